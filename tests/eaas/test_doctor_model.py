"""The doctor of a checkpoint says of each fault where it is, and its figures are those of what is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from typer.testing import CliRunner

from benchmarks.make_model import make_model
from eaas.model.loader import load_spec, load_weights
from eaas.ops import doctor_model
from eaas.ops.cli import app
from eaas.ops.doctor import Finding
from experts.checkpoint import Checkpoint
from experts.model import Dtype, ExpertShape
from experts.pack import PackedExperts
from tests.experts.gguf_files import write_gguf


def examined(folder: Path, dtype: str = "auto", experts: int = 4, **options: Any) -> dict[str, Finding]:
    found = doctor_model.examine_model(str(folder), dtype=dtype, experts=experts, replicas=2, **options)
    return {finding.what: finding for finding in found}


def sharded(folder: Path, parts: int = 3) -> list[Path]:
    """Split the one file of a model into shards, tensor by tensor in turns."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [folder / f"model-{part + 1:05}-of-{parts:05}.safetensors" for part in range(parts)]
    names = sorted(tensors)
    for part, file in enumerate(files):
        save_file({name: tensors[name] for name in names[part::parts]}, file)
    weight_map = {name: files[at % parts].name for at, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "int8"])
@pytest.mark.parametrize("arch", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_figures_are_those_of_what_is_packed_and_loaded(
    arch: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_model("tiny", arch, tmp_path / "m", seed=1, dtype="float32" if dtype == "float32" else "bfloat16")
    found = examined(folder, dtype)
    assert all(finding.usable for finding in found.values()), found
    checkpoint = Checkpoint.open(folder)
    shape = ExpertShape.from_config(checkpoint.config)
    packed = PackedExperts.open(checkpoint, shape, Dtype.resolve(dtype, checkpoint.config))
    figures = found["expert servers load"].figures
    assert figures["expert"] == packed.blob(0, 0).size
    assert figures["experts"] == figures["expert"] * shape.layers * shape.experts
    # Two replicas on four servers, evenly.
    assert figures["server"] == figures["experts"] // 2
    weights = load_weights(checkpoint, load_spec(checkpoint))
    assert found["attention worker loads"].figures["weights"] == sum(w.nbytes for w in weights.values())
    assert found["checkpoint"].figures["bytes"] == (folder / "model.safetensors").stat().st_size


def test_every_truncated_and_missing_shard_is_named(tmp_path: Path) -> None:
    first, second, third = sharded(make_model("tiny", "qwen3_moe", tmp_path, seed=1, dtype="float32"))
    first.write_bytes(first.read_bytes()[:-100])
    third.unlink()
    found = examined(tmp_path)
    assert list(found) == ["checkpoint"] and not found["checkpoint"].usable
    text = found["checkpoint"].found
    assert f"{first}: " in text and f"{third}: cannot be read" in text and str(second) not in text


def test_every_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = make_model("tiny", "qwen3_moe", tmp_path, seed=1, dtype="float32")
    tensors = load_file(folder / "model.safetensors")
    experts = ["model.layers.1.mlp.experts.3.gate_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight",
               "model.layers.2.mlp.experts.0.down_proj.weight"]  # fmt: skip
    others = ["model.layers.1.self_attn.q_norm.weight", "model.layers.3.self_attn.o_proj.weight"]
    for name in experts + others:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    found = examined(folder)
    for what, names in (("weights of experts", experts), ("attention worker loads", others)):
        assert not found[what].usable and found[what].required
        assert len(found[what].found.splitlines()) == len(names)
        for name in names:
            assert name in found[what].found
    assert found["expert servers load"].usable and found["tokenizer"].usable


def test_a_tensor_of_another_shape_or_type_is_named(tmp_path: Path) -> None:
    folder = make_model("tiny", "qwen3_moe", tmp_path, seed=1, dtype="float32")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.experts.5.up_proj.weight"] = np.zeros((3, 64), np.float32)
    tensors["model.layers.2.self_attn.k_proj.weight"] = np.zeros((32, 64), np.int64)
    save_file(tensors, folder / "model.safetensors")
    found = examined(folder)
    assert "layers.2.mlp.experts.5.up_proj.weight is (3, 64)" in found["weights of experts"].found
    assert "layers.2.self_attn.k_proj.weight is I64" in found["attention worker loads"].found


def test_what_is_not_served_is_named_with_what_is(tmp_path: Path) -> None:
    folder = make_model("tiny", "qwen3_moe", tmp_path, seed=1)
    config = json.loads((folder / "config.json").read_text())

    def of(**changed: Any) -> dict[str, Finding]:
        (folder / "config.json").write_text(json.dumps(config | changed))
        return examined(folder)

    unknown = of(architectures=["LlamaForCausalLM"])["experts"]
    assert unknown.required and not unknown.usable
    assert "names LlamaForCausalLM. Experts are served of" in unknown.found
    behind_others = of(architectures=["Qwen3NextForCausalLM"])
    assert behind_others["weights of experts"].usable
    engine = behind_others["own engine"]
    assert not engine.usable and not engine.required and "only the experts are served" in engine.found
    quantized = next(f for f in of(quantization_config={"quant_method": "bitsandbytes"}).values() if not f.usable)
    assert quantized.required and "bitsandbytes" in quantized.found


def test_gguf_files_are_examined_too(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "moe_intermediate_size": 256, "head_dim": 64}
    source = make_model("tiny", "qwen3_moe", tmp_path / "source", seed=1, dtype="float32", overrides=sizes)
    write_gguf(source, tmp_path / "gguf", lambda name: Kind.Q4_K if "exps" in name else Kind.Q8_0, seed=1)
    found = examined(tmp_path / "gguf")
    assert all(finding.usable for finding in found.values()), found
    assert "Q4_K" in found["checkpoint"].found and "Q8_0" in found["checkpoint"].found


def test_the_command_prints_a_table_or_json_and_fails_where_something_is_missing(tmp_path: Path) -> None:
    folder = make_model("tiny", "qwen3_moe", tmp_path, seed=1)
    run = CliRunner().invoke
    shown = run(app, ["doctor", str(folder), "--experts", "3"])
    assert shown.exit_code == 0 and "own engine" not in shown.output and "3" in shown.output
    as_json = run(app, ["doctor", str(folder), "--json"])
    assert {entry["what"] for entry in json.loads(as_json.stdout)} >= {"checkpoint", "KV cache", "tokenizer"}
    (folder / "tokenizer.json").unlink()
    assert run(app, ["doctor", str(folder)]).exit_code == 1
    assert run(app, ["doctor", str(tmp_path / "absent")]).exit_code == 1


def quantized(folder: Path, method: str) -> Path:
    """Have every projection stored as published checkpoints of a method have it, all zero."""
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, weight in load_torch(folder / "model.safetensors").items():
        rows, k = weight.shape if weight.ndim == 2 else (0, 0)
        module = name.removesuffix(".weight")
        words, half = torch.int32, torch.float16
        if "_proj" not in name or not rows:
            plain[name] = weight
        elif method == "fp8":
            tensors[name] = torch.zeros(rows, k, dtype=torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 128), -(-k // 128))
        elif method == "compressed-tensors":
            tensors[f"{name}_packed"] = torch.zeros(rows, k // 8, dtype=words)
            tensors[f"{name}_scale"] = torch.ones(rows, k // 32, dtype=torch.bfloat16)
            tensors[f"{name}_shape"] = torch.tensor([rows, k])
        else:
            packed = (k, rows // 8) if method == "awq" else (k // 8, rows)
            tensors[f"{module}.qweight"] = torch.zeros(packed, dtype=words)
            tensors[f"{module}.qzeros"] = torch.zeros(k // 32, rows // 8, dtype=words)
            tensors[f"{module}.scales"] = torch.ones(k // 32, rows, dtype=half)
            if method == "gptq":
                tensors[f"{module}.g_idx"] = torch.arange(k, dtype=torch.int32) // 32
    save_torch(plain | tensors, folder / "model.safetensors")
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    fields: dict[str, dict[str, Any]] = {
        "fp8": {"weight_block_size": [128, 128]},
        "awq": {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        "gptq": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        "compressed-tensors": {
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method} | fields[method]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "compressed-tensors"])
def test_quantized_checkpoints_are_checked_by_the_tensors_that_they_have(method: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 128, "hidden_size": 128, "head_dim": 32}
    made = make_model("tiny", "qwen3_moe", tmp_path, seed=1, overrides=sizes)
    folder = quantized(made, method)
    found = examined(folder)
    assert all(finding.usable for finding in found.values()), found
    assert ("served in fp8" if method == "fp8" else "served in int4-g32") in found["experts"].found
    weights = load_weights(checkpoint := Checkpoint.open(folder), load_spec(checkpoint))
    assert found["attention worker loads"].figures["weights"] == sum(w.nbytes for w in weights.values())
    tensors = load_torch(folder / "model.safetensors")
    scales = "weight_scale" if method == "compressed-tensors" else "scales"
    scales = "weight_scale_inv" if method == "fp8" else scales
    gone = [f"model.layers.2.mlp.experts.4.up_proj.{scales}", f"model.layers.3.self_attn.v_proj.{scales}"]
    for name in gone:
        del tensors[name]
    save_torch(tensors, folder / "model.safetensors")
    found = examined(folder)
    assert found["weights of experts"].found == f"no tensor {gone[0]}"
    assert found["attention worker loads"].found == f"no tensor {gone[1]}"


def test_an_expert_that_is_not_stored_as_config_json_says_is_named(tmp_path: Path) -> None:
    """What packing refuses; where config.json says so too all are served in bfloat16."""
    sizes = {"moe_intermediate_size": 128, "hidden_size": 128, "head_dim": 32}
    folder = quantized(make_model("tiny", "qwen3_moe", tmp_path, seed=1, overrides=sizes), "fp8")
    module = "model.layers.1.mlp.experts.3"
    tensors = load_torch(folder / "model.safetensors")
    tensors[f"{module}.up_proj.weight"] = tensors[f"{module}.up_proj.weight"].to(torch.bfloat16)
    save_torch(tensors, folder / "model.safetensors")
    found = examined(folder)["weights of experts"]
    assert not found.usable and "expert 3 of MoE layer 1: weights are uint16; fp8 is of" in found.found
    assert len(found.found.splitlines()) == 1
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [f"{module}.up_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    told = examined(folder)
    assert all(finding.usable for finding in told.values()), told
    assert "served in bfloat16" in told["experts"].found


def test_gpt_oss_in_four_bits_is_checked_layer_by_layer(tmp_path: Path) -> None:
    folder = make_model("tiny", "gpt_oss", tmp_path, seed=1)
    tensors = load_torch(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, k, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.zeros(experts, rows, k // 32, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.zeros(experts, rows, k // 32, dtype=torch.uint8)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    save_torch(tensors, folder / "model.safetensors")
    found = examined(folder)
    assert all(finding.usable for finding in found.values()), found
    assert "served in mxfp4" in found["experts"].found
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_torch(tensors, folder / "model.safetensors")
    assert examined(folder)["weights of experts"].found == "no tensor model.layers.1.mlp.experts.down_proj_scales"
