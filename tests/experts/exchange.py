"""An expert client's call with numpy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from experts.backend import HostArrays
from experts.client import ExpertClient
from experts.model import Dtype


def exchange(
    client: ExpertClient,
    layer: int,
    rows: NDArray[Any],
    ids: NDArray[np.uint16],
    weights: NDArray[np.float32],
    deadline_s: float | None = None,
) -> NDArray[np.float32]:
    """What `apply` gives, in float32; rows are float32, or bfloat16 as uint16."""
    assert all(array.flags.c_contiguous for array in (rows, ids, weights)) and ids.dtype == np.uint16
    out = np.empty((len(rows), client.shape.hidden), np.float32)
    given = Dtype.FLOAT32 if rows.dtype == np.float32 else Dtype.BFLOAT16
    arrays = HostArrays(
        layer, rows.ctypes.data, given, len(rows), ids.ctypes.data, 2, weights.ctypes.data, out.ctypes.data,
        Dtype.FLOAT32,
    )  # fmt: skip
    client.apply(arrays, deadline_s)
    return out
