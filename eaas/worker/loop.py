"""The loop of an attention worker: gateways' connections and the engine, on one thread.

Between two steps it takes what has arrived and writes what fits into the sockets' buffers; with nothing to
compute it sleeps in select. A gateway that goes away loses its requests before the next step. One that does
not read is dropped once its unread messages pass a bound: memory is for the others too.

While there is work a second thread says every BEAT_S to each gateway that heard nothing else that this process
lives, however long a step takes: a frozen process is told from a busy one within a few beats. It falls silent once
a step has gone on longer than any may, or the loop is known to stand still (router.heartbeat). It also reads what
comes in such a step, so that a request's time to wait counts from when it came and not from when the step was over.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from eaas.worker.engine import Engine
from eaas.worker.protocol import (
    Cancel,
    Failed,
    ForgetBlocks,
    Hello,
    Inspect,
    Inspected,
    ProtocolError,
    Step,
    Submit,
    ToGateway,
    encode,
    for_worker,
)
from eaas.worker.request import Request
from eaas.worker.runs import NOBODY, Runs
from eaas.worker.tls_listener import SecureConnection, TlsListener
from p2p import faults

if TYPE_CHECKING:
    from eaas.spans import WorkerSpans

log = logging.getLogger(__name__)

READ_BYTES = 1 << 18
UNREAD_LIMIT_BYTES = 32 << 20
LINKS_LIMIT = 64
# Twenty frames of 12 bytes a second, and only where no token was sent: a gateway that misses five of them suspects.
BEAT_S = 0.05
# A step ends by its deadline; one that has gone on for so much longer never ends.
STUCK_MARGIN_S = 5.0
LEASE_POLL_S = 0.02
NOT_INSPECTED = "This attention worker records nothing; start it with --inspect-folder FOLDER."
# After a step for the background alone others may have the cores for as long as it took, but no longer.
MOST_REST_S = 0.05
# A grammar that was compiled wakes the loop; one that takes too long is noticed so soon.
COMPILE_POLL_S = 0.1
# Nothing to do: who watches the loop sees it go round all the same.
IDLE_TURN_S = 0.25
# Those who choose among gateways by their load ask some ten times a second.
LOAD_S = 0.1
FLUSH_S = 0.3


class GatewayLink:
    """One gateway's connection."""

    def __init__(
        self,
        owner: int,
        connection: socket.socket | SecureConnection,
        selector: selectors.BaseSelector,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.owner = owner
        self.connection = connection
        self.reader = for_worker()
        self.unread = bytearray()
        # Bytes that have not been looked at yet, each piece with when it came.
        self.arrived: list[tuple[float, bytes]] = []
        self.spoke_s = 0.0
        self.lost = ""
        self._selector = selector
        # The thread that beats writes too.
        self._lock = threading.Lock()

    def send(self, message: ToGateway) -> None:
        """Write what the socket takes now and keep the rest; sets `lost` when the connection is no more. Any thread."""
        frame = encode(message)
        with self._lock:
            if self.lost:
                return
            self.spoke_s = time.monotonic()
            if not self.unread:
                taken = self._write(frame)
                if taken < len(frame) and not self.lost:
                    self.unread += frame[taken:]
                    self._selector.modify(self.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, self)
            elif len(self.unread) + len(frame) > UNREAD_LIMIT_BYTES:
                self.lost = f"{len(self.unread)} bytes lie unread"
            else:
                self.unread += frame

    def flush(self) -> None:
        """Write more of what is kept."""
        with self._lock:
            taken = self._write(self.unread)
            del self.unread[:taken]
            if not self.unread and not self.lost:
                self._selector.modify(self.connection, selectors.EVENT_READ, self)

    def read(self) -> bool:
        """Take what the socket holds; True if there was something, or the connection is no more. Any thread."""
        with self._lock:
            if self.lost or sum(len(data) for _, data in self.arrived) > UNREAD_LIMIT_BYTES:
                return False
            try:
                data = self.connection.recv(READ_BYTES)
            except BlockingIOError:
                return False
            except OSError as error:
                self.lost = f"read failed: {error}"
                return True
            if data:
                self.arrived.append((self._clock(), data))
            else:
                self.lost = "it disconnected"
            return True

    def take(self) -> list[tuple[float, bytes]]:
        """What has been read since the last call."""
        with self._lock:
            arrived, self.arrived = self.arrived, []
        return arrived

    def close(self, reason: str) -> None:
        """End the connection; nothing is sent after it."""
        with self._lock:
            self.lost = self.lost or reason
            self._selector.unregister(self.connection)
            self.connection.close()

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self.connection.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.lost = f"write failed: {error}"
            return 0


class Worker:
    """Serves gateways until `stop`. Everything but `stop` belongs to the thread that calls `run`."""

    def __init__(
        self,
        engine: Engine,
        hello: Hello,
        listener: socket.socket | TlsListener,
        *,
        before_step: Callable[[], None] = lambda: None,
        between_steps: Callable[[], None] = lambda: None,
        may_answer: Callable[[], bool] = lambda: True,
        spans: WorkerSpans | None = None,
        elsewhere: Callable[[], str] = lambda: "",
        stands: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        rest_s: float = MOST_REST_S,
    ) -> None:
        """Args:
        listener: Bound and listening; the worker closes it.
        before_step: Called before each step, with requests there.
        between_steps: Called after each step, and after each sleep.
        may_answer: False while this process must not answer, because its lease may have ended.
        spans: Told what becomes of traced choices; None: nothing is traced.
        elsewhere: Why new requests should go to other workers; "" while they should not.
        stands: Whether this loop is known to stand still: then nobody is told that this process lives.
        clock: The engine's.
        rest_s: Longest rest after a step for the background alone; 0 where steps take no core from who serves others.
        """
        self._engine, self._rest_s = engine, rest_s
        self._runs = Runs(engine)
        engine.on_begun, engine.scheduler.on_end = self._tell_begun, self._runs.ended
        self._hello = hello
        self._listener = listener
        self._before_step, self._between_steps = before_step, between_steps
        self._may_answer = may_answer
        self._spans = spans
        self._elsewhere = elsewhere
        self._stands = stands
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._links: dict[int, GatewayLink] = {}
        self._owners = 0
        self._stopping = ""
        self._running, self._turns = False, 0
        self._step_began_s: float | None = None
        self._took_s = 0.0
        self._told_s, self._told_idle = 0.0, False
        self._busy, self._ended = threading.Event(), threading.Event()
        for waker in (self._wake_read, self._wake_write, listener):
            waker.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def turns(self) -> int | None:
        """How often the loop has gone round, which it does idle too; None while it does not run."""
        return self._turns if self._running else None

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
        beats = threading.Thread(target=self._beat, name="beats", daemon=True)
        beats.start()
        try:
            self._running = True
            while not self._stopping:
                self._turns += 1
                self._exchange(self._sleep_s())
                if self._engine.has_work and self._may_answer() and not self._blocked:
                    self._busy.set()
                    self._before_step()
                    self._step()
                # Grammars are compiled elsewhere, but those who wait for them must hear that this process lives.
                if (self._engine.has_work or self._engine.compiling) and self._may_answer():
                    self._busy.set()
                else:
                    # Before the next sleep, which may be long.
                    self._busy.clear()
                if self._spans is not None:
                    self._spans.between()
                self._tell_load()
                self._tell_inspection()
                self._runs.expire(self._clock())
                self._between_steps()
            self._dismiss(self._stopping)
        finally:
            self._running = False
            self._ended.set()
            self._busy.set()
            beats.join()
            if self._spans is not None:
                self._spans.stop()
            for link in self._links.values():
                link.close("the worker stops")
            if self._engine.inspector is not None:
                self._engine.inspector.close()
            self._selector.close()
            for waker in (self._wake_read, self._wake_write, self._listener):
                waker.close()

    # -- steps -----------------------------------------------------------------------------------------------

    @property
    def _blocked(self) -> bool:
        return self._engine.inspector is not None and self._engine.inspector.blocked

    def _sleep_s(self) -> float:
        if not self._engine.has_work:
            return COMPILE_POLL_S if self._engine.compiling else IDLE_TURN_S
        if not self._may_answer() or self._blocked:
            return LEASE_POLL_S
        return min(self._took_s, self._rest_s) if self._engine.scheduler.rests else 0.0

    def _step(self) -> None:
        self._step_began_s = self._clock()
        began_ns, computed = self._spans.begin_step() if self._spans else 0, self._engine.computed
        outcome = self._engine.step()
        self._took_s = self._clock() - self._step_began_s
        if self._spans is not None:
            self._spans.end_step(began_ns, outcome, self._engine.computed - computed)
        self._step_began_s = None
        if outcome is None:
            return
        self._runs.spread(outcome)
        faults.point("step-before-tokens")
        for owner, prompts in outcome.prompts.items():
            self._send(owner, Step(tokens=[], prompts=prompts))
        for owner, tokens in outcome.tokens.items():
            dropped, routed = outcome.dropped.get(owner, []), outcome.routed.get(owner, [])
            self._send(owner, Step(tokens=tokens, dropped=dropped, routed=routed))
        faults.point("step-after-tokens")
        for owner, failures in outcome.failed.items():
            for failed in failures:
                self._send(owner, failed)
        for link in list(self._links.values()):
            if link.lost:
                self._drop(link)

    def _send(self, owner: int, message: ToGateway) -> None:
        if owner != NOBODY:
            self._links[owner].send(message)

    def _tell_begun(self, requests: Sequence[Request]) -> None:
        """Say which requests are computed from now on, so that no other is suspected should this process die of one."""
        begun: dict[int, list[tuple[str, int]]] = {}
        for request in requests:
            for owner, id, attempt in self._runs.listeners(request):
                begun.setdefault(owner, []).append((id, attempt))
        for owner, marks in begun.items():
            self._links[owner].send(Step(tokens=[], begun=marks))

    def _tell_load(self) -> None:
        """Say how busy this worker is: from time to time, and once when it has nothing to do."""
        idle, now_s = not self._engine.has_work, time.monotonic()
        if self._told_idle if idle else now_s - self._told_s < LOAD_S:
            return
        if self._may_answer():
            self._told_s, self._told_idle = now_s, idle
            runs = self._runs
            told = {"joined": runs.joined, "kept": runs.kept, "told": runs.told}
            load = msgspec.structs.replace(self._engine.worker_load(), **told)
            for link in self._links.values():
                link.send(Step(tokens=[], load=load))

    def _tell_inspection(self) -> None:
        news = self._engine.inspector.news() if self._engine.inspector is not None else None
        if news is not None and (link := self._links.get(news[0])) is not None:
            link.send(news[1])

    def _inspect(self, order: Inspect, link: GatewayLink) -> None:
        if self._engine.inspector is None:
            link.send(Inspected(id=order.id, fault=NOT_INSPECTED, ended=True))
        else:
            refusal = self._engine.inspector.begin(order, link.owner)
            if refusal is not None:
                link.send(refusal)

    def _beat(self) -> None:
        longest_s = self._engine.config.deadline_s + STUCK_MARGIN_S
        while self._busy.wait() and not self._ended.wait(BEAT_S):
            now_s, began_s = self._clock(), self._step_began_s
            if began_s is not None and sum(link.read() for link in list(self._links.values())):
                # The step may have ended meanwhile: who sleeps in select sees nothing in the sockets any more.
                self.wake()
            if (
                not self._busy.is_set()
                or self._stands()
                or not self._may_answer()
                or now_s - (began_s or now_s) > longest_s
            ):
                continue
            for link in list(self._links.values()):
                if time.monotonic() - link.spoke_s >= BEAT_S:
                    link.send(Step(tokens=[]))

    # -- sockets ---------------------------------------------------------------------------------------------

    def _exchange(self, timeout_s: float) -> None:
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
                    link.read()
        for link in list(self._links.values()):
            for came_s, data in link.take():
                if not link.lost:
                    self._receive(link, came_s, data)
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
        link = GatewayLink(self._owners, connection, self._selector, self._clock)
        self._selector.register(connection, selectors.EVENT_READ, link)
        log.info("gateway_connected peer=%s owner=%d", peer, link.owner)
        link.send(self._hello)
        self._links[link.owner] = link
        self._told_idle = False

    def _receive(self, link: GatewayLink, came_s: float, data: bytes) -> None:
        try:
            messages = link.reader.feed(data)
        except ProtocolError as error:
            link.lost = str(error)
            return
        for message in messages:
            if isinstance(message, Submit):
                reply = self._send_on(message, link) or self._runs.submit(message, link.owner, self._clock(), came_s)
                if reply is not None:
                    link.send(reply)
                if self._spans is not None and not isinstance(reply, Failed):
                    self._spans.submitted(message, link.owner)
            elif isinstance(message, Cancel):
                self._runs.cancel(message.id, link.owner)
            elif isinstance(message, ForgetBlocks):
                self._engine.scheduler.forget_blocks()
            elif isinstance(message, Inspect):
                self._inspect(message, link)
            elif self._engine.inspector is not None:
                self._engine.inspector.end(message.id)
        if any(isinstance(message, Cancel) for message in messages):
            # With nothing left to do it would be silent, and a gateway that thought it frozen would never know better.
            link.send(Step(tokens=[]))

    def _send_on(self, message: Submit, link: GatewayLink) -> Failed | None:
        """The refusal of a request that is better off elsewhere."""
        reason, code = self._elsewhere(), "class_lost"
        if not reason and message.key and len(link.unread) > UNREAD_LIMIT_BYTES // 2:
            # What is known of its run already would lie here too.
            reason, code = f"{len(link.unread)} bytes lie unread for this gateway", "overloaded"
        return Failed.of(message, code, f"{self._hello.name}: {reason}.", retryable=True) if reason else None

    def _drop(self, link: GatewayLink) -> None:
        cancelled = self._runs.leave(link.owner, self._clock())
        log.info("gateway_gone owner=%d cancelled=%d reason=%s", link.owner, cancelled, link.lost)
        link.close(link.lost)
        del self._links[link.owner]
        if self._engine.inspector is not None:
            self._engine.inspector.owner_lost(link.owner)

    def _dismiss(self, reason: str) -> None:
        message = f"{self._hello.name} stops: {reason}."
        for request in self._engine.live():
            for listener in self._runs.listeners(request):
                failed = Failed.of(listener, "shutting_down", message, retryable=True)
                self._links[listener.owner].send(failed)
            self._engine.cancel(request.id, request.owner)
        end_s = time.monotonic() + FLUSH_S
        for link in self._links.values():
            while link.unread and not link.lost and time.monotonic() < end_s:
                self._selector.select(end_s - time.monotonic())
                link.flush()
