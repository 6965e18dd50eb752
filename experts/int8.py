"""Int8 products in numpy: their definition, which has the bits of every native kernel. Pure.

A group is GROUP consecutive k, padded with zeros. Of a row of activations (bfloat16, widened) or of weights,
each group is quantised alone: scale = largest / 127, q = x * (127 / largest) to the nearest integer, ties to
even. An output starts at 0 and takes the groups in ascending k, each operation rounded to float32:
    out = out + float(sum of qx * qw) * (scale_x * scale_w)
"""

from __future__ import annotations

import numpy as np

GROUP = 64
TILE_ROWS = 64
LEAST = np.float32(2.0**-100)  # a group whose largest magnitude is below counts as zero

_MAGIC = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer


def tile_bytes(k: int) -> int:
    """Bytes of one packed tile of 64 rows: for each group 64 float32 scales, then int8 [k / 4][64 rows][4]."""
    return -(-k // GROUP) * TILE_ROWS * (GROUP + 4)


def quantise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [rows, k] to int8 [rows, groups, GROUP] and scales, float32 [rows, groups].

    A group with an infinity or a NaN has scale NaN.
    """
    rows, k = x.shape
    grouped = np.pad(x, ((0, 0), (0, -k % GROUP))).reshape(rows, -1, GROUP)
    largest = np.abs(grouped).max(axis=2)
    finite = np.isfinite(largest)
    usable = finite & (largest >= LEAST)
    divisor = np.where(usable, largest, np.float32(1))
    inverse = np.where(usable, np.float32(127) / divisor, np.float32(0))
    scales = np.where(usable, divisor / np.float32(127), np.where(finite, np.float32(0), np.float32("nan")))
    scaled = np.where(usable[..., None], grouped, np.float32(0)) * inverse[..., None]
    return np.rint(scaled).astype(np.int8), scales


def product(x: tuple[np.ndarray, np.ndarray], w: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """x @ w.T of quantised rows: float32 [rows of x, rows of w]."""
    out = np.zeros((len(x[0]), len(w[0])), np.float32)
    for group in range(x[0].shape[1]):
        # Partial sums are integers below 2**24: float32 holds them exactly in any order.
        sums = x[0][:, group].astype(np.float32) @ w[0][:, group].astype(np.float32).T
        out += sums * (x[1][:, group, None] * w[1][:, group])
    return out


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + e**-x) of float32, in the steps and hence with the bits of experts/native/simd.h."""
    with np.errstate(over="ignore", invalid="ignore"):
        return x / (np.float32(1) + _exp(-x))


def _exp(x: np.ndarray) -> np.ndarray:
    f32 = np.float32
    bounded = np.where(f32(-104) > x, f32(-104), x)
    bounded = np.where(f32(89) < bounded, f32(89), bounded)
    shifted = _fma(bounded, f32(1.44269504088896341), _MAGIC)
    n = shifted - _MAGIC
    r = _fma(n, f32(2.12194440e-4), _fma(n, f32(-0.693359375), bounded))
    p = np.full_like(r, f32(1.9875691500e-4))
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(p, r, f32(term))
    p = _fma(p, r * r, r) + f32(1)
    power = shifted.view(np.int32) - np.int32(0x4B400000)
    half = power >> 1
    # Two factors, so that subnormal results round once.
    low, high = (((part + 127) << 23).view(np.float32) for part in (half, power - half))
    return p * low * high


def _fma(x: np.ndarray, y: np.ndarray | np.float32, z: np.ndarray | np.float32) -> np.ndarray:
    """x * y + z of float32, rounded once: exact in double but for the sum, which is rounded to odd."""
    product = x.astype(np.float64) * y
    addend = np.broadcast_to(np.asarray(z, np.float64), product.shape)
    total = product + addend
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    raw = total.view(np.int64)
    outward = np.where((error > 0) == (total > 0), 1, -1)
    # A NaN error, of infinite operands, is neither above nor below.
    inexact = (error > 0) | (error < 0)
    return np.where(inexact & (raw & 1 == 0), raw + outward, raw).view(np.float64).astype(np.float32)
