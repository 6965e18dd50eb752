"""Reads a model directory: config.json and safetensors or GGUF, mapped and checked before use.

A safetensors file is an 8-byte little-endian header length, a JSON header, then the tensors' bytes:
    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}
Offsets count from the end of the header. Files may come from anywhere, so every number is checked first.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from experts.quantized import Quantized
from experts.tensor_file import HEADER_LIMIT_BYTES, NUMPY, CheckpointInvalid, TensorEntry, TensorFile, opened

JSON_LIMIT_BYTES = 64 << 20


class SafetensorsFile(TensorFile):
    """One mapped safetensors file, its header already checked.

    Raises:
        CheckpointInvalid: the file is missing or not a well-formed safetensors file.
    """

    def __init__(self, path: Path) -> None:
        with opened(path) as (file, size):
            if size < 8:
                raise CheckpointInvalid(f"{path}: {size} bytes; a safetensors file has at least 8.")
            length = int.from_bytes(file.read(8), "little")
            # Before the header is read: its length is the file's own claim.
            if length > HEADER_LIMIT_BYTES:
                raise CheckpointInvalid(
                    f"{path}: claims a header of {length} bytes; the limit is {HEADER_LIMIT_BYTES}. Download it again:"
                    " perhaps this is a pointer of git LFS, which stands for a file."
                )
            if 8 + length > size:
                raise CheckpointInvalid(
                    f"{path}: the header ends at {8 + length}, the file at {size}. Download it again."
                )
            self.header = header = file.read(length)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start = 8 + length
        super().__init__(path, _entries(path, header, size - start), mapped, start)


def _entries(path: Path, header: bytes, data_bytes: int) -> dict[str, TensorEntry]:
    parsed = _json_object(path, "header", header)
    parsed.pop("__metadata__", None)
    entries = {name: _entry(path, name, fields, data_bytes) for name, fields in parsed.items()}
    place = 0
    previous = "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != place:
            fault = "overlaps" if entry.begin < place else f"leaves {entry.begin - place} unused bytes after"
            raise CheckpointInvalid(f"{path}: {name} begins at {entry.begin} and {fault} {previous}.")
        place, previous = entry.end, name
    if place != data_bytes:
        raise CheckpointInvalid(f"{path}: its tensors fill {place} bytes, the file holds {data_bytes}.")
    return entries


def _entry(path: Path, name: str, fields: Any, data_bytes: int) -> TensorEntry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise CheckpointInvalid(f"{path}: {name} lacks dtype, shape or data_offsets.")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NUMPY:
        raise CheckpointInvalid(f"{path}: {name} has dtype {dtype!r}; known are {', '.join(NUMPY)}.")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise CheckpointInvalid(f"{path}: {name} has shape {shape!r} and data_offsets {offsets!r}.")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise CheckpointInvalid(
            f"{path}: {name} lies at bytes {begin} to {end}, the file holds {data_bytes}. Download it again."
        )
    needed = math.prod(shape) * NUMPY[dtype].itemsize
    if needed != end - begin:
        raise CheckpointInvalid(f"{path}: {name}, {dtype} {shape}, needs {needed} bytes and has {end - begin}.")
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _sizes(value: Any) -> bool:
    # At most 8 axes, each below 2**48: the product stays small enough to be cheap to compare.
    return (
        isinstance(value, list) and len(value) <= 8 and all(type(size) is int and 0 <= size < 1 << 48 for size in value)
    )


def _json_object(path: Path, what: str, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{path}: its {what} is not JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise CheckpointInvalid(f"{path}: its {what} is JSON, but not an object.")
    return parsed


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    with opened(path) as (file, size):
        if size > JSON_LIMIT_BYTES:
            raise CheckpointInvalid(f"{path}: {size} bytes; the limit is {JSON_LIMIT_BYTES}.")
        text = file.read(size)
    return text, _json_object(path, "text", text)


def read_config(directory: str | Path) -> dict[str, Any]:
    """The config.json of a model directory, which need not hold weights.

    Raises:
        CheckpointInvalid: it is missing or malformed.
    """
    return _read_json(Path(directory) / "config.json")[1]


class Checkpoint:
    """A model directory: `config` and every tensor by name. Tensors are views of mapped files.

    The files must not shrink while they are mapped: the system answers a read past their end with SIGBUS.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise CheckpointInvalid(
                f"{directory}: no such directory. A model directory holds config.json and *.safetensors or *.gguf."
            )
        self.directory = directory
        self._config_text, self.config = _read_json(directory / "config.json")
        self._file_of: Mapping[str, TensorFile]
        whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        if whole.exists():
            file = SafetensorsFile(whole)
            self._file_of = dict.fromkeys(file.entries, file)
        elif index.exists():
            self._file_of = _shards(index)
        elif files := sorted(directory.glob("*.gguf")):
            # Imported here: it needs a library that nobody else does.
            from experts.gguf import open_files

            self._file_of, self.config = open_files(files, self.config)
        else:
            raise CheckpointInvalid(f"{directory}: holds neither {whole.name} nor {index.name} nor a .gguf file.")

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Open a model directory: config.json beside model.safetensors, model.safetensors.index.json or *.gguf.

        Raises:
            CheckpointInvalid: a file is missing, truncated or malformed.
        """
        return cls(Path(directory))

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._file_of))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, read-only, in its own shape; bfloat16 as uint16, float8 as uint8.

        Raises:
            CheckpointInvalid: no such tensor.
        """
        return self._file(name).tensor(name)

    def quantized(self, name: str) -> Quantized | None:
        """One tensor as codes, where its format itself says that it has them: then `tensor` dequantizes it. Else None.

        Raises:
            CheckpointInvalid: no such tensor.
        """
        return self._file(name).quantized(name)

    def dtype(self, name: str) -> str:
        """Element type as safetensors spells it: "BF16", "F32", "F16", ..."""
        return self._file(name).entries[name].dtype

    def coded(self, name: str) -> str:
        """How the file codes what is decoded as it is read, such as "Q4_K" of GGUF; else empty."""
        return self._file(name).entries[name].coded

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._file(name).entries[name].shape

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over config.json and all bytes of the files of tensors: where it is equal, the weights are.

        What the files are called does not count; where the shards are split does. The first call on a host reads all of
        them, about a minute for 60 GB; later ones believe its notes (`TensorFile.digest`).
        """
        # Of a tensor that stands in two files the index decides which one is meant.
        files = [
            (file.digest(), sorted(name for name in file.entries if self._file_of.get(name) is not file))
            for file in set(self._file_of.values())
        ]
        text = json.dumps([hashlib.sha256(self._config_text).hexdigest(), sorted(files)])
        return hashlib.sha256(text.encode()).hexdigest()

    def let_go(self) -> None:
        """Hold no page of the files any more: views read them again."""
        for file in set(self._file_of.values()):
            file.let_go()

    def _file(self, name: str) -> TensorFile:
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointInvalid(f"{self.directory}: no tensor {name} among {len(self._file_of)}.")
        return file


def _shards(index: Path) -> dict[str, SafetensorsFile]:
    weight_map = _read_json(index)[1].get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointInvalid(f"{index}: weight_map, from tensor names to file names, is missing.")
    files: dict[str, SafetensorsFile] = {}
    faults: list[str] = []
    for name in sorted(set(weight_map.values())):
        # A shard lies beside its index: a path could lead anywhere.
        if Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointInvalid(f"{index}: {name!r} is not a plain file name.")
        try:
            files[name] = SafetensorsFile(index.parent / name)
        except CheckpointInvalid as fault:
            # On to the others: whoever downloads them again wants to know all.
            faults.append(str(fault))
    for tensor, name in weight_map.items():
        if name in files and tensor not in files[name].entries:
            faults.append(f"{index}: {tensor} should be in {name}, which does not hold it.")
    if faults:
        raise CheckpointInvalid("\n".join(faults))
    return {tensor: files[name] for tensor, name in weight_map.items()}
