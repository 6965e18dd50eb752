"""Small models of random weights of every family whose experts are served, as transformers makes them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB, HIDDEN, INTER, EXPERTS, LAYERS = 64, 32, 24, 4, 3

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    # Ten times as usual, so that experts weigh in the logits as they do in a trained model.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN: dict[str, Any] = {"moe_intermediate_size": INTER, "intermediate_size": 40, "num_experts": EXPERTS}
_GATED: dict[str, Any] = {
    "layer_types": ["full_attention"] * LAYERS,
    "shared_expert_intermediate_size": INTER,
}
_DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": INTER,
    "intermediate_size": 40,
    "n_routed_experts": EXPERTS,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "head_dim": 8,
}  # fmt: skip
_INDEXED: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
_MIXTRAL: dict[str, Any] = {"intermediate_size": INTER, "num_local_experts": EXPERTS}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_KINDS = ["dense", *["sparse"] * (LAYERS - 1)]

# By the name of the model's class, and of its configuration's, up to ForCausalLM and Config.
FAMILIES: dict[str, dict[str, Any]] = {
    "Afmoe": _QWEN | {"num_dense_layers": 1, "num_shared_experts": 1},
    "AXK1": _DEEPSEEK | _MLA,
    "Cohere2Moe": {"intermediate_size": INTER, "num_experts": EXPERTS},
    "DeepseekV2": _DEEPSEEK | _MLA,
    "DeepseekV3": _DEEPSEEK | _MLA,
    "DeepseekV32": _DEEPSEEK | _MLA | _INDEXED,
    "Dots1": _DEEPSEEK,
    "Ernie4_5_Moe": {
        "moe_intermediate_size": INTER, "intermediate_size": 40, "moe_num_experts": EXPERTS, "moe_k": 2,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    },
    "ExaoneMoe": _QWEN | {"first_k_dense_replace": 1, "num_shared_experts": 1, "n_group": 1},
    "FlexOlmo": {"intermediate_size": INTER, "num_experts": EXPERTS},
    "Glm4Moe": _DEEPSEEK,
    "Glm4MoeLite": _DEEPSEEK | _MLA,
    "GlmMoeDsa": _DEEPSEEK | _MLA | _INDEXED,
    "GptOss": _MIXTRAL,
    "GraniteMoe": _MIXTRAL,
    "GraniteMoeHybrid": _MIXTRAL | _MAMBA | {
        "shared_intermediate_size": INTER, "layer_types": ["mamba", "full_attention", "mamba"],
    },
    "GraniteMoeShared": _MIXTRAL | {"shared_intermediate_size": INTER},
    "HYV3": _QWEN | {"num_shared_experts": 1, "mlp_layer_types": _KINDS},
    "Jamba": {
        "intermediate_size": INTER, "num_experts": EXPERTS, "expert_layer_period": 2, "expert_layer_offset": 1,
        "attn_layer_period": 2, "attn_layer_offset": 0, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "KimiLinear": _QWEN | _MLA | {
        "num_shared_experts": 1, "mlp_layer_types": _KINDS, "linear_head_dim": 16, "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "Laguna": _QWEN | {"shared_expert_intermediate_size": INTER, "mlp_layer_types": _KINDS},
    "Lfm2Moe": _QWEN | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    "Mellum": _QWEN,
    "MiMoV2Flash": _DEEPSEEK | {
        "mlp_layer_types": _KINDS, "v_head_dim": 16, "layer_types": ["full_attention"] * LAYERS,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    },
    "MiniMax": _MIXTRAL,
    "MiniMaxM2": _MIXTRAL | {"rotary_dim": 8},
    "Mixtral": _MIXTRAL,
    "Olmoe": {"intermediate_size": INTER, "num_experts": EXPERTS},
    "Phimoe": _MIXTRAL,
    "Qwen2Moe": _QWEN | {"decoder_sparse_step": 2},
    "Qwen3Moe": _QWEN,
    "Qwen3Next": _QWEN | _GATED | _DELTA,
    "Qwen3_5Moe": _QWEN | _GATED | _DELTA,
    "SolarOpen": _DEEPSEEK | {"first_k_dense_replace": 0},
}  # fmt: skip
# transformers names the configuration of its text model otherwise.
_CONFIGS = {"Qwen3_5Moe": "Qwen3_5MoeTextConfig"}
# Written by transformers only as published, or with the names of no published checkpoint.
PUBLISHED_ONLY = ("GraniteMoe", "GraniteMoeHybrid", "GraniteMoeShared")


def model_of(family: str, seed: int = 7, **changes: Any) -> Any:
    """A model; what it computes depends on each of its weights."""
    torch.manual_seed(seed)
    config = getattr(transformers, _CONFIGS.get(family, f"{family}Config"))(**_SIZES | FAMILIES[family] | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def experts_of(model: torch.nn.Module) -> dict[int, Any]:
    """The modules of experts by decoder layer."""
    return {
        int(path.split(".layers.")[1].split(".")[0]): module
        for path, module in model.named_modules()
        if hasattr(module, "is_transposed")
    }
