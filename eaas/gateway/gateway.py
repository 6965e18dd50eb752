"""What all routes of one gateway share: configuration, model, workers, metrics, and who is let in."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from eaas.gateway import errors
from eaas.gateway.config import GatewayConfig
from eaas.gateway.dashboard.app import Dashboard
from eaas.gateway.dashboard.history import ClusterSnapshot
from eaas.gateway.errors import ApiError
from eaas.gateway.guard import json_body
from eaas.gateway.inspections import Inspections
from eaas.gateway.metrics import GatewayMetrics
from eaas.gateway.pool import WorkerPool
from eaas.gateway.served_model import ServedModel
from eaas.gateway.stream import EventStream, Exchange, Work
from eaas.worker.protocol import Share
from eaas.worker.shares import has_room
from router.view import View

R = TypeVar("R", bound=BaseModel)


class ViewSource(Protocol):
    """Where Views come from: the router's client, or a stand-in."""

    @property
    def name(self) -> str: ...

    def start(self, on_view: Callable[[View], None], load: Callable[[], Mapping[str, float]]) -> None: ...

    def snapshot(self, *, rows: bool = True) -> ClusterSnapshot: ...

    def suspect(self, name: str, incarnation: int, reason: str) -> None: ...

    def scale(self, pool: str, wanted: int, drain_s: float | None) -> None: ...

    def close(self) -> None: ...


class Gateway:
    """Everything that the routes share, for the life of the process."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        model: ServedModel,
        views: ViewSource,
        version: str,
        address: str,
        resume_key: bytes = b"",
    ) -> None:
        """Args: resume_key: what the gateways of a cluster seal their event ids with; empty: one is drawn, and nobody
        else goes on with a stream of this gateway."""
        self.config = config
        self.model = model
        self.version = version
        self.address = address
        self.resume_key = resume_key or secrets.token_bytes(32)
        self.metrics = GatewayMetrics(model.name, config.ttft_target_s, config.tpot_target_s)
        self.running = 0
        self._in_progress: Counter[Share] = Counter()  # of these, whose they are
        self.draining = False
        self._paused_s: float | None = None  # since when new requests are refused
        self.exchanges: dict[str, Exchange] = {}  # those in progress
        self._loop: asyncio.AbstractEventLoop | None = None
        self.views = views
        self.dashboard = Dashboard(self, views.snapshot)
        self.beside = [self.dashboard.running]  # what runs for as long as the gateway serves
        self.on_stop = [self.dashboard.close]  # ends streams of theirs
        self._pool: WorkerPool | None = None
        self.started_s = time.monotonic()

    @property
    def name(self) -> str:
        """This gateway's name as a member; ``gateway/0`` until the router has given it one."""
        return self.views.name

    @property
    def pool(self) -> WorkerPool:
        """The attention workers; there from start-up to shutdown."""
        if self._pool is None:
            raise RuntimeError("the gateway has not started: run it under an ASGI server with lifespan on")
        return self._pool

    @property
    def inspections(self) -> Inspections:
        """What attention workers record for an operator."""
        return self.pool.inspections

    @property
    def paused(self) -> bool:
        """Whether new requests are refused, as an operator wants."""
        return self._paused_s is not None

    @paused.setter
    def paused(self, paused: bool) -> None:
        now_s = time.monotonic()
        if self._paused_s is not None and not paused:
            self.pool.eta.lasted("pause", now_s - self._paused_s)
        self._paused_s = (now_s if self._paused_s is None else self._paused_s) if paused else None

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Start the pool and follow the router until shutdown."""
        loop = self._loop = asyncio.get_running_loop()
        pool = self._pool = WorkerPool(self.config, self.metrics, self.model.fingerprint)
        self.metrics.workers, self.metrics.waiting = pool.links, lambda: pool.waiting
        self.metrics.gauges |= {
            "eaas_running": ("Requests in progress.", lambda: self.running),
            "eaas_choices": ("Choices in flight.", lambda: pool.running),
            "eaas_waiting": ("Choices that wait for an attention worker.", lambda: pool.waiting),
            "eaas_paused": ("Choices that wait for their client to read.", lambda: pool.paused),
            "eaas_owed_tokens": ("Tokens still to be computed, as reckoned.", lambda: pool.owed_tokens),
            "eaas_eta_p50_seconds": (
                "Median of what a request sent now is predicted to take.",
                lambda: pool.eta.sent_now().p50_s,
            ),
            "eaas_eta_p90_seconds": ("Its 90th percentile.", lambda: pool.eta.sent_now().p90_s),
            "eaas_attention_workers": ("Attention workers connected.", lambda: len(pool.links())),
        }

        def on_view(view: View) -> None:
            loop.call_soon_threadsafe(pool.apply_view, view)
            loop.call_soon_threadsafe(self.dashboard.follow, view)

        def on_silent(name: str, incarnation: int, reason: str) -> None:
            # Only a hint, so nobody waits for it.
            loop.run_in_executor(None, self.views.suspect, name, incarnation, reason)

        pool.on_silent = on_silent
        # It may wait a moment for the router.
        await asyncio.to_thread(self.views.start, on_view, pool.load)
        try:
            async with AsyncExitStack() as running:
                for one in self.beside:
                    await running.enter_async_context(one())
                yield
        finally:
            pool.close()
            await asyncio.to_thread(self.views.close)

    def call(self, act: Callable[[], None]) -> None:
        """Carry out an act on the event loop; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(act)

    def stop(self) -> None:
        """Fail what is in progress with a retryable error, so that every response ends now."""
        for end in self.on_stop:
            end()
        if self._pool is not None:
            self._pool.close()

    # -- requests

    async def body_of(self, request: Request) -> bytes:
        """The body of a request, which is read once.

        Raises:
            ApiError: it is said to be no JSON, too large, too slow, or nested too much.
        """
        known = getattr(request.state, "body", None)
        if known is None:
            known = await json_body(request, self.config.max_body_bytes, self.config.body_timeout_s)
            request.state.body = known
        return known

    async def parse(self, request: Request, shape: type[R]) -> R:
        """What a request asks. Its body is not kept: an answer may be streamed for hours.

        Raises:
            ApiError: as for `body_of`; or it is not of that shape; 404, it names another model than the one served
                here, which is meant where none is named.
        """
        body = await self.body_of(request)
        del request.state.body
        asked = errors.checked(shape, body)
        name: str | None = getattr(asked, "model", None)
        if name not in (None, self.model.name):
            raise errors.unknown_model(name, self.model.name)
        return asked

    async def counted(self, endpoint: str, reply: Coroutine[Any, Any, Response]) -> Response:
        """Await a reply and count it under ``endpoint``."""
        started_s = time.monotonic()

        def count(status: int) -> None:
            self.metrics.count_request(endpoint, status, time.monotonic() - started_s)

        try:
            response = await reply
        except BaseException as error:
            count(error.reply.status if isinstance(error, ApiError) else 500)
            raise
        if isinstance(response, EventStream):
            # It is counted when it ends: its status is not known before.
            response.on_end = count
        else:
            count(response.status_code)
        return response

    def admit(self, share: Share) -> None:
        """Let one request of a tenant in; ``release`` must follow.

        Raises:
            ApiError: 429, as many are in progress as may be; 503, an operator has paused this gateway.
        """
        self.refuse_if_paused()
        self._let_in(share)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let one request in that nothing is computed for, or whose body is to be read first.

        Raises:
            ApiError: 429, as many are in progress as may be.
        """
        nobody = Share()
        self._let_in(nobody)
        try:
            yield
        finally:
            self.release(nobody)

    def _let_in(self, share: Share) -> None:
        most = self.config.max_requests
        if self.running >= most and not has_room(self._in_progress, share, most):
            self.metrics.count_refused("requests")
            raise errors.full(
                f"{self.running} requests are in progress, the most that this server takes. Try again shortly.",
                after_s=self.pool.eta.freed_s(time.monotonic()),
            )
        self.running += 1
        self._in_progress[share] += 1

    def refuse_if_paused(self) -> None:
        """Let no request begin while an operator wants none.

        Raises:
            ApiError: 503.
        """
        if self._paused_s is not None:
            self.metrics.count_refused("paused")
            age_s = time.monotonic() - self._paused_s
            message = "An operator has paused this server. Try again later."
            raise errors.unavailable(message, code="paused", after_s=self.pool.eta.back_s("pause", age_s))

    def admit_tokens(self, work: Work) -> None:
        """Refuse a request that would make what is owed too much.

        Raises:
            ApiError: 429.
        """
        cost, most = work.cost(self.config.batch_tokens), self.config.max_owed_tokens
        if self.pool.owed_tokens + cost <= most:
            return
        by_share = self.pool.owed_by_share()
        owed = by_share.total()
        if owed and not has_room(by_share, work.share, most, cost):
            self.metrics.count_refused("tokens")
            too_many = (owed + cost - most) * self.pool.running / owed
            raise errors.full(
                f"{owed} tokens are still to be computed here, and this request would make them more than {most}. "
                "Try again shortly.",
                after_s=self.pool.eta.freed_s(time.monotonic(), max(1.0, too_many)),
            )

    def release(self, share: Share) -> None:
        """One request of a tenant has ended."""
        self.running -= 1
        self._in_progress -= Counter((share,))  # which keeps those alone that have some
