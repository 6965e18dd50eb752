"""A streaming client for OpenAI-compatible endpoints, light enough to share a machine with what it measures.

One class holds a connection and parses what arrives on it without a task or a queue in between: a token costs one
callback. General HTTP clients take several times as long for each, which on two cores is load of its own.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from eaas.ops.load.record import StreamRecord

_LONGEST_ERROR = 65536
# Servers close idle connections; one that has idled for longer may be closing while we write.
_MOST_IDLE_S = 2.0


class EndpointInvalid(ValueError):
    """No address of an endpoint; the text says what is needed."""


class EndpointUnreachable(RuntimeError):
    """Nothing that speaks the OpenAI API answered; the text says what to check."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where requests go.

    Attributes:
        base: Path before /v1, such as "" or "/proxy".
        chat: /v1/chat/completions rather than /v1/completions.
        key: Sent as a bearer token; empty: none.
    """

    host: str
    port: int
    tls: bool = False
    base: str = ""
    chat: bool = False
    key: str = field(default="", repr=False)

    @classmethod
    def of_url(cls, url: str, *, chat: bool | None = None, key: str = "") -> Endpoint:
        """From http://HOST:PORT, with or without /v1, /v1/completions or /v1/chat/completions. Raises EndpointInvalid:
        no such URL."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise EndpointInvalid(f"{url!r} is no address ({error}); give http://HOST:PORT.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EndpointInvalid(f"{url!r} is no address of an endpoint; give http://HOST:PORT.")
        path, named = parts.path.rstrip("/"), None
        for ending, means_chat in (("/chat/completions", True), ("/completions", False)):
            if path.endswith(ending):
                path, named = path.removesuffix(ending), means_chat
                break
        is_chat = bool(named) if chat is None else chat
        return cls(
            host=parts.hostname, port=port, tls=parts.scheme == "https",
            base=path.removesuffix("/v1"), chat=is_chat, key=key,
        )  # fmt: skip

    @property
    def path(self) -> str:
        return f"{self.base}/v1/{'chat/' if self.chat else ''}completions"

    @property
    def origin(self) -> str:
        """Scheme, host and port, as a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    @property
    def headers(self) -> Mapping[str, str]:
        named = {"host": self.origin.partition("//")[2], "user-agent": "eaas-load"}
        return named | ({"authorization": f"Bearer {self.key}"} if self.key else {})


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


def _message(error: Any) -> str:
    said = error.get("message") if isinstance(error, dict) else error
    return str(said)[:300]


class _Connection(asyncio.Protocol):
    """One connection, and the stream that is on it. Events end up in the stream's record, in order."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._t0_s = client.t0_s
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._record: StreamRecord | None = None
        self._ended: asyncio.Future[None] | None = None
        self._now_s = 0.0
        self._rest = b""
        self._data = b""
        self._body = bytearray()
        self._is_stream = self._done = False
        self.idle_since_s = 0.0

    @property
    def usable(self) -> bool:
        """Whether another request can go out on it."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and time.monotonic() - self.idle_since_s < _MOST_IDLE_S
        )

    def send(self, request: bytes, record: StreamRecord) -> asyncio.Future[None]:
        """Send a request; the future is done when its stream has ended, well or badly."""
        if self._transport is None:
            raise RuntimeError("send before the connection was made")
        self._parser = httptools.HttpResponseParser(self)
        self._record, self._rest, self._data = record, b"", b""
        self._is_stream = self._done = False
        self._body.clear()
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._ended

    def abort(self, error: str | None) -> None:
        """Close the connection; its stream, if any, ends with the error."""
        self._end(error)
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses, though they do all the same.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic() - self._t0_s
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, AttributeError) as error:
            # Without a parser: bytes that nobody asked for.
            self.abort(f"protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._now_s = time.monotonic() - self._t0_s
        self._client.forget(self)
        # Done is done, even where the server ends its answers by closing.
        self._end(None if self._done else f"closed: {exc or 'by the server in mid-stream'}")

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = value.lower().startswith(b"text/event-stream")
        elif name.lower() == b"retry-after" and value.isdigit() and self._record is not None:
            self._record.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        if self._record is not None:
            self._record.status = self._parser.get_status_code()
            self._is_stream = self._is_stream and self._record.status == 200

    def on_body(self, body: bytes) -> None:
        if not self._is_stream:
            self._body += body[: _LONGEST_ERROR - len(self._body)]
            return
        if not self._rest and not self._data and body[:5] == b"data:" and body.find(b"\n\n") == len(body) - 2:
            # One whole event, as most servers write them.
            self._event(body[5:-2])
            return
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line[:5] == b"data:":
                self._data = self._data + b"\n" + line[5:] if self._data else line[5:]
            elif self._data and not line.rstrip(b"\r"):
                data, self._data = self._data, b""
                self._event(data)

    def on_message_complete(self) -> None:
        record = self._record
        if record is None:
            return
        if not self._is_stream:
            kind = "protocol" if record.status == 200 else f"http {record.status}"
            self._end(f"{kind}: {self._said()}")
        else:
            self._end(None if self._done else "stream: it ended without [DONE]")
        transport = self._transport
        if transport is not None and not transport.is_closing():
            if self._parser.should_keep_alive():
                self.idle_since_s = time.monotonic()
                self._client.keep(self)
            else:
                transport.close()

    def _said(self) -> str:
        try:
            return _message(msgspec.json.decode(bytes(self._body))["error"])
        except (msgspec.DecodeError, KeyError, TypeError):
            return bytes(self._body[:200]).decode(errors="replace") or "an empty answer"

    def _event(self, data: bytes) -> None:
        record = self._record
        if record is None:
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            if data.strip() == b"[DONE]":
                self._done = True
            else:
                record.error = record.error or f"protocol: {error} in {data[:100]!r}"
            return
        for choice in event.choices:
            delta = choice.delta
            text = choice.text if delta is None else delta.content or delta.reasoning_content
            if text:
                record.token_s.append(self._now_s)
                record.pieces.append(text)
                self._client.pieces += 1
            if choice.finish_reason is not None:
                record.finish = choice.finish_reason
        if event.usage is not None:
            record.tokens, record.prompt_tokens = event.usage.completion_tokens, event.usage.prompt_tokens
        if event.error is not None:
            record.error = record.error or f"stream: {_message(event.error)}"

    def _end(self, error: str | None) -> None:
        record, ended = self._record, self._ended
        self._record = self._ended = None
        if record is None or ended is None:
            return
        if record.ended_s is None:
            record.ended_s = self._now_s
        record.error = record.error or error
        if not ended.done():
            ended.set_result(None)


class Client:
    """A pool of connections to one endpoint. Times are counted from `start`, and `pieces` of text over all streams."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint = endpoint
        self.t0_s = time.monotonic()
        self.pieces = 0
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context() if endpoint.tls else None
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        named = "".join(f"{name}: {value}\r\n" for name, value in endpoint.headers.items())
        self._head = (
            f"POST {endpoint.path} HTTP/1.1\r\n{named}accept: text/event-stream\r\n"
            "content-type: application/json\r\ncontent-length: "
        ).encode()

    def start(self) -> None:
        """Count time from now. No stream may be under way."""
        self.close()
        self.t0_s = time.monotonic()
        self.pieces = 0

    @property
    def now_s(self) -> float:
        """Seconds since `start`."""
        return time.monotonic() - self.t0_s

    async def stream(self, body: bytes, record: StreamRecord) -> None:
        """Send one request and fill its record until the stream has ended; what fails is in the record."""
        record.sent_s = self.now_s
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connection()
                await connection.send(self._head + b"%d\r\n\r\n" % len(body) + body, record)
        except TimeoutError:
            record.error = f"timeout: no end within {self._timeout_s:g} s"
        except OSError as error:
            record.error = f"connect: {error}"
        finally:
            if record.ended_s is None:
                record.ended_s = self.now_s
                if connection is not None:
                    connection.abort(record.error)

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                self._busy.add(connection)
                return connection
            connection.abort(None)
        endpoint = self.endpoint
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self), endpoint.host, endpoint.port, ssl=self._tls
        )
        self._busy.add(connection)
        return connection

    def keep(self, connection: _Connection) -> None:
        """Take a connection back whose stream has ended."""
        self._busy.discard(connection)
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        for connection in [*self._idle, *self._busy]:
            connection.abort("closed: by this client")
        self._idle.clear()
        self._busy.clear()
