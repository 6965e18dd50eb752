"""The attention workers: which one serves a choice, and what happens to its choices when it is lost.

The pool follows the router's View, keeps one connection to each attention worker in it, and owns the token
log of every choice in flight. When a worker goes, each of its choices is sent to another one, prompt and
tokens so far, under the next attempt number; a worker that wakes later repeats nothing, because its attempt
is no longer accepted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable

import msgspec

from eaas.engine.worker_protocol import Cancel, Failed, ProtocolError, Submit, Token
from eaas.gateway.config import GatewayConfig
from eaas.gateway.errors import ApiError, internal, invalid, unavailable
from eaas.gateway.metrics import GatewayMetrics
from eaas.gateway.sequence import Sequence
from eaas.gateway.worker_link import WorkerLink
from router.view import DRAINING, SERVING, SUSPECT, Member, View

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 2.0
_RETRY_FIRST_S = 0.05
_RETRY_MOST_S = 1.0
_SWEEP_S = 0.25
_CONNECTED_STATES = frozenset({SERVING, SUSPECT, DRAINING})
# Ends of an attempt that say nothing against the request.
_PLANNED = frozenset({"drained", "shared", "shutting_down"})
_CLIENT_FAULTS = {
    "too_long": "context_length_exceeded",
    "never_fits": "request_too_large",
    "bad_request": None,
}


class _Worker:
    """A member of the attention pool and its present connection."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.link: WorkerLink | None = None
        self.task: asyncio.Task[None] | None = None
        self.draining_s: float | None = None  # since when


class WorkerPool:
    """All attention workers of one gateway. Everything runs on the event loop that created it."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics, model_hash: str = "") -> None:
        """Args: model_hash: fingerprint of the gateway's checkpoint; workers with another are not used."""
        self._config = config
        self.metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._workers: dict[int, _Worker] = {}
        self._sequences: dict[str, Sequence] = {}
        self._waiting: dict[str, Sequence] = {}
        self._ids = itertools.count(1)
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self.model_hash = model_hash
        self.view: View | None = None

    # -- what others ask

    @property
    def running(self) -> int:
        """Choices in flight, waiting ones included."""
        return len(self._sequences)

    @property
    def waiting(self) -> int:
        """Choices without a worker."""
        return len(self._waiting)

    def queue(self) -> list[Sequence]:
        """Choices without a worker. Any thread."""
        return list(self._waiting.values())

    def cost_of(self, sequence: Sequence) -> int:
        """Tokens to be computed for a choice from here on, as far as can be reckoned: prefill and output."""
        log = sequence.log
        left = sequence.params.max_tokens - len(log.output)
        return len(log.prompt) + len(log.output) + max(1, min(left, self._config.batch_tokens))

    @property
    def max_model_len(self) -> int | None:
        """Tokens that fit in the context on every connected worker; None when there is none."""
        return min((link.hello.max_model_len for link in self._ready_links() if link.hello), default=None)

    @property
    def numerics_classes(self) -> list[str]:
        """Numerics classes of the connected workers."""
        return sorted({link.hello.numerics_class for link in self._ready_links() if link.hello})

    def unready_reason(self) -> str:
        """Why no request can be served now; empty when one can."""
        if self.view is None:
            return "the router has not been heard yet"
        members = self.view.pool("attention")
        if not members:
            return "the router knows no attention worker"
        if self._candidates():
            return ""
        states = ", ".join(f"{member.name} is {member.state}" for member in members)
        return f"no attention worker serves: {states}; {len(list(self._ready_links()))} connected"

    def links(self) -> list[WorkerLink]:
        """Connections that are ready."""
        return list(self._ready_links())

    # -- requests

    def submit(self, sequence: Sequence) -> None:
        """Send a choice to the worker with the least work, or let it wait for one until the deadline."""
        now_s = time.monotonic()
        sequence.started_s = sequence.last_s = now_s
        self._sequences[sequence.id] = sequence
        if self._closed:
            self._fail(sequence, unavailable("The gateway is shutting down.", code="shutting_down"))
        else:
            self._place(sequence)
            self._watch_time()

    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """Forget choices and tell their workers, which free what they hold within one step. Idempotent."""
        for sequence in sequences:
            if self._sequences.get(sequence.id) is sequence:
                link = sequence.link
                self._forget(sequence)
                if link is not None:
                    link.send(Cancel(id=sequence.id))

    def close(self) -> None:
        """End every choice with a retryable error and every connection."""
        self._closed = True
        for sequence in list(self._sequences.values()):
            self._fail(sequence, unavailable("The gateway is shutting down.", code="shutting_down"))
        for incarnation in list(self._workers):
            self._remove(incarnation, "gateway_closes")
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    # -- the View

    def apply_view(self, view: View) -> None:
        """Connect to new attention workers and give up those that the router has fenced."""
        if self._closed:
            return
        self.view = view
        present = {m.incarnation: m for m in view.pool("attention") if m.state in _CONNECTED_STATES}
        for incarnation in [i for i in self._workers if i not in present]:
            self._remove(incarnation, "left_the_view")
        for incarnation, member in present.items():
            worker = self._workers.get(incarnation)
            if worker is None:
                worker = self._workers[incarnation] = _Worker(member)
                worker.task = self._loop.create_task(self._keep_connected(worker))
            worker.member = member
            if member.state != DRAINING:
                worker.draining_s = None
            elif worker.draining_s is None:
                worker.draining_s = time.monotonic()
                self._move_from(worker.link, begun=False)
        self._place_waiting()

    def _remove(self, incarnation: int, reason: str) -> None:
        worker = self._workers[incarnation]
        if worker.task is not None:
            worker.task.cancel()
        if worker.link is not None:
            worker.link.drop(reason)
        del self._workers[incarnation]

    async def _keep_connected(self, worker: _Worker) -> None:
        retry_s = _RETRY_FIRST_S
        while True:
            member = worker.member
            host, _, port = member.address.rpartition(":")
            link = WorkerLink(self, member.name, member.incarnation)
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    await self._loop.create_connection(lambda link=link: link, host, int(port))
            except (OSError, ValueError) as error:
                log.info(
                    "worker_connect_failed name=%s address=%s error=%s", member.name, member.address, error
                )
            else:
                worker.link = link
                await link.closed
                worker.link = None
                if link.hello is not None:
                    retry_s = _RETRY_FIRST_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _RETRY_MOST_S)

    # -- what links report

    def link_ready(self, link: WorkerLink) -> None:
        """A worker can take requests."""
        hello = link.hello
        if hello is not None and self.model_hash and hello.model_hash and hello.model_hash != self.model_hash:
            link.drop(f"it serves model {hello.model_hash[:12]}, this gateway {self.model_hash[:12]}")
            return
        worker = self._workers.get(link.incarnation)
        if worker is not None:
            worker.link = link
        self._place_waiting()
        self._relieve(link)

    def link_lost(self, link: WorkerLink, reason: str) -> None:
        """Replay every choice of a worker elsewhere."""
        worker = self._workers.get(link.incarnation)
        if worker is not None and worker.link is link:
            worker.link = None
        lost = [sequence for sequence in self._sequences.values() if sequence.link is link]
        for sequence in lost:
            self._replay(sequence, "drained" if worker and worker.draining_s else "worker_lost")
        if lost:
            log.warning("replay name=%s choices=%d reason=%s", link.name, len(lost), reason)

    def tokens(self, link: WorkerLink, tokens: list[Token]) -> None:
        """All tokens of one engine step: log each, show it, end what has ended."""
        now_s = time.monotonic()
        sequences, metrics = self._sequences, self.metrics
        observe_itl = metrics.itl.observe
        for token in tokens:
            sequence = sequences.get(token.id)
            if sequence is None:
                continue
            token_log = sequence.log
            if not token_log.accept(token.attempt, token.index, token.token):
                metrics.stale_tokens += 1
                if token.attempt == token_log.attempt and token.index > len(token_log.output):
                    log.error(
                        "token_gap id=%s index=%d next=%d", token.id, token.index, len(token_log.output)
                    )
                    self._move(sequence, "token_gap")
                continue
            if len(token_log.output) == 1:
                sequence.first_s = now_s
                metrics.ttft.observe(now_s - sequence.started_s)
                metrics.recent_ttft.add(now_s, now_s - sequence.started_s)
            else:
                observe_itl(now_s - sequence.last_s)
            sequence.last_s = now_s
            metrics.output_tokens += 1
            if sequence.prefill:
                # The first token of an attempt says that the prompt has been computed.
                paid, sequence.prefill = sequence.prefill, 0
                sequence.generation.computed_by(sequence.numerics_class or "")
            else:
                paid = 1 if sequence.debt > 1 else 0
            sequence.debt -= paid
            link.outstanding -= paid
            try:
                stopped = sequence.choice.token(token.token, token.finish, token.logprob, token.top)
            except Exception:
                # One client's text or connection; raised further, it would end the link that all share.
                log.exception("choice_broken id=%s", token.id)
                self._fail(sequence, internal("The gateway could not show a token.", code="internal"))
                link.send(Cancel(id=sequence.id))
                continue
            if token.finish or stopped:
                self._forget(sequence)
                later = len(token_log.output) - 1
                if later:
                    metrics.recent_tpot.add(now_s, (now_s - sequence.first_s) / later)
                if not token.finish:
                    link.send(Cancel(id=sequence.id))

    def failed(self, link: WorkerLink, message: Failed) -> None:
        """A worker gave up one choice: move it, or tell the client."""
        sequence = self._sequences.get(message.id)
        if sequence is None or sequence.log.attempt != message.attempt:
            return
        log.warning(
            "choice_failed id=%s worker=%s code=%s message=%s",
            message.id,
            link.name,
            message.code,
            message.message,
        )
        if message.code == "shutting_down":
            sequence.refused_by.add(link.incarnation)
            self._replay(sequence, "shutting_down")
            return
        if message.code in ("overloaded", "too_long", "never_fits"):
            # Another worker may have room, or a larger KV pool.
            sequence.refused_by.add(link.incarnation)
            if self._choose(sequence) is not None:
                self._replay(sequence, message.code)
                return
        if message.code in _CLIENT_FAULTS and not sequence.log.output:
            self._fail(sequence, invalid(message.message, code=_CLIENT_FAULTS[message.code]))
        elif message.retryable:
            self._fail(sequence, unavailable(message.message, code=message.code))
        else:
            self._fail(sequence, internal(message.message, code=message.code))

    # -- placing

    def _ready_links(self) -> Iterable[WorkerLink]:
        return (
            worker.link for worker in self._workers.values() if worker.link is not None and worker.link.ready
        )

    def _candidates(self) -> list[WorkerLink]:
        by_state: dict[str, list[WorkerLink]] = {}
        for worker in self._workers.values():
            if worker.link is not None and worker.link.ready:
                by_state.setdefault(worker.member.state, []).append(worker.link)
        # A suspect worker is better than none, and may be slow rather than dead.
        return by_state.get(SERVING) or by_state.get(SUSPECT) or []

    def _choose(self, sequence: Sequence) -> WorkerLink | None:
        links = [link for link in self._candidates() if link.incarnation not in sequence.refused_by]
        wanted = sequence.numerics_class
        same_class = [link for link in links if link.hello and link.hello.numerics_class == wanted]
        return min(same_class or links, key=lambda link: (link.outstanding, link.chosen), default=None)

    def _place(self, sequence: Sequence) -> None:
        link = self._choose(sequence)
        if link is None:
            if sequence.id not in self._waiting:
                self._waiting[sequence.id] = sequence
                sequence.waiting_since_s = time.monotonic()
            return
        self._waiting.pop(sequence.id, None)
        token_log = sequence.log
        numerics_class = link.hello.numerics_class if link.hello else ""
        if (
            sequence.numerics_class is not None
            and numerics_class != sequence.numerics_class
            and token_log.output
        ):
            self.metrics.class_crossings += 1
            log.warning(
                "class_crossed id=%s from=%s to=%s", sequence.id, sequence.numerics_class, numerics_class
            )
        sequence.numerics_class = numerics_class
        sequence.link = link
        if sequence.open_end and link.hello and not token_log.output:
            room = max(1, link.hello.max_model_len - len(token_log.prompt))
            if sequence.params.max_tokens > room:
                sequence.params = msgspec.structs.replace(sequence.params, max_tokens=room)
        sequence.prefill = len(token_log.prompt) + len(token_log.output)
        sequence.debt = self.cost_of(sequence)
        if link.outstanding == 0:
            # Silence counts from when there is work.
            link.heard_s = time.monotonic()
        link.outstanding += sequence.debt
        link.chosen = next(self._ids)
        submit = Submit(
            id=sequence.id,
            attempt=token_log.attempt,
            prompt=token_log.prompt,
            output=token_log.output,
            params=sequence.params,
        )
        try:
            link.send(submit)
        except ProtocolError as error:
            self._fail(sequence, invalid(str(error)))

    def _place_waiting(self) -> None:
        for sequence in list(self._waiting.values()):
            self._place(sequence)

    def _replay(self, sequence: Sequence, reason: str) -> None:
        self._unlink(sequence)
        if reason in _PLANNED:
            sequence.log.move()
        elif (losses := sequence.log.lose()) >= self._config.max_losses:
            message = f"{losses} attempts in a row ended without a new token ({reason}); it is given up."
            self._fail(sequence, internal(message, code="attempts_exhausted"))
            return
        self.metrics.count_replay(reason)
        self._place(sequence)

    def _move(self, sequence: Sequence, reason: str) -> None:
        link = sequence.link
        if link is not None:
            link.send(Cancel(id=sequence.id))
            # A drain may be taken back, and until then its worker is chosen for nothing anyway.
            if reason != "drained":
                sequence.refused_by.add(link.incarnation)
        self._replay(sequence, reason)

    def _move_from(self, link: WorkerLink | None, *, begun: bool) -> None:
        """Move choices that another worker can take. Args: begun: those too that have tokens, at a prefill each."""
        for sequence in [s for s in self._sequences.values() if link is not None and s.link is link]:
            if (begun or not sequence.log.output) and self._choose(sequence) is not None:
                self._move(sequence, "drained")

    def _relieve(self, link: WorkerLink) -> None:
        """Give a worker that has just come its part of what waits for a first token, the latest requests first.

        What has at most two of its own size before it stays: its prompt may be half computed already.
        """
        for sequence in reversed(list(self._sequences.values())):
            source = sequence.link
            if source is None or sequence.log.output:
                continue
            much = source.outstanding >= link.outstanding + 3 * sequence.debt
            if much and self._choose(sequence) is link:
                source.send(Cancel(id=sequence.id))
                self._replay(sequence, "shared")

    def _unlink(self, sequence: Sequence) -> None:
        if sequence.link is not None:
            sequence.link.outstanding -= sequence.debt
            sequence.link = None
        sequence.debt = 0

    def _forget(self, sequence: Sequence) -> None:
        self._unlink(sequence)
        self._sequences.pop(sequence.id, None)
        self._waiting.pop(sequence.id, None)

    def _fail(self, sequence: Sequence, error: ApiError) -> None:
        self._forget(sequence)
        sequence.generation.fail(error.reply)

    # -- time

    def _watch_time(self) -> None:
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        now_s = time.monotonic()
        overdue = [s for s in self._waiting.values() if now_s - s.waiting_since_s >= self._config.deadline_s]
        for sequence in overdue:
            reason = self.unready_reason() or "every attention worker refused the request"
            self._fail(
                sequence,
                unavailable(
                    f"No attention worker took the request within {self._config.deadline_s:g} s: {reason}."
                ),
            )
        for worker in self._workers.values():
            if worker.draining_s is not None and now_s - worker.draining_s >= self._config.drain_move_s:
                self._move_from(worker.link, begun=True)
        for link in self.links():
            if link.outstanding > 0 and now_s - link.heard_s >= self._config.silence_s:
                link.drop("silent_with_work")
        if self._sequences:
            self._watch_time()
