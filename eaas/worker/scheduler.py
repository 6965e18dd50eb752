"""Which rows the next engine step computes. Pure: one `plan` and one `complete` (or `abandon`) make a step.

Continuous batching: every request that generates has one row in every step; what is left of the step's token
budget goes to prompts, in chunks, in order of admission; then to waiting requests, by priority and in order of
arrival, as long as their blocks can be had. When blocks run out, the youngest running request of the last priority
gives up its own and waits again: what it has emitted stays; prompt and output are computed again later, with
the same bits.

A row costs no Python object: the state that rows need lies in arrays indexed by slot, and a plan of requests
that generate is two gathers.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eaas.worker.blocks import BlockPool, next_digest, root_digest
from eaas.worker.request import Refused, Request, TokenArray
from eaas.worker.steps import Chunk, Emitted, Flight, Judged, Plan, judged_of, rows_to_judge


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one worker.

    Args:
        max_model_len: Most tokens of prompt and output together.
        step_tokens: Most rows in one step.
        max_running: Most requests with blocks; `step_tokens` caps it, so that each has a row in every step.
        max_waiting: Requests in the queue; one more is refused as overloaded.
        judged_rows: Prompt tokens whose log-probabilities are computed in one step, about: each needs a row of logits.
        fingerprint: Names the model's weights and dtype; blocks are only shared under the same one.

    Raises:
        ValueError: a limit is below 1.
    """

    max_model_len: int
    step_tokens: int = 512
    max_running: int = 256
    max_waiting: int = 4096
    fingerprint: str = ""
    judged_rows: int = 512

    def __post_init__(self) -> None:
        for name in ("max_model_len", "step_tokens", "max_running", "max_waiting", "judged_rows"):
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
        self._live: dict[tuple[int, str], Request] = {}
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []
        self._parked: list[Request] = []
        # Those that were taken into the steps again last, by their order; whether others come in beside the parked.
        self._retried: set[int] = set()
        self._open = True
        self._arrivals = 0
        self._free_slots = list(range(slots - 1, -1, -1))
        self._tables: TokenArray = np.zeros((slots, table_blocks), dtype=np.int32)
        self._last: TokenArray = np.zeros(slots, dtype=np.int32)
        self._computed: TokenArray = np.zeros(slots, dtype=np.int32)
        self._ranks: TokenArray = np.arange(slots, dtype=np.int32)
        self._may_drop = np.zeros(slots, np.uint8)
        self._droppers = self._routed = 0
        self._decode_slots: TokenArray | None = None
        self._in_flight: Flight | None = None

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
        return len(self._waiting)

    def live(self) -> Iterable[Request]:
        """Every request that has not ended."""
        return self._live.values()

    def queue(self) -> list[Request]:
        """Requests that hold no blocks, the next to be admitted first. Any thread."""
        return list(self._waiting)

    def prefills(self) -> list[Request]:
        """Requests whose prompts are being computed. Any thread."""
        return list(self._prefilling)

    def get(self, owner: int, id: str) -> Request | None:
        """The live request of that name."""
        return self._live.get((owner, id))

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            Refused: it can never be served here, or not now (overloaded); nothing is kept.
        """
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
        if len(self._waiting) >= config.max_waiting:
            raise Refused(
                "overloaded",
                f"{len(self._waiting)} requests wait here, which is the limit; try again later.",
                retryable=True,
            )
        self._arrivals += 1
        request.order = self._arrivals
        self._live[request.owner, request.id] = request
        insort(self._waiting, request, key=_turn)

    def cancel(self, owner: int, id: str) -> bool:
        """Forget a request and free its blocks; False if there is none of that name."""
        self._between_steps()
        request = self._live.get((owner, id))
        if request is None:
            return False
        self._end(request)
        return True

    # -- the step --------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to compute."""
        self._between_steps()
        self._grow()
        slots = self._decode_slots
        if slots is None:
            slots = self._decode_slots = np.array([r.slot for r in self._decoding], dtype=np.int32)
        running = len(self._prefilling)
        chunks = self._chunks(self.config.step_tokens - len(slots))
        if not chunks:
            if not len(slots):
                return None
            self._in_flight = Flight(self._decoding, slots, chunks)
            return Plan(
                token_ids=self._last[slots],
                positions=self._computed[slots],
                seqs=slots,
                block_tables=self._tables,
                logits_rows=self._ranks[: len(slots)],
                requests=self._decoding,
                slots=slots,
                drop=self._droppable(slots),
                routed=self._routed > 0,
            )
        return self._mixed(slots, chunks, self._prefilling[running:])

    def complete(self, tokens: Sequence[int]) -> list[Emitted]:
        """Take the tokens chosen from the plan's logits, in their order; returns what is to be emitted, as many.

        A token below 0 says that none could be chosen yet: the next step computes that row again. Requests that end
        free their blocks before this returns.
        """
        if self._in_flight is None:
            raise RuntimeError("complete was called without a plan; call plan first.")
        decoding, slots, chunks = self._in_flight
        self._in_flight = None
        emitted: list[Emitted] = []
        block_tokens = self.pool.block_tokens
        ended: list[Request] = []
        if decoding:
            chosen = np.array(tokens[: len(decoding)], dtype=np.int32)
            known = chosen >= 0
            self._computed[slots] += known
            self._last[slots] = np.where(known, chosen, self._last[slots])
            for request, token in zip(decoding, tokens, strict=False):
                if token < 0:
                    emitted.append(Emitted(request, len(request.output), -1, ""))
                    continue
                request.computed = computed = request.computed + 1
                if computed % block_tokens == 0:
                    self._publish(request)
                step = self._emit(request, token)
                emitted.append(step)
                if step.finish:
                    ended.append(request)
        ranked = len(decoding)
        for request, start, stop in chunks:
            first, last = judged_of(request, start, stop)
            request.judged += last - first
            ends = stop == len(request.context)
            again = ends and tokens[ranked] < 0
            request.computed = stop - again
            self._computed[request.slot] = stop - again
            self._publish(request)
            if not ends:
                continue
            token = tokens[ranked]
            ranked += 1
            if again:
                emitted.append(Emitted(request, len(request.output), -1, ""))
                continue
            self._prefilling.remove(request)
            self._decoding.append(request)
            self._decode_slots = None
            self._last[request.slot] = token
            step = self._emit(request, token)
            emitted.append(step)
            if step.finish:
                ended.append(request)
        for request in ended:
            self._end(request)
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
        """Make the running request whose turn came last give up its blocks and wait again: the youngest of the last
        priority; in the queue it is before those whose turns are later."""
        self._between_steps()
        running = [*self._prefilling, *self._decoding, *self._parked]
        if not running:
            return None
        youngest = max(running, key=_turn)
        self._stop_running(youngest)
        youngest.preemptions += 1
        self.preemptions += 1
        insort(self._waiting, youngest, key=_turn)
        return youngest

    # -- inside ----------------------------------------------------------------------------------------------

    def _between_steps(self) -> None:
        if self._in_flight is not None:
            raise RuntimeError("A step is running; complete or fail it first.")

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_tokens)

    def _grow(self) -> None:
        """Give every generating request the block that its next row is written to."""
        block_tokens = self.pool.block_tokens
        for request in list(self._decoding):
            # A request preempted in this loop has no slot.
            while request.slot >= 0 and request.computed == len(request.blocks) * block_tokens:
                if self.pool.free:
                    self._tables[request.slot, len(request.blocks)] = block = self.pool.take()
                    request.blocks.append(block)
                else:
                    self.preempt_youngest()

    def _chunks(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        judged = 0
        for request in self._prefilling:
            if budget <= 0:
                return chunks
            taken = self._take_chunk(request, budget, judged, chunks)
            budget, judged = budget - taken, judged + rows_to_judge(chunks[-1])
        if self._parked and not self._open:
            return chunks
        while budget > 0 and self._waiting and self._free_slots and self._admit(self._waiting[0]):
            taken = self._take_chunk(self._waiting.popleft(), budget, judged, chunks)
            budget, judged = budget - taken, judged + rows_to_judge(chunks[-1])
        return chunks

    def _take_chunk(self, request: Request, budget: int, judged: int, chunks: list[Chunk]) -> int:
        start = request.computed
        if request.judged < len(request.prompt):
            # At least one, so that it goes on whoever came before it.
            budget = min(budget, max(1, self.config.judged_rows - judged))
        stop = min(len(request.context), start + budget)
        chunks.append(Chunk(request, start, stop))
        return stop - start

    def _admit(self, request: Request) -> bool:
        pool = self.pool
        context = request.tokens(0, request.length)
        # The last token is always computed, since its logits choose the next one.
        # So is every token of a prompt that is judged.
        shares = pool.reuse and request.judged >= len(request.prompt)
        full = (len(context) - 1) // pool.block_tokens if shares else 0
        self._extend_digests(request, context, full)
        # One spare block for each running request: else the newcomer would soon be preempted for one of them.
        got = pool.acquire(request.digests[:full], self._blocks_for(len(context)), spare=self.running)
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
        self._prefilling.append(request)
        return True

    def _mixed(self, slots: TokenArray, chunks: list[Chunk], begun: list[Request]) -> Plan:
        count = len(slots)
        rows = count + sum(stop - start for _, start, stop in chunks)
        token_ids = np.empty(rows, dtype=np.int32)
        positions = np.empty(rows, dtype=np.int32)
        seqs = np.empty(rows, dtype=np.int32)
        token_ids[:count] = self._last[slots]
        positions[:count] = self._computed[slots]
        seqs[:count] = slots
        logits_rows = list(range(count))
        requests = list(self._decoding)
        judged: list[Judged] = []
        judged_rows: list[int] = []
        row = count
        for request, start, stop in chunks:
            end = row + stop - start
            token_ids[row:end] = request.context[start:stop]
            positions[row:end] = np.arange(start, stop, dtype=np.int32)
            seqs[row:end] = request.slot
            first, last = judged_of(request, start, stop)
            if first < last:
                judged.append(Judged(request, first, last))
                judged_rows += range(row + first - 1 - start, row + last - 1 - start)
            row = end
            if stop == len(request.context):
                logits_rows.append(end - 1)
                requests.append(request)
        # A request that ends its prompt in this step joins self._decoding while `complete` walks the plan.
        self._in_flight = Flight(list(self._decoding), slots, chunks)
        return Plan(
            token_ids=token_ids,
            positions=positions,
            seqs=seqs,
            block_tables=self._tables,
            logits_rows=np.array(logits_rows + judged_rows, dtype=np.int32),
            requests=requests,
            slots=np.array([request.slot for request in requests], dtype=np.int32),
            drop=self._droppable(seqs),
            judged=judged,
            begun=begun,
            routed=self._routed > 0,
        )

    def _droppable(self, seqs: TokenArray) -> NDArray[np.uint8] | None:
        return self._may_drop[seqs] if self._droppers else None

    def _emit(self, request: Request, token: int) -> Emitted:
        output = request.output
        index = len(output)
        output.append(token)
        params = request.params
        if token in request.stops and index >= params.min_tokens:
            return Emitted(request, index, token, "stop")
        if request.constraint is not None and request.constraint.advance(token):
            return Emitted(request, index, token, "complete")
        return Emitted(request, index, token, "length" if index + 1 >= params.max_tokens else "")

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
        self._free_slots.append(request.slot)
        request.blocks = []
        request.slot = -1
        request.computed = 0

    def _end(self, request: Request) -> None:
        if request.slot >= 0:
            self._stop_running(request)
        else:
            self._waiting.remove(request)
        del self._live[request.owner, request.id]


def _turn(request: Request) -> tuple[int, int]:
    return request.params.priority, request.order
