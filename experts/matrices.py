"""Reads matrices of quantized checkpoints, each as it is stored.

    fp8                 X.weight (E4M3) with X.weight_scale_inv of each block, or X.weight_scale of all
    compressed-tensors  X.weight (E4M3 or int8) with X.weight_scale of each row, block or of all; or 4 or 8 bits packed
                        along k in X.weight_packed, with X.weight_scale [rows, groups] and perhaps X.weight_zero_point
    gptq                X.qweight packed along k, X.qzeros, X.scales [groups, rows], X.g_idx: the group of each column
    awq                 X.qweight [k, rows / 8], X.qzeros and X.scales [groups, rows]
What is in none of these forms is stored plainly: the tensors tell, whichever modules config.json excepts.
Sources: compressed_tensors.compressors, gptqmodel.nn_modules.qlinear, awq.modules.linear, transformers.integrations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.formats import Scheme
from experts.quantized import Codes, Quantized

PLAIN = ("BF16", "F32", "F16")
_CODES = {"F8_E4M3": Codes.E4M3, "I8": Codes.INT8}
# Where in a word of AWQ the code of its column 0, 1, ... is: its kernels unpack even ones first.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]

Matrix = NDArray[np.generic] | Quantized
"""W [rows, k]: float32, bfloat16 bits as uint16, or as stored."""


def holds(scheme: Scheme, checkpoint: Checkpoint, name: str) -> bool:
    """Whether a module's matrix is quantized."""
    weight = f"{name}.weight"
    return bool(scheme.method) and (
        any(tensor in checkpoint for tensor in (f"{weight}_packed", f"{name}.qweight"))
        or (weight in checkpoint and (checkpoint.dtype(weight) in _CODES or bool(checkpoint.coded(weight))))
    )


def size_of(scheme: Scheme, checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """Rows and columns of a module's matrix, as its tensors have them. Raises CheckpointInvalid."""
    if f"{name}.weight_packed" in checkpoint:
        rows, k = tensor_of(checkpoint, f"{name}.weight_shape", (2,), dtypes=("I32", "I64"))
        return int(rows), int(k)
    words = f"{name}.qweight" in checkpoint
    first, last = (1, 1, *checkpoint.shape(f"{name}.{'qweight' if words else 'weight'}"))[-2:]
    if not words:
        return first, last
    stored = scheme.stored(name)
    in_word = 4 if stored and stored.codes is Codes.INT8 else 8
    return (last * in_word, first) if scheme.method == "awq" else (last, first * in_word)


def read(scheme: Scheme, checkpoint: Checkpoint, name: str, rows: int, k: int) -> Matrix:
    """W [rows, k] of a module.

    Args:
        name: Of the module, whose tensors are {name}.weight or others.

    Returns:
        As stored; float32 where columns were permuted into groups.

    Raises:
        CheckpointInvalid: a tensor is missing, or has another shape or type than config.json says.
    """
    if f"{name}.weight_packed" in checkpoint:
        return _packed(scheme, checkpoint, name, rows, k)
    if f"{name}.qweight" in checkpoint:
        return (_awq if scheme.method == "awq" else _gptq)(scheme, checkpoint, name, rows, k)
    return whole(scheme, checkpoint, f"{name}.weight", (rows, k))


def whole(
    scheme: Scheme, checkpoint: Checkpoint, name: str, wanted: tuple[int, ...], expert: int | None = None
) -> Matrix:
    """W of a tensor with a code in each element, beside it {name}_scale_inv or {name}_scale; or of a plain one.

    Args:
        wanted: [rows, k]; of a tensor of all experts of a layer [experts, rows, k].
        expert: Which of them.

    Raises:
        CheckpointInvalid: as `read`.
    """
    if expert is None and checkpoint.shape(name) == wanted and (coded := checkpoint.quantized(name)) is not None:
        return coded
    kind = _CODES.get(dtype := checkpoint.dtype(name))
    if kind is None or not scheme.method:
        return tensor_of(checkpoint, name, wanted, expert)
    codes = tensor_of(checkpoint, name, wanted, expert, (dtype,)).view(np.uint8)
    beside = f"{name}_scale_inv" if f"{name}_scale_inv" in checkpoint else f"{name}_scale"
    found = checkpoint.shape(beside)
    # One scale may be that of all experts.
    scales = _floats(checkpoint, beside, found, expert if found[:1] == wanted[:1] else None)
    rows, k = codes.shape
    group = k
    if scales.size == 1:
        scales = np.full((rows, 1), scales.item(), np.float32)
    elif scheme.block and scales.shape == (-(-rows // scheme.block[0]), -(-k // scheme.block[1])):
        scales, group = np.repeat(scales, min(scheme.block[0], rows), axis=0)[:rows], scheme.block[1]
    elif scales.shape == (rows,) or (scales.ndim == 2 and len(scales) == rows):
        scales = scales.reshape(rows, -1)
        group = _group(beside, k, scales.shape[1])
    else:
        raise CheckpointInvalid(
            f"{beside} is {scales.shape}; {rows} x {k} in blocks of {scheme.block} need one for each block, for"
            " each row, or for all."
        )
    zeros, stored = f"{name}_zero_point", scheme.stored(name.removesuffix(".weight"))
    if kind is Codes.INT8 and (zeros in checkpoint or (stored and stored.asymmetric)):
        found = tensor_of(checkpoint, zeros, scales.shape, dtypes=("I8",)).view(np.uint8)
        return _integers(codes ^ np.uint8(128), found ^ np.uint8(128), scales, 8, group)
    return Quantized(kind=kind, codes=codes, scales=scales, group=group)


def _packed(scheme: Scheme, checkpoint: Checkpoint, name: str, rows: int, k: int) -> Matrix:
    weight = f"{name}.weight"
    bits, packed = _words(checkpoint, f"{weight}_packed", rows, k)
    groups = _groups(checkpoint, f"{weight}_scale", -1)
    scales = _floats(checkpoint, f"{weight}_scale", (rows, groups))
    zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    stored = scheme.stored(name)
    if f"{weight}_zero_point" in checkpoint or (stored and stored.asymmetric):
        wanted = (-(-rows * bits // 32), groups)
        words = tensor_of(checkpoint, f"{weight}_zero_point", wanted, dtypes=("I32",))
        zeros = unpacked(words.T, bits)[:, :rows].T
    codes = unpacked(packed, bits)[:, :k]
    if f"{weight}_g_idx" in checkpoint or (stored and stored.permuted):
        columns = _columns(checkpoint, f"{weight}_g_idx", k, groups)
        return _integers(codes, zeros, scales, bits, k, columns)
    return _integers(codes, zeros, scales, bits, _group(f"{weight}_scale", k, groups))


def _gptq(scheme: Scheme, checkpoint: Checkpoint, name: str, rows: int, k: int) -> Matrix:
    bits, packed = _words(checkpoint, f"{name}.qweight", rows, k, across=True)
    groups = _groups(checkpoint, f"{name}.scales", 0)
    scales = _floats(checkpoint, f"{name}.scales", (groups, rows)).T
    wanted = (groups, -(-rows * bits // 32))
    words = tensor_of(checkpoint, f"{name}.qzeros", wanted, dtypes=("I32",)).view(np.uint32)
    if scheme.zeros_less_one:
        words = words + np.uint32(0x11111111 if bits == 4 else 0x01010101)
    zeros = unpacked(words, bits)[:, :rows].T
    stored = scheme.stored(name)
    size = (stored and stored.group) or k
    group = size if -(-k // size) == groups else _group(f"{name}.scales", k, groups)
    columns = None
    if f"{name}.g_idx" in checkpoint or (stored and stored.permuted):
        columns = _columns(checkpoint, f"{name}.g_idx", k, groups)
        columns = None if np.array_equal(columns, np.arange(k) // group) else columns
    return _integers(unpacked(packed, bits)[:, :k], zeros, scales, bits, group, columns)


def _awq(scheme: Scheme, checkpoint: Checkpoint, name: str, rows: int, k: int) -> Matrix:
    def columns(tensor: str, length: int) -> NDArray[np.uint8]:
        words = tensor_of(checkpoint, f"{name}.{tensor}", (length, rows // 8), dtypes=("I32",))
        return unpacked(words, 4).reshape(length, -1, 8)[..., _AWQ_PLACES].reshape(length, rows).T

    groups = _groups(checkpoint, f"{name}.scales", 0)
    scales = _floats(checkpoint, f"{name}.scales", (groups, rows)).T
    group = _group(f"{name}.scales", k, groups)
    return _integers(columns("qweight", k), columns("qzeros", groups), scales, 4, group)


def _integers(
    codes: NDArray[np.uint8],
    zeros: NDArray[np.uint8],
    scales: NDArray[np.float32],
    bits: int,
    group: int,
    columns: NDArray[np.int32] | None = None,
) -> Matrix:
    """(codes - zeros) * scales, of which float32 loses nothing where scales have 16 bits; columns: their groups."""
    if columns is not None:
        return (codes.astype(np.float32) - zeros[:, columns]) * scales[:, columns]
    kind, middle = (Codes.UINT4, 0) if bits == 4 else (Codes.INT8, 128)
    centered = kind is Codes.INT8 and bool(np.all(zeros == middle))
    return Quantized(
        kind=kind,
        codes=np.ascontiguousarray(codes) ^ np.uint8(middle),
        scales=np.ascontiguousarray(scales),
        group=group,
        offsets=None if centered else scales * (middle - zeros.astype(np.float32)),
    )


def _words(
    checkpoint: Checkpoint, name: str, rows: int, k: int, across: bool = False
) -> tuple[int, NDArray[np.generic]]:
    """Bits of a code, and words [rows, ...] that hold k of them; across: stored the other way round."""
    sizes = {bits: (rows, -(-k * bits // 32)) for bits in (4, 8)}
    found = checkpoint.shape(name)
    bits = 8 if (found[::-1] if across else found) == sizes[8] else 4
    words = tensor_of(checkpoint, name, sizes[bits][::-1] if across else sizes[bits], dtypes=("I32",))
    return bits, words.T if across else words


def unpacked(words: NDArray[np.generic], bits: int) -> NDArray[np.uint8]:
    """Codes [rows, k] of words, the lowest first."""
    codes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return codes
    return np.stack([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1).reshape(len(codes), -1)


def _groups(checkpoint: Checkpoint, name: str, axis: int) -> int:
    shape = checkpoint.shape(name)
    if len(shape) != 2 or shape[axis] == 0:
        raise CheckpointInvalid(f"{name} is {shape}; rows and groups are needed, one of each at least.")
    return shape[axis]


def _group(name: str, k: int, groups: int) -> int:
    if groups == 0 or k % groups:
        raise CheckpointInvalid(f"{name} has {groups} groups, into which {k} columns cannot be cut evenly.")
    return k // groups


def _columns(checkpoint: Checkpoint, name: str, k: int, groups: int) -> NDArray[np.int32]:
    columns = tensor_of(checkpoint, name, (k,), dtypes=("I32", "I64")).astype(np.int32)
    if not all(0 <= column < groups for column in (columns.min(), columns.max())):
        raise CheckpointInvalid(f"{name} names groups {columns.min()} to {columns.max()} of {groups}.")
    return columns


def _floats(
    checkpoint: Checkpoint, name: str, wanted: tuple[int, ...], expert: int | None = None
) -> NDArray[np.float32]:
    found = tensor_of(checkpoint, name, wanted, expert)
    return (found.astype(np.uint32) << 16).view(np.float32) if found.dtype == np.uint16 else found.astype(np.float32)


def tensor_of(
    checkpoint: Checkpoint, name: str, wanted: tuple[int, ...], index: int | None = None, dtypes: Sequence[str] = PLAIN
) -> NDArray[np.generic]:
    """A tensor of that shape and one of these types, or of its first axis the one at `index`; float16 as float32.

    Raises:
        CheckpointInvalid: it is missing, or has another shape or type.
    """
    tensor, dtype = checkpoint.tensor(name), checkpoint.dtype(name)
    if tensor.shape != wanted:
        raise CheckpointInvalid(f"{name} is {tensor.shape}; config.json says {wanted}.")
    if dtype not in dtypes:
        raise CheckpointInvalid(f"{name} is stored as {dtype}; it is read from {', '.join(dtypes)}.")
    # Of all experts only the one asked for: a layer may be larger than memory.
    part = tensor if index is None else tensor[index]
    return part.astype(np.float32) if dtype == "F16" else part
