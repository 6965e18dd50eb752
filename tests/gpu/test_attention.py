"""Promises of paged attention: right values over any paging, and a row's bits its own however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from eaas.gpu import attention as kernels
from eaas.gpu.attention import PARTIALS, Sums, Work, attention, attention_reference, plan_work
from eaas.gpu.norm_rope import ShapeInvalid
from tests.gpu.aot import SHARED_LIMIT_BYTES, compile_kernel
from tests.gpu.device import DEVICE, distance, fresh_seed, poisoned, same_bits

SPLIT_KEYS = 128  # as long splits as a GPU has cost the interpreter minutes


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SPLIT_KEYS", SPLIT_KEYS)


class World:
    """A cache with some sequences in it, their blocks in any order, and a query for every position."""

    def __init__(self, seed: int, lengths: list[int], q_heads: int, kv_heads: int, dim: int, block_tokens: int):
        generator = torch.Generator().manual_seed(seed)
        self.sizes = (q_heads, kv_heads, dim, block_tokens)
        counts = [-(-length // block_tokens) for length in lengths]
        blocks = sum(counts) + 2
        order = torch.randperm(blocks, generator=generator).tolist()
        self.tables = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
        # What no sequence wrote is NaN: a kernel that reads there shows it.
        shape = (blocks, kv_heads, block_tokens, dim)
        self.keys, self.values = (poisoned(*shape, dtype=torch.bfloat16) for _ in range(2))
        self.queries = []
        for seq, length in enumerate(lengths):
            for number in range(counts[seq]):
                self.tables[seq, number] = order.pop()
            for position in range(length):
                block = int(self.tables[seq, position // block_tokens])
                for cache in (self.keys, self.values):
                    row = torch.randn(kv_heads, dim, generator=generator)
                    cache[block, :, position % block_tokens] = row.to(torch.bfloat16)
            rows = torch.randn(length, q_heads, dim, generator=generator) * 2
            self.queries.append(rows.to(torch.bfloat16))
        self.tables = self.tables.to(DEVICE)

    def run(
        self, rows: list[tuple[int, int]], *, window: int = 0, partials: int = PARTIALS, programs: int = 3
    ) -> tuple[Tensor, Work]:
        """Attention of (sequence, position) rows in one step, and how it was cut."""
        q_heads, kv_heads, dim, _ = self.sizes
        seqs, positions = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
        work = plan_work(positions, seqs, q_heads // kv_heads, partials)
        out = poisoned(len(rows), q_heads, dim, dtype=torch.bfloat16)
        made = Sums.make(q_heads, dim, DEVICE, max(partials, 1))
        sums = Sums(values=made.values, scales=made.scales, programs=programs)
        places, numbers, items, merges = (
            torch.from_numpy(array).to(DEVICE) for array in (positions, seqs, work.items, work.merges)
        )
        if not len(merges):
            merges = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
        counts = [torch.tensor([len(x)], dtype=torch.int32, device=DEVICE) for x in (work.items, work.merges)]
        queries = torch.stack([self.queries[seq][position] for seq, position in rows]).to(DEVICE)
        attention(
            queries, self.keys, self.values, places, numbers, self.tables, items, counts[0], merges, counts[1],
            sums, out, window=window,
        )  # fmt: skip
        return out, work

    def wanted(self, rows: list[tuple[int, int]], window: int = 0) -> Tensor:
        seqs, positions = (torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in zip(*rows, strict=True))
        queries = torch.stack([self.queries[seq][position] for seq, position in rows]).to(DEVICE)
        return attention_reference(queries, self.keys, self.values, positions, seqs, self.tables, window)


def rows_of(seq: int, begin: int, end: int) -> list[tuple[int, int]]:
    return [(seq, position) for position in range(begin, end)]


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "block_tokens", "window"),
    [
        pytest.param(6, 2, 32, 16, 0, marks=pytest.mark.smoke),
        (3, 3, 10, 16, 0),
        (8, 1, 16, 32, 9),
        (4, 2, 64, 128, 70),
    ],
)
def test_prefill_and_decode_equal_the_definition(
    q_heads: int, kv_heads: int, dim: int, block_tokens: int, window: int
) -> None:
    seed = fresh_seed()
    world = World(seed, [70, 1, 131], q_heads, kv_heads, dim, block_tokens)
    rows = [*rows_of(0, 0, 70), (1, 0), (2, 130)]
    out, _ = world.run(rows, window=window)
    off = distance(out, world.wanted(rows, window))
    assert off < 5e-3, f"off by {off}, seed {seed}"


@pytest.mark.parametrize("window", [0, 150])
def test_a_row_has_the_same_bits_alone_in_a_batch_in_chunks_and_however_it_is_cut(window: int) -> None:
    seed = fresh_seed()
    length = 2 * SPLIT_KEYS + 37
    world = World(seed, [length, SPLIT_KEYS + 1, 20], 4, 2, 16, 16)
    tail = length - 21
    whole, work = world.run(rows_of(0, tail, length), window=window)
    assert (work.items[:, 4] == -1).all(), "rows of a chunk are computed whole"
    assert distance(whole, world.wanted(rows_of(0, tail, length), window)) < 5e-3, f"seed {seed}"
    for row in (tail, tail + 20):
        for partials in (PARTIALS, 0):
            alone, work = world.run([(0, row)], window=window, partials=partials)
            assert len(work.merges) == (partials > 0)
            assert same_bits(alone[0], whole[row - tail]), f"row {row}, {partials} partials, seed {seed}"
    for cut in (1, 7, 16):
        parts = [world.run(rows_of(0, a, b), window=window)[0] for a, b in ((tail, tail + cut), (tail + cut, length))]
        assert same_bits(torch.cat(parts), whole), f"cut at {cut}, seed {seed}"
    batch = [(2, 19), (1, SPLIT_KEYS), *rows_of(0, tail, tail + 5), (1, 3), (0, length - 1)]
    mixed, work = world.run(batch, window=window, programs=5)
    assert len(work.merges) == 2
    for place, (seq, position) in enumerate(batch):
        alone, _ = world.run([(seq, position)], window=window, programs=1)
        assert same_bits(mixed[place], alone[0]), f"{seq} {position}, seed {seed}"


def test_work_covers_each_row_once_and_the_longest_first() -> None:
    seed = fresh_seed()
    source = np.random.default_rng(seed)
    for _ in range(200):
        pieces, seqs, positions = int(source.integers(1, 9)), [], []
        for seq in range(pieces):
            length = int(source.choice([1, 1, 1, 5, 40]))
            begin = int(source.integers(0, 1200))
            seqs += [seq] * length
            positions += range(begin, begin + length)
        group, partials = int(source.choice([1, 3, 8, 64])), int(source.choice([0, 6, 40]))
        rows = np.array(positions, dtype=np.int32)
        work = plan_work(rows, np.array(seqs, dtype=np.int32), group, partials)
        seen: dict[int, list[int]] = {}
        for first, size, begin, end, partial, *_ in work.items.tolist():
            assert size * group <= kernels.QUERIES
            assert len({seqs[row] for row in range(first, first + size)}) == 1
            for row in range(first, first + size):
                if partial < 0:
                    assert begin == 0
                    assert end > positions[row] // SPLIT_KEYS, f"seed {seed}"
                    assert row not in seen
                    seen[row] = []
                else:
                    assert end == begin + 1
                    seen.setdefault(row, []).append(partial)
        assert sorted(seen) == list(range(len(rows))), f"seed {seed}"
        merged = {row: list(range(first, first + count)) for row, first, count, _ in work.merges.tolist()}
        assert merged == {row: places for row, places in seen.items() if places}, f"seed {seed}"
        assert all(len(places) == positions[row] // SPLIT_KEYS + 1 for row, places in merged.items())
        assert sum(map(len, merged.values())) <= partials


def test_more_query_heads_than_a_program_takes_are_refused() -> None:
    one = np.zeros(1, dtype=np.int32)
    with pytest.raises(ShapeInvalid, match="65 query heads share a key head; 1 to 64"):
        plan_work(one, one, 65)


ATTENTION = {
    "queries": "*bf16", "keys": "*bf16", "values": "*bf16", "positions": "*i32", "seqs": "*i32", "tables": "*i32",
    "items": "*i32", "n_items": "*i32", "sums": "*fp32", "scales": "*fp32", "out": "*bf16", "table_blocks": "i32",
    "reach": "i32", "scale": "fp32",
}  # fmt: skip


@pytest.mark.parametrize(("group", "kv_heads", "dim"), [(8, 4, 128), (4, 4, 64), (1, 16, 128)])
def test_attention_compiles_for_an_h200_to_warp_group_products(group: int, kv_heads: int, dim: int) -> None:
    built = compile_kernel(
        "eaas.gpu.attention", "attention_kernel", ATTENTION,
        {
            "KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "DIM_PAD": dim, "BLOCK_TOKENS": 16,
            "ROWS": 64 // group, "M": 64, "TILE": 64, "SPLIT": 512, "WORDS": 8, "INTERPRET": False,
        },
    )  # fmt: skip
    assert built.wgmma
    assert built.spills == 0
    # Two programs of each multiprocessor: while one waits for its tile, the other computes.
    assert 2 * built.shared_bytes <= SHARED_LIMIT_BYTES
    assert 2 * 128 * built.registers <= 65536
    assert "cp.async.cg.shared.global" in built.ptx, "keys and values are not loaded ahead"


def test_merging_compiles_for_an_h200_without_spills() -> None:
    built = compile_kernel(
        "eaas.gpu.attention", "merge_kernel",
        {"merges": "*i32", "n_merges": "*i32", "sums": "*fp32", "scales": "*fp32", "out": "*bf16"},
        {"KV_HEADS": 4, "GROUP": 8, "DIM": 128, "GROUP_PAD": 8, "DIM_PAD": 128, "INTERPRET": False},
    )  # fmt: skip
    assert built.spills == 0
