"""A quantized matrix as a checkpoint holds it: a code for each number, and what groups of k share. Pure.

    W[row, k] = value(codes[row, k]) * scales[row, k // group] + offsets[row, k // group]

Each operation is rounded to float32. Where the scales are those of a reference that computes in float16 or bfloat16,
its weights are these rounded once more: nothing here is lost on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray


def _e4m3() -> NDArray[np.float32]:
    """Values of float8_e4m3fn: sign, 4 bits of exponent with a bias of 7, 3 of mantissa; no infinity, two NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    size = np.where(code & 127 == 127, np.nan, size)
    return np.where(code < 128, size, -size).astype(np.float32)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Codes(Enum):
    """What a code stands for."""

    E4M3 = "e4m3"
    E2M1 = "e2m1"
    UINT4 = "uint4"
    INT8 = "int8"

    @property
    def values(self) -> NDArray[np.float32]:
        """The value of each code; four bits have 16 of them."""
        return _VALUES[self]


_VALUES = {
    Codes.E4M3: _e4m3(),
    Codes.E2M1: _E2M1,
    Codes.UINT4: np.arange(16, dtype=np.float32),
    Codes.INT8: np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantized:
    """W [rows, k].

    Attributes:
        codes: uint8 [rows, k], one in each byte, whatever it takes in the file.
        scales: float32 [rows, groups]; the last group may be shorter than the others.
        offsets: float32 [rows, groups]; None: zero.

    Raises:
        ValueError: the shapes do not fit each other.
    """

    kind: Codes
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    group: int
    offsets: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        rows, k = self.codes.shape
        wanted = (rows, -(-k // self.group))
        if self.scales.shape != wanted or (self.offsets is not None and self.offsets.shape != wanted):
            raise ValueError(
                f"{rows} x {k} codes in groups of {self.group} need scales, and offsets, of shape {wanted}; found"
                f" {self.scales.shape} and {None if self.offsets is None else self.offsets.shape}."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and k."""
        rows, k = self.codes.shape
        return rows, k

    def dequantized(self) -> NDArray[np.float32]:
        """W."""
        k = self.codes.shape[1]
        group = min(self.group, k)
        values = self.kind.values[self.codes]
        wide = values * np.repeat(self.scales, group, axis=1)[:, :k]
        return wide if self.offsets is None else wide + np.repeat(self.offsets, group, axis=1)[:, :k]

    def __getitem__(self, rows: slice) -> Quantized:
        """Some of its rows."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return Quantized(
            kind=self.kind, codes=self.codes[rows], scales=self.scales[rows], group=self.group, offsets=offsets
        )
