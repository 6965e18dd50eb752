"""Promises of the experts layer's messages, by the numpy codec (tests/fuzz: the native one agrees)."""

from __future__ import annotations

import numpy as np
import pytest

from experts.model import Dtype
from experts.wire import HEADER_BYTES, Status, WireShape, native_header
from p2p import build
from tests.experts.steps import shape_of
from tests.experts.wire_codec import (
    PAIR,
    Reply,
    Request,
    WireInvalid,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)

WIRE = WireShape(shape=shape_of(), dtype=Dtype.BFLOAT16, model_hash=0xFEDC_BA98_7654_3210)
CAPACITY = 1 << 16
# Another layer or reply lane is a message as good as this one: the frame's checksum guards them.
FREE = (24, 44, 45)


def request_of(seed: int) -> Request:
    rng = np.random.default_rng(seed)
    pairs = np.zeros(6, PAIR)
    pairs["row"], pairs["expert"], pairs["k_slot"] = (
        [0, 1, 2, 0, 1, 2],
        [1, 1, 3, 4, 6, 7],
        [0, 0, 0, 1, 1, 1],
    )
    rows = rng.integers(0, 1 << 16, (3, WIRE.shape.hidden), np.uint16)
    return Request(layer=1, rows=rows, pairs=pairs, reply_lane=3)


def test_a_request_and_its_reply_come_back_as_they_went() -> None:
    request = request_of(1)
    back = decode_request(WIRE, encode_request(WIRE, request), CAPACITY)
    assert (back.layer, back.reply_lane) == (1, 3)
    assert back.rows.tobytes() == request.rows.tobytes() and back.pairs.tobytes() == request.pairs.tobytes()
    rows = np.random.default_rng(2).standard_normal((6, WIRE.shape.hidden)).astype(np.float32)
    reply = decode_reply(WIRE, encode_reply(WIRE, request, Reply(status=Status.OK, rows=rows, service_ns=9)), request)
    assert (reply.status, reply.service_ns) == (Status.OK, 9)
    assert reply.rows.tobytes() == rows.tobytes()


def test_every_flipped_byte_of_a_requests_header_and_list_is_refused() -> None:
    good = encode_request(WIRE, request_of(3))
    for where in range(HEADER_BYTES + 6 * PAIR.itemsize):
        if where in FREE:
            continue
        bad = bytearray(good)
        bad[where] ^= 1 << (where % 8)
        with pytest.raises(WireInvalid):
            decode_request(WIRE, bytes(bad), CAPACITY)


def test_a_reply_to_another_request_is_refused() -> None:
    mine, other = request_of(4), request_of(4)
    swapped = other.pairs.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    other = Request(layer=other.layer, rows=other.rows, pairs=swapped)
    rows = np.zeros((6, WIRE.shape.hidden), np.float32)
    payload = encode_reply(WIRE, other, Reply(status=Status.OK, rows=rows))
    with pytest.raises(WireInvalid, match="routing_hash"):
        decode_reply(WIRE, payload, mine)


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, 200])
def test_a_message_cut_short_is_refused(cut: int) -> None:
    request = request_of(5)
    with pytest.raises(WireInvalid):
        decode_request(WIRE, encode_request(WIRE, request)[:cut], CAPACITY)
    rows = np.zeros((6, WIRE.shape.hidden), np.float32)
    with pytest.raises(WireInvalid):
        decode_reply(WIRE, encode_reply(WIRE, request, Reply(status=Status.OK, rows=rows))[:cut], request)


def test_a_request_whose_reply_would_not_fit_is_refused() -> None:
    with pytest.raises(WireInvalid, match="reply bytes"):
        decode_request(WIRE, encode_request(WIRE, request_of(6)), 512)


def test_native_code_is_built_from_the_same_description() -> None:
    assert (build.ROOT / "experts/native/build/wire_format.h").read_text() == native_header()
