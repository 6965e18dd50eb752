"""Streams that outlive a gateway, for clients of openai, of anthropic, and whatever else rests on httpx.

Where a connection breaks, the same request is sent again with the id of the last event that came, as Last-Event-ID,
and the stream goes on with the event behind it: any gateway of the cluster computes, bit for bit, what the lost one
would have sent. Events are passed on whole, so that none is seen in part and then again.

    client = resuming(openai.OpenAI(base_url="http://127.0.0.1:8000/v1"))
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

_Client = TypeVar("_Client")

# Of the gateway, or of a proxy before it.
_RETRIED = frozenset({429, 502, 503, 504})
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
_BLANK_LINE = re.compile(rb"\n\n|\r\n\r\n")
_ID = re.compile(rb"^id: ?([^\r\n]*)", re.MULTILINE)
_END = re.compile(rb"^(?:data: ?\[DONE\]|event: ?(?:message_stop|response\.(?:completed|incomplete)))", re.M)
_FAILURE = re.compile(rb'^(?:event: ?(?:error|response\.failed)|data: ?\{"error")', re.MULTILINE)
# In a failure: the gateway stops, or none of its workers can go on; another's may.
_PASSING = b'"overloaded_error"'


def resuming(client: _Client, patience_s: float = 60.0) -> _Client:
    """A client of the same kind whose streams survive a cut; it uses the connections of the one given.

    Connection errors and the statuses 429, 502, 503 and 504 are tried again after 50 ms, then ever longer up to 2 s, or
    what Retry-After says; in a stream so is an error event that says the service is overloaded or stops. Before the
    first event of a stream this holds for requests with ``stream`` true, which compute and change nothing; all
    others pass through. A stream that no gateway can go on with ends as the client raises any status: 409.

    Args:
        client: OpenAI, AsyncOpenAI, Anthropic, AsyncAnthropic, or a client of httpx or httpx2.
        patience_s: Longest time without a new event for which a stream is tried; an SDK's own retries come on top.

    Raises:
        TypeError: it is no client that rests on httpx.
    """
    sdk: Any = client
    http = getattr(sdk, "_client", sdk)
    loaded = [module for name in ("httpx2", "httpx") if (module := sys.modules.get(name)) is not None]
    library: Any = next((it for it in loaded if isinstance(http, it.Client | it.AsyncClient)), None)
    if library is None:
        found = type(client).__name__
        raise TypeError(f"{found} does not rest on httpx; give a client of openai, anthropic or httpx.")

    def refusal(response: Any) -> Exception:
        if make := getattr(sdk, "_make_status_error_from_response", None):
            return make(response)
        message = f"{response.status_code} for {response.request.url}: {response.text}"
        return library.HTTPStatusError(message, request=response.request, response=response)

    base = _Base(http=http, library=library, refusal=refusal, patience_s=patience_s)
    is_async = isinstance(http, library.AsyncClient)
    kind, transport = (library.AsyncClient, _async_transport) if is_async else (library.Client, _transport)
    shared = {name: getattr(http, name) for name in ("base_url", "headers", "params", "timeout")}
    resumed = kind(transport=transport(base), **shared)
    return resumed if http is sdk else sdk.with_options(http_client=resumed)


@dataclass(frozen=True, kw_only=True)
class _Base:
    http: Any
    library: Any
    refusal: Callable[[Any], Exception]  # what the client raises for a status, its body read
    patience_s: float


class _Course:
    """One request and how far its stream has come: what is passed on of it, and when it is sent again."""

    def __init__(self, base: _Base, request: Any) -> None:
        self._base, self._first = base, request
        try:
            self._body: bytes | None = request.content
        except base.library.RequestNotRead:
            # It can be read once, and so sent once.
            self._body = None
        self._last_id = b""
        self.rest = b""  # what was not passed on: the beginning of an event, or a failure
        self._begun = self._failing = self._ended = False
        self._waits, self._lost_s = 0, 0.0

    def request(self) -> Any:
        """The request as it came, or from the last event on."""
        first = self._first
        if not self._last_id:
            return first
        headers = [*first.headers.raw, (b"last-event-id", self._last_id)]
        return self._base.library.Request(
            first.method, first.url, headers=headers, content=self._body, extensions=first.extensions
        )

    def take(self, chunk: bytes) -> bytes:
        """What to pass on of these bytes: whole events, and nothing of a failure before it is known to be final."""
        self.rest += chunk
        if self._failing:
            return b""
        end = _whole(self.rest, len(self.rest))
        if failure := _FAILURE.search(self.rest, 0, end):
            self._failing, end = True, _whole(self.rest, failure.start())
        events, self.rest = self.rest[:end], self.rest[end:]
        if events:
            self._waits, self._begun = 0, True
            self._ended = _END.search(events) is not None
            for found in _ID.finditer(events):
                self._last_id = found[1]
        return events

    def after(self, lost: Exception | None) -> float | None:
        """How long to wait, when a body has ended, before the stream is asked to go on; None: its end is `rest`.

        Raises:
            Exception: `lost`, by which the body ended, or that it ended too early, where it goes on no more.
        """
        # Of events without ids none may come twice.
        known = self._last_id or not self._begun
        resumable = known and not self._ended and (not self._failing or _PASSING in self.rest)
        if resumable and (wait_s := self.wait_s()) is not None:
            self.rest, self._failing = b"", False
            return wait_s
        if self._ended or self._failing or not (lost or resumable):
            return None
        raise lost or self._base.library.RemoteProtocolError("The stream ends before its last event.")

    def wait_s(self, found: Any = None) -> float | None:
        """How long to wait before it is sent again; None: what was found, a response or an error, is final."""
        status = getattr(found, "status_code", 503)
        if status not in _RETRIED or isinstance(found, self._base.library.UnsupportedProtocol):
            return None
        if self._body is None or not (self._last_id or self._asks_for_stream()):
            return None
        now_s = time.monotonic()
        if not self._waits:
            self._lost_s = now_s
        wait_s = min(_FIRST_WAIT_S * 2.0 ** min(self._waits, 30), _LONGEST_WAIT_S) * random.uniform(0.5, 1.5)
        asked = found.headers.get("retry-after", "") if hasattr(found, "headers") else ""
        if re.fullmatch(r"\d+(\.\d+)?", asked, re.ASCII):
            wait_s = max(wait_s, float(asked))
        self._waits += 1
        return wait_s if now_s + wait_s - self._lost_s <= self._base.patience_s else None

    def _asks_for_stream(self) -> bool:
        try:
            asked = json.loads(self._body or b"{}")
        except ValueError:
            return False
        # What is computed in the background is kept: asked for twice it is two.
        return isinstance(asked, dict) and asked.get("stream") is True and not asked.get("background")

    def whole(self, response: Any, body: Callable[..., Any]) -> Any:
        """The response to pass on: of a stream, one whose body goes on by itself."""
        if not _is_stream(response):
            return response
        # Its body is passed on as it was before it was packed.
        headers = [pair for pair in response.headers.raw if pair[0].lower() != b"content-encoding"]
        stream = body(response, self)
        return self._base.library.Response(200, headers=headers, stream=stream, extensions=response.extensions)


def _whole(events: bytes, end: int) -> int:
    """Where the last whole event before `end` ends."""
    return max((found.end() for found in _BLANK_LINE.finditer(events, 0, end)), default=0)


def _is_stream(response: Any) -> bool:
    kind = response.headers.get("content-type", "").partition(";")[0]
    return response.status_code == 200 and kind.strip().lower() == "text/event-stream"


def _transport(base: _Base) -> Any:
    http, library = base.http, base.library

    def ask(course: _Course) -> Any:
        while True:
            try:
                response = http.send(course.request(), stream=True)
                if (wait_s := course.wait_s(response)) is None:
                    return response
                response.close()
            except library.TransportError as error:
                if (wait_s := course.wait_s(error)) is None:
                    raise
            time.sleep(wait_s)

    class Body(library.SyncByteStream):
        def __init__(self, response: Any, course: _Course) -> None:
            self._response, self._course = response, course

        def __iter__(self) -> Iterator[bytes]:
            course = self._course
            while True:
                lost = None
                try:
                    for chunk in self._response.iter_bytes():
                        if events := course.take(chunk):
                            yield events
                except library.TransportError as error:
                    lost = error
                self._response.close()
                if (wait_s := course.after(lost)) is None:
                    break
                time.sleep(wait_s)
                self._response = ask(course)
                if not _is_stream(self._response):
                    self._response.read()
                    raise base.refusal(self._response)
            yield course.rest

        def close(self) -> None:
            self._response.close()

    class Transport(library.BaseTransport):
        def handle_request(self, request: Any) -> Any:
            course = _Course(base, request)
            return course.whole(ask(course), Body)

        def close(self) -> None:
            http.close()

    return Transport()


def _async_transport(base: _Base) -> Any:
    http, library = base.http, base.library

    async def ask(course: _Course) -> Any:
        while True:
            try:
                response = await http.send(course.request(), stream=True)
                if (wait_s := course.wait_s(response)) is None:
                    return response
                await response.aclose()
            except library.TransportError as error:
                if (wait_s := course.wait_s(error)) is None:
                    raise
            await asyncio.sleep(wait_s)

    class Body(library.AsyncByteStream):
        def __init__(self, response: Any, course: _Course) -> None:
            self._response, self._course = response, course

        async def __aiter__(self) -> AsyncIterator[bytes]:
            course = self._course
            while True:
                lost = None
                try:
                    async for chunk in self._response.aiter_bytes():
                        if events := course.take(chunk):
                            yield events
                except library.TransportError as error:
                    lost = error
                await self._response.aclose()
                if (wait_s := course.after(lost)) is None:
                    break
                await asyncio.sleep(wait_s)
                self._response = await ask(course)
                if not _is_stream(self._response):
                    await self._response.aread()
                    raise base.refusal(self._response)
            yield course.rest

        async def aclose(self) -> None:
            await self._response.aclose()

    class Transport(library.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any:
            course = _Course(base, request)
            return course.whole(await ask(course), Body)

        async def aclose(self) -> None:
            await http.aclose()

    return Transport()
