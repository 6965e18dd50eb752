"""Packed matrix products and the expert's FFN on numpy arrays, in native code.

Definition, for activations x [m, hidden] and one expert's weights:
    act = round(silu(x @ gate.T) * (x @ up.T))   [m, intermediate], in the dtype
    out = act @ down.T                           [m, hidden], float32
Where an expert has biases they are added to each product in float32; `experts.model.Activation` has what
else may be between the two.
Cost: 6 * m * hidden * intermediate flops; 3 * hidden * intermediate elements of weights are read whatever m
is, so up to about four rows the floor is their bytes over the memory's bandwidth.

`ffn_reference` is the definition in numpy: for float32 and bfloat16 to compare with within rounding; int8 products
(`experts.int8`) are exact integers but for few float32 operations, so there native code has the definition's bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experts import grouped, int8, native
from experts.model import SWIGLU, Activation, Dtype
from experts.quantized import Quantized

Weights = NDArray[Any] | Quantized
"""A matrix [rows, k]: float32, bfloat16 bits (uint16), or quantized."""

TILE_ROWS = 64
GATE_UP_COLUMNS = 32  # of the activation, that one 64-row tile of gate_up holds
_BLOCK_ROWS = 16  # of gate, then as many of up


class KernelsBroken(RuntimeError):
    """The native kernels computed something else than the reference on this machine."""


class WeightsBroken(RuntimeError):
    """An expert's weights do not give the row that they should."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedMatrix:
    """W [rows, k] in the packed layout of kernels.h, for out = x @ W.T."""

    dtype: Dtype
    rows: int
    k: int
    data: np.ndarray  # uint8, contiguous, aligned to 64 bytes

    @property
    def tiles(self) -> int:
        """Number of 64-row tiles."""
        return -(-self.rows // TILE_ROWS)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedExpert:
    """One expert: gate and up interleaved by 16 rows, and down; behind each, where it has biases, those of its rows."""

    dtype: Dtype
    hidden: int
    intermediate: int
    gate_up: np.ndarray  # uint8, contiguous, aligned to 64 bytes
    down: np.ndarray
    activation: Activation = SWIGLU
    biased: bool = False

    @property
    def gate_up_tiles(self) -> int:
        """Number of 64-row tiles of gate_up, each 32 columns of the activation."""
        return -(-self.intermediate // GATE_UP_COLUMNS)

    @property
    def down_matrix(self) -> PackedMatrix:
        """The down projection, [hidden, intermediate]."""
        return PackedMatrix(dtype=self.dtype, rows=self.hidden, k=self.intermediate, data=self.down)

    def biases(self, data: np.ndarray, tiles: int) -> np.ndarray | None:
        """float32 [64 * tiles] behind the tiles of `data`, in the order of its rows; None where there are none."""
        return data[-4 * tiles * TILE_ROWS :].view(np.float32) if self.biased else None


def numerics_class(dtype: Dtype) -> str:
    """Name of the arithmetic: two processes with equal names compute equal bits. "cpu-bf16-fma-1", ..."""
    return native.load().experts_numerics_class(dtype).decode()


def isa_name() -> str:
    """Instruction set in use: "portable", "avx2" or "avx512"."""
    return native.load().experts_isa_name().decode()


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Zeroed uint8 array that begins at a multiple of 4096."""
    whole = np.zeros(nbytes + 4096, np.uint8)
    start = -whole.ctypes.data % 4096
    return whole[start : start + nbytes]


def to_dtype(x: np.ndarray, dtype: Dtype) -> np.ndarray:
    """float32 array to rows of `dtype`: bfloat16 by round to nearest even, its bits as uint16."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype is Dtype.FLOAT32:
        return x
    out = np.empty(x.shape, np.uint16)
    native.load().experts_to_dtype(dtype, x.ctypes.data, out.ctypes.data, x.size)
    return out


def from_dtype(x: np.ndarray) -> np.ndarray:
    """Inverse of `to_dtype`, exact: bfloat16 bits (uint16) or float32 to float32."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def pack_matrix(w: Weights, dtype: Dtype) -> PackedMatrix:
    """Pack W [rows, k]. The types that keep weights as they are stored take a Quantized that they hold; the others take
    any, and round what it stands for.

    Raises:
        ValueError: another shape or element type.
    """
    if dtype in grouped.LAYOUTS:
        rows, k = w.shape
        return PackedMatrix(dtype=dtype, rows=rows, k=k, data=_aligned(grouped.pack(_quantized(w, dtype), dtype)))
    w = _weights(w)
    rows, k = w.shape
    library = native.load()
    data = aligned_bytes(library.experts_pack_bytes(dtype, rows, k))
    library.experts_pack_matrix(dtype, w.ctypes.data, _dtype_of(w), rows, k, data.ctypes.data)
    return PackedMatrix(dtype=dtype, rows=rows, k=k, data=data)


def pack_expert(
    gate: Weights,
    up: Weights,
    down: Weights,
    dtype: Dtype,
    *,
    activation: Activation = SWIGLU,
    biases: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> PackedExpert:
    """Pack one expert: gate and up [intermediate, hidden], down [hidden, intermediate], each as `pack_matrix` takes it,
    and biases of each.

    Raises:
        ValueError: shapes do not fit each other, another element type, or int8 with more than SwiGLU.
    """
    if dtype is Dtype.INT8 and (biases is not None or activation != SWIGLU):
        raise ValueError("int8 experts are SwiGLU without biases; serve these in bfloat16 or float32.")
    if not gate.shape == up.shape == down.shape[::-1]:
        raise ValueError(f"gate {gate.shape}, up {up.shape}, down {down.shape}: need [I, H], [I, H], [H, I].")
    inter, hidden = gate.shape
    gate_up = _pack_gate_up(gate, up, dtype)
    packed_down = pack_matrix(down, dtype).data
    if biases is not None:
        halves = [_padded(bias, GATE_UP_COLUMNS).reshape(-1, _BLOCK_ROWS) for bias in biases[:2]]
        gate_up = _with_biases(gate_up, np.stack(halves, axis=1))
        packed_down = _with_biases(packed_down, _padded(biases[2], TILE_ROWS))
    return PackedExpert(
        dtype=dtype,
        hidden=hidden,
        intermediate=inter,
        gate_up=gate_up,
        down=packed_down,
        activation=activation,
        biased=biases is not None,
    )


def _pack_gate_up(gate: Weights, up: Weights, dtype: Dtype) -> np.ndarray:
    inter, hidden = gate.shape
    if dtype in grouped.LAYOUTS:
        one, other = (_quantized(w, dtype) for w in (gate, up))
        return _aligned(grouped.pack(grouped.interleaved(one, other, _BLOCK_ROWS), dtype))
    gate, up = _weights(gate), _weights(up)
    if gate.dtype != up.dtype:
        gate, up = from_dtype(gate), from_dtype(up)
    library = native.load()
    data = aligned_bytes(library.experts_gate_up_bytes(dtype, inter, hidden))
    library.experts_pack_gate_up(
        dtype, gate.ctypes.data, up.ctypes.data, _dtype_of(gate), inter, hidden, data.ctypes.data
    )
    return data


def unpack_matrix(packed: PackedMatrix) -> Weights:
    """W [rows, k] of a packed matrix, of which packing has lost nothing: float32, bfloat16 bits, or as it was stored.

    Raises:
        ValueError: it is packed in int8.
    """
    if packed.dtype in grouped.LAYOUTS:
        return grouped.unpack(packed.data, packed.dtype, packed.rows, packed.k)
    if packed.dtype is Dtype.INT8:
        raise ValueError("int8 experts cannot be unpacked; serve them on CPUs, or in bfloat16 with --dtype.")
    element, per_step = (np.uint16, 2) if packed.dtype is Dtype.BFLOAT16 else (np.float32, 1)
    steps = packed.data.view(element).reshape(packed.tiles, -1, TILE_ROWS, per_step)
    padded = steps.transpose(0, 2, 1, 3).reshape(packed.tiles * TILE_ROWS, -1)
    return np.ascontiguousarray(padded[: packed.rows, : packed.k])


def unpack_expert(packed: PackedExpert) -> tuple[Weights, Weights, Weights]:
    """Gate and up [intermediate, hidden], down [hidden, intermediate], for processors with a layout of their own.

    Raises:
        ValueError: it is packed in int8.
    """
    padded = packed.gate_up_tiles * GATE_UP_COLUMNS
    both = unpack_matrix(PackedMatrix(dtype=packed.dtype, rows=2 * padded, k=packed.hidden, data=packed.gate_up))

    def part(of: NDArray[Any], half: int) -> NDArray[Any]:
        blocks = of.reshape(-1, 2, _BLOCK_ROWS, of.shape[1])
        return np.ascontiguousarray(blocks[:, half].reshape(padded, -1)[: packed.intermediate])

    def half(number: int) -> Weights:
        if not isinstance(both, Quantized):
            return part(both, number)
        offsets = None if both.offsets is None else part(both.offsets, number)
        codes, scales = part(both.codes, number), part(both.scales, number)
        return replace(both, codes=codes, scales=scales, offsets=offsets)

    return half(0), half(1), unpack_matrix(packed.down_matrix)


def linear(packed: PackedMatrix, x: np.ndarray, tiles: range | None = None) -> np.ndarray:
    """x @ W.T in float32, [m, rows]; columns outside `tiles` (default: all) are zero.

    Args:
        x: [m, k], rows of the packed dtype (bfloat16 as uint16), contiguous along k.
        tiles: Contiguous range of 64-row tiles.

    Raises:
        ValueError: x has another type or width, or there are no such tiles.
    """
    x = _activations(x, packed.dtype, packed.k)
    tiles = _tiles(tiles, packed.tiles)
    out = np.zeros((len(x), packed.rows), np.float32)
    native.load().experts_linear(
        packed.dtype, packed.data.ctypes.data, packed.rows, packed.k, x.ctypes.data, _stride(x), len(x),
        out.ctypes.data, packed.rows, tiles.start, tiles.stop,
    )  # fmt: skip
    return out


def ffn_gate_up(expert: PackedExpert, x: np.ndarray, tiles: range | None = None) -> np.ndarray:
    """The activation, as silu(gate) * up, rounded to the dtype, [m, intermediate]; zero outside `tiles`.

    Arguments and errors as for `linear`; a tile is 32 columns.
    """
    x = _activations(x, expert.dtype, expert.hidden)
    tiles = _tiles(tiles, expert.gate_up_tiles)
    act = np.zeros((len(x), expert.intermediate), _element(expert.dtype))
    form = native.form_of(expert.activation, expert.biased)
    native.load().experts_ffn_gate_up_formed(
        form, expert.dtype, expert.gate_up.ctypes.data, expert.hidden, expert.intermediate, x.ctypes.data,
        _stride(x), len(x), act.ctypes.data, expert.intermediate, tiles.start, tiles.stop,
    )  # fmt: skip
    return act


def ffn(expert: PackedExpert, x: np.ndarray) -> np.ndarray:
    """The whole expert on x [m, hidden] in its dtype: float32 [m, hidden].

    Raises:
        ValueError: x has another type or width.
    """
    out = linear(expert.down_matrix, ffn_gate_up(expert, x))
    biases = expert.biases(expert.down, expert.down_matrix.tiles)
    return out if biases is None else out + biases[: expert.hidden]


def ffn_reference(gate: Weights, up: Weights, down: Weights, x: np.ndarray, dtype: Dtype) -> np.ndarray:
    """The expert's definition in double, rounding where the kernels round: weights, x and act to `dtype`.

    All arrays float32 (gate, up [I, H]; down [H, I]; x [m, H]), or weights quantized where the type keeps them so;
    returns float64 [m, H]. For int8, the bits.
    """
    gate, up, down = (_weights(w) for w in (gate, up, down))
    if dtype is Dtype.INT8:
        rows = int8.quantise(from_dtype(to_dtype(x, dtype)))
        gated, upped = (int8.product(rows, int8.quantise(w)) for w in (gate, up))
        act = from_dtype(to_dtype(int8.silu(gated) * upped, dtype))
        return int8.product(int8.quantise(act), int8.quantise(down)).astype(np.float64)
    if dtype not in grouped.LAYOUTS:
        gate, up, down = (from_dtype(to_dtype(w, dtype)) for w in (gate, up, down))
    wide_gate, wide_up, wide_down = (w.astype(np.float64) for w in (gate, up, down))
    wide_x = from_dtype(to_dtype(x, dtype)).astype(np.float64)
    act = SWIGLU.apply(wide_x @ wide_gate.T, wide_x @ wide_up.T)
    return from_dtype(to_dtype(act.astype(np.float32), dtype)).astype(np.float64) @ wide_down.T


def self_test(dtype: Dtype) -> None:
    """Run a small expert through the kernels and compare with the definition.

    Raises:
        KernelsBroken: the results differ by more than rounding explains.
    """
    generator = np.random.default_rng(20250917)
    inter, hidden, m = 80, 97, 7

    def weights(rows: int, k: int) -> Weights:
        if dtype in grouped.LAYOUTS:
            return grouped.sample(dtype, rows, k, generator)
        return generator.standard_normal((rows, k), np.float32) / np.float32(8)

    gate, up, down = weights(inter, hidden), weights(inter, hidden), weights(hidden, inter)
    x = generator.standard_normal((m, hidden), np.float32)
    found = ffn(pack_expert(gate, up, down, dtype), to_dtype(x, dtype))
    wanted = ffn_reference(gate, up, down, x, dtype)
    # One unit of act's rounding, over a row of about 80 terms of size 0.1, plus float32 accumulation.
    bound = {Dtype.FLOAT32: 1e-4, Dtype.INT8: 0.0}.get(dtype, 2e-2)
    error = float(np.abs(found - wanted).max())
    if not error <= bound:
        raise KernelsBroken(
            f"{isa_name()} kernels differ from the definition by {error:.3g} in {dtype.label}; up to {bound}"
            " is rounding. Set EAAS_ISA=portable, and report this machine's CPU."
        )


def answer_of(expert: PackedExpert) -> bytes:
    """SHA-256 of the row that an expert makes of one fixed row: its self-test vector.

    It reads every weight once, so its floor is the expert's bytes over the memory's bandwidth.

    Raises:
        WeightsBroken: the row is not finite.
    """
    # Odd 128ths, of both signs: exact in every dtype, and none is zero.
    probe = (2 * (np.arange(expert.hidden) % 127) - 127).astype(np.float32) / np.float32(128)
    row = ffn(expert, to_dtype(probe[None], expert.dtype))
    if not np.isfinite(row).all():
        raise WeightsBroken("its row is not finite. Check the checkpoint.")
    return hashlib.sha256(row.data).digest()


def _quantized(w: Weights, dtype: Dtype) -> Quantized:
    if isinstance(w, Quantized):
        return w
    raise ValueError(
        f"weights are {w.dtype}; {dtype.label} is of weights that the checkpoint holds so. Serve them with --dtype"
        " bfloat16."
    )


def _weights(w: Weights) -> np.ndarray:
    if isinstance(w, Quantized):
        return w.dequantized()
    if w.ndim != 2 or w.dtype not in (np.float32, np.uint16):
        raise ValueError(f"weights are {w.dtype} {w.shape}; a matrix of float32 or bfloat16 bits (uint16) is needed.")
    return np.ascontiguousarray(w)


def _activations(x: np.ndarray, dtype: Dtype, k: int) -> np.ndarray:
    if x.ndim != 2 or x.shape[1] != k or x.dtype != _element(dtype):
        raise ValueError(f"activations are {x.dtype} {x.shape}; {_element(dtype).__name__} [m, {k}] is needed.")
    rows_apart = x.strides[0] % x.itemsize == 0 and x.strides[0] >= k * x.itemsize
    return x if x.strides[1] == x.itemsize and rows_apart else np.ascontiguousarray(x)


def _aligned(data: np.ndarray) -> np.ndarray:
    aligned = aligned_bytes(data.nbytes)
    aligned[:] = data
    return aligned


def _tiles(tiles: range | None, count: int) -> range:
    if tiles is None:
        return range(count)
    if tiles.step != 1 or not 0 <= tiles.start <= tiles.stop <= count:
        raise ValueError(f"tiles {tiles} of {count}; a contiguous range within them is needed.")
    return tiles


def _stride(x: np.ndarray) -> int:
    return x.strides[0] // x.itemsize


def _element(dtype: Dtype) -> type[np.generic]:
    return np.float32 if dtype is Dtype.FLOAT32 else np.uint16


def _dtype_of(w: np.ndarray) -> Dtype:
    return Dtype.FLOAT32 if w.dtype == np.float32 else Dtype.BFLOAT16


def packed_bytes(dtype: Dtype, tiles: int, k: int, biased: bool = False) -> int:
    """Bytes of that many packed tiles, and of the biases behind them."""
    biases = 4 * TILE_ROWS * biased
    if dtype in grouped.LAYOUTS:
        weights = grouped.LAYOUTS[dtype].tile_bytes(k)
    else:
        weights = int8.tile_bytes(k) if dtype is Dtype.INT8 else TILE_ROWS * (k + k % 2) * dtype.nbytes
    return tiles * (weights + biases)


def _padded(bias: np.ndarray, multiple: int) -> np.ndarray:
    wide = from_dtype(bias).astype(np.float32)
    return np.pad(wide, (0, -len(wide) % multiple))


def _with_biases(packed: np.ndarray, biases: np.ndarray) -> np.ndarray:
    data = aligned_bytes(packed.nbytes + biases.nbytes)
    data[: packed.nbytes], data[packed.nbytes :] = packed, biases.reshape(-1).view(np.uint8)
    return data
