"""The packed layout of kernels.h, written again in numpy."""

from __future__ import annotations

import numpy as np

from experts import int8
from experts.kernels import TILE_ROWS, from_dtype, to_dtype
from experts.model import Dtype


def packed(w: np.ndarray, dtype: Dtype) -> np.ndarray:
    """The bytes of W [rows, k], float32 or bfloat16 bits: uint8."""
    rows, k = w.shape
    if dtype is Dtype.INT8:
        return _packed_int8(np.pad(from_dtype(w), ((0, -rows % TILE_ROWS), (0, 0))))
    padded = np.pad(to_dtype(from_dtype(w), dtype), ((0, -rows % TILE_ROWS), (0, k % 2)))
    per_step = 2 if dtype is Dtype.BFLOAT16 else 1
    steps = padded.reshape(-1, TILE_ROWS, padded.shape[1] // per_step, per_step).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(steps).reshape(-1).view(np.uint8)


def interleaved(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The matrix that is packed of gate and up [intermediate, hidden]: 16 rows of one, then of the other."""
    padded = [np.pad(matrix, ((0, -len(matrix) % 32), (0, 0))) for matrix in (gate, up)]
    both = np.stack([matrix.reshape(-1, 16, gate.shape[1]) for matrix in padded], axis=1)
    return both.reshape(-1, gate.shape[1])


def _packed_int8(w: np.ndarray) -> np.ndarray:
    q, scales = int8.quantise(w)
    tiles, groups = len(w) // TILE_ROWS, q.shape[1]
    steps = q.reshape(tiles, TILE_ROWS, groups, int8.GROUP // 4, 4).transpose(0, 2, 3, 1, 4)
    columns = scales.reshape(tiles, TILE_ROWS, groups).transpose(0, 2, 1)
    parts = (np.ascontiguousarray(part).view(np.uint8).reshape(tiles, groups, -1) for part in (columns, steps))
    return np.concatenate(list(parts), axis=2).reshape(-1)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits (uint16) by definition: nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)
