"""Row operations around the attention worker's products: embedding, RMS norm, SwiGLU, and what queries and keys need.

Definition, per row of the float32 residual stream x [hidden]:
    embed      x = embedding[token]
    add_norm   x += addend (+ bias), x += scale * shared; x / sqrt(mean(x^2) + eps) * weight
    swiglu     silu(gate) * up
    place      queries and keys of the fused projection [q | k | v]: + bias, RMS norm of each head or of the whole
               projection, clip, rotation by the tables of `eaas.worker.decoder.rope_tables`; queries go to the
               attention kernel, keys and values into the paged cache, all as bfloat16
One program computes a row (or a row's heads of one key head) whatever the batch, by one order of additions. Each takes
n_rows, int32 [1] on the device: the rows that count. ShapeInvalid: a tensor has another type or shape.

Cache of one layer: keys and values [blocks, kv_heads, block_tokens, head_dim]: what one key head has of a block is
contiguous, since one program of attention reads just that.

Cost per row: embed 6 * hidden bytes; add_norm up to 16 * hidden (x read and written, addend read, norm and what
rounding took from it written); swiglu 10 * inner; place 6 bytes a column. 256 rows of 4096 at 4.3 TB/s: 5 us at most,
about what a launch costs.
"""
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from experts.gpu.tiles import inlined, to_bfloat16
from p2p.device import INTERPRET


class ShapeInvalid(ValueError):
    """A tensor has another type, shape or layout than a kernel needs; the text says which."""


def check(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """Refuse a tensor that a kernel would misread.

    Args:
        shape: Sizes; None: any. The first may be larger than asked for: buffers have room for the largest batch.

    Raises:
        ShapeInvalid: another type or shape, or rows that are not contiguous.
    """
    found = list(tensor.shape)
    fits = len(found) == len(shape) and all(
        size is None or have == size or (place == 0 and have > size)
        for place, (have, size) in enumerate(zip(found, shape, strict=True))
    )
    if tensor.dtype != dtype or not fits or not tensor.is_contiguous():
        laid = "contiguous" if tensor.is_contiguous() else "strided"
        sizes = ["any" if size is None else size for size in shape]
        raise ShapeInvalid(
            f"{name} is {laid} {tensor.dtype} {found}; contiguous {dtype} {sizes} is needed. Give it that way."
        )


def add_norm_reference(x: Tensor, addend: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, and its norm; in the type of x."""
    total = x + addend
    return total, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight


def rotate_reference(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Heads [rows, heads, head_dim] turned by tables [rows, head_dim / 2]."""
    low, high = x.chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), -1)


def embed(table: Tensor, tokens: Tensor, x: Tensor, n_rows: Tensor) -> None:
    """x[row] = table[tokens[row]] for the first n_rows rows.

    Args:
        table: bfloat16 [vocab, hidden].
        tokens: int32 [rows].
        x: float32 [rows, hidden], written.
    """
    rows, hidden = len(tokens), table.shape[1]
    check("table", table, torch.bfloat16, None, hidden)
    check("tokens", tokens, torch.int32, rows)
    check("x", x, torch.float32, rows, hidden)
    check("n_rows", n_rows, torch.int32, 1)
    block = triton.next_power_of_2(hidden)
    embed_kernel[(rows,)](table, tokens, x, n_rows, hidden, BLOCK=block, num_warps=4, enable_fp_fusion=False)


def add_norm(
    x: Tensor, weight: Tensor, n_rows: Tensor, eps: float, *, out: Tensor, addend: Tensor | None = None,
    bias: Tensor | None = None, shared: Tensor | None = None, scale: Tensor | None = None,
    low: Tensor | None = None, share_weight: Tensor | None = None, share: Tensor | None = None,
    pick: Tensor | None = None,
) -> None:  # fmt: skip
    """Add to the residual stream what the last part of a layer computed, and norm it for the next.

    Args:
        x: float32 [rows, hidden]; with an addend and without `pick` it is written.
        weight: float32 [hidden].
        n_rows: int32 [1]: rows that count; with `pick`, picked rows.
        out: bfloat16 [rows, hidden], written: the norm.
        addend: float32 [rows, hidden], added to x, with `bias` float32 [hidden] where given.
        shared: float32 [rows, hidden], added after that, times `scale` float32 [rows] where given.
        low: bfloat16 [rows, hidden], written: what rounding took from the norm, so that out + low has 16 bits.
        share_weight: float32 [hidden]; `share` float32 [rows] becomes sigmoid(norm . share_weight).
        pick: int32 [rows]: row i of `out` is the norm of row pick[i]; x is left alone.
    """
    rows, hidden = len(out) if pick is None else len(pick), x.shape[1]
    check("x", x, torch.float32, None if pick is not None else rows, hidden)
    check("weight", weight, torch.float32, hidden)
    check("n_rows", n_rows, torch.int32, 1)
    check("out", out, torch.bfloat16, rows, hidden)
    columns = (("bias", bias), ("share_weight", share_weight))
    for name, vector in columns:
        if vector is not None:
            check(name, vector, torch.float32, hidden)
    for name, matrix in (("addend", addend), ("shared", shared)):
        if matrix is not None:
            check(name, matrix, torch.float32, rows if pick is None else None, hidden)
    if low is not None:
        check("low", low, torch.bfloat16, rows, hidden)
    for name, vector in (("scale", scale), ("share", share)):
        if vector is not None:
            check(name, vector, torch.float32, rows if pick is None else None)
    if pick is not None:
        check("pick", pick, torch.int32, rows)
    if (share is None) != (share_weight is None):
        raise ShapeInvalid("share and share_weight belong together; give both or neither.")
    block = triton.next_power_of_2(hidden)
    add_norm_kernel[(rows,)](
        x, addend, bias, shared, scale, weight, out, low, share_weight, share, pick, n_rows, hidden, eps,
        BLOCK=block, INTERPRET=INTERPRET, num_warps=8 if block > 4096 else 4, enable_fp_fusion=False,
    )  # fmt: skip


def swiglu(gate_up: Tensor, out: Tensor, n_rows: Tensor) -> None:
    """out = silu(gate) * up for the first n_rows rows.

    Args:
        gate_up: float32 [rows, 2 * inner]: all gates of a row, then all ups.
        out: bfloat16 [rows, inner], written.
    """
    rows, inner = out.shape
    check("gate_up", gate_up, torch.float32, rows, 2 * inner)
    check("out", out, torch.bfloat16, rows, inner)
    check("n_rows", n_rows, torch.int32, 1)
    block = min(1024, triton.next_power_of_2(inner))
    swiglu_kernel[(rows, triton.cdiv(inner, block))](
        gate_up, out, n_rows, inner, BLOCK=block, INTERPRET=INTERPRET, num_warps=4, enable_fp_fusion=False
    )


def place(
    qkv: Tensor, bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, cosines: Tensor,
    sines: Tensor, positions: Tensor, seqs: Tensor, tables: Tensor, queries: Tensor, keys: Tensor,
    values: Tensor, n_rows: Tensor, eps: float, clip: float,
) -> None:  # fmt: skip
    """Finish queries, keys and values of the first n_rows rows; keys and values go into the cache.

    Args:
        qkv: float32 [rows, (q_heads + 2 * kv_heads) * head_dim].
        bias: float32, as many columns; or None.
        q_norm, k_norm: float32 [head_dim] each: every head is normed; or [q_heads * head_dim] and [kv_heads *
            head_dim]: the whole projection is; or None.
        cosines, sines: float32 [positions, head_dim / 2].
        positions: int32 [rows].
        seqs: int32 [rows]: row of `tables`.
        tables: int32 [sequences, blocks]: cache block of each block_tokens positions.
        queries: bfloat16 [rows, q_heads, head_dim], written.
        keys, values: bfloat16 [blocks, kv_heads, block_tokens, head_dim], written where the rows' positions are.
        clip: Bound of all three before rotation; 0: none.
    """
    rows, q_heads, dim = queries.shape
    blocks, kv_heads, block_tokens, _ = keys.shape
    columns = (q_heads + 2 * kv_heads) * dim
    check("qkv", qkv, torch.float32, rows, columns)
    check("queries", queries, torch.bfloat16, rows, q_heads, dim)
    for name, cache in (("keys", keys), ("values", values)):
        check(name, cache, torch.bfloat16, blocks, kv_heads, block_tokens, dim)
    for name, table in (("cosines", cosines), ("sines", sines)):
        check(name, table, torch.float32, None, dim // 2)
    for name, row in (("positions", positions), ("seqs", seqs)):
        check(name, row, torch.int32, rows)
    check("tables", tables, torch.int32, None, tables.shape[1])
    check("n_rows", n_rows, torch.int32, 1)
    if bias is not None:
        check("bias", bias, torch.float32, columns)
    norm = 0
    if q_norm is not None and k_norm is not None:
        norm = 1 if len(q_norm) == dim and len(k_norm) == dim else 2
        check("q_norm", q_norm, torch.float32, dim if norm == 1 else q_heads * dim)
        check("k_norm", k_norm, torch.float32, dim if norm == 1 else kv_heads * dim)
    group = q_heads // kv_heads
    place_kernel[(rows, kv_heads)](
        qkv, bias, q_norm, k_norm, cosines, sines, positions, seqs, tables, queries, keys, values, n_rows,
        tables.shape[1], eps, clip,
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, BLOCK_TOKENS=block_tokens, NORM=norm, CLIP=clip > 0,
        GROUP_PAD=triton.next_power_of_2(group), HALF_PAD=triton.next_power_of_2(dim // 2),
        Q_PAD=triton.next_power_of_2(q_heads * dim), KV_PAD=triton.next_power_of_2(kv_heads * dim),
        INTERPRET=INTERPRET, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def embed_kernel(table, tokens, x, n_rows, hidden, BLOCK: tl.constexpr):
    """A program copies one row."""
    row = tl.program_id(0)
    if row < tl.load(n_rows):
        column = tl.arange(0, BLOCK)
        inside = column < hidden
        token = tl.load(tokens + row).to(tl.int64)
        value = tl.load(table + token * hidden + column, mask=inside)
        tl.store(x + row.to(tl.int64) * hidden + column, value.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["scale", "share", "pick"])
def add_norm_kernel(
    x, addend, bias, shared, scale, weight, out, low, share_weight, share, pick, n_rows, hidden, eps,
    BLOCK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A program adds and norms one row."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(n_rows):
        source = row
        if pick is not None:
            source = tl.load(pick + row).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < hidden
        value = tl.load(x + source * hidden + column, mask=inside, other=0.0)
        if addend is not None:
            more = tl.load(addend + source * hidden + column, mask=inside, other=0.0)
            if bias is not None:
                more += tl.load(bias + column, mask=inside, other=0.0)
            value += more
        if shared is not None:
            more = tl.load(shared + source * hidden + column, mask=inside, other=0.0)
            if scale is not None:
                more *= tl.load(scale + source)
            value += more
        # Several picks may name one row, so only a pass over all rows may change them.
        if pick is None and (addend is not None or shared is not None):
            tl.store(x + source * hidden + column, value, mask=inside)
        mean = tl.sum(value * value, 0) / hidden
        normed = value * (1.0 / tl.sqrt_rn(mean + eps)) * tl.load(weight + column, mask=inside, other=0.0)
        rounded = to_bfloat16(normed, INTERPRET)
        tl.store(out + row * hidden + column, rounded, mask=inside)
        if low is not None:
            rest = normed - rounded.to(tl.float32)
            tl.store(low + row * hidden + column, to_bfloat16(rest, INTERPRET), mask=inside)
        if share is not None:
            dot = tl.sum(normed * tl.load(share_weight + column, mask=inside, other=0.0), 0)
            tl.store(share + row, 1.0 / (1.0 + tl.exp(-dot)))


@triton.jit
def swiglu_kernel(gate_up, out, n_rows, inner, BLOCK: tl.constexpr, INTERPRET: tl.constexpr):
    """A program computes BLOCK columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(n_rows):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < inner
        gate = tl.load(gate_up + row * 2 * inner + column, mask=inside, other=0.0)
        up = tl.load(gate_up + row * 2 * inner + inner + column, mask=inside, other=0.0)
        act = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + row * inner + column, to_bfloat16(act, INTERPRET), mask=inside)


@inlined
def _inverse_of_all(first, bias, columns, eps, PAD: tl.constexpr):
    """1 / root mean square of `columns` values, bias added."""
    column = tl.arange(0, PAD)
    value = tl.load(first + column, mask=column < columns, other=0.0)
    if bias is not None:
        value += tl.load(bias + column, mask=column < columns, other=0.0)
    return 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / columns + eps)


@inlined
def _finish(
    source, bias, norm, inverse, head, cosine, sine, eps, clip,
    DIM: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr, ROTATE: tl.constexpr, HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    """Both halves of HEADS heads from `head` on: bias, norm, clip, rotation; [HEADS_PAD, HALF_PAD] each."""
    number = tl.arange(0, HEADS_PAD)[:, None]
    place = tl.arange(0, HALF_PAD)[None, :]
    inside = (number < HEADS) & (place < DIM // 2)
    low_at = (head + number) * DIM + place
    high_at = low_at + DIM // 2
    low = tl.load(source + low_at, mask=inside, other=0.0)
    high = tl.load(source + high_at, mask=inside, other=0.0)
    if bias is not None:
        low += tl.load(bias + low_at, mask=inside, other=0.0)
        high += tl.load(bias + high_at, mask=inside, other=0.0)
    if NORM == 1:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM
        each = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
        low = low * each * tl.load(norm + place, mask=place < DIM // 2, other=0.0)
        high = high * each * tl.load(norm + place + DIM // 2, mask=place < DIM // 2, other=0.0)
    if NORM == 2:
        low = low * inverse * tl.load(norm + low_at, mask=inside, other=0.0)
        high = high * inverse * tl.load(norm + high_at, mask=inside, other=0.0)
    if CLIP:
        low = tl.minimum(tl.maximum(low, -clip), clip)
        high = tl.minimum(tl.maximum(high, -clip), clip)
    if ROTATE:
        turned = low * cosine - high * sine
        high = high * cosine + low * sine
        low = turned
    return low, high


@triton.jit(do_not_specialize_on_alignment=["positions", "seqs"])
def place_kernel(
    qkv, bias, q_norm, k_norm, cosines, sines, positions, seqs, tables, queries, keys, values, n_rows,
    table_blocks, eps, clip,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    NORM: tl.constexpr, CLIP: tl.constexpr, GROUP_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
    Q_PAD: tl.constexpr, KV_PAD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A program finishes one key head of one row, and the query heads that share it."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    if row < tl.load(n_rows):
        q_columns: tl.constexpr = KV_HEADS * GROUP * DIM
        kv_columns: tl.constexpr = KV_HEADS * DIM
        q = qkv + row * (q_columns + 2 * kv_columns)
        k = q + q_columns
        v = k + kv_columns
        k_bias = bias
        v_bias = bias
        if bias is not None:
            k_bias = bias + q_columns
            v_bias = bias + q_columns + kv_columns
        position = tl.load(positions + row)
        half = tl.arange(0, HALF_PAD)[None, :]
        angle = position.to(tl.int64) * (DIM // 2) + half
        cosine = tl.load(cosines + angle, mask=half < DIM // 2, other=0.0)
        sine = tl.load(sines + angle, mask=half < DIM // 2, other=0.0)
        q_inverse = 1.0
        k_inverse = 1.0
        if NORM == 2:
            q_inverse = _inverse_of_all(q, bias, q_columns, eps, Q_PAD)
            k_inverse = _inverse_of_all(k, k_bias, kv_columns, eps, KV_PAD)
        low, high = _finish(
            q, bias, q_norm, q_inverse, kv_head * GROUP, cosine, sine, eps, clip,
            DIM, NORM, CLIP, True, GROUP, GROUP_PAD, HALF_PAD,
        )  # fmt: skip
        number = tl.arange(0, GROUP_PAD)[:, None]
        inside = (number < GROUP) & (half < DIM // 2)
        to = queries + row * q_columns + (kv_head * GROUP + number) * DIM + half
        tl.store(to, to_bfloat16(low, INTERPRET), mask=inside)
        tl.store(to + DIM // 2, to_bfloat16(high, INTERPRET), mask=inside)

        table = tables + tl.load(seqs + row).to(tl.int64) * table_blocks
        block = tl.load(table + position // BLOCK_TOKENS).to(tl.int64)
        slot = (block * KV_HEADS + kv_head) * BLOCK_TOKENS + position % BLOCK_TOKENS
        to = slot * DIM + half
        low, high = _finish(
            k, k_bias, k_norm, k_inverse, kv_head, cosine, sine, eps, clip, DIM, NORM, CLIP, True, 1, 1, HALF_PAD
        )
        tl.store(keys + to, to_bfloat16(low, INTERPRET), mask=half < DIM // 2)
        tl.store(keys + to + DIM // 2, to_bfloat16(high, INTERPRET), mask=half < DIM // 2)
        low, high = _finish(
            v, v_bias, k_norm, k_inverse, kv_head, cosine, sine, eps, clip, DIM, 0, CLIP, False, 1, 1, HALF_PAD
        )
        tl.store(values + to, to_bfloat16(low, INTERPRET), mask=half < DIM // 2)
        tl.store(values + to + DIM // 2, to_bfloat16(high, INTERPRET), mask=half < DIM // 2)
