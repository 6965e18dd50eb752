"""The attention workers that the router's View names, and one connection to each. What runs where is for the pool."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, cast

from eaas.gateway.failover import Silence
from eaas.worker.protocol import (
    PROTOCOL,
    Failed,
    Hello,
    Inspected,
    ProtocolError,
    Step,
    ToWorker,
    WorkerLoad,
    encode,
    for_gateway,
)
from router.access import server_name
from router.tls import Credentials
from router.view import ATTENTION, DRAINING, SERVING, SUSPECT, Member, View, covering

if TYPE_CHECKING:
    from eaas.gateway.pool import WorkerPool

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 2.0
_RETRY_FIRST_S = 0.05
_RETRY_MOST_S = 1.0
_CONNECTED_STATES = frozenset({SERVING, SUSPECT, DRAINING})


class WorkerLink(asyncio.Protocol):
    """A connection from its start to its end, which tells its pool what arrives; to connect again another is made.

    Attributes:
        hello: What the worker said of itself; None until then.
        outstanding: Tokens still to be computed for the choices sent here.
        chosen: Higher, the later it was chosen last.
        heard_s: Monotonic time of the last message.
        silence: What is known of its silences while it had work.
        told_s: When the router was last told of its silence.
        load: What it last said of its load; None before.
        closed: Done when the connection has ended.
    """

    def __init__(self, owner: WorkerPool, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.hello: Hello | None = None
        self.outstanding = self.chosen = 0
        self.load: WorkerLoad | None = None
        self.heard_s, self.told_s = time.monotonic(), 0.0
        self.silence = Silence()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._reader = for_gateway()
        self._transport: asyncio.Transport | None = None
        self._lost = False

    @property
    def ready(self) -> bool:
        """Whether requests may be sent."""
        return self.hello is not None and not self._lost

    @property
    def numerics_class(self) -> str:
        """The worker's; empty before it has said."""
        return self.hello.numerics_class if self.hello else ""

    def send(self, message: ToWorker) -> None:
        """Queue one message; a connection that has ended takes it silently, since its loss is reported anyway.

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
        if self._transport is not None:
            self._transport.abort()
        self._owner.link_lost(self, reason)
        if not self.closed.done():
            self.closed.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
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
                self._owner.step(self, message)
                self.load = message.load or self.load
            elif type(message) is Failed:
                self._owner.failed(self, message)
            elif type(message) is Hello:
                self._greet(message)
            elif type(message) is Inspected:
                self._owner.inspections.heard(self, message)

    def _greet(self, hello: Hello) -> None:
        if hello.incarnation != self.incarnation:
            self.drop(f"another worker answers at its address: {hello.name} incarnation {hello.incarnation}")
            return
        self.hello = hello
        found = self.name, self.incarnation, hello.numerics_class
        log.info("worker_ready name=%s incarnation=%d class=%s", *found)
        self._owner.link_ready(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.drop("closed" if exc is None else f"closed ({exc})")


class _Worker:
    """A member of the attention pool and its present connection."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.link: WorkerLink | None = None
        self.task: asyncio.Task[None] | None = None
        self.draining_s: float | None = None  # since when


class Workers:
    """Members of the attention pool, each connected to again and again while the View names it."""

    def __init__(self, owner: WorkerPool, credentials: Credentials | None = None) -> None:
        """Args: credentials: of this gateway; with them it speaks only to those that prove to be attention workers."""
        self._owner = owner
        self._credentials = credentials
        self._loop = asyncio.get_running_loop()
        self._workers: dict[int, _Worker] = {}
        self.view: View | None = None

    def follow(self, view: View) -> list[WorkerLink]:
        """Connect to new attention workers of the View, which is of one model, and give up those that it has fenced.
        Returns: Connections to those that have just begun to drain."""
        self.view = view
        present = {m.incarnation: m for m in view.pool(ATTENTION) if m.state in _CONNECTED_STATES}
        for incarnation in [i for i in self._workers if i not in present]:
            self._remove(incarnation, "left_the_view")
        drains: list[WorkerLink] = []
        for incarnation, member in present.items():
            worker = self._workers.get(incarnation)
            if worker is None:
                worker = self._workers[incarnation] = _Worker(member)
                worker.task = self._loop.create_task(self._keep_connected(worker))
            worker.member = member
            if member.state != DRAINING:
                worker.draining_s = None
            elif worker.draining_s is None:
                worker.draining_s = time.monotonic()
                drains += [worker.link] if worker.link else []
        return drains

    def ready(self) -> list[WorkerLink]:
        """Connections that take requests."""
        # A copy: the load report asks from another thread.
        return [w.link for w in list(self._workers.values()) if w.link is not None and w.link.ready]

    def missing(self) -> bool:
        """Whether the View names one that no message reaches now."""
        return any(w.link is None or not w.link.ready for w in self._workers.values())

    def candidates(self) -> list[WorkerLink]:
        """Connections that new work may go to: none that drains, nor one that is silent with work."""
        by_state: dict[str, list[WorkerLink]] = {}
        for worker in self._workers.values():
            if worker.link is not None and worker.link.ready and not worker.link.silence.alarmed:
                by_state.setdefault(worker.member.state, []).append(worker.link)
        # A suspect worker is better than none, and may be slow rather than dead.
        return by_state.get(SERVING) or by_state.get(SUSPECT) or []

    def left_behind(self, link: WorkerLink) -> set[int]:
        """Workers of a connection's numerics class, by incarnation, where its choices can go on in another.

        Empty where no other class of expert servers is whole: then there is nothing to cross to.
        """
        lost = link.numerics_class
        # The last of its words is the class of the servers that it asks.
        if self.view is None or not covering(self.view) - {lost.rpartition("+")[2], ""}:
            return set()
        return {other.incarnation for other in self.ready() if other.numerics_class == lost}

    def draining(self, link: WorkerLink) -> bool:
        """Whether that connection's worker drains."""
        worker = self._workers.get(link.incarnation)
        return worker is not None and worker.draining_s is not None

    def drained_for(self, least_s: float, now_s: float) -> list[WorkerLink]:
        """Connections of workers that have drained for so long."""
        return [
            w.link
            for w in self._workers.values()
            if w.link is not None and w.draining_s is not None and now_s - w.draining_s >= least_s
        ]

    def unready_reason(self) -> str:
        """Why no request can be served now; empty when one can."""
        if self.view is None:
            return "the router has not been heard yet"
        members = self.view.pool(ATTENTION)
        if not members:
            return "the router knows no attention worker"
        if self.candidates():
            return ""
        silent = {link.name for link in self.ready() if link.silence.alarmed}
        states = ", ".join(f"{m.name} is {'silent' if m.name in silent else m.state}" for m in members)
        return f"no attention worker serves: {states}; {len(self.ready())} connected"

    def accepts(self, link: WorkerLink) -> bool:
        """Take a connection whose worker has said what it is into use.

        One to another model, or that speaks another protocol, is dropped.
        """
        hello = link.hello
        if hello is not None and hello.protocol != PROTOCOL:
            spoken = f"it speaks protocol {hello.protocol}, this gateway {PROTOCOL}"
            link.drop(f"{spoken}; start both from the same release")
            return False
        wanted = self.view.model_hash if self.view is not None else ""
        if hello is not None and wanted and hello.model_hash not in ("", wanted):
            link.drop(f"it serves model {hello.model_hash[:12]}, where {wanted[:12]} is needed")
            return False
        worker = self._workers.get(link.incarnation)
        if worker is not None:
            worker.link = link
        return True

    def lost(self, link: WorkerLink) -> None:
        worker = self._workers.get(link.incarnation)
        if worker is not None and worker.link is link:
            worker.link = None

    def close(self) -> None:
        for incarnation in list(self._workers):
            self._remove(incarnation, "gateway_closes")

    def _remove(self, incarnation: int, reason: str) -> None:
        worker = self._workers[incarnation]
        if worker.task is not None:
            worker.task.cancel()
        if worker.link is not None:
            worker.link.drop(reason)
        # Whoever is told of the lost link asks whether its worker drained.
        del self._workers[incarnation]

    async def _keep_connected(self, worker: _Worker) -> None:
        retry_s = _RETRY_FIRST_S
        while True:
            member = worker.member
            host, _, port = member.address.rpartition(":")
            link = WorkerLink(self._owner, member.name, member.incarnation)
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    secure = self._credentials
                    await self._loop.create_connection(
                        lambda link=link: link,
                        host.strip("[]"),
                        int(port),
                        ssl=secure.client_context() if secure else None,
                        server_hostname=server_name(ATTENTION) if secure else None,
                    )
            except (OSError, ValueError) as error:
                log.info("worker_connect_failed name=%s address=%s error=%s", member.name, member.address, error)
            else:
                worker.link = link
                await link.closed
                worker.link = None
                if link.hello is not None:
                    retry_s = _RETRY_FIRST_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _RETRY_MOST_S)
