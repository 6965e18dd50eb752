"""Which rows the next engine step computes. Pure: one `plan` and one `complete` (or `abandon`) make a step.

Continuous batching: every request that generates has one row in every step; what is left of the step's token budget,
or as much of it as those can bear (eaas.worker.step_time), goes to prompts, in chunks, in order of admission; then to
waiting requests, by priority and in order of arrival, as long as their blocks can be had. When blocks run out, the
youngest running request of the last priority gives up its own and waits again: what it has emitted stays; prompt and
output are computed again later, with the same bits.

Where several tenants want more than there is, each has its weight's part of the tokens (eaas.worker.shares): the one
that is owed most is admitted first, has the step's budget first, and is preempted last. Within a tenant it is as above.

Requests in the background have what those that are not leave them. While such come, at most `background_rows` of them
have rows in a step, so that it stays short: one beside each BACKGROUND_BESIDE of others that generate, none beside
prompts of others. After a step of theirs alone the cores rest; others take their slots and blocks. Where that leaves
them no row at all, the first takes its turn among the others once BACKGROUND_PART times as many tokens as it needs have
been computed without it.

A row costs no Python object: the state that rows need lies in arrays indexed by slot, and a plan of requests
that generate is two gathers.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from eaas.worker.blocks import BlockPool, next_digest, root_digest
from eaas.worker.plan import StepPlan, StepTaps, forced_rows
from eaas.worker.request import Chunk, Flow, Refused, Request, TokenArray
from eaas.worker.shares import Flows, has_room, reckoned_tokens
from eaas.worker.speculate import Speculation
from eaas.worker.step_time import MOST_MIXED, StepTime, rows_beside

BACKGROUND_PART = 20
# Rows of others for each in the background in the same step, which it makes longer.
BACKGROUND_BESIDE = 4
# So many steps without a request that is not in the background, and those that are have the steps for themselves.
QUIET_STEPS = 1000


class Emitted(NamedTuple):
    """A token that a step made of logits `row`: number `number` of the request's output; the last says how it finished.
    Below 0: none was chosen yet."""

    request: Request
    number: int
    token: int
    finish: Literal["", "stop", "length", "complete"]
    row: int


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one worker.

    Args:
        max_model_len: Most tokens of prompt and output together.
        step_tokens: Most rows in one step.
        max_running: Most requests with blocks; `step_tokens` caps it, so that each has a row in every step.
        max_waiting: Requests in the queue; one more is refused as overloaded.
        background_rows: Most rows of a step for requests in the background while others come.
        prefill_share: Least part of the speed of prompts alone that they keep beside requests that generate.
        prompt_logprobs_rows: Prompt tokens whose log-probabilities one step computes, about: each is a row of logits.
        drafts: Most tokens that are guessed ahead of a request (eaas.worker.speculate); 0: none ever.
        fingerprint: Names the model's weights and dtype; blocks are only shared under the same one.

    Raises:
        ValueError: a limit is below 1.
    """

    max_model_len: int
    step_tokens: int = 512
    max_running: int = 256
    max_waiting: int = 4096
    background_rows: int = 4
    prefill_share: float = 0.5
    fingerprint: str = ""
    prompt_logprobs_rows: int = 512
    drafts: int = 0

    def __post_init__(self) -> None:
        limits = "max_model_len", "step_tokens", "max_running", "max_waiting", "prompt_logprobs_rows"
        for name in (*limits, "background_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    @property
    def slots(self) -> int:
        """Requests that can run at once."""
        return min(self.max_running, self.step_tokens)


class Scheduler:
    """Admits, orders, preempts and ends requests; owns their blocks."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.preemptions = 0
        self.looked_up_tokens = 0
        self.reused_tokens = 0
        slots = config.slots
        table_blocks = min(-(-config.max_model_len // pool.block_tokens), pool.blocks)
        self._root = root_digest(config.fingerprint, pool.block_tokens)
        # Told of each request that was added and has ended.
        self.on_end: Callable[[Request], None] = lambda _: None
        self._live: dict[tuple[int, str], Request] = {}
        self._flows = Flows()
        # Live requests in the background; most rows that they have in this step; tokens computed since one had a row.
        self._background, self._background_most, self._without = 0, 0, 0
        self._quiet = QUIET_STEPS
        # The step is for the background alone though others come: who serves them may have the cores after it.
        self.rests = False
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []
        self._parked: list[Request] = []
        # Those that were taken into the steps again last, by their order; whether others come in beside the parked.
        self._retried: set[int] = set()
        self._open = True
        self._begun: list[Request] = []
        self._arrivals = 0
        self._free_slots = list(range(slots - 1, -1, -1))
        self._tables: TokenArray = np.zeros((slots, table_blocks), dtype=np.int32)
        self._last: TokenArray = np.zeros(slots, dtype=np.int32)
        self._computed: TokenArray = np.zeros(slots, dtype=np.int32)
        self._ranks: TokenArray = np.arange(slots, dtype=np.int32)
        self._may_drop = np.zeros(slots, np.uint8)
        self._droppers = self._routed = 0
        self._forced: dict[int, NDArray[np.uint16]] = {}  # by slot
        # Those that run and may be recorded, by slot: another object after each change. And what is of a step's rows.
        self._inspected: Mapping[int, Request] = {}
        self.record: Callable[[TokenArray, Mapping[int, Request]], StepTaps | None] = lambda seqs, requests: None
        self._decode_slots: TokenArray | None = None
        self.step_time = StepTime(config.step_tokens)
        self._mixed_steps = 0  # with chunks, one after another
        self.speculation = Speculation(config.drafts, config.step_tokens)
        self._drafted = False  # whether the step has rows for drafts
        # Of the step between `plan` and `complete`: requests that generate, their slots, and chunks of prompts.
        self._in_flight: tuple[list[Request], TokenArray, list[Chunk]] | None = None

    # -- the queue -------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return len(self._prefilling) + len(self._decoding) + len(self._parked)

    @property
    def parked(self) -> int:
        """Of these, requests that steps leave out."""
        return len(self._parked)

    @property
    def waiting(self) -> int:
        """Requests that hold none yet, or none any more."""
        return len(self._live) - self.running

    def live(self) -> Iterable[Request]:
        """Every request that has not ended."""
        return self._live.values()

    def queue(self) -> list[Request]:
        """Requests that hold no blocks, the next to be admitted first. Any thread."""
        return [request for flow in self._flows.waiting() for request in list(flow.waiting)]

    def prefills(self) -> list[Request]:
        """Requests whose prompts are being computed. Any thread."""
        return list(self._prefilling)

    def get(self, owner: int, id: str) -> Request | None:
        """The live request of that name."""
        return self._live.get((owner, id))

    def add(self, request: Request) -> None:
        """Queue a request. Raises Refused: it can never be served here, or not now (overloaded); nothing is kept."""
        config, pool, params = self.config, self.pool, request.params
        if not len(request.prompt):
            raise Refused("bad_request", "The prompt has no tokens; at least 1 is needed.")
        if (request.owner, request.id) in self._live:
            raise Refused("bad_request", f"Request {request.id} is already being served; use another id.")
        if len(request.output) >= params.max_tokens:
            raise Refused(
                "bad_request",
                f"{len(request.output)} of max_tokens {params.max_tokens} are there already: nothing to do.",
            )
        if request.final_length > config.max_model_len:
            raise Refused(
                "too_long",
                f"The prompt's {len(request.prompt)} tokens and max_tokens {params.max_tokens} make "
                f"{request.final_length}; the model's limit is {config.max_model_len}. Shorten the prompt or "
                f"ask for at most {max(0, config.max_model_len - len(request.prompt))} tokens.",
            )
        if self._blocks_for(request.final_length - 1) > pool.blocks:
            raise Refused(
                "never_fits",
                f"The prompt's {len(request.prompt)} tokens and max_tokens {params.max_tokens} need "
                f"{self._blocks_for(request.final_length - 1)} KV blocks; this worker has {pool.blocks} "
                f"({pool.blocks * pool.block_tokens} tokens). Ask for fewer tokens or raise --kv-tokens.",
            )
        if self.waiting >= config.max_waiting and not has_room(
            {flow.share: len(flow.waiting) for flow in self._flows.waiting()}, request.share, config.max_waiting
        ):
            raise Refused(
                "overloaded", f"{self.waiting} requests wait here, which is the limit; try again later.", retryable=True
            )
        self._arrivals += 1
        request.order = self._arrivals
        self._live[request.owner, request.id] = request
        self._background += request.share.background
        self._quiet *= request.share.background
        flow = request.flow = self._flows.of(request.share)
        flow.live += 1
        insort(flow.waiting, request, key=_turn)

    def cancel(self, owner: int, id: str) -> bool:
        """Forget a request and free its blocks; False if there is none of that name."""
        self._between_steps()
        request = self._live.get((owner, id))
        if request is None:
            return False
        self._end(request)
        return True

    def rename(self, request: Request, owner: int, id: str, attempt: int) -> bool:
        """Have a live request go by another name, which no other has; False if it is not here, as while its grammar is
        compiled."""
        if self._live.get((request.owner, request.id)) is not request:
            return False
        del self._live[request.owner, request.id]
        request.owner, request.id, request.attempt = owner, id, attempt
        self._live[owner, id] = request
        return True

    # -- the step --------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute."""
        self._between_steps()
        self._grow()
        ahead = self._ahead() if self._background else self._decoding
        budget = self.config.step_tokens - len(ahead)
        if ahead and budget > 0 and len(self._live) > len(self._decoding):
            waiting = max(0, len(self._live) - self._background - len(ahead) - len(self._parked))
            budget = rows_beside(self.step_time, len(ahead), waiting, budget, self.config.prefill_share)
            budget *= self._mixed_steps < MOST_MIXED
        self._begun, self.rests, self._drafted = [], False, False
        chunks = self._chunks(budget) if budget > 0 else []
        decoding, slots = self._decoding, self._decode_slots
        if self._background:
            # Where somebody waits for a first token, the step is no longer than it need be.
            most = 0 if chunks and not chunks[0].request.share.background else self._background_most
            behind = [request for request in decoding if request.share.background]
            self.rests = most > 0 and not ahead and self._quiet < QUIET_STEPS
            if len(behind) > most:
                decoding, slots = [*ahead, *behind[:most]], None
        if slots is None:
            slots = np.array([request.slot for request in decoding], dtype=np.int32)
            if decoding is self._decoding:
                self._decode_slots = slots
        if not chunks:
            if not len(slots):
                return None
            self._in_flight = decoding, slots, chunks
            rows = sum(1 + len(request.drafts) for request in decoding) if self.speculation.out else 0
            self._drafted = len(decoding) < rows <= self.config.step_tokens
            if self._drafted:
                return self._with_drafts(decoding, slots)
            ranks = self._ranks[: len(slots)]
            return self._step(self._last[slots], self._computed[slots], slots, logits_rows=ranks, requests=decoding)
        return self._mixed(decoding, slots, chunks)

    def complete(self, tokens: Sequence[int]) -> list[Emitted]:
        """Take the tokens chosen from the plan's logits, in their order; returns what is to be emitted: of each request
        one, and as many more as drafts of it were right.

        A token below 0 says that none could be chosen yet: the next step computes that row again. Requests that end
        free their blocks before this returns.
        """
        if self._in_flight is None:
            raise RuntimeError("complete was called without a plan; call plan first.")
        decoding, slots, chunks = self._in_flight
        self._in_flight = None
        self._mixed_steps = self._mixed_steps + 1 if chunks else 0
        if self._flows.contested:
            self._count(decoding, chunks)
        emitted: list[Emitted] = []
        block_tokens = self.pool.block_tokens
        if self._drafted:
            emitted = self._judge(decoding, tokens)
        elif decoding:
            chosen = np.array(tokens[: len(decoding)], dtype=np.int32)
            known = chosen >= 0
            self._computed[slots] += known
            self._last[slots] = np.where(known, chosen, self._last[slots])
            for number, request in enumerate(decoding):
                token = tokens[number]
                if token >= 0:
                    request.computed = computed = request.computed + 1
                    if computed % block_tokens == 0:
                        self._publish(request)
                emitted.append(self._emit(request, token, number))
        row = len(decoding)
        for chunk in chunks:
            request, _, stop = chunk
            request.prompt_scored += chunk.prompt_logprobs().rows
            ends = stop == len(request.context)
            again = ends and tokens[row] < 0
            request.computed = stop - again
            self._computed[request.slot] = stop - again
            self._publish(request)
            if not ends:
                continue
            token = tokens[row]
            if not again:
                self._prefilling.remove(request)
                self._decoding.append(request)
                self._decode_slots = None
                self._last[request.slot] = token
            emitted.append(self._emit(request, token, row))
            row += 1
        going: dict[Request, None] = {}
        looks = self.speculation.looks
        for made in emitted:
            if made.finish:
                made.request.finish = made.finish
                self._end(made.request)
            elif (looks or made.request.constraint is not None) and made.token >= 0:
                going[made.request] = None
        if going:
            self._look_ahead([request for request in going if request.slot >= 0])
        return emitted

    def abandon(self) -> None:
        """The planned step did not happen: forget it. The next plan computes the same rows again."""
        if self._in_flight is None:
            raise RuntimeError("abandon was called without a plan; call plan first.")
        self._in_flight = None

    def park(self, requests: Iterable[Request]) -> None:
        """Leave running requests out of the steps to come until `unpark`; they keep their blocks.

        Others are admitted meanwhile, unless some of these are left out for the first time: each that comes may need
        the same as they, and hold up those that run.
        """
        self._between_steps()
        left_out = list(requests)
        if left_out:
            self._open = all(request.order in self._retried for request in left_out)
        for request in left_out:
            (self._prefilling if request in self._prefilling else self._decoding).remove(request)
            self._parked.append(request)
        self._decode_slots = None

    def unpark(self) -> None:
        """Take those that were left out into the steps again."""
        self._between_steps()
        for request in self._parked:
            is_prompt = request.computed < len(request.context)
            (self._prefilling if is_prompt else self._decoding).append(request)
        self._prefilling.sort(key=_turn)
        self._retried = {request.order for request in self._parked}
        self._parked = []
        self._decode_slots = None

    def preempt_youngest(self) -> Request | None:
        """Make the running request whose turn came last give up its blocks and wait again: one in the background, else
        of the tenant that has had most, and there the youngest of the last priority; in the queue it is before those
        whose turns are later."""
        self._between_steps()
        return self._preempt_last(self._running())

    def _preempt_last(self, running: list[Request]) -> Request | None:
        if not running:
            return None
        last = max(running, key=lambda request: (*request.flow.turn(), *_turn(request)))
        self._stop_running(last)
        last.preemptions += 1
        self.preemptions += 1
        insort(last.flow.waiting, last, key=_turn)
        return last

    def _between_steps(self) -> None:
        if self._in_flight is not None:
            raise RuntimeError("A step is running; complete or abandon it first.")

    def _running(self) -> list[Request]:
        return [*self._prefilling, *self._decoding, *self._parked]

    def _running_background(self) -> list[Request]:
        return [r for r in self._running() if r.share.background] if self._background else []

    def _count(self, decoding: list[Request], chunks: list[Chunk]) -> None:
        """Note whose rows were computed."""
        for request in decoding:
            flow = request.flow
            flow.tag += flow.token * (1 + len(request.drafts) * self._drafted)
        for request, start, stop in chunks:
            flow = request.flow
            flow.tag += flow.token * (stop - start)
        if self._background:
            rows = len(decoding) + sum(chunk.rows for chunk in chunks)
            had = any(r.share.background for r in decoding) or any(c.request.share.background for c in chunks)
            self._without = 0 if had else self._without + rows

    def _ahead(self) -> list[Request]:
        """Before a step: those that generate and are not in the background, any longer; and how many rows others have
        beside theirs."""
        waiting = [flow.waiting[0] for flow in self._flows.waiting() if flow.share.background]
        first = min(self._running_background() or waiting, key=_turn, default=None)
        if first is not None and self._without >= BACKGROUND_PART * reckoned_tokens(first):
            self._promote(first)
        ahead = [request for request in self._decoding if not request.share.background]
        self._quiet = self._quiet + 1 if len(self._live) == self._background else 0
        most = self.config.step_tokens if self._quiet >= QUIET_STEPS else self.config.background_rows
        beside = min(1 + len(ahead) // BACKGROUND_BESIDE, self.config.step_tokens - len(ahead))
        self._background_most = min(most, beside) if ahead else most
        return ahead

    def _promote(self, request: Request) -> None:
        """Let one that was in the background take its turn among the others of its tenant."""
        self._without = 0
        before, request.share = request.flow, replace(request.share, background=False)
        self._background -= 1
        before.live -= 1
        flow = request.flow = self._flows.of(request.share)
        flow.live += 1
        if request.slot < 0:
            before.waiting.remove(request)
            insort(flow.waiting, request, key=_turn)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_tokens)

    def _grow(self) -> None:
        """Give every generating request the block that its next row is written to, and those of its drafts if they are
        free: nobody is preempted for a guess, now or at the next step."""
        block_tokens = self.pool.block_tokens
        for request in list(self._decoding):
            # A request preempted in this loop has no slot.
            while request.slot >= 0 and request.computed == len(request.blocks) * block_tokens:
                if self.pool.free:
                    self._take_block(request)
                else:
                    self.preempt_youngest()
        for request in self._decoding if self.speculation.out else ():
            room = len(request.blocks) * block_tokens - request.computed - 1
            while room < len(request.drafts) and self.pool.free > len(self._decoding):
                self._take_block(request)
                room += block_tokens
            request.drafts = request.drafts[:room]

    def _take_block(self, request: Request) -> None:
        self._tables[request.slot, len(request.blocks)] = block = self.pool.take()
        request.blocks.append(block)

    def _chunks(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        scored, background = self.config.prompt_logprobs_rows, self._background_most
        if self._background:
            background -= sum(request.share.background for request in self._decoding)
        for request in self._in_turn(chunks):
            if request.share.background:
                # They come last, and no more of them run than may have rows.
                budget = min(budget, background)
                if budget <= 0:
                    break
            start, most = request.computed, budget
            if request.prompt_scored < len(request.prompt):
                # At least one, so that it goes on whoever came before it.
                most = min(budget, max(1, scored))
            chunks.append(chunk := Chunk(request, start, min(len(request.context), start + most)))
            budget, scored = budget - chunk.rows, scored - chunk.prompt_logprobs().rows
            if budget <= 0:
                break
        return chunks

    def _in_turn(self, chunks: list[Chunk]) -> Iterator[Request]:
        """Those whose prompts are being computed, then those that wait, as each is asked for: who is admitted. Those in
        the background where there are no `chunks` of others."""
        flows = self._flows
        if flows.contested:
            self._prefilling.sort(key=lambda request: request.flow.turn())
            if self.waiting and (self._free_slots or self._background):
                flows.reckon(self._running())
                self._begin_between()
        for background in (False, True) if self._background else (False,):
            if chunks:
                return
            yield from [request for request in self._prefilling if request.share.background == background]
            while (flow := self._next(background=background)) is not None:
                if not self._take(flow):
                    return
                yield self._begun[-1]

    def _next(self, *, background: bool) -> Flow | None:
        """The flow whose first request may be admitted now."""
        if self._parked and not self._open:
            return None
        if background and len(self._running_background()) >= self._background_most:
            return None
        return self._flows.next(background=background)

    def _begin_between(self) -> None:
        """Admit the next request of a tenant that has none among the prompts, if it is owed more than those that have:
        else it would wait for the end of prompts, however long they are."""
        flow = self._next(background=False) if self._prefilling else None
        if flow is not None and flow.turn() < self._prefilling[0].flow.turn() and self._take(flow):
            self._prefilling.sort(key=lambda request: request.flow.turn())

    def _take(self, flow: Flow) -> bool:
        """Admit a flow's first request, at the cost of those in the background if it is not."""
        request = flow.waiting[0]
        while not self._admit(request):
            if flow.share.background or self._preempt_last(self._running_background()) is None:
                return False
        flow.waiting.popleft()
        flow.ahead += reckoned_tokens(request) * flow.token
        self._begun.append(request)
        return True

    def _admit(self, request: Request) -> bool:
        pool = self.pool
        if not self._free_slots:
            return False
        context = request.tokens(0, request.length)
        # The last token is always computed, since its logits choose the next one.
        # So is every token of a prompt whose log-probabilities are told.
        shares = pool.reuse and request.prompt_scored >= len(request.prompt)
        full = (len(context) - 1) // pool.block_tokens if shares else 0
        self._extend_digests(request, context, full)
        # One spare block for each running request: else the newcomer would soon be preempted for one of them.
        # Those in the background will rather be preempted themselves.
        spare = self.running if request.share.background else self.running - len(self._running_background())
        got = pool.acquire(request.digests[:full], self._blocks_for(len(context)), spare=spare)
        if got is None:
            return False
        request.slot = self._free_slots.pop()
        request.context = context
        request.blocks = got.blocks
        request.computed = got.reused * pool.block_tokens
        request.published = got.reused
        self.looked_up_tokens += len(context) if pool.reuse else 0
        self.reused_tokens += request.computed
        self._tables[request.slot, : len(got.blocks)] = got.blocks
        self._computed[request.slot] = request.computed
        self._may_drop[request.slot] = request.params.drop_lost_experts
        self._droppers += request.params.drop_lost_experts
        self._routed += request.params.wants_routing
        if request.forced is not None:
            self._forced[request.slot] = request.forced
        if request.inspected:
            self._inspected = {**self._inspected, request.slot: request}
        self._prefilling.append(request)
        return True

    def _mixed(self, decoding: list[Request], slots: TokenArray, chunks: list[Chunk]) -> StepPlan:
        count = len(slots)
        rows = count + sum(chunk.rows for chunk in chunks)
        token_ids = np.empty(rows, dtype=np.int32)
        positions = np.empty(rows, dtype=np.int32)
        seqs = np.empty(rows, dtype=np.int32)
        token_ids[:count] = self._last[slots]
        positions[:count] = self._computed[slots]
        seqs[:count] = slots
        logits_rows = list(range(count))
        requests = list(decoding)
        scored: list[Chunk] = []
        scored_rows: list[int] = []
        row = count
        for chunk in chunks:
            request, start, stop = chunk
            end = row + chunk.rows
            token_ids[row:end] = request.context[start:stop]
            positions[row:end] = np.arange(start, stop, dtype=np.int32)
            seqs[row:end] = request.slot
            told = chunk.prompt_logprobs()
            if told.rows:
                scored.append(told)
                first = row + told.start - 1 - start
                scored_rows += range(first, first + told.rows)
            row = end
            if stop == len(request.context):
                logits_rows.append(end - 1)
                requests.append(request)
        # A request that ends its prompt in this step joins self._decoding while `complete` walks the plan.
        self._in_flight = list(decoding), slots, chunks
        return self._step(
            token_ids,
            positions,
            seqs,
            logits_rows=np.array(logits_rows + scored_rows, dtype=np.int32),
            requests=requests,
            prompt_logprobs=scored,
            begun=self._begun,
        )

    def _with_drafts(self, decoding: list[Request], slots: TokenArray) -> StepPlan:
        """A step of those that generate, each row followed by those of its drafts."""
        counts: NDArray[np.int64] = np.array([1 + len(request.drafts) for request in decoding])
        firsts = np.cumsum(counts) - counts
        ahead: NDArray[np.int64] = np.arange(counts.sum(), dtype=np.int64) - np.repeat(firsts, counts)
        seqs = np.repeat(slots, counts)
        token_ids = self._last[seqs]
        token_ids[ahead > 0] = [token for request in decoding for token in request.drafts]
        positions = (self._computed[seqs] + ahead).astype(np.int32)
        logits_rows = np.arange(len(seqs), dtype=np.int32)
        requests = [request for request in decoding for _ in range(1 + len(request.drafts))]
        return self._step(token_ids, positions, seqs, logits_rows=logits_rows, requests=requests, ahead=ahead)

    def _step(self, token_ids: TokenArray, positions: TokenArray, seqs: TokenArray, **more: Any) -> StepPlan:
        """A step of these rows, with what its requests ask for. more: of the plan's other fields."""
        return StepPlan(
            token_ids=token_ids,
            positions=positions,
            seqs=seqs,
            block_tables=self._tables,
            drop=self._may_drop[seqs] if self._droppers else None,
            routed=self._routed > 0,
            forced=forced_rows(self._forced, seqs, positions),
            taps=self.record(seqs, self._inspected) if self._inspected else None,
            **more,
        )

    def _judge(self, decoding: list[Request], tokens: Sequence[int]) -> list[Emitted]:
        """Take of each request the tokens chosen after drafts that were right, and the first that was chosen otherwise.

        What the rows of wrong drafts have written lies beyond `computed`, in blocks of the request's own, and is
        written again before it is read.
        """
        emitted: list[Emitted] = []
        row = 0
        for request in decoding:
            drafts, right = request.drafts, 0
            emitted.append(made := self._emit(request, tokens[row], row))
            while right < len(drafts) and made.token == drafts[right] and not made.finish:
                right += 1
                emitted.append(made := self._emit(request, tokens[row + right], row + right))
            row += 1 + len(drafts)
            if taken := right + (made.token >= 0):
                request.computed += taken
                self._computed[request.slot] = request.computed
                self._last[request.slot] = request.output[-1]
                self._publish(request)
                if drafts:
                    self.speculation.judged(request, right)
        return emitted

    def _look_ahead(self, going: Sequence[Request]) -> None:
        """Choose the drafts of requests for which tokens were chosen, and have the masks of their grammars made."""
        if self.speculation.looks:
            # A row of a draft that proves wrong would be recorded like any other.
            self.speculation.draft([request for request in going if not request.inspected])
        for request in going:
            if request.constraint is not None:
                drafts = request.drafts
                request.drafts = request.constraint.look(drafts)
                if drafts and not request.drafts:
                    self.speculation.forbidden(request)

    def _emit(self, request: Request, token: int, row: int) -> Emitted:
        output = request.output
        index = len(output)
        if token < 0:
            return Emitted(request, index, -1, "", row)
        output.append(token)
        params = request.params
        if token in request.stops and index >= params.min_tokens:
            return Emitted(request, index, token, "stop", row)
        if request.constraint is not None and request.constraint.advance(token):
            return Emitted(request, index, token, "complete", row)
        return Emitted(request, index, token, "length" if index + 1 >= params.max_tokens else "", row)

    def _publish(self, request: Request) -> None:
        """Name the blocks that the last step filled, so that others can share them."""
        pool = self.pool
        # What was computed without some experts must answer for nobody else.
        if not pool.reuse or request.params.drop_lost_experts:
            return
        full = request.computed // pool.block_tokens
        self._extend_digests(request, None, full)
        for number in range(request.published, full):
            pool.publish(request.blocks[number], request.digests[number])
        request.published = full

    def _extend_digests(self, request: Request, context: TokenArray | None, full: int) -> None:
        block_tokens = self.pool.block_tokens
        digests = request.digests
        digest = digests[-1] if digests else self._root_of(request)
        for number in range(len(digests), full):
            start, stop = number * block_tokens, (number + 1) * block_tokens
            held = request.tokens(start, stop) if context is None else context[start:stop]
            digest = next_digest(digest, held.tobytes())
            digests.append(digest)

    def forget_blocks(self) -> None:
        """Let no later request reuse what was computed until now, or what those in progress compute from it."""
        self._root = next_digest(self._root, b"forgotten")
        self.pool.forget()

    def _root_of(self, request: Request) -> bytes:
        salt = request.params.cache_salt
        # As a token, the first four bytes are above every vocabulary: no salt is another request's block.
        root = next_digest(self._root, b"salt" + salt.encode()) if salt else self._root
        if request.forced_digest:
            root = next_digest(root, b"forced" + request.forced_digest)
        # Only blocks whose experts were noted as they were computed can tell them.
        return next_digest(root, b"routed") if request.params.wants_routing else root

    def _stop_running(self, request: Request) -> None:
        if request.slot < 0:
            return
        if request in self._prefilling:
            self._prefilling.remove(request)
        elif request in self._parked:
            self._parked.remove(request)
        else:
            self._decoding.remove(request)
            self._decode_slots = None
        self.pool.release(request.blocks)
        self._droppers -= request.params.drop_lost_experts
        self._routed -= request.params.wants_routing
        self._forced.pop(request.slot, None)
        if request.inspected:
            self._inspected = {slot: one for slot, one in self._inspected.items() if one is not request}
        self._free_slots.append(request.slot)
        request.blocks, request.drafts = [], []
        request.slot = -1
        request.computed = 0

    def _end(self, request: Request) -> None:
        if request.slot >= 0:
            self._stop_running(request)
        else:
            request.flow.waiting.remove(request)
        request.flow.live -= 1
        self._background -= request.share.background
        self.speculation.forget(request)
        del self._live[request.owner, request.id]
        self.on_end(request)


def _turn(request: Request) -> tuple[int, int]:
    return request.params.priority, request.order
