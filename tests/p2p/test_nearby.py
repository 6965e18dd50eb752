"""Two transports behind one endpoint: each pair uses the one it began with, and both ring the same doorbell."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import pytest

from p2p import native, nixl_native
from p2p.descriptor import Transport, decode
from p2p.endpoint import EndpointClosed, P2PError, Status
from p2p.local import LocalPeer, ShmEndpoint
from p2p.transport import TransportChoice

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec(nixl_native.PACKAGE) is None, reason="needs package nixl-cu13, found none"
    ),
    pytest.mark.alone,
]


@pytest.fixture
def ends() -> Iterator[tuple[Any, Any]]:
    opener = TransportChoice.parse("shm+nixl:lo").opener()
    owner, writer = opener("owner", 7, 2), opener("writer", 8, 1)
    yield owner, writer
    writer.close()
    owner.close()


@pytest.mark.parametrize("is_near", [True, False])
def test_what_comes_by_either_way_is_there_and_rings_the_one_page(ends: tuple[Any, Any], is_near: bool) -> None:
    owner, writer = ends
    library = native.load()
    window = (owner.near if is_near else owner).export_window(8192)
    assert decode(window.descriptor).transport is (Transport.SHM if is_near else Transport.NIXL)
    peer = writer.connect(window.descriptor)
    assert isinstance(peer, LocalPeer) is is_near is peer.shares_doorbells
    assert writer.toward(peer) is (writer.near if is_near else writer.far)
    rung = library.p2p_bell_read(owner.page_address, 0)
    writer.put(peer, 64, b"rows")
    writer.signal(peer, 0, 3)
    if is_near:
        # Native code rings after a signal; shared memory carries the ring itself.
        library.p2p_bell_ring(peer.page_address, 0)
    end_s = time.monotonic() + 60
    while window.poll(0, 1)[0] != 3 or library.p2p_bell_read(owner.page_address, 0) == rung:
        assert time.monotonic() < end_s, "nothing came, or nobody was woken"
        owner.progress()
        writer.progress()
    assert window.memory[64:68].tobytes() == b"rows"
    assert writer.status(peer) is owner.status(window) is Status.ALIVE
    assert bool(writer.rail_counts(peer)) is not is_near
    writer.disconnect(peer)
    while owner.status(window) is not Status.GONE:
        assert time.monotonic() < end_s, "it left unseen"
        owner.progress()


def test_closed_it_is_closed_both_ways(ends: tuple[Any, Any]) -> None:
    owner, _ = ends
    owner.close()
    for endpoint in (owner, owner.near):
        with pytest.raises(EndpointClosed):
            endpoint.export_window(4096)
    with pytest.raises(EndpointClosed):
        _ = owner.page_address


def test_what_the_command_line_may_say() -> None:
    both = TransportChoice.parse("shm+nixl:eth0,eth1")
    assert (both.near, both.named_rails, both.crosses_network) == (True, ("eth0", "eth1"), True)
    assert not TransportChoice.parse("nixl").near
    assert not TransportChoice.parse("shm+nixl:lo").crosses_network
    for text in ("shm+nixl@cuda:0", "shm+shm", "shm+cuda", "nixl+shm"):
        with pytest.raises(ValueError, match="is not known"):
            TransportChoice.parse(text)


def test_without_the_far_transport_nothing_of_the_near_one_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, close = list[str](), ShmEndpoint.close

    def noted(endpoint: ShmEndpoint) -> None:
        closed.append(endpoint.name)
        close(endpoint)

    monkeypatch.setattr(ShmEndpoint, "close", noted)
    with pytest.raises(P2PError, match="no device of this machine"):
        TransportChoice.parse("shm+nixl:nowhere0").opener()("owner", 7, 1)
    assert closed == ["owner"]
