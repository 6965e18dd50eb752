"""What a MoE checkpoint's configuration says about its experts: counts, sizes, what an expert computes between its two
products, and how each family of models spells them: fields of config.json and names of tensors. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

MOST_LAYERS = 4096
MOST_EXPERTS = 1 << 20  # of all layers


class ConfigInvalid(ValueError):
    """config.json lacks a field, or holds a value that cannot be served; the text names it."""


class UnknownArchitecture(ConfigInvalid):
    """config.json names an architecture that is not served; the text lists those that are."""


class Dtype(IntEnum):
    """What a model, or its experts, are served in, as the native libraries number it (kernels.h).

    INT8 is of weights, quantised at load, and of what products read; rows, keys and values are bfloat16. Those after it
    are of experts that a checkpoint holds so (`experts.formats`); their rows, and all else of the model, are bfloat16.
    """

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    FP8 = 3
    MXFP4 = 4
    INT4 = 5
    INT4_G32 = 6

    @property
    def label(self) -> str:
        """Its name in messages; on command lines too "float32", "bfloat16" or "int8"."""
        return self.name.lower().replace("_", "-")

    @property
    def nbytes(self) -> int:
        """Bytes of one element of a row."""
        return 4 if self is Dtype.FLOAT32 else 2

    @classmethod
    def resolve(cls, wanted: str, config: Mapping[str, Any]) -> Dtype:
        """The type to serve in.

        Args:
            wanted: "float32", "bfloat16", "int8", or "auto": bfloat16 where the checkpoint is stored so or is
                quantized, else float32, which holds every float16 value exactly.

        Raises:
            ConfigInvalid: any other word.
        """
        if wanted == "auto":
            stored = config.get("dtype", config.get("torch_dtype"))
            quantized = bool(config.get("quantization_config"))
            return cls.BFLOAT16 if quantized or stored == "bfloat16" else cls.FLOAT32
        for dtype in CHOICES:
            if wanted == dtype.label:
                return dtype
        raise ConfigInvalid(f"dtype {wanted!r} is not served. Use auto, bfloat16, float32 or int8.")

    @classmethod
    def of_class(cls, numerics_class: str) -> Dtype:
        """The type that a numerics class, such as "cpu-bf16-fma-1", serves in.

        Raises:
            ConfigInvalid: it names none.
        """
        for word in numerics_class.split("-"):
            if word in _WORDS:
                return cls(_WORDS.index(word))
        raise ConfigInvalid(f"numerics class {numerics_class!r} names no type; one of {', '.join(_WORDS)} is needed.")


CHOICES = (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.INT8)
"""What a user may ask for, of any checkpoint."""

_WORDS = ("f32", "bf16", "int8", "fp8", "mxfp4", "int4", "int4g32")  # in numerics classes, in the order of Dtype


# Names of tensors of routed experts. Not of shared ones, nor of a gate that a family stores among its experts.
EXPERT_TENSORS = r"\.experts\.(?!e_score_correction_bias)|\.block_sparse_moe\.(in|out)put_linear\."

# Decoder layers with experts, of a configuration and a depth.
LayersOf = Callable[[Mapping[str, Any], int], Sequence[int]]


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
        layers: Which decoder layers have experts.
        clamped: Their activation is that of GPT-OSS, not SiLU.
    """

    experts_field: str
    intermediate_field: str
    prefix: str
    fused: FusedNames
    gate: str = "gate_proj.weight"
    up: str = "up_proj.weight"
    down: str = "down_proj.weight"
    top_k_field: str = "num_experts_per_tok"
    layers: LayersOf = lambda config, depth: range(depth)
    clamped: bool = False


def _stepped(config: Mapping[str, Any], depth: int) -> Sequence[int]:
    """Each decoder_sparse_step-th, but for mlp_only_layers."""
    step = _count(config, "decoder_sparse_step") if "decoder_sparse_step" in config else 1
    dense = _listed(config, "mlp_only_layers")
    if not all(isinstance(layer, int) for layer in dense):
        raise ConfigInvalid(
            f"config.json: mlp_only_layers is {config['mlp_only_layers']!r}; a list of layer numbers is needed."
        )
    return [layer for layer in range(depth) if layer not in dense and (layer + 1) % step == 0]


def _behind(field: str) -> LayersOf:
    """All behind as many dense ones as a field says; or as a list of all layers' kinds says, where there is one."""

    def layers(config: Mapping[str, Any], depth: int) -> Sequence[int]:
        for listed, sparse in (("mlp_layer_types", "sparse"), ("moe_layer_freq", 1)):
            kinds = config.get(listed)
            if isinstance(kinds, list):
                return [layer for layer, kind in enumerate(cast("list[object]", kinds[:depth])) if kind == sparse]
        first = config.get(field) or 0
        if not isinstance(first, int) or first < 0:
            raise ConfigInvalid(f"config.json: {field} is {first!r}; a number from 0 is needed.")
        if (step := config.get("moe_layer_freq", 1)) != 1:
            raise ConfigInvalid(f"config.json: moe_layer_freq is {step!r}; only 1, or a list, is served.")
        return range(first, depth)

    return layers


def _ernie(config: Mapping[str, Any], depth: int) -> Sequence[int]:
    """From moe_layer_start_index to moe_layer_end_index, where an interval ends; an end of -1 is the last layer."""
    start, end, step = (
        config.get(f"moe_layer_{name}", default)
        for name, default in (("start_index", 0), ("end_index", -1), ("interval", 1))
    )
    if not all(isinstance(value, int) for value in (start, end, step)) or start < 0 or step < 1:
        raise ConfigInvalid(f"config.json: moe_layer_start_index, _end_index and _interval are {start}, {end}, {step}.")
    return [layer for layer in range(start, depth if end < 0 else min(end + 1, depth)) if (layer + 1) % step == 0]


def _jamba(config: Mapping[str, Any], depth: int) -> Sequence[int]:
    """Each expert_layer_period-th, from expert_layer_offset on."""
    period, offset = _count(config, "expert_layer_period"), config.get("expert_layer_offset")
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise ConfigInvalid(f"config.json: expert_layer_offset is {offset!r}; a number below {period} is needed.")
    return range(offset, depth, period)


_FUSED = FusedNames(prefix="model.layers.{layer}.mlp.experts.")

_QWEN = ExpertFamily(
    experts_field="num_experts",
    intermediate_field="moe_intermediate_size",
    prefix="model.layers.{layer}.mlp.experts.{expert}.",
    fused=_FUSED,
    layers=_stepped,
)
_SPARSE = replace(_QWEN, layers=_behind("first_k_dense_replace"))
_DEEPSEEK = replace(_SPARSE, experts_field="n_routed_experts")
_MIXTRAL = ExpertFamily(
    experts_field="num_local_experts",
    intermediate_field="intermediate_size",
    prefix="model.layers.{layer}.block_sparse_moe.experts.{expert}.",
    fused=_FUSED,
    gate="w1.weight",
    up="w3.weight",
    down="w2.weight",
)
_OLMOE = replace(_SPARSE, intermediate_field="intermediate_size")
_GRANITE = ExpertFamily(
    experts_field="num_local_experts",
    intermediate_field="intermediate_size",
    prefix="",
    fused=FusedNames(
        prefix="model.layers.{layer}.block_sparse_moe.", gate_up="input_linear.weight", down="output_linear.weight"
    ),
)
_FEED_FORWARD = replace(
    _QWEN,
    prefix="model.layers.{layer}.feed_forward.experts.{expert}.",
    fused=replace(_FUSED, prefix="model.layers.{layer}.feed_forward.experts."),
)

FAMILIES: Mapping[str, ExpertFamily] = {
    "Qwen3MoeForCausalLM": _QWEN,
    "Qwen2MoeForCausalLM": _QWEN,
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "OlmoeForCausalLM": _OLMOE,
    "FlexOlmoForCausalLM": _OLMOE,
    "Cohere2MoeForCausalLM": _OLMOE,
    "MixtralForCausalLM": _MIXTRAL,
    "MiniMaxForCausalLM": _MIXTRAL,
    "MiniMaxM2ForCausalLM": _MIXTRAL,
    "PhimoeForCausalLM": _MIXTRAL,
    "PhiMoEForCausalLM": _MIXTRAL,
    "KimiLinearForCausalLM": replace(
        _MIXTRAL,
        experts_field="num_experts",
        intermediate_field="moe_intermediate_size",
        top_k_field="num_experts_per_token",
        layers=_behind("first_k_dense_replace"),
    ),
    "DeepseekForCausalLM": _DEEPSEEK,
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "Dots1ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _DEEPSEEK,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "GlmMoeDsaForCausalLM": _DEEPSEEK,
    "AXK1ForCausalLM": _DEEPSEEK,
    "MiMoV2FlashForCausalLM": _DEEPSEEK,
    "MiMoV2ForCausalLM": _DEEPSEEK,
    "SolarOpenForCausalLM": _DEEPSEEK,
    "AfmoeForCausalLM": replace(_QWEN, layers=_behind("num_dense_layers")),
    "BailingMoeForCausalLM": _SPARSE,
    "BailingMoeV2ForCausalLM": _SPARSE,
    "BailingMoeV2_5ForCausalLM": _SPARSE,
    "ExaoneMoeForCausalLM": _SPARSE,
    "ExaoneMoEForCausalLM": _SPARSE,
    "HYV3ForCausalLM": _SPARSE,
    "LagunaForCausalLM": _SPARSE,
    "MellumForCausalLM": _SPARSE,
    "SarvamMLAForCausalLM": _SPARSE,
    "SarvamMoEForCausalLM": _SPARSE,
    "Ernie4_5_MoeForCausalLM": replace(_QWEN, experts_field="moe_num_experts", top_k_field="moe_k", layers=_ernie),
    "Lfm2MoeForCausalLM": replace(
        _FEED_FORWARD, gate="w1.weight", up="w3.weight", down="w2.weight", layers=_behind("num_dense_layers")
    ),
    "JambaForCausalLM": replace(_FEED_FORWARD, intermediate_field="intermediate_size", layers=_jamba),
    "GraniteMoeForCausalLM": _GRANITE,
    "GraniteMoeSharedForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": _GRANITE,
    "GptOssForCausalLM": ExpertFamily(
        experts_field="num_local_experts",
        intermediate_field="intermediate_size",
        prefix="",
        fused=replace(_FUSED, transposed=True, interleaved=True, biased=True),
        clamped=True,
    ),
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first architecture that config.json names whose experts are served.

    Raises:
        UnknownArchitecture: there is none.
    """
    names = [name for name in _listed(config, "architectures") if isinstance(name, str)]
    for name in names:
        if name in FAMILIES:
            return name
    found = ", ".join(names) or "no architecture"
    raise UnknownArchitecture(f"config.json names {found}. Experts are served of {', '.join(sorted(FAMILIES))}.")


@dataclass(frozen=True, kw_only=True)
class Activation:
    """act(gate, up) = g * sigmoid(alpha * g) * (u + shift), g = min(gate, limit), u = up within -limit to limit.

    As it stands by default it is SwiGLU, silu(gate) * up. GPT-OSS has (1.702, 7, 1).

    Raises:
        ValueError: alpha is not positive, or the limit is not.
    """

    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.alpha < math.inf and self.limit > 0 and math.isfinite(self.shift)):
            raise ValueError(
                f"activation alpha {self.alpha}, limit {self.limit}, shift {self.shift}: alpha and limit must be"
                " positive, alpha and shift finite."
            )

    def apply(self, gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
        """By its definition, in the type of its arguments."""
        if self == SWIGLU:
            # No sum with 0, which would take the sign of -0 away.
            with np.errstate(over="ignore"):
                return gate / (1 + np.exp(-gate)) * up
        gated, upped = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        with np.errstate(over="ignore"):
            return gated / (1 + np.exp(-self.alpha * gated)) * (upped + self.shift)


SWIGLU = Activation()


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts of one checkpoint. A `layer` counts MoE layers from 0, as placement and the wire do."""

    architecture: str
    layer_ids: tuple[int, ...]  # decoder layer of each MoE layer
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    activation: Activation = SWIGLU
    biased: bool = False  # both products have biases

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.layer_ids)

    @property
    def plain(self) -> bool:
        """Whether an expert is SwiGLU without biases, which every kernel computes."""
        return self.activation == SWIGLU and not self.biased

    def numerics_class(self, kernels: str) -> str:
        """The name of what kernels of that class compute of these experts."""
        return kernels if self.plain else f"{kernels}-clamped-1"

    @property
    def family(self) -> ExpertFamily:
        """How its checkpoints spell them."""
        return FAMILIES[self.architecture]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ExpertShape:
        """Read the shape from config.json.

        Raises:
            UnknownArchitecture: the architecture is not served.
            ConfigInvalid: a field is missing or makes no sense.
        """
        architecture = architecture_of(config)
        family = FAMILIES[architecture]
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ConfigInvalid(f"hidden_act is {activation!r}; the expert kernels compute 'silu' only.")
        depth = _count(config, "num_hidden_layers")
        if depth > MOST_LAYERS:
            raise ConfigInvalid(f"num_hidden_layers is {depth}; at most {MOST_LAYERS} are served.")
        layer_ids = tuple(family.layers(config, depth))
        if not layer_ids:
            raise ConfigInvalid(f"None of the {depth} layers has experts: a dense model has nothing to serve here.")
        shape = cls(
            architecture=architecture,
            layer_ids=layer_ids,
            # transformers 5 writes num_local_experts for families that had num_experts before.
            experts=_count(config, family.experts_field if family.experts_field in config else "num_local_experts"),
            hidden=_count(config, "hidden_size"),
            intermediate=_count(config, family.intermediate_field),
            top_k=_count(config, family.top_k_field),
            activation=_clamped(config) if family.clamped else SWIGLU,
            biased=family.fused.biased,
        )
        if shape.layers * shape.experts > MOST_EXPERTS:
            raise ConfigInvalid(
                f"{shape.layers} layers have {shape.experts} experts each; at most {MOST_EXPERTS} in all are served."
            )
        if shape.top_k > shape.experts:
            raise ConfigInvalid(f"{family.top_k_field} is {shape.top_k}, but there are {shape.experts} experts.")
        return shape

    def names(self, layer: int, expert: int) -> tuple[str, str, str]:
        """Tensor names of (gate, up, down): [intermediate, hidden] twice, then [hidden, intermediate].

        Raises:
            IndexError: no such MoE layer or expert.
            ConfigInvalid: the family has no tensors of single experts.
        """
        if not (0 <= layer < self.layers and 0 <= expert < self.experts):
            raise IndexError(
                f"expert {expert} of MoE layer {layer} does not exist; there are {self.layers} layers"
                f" of {self.experts} experts"
            )
        family = self.family
        if not family.prefix:
            raise ConfigInvalid(f"{self.architecture} has no tensors of single experts.")
        prefix = family.prefix.format(layer=self.layer_ids[layer], expert=expert)
        return prefix + family.gate, prefix + family.up, prefix + family.down


def _count(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ConfigInvalid(f"config.json: {field} is {value!r}; a whole number from 1 is needed.")
    return value


def _clamped(config: Mapping[str, Any]) -> Activation:
    """GPT-OSS's; its first configurations leave alpha out."""
    values = [config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)]
    if not all(isinstance(value, float | int) and 0 < value < float("inf") for value in values):
        raise ConfigInvalid(f"config.json: swiglu_alpha and swiglu_limit are {values}; positive numbers are needed.")
    return Activation(alpha=values[0], limit=values[1], shift=1.0)


def _listed(config: Mapping[str, Any], field: str) -> list[Any]:
    """What a list of config.json holds; one None where it is no list."""
    value: Any = config.get(field) or []
    return value if isinstance(cast("object", value), list) else [None]
