"""Writes quantized checkpoints by the libraries that define their formats, with the weights that these read in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

Tensors = dict[str, torch.Tensor]
Written = tuple[dict[str, Any], Tensors, torch.Tensor]
"""quantization_config, a module's tensors by their names after its own, and the weight that they stand for."""

BLOCK = (128, 128)
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # columns of a word, from its lowest bits up


def compressed(weight: torch.Tensor, form: str, **arguments: Any) -> Written:
    """quantization_config, tensors, and the weight that compressed-tensors makes of them.

    Args:
        weight: [rows, k], in the type that the scales are to have.
        form: "pack-quantized", "int-quantized" or "float-quantized".
        arguments: Of QuantizationArgs.
    """
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    rows = len(weight)
    match arguments["strategy"]:
        case "group":
            parts, axes = weight.reshape(rows, -1, arguments["group_size"]), (2,)
        case "channel":
            parts, axes = weight[:, None], (2,)
        case "tensor":
            parts, axes = weight.reshape(1, -1), (1,)
        case _:
            high, wide = arguments["block_structure"]
            padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % wide, 0, -rows % high))
            parts, axes = padded.reshape(len(padded) // high, high, -1, wide), (1, 3)
    scale, zero = calculate_qparams(parts.amin(axes), parts.amax(axes), args)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=form)
    return config.to_dict(), stored, compressor.decompress(stored, scheme)["weight"]


def fp8(weight: torch.Tensor) -> Written:
    """The same in FP8 of blocks, by transformers; where blocks overhang, which it refuses, by compressed-tensors."""
    fields = FineGrainedFP8Config(weight_block_size=BLOCK, modules_to_not_convert=["lm_head", "gate"])
    rows, k = weight.shape
    if rows % BLOCK[0] or k % BLOCK[1]:
        _, stored, wanted = compressed(
            weight, "float-quantized", num_bits=8, type="float", strategy="block", block_structure=list(BLOCK)
        )
        return (
            fields.to_dict(),
            {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]},
            wanted,
        )
    quantizer = SimpleNamespace(quantization_config=fields)
    stored = Fp8Quantize(quantizer).convert({"weight": weight})
    return fields.to_dict(), stored, Fp8Dequantize(quantizer).convert(stored)["weight"]


def four_bits(weight: torch.Tensor, method: str, group: int, permuted: bool) -> Written:
    """The same as awq or gptq, the codes by compressed-tensors; permuted: columns in groups by a table (gptq)."""
    rows, k = weight.shape
    order = torch.randperm(k, generator=torch.Generator().manual_seed(rows)) if permuted else torch.arange(k)
    table = torch.empty(k, dtype=torch.int32)
    table[order] = (torch.arange(k) // group).to(torch.int32)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=group, symmetric=False)
    parts = weight[:, order].reshape(rows, -1, group)
    scale, zero = calculate_qparams(parts.amin(2), parts.amax(2), args)
    scale, zeros = scale.half(), zero.int() + 8
    wide = scale.float()[:, table.long()]
    codes = (torch.round(weight / wide) + zeros[:, table.long()]).clamp(0, 15).int()
    wanted = (codes - zeros[:, table.long()]) * wide
    fields: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": group}
    if method == "awq":
        fields |= {"zero_point": True, "version": "gemm", "modules_to_not_convert": ["gate"]}
        stored = {"qweight": _packed(_interleaved(codes.T)), "qzeros": _packed(_interleaved(zeros.T))}
    else:
        fields |= {"desc_act": permuted, "sym": False, "checkpoint_format": "gptq"}
        less = torch.full((1, rows // 8), 0x11111111, dtype=torch.int32)
        stored = {"qweight": _packed(codes).T, "qzeros": _packed(zeros.T) - less, "g_idx": table}
    return fields, stored | {"scales": scale.T}, wanted


def mxfp4(weight: torch.Tensor) -> Written:
    """All experts of a layer of GPT-OSS, [experts, in, out], as it is published; read back by transformers."""
    parts = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.ceil(torch.log2(parts.abs().amax(-1) / FP4_VALUES[7]))
    scaled = parts / torch.exp2(exponents)[..., None]
    codes = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    stored = {
        "_blocks": codes[..., ::2] | codes[..., 1::2] << 4,
        "_scales": (exponents + 127).to(torch.uint8),
    }
    fields = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"],
    }
    return fields, stored, convert_moe_packed_tensors(stored["_blocks"], stored["_scales"]).float()


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """int32 words of eight codes of the last axis, the first lowest."""
    parts = codes.reshape(len(codes), -1, 8).to(torch.int64) << (4 * torch.arange(8))
    return parts.sum(-1).to(torch.int32)


def _interleaved(codes: torch.Tensor) -> torch.Tensor:
    return codes.reshape(len(codes), -1, 8)[..., _AWQ_ORDER].reshape(codes.shape)


def quantized(weight: torch.Tensor, method: str) -> Written:
    """quantization_config, tensors and the weight they stand for in float32, by one of METHODS."""
    return METHODS[method](weight.float())


Quantizer = Callable[[torch.Tensor], Written]


def _exact(form: str, **arguments: Any) -> Quantizer:
    """By compressed-tensors with scales in bfloat16, dequantized with these in float32."""

    def quantize(weight: torch.Tensor) -> Written:
        config, stored, _ = compressed(weight.bfloat16(), form, **arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments), format=form)
        wide = {**stored, "weight_scale": stored["weight_scale"].float()}
        return config, stored, BaseCompressor.get_value_from_registry(form).decompress(wide, scheme)["weight"]

    return quantize


METHODS: Mapping[str, Quantizer] = {
    "fp8": fp8,
    "fp8-rows": _exact("float-quantized", num_bits=8, type="float", strategy="channel"),
    "w4a16": _exact("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
    "w8a8": _exact("int-quantized", num_bits=8, strategy="channel"),
    "awq": lambda weight: four_bits(weight, "awq", 128, False),
    "gptq": lambda weight: four_bits(weight, "gptq", 64, False),
    "gptq-permuted": lambda weight: four_bits(weight, "gptq", 32, True),
}


def is_quantized(name: str) -> bool:
    """Whether published checkpoints quantize that tensor: linear layers, but for gate and head."""
    ends = (
        "proj.weight",
        "_a_proj_with_mqa.weight",
        "_b_proj.weight",
        ".w1.weight",
        ".w2.weight",
        ".w3.weight",
    )
    return name.endswith(ends)


def quantize_model(
    folder: Path, out: Path, plain: Path, method: str, chosen: Callable[[str], bool] = is_quantized
) -> Mapping[str, torch.Tensor]:
    """Write `folder` quantized to `out`, and what that stands for in float32 to `plain`; the latter's tensors.

    Args:
        chosen: Says of a tensor's name whether it is quantized. MXFP4 has its own answer: the experts.
    """
    for target in (out, plain):
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((folder / "config.json").read_text())
    stored: Tensors = {}
    wanted: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        fused = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        if not (fused if method == "mxfp4" else chosen(name)):
            stored[name], wanted[name] = tensor, tensor.float()
            continue
        fields, parts, wanted[name] = mxfp4(tensor) if method == "mxfp4" else quantized(tensor, method)
        config["quantization_config"] = fields
        stored |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    save_file(
        {name: weight.contiguous() for name, weight in wanted.items()},
        plain / "model.safetensors",
        {"format": "pt"},
    )
    (out / "config.json").write_text(json.dumps(config))
    return wanted
