"""Quantized checkpoints hold the weights that the libraries which define their formats read from them, bit by bit."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.formats import Scheme, Stored, scheme_of, stored_as
from experts.kernels import pack_expert
from experts.matrices import Matrix, holds
from experts.matrices import read as read_matrix
from experts.model import ConfigInvalid, Dtype, ExpertShape
from experts.quantized import Codes, Quantized
from experts.tensors import tensors_of
from tests.experts.quantizing import compressed, fp8

MODULE = "model.layers.0.mlp.experts.3.gate_proj"
SEED = time.time_ns() % 1_000_000
SIZES = ((128, 256), (200, 384), (64, 128))


def opened(root: Path, quantization: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    """A checkpoint of one module: its tensors by their names after the module's."""
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    named = {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, root / "model.safetensors")
    return Checkpoint.open(root)


def read(checkpoint: Checkpoint, rows: int, k: int) -> Matrix:
    return read_matrix(scheme_of(checkpoint.config), checkpoint, MODULE, rows, k)


def same(found: Matrix, wanted: torch.Tensor, what: object) -> None:
    """Equal in the reference's own type."""
    plain = found.dequantized() if isinstance(found, Quantized) else found
    assert plain.dtype == np.float32
    assert torch.equal(torch.from_numpy(plain).to(wanted.dtype), wanted), f"{what}, seed {SEED}"


def random_weights(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(rows, k, generator=generator).to(dtype) / 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_are_what_compressed_tensors_reads(
    bits: int, group: int, symmetric: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"num_bits": bits, "symmetric": symmetric, "strategy": "channel"}
    if group > 0:
        arguments |= {"strategy": "group", "group_size": group}
    for rows, k in (*SIZES, (72, 128)):
        weight = random_weights(rows, k, dtype)
        quantization, tensors, wanted = compressed(weight, "pack-quantized", **arguments)
        checkpoint = opened(tmp_path / f"{rows}", quantization, tensors)
        found = read(checkpoint, rows, k)
        assert isinstance(found, Quantized)
        assert found.kind is (Codes.UINT4 if bits == 4 else Codes.INT8)
        assert found.group == (group if group > 0 else k)
        same(found, wanted, (bits, group, symmetric, rows, k))
        # In float32 too: no product of a short code and a scale of 16 bits is rounded.
        wide = {**tensors, "weight_scale": tensors["weight_scale"].float()}
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
        exact = BaseCompressor.get_value_from_registry("pack-quantized").decompress(wide, scheme)["weight"]
        same(found, exact, (bits, group, symmetric, rows, k))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_whole_numbers_and_floats_are_what_compressed_tensors_reads(
    strategy: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "int-quantized": {"num_bits": 8, "type": "int", "strategy": strategy},
        "float-quantized": {"num_bits": 8, "type": "float", "strategy": strategy},
    }
    if strategy == "block":
        kinds["float-quantized"]["block_structure"] = [128, 128]
        del kinds["int-quantized"]
    for form, arguments in kinds.items():
        for rows, k in (*SIZES, (130, 200)):
            quantization, tensors, wanted = compressed(random_weights(rows, k, dtype), form, **arguments)
            checkpoint = opened(tmp_path / f"{form}{rows}", quantization, tensors)
            found = read(checkpoint, rows, k)
            assert isinstance(found, Quantized)
            assert found.kind is (Codes.INT8 if form == "int-quantized" else Codes.E4M3)
            same(found, wanted, (form, strategy, rows, k))


def test_asymmetric_int8_of_each_row(tmp_path: Path) -> None:
    arguments = {"num_bits": 8, "strategy": "channel", "symmetric": False}
    weight = random_weights(96, 160, torch.bfloat16) + 1 / 8
    quantization, tensors, wanted = compressed(weight, "int-quantized", **arguments)
    assert "weight_zero_point" in tensors
    same(read(opened(tmp_path, quantization, tensors), 96, 160), wanted, "asymmetric")


@pytest.mark.parametrize("block", [(128, 128), (64, 32), None], ids=str)
def test_fp8_is_what_transformers_reads(block: tuple[int, int] | None, tmp_path: Path) -> None:
    fields = FineGrainedFP8Config(weight_block_size=block, modules_to_not_convert=["lm_head"])
    quantizer = SimpleNamespace(quantization_config=fields)
    for rows, k in ((128, 256), (384, 128)):
        written = Fp8Quantize(quantizer).convert({"weight": random_weights(rows, k, torch.float32)})
        if block is None:
            written["weight_scale_inv"] = written["weight_scale_inv"].reshape(())
        for dtype in (torch.float32, torch.bfloat16):
            tensors = {**written, "weight_scale_inv": written["weight_scale_inv"].to(dtype)}
            wanted = Fp8Dequantize(quantizer).convert(tensors)["weight"]
            checkpoint = opened(tmp_path / f"{rows}{dtype}", fields.to_dict(), tensors)
            found = read(checkpoint, rows, k)
            assert isinstance(found, Quantized) and found.group == (block[1] if block else k)
            same(found, wanted, (block, rows, k, dtype))


def random_words(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED + sum(shape))
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def random_scales(*shape: int) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(SEED)) / 64 + 1 / 128).half()


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_awq_is_what_compressed_tensors_makes_of_it(group: int, tmp_path: Path) -> None:
    fields = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    for rows, k in ((64, 128), (200, 384)):
        groups = k // group if group > 0 else 1
        tensors = {
            "qweight": random_words(k, rows // 8),
            "qzeros": random_words(groups, rows // 8),
            "scales": random_scales(groups, rows),
        }
        converter = AutoAWQConverter.from_autoawq_config({**fields, "group_size": k // groups})
        named = converter.process({f"{MODULE}.{name}": tensor for name, tensor in tensors.items()})
        scheme = converter._build_quant_config().config_groups["config_group_0"]
        state = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in named.items()}
        compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        wanted = compressor.decompress(state, scheme)["weight"]
        found = read(opened(tmp_path / f"{rows}", fields, tensors), rows, k)
        assert isinstance(found, Quantized) and found.kind is Codes.UINT4 and found.group == k // groups
        same(found, wanted, (group, rows, k))


def gptq(rows: int, k: int, bits: int, group: int, permuted: bool) -> dict[str, torch.Tensor]:
    """Tensors of GPTQ, every code and zero point at random."""
    size = group if group > 0 else k
    groups = -(-k // size)
    table = torch.arange(k) // size
    if permuted:
        table = table[torch.randperm(k, generator=torch.Generator().manual_seed(SEED))]
    return {
        "qweight": random_words(k * bits // 32, rows),
        "qzeros": random_words(groups, rows * bits // 32),
        "scales": random_scales(groups, rows),
        "g_idx": table.to(torch.int32),
    }


def by_definition(tensors: Mapping[str, torch.Tensor], bits: int, less_one: bool) -> torch.Tensor:
    """(code - zero) * scale of every element, in float16, from the words as Python's integers."""
    words, zeros = (tensors[name].numpy().astype(np.uint32).astype(object) for name in ("qweight", "qzeros"))
    if less_one:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        zeros = (zeros + ones) % (1 << 32)
    per, mask = 32 // bits, (1 << bits) - 1
    rows, table = words.shape[1], tensors["g_idx"].tolist()
    columns = np.arange(rows)
    code = np.array([words[k // per] >> (bits * (k % per)) & mask for k in range(len(table))])
    zero = np.array([zeros[g][columns // per] >> (bits * (columns % per)) & mask for g in table])
    return ((torch.from_numpy((code - zero).astype(np.float16))) * tensors["scales"][tensors["g_idx"].long()]).T


def by_gptqmodel(tensors: Mapping[str, torch.Tensor], bits: int, group: int, less_one: bool) -> torch.Tensor:
    linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", reason="needs gptqmodel, not found")
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    k, rows = len(tensors["g_idx"]), tensors["qweight"].shape[1]
    module = linear.TorchLinear(
        bits=bits, group_size=group, sym=False, desc_act=True, in_features=k, out_features=rows,
        bias=False, register_buffers=True,
    )  # fmt: skip
    for name, tensor in tensors.items():
        setattr(module, name, tensor.clone())
    if less_one:
        convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
    module._init_wf_unsqueeze_buffers()
    return module.dequantize_weight().T


@pytest.mark.parametrize("judge", ["definition", "gptqmodel"])
@pytest.mark.parametrize("permuted", [False, True], ids=["in-order", "permuted"])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_is_what_its_definition_says(bits: int, group: int, permuted: bool, judge: str, tmp_path: Path) -> None:
    permuted = permuted and group > 0
    for form in ("gptq", "gptq_v2"):
        fields = {
            "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": permuted, "sym": False,
            "checkpoint_format": form,
        }  # fmt: skip
        for rows, k in ((64, 256), (200, 384)):
            tensors = gptq(rows, k, bits, group, permuted)
            less_one = form == "gptq"
            if judge == "definition":
                wanted = by_definition(tensors, bits, less_one)
            else:
                wanted = by_gptqmodel(tensors, bits, group, less_one)
            found = read(opened(tmp_path / f"{form}{rows}", fields, tensors), rows, k)
            assert isinstance(found, Quantized) != permuted
            same(found, wanted.contiguous(), (bits, group, permuted, form, rows, k))


def test_a_plain_module_of_a_quantized_checkpoint_is_read_as_it_is(tmp_path: Path) -> None:
    weight = random_weights(8, 16, torch.bfloat16)
    checkpoint = opened(tmp_path, {"quant_method": "fp8"}, {"weight": weight})
    assert not holds(scheme_of(checkpoint.config), checkpoint, MODULE)
    assert np.array_equal(read(checkpoint, 8, 16), weight.view(torch.uint16).numpy())


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
            },
        }
    },
}


def test_exceptions_name_modules_or_parts_of_names_or_patterns() -> None:
    scheme = scheme_of({"quantization_config": W4A16})
    group = Stored(codes=Codes.UINT4, group=32)
    assert scheme.stored(MODULE) == group
    assert scheme.stored("model.layers.0.mlp.gate_proj") is None
    assert scheme.stored("model.layers.3.self_attn.q_proj") is scheme.stored("lm_head") is None
    skips = scheme_of({"quantization_config": FP8 | {"modules_to_not_convert": ["gate", "mlp.shared_expert"]}})
    assert skips.stored("model.layers.0.mlp.gate") is None
    assert skips.stored("model.layers.0.mlp.shared_expert.up_proj") is None
    assert skips.stored(MODULE) == Stored(codes=Codes.E4M3, group=128)
    dynamic = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False} | {
        "dynamic": {r"-:.*mlp\.gate$": {}, r"+:.*down_proj": {"bits": 8, "group_size": 64}}
    }
    gptq_scheme = scheme_of({"quantization_config": dynamic})
    assert gptq_scheme.stored("model.layers.0.mlp.gate") is None
    kinds = {name: gptq_scheme.stored(f"model.layers.0.mlp.experts.0.{name}") for name in ("up_proj", "down_proj")}
    assert [(kind.codes, kind.group) for kind in kinds.values() if kind] == [
        (Codes.UINT4, 128),
        (Codes.INT8, 64),
    ]
    assert scheme_of({}) == Scheme()


QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32,
    "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, None),
        (FP8, Dtype.FP8),
        ({"quant_method": "fp8"}, Dtype.FP8),
        (FP8 | {"weight_block_size": [64, 64]}, None),
        (FP8 | {"modules_to_not_convert": ["gate", "lm_head"]}, Dtype.FP8),
        (FP8 | {"modules_to_not_convert": ["model.layers.1.mlp.experts"]}, None),
        (FP8 | {"modules_to_not_convert": ["model.layers.1.mlp.experts.3"]}, None),
        (FP8 | {"modules_to_not_convert": [r"re:.*experts\.3\.up_proj"]}, None),
        (W4A16, Dtype.INT4_G32),
        (GPTQ, Dtype.INT4),
        (GPTQ | {"group_size": -1}, Dtype.INT4),
        (GPTQ | {"group_size": 64}, Dtype.INT4_G32),
        (GPTQ | {"group_size": 16}, None),
        (GPTQ | {"desc_act": True}, None),
        (GPTQ | {"bits": 8}, None),
        (GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, Dtype.INT4),
        (FP8 | {"ignored_layers": ["Linear"]}, None),
        (FP8 | {"ignored_layers": ["model.layers.1.mlp.experts.3.", "re:x\n"]}, None),
        (FP8 | {"ignored_layers": ["model.layers.1.mlp.expert", "experts.4"]}, Dtype.FP8),
        ({"quant_method": "mxfp4"}, Dtype.MXFP4),
    ],
)
def test_experts_are_kept_as_stored_where_one_type_holds_them_all(
    fields: Mapping[str, Any], kept: Dtype | None
) -> None:
    assert stored_as(QWEN3 | {"quantization_config": fields}) is kept


def test_fp8_of_all_experts_in_one_tensor(tmp_path: Path) -> None:
    """Each with its blocks, as they are: halves of gate_up are gate and up."""
    experts, hidden, inter = 3, 256, 128
    config = QWEN3 | {"num_hidden_layers": 1, "hidden_size": hidden, "moe_intermediate_size": inter}
    config |= {"num_experts": experts, "quantization_config": FP8}
    both, down = (
        [fp8(random_weights(rows, k, torch.float32) * (expert + 1))[1:] for expert in range(experts)]
        for rows, k in ((2 * inter, hidden), (hidden, inter))
    )
    prefix = "model.layers.0.mlp.experts."
    tensors = {
        prefix + name + part: torch.stack([stored[f"weight{part}"] for stored, _ in matrices])
        for name, matrices in (("gate_up_proj", both), ("down_proj", down))
        for part in ("", "_scale_inv")
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    for expert in range(experts):
        found = tensors_of(checkpoint, ExpertShape.from_config(config), 0, expert)
        same(found.gate, both[expert][1][:inter], expert)
        same(found.up, both[expert][1][inter:], expert)
        same(found.down, down[expert][1], expert)
        assert isinstance(found.gate, Quantized) and found.gate.group == 128
        pack_expert(found.gate, found.up, found.down, Dtype.FP8)


def test_no_more_experts_are_looked_for_than_are_served() -> None:
    with pytest.raises(ConfigInvalid, match="2 layers have 2000000000 experts each; at most 1048576 in all"):
        stored_as(QWEN3 | {"num_experts": 2 * 10**9, "quantization_config": FP8})


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_fp8_of_all_experts_may_have_one_scale(shape: tuple[int, ...], tmp_path: Path) -> None:
    """In twos, which are exact; a scale for each of other experts is refused."""
    config = QWEN3 | {"num_hidden_layers": 1, "quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prefix = "model.layers.0.mlp.experts."
    tensors = {}
    for name, size in (("gate_up_proj", (4, 64, 64)), ("down_proj", (4, 64, 32))):
        tensors[prefix + name] = torch.ones(size, dtype=torch.float8_e4m3fn)
        tensors[f"{prefix}{name}_scale"] = torch.full(shape, 2.0)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    same(tensors_of(checkpoint, ExpertShape.from_config(config), 0, 3).down, torch.full((64, 32), 2.0), shape)
    tensors[f"{prefix}down_proj_scale"] = torch.ones(2, 1, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"down_proj_scale is \(2, 1, 1\)"):
        tensors_of(Checkpoint.open(tmp_path), ExpertShape.from_config(config), 0, 3)


def changed(fields: Mapping[str, Any], **weights: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(fields))
    copy["config_groups"]["group_0"]["weights"] |= weights
    return copy


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"quant_method": "quark"}, "quark"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "aqlm"}, "aqlm"),
        ({"bits": 4}, "None"),
        (FP8 | {"modules_to_not_convert": ["re:("]}, "fp8, malformed: missing )"),
        (FP8 | {"modules_to_not_convert": [r"re:(.*.*.*)*\d!"]}, r"pattern re:(.*.*.*)*\d! may take forever"),
        (FP8 | {"modules_to_not_convert": ["re:(?x)(.*) *!"]}, "may take forever"),
        (FP8 | {"modules_to_not_convert": ["re:" + ".*" * 30 + "!"]}, "may take forever"),
        (FP8 | {"modules_to_not_convert": ["re:" + "(" * 5000]}, "may take forever"),
        (FP8 | {"modules_to_not_convert": ["re:a{99999999999999999999}"]}, "fp8, malformed"),
        (FP8 | {"weight_block_size": [128, 10**30]}, "fp8 in blocks of"),
        (GPTQ | {"group_size": 10**30}, "gptq in groups of 1000"),
        ({"quant_method": "awq", "bits": 4, "version": 2}, "awq, malformed"),
        ({"quant_method": ["fp8"]}, "['fp8'], malformed"),
        ("4bit", "(4bit, malformed"),
        (FP8 | {"fmt": "e5m2"}, "fp8 as e5m2"),
        (FP8 | {"weight_block_size": [128]}, "fp8 in blocks of [128]"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "format marlin"),
        ({"quant_method": "gptq", "bits": 4}, "gptq in groups of None"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version gemv"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "awq of 8 bits"),
        (W4A16 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (W4A16 | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (changed(W4A16, num_bits=3), "3 bits of int"),
        (
            changed(W4A16 | {"format": "nvfp4-pack-quantized"}, type="float", strategy="tensor_group"),
            "compressed-tensors as nvfp4-pack-quantized, 4 bits of float for each tensor_group",
        ),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(quantization: object, said: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(said) + ".*Served are fp8, mxfp4, awq"):
        scheme_of({"quantization_config": quantization})


@pytest.mark.parametrize("order", ["group", "dynamic", True])
def test_columns_permuted_into_groups_are_not_kept(order: object) -> None:
    assert stored_as(QWEN3 | {"quantization_config": changed(W4A16, actorder=order)}) is None
    assert stored_as(QWEN3 | {"quantization_config": changed(W4A16, actorder="static")}) is Dtype.INT4_G32


@pytest.mark.parametrize("block", [[10**9, 128], [1, 10**9], [10**9, 10**9]], ids=str)
def test_a_block_larger_than_the_matrix_takes_no_more_room(block: list[int], tmp_path: Path) -> None:
    weight = torch.ones(8, 256, dtype=torch.float8_e4m3fn)
    scales = torch.full((-(-8 // block[0]), -(-256 // block[1])), 3.0)
    checkpoint = opened(tmp_path, FP8 | {"weight_block_size": block}, {"weight": weight, "weight_scale": scales})
    tracemalloc.start()
    same(read(checkpoint, 8, 256), torch.full((8, 256), 3.0), block)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


def test_a_tensor_that_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    quantization, tensors, _ = compressed(
        random_weights(64, 128, torch.bfloat16), "pack-quantized",
        num_bits=4, symmetric=False, strategy="group", group_size=32,
    )  # fmt: skip
    cut = {name: tensor for name, tensor in tensors.items() if name != "weight_zero_point"}
    with pytest.raises(CheckpointInvalid, match=r"no tensor .*gate_proj\.weight_zero_point"):
        read(opened(tmp_path / "zeros", quantization, cut), 64, 128)
    with pytest.raises(CheckpointInvalid, match=r"weight_packed is \(64, 16\); config.json says \(64, 32\)"):
        read(opened(tmp_path / "wide", quantization, tensors), 64, 256)
    uneven = {
        **tensors,
        "weight_scale": tensors["weight_scale"][:, :3],
        "weight_zero_point": tensors["weight_zero_point"][:, :3],
    }
    with pytest.raises(CheckpointInvalid, match="3 groups, into which 128 columns cannot be cut"):
        read(opened(tmp_path / "uneven", quantization, uneven), 64, 128)
    with pytest.raises(CheckpointInvalid, match=r"no tensor .*gate_proj\.weight among"):
        read(opened(tmp_path / "none", quantization, {"bias": tensors["weight_scale"]}), 64, 128)
    codes = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    with pytest.raises(CheckpointInvalid, match=r"no tensor .*gate_proj\.weight_scale"):
        read(opened(tmp_path / "scale", FP8, {"weight": codes}), 64, 128)
    none = gptq(64, 128, 4, 128, False) | {"qzeros": random_words(0, 8), "scales": random_scales(0, 64)}
    with pytest.raises(CheckpointInvalid, match=r"scales is \(0, 64\); rows and groups are needed"):
        read(opened(tmp_path / "groups", GPTQ, none), 64, 128)
    odd = {"weight": codes, "weight_scale_inv": torch.ones(2, 2)}
    with pytest.raises(CheckpointInvalid, match=r"weight_scale_inv is \(2, 2\); 64 x 128 in blocks of \(128, 128\)"):
        read(opened(tmp_path / "odd", FP8, odd), 64, 128)
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    wrong = gptq(64, 128, 4, 32, True)
    without = {name: tensor for name, tensor in wrong.items() if name != "g_idx"}
    with pytest.raises(CheckpointInvalid, match=r"no tensor .*gate_proj\.g_idx"):
        read(opened(tmp_path / "order", fields, without), 64, 128)
    wrong["g_idx"][3] = 4
    with pytest.raises(CheckpointInvalid, match="g_idx names groups 0 to 4 of 4"):
        read(opened(tmp_path / "table", fields, wrong), 64, 128)
