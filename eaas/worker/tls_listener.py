"""A listening socket for TLS that the worker's loop can wait on: greetings happen on threads of their own.

Whoever connects must show a gateway's certificate. A connection reaches the loop only then: one that is slow to greet,
or has no right to, costs the loop nothing.
"""

from __future__ import annotations

import logging
import queue
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

from router.access import GATEWAY
from router.tls import Credentials, peer_role

log = logging.getLogger(__name__)

GREETING_S = 5.0
# Connections that greet, and that wait to greet; more are closed.
_GREETERS = 4
_MOST_GREETING = 32


class SecureConnection:
    """A connection that has been greeted, with the few calls of a socket that the loop makes of one."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """For select. Nothing that has arrived is kept back here: `recv` takes all that there is."""
        return self._connection.fileno()

    def setblocking(self, blocking: bool) -> None:
        self._connection.setblocking(blocking)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._connection.setsockopt(level, option, value)

    def send(self, data: bytes | bytearray) -> int:
        """Bytes taken of `data`. Raises BlockingIOError: none now; what is sent next must begin with the same."""
        try:
            return self._connection.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def recv(self, nbytes: int) -> bytes:
        """About `nbytes` at most, all that has arrived if it is less; empty at the end. Raises BlockingIOError."""
        pieces = bytearray()
        while len(pieces) < nbytes:
            try:
                # A record at a time: select does not see what OpenSSL has already taken from the socket.
                piece = self._connection.recv(nbytes - len(pieces))
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                if not pieces:
                    raise BlockingIOError from error
                break
            if not piece:
                break
            pieces += piece
        # The loop looks at the socket again, and what OpenSSL holds must be taken before that.
        while pieces and (held := self._connection.pending()):
            pieces += self._connection.recv(held)
        return bytes(pieces)

    def close(self) -> None:
        """As of a socket: the other side sees the end of it, with no farewell."""
        self._connection.close()


class TlsListener:
    """What the worker's loop accepts from instead of a listening socket."""

    def __init__(self, listener: socket.socket, credentials: Credentials) -> None:
        """Args: listener: bound and listening; closed with this."""
        self._listener, self._credentials = listener, credentials
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._greeted: queue.SimpleQueue[tuple[SecureConnection, str]] = queue.SimpleQueue()
        self._greeting = threading.Semaphore(_MOST_GREETING)
        self._greeters = ThreadPoolExecutor(max_workers=_GREETERS, thread_name_prefix="tls-greeting")
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="tls-door", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For select: readable when `accept` has something."""
        return self._bell.fileno()

    def setblocking(self, blocking: bool) -> None:
        """It never blocks."""

    def accept(self) -> tuple[SecureConnection, str]:
        """A gateway's connection, and who that is. Raises OSError: there is none."""
        try:
            self._bell.recv(1)
            return self._greeted.get_nowait()
        except queue.Empty:
            raise BlockingIOError from None

    def close(self) -> None:
        """Stop listening, and close what nobody accepted. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # The thread wakes from accept.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._greeters.shutdown(wait=False, cancel_futures=True)
        self._ring.close()
        self._bell.close()
        while not self._greeted.empty():
            self._greeted.get()[0].close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("accept_failed error=%s", error)
                    threading.Event().wait(0.05)
                continue
            if not self._greeting.acquire(blocking=False):
                log.warning("gateway_refused peer=%s reason=%s", peer, "too many greet at once")
                connection.close()
                continue
            self._greeters.submit(self._greet, connection, peer)

    def _greet(self, connection: socket.socket, peer: object) -> None:
        try:
            connection.settimeout(GREETING_S)
            greeted = self._credentials.server_context().wrap_socket(connection, server_side=True)
            role = peer_role(greeted.getpeercert())
            if role != GATEWAY:
                log.warning("gateway_refused peer=%s role=%s needed=%s", peer, role or "none", GATEWAY)
                greeted.close()
                return
            self._greeted.put((SecureConnection(greeted), f"{peer}"))
            self._ring.send(b"!")
        except (OSError, ValueError) as error:
            log.warning("gateway_refused peer=%s reason=%s", peer, error)
            connection.close()
        finally:
            self._greeting.release()
