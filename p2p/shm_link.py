"""The links of one host: sealed memory, the handshake that passes a window's memory, the thread that answers.

Hello, from the connecting side, 64 bytes little-endian::

    offset  size  field
         0     4  magic "P2PH"
         4     2  version (1)
         6     2  zero
         8     8  incarnation of the connecting endpoint
        16    32  token from the descriptor
        48    16  zero

Answer, 16 bytes, with two file descriptors (window, doorbell page) beside it where the verdict is OK::

    offset  size  field
         0     4  magic "P2PA"
         4     4  verdict
         8     8  nbytes of the window

After that the socket stays silent: it is the proof of life that local.py tells of.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from p2p.descriptor import TOKEN_BYTES, Descriptor
from p2p.endpoint import ConnectRefused
from p2p.memory import HostMemory, Memory

HANDSHAKE_S: Final = 1.0
SOCKET_PREFIX: Final = b"\0p2p-"
SOCKET_BYTES: Final = len(SOCKET_PREFIX) + 32  # of its name, at the head of a descriptor's address
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_HELLO: Final = struct.Struct("<4sHHQ32s16s")
_ANSWER: Final = struct.Struct("<4sIQ")
_CREDENTIALS: Final = struct.Struct("iII")
_VERSION: Final = 1
_HUNG_UP: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
_PAUSE_S: Final = 0.05

_log = logging.getLogger(__name__)


class Verdict(IntEnum):
    """What an endpoint answers to a hello."""

    OK = 0
    UNKNOWN = 1
    RETIRED_FULL = 2
    VERSION = 3


_REFUSALS: Final = {
    Verdict.UNKNOWN: "this descriptor was withdrawn or taken; ask its owner for a new one",
    Verdict.RETIRED_FULL: "too much memory is retired for this peer; end its process or let it disconnect",
    Verdict.VERSION: "it speaks another version; run the same release on both sides",
}


def create_memory(label: str, nbytes: int) -> int:
    """A memfd of `nbytes` zeros that nobody can resize any more.

    Raises:
        OSError: the system has no memory or descriptors left.
    """
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Allocated now: without memory this fails here, and not as a SIGBUS in the token path.
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int, nbytes: int) -> mmap.mmap:
    """Map a received memfd.

    Raises:
        ConnectRefused: it is not `nbytes` long, or its owner could still resize it.
    """
    if os.fstat(fd).st_size != nbytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ConnectRefused(f"the owner passed memory that is not {nbytes} sealed bytes: not to be trusted.")
    return mmap.mmap(fd, nbytes)


def hung_up(link: socket.socket | None) -> bool:
    """Whether the other side of the socket has ended, closed or withdrawn."""
    if link is None:
        return False
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    return any(events & _HUNG_UP for _, events in poll.poll(0))


def same_user(link: socket.socket) -> bool:
    """Whether the other side runs as this user; the kernel says so."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return uid == os.geteuid()


def answer(link: socket.socket, verdict: Verdict, nbytes: int = 0, fds: Sequence[int] = ()) -> None:
    """Answer a hello; where that fails the link is hung up, which both sides see."""
    packed = _ANSWER.pack(b"P2PA", verdict, nbytes)
    try:
        # Nothing was sent before, so the answer fits into the socket's buffer without blocking.
        socket.send_fds(link, [packed], fds)
    except OSError as error:
        _log.warning("p2p_answer_failed error=%s", error)
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


def call(
    descriptor: Descriptor, incarnation: int, timeout_s: float, map_window: Callable[[int], Memory]
) -> tuple[socket.socket, Memory, HostMemory]:
    """Connect to the window's owner: (link, window, doorbell page).

    Args:
        map_window: Maps the window that a file descriptor stands for, which stays this function's to close.

    Raises:
        ConnectRefused: with the reason.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        link.settimeout(timeout_s)
        link.connect(descriptor.address[:SOCKET_BYTES])
        if not same_user(link):
            raise ConnectRefused(f"{descriptor.name}'s socket belongs to another user; run both as one.")
        link.sendall(_HELLO.pack(b"P2PH", _VERSION, 0, incarnation, descriptor.token, bytes(16)))
        answer, fds, flags, _ = socket.recv_fds(link, _ANSWER.size, 2, socket.MSG_CMSG_CLOEXEC)
        _check_answer(descriptor, answer, len(fds), flags)
        window = map_window(fds[0])
        try:
            page = HostMemory(map_memory(fds[1], mmap.PAGESIZE))
        except BaseException:
            window.close()
            raise
        return link, window, page
    except OSError as error:
        link.close()
        raise ConnectRefused(f"{descriptor.name} does not answer: {error}. Is its process running?") from error
    except BaseException:
        link.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _check_answer(descriptor: Descriptor, answer: bytes, fds: int, flags: int) -> None:
    if len(answer) != _ANSWER.size or flags & socket.MSG_CTRUNC:
        raise ConnectRefused(f"{descriptor.name} hung up in the handshake, or file descriptors ran out.")
    magic, verdict, nbytes = _ANSWER.unpack(answer)
    if magic == b"P2PA" and verdict in _REFUSALS:
        raise ConnectRefused(f"{descriptor.name} refuses: {_REFUSALS[Verdict(verdict)]}.")
    if magic != b"P2PA" or verdict != Verdict.OK or fds != 2 or nbytes != descriptor.nbytes:
        raise ConnectRefused(f"{descriptor.name} gave an answer that makes no sense; is it another program?")


@dataclass(kw_only=True)
class _Caller:
    """A connection whose hello is not complete yet."""

    deadline_s: float
    received: bytearray


class Acceptor:
    """Hears hellos in a thread of its own, any number at a time, so that a slow caller delays nobody.

    No thread for each: the stacks that they leave behind let a thread begin in a process without memory, which Python
    then waits for without end, where it says otherwise that none can be started.

    Args:
        address: Where to listen.
        admit: Called on that thread with each hello's incarnation and token, and its link, which then is the callee's.
    """

    def __init__(self, address: bytes, admit: Callable[[int, bytes, socket.socket], None]) -> None:
        self._admit = admit
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._listener.setblocking(False)
        self._listener.bind(address)
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="p2p-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; callers in mid-handshake are hung up on. Returns when the thread has ended."""
        self._waker.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._serve_once():
                pass
        finally:
            for key in list(self._selector.get_map().values()):
                self._drop(key.fileobj)
            self._selector.close()

    def _serve_once(self) -> bool:
        callers = [key for key in self._selector.get_map().values() if key.data]
        timeout_s = max(0.0, min(key.data.deadline_s for key in callers) - time.monotonic()) if callers else None
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._wake:
                return False
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._hear(key)
        for key in callers:
            # By identity: the number may by now belong to a younger caller.
            if key.data.deadline_s <= time.monotonic() and self._selector.get_map().get(key.fd) is key:
                self._drop(key.fileobj)
        return True

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # The caller waits in the backlog meanwhile; without a pause this thread would spin.
            _log.warning("p2p_accept_failed error=%s", error)
            time.sleep(_PAUSE_S)
            return
        if not same_user(link):
            _log.warning("p2p_caller_refused reason=other_user")
            link.close()
            return
        link.setblocking(False)
        caller = _Caller(deadline_s=time.monotonic() + HANDSHAKE_S, received=bytearray())
        self._selector.register(link, selectors.EVENT_READ, caller)

    def _hear(self, key: selectors.SelectorKey) -> None:
        link, caller = key.fileobj, key.data
        if not isinstance(link, socket.socket):
            return
        try:
            piece = link.recv(_HELLO.size - len(caller.received))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        caller.received += piece
        if not piece:
            self._drop(link)
        elif len(caller.received) == _HELLO.size:
            self._selector.unregister(link)
            self._greet(link, bytes(caller.received))

    def _greet(self, link: socket.socket, raw: bytes) -> None:
        magic, version, zero, incarnation, token, rest = _HELLO.unpack(raw)
        if magic != b"P2PH" or version != _VERSION or zero or rest != bytes(16):
            answer(link, Verdict.VERSION)
            link.close()
            return
        self._admit(incarnation, token, link)

    def _drop(self, link: object) -> None:
        if isinstance(link, socket.socket):
            self._selector.unregister(link)
            link.close()


def new_token() -> bytes:
    """A secret that nobody can guess."""
    return os.urandom(TOKEN_BYTES)
