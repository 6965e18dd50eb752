"""Each output has one fma chain: a row's bits are the same alone, in any batch and in any tile range."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from experts import grouped, kernels, native
from experts.kernels import (
    PackedExpert,
    PackedMatrix,
    ffn,
    ffn_gate_up,
    from_dtype,
    linear,
    pack_expert,
    pack_matrix,
    to_dtype,
)
from experts.model import SWIGLU, Dtype
from tests.experts import packing

SEED = 5
DTYPES = list(Dtype)
KEPT = list(grouped.LAYOUTS)  # as they are stored: test_grouped.py
FLOATS = [Dtype.FLOAT32, Dtype.BFLOAT16]  # int8 has bits rather than bounds: test_int8.py
# Odd sizes on both sides of a block (16), a tile (64), a chunk (64 or 128 steps) and a panel of rows (24).
SIZES = [(1, 1), (16, 2), (63, 65), (64, 64), (65, 127), (130, 129), (200, 257), (321, 300)]


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    """The native library; the instruction set that a test selects is undone."""
    loaded = native.load()
    yield loaded
    assert loaded.experts_isa_select(None) == 0


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest, library: ctypes.CDLL) -> str:
    """Each instruction set in turn, selected."""
    name: str = request.param
    if library.experts_isa_select(name.encode()) != 0:
        pytest.skip(f"needs a CPU with {name}, found {library.experts_isa_name().decode()} as its best")
    return name


def normal(*shape: int, seed: int = SEED) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def matrix(rows: int, k: int, dtype: Dtype) -> tuple[np.ndarray, PackedMatrix]:
    """Weights as the kernels see them (rounded to dtype, as float32), and packed."""
    if dtype in KEPT:
        stored = grouped.sample(dtype, rows, k, np.random.default_rng(SEED))
        return stored.dequantized(), pack_matrix(stored, dtype)
    w = from_dtype(to_dtype(normal(rows, k), dtype))
    return w, pack_matrix(w, dtype)


def expert(inter: int, hidden: int, dtype: Dtype) -> tuple[tuple[np.ndarray, ...], PackedExpert]:
    if dtype in KEPT:
        generator = np.random.default_rng(SEED)
        stored = [grouped.sample(dtype, *size, generator) for size in ((inter, hidden),) * 2 + ((hidden, inter),)]
        return tuple(w.dequantized() for w in stored), pack_expert(*stored, dtype)
    scale = np.float32(hidden**-0.5)
    gate, up = normal(2, inter, hidden) * scale
    down = normal(hidden, inter, seed=SEED + 1) * np.float32(inter**-0.5)
    return (gate, up, down), pack_expert(gate, up, down, dtype)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32) if x.dtype == np.float32 else x


def gamma(k: int) -> float:
    """Error of k float32 fma in a row, relative to the sum of magnitudes (Higham 2002, 3.1)."""
    return k * 2.0**-24 / (1 - k * 2.0**-24)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "k"), SIZES)
def test_linear_is_within_the_bound_of_its_fma_chain(isa: str, dtype: Dtype, rows: int, k: int) -> None:
    w, packed = matrix(rows, k, dtype)
    x = to_dtype(normal(9, k, seed=SEED + 2), dtype)
    wide_x, wide_w = from_dtype(x).astype(np.float64), w.astype(np.float64)
    # VDPBF16PS rounds each of a pair's two steps by its own rule: at most one more unit each.
    chain = 2 * k if isa == "avx512" and dtype is Dtype.BFLOAT16 else k
    bound = gamma(chain) * (np.abs(wide_x) @ np.abs(wide_w).T)
    error = np.abs(linear(packed, x) - wide_x @ wide_w.T)
    assert (error <= bound).all(), f"{(error / bound).max()} of the bound, seed {SEED}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k"), [(65, 131), (130, 300)])
def test_a_row_has_the_same_bits_alone_and_in_every_batch(isa: str, dtype: Dtype, rows: int, k: int) -> None:
    packed = matrix(rows, k, dtype)[1]
    x = to_dtype(normal(70, k, seed=SEED + 2), dtype)
    alone = np.concatenate([linear(packed, x[i : i + 1]) for i in range(70)])
    for m in range(1, 71):
        assert np.array_equal(bits(linear(packed, x[70 - m :])), bits(alone[70 - m :])), f"m {m} seed {SEED}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_experts_row_has_the_same_bits_alone_and_in_every_batch(isa: str, dtype: Dtype) -> None:
    packed = expert(90, 133, dtype)[1]
    x = to_dtype(normal(70, 133, seed=SEED + 2), dtype)
    alone = np.concatenate([ffn(packed, x[i : i + 1]) for i in range(70)])
    for m in (1, 2, 3, 4, 5, 6, 7, 11, 23, 24, 25, 48, 70):
        assert np.array_equal(bits(ffn(packed, x[:m])), bits(alone[:m])), f"m {m} seed {SEED}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 7])
def test_every_tile_range_gives_the_same_bits_and_touches_nothing_else(isa: str, dtype: Dtype, m: int) -> None:
    packed, (_, ffn_packed) = matrix(250, 70, dtype)[1], expert(107, 70, dtype)
    x = to_dtype(normal(m, 70, seed=SEED + 2), dtype)
    for whole, width, count, part in (
        (linear(packed, x), 64, packed.tiles, lambda tiles: linear(packed, x, tiles)),
        (
            ffn_gate_up(ffn_packed, x),
            32,
            ffn_packed.gate_up_tiles,
            lambda tiles: ffn_gate_up(ffn_packed, x, tiles),
        ),
    ):
        assert count == 4
        for first in range(count + 1):
            for last in range(first, count + 1):
                wanted = np.zeros_like(whole)
                columns = slice(first * width, last * width)
                wanted[:, columns] = whole[:, columns]
                assert np.array_equal(bits(part(range(first, last))), bits(wanted)), f"{first}:{last}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", ["avx2", "avx512"])
def test_instruction_sets_of_one_numerics_class_agree_in_every_bit(
    library: ctypes.CDLL, dtype: Dtype, other: str
) -> None:
    packed = expert(205, 131, dtype)[1]
    x = to_dtype(normal(26, 131, seed=SEED + 2), dtype)
    x[3, 5], x[4, 7] = to_dtype(np.array([1e-38, 3e38], np.float32), dtype)  # subnormal products, overflow
    found, classes = [], set()
    for name in ("portable", other):
        if library.experts_isa_select(name.encode()) != 0:
            pytest.skip(f"needs a CPU with {name}, found one without")
        act = ffn_gate_up(packed, x)
        found.append((act, linear(packed.down_matrix, act), to_dtype(normal(1, 77), dtype)))
        classes.add(kernels.numerics_class(dtype))
    dot = dtype in (Dtype.BFLOAT16, *KEPT)
    assert len(classes) == (2 if other == "avx512" and dot else 1)
    for one, two in zip(*found, strict=True) if len(classes) == 1 else ():
        nan = np.isnan(from_dtype(one))
        assert np.array_equal(nan, np.isnan(from_dtype(two))), f"seed {SEED}"
        assert np.array_equal(bits(one)[~nan], bits(two)[~nan]), f"seed {SEED}"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("inter", "hidden"), [(1, 1), (16, 64), (31, 65), (33, 129), (96, 130), (205, 257)])
def test_gate_up_is_within_its_bound(isa: str, dtype: Dtype, inter: int, hidden: int) -> None:
    (gate, up, _), packed = expert(inter, hidden, dtype)
    x = to_dtype(normal(6, hidden, seed=SEED + 2), dtype)
    wide_x = from_dtype(x).astype(np.float64)
    wide_gate, wide_up = (from_dtype(to_dtype(w, dtype)).astype(np.float64) for w in (gate, up))
    g, u = wide_x @ wide_gate.T, wide_x @ wide_up.T
    unit = gamma(2 * hidden)
    error_g, error_u = (unit * (np.abs(wide_x) @ np.abs(w).T) for w in (wide_gate, wide_up))
    silu = SWIGLU.apply(g, np.ones_like(g))
    # |silu'| < 1.1; silu itself is good to 4 units, and the product is rounded to float32, then to the dtype.
    before = 1.1 * error_g * (np.abs(u) + error_u) + np.abs(silu) * error_u + 6 * 2.0**-24 * np.abs(silu * u)
    rounding = 2.0**-8 if dtype is Dtype.BFLOAT16 else 2.0**-24
    bound = before + rounding * (np.abs(silu * u) + before) + 1e-37
    error = np.abs(from_dtype(ffn_gate_up(packed, x)) - silu * u)
    assert (error <= bound).all(), f"{(error / bound).max()} of the bound, seed {SEED}"


def test_silu_survives_every_extreme_gate(isa: str) -> None:
    values = np.array([0, -0.0, 1e-45, -1e-45, 80, -80, 89, -89, 104, -104, 1e10, -1e10, 3e38, -3e38], np.float32)
    gate, up, down = np.array([[1, 0]]), np.array([[0, 1]]), np.ones((2, 1))
    packed = pack_expert(*(w.astype(np.float32) for w in (gate, up, down)), Dtype.FLOAT32)
    x = np.stack([values, np.ones_like(values)], axis=1)
    found = ffn_gate_up(packed, x)[:, 0]
    wanted = SWIGLU.apply(values.astype(np.float64), np.ones_like(values))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-36)
    x[0, 0] = np.nan
    assert np.isnan(ffn_gate_up(packed, x)[0, 0])
    assert np.isfinite(ffn_gate_up(packed, x)[1:]).all()


def test_bfloat16_rounding_is_exact_for_every_upper_half_and_every_kind_of_lower(isa: str) -> None:
    upper = np.arange(1 << 16, dtype=np.uint32)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper << 16 | lower).view(np.float32)
        # Up when beyond the middle, or on it and odd; the exponent carries, up to infinity.
        up = lower > 0x8000 or (lower == 0x8000) & (upper & 1)
        nan = np.isnan(x)
        wanted = (upper + up).astype(np.uint16)
        for found in (
            to_dtype(x, Dtype.BFLOAT16),
            to_dtype(x[:-3], Dtype.BFLOAT16),
            packing.to_bfloat16(x),
        ):
            known = ~nan[: found.size]
            assert np.array_equal(found[known], wanted[: found.size][known]), f"lower {lower:#x}"
            assert np.isnan(from_dtype(found)[~known]).all(), f"lower {lower:#x}"
            assert np.array_equal(found[~known] >> 15, upper[: found.size][~known] >> 15), f"lower {lower:#x}"


def test_rows_may_lie_apart_in_memory(isa: str) -> None:
    packed = matrix(70, 33, Dtype.BFLOAT16)[1]
    wide = to_dtype(normal(12, 80), Dtype.BFLOAT16)
    for view in (
        wide[:, 7:40],
        wide[::2, 7:40],
        wide[::-1, 7:40],
        wide[:, 0:66:2],
        np.asfortranarray(wide[:, 7:40]),
    ):
        assert np.array_equal(linear(packed, view), linear(packed, view.copy()))


def test_no_rows_and_no_tiles_are_no_work(isa: str) -> None:
    packed = matrix(70, 33, Dtype.FLOAT32)[1]
    assert linear(packed, normal(0, 33)).shape == (0, 70)
    assert not linear(packed, normal(2, 33), range(1, 1)).any()


def test_threads_that_split_the_tiles_agree_with_one(library: ctypes.CDLL) -> None:
    packed = matrix(1000, 256, Dtype.BFLOAT16)[1]
    x = to_dtype(normal(5, 256), Dtype.BFLOAT16)
    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(lambda tiles: linear(packed, x, tiles), [range(8), range(8, 16)] * 8))
    whole = linear(packed, x)
    for left, right in zip(halves[::2], halves[1::2], strict=True):
        assert np.array_equal(left + right, whole)


@pytest.mark.parametrize("dtype", [*FLOATS, Dtype.INT8])
@pytest.mark.parametrize("source", [np.float32, np.uint16])
@pytest.mark.parametrize(("rows", "k"), SIZES)
def test_native_packing_matches_the_layout_written_in_numpy(dtype: Dtype, source: type, rows: int, k: int) -> None:
    w, other = (normal(rows, k, seed=seed) for seed in (1, 2))
    if source is np.uint16:
        w, other = packing.to_bfloat16(w), packing.to_bfloat16(other)
    data, packed_expert = pack_matrix(w, dtype).data, pack_expert(w, other, w.T, dtype)
    assert data.ctypes.data % 64 == 0
    assert np.array_equal(data, packing.packed(w, dtype))
    assert np.array_equal(packed_expert.gate_up, packing.packed(packing.interleaved(w, other), dtype))


def test_the_self_test_passes_here_and_catches_a_broken_kernel(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in DTYPES:
        kernels.self_test(dtype)
    whole = kernels.ffn
    monkeypatch.setattr(kernels, "ffn", lambda packed, x: whole(packed, x) * np.float32(1.1))
    with pytest.raises(kernels.KernelsBroken, match="EAAS_ISA=portable"):
        kernels.self_test(Dtype.BFLOAT16)


def test_numerics_classes_tell_vdpbf16_from_fma(isa: str) -> None:
    assert kernels.numerics_class(Dtype.FLOAT32) == "cpu-f32-fma-1"
    wanted = "cpu-bf16-vdpbf16-1" if isa == "avx512" else "cpu-bf16-fma-1"
    assert kernels.numerics_class(Dtype.BFLOAT16) == wanted
    assert kernels.numerics_class(Dtype.INT8) == "cpu-int8-g64-1"
    for dtype, word in zip(KEPT, ("fp8", "mxfp4", "int4", "int4g32"), strict=True):
        assert kernels.numerics_class(dtype) == wanted.replace("bf16", word, 1)
    for dtype in DTYPES:
        assert Dtype.of_class(kernels.numerics_class(dtype)) is dtype
    assert kernels.isa_name() == isa


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pack_matrix(np.zeros((2, 2), np.float64), Dtype.FLOAT32), "weights are float64"),
        (lambda: pack_matrix(np.zeros(2, np.float32), Dtype.FLOAT32), "a matrix of float32"),
        (lambda: pack_expert(normal(4, 2), normal(4, 3), normal(2, 4), Dtype.FLOAT32), "need"),
        (lambda: linear(matrix(4, 3, Dtype.FLOAT32)[1], normal(2, 4)), r"float32 \[m, 3\] is needed"),
        (lambda: linear(matrix(4, 3, Dtype.BFLOAT16)[1], normal(2, 3)), r"uint16 \[m, 3\] is needed"),
        (lambda: linear(matrix(4, 3, Dtype.FLOAT32)[1], normal(2, 3), range(2)), "of 1"),
        (lambda: linear(matrix(4, 3, Dtype.FLOAT32)[1], normal(2, 3), range(-1, 1)), "of 1"),
        (lambda: ffn_gate_up(expert(4, 3, Dtype.FLOAT32)[1], normal(2, 4)), r"\[m, 3\] is needed"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(call: object, text: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=text):
        call()


def isa_of(environment: str) -> subprocess.CompletedProcess[str]:
    code = "from experts import native; print(native.load().experts_isa_name().decode())"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"EAAS_ISA": environment},
        capture_output=True,
        text=True,
    )


def test_the_environment_chooses_the_instruction_set(library: ctypes.CDLL) -> None:
    assert isa_of("portable").stdout.strip() == "portable"
    best = isa_of("").stdout.strip()
    assert library.experts_isa_available(best.encode())
    refused = isa_of("sse9")
    assert refused.returncode and "EAAS_ISA is 'sse9'; this machine can run portable" in refused.stderr
    if not library.experts_isa_available(b"avx512"):
        refused = isa_of("avx512")
        assert refused.returncode and "EAAS_ISA is 'avx512'; this machine can run portable" in refused.stderr
