"""From config.json to a ModelSpec, and from roles to tensor names, for each family. Pure.

Every field is honored, known not to matter for serving, or refused; `unknown_fields` names the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from eaas.model.spec import Latent, ModelSpec, MoeSpec, QkNorm, Score, positive, rope_of
from experts.formats import scheme_of
from experts.model import ConfigInvalid, Dtype, ExpertShape, UnknownArchitecture

# Read here, in rope.py or in experts.model.
_HONORED = frozenset(
    {
        "architectures", "attention_bias", "clip_qkv", "decoder_sparse_step", "dtype", "eos_token_id",
        "first_k_dense_replace", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "kv_lora_rank",
        "layer_types", "max_position_embeddings", "max_window_layers", "mlp_bias", "mlp_only_layers",
        "moe_intermediate_size", "moe_layer_freq", "n_group", "n_routed_experts", "n_shared_experts",
        "norm_topk_prob", "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers",
        "num_key_value_heads", "num_local_experts", "partial_rotary_factor", "q_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "qkv_bias", "quantization_config", "rms_norm_eps", "rope_interleave",
        "postnorm", "qk_norm_type", "rope_parameters", "rope_scaling", "rope_theta", "rotary_dim",
        "routed_scaling_factor", "scoring_func", "shared_intermediate_size", "use_routing_bias",
        "shared_expert_intermediate_size", "sliding_window", "swiglu_alpha", "swiglu_limit", "tie_word_embeddings",
        "topk_group", "topk_method", "torch_dtype", "use_qk_norm", "use_sliding_window", "v_head_dim", "vocab_size",
    }
)  # fmt: skip
# Training, bookkeeping, layers that guess further tokens, or what the tokenizer and the generation defaults say better.
_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "attention_dropout", "attn_type_list", "auto_map", "aux_loss_alpha", "bos_token_id",
        "ep_size", "experts_per_token", "initial_context_length", "initializer_range",
        "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta",
        "mlp_intermediate_size", "model_type", "mtp_transformer_layers", "num_mtp_layers", "num_mtp_modules",
        "num_nextn_predict_layers", "output_attentions", "output_hidden_states", "output_router_logits",
        "pad_token_id", "pretraining_tp", "qk_head_dim", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
        "seq_aux", "shared_moe_mode", "transformers_version", "use_cache", "use_mtp",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family:
    """What sets one architecture apart, with the defaults of its transformers config class.

    Tensors are named as they are inside a layer. `only` holds values that are the only ones a field may have.
    """

    gate: str
    gate_bias: str = ""  # tensor that its logits have added
    correction: str = ""  # tensor that steers the choice of experts
    score: Score = Score.SOFTMAX
    norm_topk: bool = False
    groups: tuple[int, int] | None = None  # honors n_group, topk_group and routed_scaling_factor
    scaling_factor: float = 1.0
    shared: str = ""  # prefix of the shared expert's tensors; as wide as n_shared_experts of the others,
    shared_gate: str = ""  # or, where it has a gate, shared_expert_intermediate_size wide
    shared_experts: int = 1
    qk_norm: QkNorm = QkNorm.NONE
    qk_norm_switch: bool = False  # only if use_qk_norm
    eps: float = 1e-6
    max_model_len: int = 32768
    rope_theta: float = 10_000.0
    rope: Mapping[str, Any] = field(default_factory=dict)  # rope_parameters where there are none
    head_dim: bool = True  # honors head_dim
    rotated: float | None = None  # honors partial_rotary_factor, or rotary_dim; the part without them
    bias: str = ""  # field that gives queries, keys and values biases
    biased: bool = False  # without that field
    o_bias: bool = False  # and then the output projection has one, too
    clip_qkv: bool = False
    # "": none, "all": every layer, "switch": every layer if use_sliding_window, "by_layer": some if so; always some:
    # "alternate": every other layer, "late": those from max_window_layers on
    window: str = ""
    sliding: int | None = 4096  # sliding_window
    sinks: str = ""  # tensor of a logit for each query head
    latent: bool = False  # attention of DeepSeek-V2; honors its ranks and widths, and no head_dim
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


# Sigmoid scores, steered by a correction, and shared experts: DeepSeek-V3's gate.
_CORRECTED = Family(
    gate="mlp.gate.weight", correction="mlp.gate.e_score_correction_bias", score=Score.SIGMOID, norm_topk=True,
    groups=(1, 1), shared="mlp.shared_experts.",
    only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "Qwen3MoeForCausalLM": Family(
        gate="mlp.gate.weight", qk_norm=QkNorm.HEAD, bias="attention_bias", o_bias=True, window="switch"
    ),
    "Qwen2MoeForCausalLM": Family(
        gate="mlp.gate.weight", bias="qkv_bias", biased=True, window="by_layer", shared="mlp.shared_expert.",
        shared_gate="mlp.shared_expert_gate.weight",
    ),
    "OlmoeForCausalLM": Family(
        gate="mlp.gate.weight", qk_norm=QkNorm.FULL, eps=1e-5, max_model_len=4096, head_dim=False,
        bias="attention_bias", o_bias=True, clip_qkv=True,
    ),
    "MixtralForCausalLM": Family(
        gate="block_sparse_moe.gate.weight", eps=1e-5, max_model_len=131072, rope_theta=1e6, window="all",
        sliding=None, norm_topk=True, only={"norm_topk_prob": (True,)},
    ),
    "Glm4MoeForCausalLM": replace(
        _CORRECTED, qk_norm=QkNorm.HEAD, qk_norm_switch=True, eps=1e-5, max_model_len=131072, rotated=0.5,
        bias="attention_bias",
    ),
    # The best of a group ranks it, and no weights are normed, whatever norm_topk_prob says: as in transformers.
    "DeepseekV2ForCausalLM": Family(
        gate="mlp.gate.weight", groups=(1, 1), shared="mlp.shared_experts.", shared_experts=2, max_model_len=2048,
        latent=True,
        only={
            "scoring_func": ("softmax",), "topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,),
            "attention_bias": (False,), "mlp_bias": (False,),
        },
    ),
    "DeepseekV3ForCausalLM": replace(
        _CORRECTED, groups=(8, 4), scaling_factor=2.5, max_model_len=4096, latent=True,
        only={**_CORRECTED.only, "attention_bias": (False,)},
    ),
    "Dots1ForCausalLM": replace(
        _CORRECTED, qk_norm=QkNorm.HEAD, norm_topk=False, max_model_len=2048, bias="attention_bias", o_bias=True,
        window="late", only={"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)},
    ),
    "MiniMaxM2ForCausalLM": Family(
        gate="block_sparse_moe.gate.weight", correction="block_sparse_moe.e_score_correction_bias",
        score=Score.SIGMOID, norm_topk=True, qk_norm=QkNorm.FULL, max_model_len=196608, rope_theta=5e6, rotated=1.0,
        only={
            "scoring_func": ("sigmoid",), "norm_topk_prob": (True,), "use_routing_bias": (True,),
            "use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,),
            "postnorm": (False,),
        },
    ),
    # A softmax over the chosen alone is that over all, divided by the sum of the chosen.
    "GptOssForCausalLM": Family(
        gate="mlp.router.weight", gate_bias="mlp.router.bias", norm_topk=True, eps=1e-5, max_model_len=131072,
        rope_theta=150_000.0, bias="attention_bias", biased=True, o_bias=True, window="alternate", sliding=128,
        sinks="self_attn.sinks", only={"norm_topk_prob": (True,)},
        rope={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    ),
}  # fmt: skip


def spec_of(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read the model from config.json.

    Args:
        config: The whole of config.json.
        generation: generation_config.json where there is one; its end-of-sequence tokens win.

    Raises:
        UnknownArchitecture: the architecture is not served; the text lists those that are.
        ConfigInvalid: a field is missing, makes no sense, or asks for what is not served.
    """
    shape = ExpertShape.from_config(config)
    family = FAMILIES.get(shape.architecture)
    if family is None:
        raise UnknownArchitecture(
            f"config.json names {shape.architecture}, of which only the experts are served (eaas pool; see "
            f"docs/transformers.md). Served whole are {', '.join(sorted(FAMILIES))}."
        )
    scheme_of(config)  # refuses what is not served
    for name, values in family.only.items():
        if config.get(name) not in (None, *values):
            raise ConfigInvalid(
                f"config.json: {name} is {config[name]!r}; {shape.architecture} is served with "
                f"{' or '.join(map(repr, values))}."
            )
    layers, hidden = _count(config, "num_hidden_layers"), shape.hidden
    q_heads = _count(config, "num_attention_heads")
    kv_heads = q_heads if config.get("num_key_value_heads") is None else _count(config, "num_key_value_heads")
    latent = _latent(config) if family.latent else None
    if latent:
        kv_heads, head_dim = 1, latent.rope_dim + latent.kv_rank
    else:
        head_dim = _head_dim(config, family, hidden, q_heads)
    rotated = latent.rope_dim if latent else head_dim
    max_model_len = _count(config, "max_position_embeddings", family.max_model_len)
    vocab = _count(config, "vocab_size")
    dense = frozenset(range(layers)) - frozenset(shape.layer_ids)
    biased = bool(family.bias) and _flag(config, family.bias, family.biased)
    normed = not family.qk_norm_switch or _flag(config, "use_qk_norm", False)
    return ModelSpec(
        architecture=shape.architecture,
        hidden=hidden,
        layers=layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        intermediate=_count(config, "intermediate_size") if dense else 0,
        eps=positive(config, "rms_norm_eps", family.eps),
        rope=rope_of(
            {"rope_parameters": family.rope, **config}, rotated, max_model_len, family.rope_theta, family.rotated
        ),
        max_model_len=max_model_len,
        qk_norm=family.qk_norm if normed else QkNorm.NONE,
        qkv_bias=biased,
        o_bias=biased and family.o_bias,
        clip_qkv=positive(config, "clip_qkv", 0.0) if family.clip_qkv else 0.0,
        sliding_window=_windows(config, family, layers, max_model_len),
        sinks=bool(family.sinks),
        tie_embeddings=_flag(config, "tie_word_embeddings", False),
        dtype=Dtype.resolve("auto", config),
        moe=_moe_spec(config, family, shape, dense),
        eos_ids=_eos_ids(config, generation, vocab),
        latent=latent,
    )


def _latent(config: Mapping[str, Any]) -> Latent:
    whole = "q_lora_rank" in config and config["q_lora_rank"] is None
    return Latent(
        q_rank=0 if whole else _count(config, "q_lora_rank", 1536),
        kv_rank=_count(config, "kv_lora_rank", 512),
        nope_dim=_count(config, "qk_nope_head_dim", 128),
        rope_dim=_count(config, "qk_rope_head_dim", 64),
        value_dim=_count(config, "v_head_dim", 128),
        interleaved=_flag(config, "rope_interleave", True),
    )


def _moe_spec(config: Mapping[str, Any], family: Family, shape: ExpertShape, dense: frozenset[int]) -> MoeSpec:
    groups, kept, scaling = (1, 1, 1.0)
    if family.groups:
        scaling = positive(config, "routed_scaling_factor", family.scaling_factor)
        if config.get("topk_method", family.only.get("topk_method", ("",))[0]) != "greedy":
            groups, kept = (
                _count(config, name, default)
                for name, default in zip(("n_group", "topk_group"), family.groups, strict=True)
            )
    shared = 0
    if family.shared_gate:
        shared = _count(config, "shared_expert_intermediate_size", 5632)
    elif family.shared:
        shared = _count(config, "n_shared_experts", family.shared_experts) * shape.intermediate
    return MoeSpec(
        experts=shape.experts,
        top_k=shape.top_k,
        expert_intermediate=shape.intermediate,
        norm_topk=_flag(config, "norm_topk_prob", family.norm_topk),
        score=family.score,
        gate_bias=bool(family.gate_bias),
        correction_bias=bool(family.correction),
        groups=groups,
        groups_topk=kept,
        scaling_factor=scaling,
        dense_layers=dense,
        shared_intermediate=shared,
        shared_gate=bool(family.shared_gate),
    )


def unknown_fields(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields that are set, yet neither honored nor known to have no effect: worth one warning."""
    known = _HONORED | _WITHOUT_EFFECT
    return tuple(sorted(name for name, value in config.items() if name not in known and value not in (None, False)))


class TensorPlan(NamedTuple):
    """One tensor that the attention worker needs."""

    name: str
    shape: tuple[int, ...]

    @property
    def module(self) -> str:
        """Its name without what says that it is the weight."""
        return self.name.removesuffix(".weight")


def tensors_of(spec: ModelSpec) -> dict[str, TensorPlan]:
    """Role -> tensor name and shape, of everything but the routed experts.

    Roles: "embed", "final_norm", "head" (absent when tied), and for layer L: "L.input_norm", "L.q", "L.k",
    "L.v", "L.o", "L.post_norm"; of latent attention "L.kv_a", "L.kv_a_norm" and "L.kv_b" in place of keys and values,
    and "L.q_a" and "L.q_a_norm" before "L.q" if queries have a latent; where the model has them "L.q_bias",
    "L.k_bias", "L.v_bias", "L.o_bias", "L.q_norm", "L.k_norm", "L.sinks"; MoE layers "L.gate" and perhaps
    "L.gate_bias", "L.gate_correction", "L.shared_gate_proj", "L.shared_up_proj", "L.shared_down_proj",
    "L.shared_gate"; dense layers "L.dense_gate_proj", "L.dense_up_proj", "L.dense_down_proj".
    """
    table = {"embed": TensorPlan("model.embed_tokens.weight", (spec.vocab, spec.hidden))}
    dense = _mlp("dense_", "mlp.", spec.hidden, spec.intermediate)
    for layer in range(spec.layers):
        parts = _attention(spec) | (dense if layer in spec.moe.dense_layers else _moe(spec))
        for role, (name, shape) in parts.items():
            table[f"{layer}.{role}"] = TensorPlan(f"model.layers.{layer}.{name}", shape)
    table["final_norm"] = TensorPlan("model.norm.weight", (spec.hidden,))
    if not spec.tie_embeddings:
        table["head"] = TensorPlan("lm_head.weight", (spec.vocab, spec.hidden))
    return table


_Parts = dict[str, tuple[str, tuple[int, ...]]]


def _latent_attention(spec: ModelSpec, latent: Latent) -> _Parts:
    hidden, heads, rank = spec.hidden, spec.q_heads, latent.kv_rank
    query, out = heads * (latent.nope_dim + latent.rope_dim), heads * latent.value_dim
    parts: _Parts = {
        "input_norm": ("input_layernorm.weight", (hidden,)),
        "kv_a": ("self_attn.kv_a_proj_with_mqa.weight", (rank + latent.rope_dim, hidden)),
        "kv_a_norm": ("self_attn.kv_a_layernorm.weight", (rank,)),
        "kv_b": ("self_attn.kv_b_proj.weight", (heads * latent.nope_dim + out, rank)),
        "o": ("self_attn.o_proj.weight", (hidden, out)),
        "post_norm": ("post_attention_layernorm.weight", (hidden,)),
    }
    if not latent.q_rank:
        return parts | {"q": ("self_attn.q_proj.weight", (query, hidden))}
    return parts | {
        "q_a": ("self_attn.q_a_proj.weight", (latent.q_rank, hidden)),
        "q_a_norm": ("self_attn.q_a_layernorm.weight", (latent.q_rank,)),
        "q": ("self_attn.q_b_proj.weight", (query, latent.q_rank)),
    }


def _attention(spec: ModelSpec) -> _Parts:
    if spec.latent:
        return _latent_attention(spec, spec.latent)
    hidden, q, kv = spec.hidden, spec.q_size, spec.kv_size
    parts: _Parts = {
        "input_norm": ("input_layernorm.weight", (hidden,)),
        "q": ("self_attn.q_proj.weight", (q, hidden)),
        "k": ("self_attn.k_proj.weight", (kv, hidden)),
        "v": ("self_attn.v_proj.weight", (kv, hidden)),
        "o": ("self_attn.o_proj.weight", (hidden, q)),
        "post_norm": ("post_attention_layernorm.weight", (hidden,)),
    }
    if spec.qkv_bias:
        parts |= {f"{x}_bias": (f"self_attn.{x}_proj.bias", (size,)) for x, size in (("q", q), ("k", kv), ("v", kv))}
    if spec.o_bias:
        parts["o_bias"] = ("self_attn.o_proj.bias", (hidden,))
    if spec.sinks:
        parts["sinks"] = (FAMILIES[spec.architecture].sinks, (spec.q_heads,))
    if spec.qk_norm is not QkNorm.NONE:
        sizes = (spec.head_dim, spec.head_dim) if spec.qk_norm is QkNorm.HEAD else (q, kv)
        parts |= {f"{x}_norm": (f"self_attn.{x}_norm.weight", (size,)) for x, size in zip("qk", sizes, strict=True)}
    return parts


def _moe(spec: ModelSpec) -> _Parts:
    hidden, moe, family = spec.hidden, spec.moe, FAMILIES[spec.architecture]
    parts: _Parts = {"gate": (family.gate, (moe.experts, hidden))}
    if moe.gate_bias:
        parts["gate_bias"] = (family.gate_bias, (moe.experts,))
    if moe.correction_bias:
        parts["gate_correction"] = (family.correction, (moe.experts,))
    if moe.shared_intermediate:
        parts |= _mlp("shared_", family.shared, hidden, moe.shared_intermediate)
        if moe.shared_gate:
            parts["shared_gate"] = (family.shared_gate, (1, hidden))
    return parts


def _mlp(role: str, name: str, hidden: int, inner: int) -> _Parts:
    return {
        f"{role}gate_proj": (f"{name}gate_proj.weight", (inner, hidden)),
        f"{role}up_proj": (f"{name}up_proj.weight", (inner, hidden)),
        f"{role}down_proj": (f"{name}down_proj.weight", (hidden, inner)),
    }


def _head_dim(config: Mapping[str, Any], family: Family, hidden: int, q_heads: int) -> int:
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim")
        if not family.head_dim and head_dim * q_heads != hidden:
            raise ConfigInvalid(f"config.json: head_dim is {head_dim}; this family has hidden_size / heads only.")
        return head_dim
    if hidden % q_heads:
        raise ConfigInvalid(f"config.json: hidden_size {hidden} is no multiple of the {q_heads} heads; give head_dim.")
    return hidden // q_heads


def _windows(config: Mapping[str, Any], family: Family, layers: int, max_model_len: int) -> tuple[int, ...]:
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise ConfigInvalid(f"config.json: layer_types is {kinds!r}; one word for each of {layers} layers is needed.")
    known = {"full_attention", "sliding_attention"}
    if kinds is not None and not set(kinds) <= known:
        raise ConfigInvalid(f"config.json: layer_types holds {sorted(set(kinds) - known)}; known are {sorted(known)}.")
    switched_on = family.window in ("all", "alternate", "late") or (
        bool(family.window) and _flag(config, "use_sliding_window", False)
    )
    window = config.get("sliding_window", family.sliding) if switched_on else None
    if window is not None:
        window = _count(config, "sliding_window", family.sliding)
    if family.window in ("by_layer", "alternate", "late"):
        slid: Sequence[int] = range(0, layers, 2)
        if family.window == "by_layer":
            slid = range(0, min(layers, _count(config, "max_window_layers", 28)), 2)
        elif family.window == "late":
            slid = range(_count(config, "max_window_layers", 62), layers)
        kinds = kinds or ["sliding_attention" if i in slid and window else "full_attention" for i in range(layers)]
        slides = [kind == "sliding_attention" for kind in kinds]
        if any(slides) and not window:
            raise ConfigInvalid(
                "config.json: layer_types asks for sliding_attention, but sliding_window is null or use_sliding_window "
                "is off."
            )
    else:
        slides = [True] * layers
        if kinds is not None and ("sliding_attention" in kinds) != bool(window):
            raise ConfigInvalid(
                "config.json: layer_types disagrees with sliding_window, which holds for all layers here."
            )
    # A window as wide as the context hides nothing.
    return tuple(window if window and window < max_model_len and slide else 0 for slide in slides)


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any] | None, vocab: int) -> tuple[int, ...]:
    value = (generation or {}).get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < vocab for token in ids):
        raise ConfigInvalid(f"eos_token_id is {value!r}; token ids below vocab_size {vocab} are needed.")
    return tuple(sorted(set(ids)))


def _count(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ConfigInvalid(f"config.json: {field} is {value!r}; a whole number from 1 is needed.")
    return value


def _flag(config: Mapping[str, Any], field: str, default: bool) -> bool:
    value = config.get(field)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigInvalid(f"config.json: {field} is {value!r}; true or false is needed.")
    return value
