"""What the simulated clients ask, and the only right answer to each, known before the first call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from experts.model import Dtype
from tests.experts.steps import NO_EXPERT, Weights, shape_of, to_bits

SHAPE = shape_of(layers=2, experts=4, hidden=16, intermediate=16, top_k=2)
MOST_TOKENS = 6


@dataclass(frozen=True, eq=False)
class Ask:
    """One call and the only right answer to it."""

    layer: int
    n: int
    addresses: tuple[int, int, int]  # rows, ids, gate weights
    before: bytes
    after: bytes
    kept: tuple[object, ...]


@cache
def asks(dtype: Dtype) -> tuple[Weights, tuple[Ask, ...]]:
    """Weights, and calls with answers: few routings, so that one call's reply could pass for another's."""
    rng = np.random.default_rng(4)
    weights = Weights(SHAPE, dtype, 4)
    made: list[Ask] = []
    none = NO_EXPERT
    for layer in range(SHAPE.layers):
        for ids in (
            [[0, 1]],
            [[2, 3]],
            [[1, 2], [3, 0]],
            [[0, 1], [2, none], [1, 3], [none, none], [3, 1], [none, 0]],
        ):
            for _ in range(40):
                n, top_k = np.shape(ids)
                x = to_bits(rng.standard_normal((n, SHAPE.hidden)), dtype)
                listed, gates = np.array(ids, np.uint16), rng.random((n, top_k), dtype=np.float32)
                before = rng.standard_normal((n, SHAPE.hidden)).astype(np.float32)
                after = weights.reference(layer, x, listed, gates, before)
                places = x.ctypes.data, listed.ctypes.data, gates.ctypes.data
                made.append(Ask(layer, n, places, before.tobytes(), after.tobytes(), (x, listed, gates)))
    return weights, tuple(made)
