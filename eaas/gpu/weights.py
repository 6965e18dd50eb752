"""The attention worker's weights in device memory: matrices in bfloat16 as the products read them, vectors in float32.

Roles are those of `eaas.model.families.tensors_of`. Queries, keys and values become one matrix, and so do gate and up
of an MLP: a step of few rows is bound by launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eaas.gpu.linear import LinearWeight, Scratch
from eaas.model.families import tensors_of
from eaas.model.spec import ModelSpec, QkNorm
from eaas.worker.decoder import DecoderError, WeightsInvalid, weight_of
from experts.gpu.weights import as_tensor

Source = Callable[[str], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Mlp:
    """A SwiGLU: gate_up [2 * inner, hidden] and down [hidden, inner]."""

    inner: int
    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights:
    """One layer.

    Attributes:
        moe_layer: Its number among MoE layers; -1: its MLP is `dense`.
        qkv: [q_size + 2 * kv_size, hidden], with qkv_bias float32 beside it, which is added before the norms.
        o: [hidden, q_size]; o_bias is added with the residual.
        gate: bfloat16 [experts, hidden]; correction float32 [experts].
        shared_gate: float32 [hidden].
    """

    moe_layer: int
    input_norm: Tensor
    post_norm: Tensor
    qkv: LinearWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: LinearWeight
    o_bias: Tensor | None
    dense: Mlp | None
    gate: Tensor | None
    correction: Tensor | None
    shared: Mlp | None
    shared_gate: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceWeights:
    """All but the routed experts.

    Attributes:
        embed: bfloat16 [vocab, hidden].
    """

    embed: Tensor
    head: LinearWeight
    final_norm: Tensor
    layers: tuple[LayerWeights, ...]

    @classmethod
    def upload(cls, spec: ModelSpec, source: Source, device: torch.device | str) -> DeviceWeights:
        """Bring a model's weights to a device, a role at a time.

        Args:
            source: Role -> tensor of bfloat16 or float32, anywhere; `source_of` makes one of a checkpoint's arrays.

        Raises:
            WeightsInvalid: a weight is missing or has another shape than the spec says.
            DecoderError: widths that the products cannot read.
        """
        narrow = {"hidden": spec.hidden, "query columns": spec.q_size}
        narrow |= {"dense MLP": spec.intermediate, "shared expert": spec.moe.shared_intermediate}
        odd = [f"{name} {size}" for name, size in narrow.items() if size % 8]
        if odd:
            raise DecoderError(
                f"The GPU's products read rows of multiples of 8 columns; this model has {', '.join(odd)}. "
                "Serve it with --device cpu."
            )
        shapes = {role: plan.shape for role, plan in tensors_of(spec).items()}

        def get(role: str, dtype: torch.dtype) -> Tensor:
            tensor = source(role)
            if tuple(tensor.shape) != shapes[role]:
                raise WeightsInvalid(
                    f"Weight {role} has shape {list(tensor.shape)}; the spec needs {list(shapes[role])}."
                )
            return tensor.to(device=device, dtype=dtype).contiguous()

        def vector(role: str) -> Tensor | None:
            return get(role, torch.float32).flatten() if role in shapes else None

        # A step's products run one after another.
        scratch = Scratch.make(device)

        def matrix(*roles: str) -> LinearWeight:
            return LinearWeight.pack(torch.cat([get(role, torch.bfloat16) for role in roles]), scratch)

        def mlp(stem: str) -> Mlp | None:
            if f"{stem}_gate_proj" not in shapes:
                return None
            return Mlp(
                inner=shapes[f"{stem}_gate_proj"][0],
                gate_up=matrix(f"{stem}_gate_proj", f"{stem}_up_proj"),
                down=matrix(f"{stem}_down_proj"),
            )

        order = {layer: number for number, layer in enumerate(spec.moe_layers)}
        layers = []
        for layer in range(spec.layers):
            at = f"{layer}."
            biases = [f"{at}{part}_bias" for part in "qkv"] if spec.qkv_bias else []
            layers.append(
                LayerWeights(
                    moe_layer=order.get(layer, -1),
                    input_norm=get(f"{at}input_norm", torch.float32),
                    post_norm=get(f"{at}post_norm", torch.float32),
                    qkv=matrix(*(at + part for part in "qkv")),
                    qkv_bias=torch.cat([get(role, torch.float32) for role in biases]) if biases else None,
                    q_norm=vector(f"{at}q_norm") if spec.qk_norm is not QkNorm.NONE else None,
                    k_norm=vector(f"{at}k_norm") if spec.qk_norm is not QkNorm.NONE else None,
                    o=matrix(f"{at}o"),
                    o_bias=vector(f"{at}o_bias"),
                    dense=mlp(f"{at}dense"),
                    gate=get(f"{at}gate", torch.bfloat16) if layer in order else None,
                    correction=vector(f"{at}gate_correction"),
                    shared=mlp(f"{at}shared"),
                    shared_gate=vector(f"{at}shared_gate"),
                )
            )
        return cls(
            embed=get("embed", torch.bfloat16),
            head=matrix("embed" if spec.tie_embeddings else "head"),
            final_norm=get("final_norm", torch.float32),
            layers=tuple(layers),
        )


def source_of(weights: Mapping[str, np.ndarray]) -> Source:
    """Weights by role as `eaas.model.loader.load_weights` gives them: float32, or bfloat16 bits as uint16."""
    # A copy: a mapped checkpoint's rows lie at any byte and cannot be written.
    return lambda role: as_tensor(np.array(weight_of(weights, role)))
