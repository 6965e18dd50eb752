"""A packed expert gives back the matrices that were packed, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from experts import grouped
from experts.kernels import pack_expert, to_dtype, unpack_expert
from experts.model import Dtype
from experts.quantized import Quantized


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 32), (97, 80), (130, 33), (1, 1)])
def test_what_was_packed_comes_back(dtype: Dtype, hidden: int, intermediate: int) -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    generator = np.random.default_rng(seed)
    gate, up = generator.standard_normal((2, intermediate, hidden), np.float32)
    down = generator.standard_normal((hidden, intermediate), np.float32)
    wanted = [to_dtype(matrix, dtype) for matrix in (gate, up, down)]
    found = unpack_expert(pack_expert(*wanted, dtype))
    for name, one, other in zip(("gate", "up", "down"), found, wanted, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other), f"{name}, seed {seed}"


@pytest.mark.parametrize("dtype", list(grouped.LAYOUTS))
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 32), (97, 80), (130, 33)])
def test_what_was_stored_comes_back_as_it_was(dtype: Dtype, hidden: int, intermediate: int) -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    generator = np.random.default_rng(seed)
    sizes = (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)
    wanted = [grouped.sample(dtype, *size, generator) for size in sizes]
    for one, other in zip(unpack_expert(pack_expert(*wanted, dtype)), wanted, strict=True):
        assert isinstance(one, Quantized) and one.kind is other.kind and one.group == other.group, f"seed {seed}"
        assert np.array_equal(one.codes, other.codes), f"seed {seed}"
        assert np.array_equal(one.scales, other.scales), f"seed {seed}"
        assert other.offsets is None or np.array_equal(one.offsets, other.offsets), f"seed {seed}"


def test_int8_says_that_it_cannot() -> None:
    ones = np.ones((32, 32), np.float32)
    with pytest.raises(ValueError, match="int8 experts cannot be unpacked"):
        unpack_expert(pack_expert(ones, ones, ones, Dtype.INT8))
