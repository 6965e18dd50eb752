"""simd.h computes the same bits under every instruction set, and the right ones."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from p2p.build import COMMON, ISA_FLAGS, ROOT, run_compiler
from tests.experts.packing import to_bfloat16

SOURCE = Path(__file__).parent / "simd_probe.isa.cpp"
SEED = 11


def runs(isa: str) -> bool:
    """Whether this CPU has the instruction set, by the kernel's own words."""
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    return {"portable": True, "avx2": "avx2" in flags, "avx512": "avx512_bf16" in flags}[isa]


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ctypes.CDLL]:
    """simd.h under every instruction set of this CPU, compiled for the test."""
    found = {}
    for isa in filter(runs, ISA_FLAGS):
        path = tmp_path_factory.mktemp("simd") / f"{isa}.so"
        flags = [*COMMON, *ISA_FLAGS[isa], f"-DEAAS_ISA_{isa.upper()}=1", f"-DEAAS_ISA_NS=isa_{isa}"]
        run_compiler([*flags, "-I", str(ROOT), "-shared", str(SOURCE), "-o", str(path)])
        found[isa] = ctypes.CDLL(str(path))
    return found


def apply(probe: ctypes.CDLL, name: str, *arrays: np.ndarray, out: int | None = None) -> np.ndarray:
    """Call probe_`name` on float32 arrays of one length."""
    padded = [np.resize(np.asarray(array, np.float32), -(-array.size // 16) * 16) for array in arrays]
    result = np.zeros(out or padded[0].size, np.float32)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*padded, result)]
    getattr(probe, f"probe_{name}")(*pointers, ctypes.c_uint64(padded[0].size))
    return result[: out or arrays[0].size]


def everywhere(probes: Mapping[str, ctypes.CDLL], name: str, *arrays: np.ndarray, out: int | None = None) -> np.ndarray:
    """The one result of all instruction sets, which must agree in every bit (NaN is NaN)."""
    results = {isa: apply(probe, name, *arrays, out=out) for isa, probe in probes.items()}
    first = results["portable"]
    for isa, result in results.items():
        same = (result.view(np.uint32) == first.view(np.uint32)) | (np.isnan(result) & np.isnan(first))
        assert same.all(), f"{name} under {isa} differs from portable at {np.flatnonzero(~same)[:5]}, seed {SEED}"
    return first


def all_magnitudes(count: int, seed: int = SEED) -> np.ndarray:
    """Random bit patterns: every exponent, subnormals, infinities, NaN."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, np.uint32)
    special = np.array([0, 1 << 31, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000], np.uint32)
    return np.concatenate([special, bits]).view(np.float32)


def ulp_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest distance, in units in the last place of the exact float64 value rounded to float32."""
    spacing = np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64)
    return float((np.abs(found - wanted) / spacing).max())


def test_exp_is_within_1_1_ulp_over_the_whole_range(probes: Mapping[str, ctypes.CDLL]) -> None:
    x = np.concatenate([np.linspace(-87.3, 88.72, 400_000), np.linspace(-1e-3, 1e-3, 10_001)]).astype(np.float32)
    assert ulp_error(everywhere(probes, "exp", x), np.exp(x.astype(np.float64))) < 1.1


def test_exp_rounds_into_subnormals_and_saturates_at_both_ends(probes: Mapping[str, ctypes.CDLL]) -> None:
    low = np.linspace(-103.9, -87.4, 10_000).astype(np.float32)
    assert ulp_error(everywhere(probes, "exp", low), np.exp(low.astype(np.float64))) <= 1.5
    x = np.array([0, -0.0, 88.73, 89, 1e4, np.inf, -104, -105, -1e30, -np.inf, np.nan], np.float32)
    wanted = np.array([1, 1, np.inf, np.inf, np.inf, np.inf, 0, 0, 0, 0, np.nan], np.float32)
    np.testing.assert_array_equal(everywhere(probes, "exp", x), wanted)


def test_silu_keeps_its_limits(probes: Mapping[str, ctypes.CDLL]) -> None:
    x = np.array([0, -0.0, 1e-45, -1e-45, 88, -88, 104, -104, 3e38, -3e38, np.inf, np.nan], np.float32)
    found = everywhere(probes, "silu", x)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-36)
    assert np.array_equal(np.signbit(found[:-1]), np.signbit(x[:-1]))
    dense = np.linspace(-80, 80, 100_000).astype(np.float32)
    exact = dense / (1 + np.exp(-dense.astype(np.float64)))
    assert ulp_error(everywhere(probes, "silu", dense), exact) < 4


def test_fma_rounds_once_everywhere(probes: Mapping[str, ctypes.CDLL]) -> None:
    x, y, z = (all_magnitudes(200_000, SEED + i) for i in range(3))
    with np.errstate(all="ignore"):
        y[7::3] = np.float32(1) / x[7::3]  # products near 1, to meet addends near -1
        z[7::3] = np.float32(-1)
        z[8::3] = -(x[8::3] * y[8::3])  # what is left is the product's rounding error
    found = everywhere(probes, "fma", x, y, z)
    libm = ctypes.CDLL("libm.so.6").fmaf
    libm.argtypes, libm.restype = [ctypes.c_float] * 3, ctypes.c_float
    for i in (*range(3000), *range(3000, len(x), 97)):
        wanted = np.float32(libm(x[i], y[i], z[i]))
        assert np.array_equal(found[i], wanted, equal_nan=True), (x[i], y[i], z[i], found[i], wanted)


def test_max_and_min_return_the_second_where_one_is_nan(probes: Mapping[str, ctypes.CDLL]) -> None:
    x, y = all_magnitudes(5000), all_magnitudes(5000, SEED + 1)
    np.testing.assert_array_equal(everywhere(probes, "max", x, y), np.where(x > y, x, y))
    np.testing.assert_array_equal(everywhere(probes, "min", x, y), np.where(x < y, x, y))


def test_plain_arithmetic_is_ieee(probes: Mapping[str, ctypes.CDLL]) -> None:
    x, y = all_magnitudes(5000), all_magnitudes(5000, SEED + 1)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(everywhere(probes, "divide", x, y), (x - y) / -y)
        np.testing.assert_array_equal(everywhere(probes, "sqrt", x), np.sqrt(x))
    everywhere(probes, "splat", np.repeat(all_magnitudes(300), 16))
    assert np.signbit(apply(probes["portable"], "splat", np.full(16, -0.0))).all()


def test_reductions_follow_one_tree(probes: Mapping[str, ctypes.CDLL]) -> None:
    x = np.random.default_rng(SEED).standard_normal(16 * 500).astype(np.float32) * 1000
    tree = x.reshape(-1, 16)
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    np.testing.assert_array_equal(everywhere(probes, "sum", x, out=500), tree[:, 0])
    # Not numbers and both zeros among them: where either is NaN, and where both are zero, the second.
    odd = np.where(np.random.default_rng(SEED).random(x.shape) < 0.7, x, all_magnitudes(len(x))[-len(x) :])
    odd[::7], odd[3::11] = 0.0, -0.0
    odd[5 * 16 :: 37] = np.nan
    tree = odd.reshape(-1, 16)
    while tree.shape[1] > 1:
        low, high = np.split(tree, 2, axis=1)
        tree = np.where(low > high, low, high)
    found = everywhere(probes, "max_of", odd, out=500)
    np.testing.assert_array_equal(found, tree[:, 0])
    np.testing.assert_array_equal(np.signbit(found), np.signbit(tree[:, 0]))


def test_bfloat16_pairs_split_into_even_and_odd(probes: Mapping[str, ctypes.CDLL]) -> None:
    pairs = np.arange(1 << 16, dtype=np.uint16)
    for isa, probe in probes.items():
        even, odd = np.zeros((2, 1 << 15), np.uint32)
        addresses = (ctypes.c_void_p(array.ctypes.data) for array in (pairs, even, odd))
        probe.probe_bf16_pairs(*addresses, ctypes.c_uint64(1 << 15))
        assert np.array_equal(even >> 16, pairs[::2]) and np.array_equal(odd >> 16, pairs[1::2]), isa
        assert not (even & 0xFFFF).any() and not (odd & 0xFFFF).any(), isa


@pytest.mark.parametrize("count", range(17))
def test_partial_loads_and_stores_touch_nothing_behind(probes: Mapping[str, ctypes.CDLL], count: int) -> None:
    x = np.random.default_rng(SEED).standard_normal(16).astype(np.float32)
    rounded = to_bfloat16(x)
    for isa, probe in probes.items():
        out, half = np.full(16, 7, np.float32), np.full(16, 7, np.uint16)
        addresses = (ctypes.c_void_p(array.ctypes.data) for array in (x, out, half))
        probe.probe_part(*addresses, ctypes.c_uint(count))
        assert np.array_equal(out, np.where(np.arange(16) < count, x, 7)), isa
        assert np.array_equal(half, np.where(np.arange(16) < count, rounded, 7)), isa
