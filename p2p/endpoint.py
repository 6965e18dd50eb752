"""What every transport offers: endpoints export windows, connect to those of others, put bytes and signal.

A window is memory which one peer, and only that one, writes from afar. Its descriptor is what that peer needs
to find it: plain bytes, to be carried by whatever channel the two already have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from p2p.descriptor import Descriptor
    from p2p.memory import Memory

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
        raise ValueError(f"name {name!r}, incarnation {incarnation}: 1 to {NAME_LIMIT} bytes and a u64 needed.")
    if not 1 <= lanes <= LANES_LIMIT:
        raise ValueError(f"{lanes} lanes asked for; a doorbell page has room for 1 to {LANES_LIMIT}.")


class Status(Enum):
    """Whether the other side of a window can still write, or still be written to."""

    ALIVE = "alive"
    GONE = "gone"


def check_words(nbytes: int, offset: int, count: int = 1, stride_bytes: int = 8) -> None:
    """Refuse words that do not lie on 8 bytes inside `nbytes` of memory.

    Raises:
        ValueError: they do not.
    """
    end = offset + (count - 1) * stride_bytes + 8
    if offset < 0 or count < 1 or stride_bytes < 8 or end > nbytes or offset % 8 or stride_bytes % 8:
        raise ValueError(f"{count} words {stride_bytes} apart at {offset}: not 8-aligned in {nbytes} bytes.")


class _Shared(ABC):
    """A window's memory, as either side has it."""

    _GIVEN_UP: ClassVar[str]  # what is said once this side has given it up; {}: the owner's name

    def __init__(self, offer: Descriptor, memory: Memory) -> None:
        self._offer = offer
        self._memory: Memory | None = memory

    @property
    def nbytes(self) -> int:
        return self._offer.nbytes

    @property
    def incarnation(self) -> int:
        """Of the owner, as it stands in frames meant for this window."""
        return self._offer.incarnation

    @property
    @abstractmethod
    def liveness_fd(self) -> int:
        """A file descriptor that hangs up (POLLRDHUP) when the other side is gone: nothing is written there, or nothing
        can be written, any more; -1 where none."""

    def _require_open(self) -> Memory:
        if self._memory is None:
            raise EndpointClosed(self._GIVEN_UP.format(self._offer.name))
        return self._memory


class Window(_Shared):
    """Exported memory: one peer writes, this process reads."""

    _GIVEN_UP = "this window was closed; export a new one."

    @property
    def address(self) -> int:
        """Where the memory starts in this process: for kernels where it lies on a GPU, which the CPU cannot read."""
        return self._require_open().address

    @property
    def descriptor(self) -> bytes:
        return self._offer.encode()

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The memory as u8[nbytes]. Views keep it mapped; of what lies on a GPU it is a copy as it is now."""
        return self._require_open().read(0, self.nbytes)

    @property
    @abstractmethod
    def peer_incarnation(self) -> int:
        """Of the peer that connected; 0 before."""

    def poll(self, offset: int, count: int, stride_bytes: int = 8) -> NDArray[np.uint64]:
        """Read `count` signal words, the first at `offset`, each an acquire: u64[count].

        Raises:
            ValueError: a word would lie outside the window or off 8 bytes.
        """
        memory = self._require_open()
        check_words(self.nbytes, offset, count, stride_bytes)
        return memory.poll(offset, count, stride_bytes)

    @abstractmethod
    def close(self) -> None:
        """Withdraw the window. While its peer may still write it stays mapped, retired."""


class Peer(_Shared):
    """Another endpoint's window, as this process writes it."""

    _GIVEN_UP = "this side disconnected from {}; connect with a new descriptor."

    @property
    def name(self) -> str:
        """Of the owner's endpoint."""
        return self._offer.name

    @property
    def address(self) -> int:
        """Where to write: the window itself, or an image whose ranges the transport carries over."""
        return self._require_open().address

    # Whether `page_address` is the owner's own page: ringing a lane there wakes that very lane.
    shares_doorbells: ClassVar[bool]

    @property
    @abstractmethod
    def page_address(self) -> int:
        """The owner's doorbell page; 0 where the transport has none."""


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

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def page_address(self) -> int:
        """This endpoint's own doorbell page; 0 where the transport has none."""
        ...

    def export_window(self, nbytes: int, incarnation: int | None = None) -> W:
        """Offer `nbytes` of zeroed memory to one peer; `incarnation` is the endpoint's own unless given.

        Raises:
            ValueError: nbytes is out of bounds.
            OSError, P2PError: the system or the transport has no memory or descriptors left.
        """
        ...

    def connect(self, descriptor: bytes, timeout_s: float = CONNECT_S) -> P:
        """Take up another endpoint's offer.

        Raises:
            DescriptorInvalid: these bytes are no descriptor of this transport.
            ConnectRefused: the owner is gone, does not answer in time, or refuses, or its memory cannot be mapped.
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
        """Store a signal word, a release: whoever sees it sees every earlier put as well.

        Raises:
            ValueError: it would lie outside the window or off 8 bytes.
            EndpointClosed, PeerGone: as for `put`.
        """
        ...

    def progress(self) -> None:
        """Let the transport do its chores; cheap, to be called in every wait loop."""
        ...

    def status(self, link: W | P) -> Status:
        """GONE once the other side has ended, disconnected or withdrawn, or this side has closed the link.

        A window whose peer has not connected yet is ALIVE.
        """
        ...

    def disconnect(self, peer: P) -> None:
        """Give up a peer: no byte is written there after this returns. Idempotent."""
        ...

    def close(self) -> None:
        """Leave nothing behind: windows, peers, threads, descriptors. Idempotent."""
        ...
