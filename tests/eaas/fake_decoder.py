"""A model without weights: what it says next is a hash of the tokens that it finds through the block tables.

It keeps token ids where a real decoder keeps keys and values, so a wrong block, position or order changes the
logits just as it would there.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from eaas.worker.blocks import BlockPool

VOCAB = 97
BLOCK_TOKENS = 4


def logits_of(history: Sequence[int]) -> np.ndarray:
    """float32 [VOCAB], a function of the tokens alone."""
    key = zlib.crc32(np.asarray(history, dtype=np.int32).tobytes())
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(VOCAB, dtype=np.float32)


def next_token(history: Sequence[int]) -> int:
    """The greedy choice."""
    return int(np.argmax(logits_of(history)))


def expected_output(prompt: Sequence[int], max_tokens: int, stops: frozenset[int] = frozenset()) -> list[int]:
    """What a request alone on a perfect machine emits."""
    history, output = list(prompt), []
    while len(output) < max_tokens:
        token = next_token(history)
        history.append(token)
        output.append(token)
        if token in stops:
            break
    return output


class FakeDecoder:
    """The decoder's interface. `before_step` may raise in place of a step."""

    def __init__(self, kv_blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.block_tokens = block_tokens
        self.kv = np.full((kv_blocks, block_tokens), -1, dtype=np.int32)
        self.before_step: Callable[[float], object] | None = None
        self.rows_per_step: list[int] = []
        self.logits: Callable[[Any], np.ndarray] = logits_of
        self.vocab = VOCAB

    def step(self, plan: Any, deadline_s: float) -> np.ndarray:
        """float32 [m, vocab]; as the real one writes what all rows keep before any row looks back."""
        if self.before_step is not None:
            self.before_step(deadline_s)
        count = len(plan.token_ids)
        if not len(plan.positions) == len(plan.seqs) == count > 0:
            raise ValueError("the plan's rows disagree")
        self.rows_per_step.append(count)
        blocks = plan.block_tables[plan.seqs, plan.positions // self.block_tokens]
        cells = blocks * self.block_tokens + plan.positions % self.block_tokens
        if len(set(cells.tolist())) != count:
            raise ValueError("two rows write the same place")
        self.kv.reshape(-1)[cells] = plan.token_ids
        out = np.empty((len(plan.logits_rows), self.vocab), dtype=np.float32)
        for number, row in enumerate(plan.logits_rows):
            length = int(plan.positions[row]) + 1
            table = plan.block_tables[plan.seqs[row], : -(-length // self.block_tokens)]
            out[number] = self.logits(self.kv[table].reshape(-1)[:length])
        return out


def problems(pool: BlockPool, held: Iterable[Sequence[int]]) -> list[str]:
    """Everything that is wrong with a pool, given the blocks of every live sequence; empty when all is well."""
    expected = [0] * pool.blocks
    for block in itertools.chain.from_iterable(held):
        expected[block] += 1
    found = [
        f"block {block}: {counted} references, {expected[block]} holders"
        for block, counted in enumerate(pool._references)
        if counted != expected[block]
    ]
    if len(set(pool._blank)) != len(pool._blank):
        found.append("a block is twice in the blank list")
    if set(pool._blank) & set(pool._cached):
        found.append("a block is both blank and cached")
    unheld = {block for block in range(pool.blocks) if expected[block] == 0}
    if unheld != set(pool._blank) | set(pool._cached):
        found.append("the free lists are not the unheld blocks")
    if any(pool._digests[block] is None for block in pool._cached):
        found.append("a cached block has no digest")
    named = {digest: block for block, digest in enumerate(pool._digests) if digest is not None}
    if named != pool._by_digest:
        found.append("digests and blocks disagree")
    return found


class Watched:
    """A decoder; `look` is called with (request, index, float32 [vocab]) for each token to be chosen by its logits."""

    def __init__(self, decoder: Any, look: Callable[[Any, int, np.ndarray], None]) -> None:
        self._decoder, self._look = decoder, look

    def step(self, plan: Any, deadline_s: float) -> np.ndarray:
        logits = self._decoder.step(plan, deadline_s)
        for request, row in zip(plan.requests, logits, strict=False):
            self._look(request, len(request.output), row)
        return logits
