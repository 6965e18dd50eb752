"""Gathering: the rows that a pass computes on, out of the clients' windows into one tensor, each under its seal.

Definition: row t of client c becomes rows[c * capacity + t], as it travels: bf16, or e4m3 with its scales beside it. A
row is loaded into registers once; the sum of its words with its seal says whether it is whole, of this sequence and
from this place; exactly these registers are stored. One bad row makes its whole request INVALID. Rows that no pair asks
for were not sent, and are left as they are.

Cost: reads and writes each row once. 128 rows of 7,168 e4m3 columns: 1.9 MB, under 1 us of an H200's copy rate; three
dependent loads (a pair, its request, the row): about 3 us. Programs share out the pairs, in stretches of neighbors: a
request's pairs stand in the order of its rows, and each row is brought in at its first pair.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from experts.gpu.layout import SCALE_GROUP, RowsOut, row_warps
from experts.gpu.tables import ServerTables, check_tensor
from experts.gpu.tiles import programs
from experts.gpu.words import JOB, OUT, SERVER, SLOT, STATUS, WIRE
from p2p.device import folded, row_stamp

PROGRAMS = 4  # of each processor, so that loads of one are under way while another waits


def gather(tables: ServerTables, rows: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Bring in the rows of the requests that `poll` found.

    Args:
        rows: bf16 [clients * capacity, hidden], or float8_e4m3fn where the rows travel so.
        scales: float32 [clients * capacity, hidden / 128] in that case, else None.

    Raises:
        ValueError: a shape or type does not fit.
    """
    shape = tables.shape
    needed = (tables.clients * shape.capacity, shape.hidden)
    narrow = shape.rows_out is RowsOut.E4M3
    dtype = torch.float8_e4m3fn if narrow else torch.bfloat16
    check_tensor("rows", rows, dtype, needed)
    wanted = (torch.float32, (needed[0], needed[1] // SCALE_GROUP)) if narrow else None
    found = None if scales is None else (scales.dtype, tuple(scales.shape))
    if found != wanted:
        raise ValueError(f"scales: found {found}, needed {wanted}.")
    warps = row_warps(shape.row_words)
    gather_kernel[(programs(rows.device, PROGRAMS),)](
        tables.control, tables.jobs, tables.origin, tables.n_pairs, rows.view(torch.int32),
        rows if scales is None else scales,
        **tables.constants(gather_kernel.arg_names), THREADS=32 * warps, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def sound(total):
    """Whether a row's words and its seal agree: what is left of their sum."""
    return total == 0


@triton.jit
def gather_kernel(
    control, jobs, origin, n_pairs, rows, scales,
    HIDDEN: tl.constexpr, K: tl.constexpr, CAPACITY: tl.constexpr, ROWS_OUT: tl.constexpr, ROW_SEAL: tl.constexpr,
    ROW_STRIDE: tl.constexpr, ROWS_OFFSET: tl.constexpr, ROW_TILE: tl.constexpr,
    THREADS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """The rows of a stretch of pairs: copy each out of its window and check its seal."""
    pairs = tl.load(n_pairs)
    stretch = (pairs + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.program_id(0) * stretch
    for pair in tl.range(begin, tl.minimum(begin + stretch, pairs)):
        place = (tl.load(origin + pair) // K).to(tl.int64)
        client = place // CAPACITY
        token = (place % CAPACITY).to(tl.int32)
        job = jobs + client * JOB.WORDS
        first = place != tl.load(origin + pair - 1, mask=pair > 0, other=-K) // K
        if first & (tl.load(job + JOB.STATUS) == STATUS.OK):
            at = tl.load(job + JOB.REQUEST) + SLOT.PAYLOAD + ROWS_OFFSET + place % CAPACITY * ROW_STRIDE
            index = tl.arange(0, ROW_TILE)
            row = tl.multiple_of(at.to(tl.pointer_type(tl.uint32)), 64)
            row_words: tl.constexpr = HIDDEN // 2 if ROWS_OUT == OUT.BF16 else HIDDEN // 4 + HIDDEN // WIRE.SCALE_GROUP
            # Volatile: loaded once, and what is stored is what is summed.
            words = tl.load(row + index, mask=index < row_words, other=0, volatile=True)
            lane = tl.arange(0, THREADS)
            seal = tl.load(
                (at + ROW_SEAL + lane * 0).to(tl.pointer_type(tl.uint64)), mask=lane == 0, other=0, volatile=True
            )
            total = tl.sum(folded(words, index, token), axis=0) - tl.sum(seal, axis=0)
            total += row_stamp(tl.load(job + JOB.SEQUENCE), tl.load(control + SERVER.INCARNATION), token)
            # For `reply` to look at: here some threads of a program might see it, and others not yet.
            tl.store(job + JOB.BAD, 1, mask=sound(total) == 0)
            stored: tl.constexpr = HIDDEN // 2 if ROWS_OUT == OUT.BF16 else HIDDEN // 4
            tl.store(rows + place * stored + index, words, mask=index < stored)
            if ROWS_OUT != OUT.BF16:
                group = index - HIDDEN // 4
                value = words.to(tl.float32, bitcast=True)
                tl.store(
                    scales + place * (HIDDEN // WIRE.SCALE_GROUP) + group,
                    value,
                    mask=(group >= 0) & (index < row_words),
                )
