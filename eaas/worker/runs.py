"""Runs: what is computed under a key, for all who ask for it, and the tokens of those that have ended. Pure.

A gateway that goes on with a stream of another, which was lost, asks for the same under the same key. It is told the
tokens that are there, at once, and then each new one: nothing is computed twice. A run that nobody listens to, since
its gateway was lost, goes on for a while; what it said is kept for longer.

The engine knows a run by the name that one listener gave it, so that most tokens cost nothing here; by its key once
that one has gone, until somebody listens alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import numpy as np

from eaas.worker.protocol import Failed, Step, Submit, Token
from eaas.worker.request import Request

if TYPE_CHECKING:
    from eaas.worker.engine import Engine, Outcome

T = TypeVar("T", Token, Failed)

# A client that was cut off asks another gateway within a second or two; one whose gateway is started anew, in ten.
GRACE_S, GRACE_TOKENS = 10.0, 1024
KEPT_S = 60.0
# Some 200 bytes and 36 for each token: what a hundred streams of a thousand tokens say is 4 MB.
KEPT_RUNS, KEPT_BYTES = 4096, 64 << 20
# Pairs of a token and its log-probability, of one run and of all, some 110 bytes each. Of a run that has more none are
# kept, and who needs them has it computed again.
RUN_PAIRS, ALL_PAIRS = 1 << 14, 1 << 19
MOST_LISTENERS = 16
NOBODY = 0  # no connection has this number


class Listener(NamedTuple):
    """Who is told of a run: a connection, and what it calls the run."""

    owner: int
    id: str
    attempt: int


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """One run, in progress or ended.

    Attributes:
        request: Named as its first listener calls it; NOBODY's once that one has gone.
        others: The other listeners.
        since_s: Of one in progress, since when nobody listens; of one that ended, when.
        since: Tokens that it had then.
        pairs: What was set aside of ALL_PAIRS.
    """

    request: Request
    others: list[Listener] = field(default_factory=list[Listener])
    since_s: float = 0.0
    since: int = 0
    pairs: int = 0

    @property
    def nbytes(self) -> int:
        """Of one that ended, about. What was asked of it may hold a grammar, or a list of tokens."""
        params = self.request.params
        asked = 8 * len(msgspec.msgpack.encode(msgspec.structs.replace(params, forced=None)))
        asked += len(params.forced.experts) if params.forced is not None else 0
        return 200 + asked + 4 * len(self.request.prompt) + 36 * len(self.request.output)

    @property
    def is_alone(self) -> bool:
        return self.request.owner == NOBODY and not self.others


class Runs:
    """All runs of one worker. Belongs to the thread of its engine, which must tell `ended` of each request's end.

    Attributes:
        joined, kept: Submits that were answered from a run in progress, and from one that had ended.
        told: Tokens that these were told and nothing was computed for.
    """

    def __init__(self, engine: Engine) -> None:
        self.joined = self.kept = self.told = 0
        self._engine = engine
        self._now_s = 0.0
        self._live: dict[str, Run] = {}
        self._alone: dict[str, Run] = {}
        self._ended: dict[str, Run] = {}  # the first to end first
        self._ended_bytes = self._pairs = 0
        # Runs with other listeners, by the names that the engine knows them by, and by those of the others.
        self._shared: dict[tuple[int, str], Run] = {}
        self._others: dict[tuple[int, str], Run] = {}

    def submit(self, message: Submit, owner: int, now_s: float, came_s: float) -> Failed | Step | None:
        """Compute what is asked for, or have a run tell it that is there already. Args: came_s: as for the engine.

        Returns:
            The refusal; or what is known already, to be sent before anything that later steps make.
        """
        self._now_s = now_s
        if self._attempt(owner, message.id) < message.attempt:
            self.cancel(message.id, owner)
        run = self._live.get(message.key) or self._ended.get(message.key)
        if run is None or not message.key or not _answers(run.request, message):
            return self._begin(message, owner, came_s)
        request, start = run.request, len(message.output)
        if message.key in self._live:
            if not self._join(run, Listener(owner, message.id, message.attempt)):
                return self._begin(message, owner, came_s)
            self.joined += 1
        else:
            if not request.finish:
                whole = msgspec.structs.replace(message, output=list(request.output))
                refusal = self._begin(whole, owner, came_s, run)
                if refusal is not None:
                    return refusal
            self.kept += 1
        self.told += len(request.output) - start
        begun = [(message.id, message.attempt)] if request.slot >= 0 else []
        return Step(tokens=list(_tokens(request, message)), begun=begun)

    def cancel(self, id: str, owner: int) -> bool:
        """Have a listener hear nothing more; the last one's word ends its run. False: there is none of that name."""
        run = self._part(id, owner)
        if run is None:
            return self._engine.cancel(id, owner)
        return not run.is_alone or self._engine.cancel(run.request.id, NOBODY)

    def leave(self, owner: int, now_s: float) -> int:
        """A connection was lost: its runs go on for the others, or for who may ask for them within GRACE_S.

        Returns:
            How many requests ended.
        """
        self._now_s = now_s
        ended, named = 0, [request.id for request in self._engine.live() if request.owner == owner]
        for id in [*named, *(id for other, id in self._others if other == owner)]:
            run = self._part(id, owner)
            if run is None:
                ended += self._engine.cancel(id, owner)
            elif run.is_alone:
                run.since_s, run.since = now_s, len(run.request.output)
                self._alone[run.request.key] = run
        return ended

    def expire(self, now_s: float) -> None:
        """End what nobody has asked for in time, and forget what was kept long enough."""
        self._now_s = now_s
        for key, run in list(self._alone.items()):
            if now_s - run.since_s >= GRACE_S or len(run.request.output) - run.since >= GRACE_TOKENS:
                self._engine.cancel(key, NOBODY)
        for run in list(self._ended.values()):
            if now_s - run.since_s < KEPT_S:
                break
            self._forget(run)

    def ended(self, request: Request) -> None:
        """A request has ended, for whatever reason: keep what was said of it, within bounds."""
        run = self._run_of(request)
        if run is None:
            return
        del self._live[request.key]
        self._alone.pop(request.key, None)
        if request.dropped or not request.output:
            self._pairs -= run.pairs
            return
        request.context, request.digests, request.constraint = request.prompt, [], None
        run.since_s = self._now_s
        older = self._ended.get(request.key)
        if older is not None:
            self._forget(older)
        self._ended[request.key] = run
        self._ended_bytes += run.nbytes
        while len(self._ended) > KEPT_RUNS or self._ended_bytes > KEPT_BYTES:
            self._forget(next(iter(self._ended.values())))

    def spread(self, made: Outcome) -> None:
        """Have the other listeners told too what a step made."""
        if not self._shared:
            return
        self._spread(made.tokens)
        self._spread(made.failed)
        for name, run in list(self._shared.items()):
            if self._run_of(run.request) is not run:
                del self._shared[name]
                for other in run.others:
                    del self._others[other.owner, other.id]

    def listeners(self, request: Request) -> list[Listener]:
        """All who are told of a request."""
        run = self._shared.get((request.owner, request.id))
        named = Listener(request.owner, request.id, request.attempt)
        return [one for one in (named, *(run.others if run else ())) if one.owner != NOBODY]

    def _spread(self, told: dict[int, list[T]]) -> None:
        for owner in {owner for owner, _ in self._shared}:
            for one in list(told.get(owner, ())):
                run = self._shared.get((owner, one.id))
                for other in run.others if run is not None else ():
                    copy = msgspec.structs.replace(one, id=other.id, attempt=other.attempt)
                    told.setdefault(other.owner, []).append(copy)

    def _part(self, id: str, owner: int) -> Run | None:
        """Have a listener hear nothing more. Returns its run; None: there is none that anybody else may ask for."""
        run = self._others.pop((owner, id), None)
        if run is None:
            request = self._engine.find(owner, id)
            run = None if request is None else self._run_of(request)
            if run is None or not self._engine.scheduler.rename(run.request, NOBODY, run.request.key, 0):
                return None
            if self._shared.pop((owner, id), None) is not None:
                self._shared[NOBODY, run.request.key] = run
            return run
        run.others = [other for other in run.others if (other.owner, other.id) != (owner, id)]
        if not run.others:
            del self._shared[run.request.owner, run.request.id]
        return run

    def _run_of(self, request: Request) -> Run | None:
        run = self._live.get(request.key) if request.key else None
        return run if run is not None and run.request is request else None

    def _attempt(self, owner: int, id: str) -> int:
        other = self._others.get((owner, id))
        if other is not None:
            return next(one.attempt for one in other.others if (one.owner, one.id) == (owner, id))
        request = self._engine.find(owner, id)
        # One of the same attempt is refused by the engine.
        return 1 << 31 if request is None else request.attempt

    def _begin(self, message: Submit, owner: int, came_s: float, before: Run | None = None) -> Failed | None:
        """Args: before: what was said of the run so far, where that is known."""
        refusal = self._engine.submit(message, owner, came_s)
        request = self._engine.find(owner, message.id)
        if refusal is not None or request is None or not _is_kept(message) or message.key in self._live:
            return refusal
        request.key = message.key
        run = self._live[request.key] = Run(request=request)
        wanted = request.params.logprobs
        pairs = min(RUN_PAIRS, (wanted + 1) * request.params.max_tokens)
        if before is not None:
            self._forget(before)
        if wanted >= 0 and self._pairs + pairs <= ALL_PAIRS:
            run.pairs = pairs
            self._pairs += pairs
            request.told = [] if before is None else before.request.told
            request.told_most = RUN_PAIRS // (wanted + 1)
        return None

    def _join(self, run: Run, listener: Listener) -> bool:
        request = run.request
        # While its grammar is compiled it cannot go by another name, should its first listener leave.
        compiling = self._engine.compiling.get(request.owner, request.id) is request
        if len(run.others) >= MOST_LISTENERS or compiling:
            return False
        if self._alone.pop(request.key, None) is not None:
            return self._engine.scheduler.rename(request, *listener)
        run.others.append(listener)
        self._others[listener.owner, listener.id] = self._shared[request.owner, request.id] = run
        return True

    def _forget(self, run: Run) -> None:
        del self._ended[run.request.key]
        self._ended_bytes -= run.nbytes
        self._pairs -= run.pairs


def _is_kept(message: Submit) -> bool:
    """Whether the tokens of a request are all that there is to tell of it, and the same whenever it is computed."""
    params = message.params
    return bool(message.key) and not (params.prompt_logprobs >= 0 or params.wants_routing or params.drop_lost_experts)


def _answers(request: Request, message: Submit) -> bool:
    """Whether a run's tokens are those that are asked for, and all that is asked of them is known."""
    known = len(request.output) - len(request.told) if request.told is not None else 1 << 31
    return (
        request.params == message.params
        and request.output[: len(message.output)] == message.output
        and (request.params.logprobs < 0 or known <= len(message.output))
        and np.array_equal(request.prompt, np.array(message.prompt, np.int32))
    )


def _tokens(request: Request, message: Submit) -> Iterator[Token]:
    """Those that a listener lacks."""
    output, told = request.output, request.told or []
    for index in range(len(message.output), len(output)):
        finish = request.finish if index == len(output) - 1 else ""
        if request.params.logprobs < 0:
            yield Token(message.id, message.attempt, index, output[index], finish)
        else:
            one = told[index - len(output)]
            yield Token(message.id, message.attempt, index, one.token, finish, one.logprob, one.top)
