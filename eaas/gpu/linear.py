"""Dense matrix products of bfloat16, batch-invariant: the bits of a row depend on no other row.

Definition: out[b] = W @ x[b] (+ bias), W [N, K] and x bf16, summed in float32 in the order of
`experts.gpu.tiles.products`; the bias is added last, in float32, and bf16 output is rounded once.

Cost: 2 * B * N * K flops; 2 * N * K bytes of weights, whatever B is. On an H200 (4.3 TB/s copied, 790 TFLOP/s) a
4096 x 4096 matrix takes 7.8 us up to about 180 rows; then its flops are the larger term.

Up to 64 rows a program takes 64 features, so that even small matrices are read by many processors; beyond, 256
features by 128 rows. Which it is changes no bit.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from experts.gpu.tiles import (
    BLOCK,
    K_TILE,
    block_offsets,
    blocks_of,
    k_tiles_of,
    pack_blocks,
    place_of,
    products,
    programs,
    to_bfloat16,
    unpack_blocks,
)
from p2p.device import INTERPRET

_BLOCK = tl.constexpr(BLOCK)
_K_TILE = tl.constexpr(K_TILE)


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearWeight:
    """W [n, k] in the packed layout of `experts.gpu.tiles`, and a bias.

    Attributes:
        packed: bf16 [blocks, k tiles, BLOCK, K_TILE].
        bias: float32 [n].
    """

    n: int
    k: int
    packed: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def pack(
        cls, weight: torch.Tensor, bias: torch.Tensor | None = None, device: torch.device | str | None = None
    ) -> LinearWeight:
        """Pack W [n, k], rounded to bf16, and a bias [n], on `device` (None: where W is).

        Raises:
            ValueError: shapes that do not fit, or rows that would not begin at multiples of 16 bytes.
        """
        n, k = weight.shape
        if k % 8:
            raise ValueError(f"W has {k} columns; a multiple of 8 is needed, so that rows begin at 16 bytes.")
        if bias is not None and tuple(bias.shape) != (n,):
            raise ValueError(f"The bias is {tuple(bias.shape)}; {(n,)} is needed.")
        if blocks_of(n) * BLOCK * k_tiles_of(k) * K_TILE >= 1 << 31:
            raise ValueError(f"W [{n}, {k}] has 2**31 elements or more; cut it by rows.")
        on = weight.device if device is None else device
        return cls(
            n=n,
            k=k,
            packed=pack_blocks(weight.to(on).to(torch.bfloat16)),
            bias=None if bias is None else bias.to(on).to(torch.float32).contiguous(),
        )

    def unpack(self) -> torch.Tensor:
        """A copy of W [n, k], bf16."""
        return unpack_blocks(self.packed, self.n, self.k).clone()


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The definition in double: x [B, K] and W [N, K] to float64 [B, N]."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def linear(x: torch.Tensor, weight: LinearWeight, out: torch.Tensor, n_rows: torch.Tensor) -> None:
    """Multiply rows by a matrix.

    Args:
        x: bf16 [B, k]; rows may be further apart than k, by a multiple of 8 elements.
        out: bf16 or float32 [B, n]; rows may be further apart than n. Rows from n_rows on are left as they are.
        n_rows: int32 [1], on the device: rows that there are.

    Raises:
        ValueError: a shape or type does not fit.
    """
    b = len(x)
    if (
        x.dtype != torch.bfloat16
        or x.dim() != 2
        or x.shape[1] != weight.k
        or x.stride(1) != 1
        or x.stride(0) % 8
    ):
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; bfloat16 [rows, {weight.k}], "
            "columns side by side and rows a multiple of 8 elements apart, is needed."
        )
    if out.dtype not in (torch.bfloat16, torch.float32) or out.shape != (b, weight.n) or out.stride(1) != 1:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; bfloat16 or float32 "
            f"{(b, weight.n)}, columns side by side, is needed."
        )
    if b > 64:
        shape = {"FEATURES": 128, "PAIR": True, "TOKENS": 128, "STAGES": 4, "num_warps": 8}
    else:
        # Stages of 8 KB of weights and 2 of rows, or 4 or 8: two programs on a processor.
        tokens, stages = next((t, s) for t, s in ((16, 10), (32, 8), (64, 6)) if b <= t)
        shape = {"FEATURES": 64, "PAIR": False, "TOKENS": tokens, "STAGES": stages, "num_warps": 4}
    _linear[(programs(x.device, 1 if b > 64 else 2),)](
        x, weight.packed, weight.packed if weight.bias is None else weight.bias, out, n_rows,
        b, x.stride(0), out.stride(0), k_tiles_of(weight.k),
        N=weight.n, K=weight.k, BIAS=weight.bias is not None, INTERPRET=INTERPRET,
        **shape, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _linear(
    x,
    weights,
    bias,
    out,
    n_rows,
    rows,
    x_stride,
    out_stride,
    k_tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    FEATURES: tl.constexpr,
    PAIR: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    RUN: tl.constexpr = (K + _K_TILE - 1) // _K_TILE * _K_TILE * _BLOCK
    BLOCKS: tl.constexpr = (N + _BLOCK - 1) // _BLOCK
    HEIGHT: tl.constexpr = FEATURES * 2 if PAIR else FEATURES
    feature_tiles: tl.constexpr = (N + HEIGHT - 1) // HEIGHT
    there = tl.minimum(tl.load(n_rows), rows)
    token_tiles = tl.cdiv(there, TOKENS)
    for t in tl.range(tl.program_id(0), token_tiles * feature_tiles, tl.num_programs(0)):
        i, f = place_of(t, token_tiles, feature_tiles, 16)
        token = i * TOKENS + tl.arange(0, TOKENS)
        live = token < there
        first = f * (HEIGHT // _BLOCK)
        lower, upper = products(
            weights,
            block_offsets(first, 1, BLOCKS - 1, RUN, FEATURES, _K_TILE),
            block_offsets(first + FEATURES // _BLOCK, 1, BLOCKS - 1, RUN, FEATURES, _K_TILE),
            x, token.to(tl.int64) * x_stride, live, k_tiles, K, _K_TILE, PAIR, FEATURES, TOKENS, STAGES, INTERPRET,
        )  # fmt: skip
        feature = f * HEIGHT + tl.arange(0, FEATURES)
        place = out + (token.to(tl.int64) * out_stride)[None, :]
        _store(place, lower, bias, feature, live, N, BIAS, INTERPRET)
        if PAIR:
            _store(place, upper, bias, feature + FEATURES, live, N, BIAS, INTERPRET)


@triton.jit
def _store(place, value, bias, feature, live, N: tl.constexpr, BIAS: tl.constexpr, INTERPRET: tl.constexpr):
    inside = feature < N
    if BIAS:
        value += tl.load(bias + feature, mask=inside, other=0.0)[:, None]
    if place.dtype.element_ty == tl.bfloat16:
        value = to_bfloat16(value, INTERPRET)
    tl.store(place + feature[:, None], value, mask=live[None, :] & inside[:, None])
