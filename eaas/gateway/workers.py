"""The attention workers that the router's View names, and one connection to each. What runs where is for the pool."""

from __future__ import annotations

import asyncio
import logging
import time

from eaas.gateway.fleet import Seen
from eaas.gateway.link import LinkOwner, WorkerLink
from eaas.worker.protocol import PROTOCOL
from router.access import server_name
from router.tls import Credentials
from router.view import ATTENTION, DRAINING, SERVING, SUSPECT, Member, View, covering

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 2.0
_RETRY_FIRST_S = 0.05
_RETRY_MOST_S = 1.0
_CONNECTED_STATES = frozenset({SERVING, SUSPECT, DRAINING})


class _Worker:
    """A member of the attention pool and its present connection."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.link: WorkerLink | None = None
        self.task: asyncio.Task[None] | None = None
        self.draining_s: float | None = None  # since when


class Workers:
    """Members of the attention pool, each connected to again and again while the View names it."""

    def __init__(self, owner: LinkOwner, model_hash: str, credentials: Credentials | None = None) -> None:
        """Args: model_hash: fingerprint of the gateway's checkpoint; workers with another are not used. credentials: of
        this gateway; with them it speaks only to those that prove to be attention workers."""
        self._owner = owner
        self._credentials = credentials
        self._model_hash = model_hash
        self._loop = asyncio.get_running_loop()
        self._workers: dict[int, _Worker] = {}
        self.view: View | None = None

    def follow(self, view: View) -> list[WorkerLink]:
        """Connect to new attention workers and give up those that the router has fenced.

        Returns:
            Connections to those that have just begun to drain.
        """
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

    def seen(self) -> list[Seen]:
        """The connected workers, as metrics show them."""
        return [
            Seen(
                name=link.name,
                incarnation=link.incarnation,
                kv_blocks=link.hello.kv_tokens // link.hello.block_tokens,
                block_tokens=link.hello.block_tokens,
                outstanding=link.outstanding,
                load=link.load,
            )
            for link in self.ready()
            if link.hello
        ]

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
        lost = link.hello.numerics_class if link.hello else ""
        # The last of its words is the class of the servers that it asks.
        if self.view is None or not covering(self.view) - {lost.rpartition("+")[2], ""}:
            return set()
        return {x.incarnation for x in self.ready() if x.hello and x.hello.numerics_class == lost}

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
            link.drop(
                f"it speaks protocol {hello.protocol}, this gateway {PROTOCOL}; start both from the same release"
            )
            return False
        if hello is not None and self._model_hash and hello.model_hash not in ("", self._model_hash):
            link.drop(f"it serves model {hello.model_hash[:12]}, this gateway {self._model_hash[:12]}")
            return False
        worker = self._workers.get(link.incarnation)
        if worker is not None:
            worker.link = link
        return True

    def lost(self, link: WorkerLink) -> None:
        """Forget a connection that has ended."""
        worker = self._workers.get(link.incarnation)
        if worker is not None and worker.link is link:
            worker.link = None

    def close(self) -> None:
        """End every connection."""
        for incarnation in list(self._workers):
            self._remove(incarnation, "gateway_closes")

    def _remove(self, incarnation: int, reason: str) -> None:
        worker = self._workers[incarnation]
        if worker.task is not None:
            worker.task.cancel()
        if worker.link is not None:
            worker.link.drop(reason)
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
                log.info(
                    "worker_connect_failed name=%s address=%s error=%s", member.name, member.address, error
                )
            else:
                worker.link = link
                await link.closed
                worker.link = None
                if link.hello is not None:
                    retry_s = _RETRY_FIRST_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _RETRY_MOST_S)
