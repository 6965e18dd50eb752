"""The families against transformers: its checkpoints, read by our loader, run by the native decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eaas.model.loader import load_spec, load_weights
from eaas.worker.decoder import Decoder
from experts.checkpoint import Checkpoint
from experts.model import Dtype, ExpertShape
from experts.tensors import tensors_of
from tests.eaas.decoder_world import Runner, bits_of
from tests.eaas.local_experts import LocalExperts
from tests.eaas.reference import ReferenceDecoder

transformers = pytest.importorskip("transformers", reason="needs transformers, found none")

SEED = 20261121
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "n_routed_experts": 6, "moe_intermediate_size": 40, "intermediate_size": 72, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12, "v_head_dim": 28,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 6, "moe_intermediate_size": 40, "intermediate_size": 72, "head_dim": 32,
         "norm_topk_prob": True, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "qwen3_moe, sliding, bias": (
        "Qwen3Moe",
        {"num_experts": 6, "moe_intermediate_size": 40, "head_dim": 16, "norm_topk_prob": False,
         "attention_bias": True, "use_sliding_window": True, "sliding_window": 23},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 6, "moe_intermediate_size": 40, "intermediate_size": 72,
         "shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "intermediate_size": 56, "sliding_window": 50}),
    "olmoe": (
        "Olmoe",
        {"num_experts": 6, "intermediate_size": 40, "clip_qkv": 1.0, "norm_topk_prob": False,
         "num_key_value_heads": 4},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {"n_routed_experts": 6, "moe_intermediate_size": 40, "intermediate_size": 72, "head_dim": 24,
         "n_shared_experts": 2, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True,
         "attention_bias": True, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "deepseek_v2, queries of the row": (
        "DeepseekV2",
        LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
                  "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT | {"q_lora_rank": 40, "n_group": 3, "topk_group": 2, "norm_topk_prob": True, "rms_norm_eps": 1e-3,
                  "routed_scaling_factor": 1.7, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.6}},
    ),
    "dots1": (
        "Dots1",
        {"n_routed_experts": 6, "moe_intermediate_size": 40, "intermediate_size": 72, "head_dim": 24,
         "n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": 23, "max_window_layers": 1},
    ),
    "minimax_m2": (
        "MiniMaxM2", {"num_local_experts": 6, "intermediate_size": 40, "head_dim": 24, "rotary_dim": 12}
    ),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 6, "intermediate_size": 40, "head_dim": 16, "sliding_window": 23, "swiglu_limit": 1.0},
    ),
}  # fmt: skip


class Family:
    """One tiny model as transformers has it, and as we load it."""

    def __init__(self, kind: str, changes: dict[str, Any], directory: Path) -> None:
        config = getattr(transformers, f"{kind}Config")(**(SIZES | changes))
        torch.manual_seed(SEED)
        self.theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for name, parameter in [*self.theirs.named_parameters(), *self.theirs.named_buffers()]:
            # Norms and biases start as ones and zeros, which would hide a mistake.
            if name.endswith("bias"):
                parameter.data = torch.randn(parameter.shape) * 0.2
            elif parameter.ndim == 1 and "inv_freq" not in name:
                parameter.data = 1 + torch.randn(parameter.shape) * 0.2
        self.theirs.save_pretrained(directory)
        self.checkpoint = Checkpoint.open(directory)
        self.spec = load_spec(self.checkpoint)
        self.weights = load_weights(self.checkpoint, self.spec)
        self.shape = ExpertShape.from_config(self.checkpoint.config)

    def expert(self, layer: int, expert: int) -> tuple[np.ndarray, ...]:
        found = tensors_of(self.checkpoint, self.shape, layer, expert)
        return found.gate, found.up, found.down, *(found.biases or ())

    def runner(self, dtype: Dtype) -> Runner:
        shape, spec = self.shape, replace(self.spec, dtype=dtype)
        local = LocalExperts(
            layers=shape.layers,
            experts=shape.experts,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            top_k=shape.top_k,
            dtype=dtype,
            lanes=2,
            activation=shape.activation,
            biased=shape.biased,
        )
        for layer in range(shape.layers):
            for expert in range(shape.experts):
                gate, up, down, *biases = self.expert(layer, expert)
                local.set(layer, expert, gate, up, down, tuple(biases) or None)
        return Runner(Decoder(spec, self.weights, local.backend, [-1, -1], 64), local)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Family(*FAMILIES[request.param], tmp_path_factory.mktemp("checkpoint"))
    torch.set_num_threads(threads)


def test_float32_logits_equal_transformers(family: Family) -> None:
    ours = family.runner(Dtype.FLOAT32)
    definition = ReferenceDecoder(family.spec, family.weights, family.expert, activation=family.shape.activation)
    for length in (1, 17, 300):
        tokens = np.random.default_rng(SEED).integers(0, SIZES["vocab_size"], length)
        with torch.inference_mode():
            wanted = family.theirs(torch.from_numpy(tokens)[None]).logits[0].numpy()
        for name, logits in (
            ("native", ours.prefill(tokens.tolist())),
            ("reference", definition.logits(tokens)),
        ):
            worst = float(np.abs(logits - wanted).max())
            assert worst < 2e-4, f"{name}: off by {worst}, length {length}, seed {SEED}"


def test_bfloat16_errs_no_more_than_transformers(family: Family) -> None:
    tokens = np.random.default_rng(SEED + 1).integers(0, SIZES["vocab_size"], 200)
    rounded = Family.__new__(Family)
    rounded.__dict__ = family.__dict__ | {
        "weights": {role: bits_of(array) for role, array in family.weights.items()},
        "expert": lambda layer, expert: tuple(bits_of(array) for array in family.expert(layer, expert)),
    }
    exact = ReferenceDecoder(
        family.spec, rounded.weights, rounded.expert, torch.float64, family.shape.activation
    ).logits(tokens)
    ours = rounded.runner(Dtype.BFLOAT16).prefill(tokens.tolist())
    with torch.inference_mode():
        theirs = family.theirs.to(torch.bfloat16)(torch.from_numpy(tokens)[None]).logits[0].float().numpy()
    family.theirs.float()
    # A choice that rounding flips early on reaches most later positions; the tenth best has met none.
    errors = (np.linalg.norm(logits - exact, axis=1) / np.linalg.norm(exact, axis=1) for logits in (ours, theirs))
    error, bound = (float(np.quantile(part, 0.1)) for part in errors)
    assert error < 1.1 * bound, f"relative error {error}, transformers {bound}, seed {SEED}"
