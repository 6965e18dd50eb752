"""Grouping: pairs of equal weight slot together, in pieces of bounded size, found on the device.

Definition, for slots s[0..n): the valid pairs (s >= 0) sorted by (slot, pair) make `order`. Each run of one slot is
cut from its beginning into groups of at most `tile` pairs; group g is order[start[g] : start[g] + count[g]], all
of slot[g], and groups stand in the order of their starts. With a table, s[p] = table[ids[p]].

Cost: a few integers a pair: what counts is launches. At most 256 pairs: one, of one program that compares all
pairs with all, about 3 us on an H200. More: two, about 6 us for 1,024 pairs and 30 us for 65,536; the slots are
counted by atomics, and the last program to finish adds them up, SCAN at a time and only where a pair was counted: a
pass is of few layers, whose experts mostly lie side by side. Then each slot's pairs are collected by one program.
Neither waits for another program, and neither order nor groups depend on which ran first.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from experts.gpu.tiles import programs
from p2p.device import is_last

SMALL = 256  # pairs that one program compares with each other
SCAN = 512  # slots that one program adds up at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """What `group` finds, in device memory of fixed size.

    Attributes:
        tile: Most pairs of one group.
        slots: Weight slots there are.
        order: int32 [pairs].
        slot, start, count: int32 [groups].
        n_groups: int32 [1].
        marks: Scratch, int32 [SMALL].
        runs: Scratch, int32 [4, slots there can be]: slot, first place, pairs and first group of each run.
        tally: Scratch, int32 [slots up to whole SCANs + 1]: pairs of each slot, all zero between calls; the last is
            the number of runs.
        touched: Scratch, int32 [SCANs of slots], all zero between calls: whether a pair was counted there.
        arrived: Scratch, int64 [1], zero between calls.
    """

    tile: int
    slots: int
    order: torch.Tensor
    slot: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    n_groups: torch.Tensor
    marks: torch.Tensor
    runs: torch.Tensor
    tally: torch.Tensor
    touched: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def allocate(cls, *, pairs: int, slots: int, tile: int, device: torch.device | str) -> Groups:
        """Room for `pairs` pairs over `slots` weight slots.

        Raises:
            ValueError: no pairs or slots, or groups of none.
        """
        if min(pairs, slots, tile) < 1:
            raise ValueError(f"{pairs} pairs over {slots} slots in groups of {tile}; each is at least 1.")
        runs, scans = min(pairs, slots), triton.cdiv(slots, SCAN)
        whole, device = runs + pairs // tile, torch.device(device)

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            tile=tile, slots=slots, order=integers(pairs), slot=integers(whole), start=integers(whole),
            count=integers(whole), n_groups=integers(1), marks=integers(SMALL), runs=integers(4, runs),
            tally=integers(scans * SCAN + 1), touched=integers(scans), arrived=integers(1).long(),
        )  # fmt: skip


def group_reference(slots: torch.Tensor, tile: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The definition: `order`, and (slot, start, count) of each group, for int32 [n] on any device."""
    found = slots.tolist()
    order = sorted((p for p, s in enumerate(found) if s >= 0), key=lambda p: (found[p], p))
    groups: list[tuple[int, int, int]] = []
    for place, pair in enumerate(order):
        slot, start, count = groups[-1] if groups else (-1, 0, 0)
        if slot == found[pair] and count < tile:
            groups[-1] = (slot, start, count + 1)
        else:
            groups.append((found[pair], place, 1))
    return order, groups


def group(
    slots: torch.Tensor, n: torch.Tensor, out: Groups, *, per_row: int = 1, table: torch.Tensor | None = None
) -> None:
    """Group pairs by weight slot.

    Args:
        slots: int32 [P], below out.slots; negative: nobody's. With a table: its indices, negative likewise.
        n: int32 [1], on the device: rows that there are; the first n * per_row of the P pairs count.
        out: Allocated for at least P pairs.
        table: int32, slot by index; negative: not held.

    Raises:
        ValueError: a shape or type does not fit.
    """
    pairs = slots.numel()
    for name, tensor in (("slots", slots), ("n", n), ("table", slots if table is None else table)):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} with strides {tensor.stride()}; contiguous int32 is needed.")
    if not 0 < pairs <= out.order.numel():
        raise ValueError(f"{pairs} pairs, and groups with room for {out.order.numel()}. Allocate them for {pairs}.")
    read = slots if table is None else table
    shape = {"TILE": out.tile, "TABLE": table is not None, "enable_fp_fusion": False}
    if pairs <= SMALL:
        _group_small[(1,)](
            slots, n, read, out.order, out.slot, out.start, out.count, out.n_groups, out.marks, pairs, per_row,
            WIDTH=SMALL, CHUNK=16, num_warps=8, **shape,
        )  # fmt: skip
        return
    n_runs = out.runs.shape[1]
    scans = len(out.touched)
    _count[(triton.cdiv(pairs, 1024),)](
        slots, n, read, out.tally, out.touched, out.arrived, out.runs, out.n_groups, pairs, per_row, scans, n_runs,
        SCAN=SCAN, SCANS=triton.next_power_of_2(scans), WIDTH=1024, num_warps=8, **shape,
    )  # fmt: skip
    _collect[(min(n_runs, programs(slots.device, 8)),)](
        slots, n, read, out.tally, out.runs, out.order, out.slot, out.start, out.count, pairs, per_row, scans, n_runs,
        SCAN=SCAN, WIDTH=min(2048, triton.next_power_of_2(pairs)), num_warps=4, **shape,
    )  # fmt: skip


@triton.jit
def _slot_of(slots, there, table, pair, TABLE: tl.constexpr):
    """Slots of `pair`, and -1 for what is not there."""
    slot = tl.load(slots + pair, mask=there, other=-1)
    if TABLE:
        slot = tl.load(table + slot, mask=slot >= 0, other=-1)
    return slot


@triton.jit
def _group_small(
    slots, n, table, order, group_slot, group_start, group_count, n_groups, marks, pairs, per_row,
    TILE: tl.constexpr, TABLE: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    there = tl.minimum(tl.load(n) * per_row, pairs)
    pair = tl.arange(0, WIDTH)
    slot = _slot_of(slots, pair < there, table, pair, TABLE)
    inside, place, total = tl.zeros_like(slot), tl.zeros_like(slot), tl.zeros_like(slot)
    # In chunks: all pairs by all would not fit into registers.
    for base in tl.range(0, there, CHUNK):
        other = base + tl.arange(0, CHUNK)
        others = _slot_of(slots, other < there, table, other, TABLE)
        same = slot[:, None] == others[None, :]
        earlier = same & (other[None, :] < pair[:, None])
        below = (others[None, :] < slot[:, None]) & (others >= 0)[None, :]
        inside += tl.sum(earlier.to(tl.int32), axis=1)
        place += tl.sum((below | earlier).to(tl.int32), axis=1)
        total += tl.sum(same.to(tl.int32), axis=1)
    held = slot >= 0
    tl.store(order + place, pair, mask=held)
    tl.store(marks + place, tl.where(inside % TILE == 0, tl.minimum(total - inside, TILE), 0), mask=held)
    tl.debug_barrier()
    # Now by place: a group begins where a mark is.
    sorted = pair < tl.sum(held.to(tl.int32), axis=0)
    count = tl.load(marks + pair, mask=sorted, other=0)
    first = (count > 0).to(tl.int32)
    g = tl.cumsum(first) - 1
    slot = _slot_of(slots, sorted, table, tl.load(order + pair, mask=sorted, other=0), TABLE)
    tl.store(group_slot + g, slot, mask=count > 0)
    tl.store(group_start + g, pair, mask=count > 0)
    tl.store(group_count + g, count, mask=count > 0)
    tl.store(n_groups, tl.sum(first, axis=0))


@triton.jit
def _count(
    slots, n, table, tally, touched, arrived, runs, n_groups, pairs, per_row, scans, n_runs,
    TILE: tl.constexpr, TABLE: tl.constexpr, SCAN: tl.constexpr, SCANS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    slot = _slot_of(slots, pair < tl.minimum(tl.load(n) * per_row, pairs), table, pair, TABLE)
    tl.atomic_add(tally + slot, 1, mask=slot >= 0, sem="relaxed")
    tl.store(touched + slot // SCAN, 1, mask=slot >= 0)
    if is_last(arrived, tl.num_programs(0)):
        runs_before = 0
        pairs_before = 0
        groups_before = 0
        scan = tl.arange(0, SCANS)
        # From L2: what the other programs wrote never passes through this processor's L1.
        left = tl.load(touched + scan, mask=scan < scans, other=0, cache_modifier=".cg")
        for _ in tl.range(0, tl.sum(left)):
            first = tl.min(tl.where(left > 0, scan, SCANS))
            left = tl.where(scan == first, 0, left)
            s = first * SCAN + tl.arange(0, SCAN)
            count = tl.load(tally + s, cache_modifier=".cg")
            used = (count > 0).to(tl.int32)
            pieces = (count + TILE - 1) // TILE
            run = runs_before + tl.cumsum(used) - used
            tl.store(runs + run, s, mask=count > 0)
            tl.store(runs + n_runs + run, pairs_before + tl.cumsum(count) - count, mask=count > 0)
            tl.store(runs + 2 * n_runs + run, count, mask=count > 0)
            tl.store(runs + 3 * n_runs + run, groups_before + tl.cumsum(pieces) - pieces, mask=count > 0)
            # Where a block has more threads than numbers, several hold the same one: all read before one clears.
            tl.debug_barrier()
            tl.store(tally + s, tl.zeros_like(count))
            runs_before += tl.sum(used)
            pairs_before += tl.sum(count)
            groups_before += tl.sum(pieces)
        tl.debug_barrier()
        tl.store(touched + scan, tl.zeros_like(scan), mask=scan < scans)
        tl.store(n_groups, groups_before)
        tl.store(tally + scans * SCAN, runs_before)


@triton.jit
def _collect(
    slots, n, table, tally, runs, order, group_slot, group_start, group_count, pairs, per_row, scans, n_runs,
    TILE: tl.constexpr, TABLE: tl.constexpr, SCAN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    there = tl.minimum(tl.load(n) * per_row, pairs)
    for run in tl.range(tl.program_id(0), tl.load(tally + scans * SCAN), tl.num_programs(0)):
        wanted, place = tl.load(runs + run), tl.load(runs + n_runs + run)
        total, first = tl.load(runs + 2 * n_runs + run), tl.load(runs + 3 * n_runs + run)
        piece = tl.arange(0, WIDTH)
        for base in tl.range(0, total, WIDTH * TILE):
            at = base + piece * TILE
            g = first + base // TILE + piece
            tl.store(group_slot + g, wanted + 0 * piece, mask=at < total)
            tl.store(group_start + g, place + at, mask=at < total)
            tl.store(group_count + g, tl.minimum(total - at, TILE), mask=at < total)
        for base in tl.range(0, there, WIDTH):
            pair = base + tl.arange(0, WIDTH)
            mine = (_slot_of(slots, pair < there, table, pair, TABLE) == wanted).to(tl.int32)
            tl.store(order + place + tl.cumsum(mine) - mine, pair, mask=mine > 0)
            place += tl.sum(mine)
