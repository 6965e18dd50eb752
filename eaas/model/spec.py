"""What the generic decoder computes: one frozen description, whatever the family. Pure.

Inverse frequencies of rotary embedding are computed as in transformers (modeling_rope_utils.py), in double precision,
and rounded to float32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeGuard, cast

from experts.model import ConfigInvalid, Dtype

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class QkNorm(Enum):
    """Root-mean-square norm of queries and keys, before rope."""

    NONE = "none"
    HEAD = "head"  # over each head: weights [head_dim]
    FULL = "full"  # over the whole projection: weights [heads * head_dim]


class Score(Enum):
    """How gate logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Position p turns the pair (x[i], x[i + n]) of a head by the angle p * inv_freq[i], for i below n = len(inv_freq).

    Attributes:
        kind: One of ROPE_TYPES.
        theta: Base of the wavelengths.
        inv_freq: At most head_dim / 2 values, each exactly a float32; radians per position. Where they are fewer, the
            rest of the head stays as it is.
        attention_factor: Multiplies both cosine and sine.
        all_dim_factor: Yarn's magnitude for mscale_all_dim: latent attention multiplies queries and keys by it, whole.
    """

    kind: str
    theta: float
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    all_dim_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one short row.

    This latent, normed, gives each head its value and the part of its key that is not rotated; the rotated part is one
    for all heads. A query has both parts, from the row, or from a latent of its own that is normed, too.

    Attributes:
        q_rank: Width of the query's latent; 0: it has none.
        kv_rank: Width of the latent of keys and values.
        nope_dim, rope_dim: Parts of a query and key that are not rotated, and that are.
        value_dim: Of one head's output.
        interleaved: Rope turns the pairs (2i, 2i + 1) of the rotated part as it is stored, not (i, i + rope_dim / 2).
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """The MoE layers.

    The gate scores all experts in float32, by logits to which `gate_bias` adds a per-expert bias; with
    `correction_bias` another one is added for choosing only. With groups, only experts of the `groups_topk`
    best groups stand for choice. The weights of the `top_k` chosen (ties: lowest index) are divided by their
    sum when `norm_topk`, then multiplied by `scaling_factor`.

    Attributes:
        experts: Logical experts of each MoE layer.
        expert_intermediate: Inner size of one expert.
        dense_layers: Decoder layers whose MLP is an ordinary one.
        shared_intermediate: Inner size of the shared expert; 0: there is none.
        shared_gate: The shared expert's output is multiplied by sigmoid(x . w).
    """

    experts: int
    top_k: int
    expert_intermediate: int
    norm_topk: bool
    score: Score = Score.SOFTMAX
    gate_bias: bool = False
    correction_bias: bool = False
    groups: int = 1
    groups_topk: int = 1
    scaling_factor: float = 1.0
    dense_layers: frozenset[int] = frozenset()
    shared_intermediate: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        """Refuse nonsense. Raises ConfigInvalid: sizes that cannot be."""
        if not 0 < self.top_k <= self.experts:
            raise ConfigInvalid(
                f"A token takes {self.top_k} experts of {self.experts}; 1 to {self.experts} are possible."
            )
        if self.experts % self.groups or not 0 < self.groups_topk <= self.groups:
            raise ConfigInvalid(
                f"{self.experts} experts, {self.groups} groups of which {self.groups_topk}: impossible."
            )
        if self.groups_topk * (self.experts // self.groups) < self.top_k:
            raise ConfigInvalid(f"{self.groups_topk} of {self.groups} groups hold fewer than {self.top_k} experts.")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One decoder-only MoE model, as the attention worker computes it.

    Attributes:
        architecture: Name in config.json, for example "Qwen3MoeForCausalLM".
        intermediate: Inner size of the MLP of dense layers; 0 where there are none.
        eps: Added to the mean square in every norm.
        max_model_len: Tokens of prompt and output together.
        clip_qkv: Queries, keys and values are clipped to +-this after QK norm and before rope; 0: not at all.
        sliding_window: For each layer: a token sees itself and the `window - 1` before it; 0: all before it.
        sinks: A learned logit of each query head joins the softmax over its keys, and adds no value.
        tie_embeddings: The output head is the embedding matrix.
        dtype: Type in which the checkpoint is to be served unless asked otherwise.
        latent: Latent attention instead of key-value heads. The cache then holds one, for all query heads: `head_dim`
            is its key's width, the rotated part and the latent, and the latent is its value.
        eos_ids: Tokens that end a generation, sorted.
    """

    architecture: str
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int
    eps: float
    rope: Rope
    max_model_len: int
    qk_norm: QkNorm
    qkv_bias: bool
    o_bias: bool
    clip_qkv: float
    sliding_window: tuple[int, ...]
    sinks: bool = False
    tie_embeddings: bool
    dtype: Dtype
    moe: MoeSpec
    eos_ids: tuple[int, ...]
    latent: Latent | None = None

    def __post_init__(self) -> None:
        """Refuse nonsense. Raises ConfigInvalid: sizes that cannot be."""
        if self.q_heads % self.kv_heads:
            raise ConfigInvalid(f"{self.q_heads} query heads cannot share {self.kv_heads} key-value heads evenly.")
        if self.head_dim % 2 or not 0 < len(self.rope.inv_freq) <= self.head_dim // 2:
            raise ConfigInvalid(
                f"Heads of {self.head_dim} with {len(self.rope.inv_freq)} rope frequencies; an even size and at most"
                " half as many are needed."
            )
        if self.head_dim > 576 or (self.latent and self.latent.rope_dim % 2):
            raise ConfigInvalid(
                f"Heads of {self.head_dim}, or latents of which {self.latent and self.latent.rope_dim} columns are"
                " rotated: at most 576, and an even number, are served."
            )
        if len(self.sliding_window) != self.layers:
            raise ConfigInvalid(f"{len(self.sliding_window)} sliding windows are given for {self.layers} layers.")
        wrong = sorted(layer for layer in self.moe.dense_layers if not 0 <= layer < self.layers)
        if wrong:
            raise ConfigInvalid(f"Dense layers {wrong} do not exist; there are {self.layers} layers.")
        if self.moe.dense_layers and not self.intermediate:
            raise ConfigInvalid(f"Layers {sorted(self.moe.dense_layers)} are dense, but intermediate_size is missing.")

    def context(self, wanted: int | None) -> int:
        """Tokens of the context where so many are wanted; None: all that the model has.

        Raises:
            ConfigInvalid: none, or more than the model has.
        """
        if wanted is None:
            return self.max_model_len
        if not 1 <= wanted <= self.max_model_len:
            raise ConfigInvalid(f"--max-model-len {wanted} asked for; this model has 1 to {self.max_model_len}.")
        return wanted

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Decoder layers that have experts, in order: the n-th of these is MoE layer n of `experts`."""
        return tuple(layer for layer in range(self.layers) if layer not in self.moe.dense_layers)

    @property
    def q_size(self) -> int:
        """Columns of all query heads."""
        return self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads; as many again for values."""
        return self.kv_heads * self.head_dim

    @property
    def cached_dims(self) -> int:
        """Columns of one key and one value, as the cache holds them."""
        return self.head_dim + (self.latent.kv_rank if self.latent else self.head_dim)

    @property
    def beyond_gpus(self) -> str:
        """What of it the GPU's kernels do not compute, in words; empty: nothing."""
        parts = {
            "latent attention": self.latent,
            "rope over a part of each head": len(self.rope.inv_freq) * 2 != self.head_dim and not self.latent,
            "attention sinks": self.sinks,
            "a bias of the gate's logits": self.moe.gate_bias,
        }
        return " and ".join(name for name, has in parts.items() if has)

    @property
    def query_scale(self) -> float:
        """Multiplies the product of a query and a key."""
        if self.latent is None:
            return 1 / math.sqrt(self.head_dim)
        return (self.latent.nope_dim + self.latent.rope_dim) ** -0.5 * self.rope.all_dim_factor**2


def rope_of(
    config: Mapping[str, Any], head_dim: int, max_model_len: int, default_theta: float, share: float | None = None
) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    Args:
        share: Part of each head that is rotated where neither partial_rotary_factor nor rotary_dim says it; None: the
            family has whole heads only.

    Raises:
        ConfigInvalid: a type that is not served, or a parameter that is missing or makes no sense.
    """
    # transformers lets rope_scaling win over rope_parameters, and values inside over those beside.
    source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given: Any = config.get(source) or {}
    if not isinstance(given, Mapping):
        raise ConfigInvalid(f"config.json: {source} is {given!r}; an object is needed.")
    scaling = cast("Mapping[str, Any]", given)
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ConfigInvalid(f"config.json: {source} differs by layer type; only one for all layers is served.")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ConfigInvalid(f"config.json: rope type {kind!r} is not served. Known are {', '.join(ROPE_TYPES)}.")
    given_share = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if given_share is None:
        given_share = positive(config, "rotary_dim", share * head_dim) / head_dim if share else 1.0
    if not _is_number(given_share) or not 0 < given_share <= 1 or (share is None and given_share != 1):
        raise ConfigInvalid(
            f"config.json: partial_rotary_factor is {given_share!r}; this family has "
            f"{'whole heads rotated (1.0)' if share is None else 'a part above 0, up to 1'}."
        )
    size = int(head_dim * given_share)
    theta = scaling.get("rope_theta")
    theta = config.get("rope_theta") if theta is None else theta
    theta = default_theta if theta is None else theta
    if not _is_number(theta) or theta <= 1:
        raise ConfigInvalid(f"config.json: rope_theta is {theta!r}; a number above 1 is needed.")
    inv_freq = [float(theta) ** (-2 * i / size) for i in range(size // 2)]
    attention_factor = all_dim_factor = 1.0
    if kind == "linear":
        factor = _number(scaling, "factor", source)
        inv_freq = [frequency / factor for frequency in inv_freq]
    elif kind == "dynamic":
        # Its base grows only beyond max_position_embeddings, where no request reaches.
        _number(scaling, "factor", source)
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, scaling, source, max_model_len)
    elif kind == "yarn":
        inv_freq, attention_factor, all_dim_factor = _yarn(inv_freq, float(theta), scaling, source, max_model_len)
    return Rope(
        kind=kind,
        theta=float(theta),
        inv_freq=tuple(map(_as_float32, inv_freq)),
        attention_factor=_as_float32(attention_factor),
        all_dim_factor=all_dim_factor,
    )


def _llama3(inv_freq: list[float], scaling: Mapping[str, Any], source: str, max_model_len: int) -> list[float]:
    factor = _number(scaling, "factor", source)
    low = _number(scaling, "low_freq_factor", source)
    high = _number(scaling, "high_freq_factor", source)
    original = _number(scaling, "original_max_position_embeddings", source, default=max_model_len)
    if high <= low:
        raise ConfigInvalid(f"config.json: {source} has high_freq_factor {high} and low_freq_factor {low}; high > low.")
    out: list[float] = []
    for frequency in inv_freq:
        turns = original * frequency / (2 * math.pi)  # over the original context
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append((1 - keep) * frequency / factor + keep * frequency)
    return out


def _yarn(
    inv_freq: list[float], theta: float, scaling: Mapping[str, Any], source: str, max_model_len: int
) -> tuple[list[float], float, float]:
    size = 2 * len(inv_freq)
    original = _number(scaling, "original_max_position_embeddings", source, default=max_model_len)
    factor = _number(scaling, "factor", source, default=max_model_len / original)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        attention_factor = _number(scaling, "attention_factor", source)
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        above, below = _number(scaling, "mscale", source), _number(scaling, "mscale_all_dim", source)
        attention_factor = magnitude(above) / magnitude(below)
    else:
        attention_factor = magnitude(1.0)

    def pair_turning(times: float) -> float:
        return size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_turning(_number(scaling, "beta_fast", source, default=32.0))
    high = pair_turning(_number(scaling, "beta_slow", source, default=1.0))
    truncate = scaling.get("truncate")
    if truncate is None or truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low if high != low else 0.001
    slow = [min(max((i - low) / span, 0.0), 1.0) for i in range(len(inv_freq))]
    out = [frequency / factor * part + frequency * (1 - part) for frequency, part in zip(inv_freq, slow, strict=True)]
    all_dim = _number(scaling, "mscale_all_dim", source) if scaling.get("mscale_all_dim") else 0.0
    return out, attention_factor, magnitude(all_dim)


def _number(scaling: Mapping[str, Any], field: str, source: str, default: float | None = None) -> float:
    return positive(scaling, field, default, f"config.json: {source} has {field} ")


def positive(fields: Mapping[str, Any], field: str, default: float | None = None, found: str | None = None) -> float:
    """A number above 0 of a configuration; the default where it is not given.

    Args:
        found: What an error says before the value.

    Raises:
        ConfigInvalid: it is something else.
    """
    value = fields.get(field)
    if value is None and default is not None:
        return float(default)
    if not _is_number(value) or value <= 0:
        raise ConfigInvalid(f"{found or f'config.json: {field} is '}{value!r}; a number above 0 is needed.")
    return float(value)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _as_float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]
