"""Weights that are kept as a checkpoint holds them: the layout, what they compute, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from experts import grouped, native
from experts.formats import experts_dtype, stored_as
from experts.kernels import ffn, from_dtype, linear, pack_expert, pack_matrix, to_dtype, unpack_expert
from experts.model import SWIGLU, Activation, Dtype
from experts.quantized import Codes, Quantized

KEPT = list(grouped.LAYOUTS)
GROUPS = {Dtype.FP8: 128, Dtype.MXFP4: 32, Dtype.INT4: 128, Dtype.INT4_G32: 32}
# Odd sizes on both sides of a block (16), a tile (64) and a group (32 or 128), and rows of more groups than are staged.
SIZES = [(1, 1), (16, 2), (63, 65), (64, 64), (65, 127), (130, 129), (200, 257), (3, 60_001)]


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    library = native.load()
    if library.experts_isa_select(name.encode()) != 0:
        pytest.skip(f"needs a CPU with {name}, found {library.experts_isa_name().decode()} as its best")
    yield name
    assert library.experts_isa_select(None) == 0


@pytest.fixture
def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.default_rng().integers(1 << 31))
    return seed, np.random.default_rng(seed)


def exactly(w: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """W and what its terms add up to at most, in double: nothing is rounded."""
    spread = [
        np.repeat(part, w.group, axis=1)[:, : w.shape[1]].astype(np.float64)
        for part in (w.scales, np.zeros_like(w.scales) if w.offsets is None else w.offsets)
    ]
    scaled = w.kind.values[w.codes].astype(np.float64) * spread[0]
    return scaled + spread[1], np.abs(scaled) + np.abs(spread[1])


@pytest.mark.parametrize("dtype", KEPT)
@pytest.mark.parametrize(("rows", "k"), SIZES)
def test_products_are_within_the_bound_of_their_sums(
    isa: str, dtype: Dtype, rows: int, k: int, fresh: tuple[int, np.random.Generator]
) -> None:
    seed, generator = fresh
    w = grouped.sample(dtype, rows, k, generator)
    x = to_dtype(generator.standard_normal((9 if k < 1000 else 2, k), np.float32), dtype)
    exact, most = exactly(w)
    wide = from_dtype(x).astype(np.float64)
    # As for bfloat16: VDPBF16PS rounds each of a pair's two steps. Beside them there are two more for each group.
    steps = 2 * k + 2 * -(-k // GROUPS[dtype])
    bound = steps * 2.0**-24 / (1 - steps * 2.0**-24) * (np.abs(wide) @ most.T)
    error = np.abs(linear(pack_matrix(w, dtype), x) - wide @ exact.T)
    assert (error <= bound).all(), f"{(error / bound).max()} of the bound, seed {seed}"


@pytest.mark.parametrize("dtype", KEPT)
def test_every_code_is_read_as_its_value_in_every_place(isa: str, dtype: Dtype) -> None:
    """One column of x is 1 and the others 0, so that products are the weights themselves."""
    kind = grouped.LAYOUTS[dtype].codes
    codes = np.flatnonzero(np.isfinite(kind.values)).astype(np.uint8)
    rows, k = max(64, len(codes)), GROUPS[dtype] + 3
    w = Quantized(
        kind=kind,
        codes=np.resize(codes, (rows, k)),
        scales=np.full((rows, 2), 0.25, np.float32),
        group=GROUPS[dtype],
    )
    found = linear(pack_matrix(w, dtype), to_dtype(np.eye(k, dtype=np.float32), dtype))
    assert np.array_equal(found.T, kind.values[w.codes] * np.float32(0.25))


@pytest.mark.parametrize("dtype", KEPT)
@pytest.mark.parametrize("biased", [False, True])
def test_an_expert_computes_its_definition_and_a_row_alone_has_its_bits(
    isa: str, dtype: Dtype, biased: bool, fresh: tuple[int, np.random.Generator]
) -> None:
    seed, generator = fresh
    inter, hidden = 83, 150
    weights = [grouped.sample(dtype, *size, generator) for size in ((inter, hidden),) * 2 + ((hidden, inter),)]
    activation = Activation(alpha=1.702, limit=1.5, shift=1.0) if biased else SWIGLU
    biases = [generator.standard_normal(size, np.float32) * biased for size in (inter, inter, hidden)]
    packed = pack_expert(
        *weights, dtype, activation=activation, biases=(biases[0], biases[1], biases[2]) if biased else None
    )
    x = to_dtype(generator.standard_normal((61, hidden), np.float32), dtype)
    found, wide = ffn(packed, x), from_dtype(x).astype(np.float64)
    gate, up, down = (exactly(w)[0] for w in weights)
    act = activation.apply(wide @ gate.T + biases[0], wide @ up.T + biases[1])
    wanted = from_dtype(to_dtype(act.astype(np.float32), dtype)).astype(np.float64) @ down.T + biases[2]
    # One rounding of act to bfloat16, over rows of 83 terms of its size times about 1/8.
    assert np.abs(found - wanted).max() <= 2.0**-8 * (np.abs(act) @ np.abs(down).T).max(), f"seed {seed}"
    for m in (1, 2, 3, 6, 7, 12, 13, 48, 49):
        assert np.array_equal(ffn(packed, x[:m]), found[:m]), f"m {m}, seed {seed}"


@pytest.mark.parametrize("dtype", KEPT)
@pytest.mark.parametrize(("rows", "k"), SIZES[:-1])
def test_what_was_packed_comes_back(dtype: Dtype, rows: int, k: int, fresh: tuple[int, np.random.Generator]) -> None:
    seed, generator = fresh
    w, other = (grouped.sample(dtype, rows, k, generator) for _ in range(2))
    found = grouped.unpack(pack_matrix(w, dtype).data, dtype, rows, k)
    assert np.array_equal(found.codes, w.codes) and np.array_equal(found.scales, w.scales), f"seed {seed}"
    assert np.array_equal(found.dequantized(), w.dequantized()), f"seed {seed}"
    down = grouped.sample(dtype, k, rows, generator)
    back = unpack_expert(pack_expert(w, other, down, dtype))
    for one, given in zip(back, (w, other, down), strict=True):
        assert isinstance(one, Quantized)
        assert np.array_equal(one.dequantized(), given.dequantized()), f"seed {seed}"


def test_larger_groups_are_repeated_and_smaller_ones_refused() -> None:
    generator = np.random.default_rng(3)

    def stored(group: int, k: int = 256) -> Quantized:
        codes = generator.integers(0, 16, (64, k), np.uint8)
        scales = generator.random((64, -(-k // group)), np.float32)
        return Quantized(kind=Codes.UINT4, codes=codes, scales=scales, group=group, offsets=-scales)

    for group, dtype in ((256, Dtype.INT4), (64, Dtype.INT4_G32), (1000, Dtype.INT4), (96, Dtype.INT4_G32)):
        w = stored(group)
        packed = pack_matrix(w, dtype)
        found = grouped.unpack(packed.data, dtype, *w.shape)
        assert np.array_equal(found.dequantized(), w.dequantized())
    with pytest.raises(ValueError, match="uint4 in groups of 64 with offsets; int4 keeps uint4 in groups of 128"):
        pack_matrix(stored(64), Dtype.INT4)
    with pytest.raises(ValueError, match="fp8 keeps e4m3 in groups of 128 or multiples"):
        pack_matrix(stored(128), Dtype.FP8)
    with pytest.raises(ValueError, match="gate is stored as uint4 in groups of 128, up as uint4 in groups of 32"):
        pack_expert(stored(128, 64), stored(32, 64), stored(128, 64), Dtype.INT4)


def test_what_is_no_number_is_refused_by_name() -> None:
    ones = np.ones((64, 1), np.float32)
    nan = Quantized(kind=Codes.E4M3, codes=np.full((64, 128), 0xFF, np.uint8), scales=ones, group=128)
    with pytest.raises(ValueError, match="a code of fp8 is NaN"):
        pack_matrix(nan, Dtype.FP8)
    for scale in (3.0, 0.0, np.inf, 2.0**-128):
        odd = Quantized(kind=Codes.E2M1, codes=np.zeros((64, 32), np.uint8), scales=ones * np.float32(scale), group=32)
        with pytest.raises(ValueError, match="a scale of mxfp4 is"):
            pack_matrix(odd, Dtype.MXFP4)
    with pytest.raises(ValueError, match="mxfp4 is of weights that the checkpoint holds so"):
        pack_matrix(ones, Dtype.MXFP4)


@pytest.mark.parametrize("exponent", [-127, -126, 0, 127])
def test_every_scale_of_mxfp4_is_read(isa: str, exponent: int) -> None:
    codes, scales = np.full((64, 32), 2, np.uint8), np.full((64, 1), np.ldexp(1.0, exponent), np.float32)
    w = Quantized(kind=Codes.E2M1, codes=codes, scales=scales, group=32)
    x = to_dtype(np.eye(1, 32, dtype=np.float32), Dtype.MXFP4)
    assert (linear(pack_matrix(w, Dtype.MXFP4), x) == np.ldexp(np.float32(1), exponent)).all()


def test_experts_are_served_as_they_are_stored_where_nothing_else_is_asked_for() -> None:
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    assert stored_as(config) is Dtype.MXFP4 and stored_as({}) is None
    assert experts_dtype("auto", config, KEPT) is Dtype.MXFP4
    assert experts_dtype("auto", config, []) is Dtype.BFLOAT16
    assert experts_dtype("float32", config, KEPT) is Dtype.FLOAT32
    assert Dtype.resolve("auto", config | {"dtype": "float16"}) is Dtype.BFLOAT16
