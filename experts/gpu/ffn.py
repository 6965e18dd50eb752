"""Grouped SwiGLU FFN: rows of many experts in two launches, for any number of rows, in bfloat16 or float8 (e4m3).

Definition, for a pair p of row x [H] and weight slot s, all sums in float32 in the order of `tiles.products`:
    act[p] = bf16(silu(gate[s] @ x) * (up[s] @ x))   [I], silu(g) = g / (1 + exp(-g))
    out[p] = down[s] @ act[p]                        [H], float32, or rounded once to bf16
Float8 experts have a scale for each row and 128 columns, and take rows quantized 128 columns at a time: scale =
a * (1 / 448), q = e4m3(x * (448 / a)), where a is the largest magnitude, at least 2**-100. A product then adds, for
each 128 columns k in ascending order, (q_w[k] @ q_x[k]) * (scale_w[k] * scale_x[k]) in float32; act is quantized from
float32. That is what DeepSeek-V3's checkpoints are made for, of which 128 rows share their scales.

Cost: 6 * P * H * I flops; 6 * H * I bytes of weights for each expert that is used, half of that and 3% of scales in
float8. Reckoned for an H100 (132 processors, 3.35 TB/s, 990 TFLOP/s), floors of both launches for B tokens, top-8:
    Qwen3-30B-A3B, 9.4 MB an expert: B 1, 8 experts: 23 us; 32, 112: 315 us; 256 and 512, 128 of 16 and 32 pairs: 360 us
    DeepSeek-V3, 88 MB an expert:    B 1, 8 experts: 210 us; 32, 163: 4.3 ms; 256 and 512, 256 of 8 and 16: 6.7 ms
A pair is one flop for each byte of its expert: below 295 pairs an expert the weights take the time. What they need is
bytes in flight, 20 KB a processor (3.35 TB/s for 0.8 us). One form serves all counts: two programs of four warps on a
processor, so that one fetches while the other ends an item, each with 108 KB for tiles in flight. An item is 64 rows of
gate and of up, or 128 of down, by 16, 64 or 128 tokens, as its group has pairs: 5, 3 or 2 stages ahead of 16 KB of
weights, so 160, 96 or 64 KB a processor. Where that makes fewer items than programs (B 1: 96 and 128 of Qwen3's) an
item is half as high: 192 of gate and up, 256 of down, 7 stages ahead of 8 KB, 112 KB a processor.
An item of 128 by 128 takes 64 flops a byte out of L2: a large prefill ends near 450 TFLOP/s where L2 gives 7 TB/s,
which 134 pairs an expert reach. 256 rows would make 87 flops of it, but leave a processor one program, at decode too.

Float8 takes one program of eight warps. A scale of act is of 128 columns, so an item has 128 rows of gate and of up, or
256 of down; partial sums stand beside its accumulators, and 64 tokens are all that registers hold. 5 or 4 stages ahead
of 32 KB are as many bytes as above. One token of 8 experts makes 128 items of DeepSeek-V3's gate and up, but 48 of
Qwen3's, 25 MB: items half as high would have to agree on their largest act. Down may have half as many rows.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from experts.gpu.group import Groups
from experts.gpu.pack import LARGEST, LEAST, e4m3_codes
from experts.gpu.tiles import BLOCK, k_tiles_of, place_of, products, programs, row_offsets, store_products
from experts.gpu.weights import FP8_TILE, ExpertWeights, Fp8ExpertWeights
from p2p.device import INTERPRET

# How the kernel is launched, the same for every model.
LAUNCH = {
    torch.bfloat16: {"FEATURES": 64, "K_TILE": 64, "SHARED": 108 << 10, "per_processor": 2, "num_warps": 4},
    torch.float8_e4m3fn: {
        "FEATURES": FP8_TILE, "K_TILE": FP8_TILE, "SHARED": 224 << 10, "per_processor": 1, "num_warps": 8,
    },
}  # fmt: skip

_BLOCK = tl.constexpr(BLOCK)
_BAND = tl.constexpr(16)
_LARGEST = tl.constexpr(LARGEST)
_ONE_PART = tl.constexpr(1 / LARGEST)
_LEAST = tl.constexpr(LEAST)


def ffn_reference(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The definition in double: x [m, H], gate and up [I, H], down [H, I], all bf16, to float64 [m, H]."""
    g, u = x.double() @ gate.double().T, x.double() @ up.double().T
    act = (g / (1 + torch.exp(-g)) * u).to(torch.float32).to(torch.bfloat16)
    return act.double() @ down.double().T


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


def ffn_fp8_reference(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The definition in double: x [m, H], dequantized gate and up [I, H] and down [H, I], to float64 [m, H]."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        q, scales = quantize_reference(rows)
        return (q.double() * scales.double().repeat_interleave(FP8_TILE, 1))[:, : rows.shape[1]]

    wide = rounded(x.float())
    g, u = wide @ gate.T, wide @ up.T
    return rounded((g / (1 + torch.exp(-g)) * u).float()) @ down.T


def grouped_ffn(
    rows: torch.Tensor, row_of: torch.Tensor, groups: Groups, weights: ExpertWeights | Fp8ExpertWeights,
    act: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None = None,
    act_scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Run every grouped pair through its expert. Captured in a graph, it follows what the device then finds.

    Args:
        rows: bf16 [R, H]; for float8 experts as they travel, float8_e4m3fn [R, H up to a multiple of 128].
        row_of: int32 [P]: pair to row.
        groups: From `group`, of pairs below P.
        act: Scratch of the type of the rows, [P, weights.act_width].
        out: float32 or bf16 [P, H] by pair. Rows of pairs in no group are left as they are.
        scales, act_scales: With float8 alone: float32 [R, tiles] of the rows, scratch [P, weights.act_width / 128].

    Raises:
        ValueError: a shape or type does not fit.
    """
    kind, pairs, width = weights.gate_up.dtype, row_of.numel(), weights.act_width
    columns = weights.hidden
    needed = [("row_of", row_of, (pairs,), torch.int32), ("act", act, (pairs, width), kind)]
    if kind == torch.float8_e4m3fn:
        tiles = k_tiles_of(columns, FP8_TILE)
        columns = tiles * FP8_TILE
        needed.append(("scales", scales, (len(rows), tiles), torch.float32))
        needed.append(("act_scales", act_scales, (pairs, width // FP8_TILE), torch.float32))
    wanted_out = out.dtype if out.dtype == torch.bfloat16 else torch.float32
    needed += [("rows", rows, (len(rows), columns), kind), ("out", out, (pairs, weights.hidden), wanted_out)]
    for name, tensor, shape, dtype in needed:
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            found = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"{name} is {found}; {dtype} {shape}, contiguous, is needed.")
    if groups.order.numel() < pairs or groups.tile > weights.widest_group:
        raise ValueError(
            f"{groups.order.numel()} pairs in groups of {groups.tile}; allocate {pairs} in groups of at most "
            f"{weights.widest_group}."
        )
    gate_up(rows, row_of, groups, weights, act, scales, act_scales)
    down(groups, weights, act, out, act_scales)


def gate_up(
    rows: torch.Tensor, row_of: torch.Tensor, groups: Groups, weights: ExpertWeights | Fp8ExpertWeights,
    act: torch.Tensor, scales: torch.Tensor | None = None, act_scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The first half of `grouped_ffn`, which checks what it is given: act, in the order of the groups."""
    matrix_scales = weights.gate_up_scales if isinstance(weights, Fp8ExpertWeights) else None
    _launch(
        rows, scales, row_of, groups, weights.gate_up, matrix_scales, act, act_scales,
        K=rows.shape[1], N=weights.act_width, GATED=True,
    )  # fmt: skip


def down(
    groups: Groups, weights: ExpertWeights | Fp8ExpertWeights, act: torch.Tensor, out: torch.Tensor,
    act_scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The second half of `grouped_ffn`, which checks what it is given: act to the pairs' rows."""
    matrix_scales = weights.down_scales if isinstance(weights, Fp8ExpertWeights) else None
    _launch(
        act, act_scales, None, groups, weights.down, matrix_scales, out, None,
        K=weights.act_width, N=weights.hidden, GATED=False,
    )  # fmt: skip


def _launch(
    rows: torch.Tensor, scales: torch.Tensor | None, row_of: torch.Tensor | None, groups: Groups,
    weights: torch.Tensor, weight_scales: torch.Tensor | None, out: torch.Tensor, out_scales: torch.Tensor | None,
    **constants: int,
) -> None:  # fmt: skip
    shape = dict(LAUNCH[weights.dtype])
    grouped_kernel[(programs(rows.device, shape.pop("per_processor")),)](
        rows, scales, row_of, groups.order, groups.slot, groups.start, groups.count, groups.n_groups,
        weights, weight_scales, out, out_scales, k_tiles_of(constants["K"], shape["K_TILE"]),
        WIDEST=groups.tile, INTERPRET=INTERPRET, **constants, **shape, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def grouped_kernel(
    rows, scales, row_of, order, group_slot, group_start, group_count, n_groups, weights, weight_scales, out,
    out_scales, k_tiles,
    K: tl.constexpr, N: tl.constexpr, GATED: tl.constexpr, FEATURES: tl.constexpr, K_TILE: tl.constexpr,
    WIDEST: tl.constexpr, SHARED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A half of the FFN of all groups: gate and up with silu where GATED, else down."""
    HEIGHT: tl.constexpr = FEATURES if GATED else FEATURES * 2  # features of an item
    WIDTHS: tl.constexpr = 3 if WIDEST > 64 else 2 if WIDEST > 16 else 1
    # A scale of act is of all features of an item.
    HALVES: tl.constexpr = out_scales is None
    groups = tl.load(n_groups)
    halved = HALVES & (groups * ((N + HEIGHT - 1) // HEIGHT) < tl.num_programs(0))
    for split in tl.static_range(2 if HALVES else 1):
        if halved == (split == 1):
            tiles = (N + HEIGHT // (1 + split) - 1) // (HEIGHT // (1 + split))
            for t in tl.range(tl.program_id(0), groups * tiles, tl.num_programs(0)):
                g, f = place_of(t, groups, tiles, _BAND)
                slot, start = tl.load(group_slot + g).to(tl.int64), tl.load(group_start + g)
                count = tl.load(group_count + g)
                width = (count > 16).to(tl.int32) + (count > 64).to(tl.int32)
                for number in tl.static_range(WIDTHS):
                    if width == number:
                        _item(
                            rows, scales, row_of, order, slot, start, count, f, weights, weight_scales,
                            out, out_scales, k_tiles,
                            K, N, GATED, FEATURES, K_TILE, split == 0, 16 if number == 0 else 32 << number, SHARED,
                            INTERPRET,
                        )  # fmt: skip


@triton.jit
def _item(
    rows, scales, row_of, order, slot, start, count, f, weights, weight_scales, out, out_scales, k_tiles,
    K: tl.constexpr, N: tl.constexpr, GATED: tl.constexpr, FEATURES: tl.constexpr, K_TILE: tl.constexpr,
    PAIR: tl.constexpr, TOKENS: tl.constexpr, SHARED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One group by FEATURES rows of weights, or with PAIR by twice as many: half of them of gate, half of up."""
    PARTS: tl.constexpr = 2 if GATED else 1
    RUN: tl.constexpr = (K + K_TILE - 1) // K_TILE * K_TILE * _BLOCK
    BLOCKS: tl.constexpr = (N + _BLOCK - 1) // _BLOCK * PARTS
    token = tl.arange(0, TOKENS)
    live = token < count
    pair = tl.load(order + start + token, mask=live, other=0).to(tl.int64)
    place = (start + token).to(tl.int64)
    row = tl.load(row_of + pair, mask=live, other=0).to(tl.int64) if GATED else place
    feature = tl.arange(0, FEATURES)
    if GATED and PAIR:
        offsets0 = row_offsets(f * FEATURES + feature, 0, 2, BLOCKS, RUN, K_TILE)
        offsets1 = row_offsets(f * FEATURES + feature, 1, 2, BLOCKS, RUN, K_TILE)
    elif GATED:
        HALF: tl.constexpr = FEATURES // 2
        offsets0 = row_offsets(f * HALF + feature % HALF, feature // HALF, 2, BLOCKS, RUN, K_TILE)
        offsets1 = offsets0
    elif PAIR:
        offsets0 = row_offsets(f * 2 * FEATURES + feature, 0, 1, BLOCKS, RUN, K_TILE)
        offsets1 = row_offsets((f * 2 + 1) * FEATURES + feature, 0, 1, BLOCKS, RUN, K_TILE)
    else:
        offsets0 = row_offsets(f * FEATURES + feature, 0, 1, BLOCKS, RUN, K_TILE)
        offsets1 = offsets0
    scales0 = None
    scales1 = None
    if weight_scales is not None:
        # Of FEATURES rows together: all of gate, then all of up; or of down.
        TILES: tl.constexpr = (N + FEATURES - 1) // FEATURES
        first = f if GATED or not PAIR else 2 * f
        second = f + TILES if GATED else tl.minimum(first + 1, TILES - 1)
        scales0 = weight_scales + (slot * (TILES * PARTS) + first) * (K // K_TILE * FEATURES)
        scales1 = weight_scales + (slot * (TILES * PARTS) + second) * (K // K_TILE * FEATURES)
    first_acc, second_acc = products(
        weights + slot * (BLOCKS * RUN), offsets0, offsets1, scales0, scales1, rows, row * K,
        scales, row * (K // K_TILE), live, 0, k_tiles, K, K_TILE, PAIR, FEATURES, TOKENS, SHARED, INTERPRET,
    )  # fmt: skip
    if not GATED:
        to = (f * 2 if PAIR else f) * FEATURES + feature
        store_products(out, pair * N, to, live, first_acc, N, INTERPRET)
        if PAIR:
            store_products(out, pair * N, to + FEATURES, live, second_acc, N, INTERPRET)
    elif PAIR:
        _store_act(first_acc, second_acc, out, out_scales, start, f, live, N, FEATURES, TOKENS, INTERPRET)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(first_acc, [2, FEATURES // 2, TOKENS]), (1, 2, 0)))
        _store_act(gate, up, out, out_scales, start, f, live, N, FEATURES // 2, TOKENS, INTERPRET)


@triton.jit
def _store_act(
    gate, up, out, out_scales, start, f, live,
    N: tl.constexpr, HEIGHT: tl.constexpr, TOKENS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    feature = f * HEIGHT + tl.arange(0, HEIGHT)
    token = tl.arange(0, TOKENS)
    # The pairs of a group stand together: 32 bits say where in their rows, and leave registers to the sums.
    out += start.to(tl.int64) * N
    value = gate / (1.0 + tl.exp(-gate)) * up
    if out_scales is None:
        store_products(out, token * N, feature, live, value, N, INTERPRET)
    else:
        largest = tl.maximum(tl.max(tl.abs(value), axis=0), _LEAST)
        value *= tl.div_rn(tl.full([TOKENS], _LARGEST, tl.float32), largest)[None, :]
        tl.store(out + (token * N)[None, :] + feature[:, None], to_e4m3(value, INTERPRET), mask=live[None, :])
        out_scales += (start + token).to(tl.int64) * (N // HEIGHT) + f
        tl.store(out_scales, largest * _ONE_PART, mask=live)


@triton.jit
def to_e4m3(value, INTERPRET: tl.constexpr):
    """float32 of at most 448 rounded to float8_e4m3fn, to nearest, ties to even."""
    if INTERPRET:  # which would cut off
        return e4m3_codes(value).to(tl.float8e4nv, bitcast=True)
    return value.to(tl.float8e4nv)
