"""The ASGI application: the routes of every API, each failure in that API's shape, and the routes that make no tokens:
models, health, metrics, status; and, in vLLM's names, those by which operators pause and resume, abort, forget, scale.

Pausing is this gateway's own; what is forgotten and scaled is the cluster's.
"""

from __future__ import annotations

import asyncio
import html
import logging
import os
import time
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request, Response
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from eaas.gateway import errors, routes, tokenizing
from eaas.gateway.constraints import Strict
from eaas.gateway.dashboard import app as dashboard
from eaas.gateway.errors import ApiError, ErrorReply, invalid, unavailable, wrong_field
from eaas.gateway.gateway import Gateway, Served
from eaas.gateway.inspections import InspectRequest
from eaas.gateway.messages import body_for
from eaas.gateway.status import cluster_status
from router.client import OrderRefused, RouterUnavailable

log = logging.getLogger(__name__)

_PAUSE_MODES = ("abort", "wait", "keep")
_POLL_S = 0.05


class AbortRequest(Strict, extra="forbid"):
    """Body of POST /abort_requests: ids of requests; none or an empty list is all."""

    request_ids: list[str] | None = None


class ScaleRequest(Strict, extra="forbid"):
    """Body of POST /scale_elastic_ep: attention workers wanted, or members of the pool that is named."""

    new_data_parallel_size: Annotated[int, Field(ge=1, le=1 << 16)]
    drain_timeout: Annotated[float, Field(gt=0)] | None = None
    pool: Literal["attention", "expert"] = "attention"


class OperatingRoutes:
    """What looks, and what changes something for everybody."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    # -- looking

    def model_card(self, served: Served) -> dict[str, Any]:
        model = served.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "eaas",
            "root": model.name,
            "parent": None,
            "max_model_len": served.context,
        }

    async def front(self) -> Response:
        """GET /: where to go from here, for people."""
        name = html.escape(", ".join(self._gateway.listed))
        page = (
            f"<!doctype html><meta charset=utf-8><title>{name} on EaaS</title><h1>{name}</h1>"
            "<p>The API is OpenAI's, under /v1. <ul>"
            "<li><a href=dashboard>The cluster, live</a><li><a href=v1/models>What is served</a>"
            "<li><a href=openapi.json>The routes, as OpenAPI</a><li><a href=metrics>Metrics</a></ul>"
        )
        return Response(page, media_type="text/html", headers={"content-security-policy": "default-src 'none'"})

    async def models(self) -> Response:
        """GET /v1/models: all that can be asked for."""
        cards = [self.model_card(served) for served in self._gateway.listed.values()]
        return JSONResponse({"object": "list", "data": cards})

    async def one_model(self, name: str) -> Response:
        """GET /v1/models/{name}."""
        return JSONResponse(self.model_card(self._gateway.find(name)))

    async def health(self) -> Response:
        """GET /health and /ping: 200 when requests for some model could be served now, else 503 with the reason."""
        gateway = self._gateway
        drains = "it drains, another gateway has taken its place" if gateway.draining else ""
        reason = drains or gateway.unready_reason()
        if reason:
            after_s = max(served.pool.eta.back_s("workers", 0.0) for served in gateway.all())
            raise unavailable(f"Not ready: {reason}.", code="not_ready", after_s=after_s)
        return JSONResponse({"status": "ok"})

    async def load(self) -> Response:
        """GET /load: requests in progress."""
        return JSONResponse({"server_load": self._gateway.running})

    async def server_info(self, request: Request) -> Response:
        """GET /server_info?model=NAME: what is served, and its limits."""
        gateway = self._gateway
        served = gateway.find(request.query_params.get("model"))
        model, pool = served.model, served.pool
        limits = ("max_requests", "max_owed_tokens", "max_body_bytes", "deadline_s", "stall_s")
        return JSONResponse(
            {
                "version": gateway.version,
                "model": model.name,
                "models": list(gateway.listed),
                "model_hash": model.fingerprint,
                "max_model_len": served.context,
                "vocab": model.vocab,
                "numerics_classes": pool.numerics_classes,
                "attention_workers": len(pool.links()),
                **{name: getattr(served.config, name) for name in limits},
            }
        )

    async def embeddings(self) -> Response:
        """POST /v1/embeddings: refused."""
        message = (
            "The models here generate text and have no embeddings. Use a server with an embedding model, or "
            "/v1/chat/completions and /v1/completions here."
        )
        raise invalid(message, code="unsupported_endpoint")

    async def versions(self) -> Response:
        """GET /version."""
        return JSONResponse({"version": self._gateway.version})

    async def metrics_page(self) -> Response:
        """GET /metrics, in Prometheus's text format."""
        return Response(self._gateway.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self) -> Response:
        """GET /status: members, epoch, and this gateway's figures, in all and of each model."""
        gateway = self._gateway
        known = await asyncio.to_thread(gateway.views.snapshot, rows=False)
        served = gateway.all()
        models = [_figures(one) for one in gateway.models.values()]
        reason = gateway.unready_reason()
        own = {
            "name": gateway.views.name,
            "pid": os.getpid(),
            "address": gateway.address,
            "version": gateway.version,
            "ready": not reason,
            "reason": reason,
            "running": gateway.running,
            "waiting": sum(one.pool.waiting for one in served),
            "attention_workers": sorted(link.name for one in served for link in one.pool.links()),
            "requests": sum(one.metrics.requests.total() for one in served),
            "output_tokens": sum(one.metrics.output_tokens for one in served),
            "replays": sum(one.metrics.replays.total() for one in served),
            "model_hash": gateway.own.model.fingerprint,
            "numerics_classes": sorted({name for one in served for name in one.pool.numerics_classes}),
            "models": models,
            "uptime_s": round(time.monotonic() - gateway.started_s, 3),
        }
        return JSONResponse(
            cluster_status(
                model=gateway.own.model.name,
                view=known.view or gateway.view,
                gateway=own,
                routers=known.routers,
                retirements=known.retirements,
            )
        )

    # -- changing

    async def pause(self, request: Request) -> Response:
        """POST /pause?mode=abort|wait|keep: no request is computed here any more, until /resume.

        abort ends those in progress with what they have said; wait lets them end, and answers then; keep has them wait
        with the tokens that they have, and new ones too. With the others new requests are refused: 503.
        """
        gateway, mode = self._gateway, request.query_params.get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise wrong_field("mode", f"{mode[:32]!r} found; 'abort', 'wait' or 'keep' is needed")
        gateway.paused = mode != "keep"
        self._hold(held=mode == "keep")
        if mode == "abort":
            self._abort(None)
        while mode == "wait" and gateway.exchanges and gateway.paused:
            await asyncio.sleep(_POLL_S)
        return JSONResponse({"status": "paused"})

    async def resume(self) -> Response:
        """POST /resume: requests are computed again."""
        self._gateway.paused = False
        self._hold(held=False)
        return JSONResponse({"status": "resumed"})

    def _hold(self, *, held: bool) -> None:
        for served in self._gateway.all():
            served.pool.hold(held=held)

    async def is_paused(self) -> Response:
        """GET /is_paused."""
        gateway = self._gateway
        return JSONResponse({"is_paused": gateway.paused or gateway.own.pool.held})

    async def abort(self, request: Request) -> Response:
        """POST /abort_requests: end requests by the ids that their clients gave or were told, or all."""
        wanted = await self._gateway.read(request, AbortRequest)
        return JSONResponse({"status": "aborted", "aborted": self._abort(wanted.request_ids or None)})

    async def abort_named(self, request: Request) -> Response:
        """POST /inference/v1/abort_requests: the same of those that are named, never of all."""
        ids = (await self._gateway.read(request, AbortRequest)).request_ids
        if ids is None:
            message = "'request_ids' is missing; name the requests to end, or POST /abort_requests to end all."
            raise invalid(message, param="request_ids", code="missing_required_parameter")
        return JSONResponse({"status": "aborted", "aborted": self._abort(ids)})

    def _abort(self, ids: list[str] | None) -> int:
        named = None if ids is None else frozenset(ids)
        ended = 0
        for exchange in list(self._gateway.exchanges.values()):
            if named is None or exchange.id in named or exchange.request_id in named:
                exchange.cancel()
                ended += 1
        return ended

    async def forget(self) -> Response:
        """POST /reset_prefix_cache: attention workers reuse nothing that was computed before, for any request."""
        told = [served.pool.forget_blocks() for served in self._gateway.all()]
        return JSONResponse({"success": all(told)})

    async def inspect(self, request: Request) -> Response:
        """POST /admin/inspect: begin to record what attention workers of a model compute of requests."""
        return JSONResponse(await self._gateway.inspect(await self._gateway.read(request, InspectRequest)))

    async def inspection(self, request: Request) -> Response:
        """GET /admin/inspect?model=NAME&id=ID: how that goes, or how the last one went."""
        asked = request.query_params
        return JSONResponse(self._gateway.inspections(asked.get("model")).state(asked.get("id")))

    async def end_inspection(self, request: Request) -> Response:
        """DELETE /admin/inspect?model=NAME&id=ID: end it; answers when everything was delivered."""
        asked = request.query_params
        return JSONResponse(await self._gateway.inspections(asked.get("model")).end(asked.get("id")))

    async def scale(self, request: Request) -> Response:
        """POST /scale_elastic_ep: change the wanted size of a pool; the change itself takes its time."""
        wanted = await self._gateway.read(request, ScaleRequest)
        try:
            await asyncio.to_thread(
                self._gateway.views.scale, wanted.pool, wanted.new_data_parallel_size, wanted.drain_timeout
            )
        except OrderRefused as error:
            raise invalid(str(error), param="new_data_parallel_size") from None
        except RouterUnavailable as error:
            message = f"{error} Scale with: eaas scale."
            raise unavailable(message, code="router_unavailable", after_s=0.0) from None
        members = f"{wanted.new_data_parallel_size} members of the {wanted.pool} pool"
        return JSONResponse({"message": f"Scaling to {members}."})


def _figures(served: Served) -> dict[str, Any]:
    pool = served.pool
    return {
        "name": served.model.name,
        "model_hash": served.model.fingerprint,
        "leaving": served.leaving,
        "reason": pool.unready_reason(),
        "running": served.running,
        "waiting": pool.waiting,
        "attention_workers": sorted(link.name for link in pool.links()),
    }


async def _from_no_other_page(request: Request) -> None:
    """Refuse a page of another origin: a browser sends such a request without asking, and with stored passwords.

    Raises:
        ApiError: 403.
    """
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        message = "This route takes no request from a page of another origin. Ask from a terminal, such as by curl."
        raise ApiError(ErrorReply(status=403, message=message, code="other_origin"))


def _reply(request: Request, reply: ErrorReply) -> Response:
    body = body_for(request.url.path, reply)
    return Response(body, reply.status, headers=reply.all_headers(), media_type="application/json")


async def _on_api_error(request: Request, error: Any) -> Response:
    return _reply(request, error.reply)


async def _on_http_error(request: Request, error: Any) -> Response:
    headers, where = dict(error.headers or {}), f"{request.method} {request.url.path}"
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"There is nothing at {where}. The API is under /v1; see GET /v1/models.", "unknown_url"
    elif error.status_code == 405:
        allowed = headers.get("Allow", headers.get("allow", "another method"))
        message, code = f"{where} is not allowed; use {allowed}.", "method_not_allowed"
    return _reply(request, ErrorReply(status=error.status_code, message=message, code=code, headers=headers))


async def _on_fault(request: Request, error: Exception) -> Response:
    log.error("request_failed method=%s path=%s error=%r", request.method, request.url.path, error)
    return _reply(request, errors.internal("The server failed to answer; its log says why.").reply)


def create_app(gateway: Gateway, root_path: str = "") -> FastAPI:
    """The ASGI application of one gateway. Args: root_path: where clients find it, as its own description says."""
    # Traces are the gateway's own (eaas.spans): FastAPI would look for a tracer at each request.
    app = FastAPI(
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
        title="EaaS", version=gateway.version, lifespan=gateway.lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False, servers=[{"url": root_path}] if root_path else None,
    )  # fmt: skip
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_fault)
    for surface in (routes, tokenizing, dashboard):
        surface.add_routes(app, gateway)
    app.openapi = partial(routes.describe, app)
    operating = OperatingRoutes(gateway)
    for path, route in (
        ("/", operating.front),
        ("/v1/models", operating.models),
        ("/v1/models/{name:path}", operating.one_model),
        ("/health", operating.health),
        ("/ping", operating.health),
        ("/load", operating.load),
        ("/server_info", operating.server_info),
        ("/version", operating.versions),
        ("/metrics", operating.metrics_page),
        ("/status", operating.status),
        ("/is_paused", operating.is_paused),
        ("/admin/inspect", operating.inspection),
    ):
        app.add_api_route(path, route, methods=["GET"], response_model=None)
        app.add_api_route(path, route, methods=["HEAD"], response_model=None, include_in_schema=False)
    app.add_api_route("/ping", operating.health, methods=["POST"], response_model=None)
    app.add_api_route("/v1/embeddings", operating.embeddings, methods=["POST"], response_model=None)
    for method, path, route in (
        ("DELETE", "/admin/inspect", operating.end_inspection),
        ("POST", "/admin/inspect", operating.inspect),
        ("POST", "/pause", operating.pause),
        ("POST", "/resume", operating.resume),
        ("POST", "/abort_requests", operating.abort),
        ("POST", "/inference/v1/abort_requests", operating.abort_named),
        ("POST", "/reset_prefix_cache", operating.forget),
        ("POST", "/scale_elastic_ep", operating.scale),
    ):
        guards = [Depends(_from_no_other_page)]
        app.add_api_route(path, route, methods=[method], response_model=None, dependencies=guards)
    return app
