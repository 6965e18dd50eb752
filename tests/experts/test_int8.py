"""int8 products: every bit is that of the definition, written here again, number by number."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from experts import int8, native
from experts.kernels import ffn_gate_up, from_dtype, linear, pack_expert, pack_matrix, to_dtype
from experts.model import SWIGLU, Dtype

SEED = 8
INT8 = Dtype.INT8
# Odd sizes on both sides of a block (16), a group and a tile (64), and of two and three groups.
SIZES = [(1, 1), (16, 4), (63, 65), (64, 64), (65, 127), (130, 129), (200, 190)]
MOST = 70  # rows: beyond two panels


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn."""
    name, library = request.param, native.load()
    if library.experts_isa_select(name.encode()) != 0:
        pytest.skip(f"needs a CPU with {name}, found {library.experts_isa_name().decode()} as its best")
    yield name
    assert library.experts_isa_select(None) == 0


def normal(*shape: int, seed: int = SEED) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rows(m: int, k: int, seed: int = SEED + 1) -> np.ndarray:
    """bfloat16 rows whose groups differ in size by orders of magnitude."""
    scale = np.exp(np.random.default_rng(seed).standard_normal((m, k // 64 + 1)) * 3).repeat(64, axis=1)
    return to_dtype(normal(m, k, seed=seed) * scale[:, :k].astype(np.float32), INT8)


def quantised(row: np.ndarray) -> list[tuple[list[int], np.float32]]:
    """One row, group by group: its integers and its scale."""
    out = []
    for first in range(0, len(row), 64):
        group = [np.float32(value) for value in row[first : first + 64]]
        largest = max(abs(value) for value in group)
        inverse = np.float32(127) / largest
        # round() of a Python float is exact and takes ties to even.
        out.append(([round(float(value * inverse)) for value in group], largest / np.float32(127)))
    return out


def defined(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x @ w.T by Python's integers and numpy's float32 scalars."""
    ours, theirs = [quantised(row) for row in x], [quantised(row) for row in w]
    out = np.zeros((len(x), len(w)), np.float32)
    for i, row in enumerate(ours):
        for j, column in enumerate(theirs):
            total = np.float32(0)
            for (qx, scale_x), (qw, scale_w) in zip(row, column, strict=True):
                exact = sum(a * b for a, b in zip(qx, qw, strict=True))
                total = total + np.float32(exact) * (scale_x * scale_w)
            out[i, j] = total
    return out


def same_bits(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    kind = np.uint32 if found.dtype == np.float32 else np.uint16
    wrong = int((found.view(kind) != wanted.view(kind)).sum())
    assert not wrong, f"{what}: {wrong} of {found.size} values differ, seed {SEED}"


@pytest.mark.parametrize(("columns", "k"), SIZES)
def test_every_product_has_the_bits_of_the_definition(isa: str, columns: int, k: int) -> None:
    w, x = normal(columns, k), rows(4, k)
    same_bits(linear(pack_matrix(w, INT8), x), defined(from_dtype(x), w), f"{columns} x {k}")


@pytest.mark.parametrize("k", [65, 190])
def test_a_row_has_the_same_bits_alone_in_every_batch_and_over_any_threads(isa: str, k: int) -> None:
    packed, x = pack_matrix(normal(200, k), INT8), rows(MOST, k)
    alone = np.concatenate([linear(packed, x[i : i + 1]) for i in range(MOST)])
    for m in range(1, MOST + 1):
        same_bits(linear(packed, x[MOST - m :]), alone[MOST - m :], f"{m} rows")
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(lambda tiles: linear(packed, x, tiles), [range(1), range(1, 3), range(3, 4)]))
    same_bits(parts[0] + parts[1] + parts[2], alone, "three threads")


def test_a_row_of_more_groups_than_are_held_at_once(isa: str) -> None:
    """1,024 groups are quantised at a time; from 33 on, fewer rows are."""
    for k in (33 * 64, 1024 * 64, 1024 * 64 + 70):
        w, x = normal(65, k), to_dtype(normal(40, k, seed=2), INT8)[: 40 if k < 10_000 else 3]
        wanted = int8.product(int8.quantise(from_dtype(x)), int8.quantise(w))
        same_bits(linear(pack_matrix(w, INT8), x), wanted, f"k {k}")


def test_the_greatest_integers_of_every_sign_do_not_saturate(isa: str) -> None:
    for signs in ((1, 1), (1, -1), (-1, -1)):
        x, w = np.full((5, 128), signs[0], np.float32), np.full((64, 128), signs[1], np.float32)
        found = linear(pack_matrix(w, INT8), to_dtype(x, INT8))
        same_bits(found, defined(x, w), f"signs {signs}")
        np.testing.assert_allclose(found, 128 * signs[0] * signs[1], rtol=1e-6)


def test_empty_tiny_and_infinite_groups(isa: str) -> None:
    w, x = normal(64, 192), from_dtype(rows(6, 192))
    w[3, :64] = 0.0
    w[4] = 2.0**-110
    x[1, 64:128] = -0.0
    x[2] = 2.0**-110
    x[3, 5], x[4, 70] = np.inf, np.nan
    found = linear(pack_matrix(w, INT8), to_dtype(x, INT8))
    assert np.isnan(found[3:5]).all(), "a row that is not finite must not pass for one that is"
    assert not found[2].any() and not found[[0, 1, 5], 4].any(), "below the least magnitude a group is zero"
    w[4], x[2] = 0.0, 0.0
    finite = [0, 1, 2, 5]
    wanted = int8.product(int8.quantise(from_dtype(to_dtype(x[finite], INT8))), int8.quantise(w))
    same_bits(found[finite], wanted, "beside a row that is not finite")
    exact = from_dtype(to_dtype(x[finite], INT8)).astype(np.float64) @ w.T.astype(np.float64)
    assert np.abs(found[finite] - exact).max() < 0.03 * np.abs(exact).max(), f"seed {SEED}"


def test_weights_that_are_not_finite_make_their_column_so(isa: str) -> None:
    w = normal(64, 70)
    w[7, 3], w[8, 69] = np.nan, -np.inf
    found = linear(pack_matrix(w, INT8), rows(2, 70))
    assert np.array_equal(np.isnan(found).all(axis=0), np.isin(np.arange(64), (7, 8)))


@pytest.mark.parametrize(("inter", "hidden"), [(1, 1), (31, 65), (33, 129), (96, 64)])
def test_swiglu_is_right_and_has_the_same_bits_everywhere(isa: str, inter: int, hidden: int) -> None:
    gate, up = normal(2, inter, hidden) * np.float32(2)
    gate[0] *= np.float32(40)  # far into both ends of the exponential
    x = to_dtype(normal(5, hidden, seed=3), INT8)
    found = ffn_gate_up(pack_expert(gate, up, gate.T.copy(), INT8), x)
    g, u = (defined(from_dtype(x), w) for w in (gate, up))
    same_bits(found, to_dtype(int8.silu(g) * u, INT8), f"{inter} x {hidden}")
    wanted = SWIGLU.apply(g.astype(np.float64), u)
    np.testing.assert_allclose(from_dtype(found), wanted, rtol=2.0**-8 + 2.0**-20, atol=1e-37)


def test_silu_in_numpy_is_within_four_units_of_the_truth() -> None:
    x = np.concatenate([normal(5000) * np.float32(30), np.array([0, -0.0, 88.5, -88.5, -103, 3e38, -3e38], np.float32)])
    wanted = SWIGLU.apply(x.astype(np.float64), np.ones_like(x))
    np.testing.assert_allclose(int8.silu(x), wanted, rtol=4 * 2.0**-24, atol=1e-36)
    assert np.isnan(int8.silu(np.array([np.nan], np.float32))).all()
