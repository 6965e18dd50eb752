"""The transports of one host: windows handed over a unix socket that then is the proof of life; shm is one of them.

A window's memory is a file descriptor, passed by shm_link's handshake to the one peer that shows the window's token.
The socket stays open for the life of the link and is the proof of life (`liveness_fd`): it hangs up when the peer's
process ends or the peer disconnects, in both cases after its mapping is gone.

A process that forks without exec shares its sockets with the child, which then vouches for it: spawn instead.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from p2p import native
from p2p.descriptor import WINDOW_LIMIT_BYTES, Descriptor, Transport, decode
from p2p.endpoint import (
    CONNECT_S,
    DescriptorInvalid,
    EndpointClosed,
    Peer,
    PeerGone,
    Status,
    Window,
    check_endpoint,
    check_words,
)
from p2p.memory import HostMemory, Memory
from p2p.shm_link import (
    SOCKET_PREFIX,
    Acceptor,
    Verdict,
    answer,
    call,
    create_memory,
    hung_up,
    map_memory,
    new_token,
)

# 32 windows of 2 MiB: a peer that leaves that much behind and lives on is broken.
RETIRED_LIMIT_BYTES: Final = 64 << 20


class LocalWindow(Window):
    """Memory that one peer writes and this process reads.

    Args:
        fd: What stands for the memory; this object closes it once it was passed on.
    """

    def __init__(self, endpoint: LocalEndpoint, offer: Descriptor, memory: Memory, fd: int) -> None:
        super().__init__(offer, memory)
        self._endpoint = endpoint
        self._fd = fd
        self._link: socket.socket | None = None
        self._peer_incarnation = 0
        self.held_bytes = memory.nbytes

    @property
    def peer_incarnation(self) -> int:
        return self._peer_incarnation

    @property
    def liveness_fd(self) -> int:
        link = self._link
        return link.fileno() if link else -1

    def close(self) -> None:
        """Withdraw the window; idempotent. It stays mapped, retired, until its peer lets go."""
        self._endpoint._withdraw(self)

    def _release(self) -> None:
        if self._memory:
            self._memory.close()
            self._memory = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._link:
            self._link.close()
            self._link = None


class LocalPeer(Peer):
    """Another endpoint's window, mapped."""

    shares_doorbells: ClassVar[bool] = True

    def __init__(self, offer: Descriptor, link: socket.socket, memory: Memory, page: HostMemory) -> None:
        super().__init__(offer, memory)
        self._link = link
        self._page = page

    @property
    def page_address(self) -> int:
        self._require_open()
        return self._page.address

    @property
    def liveness_fd(self) -> int:
        return self._link.fileno()

    def _release(self) -> None:
        # In this order: the hang-up proves to the owner that nothing is written any more.
        if self._memory:
            self._memory.close()
            self._memory = None
        self._page.close()
        self._link.close()


class LocalEndpoint(ABC):
    """One process's end of such a transport: an `Endpoint`. A context manager; safe to use from several threads.

    Args:
        name: For logs and error messages, at most 255 bytes.
        incarnation: Of this process's life; a restarted process has another.
        lanes: Doorbells to offer, 1 to 63.
        retired_limit_bytes: A peer that keeps more than this of closed windows mapped is refused new ones.
    """

    transport: ClassVar[Transport]

    def __init__(
        self, name: str, incarnation: int, lanes: int = 1, *, retired_limit_bytes: int = RETIRED_LIMIT_BYTES
    ) -> None:
        check_endpoint(name, incarnation, lanes)
        self.name = name
        self.incarnation = incarnation
        self.lanes = lanes
        self._retired_limit_bytes = retired_limit_bytes
        self._lock = threading.RLock()
        self._closed = False
        self._windows: list[LocalWindow] = []
        self._retired: list[LocalWindow] = []
        self._peers: list[LocalPeer] = []
        self._socket_name = SOCKET_PREFIX + secrets.token_hex(16).encode()
        self._page_fd = create_memory("p2p-page", mmap.PAGESIZE)
        self._page = HostMemory(mmap.mmap(self._page_fd, mmap.PAGESIZE))
        native.load().p2p_bell_init(self._page.address, incarnation, lanes)
        self._acceptor = Acceptor(self._socket_name, self._admit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def _allocate(self, nbytes: int) -> tuple[Memory, int, bytes]:
        """Memory for a window, what stands for it, and what a descriptor's address says beside the socket's name."""

    @abstractmethod
    def _mapper(self, offer: Descriptor) -> Callable[[int], Memory]:
        """What maps the memory that a file descriptor stands for, which stays the caller's."""

    @property
    def page_address(self) -> int:
        self._require_open()
        return self._page.address

    def share_page(self) -> HostMemory:
        """The same page, mapped once more: for another transport that rings there."""
        self._require_open()
        return HostMemory(mmap.mmap(self._page_fd, mmap.PAGESIZE))

    def export_window(self, nbytes: int, incarnation: int | None = None) -> LocalWindow:
        if not 1 <= nbytes <= WINDOW_LIMIT_BYTES:
            raise ValueError(f"a window of {nbytes} bytes asked for; 1 to {WINDOW_LIMIT_BYTES} needed.")
        self.progress()
        with self._lock:
            self._require_open()
            memory, fd, place = self._allocate(nbytes)
            offer = Descriptor(
                transport=self.transport,
                incarnation=self.incarnation if incarnation is None else incarnation,
                nbytes=nbytes,
                address=self._socket_name + place,
                name=self.name,
                token=new_token(),
            )
            window = LocalWindow(self, offer, memory, fd)
            self._windows.append(window)
        return window

    def connect(self, descriptor: bytes, timeout_s: float = CONNECT_S) -> LocalPeer:
        offer = decode(descriptor)
        if offer.transport is not self.transport or not offer.address.startswith(SOCKET_PREFIX):
            raise DescriptorInvalid(f"a {offer.transport.name} descriptor; this endpoint speaks {self.transport.name}.")
        self._require_open()
        peer = LocalPeer(offer, *call(offer, self.incarnation, timeout_s, self._mapper(offer)))
        with self._lock:
            if not self._closed:
                self._peers.append(peer)
                return peer
        peer._release()
        raise EndpointClosed(f"endpoint {self.name} was closed while it connected.")

    def put(self, peer: LocalPeer, offset: int, source: bytes | bytearray | memoryview | NDArray[np.uint8]) -> None:
        data = np.frombuffer(source, dtype=np.uint8)
        if offset < 0 or offset + len(data) > peer.nbytes:
            raise ValueError(f"{len(data)} bytes at {offset} do not lie in a window of {peer.nbytes}.")
        with self._lock:
            peer._require_open().write(offset, data)

    def signal(self, peer: LocalPeer, offset: int, value: int) -> None:
        check_words(peer.nbytes, offset)
        with self._lock:
            memory = peer._require_open()
            if hung_up(peer._link):
                raise PeerGone(f"{peer.name} has ended or withdrew the window; use another.")
            memory.store_signal(offset, value)

    def progress(self) -> None:
        """Free retired windows whose peers have let go."""
        with self._lock:
            for window in [window for window in self._retired if hung_up(window._link)]:
                self._retired.remove(window)
                window._release()

    def status(self, link: LocalWindow | LocalPeer) -> Status:
        with self._lock:
            return Status.GONE if link._memory is None or hung_up(link._link) else Status.ALIVE

    def disconnect(self, peer: LocalPeer) -> None:
        """Unmap a peer's window and hang up; idempotent. Stop native code and kernels that write there first."""
        with self._lock:
            if peer in self._peers:
                peer._release()
                self._peers.remove(peer)

    def close(self) -> None:
        """Leave nothing behind; idempotent. Stop native code and kernels that use this endpoint's memory first."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # Not under the lock: the thread may be waiting for it.
        self._acceptor.close()
        with self._lock, ExitStack() as every:
            # Whatever one of them raises, the others go as well, the last pushed first.
            every.callback(os.close, self._page_fd)
            every.callback(self._page.close)
            for item in (*self._retired, *self._windows, *self._peers):
                every.callback(item._release)
            self._peers.clear()
            self._windows.clear()
            self._retired.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise EndpointClosed(f"endpoint {self.name} was closed; make a new one under a new incarnation.")

    def _withdraw(self, window: LocalWindow) -> None:
        with self._lock:
            if window not in self._windows:
                return
            self._windows.remove(window)
            if window._link is None or hung_up(window._link):
                window._release()
                return
            # Asks the peer to let go; its hang-up is the proof that the memory may be freed.
            window._link.shutdown(socket.SHUT_WR)
            self._retired.append(window)

    def _admit(self, incarnation: int, token: bytes, link: socket.socket) -> None:
        with self._lock:
            # Every token is compared, each in constant time: how long this takes says nothing.
            matches = [window for window in self._windows if hmac.compare_digest(window._offer.token, token)]
            verdict = self._judge(matches, incarnation)
            if verdict is not Verdict.OK:
                answer(link, verdict)
                link.close()
                return
            window = matches[0]
            window._link = link
            window._peer_incarnation = incarnation
            answer(link, verdict, window.nbytes, (window._fd, self._page_fd))
            os.close(window._fd)
            window._fd = -1

    def _judge(self, matches: list[LocalWindow], incarnation: int) -> Verdict:
        self.progress()
        if self._closed or not matches or matches[0]._link is not None:
            return Verdict.UNKNOWN
        left_behind = sum(window.held_bytes for window in self._retired if window.peer_incarnation == incarnation)
        return Verdict.RETIRED_FULL if left_behind > self._retired_limit_bytes else Verdict.OK


class ShmEndpoint(LocalEndpoint):
    """One process's end of the shm transport: windows are sealed memfds, mapped by both sides."""

    transport: ClassVar[Transport] = Transport.SHM

    def _allocate(self, nbytes: int) -> tuple[Memory, int, bytes]:
        fd = create_memory(f"p2p-{self.name}"[:200], nbytes)
        try:
            return HostMemory(mmap.mmap(fd, nbytes)), fd, b""
        except BaseException:
            os.close(fd)
            raise

    def _mapper(self, offer: Descriptor) -> Callable[[int], Memory]:
        return lambda fd: HostMemory(map_memory(fd, offer.nbytes))
