"""Descriptors: every field comes back, and nothing but a descriptor is taken for one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.descriptor import Descriptor, Transport, decode
from p2p.endpoint import DescriptorInvalid

DESCRIPTORS = st.builds(
    Descriptor,
    transport=st.sampled_from(Transport),
    incarnation=st.integers(0, 2**64 - 1),
    nbytes=st.integers(1, 1 << 40),
    address=st.binary(min_size=1, max_size=107),
    name=st.text(max_size=60),
    token=st.binary(min_size=32, max_size=32),
)


@given(DESCRIPTORS)
def test_what_goes_in_comes_out(descriptor: Descriptor) -> None:
    assert decode(descriptor.encode()) == descriptor


@given(st.binary(max_size=500))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(DescriptorInvalid):
        decode(raw)


@given(DESCRIPTORS, st.data())
def test_damage_is_refused(descriptor: Descriptor, data: st.DataObject) -> None:
    raw = bytearray(descriptor.encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DescriptorInvalid):
        decode(bytes(raw))


@given(DESCRIPTORS, st.integers(1, 400))
def test_truncation_and_excess_are_refused(descriptor: Descriptor, count: int) -> None:
    raw = descriptor.encode()
    for damaged in (raw[:-count], raw + bytes(count)):
        with pytest.raises(DescriptorInvalid):
            decode(damaged)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"nbytes": 0}, "a window of 0 bytes; 1 to"),
        ({"address": b""}, "an address of 0 bytes; 1 to 107"),
        ({"address": b"x" * 108}, "an address of 108 bytes"),
        ({"name": "x" * 256}, "a name of 256 bytes; at most 255"),
        ({"token": b"short"}, "the token has 5 bytes; it needs 32"),
    ],
)
def test_fields_out_of_bounds_are_refused_before_they_travel(change: dict[str, object], message: str) -> None:
    fields = {
        "transport": Transport.SHM,
        "incarnation": 1,
        "nbytes": 1,
        "address": b"a",
        "name": "",
        "token": bytes(32),
    }
    with pytest.raises(ValueError, match=message):
        Descriptor(**(fields | change)).encode()  # type: ignore[arg-type]


def test_only_nixl_addresses_may_be_long() -> None:
    fields = {"incarnation": 1, "nbytes": 1, "name": "n", "token": bytes(32)}
    for transport in Transport:
        limit = 16384 if transport is Transport.NIXL else 107
        longest = Descriptor(transport=transport, address=b"a" * limit, **fields)  # type: ignore[arg-type]
        assert decode(longest.encode()) == longest
        with pytest.raises(ValueError, match=f"an address of {limit + 1} bytes; 1 to {limit} needed"):
            replace(longest, address=b"a" * (limit + 1)).encode()


def test_the_token_does_not_show() -> None:
    token = bytes(range(32))
    shown = repr(Descriptor(transport=Transport.SHM, incarnation=1, nbytes=1, address=b"a", name="n", token=token))
    assert "token" not in shown and repr(token) not in shown
