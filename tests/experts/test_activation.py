"""Experts with biases and a clamped activation: the definition, and the bits of a row alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from experts import kernels
from experts.kernels import PackedExpert, ffn, from_dtype, pack_expert, to_dtype
from experts.model import SWIGLU, Activation, ConfigInvalid, Dtype, ExpertShape
from experts.pack import layout_of

SEED = 11
CLAMPED = Activation(alpha=1.702, limit=1.5, shift=1.0)
# As for the plain kernels: one rounding of act in the type, over rows of about 80 terms of size 0.2.
BOUND = {Dtype.FLOAT32: 2e-4, Dtype.BFLOAT16: 5e-2}


def expert(
    inter: int, hidden: int, dtype: Dtype, activation: Activation = CLAMPED
) -> tuple[list[np.ndarray], PackedExpert]:
    """Weights and biases in float32, and packed."""
    generator = np.random.default_rng(SEED)
    sizes = [(inter, hidden), (inter, hidden), (hidden, inter), (inter,), (inter,), (hidden,)]
    arrays = [generator.standard_normal(size, np.float32) / np.float32(4) for size in sizes]
    packed = pack_expert(*arrays[:3], dtype, activation=activation, biases=(arrays[3], arrays[4], arrays[5]))
    return arrays, packed


def applied(activation: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The activation in double, by its definition."""
    gated, upped = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    return gated / (1 + np.exp(-activation.alpha * gated)) * (upped + activation.shift)


def definition(arrays: list[np.ndarray], x: np.ndarray, dtype: Dtype, activation: Activation) -> np.ndarray:
    """In double, rounding where the kernels round."""
    gate, up, down = (from_dtype(to_dtype(a, dtype)).astype(np.float64) for a in arrays[:3])
    wide = from_dtype(x).astype(np.float64)
    act = applied(activation, wide @ gate.T + arrays[3], wide @ up.T + arrays[4])
    return from_dtype(to_dtype(act.astype(np.float32), dtype)).astype(np.float64) @ down.T + arrays[5]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("activation", [CLAMPED, SWIGLU], ids=["clamped", "swiglu"])
def test_the_kernels_compute_the_definition_and_a_row_alone_has_the_same_bits(
    activation: Activation, dtype: Dtype
) -> None:
    # Neither size fills its last tile; 29 rows take the way of many, single ones that of few.
    arrays, packed = expert(83, 97, dtype, activation)
    x = to_dtype(np.random.default_rng(SEED + 1).standard_normal((29, 97), np.float32), dtype)
    found = ffn(packed, x)
    error = float(np.abs(found - definition(arrays, x, dtype, activation)).max())
    assert error <= BOUND[dtype], f"differs by {error:.3g}, seed {SEED}"
    for row in range(len(x)):
        assert np.array_equal(ffn(packed, x[row : row + 1])[0], found[row]), f"row {row}, seed {SEED}"


def test_a_nan_is_passed_on_and_no_number_is_beyond_the_limit() -> None:
    _, packed = expert(40, 40, Dtype.FLOAT32)
    x = np.full((2, 40), 1e4, np.float32)
    x[0, 3] = np.nan
    act = kernels.ffn_gate_up(packed, x)
    assert np.isnan(act[0]).all()
    limit, shift = CLAMPED.limit, CLAMPED.shift
    assert np.abs(act[1]).max() <= limit * (limit + shift)


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"alpha": 0.0}, "alpha 0.0"), ({"limit": -1.0}, "limit -1.0"), ({"shift": math.nan}, "shift nan")],
)
def test_a_senseless_activation_is_refused(fields: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Activation(**fields)


def shape_of(**changes: object) -> ExpertShape:
    """That of a small GPT-OSS."""
    config = {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    return ExpertShape.from_config(config | changes)


def test_gpt_oss_reads_its_activation_and_has_a_numerics_class_of_its_own() -> None:
    shape = shape_of()
    assert (shape.activation, shape.biased) == (Activation(alpha=1.702, limit=7.0, shift=1.0), True)
    assert shape_of(swiglu_alpha=1.5, swiglu_limit=3).activation == Activation(alpha=1.5, limit=3, shift=1.0)
    assert shape.numerics_class("cpu-bf16-fma-1") == "cpu-bf16-fma-1-clamped-1"
    assert layout_of(shape, Dtype.BFLOAT16, "0" * 64).numerics_class.endswith("-clamped-1")
    with pytest.raises(ConfigInvalid, match="swiglu_alpha and swiglu_limit are"):
        shape_of(swiglu_limit=-7)
    with pytest.raises(ConfigInvalid, match="no tensors of single experts"):
        shape.names(0, 0)


def test_int8_refuses_what_it_does_not_compute() -> None:
    with pytest.raises(ConfigInvalid, match=r"not served in int8. Use bfloat16 or float32"):
        layout_of(shape_of(), Dtype.INT8, "0" * 64)
    with pytest.raises(ValueError, match="SwiGLU without biases"):
        expert(32, 32, Dtype.INT8)
