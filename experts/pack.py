"""The packed expert cache: all experts of one checkpoint in kernel layout, built once per host.

One file per (checkpoint fingerprint, dtype, layout version):

    offset  size  field
         0     8  magic "EAASPACK"
         8     4  layout version
        12     4  dtype (0 float32, 1 bfloat16, 2 int8)
        16    16  layers, experts, hidden, intermediate: u32 each
        32     8  gate_up_bytes: where `down` begins within a blob
        40     8  blob_bytes: gate_up, then down
        48     8  blob_stride: blob_bytes rounded up to 4096
        56     8  data_offset: of the first blob, a multiple of 4096
        64    32  checkpoint fingerprint
        96    32  SHA-256 of bytes 0 to 96 and of the digests
       128   32n  digests: SHA-256 of each blob, layer by layer, expert by expert
    data_offset   blobs

Integers are little-endian. A builder holds an flock, writes a file of its own name, and renames it when it is
whole and on disk; so readers see a whole file or none, and a file that is being read is never written.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.kernels import PackedExpert, pack_expert, packed_bytes
from experts.model import Dtype, ExpertShape

LAYOUT_VERSION = 1
PAGE_BYTES = 4096

_FIELDS = struct.Struct("<8s6I4Q32s")
_MAGIC = b"EAASPACK"
_HUGE_PAGE = 2 << 20
_DIGEST_BYTES = 32
_DIGESTS_OFFSET = _FIELDS.size + _DIGEST_BYTES

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (experts packed, experts in all) after each."""


class PackUnavailable(RuntimeError):
    """The cache can be neither read nor built: no room, no right to write; the text says which."""


class PackCorrupt(RuntimeError):
    """A blob's bytes are not those that were packed; the cache has to be built again."""


@dataclass(frozen=True, kw_only=True)
class PackLayout:
    """Where everything lies in the file of one checkpoint."""

    shape: ExpertShape
    dtype: Dtype
    fingerprint: str

    @property
    def count(self) -> int:
        """Number of blobs."""
        return self.shape.layers * self.shape.experts

    @property
    def gate_up_bytes(self) -> int:
        """Bytes of one expert's gate_up: tiles of 32 columns, 64 rows each."""
        return packed_bytes(self.dtype, -(-self.shape.intermediate // 32), self.shape.hidden)

    @property
    def blob_bytes(self) -> int:
        """Bytes of one expert."""
        down_tiles = -(-self.shape.hidden // 64)
        return self.gate_up_bytes + packed_bytes(self.dtype, down_tiles, self.shape.intermediate)

    @property
    def blob_stride(self) -> int:
        """Bytes from one blob to the next."""
        return _page_up(self.blob_bytes)

    @property
    def data_offset(self) -> int:
        """Byte of the first blob."""
        return _page_up(_DIGESTS_OFFSET + self.count * _DIGEST_BYTES)

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_offset + self.count * self.blob_stride

    @property
    def file_name(self) -> str:
        """Name within the cache directory."""
        return f"{self.fingerprint}-{self.dtype.label}-v{LAYOUT_VERSION}.experts"

    def head(self, digests: bytes) -> bytes:
        """Header and digests, as they stand at the beginning of the file."""
        shape = self.shape
        fields = _FIELDS.pack(
            _MAGIC, LAYOUT_VERSION, self.dtype, shape.layers, shape.experts, shape.hidden, shape.intermediate,
            self.gate_up_bytes, self.blob_bytes, self.blob_stride, self.data_offset,
            bytes.fromhex(self.fingerprint),
        )  # fmt: skip
        return fields + hashlib.sha256(fields + digests).digest() + digests


def cache_directory() -> Path:
    """Where packed experts are kept: $XDG_CACHE_HOME/eaas/packed, by default under ~/.cache."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    root = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    return root / "eaas" / "packed"


class PackedExperts:
    """Every packed expert of one checkpoint, mapped read-only. Addresses hold while this object lives."""

    def __init__(self, path: Path, layout: PackLayout, mapped: mmap.mmap) -> None:
        self.path = path
        self.layout = layout
        self._map = mapped
        self._bytes = np.frombuffer(mapped, np.uint8)
        self._address = self._bytes.ctypes.data

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        shape: ExpertShape,
        dtype: Dtype,
        *,
        directory: Path | None = None,
        progress: Progress | None = None,
        rebuild: bool = False,
    ) -> PackedExperts:
        """Map the cache of this checkpoint, building it first where there is none or it is not whole.

        Args:
            checkpoint: Source of the weights.
            shape: Its experts.
            dtype: Element type to pack in.
            directory: Cache directory; default `cache_directory()`.
            progress: Called after each expert that is packed.
            rebuild: Build again even where the file looks whole: what to do about `PackCorrupt`.

        Raises:
            CheckpointInvalid: an expert's tensor is missing or has the wrong shape or type.
            PackUnavailable: the cache cannot be written.
        """
        layout = PackLayout(shape=shape, dtype=dtype, fingerprint=checkpoint.fingerprint)
        root = directory or cache_directory()
        path = root / layout.file_name
        try:
            mapped = None if rebuild else _map_whole(path, layout)
            if mapped is None:
                root.mkdir(parents=True, exist_ok=True)
                with _locked(path.with_suffix(".lock")):
                    # Another builder may have finished while this one waited.
                    mapped = None if rebuild else _map_whole(path, layout)
                    if mapped is None:
                        _build(path, layout, checkpoint, progress)
                        mapped = _map_whole(path, layout)
        except OSError as error:
            raise PackUnavailable(
                f"{path}: cannot be written: {error.strerror or error}. {layout.file_bytes} bytes are"
                " needed; set XDG_CACHE_HOME to a directory with room."
            ) from error
        if mapped is None:
            raise PackUnavailable(
                f"{path}: is not whole right after it was built. Does something else write there?"
            )
        return cls(path, layout, mapped)

    def blob(self, layer: int, expert: int) -> tuple[int, int]:
        """(address, bytes) of one expert: gate_up, then down at `layout.gate_up_bytes`.

        Raises:
            IndexError: no such MoE layer or expert.
        """
        return self._address + self._offset(layer, expert), self.layout.blob_bytes

    def expert(self, layer: int, expert: int) -> PackedExpert:
        """One expert for `experts.kernels`, as views of the map."""
        start, shape = self._offset(layer, expert), self.layout.shape
        blob = self._bytes[start : start + self.layout.blob_bytes]
        return PackedExpert(
            dtype=self.layout.dtype,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            gate_up=blob[: self.layout.gate_up_bytes],
            down=blob[self.layout.gate_up_bytes :],
        )

    def verify(self, layer: int, expert: int) -> None:
        """Compare one blob with its SHA-256.

        Raises:
            PackCorrupt: they differ. Open again with rebuild=True.
        """
        start = self._offset(layer, expert)
        index = _DIGESTS_OFFSET + (layer * self.layout.shape.experts + expert) * _DIGEST_BYTES
        wanted = self._map[index : index + _DIGEST_BYTES]
        found = hashlib.sha256(memoryview(self._map)[start : start + self.layout.blob_bytes]).digest()
        if found != wanted:
            raise PackCorrupt(
                f"{self.path}: expert {expert} of MoE layer {layer} has SHA-256 {found.hex()[:16]}...,"
                f" packed was {wanted.hex()[:16]}.... Delete the file; it is built again at the next start."
            )

    def _offset(self, layer: int, expert: int) -> int:
        shape = self.layout.shape
        if not (0 <= layer < shape.layers and 0 <= expert < shape.experts):
            raise IndexError(
                f"expert {expert} of MoE layer {layer}; packed are {shape.layers} x {shape.experts}"
            )
        return self.layout.data_offset + (layer * shape.experts + expert) * self.layout.blob_stride


def _page_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _map_whole(path: Path, layout: PackLayout) -> mmap.mmap | None:
    """Map a cache file whose size, header and digests are right; None where it is absent or not."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != layout.file_bytes:
                _log.warning("pack event=rejected path=%s reason=size", path)
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return None
    # A third more bandwidth where the file system's cache has them; what it reads from now on comes in them.
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    digests_end = _DIGESTS_OFFSET + layout.count * _DIGEST_BYTES
    if mapped[:digests_end] != layout.head(mapped[_DIGESTS_OFFSET:digests_end]):
        _log.warning("pack event=rejected path=%s reason=header", path)
        mapped.close()
        return None
    return mapped


def _build(path: Path, layout: PackLayout, checkpoint: Checkpoint, progress: Progress | None) -> None:
    # Only builders write partial files, and the lock is held: any found belong to builders that died.
    for stale in path.parent.glob(f"{path.stem}.*.partial"):
        stale.unlink(missing_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < layout.file_bytes:
        raise PackUnavailable(
            f"{path.parent}: packing the experts needs {layout.file_bytes} bytes, {free} are free."
            " Make room, or set XDG_CACHE_HOME to another file system."
        )
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            digests, pending = bytearray(), bytearray(layout.data_offset)
            for index in range(layout.count):
                blob = _blob(layout, checkpoint, *divmod(index, layout.shape.experts))
                digests += hashlib.sha256(blob).digest()
                pending += blob.ljust(layout.blob_stride, b"\0")
                # In whole huge pages: the page cache keeps, and maps, in one piece what came in one piece.
                whole = len(pending) // _HUGE_PAGE * _HUGE_PAGE
                file.write(memoryview(pending)[:whole].tobytes())
                del pending[:whole]
                if progress is not None:
                    progress(index + 1, layout.count)
            file.write(pending)
            file.seek(0)
            file.write(layout.head(bytes(digests)))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _blob(layout: PackLayout, checkpoint: Checkpoint, layer: int, expert: int) -> bytes:
    inter, hidden = layout.shape.intermediate, layout.shape.hidden
    names = layout.shape.names(layer, expert)
    gate, up, down = (
        _weights(checkpoint, name, wanted)
        for name, wanted in zip(names, ((inter, hidden), (inter, hidden), (hidden, inter)), strict=True)
    )
    packed = pack_expert(gate, up, down, layout.dtype)
    return packed.gate_up.tobytes() + packed.down.tobytes()


def _weights(checkpoint: Checkpoint, name: str, wanted: tuple[int, int]) -> np.ndarray:
    tensor, dtype = checkpoint.tensor(name), checkpoint.dtype(name)
    if tensor.shape != wanted:
        raise CheckpointInvalid(f"{name} is {tensor.shape}; config.json says {wanted}.")
    if dtype not in ("BF16", "F32", "F16"):
        raise CheckpointInvalid(f"{name} is stored as {dtype}; experts are read from BF16, F32 or F16.")
    return tensor.astype(np.float32) if dtype == "F16" else tensor
