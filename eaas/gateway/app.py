"""The ASGI application: every surface's routes, and every failure in OpenAI's shape."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from eaas.gateway import errors, operating, routes, tokenizing
from eaas.gateway.dashboard import app as dashboard
from eaas.gateway.errors import ApiError, ErrorReply
from eaas.gateway.gateway import Gateway
from eaas.gateway.messages import body_for

log = logging.getLogger(__name__)


def _reply(request: Request, reply: ErrorReply) -> Response:
    body = body_for(request.url.path, reply)
    return Response(body, reply.status, headers=reply.all_headers(), media_type="application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return _reply(request, error.reply)


async def _on_invalid(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    return _reply(request, errors.from_validation(error.errors()).reply)


async def _on_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    headers = dict(error.headers or {})
    where = f"{request.method} {request.url.path}"
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = (
            f"There is nothing at {where}. The API is under /v1; see GET /v1/models.",
            "unknown_url",
        )
    elif error.status_code == 405:
        allowed = headers.get("Allow", headers.get("allow", "another method"))
        message, code = f"{where} is not allowed; use {allowed}.", "method_not_allowed"
    return _reply(request, ErrorReply(status=error.status_code, message=message, code=code, headers=headers))


async def _on_fault(request: Request, error: Exception) -> Response:
    log.error("request_failed method=%s path=%s error=%r", request.method, request.url.path, error)
    return _reply(request, errors.internal("The server failed to answer; its log says why.").reply)


def create_app(gateway: Gateway, root_path: str = "") -> FastAPI:
    """The ASGI application of one gateway. Args: root_path: where clients find it, as its own description says."""
    app = FastAPI(
        title="EaaS", version=gateway.version, lifespan=gateway.lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False, servers=[{"url": root_path}] if root_path else None,
    )  # fmt: skip
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_fault)
    for surface in (routes, tokenizing, operating, dashboard):
        surface.add_routes(app, gateway)
    return app
