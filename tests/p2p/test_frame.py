"""Frames: what a reader accepts, and that the native codec and the reference are one."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2p import native
from p2p.frame import HEADER_BYTES, PAYLOAD_OFFSET, SIGNAL_BYTES, FrameInvalid, Header, Reason, load_signals, open_frame
from p2p.frame import seal_frame as native_seal
from tests.p2p import frame_reference as reference
from tests.p2p.frame_reference import checksum, encode_header, seal_frame

CAPACITY = 3000
OWNER, SENDER, SEQUENCE = 0xA1, 0xB2, 77
U64 = st.integers(0, 2**64 - 1)


def make_slot(payload: bytes, **changes: int) -> np.ndarray:
    """A slot with a sealed frame, 64-aligned, in memory that both codecs read."""
    fields = {"incarnation": OWNER, "sequence": SEQUENCE, "sender": SENDER, "length": len(payload)} | changes
    slot = np.zeros(PAYLOAD_OFFSET + CAPACITY, dtype=np.uint8)
    seal_frame(slot.data, Header(**fields), payload)
    return slot


def native_open(slot: np.ndarray, capacity: int = CAPACITY, owner=OWNER, sender=SENDER, sequence=SEQUENCE):
    """(result, header bytes, payload) of p2p_frame_open."""
    header, payload = np.zeros(HEADER_BYTES, np.uint8), np.zeros(max(capacity, 1), np.uint8)
    arguments = (slot.ctypes.data, capacity, owner, sender, sequence, header.ctypes.data, payload.ctypes.data)
    result = native.load().p2p_frame_open(*arguments)
    return result, header.tobytes(), payload[: max(result, 0)].tobytes()


def reference_open(slot: np.ndarray, capacity: int = CAPACITY, owner=OWNER, sender=SENDER, sequence=SEQUENCE):
    """The reference's verdict in the native form."""
    try:
        frame = reference.open_frame(slot.data, capacity, owner, sender, sequence)
    except FrameInvalid as refusal:
        return int(refusal.reason), b""
    return frame.header.length, frame.payload


@pytest.mark.parametrize("length", [0, 1, 63, 1024, 1337])
def test_every_flipped_byte_is_refused_with_a_reason(length: int) -> None:
    slot = make_slot(random.Random(length).randbytes(length), attempt=3, remaining_ns=10**9)
    assert native_open(slot)[0] == length
    for position in range(SIGNAL_BYTES, PAYLOAD_OFFSET + length):
        for flip in (0x01, 0x80, 0xFF):
            slot[position] ^= flip
            found, _ = reference_open(slot)
            assert found == native_open(slot)[0], f"byte {position} flipped by {flip:#x}"
            assert found in iter(Reason), f"byte {position} flipped by {flip:#x} was accepted"
            slot[position] ^= flip
    assert native_open(slot)[0] == length


REFUSALS = {
    Reason.INCARNATION: {"incarnation": OWNER + 1},
    Reason.SENDER: {"sender": SENDER + 1},
    Reason.SEQUENCE: {"sequence": SEQUENCE - 1},
    Reason.ATTEMPT: {"attempt": 1 << 16},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_well_sealed_frame_that_is_not_the_one_awaited_is_refused_by_its_own_code(reason: Reason) -> None:
    # Only that check stands between this frame and its acceptance: its checksum is right.
    slot = make_slot(b"late", **REFUSALS[reason])
    assert native_open(slot)[0] == reason
    with pytest.raises(FrameInvalid, match=rf"^{reason.name.lower()}: \d+ found, .*\d+ needed") as refusal:
        open_frame(slot.data, CAPACITY, OWNER, SENDER, SEQUENCE)
    assert refusal.value.reason is reason


RESEALED = {
    Reason.MAGIC: (0, "<I", 0x46503251),
    Reason.VERSION: (4, "<H", 2),
    Reason.FLAGS: (6, "<H", 1),
    Reason.RESERVED: (48, "<Q", 1),
    Reason.LENGTH: (28, "<I", CAPACITY + 1),
}


@pytest.mark.parametrize("reason", RESEALED)
def test_a_well_sealed_frame_of_another_form_is_refused_by_its_own_code(reason: Reason) -> None:
    offset, form, value = RESEALED[reason]
    slot = make_slot(b"odd")
    sealed = bytearray(slot[SIGNAL_BYTES : SIGNAL_BYTES + 56].tobytes())
    struct.pack_into(form, sealed, offset, value)
    slot[SIGNAL_BYTES : SIGNAL_BYTES + 56] = np.frombuffer(bytes(sealed), np.uint8)
    slot[SIGNAL_BYTES + 56 : PAYLOAD_OFFSET] = np.frombuffer(checksum(sealed, b"odd").to_bytes(8, "little"), np.uint8)
    assert native_open(slot)[0] == reason == reference_open(slot)[0]


def test_a_torn_payload_is_refused_by_the_checksum_alone() -> None:
    slot = make_slot(bytes(range(256)))
    slot[PAYLOAD_OFFSET + 100 : PAYLOAD_OFFSET + 164] = 0
    assert native_open(slot)[0] == Reason.CHECKSUM == reference_open(slot)[0]


def test_moved_blocks_and_words_are_refused() -> None:
    payload = random.Random(5).randbytes(2048)
    for width in (4, 64, 1024):
        slot = make_slot(payload)
        swapped = payload[width : 2 * width] + payload[:width] + payload[2 * width :]
        slot[PAYLOAD_OFFSET : PAYLOAD_OFFSET + 2048] = np.frombuffer(swapped, np.uint8)
        assert native_open(slot)[0] == Reason.CHECKSUM, f"two runs of {width} bytes changed places"


def test_a_length_beyond_the_memory_is_never_copied() -> None:
    slot = make_slot(b"x" * 2000)
    result, _, _ = native_open(slot, capacity=1999)
    assert result == Reason.LENGTH
    assert reference_open(slot[: PAYLOAD_OFFSET + 1999])[0] == Reason.LENGTH


@settings(max_examples=300, deadline=None)
@given(
    payload=st.binary(max_size=CAPACITY),
    incarnation=U64,
    sequence=U64,
    sender=U64,
    remaining_ns=U64,
    attempt=st.integers(0, 2**16 - 1),
)
@example(payload=b"", incarnation=0, sequence=0, sender=0, remaining_ns=0, attempt=0)
@example(payload=b"\xff" * 2049, incarnation=2**64 - 1, sequence=2**64 - 1, sender=1, remaining_ns=0, attempt=0)
def test_native_and_reference_agree_bit_for_bit(payload: bytes, **fields: int) -> None:
    header = Header(length=len(payload), **fields)
    # What lies behind the payload is not zero: it must not count.
    by_reference = np.full(PAYLOAD_OFFSET + CAPACITY, 0xEE, np.uint8)
    seal_frame(by_reference.data, header, payload)
    by_native = np.full_like(by_reference, 0xEE)
    by_native[PAYLOAD_OFFSET : PAYLOAD_OFFSET + len(payload)] = np.frombuffer(payload, np.uint8)
    unsealed = struct.pack(
        "<IHHQQIIQQQQ",
        *(1, 1, 1, header.incarnation, header.sequence, header.attempt, header.length),
        *(header.remaining_ns, header.sender, 1, 1),
    )
    native.load().p2p_frame_seal(by_native.ctypes.data, unsealed)
    assert by_native.tobytes() == by_reference.tobytes()
    by_native[:PAYLOAD_OFFSET] = 0xEE
    native_seal(by_native.data, header, payload)
    assert by_native.tobytes() == by_reference.tobytes()
    result, raw, copied = native_open(by_native, CAPACITY, header.incarnation, header.sender, header.sequence)
    assert (result, copied) == (len(payload), payload)
    assert raw == encode_header(header, payload)
    frame = open_frame(by_native.data, CAPACITY, header.incarnation, header.sender, header.sequence)
    assert frame.header == header and frame.payload == payload


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(min_size=PAYLOAD_OFFSET, max_size=400), capacity=st.integers(0, 272))
def test_both_codecs_give_the_same_verdict_on_any_bytes(raw: bytes, capacity: int) -> None:
    slot = np.zeros(PAYLOAD_OFFSET + 272, np.uint8)
    slot[: len(raw)] = np.frombuffer(raw, np.uint8)
    result, _, payload = native_open(slot, capacity)
    assert (result, payload) == reference_open(slot, capacity)


def test_the_keys_of_the_checksum_are_odd_and_all_different() -> None:
    zeros = bytes(56)
    unit = [checksum(zeros, bytes(4 * i) + b"\x01\0\0\0" + bytes(1020 - 4 * i)) for i in range(256)]
    assert len(set(unit)) == 256


def test_signals_are_the_first_word_of_a_slot() -> None:
    slot = np.zeros(256, np.uint8)
    library = native.load()
    slot[:8] = np.array([2**64 - 3], np.uint64).view(np.uint8)
    assert library.p2p_signal_load(slot.ctypes.data) == 2**64 - 3
    library.p2p_signal_store(slot.ctypes.data + 128, 12)
    assert slot[128:136].view(np.uint64)[0] == 12
    words = np.zeros(2, np.uint64)
    library.p2p_signals_load(slot.ctypes.data, 128, 2, words.ctypes.data)
    assert words.tolist() == load_signals(slot, 0, 2, 128).tolist() == [2**64 - 3, 12]


@pytest.mark.parametrize(
    "offset, count, stride", [(-8, 1, 8), (4, 1, 8), (0, 0, 8), (0, 2, 4), (8, 2, 128), (136, 1, 8)]
)
def test_words_outside_the_window_are_refused(offset: int, count: int, stride: int) -> None:
    with pytest.raises(ValueError, match="not 8-aligned in 136 bytes"):
        load_signals(np.zeros(136, np.uint8), offset, count, stride)


def test_a_payload_that_its_header_or_slot_does_not_fit_is_refused() -> None:
    header = Header(incarnation=1, sequence=1, sender=1, length=5)
    with pytest.raises(ValueError, match="says 5 bytes, the payload has 4"):
        native_seal(memoryview(bytearray(200)), header, b"four")
    with pytest.raises(ValueError, match="the slot has 130 bytes, the frame needs 133"):
        native_seal(memoryview(bytearray(130)), header, b"fiver")
    with pytest.raises(FrameInvalid, match="length: 100 bytes found, 128 needed"):
        open_frame(bytes(100), CAPACITY, OWNER, SENDER, SEQUENCE)
