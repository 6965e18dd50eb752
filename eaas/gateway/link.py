"""One connection to one attention worker: messages in and out, nothing decided here."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol, cast

from eaas.gateway.silence import Silence
from eaas.worker.protocol import (
    Failed,
    Hello,
    PromptLogprobs,
    ProtocolError,
    RoutedExperts,
    Step,
    Token,
    ToWorker,
    WorkerLoad,
    encode,
    for_gateway,
)

log = logging.getLogger(__name__)


class LinkOwner(Protocol):
    """Who is told what arrives; called on the event loop."""

    def link_ready(self, link: WorkerLink) -> None: ...

    def link_lost(self, link: WorkerLink, reason: str) -> None: ...

    def tokens(self, link: WorkerLink, tokens: list[Token]) -> None: ...

    def begun(self, marks: list[tuple[str, int]]) -> None: ...

    def dropped(self, marks: list[tuple[str, int]]) -> None: ...

    def judged(self, pieces: list[PromptLogprobs]) -> None: ...

    def routed(self, pieces: list[RoutedExperts]) -> None: ...

    def failed(self, link: WorkerLink, message: Failed) -> None: ...

    def woke(self, link: WorkerLink, silence_s: float) -> None: ...


class WorkerLink(asyncio.Protocol):
    """A connection from its start to its end; a new one is made to connect again.

    Attributes:
        hello: What the worker said of itself; None until then.
        outstanding: Tokens still to be computed for the choices sent here.
        heard_s: Monotonic time of the last message.
        silence: What is known of its silences while it had work.
        told_s: When the router was last told of its silence.
        load: What it last said of its load; None before.
        closed: Done when the connection has ended.
    """

    def __init__(self, owner: LinkOwner, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.hello: Hello | None = None
        self.outstanding = 0
        self.chosen = 0
        self.load: WorkerLoad | None = None
        loop = asyncio.get_running_loop()
        self.heard_s = time.monotonic()
        self.silence = Silence()
        self.told_s = 0.0
        self.closed: asyncio.Future[None] = loop.create_future()
        self._owner = owner
        self._reader = for_gateway()
        self._transport: asyncio.Transport | None = None
        self._lost = False

    @property
    def ready(self) -> bool:
        """Whether requests may be sent."""
        return self.hello is not None and not self._lost

    def send(self, message: ToWorker) -> None:
        """Queue one message; a connection that has ended takes it silently, since its loss is reported
        anyway.

        Raises:
            ProtocolError: the message is too large for a frame.
        """
        frame = encode(message)
        if self._transport is not None and not self._lost:
            self._transport.write(frame)

    def drop(self, reason: str) -> None:
        """End the connection at once and report it lost. Idempotent."""
        if self._lost:
            return
        self._lost = True
        log.warning("worker_lost name=%s incarnation=%d reason=%s", self.name, self.incarnation, reason)
        if self._transport is not None:
            self._transport.abort()
        self._finish(reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the socket is connected."""
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """asyncio: decode what is complete and pass it on."""
        now_s = time.monotonic()
        silence_s, self.heard_s = now_s - self.heard_s, now_s
        if (self.outstanding or self.silence.alarmed) and self.silence.heard(silence_s, now_s):
            self._owner.woke(self, silence_s)
        try:
            messages = self._reader.feed(data)
        except ProtocolError as error:
            self.drop(f"bad_message ({error})")
            return
        for message in messages:
            if self._lost:
                return
            if type(message) is Step:
                if message.begun:
                    self._owner.begun(message.begun)
                if message.dropped:
                    self._owner.dropped(message.dropped)
                if message.prompts:
                    self._owner.judged(message.prompts)
                if message.routed:
                    self._owner.routed(message.routed)
                self._owner.tokens(self, message.tokens)
                self.load = message.load or self.load
            elif type(message) is Failed:
                self._owner.failed(self, message)
            elif type(message) is Hello:
                self._greet(message)

    def _greet(self, hello: Hello) -> None:
        if hello.incarnation != self.incarnation:
            self.drop(f"another worker answers at its address: {hello.name} incarnation {hello.incarnation}")
            return
        self.hello = hello
        log.info(
            "worker_ready name=%s incarnation=%d class=%s",
            hello.name,
            hello.incarnation,
            hello.numerics_class,
        )
        self._owner.link_ready(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the peer closed or died."""
        if self._lost:
            return
        self._lost = True
        reason = "closed" if exc is None else f"closed ({exc})"
        log.warning("worker_lost name=%s incarnation=%d reason=%s", self.name, self.incarnation, reason)
        self._finish(reason)

    def _finish(self, reason: str) -> None:
        self._owner.link_lost(self, reason)
        if not self.closed.done():
            self.closed.set_result(None)
