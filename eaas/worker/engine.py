"""The engine of one attention worker: requests in, one step at a time, tokens out.

One thread owns it. Between steps requests come and go; a step plans rows, computes their logits, chooses
tokens and hands them out. Nothing of a request that was cancelled, refused or failed stays behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from eaas.worker.blocks import BlockPool, next_digest
from eaas.worker.constraint import Compiling, Grammars
from eaas.worker.decoder import ExpertsLost
from eaas.worker.inspector import Inspector
from eaas.worker.plan import StepPlan
from eaas.worker.protocol import Failed, PromptLogprobs, RoutedExperts, Submit, Token, WorkerLoad
from eaas.worker.request import Refused, Request
from eaas.worker.sample import DeviceSamples, Refusal, Samples, SlotSampler
from eaas.worker.scheduler import Scheduler, SchedulerConfig
from eaas.worker.shares import reckoned_tokens
from experts.routes import DROPPED

log = logging.getLogger(__name__)

# A request this close to its deadline has reached it.
NEARLY_S = 0.01
# A step's wait is never a smaller share of the deadline: others than those who are overdue have rows in it too, whose
# experts are there and must have time to answer.
LEAST_WAIT = 1 / 20
# Who queues may need no lost expert, and is asked to wait beyond the deadline while that can be found out: for so many
# steps, one after another, of which none could be computed.
QUEUE_STEPS = 5
# How long a step waits for masks that are not ready: less than computing their rows again costs. Where all its rows
# wait, nobody else is held up, and the longest is what one mask may take.
MASK_GRACE_S = 0.001
LONGEST_MASK_S = 0.05
# Logits for log-probabilities of prompts, at most so many bytes in a step.
PROMPT_LOGITS_BYTES = 64 << 20
# Choices of experts told with one token: twice as many bytes, well below what a slow gateway may leave unread.
MOST_ROUTED = 4 << 20


class StepDecoder(Protocol):
    """What computes logits: `eaas.worker.decoder.Decoder`, or a stand-in."""

    def step(self, plan: StepPlan, deadline_s: float) -> np.ndarray:
        """float32 [m, vocab], valid until the next step. Raises ExpertsLost."""
        ...


@runtime_checkable
class TokenDecoder(Protocol):
    """A decoder that can sample where it computes logits, which then need not leave it."""

    def step_tokens(self, plan: StepPlan, rows: np.ndarray, deadline_s: float) -> DeviceSamples:
        """As `StepDecoder.step`; rows: `eaas.native.SAMPLE_ROW`, one for each of the plan's logits rows."""
        ...


@runtime_checkable
class RoutingDecoder(Protocol):
    """A decoder that notes which experts its gates choose, or takes others: `eaas.worker.decoder.Decoder`."""

    @property
    def routing_shape(self) -> tuple[int, int, int]:
        """MoE layers, experts chosen in each, and experts to choose from."""
        ...

    def routing(self, places: Sequence[int]) -> np.ndarray:
        """uint16 [places, layers, top_k]."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SchedulerConfig):
    """How one engine serves.

    Args:
        kv_blocks: Blocks of the decoder's KV pool.
        block_tokens: Tokens in each.
        vocab: Token ids are below it.
        eos_ids: Tokens that end a generation unless the request ignores them.
        deadline_s: How long a step may wait for expert servers.
        prefix_reuse: Share full blocks between requests with a common beginning.
    """

    kv_blocks: int
    vocab: int
    block_tokens: int = 16
    eos_ids: frozenset[int] = frozenset()
    deadline_s: float = 30.0
    prefix_reuse: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a step made, by owner."""

    tokens: dict[int, list[Token]] = field(default_factory=dict)
    dropped: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    failed: dict[int, list[Failed]] = field(default_factory=dict)
    prompts: dict[int, list[PromptLogprobs]] = field(default_factory=dict)
    routed: dict[int, list[RoutedExperts]] = field(default_factory=dict)


class Engine:
    """Requests of many owners over one decoder. An owner is a number of the caller's: a connection."""

    def __init__(
        self,
        decoder: StepDecoder,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        grammars: Who compiles grammars; None: requests with one are refused.
        wake: Called, on another thread, when a request whose grammar was compiled can be queued.
        """
        self.config = config
        # Told of requests whose computing begins with the step at hand, before it is computed.
        self.on_begun: Callable[[Sequence[Request]], None] = lambda _: None
        self.computed = 0
        self.busy_s = 0.0
        self._decoder = decoder
        self._by_token = decoder if isinstance(decoder, TokenDecoder) else None
        self._by_experts = decoder if isinstance(decoder, RoutingDecoder) else None
        self._clock = clock
        # Since when no step has succeeded for want of experts; None while all is well.
        self._lost_since_s: float | None = None
        self._computed_s = 0.0
        # When requests that steps leave out for want of experts are tried again.
        self._unpark_s = 0.0
        self._pool = BlockPool(blocks=config.kv_blocks, block_tokens=config.block_tokens, reuse=config.prefix_reuse)
        rows = max(1, min(config.prompt_logprobs_rows, PROMPT_LOGITS_BYTES // (4 * config.vocab)))
        self.scheduler = Scheduler(replace(config, prompt_logprobs_rows=rows), self._pool)
        self.compiling = Compiling(grammars, wake, clock)
        self.inspector: Inspector | None = None  # None: nothing can be recorded
        self._sampler = SlotSampler(vocab=config.vocab, slots=config.slots)

    def inspect(self, inspector: Inspector) -> None:
        """Let this one record rows for an operator."""
        self.inspector, self.scheduler.record = inspector, inspector.record

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.running > 0 or self.scheduler.waiting > 0 or self.compiling.ready

    def live(self) -> list[Request]:
        """Every request that has not ended, those whose grammars are being compiled included."""
        return [*self.compiling.requests(), *self.scheduler.live()]

    def find(self, owner: int, id: str) -> Request | None:
        """The request of that name that has not ended, its grammar compiled or not."""
        return self.compiling.get(owner, id) or self.scheduler.get(owner, id)

    def load(self) -> dict[str, float]:
        """Requests running and waiting, what is queued, and the share of KV blocks held, 0 to 1. Any thread.

        backlog_tokens: of prompts not yet computed, what the waiting requests are reckoned to generate, and the next
        token of each that generates, so that it is 0 only when nothing is to do.
        queue_s: age of the oldest request that has never run; one that was preempted shows in kv_use.
        """
        running, queue, prefills = self.scheduler.running, self.scheduler.queue(), self.scheduler.prefills()
        left = running - len(prefills) + sum(map(reckoned_tokens, queue))
        left += sum(len(request.context) - request.computed for request in prefills)
        oldest_s = min((r.submitted_s for r in queue if not r.preemptions), default=None)
        return {
            "running": float(running),
            "waiting": float(len(queue)),
            "backlog_tokens": float(left),
            "queue_s": 0.0 if oldest_s is None else max(0.0, self._clock() - oldest_s),
            "kv_use": 1.0 - self._pool.free / self._pool.blocks,
        }

    def worker_load(self) -> WorkerLoad:
        """The same in brief, with what was counted, for gateways."""
        scheduler = self.scheduler
        return WorkerLoad(
            running=scheduler.running,
            waiting=scheduler.waiting,
            kv_use=1.0 - self._pool.free / self._pool.blocks,
            preemptions=scheduler.preemptions,
            looked_up=scheduler.looked_up_tokens,
            reused=scheduler.reused_tokens,
        )

    def totals(self) -> dict[str, float]:
        """What was done since the start: tokens computed and found again, preemptions, seconds in steps. Any thread."""
        speculation = self.scheduler.speculation
        return {
            "computed_tokens": float(self.computed),
            "reused_tokens": float(self.scheduler.reused_tokens),
            "preemptions": float(self.scheduler.preemptions),
            "busy_s": self.busy_s,
            "drafted_tokens": float(speculation.drafted),
            "accepted_tokens": float(speculation.accepted),
        }

    def submit(self, message: Submit, owner: int = 0, came_s: float | None = None) -> Failed | None:
        """Queue a request. A newer attempt takes the place of an older one of the same id.

        Args:
            came_s: When it came, by the engine's clock; now unless given.

        Returns:
            The refusal, or None when it was taken.
        """
        older = self.find(owner, message.id)
        if older is not None and older.attempt < message.attempt:
            self.cancel(message.id, owner)
        request = Request(
            owner=owner,
            id=message.id,
            attempt=message.attempt,
            prompt=np.array(message.prompt, dtype=np.int32),
            output=list(message.output),
            params=message.params,
            share=message.share,
            inspected=message.inspected,
            eos=self.config.eos_ids,
            submitted_s=self._clock() if came_s is None else came_s,
        )
        try:
            self._check_vocabulary(request)
            self._check_routing(request)
            request.forced = self._forced(request)
            if request.params.grammar is None:
                self.scheduler.add(request)
            else:
                self.compiling.add(request, request.params.grammar)
        except Refused as refused:
            return refused.reply(request)
        return None

    def cancel(self, id: str, owner: int = 0) -> bool:
        """Forget a request and free its blocks at once; False if there is none of that name."""
        waits = self.compiling.get(owner, id)
        if waits is None:
            return self.scheduler.cancel(owner, id)
        self.compiling.cancel(owner, id)
        self.scheduler.on_end(waits)
        return True

    def step(self) -> Outcome | None:
        """Compute one step; None when there is nothing to do.

        When experts are lost, a request fails, retryably, once it has waited for the deadline and has rows in the step
        that need them; the engine goes on with the others, and tries again with those from time to time. Who queues
        fails only when nothing could be computed for a while longer, or when the step is lost for no row in particular.
        """
        refused = self._admit_compiled() if self.compiling else []
        outcome = self._step()
        if refused:
            outcome = Outcome() if outcome is None else outcome
            for owner, failed in refused:
                outcome.failed.setdefault(owner, []).append(failed)
        return outcome

    def _admit_compiled(self) -> list[tuple[int, Failed]]:
        """Queue requests whose grammars have been compiled; those that are refused."""
        refused: list[tuple[int, Failed]] = []
        for request, fault in self.compiling.take():
            try:
                if fault is not None:
                    raise fault
                self.scheduler.add(request)
            except Refused as reason:
                refused.append((request.owner, reason.reply(request)))
                self.scheduler.on_end(request)
        return refused

    def _step(self) -> Outcome | None:
        if self.scheduler.parked and self._clock() >= self._unpark_s:
            self.scheduler.unpark()
        plan = self.scheduler.plan()
        if plan is None and self.scheduler.parked:
            self.scheduler.unpark()
            plan = self.scheduler.plan()
        if plan is None:
            return None
        if plan.begun:
            self.on_begun(plan.begun)
        began_s = self._clock()
        try:
            samples = self._compute(plan, self._budget_s(began_s, guessing=plan.ahead is not None))
        except ExpertsLost as lost:
            if self.inspector is not None:
                self.inspector.failed()
            return self._after_loss(lost, began_s, plan)
        if self.inspector is not None:
            self.inspector.done(plan)
        self._computed_s = self._clock()
        if not self.scheduler.parked:
            self._lost_since_s = None
        else:
            for request in self.scheduler.live():
                if request.slot in plan.seqs:
                    request.moved_s = self._clock()
        if plan.drop is not None:
            self._note_dropped(plan.seqs[plan.drop == DROPPED])
        speculation = self.scheduler.speculation
        wrong = speculation.wrong
        outcome = self._hand_out(plan, samples)
        # A step that ended for want of experts is not counted: it waited.
        took_s = self._clock() - began_s
        self.busy_s += took_s
        self.computed += len(plan.token_ids) - (speculation.wrong - wrong)
        self.scheduler.step_time.took(len(plan.token_ids), took_s)
        if speculation.most and len(plan.requests) == len(plan.token_ids):
            speculation.took(len(plan.token_ids), took_s)
        return outcome

    def _note_dropped(self, slots: np.ndarray) -> None:
        without = set(slots.tolist())
        for request in self.scheduler.live():
            if request.slot in without and not request.dropped:
                request.dropped = True
                log.warning("experts_dropped id=%s at=%d", request.id, len(request.output))

    def _compute(self, plan: StepPlan, budget_s: float) -> Samples | None:
        """Run a step and sample its tokens; None where it has none to sample."""
        if not len(plan.logits_rows):
            self._decoder.step(plan, budget_s)
            return None
        rows, device = self._sampler.rows(plan), None
        if self._by_token is not None:
            device = self._by_token.step_tokens(plan, rows, budget_s)
            logits = device.logits
        else:
            logits = self._decoder.step(plan, budget_s)
        return self._sampler.sample(plan, rows, logits, self._barred(plan), device)

    def _barred(self, plan: StepPlan) -> dict[int, str]:
        """Rows whose grammars say nothing yet, and "", or nothing any more, and why."""
        requests, ahead = plan.requests, plan.ahead
        bound = [(row, r.constraint) for row, r in enumerate(requests) if r.constraint is not None]
        if not bound:
            return {}
        end_s = time.monotonic() + (MASK_GRACE_S if len(bound) < len(requests) else LONGEST_MASK_S)
        barred: dict[int, str] = {}
        for row, constraint in bound:
            if not constraint.ready(max(0.0, end_s - time.monotonic())):
                barred[row] = ""
            elif constraint.fault:
                barred[row] = constraint.fault
            elif ahead is not None and ahead[row] >= constraint.made:
                barred[row] = ""
        return barred

    def _hand_out(self, plan: StepPlan, samples: Samples | None) -> Outcome:
        outcome = Outcome()
        requests = plan.requests
        if samples is None:
            self.scheduler.complete([])
            return outcome
        refused: dict[Request, Refusal] = {}
        self._tell_prompts(plan, samples, outcome, refused)
        for row in samples.refused:
            if row < len(requests):
                samples.tokens[row] = -1
        # Those of a request that ends are free by then, and as they were until the next step.
        blocks = {r: r.blocks for r in requests if r.params.wants_routing} if plan.routed else {}
        told: dict[Request, Sequence[int]] = {}  # they go with a token
        for request, number, token, finish, row in self.scheduler.complete(samples.tokens):
            if row in samples.refused:
                refused[request] = samples.refused[row]
            if token < 0:
                continue
            wanted = request.params.logprobs
            if samples.logprobs is None or wanted < 0:
                made = Token(request.id, request.attempt, number, token, finish)
            else:
                top = samples.top(row, wanted)
                made = Token(request.id, request.attempt, number, token, finish, samples.logprobs[row], top)
                if request.told is not None:
                    request.told.append(made)
                    if len(request.told) > request.told_most:
                        request.told = None
            outcome.tokens.setdefault(request.owner, []).append(made)
            if request in blocks and request.length - 1 > request.routed:
                told[request] = blocks[request]
            if request.dropped:
                outcome.dropped.setdefault(request.owner, []).append((request.id, request.attempt))
        if self._by_experts is not None and told:
            self._tell_routing(self._by_experts, told, outcome)
        for request, (reason, asked) in refused.items():
            self.scheduler.cancel(request.owner, request.id)
            log.error("choice_failed id=%s reason=%s", request.id, reason)
            code = "no_token" if asked else "internal"
            _fail(outcome, [request], code, f"No token could be chosen: {reason}.", retryable=False)
        return outcome

    def _tell_routing(self, decoder: RoutingDecoder, blocks: Mapping[Request, Sequence[int]], outcome: Outcome) -> None:
        """Hand out the experts of the tokens computed since the last time: of all but each request's last."""
        size = self.config.block_tokens
        places = [
            blocks[request][at // size] * size + at % size
            for request in blocks
            for at in range(request.routed, request.length - 1)
        ]
        layers, top_k, experts = decoder.routing_shape
        found = decoder.routing(places).astype("u1" if experts <= 256 else "<u2").tobytes() if places else b""
        each, begin = len(found) // max(1, len(places)), 0
        for request in blocks:
            start, request.routed = request.routed, request.length - 1
            end = begin + (request.routed - start) * each
            piece = RoutedExperts(request.id, request.attempt, start, request.routed, layers, top_k, found[begin:end])
            outcome.routed.setdefault(request.owner, []).append(piece)
            begin = end

    def _tell_prompts(
        self, plan: StepPlan, samples: Samples, outcome: Outcome, refused: dict[Request, Refusal]
    ) -> None:
        row = len(plan.requests)
        for chunk in plan.prompt_logprobs:
            request, start, _ = chunk
            rows = range(row, row + chunk.rows)
            row = rows.stop
            broken = next((samples.refused[number] for number in rows if number in samples.refused), None)
            if broken is not None:
                refused[request] = broken
            elif samples.logprobs is not None:
                count = request.params.prompt_logprobs
                ranks = samples.ranks.tolist()
                tokens = [(samples.logprobs[number], ranks[number], samples.top(number, count)) for number in rows]
                piece = PromptLogprobs(request.id, request.attempt, start, tokens)
                outcome.prompts.setdefault(request.owner, []).append(piece)

    def _waited_s(self, request: Request, now_s: float) -> float:
        """How long a request has waited for lost experts."""
        since_s = now_s if self._lost_since_s is None else self._lost_since_s
        return now_s - max(since_s, request.moved_s)

    def _budget_s(self, now_s: float, *, guessing: bool = False) -> float:
        """How long the next step may wait: until the first request that waits has waited for the deadline. Of what is
        only guessed nobody can tell whether it is worth waiting for."""
        if guessing:
            return self.config.deadline_s * LEAST_WAIT
        if self._lost_since_s is None:
            return self.config.deadline_s
        longest_s = max(self._waited_s(request, now_s) for request in self.scheduler.live())
        return max(self.config.deadline_s * LEAST_WAIT, self.config.deadline_s - longest_s)

    def _after_loss(self, lost: ExpertsLost, began_s: float, plan: StepPlan) -> Outcome:
        # A request whose rows all came is not to blame for the step, and goes on; who queues has its turn after those
        # that are. With no row to blame, all wait: else nobody would ever have waited for too long.
        rows = lost.rows
        self.scheduler.abandon()
        if plan.ahead is not None:
            self.scheduler.speculation.lost(plan.requests)
            if rows is not None and len(rows):
                rows = rows[plan.ahead[rows] == 0]
                if not len(rows):
                    # Nobody waits for the experts of a guess: the step is taken again without.
                    return Outcome()
        waiting = set(plan.seqs[rows].tolist()) if rows is not None and len(rows) else None
        if self._lost_since_s is None:
            self._lost_since_s = began_s
        latest_s = self._clock() + NEARLY_S
        in_vain_s = latest_s - max(self._lost_since_s, self._computed_s)
        if waiting is not None and in_vain_s >= self.config.deadline_s * (1 + QUEUE_STEPS * LEAST_WAIT):
            waiting.add(-1)
        overdue = [
            request
            for request in self.scheduler.live()
            if (waiting is None or request.slot in waiting)
            and self._waited_s(request, latest_s) >= self.config.deadline_s
        ]
        queued = [request for request in overdue if request.slot < 0]
        stepped = [request for request in overdue if request.slot >= 0]
        for request in overdue:
            self.scheduler.cancel(request.owner, request.id)
        if waiting is not None:
            # However many more come that need them, the others are not held up by them for ever.
            parked = [r for r in list(self.scheduler.live()) if r.slot in waiting and r.slot >= 0]
            self.scheduler.park(parked)
            # A step tried again in vain takes as long as one is left out: it ends by the first deadline.
            most_s = self.config.deadline_s * LEAST_WAIT
            left_s = self.config.deadline_s - max((self._waited_s(r, latest_s) for r in parked), default=0.0)
            self._unpark_s = self._clock() + min(most_s, max(0.0, left_s - most_s))
        log.error("step_failed requests=%d reason=%s", len(overdue), lost)
        outcome = Outcome()
        message = (
            f"No live server holds some of the experts needed (waited {self.config.deadline_s:g} s). They are being "
            "restored; try again."
        )
        _fail(outcome, stepped, "expert_lost", message, retryable=True)
        message = (
            f"It waited in the queue while nothing could be computed for {in_vain_s:.0f} s: no live server holds some "
            "of the experts that others need. They are being restored; try again."
        )
        _fail(outcome, queued, "expert_lost", message, retryable=True)
        return outcome

    def _check_routing(self, request: Request) -> None:
        if not request.params.wants_routing:
            return
        if self._by_experts is None:
            raise Refused(
                "bad_request", "The decoder of this worker does not tell which experts it chose; the native one does."
            )
        layers, top_k, _ = self._by_experts.routing_shape
        told = (len(request.prompt) - request.params.routed_from) * layers * top_k
        if told > MOST_ROUTED:
            raise Refused(
                "bad_request",
                f"The prompt's tokens have {told} choices of experts; at most {MOST_ROUTED} are told at once. "
                "Shorten it, or leave out those that are known with routed_experts_prompt_start.",
            )

    def _forced(self, request: Request) -> np.ndarray | None:
        found = request.params.forced
        if found is None:
            return None
        if self._by_experts is None:
            raise Refused(
                "bad_request", "The decoder of this worker cannot take experts that are given; the native one can."
            )
        layers, top_k, experts = self._by_experts.routing_shape
        if not layers or (found.layers, found.top_k) != (layers, top_k) or len(found.experts) % (2 * layers * top_k):
            raise Refused(
                "bad_request",
                f"'force_routed_experts' has experts of {found.layers} layers, {found.top_k} in each; this model has "
                f"{layers} MoE layers with {top_k} in each.",
            )
        forced = np.frombuffer(found.experts, "<u2").astype(np.uint16, copy=False).reshape(-1, layers, top_k)
        forced = forced[: request.final_length]
        if forced.size and (most := int(forced.max())) >= experts:
            raise Refused(
                "bad_request", f"'force_routed_experts' has expert {most}; this model has 0 to {experts - 1}."
            )
        ordered = np.sort(forced, axis=2)
        twice = ordered[:, :, 1:] == ordered[:, :, :-1]
        if twice.any():
            token, layer, _ = np.unravel_index(int(twice.argmax()), twice.shape)
            where = f"for token {token} in MoE layer {layer}"
            raise Refused("bad_request", f"'force_routed_experts' has an expert twice {where}.")
        request.forced_digest = next_digest(b"forced", found.experts)
        return forced

    def _check_vocabulary(self, request: Request) -> None:
        params = request.params
        for what, tokens in (
            ("prompt", request.prompt),
            ("output", request.output),
            ("allowed_token_ids", params.allowed_token_ids),
            ("bad_tokens", [token for bad in params.bad_tokens for token in bad]),
            ("logit_bias", [token for token, _ in params.logit_bias]),
        ):
            ids = np.asarray(tokens, dtype=np.int32)
            if len(ids) and (ids.max() >= self.config.vocab or ids.min() < 0):
                raise Refused(
                    "bad_request",
                    f"The {what} holds token {max(int(ids.max()), -int(ids.min()))}; ids are 0 to "
                    f"{self.config.vocab - 1}.",
                )


def _fail(outcome: Outcome, requests: Iterable[Request], code: str, message: str, *, retryable: bool) -> None:
    for request in requests:
        failed = Failed.of(request, code, message, retryable=retryable)
        outcome.failed.setdefault(request.owner, []).append(failed)
