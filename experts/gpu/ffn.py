"""Grouped SwiGLU FFN of bfloat16 experts: rows of many experts in two launches, at decode and at prefill.

Definition, for a pair p of row x [H] and weight slot s, all sums in float32 in the order of `tiles.products`:
    act[p] = bf16(silu(gate[s] @ x) * (up[s] @ x))   [I], silu(g) = g / (1 + exp(-g))
    out[p] = down[s] @ act[p]                        [H], float32, or rounded once to bf16

Cost: 6 * P * H * I flops; 6 * H * I bytes of weights for each expert that is used. On an H200 (4.3 TB/s copied,
790 TFLOP/s) at H 7168, I 2048: 20.5 us for each expert used, so 164 us for one token's 8; from about 2,900 pairs on
16 experts the flops are the larger term: 7.3 ms for 8192 tokens' 65,536 pairs.

A program takes two tiles of weights at once: gate and up of the same columns, or two neighbouring ones of down.
Narrow groups (at most 64 pairs) stream weights through many small stages, two programs on a processor; wide ones
(128 pairs) use 256 rows of weights and eight warps. Which of these a pair falls in changes none of its bits.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from experts.gpu.group import Groups
from experts.gpu.tiles import (
    BLOCK,
    K_TILE,
    block_offsets,
    k_tiles_of,
    place_of,
    products,
    programs,
    to_bfloat16,
)
from experts.gpu.weights import ExpertWeights
from p2p.device import INTERPRET

_BLOCK = tl.constexpr(BLOCK)
_K_TILE = tl.constexpr(K_TILE)


def ffn_reference(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The definition in double: x [m, H], gate and up [I, H], down [H, I], all bf16, to float64 [m, H]."""
    g, u = x.double() @ gate.double().T, x.double() @ up.double().T
    act = (g / (1 + torch.exp(-g)) * u).to(torch.float32).to(torch.bfloat16)
    return act.double() @ down.double().T


def grouped_ffn(
    rows: torch.Tensor,
    row_of: torch.Tensor,
    groups: Groups,
    weights: ExpertWeights,
    act: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Run every grouped pair through its expert. Captured in a graph, it follows what the device then finds.

    Args:
        rows: bf16 [R, H].
        row_of: int32 [P]: pair to row.
        groups: From `group`, of pairs below P.
        act: Scratch, bf16 [P, weights.act_width].
        out: float32 or bf16 [P, H] by pair. Rows of pairs in no group are left as they are.

    Raises:
        ValueError: a shape or type does not fit.
    """
    pairs = row_of.numel()
    check_shapes(rows, row_of, weights.hidden, torch.bfloat16, out, weights.hidden, groups)
    if act.shape != (pairs, weights.act_width) or act.dtype != torch.bfloat16 or not act.is_contiguous():
        raise ValueError(
            f"act is {act.dtype} {tuple(act.shape)}; bfloat16 {(pairs, weights.act_width)}, contiguous, is needed."
        )
    gate_up(rows, row_of, groups, weights, act)
    down(groups, weights, act, out)


def gate_up(
    rows: torch.Tensor, row_of: torch.Tensor, groups: Groups, weights: ExpertWeights, act: torch.Tensor
) -> None:
    """The first half of `grouped_ffn`, which checks what it is given: act, in the order of the groups."""
    shape = launch_shape(groups.tile)
    grid = (programs(rows.device, shape.pop("per_processor")),)
    _gate_up[grid](
        rows, row_of, groups.order, groups.slot, groups.start, groups.count, groups.n_groups,
        weights.gate_up, act, k_tiles_of(weights.hidden),
        HIDDEN=weights.hidden, INTERMEDIATE=weights.act_width, WIDEST=groups.tile, INTERPRET=INTERPRET, **shape,
    )  # fmt: skip


def down(groups: Groups, weights: ExpertWeights, act: torch.Tensor, out: torch.Tensor) -> None:
    """The second half of `grouped_ffn`, which checks what it is given: act to the pairs' rows."""
    shape = launch_shape(groups.tile)
    grid = (programs(act.device, shape.pop("per_processor")),)
    _down[grid](
        act, groups.order, groups.slot, groups.start, groups.count, groups.n_groups,
        weights.down, out, k_tiles_of(weights.act_width),
        HIDDEN=weights.hidden, INTERMEDIATE=weights.act_width, WIDEST=groups.tile, INTERPRET=INTERPRET, **shape,
    )  # fmt: skip


def check_shapes(
    rows: torch.Tensor,
    row_of: torch.Tensor,
    width: int,
    rows_type: torch.dtype,
    out: torch.Tensor,
    hidden: int,
    groups: Groups,
) -> None:
    """What all grouped products ask of their arguments.

    Raises:
        ValueError: a shape or type does not fit.
    """
    pairs = row_of.numel()
    if rows.dim() != 2 or rows.shape[1] != width or rows.dtype != rows_type or not rows.is_contiguous():
        raise ValueError(
            f"Rows are {rows.dtype} {tuple(rows.shape)}; {rows_type} [rows, {width}], contiguous, are needed."
        )
    if row_of.dtype != torch.int32 or row_of.dim() != 1 or not row_of.is_contiguous():
        raise ValueError(
            f"row_of is {row_of.dtype} {tuple(row_of.shape)}; contiguous int32 [pairs] is needed."
        )
    if out.shape != (pairs, hidden) or out.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}; float32 or bfloat16 {(pairs, hidden)} is needed."
        )
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}; pass a contiguous tensor.")
    if groups.order.numel() < pairs:
        raise ValueError(
            f"The groups hold {groups.order.numel()} pairs, row_of {pairs}. Allocate groups for {pairs}."
        )


def launch_shape(tile: int) -> dict[str, int]:
    """How the kernels are launched for groups of at most `tile` pairs: the same for every model.

    A stage holds 2 * FEATURES rows of weights of 128 bytes, and the tokens. Of 227 KB shared memory: narrow,
    two programs of 6 stages of 16 + 2 KB, or 4 of 16 + 8; wide, one program of 4 stages of 32 + 16 KB.
    """
    if tile <= 64:
        return {
            "FEATURES": 64, "BAND": 4, "NARROW_STAGES": 6, "WIDE_STAGES": 4, "per_processor": 2, "num_warps": 4,
            "num_stages": 3, "enable_fp_fusion": False,
        }  # fmt: skip
    return {
        "FEATURES": 128, "BAND": 16, "NARROW_STAGES": 5, "WIDE_STAGES": 4, "per_processor": 1, "num_warps": 8,
        "num_stages": 3, "enable_fp_fusion": False,
    }  # fmt: skip


@triton.jit
def _gate_up(
    rows,
    row_of,
    order,
    group_slot,
    group_start,
    group_count,
    n_groups,
    weights,
    act,
    k_tiles,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDEST: tl.constexpr,
    BAND: tl.constexpr,
    NARROW_STAGES: tl.constexpr,
    WIDE_STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    feature_tiles: tl.constexpr = (INTERMEDIATE + FEATURES - 1) // FEATURES
    groups = tl.load(n_groups)
    for t in tl.range(tl.program_id(0), groups * feature_tiles, tl.num_programs(0)):
        g, f = place_of(t, groups, feature_tiles, BAND)
        slot, start, count = tl.load(group_slot + g), tl.load(group_start + g), tl.load(group_count + g)
        # fmt: off
        if WIDEST == 16:
            _gate_up_tile(rows, row_of, order, slot, start, count, weights, act, f, k_tiles,
                          HIDDEN, INTERMEDIATE, FEATURES, 16, NARROW_STAGES, INTERPRET)
        elif WIDEST == 64:
            if count <= 16:
                _gate_up_tile(rows, row_of, order, slot, start, count, weights, act, f, k_tiles,
                              HIDDEN, INTERMEDIATE, FEATURES, 16, NARROW_STAGES, INTERPRET)
            elif count <= 32:
                _gate_up_tile(rows, row_of, order, slot, start, count, weights, act, f, k_tiles,
                              HIDDEN, INTERMEDIATE, FEATURES, 32, WIDE_STAGES, INTERPRET)
            else:
                _gate_up_tile(rows, row_of, order, slot, start, count, weights, act, f, k_tiles,
                              HIDDEN, INTERMEDIATE, FEATURES, 64, WIDE_STAGES, INTERPRET)
        else:
            if count <= 32:
                _gate_up_tile(rows, row_of, order, slot, start, count, weights, act, f, k_tiles,
                              HIDDEN, INTERMEDIATE, FEATURES, 32, NARROW_STAGES, INTERPRET)
            elif count <= 64:
                _gate_up_tile(rows, row_of, order, slot, start, count, weights, act, f, k_tiles,
                              HIDDEN, INTERMEDIATE, FEATURES, 64, WIDE_STAGES, INTERPRET)
            else:
                _gate_up_tile(rows, row_of, order, slot, start, count, weights, act, f, k_tiles,
                              HIDDEN, INTERMEDIATE, FEATURES, WIDEST, WIDE_STAGES, INTERPRET)
        # fmt: on


@triton.jit
def _gate_up_tile(
    rows,
    row_of,
    order,
    slot,
    start,
    count,
    weights,
    act,
    f,
    k_tiles,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    RUN: tl.constexpr = (HIDDEN + _K_TILE - 1) // _K_TILE * _K_TILE * _BLOCK
    BLOCKS: tl.constexpr = INTERMEDIATE // _BLOCK * 2
    token = tl.arange(0, TOKENS)
    live = token < count
    pair = tl.load(order + start + token, mask=live, other=0)
    row = tl.load(row_of + pair, mask=live, other=0).to(tl.int64)
    # Blocks of gate and up alternate.
    first = f * (FEATURES // _BLOCK) * 2
    gate, up = products(
        weights + slot.to(tl.int64) * (BLOCKS * RUN),
        block_offsets(first, 2, BLOCKS - 2, RUN, FEATURES, _K_TILE),
        block_offsets(first + 1, 2, BLOCKS - 1, RUN, FEATURES, _K_TILE),
        rows, row * HIDDEN, live, k_tiles, HIDDEN, _K_TILE, True, FEATURES, TOKENS, STAGES, INTERPRET,
    )  # fmt: skip
    value = to_bfloat16(gate / (1.0 + tl.exp(-gate)) * up, INTERPRET)
    feature = f * FEATURES + tl.arange(0, FEATURES)
    place = (start + token).to(tl.int64) * INTERMEDIATE
    tl.store(
        act + place[None, :] + feature[:, None],
        value,
        mask=live[None, :] & (feature < INTERMEDIATE)[:, None],
    )


@triton.jit
def _down(
    act,
    order,
    group_slot,
    group_start,
    group_count,
    n_groups,
    weights,
    out,
    k_tiles,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDEST: tl.constexpr,
    BAND: tl.constexpr,
    NARROW_STAGES: tl.constexpr,
    WIDE_STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    feature_tiles: tl.constexpr = (HIDDEN + 2 * FEATURES - 1) // (2 * FEATURES)
    groups = tl.load(n_groups)
    for t in tl.range(tl.program_id(0), groups * feature_tiles, tl.num_programs(0)):
        g, f = place_of(t, groups, feature_tiles, BAND)
        slot, start, count = tl.load(group_slot + g), tl.load(group_start + g), tl.load(group_count + g)
        # fmt: off
        if WIDEST == 16:
            _down_tile(act, order, slot, start, count, weights, out, f, k_tiles,
                       HIDDEN, INTERMEDIATE, FEATURES, 16, NARROW_STAGES, INTERPRET)
        elif WIDEST == 64:
            if count <= 16:
                _down_tile(act, order, slot, start, count, weights, out, f, k_tiles,
                           HIDDEN, INTERMEDIATE, FEATURES, 16, NARROW_STAGES, INTERPRET)
            elif count <= 32:
                _down_tile(act, order, slot, start, count, weights, out, f, k_tiles,
                           HIDDEN, INTERMEDIATE, FEATURES, 32, WIDE_STAGES, INTERPRET)
            else:
                _down_tile(act, order, slot, start, count, weights, out, f, k_tiles,
                           HIDDEN, INTERMEDIATE, FEATURES, 64, WIDE_STAGES, INTERPRET)
        else:
            if count <= 32:
                _down_tile(act, order, slot, start, count, weights, out, f, k_tiles,
                           HIDDEN, INTERMEDIATE, FEATURES, 32, NARROW_STAGES, INTERPRET)
            elif count <= 64:
                _down_tile(act, order, slot, start, count, weights, out, f, k_tiles,
                           HIDDEN, INTERMEDIATE, FEATURES, 64, WIDE_STAGES, INTERPRET)
            else:
                _down_tile(act, order, slot, start, count, weights, out, f, k_tiles,
                           HIDDEN, INTERMEDIATE, FEATURES, WIDEST, WIDE_STAGES, INTERPRET)
        # fmt: on


@triton.jit
def _down_tile(
    act,
    order,
    slot,
    start,
    count,
    weights,
    out,
    f,
    k_tiles,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    RUN: tl.constexpr = INTERMEDIATE * _BLOCK
    BLOCKS: tl.constexpr = (HIDDEN + _BLOCK - 1) // _BLOCK
    token = tl.arange(0, TOKENS)
    live = token < count
    place = (start + token).to(tl.int64) * INTERMEDIATE
    first = f * (FEATURES // _BLOCK) * 2
    lower, upper = products(
        weights + slot.to(tl.int64) * (BLOCKS * RUN),
        block_offsets(first, 1, BLOCKS - 1, RUN, FEATURES, _K_TILE),
        block_offsets(first + FEATURES // _BLOCK, 1, BLOCKS - 1, RUN, FEATURES, _K_TILE),
        act, place, live, k_tiles, INTERMEDIATE, _K_TILE, True, FEATURES, TOKENS, STAGES, INTERPRET,
    )  # fmt: skip
    pair = tl.load(order + start + token, mask=live, other=0).to(tl.int64)
    feature = f * 2 * FEATURES + tl.arange(0, FEATURES)
    to = out + (pair * HIDDEN)[None, :] + feature[:, None]
    if out.dtype.element_ty == tl.bfloat16:
        lower, upper = to_bfloat16(lower, INTERPRET), to_bfloat16(upper, INTERPRET)
    tl.store(to, lower, mask=live[None, :] & (feature < HIDDEN)[:, None])
    tl.store(to + FEATURES, upper, mask=live[None, :] & (feature < HIDDEN - FEATURES)[:, None])
