"""Device functions that every matrix product here shares: the packed layout of weights, and one loop over K.

Packed layout: a matrix W [rows, k] is cut into blocks of BLOCK rows, each block into tiles of K_TILE columns, and
each tile is stored row by row; both edges are padded with zeros. In elements, W[r, c] lies at
    ((r // BLOCK) * k_tiles + c // K_TILE) * BLOCK * K_TILE + (r % BLOCK) * K_TILE + c % K_TILE
so that whoever multiplies by a block reads one contiguous run of it, 128 bytes a row.

Exactness: `products` adds the tiles of K that it is given in ascending order into one float32 accumulator per output,
the weights as the first operand and the tokens as the second. No number of tokens, width of the token tile, height of
the tile of weights or count of warps enters into the order in which one output's products are added.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from p2p.device import INTERPRET

BLOCK = 64
K_TILE = 64

_BLOCK = tl.constexpr(BLOCK)


def blocks_of(rows: int) -> int:
    """Blocks of BLOCK rows that hold `rows` rows."""
    return -(-rows // BLOCK)


def k_tiles_of(k: int, k_tile: int = K_TILE) -> int:
    """Tiles of `k_tile` columns that hold `k` columns."""
    return -(-k // k_tile)


def pack_blocks(matrix: torch.Tensor, k_tile: int = K_TILE) -> torch.Tensor:
    """W [rows, k] in the packed layout: [blocks, k tiles, BLOCK, k_tile], contiguous, of the same type and device."""
    rows, k = matrix.shape
    blocks, tiles = blocks_of(rows), k_tiles_of(k, k_tile)
    padded = matrix
    if (rows, k) != (blocks * BLOCK, tiles * k_tile):
        padded = torch.zeros(blocks * BLOCK, tiles * k_tile, dtype=matrix.dtype, device=matrix.device)
        padded[:rows, :k] = matrix
    return padded.view(blocks, BLOCK, tiles, k_tile).transpose(1, 2).contiguous()


def unpack_blocks(packed: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """The inverse of `pack_blocks`: W [rows, k] of a packed [blocks, k tiles, BLOCK, k_tile]."""
    blocks, tiles, _, k_tile = packed.shape
    return packed.transpose(1, 2).reshape(blocks * BLOCK, tiles * k_tile)[:rows, :k]


def numerics_class(device: torch.device, products: str = "bf16") -> str:
    """Name of the arithmetic of products of "bf16" or "fp8" on a device: equal names promise equal bits."""
    compiler = ".".join(triton.__version__.split(".")[:2])
    if device.type != "cuda":
        return f"interpreter-{products}-triton{compiler}-2"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda-sm{major}{minor}-{products}-triton{compiler}-2"


def programs(device: torch.device, per_processor: int) -> int:
    """Size of a grid whose programs stay and take one tile after another: `per_processor` on each processor."""
    if device.type != "cuda":
        return 3  # The interpreter runs one after another; more than one, so that strides are exercised
    return torch.cuda.get_device_properties(device).multi_processor_count * per_processor


def inlined(function: Any) -> Any:
    """A function that kernels call: compiled into them. To the interpreter it is plain Python, a hundred times as fast
    there as a kernel's call of a kernel."""
    return function if INTERPRET else triton.jit(function)


@triton.jit
def place_of(t, tokens_tiles, feature_tiles, BAND: tl.constexpr):
    """Work item t of tokens_tiles * feature_tiles as (token tile, feature tile).

    BAND token tiles go together through all feature tiles, token tiles fastest: programs that run at the same
    time then share their weights and their rows in the L2 cache.
    """
    band = t // (BAND * feature_tiles)
    inside = t - band * BAND * feature_tiles
    width = tl.minimum(tokens_tiles - band * BAND, BAND)
    feature = inside // width
    return band * BAND + inside - feature * width, feature


@triton.jit
def row_offsets(feature, part, PARTS: tl.constexpr, BLOCKS: tl.constexpr, RUN: tl.constexpr, K_TILE: tl.constexpr):
    """Offsets [features, K_TILE] of the first tile of rows `feature` of the `part`th of PARTS matrices.

    Their blocks, of RUN elements each, take turns; there are BLOCKS. Rows beyond the last block repeat it: never store
    them.
    """
    block = tl.minimum(feature // _BLOCK * PARTS, BLOCKS - PARTS) + part
    return (block * RUN + feature % _BLOCK * K_TILE)[:, None] + tl.arange(0, K_TILE)[None, :]


@triton.jit
def products(
    weights, offsets0, offsets1, weight_scales0, weight_scales1, rows, row_at, scales, scale_at, live, first, last,
    K: tl.constexpr, K_TILE: tl.constexpr, PAIR: tl.constexpr, FEATURES: tl.constexpr, TOKENS: tl.constexpr,
    SHARED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Two tiles of weights times the same tile of tokens: float32 [FEATURES, TOKENS] each.

    Args:
        weights: Pointer to a packed matrix [_, K].
        offsets0, offsets1: From `row_offsets`; without PAIR the second is not read and its result is zero.
        weight_scales0, weight_scales1: None, or pointers to float32 [k tiles, FEATURES]: a scale for each row and tile.
        rows: Pointer to rows of K elements.
        row_at: int64 [TOKENS], where each token's row begins.
        scales, scale_at: None and anything, or as `rows` and `row_at`: a scale for each token and tile.
        live: bool [TOKENS]; the others count as rows of zeros and are not read.
        first, last: Tiles of K to add up. Numbers of the launch: were they constants, a short loop would be unrolled
            and spill.
        SHARED: Bytes of shared memory for the tiles in flight, whose rows are 128 bytes long.
    """
    MOST: tl.constexpr = SHARED // ((FEATURES * (2 if PAIR else 1) + TOKENS) * 128)
    STAGES: tl.constexpr = MOST if MOST < 8 else 8
    column = tl.arange(0, K_TILE)
    at = row_at[:, None] + column[None, :]
    feature = tl.arange(0, FEATURES)
    acc0 = tl.zeros([FEATURES, TOKENS], tl.float32)
    acc1 = tl.zeros([FEATURES, TOKENS], tl.float32)
    for i in tl.range(first, last, num_stages=STAGES):
        step = i * (_BLOCK * K_TILE)
        inside = live[:, None]
        if K // K_TILE * K_TILE != K:
            inside = inside & (column < K - i * K_TILE)[None, :]
        w0 = tl.load(weights + step + offsets0)
        x = tl.trans(tl.load(rows + i * K_TILE + at, mask=inside, other=0.0))
        if scales is None:
            acc0 = add_product(w0, x, acc0, INTERPRET)
            if PAIR:
                acc1 = add_product(tl.load(weights + step + offsets1), x, acc1, INTERPRET)
        else:
            # The tensor cores add up no more than one tile: the rest is float32 arithmetic.
            scale = tl.load(scales + i + scale_at, mask=live, other=0.0)
            nothing = tl.zeros([FEATURES, TOKENS], tl.float32)
            sum0 = add_product(w0, x, nothing, INTERPRET)
            acc0 += sum0 * (tl.load(weight_scales0 + i * FEATURES + feature)[:, None] * scale[None, :])
            if PAIR:
                sum1 = add_product(tl.load(weights + step + offsets1), x, nothing, INTERPRET)
                acc1 += sum1 * (tl.load(weight_scales1 + i * FEATURES + feature)[:, None] * scale[None, :])
    return acc0, acc1


@triton.jit
def store_products(out, row_at, feature, live, value, N: tl.constexpr, INTERPRET: tl.constexpr):
    """Products [features, tokens] to rows of N elements that begin at `row_at`; bfloat16 is rounded once."""
    if out.dtype.element_ty == tl.bfloat16:
        value = to_bfloat16(value, INTERPRET)
    tl.store(out + row_at[None, :] + feature[:, None], value, mask=live[None, :] & (feature < N)[:, None])


@inlined
def add_product(w, x, acc, INTERPRET: tl.constexpr):
    """acc + w @ x: w [FEATURES, K_TILE] of weights, x [K_TILE, TOKENS], acc float32 [FEATURES, TOKENS]."""
    if INTERPRET:
        # Its dot multiplies the bit patterns of bfloat16, and in an order that depends on the number of tokens.
        return acc + tl.sum(w.to(tl.float32)[:, :, None] * x.to(tl.float32)[None, :, :], axis=1)
    return tl.dot(w, x, acc)


@inlined
def to_bfloat16(value, INTERPRET: tl.constexpr):
    """float32 rounded to nearest, ties to even."""
    if INTERPRET:  # which would cut off
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(value == value, bits, 0x7FC0).to(tl.int16)
        return bits.to(tl.bfloat16, bitcast=True)
    return value.to(tl.bfloat16)
