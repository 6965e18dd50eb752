"""The attention workers: which one serves a choice, and what happens to its choices when it is lost.

The pool follows the router's View, keeps one connection to each attention worker in it, and owns the token log of every
choice in flight. When a worker goes, each of its choices is sent to another one, prompt and tokens so far, under the
next attempt number; a worker that wakes later repeats nothing, because its attempt is no longer accepted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from eaas.gateway.config import GatewayConfig
from eaas.gateway.errors import BLAMELESS, LOST, REFUSALS, ApiError, error_of, full, internal, invalid, unavailable
from eaas.gateway.eta import Eta
from eaas.gateway.event_ids import HINTS, not_resumable
from eaas.gateway.failover import Sequence, Trial, prefix_hash
from eaas.gateway.inspections import Inspections
from eaas.gateway.link import WorkerLink, Workers
from eaas.gateway.metrics import GatewayMetrics
from eaas.traceparent import TRACEPARENT
from eaas.worker.protocol import Cancel, Failed, ForgetBlocks, Inspected, ProtocolError, Share, Step, Submit, Token
from router.access import GATEWAY
from router.logs import REQUEST_ID
from router.tls import Credentials
from router.view import EXPERT, HEARS, View

log = logging.getLogger(__name__)

_SWEEP_S = 0.05
# A choice that has tokens already asks again so often at a worker that was full.
_AGAIN_S = 0.5
# Who owes tokens and is silent for so long is told of, and again every two seconds.
_TELL_S, _TELL_AGAIN_S = 1.0, 2.0
_NO_SERVERS = (
    "No expert server is in the pool. Where it was scaled to 0 (see `eaas scale`), `eaas scale expert 2` starts two; "
    "else the router starts others: try again."
)
# Workers with work speak every 50 ms.
_HEARD_S = 1.0


class WorkerPool:
    """All attention workers of one model. Everything runs on the event loop that created it."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        self._config = config
        self.metrics = metrics
        self._loop = asyncio.get_running_loop()
        credentials = Credentials(config.tls_dir, GATEWAY) if config.tls_dir is not None else None
        self._workers = Workers(self, credentials)
        self._sequences: dict[str, Sequence] = {}
        self._waiting: dict[str, Sequence] = {}
        # Those whose client reads too slowly: no worker computes for them.
        self._paused: dict[str, Sequence] = {}
        # An operator has everybody wait.
        self.held = False
        self._trial = Trial()
        self.inspections = Inspections(self.links)
        self.eta = Eta()
        self._placing = False
        self._ids = itertools.count(1)
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        # Told of a worker that owes tokens and says nothing: name, incarnation, and why.
        self.on_silent: Callable[[str, int, str], None] = lambda name, incarnation, reason: None

    # -- what others ask

    @property
    def running(self) -> int:
        """Choices in flight, waiting ones included."""
        return len(self._sequences)

    @property
    def waiting(self) -> int:
        """Choices without a worker."""
        return len(self._waiting)

    def load(self) -> dict[str, float]:
        """The report that goes with each lease renewal, from which the router and autoscalers judge whether workers are
        missing. Any thread.

        running: choices at a worker. waiting: those without one; backlog_tokens: to be computed for these, and
        queue_s: the age of the oldest. ttft_p99_s, tpot_p99_s: of the last minute, absent when nothing ended in it.
        hears:NAME: 1 for each attention worker that spoke in the last second.
        """
        now_s = time.monotonic()
        waiting = list(self._waiting.values())
        oldest_s = min((sequence.waiting_since_s for sequence in waiting), default=now_s)
        load = {
            "running": float(self.running - len(waiting)),
            "waiting": float(len(waiting)),
            "backlog_tokens": float(sum(map(self.cost_of, waiting))),
            "queue_s": now_s - oldest_s,
        }
        for name, recent in (("ttft_p99_s", self.metrics.recent_ttft), ("tpot_p99_s", self.metrics.recent_tpot)):
            p99_s = recent.p99_s(now_s)
            if p99_s is not None:
                load[name] = p99_s
        return load | {HEARS + link.name: 1.0 for link in self.links() if now_s - link.heard_s < _HEARD_S}

    def cost_of(self, sequence: Sequence) -> int:
        """Tokens to be computed for a choice from here on, as far as can be reckoned: prefill and output."""
        return sequence.cost(self._config.batch_tokens)

    @property
    def max_model_len(self) -> int | None:
        """Tokens that fit in the context on every connected worker; None when there is none."""
        return min((link.hello.max_model_len for link in self.links() if link.hello), default=None)

    @property
    def numerics_classes(self) -> list[str]:
        """Numerics classes of the connected workers."""
        return sorted({link.numerics_class for link in self.links()})

    @property
    def view(self) -> View | None:
        """The router's newest View, of this model alone; None before the first."""
        return self._workers.view

    @property
    def owed_tokens(self) -> int:
        """Tokens still to be computed for all choices, as far as can be reckoned."""
        waiting = sum(map(self.cost_of, self._waiting.values()))
        return waiting + sum(link.outstanding for link in self.links())

    def owed_by_share(self) -> Counter[Share]:
        """The same by whose they are, without those in the background, which yield."""
        owed: Counter[Share] = Counter()
        for sequence in self._sequences.values():
            if not sequence.share.background and sequence.id not in self._paused:
                owed[sequence.share] += sequence.debt if sequence.link is not None else self.cost_of(sequence)
        return owed

    @property
    def paused(self) -> int:
        """Choices that wait for their client to read."""
        return len(self._paused)

    def unready_reason(self) -> str:
        """Why no request can be served now; empty when one can."""
        return self._workers.unready_reason()

    def links(self) -> list[WorkerLink]:
        return self._workers.ready()

    # -- requests

    def submit(self, sequence: Sequence) -> None:
        """Send a choice to the worker with the least work, or let it wait for one until the deadline."""
        now_s = time.monotonic()
        sequence.started_s = sequence.last_s = now_s
        sequence.traceparent = TRACEPARENT.get()
        sequence.inspected = self.inspections.name_of(sequence.id, sequence.response_id, REQUEST_ID.get())
        self._sequences[sequence.id] = sequence
        params = sequence.params
        self.expect(
            sequence.eta_id, sequence.share, sequence.log.prompt, params.max_tokens, ignore_eos=params.ignore_eos
        )
        if self._closed:
            self._fail(sequence, _shutting_down())
        else:
            self._place(sequence)
            self._watch_time()

    def expect(self, id: str, share: Share, prompt: list[int], limit: int, *, ignore_eos: bool) -> None:
        """Predict from now on when a choice ends, though it may be submitted later. Idempotent."""
        alike = share.tenant, prefix_hash(prompt), ignore_eos
        self.eta.workers = max(1, len(self._workers.candidates()))
        self.eta.submitted(
            id, time.monotonic(), prompt=len(prompt), limit=limit, alike=alike, background=share.background
        )

    def cancel(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Forget choices and tell their workers, which free what they hold within one step. Idempotent. Returns: Those
        of them that were in progress."""
        in_progress = [s for s in sequences if self._sequences.get(s.id) is s]
        for sequence in in_progress:
            link = sequence.link
            self._forget(sequence)
            self.metrics.finished["abort"] += 1
            if link is not None:
                link.send(Cancel(id=sequence.id))
        return in_progress

    def pause(self, sequences: Iterable[Sequence]) -> None:
        """Take choices from their workers until `resume`: their client has too much to read already. Idempotent."""
        for sequence in sequences:
            if sequence.id in self._sequences and sequence.id not in self._paused:
                if sequence.link is not None:
                    sequence.link.send(Cancel(id=sequence.id))
                self._unlink(sequence)
                self._waiting.pop(sequence.id, None)
                sequence.log.move()
                self._paused[sequence.id] = sequence
        self.metrics.pauses += 1

    def resume(self, sequences: Iterable[Sequence]) -> None:
        """Have choices that were paused go on: the tokens that they have are computed again, as in any replay."""
        for sequence in sequences:
            if self._paused.pop(sequence.id, None) is not None:
                self.metrics.replays["resumed"] += 1
                self._place(sequence)

    def hold(self, *, held: bool) -> None:
        """Have every choice wait, those in progress with the tokens that they have; or have them go on. Idempotent."""
        self.held = held
        if held:
            for sequence in [s for s in self._sequences.values() if s.link is not None]:
                self._move(sequence, "paused")
        else:
            self._place_waiting()

    def forget_blocks(self) -> bool:
        """Have attention workers reuse no KV block that was computed before; False where one was out of reach."""
        for link in self.links():
            link.send(ForgetBlocks())
        return not self._workers.missing()

    def close(self) -> None:
        """End every choice with a retryable error and every connection."""
        self._closed = True
        for sequence in list(self._sequences.values()):
            self._fail(sequence, _shutting_down())
        self._workers.close()
        self.inspections.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    # -- the View

    def apply_view(self, view: View) -> None:
        """Connect to new attention workers and give up those that the router has fenced. Args: view: Of this model."""
        if self._closed:
            return
        for link in self._workers.follow(view):
            self._move_from(link, begun=False)
        self._place_waiting()

    # -- what links report

    def link_ready(self, link: WorkerLink) -> None:
        if self._workers.accepts(link):
            self.inspections.link_ready(link)
            self._place_waiting()
            self._relieve(link)

    def inspected(self, link: WorkerLink, message: Inspected) -> None:
        self.inspections.heard(link, message)

    def woke(self, link: WorkerLink, silence_s: float) -> None:
        """A worker that was silent speaks again: what nobody else could take goes on there, and what waited begins."""
        log.info("worker_woke name=%s silence_s=%.3f", link.name, silence_s)
        self._place_waiting()

    def link_lost(self, link: WorkerLink, reason: str) -> None:
        """Replay every choice of a worker elsewhere."""
        drained = self._workers.draining(link)
        label = "drained" if drained else "worker_lost"
        # Who has drained goes in order, and so do all when a model or this gateway does.
        level = logging.INFO if drained or self._closed else logging.WARNING
        log.log(level, "worker_lost name=%s incarnation=%d reason=%s", link.name, link.incarnation, reason)
        self._workers.lost(link)
        self.inspections.link_lost(link)
        self.metrics.ledger.heard(link.incarnation, link.load)
        lost = self._at(link)
        # A worker dies of what it computes, and not of what it has in its queue.
        computing = [sequence for sequence in lost if sequence.begun] or lost
        suspects = {sequence.id for sequence in computing}
        unanswered = sum(sequence.prefill > 0 for sequence in computing)
        for sequence in lost:
            self._replay(sequence, label, suspects=unanswered if sequence.id in suspects else None)
        if lost:
            log.log(level, "replay name=%s choices=%d reason=%s", link.name, len(lost), reason)

    def step(self, link: WorkerLink, step: Step) -> None:
        """What one engine step of a worker made; whatever is of an attempt that is over changes nothing."""
        for mark in step.begun:
            if (sequence := self._current(*mark)) is not None:
                sequence.begun = True
        for mark in step.dropped:
            sequence = self._current(*mark)
            if sequence is not None and not sequence.generation.dropped:
                self.metrics.dropped += 1
                sequence.generation.experts_dropped()
        for piece in step.prompts:
            sequence = self._current(piece.id, piece.attempt)
            if sequence is not None and sequence.choice.scores is not None:
                sequence.choice.scores.take(piece.start, piece.tokens)
        for piece in step.routed:
            sequence = self._current(piece.id, piece.attempt)
            if sequence is not None and sequence.choice.routing is not None:
                sequence.choice.routing.take(piece)
        self._take(link, step.tokens)

    def _current(self, id: str, attempt: int) -> Sequence | None:
        """The choice in flight whose present attempt this is."""
        sequence = self._sequences.get(id)
        return sequence if sequence is not None and sequence.log.attempt == attempt else None

    def _take(self, link: WorkerLink, tokens: list[Token]) -> None:
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
                    found = token.id, token.index, len(token_log.output)
                    log.error("token_gap id=%s index=%d next=%d", *found)
                    sequence.refused_by.add(link.incarnation)
                    self._move(sequence, "token_gap")
                continue
            number = len(token_log.output)
            if number > (sequence.seen or 1):
                observe_itl(now_s - sequence.last_s)
                metrics.output_tokens += 1
            else:
                sequence.first_s = now_s
                if number == 1:
                    told = sum(other.id == token.id for other in tokens)
                    self.eta.began(sequence.eta_id, now_s, told=told)
                if not sequence.seen:
                    metrics.ttft.observe(now_s - sequence.started_s)
                    metrics.recent_ttft.add(now_s, now_s - sequence.started_s)
                    metrics.output_tokens += 1
            sequence.last_s = now_s
            if sequence.prefill:
                # The first token of an attempt says that the prompt has been computed.
                if sequence.refused_since_s:
                    self.eta.lasted("experts", now_s - sequence.refused_since_s)
                paid, sequence.prefill, sequence.refused_since_s = sequence.prefill, 0, 0.0
                self._next_trial(sequence)
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
                finish = "length" if token.finish == "length" else "stop"
                self._forget(sequence, finish)
                metrics.count_whole(finish, now_s, sequence)
                if not token.finish:
                    link.send(Cancel(id=sequence.id))

    def failed(self, link: WorkerLink, message: Failed) -> None:
        """A worker gave up one choice: move it, or tell the client."""
        sequence = self._current(message.id, message.attempt)
        if sequence is None:
            return
        found = message.id, link.name, message.code, message.message
        level = logging.INFO if message.code == "shutting_down" else logging.WARNING
        log.log(level, "choice_failed id=%s worker=%s code=%s message=%s", *found)
        if message.code == "shutting_down":
            sequence.refused_by.add(link.incarnation)
            self._replay(sequence, "shutting_down")
            return
        behind = self._workers.left_behind(link) if message.code in LOST else set()
        if behind or message.code in REFUSALS:
            # Another worker may have room, a larger KV pool, or a class whose experts are there.
            sequence.refused_by |= behind | {link.incarnation}
            if self._choose(sequence) is not None:
                self._replay(sequence, message.code)
                return
        if message.code in LOST and self.view is not None and not self.view.pool(EXPERT):
            message = msgspec.structs.replace(message, message=_NO_SERVERS)
        if message.code in ("overloaded", "class_lost"):
            self._refused(sequence, message)
        else:
            after_s = self.eta.back_s("experts", time.monotonic() - sequence.last_s)
            self._fail(sequence, error_of(message, begun=bool(sequence.log.output), after_s=after_s))

    def _refused(self, sequence: Sequence, message: Failed) -> None:
        """Every worker is full or lacks experts: a choice waits, up to the deadline; no new one where full."""
        now_s = time.monotonic()
        sequence.refused_since_s = sequence.refused_since_s or now_s
        if message.code == "overloaded" and not sequence.log.output:
            self._fail(sequence, full(message.message, code=message.code, after_s=self.eta.freed_s(now_s)))
        elif now_s - sequence.refused_since_s >= self._config.deadline_s:
            after_s = self.eta.back_s("experts", now_s - sequence.refused_since_s)
            self._fail(sequence, unavailable(message.message, code=message.code, after_s=after_s))
        else:
            self._replay(sequence, message.code)

    def _ask_again(self, sequence: Sequence) -> None:
        if sequence.id in self._waiting:
            sequence.refused_by.clear()
            self._place(sequence)

    # -- placing

    def _choose(self, sequence: Sequence, *, cross: bool = True) -> WorkerLink | None:
        """Who may take a choice. Args: cross: one that has begun may leave its numerics class."""
        if self.held:
            return None
        links = [x for x in self._workers.candidates() if x.incarnation not in sequence.refused_by]
        wanted = sequence.numerics_class
        same_class = [link for link in links if link.numerics_class == wanted]
        if sequence.seen is not None:
            cross = False
            if sequence.log.attempt == 1 and sequence.link is None:
                # Whoever computed it goes on with it, or knows what was said, though it may drain.
                for link in self.links():
                    hinted = link.incarnation % HINTS == sequence.hint and link.numerics_class == wanted
                    if hinted and not link.silence.alarmed:
                        return link
        elif not sequence.log.output:
            cross = True
        return self._trial.worker(same_class or (links if cross else []), sequence)

    def _place(self, sequence: Sequence) -> None:
        link = self._choose(sequence)
        if link is not None and sequence.log.losses >= self._config.suspect_losses:
            if sequence.id not in self._waiting:
                # Turns are had in order: one that was just lost comes after those that wait for theirs.
                self._place_soon()
                link = None
            elif not self._trial.admits(sequence, link, self._suspects, self._sequences.values()):
                link = None
        if link is None:
            if sequence.id not in self._waiting:
                self._waiting[sequence.id] = sequence
                sequence.waiting_since_s = time.monotonic()
                if sequence.refused_by:
                    # What a worker could not take then it may take now, and it may be the only one.
                    self._loop.call_later(_AGAIN_S, self._ask_again, sequence)
            return
        if self._waiting.pop(sequence.id, None) is not None:
            self.eta.lasted("workers", time.monotonic() - sequence.waiting_since_s)
        token_log = sequence.log
        before, sequence.numerics_class = sequence.numerics_class, link.numerics_class
        if before not in (None, link.numerics_class) and token_log.output:
            self.metrics.class_crossings += 1
            log.warning("class_crossed id=%s from=%s to=%s", sequence.id, before, link.numerics_class)
            # Its text is of two classes: whoever asks anew for one of a single class must not join it.
            sequence.key = ""
        sequence.link, sequence.incarnation = link, link.incarnation
        sequence.begun = False
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
            share=sequence.share,
            traceparent=sequence.traceparent,
            key=sequence.key,
            inspected=sequence.inspected,
        )
        try:
            link.send(submit)
        except ProtocolError as error:
            self._fail(sequence, invalid(str(error), code=None))

    def _place_soon(self) -> None:
        """Place those that wait before long: once, however many ask for it at a time."""
        if not self._placing:
            self._placing = True
            self._loop.call_soon(self._place_waiting)

    def _place_waiting(self) -> None:
        self._placing = False
        for sequence in sorted(self._waiting.values(), key=lambda s: (s.share.background, s.params.priority)):
            self._place(sequence)

    def _next_trial(self, sequence: Sequence) -> None:
        """A choice has its first token, or leaves its worker: who waits for that may be placed now."""
        if self._trial.leave(sequence):
            self._place_soon()

    def _suspects(self) -> list[Sequence]:
        most = self._config.suspect_losses
        return [sequence for sequence in self._waiting.values() if sequence.log.losses >= most]

    def _replay(self, sequence: Sequence, reason: str, *, suspects: int | None = 1) -> None:
        """Args: suspects: how many without a token may be why its worker is lost; None: it is not one of them."""
        blameless = suspects is None or reason in BLAMELESS
        alone = suspects is not None and not blameless and self._trial.lost(sequence, suspects)
        self._unlink(sequence)
        if blameless:
            sequence.log.move()
        else:
            sequence.log.lose(alone=alone)
            if alone and self._lost_alone(sequence) >= self._config.max_losses:
                message = (
                    f"{sequence.log.losses} attempts in a row ended without a new token ({reason}), the last with no "
                    "other request to blame; it is given up."
                )
                self._fail(sequence, internal(message, code="attempts_exhausted"))
                return
        self.metrics.replays[reason] += 1
        self._place(sequence)

    def _lost_alone(self, sequence: Sequence) -> int:
        """Of all choices of its request: they are mostly of one prompt, and what one of them does, all do."""
        family = (s.log for s in self._sequences.values() if s.generation is sequence.generation)
        return sum(log.lost_alone for log in family)

    def _move(self, sequence: Sequence, reason: str) -> None:
        if sequence.link is not None:
            sequence.link.send(Cancel(id=sequence.id))
        self._replay(sequence, reason)

    def _at(self, link: WorkerLink) -> list[Sequence]:
        return [sequence for sequence in self._sequences.values() if sequence.link is link]

    def _move_from(self, link: WorkerLink, *, begun: bool) -> None:
        """Move choices that another worker can take. Args: begun: those too that have tokens, at a prefill each."""
        for sequence in self._at(link):
            if (begun or not sequence.log.output) and self._choose(sequence, cross=False) is not None:
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
        self._next_trial(sequence)

    def _forget(self, sequence: Sequence, finish: str = "abort") -> None:
        self.eta.ended(sequence.eta_id, time.monotonic(), made=len(sequence.log.output), finish=finish)
        self._unlink(sequence)
        self._sequences.pop(sequence.id, None)
        self._waiting.pop(sequence.id, None)
        self._paused.pop(sequence.id, None)

    def _fail(self, sequence: Sequence, error: ApiError) -> None:
        self._forget(sequence)
        self.metrics.finished["error"] += 1
        sequence.generation.fail(error.reply)

    # -- time

    def _watch_time(self) -> None:
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep, time.monotonic() + _SWEEP_S)

    def _sweep(self, due_s: float) -> None:
        self._sweeper = None
        now_s = time.monotonic()
        late_s = now_s - due_s
        if late_s > _SWEEP_S:
            # While this process did not run it heard nobody: that part of their silence is its own.
            for link in self.links():
                link.heard_s = min(now_s, link.heard_s + late_s)
            # Nor did anybody wait longer for it.
            for sequence in self._waiting.values():
                sequence.waiting_since_s = min(now_s, sequence.waiting_since_s + late_s)
                if sequence.refused_since_s:
                    sequence.refused_since_s = min(now_s, sequence.refused_since_s + late_s)
        if self.held or (self._trial and self._workers.candidates()):
            # All wait for an operator; or for turns, which are had while workers serve, or for the worker that is kept
            # for the trial.
            for sequence in self._waiting.values():
                sequence.waiting_since_s = now_s
        overdue = [s for s in self._waiting.values() if now_s - s.waiting_since_s >= self._config.deadline_s]
        for sequence in overdue:
            classes, wanted = self.numerics_classes, sequence.numerics_class
            if sequence.seen is not None and self._workers.candidates() and wanted not in classes:
                served = ", ".join(classes)
                gone = f"It is of numerics class {wanted}, which no attention worker serves any more; now: {served}."
                self._fail(sequence, not_resumable(gone))
                continue
            reason = self.unready_reason() or "those that serve could not take it just then"
            waited = f"No attention worker took the request within {self._config.deadline_s:g} s: {reason}."
            after_s = self.eta.back_s("workers", now_s - sequence.waiting_since_s)
            self._fail(sequence, unavailable(waited, after_s=after_s))
        for link in self._workers.drained_for(self._config.drain_move_s, now_s):
            self._move_from(link, begun=True)
        for link in self.links():
            if link.outstanding > 0:
                self._check_silence(link, now_s - link.heard_s, now_s)
        if self._sequences:
            self._watch_time()

    def _check_silence(self, link: WorkerLink, silence_s: float, now_s: float) -> None:
        """Have the choices of a worker that is silent for too long go on elsewhere, or wait where nobody else can take
        them: for it, or for the next to come."""
        if silence_s >= self._config.silence_s:
            link.drop("silent_with_work")
        elif silence_s >= link.silence.bound_s(now_s) or link.silence.alarmed:
            if not link.silence.alarmed:
                link.silence.alarmed = True
                self.metrics.silences += 1
                log.warning("worker_silent name=%s silence_s=%.3f", link.name, silence_s)
            if silence_s >= _TELL_S and now_s - link.told_s >= _TELL_AGAIN_S:
                link.told_s = now_s
                reason = f"it owes {link.outstanding} tokens and has been silent for {silence_s:.2f} s"
                self.on_silent(link.name, link.incarnation, reason)
            for sequence in self._at(link):
                # Silence is little evidence: within the deadline nobody leaves the class for it.
                if self._choose(sequence, cross=silence_s >= self._config.deadline_s) is not None:
                    self._move(sequence, "silent")
                elif silence_s >= self._config.deadline_s:
                    link.send(Cancel(id=sequence.id))
                    waited = f"{link.name} has been silent for {silence_s:.1f} s, and no other serves."
                    after_s = self.eta.back_s("workers", silence_s)
                    self._fail(sequence, unavailable(waited, after_s=after_s))


def _shutting_down() -> ApiError:
    # Another gateway, or this one started again, may answer at once.
    return unavailable("The gateway is shutting down.", code="shutting_down", after_s=0.0)
