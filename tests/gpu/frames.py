"""Frames of the GPU exchange by plain arithmetic: what kernels must write, and what they must refuse."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from experts.gpu.layout import ExchangeShape
from tests.gpu.exchange_world import CLIENT, SERVER
from tests.p2p.frame_reference import checksum

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FRAME = struct.Struct("<IHHQQIIQQQ")
WIRE = struct.Struct("<IHHQQIIIIHHIQQ")


def mixed(h: int) -> int:
    """The bijection at the end of a frame's checksum."""
    h = ((h ^ (h >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    h = ((h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
    return h ^ (h >> 33)


def seal(words: np.ndarray, sequence: int, incarnation: int, place: int) -> int:
    """A row's seal, by p2p/device.py's definition."""
    keys = (np.arange(len(words), dtype=np.uint64) * 0x9E3779B1 + place * 0x85EBCA6B) & 0xFFFFFFFF | 1
    total = int((words.astype(np.uint64) * keys).sum(dtype=np.uint64))
    stamp = mixed((mixed(mixed(sequence ^ GOLDEN) ^ incarnation) + place * GOLDEN) & MASK)
    return (total + stamp) & MASK


def head_of(frame: dict[str, int], wire: dict[str, int], listed: bytes) -> bytes:
    """Both headers and the list, under a checksum that holds whatever they say."""
    sealed = FRAME.pack(*frame.values())
    payload = WIRE.pack(*wire.values()) + listed
    return sealed + struct.pack("<Q", checksum(sealed, payload)) + payload


@dataclass(kw_only=True)
class Request:
    """A request; `frame` and `wire` override its header fields."""

    shape: ExchangeShape
    rows: int
    pairs: int
    listed: list[int]
    layer: int = 0
    sequence: int = 1
    frame: dict[str, int] = field(default_factory=dict)
    wire: dict[str, int] = field(default_factory=dict)

    def head(self, remaining_ns: int = 0) -> bytes:
        """From the frame's header to the end of the list."""
        shape, listed = self.shape, np.array(self.listed, "<u4").tobytes()
        frame = {
            "magic": 0x46503250, "version": 1, "flags": 1, "incarnation": SERVER, "sequence": self.sequence,
            "attempt": 0, "length": shape.rows_offset + self.rows * shape.row_stride, "remaining": remaining_ns,
            "sender": CLIENT, "covered": 64 + len(listed),
        }  # fmt: skip
        wire = {
            "magic": 0x54505845, "version": 3, "kind": 1, "model": shape.model_hash, "routing": 0,
            "layer": self.layer, "rows": self.rows, "pairs": self.pairs, "hidden": shape.hidden,
            "form": int(shape.rows_out), "status": 0, "zero": 0, "service": 0, "last": 0,
        }  # fmt: skip
        return head_of(frame | self.frame, wire | self.wire, listed)

    def slot(self, signal: int | None = None) -> bytes:
        """A slot from its signal on, up to the end of the list."""
        seen = self.sequence if signal is None else signal
        return struct.pack("<Q", seen).ljust(64, b"\0") + self.head()


@dataclass(kw_only=True)
class Reply:
    """The reply to a request; `frame` and `wire` override its header fields."""

    request: Request
    status: int = 0
    service_ns: int = 0
    frame: dict[str, int] = field(default_factory=dict)
    wire: dict[str, int] = field(default_factory=dict)

    def head(self, request_sum: int) -> bytes:
        """Both headers."""
        asked, shape = self.request, self.request.shape
        answers = asked.rows * shape.top_k * shape.answer_stride if self.status == 0 else 0
        frame = {
            "magic": 0x46503250, "version": 1, "flags": 1, "incarnation": CLIENT, "sequence": asked.sequence,
            "attempt": 0, "length": 64 + answers, "remaining": 0, "sender": SERVER, "covered": 64,
        }  # fmt: skip
        wire = {
            "magic": 0x54505845, "version": 3, "kind": 2, "model": shape.model_hash, "routing": request_sum,
            "layer": asked.layer, "rows": asked.rows, "pairs": asked.pairs, "hidden": shape.hidden,
            "form": 1, "status": self.status, "zero": 0, "service": self.service_ns, "last": 0,
        }  # fmt: skip
        return head_of(frame | self.frame, wire | self.wire, b"")
