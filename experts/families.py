"""How each family of models spells its experts: fields of config.json, and names of tensors. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum


class DenseLayers(Enum):
    """Which layers of a family have no experts."""

    NONE = "none"
    STEP = "step"  # decoder_sparse_step and mlp_only_layers say
    FIRST = "first"  # the first first_k_dense_replace of them


@dataclass(frozen=True, kw_only=True)
class FusedNames:
    """Tensors that hold all experts of a layer: [experts, ...] each.

    Attributes:
        transposed: [experts, in, out] for x @ W; else [experts, out, in], as matrices of single experts are stored.
        interleaved: gate and up take turns, element by element; else all of gate comes first.
        biased: There are biases beside them, named as they are with "_bias" at the end.
    """

    prefix: str  # {layer} is filled in
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    transposed: bool = False
    interleaved: bool = False
    biased: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertFamily:
    """How one architecture spells its experts.

    Attributes:
        experts_field: Their number; transformers 5 may write num_local_experts instead.
        prefix: Of one expert's tensors, with {layer} and {expert} to be filled in; empty: none has tensors of its own.
        fused: Names of the tensors of all experts of a layer, where a checkpoint has those.
        clamped: Their activation is that of GPT-OSS, not SiLU.
    """

    experts_field: str
    intermediate_field: str
    prefix: str
    fused: FusedNames
    gate: str = "gate_proj.weight"
    up: str = "up_proj.weight"
    down: str = "down_proj.weight"
    dense: DenseLayers = DenseLayers.NONE
    clamped: bool = False


_FUSED = FusedNames(prefix="model.layers.{layer}.mlp.experts.")

_QWEN = ExpertFamily(
    experts_field="num_experts",
    intermediate_field="moe_intermediate_size",
    prefix="model.layers.{layer}.mlp.experts.{expert}.",
    fused=_FUSED,
    dense=DenseLayers.STEP,
)
_DEEPSEEK = replace(_QWEN, experts_field="n_routed_experts", dense=DenseLayers.FIRST)
_MIXTRAL = ExpertFamily(
    experts_field="num_local_experts",
    intermediate_field="intermediate_size",
    prefix="model.layers.{layer}.block_sparse_moe.experts.{expert}.",
    fused=_FUSED,
    gate="w1.weight",
    up="w3.weight",
    down="w2.weight",
)
_OLMOE = replace(_QWEN, intermediate_field="intermediate_size", dense=DenseLayers.NONE)

FAMILIES: Mapping[str, ExpertFamily] = {
    "Qwen3MoeForCausalLM": _QWEN,
    "Qwen2MoeForCausalLM": _QWEN,
    "Qwen3NextForCausalLM": _QWEN,
    "OlmoeForCausalLM": _OLMOE,
    "FlexOlmoForCausalLM": _OLMOE,
    "MixtralForCausalLM": _MIXTRAL,
    "MiniMaxM2ForCausalLM": _MIXTRAL,
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Dots1ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _DEEPSEEK,
    "GptOssForCausalLM": ExpertFamily(
        experts_field="num_local_experts",
        intermediate_field="intermediate_size",
        prefix="",
        fused=replace(_FUSED, transposed=True, interleaved=True, biased=True),
        clamped=True,
    ),
}
