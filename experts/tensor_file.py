"""One mapped file of tensors: what safetensors and GGUF share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from experts.quantized import Quantized

HEADER_LIMIT_BYTES = 64 << 20  # 18,867 tensors (48 layers of 128 experts) need 2.5 MB

# numpy has no bfloat16 or float8: their bits are served as unsigned integers.
NUMPY: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
}


class CheckpointInvalid(ValueError):
    """A file of the model directory is missing, truncated or malformed; the text names it and the fault."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of one file."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    begin: int  # bytes from the end of the header
    end: int
    coded: str = ""  # in the file, where what is read is decoded to dtype, such as "Q4_K" of GGUF


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A file and how many bytes it has; CheckpointInvalid where it cannot be read."""
    try:
        with path.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointInvalid(f"{path}: cannot be read: {error.strerror or error}.") from error


class TensorFile:
    """A mapped file whose header was read and checked.

    Args:
        start: Byte where the tensors begin.
    """

    def __init__(
        self, path: Path, header: bytes, entries: Mapping[str, TensorEntry], mapped: mmap.mmap, start: int
    ) -> None:
        self.path, self.header, self.entries = path, header, entries
        self._told = entries  # by the names in the file itself
        self._start = start
        self._data = np.frombuffer(mapped, np.uint8)[start:]

    def tensor(self, name: str) -> np.ndarray:
        """View of one tensor, read-only, in its own shape."""
        entry = self.entries[name]
        view = self._bytes(entry).view(NUMPY[entry.dtype]).reshape(entry.shape)
        # Native code reads whole elements; the format does not promise that they are aligned.
        aligned = view if view.flags.aligned else view.copy()
        aligned.flags.writeable = False
        return aligned

    def quantized(self, name: str) -> Quantized | None:
        """One matrix as codes, where the format itself says that it has them; else None."""

    def samples(self, nbytes: int) -> dict[str, bytes]:
        """The first `nbytes` bytes of each tensor, or all where it is shorter, by its name in the file itself.

        Raises:
            CheckpointInvalid: the file is gone.
        """
        # Not through the map: for 64 bytes that would read megabytes around them, hundreds of GB of a large model.
        with opened(self.path) as (file, _):
            descriptor = file.fileno()
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            return {
                name: os.pread(descriptor, min(nbytes, entry.end - entry.begin), self._start + entry.begin)
                for name, entry in self._told.items()
            }

    def _bytes(self, entry: TensorEntry) -> np.ndarray:
        return self._data[entry.begin : entry.end]
