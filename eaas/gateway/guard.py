"""What stands before every route: the connection and its bounds, request ids, body limits, content types."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any, ClassVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from eaas.gateway.config import GatewayConfig
from eaas.gateway.errors import OVERLOADED, ApiError, ErrorReply
from eaas.gateway.protection import account_of
from router.logs import REQUEST_ID

log = logging.getLogger(__name__)

_HEADER = b"x-request-id"
_LONGEST_ID = 128
_LONGEST_PATH = 256
# About 20 ms of reading, and 70 ms where each is a block of a message; nothing else is done meanwhile.
MOST_CONTAINERS = 1 << 14
# Possessive, and to the end of what is never closed: each byte is looked at once, whatever the body holds.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)

# Of links to workers, the router, files: some ten each; the rest is a reserve.
_KEPT_DESCRIPTORS = 128
_CONNECTION = "eaas.connection"
# A client that has gone is known by the second write that it does not take, its reset being on the way until then.
_PROBES_S = (0.1, 0.9)


class _OutOfBounds(Exception):
    """Raised through the parser, which stops there."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with bounds, which a response may write to past ASGI once its body has begun."""

    # What a client may make this process hold before its request is looked at.
    bounds: ClassVar[GatewayConfig] = GatewayConfig()

    _running: RequestResponseCycle | None = None
    _on_gone: Callable[[], None] | None = None
    timed_out = False  # the client took nothing for too long, and the kernel ended it

    # Of the message that comes in: what was received of it beside its body, and of that the headers; the head is open
    # until the blank line.
    _received_bytes = 0
    _header_bytes = 0
    _head_open = True
    _began_here = False
    _head_timer: asyncio.TimerHandle | None = None

    @classmethod
    def bounded(cls, bounds: GatewayConfig, descriptors: int = sys.maxsize) -> type[Connection]:
        """A class of connections with these bounds. Args: descriptors: The most that this process may have: no more
        connections than leave some for what else it opens."""
        connections = max(1, min(bounds.max_connections, descriptors - _KEPT_DESCRIPTORS))
        if connections < bounds.max_connections:
            found = connections, descriptors
            log.warning("connections_limited to=%d descriptors=%d: raise ulimit -n for more", *found)
        return type(cls.__name__, (cls,), {"bounds": replace(bounds, max_connections=connections)})

    @classmethod
    def of(cls, scope: Scope) -> Connection:
        return scope["state"][_CONNECTION]

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.max_connections:
            log.warning("connection_refused open=%d", len(self.connections) - 1)
            self._refuse(_TOO_MANY_CONNECTIONS)
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """asyncio: some bytes, of which no more than the bounds are kept."""
        self._began_here = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._began_here:
            self._received_bytes += len(data)
        if self._head_open:
            if self._received_bytes > self.bounds.head_limit_bytes:
                self._refuse(_HEAD_TOO_LARGE)
            elif self._head_timer is None:
                self._await_head()
        elif self._received_bytes > self.bounds.head_limit_bytes + self.bounds.max_body_bytes:
            # Beside its payload a body may carry so much: sizes of chunks, and what clients write behind these.
            self._refuse(_HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope.setdefault("state", {})[_CONNECTION] = self
        self._received_bytes = self._header_bytes = 0
        self._head_open = self._began_here = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: a header, or one after a chunked body."""
        super().on_header(name, value)
        self._count(len(name) + len(value))
        if len(self.headers) > self.bounds.max_headers:
            raise _OutOfBounds

    def on_headers_complete(self) -> None:
        self._head_open = False
        self._cancel_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """httptools: a piece of the body, which the route bounds."""
        self._received_bytes -= len(body)
        super().on_body(body)

    def _count(self, nbytes: int) -> None:
        self._header_bytes += nbytes
        if self._header_bytes > self.bounds.head_limit_bytes:
            raise _OutOfBounds

    def send_400_response(self, msg: str) -> None:
        """uvicorn: the parser stopped. In the form of every other error, and 431 where a bound was the reason."""
        large = self._header_bytes > self.bounds.head_limit_bytes or len(self.headers or ()) > self.bounds.max_headers
        self._refuse(_HEAD_TOO_LARGE if large else _NOT_HTTP)

    def _refuse(self, reply: ErrorReply) -> None:
        """Answer without a request, and close."""
        self._cancel_head_timer()
        running = self._running
        # In the middle of another's answer there is nothing to say.
        if running is None or running.response_complete or not running.response_started:
            body = reply.body()
            head = (
                f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.bounds.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.headers is None:
            # A client that has asked nothing would take an answer for that to its first question.
            self.transport.close()
        elif self._head_open and not self.transport.is_closing():
            self._refuse(_HEAD_LATE)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, _until_close(cycle, app) if _is_old(cycle) else app)

    def eof_received(self) -> bool:
        """asyncio: the client sends no more. It may have gone, or only be done with asking. True: the connection stays
        open, for the last answer.

        Whoever has gone resets what is written to it: where an answer has begun its next bytes will tell. Before that
        empty interim answers do, which every client of HTTP/1.1 passes over."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if not cycle.response_started:
            if _is_old(cycle):
                return False
            self._probe(_PROBES_S)
        cycle.keep_alive = False
        return True

    def _probe(self, waits_s: tuple[float, ...]) -> None:
        cycle = self._running
        if cycle is None or cycle.response_started or self.transport.is_closing():
            return
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if waits_s:
            self.loop.call_later(waits_s[0], self._probe, waits_s[1:])

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the client has gone. uvicorn tells the request that came last; this, the one being answered."""
        self.timed_out = isinstance(exc, TimeoutError)
        self._cancel_head_timer()
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
            if self._on_gone is not None:
                self._on_gone()

    def when_gone(self, act: Callable[[], None] | None) -> None:
        """Call this, once the whole request has been read, should its client go before it has been answered: at once if
        it has gone already. None: nothing more. A task that waits for that would cost more than all else of it."""
        self._on_gone = act
        if act is not None:
            self.flow.resume_reading()
            if self._running is not None and self._running.disconnected:
                act()

    def write_chunk(self, data: bytes) -> bool:
        """Write one chunk of a body of unknown length.

        False, and nothing is written, while the client is slow to read, or once it has gone: what is to be done then
        is for the response's own task to find out.
        """
        if self.flow.write_paused or self.transport.is_closing():
            return False
        running = self._running
        chunked = running is None or running.chunked_encoding
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        return True

    @property
    def has_whole_request(self) -> bool:
        return self._running is not None and not self._running.more_body

    def linger(self, idle_s: int) -> None:
        """From now on close once idle for so long.

        Not at the end of a response that began without a word of it: its client may send another request at once.
        """
        self.timeout_keep_alive = idle_s
        if self.cycle is None or self.cycle.response_complete:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(idle_s, self.timeout_keep_alive_handler)


def _is_old(cycle: RequestResponseCycle) -> bool:
    return cycle.scope["http_version"] == "1.0"


def _until_close(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """The application for a client of HTTP/1.0, which knows no chunks: a body of unknown length ends with its
    connection, which is closed after each answer."""

    async def answered(scope: Any, receive: Any, send: Any) -> None:
        open_end = False

        async def send_plainly(message: Any) -> None:
            nonlocal open_end
            if message["type"] == "http.response.start":
                open_end = not any(name == b"content-length" for name, _ in message.get("headers", ()))
                if open_end:
                    cycle.chunked_encoding = False
            elif open_end:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return answered


class RequestIds:
    """Outermost layer: echoes a client's x-request-id, or draws one, on every response, errors included.

    It takes ``prefix``, such as "/llm", off the paths of requests that a proxy passed on with it. While ``closing()``
    it asks clients to connect anew for their next request. What is logged for a request bears its id; with
    ``logs_requests`` one line is logged for each when it has been answered: of what was asked only method and path.
    """

    def __init__(
        self,
        app: ASGIApp,
        prefix: str = "",
        closing: Callable[[], bool] = lambda: False,
        *,
        logs_requests: bool = False,
    ) -> None:
        self._app, self._prefix = app, prefix
        self._closing, self._logs_requests = closing, logs_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = scope["path"]
        if self._prefix and asked.startswith(f"{self._prefix}/"):
            path = asked.removeprefix(self._prefix)
            scope = {**scope, "path": path, "raw_path": path.encode()}
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        usable = 0 < len(given) <= _LONGEST_ID and all(0x21 <= byte <= 0x7E for byte in given)
        request_id = given if usable else f"req-{uuid.uuid4().hex}".encode()

        REQUEST_ID.set(request_id.decode())
        began_s, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_HEADER, request_id)]
                if self._closing():
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._logs_requests:
                account = account_of(scope)
                log.info(
                    "request method=%s path=%s status=%d elapsed_ms=%.1f key=%s request_id=%s",
                    scope["method"],
                    asked[:_LONGEST_PATH],
                    status,
                    (time.monotonic() - began_s) * 1e3,
                    account.name if account is not None else "-",
                    REQUEST_ID.get(),
                )


async def json_body(request: Request, limit_bytes: int, timeout_s: float) -> bytes:
    """The body of a request, never more than ``limit_bytes`` of it in memory.

    Raises:
        ApiError: 415, it does not call itself JSON, or is compressed; 413 (before reading where the length is
            declared); 408; 400, it has so many lists and objects that reading it would hold up every other request.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        message = f"Bodies are taken as they are; found content-encoding '{encoding}'. Send it without."
        raise _refusal(415, message, "unsupported_media_type")
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        found = f"'{given}'" if given else "none"
        message = f"The content type must be application/json; found {found}. Set the header content-type."
        raise _refusal(415, message, "unsupported_media_type")
    message = f"The request body is over the limit of {limit_bytes} bytes. Send a smaller one."
    too_large = _refusal(413, message, "request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise too_large
    body = bytearray()
    try:
        # Most bodies have come with their heads: then nothing is waited for, and a timer costs more than the reading.
        async with asyncio.timeout(None if Connection.of(request.scope).has_whole_request else timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise too_large
    except TimeoutError:
        found = f"found {len(body)} bytes"
        message = f"The request body did not arrive within {timeout_s:g} s; {found}. Send it again."
        raise _refusal(408, message, "request_timeout") from None
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE) from None
    nested = body.count(b"[") + body.count(b"{")
    if nested > MOST_CONTAINERS:
        bare = _STRINGS.sub(b"", body)
        nested = bare.count(b"[") + bare.count(b"{")
    if nested > MOST_CONTAINERS:
        message = f"The request body has {nested} lists and objects, over the limit of {MOST_CONTAINERS}. Send fewer."
        raise _refusal(400, message, "request_too_large")
    return bytes(body)


def _refusal(status: int, message: str, code: str) -> ApiError:
    return ApiError(ErrorReply(status=status, message=message, code=code))


_NOT_HTTP = ErrorReply(status=400, message="That is no HTTP request. Speak HTTP/1.1 here.", code="invalid_http")
_HEAD_TOO_LARGE = ErrorReply(
    status=431,
    message="The request line and headers are over this server's limits. Send fewer or shorter ones.",
    code="headers_too_large",
)
_HEAD_LATE = ErrorReply(
    status=408, message="The request's headers did not arrive in time. Send it again.", code="request_timeout"
)
_TOO_MANY_CONNECTIONS = ErrorReply(
    status=503,
    message="This server has as many connections as it takes. Try again shortly.",
    kind=OVERLOADED,
    code="too_many_connections",
)

# Nobody reads this reply; the status is what proxies log for a client that closed its connection.
CLIENT_GONE = ErrorReply(status=499, message="The client closed the connection.", code="client_closed_request")
CLIENT_STALLED = ErrorReply(status=499, message="The client read too slowly for too long.", code="client_stalled")
