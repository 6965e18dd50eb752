"""Finds the tensors of one expert in a checkpoint, however its family stores them.

A checkpoint has a tensor for each matrix of each expert, or one for all experts of a layer: in either orientation,
gate and up behind each other or taking turns, with biases or without, in MXFP4 where GPT-OSS is published. What comes
from here is always the same: gate and up [intermediate, hidden], down [hidden, intermediate].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.model import ExpertShape, FusedNames
from experts.quantized import Codes, Quantized

_READ = ("BF16", "F32", "F16")
_GROUP = 32  # numbers of MXFP4 that share a scale

Matrix = NDArray[np.generic]
_Either = TypeVar("_Either", NDArray[np.generic], Quantized)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertTensors:
    """One expert's weights: float32, bfloat16 bits as uint16, or quantized as the checkpoint holds them."""

    gate: Matrix | Quantized  # [intermediate, hidden]
    up: Matrix | Quantized  # [intermediate, hidden]
    down: Matrix | Quantized  # [hidden, intermediate]
    biases: tuple[Matrix, Matrix, Matrix] | None = None  # of each, as long as it has rows


def tensors_of(checkpoint: Checkpoint, shape: ExpertShape, layer: int, expert: int) -> ExpertTensors:
    """Read one expert.

    Args:
        layer: Counted over MoE layers.

    Raises:
        CheckpointInvalid: a tensor is missing, or has another shape or type than config.json says.
        IndexError: no such MoE layer or expert.
    """
    names = shape.names(layer, expert) if shape.family.prefix else ()
    fused = shape.family.fused
    prefix = fused.prefix.format(layer=shape.layer_ids[layer])
    if names and (names[0] in checkpoint or prefix + fused.gate_up not in checkpoint):
        inner, outer = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
        gate, up, down = (
            _read(checkpoint, name, wanted) for name, wanted in zip(names, (inner, inner, outer), strict=True)
        )
        return ExpertTensors(gate=gate, up=up, down=down)
    return _fused(checkpoint, shape, fused, prefix, expert)


def _fused(
    checkpoint: Checkpoint, shape: ExpertShape, names: FusedNames, prefix: str, expert: int
) -> ExpertTensors:
    both, hidden, inter = 2 * shape.intermediate, shape.hidden, shape.intermediate
    biases = None
    if names.biased:
        gate_up, down = (
            _read(checkpoint, f"{prefix}{name}_bias", (shape.experts, size), expert)
            for name, size in ((names.gate_up, both), (names.down, hidden))
        )
        biases = (*_halves(gate_up, names), down)
    if f"{prefix}{names.gate_up}_blocks" in checkpoint:
        gate_up, down = (
            mxfp4(checkpoint, prefix + name, shape.experts, size, expert)
            for name, size in ((names.gate_up, (both, hidden)), (names.down, (hidden, inter)))
        )
        gate, up = _halves(gate_up, names)
        return ExpertTensors(gate=gate, up=up, down=down, biases=biases)
    wanted = ((hidden, both), (inter, hidden)) if names.transposed else ((both, hidden), (hidden, inter))
    gate_up, down = (
        _read(checkpoint, prefix + name, (shape.experts, *size), expert)
        for name, size in zip((names.gate_up, names.down), wanted, strict=True)
    )
    if names.transposed:
        gate_up, down = gate_up.T, down.T
    gate, up = _halves(gate_up, names)
    return ExpertTensors(gate=gate, up=up, down=down, biases=biases)


def mxfp4(checkpoint: Checkpoint, name: str, experts: int, size: tuple[int, int], expert: int) -> Quantized:
    """One expert's matrix from {name}_blocks, [experts, rows, k / 32, 16], and {name}_scales, [experts, rows, k / 32].

    32 numbers of 4 bits (E2M1), the first of two in the low half of a byte, share a scale: a power of two, its exponent
    plus 127. bfloat16 holds every product.

    Raises:
        CheckpointInvalid: as `tensors_of`.
    """
    rows, k = size
    groups = k // _GROUP
    blocks = _read(checkpoint, name + "_blocks", (experts, rows, groups, _GROUP // 2), expert, ("U8",))
    scales = _read(checkpoint, name + "_scales", (experts, rows, groups), expert, ("U8",))
    pairs = blocks.view(np.uint8)
    codes = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=-1).reshape(rows, k)
    return Quantized(
        kind=Codes.E2M1,
        codes=codes.astype(np.uint8),
        scales=np.ldexp(np.float32(1), scales.astype(np.int32) - 127),
        group=_GROUP,
    )


def _halves(both: _Either, names: FusedNames) -> tuple[_Either, _Either]:
    middle = both.shape[0] // 2
    return (both[::2], both[1::2]) if names.interleaved else (both[:middle], both[middle:])


def _read(
    checkpoint: Checkpoint,
    name: str,
    wanted: tuple[int, ...],
    index: int | None = None,
    dtypes: tuple[str, ...] = _READ,
) -> Matrix:
    tensor, dtype = checkpoint.tensor(name), checkpoint.dtype(name)
    if tensor.shape != wanted:
        raise CheckpointInvalid(f"{name} is {tensor.shape}; config.json says {wanted}.")
    if dtype not in dtypes:
        raise CheckpointInvalid(f"{name} is stored as {dtype}; experts are read from {', '.join(dtypes)}.")
    # Of all experts only the one asked for: a layer may be larger than memory.
    part = tensor if index is None else tensor[index]
    return part.astype(np.float32) if dtype == "F16" else part
