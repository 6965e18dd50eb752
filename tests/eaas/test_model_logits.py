"""The readable decoder and transformers agree on what a checkpoint means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.bits_per_byte import open_reference
from benchmarks.make_model import make_model
from eaas.model.loader import resolve_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-dense-layers": (
        "qwen3_moe",
        {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False, "attention_bias": True},
    ),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}),
    "qwen3_moe-yarn": (
        "qwen3_moe",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 4, "norm_topk_prob": True},
    ),
    "olmoe": ("olmoe", {}),
    "olmoe-clip": ("olmoe", {"clip_qkv": 0.5, "num_key_value_heads": 4}),
    "mixtral": ("mixtral", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-groups": (
        "glm4_moe",
        {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 2, "use_qk_norm": False,
         "attention_bias": False, "partial_rotary_factor": 0.25, "routed_scaling_factor": 2.5},
    ),
    "deepseek_v2": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "deepseek_v2-lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "n_shared_experts": 2, "v_head_dim": 24, "qk_nope_head_dim": 24, "kv_lora_rank": 40,
         "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-yarn-untied": (
        "deepseek_v3",
        {"tie_word_embeddings": False, "rms_norm_eps": 1e-4, "routed_scaling_factor": 2.5, "n_group": 1,
         "topk_group": 1, "first_k_dense_replace": 2, "qk_rope_head_dim": 16,
         "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    "deepseek_v3-halves": ("deepseek_v3", {"rope_interleave": False}),
    "glm4_moe-yarn": ("glm4_moe", {"rope_scaling": YARN}),
    "dots1": ("dots1", {}),
    "dots1-late-windows": (
        "dots1",
        {"sliding_window": 7, "max_window_layers": 2, "attention_bias": True, "norm_topk_prob": False,
         "n_group": 2, "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
    ),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m2-rotary": ("minimax_m2", {"rotary_dim": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss-clamped": (
        "gpt_oss",
        {"swiglu_limit": 0.4, "sliding_window": 5, "attention_bias": False,
         "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]},
    ),
    "mixtral-window-untied": ("mixtral", {"sliding_window": 7, "tie_word_embeddings": False, "head_dim": 32}),
}  # fmt: skip


def theirs(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_family_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    arch, overrides = VARIANTS[variant]
    folder = make_model("tiny", arch, tmp_path, seed=5, dtype="float32", overrides=overrides)
    tokens = np.random.default_rng(5).integers(0, 512, 40).tolist()
    ours, expected = open_reference(folder).logits(tokens), theirs(folder, tokens)
    assert np.abs(ours - expected).max() < 2e-4, f"{variant}, seed 5"
    assert expected.std() > 0.3, f"{variant}: logits so flat compare nothing, seed 5"


def test_layers_beyond_those_of_the_model_are_left_alone(tmp_path: Path) -> None:
    """DeepSeek-V3's checkpoints go on with layers that guess further tokens."""
    folder = make_model("tiny", "deepseek_v3", tmp_path, seed=5, dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": config["num_hidden_layers"] - 1, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = np.random.default_rng(5).integers(0, 512, 40).tolist()
    ours, expected = open_reference(folder).logits(tokens), theirs(folder, tokens)
    assert np.abs(ours - expected).max() < 2e-4, "seed 5"


def test_the_demonstration_model_says_the_same_in_transformers() -> None:
    folder = resolve_model("demo")
    tokens = np.random.default_rng(6).integers(0, 1024, 64).tolist()
    ours, expected = open_reference(folder).logits(tokens), theirs(folder, tokens)
    assert np.abs(ours - expected).max() < 2e-4, "seed 6"
    assert (ours.argmax(-1) == expected.argmax(-1)).all(), "seed 6"
