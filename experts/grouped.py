"""The packed layout of quantized weights that kernels read as the checkpoint holds them, in numpy. Pure.

Tiles of 64 rows, each four blocks of 16; in each tile the groups of k follow one another, padded with zeros:

    64 scales         float32, or of MXFP4 their exponents: uint8 e, the scale is 2**(e - 127)
    64 offsets        float32, where the type has them
    codes             [steps][4 blocks][16 rows][2] words of 16 bits, 256 bytes per step

A word holds the codes of every second k, the first in its lowest bits: with n codes in a word, code i of word j of step
s is that of k = 2 * n * s + 2 * i + j within the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experts.model import Dtype
from experts.quantized import Codes, Quantized

TILE_ROWS = 64
_BLOCKS, _BLOCK_ROWS = 4, 16


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How weights of one type are packed.

    Attributes:
        bits: Of a code.
        group: k that share a scale.
        exponents: Scales are powers of two, kept as a byte.
        offsets: There is one beside each scale.
    """

    codes: Codes
    bits: int
    group: int
    exponents: bool = False
    offsets: bool = False

    @property
    def group_bytes(self) -> int:
        """Bytes of one group of a tile."""
        head = (1 if self.exponents else 4) + 4 * self.offsets
        return TILE_ROWS * (head + self.group * self.bits // 8)

    def tile_bytes(self, k: int) -> int:
        """Bytes of one packed tile."""
        return -(-k // self.group) * self.group_bytes


LAYOUTS: Mapping[Dtype, Layout] = {
    Dtype.FP8: Layout(codes=Codes.E4M3, bits=8, group=128),
    Dtype.MXFP4: Layout(codes=Codes.E2M1, bits=4, group=32, exponents=True),
    Dtype.INT4: Layout(codes=Codes.UINT4, bits=4, group=128, offsets=True),
    Dtype.INT4_G32: Layout(codes=Codes.UINT4, bits=4, group=32, offsets=True),
}


def pack(w: Quantized, dtype: Dtype) -> NDArray[np.uint8]:
    """The bytes of W in the layout of `dtype`; padding rows and columns are zero.

    Raises:
        ValueError: the type does not hold these weights as they are.
    """
    layout = LAYOUTS[dtype]
    scales = _regrouped(w, w.scales, dtype)
    if w.kind is Codes.E4M3 and (w.codes & 127 == 127).any():
        raise ValueError("a code of fp8 is NaN (0x7f or 0xff). Check the checkpoint.")
    heads: list[NDArray[np.generic]] = [_exponents(scales) if layout.exponents else scales]
    if layout.offsets:
        heads.append(_regrouped(w, np.zeros_like(w.scales) if w.offsets is None else w.offsets, dtype))
    rows, k = w.shape
    tiles, groups, per_word = -(-rows // TILE_ROWS), -(-k // layout.group), 16 // layout.bits
    codes = np.pad(w.codes, ((0, -rows % TILE_ROWS), (0, -k % layout.group)))
    steps = codes.reshape(tiles, _BLOCKS, _BLOCK_ROWS, groups, -1, per_word, 2)
    words = np.zeros((*steps.shape[:5], 2), np.uint16)
    for i in range(per_word):
        words |= steps[..., i, :].astype(np.uint16) << np.uint16(layout.bits * i)
    parts = [_by_tile(head, tiles) for head in heads]
    parts.append(words.transpose(0, 3, 4, 1, 2, 5))
    flat = [np.ascontiguousarray(part).view(np.uint8).reshape(tiles, groups, -1) for part in parts]
    return np.concatenate(flat, axis=2).reshape(-1)


def unpack(data: NDArray[np.uint8], dtype: Dtype, rows: int, k: int) -> Quantized:
    """What was packed; its groups are those of the type."""
    layout = LAYOUTS[dtype]
    tiles, groups, per_word = -(-rows // TILE_ROWS), -(-k // layout.group), 16 // layout.bits
    packed = data.reshape(tiles, groups, layout.group_bytes)

    def head(first: int, element: type[np.generic]) -> NDArray[np.generic]:
        size = np.dtype(element).itemsize * TILE_ROWS
        part = np.ascontiguousarray(packed[:, :, first : first + size]).view(element)
        return part.transpose(0, 2, 1).reshape(-1, groups)[:rows]

    coded = TILE_ROWS * layout.group * layout.bits // 8
    words = np.ascontiguousarray(packed[:, :, -coded:]).view(np.uint16)
    steps = words.reshape(tiles, groups, -1, _BLOCKS, _BLOCK_ROWS, 1, 2)
    shifts = np.arange(per_word, dtype=np.uint16)[:, None] * np.uint16(layout.bits)
    codes = (steps >> shifts & np.uint16((1 << layout.bits) - 1)).astype(np.uint8)
    codes = codes.transpose(0, 3, 4, 1, 2, 5, 6).reshape(tiles * TILE_ROWS, -1)[:rows, :k]
    if layout.exponents:
        scales = np.ldexp(np.float32(1), head(0, np.uint8).astype(np.int32) - 127)
    else:
        scales = head(0, np.float32)
    return Quantized(
        kind=layout.codes,
        codes=np.ascontiguousarray(codes),
        scales=np.ascontiguousarray(scales, np.float32),
        group=layout.group,
        offsets=head(4 * TILE_ROWS, np.float32).astype(np.float32) if layout.offsets else None,
    )


def interleaved(gate: Quantized, up: Quantized, block: int) -> Quantized:
    """`block` rows of gate, as many of up, and so on; each padded to a multiple of that with codes of zero.

    Raises:
        ValueError: they are stored in different ways.
    """
    if (gate.kind, gate.group, gate.offsets is None) != (up.kind, up.group, up.offsets is None):
        raise ValueError(
            f"gate is stored as {gate.kind.value} in groups of {gate.group}, up as {up.kind.value} in groups of"
            f" {up.group}. Serve them with --dtype bfloat16."
        )

    def both(one: NDArray[Any], other: NDArray[Any], fill: int = 0) -> NDArray[Any]:
        edges = ((0, -len(one) % block), (0, 0))
        padded = [np.pad(each, edges, constant_values=fill) for each in (one, other)]
        blocks = [each.reshape(-1, block, each.shape[1]) for each in padded]
        return np.stack(blocks, axis=1).reshape(-1, one.shape[1])

    offsets = both(gate.offsets, up.offsets) if gate.offsets is not None and up.offsets is not None else None
    return Quantized(
        kind=gate.kind,
        codes=both(gate.codes, up.codes),
        scales=both(gate.scales, up.scales, 1),
        group=gate.group,
        offsets=offsets,
    )


def sample(dtype: Dtype, rows: int, k: int, generator: np.random.Generator) -> Quantized:
    """Random weights of about 1/8, as they are stored in a type."""
    layout = LAYOUTS[dtype]
    # Of FP8 those up to 2, of both signs; of four bits all, of which UINT4's offset makes both signs.
    codes = generator.integers(0, 64 if layout.bits == 8 else 16, (rows, k), np.uint8)
    if layout.bits == 8:
        codes |= generator.integers(0, 2, (rows, k), np.uint8) << 7
    unit = {Codes.E4M3: 0.125, Codes.E2M1: 0.03125, Codes.UINT4: 0.03}[layout.codes]
    shape = (rows, -(-k // layout.group))
    powers = np.ldexp(np.float32(unit), generator.integers(-1, 2, shape)).astype(np.float32)
    if layout.exponents:
        return Quantized(kind=layout.codes, codes=codes, scales=powers, group=layout.group)
    scales = powers * generator.uniform(0.7, 1, shape).astype(np.float32)
    offsets = -scales * generator.integers(6, 10, shape).astype(np.float32) if layout.offsets else None
    return Quantized(kind=layout.codes, codes=codes, scales=scales, group=layout.group, offsets=offsets)


def _regrouped(w: Quantized, values: NDArray[np.float32], dtype: Dtype) -> NDArray[np.float32]:
    """Scales or offsets [rows, groups] of the type's groups. Raises ValueError."""
    layout, k = LAYOUTS[dtype], w.shape[1]
    alike = w.group == layout.group or w.group >= k or w.group % layout.group == 0
    if w.kind is not layout.codes or not alike or (w.offsets is not None and not layout.offsets):
        offset = "" if w.offsets is None else " with offsets"
        raise ValueError(
            f"weights are stored as {w.kind.value} in groups of {w.group}{offset}; {dtype.label} keeps"
            f" {layout.codes.value} in groups of {layout.group} or multiples{' with offsets' * layout.offsets}."
            " Serve them with --dtype bfloat16."
        )
    first = np.arange(0, k, layout.group) // w.group
    return np.ascontiguousarray(values[:, first])


def _exponents(scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Plus 127. Raises ValueError where a scale is no power of two."""
    fraction, exponent = np.frexp(scales)
    if not ((fraction == 0.5) & (exponent > -127)).all():
        wrong = float(scales[(fraction != 0.5) | (exponent <= -127)][0])
        raise ValueError(f"a scale of mxfp4 is {wrong:g}; powers of two from 2**-127 are needed. Check the checkpoint.")
    return (exponent + 126).astype(np.uint8)


def _by_tile(values: NDArray[np.generic], tiles: int) -> NDArray[np.generic]:
    """[rows, groups] as [tiles, groups, 64]."""
    padded = np.pad(values, ((0, tiles * TILE_ROWS - len(values)), (0, 0)))
    return padded.reshape(tiles, TILE_ROWS, -1).transpose(0, 2, 1)
