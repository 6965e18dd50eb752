"""Two transports behind one endpoint: shared memory to peers on this host, another to all others.

Both ring one doorbell page, so that whoever waits for requests or replies waits once. Which of the two a pair of
processes uses is settled when they connect: the offer says it, and the answer goes the same way.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2p.descriptor import Transport, decode
from p2p.endpoint import CONNECT_S, Endpoint, Peer, Status, Window
from p2p.local import LocalPeer, LocalWindow


class NearbyEndpoint:
    """One process's end of both: an `Endpoint`, of use from several threads, as they are.

    What is done with a window or a peer its own transport does.

    Args:
        near: To peers on this host.
        far: To all others; it rings the page of `near`, and its name and incarnation are the same.
    """

    def __init__(self, near: Endpoint[Any, Any], far: Endpoint[Any, Any]) -> None:
        self.near, self.far = near, far
        self.name, self.incarnation = near.name, near.incarnation
        self.rails: tuple[str, ...] = getattr(far, "rails", ())

    @property
    def page_address(self) -> int:
        return self.near.page_address

    def toward(self, link: Window | Peer) -> Endpoint[Any, Any]:
        """The transport of a window or peer; what goes with it comes from there."""
        return self.near if isinstance(link, LocalWindow | LocalPeer) else self.far

    def export_window(self, nbytes: int, incarnation: int | None = None) -> Window:
        """A window for a peer of which nothing is known: on any host."""
        return self.far.export_window(nbytes, incarnation)

    def connect(self, descriptor: bytes, timeout_s: float = CONNECT_S) -> Peer:
        """Take up an offer, by the transport that it is of. Raises as that does."""
        is_near = decode(descriptor).transport is Transport.SHM
        return (self.near if is_near else self.far).connect(descriptor, timeout_s)

    def put(self, peer: Peer, offset: int, source: bytes | bytearray | memoryview | NDArray[np.uint8]) -> None:
        self.toward(peer).put(peer, offset, source)

    def signal(self, peer: Peer, offset: int, value: int) -> None:
        self.toward(peer).signal(peer, offset, value)

    def status(self, link: Window | Peer) -> Status:
        return self.toward(link).status(link)

    def disconnect(self, peer: Peer) -> None:
        self.toward(peer).disconnect(peer)

    def progress(self) -> None:
        self.near.progress()
        self.far.progress()

    def rail_counts(self, peer: Peer) -> tuple[Any, ...]:
        """As of the far transport; a peer on this host has no rails."""
        counts: Any = getattr(self.toward(peer), "rail_counts", None)
        return counts(peer) if counts else ()

    def close(self) -> None:
        """Close both; idempotent. The far one first: it rings the other's page."""
        with ExitStack() as every:
            every.callback(self.near.close)
            every.callback(self.far.close)
