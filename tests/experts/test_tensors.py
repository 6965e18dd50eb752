"""Experts are found in checkpoints as transformers writes them, whatever their family calls and folds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.kernels import from_dtype
from experts.model import ConfigInvalid, ExpertShape
from experts.quantized import Quantized
from experts.tensors import tensors_of
from tests.moe_families import EXPERTS, FAMILIES, HIDDEN, INTER, LAYERS, PUBLISHED_ONLY, experts_of, model_of

# Of hand-written configurations below.
_SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_experts_per_tok": 2,
}
_DEEPSEEK = {"moe_intermediate_size": INTER, "n_routed_experts": EXPERTS, "first_k_dense_replace": 1}


@pytest.mark.parametrize("fused", [False, True], ids=["as-published", "as-in-memory"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_is_the_modules_own(family: str, fused: bool, tmp_path: Path) -> None:
    if fused and family in PUBLISHED_ONLY:
        pytest.skip("no checkpoint is published with these names")
    model = model_of(family)
    model.save_pretrained(tmp_path, save_original_format=not fused)
    checkpoint = Checkpoint.open(tmp_path)
    shape = ExpertShape.from_config(checkpoint.config)
    modules = experts_of(model)
    assert shape.layer_ids == tuple(modules)
    assert (shape.experts, shape.hidden, shape.intermediate) == (EXPERTS, HIDDEN, INTER)
    for layer, module in enumerate(modules.values()):
        for expert in range(EXPERTS):
            found = tensors_of(checkpoint, shape, layer, expert)
            gate_up, down = (w[expert].detach().numpy() for w in (module.gate_up_proj, module.down_proj))
            if module.is_transposed:
                gate_up, down = gate_up.T, down.T
            if not module.is_concatenated:
                gate_up = np.concatenate([gate_up[::2], gate_up[1::2]])
            assert np.array_equal(np.concatenate([found.gate, found.up]), gate_up), (family, layer, expert)
            assert np.array_equal(found.down, down), (family, layer, expert)
            assert module.has_bias == (found.biases is not None)
            if found.biases is not None:
                gate_bias, up_bias, down_bias = found.biases
                both = module.gate_up_proj_bias[expert].detach().numpy()
                assert np.array_equal(gate_bias, both[::2]) and np.array_equal(up_bias, both[1::2])
                assert np.array_equal(down_bias, module.down_proj_bias[expert].detach().numpy())


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    hidden, inter, generator = 64, 96, torch.Generator().manual_seed(4)

    def packed(rows: int, columns: int) -> dict[str, torch.Tensor]:
        blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), generator=generator)
        scales = torch.randint(120, 134, (EXPERTS, rows, columns // 32), generator=generator)
        return {"_blocks": blocks.to(torch.uint8), "_scales": scales.to(torch.uint8)}

    config = _SIZES | {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_local_experts": EXPERTS,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    matrices = {"gate_up_proj": packed(2 * inter, hidden), "down_proj": packed(hidden, inter)}
    tensors = {name + part: tensor for name, parts in matrices.items() for part, tensor in parts.items()}
    tensors["gate_up_proj_bias"] = torch.randn(EXPERTS, 2 * inter, generator=generator)
    tensors["down_proj_bias"] = torch.randn(EXPERTS, hidden, generator=generator)
    save_file(
        {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    checkpoint = Checkpoint.open(tmp_path)
    shape = ExpertShape.from_config(checkpoint.config)
    gate_up, down = (
        convert_moe_packed_tensors(parts["_blocks"], parts["_scales"]).float().numpy() for parts in matrices.values()
    )
    for expert in range(EXPERTS):
        found = tensors_of(checkpoint, shape, 0, expert)
        wanted = (gate_up[expert].T[::2], gate_up[expert].T[1::2], down[expert].T)
        for one, other in zip((found.gate, found.up, found.down), wanted, strict=True):
            assert isinstance(one, Quantized) and np.array_equal(one.dequantized(), other)
        assert found.biases is not None and len(found.biases[2]) == hidden


def fused_qwen(root: Path, tensor: torch.Tensor | None = None) -> Path:
    """A checkpoint of one layer with fused tensors alone."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
    }
    (root / "config.json").write_text(json.dumps(config))
    prefix = "model.layers.0.mlp.experts."
    gate_up = torch.zeros(EXPERTS, 2 * INTER, HIDDEN) if tensor is None else tensor
    save_file(
        {prefix + "gate_up_proj": gate_up, prefix + "down_proj": torch.zeros(EXPERTS, HIDDEN, INTER)},
        root / "model.safetensors",
    )
    return root


def test_float16_is_widened(tmp_path: Path) -> None:
    values = torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=torch.Generator().manual_seed(1)).half()
    checkpoint = Checkpoint.open(fused_qwen(tmp_path, values))
    found = tensors_of(checkpoint, ExpertShape.from_config(checkpoint.config), 0, 3)
    assert found.gate.dtype == np.float32
    assert np.array_equal(from_dtype(found.up), values[3, INTER:].float().numpy())


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (
            torch.zeros(EXPERTS, HIDDEN, 2 * INTER),
            r"gate_up_proj is \(4, 32, 48\); config.json says \(4, 48, 32\)",
        ),
        (torch.zeros(EXPERTS, 2 * INTER, HIDDEN, dtype=torch.int8), "stored as I8; it is read from"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tensor: torch.Tensor, text: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(fused_qwen(tmp_path, tensor))
    with pytest.raises(CheckpointInvalid, match=text):
        tensors_of(checkpoint, ExpertShape.from_config(checkpoint.config), 0, 0)


def test_a_missing_expert_is_named_as_its_family_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((fused_qwen(tmp_path) / "config.json").read_text())
    save_file({"model.norm.weight": torch.zeros(HIDDEN)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointInvalid, match=r"model.layers.0.mlp.experts.2.gate_proj.weight"):
        tensors_of(checkpoint, ExpertShape.from_config(checkpoint.config), 0, 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"n_routed_experts": None}, "n_routed_experts is None"),
        ({"first_k_dense_replace": LAYERS}, "None of the 3 layers"),
    ],
)
def test_a_senseless_field_of_deepseek_is_refused(change: dict[str, Any], text: str) -> None:
    config = _SIZES | _DEEPSEEK | {"architectures": ["DeepseekV3ForCausalLM"]} | change
    with pytest.raises(ConfigInvalid, match=text):
        ExpertShape.from_config(config)
