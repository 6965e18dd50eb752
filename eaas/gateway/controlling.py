"""The routes by which operators change what a gateway does, in vLLM's names: pause and resume, abort, forget, scale.

Pausing is this gateway's own; what is forgotten and scaled is the cluster's. Where keys are asked for, these take
an operator's; and none answers a page of another origin, which a browser would ask for anybody.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse

from eaas.gateway.errors import ApiError, ErrorReply, invalid, unavailable
from eaas.gateway.gateway import Gateway
from router.client import RouterUnavailable, ScaleRefused

PauseMode = Literal["abort", "wait", "keep"]
_POLL_S = 0.05


class AbortRequest(BaseModel):
    """Body of POST /abort_requests: ids of requests; none or an empty list is all."""

    model_config = ConfigDict(strict=True, extra="ignore")
    request_ids: list[str] | None = None


class ScaleRequest(BaseModel):
    """Body of POST /scale_elastic_ep: attention workers wanted, or members of the pool that is named."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    new_data_parallel_size: Annotated[int, Field(ge=1, le=1 << 16)]
    drain_timeout: Annotated[float, Field(gt=0)] | None = None
    pool: Literal["attention", "expert"] = "attention"


class ControlRoutes:
    """The routes that change something for everybody."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def pause(self, request: Request) -> Response:
        """POST /pause?mode=abort|wait|keep: no request is computed here any more, until /resume.

        abort ends those in progress with what they have said; wait lets them end, and answers then; keep has them wait
        with the tokens that they have, and new ones too. With the others new requests are refused: 503.
        """
        _from_no_other_page(request)
        gateway, mode = self._gateway, request.query_params.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise invalid(
                f"Invalid value for 'mode': {mode[:32]!r} found; 'abort', 'wait' or 'keep' is needed.",
                param="mode",
                code="invalid_value",
            )
        gateway.paused = mode != "keep"
        gateway.pool.hold(held=mode == "keep")
        if mode == "abort":
            self._abort(None)
        while mode == "wait" and gateway.exchanges and gateway.paused:
            await asyncio.sleep(_POLL_S)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """POST /resume: requests are computed again."""
        _from_no_other_page(request)
        self._gateway.paused = False
        self._gateway.pool.hold(held=False)
        return JSONResponse({"status": "resumed"})

    async def is_paused(self) -> Response:
        """GET /is_paused."""
        gateway = self._gateway
        return JSONResponse({"is_paused": gateway.paused or gateway.pool.held})

    async def abort(self, request: Request) -> Response:
        """POST /abort_requests: end requests by the ids that their clients gave or were told, or all."""
        _from_no_other_page(request)
        wanted = await self._gateway.parse(request, AbortRequest)
        return JSONResponse({"status": "aborted", "aborted": self._abort(wanted.request_ids or None)})

    async def abort_named(self, request: Request) -> Response:
        """POST /inference/v1/abort_requests: the same of those that are named, never of all."""
        _from_no_other_page(request)
        ids = (await self._gateway.parse(request, AbortRequest)).request_ids
        if ids is None:
            message = (
                "'request_ids' is missing; name the requests to end, or POST /abort_requests to end all."
            )
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

    async def forget(self, request: Request) -> Response:
        """POST /reset_prefix_cache: attention workers reuse nothing that was computed before, for any request."""
        _from_no_other_page(request)
        return JSONResponse({"success": self._gateway.pool.forget_blocks()})

    async def scale(self, request: Request) -> Response:
        """POST /scale_elastic_ep: change the wanted size of a pool; the change itself takes its time."""
        _from_no_other_page(request)
        wanted = await self._gateway.parse(request, ScaleRequest)
        try:
            await asyncio.to_thread(
                self._gateway.views.scale, wanted.pool, wanted.new_data_parallel_size, wanted.drain_timeout
            )
        except ScaleRefused as error:
            raise invalid(str(error), param="new_data_parallel_size", code="invalid_value") from None
        except RouterUnavailable as error:
            raise unavailable(f"{error} Scale with: eaas scale.", code="router_unavailable") from None
        members = f"{wanted.new_data_parallel_size} members of the {wanted.pool} pool"
        return JSONResponse({"message": f"Scaling to {members}."})


def _from_no_other_page(request: Request) -> None:
    """Refuse a page of another origin: a browser sends such a request without asking, and with stored passwords.

    Raises:
        ApiError: 403.
    """
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        message = (
            "This route takes no request from a page of another origin. Ask from a terminal, such as by curl."
        )
        raise ApiError(ErrorReply(status=403, message=message, code="other_origin"))


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Serve them under ``app``."""
    routes = ControlRoutes(gateway)
    for path, route in (
        ("/pause", routes.pause),
        ("/resume", routes.resume),
        ("/abort_requests", routes.abort),
        ("/inference/v1/abort_requests", routes.abort_named),
        ("/reset_prefix_cache", routes.forget),
        ("/scale_elastic_ep", routes.scale),
    ):
        app.add_api_route(path, route, methods=["POST"], response_model=None)
    app.add_api_route("/is_paused", routes.is_paused, methods=["GET", "HEAD"], response_model=None)
