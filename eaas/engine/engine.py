"""The engine of one attention worker: requests in, one step at a time, tokens out.

One thread owns it. Between steps requests come and go; a step plans rows, computes their logits, chooses
tokens and hands them out. Nothing of a request that was cancelled, refused or failed stays behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from eaas.engine.blocks import BlockPool
from eaas.engine.choice import Chooser
from eaas.engine.decoder import ExpertsLost, StepPlan
from eaas.engine.request import Refused, Request
from eaas.engine.scheduler import Plan, Scheduler, SchedulerConfig
from eaas.engine.worker_protocol import Failed, Submit, Token

log = logging.getLogger(__name__)

# A step's wait is never shorter, and a request this close to its deadline has reached it.
LEAST_WAIT_S = 0.01
# Output tokens reckoned for a request that waits, at most: limits are mostly far above what is generated.
RECKONED_TOKENS = 256
LogitsHook = Callable[[Request, int, np.ndarray], None]


class StepDecoder(Protocol):
    """What computes logits: `eaas.engine.decoder.Decoder`, or a stand-in."""

    def step(self, plan: StepPlan, deadline_s: float) -> np.ndarray:
        """float32 [m, vocab], valid until the next step. Raises ExpertsLost."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine serves.

    Args:
        scheduler: Limits of the schedule.
        kv_blocks: Blocks of the decoder's KV pool.
        block_tokens: Tokens in each.
        vocab: Token ids are below it.
        eos_ids: Tokens that end a generation unless the request ignores them.
        deadline_s: How long a step may wait for expert servers.
        prefix_reuse: Share full blocks between requests with a common beginning.
    """

    scheduler: SchedulerConfig
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
    failed: dict[int, list[Failed]] = field(default_factory=dict)


class Engine:
    """Requests of many owners over one decoder. An owner is a number of the caller's: a connection."""

    def __init__(
        self,
        decoder: StepDecoder,
        config: EngineConfig,
        on_logits: LogitsHook | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: on_logits: called with (request, index, float32 [vocab]) before each choice; copy it."""
        self.config = config
        self.computed = 0
        self.busy_s = 0.0
        self._decoder = decoder
        self._on_logits = on_logits
        self._clock = clock
        # Since when no step has succeeded for want of experts; None while all is well.
        self._lost_since_s: float | None = None
        self._pool = BlockPool(
            blocks=config.kv_blocks, block_tokens=config.block_tokens, reuse=config.prefix_reuse
        )
        self.scheduler = Scheduler(config.scheduler, self._pool)
        self._chooser = Chooser(vocab=config.vocab, slots=config.scheduler.slots)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return self.scheduler.running > 0 or self.scheduler.waiting > 0

    def load(self) -> dict[str, float]:
        """Requests running and waiting, what is queued, and the share of KV blocks held, 0 to 1. Any thread.

        backlog_tokens: of prompts not yet computed, what the waiting requests are reckoned to generate, and the next
        token of each that generates, so that it is 0 only when nothing is to do.
        queue_s: age of the oldest request that has never run; one that was preempted shows in kv_use.
        """
        running, queue, prefills = self.scheduler.running, self.scheduler.queue(), self.scheduler.prefills()
        left = running - len(prefills)
        left += sum(len(request.context) - request.computed for request in prefills)
        for request in queue:
            left += request.length
            left += min(RECKONED_TOKENS, request.params.max_tokens - len(request.output))
        oldest_s = min((r.submitted_s for r in queue if not r.preemptions), default=None)
        return {
            "running": float(running),
            "waiting": float(len(queue)),
            "backlog_tokens": float(left),
            "queue_s": 0.0 if oldest_s is None else max(0.0, self._clock() - oldest_s),
            "kv_use": 1.0 - self._pool.free / self._pool.blocks,
        }

    def submit(self, message: Submit, owner: int = 0) -> Failed | None:
        """Queue a request. A newer attempt takes the place of an older one of the same id.

        Returns:
            The refusal, or None when it was taken.
        """
        older = self.scheduler.get(owner, message.id)
        if older is not None and older.attempt < message.attempt:
            self.scheduler.cancel(owner, message.id)
        request = Request(
            owner=owner,
            id=message.id,
            attempt=message.attempt,
            prompt=message.prompt,
            output=message.output,
            params=message.params,
            eos=self.config.eos_ids,
            submitted_s=self._clock(),
        )
        try:
            self._check_vocabulary(request)
            self.scheduler.add(request)
        except Refused as refused:
            return Failed(
                id=message.id,
                attempt=message.attempt,
                code=refused.code,
                message=str(refused),
                retryable=refused.retryable,
            )
        return None

    def cancel(self, id: str, owner: int = 0) -> bool:
        """Forget a request and free its blocks at once; False if there is none of that name."""
        return self.scheduler.cancel(owner, id)

    def cancel_owner(self, owner: int) -> int:
        """Forget every request of an owner; returns how many there were."""
        ids = [request.id for request in self.scheduler.live() if request.owner == owner]
        for id in ids:
            self.scheduler.cancel(owner, id)
        return len(ids)

    def step(self) -> Outcome | None:
        """Compute one step; None when there is nothing to do.

        When experts are lost, a request fails, retryably, once it has waited for the deadline, whether in a step
        or in the queue; the engine goes on with the others.
        """
        plan = self.scheduler.plan()
        if plan is None:
            return None
        step = StepPlan(
            token_ids=plan.token_ids,
            positions=plan.positions,
            seqs=plan.seqs,
            block_tables=plan.block_tables,
            logits_rows=plan.logits_rows,
        )
        began_s = self._clock()
        try:
            logits = self._decoder.step(step, self._budget_s(began_s))
        except ExpertsLost as lost:
            return self._fail_overdue(lost, began_s)
        self._lost_since_s = None
        outcome = self._hand_out(plan, logits)
        # A step that ended for want of experts is not counted: it waited.
        self.busy_s += self._clock() - began_s
        self.computed += len(plan.token_ids)
        return outcome

    # -- inside ----------------------------------------------------------------------------------------------

    def _hand_out(self, plan: Plan, logits: np.ndarray) -> Outcome:
        outcome = Outcome()
        requests = plan.requests
        if not requests:
            self.scheduler.complete([])
            return outcome
        if self._on_logits is not None:
            for request, row in zip(requests, logits, strict=True):
                self._on_logits(request, len(request.output), row)
        choice = self._chooser.choose(logits, plan.slots, requests)
        refused = [(requests[row], reason) for row, reason in choice.refused.items()]
        by_owner = outcome.tokens
        for row, (request, number, token, finish) in enumerate(self.scheduler.complete(choice.tokens)):
            if row in choice.refused:
                continue
            wanted = request.params.logprobs
            if choice.logprobs is None or wanted < 0:
                made = Token(request.id, request.attempt, number, token, finish)
            else:
                top = choice.top(row, wanted)
                made = Token(request.id, request.attempt, number, token, finish, choice.logprobs[row], top)
            tokens = by_owner.get(request.owner)
            if tokens is None:
                by_owner[request.owner] = [made]
            else:
                tokens.append(made)
        for request, reason in refused:
            self.scheduler.cancel(request.owner, request.id)
            log.error("choice_failed id=%s reason=%s", request.id, reason)
            _fail(outcome, [request], "internal", f"No token could be chosen: {reason}.", retryable=False)
        return outcome

    def _waited_s(self, request: Request, now_s: float) -> float:
        """How long a request has waited for lost experts."""
        since_s = now_s if self._lost_since_s is None else self._lost_since_s
        return now_s - max(since_s, request.submitted_s)

    def _budget_s(self, now_s: float) -> float:
        """How long the next step may wait: until the first request that waits has waited for the deadline."""
        if self._lost_since_s is None:
            return self.config.deadline_s
        longest_s = max(self._waited_s(request, now_s) for request in self.scheduler.live())
        return max(LEAST_WAIT_S, self.config.deadline_s - longest_s)

    def _fail_overdue(self, lost: ExpertsLost, began_s: float) -> Outcome:
        self.scheduler.abandon()
        if self._lost_since_s is None:
            self._lost_since_s = began_s
        latest_s = self._clock() + LEAST_WAIT_S
        overdue = [r for r in self.scheduler.live() if self._waited_s(r, latest_s) >= self.config.deadline_s]
        for request in overdue:
            self.scheduler.cancel(request.owner, request.id)
        log.error("step_failed requests=%d reason=%s", len(overdue), lost)
        outcome = Outcome()
        message = (
            f"No live server holds some of the experts needed (waited {self.config.deadline_s:g} s). They are being "
            "restored; try again."
        )
        _fail(outcome, overdue, "expert_lost", message, retryable=True)
        return outcome

    def _check_vocabulary(self, request: Request) -> None:
        for what, tokens in (
            ("prompt", request.prompt),
            ("output", np.array(request.output, dtype=np.int32)),
        ):
            if len(tokens) and (tokens.max() >= self.config.vocab or tokens.min() < 0):
                raise Refused(
                    "bad_request",
                    f"The {what} holds token {max(int(tokens.max()), -int(tokens.min()))}; ids are 0 to "
                    f"{self.config.vocab - 1}.",
                )


def _fail(outcome: Outcome, requests: Iterable[Request], code: str, message: str, *, retryable: bool) -> None:
    for request in requests:
        failed = Failed(
            id=request.id, attempt=request.attempt, code=code, message=message, retryable=retryable
        )
        outcome.failed.setdefault(request.owner, []).append(failed)
