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

from experts.checkpoint import Checkpoint
from experts.formats import Scheme, scheme_of
from experts.matrices import Matrix, read, tensor_of, unpacked, whole
from experts.model import ExpertShape, FusedNames
from experts.quantized import Codes, Quantized

_GROUP = 32  # numbers of MXFP4 that share a scale

Bias = NDArray[np.generic]
_Either = TypeVar("_Either", NDArray[np.generic], Quantized)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertTensors:
    """One expert's weights: float32, bfloat16 bits as uint16, or quantized as the checkpoint holds them."""

    gate: Matrix  # [intermediate, hidden]
    up: Matrix  # [intermediate, hidden]
    down: Matrix  # [hidden, intermediate]
    biases: tuple[Bias, Bias, Bias] | None = None  # of each, as long as it has rows


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
    scheme = scheme_of(checkpoint.config)
    if names and prefix + fused.gate_up not in checkpoint:
        inner, outer = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
        gate, up, down = (
            read(scheme, checkpoint, name.removesuffix(".weight"), *wanted)
            for name, wanted in zip(names, (inner, inner, outer), strict=True)
        )
        return ExpertTensors(gate=gate, up=up, down=down)
    return _fused(scheme, checkpoint, shape, fused, prefix, expert)


def _fused(
    scheme: Scheme, checkpoint: Checkpoint, shape: ExpertShape, names: FusedNames, prefix: str, expert: int
) -> ExpertTensors:
    both, hidden, inter = 2 * shape.intermediate, shape.hidden, shape.intermediate
    biases = None
    if names.biased:
        gate_up, down = (
            tensor_of(checkpoint, f"{prefix}{name}_bias", (shape.experts, size), expert)
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
        whole(scheme, checkpoint, prefix + name, (shape.experts, *size), expert)
        for name, size in zip((names.gate_up, names.down), wanted, strict=True)
    )
    if names.transposed:
        # Groups lie along k, so what is stored across it has none.
        gate_up, down = ((w.dequantized() if isinstance(w, Quantized) else w).T for w in (gate_up, down))
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
    blocks = tensor_of(checkpoint, name + "_blocks", (experts, rows, groups, _GROUP // 2), expert, ("U8",))
    scales = tensor_of(checkpoint, name + "_scales", (experts, rows, groups), expert, ("U8",))
    return Quantized(
        kind=Codes.E2M1,
        codes=unpacked(blocks, 4),
        scales=np.ldexp(np.float32(1), scales.astype(np.int32) - 127),
        group=_GROUP,
    )


def _halves(both: _Either, names: FusedNames) -> tuple[_Either, _Either]:
    middle = both.shape[0] // 2
    return (both[::2], both[1::2]) if names.interleaved else (both[:middle], both[middle:])
