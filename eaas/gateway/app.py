"""The routes: the OpenAI API, health, metrics and status."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from eaas.gateway import errors
from eaas.gateway.config import GatewayConfig
from eaas.gateway.errors import ApiError, ErrorReply
from eaas.gateway.http_guard import read_body, require_json
from eaas.gateway.load import GatewayLoad
from eaas.gateway.metrics import GatewayMetrics
from eaas.gateway.openai_format import ChatFormat, CompletionFormat, Format
from eaas.gateway.replies import EventStream, Exchange, Work
from eaas.gateway.sampling import sampling_params, token_limit
from eaas.gateway.schema import ChatRequest, CompletionRequest
from eaas.gateway.served_model import ServedModel
from eaas.gateway.status import RouterStatus, cluster_status
from eaas.gateway.worker_pool import WorkerPool
from router.view import View

log = logging.getLogger(__name__)

R = TypeVar("R", ChatRequest, CompletionRequest)


class ViewSource(Protocol):
    """Where Views come from: the router's client, or a stand-in."""

    @property
    def name(self) -> str: ...

    def start(self, on_view: Callable[[View], None], load: Callable[[], Mapping[str, float]]) -> None: ...

    def latest(self) -> tuple[View | None, RouterStatus]: ...

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
    ) -> None:
        self.config = config
        self.model = model
        self.version = version
        self.address = ""
        self.metrics = GatewayMetrics()
        self.running = 0
        self._views = views
        self._pool: WorkerPool | None = None
        self._started_s = time.monotonic()

    @property
    def name(self) -> str:
        """This gateway's name as a member; ``gateway/0`` until the router has given it one."""
        return self._views.name

    @property
    def pool(self) -> WorkerPool:
        """The attention workers; there from start-up to shutdown."""
        if self._pool is None:
            raise RuntimeError("the gateway has not started: run it under an ASGI server with lifespan on")
        return self._pool

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Start the pool and follow the router until shutdown."""
        loop = asyncio.get_running_loop()
        pool = self._pool = WorkerPool(self.config, self.metrics, self.model.fingerprint)
        gauges = self.metrics.gauges
        gauges["eaas_running"] = ("Requests in progress.", lambda: self.running)
        gauges["eaas_choices"] = ("Choices in flight.", lambda: pool.running)
        gauges["eaas_waiting"] = ("Choices that wait for an attention worker.", lambda: pool.waiting)
        gauges["eaas_attention_workers"] = ("Attention workers connected.", lambda: len(pool.links()))

        def on_view(view: View) -> None:
            loop.call_soon_threadsafe(pool.apply_view, view)

        # It may wait a moment for the router.
        await asyncio.to_thread(self._views.start, on_view, GatewayLoad(pool))
        try:
            yield
        finally:
            pool.close()
            await asyncio.to_thread(self._views.close)

    def stop(self) -> None:
        """Fail what is in progress with a retryable error, so that every response ends now."""
        if self._pool is not None:
            self._pool.close()

    # -- generation

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""

        async def encode(wanted: ChatRequest) -> list[list[int]]:
            messages = [message.model_dump(exclude_none=True) for message in wanted.messages]
            return [await self.model.encode_chat(messages, wanted.chat_template_kwargs)]

        return await self._counted("chat", self._generate(request, ChatRequest, ChatFormat(), encode))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""

        async def encode(wanted: CompletionRequest) -> list[list[int]]:
            return await self.model.encode_prompts(wanted.prompt)

        return await self._counted(
            "completions", self._generate(request, CompletionRequest, CompletionFormat(), encode)
        )

    async def _counted(self, endpoint: str, reply: Coroutine[Any, Any, Response]) -> Response:
        # A stream is counted when it ends: its status is not known before.
        started_s = time.monotonic()
        status = 500
        try:
            response = await reply
            if isinstance(response, EventStream):
                response.on_end = lambda status: self._count(endpoint, status, started_s)
                status = 0
            else:
                status = response.status_code
            return response
        except ApiError as error:
            status = error.reply.status
            raise
        finally:
            if status:
                self._count(endpoint, status, started_s)

    def _count(self, endpoint: str, status: int, started_s: float) -> None:
        self.metrics.count_request(endpoint, status)
        self.metrics.e2e.observe(time.monotonic() - started_s)

    async def _parse(self, request: Request, shape: type[R]) -> R:
        require_json(request)
        body = await read_body(request, self.config.body_limit_bytes, self.config.body_timeout_s)
        try:
            wanted = shape.model_validate_json(body)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            raise errors.from_validation(problems) from None
        if wanted.model != self.model.name:
            raise errors.unknown_model(wanted.model, self.model.name)
        return wanted

    async def _generate(
        self,
        request: Request,
        shape: type[R],
        reply_format: Format,
        encode: Callable[[R], Awaitable[list[list[int]]]],
    ) -> Response:
        self._admit()
        exchange: Exchange | None = None
        response: Response | None = None
        try:
            wanted = await self._parse(request, shape)
            prompts = await encode(wanted)
            context = min(self.model.max_model_len, self.pool.max_model_len or self.model.max_model_len)
            limits = [token_limit(wanted, len(prompt), context) for prompt in prompts]
            work = Work(
                format=reply_format,
                prompts=prompts,
                limits=limits,
                choices=wanted.choices,
                params=sampling_params(wanted, min(limits), self.model.vocab),
                stops=tuple(wanted.stop or ()),
                stream=bool(wanted.stream),
                include_usage=wanted.include_usage,
                open_end=wanted.token_limit is None,
            )
            exchange = Exchange(
                work=work, model=self.model, pool=self.pool, metrics=self.metrics, on_close=self._release
            )
            response = await exchange.answer(request)
            return response
        finally:
            if exchange is None:
                self._release()
            elif not isinstance(response, EventStream):
                exchange.close()

    def _admit(self) -> None:
        if self.running >= self.config.max_requests:
            self.metrics.refused += 1
            raise errors.too_many(self.running)
        self.running += 1

    def _release(self) -> None:
        self.running -= 1

    # -- the rest

    def model_card(self) -> dict[str, Any]:
        """The model as /v1/models shows it."""
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.model.created,
            "owned_by": "eaas",
            "max_model_len": self.model.max_model_len,
        }

    async def models(self) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self.model_card()]})

    async def one_model(self, name: str) -> Response:
        """GET /v1/models/{name}."""
        if name != self.model.name:
            raise errors.unknown_model(name, self.model.name)
        return JSONResponse(self.model_card())

    async def health(self) -> Response:
        """GET /health: 200 when a request could be served now, else 503 with the reason."""
        reason = self.pool.unready_reason()
        if reason:
            raise errors.unavailable(f"Not ready: {reason}.", code="not_ready")
        return JSONResponse({"status": "ok"})

    async def versions(self) -> Response:
        """GET /version."""
        return JSONResponse({"version": self.version})

    async def metrics_page(self) -> Response:
        """GET /metrics, in Prometheus's text format."""
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self) -> Response:
        """GET /status: members, epoch, and this gateway's figures."""
        view, router = await asyncio.to_thread(self._views.latest)
        pool, metrics = self.pool, self.metrics
        gateway = {
            "name": self.name,
            "pid": os.getpid(),
            "address": self.address,
            "version": self.version,
            "ready": not pool.unready_reason(),
            "reason": pool.unready_reason(),
            "running": self.running,
            "waiting": pool.waiting,
            "attention_workers": sorted(link.name for link in pool.links()),
            "requests": sum(metrics.requests.values()),
            "output_tokens": metrics.output_tokens,
            "replays": sum(metrics.replays.values()),
            "model_hash": self.model.fingerprint,
            "numerics_classes": pool.numerics_classes,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
        }
        return JSONResponse(
            cluster_status(model=self.model.name, view=view or pool.view, gateway=gateway, router=router)
        )


def _reply(reply: ErrorReply) -> Response:
    return Response(reply.body(), reply.status, headers=reply.all_headers(), media_type="application/json")


async def _on_api_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return _reply(error.reply)


async def _on_invalid(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    return _reply(errors.from_validation(error.errors()).reply)


async def _on_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    headers = dict(error.headers or {})
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        message, code = (
            f"There is nothing at {where}. The API is under /v1; see GET /v1/models.",
            "unknown_url",
        )
    elif error.status_code == 405:
        allowed = headers.get("Allow", headers.get("allow", "another method"))
        message, code = f"{where} is not allowed; use {allowed}.", "method_not_allowed"
    else:
        message, code = str(error.detail), None
    return _reply(ErrorReply(status=error.status_code, message=message, code=code, headers=headers))


async def _on_fault(request: Request, error: Exception) -> Response:
    log.error("request_failed method=%s path=%s error=%r", request.method, request.url.path, error)
    return _reply(errors.internal("The server failed to answer; its log says why.").reply)


def create_app(gateway: Gateway) -> FastAPI:
    """The ASGI application of one gateway."""
    app = FastAPI(
        title="EaaS", version=gateway.version, lifespan=gateway.lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_fault)
    # Bodies are read and checked here rather than by FastAPI: limits come first, parsing once.
    for path, route, shape in (
        ("/v1/chat/completions", gateway.chat, ChatRequest),
        ("/v1/completions", gateway.complete, CompletionRequest),
    ):
        body = {"content": {"application/json": {"schema": shape.model_json_schema()}}, "required": True}
        app.add_api_route(
            path, route, methods=["POST"], response_model=None, openapi_extra={"requestBody": body}
        )
    for path, route in (
        ("/v1/models", gateway.models),
        ("/v1/models/{name:path}", gateway.one_model),
        ("/health", gateway.health),
        ("/version", gateway.versions),
        ("/metrics", gateway.metrics_page),
        ("/status", gateway.status),
    ):
        app.add_api_route(path, route, methods=["GET"], response_model=None)
    return app
