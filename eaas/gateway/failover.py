"""Which attention worker computes a choice, and what happens to the choice when that worker fails. Pure.

Workers die, freeze and wake again. The gateway owns the log of each choice's tokens: a token is accepted only from the
current attempt and only at the next index, so that whatever a worker sends late or twice, the client sees each token
once and in order. The pool (pool.py) carries out what is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from typing import Protocol, TypeVar

from eaas.gateway.text import Choice, Generation
from eaas.worker.protocol import SamplingParams, Share, ToWorker

# Four blocks of 16: what is shared of less saves less than a decoding step costs.
PREFIX_TOKENS = 64
_SPREAD = 1.25
# One step's rows: on an idle pool any work at all would be "clearly busier".
_SLACK_TOKENS = 512

# Bounds of a worker's silence; see Silence.
LEAST_S = 0.25
MOST_S = 0.7
FALSE_MOST_S = 5.0
FORGIVE_S = 60.0
_TIMES = 4.0
# The longest silence fades by so much with each message: to a third after 500 of them.
_FADES = 0.998


class Worker(Protocol):
    """A connection to an attention worker, as it is chosen.

    Attributes:
        outstanding: Tokens still to be computed there.
        chosen: Higher, the later it was chosen last.
    """

    incarnation: int
    outstanding: int
    chosen: int

    def send(self, message: ToWorker) -> None: ...


W = TypeVar("W", bound=Worker)


class TokenLog:
    """Prompt, output so far, and the attempt that may extend it. Attributes: losses, lost_alone: Attempts lost since
    the last accepted token, and those of them in which nothing else can have been the cause."""

    __slots__ = ("attempt", "losses", "lost_alone", "output", "prompt")

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.output: list[int] = []
        self.attempt = 1
        self.losses = self.lost_alone = 0

    def accept(self, attempt: int, index: int, token: int) -> bool:
        """Append ``token`` if it is the next of the current attempt; else change nothing and say False."""
        if attempt != self.attempt or index != len(self.output):
            return False
        self.output.append(token)
        self.losses = self.lost_alone = 0
        return True

    def move(self) -> None:
        """End the current attempt, for no fault of the request or its worker."""
        self.attempt += 1

    def lose(self, *, alone: bool = False) -> None:
        """End the current attempt with its worker: nothing more is accepted from it. Args: alone: No other request
        there waited for its first token, so that this one may have brought it down."""
        self.attempt += 1
        self.losses += 1
        self.lost_alone += alone


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One choice in flight: its log, its parameters, and where it is being served.

    Attributes:
        response_id: What its client is told that it belongs to.
        inspected: The name under which its rows are recorded for an operator; "": they are not.
        open_end: The client named no limit; that of ``params`` is lowered to what the worker has room for.
        prefill: Tokens to compute before this attempt's first new one.
        debt: Tokens still to be computed, the prefill included.
        begun: Its worker has begun to compute this attempt.
        trial_most: How many are tried with it at once, at most.
        refused_by: Workers that could not take it, by incarnation.
        refused_since_s: Since when every worker was full; 0: not since the last token.
        traceparent: Of the request's span, where it is traced.
        key: Under which workers know its run; "": nobody goes on with it.
        incarnation: Of the last worker that it was sent to; 0: to none.
        seen: Tokens that its client had over another connection; it never leaves its numerics class then. None: it is
            the first.
        hint: The last bits of the incarnation of the worker that computed these.
        eta_id: What its end is predicted under: in the background, from before there was a choice.
    """

    id: str
    prompt: InitVar[list[int]]
    params: SamplingParams
    choice: Choice
    generation: Generation
    share: Share = field(default_factory=Share)
    response_id: str = ""
    inspected: str = ""
    open_end: bool = False
    log: TokenLog = field(init=False)
    prefix: int | None = field(init=False)
    link: Worker | None = None
    numerics_class: str | None = None
    prefill: int = 0
    debt: int = 0
    begun: bool = False
    trial_most: int | None = None
    refused_by: set[int] = field(default_factory=set[int])
    refused_since_s: float = 0.0
    waiting_since_s: float = 0.0
    started_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    traceparent: str = ""
    key: str = ""
    incarnation: int = 0
    seen: int | None = None
    hint: int = 0
    eta_id: str = field(init=False)

    def __post_init__(self, prompt: list[int]) -> None:
        self.log = TokenLog(prompt)
        self.prefix = prefix_hash(prompt)
        self.eta_id = self.key if self.share.background and self.key else self.id

    def cost(self, most_output: int) -> int:
        """Tokens to be computed from here on: prefill, and at most so many reckoned for the output."""
        log = self.log
        left = self.params.max_tokens - len(log.output)
        return len(log.prompt) + len(log.output) + max(1, min(left, most_output))


# -- which worker


def prefix_hash(prompt: list[int]) -> int | None:
    """A number for how a prompt begins, the same in every process; None for one too short to matter."""
    return hash(tuple(prompt[:PREFIX_TOKENS])) if len(prompt) >= PREFIX_TOKENS else None


def choose(workers: list[W], prefix: int | None) -> W | None:
    """The worker for a prompt that begins so: the least busy, or the one that may know the beginning. None: no worker.

    Workers keep the blocks of prompts that they have computed and share them (prefix reuse), so prompts that begin
    alike should meet. Each prefix has its own order of the workers (rendezvous hashing: when one comes or goes, only
    what was or becomes its own moves), and goes to the first in that order whose outstanding tokens are at most 1.25
    times the mean and one step beside. Of equally busy ones the one chosen longest ago is taken.
    """
    if prefix is not None and workers:
        mean = sum(worker.outstanding for worker in workers) / len(workers)
        free = [worker for worker in workers if worker.outstanding <= _SPREAD * mean + _SLACK_TOKENS]
        # Whoever has the least is never above the bound.
        return max(free, key=lambda worker: hash((prefix, worker.incarnation)))
    return min(workers, key=lambda worker: (worker.outstanding, worker.chosen), default=None)


# -- when one is silent


@dataclass(slots=True)
class Silence:
    """How long one worker with work may be silent before its choices go on elsewhere.

    It speaks at least every 50 ms (its beats). To move its choices is cheap, a prefill each, and it is used again as
    soon as it speaks. So little evidence is enough: four times the longest of its recent silences. That is never below
    LEAST_S, five beats, nor above MOST_S, which leaves 0.3 s of a pause of one second for the replay. An alarm that
    proves false, because the silence ended soon after it, doubles the bound, up to FALSE_MOST_S, for a minute: a host
    too busy to run its processes in time is not made busier.
    """

    longest_s: float = 0.0
    alarmed: bool = False
    _false_alarms: int = 0
    _last_false_s: float = 0.0

    def heard(self, silence_s: float, now_s: float) -> bool:
        """A silence has ended. Returns whether it was an alarm."""
        alarmed, self.alarmed = self.alarmed, False
        if alarmed and silence_s < 2.0 * self.bound_s(now_s):
            self._false_alarms += 1
            self._last_false_s = now_s
        # What was a freeze says nothing of the rhythm.
        self.longest_s = max(self.longest_s * _FADES, min(silence_s, MOST_S) if not alarmed else 0.0)
        return alarmed

    def bound_s(self, now_s: float) -> float:
        """The longest silence that is no alarm."""
        if self._false_alarms and now_s - self._last_false_s >= FORGIVE_S:
            self._false_alarms -= 1
            self._last_false_s = now_s
        bound_s = min(max(LEAST_S, _TIMES * self.longest_s), MOST_S)
        return min(bound_s * 2.0**self._false_alarms, FALSE_MOST_S) if self._false_alarms else bound_s


# -- when one dies


class Trial:
    """Requests that may be what brings workers down, tried by halves where they can take no other with them.

    A worker that dies loses every request that it was computing, and does not say which was the cause. Whoever has been
    lost so more than once is a suspect. Suspects are tried in groups, a worker kept for each group: half of them first;
    a group that brings its worker down is tried again by halves, down to one request alone.
    """

    def __init__(self) -> None:
        # Of the group that is tried, those that have neither a token yet nor left.
        self._tried: dict[str, Sequence] = {}
        self._kept: Worker | None = None
        # Nobody but the group waits at the worker that is kept.
        self._ours = False

    def __bool__(self) -> bool:
        """Whether a group is being tried."""
        return bool(self._tried)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._tried

    def worker(self, links: list[W], sequence: Sequence) -> W | None:
        """The worker of these for a choice; None when the one that it could have is kept for others."""
        kept = next((link for link in links if link is self._kept), None)
        if sequence not in self:
            return choose([link for link in links if link is not kept], sequence.prefix)
        return kept or choose(links, sequence.prefix)

    def admits(
        self, sequence: Sequence, link: Worker, suspects: Callable[[], list[Sequence]], others: Iterable[Sequence]
    ) -> bool:
        """Whether a suspect may go to a worker now: with its group, once nobody else there waits for a first token.
        From its turn on the worker is kept for its group.

        Args: suspects: gives all that wait for their turn, the first in line first; `sequence` is one of them. others:
        all choices."""
        if not self._tried:
            waiting = suspects()
            most = sequence.trial_most or -(-len(waiting) // 2)
            group = [sequence, *(s for s in waiting if s is not sequence and (s.trial_most or most) >= most)]
            self._tried = {s.id: s for s in group[:most]}
        if sequence not in self:
            return False
        # Looked at once in a round: for each of the group it would take time by the square of how many there are.
        first = sequence is next(iter(self._tried.values()))
        if link is not self._kept or (first and not self._ours):
            self._kept = link
            self._ours = not any(x.link is link and x.prefill and x not in self for x in others)
        return self._ours

    def lost(self, sequence: Sequence, of: int) -> bool:
        """Note that a worker died while it computed `sequence`; True if nothing else can have been the cause.

        Args:
            of: How many it was computing that had no token yet.
        """
        if sequence not in self:
            return False
        sequence.trial_most = max(1, of // 2)
        return of == 1

    def leave(self, sequence: Sequence) -> bool:
        """Take out one that has its token, or has gone; True if another may have its turn now."""
        if not self._tried:
            return False
        if self._tried.pop(sequence.id, None) is not None and not self._tried:
            self._kept, self._ours = None, False
        return True
