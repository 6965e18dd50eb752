"""What config.json says about experts, and what is refused."""

from __future__ import annotations

import pytest

from experts.model import ConfigInvalid, Dtype, ExpertShape, UnknownArchitecture
from tests.experts.checkpoint_files import QWEN3


def test_qwen3_layers_are_counted_without_the_dense_ones() -> None:
    shape = ExpertShape.from_config(QWEN3)
    assert (shape.layer_ids, shape.layers) == ((0, 2), 2)
    assert (shape.experts, shape.hidden, shape.intermediate, shape.top_k) == (4, 70, 45, 2)
    assert shape.names(1, 3) == (
        "model.layers.2.mlp.experts.3.gate_proj.weight",
        "model.layers.2.mlp.experts.3.up_proj.weight",
        "model.layers.2.mlp.experts.3.down_proj.weight",
    )


def test_qwen2_sparse_step_makes_every_second_layer_moe() -> None:
    config = QWEN3 | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
    }
    assert ExpertShape.from_config(config).layer_ids == (1, 3, 5)


def test_mixtral_names_gate_up_down_as_w1_w3_w2() -> None:
    config = {
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    shape = ExpertShape.from_config(config)
    assert (shape.intermediate, shape.experts, shape.layer_ids) == (96, 8, (0, 1))
    stem = "model.layers.1.block_sparse_moe.experts.7."
    assert shape.names(1, 7) == (stem + "w1.weight", stem + "w3.weight", stem + "w2.weight")


def test_olmoe_reads_intermediate_size_and_ignores_dense_layers() -> None:
    config = QWEN3 | {"architectures": ["OlmoeForCausalLM"], "intermediate_size": 33}
    shape = ExpertShape.from_config(config)
    assert (shape.intermediate, shape.layer_ids) == (33, (0, 1, 2))


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownArchitecture, match=r"GPT2.*MixtralForCausalLM.*Qwen3MoeForCausalLM"):
        ExpertShape.from_config({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(UnknownArchitecture, match="no architecture"):
        ExpertShape.from_config({})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": None}, "num_experts is None"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"moe_intermediate_size": "45"}, "moe_intermediate_size is '45'"),
        ({"num_experts_per_tok": 5}, "5, but there are 4 experts"),
        ({"mlp_only_layers": [0, 1, 2]}, "None of the 3 layers"),
        ({"mlp_only_layers": "x"}, "mlp_only_layers is 'x'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_a_senseless_field_is_refused_by_name(change: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigInvalid, match=text):
        ExpertShape.from_config(QWEN3 | change)


@pytest.mark.parametrize(("layer", "expert"), [(2, 0), (0, 4), (-1, 0), (0, -1)])
def test_no_name_for_an_expert_that_does_not_exist(layer: int, expert: int) -> None:
    with pytest.raises(IndexError, match="does not exist"):
        ExpertShape.from_config(QWEN3).names(layer, expert)


def test_auto_dtype_keeps_bfloat16_and_widens_everything_else() -> None:
    assert Dtype.resolve("auto", {"dtype": "bfloat16"}) is Dtype.BFLOAT16
    assert Dtype.resolve("auto", {"torch_dtype": "bfloat16"}) is Dtype.BFLOAT16
    assert Dtype.resolve("auto", {"torch_dtype": "float16"}) is Dtype.FLOAT32
    assert Dtype.resolve("auto", {}) is Dtype.FLOAT32
    assert Dtype.resolve("float32", {"dtype": "bfloat16"}) is Dtype.FLOAT32
    assert Dtype.resolve("int8", {"dtype": "bfloat16"}) is Dtype.INT8
    with pytest.raises(ConfigInvalid, match="float16"):
        Dtype.resolve("float16", {})
