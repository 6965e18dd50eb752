"""Writes a checkpoint as llama.cpp's converter would, by gguf's own writer, and beside it what its bytes stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from experts.gguf import ARCHITECTURES

# Of a block: where d and dmin stand, and the scale of a weight where d is 1.
_LAYOUT = {Kind.Q4_K: (0, 2, 300), Kind.Q5_K: (0, 2, 600), Kind.Q6_K: (208, None, 1350)}


def encoded(weights: np.ndarray, kind: Kind, generator: np.random.Generator) -> np.ndarray:
    """Bytes of that type: these weights, or random ones of their size where gguf has only the way back."""
    if kind not in _LAYOUT:
        return gguf.quants.quantize(weights, kind)
    *rows, k = weights.shape
    numbers, nbytes = gguf.GGML_QUANT_SIZES[kind]
    data = generator.integers(0, 256, (*rows, k // numbers, nbytes), np.uint8)
    d_at, least_at, size = _LAYOUT[kind]
    d = generator.uniform(0.5, 1, data.shape[:-1]) / size / k**0.5
    for at, values in ((d_at, d), (least_at, d * (7.5 if kind is Kind.Q4_K else 15.5))):
        if at is not None:
            data[..., at : at + 2] = values.astype("<f2")[..., None].view(np.uint8)
    return data.reshape(*rows, -1)


def write_gguf(
    source: Path,
    out: Path,
    kind: Callable[[str], Kind],
    *,
    seed: int,
    parts: int = 1,
    change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
) -> Path:
    """A model folder with .gguf files, of a checkpoint in float32.

    Args:
        kind: Type of each tensor, by llama.cpp's name; those of one axis are float32.
        change: May change the weights before they are written, by their names in the checkpoint.

    Returns:
        A folder with the same weights, dequantized by gguf, as safetensors in float32.
    """
    config = json.loads((source / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    generator = np.random.default_rng(seed)
    theirs: dict[str, tuple[np.ndarray, Kind]] = {}
    experts: dict[str, list[str]] = {}
    plain: dict[str, np.ndarray] = {}
    for name, weights in tensors.items():
        if expert := re.search(r"experts\.(\d+)\.", name):
            experts.setdefault(name.replace(expert[0], "experts."), []).append(name)
            continue
        name_there = name.replace("e_score_correction_bias", "e_score_correction.bias")
        found = names.get_name(name_there, try_suffixes=(".weight", ".bias"))
        assert found, name
        chosen = kind(found) if weights.ndim > 1 and weights.shape[0] > 1 else Kind.F32
        data = encoded(weights, chosen, generator)
        plain[name] = gguf.quants.dequantize(data, chosen)
        if found.endswith("ffn_gate_inp_shexp.weight"):
            data = data[0]
        if arch == "llama" and ("attn_q" in found or "attn_k" in found):
            heads = config["num_attention_heads" if "attn_q" in found else "num_key_value_heads"]
            half = data.shape[0] // heads // 2
            data = data.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(data.shape)
        theirs[found] = data, chosen
    for name, each in experts.items():
        found = names.get_name(name, try_suffixes=(".weight",))
        assert found, name
        each.sort(key=lambda name: int(re.search(r"experts\.(\d+)\.", name)[1]))
        chosen = kind(found)
        data = encoded(np.stack([tensors[one] for one in each]), chosen, generator)
        plain |= dict(zip(each, gguf.quants.dequantize(data, chosen), strict=True))
        theirs[found] = data, chosen

    twin = out.with_name(out.name + "-plain")
    for folder in (out, twin):
        folder.mkdir(parents=True)
        for file in source.glob("*.json"):
            shutil.copy(file, folder)
    save_file(
        {name: np.ascontiguousarray(weights, np.float32) for name, weights in plain.items()},
        twin / "model.safetensors",
    )
    listed = list(theirs.items())
    for part in range(parts):
        name = f"model-{part + 1:05}-of-{parts:05}.gguf" if parts > 1 else "model.gguf"
        writer = gguf.GGUFWriter(out / name, arch)
        if part == 0:
            metadata(writer, config)
        for name, (data, chosen) in listed[part::parts]:
            writer.add_tensor(name, data, raw_dtype=None if chosen in (Kind.F32, Kind.F16) else chosen)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return twin


def metadata(writer: gguf.GGUFWriter, config: dict) -> None:
    """The fields of a model that transformers reads, and a vocabulary."""
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_token_list([f"token {number}" for number in range(config["vocab_size"])])
