"""Packed experts back to plain matrices, for processors that have a layout of their own. Pure.

A host packs, checks and gives its experts once, in the layout of experts.kernels; whoever multiplies by other means
reads the same file. bfloat16 and float32 lose nothing on the way; int8 holds other numbers, and is refused.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experts.kernels import GATE_UP_COLUMNS, TILE_ROWS, PackedExpert, PackedMatrix
from experts.model import Dtype

_BLOCK_ROWS = 16  # of gate, then as many of up


def unpack_matrix(packed: PackedMatrix) -> NDArray[np.generic]:
    """W [rows, k] of a packed matrix: float32, or bfloat16 bits as uint16.

    Raises:
        ValueError: it is packed in int8.
    """
    if packed.dtype is Dtype.INT8:
        raise ValueError("int8 experts cannot be unpacked; serve them on CPUs, or in bfloat16 with --dtype.")
    element, per_step = (np.uint16, 2) if packed.dtype is Dtype.BFLOAT16 else (np.float32, 1)
    steps = packed.data.view(element).reshape(packed.tiles, -1, TILE_ROWS, per_step)
    padded = steps.transpose(0, 2, 1, 3).reshape(packed.tiles * TILE_ROWS, -1)
    return np.ascontiguousarray(padded[: packed.rows, : packed.k])


def unpack_expert(
    packed: PackedExpert,
) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
    """(gate [intermediate, hidden], up [intermediate, hidden], down [hidden, intermediate]) of a packed expert.

    Raises:
        ValueError: it is packed in int8.
    """
    padded = packed.gate_up_tiles * GATE_UP_COLUMNS
    both = unpack_matrix(
        PackedMatrix(dtype=packed.dtype, rows=2 * padded, k=packed.hidden, data=packed.gate_up)
    )
    blocks = both.reshape(-1, 2, _BLOCK_ROWS, packed.hidden)
    gate, up = (blocks[:, half].reshape(padded, -1)[: packed.intermediate] for half in (0, 1))
    return np.ascontiguousarray(gate), np.ascontiguousarray(up), unpack_matrix(packed.down_matrix)
