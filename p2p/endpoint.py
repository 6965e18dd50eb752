"""What every transport offers: endpoints export windows, connect to those of others, put bytes and signal.

A window is memory which one peer, and only that one, writes from afar. Its descriptor is what that peer needs
to find it: plain bytes, to be carried by whatever channel the two already have.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Final, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

CONNECT_S: Final = 5.0
NAME_LIMIT: Final = 255
LANES_LIMIT: Final = 63  # native/doorbell.h


class P2PError(Exception):
    """Anything that this package refuses or cannot do; the text says what was found and what to do."""


class DescriptorInvalid(P2PError, ValueError):
    """Bytes that are no descriptor, or one of another transport or version."""


class EndpointClosed(P2PError):
    """The endpoint, window or peer was closed by its own side."""


class ConnectRefused(P2PError):
    """The other endpoint is not there, did not answer in time, or refuses this descriptor."""


class PeerGone(P2PError):
    """The other side ended or disconnected; nothing more will come from it."""


def check_endpoint(name: str, incarnation: int, lanes: int) -> None:
    """Refuse what no endpoint can be made of.

    Raises:
        ValueError: the name, the incarnation or the number of doorbells is out of bounds.
    """
    if not 1 <= len(name.encode()) <= NAME_LIMIT or not 0 <= incarnation < 1 << 64:
        raise ValueError(
            f"name {name!r}, incarnation {incarnation}: 1 to {NAME_LIMIT} bytes and a u64 needed."
        )
    if not 1 <= lanes <= LANES_LIMIT:
        raise ValueError(f"{lanes} lanes asked for; a doorbell page has room for 1 to {LANES_LIMIT}.")


class Status(Enum):
    """Whether the other side of a window can still write, or still be written to."""

    ALIVE = "alive"
    GONE = "gone"


class Window(Protocol):
    """Exported memory: one peer writes, this process reads."""

    @property
    def address(self) -> int:
        """Where the memory starts in this process."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def incarnation(self) -> int:
        """Of the owner, as it stands in frames meant for this window."""
        ...

    @property
    def descriptor(self) -> bytes: ...

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The memory as u8[nbytes]. Views keep it mapped."""
        ...

    @property
    def peer_incarnation(self) -> int:
        """Of the peer that connected; 0 before."""
        ...

    @property
    def liveness_fd(self) -> int:
        """A file descriptor that hangs up (POLLRDHUP) when the peer cannot write any more; -1 where none."""
        ...

    def poll(self, offset: int, count: int, stride_bytes: int = 8) -> NDArray[np.uint64]:
        """Read `count` signal words, the first at `offset`, each an acquire: u64[count]."""
        ...

    def close(self) -> None:
        """Withdraw the window. While its peer may still write it stays mapped, retired."""
        ...


class Peer(Protocol):
    """Another endpoint's window, as this process writes it."""

    @property
    def address(self) -> int:
        """Where to write: the window itself, or an image whose ranges the transport carries over."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def incarnation(self) -> int:
        """Of the window's owner."""
        ...

    @property
    def page_address(self) -> int:
        """The owner's doorbell page; 0 where the transport has none."""
        ...

    @property
    def liveness_fd(self) -> int:
        """A file descriptor that hangs up (POLLRDHUP) when the owner is gone; -1 where none."""
        ...


@runtime_checkable
class Watched(Protocol):
    """A peer whose transport watches the way there."""

    @property
    def slow(self) -> bool:
        """Whether writes take far longer to get there than they used to."""
        ...


W = TypeVar("W", bound=Window)
P = TypeVar("P", bound=Peer)


class Endpoint(Protocol[W, P]):
    """One process's end of a transport. Every method but `close` raises EndpointClosed after `close`."""

    # Whether a peer's `page_address` is the peer's own page: ringing a lane there wakes that very lane.
    shares_doorbells: ClassVar[bool]

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def page_address(self) -> int:
        """This endpoint's own doorbell page; 0 where the transport has none."""
        ...

    def export_window(self, nbytes: int, incarnation: int | None = None) -> W:
        """Offer `nbytes` of zeroed memory to one peer; `incarnation` is the endpoint's own unless given."""
        ...

    def connect(self, descriptor: bytes, timeout_s: float = CONNECT_S) -> P:
        """Take up another endpoint's offer.

        Raises:
            DescriptorInvalid: these bytes are no descriptor of this transport.
            ConnectRefused: the owner is gone, does not answer in time, or refuses.
        """
        ...

    def put(self, peer: P, offset: int, source: bytes | bytearray | memoryview | NDArray[np.uint8]) -> None:
        """Write bytes into the peer's window.

        Raises:
            ValueError: they would not fit.
            EndpointClosed: this side disconnected.
            PeerGone: the transport can see that the owner ended.
        """
        ...

    def signal(self, peer: P, offset: int, value: int) -> None:
        """Store a signal word (8-aligned), a release: whoever sees it sees every earlier put as well."""
        ...

    def progress(self) -> None:
        """Let the transport do its chores; cheap, to be called in every wait loop."""
        ...

    def status(self, link: W | P) -> Status:
        """Whether the other side is there. A window whose peer has not connected yet is ALIVE."""
        ...

    def disconnect(self, peer: P) -> None:
        """Give up a peer: no byte is written there after this returns. Idempotent."""
        ...

    def close(self) -> None:
        """Leave nothing behind: windows, peers, threads, descriptors. Idempotent."""
        ...
