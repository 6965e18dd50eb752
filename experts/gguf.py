"""Reads .gguf files, in which llama.cpp keeps models: tensors under the names of the Hugging Face checkpoint that they
were made from, each expert under its own.

A file is "GGUF", version u32, how many tensors u64, how many fields u64; fields: name, type u32, value; tensors: name,
axes u32, a size u64 for each (the fastest first), type u32, offset u64; and their bytes, from the next multiple
of the alignment on. All is little-endian; a text is its length u64 and its bytes. The library gguf knows types and
names. Its reader is not used: it takes 10 s for a vocabulary of 150,000, where 0.1 s do, and believes every number.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experts.model import ExpertShape
from experts.quantized import Codes, Quantized
from experts.tensor_file import HEADER_LIMIT_BYTES, CheckpointInvalid, TensorEntry, TensorFile, opened

try:
    import gguf
except ImportError as missing:
    raise CheckpointInvalid("a .gguf file is read with the library gguf: pip install 'eaas[gguf]'.") from missing

# What llama.cpp calls them. Of others it also changes more than names.
ARCHITECTURES = {
    "Glm4MoeForCausalLM": "glm4moe",
    "MixtralForCausalLM": "llama",
    "OlmoeForCausalLM": "olmoe",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
}
_PLAIN = ("F32", "F16", "BF16")
_CODED = ("Q4_0", "Q4_K")
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_SPLIT = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True, kw_only=True)
class GgufEntry(TensorEntry):
    """One tensor. heads: llama.cpp lays the rows of so many out for a rope over neighbors; 0: it does not."""

    heads: int = 0


def open_files(paths: Sequence[Path], config: Mapping[str, Any]) -> tuple[dict[str, TensorFile], dict[str, Any]]:
    """The file of each tensor, by its name in the Hugging Face checkpoint; and its config with what the files tell.

    Args:
        config: That checkpoint's config.json, which says nothing of how they are quantized.

    Raises:
        CheckpointInvalid: a part is missing, truncated or malformed, two hold the same, or they are of another model.
        ConfigInvalid: as ExpertShape.from_config.
    """
    for path in paths:
        if split := _SPLIT.fullmatch(path.name):
            for part in range(1, int(split[2]) + 1):
                if not (beside := path.with_name(f"{split[1]}-{part:05}-of-{split[2]}.gguf")).exists():
                    raise CheckpointInvalid(f"{beside}: is missing, and {path.name} is here. Download it.")
    files: dict[str, GgufFile] = {}
    for path in paths:
        file = GgufFile(path, config)
        for name in file.entries:
            if name in files:
                raise CheckpointInvalid(
                    f"{name} is in {files[name].path.name} and in {path.name}. Keep the files of one model only."
                )
            files[name] = file
    coded = {name: kind for name, file in files.items() if (kind := file.entries[name].coded)}
    if not coded:
        return {**files}, {**config}
    shape = ExpertShape.from_config(config)
    experts = {coded.get(name) for layer in range(shape.layers) for name in shape.names(layer, 0)}
    bits = 4 if experts <= {*_CODED} else None
    return {**files}, {**config, "quantization_config": {"quant_method": "gguf", "experts_bits": bits}}


class GgufFile(TensorFile):
    """One mapped file, its header checked.

    Raises:
        CheckpointInvalid: it is not well formed, or holds another model than config.json says.
        ConfigInvalid: as ExpertShape.from_config.
    """

    entries: Mapping[str, GgufEntry]

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        with opened(path) as (file, size):
            if size < 24:
                raise CheckpointInvalid(f"{path}: {size} bytes; a GGUF file has at least 24.")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        head = _Head(path, mapped)
        magic, version = head.take(4), head.number("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise CheckpointInvalid(f"{path}: begins with {magic!r}, version {version}, not GGUF 2 or 3.")
        tensors, fields = head.number("Q"), dict(head.field() for _ in range(head.number("Q")))
        told = [head.tensor() for _ in range(tensors)]
        align = fields.get("general.alignment", 32)
        if type(align) is not int or align < 1:
            raise CheckpointInvalid(f"{path}: general.alignment is {align!r}; a number from 1 is needed.")
        start = -(-head.at // align) * align
        for name, entry in told:
            if entry.end > size - start:
                place = f"{entry.begin} to {entry.end} of {max(0, size - start)}"
                raise CheckpointInvalid(f"{path}: {name} lies at bytes {place}. Download it again.")
        super().__init__(path, _named(path, dict(told), fields, config), mapped, start)

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, read-only, in its own shape; float32 where the file keeps codes."""
        entry = self.entries[name]
        if entry.coded:
            kind = gguf.GGMLQuantizationType[entry.coded]
            wide = gguf.dequantize(self._rows(entry), kind).reshape(entry.shape)
        else:
            wide = super().tensor(name)
        if entry.heads:
            pairs = wide.reshape(entry.heads, -1, 2, *entry.shape[1:])
            wide = pairs.swapaxes(1, 2).reshape(entry.shape)
        wide.flags.writeable = False
        return wide

    def quantized(self, name: str) -> Quantized | None:
        """One matrix of Q4_K or Q4_0 as its codes; else None. Dequantized they are the bits of `tensor`."""
        entry = self.entries[name]
        if entry.coded not in _CODED or entry.heads or len(entry.shape) != 2:
            return None
        rows, k = entry.shape
        if entry.coded == "Q4_0":
            # Blocks of 32: d, then codes with 8 for zero, two in a byte: those of the first half are low.
            blocks = self._rows(entry).reshape(rows, -1, 18)
            scales = _halves(blocks[..., :2])[..., 0]
            offsets, packed = scales * -8, blocks[..., None, 2:]
        else:
            # Blocks of 256: d, dmin, 8 pairs of scale and minimum of 6 bits, then the codes of 8 groups of 32.
            blocks = self._rows(entry).reshape(-1, 144)
            units = _halves(blocks[:, :4]).T[:, :, None] * gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
            scales, offsets = units[0].reshape(rows, -1), -units[1].reshape(rows, -1)
            packed = blocks[:, 16:].reshape(rows, -1, 1, 32)
        low_first = np.array([0, 4], np.uint8)[:, None]
        codes = (packed >> low_first & np.uint8(15)).reshape(rows, k)
        return Quantized(kind=Codes.UINT4, codes=codes, scales=scales, group=32, offsets=offsets)

    def _rows(self, entry: GgufEntry) -> np.ndarray:
        return self._bytes(entry).reshape(math.prod(entry.shape[:-1]), -1)


def _halves(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


class _Head:
    """Takes one value after another from the head of a file, and none beyond its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.at = 0
        self._path, self._data, self._limit = path, data, min(len(data), HEADER_LIMIT_BYTES)

    def take(self, nbytes: int) -> bytes:
        begin, self.at = self.at, self.at + nbytes
        if self.at > self._limit:
            raise CheckpointInvalid(f"{self._path}: header ends after byte {self._limit}. Download it again.")
        return self._data[begin : self.at]

    def number(self, form: str) -> Any:
        form = "<" + form
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode(errors="replace")

    def field(self) -> tuple[str, Any]:
        """Name and value; of a list none, for a vocabulary has 150,000 texts that nobody here reads."""
        name, kind = self.text(), self.number("I")
        if kind == _TEXT:
            return name, self.text()
        if kind in _NUMBERS:
            return name, self.number(_NUMBERS[kind])
        inner, count = (self.number("I"), self.number("Q")) if kind == _LIST else (kind, 0)
        if inner == _TEXT:
            for _ in range(count):
                self.take(int.from_bytes(self.take(8), "little"))
        elif inner in _NUMBERS:
            self.take(count * struct.calcsize("<" + _NUMBERS[inner]))
        else:
            raise CheckpointInvalid(f"{self._path}: field {name} has type {inner}; GGUF has none such.")
        return name, None

    def tensor(self) -> tuple[str, GgufEntry]:
        name, axes = self.text(), self.number("I")
        if not 1 <= axes <= 4:
            raise CheckpointInvalid(f"{self._path}: {name} has {axes} axes; 1 to 4 are possible.")
        shape = tuple(self.number("Q") for _ in range(axes))[::-1]
        kind, begin = self.number("I"), self.number("Q")
        if kind not in {*gguf.GGMLQuantizationType}:
            raise CheckpointInvalid(f"{self._path}: {name} has type {kind}; gguf does not know it.")
        known = gguf.GGMLQuantizationType(kind).name
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        if 0 in shape:
            raise CheckpointInvalid(f"{self._path}: {name} is {shape}; an axis has one number at least.")
        if shape[-1] % block:
            raise CheckpointInvalid(f"{self._path}: {name} is {known}: rows of {shape[-1]}, blocks of {block}.")
        if known not in _PLAIN and not hasattr(gguf.quants, known):
            raise CheckpointInvalid(f"{self._path}: {name} is {known}, which gguf does not decode.")
        end = begin + math.prod(shape) // block * nbytes
        dtype, coded = (known, "") if known in _PLAIN else ("F32", known)
        return name, GgufEntry(dtype=dtype, coded=coded, shape=shape, begin=begin, end=end)


def _named(
    path: Path, told: Mapping[str, GgufEntry], fields: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, GgufEntry]:
    """Entries by the names that the Hugging Face checkpoint gives them, and by some that other families give them."""
    shape = ExpertShape.from_config(config)
    needed = ARCHITECTURES.get(shape.architecture)
    if needed is None:
        raise CheckpointInvalid(
            f"{path}: {shape.architecture} is not read from GGUF, only {', '.join(ARCHITECTURES)}. Use safetensors."
        )
    # Parts after the first need not say it.
    if (found := fields.get("general.architecture", needed)) != needed:
        raise CheckpointInvalid(f"{path}: is of {found!r}; config.json needs {needed!r} ({shape.architecture}).")
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == needed)
    q_heads = config.get("num_attention_heads", 0)
    heads = {"attn_q": q_heads, "attn_k": config.get("num_key_value_heads") or q_heads}
    named: dict[str, GgufEntry] = {}
    for theirs, (_, ours) in gguf.get_tensor_name_map(number, config["num_hidden_layers"]).mapping.items():
        for end in (".weight", ".bias"):
            if theirs.startswith(("model.", "lm_head")) and (entry := told.get(ours + end)):
                if needed == "llama" and (count := heads.get(ours.rpartition(".")[2])):
                    if type(count) is not int or count < 1 or entry.shape[0] % (2 * count):
                        raise CheckpointInvalid(f"{path}: {ours} has {entry.shape[0]} rows for {count!r} heads.")
                    entry = replace(entry, heads=count)
                if ours.endswith("_inp_shexp"):
                    entry = replace(entry, shape=(1, *entry.shape))
                named[(theirs + end).replace("e_score_correction.bias", "e_score_correction_bias")] = entry
    for layer, block in enumerate(shape.layer_ids):
        for place, part in enumerate(("gate", "up", "down")):
            if whole := told.get(fused := f"blk.{block}.ffn_{part}_exps.weight"):
                if len(whole.shape) != 3 or whole.shape[0] != shape.experts:
                    raise CheckpointInvalid(
                        f"{path}: {fused} is {whole.shape}; config.json says {shape.experts} experts."
                    )
                step = (whole.end - whole.begin) // shape.experts
                for expert in range(shape.experts):
                    begin = whole.begin + expert * step
                    named[shape.names(layer, expert)[place]] = replace(
                        whole, shape=whole.shape[1:], begin=begin, end=begin + step
                    )
    return named
