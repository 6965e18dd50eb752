"""Tiny random models for decoder tests: spec, weights by role, experts, sequences run through a Decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eaas.model.families import tensors_of
from eaas.model.spec import Latent, ModelSpec, MoeSpec, QkNorm, Rope, Score
from eaas.worker.decoder import Decoder
from eaas.worker.plan import StepPlan
from experts.model import Dtype
from tests.eaas.local_experts import LocalExperts
from tests.eaas.reference import ReferenceDecoder

VOCAB = 131


def spec_of(**changes: Any) -> ModelSpec:
    """A tiny spec; fields of MoeSpec and ModelSpec may be changed alike, and `theta` and `rotated` of a head."""
    theta = changes.pop("theta", 10000.0)
    latent = changes.get("latent")
    if latent:
        changes = {"architecture": "DeepseekV3ForCausalLM", "kv_heads": 1, **changes}
        changes["head_dim"] = latent.kv_rank + latent.rope_dim
    head_dim = latent.rope_dim if latent else changes.get("head_dim", 32)
    rotated = changes.pop("rotated", head_dim)
    layers = changes.get("layers", 3)
    moe = MoeSpec(experts=8, top_k=2, expert_intermediate=48, norm_topk=True)
    moe_changes = {name: changes.pop(name) for name in list(changes) if name in MoeSpec.__dataclass_fields__}
    inv_freq = (theta ** (-2 * np.arange(rotated // 2) / rotated)).astype(np.float32)
    spec = ModelSpec(
        architecture="Qwen3MoeForCausalLM",
        hidden=72,
        layers=layers,
        q_heads=6,
        kv_heads=2,
        head_dim=changes.pop("head_dim", head_dim),
        vocab=VOCAB,
        intermediate=88,
        eps=1e-6,
        rope=Rope(kind="default", theta=theta, inv_freq=tuple(inv_freq.tolist())),
        max_model_len=400,
        qk_norm=QkNorm.NONE,
        qkv_bias=False,
        o_bias=False,
        clip_qkv=0.0,
        sliding_window=(0,) * layers,
        tie_embeddings=False,
        dtype=Dtype.FLOAT32,
        moe=replace(moe, **moe_changes),
        eos_ids=(1,),
    )
    return replace(spec, **changes)


VARIANTS: dict[str, ModelSpec] = {
    "grouped heads, head norm, tied": spec_of(qk_norm=QkNorm.HEAD, tie_embeddings=True),
    "one head per key, full norm, clip": spec_of(kv_heads=6, qk_norm=QkNorm.FULL, clip_qkv=0.6, norm_topk=False),
    "bias, shared expert with gate": spec_of(
        qkv_bias=True, shared_intermediate=56, shared_gate=True, norm_topk=False, scaling_factor=1.5
    ),
    "output bias, many queries per key": spec_of(q_heads=8, kv_heads=1, o_bias=True, qkv_bias=True, head_dim=16),
    "sliding windows": spec_of(sliding_window=(7, 0, 64), qk_norm=QkNorm.HEAD),
    "sigmoid, groups, correction, shared, leading dense": spec_of(
        score=Score.SIGMOID,
        groups=4,
        groups_topk=2,
        correction_bias=True,
        scaling_factor=2.5,
        shared_intermediate=40,
        dense_layers=frozenset({0}),
        top_k=3,
    ),
    "softmax, groups": spec_of(groups=4, groups_topk=2, top_k=4),
    "odd sizes": spec_of(hidden=50, head_dim=10, q_heads=3, kv_heads=3, expert_intermediate=21, experts=5, top_k=5),
    "a quarter of each head rotated": spec_of(rotated=8, qk_norm=QkNorm.HEAD),
    "sinks, gate with a bias, some windows": spec_of(
        sinks=True, gate_bias=True, sliding_window=(19, 0, 70), qkv_bias=True, o_bias=True
    ),
    "heads of 64 owned by lanes": spec_of(head_dim=64, qk_norm=QkNorm.HEAD, layers=2),
    "latent attention, sigmoid, shared": spec_of(
        latent=Latent(q_rank=40, kv_rank=48, nope_dim=20, rope_dim=12, value_dim=18),
        q_heads=7,
        eps=1e-2,  # not that of the latents
        score=Score.SIGMOID,
        correction_bias=True,
        shared_intermediate=40,
        dense_layers=frozenset({0}),
    ),
    "latent attention of the row itself, in halves": spec_of(
        latent=Latent(q_rank=0, kv_rank=32, nope_dim=16, rope_dim=16, value_dim=64, interleaved=False),
        layers=2,
    ),
    "latent attention as wide as DeepSeek-V3's": spec_of(
        latent=Latent(q_rank=96, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128), layers=1, q_heads=8
    ),
}


def bits_of(array: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits, ties to even."""
    raw = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass
class World:
    """A model with random weights, and the means to run it."""

    spec: ModelSpec
    weights: dict[str, np.ndarray]
    experts: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]]

    @classmethod
    def make(cls, spec: ModelSpec, seed: int) -> World:
        """Weights from a seed, in the spec's dtype."""
        random = np.random.Generator(np.random.Philox(key=seed))

        def stored(array: np.ndarray) -> np.ndarray:
            return bits_of(array) if spec.dtype is Dtype.BFLOAT16 else array.astype(np.float32)

        def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
            return stored(random.standard_normal((rows, columns)) * gain / np.sqrt(columns))

        def vector(size: int, center: float, spread: float) -> np.ndarray:
            return stored(center + spread * random.standard_normal(size))

        def mlp(inner: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            return matrix(inner, spec.hidden), matrix(inner, spec.hidden), matrix(spec.hidden, inner)

        weights = {"embed": stored(random.standard_normal((spec.vocab, spec.hidden)))}
        if not spec.tie_embeddings:
            weights["head"] = matrix(spec.vocab, spec.hidden)
        weights["final_norm"] = vector(spec.hidden, 1.0, 0.2)
        moe, full = spec.moe, spec.qk_norm is QkNorm.FULL
        for layer in range(spec.layers):
            part: dict[str, np.ndarray] = {}
            if spec.latent:
                for role in ("q_a", "q_a_norm", "q", "kv_a", "kv_a_norm", "kv_b", "o"):
                    if plan := tensors_of(spec).get(f"{layer}.{role}"):
                        norm = role.endswith("_norm")
                        part[role] = vector(plan.shape[0], 1.0, 0.2) if norm else matrix(*plan.shape)
            else:
                for role, rows in (("q", spec.q_size), ("k", spec.kv_size), ("v", spec.kv_size)):
                    part[role] = matrix(rows, spec.hidden)
                    if spec.qkv_bias:
                        part[f"{role}_bias"] = vector(rows, 0.0, 0.5)
                if spec.sinks:
                    part["sinks"] = vector(spec.q_heads, 1.0, 1.0)
                part["o"] = matrix(spec.hidden, spec.q_size)
            if spec.o_bias:
                part["o_bias"] = vector(spec.hidden, 0.0, 0.5)
            if spec.qk_norm is not QkNorm.NONE:
                part["q_norm"] = vector(spec.q_size if full else spec.head_dim, 1.0, 0.2)
                part["k_norm"] = vector(spec.kv_size if full else spec.head_dim, 1.0, 0.2)
            part["input_norm"], part["post_norm"] = (vector(spec.hidden, 1.0, 0.2) for _ in range(2))
            names = ("gate_proj", "up_proj", "down_proj")
            if layer in moe.dense_layers:
                part |= {f"dense_{n}": w for n, w in zip(names, mlp(spec.intermediate), strict=True)}
            else:
                part["gate"] = matrix(moe.experts, spec.hidden, 2.0)
                if moe.gate_bias:
                    part["gate_bias"] = vector(moe.experts, 0.0, 0.5)
                if moe.correction_bias:
                    part["gate_correction"] = random.standard_normal(moe.experts).astype(np.float32) * 0.2
                if moe.shared_intermediate:
                    part |= {f"shared_{n}": w for n, w in zip(names, mlp(moe.shared_intermediate), strict=True)}
                    if moe.shared_gate:
                        part["shared_gate"] = matrix(1, spec.hidden)
            weights |= {f"{layer}.{role}": array for role, array in part.items()}
        experts = [[mlp(moe.expert_intermediate) for _ in range(moe.experts)] for _ in spec.moe_layers]
        return cls(spec, weights, experts)

    def reference(self, dtype: object = None) -> ReferenceDecoder:
        """The torch definition of the same model."""
        extra: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        return ReferenceDecoder(self.spec, self.weights, lambda layer, expert: self.experts[layer][expert], **extra)

    def decoder(self, lanes: int = 1, kv_blocks: int = 64, max_rows: int = 512, block_tokens: int = 16) -> Runner:
        """A native decoder with its experts in this process."""
        moe = self.spec.moe
        local = LocalExperts(
            layers=len(self.experts),
            experts=moe.experts,
            hidden=self.spec.hidden,
            intermediate=moe.expert_intermediate,
            top_k=moe.top_k,
            dtype=self.spec.dtype,
            lanes=lanes,
            max_rows=max_rows,
        )
        for layer, row in enumerate(self.experts):
            for number, expert in enumerate(row):
                local.set(layer, number, *expert)
        decoder = Decoder(
            self.spec,
            self.weights,
            local.backend,
            [-1] * lanes,
            kv_blocks,
            block_tokens=block_tokens,
            max_rows=max_rows,
        )
        return Runner(decoder, local)


class Runner:
    """Runs whole and partial sequences through one decoder; block tables are the caller's or made here."""

    def __init__(self, decoder: Decoder, local: LocalExperts) -> None:
        self.decoder = decoder
        self.local = local  # must outlive the decoder

    def run(
        self, pieces: Sequence[tuple[Sequence[int], int, Sequence[int]]], wanted: Sequence[int] | None = None
    ) -> np.ndarray:
        """One step. pieces: (tokens, first position, block table). Logits of all rows, or of `wanted`."""
        tokens = np.concatenate([np.asarray(piece[0], dtype=np.int32) for piece in pieces])
        positions = np.concatenate([piece[1] + np.arange(len(piece[0]), dtype=np.int32) for piece in pieces])
        seqs = np.concatenate([np.full(len(piece[0]), i, dtype=np.int32) for i, piece in enumerate(pieces)])
        tables = np.full((len(pieces), max(len(piece[2]) for piece in pieces)), -1, dtype=np.int32)
        for number, piece in enumerate(pieces):
            tables[number, : len(piece[2])] = piece[2]
        plan = StepPlan(
            token_ids=tokens,
            positions=positions.astype(np.int32),
            seqs=seqs,
            block_tables=tables,
            logits_rows=np.arange(len(tokens), dtype=np.int32) if wanted is None else np.array(wanted, dtype=np.int32),
        )
        return self.decoder.step(plan, 10.0).copy()

    def prefill(self, tokens: Sequence[int], first_block: int = 0) -> np.ndarray:
        """Logits of all positions of one sequence, in one step."""
        return self.run([(tokens, 0, range(first_block, first_block + len(tokens) // 16 + 1))])


def tokens_of(count: int, seed: int) -> list[int]:
    """Random token ids."""
    return np.random.Generator(np.random.Philox(key=seed)).integers(0, VOCAB, count).tolist()
