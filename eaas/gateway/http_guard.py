"""What stands before every route: the connection, request ids, body limits, content types."""

from __future__ import annotations

import asyncio
import uuid

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from eaas.gateway.errors import ApiError, ErrorReply

_HEADER = b"x-request-id"
_LONGEST_ID = 128

_CONNECTION = "eaas.connection"


class Connection(HttpToolsProtocol):
    """uvicorn's connection, which a response may write to past ASGI once its body has begun."""

    _running: RequestResponseCycle | None = None

    @classmethod
    def of(cls, scope: Scope) -> Connection | None:
        """The connection of a request; None under another server."""
        return scope.get("state", {}).get(_CONNECTION)

    def on_message_begin(self) -> None:
        """httptools: a request begins."""
        super().on_message_begin()
        self.scope.setdefault("state", {})[_CONNECTION] = self

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the client has gone. uvicorn tells the request that came last; this, the one being answered."""
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def write_chunk(self, data: bytes) -> bool:
        """Write one chunk of a chunked body.

        False, and nothing is written, while the client is slow to read, or once it has gone: what is to be done then
        is for the response's own task to find out.
        """
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class RequestIds:
    """Outermost layer: echoes a client's x-request-id, or draws one, on every response, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        usable = 0 < len(given) <= _LONGEST_ID and all(0x21 <= byte <= 0x7E for byte in given)
        request_id = given if usable else f"req-{uuid.uuid4().hex}".encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_HEADER, request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


def require_json(request: Request) -> None:
    """Refuse any body that does not call itself JSON.

    Raises:
        ApiError: 415.
    """
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    found = f"'{given}'" if given else "none"
    message = f"The content type must be application/json; found {found}. Set the header content-type."
    raise ApiError(ErrorReply(status=415, message=message, code="unsupported_media_type"))


async def read_body(request: Request, limit_bytes: int, timeout_s: float) -> bytes:
    """The request body, never more than ``limit_bytes`` of it in memory.

    Raises:
        ApiError: 413 (before reading where the length is declared) or 408.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise _too_large(limit_bytes)
    except TimeoutError:
        message = (
            f"The request body did not arrive within {timeout_s:g} s; found {len(body)} bytes. Send it again."
        )
        raise ApiError(ErrorReply(status=408, message=message, code="request_timeout")) from None
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE) from None
    return bytes(body)


def _too_large(limit_bytes: int) -> ApiError:
    message = f"The request body is over the limit of {limit_bytes} bytes. Send a smaller one."
    return ApiError(ErrorReply(status=413, message=message, code="request_too_large"))


# Nobody reads this reply; the status is what proxies log for a client that closed its connection.
CLIENT_GONE = ErrorReply(
    status=499, message="The client closed the connection.", code="client_closed_request"
)
