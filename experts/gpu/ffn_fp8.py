"""Grouped SwiGLU FFN of float8 (e4m3) experts, whose weights have a scale for each row and 128 columns.

Definition: a row is quantized 128 columns at a time: scale = a * (1 / 448), q = e4m3(x * (448 / a)), where a is the
largest magnitude, at least 2**-100. A product adds, for each 128 columns k in ascending order,
(q_w[k] @ q_x[k]) * (scale_w[k] * scale_x[k]) in float32; act is quantized from float32:
    act = quantize(silu(gate @ x) * (up @ x))        out = down @ act
That is what DeepSeek-V3's checkpoints are made for, of which 128 rows share their scales.

Cost: 6 * P * H * I flops; 3 * H * I bytes, and 3% of scales, for each expert that is used: half of bfloat16's. At
H 7168, I 2048 on an H200 10.5 us each.

As in `ffn`, a program takes two tiles of weights at once; 128 rows each, so that one program sees all 128 columns of
act that share a scale. The tensor cores add up no more than 128 products at a time: the rest is float32 arithmetic.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from experts.gpu.ffn import check_shapes
from experts.gpu.group import Groups
from experts.gpu.pack import LARGEST, LEAST, e4m3_codes
from experts.gpu.tiles import BLOCK, add_product, block_offsets, k_tiles_of, place_of, programs, to_bfloat16
from experts.gpu.weights import FP8_TILE, Fp8ExpertWeights
from p2p.device import INTERPRET

_BLOCK = tl.constexpr(BLOCK)
_TILE = tl.constexpr(FP8_TILE)
_LARGEST = tl.constexpr(LARGEST)
_ONE_PART = tl.constexpr(1 / LARGEST)
_LEAST = tl.constexpr(LEAST)


def quantize_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [m, k] to float8_e4m3fn [m, k up to whole tiles] and float32 scales [m, tiles]: the same bits."""
    m, k = x.shape
    tiles = k_tiles_of(k, FP8_TILE)
    padded = torch.zeros(m, tiles * FP8_TILE, device=x.device)
    padded[:, :k] = x
    groups = padded.view(m, tiles, FP8_TILE)
    largest = groups.abs().amax(dim=2).clamp_min(LEAST)
    q = (groups * (torch.full_like(largest, LARGEST) / largest)[:, :, None]).to(torch.float8_e4m3fn)
    return q.view(padded.shape), largest * (1 / LARGEST)


def ffn_fp8_reference(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The definition in double: x [m, H], dequantized gate and up [I, H] and down [H, I], to float64 [m, H]."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        q, scales = quantize_reference(rows)
        return (q.double() * scales.double().repeat_interleave(FP8_TILE, 1))[:, : rows.shape[1]]

    wide = rounded(x.float())
    g, u = wide @ gate.T, wide @ up.T
    return rounded((g / (1 + torch.exp(-g)) * u).float()) @ down.T


def grouped_ffn_fp8(
    q: torch.Tensor,
    scales: torch.Tensor,
    row_of: torch.Tensor,
    groups: Groups,
    weights: Fp8ExpertWeights,
    act: torch.Tensor,
    act_scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Run every grouped pair through its expert. Captured in a graph, it follows what the device then finds.

    Args:
        q, scales: Rows as they travel: float8_e4m3fn [R, H up to a multiple of 128], float32 [R, tiles].
        row_of: int32 [P]: pair to row.
        groups: From `group`, of pairs below P; at most 64 pairs each.
        act: Scratch, float8_e4m3fn [P, weights.act_width].
        act_scales: Scratch, float32 [P, weights.act_width / 128].
        out: float32 or bf16 [P, H] by pair. Rows of pairs in no group are left as they are.

    Raises:
        ValueError: a shape or type does not fit.
    """
    pairs, tiles = row_of.numel(), k_tiles_of(weights.hidden, FP8_TILE)
    check_shapes(q, row_of, tiles * FP8_TILE, torch.float8_e4m3fn, out, weights.hidden, groups)
    if scales.shape != (len(q), tiles) or scales.dtype != torch.float32 or not scales.is_contiguous():
        raise ValueError(
            f"scales are {scales.dtype} {tuple(scales.shape)}; float32 {(len(q), tiles)} are needed."
        )
    width = weights.act_width
    found = (act.dtype, tuple(act.shape), act_scales.dtype, tuple(act_scales.shape))
    needed = (torch.float8_e4m3fn, (pairs, width), torch.float32, (pairs, width // FP8_TILE))
    if found != needed:
        raise ValueError(f"act and its scales are {found}; {needed} are needed.")
    if groups.tile > weights.widest_group:
        # Partial sums stand beside the accumulators: twice the registers of bfloat16.
        raise ValueError(f"Groups of at most {groups.tile} pairs; float8 takes groups of 16 or 64.")
    # One program a processor: 6 stages of 32 KB of weights and 2 of rows, or 5 of 32 and 8.
    shape = {"TOKENS": groups.tile, "STAGES": 6 if groups.tile == 16 else 5, "BAND": 16, "num_warps": 8}
    grid = (programs(q.device, 1),)
    _gate_up[grid](
        q, scales, row_of, groups.order, groups.slot, groups.start, groups.count, groups.n_groups,
        weights.gate_up, weights.gate_up_scales, act, act_scales, tiles,
        HIDDEN=tiles * FP8_TILE, INTERMEDIATE=width, INTERPRET=INTERPRET, **shape, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    _down[grid](
        act, act_scales, groups.order, groups.slot, groups.start, groups.count, groups.n_groups,
        weights.down, weights.down_scales, out, width // FP8_TILE,
        HIDDEN=weights.hidden, INTERMEDIATE=width, INTERPRET=INTERPRET, **shape, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def to_e4m3(value, INTERPRET: tl.constexpr):
    """float32 of at most 448 rounded to float8_e4m3fn, to nearest, ties to even."""
    if INTERPRET:  # which would cut off
        return e4m3_codes(value).to(tl.float8e4nv, bitcast=True)
    return value.to(tl.float8e4nv)


@triton.jit
def _products(
    weights,
    offsets0,
    offsets1,
    weight_scales0,
    weight_scales1,
    rows,
    scales,
    row,
    live,
    k_tiles,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """`tiles.products` for scaled float8: two tiles of 128 rows of weights by the same tile of tokens.

    weight_scales0 and 1 point to float32 [k_tiles, 128], a scale for each row; scales to [_, K / 128] of the tokens.
    """
    row_offsets = (row * K)[:, None] + tl.arange(0, _TILE)[None, :]
    scale_offsets = (row * (K // _TILE)).to(tl.int32)
    feature = tl.arange(0, _TILE)
    acc0 = tl.zeros([_TILE, TOKENS], tl.float32)
    acc1 = tl.zeros([_TILE, TOKENS], tl.float32)
    for i in tl.range(0, k_tiles, num_stages=STAGES):
        step = i * (_BLOCK * _TILE)
        scale = tl.load(scales + i + scale_offsets, mask=live, other=0.0)
        x = tl.trans(tl.load(rows + i * _TILE + row_offsets, mask=live[:, None], other=0.0))
        nothing = tl.zeros([_TILE, TOKENS], tl.float32)
        sum0 = add_product(tl.load(weights + step + offsets0), x, nothing, INTERPRET)
        acc0 += sum0 * (tl.load(weight_scales0 + i * _TILE + feature)[:, None] * scale[None, :])
        sum1 = add_product(tl.load(weights + step + offsets1), x, nothing, INTERPRET)
        acc1 += sum1 * (tl.load(weight_scales1 + i * _TILE + feature)[:, None] * scale[None, :])
    return acc0, acc1


@triton.jit
def _gate_up(
    rows,
    scales,
    row_of,
    order,
    group_slot,
    group_start,
    group_count,
    n_groups,
    weights,
    weight_scales,
    act,
    act_scales,
    k_tiles,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    TOKENS: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    feature_tiles: tl.constexpr = INTERMEDIATE // _TILE
    groups = tl.load(n_groups)
    for t in tl.range(tl.program_id(0), groups * feature_tiles, tl.num_programs(0)):
        g, f = place_of(t, groups, feature_tiles, BAND)
        slot, start, count = tl.load(group_slot + g), tl.load(group_start + g), tl.load(group_count + g)
        _gate_up_tile(
            rows, scales, row_of, order, slot, start, count, weights, weight_scales, act, act_scales, f, k_tiles,
            HIDDEN, INTERMEDIATE, TOKENS, STAGES, INTERPRET,
        )  # fmt: skip


@triton.jit
def _gate_up_tile(
    rows,
    scales,
    row_of,
    order,
    slot,
    start,
    count,
    weights,
    weight_scales,
    act,
    act_scales,
    f,
    k_tiles,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    RUN: tl.constexpr = HIDDEN * _BLOCK
    BLOCKS: tl.constexpr = INTERMEDIATE // _BLOCK * 2
    K_TILES: tl.constexpr = HIDDEN // _TILE
    SCALE_ROWS: tl.constexpr = INTERMEDIATE // _TILE
    token = tl.arange(0, TOKENS)
    live = token < count
    pair = tl.load(order + start + token, mask=live, other=0)
    row = tl.load(row_of + pair, mask=live, other=0).to(tl.int64)
    weight_scales += (slot.to(tl.int64) * 2 * SCALE_ROWS + f) * (K_TILES * _TILE)
    gate, up = _products(
        weights + slot.to(tl.int64) * (BLOCKS * RUN),
        block_offsets(4 * f, 2, BLOCKS - 2, RUN, _TILE, _TILE),
        block_offsets(4 * f + 1, 2, BLOCKS - 1, RUN, _TILE, _TILE),
        weight_scales, weight_scales + SCALE_ROWS * (K_TILES * _TILE), rows, scales, row, live,
        k_tiles, HIDDEN, TOKENS, STAGES, INTERPRET,
    )  # fmt: skip
    value = gate / (1.0 + tl.exp(-gate)) * up
    largest = tl.maximum(tl.max(tl.abs(value), axis=0), _LEAST)
    inverse = tl.div_rn(tl.full([TOKENS], _LARGEST, tl.float32), largest)
    feature = f * _TILE + tl.arange(0, _TILE)
    place = (start + token).to(tl.int64)
    tl.store(
        act + (place * INTERMEDIATE)[None, :] + feature[:, None],
        to_e4m3(value * inverse[None, :], INTERPRET),
        mask=live[None, :],
    )
    tl.store(act_scales + place * SCALE_ROWS + f, largest * _ONE_PART, mask=live)


@triton.jit
def _down(
    act,
    act_scales,
    order,
    group_slot,
    group_start,
    group_count,
    n_groups,
    weights,
    weight_scales,
    out,
    k_tiles,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    TOKENS: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    feature_tiles: tl.constexpr = (HIDDEN + 2 * _TILE - 1) // (2 * _TILE)
    groups = tl.load(n_groups)
    for t in tl.range(tl.program_id(0), groups * feature_tiles, tl.num_programs(0)):
        g, f = place_of(t, groups, feature_tiles, BAND)
        slot, start, count = tl.load(group_slot + g), tl.load(group_start + g), tl.load(group_count + g)
        _down_tile(
            act, act_scales, order, slot, start, count, weights, weight_scales, out, f, k_tiles,
            HIDDEN, INTERMEDIATE, TOKENS, STAGES, INTERPRET,
        )  # fmt: skip


@triton.jit
def _down_tile(
    act,
    act_scales,
    order,
    slot,
    start,
    count,
    weights,
    weight_scales,
    out,
    f,
    k_tiles,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    RUN: tl.constexpr = INTERMEDIATE * _BLOCK
    BLOCKS: tl.constexpr = (HIDDEN + _BLOCK - 1) // _BLOCK
    K_TILES: tl.constexpr = INTERMEDIATE // _TILE
    SCALE_ROWS: tl.constexpr = (HIDDEN + _TILE - 1) // _TILE
    token = tl.arange(0, TOKENS)
    live = token < count
    weight_scales += slot.to(tl.int64) * (SCALE_ROWS * K_TILES * _TILE)
    lower, upper = _products(
        weights + slot.to(tl.int64) * (BLOCKS * RUN),
        block_offsets(4 * f, 1, BLOCKS - 1, RUN, _TILE, _TILE),
        block_offsets(4 * f + 2, 1, BLOCKS - 1, RUN, _TILE, _TILE),
        weight_scales + 2 * f * (K_TILES * _TILE),
        weight_scales + tl.minimum(2 * f + 1, SCALE_ROWS - 1) * (K_TILES * _TILE),
        act, act_scales, (start + token).to(tl.int64), live, k_tiles, INTERMEDIATE, TOKENS, STAGES, INTERPRET,
    )  # fmt: skip
    pair = tl.load(order + start + token, mask=live, other=0).to(tl.int64)
    feature = f * 2 * _TILE + tl.arange(0, _TILE)
    to = out + (pair * HIDDEN)[None, :] + feature[:, None]
    if out.dtype.element_ty == tl.bfloat16:
        lower, upper = to_bfloat16(lower, INTERPRET), to_bfloat16(upper, INTERPRET)
    tl.store(to, lower, mask=live[None, :] & (feature < HIDDEN)[:, None])
    tl.store(to + _TILE, upper, mask=live[None, :] & (feature < HIDDEN - _TILE)[:, None])
