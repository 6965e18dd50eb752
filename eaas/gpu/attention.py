"""Paged attention of queries over cached keys and values: decode, prefill chunks and any mix of them by one kernel.

Definition, for a row at position p of its sequence and each query head: softmax over its keys 0..p (or the last
`window` of them) of q . k / sqrt(head_dim), times the values. In exactly this order, whoever else is in the batch:
    tiles    TILE_KEYS keys, counted from position 0: scores by one matrix instruction; running maximum; weights
             2^(score - maximum), summed in float32, and rounded to bfloat16 for the product with the values
    splits   SPLIT_KEYS keys, counted from position 0: each begins with nothing summed
    a row    its splits in rising order: sum * 2^(m - M) + split * 2^(m' - M), by two products and one addition
A split's sums may go through memory to `merge_kernel` or stay in registers: the same operations on the same numbers.
Keys that a row does not see weigh exactly zero, and adding them changes no bit. One compiled kernel with one tile
shape serves prefill and decode, so a row's bits are the same in both.

A program has QUERIES = 64 query vectors of one key head: the heads that share it, of as many consecutive rows of one
sequence as fit. Its work comes as items, lists on the device: [first row, rows, first split, last split + 1, partial].
Whole rows have partial -1; an item of one split of one row writes its sums to that place. A fixed number of programs
goes through however many items there are, so one captured graph serves every length.

Cost: each item reads its keys and values once: 4 * kv_heads * head_dim bytes a position and layer, the floor of decode
(batch 256, 8,192 positions, 4 key heads of 128: 4.3 GB, 1.0 ms at 4.3 TB/s). Prefill: 4 * q_heads * head_dim flops a
query and key (8,192 rows of 32 heads of 128, causal: 550 GFLOP, 0.7 ms at 790 TFLOP/s). Partial sums: 4 * (head_dim
+ 2) bytes a head and split written and read, 3% of the keys and values of 8 heads each.
"""
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from eaas.gpu.norm_rope import ShapeInvalid, check
from experts.gpu.tiles import add_product, inlined, programs, to_bfloat16
from p2p.device import INTERPRET

QUERIES = 64  # query vectors of a program: the smallest M of a warp group's matrix instruction
TILE_KEYS = 64
SPLIT_KEYS = 512
ITEM_WORDS = 8  # five in use: an item begins at a multiple of 32 bytes
PARTIALS = 2048  # splits of rows that may go through memory in one step; rows beyond are computed whole
PROGRAMS_PER_SM = 2
FAR = 1 << 30  # a window that hides nothing
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step's attention is made of.

    Attributes:
        items: int32 [n, ITEM_WORDS]: first row, rows, first split, last split + 1, partial or -1.
        merges: int32 [m, 4]: row, its first partial, its splits, 0.
    """

    items: np.ndarray
    merges: np.ndarray


def rows_per_item(group: int) -> int:
    """Rows whose queries a program takes together, `group` query heads sharing a key head.

    Raises:
        ShapeInvalid: more query heads than a program takes.
    """
    if not 1 <= group <= QUERIES:
        raise ShapeInvalid(f"{group} query heads share a key head; 1 to {QUERIES} are possible.")
    return QUERIES // group


def plan_work(positions: np.ndarray, seqs: np.ndarray, group: int, partials: int = PARTIALS) -> Work:
    """Cut a step's rows into items, the longest first.

    Rows of one sequence that follow each other are taken together; a row that stands alone is cut at its splits as
    long as there are places for their sums, the longest rows first. How rows are cut changes no bit.

    Args:
        positions, seqs: int32 [rows], as in a StepPlan.
        group: Query heads of a key head.
        partials: Places for sums.
    """
    rows, most = len(positions), rows_per_item(group)
    # Where a sequence begins, or a row does not follow the one before.
    begins = np.ones(rows, dtype=bool)
    begins[1:] = (seqs[1:] != seqs[:-1]) | (positions[1:] != positions[:-1] + 1)
    starts = np.flatnonzero(begins)
    lengths = np.diff(np.append(starts, rows))
    if lengths.max(initial=0) > 1 and most > 1:
        counts = -(-lengths // most)
        first = np.repeat(starts, counts)
        number = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
        first, size = first + number * most, np.minimum(np.repeat(lengths, counts) - number * most, most)
    else:
        first, size = np.arange(rows), np.ones(rows, dtype=np.int64)
    splits = positions[first + size - 1] // SPLIT_KEYS + 1
    order = np.argsort(-splits, kind="stable")
    first, size, splits = first[order], size[order], splits[order]
    alone = (size == 1) & (splits > 1)
    cut = alone & (np.cumsum(np.where(alone, splits, 0)) <= partials)
    whole = ~cut
    parts = splits[cut]
    total, base = int(parts.sum()), np.cumsum(parts) - parts
    items = np.zeros((int(whole.sum()) + total, ITEM_WORDS), dtype=np.int32)
    kept = items[: len(items) - total]
    kept[:, 0], kept[:, 1], kept[:, 3], kept[:, 4] = first[whole], size[whole], splits[whole], -1
    pieces = items[len(items) - total :]
    pieces[:, 0], pieces[:, 1] = np.repeat(first[cut], parts), 1
    pieces[:, 2] = np.arange(total) - np.repeat(base, parts)
    pieces[:, 3], pieces[:, 4] = pieces[:, 2] + 1, np.arange(total)
    merges = np.zeros((len(parts), 4), dtype=np.int32)
    merges[:, 0], merges[:, 1], merges[:, 2] = first[cut], base, parts
    return Work(items=items, merges=merges)


def attention_reference(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, seqs: Tensor, tables: Tensor, window: int,
) -> Tensor:  # fmt: skip
    """What `attention` writes, by its definition, in double; arguments as there."""
    rows, q_heads, dim = queries.shape
    _, kv_heads, block_tokens, _ = keys.shape
    out = torch.zeros(rows, q_heads, dim, dtype=torch.float64, device=queries.device)
    for row in range(rows):
        last = int(positions[row])
        seen = torch.arange(max(0, last + 1 - window) if window else 0, last + 1, device=queries.device)
        blocks = tables[int(seqs[row])].long()[seen // block_tokens]
        k, v = (cache[blocks, :, seen % block_tokens].double() for cache in (keys, values))
        k, v = (part.repeat_interleave(q_heads // kv_heads, 1) for part in (k, v))
        scores = torch.einsum("hd,nhd->hn", queries[row].double(), k) * dim**-0.5
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
    return out


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Room for the sums of splits that go through memory, and how many programs share the work.

    Attributes:
        values: float32 [partials, q_heads, head_dim].
        scales: float32 [partials, q_heads, 2]: maximum (as a power of two's exponent) and sum of the weights.
    """

    values: Tensor
    scales: Tensor
    programs: int

    @classmethod
    def make(cls, q_heads: int, head_dim: int, device: torch.device | str, partials: int = PARTIALS) -> Sums:
        """Room for `partials` splits on a device."""
        device = torch.device(device)
        return cls(
            values=torch.empty(partials, q_heads, head_dim, dtype=torch.float32, device=device),
            scales=torch.empty(partials, q_heads, 2, dtype=torch.float32, device=device),
            programs=programs(device, PROGRAMS_PER_SM),
        )


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, seqs: Tensor, tables: Tensor,
    items: Tensor, n_items: Tensor, merges: Tensor, n_merges: Tensor, sums: Sums, out: Tensor, *,
    window: int = 0,
) -> None:  # fmt: skip
    """Attend: `out` of every row that an item names.

    Args:
        queries: bfloat16 [rows, q_heads, head_dim].
        keys, values: bfloat16 [blocks, kv_heads, block_tokens, head_dim]; block_tokens divides TILE_KEYS or is a
            multiple of it.
        positions, seqs: int32 [rows].
        tables: int32 [sequences, blocks].
        items, merges: As `plan_work` makes them: int32 [at least n_items, ITEM_WORDS], [at least n_merges, 4].
        n_items, n_merges: int32 [1].
        out: bfloat16 [rows, q_heads, head_dim], written.
        window: Keys that a row sees, itself included; 0: all.

    Raises:
        ShapeInvalid: another type or shape.
    """
    rows, q_heads, dim = queries.shape
    blocks, kv_heads, block_tokens, _ = keys.shape
    check("queries", queries, torch.bfloat16, rows, q_heads, dim)
    check("out", out, torch.bfloat16, rows, q_heads, dim)
    for name, cache in (("keys", keys), ("values", values)):
        check(name, cache, torch.bfloat16, blocks, kv_heads, block_tokens, dim)
    for name, row in (("positions", positions), ("seqs", seqs)):
        check(name, row, torch.int32, rows)
    check("tables", tables, torch.int32, None, tables.shape[1])
    check("items", items, torch.int32, None, ITEM_WORDS)
    check("merges", merges, torch.int32, None, 4)
    check("n_items", n_items, torch.int32, 1)
    check("n_merges", n_merges, torch.int32, 1)
    check("sums.values", sums.values, torch.float32, None, q_heads, dim)
    check("sums.scales", sums.scales, torch.float32, len(sums.values), q_heads, 2)
    group = q_heads // kv_heads
    rows_per_item(group)
    if q_heads % kv_heads or block_tokens % 16:
        raise ShapeInvalid(
            f"{q_heads} query heads on {kv_heads} key heads, blocks of {block_tokens} positions: the first must be a "
            "multiple of the second, the third of 16."
        )
    dim_pad = max(16, triton.next_power_of_2(dim))
    attention_kernel[(sums.programs,)](
        queries, keys, values, positions, seqs, tables, items, n_items, sums.values, sums.scales, out,
        tables.shape[1], window or FAR, dim**-0.5 * LOG2_E,
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, DIM_PAD=dim_pad, BLOCK_TOKENS=block_tokens,
        ROWS=rows_per_item(group), M=QUERIES, TILE=TILE_KEYS, SPLIT=SPLIT_KEYS, WORDS=ITEM_WORDS,
        INTERPRET=INTERPRET, num_warps=8 if dim_pad > 128 else 4, num_stages=2 if dim_pad > 128 else 3,
        enable_fp_fusion=False,
    )  # fmt: skip
    merge_kernel[(min(rows, len(merges)), kv_heads)](
        merges, n_merges, sums.values, sums.scales, out,
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, GROUP_PAD=triton.next_power_of_2(group), DIM_PAD=dim_pad,
        INTERPRET=INTERPRET, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@inlined
def join(total, weight, maximum, more, more_weight, more_maximum):
    """Sums of consecutive splits: the earlier ones [heads, head_dim], [heads], [heads], and one more."""
    raised = tl.maximum(maximum, more_maximum)
    # Where nothing was seen yet both are minus infinity, whose difference is no number.
    base = tl.where(raised == float("-inf"), 0.0, raised)
    before, after = tl.exp2(maximum - base), tl.exp2(more_maximum - base)
    total = total * before[:, None] + more * after[:, None]
    return total, weight * before + more_weight * after, raised


@triton.jit(do_not_specialize_on_alignment=["positions", "seqs"])
def attention_kernel(
    queries, keys, values, positions, seqs, tables, items, n_items, sums, scales, out,
    table_blocks, reach, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    WORDS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Programs take (item, key head) in turn; within one, splits in order, within those, tiles in order."""
    vector = tl.arange(0, M)
    column = tl.arange(0, DIM_PAD)
    key = tl.arange(0, TILE)
    inside = column < DIM
    count = tl.load(n_items) * KV_HEADS
    for work in range(tl.program_id(0), count, tl.num_programs(0)):
        item = items + (work // KV_HEADS) * WORDS
        kv_head = work % KV_HEADS
        first_row = tl.load(item)
        rows = tl.load(item + 1)
        split_begin = tl.load(item + 2)
        split_end = tl.load(item + 3)
        partial = tl.load(item + 4)
        mine = (vector < rows * GROUP) & (vector < ROWS * GROUP)
        row = (first_row + vector // GROUP).to(tl.int64)
        # Rows of an item stand at consecutive positions.
        position = tl.load(positions + first_row)
        last = tl.where(mine, position + vector // GROUP, -1)
        highest = position + rows - 1
        lowest = tl.maximum(position - reach + 1, 0)
        table = tables + tl.load(seqs + first_row).to(tl.int64) * table_blocks
        head = kv_head * GROUP + vector % GROUP
        at = (row * (KV_HEADS * GROUP) + head)[:, None] * DIM + column[None, :]
        written = mine[:, None] & inside[None, :]
        q = tl.load(queries + at, mask=written, other=0.0)

        total = tl.zeros([M, DIM_PAD], tl.float32)
        weight = tl.zeros([M], tl.float32)
        maximum = tl.full([M], float("-inf"), tl.float32)
        # Splits before the window weigh nothing for any row of the item.
        for split in range(tl.maximum(split_begin, lowest // SPLIT), split_end):
            part = tl.zeros([M, DIM_PAD], tl.float32)
            part_weight = tl.zeros([M], tl.float32)
            part_maximum = tl.full([M], float("-inf"), tl.float32)
            begin = tl.maximum(split * SPLIT, lowest // TILE * TILE)
            end = tl.minimum((split + 1) * SPLIT, highest + 1)
            for base in range(begin, end, TILE):
                here = base + key
                known = here <= highest
                block = tl.load(table + here // BLOCK_TOKENS, mask=known, other=0)
                slot = (block * KV_HEADS + kv_head) * BLOCK_TOKENS + here % BLOCK_TOKENS
                cell = slot[:, None] * DIM + column[None, :]
                # Places beyond the last row hold another request's values, or nothing yet.
                there = known[:, None] & inside[None, :]
                k = tl.load(keys + cell, mask=there, other=0.0)
                v = tl.load(values + cell, mask=there, other=0.0)
                scores = add_product(q, tl.trans(k), tl.zeros([M, TILE], tl.float32), INTERPRET)
                seen = (here[None, :] <= last[:, None]) & (here[None, :] > last[:, None] - reach)
                scores = tl.where(seen, scores * scale, float("-inf"))
                raised = tl.maximum(part_maximum, tl.max(scores, 1))
                # Rows that have seen nothing yet: minus infinity less itself is no number.
                safe = tl.where(raised == float("-inf"), 0.0, raised)
                weights = tl.exp2(scores - safe[:, None])
                factor = tl.exp2(part_maximum - safe)
                part_weight = part_weight * factor + tl.sum(weights, 1)
                part = part * factor[:, None]
                rounded = to_bfloat16(weights, INTERPRET)
                part = add_product(rounded, v, part, INTERPRET)
                part_maximum = raised
            total, weight, maximum = join(total, weight, maximum, part, part_weight, part_maximum)
        if partial < 0:
            # A vector that is nobody's has no weight; it is not written.
            weight = tl.where(mine, weight, 1.0)
            tl.store(out + at, to_bfloat16(total / weight[:, None], INTERPRET), mask=written)
        else:
            to = partial.to(tl.int64) * (KV_HEADS * GROUP) + head
            tl.store(sums + to[:, None] * DIM + column[None, :], total, mask=written)
            tl.store(scales + to * 2, maximum, mask=mine)
            tl.store(scales + to * 2 + 1, weight, mask=mine)


@triton.jit
def merge_kernel(
    merges, n_merges, sums, scales, out,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, GROUP_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A program joins the splits of one row and key head."""
    merge = tl.program_id(0)
    if merge < tl.load(n_merges):
        row = tl.load(merges + merge * 4).to(tl.int64)
        first = tl.load(merges + merge * 4 + 1).to(tl.int64)
        count = tl.load(merges + merge * 4 + 2)
        member = tl.arange(0, GROUP_PAD)
        column = tl.arange(0, DIM_PAD)
        mine = member < GROUP
        inside = mine[:, None] & (column < DIM)[None, :]
        head = tl.program_id(1) * GROUP + member
        total = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        weight = tl.zeros([GROUP_PAD], tl.float32)
        maximum = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        for split in range(count):
            at = (first + split) * (KV_HEADS * GROUP) + head
            more = tl.load(sums + at[:, None] * DIM + column[None, :], mask=inside, other=0.0)
            more_maximum = tl.load(scales + at * 2, mask=mine, other=float("-inf"))
            more_weight = tl.load(scales + at * 2 + 1, mask=mine, other=0.0)
            total, weight, maximum = join(total, weight, maximum, more, more_weight, more_maximum)
        at = (row * (KV_HEADS * GROUP) + head)[:, None] * DIM + column[None, :]
        weight = tl.where(mine, weight, 1.0)
        tl.store(out + at, to_bfloat16(total / weight[:, None], INTERPRET), mask=inside)
