"""One mapped file of tensors: what safetensors and GGUF share."""

from __future__ import annotations

import fcntl
import hashlib
import io
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experts.quantized import Quantized

HEADER_LIMIT_BYTES = 64 << 20  # 18,867 tensors (48 layers of 128 experts) need 2.5 MB
# Reading less takes less than a tenth of a second, as often as it is wanted.
NOTED_BYTES = 64 << 20
# File systems tell times in steps of up to two seconds: a change within one may show in none of them.
SETTLED_S = 2.0

# numpy has no bfloat16 or float8: their bits are served as unsigned integers.
_SPELLED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
_SPELLED |= {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}
_SPELLED |= {"BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1"}
NUMPY: Mapping[str, np.dtype[Any]] = {name: np.dtype(spelled) for name, spelled in _SPELLED.items()}


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


def cache_root() -> Path:
    """What processes of this user keep on this host: $XDG_CACHE_HOME/eaas, by default under ~/.cache."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    root = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    return root / "eaas"


@contextmanager
def opened(path: Path) -> Iterator[tuple[io.BufferedReader, int]]:
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

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry], mapped: mmap.mmap, start: int) -> None:
        self.path, self.entries = path, entries
        self._start, self._mapped = start, mapped
        self._data = np.frombuffer(mapped, np.uint8)

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

    def digest(self) -> str:
        """SHA-256 (hex) of the whole file; a large one is read once for each user and host, and the digest noted.

        A note holds while device, inode, size and times of change are those of the file that was read: no write leaves
        them as they were. Without a cache directory that can be written, every call reads the file.

        Raises:
            CheckpointInvalid: the file is gone.
        """
        with opened(self.path) as (file, size), _note(self.path, size) as note:
            state, settled_s = _state(file), time.time() - SETTLED_S
            digest, *noted = note.read().split() or [b""]
            if noted == state:
                return digest.decode()
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if state == _state(file) and os.fstat(file.fileno()).st_ctime < settled_s:
                # Without room the next process reads the file again.
                with suppress(OSError):
                    note.seek(0)
                    note.truncate()
                    note.write(b" ".join([digest.encode(), *state]))
        return digest

    def let_go(self) -> None:
        """Count for nothing in this process's memory, and let the kernel drop what was read: views read it again."""
        self._mapped.madvise(mmap.MADV_DONTNEED)

    def _bytes(self, entry: TensorEntry) -> np.ndarray:
        return self._data[self._start + entry.begin : self._start + entry.end]


def _state(file: io.BufferedReader) -> list[bytes]:
    it = os.fstat(file.fileno())
    return [b"%d" % n for n in (it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns)]


def _note(path: Path, size: int) -> io.FileIO | io.BytesIO:
    """The note on a file, locked: whoever else wants its digest waits for it rather than read the file too."""
    if size < NOTED_BYTES:
        return io.BytesIO()
    try:
        note = cache_root() / "digests" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
        note.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(note, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return io.BytesIO()
    return file
