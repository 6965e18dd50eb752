"""Dense matrix products of bfloat16, batch-invariant: the bits of a row depend on no other row.

Definition: out[b] = W @ x[b] (+ bias), W [N, K] and x bf16. K is cut into parts, as many as the matrix asks for; a part
is summed in float32 in the order of `experts.gpu.tiles.products`, then the parts in rising order; the bias is added
last, in float32, and bf16 output is rounded once.

Cost: 2 * B * N * K flops; 2 * N * K bytes of weights, whatever B is. Reckoned for an H100 (132 processors, 3.35 TB/s),
up to some 200 rows: of Qwen3-30B-A3B the queries, keys and values [5120, 2048] 6.3 us, the output projection [2048,
4096] 5.0 us, the head [151936, 2048] 186 us. An item is 64 features of one part by up to 64 rows: 160, 128 and 2,374 of
one row, two programs on a processor, each 7 stages ahead of 8 KB. Parts are added up by the last of their programs,
from 4 to 16 KB each that are still in L2: some 2 us at the end, and no launch. Where there is no room for all parts an
item is 128 features by 128 rows of all of them: 64 flops a byte out of L2.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from experts.gpu.tiles import (
    BLOCK,
    K_TILE,
    blocks_of,
    k_tiles_of,
    pack_blocks,
    place_of,
    products,
    programs,
    row_offsets,
    store_products,
    unpack_blocks,
)
from p2p.device import INTERPRET, is_last

ITEMS = 1024  # of parts that there is room for
WANTED = 128  # items of a product of few rows, where its K is long enough
LEAST_TILES = 4  # of K in a part
WIDE = 128  # features and rows of an item of all parts

_BLOCK = tl.constexpr(BLOCK)
_K_TILE = tl.constexpr(K_TILE)


def part_tiles_of(n: int, k: int) -> int:
    """Tiles of K in a part of W [n, k]: a matter of the matrix alone, so that a row's bits are."""
    tiles = k_tiles_of(k)
    return -(-tiles // max(1, min(-(-WANTED // blocks_of(n)), tiles // LEAST_TILES)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Scratch:
    """Room for parts, of products that run one after another.

    Attributes:
        sums: float32 [ITEMS * BLOCK * BLOCK].
        arrived: int64 [ITEMS], all zero between products.
    """

    sums: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def make(cls, device: torch.device | str) -> Scratch:
        """16 MiB, on a device."""
        return cls(
            sums=torch.empty(ITEMS * BLOCK * BLOCK, device=device),
            arrived=torch.zeros(ITEMS, dtype=torch.int64, device=device),
        )


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
    scratch: Scratch

    @classmethod
    def pack(cls, weight: torch.Tensor, scratch: Scratch, bias: torch.Tensor | None = None) -> LinearWeight:
        """Pack W [n, k], rounded to bf16, and a bias [n], where the scratch is.

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
        on = scratch.sums.device
        return cls(
            n=n,
            k=k,
            packed=pack_blocks(weight.to(on).to(torch.bfloat16)),
            bias=None if bias is None else bias.to(on).to(torch.float32).contiguous(),
            scratch=scratch,
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
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != weight.k or x.stride(1) != 1 or x.stride(0) % 8:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; bfloat16 [rows, {weight.k}], "
            "columns side by side and rows a multiple of 8 elements apart, is needed."
        )
    if out.dtype not in (torch.bfloat16, torch.float32) or out.shape != (b, weight.n) or out.stride(1) != 1:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; bfloat16 or float32 "
            f"{(b, weight.n)}, columns side by side, is needed."
        )
    part_tiles = part_tiles_of(weight.n, weight.k)
    parts = triton.cdiv(k_tiles_of(weight.k), part_tiles)
    room = parts > 1 and triton.cdiv(b, BLOCK) * blocks_of(weight.n) * parts <= ITEMS
    tokens = next((width for width in (16, 32) if b <= width), BLOCK if room or b <= BLOCK else WIDE)
    features, per_processor = (WIDE, 1) if tokens == WIDE else (BLOCK, 2)
    _linear[(programs(x.device, per_processor),)](
        x, weight.packed, weight.bias, out, n_rows, weight.scratch.sums, weight.scratch.arrived,
        b, x.stride(0), out.stride(0), k_tiles_of(weight.k), part_tiles,
        N=weight.n, K=weight.k, PARTS=parts, SPLIT=room, FEATURES=features, TOKENS=tokens,
        SHARED=(216 << 10) // per_processor, INTERPRET=INTERPRET,
        num_warps=8 // per_processor, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weights, bias, out, n_rows, sums, arrived, rows, x_stride, out_stride, k_tiles, part_tiles,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, FEATURES: tl.constexpr,
    TOKENS: tl.constexpr, SHARED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    SHARES: tl.constexpr = PARTS if SPLIT else 1  # items that make one tile of the output
    feature_tiles: tl.constexpr = (N + FEATURES - 1) // FEATURES
    there = tl.minimum(tl.load(n_rows), rows)
    token_tiles = tl.cdiv(there, TOKENS)
    for t in tl.range(tl.program_id(0), token_tiles * feature_tiles * SHARES, tl.num_programs(0)):
        tile = t // SHARES
        share = t - tile * SHARES
        i, f = place_of(tile, token_tiles, feature_tiles, 16)
        token = i * TOKENS + tl.arange(0, TOKENS)
        live = token < there
        feature = f * FEATURES + tl.arange(0, FEATURES)
        out_at = token.to(tl.int64) * out_stride
        if PARTS == SHARES:
            total = _part(x, weights, feature, token, live, x_stride, share * part_tiles, k_tiles, part_tiles,
                          N, K, FEATURES, TOKENS, SHARED, INTERPRET)  # fmt: skip
        else:
            total = tl.zeros([FEATURES, TOKENS], tl.float32)
            for part in tl.range(0, PARTS):
                total += _part(x, weights, feature, token, live, x_stride, part * part_tiles, k_tiles, part_tiles,
                               N, K, FEATURES, TOKENS, SHARED, INTERPRET)  # fmt: skip
        if SPLIT:
            place = tl.arange(0, FEATURES)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
            tl.store(sums + t * (FEATURES * TOKENS) + place, total)
            if is_last(arrived + tile, SHARES):
                total = tl.zeros([FEATURES, TOKENS], tl.float32)
                for part in tl.range(0, PARTS):
                    # From L2: what the other programs wrote never passes through this processor's L1.
                    at = sums + (tile * SHARES + part) * (FEATURES * TOKENS) + place
                    total += tl.load(at, cache_modifier=".cg")
                _finish(out, out_at, feature, live, total, bias, N, INTERPRET)
        else:
            _finish(out, out_at, feature, live, total, bias, N, INTERPRET)


@triton.jit
def _part(
    x, weights, feature, token, live, x_stride, first, k_tiles, part_tiles,
    N: tl.constexpr, K: tl.constexpr, FEATURES: tl.constexpr, TOKENS: tl.constexpr, SHARED: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """The products of one part of K, from tile `first` on: float32 [FEATURES, TOKENS]."""
    RUN: tl.constexpr = (K + _K_TILE - 1) // _K_TILE * _K_TILE * _BLOCK
    offsets = row_offsets(feature, 0, 1, (N + _BLOCK - 1) // _BLOCK, RUN, _K_TILE)
    return products(
        weights, offsets, offsets, None, None, x, token.to(tl.int64) * x_stride, None, token, live,
        first, tl.minimum(first + part_tiles, k_tiles), K, _K_TILE, False, FEATURES, TOKENS, SHARED, INTERPRET,
    )[0]  # fmt: skip


@triton.jit
def _finish(out, row_at, feature, live, value, bias, N: tl.constexpr, INTERPRET: tl.constexpr):
    if bias is not None:
        value += tl.load(bias + feature, mask=feature < N, other=0.0)[:, None]
    store_products(out, row_at, feature, live, value, N, INTERPRET)
