"""The packed experts of one checkpoint in a file that all servers of a host map.

The file (`manifest` has its layout) begins with the manifest and has a place for every expert. A place is a hole
until its expert is filled in: all of them when a checkpoint is packed, one after another where the manifest came from
another host. Only bytes with the digest of their place are ever written there, so that writing disturbs no reader,
heals a place that went bad, and needs no lock; what is read is compared with its digest before it is used.

Models that share experts, such as fine-tunes of one, share their bytes: a builder leaves a hole where a sibling,
another file of the directory, holds the same bytes, and a hole is read from a sibling that has its digest now. A
process reads there until it fills the place itself: what it compares must be what it serves. A sibling that was deleted
or replaced stays mapped; who starts later has what is missing from a source. Of two packed at once each is whole.

A builder holds an flock, writes a file of its own name, and renames it when its head is on disk.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from io import FileIO
from pathlib import Path

import numpy as np

from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.formats import experts_dtype
from experts.grouped import LAYOUTS
from experts.kernels import PackedExpert, WeightsBroken, aligned_bytes, answer_of, numerics_class, pack_expert
from experts.manifest import DIGEST_BYTES, Blob, BlobCorrupt, Manifest, ManifestInvalid, PackLayout, entry
from experts.model import ConfigInvalid, Dtype, ExpertShape
from experts.tensor_file import cache_root
from experts.tensors import tensors_of
from router.view import Model

_HUGE_PAGE = 2 << 20

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (experts packed, experts in all) after each."""


class PackUnavailable(RuntimeError):
    """The cache can be neither read nor built: no room, no right to write; the text says which."""


def layout_of(shape: ExpertShape, dtype: Dtype, fingerprint: str) -> PackLayout:
    """How this process packs these experts.

    Raises:
        ValueError: the fingerprint is none.
        ConfigInvalid: these experts are not served in this type.
    """
    if dtype is Dtype.INT8 and not shape.plain:
        raise ConfigInvalid(f"experts of {shape.architecture} are not served in int8. Use bfloat16 or float32.")
    kernels = shape.numerics_class(numerics_class(dtype))
    return PackLayout(shape=shape, dtype=dtype, fingerprint=fingerprint, numerics_class=kernels)


def model_entry(name: str, path: Path, dtype: str = "auto", weight: int = 1) -> tuple[Model, str]:
    """A checkpoint as the router is told of it, and the numerics class in which CPUs of this host compute it.

    dtype: As the option of that name. Raises CheckpointInvalid, ConfigInvalid: it cannot be served.
    """
    checkpoint = Checkpoint.open(path)
    shape = ExpertShape.from_config(checkpoint.config)
    layout = layout_of(shape, experts_dtype(dtype, checkpoint.config, LAYOUTS), checkpoint.fingerprint)
    model = Model(
        hash=checkpoint.fingerprint,
        name=name,
        path=str(path),
        layers=shape.layers,
        experts=shape.experts,
        expert_bytes=layout.blob_bytes,
        weight=weight,
    )
    return model, layout.numerics_class


def cache_directory() -> Path:
    """Where packed experts are kept: $XDG_CACHE_HOME/eaas/packed, by default under ~/.cache."""
    return cache_root() / "packed"


class PackedExperts:
    """The packed experts of one checkpoint, mapped read-only. Addresses hold while this object lives."""

    def __init__(self, path: Path, manifest: Manifest, file: FileIO, mapped: mmap.mmap) -> None:
        self.path = path
        self.manifest = manifest
        self.layout = manifest.layout
        self._file = file
        self._mapped, self._bytes = mapped, np.frombuffer(mapped, np.uint8)
        self._borrowed: dict[tuple[int, int], Blob] = {}

    @classmethod
    def find(cls, layout: PackLayout, directory: Path | None = None) -> PackedExperts | None:
        """Map this host's file; None where there is none, or its size or manifest is wrong."""
        return _map((directory or cache_directory()) / layout.file_name, layout)

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        shape: ExpertShape,
        dtype: Dtype,
        *,
        directory: Path | None = None,
        progress: Progress | None = None,
    ) -> PackedExperts:
        """Map this host's file, packing the checkpoint first where there is none.

        Args:
            directory: Cache directory; default `cache_directory()`.
            progress: Called after each expert that is packed.

        Raises:
            CheckpointInvalid: an expert's tensor is missing, of the wrong shape or type, or gives no finite row.
            PackUnavailable: the file cannot be written.
        """
        layout = layout_of(shape, dtype, checkpoint.fingerprint)
        return _made(layout, directory, lambda partial: _build(partial, layout, checkpoint, progress))

    @classmethod
    def begin(cls, manifest: Manifest, directory: Path | None = None) -> PackedExperts:
        """Map this host's file, making one of this manifest, all holes, where there is none.

        Raises:
            PackUnavailable: the file cannot be written.
        """

        def build(partial: Path) -> None:
            with partial.open("wb") as file:
                file.write(manifest.encode())
                file.truncate(manifest.layout.file_bytes)

        return _made(manifest.layout, directory, build)

    def expert(self, layer: int, expert: int) -> PackedExpert:
        """One expert for `experts.kernels`, as views of the map; IndexError where there is no such expert."""
        return unpacked(self.layout, self.blob(layer, expert))

    def blob(self, layer: int, expert: int) -> np.ndarray:
        """One expert's bytes, a view of a map: u8[blob_bytes]; IndexError where there is no such expert."""
        self.is_hole(layer, expert)
        return self._borrowed.get((layer, expert), self._own(layer, expert))

    def verify(self, layer: int, expert: int) -> None:
        """Compare one blob with its digest.

        Raises:
            BlobCorrupt: they differ, or it was never filled in.
        """
        if self.is_hole(layer, expert):
            raise BlobCorrupt(f"{self.path}: expert {expert} of MoE layer {layer} was not filled in yet.")
        if self._borrowed and (layer, expert) not in self._borrowed:
            with suppress(OSError):
                start = self.layout.offset(layer, expert)
                self._mapped.madvise(mmap.MADV_WILLNEED, start, self.layout.blob_stride)
        self.manifest.check(layer, expert, self.blob(layer, expert))

    def is_hole(self, layer: int, expert: int) -> bool:
        """Whether neither this place nor a sibling's was written to. No promise: some file systems do not tell."""
        if (layer, expert) in self._borrowed or self._is_written(layer, expert):
            return False
        blob = _lent(self._siblings, self.manifest.digest(layer, expert))
        if blob is not None:
            # Else reading what this file does have draws the holes around it into memory, megabytes at a time.
            with suppress(OSError):
                self._mapped.madvise(mmap.MADV_RANDOM)
                self._mapped.madvise(mmap.MADV_NOHUGEPAGE)
            self._borrowed[layer, expert] = blob
        return blob is None

    def fill(self, layer: int, expert: int, blob: Blob) -> None:
        """Put an expert into its place, from where every server of the host may map it.

        Raises:
            BlobCorrupt: these are not its bytes; nothing is written.
            OSError: there is no room, or no right to write.
        """
        self.manifest.check(layer, expert, blob)
        start, left = self.layout.offset(layer, expert), blob.data
        while left:
            written = os.pwrite(self._file.fileno(), left, start)
            start, left = start + written, left[written:]
        self._borrowed.pop((layer, expert), None)

    def page_out(self) -> None:
        """Give back the memory that holds this file, which comes back from the disk as it is used. Pages that another
        map uses stay. Raises OSError: the disk does not take what was written."""
        os.fdatasync(self._file.fileno())
        self._mapped.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _own(self, layer: int, expert: int) -> Blob:
        start = self.layout.offset(layer, expert)
        return self._bytes[start : start + self.layout.blob_bytes]

    def _is_written(self, layer: int, expert: int) -> bool:
        start = self.layout.offset(layer, expert)
        try:
            return os.lseek(self._file.fileno(), start, os.SEEK_DATA) == start
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data from here to the end
                return False
            raise

    @cached_property
    def _siblings(self) -> list[PackedExperts]:
        # Only those of use: whoever is mapped keeps its room on the disk, even deleted.
        found, wanted = _siblings_of(self.path, self.layout), self.manifest.places.keys()
        return [sibling for sibling in found if wanted & sibling.manifest.places.keys()]


def unpacked(layout: PackLayout, blob: np.ndarray) -> PackedExpert:
    """A blob as the kernels take it."""
    return PackedExpert(
        dtype=layout.dtype,
        hidden=layout.shape.hidden,
        intermediate=layout.shape.intermediate,
        gate_up=blob[: layout.gate_up_bytes],
        down=blob[layout.gate_up_bytes :],
        activation=layout.shape.activation,
        biased=layout.shape.biased,
    )


def _siblings_of(path: Path, layout: PackLayout) -> list[PackedExperts]:
    """The files beside this one whose experts have its shape and were packed in its way."""
    found: list[PackedExperts | None] = []
    for sibling in path.parent.glob("[0-9a-f]" * 64 + layout.file_name[64:]):
        # One may be gone by now, or not for this user to read.
        with suppress(OSError):
            found.append(_map(sibling, replace(layout, fingerprint=sibling.name[:64]), logging.DEBUG))
    return [sibling for sibling in found if sibling and sibling.layout != layout]


def _lent(siblings: Iterable[PackedExperts], digest: bytes) -> Blob | None:
    """The blob of a digest where a sibling has it in its own place; None where none does."""
    for sibling in siblings:
        place = sibling.manifest.places.get(digest)
        if place and sibling._is_written(*place):
            return sibling._own(*place)
    return None


def _made(layout: PackLayout, directory: Path | None, build: Callable[[Path], None]) -> PackedExperts:
    """Map the file, having it built where there is none."""
    root = directory or cache_directory()
    path = root / layout.file_name
    try:
        if (found := _map(path, layout)) is None:
            root.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Another builder may have finished while this one waited.
                if (found := _map(path, layout)) is None:
                    _replace(path, build)
                    found = _map(path, layout)
    except OSError as error:
        raise PackUnavailable(
            f"{path}: cannot be written: {error.strerror or error}. {layout.file_bytes} bytes are"
            " needed; set XDG_CACHE_HOME to a directory with room."
        ) from error
    if found is None:
        raise PackUnavailable(f"{path}: is not whole right after it was built. Does something else write there?")
    return found


def _map(path: Path, layout: PackLayout, level: int = logging.WARNING) -> PackedExperts | None:
    """Map a file whose size and manifest are right; None where it is absent or not."""
    try:
        # One that is part of an image, read-only, is good as long as it has no holes.
        file = FileIO(path, "r+" if os.access(path, os.W_OK) else "r")
    except FileNotFoundError:
        return None
    if os.fstat(file.fileno()).st_size != layout.file_bytes:
        _log.log(level, "pack event=rejected path=%s reason=size", path)
        return None
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # A third more bandwidth where the file system's cache has them; what it reads from now on comes in them.
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    try:
        manifest = Manifest.decode(mapped[: layout.head_bytes], layout)
    except ManifestInvalid as error:
        _log.log(level, "pack event=rejected path=%s reason=%s", path, error)
        return None
    return PackedExperts(path, manifest, file, mapped)


def _replace(path: Path, build: Callable[[Path], None]) -> None:
    # Only builders write partial files, and the lock is held: any found belong to builders that died.
    for stale in path.parent.glob(f"{path.stem}.*.partial"):
        stale.unlink(missing_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        build(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _build(partial: Path, layout: PackLayout, checkpoint: Checkpoint, progress: Progress | None) -> None:
    free, siblings = shutil.disk_usage(partial.parent).free, _siblings_of(partial, layout)
    # Beside siblings nobody knows yet how much is needed.
    if free < layout.file_bytes and not siblings:
        raise PackUnavailable(
            f"{partial.parent}: packing the experts needs {layout.file_bytes} bytes, {free} are free."
            " Make room, or set XDG_CACHE_HOME to another file system."
        )
    with partial.open("wb") as file:
        entries, pending = bytearray(), bytearray(layout.data_offset)
        for index in range(layout.count):
            layer, number = divmod(index, layout.shape.experts)
            blob = pack_blob(layout, checkpoint, layer, number)
            try:
                entries += (packed := entry(blob, answer_of(unpacked(layout, blob))))
            except WeightsBroken as error:
                raise CheckpointInvalid(f"expert {number} of MoE layer {layer}: {error}") from error
            lent = _lent(siblings, packed[:DIGEST_BYTES])
            # A sibling's place may have gone bad.
            if lent is not None and np.array_equal(lent, blob):
                file.write(pending)
                pending.clear()
                file.seek(layout.blob_stride, os.SEEK_CUR)
            else:
                pending += blob.data
                pending += bytes(layout.blob_stride - layout.blob_bytes)
            # In whole huge pages: the page cache keeps, and maps, in one piece what came in one piece.
            whole = max(0, len(pending) - (file.tell() + len(pending)) % _HUGE_PAGE)
            file.write(memoryview(pending)[:whole].tobytes())
            del pending[:whole]
            if progress is not None:
                progress(index + 1, layout.count)
        file.write(pending)
        file.truncate(layout.file_bytes)
        file.seek(0)
        file.write(Manifest(layout=layout, entries=bytes(entries)).encode())
    # Who packs may serve for months, and its checkpoint stays open.
    checkpoint.let_go()


def pack_blob(layout: PackLayout, checkpoint: Checkpoint, layer: int, expert: int) -> np.ndarray:
    """Pack one expert: u8[blob_bytes], aligned as the kernels need it.

    Raises:
        CheckpointInvalid: a tensor is missing, has the wrong shape or type, or holds what the type does not.
    """
    tensors = tensors_of(checkpoint, layout.shape, layer, expert)
    try:
        packed = pack_expert(
            tensors.gate,
            tensors.up,
            tensors.down,
            layout.dtype,
            activation=layout.shape.activation,
            biases=tensors.biases,
        )
    except ValueError as error:
        raise CheckpointInvalid(f"expert {expert} of MoE layer {layer}: {error}") from error
    blob = aligned_bytes(layout.blob_bytes)
    blob[: layout.gate_up_bytes], blob[layout.gate_up_bytes :] = packed.gate_up, packed.down
    return blob
