"""Frames in pure Python and numpy: the judge of p2p/native/frame.cpp, which agrees with it bit for bit.

Slot::

    offset  size  what
         0    64  signal line: the first u64 is the signal word, the frame's sequence; the rest is zero
        64    64  header
       128     -  payload, up to the window's payload capacity

Header, little-endian::

    offset  size  field
         0     4  magic "P2PF"
         4     2  version (1)
         6     2  flags (0)
         8     8  incarnation of the window's owner: the reader's own
        16     8  sequence, never used twice in one window
        24     4  attempt, below 65,536
        28     4  length of the payload in bytes
        32     8  remaining_ns until the sender's deadline: hosts share no clock
        40     8  sender: the writer's incarnation
        48     8  reserved (0)
        56     8  checksum over the 56 bytes before it and the payload

Checksum: w[i] are little-endian u32 words, the last padded with zeros; K[i] 256 odd 32-bit keys; P odd::

    block(w) = sum of w[i] * K[i] mod 2^64, over at most 256 words
    h = block(header);  for each 1,024-byte block of payload: h = h * P + block(payload block)
    checksum = mix(h), a bijection

A change within one word moves h by (less than 2^32) * K * P^n, which is never 0 mod 2^64: every flip of a
byte is seen, always. Other tears pass with odds of about 2^-32 or less. It guards against accidents, not
forgers.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from p2p.frame import (
    ATTEMPT_LIMIT,
    HEADER_BYTES,
    MAGIC,
    PAYLOAD_LIMIT,
    PAYLOAD_OFFSET,
    SIGNAL_BYTES,
    VERSION,
    Frame,
    FrameInvalid,
    Header,
    Reason,
)

_HEADER: Final = struct.Struct("<IHHQQIIQQQQ")
_SEALED: Final = struct.Struct("<IHHQQIIQQQ")
_CHECKSUM: Final = struct.Struct("<Q")
_BLOCK_WORDS: Final = 256
_BLOCK_BYTES: Final = 4 * _BLOCK_WORDS
_BLOCK_FACTOR: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def _make_keys() -> NDArray[np.uint64]:
    state, keys = 0x70327066, []
    for _ in range(_BLOCK_WORDS):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        keys.append(((z ^ (z >> 31)) >> 32) | 1)
    return np.array(keys, dtype=np.uint64)


_KEYS: Final = _make_keys()


def _blocks(data: bytes | memoryview) -> NDArray[np.uint64]:
    """Sum of each 1,024-byte block, the last padded with zeros: u64[blocks]."""
    words = np.zeros(-(-len(data) // _BLOCK_BYTES) * _BLOCK_WORDS, dtype="<u4")
    words.view(np.uint8)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    products = words.reshape(-1, _BLOCK_WORDS).astype(np.uint64) * _KEYS
    return products.sum(axis=1, dtype=np.uint64)


def checksum(sealed: bytes | memoryview, payload: bytes | memoryview) -> int:
    """The checksum of a frame: `sealed` are the header's first 56 bytes."""
    sums = np.concatenate((_blocks(sealed), _blocks(payload)))
    powers = np.full(len(sums), _BLOCK_FACTOR, dtype=np.uint64)
    powers[0] = 1
    powers = np.multiply.accumulate(powers)[::-1]
    h = int((sums * powers).sum(dtype=np.uint64))
    h = ((h ^ (h >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    h = ((h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
    return h ^ (h >> 33)


def encode_header(header: Header, payload: bytes | memoryview) -> bytes:
    """The 64 sealed header bytes of a frame.

    Raises:
        ValueError: `header.length` is not the payload's.
        struct.error: a field does not fit its width.
    """
    if header.length != len(payload):
        raise ValueError(f"header says {header.length} bytes, the payload has {len(payload)}; they must agree.")
    sealed = _SEALED.pack(
        MAGIC,
        VERSION,
        0,
        header.incarnation,
        header.sequence,
        header.attempt,
        header.length,
        header.remaining_ns,
        header.sender,
        0,
    )
    return sealed + _CHECKSUM.pack(checksum(sealed, payload))


def seal_frame(slot: memoryview, header: Header, payload: bytes | memoryview) -> None:
    """Write payload and header into a slot (writable, from its signal line on), but not the signal.

    Raises:
        ValueError: the slot is too small.
    """
    end = PAYLOAD_OFFSET + len(payload)
    if len(slot) < end:
        raise ValueError(f"the slot has {len(slot)} bytes, the frame needs {end}; send less.")
    slot[PAYLOAD_OFFSET:end] = payload
    slot[SIGNAL_BYTES:PAYLOAD_OFFSET] = encode_header(header, payload)


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
    head = bytes(slot[SIGNAL_BYTES:PAYLOAD_OFFSET])
    header = _check_header(head, min(capacity, len(slot) - PAYLOAD_OFFSET), incarnation, sender, sequence)
    payload = bytes(slot[PAYLOAD_OFFSET : PAYLOAD_OFFSET + header.length])
    (found,) = _CHECKSUM.unpack_from(head, _SEALED.size)
    needed = checksum(head[: _SEALED.size], payload)
    if found != needed:
        raise FrameInvalid(Reason.CHECKSUM, f"{found:#018x} found, the bytes give {needed:#018x}.")
    return Frame(header=header, payload=payload)


def _check_header(head: bytes, capacity: int, incarnation: int, sender: int, sequence: int) -> Header:
    if len(head) != HEADER_BYTES:
        raise FrameInvalid(Reason.LENGTH, f"{len(head)} header bytes found, {HEADER_BYTES} needed.")
    magic, version, flags, to, number, attempt, length, remaining_ns, origin, zero, _ = _HEADER.unpack(head)
    for reason, found, needed in (
        (Reason.MAGIC, magic, MAGIC),
        (Reason.VERSION, version, VERSION),
        (Reason.FLAGS, flags, 0),
        (Reason.RESERVED, zero, 0),
    ):
        if found != needed:
            raise FrameInvalid(reason, f"{found:#x} found, {needed:#x} needed.")
    if length > min(capacity, PAYLOAD_LIMIT):
        raise FrameInvalid(Reason.LENGTH, f"{length} bytes found, the slot holds {capacity}.")
    for reason, found, needed in (
        (Reason.INCARNATION, to, incarnation),
        (Reason.SENDER, origin, sender),
        (Reason.SEQUENCE, number, sequence),
    ):
        if found != needed:
            raise FrameInvalid(reason, f"{found} found, {needed} needed.")
    if attempt >= ATTEMPT_LIMIT:
        raise FrameInvalid(Reason.ATTEMPT, f"{attempt} found, below {ATTEMPT_LIMIT} needed.")
    return Header(
        incarnation=to,
        sequence=number,
        attempt=attempt,
        length=length,
        remaining_ns=remaining_ns,
        sender=origin,
    )
