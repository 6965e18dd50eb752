"""What the generic decoder computes: one frozen description, whatever the family. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from eaas.model.rope import Rope
from experts.model import ConfigInvalid, Dtype


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
class MoeSpec:
    """The MoE layers.

    The gate scores all experts in float32; with `correction_bias` a per-expert bias is added for choosing
    only. With groups, only experts of the `groups_topk` best groups stand for choice. The weights of the
    `top_k` chosen (ties: lowest index) are divided by their sum when `norm_topk`, then multiplied by
    `scaling_factor`.

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
    correction_bias: bool = False
    groups: int = 1
    groups_topk: int = 1
    scaling_factor: float = 1.0
    dense_layers: frozenset[int] = frozenset()
    shared_intermediate: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        """Refuse nonsense.

        Raises:
            ConfigInvalid: sizes that cannot be.
        """
        if not 0 < self.top_k <= self.experts:
            raise ConfigInvalid(
                f"A token takes {self.top_k} experts of {self.experts}; 1 to {self.experts} are possible."
            )
        if self.experts % self.groups or not 0 < self.groups_topk <= self.groups:
            raise ConfigInvalid(
                f"{self.experts} experts, {self.groups} groups of which {self.groups_topk}: impossible."
            )
        if self.groups_topk * (self.experts // self.groups) < self.top_k:
            raise ConfigInvalid(
                f"{self.groups_topk} of {self.groups} groups hold fewer than {self.top_k} experts."
            )


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
        tie_embeddings: The output head is the embedding matrix.
        dtype: Type in which the checkpoint is to be served unless asked otherwise.
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
    tie_embeddings: bool
    dtype: Dtype
    moe: MoeSpec
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse nonsense.

        Raises:
            ConfigInvalid: sizes that cannot be.
        """
        if self.q_heads % self.kv_heads:
            raise ConfigInvalid(
                f"{self.q_heads} query heads cannot share {self.kv_heads} key-value heads evenly."
            )
        if self.head_dim % 2 or len(self.rope.inv_freq) != self.head_dim // 2:
            raise ConfigInvalid(
                f"Heads of {self.head_dim} with {len(self.rope.inv_freq)} rope frequencies; half is needed."
            )
        if len(self.sliding_window) != self.layers:
            raise ConfigInvalid(
                f"{len(self.sliding_window)} sliding windows are given for {self.layers} layers."
            )
        wrong = sorted(layer for layer in self.moe.dense_layers if not 0 <= layer < self.layers)
        if wrong:
            raise ConfigInvalid(f"Dense layers {wrong} do not exist; there are {self.layers} layers.")
        if self.moe.dense_layers and not self.intermediate:
            raise ConfigInvalid(
                f"Layers {sorted(self.moe.dense_layers)} are dense, but intermediate_size is missing."
            )

    def context(self, wanted: int | None) -> int:
        """Tokens of the context where so many are wanted; None: all that the model has.

        Raises:
            ConfigInvalid: none, or more than the model has.
        """
        if wanted is None:
            return self.max_model_len
        if not 1 <= wanted <= self.max_model_len:
            raise ConfigInvalid(
                f"--max-model-len {wanted} asked for; this model has 1 to {self.max_model_len}."
            )
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
