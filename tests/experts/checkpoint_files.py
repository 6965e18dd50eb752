"""Writes small checkpoints, whole or broken, for tests."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from experts.checkpoint import Checkpoint
from experts.model import ExpertShape
from tests.experts.packing import to_bfloat16

_NAMES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64", "uint8": "U8"}

QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "hidden_size": 70,
    "moe_intermediate_size": 45,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}


def safetensors_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The file that holds `tensors`; uint16 is written as BF16."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        begin, data = len(data), data + tensor.tobytes()
        dtype = _NAMES[tensor.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, len(data)]}
    return file_bytes(json.dumps(header).encode(), data)


def file_bytes(header: bytes, data: bytes) -> bytes:
    """A safetensors file of any header and data."""
    return len(header).to_bytes(8, "little") + header + data


def expert_tensors(shape: ExpertShape, seed: int = 0) -> dict[str, np.ndarray]:
    """Random bfloat16 weights of every expert, by tensor name."""
    generator = np.random.default_rng(seed)
    hidden, inter = shape.hidden, shape.intermediate
    tensors = {}
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            sizes = ((inter, hidden), (inter, hidden), (hidden, inter))
            for name, size in zip(shape.names(layer, expert), sizes, strict=True):
                tensors[name] = to_bfloat16(generator.standard_normal(size, np.float32))
    return tensors


def write_model(root: Path, config: Mapping[str, object] | None = None, seed: int = 0) -> Path:
    """A model directory with config.json and model.safetensors; the default is a small Qwen3 MoE."""
    config = config or QWEN3
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    tensors = expert_tensors(ExpertShape.from_config(config), seed)
    (root / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return root


def fine_tune(model: Path, root: Path, pairs: Iterable[tuple[int, int]]) -> Path:
    """A copy of a model in which these experts (layer, expert) are others."""
    shutil.copytree(model, root)
    checkpoint = Checkpoint.open(model)
    data = np.fromfile(root / "model.safetensors", np.uint8)
    for pair in pairs:
        name = ExpertShape.from_config(checkpoint.config).names(*pair)[2]
        file = checkpoint._file(name)
        entry = file.entries[name]
        data[file._start + entry.begin : file._start + entry.end : 2] ^= 1
    data.tofile(root / "model.safetensors")
    return root


def resident(file: Path) -> np.ndarray:
    """For each page of a file whether the kernel holds it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    size = file.stat().st_size
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with file.open("r+b") as data, mmap.mmap(data.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        failed = libc.mincore(start, size, pages.ctypes.data)
    assert not failed, os.strerror(ctypes.get_errno())
    return pages & 1
