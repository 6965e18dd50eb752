"""Frames and signal words, as Python reads and writes them: native/frame.h holds the tables and does the work."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from p2p import native
from p2p.endpoint import check_words

SIGNAL_BYTES: Final = 64
HEADER_BYTES: Final = 64
PAYLOAD_OFFSET: Final = SIGNAL_BYTES + HEADER_BYTES
MAGIC: Final = 0x46503250
VERSION: Final = 1
ATTEMPT_LIMIT: Final = 1 << 16
PAYLOAD_LIMIT: Final = 1 << 30

_HEADER: Final = struct.Struct("<IHHQQIIQQQQ")


class Reason(IntEnum):
    """Why a frame is refused, in the order of the checks; the numbers are those of native/frame.h."""

    MAGIC = -1
    VERSION = -2
    FLAGS = -3
    RESERVED = -4
    LENGTH = -5
    INCARNATION = -6
    SENDER = -7
    SEQUENCE = -8
    ATTEMPT = -9
    CHECKSUM = -10


class FrameInvalid(ValueError):
    """A frame failed a check: `reason` names it, the text says what was found and what was needed."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(f"{reason.name.lower()}: {text}")
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a sender says about its frame; every other field is the codec's business."""

    incarnation: int
    sequence: int
    attempt: int = 0
    length: int
    remaining_ns: int = 0
    sender: int


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A frame that passed every check, in memory of its own."""

    header: Header
    payload: bytes


def seal_frame(slot: memoryview, header: Header, payload: bytes | memoryview) -> None:
    """Write payload and header into a slot (writable, from its signal line on), but not the signal.

    Raises:
        ValueError: the slot is too small, or `header.length` is not the payload's.
        struct.error: a field does not fit its width.
    """
    end = PAYLOAD_OFFSET + len(payload)
    if header.length != len(payload):
        raise ValueError(f"header says {header.length} bytes, the payload has {len(payload)}; they must agree.")
    if len(slot) < end:
        raise ValueError(f"the slot has {len(slot)} bytes, the frame needs {end}; send less.")
    to, number, origin = header.incarnation, header.sequence, header.sender
    fields = _HEADER.pack(0, 0, 0, to, number, header.attempt, header.length, header.remaining_ns, origin, 0, 0)
    slot[PAYLOAD_OFFSET:end] = payload
    native.load().p2p_frame_seal(np.frombuffer(slot, np.uint8).ctypes.data, fields)


def open_frame(slot: bytes | memoryview, capacity: int, incarnation: int, sender: int, sequence: int) -> Frame:
    """Copy a slot's frame, then validate the copy.

    Args:
        slot: The slot's bytes, from its signal line on.
        capacity: Payload capacity of the slot.
        incarnation: The reader's own.
        sender: Incarnation of the only peer that may write here.
        sequence: Of the frame awaited.

    Raises:
        FrameInvalid: with the first check that failed.
    """
    if len(slot) < PAYLOAD_OFFSET:
        raise FrameInvalid(Reason.LENGTH, f"{len(slot)} bytes found, {PAYLOAD_OFFSET} needed for a header.")
    capacity = min(capacity, len(slot) - PAYLOAD_OFFSET)
    head, payload = np.empty(HEADER_BYTES, np.uint8), np.empty(capacity, np.uint8)
    result = native.load().p2p_frame_open(
        *(np.frombuffer(slot, np.uint8).ctypes.data, capacity, incarnation, sender, sequence),
        *(head.ctypes.data, payload.ctypes.data),
    )
    magic, version, flags, to, number, attempt, length, remaining_ns, origin, reserved, seal = _HEADER.unpack(
        head.tobytes()
    )
    if result < 0:
        found, needed = {
            Reason.MAGIC: (magic, MAGIC),
            Reason.VERSION: (version, VERSION),
            Reason.FLAGS: (flags, 0),
            Reason.RESERVED: (reserved, 0),
            Reason.LENGTH: (length, f"at most {min(capacity, PAYLOAD_LIMIT)}"),
            Reason.INCARNATION: (to, incarnation),
            Reason.SENDER: (origin, sender),
            Reason.SEQUENCE: (number, sequence),
            Reason.ATTEMPT: (attempt, f"below {ATTEMPT_LIMIT}"),
            Reason.CHECKSUM: (seal, "that of these bytes"),
        }[Reason(result)]
        raise FrameInvalid(Reason(result), f"{found} found, {needed} needed.")
    header = Header(
        incarnation=to, sequence=number, attempt=attempt, length=length, remaining_ns=remaining_ns, sender=origin
    )
    return Frame(header=header, payload=payload[:result].tobytes())


def load_signals(memory: NDArray[np.uint8], offset: int, count: int, stride_bytes: int = 8) -> NDArray[np.uint64]:
    """Read `count` signal words of a window, the first at `offset`: u64[count].

    Raises:
        ValueError: a word would lie outside the window or off 8 bytes.
    """
    check_words(len(memory), offset, count, stride_bytes)
    return np.ndarray((count,), np.uint64, memory.data, offset, (stride_bytes,)).copy()
