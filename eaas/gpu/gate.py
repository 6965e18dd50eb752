"""The gate: logits of all experts for each row, and the choice of its top k.

Definition (`tests.eaas.reference.gate_reference`): logits = norm @ weight.T; scores by softmax or sigmoid; the choice
by scores, plus a correction where there is one, among the experts of the best groups where there are groups; ties go to
the lowest index; weights are the chosen scores, divided by their sum where asked for, times a factor.

The norm comes as two bfloat16 rows whose sum has 16 bits of it (`norm_rope.add_norm`): near ties between experts are
decided as float32 would. Logits are summed over PART_COLUMNS columns at a time, high before low in each K tile, and
the parts in rising order in float32: one order for every row count, and enough programs to read the weights quickly
when there is one row. The experts are the M of the matrix instruction, rows its N.

Cost: 2 * experts * hidden bytes of weights, 4 * hidden bytes a row, 8 * experts * parts a row for the parts, written
and read. 128 experts of 2048 columns: 0.5 MB, 0.2 us at 4.3 TB/s and so bound by two launches; 8,192 rows: 34 MB of
norms, 67 MB of parts, 24 us.
"""
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eaas.gpu.norm_rope import ShapeInvalid, check
from eaas.model.spec import MoeSpec, Score
from experts.gpu.tiles import add_product
from p2p.device import INTERPRET

PART_COLUMNS = 512
K_TILE = 64
EXPERT_TILE = 64
FEW_ROWS = 16  # up to this many, a program takes 16 rows, else 64


def parts_of(hidden: int) -> int:
    """In how many parts the logits of rows of that width are summed."""
    return -(-hidden // PART_COLUMNS)


def gate(
    norm: Tensor, low: Tensor, weight: Tensor, correction: Tensor | None, moe: MoeSpec, parts: Tensor,
    ids: Tensor, weights: Tensor, n_rows: Tensor,
) -> None:  # fmt: skip
    """Choose the experts of the first n_rows rows.

    Args:
        norm, low: bfloat16 [rows, hidden].
        weight: bfloat16 [experts, hidden].
        correction: float32 [experts], or None.
        parts: float32, scratch of at least parts_of(hidden) * rows * experts elements.
        ids: int32 [rows, top_k], written: in falling order of choice.
        weights: float32 [rows, top_k], written.
        n_rows: int32 [1].

    Raises:
        ShapeInvalid: another type or shape.
    """
    rows, hidden = norm.shape
    count = parts_of(hidden)
    check("norm", norm, torch.bfloat16, rows, hidden)
    check("low", low, torch.bfloat16, rows, hidden)
    check("weight", weight, torch.bfloat16, moe.experts, hidden)
    check("ids", ids, torch.int32, rows, moe.top_k)
    check("weights", weights, torch.float32, rows, moe.top_k)
    check("n_rows", n_rows, torch.int32, 1)
    if correction is not None:
        check("correction", correction, torch.float32, moe.experts)
    if parts.dtype != torch.float32 or parts.numel() < count * rows * moe.experts:
        raise ShapeInvalid(
            f"parts is {parts.dtype} of {parts.numel()} elements; float32 of {count * rows * moe.experts} is needed."
        )
    row_tile = 16 if rows <= FEW_ROWS else 64
    grid = (triton.cdiv(moe.experts, EXPERT_TILE), count, triton.cdiv(rows, row_tile))
    score_kernel[grid](
        norm, low, weight, parts, n_rows, rows, hidden, moe.experts,
        PART=PART_COLUMNS, K_TILE=K_TILE, M_TILE=EXPERT_TILE, N_TILE=row_tile, INTERPRET=INTERPRET,
        num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    padded = triton.next_power_of_2(moe.experts)
    choose_kernel[(rows,)](
        parts, correction, ids, weights, n_rows, rows, moe.scaling_factor,
        PARTS=count, EXPERTS=moe.experts, PAD=padded, TOP_K=moe.top_k,
        TOP_PAD=triton.next_power_of_2(moe.top_k), SIGMOID=moe.score is Score.SIGMOID, NORMALIZE=moe.norm_topk,
        GROUPS=moe.groups, GROUPS_PAD=triton.next_power_of_2(moe.groups), GROUPS_KEPT=moe.groups_topk,
        num_warps=max(1, padded // 256), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def score_kernel(
    norm, low, weight, parts, n_rows, rows, hidden, experts,
    PART: tl.constexpr, K_TILE: tl.constexpr, M_TILE: tl.constexpr, N_TILE: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """A program sums one part of the logits of M_TILE experts and N_TILE rows."""
    count = tl.load(n_rows)
    first = tl.program_id(2) * N_TILE
    if first < count:
        expert = tl.program_id(0) * M_TILE + tl.arange(0, M_TILE)
        row = first + tl.arange(0, N_TILE)
        begin = tl.program_id(1) * PART
        total = tl.zeros([M_TILE, N_TILE], tl.float32)
        for base in range(begin, tl.minimum(begin + PART, hidden), K_TILE):
            column = base + tl.arange(0, K_TILE)
            known = column < hidden
            of_row = row.to(tl.int64)[:, None] * hidden + column[None, :]
            there = (row < count)[:, None] & known[None, :]
            w = tl.load(
                weight + expert[:, None] * hidden + column[None, :],
                mask=(expert < experts)[:, None] & known[None, :],
                other=0.0,
            )
            high = tl.load(norm + of_row, mask=there, other=0.0)
            rest = tl.load(low + of_row, mask=there, other=0.0)
            total = add_product(w, tl.trans(high), total, INTERPRET)
            total = add_product(w, tl.trans(rest), total, INTERPRET)
        # [parts, rows, experts]: the choice reads a row's experts side by side.
        at = (tl.program_id(1) * rows + row).to(tl.int64)[None, :] * experts + expert[:, None]
        tl.store(parts + at, total, mask=(expert < experts)[:, None] & (row < count)[None, :])


@triton.jit(do_not_specialize=["rows"])
def choose_kernel(
    parts, correction, ids, weights, n_rows, rows, factor,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_PAD: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
):  # fmt: skip
    """A program chooses for one row."""
    row = tl.program_id(0)
    if row < tl.load(n_rows):
        expert = tl.arange(0, PAD)
        known = expert < EXPERTS
        logits = tl.zeros([PAD], tl.float32)
        for part in range(PARTS):
            at = (part * rows + row).to(tl.int64) * EXPERTS + expert
            logits += tl.load(parts + at, mask=known, other=0.0)
        if SIGMOID:
            scores = 1.0 / (1.0 + tl.exp(-logits))
        else:
            logits = tl.where(known, logits, float("-inf"))
            scores = tl.exp(logits - tl.max(logits, 0))
            scores = scores / tl.sum(scores, 0)
        choice = scores
        if correction is not None:
            choice += tl.load(correction + expert, mask=known, other=0.0)
        # What is no number can still be chosen, after all else: the weights say NaN, and no id is out of range.
        least = -3.0e38
        choice = tl.where(choice == choice, choice, least)
        choice = tl.where(known, choice, float("-inf"))
        if GROUPS > 1:
            size: tl.constexpr = EXPERTS // GROUPS
            group = tl.arange(0, GROUPS_PAD)
            ranks = tl.full([GROUPS_PAD], float("-inf"), tl.float32)
            for number in tl.static_range(GROUPS):
                members = tl.where(expert // size == number, choice, float("-inf"))
                best = tl.max(members, 0)
                # As the models were trained: sigmoid scores rank a group by its two best, softmax scores by its best.
                if SIGMOID and size > 1:
                    at = tl.argmax(members, 0, tie_break_left=True)
                    best += tl.max(tl.where(expert == at, float("-inf"), members), 0)
                ranks = tl.where(group == number, best, ranks)
            kept = expert < 0
            for _ in tl.static_range(GROUPS_KEPT):
                at = tl.argmax(ranks, 0, tie_break_left=True)
                kept = kept | (expert // size == at)
                ranks = tl.where(group == at, float("-inf"), ranks)
            choice = tl.where(kept | (expert >= EXPERTS), choice, least)
        place = tl.arange(0, TOP_PAD)
        chosen = tl.zeros([TOP_PAD], tl.int32)
        shares = tl.zeros([TOP_PAD], tl.float32)
        total = 0.0
        for number in tl.static_range(TOP_K):
            best = tl.argmax(choice, 0, tie_break_left=True)
            share = tl.sum(tl.where(expert == best, scores, 0.0), 0)
            choice = tl.where(expert == best, float("-inf"), choice)
            chosen = tl.where(place == number, best, chosen)
            shares = tl.where(place == number, share, shares)
            total += share
        if NORMALIZE:
            if SIGMOID:
                total += 1e-20
            shares = shares / total
        to = row.to(tl.int64) * TOP_K + place
        tl.store(ids + to, chosen, mask=place < TOP_K)
        tl.store(weights + to, shares * factor, mask=place < TOP_K)
