"""Writes checkpoint folders: safetensors as a stream, sharded where large, each file whole or absent."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITEM_BYTES = {"BF16": 2, "F32": 4}
SHARD_BYTES = 2 << 30
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class TensorOut:
    """One tensor to write.

    Attributes:
        dtype: As safetensors spells it: "BF16" or "F32".
        chunks: Gives the little-endian bytes from the beginning, in pieces of any size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes]]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_json(path: Path, value: Any) -> None:
    """Write one JSON file, whole or not at all."""
    _replace(path, [(json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()])


def write_safetensors(
    folder: Path, tensors: Sequence[TensorOut], shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write model.safetensors, or shards and their index once the data exceed `shard_bytes`.

    Weights that the folder held before are gone afterwards, however they were split.

    Returns:
        The safetensors files.

    Raises:
        ValueError: a tensor gave more or fewer bytes than its shape needs.
    """
    shards: list[list[TensorOut]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
        ]
    for name, shard in zip(names, shards, strict=True):
        _replace(folder / name, _stream(shard))
    index = folder / "model.safetensors.index.json"
    # Leftovers of a model that was split otherwise would be read in place of this one.
    for path in [*folder.glob("model.safetensors"), *folder.glob("model-*-of-*.safetensors"), index]:
        if path.name not in names:
            path.unlink(missing_ok=True)
    if len(shards) > 1:
        weight_map = {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        total = sum(tensor.nbytes for tensor in tensors)
        write_json(index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return [folder / name for name in names]


def _stream(tensors: Sequence[TensorOut]) -> Iterable[bytes]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        given = 0
        for chunk in tensor.chunks():
            given += len(chunk)
            yield chunk
        if given != tensor.nbytes:
            raise ValueError(
                f"{tensor.name} gave {given} bytes; {tensor.dtype} {tensor.shape} needs {tensor.nbytes}."
            )


def _replace(path: Path, chunks: Iterable[bytes]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
    partial.replace(path)
