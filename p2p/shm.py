"""The shm transport: endpoints of one host and one user, joined by sealed memfds.

Each window is a memfd of its own, passed over an abstract unix socket to the one peer that shows the window's
token. The socket stays open for the life of the link and is the proof of life (`liveness_fd`): it hangs up
when the peer's process ends or the peer disconnects, in both cases after its mapping is gone.

A process that forks without exec shares its sockets with the child, which then vouches for it: spawn instead.
"""

from __future__ import annotations

import ctypes
import hmac
import mmap
import os
import secrets
import socket
import struct
import threading
from types import TracebackType
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from p2p import doorbell, native
from p2p.descriptor import NAME_LIMIT, WINDOW_LIMIT_BYTES, Descriptor, Transport, decode
from p2p.endpoint import CONNECT_S, DescriptorInvalid, EndpointClosed, PeerGone, Status
from p2p.frame import check_words, load_signals
from p2p.shm_link import Acceptor, Hello, Verdict, answer, call, create_memory, link_status, new_token

# 32 windows of 2 MiB: a peer that leaves that much behind and lives on is broken.
RETIRED_LIMIT_BYTES: Final = 64 << 20


def _load_native() -> ctypes.CDLL | None:
    try:
        return native.load()
    except native.NativeMissing:
        return None


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class ShmWindow:
    """Memory that one peer writes and this process reads. Made by `ShmEndpoint.export_window`."""

    def __init__(self, endpoint: ShmEndpoint, offer: Descriptor) -> None:
        self._endpoint = endpoint
        self._offer = offer
        self._fd = create_memory(f"p2p-{offer.name}"[:200], offer.nbytes)
        self._memory: NDArray[np.uint8] | None = None
        self._link: socket.socket | None = None
        self.peer_incarnation = 0
        try:
            self._memory = np.frombuffer(mmap.mmap(self._fd, offer.nbytes), dtype=np.uint8)
            # Asked for once: numpy takes microseconds to say it.
            self._address = int(self._memory.ctypes.data)
        except BaseException:
            self._release()
            raise

    @property
    def address(self) -> int:
        self._require_open()
        return self._address

    @property
    def nbytes(self) -> int:
        return self._offer.nbytes

    @property
    def incarnation(self) -> int:
        return self._offer.incarnation

    @property
    def descriptor(self) -> bytes:
        return self._offer.encode()

    @property
    def memory(self) -> NDArray[np.uint8]:
        return self._require_open()

    @property
    def liveness_fd(self) -> int:
        link = self._link
        return link.fileno() if link else -1

    def poll(self, offset: int, count: int, stride_bytes: int = 8) -> NDArray[np.uint64]:
        """Read `count` signal words, the first at `offset`, each an acquire: u64[count].

        Raises:
            ValueError: a word would lie outside the window or off 8 bytes.
        """
        memory = self._require_open()
        if self._endpoint.library is None:
            return load_signals(memory, offset, count, stride_bytes)
        check_words(self.nbytes, offset, count, stride_bytes)
        words = (ctypes.c_uint64 * count)()
        self._endpoint.library.p2p_signals_load(self._address + offset, stride_bytes, count, words)
        return np.ctypeslib.as_array(words)

    def _require_open(self) -> NDArray[np.uint8]:
        if self._memory is None:
            raise EndpointClosed("this window was closed; export a new one.")
        return self._memory

    def close(self) -> None:
        """Withdraw the window; idempotent. It stays mapped, retired, until its peer lets go."""
        self._endpoint._withdraw(self)

    def _release(self) -> None:
        # Views keep the mapping: what Python code still holds stays readable.
        self._memory = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._link:
            self._link.close()
            self._link = None


class ShmPeer:
    """Another endpoint's window, mapped. Made by `ShmEndpoint.connect`."""

    def __init__(self, offer: Descriptor, link: socket.socket, window: mmap.mmap, page: mmap.mmap) -> None:
        self._offer = offer
        self._link = link
        self._window = window
        self._page = page
        self._address = _address_of(window)
        self._page_address = _address_of(page)

    @property
    def name(self) -> str:
        return self._offer.name

    @property
    def address(self) -> int:
        self._require_open()
        return self._address

    @property
    def nbytes(self) -> int:
        return self._offer.nbytes

    @property
    def incarnation(self) -> int:
        return self._offer.incarnation

    @property
    def page_address(self) -> int:
        self._require_open()
        return self._page_address

    @property
    def liveness_fd(self) -> int:
        return self._link.fileno()

    def _require_open(self) -> None:
        if self._window.closed:
            raise EndpointClosed(f"this side disconnected from {self.name}; connect with a new descriptor.")

    def _release(self) -> None:
        # In this order: the hang-up proves to the owner that nothing is written any more.
        self._window.close()
        self._page.close()
        self._link.close()


class ShmEndpoint:
    """One process's end of the shm transport. A context manager; safe to use from several threads.

    Args:
        name: For logs and error messages, at most 255 bytes.
        incarnation: Of this process's life; a restarted process has another.
        lanes: Doorbells to offer, 1 to 63.
        retired_limit_bytes: A peer that keeps more than this of closed windows mapped is refused new ones.
    """

    shares_doorbells: ClassVar[bool] = True

    def __init__(
        self, name: str, incarnation: int, lanes: int = 1, *, retired_limit_bytes: int = RETIRED_LIMIT_BYTES
    ) -> None:
        if not 1 <= len(name.encode()) <= NAME_LIMIT or not 0 <= incarnation < 1 << 64:
            raise ValueError(
                f"name {name!r}, incarnation {incarnation}: 1 to {NAME_LIMIT} bytes and a u64 needed."
            )
        header = doorbell.page_header(incarnation, lanes)
        self.name = name
        self.incarnation = incarnation
        self.lanes = lanes
        self.library = _load_native()
        self._retired_limit_bytes = retired_limit_bytes
        self._lock = threading.RLock()
        self._closed = False
        self._windows: list[ShmWindow] = []
        self._retired: list[ShmWindow] = []
        self._peers: list[ShmPeer] = []
        self._socket_name = b"\0p2p-" + secrets.token_hex(16).encode()
        self._page_fd = create_memory("p2p-page", mmap.PAGESIZE)
        self._page = mmap.mmap(self._page_fd, mmap.PAGESIZE)
        self._page[: len(header)] = header
        self._page_address = _address_of(self._page)
        self._acceptor = Acceptor(self._socket_name, self._admit)

    def __enter__(self) -> ShmEndpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def page_address(self) -> int:
        """This endpoint's own doorbell page."""
        self._require_open()
        return self._page_address

    @property
    def retired_bytes(self) -> int:
        """Memory of closed windows which their peers may still write."""
        with self._lock:
            return sum(window.nbytes for window in self._retired)

    def export_window(self, nbytes: int, incarnation: int | None = None) -> ShmWindow:
        """Offer `nbytes` of zeroed, sealed memory to one peer, as the endpoint's incarnation unless given.

        Raises:
            ValueError: nbytes is out of bounds.
            OSError: the system has no memory or descriptors left.
        """
        if not 1 <= nbytes <= WINDOW_LIMIT_BYTES:
            raise ValueError(f"a window of {nbytes} bytes asked for; 1 to {WINDOW_LIMIT_BYTES} needed.")
        offer = Descriptor(
            transport=Transport.SHM,
            incarnation=self.incarnation if incarnation is None else incarnation,
            nbytes=nbytes,
            address=self._socket_name,
            name=self.name,
            token=new_token(),
        )
        self.progress()
        with self._lock:
            self._require_open()
            window = ShmWindow(self, offer)
            self._windows.append(window)
        return window

    def connect(self, descriptor: bytes, timeout_s: float = CONNECT_S) -> ShmPeer:
        """Map the window that the descriptor invites to.

        Raises:
            DescriptorInvalid: these bytes are no descriptor, or of another transport.
            ConnectRefused: the owner is gone, does not answer in time, or refuses.
        """
        offer = decode(descriptor)
        if offer.transport is not Transport.SHM or not offer.address.startswith(b"\0p2p-"):
            raise DescriptorInvalid(f"a {offer.transport.name} descriptor; this endpoint speaks SHM.")
        self._require_open()
        peer = ShmPeer(offer, *call(offer, self.incarnation, timeout_s))
        with self._lock:
            if not self._closed:
                self._peers.append(peer)
                return peer
        peer._release()
        raise EndpointClosed(f"endpoint {self.name} was closed while it connected.")

    def put(
        self, peer: ShmPeer, offset: int, source: bytes | bytearray | memoryview | NDArray[np.uint8]
    ) -> None:
        """Copy bytes into the peer's window.

        Raises:
            ValueError: they would not fit.
            EndpointClosed: this side disconnected.
        """
        data = np.frombuffer(source, dtype=np.uint8)
        if offset < 0 or offset + len(data) > peer.nbytes:
            raise ValueError(f"{len(data)} bytes at {offset} do not lie in a window of {peer.nbytes}.")
        with self._lock:
            peer._require_open()
            peer._window[offset : offset + len(data)] = data.data

    def signal(self, peer: ShmPeer, offset: int, value: int) -> None:
        """Store a signal word, a release: whoever sees it sees every earlier put as well.

        Raises:
            ValueError: the word would lie outside the window or off 8 bytes.
            PeerGone: the owner has ended or withdrew the window.
            EndpointClosed: this side disconnected.
        """
        check_words(peer.nbytes, offset)
        with self._lock:
            if self.status(peer) is Status.GONE:
                peer._require_open()
                raise PeerGone(f"{peer.name} has ended or withdrew the window; use another.")
            if self.library is None:
                # One aligned store. Where stores may be reordered the reader's checksum catches it.
                struct.pack_into("@Q", peer._window, offset, value)
            else:
                self.library.p2p_signal_store(peer.address + offset, value)

    def progress(self) -> None:
        """Free retired windows whose peers have let go."""
        with self._lock:
            for window in [window for window in self._retired if _link_is_gone(window._link)]:
                self._retired.remove(window)
                window._release()

    def status(self, link: ShmWindow | ShmPeer) -> Status:
        """GONE once the other side has ended, disconnected or withdrawn, or this side has closed the link."""
        with self._lock:
            if isinstance(link, ShmPeer):
                return Status.GONE if link._window.closed or _link_is_gone(link._link) else Status.ALIVE
            gone = link._memory is None or _link_is_gone(link._link)
            return Status.GONE if gone else Status.ALIVE

    def disconnect(self, peer: ShmPeer) -> None:
        """Unmap a peer's window and hang up; idempotent. Stop native code that writes there first."""
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
                peer._release()

    def close(self) -> None:
        """Leave nothing behind; idempotent. Stop native code that uses this endpoint's memory first."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # Not under the lock: the thread may be waiting for it.
        self._acceptor.close()
        with self._lock:
            for item in (*self._peers, *self._windows, *self._retired):
                item._release()
            self._peers.clear()
            self._windows.clear()
            self._retired.clear()
            self._page.close()
            os.close(self._page_fd)

    def _require_open(self) -> None:
        if self._closed:
            raise EndpointClosed(f"endpoint {self.name} was closed; make a new one under a new incarnation.")

    def _withdraw(self, window: ShmWindow) -> None:
        with self._lock:
            if window not in self._windows:
                return
            self._windows.remove(window)
            if _link_is_gone(window._link) or window._link is None:
                window._release()
                return
            # Asks the peer to let go; its hang-up is the proof that the memory may be freed.
            window._link.shutdown(socket.SHUT_WR)
            self._retired.append(window)

    def _admit(self, hello: Hello, link: socket.socket) -> None:
        with self._lock:
            # Every token is compared, each in constant time: how long this takes says nothing.
            matches = [
                window for window in self._windows if hmac.compare_digest(window._offer.token, hello.token)
            ]
            verdict = self._judge(matches, hello.incarnation)
            if verdict is not Verdict.OK:
                answer(link, verdict)
                link.close()
                return
            window = matches[0]
            window._link = link
            window.peer_incarnation = hello.incarnation
            answer(link, verdict, window.nbytes, (window._fd, self._page_fd))
            os.close(window._fd)
            window._fd = -1

    def _judge(self, matches: list[ShmWindow], incarnation: int) -> Verdict:
        self.progress()
        if self._closed or not matches or matches[0]._link is not None:
            return Verdict.UNKNOWN
        left_behind = sum(window.nbytes for window in self._retired if window.peer_incarnation == incarnation)
        return Verdict.RETIRED_FULL if left_behind > self._retired_limit_bytes else Verdict.OK


def _link_is_gone(link: socket.socket | None) -> bool:
    return link is not None and link_status(link) is Status.GONE
