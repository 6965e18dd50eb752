"""config.json to ModelSpec: every field is honored or refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.make_model import ARCHITECTURES, SHAPES, make_config, make_model
from eaas.model.families import spec_of, tensors_of, unknown_fields
from eaas.model.loader import load_spec, load_weights
from eaas.model.spec import Latent, QkNorm, rope_of
from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.model import ConfigInvalid, Dtype, UnknownArchitecture

LATENT_FIELDS = (
    ("q_rank", "q_lora_rank"), ("kv_rank", "kv_lora_rank"), ("nope_dim", "qk_nope_head_dim"),
    ("rope_dim", "qk_rope_head_dim"), ("value_dim", "v_head_dim"),
)  # fmt: skip
# What config.json of moonshotai/Kimi-K2-Instruct says of shapes, its quantization left out.
KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 163584, "eos_token_id": 163585, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 131072, "model_type": "kimi_k2", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.48.3", "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip


def config(arch: str = "qwen3_moe", **fields: Any) -> dict[str, Any]:
    return make_config(SHAPES["tiny"], arch, "bfloat16") | fields


def test_each_family_reads_what_sets_it_apart() -> None:
    qwen3, qwen2 = spec_of(config("qwen3_moe")), spec_of(config("qwen2_moe"))
    olmoe, mixtral = spec_of(config("olmoe", clip_qkv=8.0)), spec_of(config("mixtral", sliding_window=32))
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.moe.norm_topk) == (QkNorm.HEAD, False, True)
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.o_bias, qwen2.moe.norm_topk) == (
        QkNorm.NONE,
        True,
        False,
        False,
    )
    assert (qwen2.moe.shared_intermediate, qwen2.moe.shared_gate) == (64, True)
    assert (olmoe.qk_norm, olmoe.clip_qkv, olmoe.eps) == (QkNorm.FULL, 8.0, 1e-5)
    assert (mixtral.sliding_window, mixtral.rope.theta, mixtral.moe.norm_topk) == ((32,) * 4, 1e6, True)
    assert all(spec.dtype is Dtype.BFLOAT16 and spec.eos_ids == (0, 2) for spec in (qwen3, qwen2, olmoe, mixtral))


def test_fields_left_out_take_the_defaults_of_transformers() -> None:
    from transformers import AutoConfig

    left_out = (
        "rms_norm_eps", "rope_theta", "max_position_embeddings", "tie_word_embeddings", "norm_topk_prob",
        "qkv_bias", "shared_expert_intermediate_size", "num_key_value_heads", "head_dim", "attention_bias",
        "rope_scaling", "rotary_dim", "use_qk_norm", "partial_rotary_factor", "n_group", "topk_group",
        "routed_scaling_factor", "n_shared_experts", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim",
    )  # fmt: skip
    for arch in ARCHITECTURES:
        short = {name: value for name, value in config(arch).items() if name not in left_out}
        short["num_key_value_heads"] = 2
        spec, theirs = spec_of(short), AutoConfig.for_model(**short)
        assert spec.eps == theirs.rms_norm_eps, arch
        assert spec.max_model_len == theirs.max_position_embeddings, arch
        assert spec.tie_embeddings == theirs.tie_word_embeddings, arch
        assert spec.rope.theta == theirs.rope_parameters["rope_theta"], arch
        assert spec.moe.norm_topk == getattr(theirs, "norm_topk_prob", True), arch
        assert spec.qkv_bias == getattr(theirs, "qkv_bias", getattr(theirs, "attention_bias", False)), arch
        number = getattr(theirs, "n_shared_experts", 0)
        # Without a number, transformers cannot make a dots1; we take one.
        shared = (1 if number is None else number) * spec.moe.expert_intermediate
        assert spec.moe.shared_intermediate == getattr(theirs, "shared_expert_intermediate_size", shared), arch
        assert (spec.qk_norm is not QkNorm.NONE) == getattr(theirs, "use_qk_norm", spec.qk_norm is not QkNorm.NONE)
        assert spec.rope.kind == theirs.rope_parameters["rope_type"], arch
        rotated = theirs.rope_parameters.get("partial_rotary_factor", 1)
        head_dim = theirs.qk_rope_head_dim if spec.latent else spec.head_dim
        assert 2 * len(spec.rope.inv_freq) == rotated * head_dim, arch
        for ours, name in LATENT_FIELDS if spec.latent else ():
            assert getattr(spec.latent, ours) == getattr(theirs, name), arch
        groups = (getattr(theirs, "n_group", None) or 1, getattr(theirs, "topk_group", None) or 1)
        assert (spec.moe.groups, spec.moe.groups_topk) == groups, arch
        assert spec.moe.scaling_factor == getattr(theirs, "routed_scaling_factor", 1.0), arch


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False,
         "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
         "attention_factor": 0.9},
    ],
    ids=lambda scaling: f"{scaling['rope_type']}-{len(scaling)}",
)  # fmt: skip
@pytest.mark.parametrize("style", [4, 5])
def test_rope_frequencies_equal_those_of_transformers(scaling: dict[str, Any], style: int) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

    fields = config(rope_theta=50_000.0, rope_scaling=dict(scaling))
    if style == 5:
        fields = config(rope_parameters={"rope_theta": 50_000.0, **scaling})
        del fields["rope_theta"]
    theirs = Qwen3MoeRotaryEmbedding(Qwen3MoeConfig(**fields))
    ours = rope_of(fields, 16, 2048, 10_000.0)
    np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq.numpy(), rtol=3e-7)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_sliding_windows_fall_on_the_layers_that_transformers_gives_them() -> None:
    on = {"use_sliding_window": True, "sliding_window": 32}
    assert spec_of(config("qwen3_moe", **on)).sliding_window == (32, 32, 32, 32)
    assert spec_of(config("qwen3_moe", sliding_window=32)).sliding_window == (0, 0, 0, 0)
    assert spec_of(config("qwen2_moe", max_window_layers=3, **on)).sliding_window == (32, 0, 32, 0)
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert spec_of(config("qwen2_moe", layer_types=kinds, **on)).sliding_window == (0, 32, 0, 0)
    short = {k: v for k, v in config("gpt_oss").items() if k not in ("layer_types", "sliding_window")}
    assert spec_of(short).sliding_window == (128, 0, 128, 0)
    assert spec_of(config("gpt_oss", layer_types=kinds)).sliding_window == (0, 32, 0, 0)
    with pytest.raises(ConfigInvalid, match="sliding_window is null"):
        spec_of(config("gpt_oss", sliding_window=None))
    assert spec_of(config("mixtral", sliding_window=4096)).sliding_window == (0, 0, 0, 0), "as wide as the context"


def test_dense_layers_are_those_outside_the_sparse_step() -> None:
    spec = spec_of(config(decoder_sparse_step=2, mlp_only_layers=[1], intermediate_size=96))
    assert spec.moe.dense_layers == {0, 1, 2}
    assert spec.moe_layers == (3,)
    assert tensors_of(spec)["0.dense_down_proj"].shape == (64, 96)
    assert "0.gate" not in tensors_of(spec)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*MixtralForCausalLM.*Qwen3MoeForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "quark"}}, "quantized \\(quark\\)"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'.*llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5.*whole heads"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"num_experts_per_tok": 9}, "9.* 8 experts"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"eos_token_id": 512}, "eos_token_id is 512"),
        ({"head_dim": 15}, "Heads of 15"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "disagrees with sliding_window"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_refused_in_clear_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        spec_of(config(**fields))


def test_a_gate_of_another_kind_than_the_familys_is_refused() -> None:
    for fields, words in (
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'.*'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"n_group": 3}, "8 experts, 3 groups"),
    ):
        with pytest.raises(ConfigInvalid, match=words):
            spec_of(config("glm4_moe", **fields))


def test_kimi_k2_is_read_whole() -> None:
    spec = spec_of(KIMI_K2)
    assert unknown_fields(KIMI_K2) == ()
    assert spec.latent == Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    # A position costs as much in the cache as docs/serve.md says, whatever the number of heads.
    assert spec.layers * spec.kv_heads * spec.cached_dims * spec.dtype.nbytes == 61 * 2176
    magnitude = 0.1 * math.log(32) + 1
    assert spec.query_scale == pytest.approx(192**-0.5 * magnitude**2, rel=1e-12)
    assert spec.rope.attention_factor == 1.0
    assert spec.moe.dense_layers == {0}
    plans = tensors_of(spec)
    assert plans["60.q"] == ("model.layers.60.self_attn.q_b_proj.weight", (64 * 192, 1536))
    assert plans["60.kv_a"] == ("model.layers.60.self_attn.kv_a_proj_with_mqa.weight", (576, 7168))
    assert plans["60.kv_b"] == ("model.layers.60.self_attn.kv_b_proj.weight", (64 * 256, 512))
    assert plans["60.o"].shape == (7168, 64 * 128)
    assert "0.gate" not in plans
    assert plans["1.gate_correction"].name == "model.layers.1.mlp.gate.e_score_correction_bias"


def test_latent_attention_that_is_not_served_is_refused() -> None:
    for arch, fields, words in (
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'.*'group_limited_greedy'"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is True"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "rope frequencies"),
        (
            "deepseek_v3",
            {"qk_rope_head_dim": 7, "kv_lora_rank": 33},
            "7 columns are rotated: .*an even number",
        ),
        ("deepseek_v3", {"kv_lora_rank": 1024}, "at most 576"),
    ):
        with pytest.raises(ConfigInvalid, match=words):
            spec_of(config(arch, **fields))


def test_an_unknown_architecture_has_its_own_error() -> None:
    with pytest.raises(UnknownArchitecture):
        spec_of({"architectures": None})


def test_olmoe_refuses_heads_that_do_not_fill_the_hidden_size() -> None:
    with pytest.raises(ConfigInvalid, match="head_dim is 32"):
        spec_of(config("olmoe", head_dim=32))


def test_unknown_fields_are_named_and_nulls_are_not() -> None:
    assert unknown_fields(config(novelty=1, nothing=None)) == ("novelty",)
    for arch in ARCHITECTURES:
        assert unknown_fields(config(arch)) == (), arch


# What config.json of published checkpoints has beyond the fields that `make_config` writes.
PUBLISHED: dict[str, dict[str, Any]] = {
    # zai-org/GLM-4.5
    "glm4_moe": {"num_nextn_predict_layers": 1, "rope_scaling": None, "routed_scaling_factor": 2.5},
    # openai/gpt-oss-20b
    "gpt_oss": {
        "experts_per_token": 4, "initial_context_length": 4096, "router_aux_loss_coef": 0.9,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    },
    # MiniMaxAI/MiniMax-M2
    "minimax_m2": {
        "attn_type_list": [1] * 4, "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1, "num_mtp_modules": 3,
        "postnorm": False, "router_jitter_noise": 0.0, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
        "use_mtp": True,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
            "weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("arch", PUBLISHED)
def test_a_published_checkpoint_leaves_no_field_unread(arch: str) -> None:
    published = config(arch, **PUBLISHED[arch])
    assert unknown_fields(published) == ()
    assert spec_of(published).dtype is Dtype.BFLOAT16


def test_generation_config_has_the_last_word_on_the_end_of_text() -> None:
    assert spec_of(config(eos_token_id=7)).eos_ids == (7,)
    assert spec_of(config(eos_token_id=7), {"eos_token_id": [9, 8]}).eos_ids == (8, 9)
    assert spec_of(config(eos_token_id=7), {"top_p": 0.9}).eos_ids == (7,)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_are_views_of_the_file_and_no_expert_is_among_them(arch: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_model("tiny", arch, tmp_path, seed=3))
    spec = load_spec(checkpoint)
    weights = load_weights(checkpoint, spec)
    touched = {plan.name for plan in tensors_of(spec).values()}
    assert not any(".experts." in name for name in touched)
    assert all(".experts." in name for name in set(checkpoint.names()) - touched)
    assert all(not array.flags.owndata and not array.flags.writeable for array in weights.values())
    assert all(array.dtype == np.uint16 for array in weights.values())


def test_a_tensor_of_another_shape_or_none_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_model("tiny", "qwen3_moe", tmp_path, seed=3))
    with pytest.raises(CheckpointInvalid, match=r"embed_tokens.weight has shape \[512, 64\].*\[500, 64\]"):
        load_weights(checkpoint, spec_of(checkpoint.config | {"vocab_size": 500}))
    with pytest.raises(CheckpointInvalid, match=r"lm_head.weight \(head\) is missing.*tie_word_embeddings"):
        load_weights(checkpoint, spec_of(checkpoint.config | {"tie_word_embeddings": False}))
