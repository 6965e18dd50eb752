"""/dashboard and its events: the cluster as one view-model, for the page and for `eaas top`. Of several models it shows
one: with ?model=NAME that, else that which this gateway was started with.

    GET /dashboard         the page, one document that needs nothing else
    GET /dashboard/events  server-sent events: `event: board` with a whole Board as JSON (board.py), at once and
                           then about once a second; a comment where there is nothing new, so that silence means a fault

What happens is always written down, since that costs next to nothing; the router is asked only while somebody watches.
A listener that reads slowly gets the newest board next, not those between.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from eaas.gateway import errors
from eaas.gateway.dashboard import board as model
from eaas.gateway.dashboard.board import WARN, Board, GatewayFacts, Heat, many
from eaas.gateway.dashboard.compose import Past, Reading, board_of, inspection_of
from eaas.gateway.dashboard.heat import Flow, heat_of
from eaas.gateway.dashboard.history import ClusterSnapshot, History, follow, learn
from router.view import ATTENTION, EXPERT, View, of_model

if TYPE_CHECKING:
    from eaas.gateway.gateway import Gateway, Served

log = logging.getLogger(__name__)

TICK_S = 1.0
# What happens is shown at once, but not every step of a burst.
_REST_S = 0.1
BEAT_S = 5.0
# Each costs about 10 kB a second, and all share one board.
MOST_LISTENERS = 16


class Dashboard:
    """What is shown of one model. Everything on the event loop, but for the calls of `look`."""

    def __init__(self, gateway: Gateway, served: Served, look: Callable[[], ClusterSnapshot]) -> None:
        """Args: look: asks the router; blocks shortly, so it is called on another thread."""
        self._gateway, self._served = gateway, served
        self._look = look
        metrics = served.metrics
        self._past = Past(ttft_bounds_s=metrics.ttft.bounds, itl_bounds_s=metrics.itl.bounds)
        self._history = History()
        self._flow = Flow()
        self._as_of_s: float | None = None
        self._looked_s = self._lost_s = time.monotonic()
        self._went_on = 0
        self.listeners = 0
        self._newest = b""
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()
        self._ends = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    def follow(self, view: View) -> None:
        """Write down what a newer View says has happened."""
        lost = self._history.lost[-1:]
        self._history = follow(self._history, view, time.time())
        if self._history.lost[-1:] != lost:
            self._lost_s = time.monotonic()
        if self.listeners:
            self._wanted.set()

    def close(self) -> None:
        self._ends = True
        self._changed.set()
        self.task.cancel()

    def events(self) -> Response:
        """The stream of one listener more."""
        self.listeners += 1
        self._wanted.set()
        return _Events(self._stream(), self._released)

    def _released(self) -> None:
        self.listeners -= 1
        if not self.listeners:
            # Whoever comes next must not be shown an old board as new.
            self._newest = b""

    async def _stream(self) -> AsyncIterator[bytes]:
        # Told once: a browser's own client would wait so long before it comes back.
        yield b"retry: 1000\n\n"
        shown = b""
        while not (self._ends or self._gateway.draining):
            changed = self._changed
            if self._newest is not shown and self._newest:
                shown = self._newest
                yield shown
                continue
            try:
                await asyncio.wait_for(changed.wait(), BEAT_S)
            except TimeoutError:
                yield b": nothing new\n\n"

    async def _run(self) -> None:
        next_s = 0.0
        while True:
            self._wanted.clear()
            try:
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + TICK_S
                    self._past = self._past.read(self._reading())
                    self._note_moves()
                if self.listeners or self._unexplained():
                    await self._compose()
            except Exception:
                # A view must never end what it shows.
                log.exception("dashboard_failed")
            await asyncio.sleep(_REST_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), max(0.0, next_s - time.monotonic()))

    def _unexplained(self) -> bool:
        """Whether a member has just gone, and why is not known: the router forgets reasons after a while."""
        lost = self._history.lost
        return bool(lost) and not lost[-1].reason and time.monotonic() - self._lost_s < 2 * TICK_S

    async def _compose(self) -> None:
        served = self._served
        snapshot = _of_model(await asyncio.to_thread(self._look), served.model.fingerprint)
        now_s, elapsed_s = time.monotonic(), time.monotonic() - self._looked_s
        self._looked_s = now_s
        # The pool's View may be newer than the answer, or the only one.
        view = served.pool.view
        if snapshot.view is None or (view is not None and view.epoch > snapshot.view.epoch):
            snapshot = replace(snapshot, view=view)
        if snapshot.heard:
            self._as_of_s = time.time()
        history = self._history = learn(self._history, snapshot, time.time())
        own, past, flow = self._facts(), self._past, self._flow.read(snapshot, now_s)
        as_of_s = self._as_of_s
        shown, token_text = served.pool.inspections.shown(), served.model.tokenizer.token_text
        models = tuple(self._gateway.listed)

        def compose() -> tuple[bytes, Flow]:
            wall_s = time.time()
            heat, later = Heat(layers=0, experts=0, servers=(), hottest=0.0, balance=None), flow
            if snapshot.view is not None:
                heat, later = heat_of(snapshot.view, flow, history, wall_s, elapsed_s)
            board = board_of(
                own=own,
                past=past,
                history=history,
                snapshot=snapshot,
                heat=heat,
                now_s=wall_s,
                as_of_s=as_of_s,
                models=models,
                inspection=inspection_of(shown, token_text) if shown is not None else None,
            )
            return event_of(board), later

        # Of a large model this takes milliseconds, in which tokens must not wait.
        self._newest, self._flow = await asyncio.to_thread(compose)
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    def _facts(self) -> GatewayFacts:
        gateway, served = self._gateway, self._served
        eta = served.pool.eta.sent_now()
        return GatewayFacts(
            name=gateway.views.name,
            model=served.model.name,
            version=gateway.version,
            unready=served.pool.unready_reason(),
            running=served.running,
            waiting=served.pool.waiting,
            went_on=self._went_on,
            ttft_target_s=gateway.config.ttft_target_s,
            tpot_target_s=gateway.config.tpot_target_s,
            eta_p50_s=eta.p50_s,
            eta_p90_s=eta.p90_s,
        )

    def _reading(self) -> Reading:
        metrics = self._served.metrics
        return Reading(
            at_s=time.monotonic(),
            wall_s=time.time(),
            requests=sum(metrics.requests.values()),
            failed=sum(count for (_, status), count in metrics.requests.items() if status >= 500),
            tokens=metrics.output_tokens,
            ended=metrics.ended,
            good=metrics.good,
            went_on=sum(metrics.replays.values()),
            ttft=tuple(metrics.ttft.counts),
            itl=tuple(metrics.itl.counts),
        )

    def _note_moves(self) -> None:
        went_on = self._past.readings[-1].went_on
        if went_on > self._went_on:
            text = f"{many(went_on - self._went_on, 'stream')} went on at another attention worker"
            self._history = self._history.tell(time.time(), "went-on", WARN, text)
        self._went_on = went_on


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Serve the page and its events under ``app``."""

    async def page() -> Response:
        """GET /dashboard."""
        body, headers = dashboard_page()
        return Response(body, media_type="text/html; charset=utf-8", headers=headers)

    async def events(request: Request) -> Response:
        """GET /dashboard/events. Raises ApiError: 503 where too many listen already, else as `Gateway.find`."""
        name = request.query_params.get("model")
        served = gateway.own if name is None else gateway.find(name)
        listeners = sum(each.dashboard.listeners for each in gateway.all())
        if listeners >= MOST_LISTENERS:
            raise errors.unavailable(
                f"{listeners} views of this gateway are open, the most that it feeds. Close one, or try again.",
                code="too_many_listeners",
                after_s=5.0,
            )
        return served.dashboard.events()

    app.add_api_route("/dashboard", page, methods=["GET"], response_model=None)
    app.add_api_route("/dashboard/events", events, methods=["GET"], response_model=None)


class _Events(StreamingResponse):
    """Gives its place back however it ends."""

    def __init__(self, content: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", "x-content-type-options": "nosniff"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: send the stream until the client goes or the gateway ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def _of_model(snapshot: ClusterSnapshot, hash: str) -> ClusterSnapshot:
    """What a snapshot says of one model."""
    whole, rows = snapshot.view, snapshot.rows
    if whole is None:
        return snapshot
    workers = ATTENTION
    for part in (part for part in whole.models if part.hash == hash):
        workers = f"{ATTENTION}:{part.name}" if part.number else ATTENTION
        rows = None if rows is None else rows[part.base : part.base + part.layers * part.experts]
    pools = {n.partition(":")[0]: size for n, size in snapshot.pools.items() if n in (EXPERT, workers)}
    return replace(snapshot, view=of_model(whole, hash), rows=rows, pools=pools)


def event_of(board: Board) -> bytes:
    """A board as one server-sent event."""
    return b"event: board\ndata: " + msgspec.json.encode(board) + b"\n\n"


@cache
def dashboard_page() -> tuple[bytes, dict[str, str]]:
    """The document, and the headers that it goes with."""
    glyphs = {
        "VERDICTS": model.VERDICT_GLYPHS,
        "MOODS": model.MOOD_GLYPHS,
        "STATES": model.STATE_GLYPHS,
        "MARKS": model.MARK_GLYPHS,
    }
    folder = resources.files(__package__ or "") / "page"
    page, style, script = ((folder / f"dashboard.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    script = script.replace("/*glyphs*/ {}", msgspec.json.encode(glyphs).decode())
    page = page.replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
        f"img-src data:; style-src {_source(style)}; script-src {_source(script)}"
    )
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return page.encode(), headers


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
