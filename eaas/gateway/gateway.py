"""What all routes of one gateway share: configuration, models with their workers, metrics, and who is let in.

The router's View says which models there are. Each has a pool of workers, counters and limits of its own, so that no
request for one is refused, delayed or answered for the sake of another."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from eaas.gateway import errors
from eaas.gateway.config import GatewayConfig
from eaas.gateway.dashboard.app import Dashboard
from eaas.gateway.dashboard.history import ClusterSnapshot
from eaas.gateway.errors import ApiError
from eaas.gateway.guard import json_body
from eaas.gateway.inspections import Inspections, InspectRequest
from eaas.gateway.metrics import GatewayMetrics
from eaas.gateway.pool import WorkerPool
from eaas.gateway.served_model import ModelUnusable, ServedModel, load_model
from eaas.gateway.stream import EventStream, Exchange, Work
from eaas.worker.protocol import Share
from eaas.worker.shares import has_room
from router.view import FOR, Model, View, of_model

log = logging.getLogger(__name__)

R = TypeVar("R", bound=BaseModel)
# Words of the load report that add up over models; of the others the highest counts.
_ADD_UP = frozenset({"running", "waiting", "backlog_tokens"})
# A checkpoint that could not be read is tried again after so long.
_AGAIN_S = 60.0


class ViewSource(Protocol):
    """Where Views come from: the router's client, or a stand-in."""

    @property
    def name(self) -> str:
        """As a member; ``gateway/0`` until the router has given it one."""
        ...

    def start(self, on_view: Callable[[View], None], load: Callable[[], Mapping[str, float]]) -> None: ...

    def snapshot(self, *, rows: bool = True) -> ClusterSnapshot: ...

    def suspect(self, name: str, incarnation: int, reason: str) -> None: ...

    def scale(self, pool: str, wanted: int, drain_s: float | None) -> None: ...

    def close(self) -> None: ...


class Served:
    """A model that is served: what it is, its attention workers, its counters, and how many of its requests are let in.

    Attributes:
        leaving: It takes no new requests.
        running: Its requests in progress.
        dashboard: What is shown of it.
    """

    dashboard: Dashboard

    def __init__(self, model: ServedModel, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        self.model, self.config, self.metrics = model, config, metrics
        self.pool = WorkerPool(config, metrics)
        metrics.workers, metrics.waiting = self.pool.links, lambda: self.pool.waiting
        self.leaving = False
        self.running = 0
        self._in_progress: Counter[Share] = Counter()  # of these, whose they are

    @property
    def context(self) -> int:
        """Tokens that fit in the context, on every connected worker too."""
        return min(self.model.max_model_len, self.pool.max_model_len or self.model.max_model_len)

    def admit(self, share: Share) -> None:
        """Let one request of a tenant in; ``release`` must follow. Raises ApiError: 429, as many of this model are in
        progress as may be."""
        most = self.config.max_requests
        if self.running >= most and not has_room(self._in_progress, share, most):
            raise self.too_many(f"{self.running} requests for `{self.model.name}`")
        self.running += 1
        self._in_progress[share] += 1

    def too_many(self, found: str) -> ApiError:
        """A 429, counted. Args: found: so many requests."""
        self.metrics.count_refused("requests")
        message = f"{found} are in progress, the most that this server takes. Try again shortly."
        return errors.full(message, after_s=self.pool.eta.freed_s(time.monotonic()))

    def release(self, share: Share) -> None:
        self.running -= 1
        self._in_progress -= Counter((share,))  # which keeps those alone that have some

    def admit_tokens(self, work: Work) -> None:
        """Refuse a request that would make what is owed of this model too much. Raises ApiError: 429."""
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


# Of each model, on the page of metrics.
_GAUGES: Mapping[str, tuple[str, Callable[[Served], float]]] = {
    "eaas_running": ("Requests in progress.", lambda served: served.running),
    "eaas_choices": ("Choices in flight.", lambda served: served.pool.running),
    "eaas_waiting": ("Choices that wait for an attention worker.", lambda served: served.pool.waiting),
    "eaas_paused": ("Choices that wait for their client to read.", lambda served: served.pool.paused),
    "eaas_owed_tokens": ("Tokens still to be computed, as reckoned.", lambda served: served.pool.owed_tokens),
    "eaas_eta_p50_seconds": (
        "Median of what a request sent now is predicted to take.",
        lambda served: served.pool.eta.sent_now().p50_s,
    ),
    "eaas_eta_p90_seconds": ("Its 90th percentile.", lambda served: served.pool.eta.sent_now().p90_s),
    "eaas_attention_workers": ("Attention workers connected.", lambda served: len(served.pool.links())),
}


class Gateway:
    """Everything that the routes share, for the life of the process.

    Attributes:
        models: Those of the router's newest View that can be served here, by name; leaving ones too.
        view: That View; None before the first.
        metrics: Of the model that this gateway was started with; what is of no model's counts there too.
        gauges: Of each model, by name: what it says, and how it is read.
        running: Requests in progress, of whichever model.
    """

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
        """Args: model: that which is meant where a request names none. resume_key: what the gateways of a cluster seal
        their event ids with; empty: one is drawn, and nobody else goes on with a stream of this gateway."""
        self.config = config
        self._model = model
        self.version = version
        self.address = address
        self.resume_key = resume_key or secrets.token_bytes(32)
        self.metrics = self._counters(model.name)
        self.metrics.others = lambda: [served.metrics for served in self.all()[1:]]
        self.gauges = dict(_GAUGES)
        self.models: dict[str, Served] = {}
        self.view: View | None = None
        self._inspected: dict[str, Inspections] = {}  # by name of the model, which may be here no more
        self._served: dict[str, Served] = {}  # by hash, the own one first; some may only end what they run
        self._known = asyncio.Event()  # the View has said which of its models is the own one
        self._first: frozenset[str] = frozenset()  # hashes of the first View's
        self._changed_s = 0.0  # when Views last named other models than before
        self._tried: dict[str, Model] = {}  # what was to be loaded, by hash
        self._loads: set[asyncio.Task[None]] = set()
        self.running = 0
        self._in_progress: Counter[Share] = Counter()  # of these, whose they are
        self.draining = False
        self._paused_s: float | None = None  # since when new requests are refused
        self.exchanges: dict[str, Exchange] = {}  # those in progress
        self._loop: asyncio.AbstractEventLoop | None = None
        self.views = views
        # What runs for as long as the gateway serves.
        self.beside: list[Callable[[], AbstractAsyncContextManager[None]]] = []
        self.on_stop: list[Callable[[], None]] = []  # ends streams of theirs
        self.started_s = time.monotonic()

    @property
    def own(self) -> Served:
        """The model that this gateway was started with; there from start-up to shutdown, though it may have left."""
        if not self._served:
            raise RuntimeError("the gateway has not started: run it under an ASGI server with lifespan on")
        return next(iter(self._served.values()))

    def all(self) -> list[Served]:
        """Models with pools, the own one first; of some no more than what they run is to end. Any thread."""
        return list(self._served.values())

    @property
    def listed(self) -> dict[str, Served]:
        """Models that take requests, by name."""
        return {name: served for name, served in self.models.items() if not served.leaving}

    def find(self, name: str | None, *, begun: bool = False) -> Served:
        """The model of that name; the own one where there is none.
        Args: begun: it was asked for before, so that it may be leaving, or not be here yet. Raises ApiError: 404, it is
        not served; 503, it may be before long."""
        name = self.own.model.name if name is None else name
        served = self.models.get(name)
        if served is not None and (begun or not served.leaving):
            return served
        if name and self.awaits(name, begun=begun):
            raise errors.unavailable(f"The model `{name}` is not served here yet.", after_s=0.0)
        raise errors.unknown_model(name, self.listed)

    def awaits(self, name: str, *, begun: bool = True) -> bool:
        """Whether a model that is not served here may be yet: the View names it, and as one that takes new requests;
        or, where it was asked for before, as one that leaves, or it has just changed."""
        if self.view is None or any(e.name == name and (begun or not e.leaving) for e in self.view.models):
            return True
        return begun and time.monotonic() - self._changed_s < self.config.deadline_s

    async def inspect(self, asked: InspectRequest) -> dict[str, Any]:
        """Have attention workers record for an operator. Raises ApiError, as `find` and `Inspections.begin`."""
        served = self.find(asked.model)
        asked.model = served.model.name
        state = await served.pool.inspections.begin(asked)
        self._inspected[asked.model] = served.pool.inspections
        return state

    def inspections(self, name: str | None) -> Inspections:
        """What they record of a model, or have recorded of one that was removed. Raises ApiError, as `find`."""
        name = self.own.model.name if name is None else name
        return self._inspected.get(name) or self.find(name).pool.inspections

    def unready_reason(self) -> str:
        """Why this gateway should be asked nothing: no model has a worker, or one is read that was there at its start.

        A model that has lost its workers, or cannot be read, takes no other down with it.
        """
        listed = self.listed
        found = {name: reason for name, served in listed.items() if (reason := served.pool.unready_reason())}
        if len(found) < len(listed):
            found = {}
        for entry in self.view.models if self.view is not None else ():
            first = entry.hash in self._first and entry.hash in self._tried
            if first and entry.hash not in self._served and not entry.leaving:
                found[entry.name] = "its checkpoint is not read yet"
        if not listed and not found:
            return "the router's View names no model that is served here"
        if len(listed.keys() | found.keys()) > 1:
            return "; ".join(f"model {name}: {reason}" for name, reason in found.items())
        return "".join(found.values())

    @property
    def paused(self) -> bool:
        """Whether new requests are refused, as an operator wants."""
        return self._paused_s is not None

    @paused.setter
    def paused(self, paused: bool) -> None:
        now_s = time.monotonic()
        if self._paused_s is not None and not paused:
            self.own.pool.eta.lasted("pause", now_s - self._paused_s)
        self._paused_s = (now_s if self._paused_s is None else self._paused_s) if paused else None

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Follow the router, and the workers of each model, until shutdown."""
        loop = self._loop = asyncio.get_running_loop()
        own = self._serve(self._model, self.metrics)
        self.models = {own.model.name: own}

        def on_view(view: View) -> None:
            loop.call_soon_threadsafe(self.follow, view)

        # It may wait a moment for the router.
        await asyncio.to_thread(self.views.start, on_view, self.load)
        try:
            async with AsyncExitStack() as running:
                for one in self.beside:
                    await running.enter_async_context(one())
                yield
        finally:
            self._close_pools()
            await asyncio.to_thread(self.views.close)

    # -- models

    def follow(self, view: View) -> None:
        """Serve the models of a View, each by its own workers; on the event loop."""
        own, before, self.view = self.own, self.view, view
        if not own.model.fingerprint:
            found = max(view.models, key=lambda it: _likeness(it, own.model), default=None)
            if found is not None and _likeness(found, own.model):
                own.model = replace(own.model, fingerprint=found.hash)
                self._served = {found.hash: own, **dict(list(self._served.items())[1:])}
                self._known.set()
        hash = own.model.fingerprint
        # A router that knows no model yet has this gateway's.
        entries = {entry.hash: entry for entry in view.models} or {hash: Model(hash=hash)}
        if before is None:
            self._first = frozenset(entries)
        if before is None or before.models != view.models:
            self._changed_s = time.monotonic()
        self._tried = {hash: entry for hash, entry in self._tried.items() if hash in entries}
        for hash, entry in entries.items():
            asked = entry.name and entry.path and not entry.leaving
            known = hash in self._served or (hash in self._tried and self._tried[hash].path == entry.path)
            if asked and not known:
                self._tried[hash] = entry
                load = asyncio.get_running_loop().create_task(self._load(entry))
                self._loads.add(load)
                load.add_done_callback(self._loads.discard)
        for hash, served in self._served.items():
            if entry := entries.get(hash):
                name = entry.name or (self._model.name if served is own else served.model.name)
                if name != served.model.name:
                    served.model = replace(served.model, name=name)
                served.leaving = entry.leaving
            part = of_model(view, served.model.fingerprint)
            served.pool.apply_view(part)
            served.dashboard.follow(part)
        self.models = self._by_name(entries)
        self.let_go()

    def _by_name(self, entries: Mapping[str, Model]) -> dict[str, Served]:
        """Models of the View by name. Of several of one name the one that takes requests has it, and its series too;
        those of the others, which end what they run, are told apart by their hash."""
        models: dict[str, Served] = {}
        labels: set[str] = set()
        for hash, served in sorted(self._served.items(), key=lambda item: (item[0] not in entries, item[1].leaving)):
            name = served.model.name
            served.metrics.model_name = f"{name}@{hash[:12]}" if name in labels else name
            labels.add(name)
            if hash in entries:
                models.setdefault(name, served)
        return models

    async def served_as(self, name: str | None, *, begun: bool = False) -> Served:
        """As `find`, once a View has said which checkpoint that is. Raises ApiError: 503 too, none did in time."""
        served = self.find(name, begun=begun)
        try:
            if not served.model.fingerprint:
                await asyncio.wait_for(self._known.wait(), self.config.deadline_s)
        except TimeoutError:
            raise errors.unavailable(f"Not ready: {served.pool.unready_reason()}.", after_s=0.0) from None
        # The View may call the own one by another name.
        return self.find(name, begun=begun)

    async def _load(self, entry: Model) -> None:
        """Serve a model of the View once what is read of its checkpoint is here; try again later where it cannot be."""
        trusts = self.config.trust_request_chat_template
        try:
            read = asyncio.to_thread(load_model, Path(entry.path), entry.name, trusts_templates=trusts)
            model = replace(await read, fingerprint=entry.hash)
            if model.shape != (needed := (entry.layers, entry.experts)):
                found = f"layers and experts {model.shape} found, {needed} needed"
                raise ModelUnusable(f"It is another checkpoint: {found}. Put the one there that was added.")
        except Exception as error:
            unforeseen, where = not isinstance(error, ModelUnusable | OSError), (entry.name, entry.path)
            log.error("model_not_served name=%s path=%s reason=%s", *where, error, exc_info=unforeseen)
            self._first -= {entry.hash}  # It has been waited for.
            await asyncio.sleep(_AGAIN_S)
            if self.view is not None and self._tried.get(entry.hash) is entry:
                del self._tried[entry.hash]
                self.follow(self.view)
            return
        view = self.view
        if view is not None and entry.hash not in self._served and self._tried.get(entry.hash) is entry:
            self._serve(model, self._counters(model.name))
            log.info("model_served name=%s path=%s", entry.name, entry.path)
            self.follow(view)

    def _serve(self, model: ServedModel, metrics: GatewayMetrics) -> Served:
        served = Served(model, self.config, metrics)
        served.dashboard = Dashboard(self, served, self.views.snapshot)
        metrics.gauges = {name: (text, partial(read, served)) for name, (text, read) in self.gauges.items()}
        served.pool.on_silent = self._on_silent
        self._served[model.fingerprint] = served
        served.pool.held = self.own.pool.held
        return served

    def _counters(self, name: str) -> GatewayMetrics:
        return GatewayMetrics(name, self.config.ttft_target_s, self.config.tpot_target_s)

    def _on_silent(self, name: str, incarnation: int, reason: str) -> None:
        # Only a hint, so nobody waits for it.
        asyncio.get_running_loop().run_in_executor(None, self.views.suspect, name, incarnation, reason)

    def let_go(self) -> None:
        """Close the pools of models that are in the View no more, once nothing of them runs."""
        for hash, served in list(self._served.items())[1:]:
            if served not in self.models.values() and not served.running and not served.pool.running:
                served.pool.close()
                served.dashboard.close()
                del self._served[hash]

    def load(self) -> dict[str, float]:
        """The report of all models that goes with each lease renewal, in the words of `WorkerPool.load`, and for each
        model of the View what is held for it (router.view.FOR). Any thread."""
        load: dict[str, float] = {}
        for served in self.all():
            for word, value in served.pool.load().items():
                known = load.get(word, 0.0)
                load[word] = known + value if word in _ADD_UP else max(known, value)
        for entry in self.view.models if self.view is not None else ():
            if served := self._served.get(entry.hash):
                own = served.pool.load() if len(self._served) > 1 else {}
                load |= {f"{FOR}{entry.number}:{word}": own[word] for word in own if ":" not in word}
                # In this order: what was let in before it took no more is counted, though this is another thread.
                takes = served in self.models.values() and not served.leaving
                load[f"{FOR}{entry.number}"] = float(takes + max(served.running, served.pool.running))
        return load

    def call(self, act: Callable[[], None]) -> None:
        """Carry out an act on the event loop; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(act)

    def stop(self) -> None:
        """Fail what is in progress with a retryable error, so that every response ends now."""
        for end in self.on_stop:
            end()
        self._close_pools()

    def _close_pools(self) -> None:
        for load in self._loads:
            load.cancel()
        for served in self.all():
            served.dashboard.close()
            served.pool.close()

    # -- requests

    async def body_of(self, request: Request) -> bytes:
        """The body of a request, which is read once. Raises ApiError: it is said to be no JSON, too large, too slow, or
        nested too much."""
        known = getattr(request.state, "body", None)
        if known is None:
            known = await json_body(request, self.config.max_body_bytes, self.config.body_timeout_s)
            request.state.body = known
        return known

    async def read(self, request: Request, shape: type[R]) -> R:
        """What a request asks. Its body is not kept: an answer may be streamed for hours. Raises ApiError: as for
        `body_of`; or it is not of that shape."""
        body = await self.body_of(request)
        del request.state.body
        return errors.checked(shape, body)

    async def parse(self, request: Request, shape: type[R], *, identified: bool = False) -> tuple[R, Served]:
        """What a request asks, and of which model; `identified`: once it is known of which checkpoint. Raises ApiError,
        as `read`, `find` and `served_as`."""
        asked = await self.read(request, shape)
        # Whoever goes on with a stream had it begun; the seal of its events refuses all others.
        begun = "last-event-id" in request.headers
        served = request.state.served = self.find(name := getattr(asked, "model", None), begun=begun)
        if identified:
            served = request.state.served = await self.served_as(name, begun=begun)
        return asked, served

    async def counted(self, endpoint: str, request: Request, reply: Coroutine[Any, Any, Response]) -> Response:
        """Await a reply and count it under ``endpoint``, as of its model once that is known."""
        started_s = time.monotonic()

        def count(status: int) -> None:
            metrics = request.state.served.metrics if hasattr(request.state, "served") else self.metrics
            metrics.count_request(endpoint, status, time.monotonic() - started_s)

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
        """Let one request of a tenant in, whose model is to be read; ``release`` must follow. Raises ApiError: 429, as
        many are in progress as all models together take; 503, an operator has paused it."""
        self.refuse_if_paused()
        self._let_in(share)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let one request in that nothing is computed for, or whose body is to be read first. Raises ApiError: 429, as
        many are in progress as all models together take."""
        nobody = Share()
        self._let_in(nobody)
        try:
            yield
        finally:
            self.release(nobody)

    def _let_in(self, share: Share) -> None:
        # Each model takes as many of its own, so that one of which too many are asked leaves room for the others.
        most = self.config.max_requests * len(self._served)
        if self.running >= most and not has_room(self._in_progress, share, most):
            raise self.own.too_many(f"{self.running} requests")
        self.running += 1
        self._in_progress[share] += 1

    def refuse_if_paused(self) -> None:
        """Let no request begin while an operator wants none. Raises ApiError: 503."""
        if self._paused_s is not None:
            self.metrics.count_refused("paused")
            age_s = time.monotonic() - self._paused_s
            message = "An operator has paused this server. Try again later."
            raise errors.unavailable(message, code="paused", after_s=self.own.pool.eta.back_s("pause", age_s))

    def release(self, share: Share) -> None:
        self.running -= 1
        self._in_progress -= Counter((share,))
        self.let_go()


def _likeness(entry: Model, own: ServedModel) -> int:
    """How surely an entry of a View is the model that a gateway was started with; 0: it is another."""
    folder = Path(entry.path)
    if (entry.layers, entry.experts) != own.shape:
        return 0
    if entry.path and str(folder.resolve()) == own.path:
        return 3
    # What can be read here in another folder is another model; what cannot may be this one, as another host has it.
    if entry.path and (folder / "config.json").is_file():
        return 0
    if entry.name == own.name:
        return 2
    # The first, with which servers are started too, may have no name, or another.
    return int(not (entry.name and entry.number))
