"""The routes for clients that look around and for operators: models, health, metrics, status."""

from __future__ import annotations

import asyncio
import html
import os
import time
from typing import Any

from fastapi import FastAPI, Response
from starlette.responses import JSONResponse

from eaas.gateway import errors
from eaas.gateway.gateway import Gateway
from eaas.gateway.status import cluster_status


class OperatingRoutes:
    """The routes that make no tokens."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def model_card(self) -> dict[str, Any]:
        """The model as /v1/models shows it."""
        return {
            "id": self._gateway.model.name,
            "object": "model",
            "created": self._gateway.model.created,
            "owned_by": "eaas",
            "root": self._gateway.model.name,
            "parent": None,
            "max_model_len": self._gateway.model.max_model_len,
        }

    async def front(self) -> Response:
        """GET /: where to go from here, for people."""
        name = html.escape(self._gateway.model.name)
        page = (
            f"<!doctype html><meta charset=utf-8><title>{name} on EaaS</title><h1>{name}</h1>"
            "<p>The API is OpenAI's, under /v1. <ul>"
            "<li><a href=dashboard>The cluster, live</a><li><a href=v1/models>The model</a>"
            "<li><a href=openapi.json>The routes, as OpenAPI</a><li><a href=metrics>Metrics</a></ul>"
        )
        return Response(
            page, media_type="text/html", headers={"content-security-policy": "default-src 'none'"}
        )

    async def models(self) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self.model_card()]})

    async def one_model(self, name: str) -> Response:
        """GET /v1/models/{name}."""
        if name != self._gateway.model.name:
            raise errors.unknown_model(name, self._gateway.model.name)
        return JSONResponse(self.model_card())

    async def health(self) -> Response:
        """GET /health: 200 when a request could be served now, else 503 with the reason."""
        gateway = self._gateway
        drains = "it drains, another gateway has taken its place" if gateway.draining else ""
        reason = drains or gateway.pool.unready_reason()
        if reason:
            raise errors.unavailable(f"Not ready: {reason}.", code="not_ready")
        return JSONResponse({"status": "ok"})

    async def ping(self) -> Response:
        """GET and POST /ping: as /health, for platforms that ask so."""
        return await self.health()

    async def load(self) -> Response:
        """GET /load: requests in progress."""
        return JSONResponse({"server_load": self._gateway.running})

    async def server_info(self) -> Response:
        """GET /server_info: what is served, and its limits."""
        gateway = self._gateway
        config, model, pool = gateway.config, gateway.model, gateway.pool
        return JSONResponse(
            {
                "version": gateway.version,
                "model": model.name,
                "model_hash": model.fingerprint,
                "max_model_len": min(model.max_model_len, pool.max_model_len or model.max_model_len),
                "vocab": model.vocab,
                "numerics_classes": pool.numerics_classes,
                "attention_workers": len(pool.links()),
                "max_requests": config.max_requests,
                "max_owed_tokens": config.max_owed_tokens,
                "max_body_bytes": config.max_body_bytes,
                "deadline_s": config.deadline_s,
                "stall_s": config.stall_s,
            }
        )

    async def embeddings(self) -> Response:
        """POST /v1/embeddings: refused."""
        message = (
            f"The model `{self._gateway.model.name}` generates text and has no embeddings. Use a server with an "
            "embedding model, or /v1/chat/completions and /v1/completions here."
        )
        raise errors.invalid(message, code="unsupported_endpoint")

    async def versions(self) -> Response:
        """GET /version."""
        return JSONResponse({"version": self._gateway.version})

    async def metrics_page(self) -> Response:
        """GET /metrics, in Prometheus's text format."""
        return Response(self._gateway.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self) -> Response:
        """GET /status: members, epoch, and this gateway's figures."""
        gateway = self._gateway
        view, routers = await asyncio.to_thread(gateway.views.latest)
        pool, metrics = gateway.pool, gateway.metrics
        own = {
            "name": gateway.name,
            "pid": os.getpid(),
            "address": gateway.address,
            "version": gateway.version,
            "ready": not pool.unready_reason(),
            "reason": pool.unready_reason(),
            "running": gateway.running,
            "waiting": pool.waiting,
            "attention_workers": sorted(link.name for link in pool.links()),
            "requests": sum(metrics.requests.values()),
            "output_tokens": metrics.output_tokens,
            "replays": sum(metrics.replays.values()),
            "model_hash": gateway.model.fingerprint,
            "numerics_classes": pool.numerics_classes,
            "uptime_s": round(time.monotonic() - gateway.started_s, 3),
        }
        return JSONResponse(
            cluster_status(model=gateway.model.name, view=view or pool.view, gateway=own, routers=routers)
        )


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Serve them under ``app``."""
    routes = OperatingRoutes(gateway)
    for path, route in (
        ("/", routes.front),
        ("/v1/models", routes.models),
        ("/v1/models/{name:path}", routes.one_model),
        ("/health", routes.health),
        ("/ping", routes.ping),
        ("/load", routes.load),
        ("/server_info", routes.server_info),
        ("/version", routes.versions),
        ("/metrics", routes.metrics_page),
        ("/status", routes.status),
    ):
        app.add_api_route(path, route, methods=["GET"], response_model=None)
        app.add_api_route(path, route, methods=["HEAD"], response_model=None, include_in_schema=False)
    app.add_api_route("/ping", routes.ping, methods=["POST"], response_model=None)
    app.add_api_route("/v1/embeddings", routes.embeddings, methods=["POST"], response_model=None)
