"""The loop of an attention worker: gateways' connections and the engine, on one thread.

Between two steps it takes what has arrived and writes what fits into the sockets' buffers; with nothing to
compute it sleeps in select. A gateway that goes away loses its requests before the next step. One that does
not read is dropped once its unread messages pass a bound: memory is for the others too.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable

from eaas.engine.engine import Engine
from eaas.engine.worker_protocol import (
    Failed,
    Hello,
    ProtocolError,
    Step,
    Submit,
    ToGateway,
    encode,
    for_worker,
)

log = logging.getLogger(__name__)

READ_BYTES = 1 << 18
UNREAD_LIMIT_BYTES = 32 << 20
LINKS_LIMIT = 64
# An engine that only computes prompts has no tokens to send; this says that it lives.
HEARTBEAT_S = 1.0
LEASE_POLL_S = 0.02
FLUSH_S = 0.3


class GatewayLink:
    """One gateway's connection."""

    def __init__(self, owner: int, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self.owner = owner
        self.connection = connection
        self.reader = for_worker()
        self.unread = bytearray()
        self.spoke_s = 0.0
        self.lost = ""
        self._selector = selector

    def send(self, message: ToGateway) -> None:
        """Write what the socket takes now and keep the rest; sets `lost` when the connection is no more."""
        if self.lost:
            return
        frame = encode(message)
        if not self.unread:
            taken = self._write(frame)
            if taken < len(frame) and not self.lost:
                self.unread += frame[taken:]
                self._watch(selectors.EVENT_READ | selectors.EVENT_WRITE)
        elif len(self.unread) + len(frame) > UNREAD_LIMIT_BYTES:
            self.lost = f"{len(self.unread)} bytes lie unread"
        else:
            self.unread += frame

    def flush(self) -> None:
        """Write more of what is kept."""
        taken = self._write(self.unread)
        del self.unread[:taken]
        if not self.unread and not self.lost:
            self._watch(selectors.EVENT_READ)

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self.connection.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.lost = f"write failed: {error}"
            return 0

    def _watch(self, events: int) -> None:
        self._selector.modify(self.connection, events, self)


class Worker:
    """Serves gateways until `stop`. Everything but `stop` belongs to the thread that calls `run`."""

    def __init__(
        self,
        engine: Engine,
        hello: Hello,
        listener: socket.socket,
        *,
        between_steps: Callable[[], None] = lambda: None,
        may_answer: Callable[[], bool] = lambda: True,
    ) -> None:
        """Args:
        listener: Bound and listening; the worker closes it.
        between_steps: Called after each step, and after each sleep.
        may_answer: False while this process must not answer, because its lease may have ended.
        """
        self._engine = engine
        self._hello = hello
        self._listener = listener
        self._between_steps = between_steps
        self._may_answer = may_answer
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._links: dict[int, GatewayLink] = {}
        self._owners = 0
        self._stopping = ""
        for waker in (self._wake_read, self._wake_write, listener):
            waker.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def stop(self, reason: str) -> None:
        """Make `run` return after the present step. Any thread; safe to repeat."""
        self._stopping = self._stopping or reason
        self.wake()

    def wake(self) -> None:
        """End a sleep. Any thread."""
        try:
            self._wake_write.send(b"!")
        except OSError:
            return  # Full of wake-ups already, or the loop has ended.

    def run(self) -> None:
        """Serve until `stop`; then tell every gateway that its requests must go elsewhere, and close."""
        try:
            while not self._stopping:
                self._exchange(self._sleep_s())
                if self._engine.has_work and self._may_answer():
                    self._step()
                self._between_steps()
            self._dismiss(self._stopping)
        finally:
            for link in self._links.values():
                link.connection.close()
            self._selector.close()
            for waker in (self._wake_read, self._wake_write, self._listener):
                waker.close()

    # -- steps -----------------------------------------------------------------------------------------------

    def _sleep_s(self) -> float | None:
        if not self._engine.has_work:
            return None
        return 0.0 if self._may_answer() else LEASE_POLL_S

    def _step(self) -> None:
        outcome = self._engine.step()
        if outcome is None:
            return
        now_s = time.monotonic()
        for owner, tokens in outcome.tokens.items():
            link = self._links[owner]
            link.spoke_s = now_s
            link.send(Step(tokens=tokens))
        for owner, failures in outcome.failed.items():
            for failed in failures:
                self._links[owner].send(failed)
        for link in list(self._links.values()):
            if now_s - link.spoke_s >= HEARTBEAT_S:
                link.spoke_s = now_s
                link.send(Step(tokens=[]))
            if link.lost:
                self._drop(link)

    # -- sockets ---------------------------------------------------------------------------------------------

    def _exchange(self, timeout_s: float | None) -> None:
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._wake_read:
                self._wake_read.recv(4096)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                link: GatewayLink = key.data
                if events & selectors.EVENT_WRITE:
                    link.flush()
                if events & selectors.EVENT_READ:
                    self._receive(link)
                if link.lost:
                    self._drop(link)

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError as error:
            log.warning("accept_failed error=%s", error)
            return
        if len(self._links) >= LINKS_LIMIT:
            log.warning("gateway_refused peer=%s links=%d", peer, len(self._links))
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._owners += 1
        link = GatewayLink(self._owners, connection, self._selector)
        self._links[link.owner] = link
        self._selector.register(connection, selectors.EVENT_READ, link)
        log.info("gateway_connected peer=%s owner=%d", peer, link.owner)
        link.send(self._hello)

    def _receive(self, link: GatewayLink) -> None:
        try:
            data = link.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            link.lost = f"read failed: {error}"
            return
        if not data:
            link.lost = "it disconnected"
            return
        try:
            messages = link.reader.feed(data)
        except ProtocolError as error:
            link.lost = str(error)
            return
        for message in messages:
            if isinstance(message, Submit):
                refusal = self._engine.submit(message, link.owner)
                if refusal is not None:
                    link.send(refusal)
            else:
                self._engine.cancel(message.id, link.owner)

    def _drop(self, link: GatewayLink) -> None:
        cancelled = self._engine.cancel_owner(link.owner)
        log.info("gateway_gone owner=%d cancelled=%d reason=%s", link.owner, cancelled, link.lost)
        self._selector.unregister(link.connection)
        link.connection.close()
        del self._links[link.owner]

    def _dismiss(self, reason: str) -> None:
        for request in list(self._engine.scheduler.live()):
            self._engine.cancel(request.id, request.owner)
            self._links[request.owner].send(
                Failed(
                    id=request.id,
                    attempt=request.attempt,
                    code="shutting_down",
                    message=f"{self._hello.name} stops: {reason}.",
                    retryable=True,
                )
            )
        end_s = time.monotonic() + FLUSH_S
        for link in self._links.values():
            while link.unread and not link.lost and time.monotonic() < end_s:
                self._selector.select(end_s - time.monotonic())
                link.flush()
