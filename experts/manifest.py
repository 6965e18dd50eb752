"""What the packed experts of a checkpoint are, byte for byte: their layout, and each one's digest and answer. Pure.

It is the head of a packed file, and what one server tells another before it gives it weights:

    offset  size  field
         0     8  magic "EAASPACK"
         8     4  layout version
        12     4  dtype, as experts.model.Dtype numbers it
        16    16  layers, experts, hidden, intermediate: u32 each
        32     8  gate_up_bytes: where `down` begins within a blob
        40     8  blob_bytes: gate_up, then down
        48     8  blob_stride: blob_bytes rounded up to 4096
        56     8  data_offset: of the first blob in the file, a multiple of 4096
        64    32  checkpoint fingerprint
        96    32  numerics class: ASCII, then zeros
       128    32  identity: SHA-256 of bytes 0 to 128 and of the entries
       160   64n  entries, layer by layer, expert by expert: digest, answer

Integers are little-endian. A digest is the SHA-256 of a blob, so that it does not matter who gave its bytes; no hash
of the standard library is as fast (blake2b takes twice as long). An answer is `kernels.answer_of` the expert as its
packer computed it: whoever holds the right bytes in the right place computes the same, bit for bit, as the numerics
class promises.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from experts.kernels import packed_bytes
from experts.model import Dtype, ExpertShape

LAYOUT_VERSION = 2
PAGE_BYTES = 4096
ENTRIES_OFFSET = 160

_FIELDS = struct.Struct("<8s6I4Q32s32s")
_MAGIC = b"EAASPACK"
DIGEST_BYTES = 32
_ENTRY_BYTES = 2 * DIGEST_BYTES

Blob = NDArray[np.uint8]


class ManifestInvalid(ValueError):
    """Bytes that are no manifest of the layout expected; the text says why."""


class BlobCorrupt(RuntimeError):
    """A blob's bytes are not those that were packed."""


@dataclass(frozen=True, kw_only=True)
class PackLayout:
    """Which experts, packed how, and where each lies in the file."""

    shape: ExpertShape
    dtype: Dtype
    fingerprint: str
    numerics_class: str

    def __post_init__(self) -> None:
        if len(self.fingerprint) != 64 or set(self.fingerprint) - set("0123456789abcdef"):
            raise ValueError(f"fingerprint {self.fingerprint!r}: 64 hexadecimal digits are needed.")
        if not self.numerics_class.isascii() or not 1 <= len(self.numerics_class) <= 32:
            raise ValueError(f"numerics class {self.numerics_class!r}: 1 to 32 ASCII characters are needed.")

    @property
    def count(self) -> int:
        """Number of blobs."""
        return self.shape.layers * self.shape.experts

    @property
    def gate_up_bytes(self) -> int:
        """Bytes of one expert's gate_up: tiles of 32 columns, 64 rows each."""
        shape = self.shape
        return packed_bytes(self.dtype, -(-shape.intermediate // 32), shape.hidden, shape.biased)

    @property
    def blob_bytes(self) -> int:
        """Bytes of one expert."""
        down_tiles = -(-self.shape.hidden // 64)
        down = packed_bytes(self.dtype, down_tiles, self.shape.intermediate, self.shape.biased)
        return self.gate_up_bytes + down

    @property
    def blob_stride(self) -> int:
        """Bytes from one blob to the next."""
        return _page_up(self.blob_bytes)

    @property
    def head_bytes(self) -> int:
        """Bytes of the manifest."""
        return ENTRIES_OFFSET + self.count * _ENTRY_BYTES

    @property
    def data_offset(self) -> int:
        """Byte of the first blob."""
        return _page_up(self.head_bytes)

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_offset + self.count * self.blob_stride

    @property
    def file_name(self) -> str:
        """Name within the cache directory."""
        return f"{self.fingerprint}-{self.numerics_class}-v{LAYOUT_VERSION}.experts"

    def index(self, layer: int, expert: int) -> int:
        """Number of a blob.

        Raises:
            IndexError: no such MoE layer or expert.
        """
        shape = self.shape
        if not (0 <= layer < shape.layers and 0 <= expert < shape.experts):
            raise IndexError(f"expert {expert} of MoE layer {layer}; packed are {shape.layers} x {shape.experts}")
        return layer * shape.experts + expert

    def offset(self, layer: int, expert: int) -> int:
        """Byte of a blob in the file; IndexError as for `index`."""
        return self.data_offset + self.index(layer, expert) * self.blob_stride

    def fields(self) -> bytes:
        """The first 128 bytes of the manifest."""
        shape = self.shape
        return _FIELDS.pack(
            _MAGIC, LAYOUT_VERSION, self.dtype, shape.layers, shape.experts, shape.hidden, shape.intermediate,
            self.gate_up_bytes, self.blob_bytes, self.blob_stride, self.data_offset,
            bytes.fromhex(self.fingerprint), self.numerics_class.encode(),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The layout and, in `entries`, what each blob is."""

    layout: PackLayout
    entries: bytes

    @cached_property
    def identity(self) -> bytes:
        """SHA-256 of all of it: equal where the same bytes were packed the same way."""
        return hashlib.sha256(self.layout.fields() + self.entries).digest()

    def encode(self) -> bytes:
        """Its bytes, as the table above says."""
        return self.layout.fields() + self.identity + self.entries

    @classmethod
    def decode(cls, data: bytes, layout: PackLayout) -> Manifest:
        """Read a manifest that must be of this layout.

        Raises:
            ManifestInvalid: it is of another, or its bytes are not those that were written.
        """
        manifest = cls(layout=layout, entries=data[ENTRIES_OFFSET:])
        if len(data) != layout.head_bytes:
            raise ManifestInvalid(f"{len(data)} bytes found, {layout.head_bytes} needed.")
        if data[: _FIELDS.size] != layout.fields():
            raise ManifestInvalid(f"it is not of {layout.file_name} with {layout.shape}.")
        if data[_FIELDS.size : ENTRIES_OFFSET] != manifest.identity:
            raise ManifestInvalid("its SHA-256 is not that of its bytes.")
        return manifest

    def check(self, layer: int, expert: int, blob: Blob) -> None:
        """Compare a blob's bytes, and how many they are, with its digest.

        Raises:
            BlobCorrupt: they differ.
            IndexError: no such MoE layer or expert.
        """
        found, needed = hashlib.sha256(blob.data).digest(), self.digest(layer, expert)
        if found != needed:
            raise BlobCorrupt(
                f"expert {expert} of MoE layer {layer} has SHA-256 {found.hex()[:16]}...,"
                f" packed was {needed.hex()[:16]}...."
            )

    def digest(self, layer: int, expert: int) -> bytes:
        """SHA-256 of this expert's blob; IndexError as for `check`."""
        return self._entry(layer, expert)[:DIGEST_BYTES]

    @cached_property
    def places(self) -> dict[bytes, tuple[int, int]]:
        """A layer and expert of each digest."""
        experts = self.layout.shape.experts
        starts = range(0, len(self.entries), _ENTRY_BYTES)
        return {self.entries[at : at + DIGEST_BYTES]: divmod(n, experts) for n, at in enumerate(starts)}

    def answer(self, layer: int, expert: int) -> bytes:
        """What `kernels.answer_of` this expert gives; IndexError as for `check`."""
        return self._entry(layer, expert)[DIGEST_BYTES:]

    def _entry(self, layer: int, expert: int) -> bytes:
        start = self.layout.index(layer, expert) * _ENTRY_BYTES
        return self.entries[start : start + _ENTRY_BYTES]


def entry(blob: Blob, answer: bytes) -> bytes:
    """The entry of one expert."""
    return hashlib.sha256(blob.data).digest() + answer


def _page_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
