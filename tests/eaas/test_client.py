"""Streams of clients that outlive what they are connected to, before a server that cuts them anywhere."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

import eaas.client
from eaas.client import resuming

EVENTS, SEED = 4, time.time_ns()
QUIET: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 20}
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}]}


def chat_events(count: int = EVENTS) -> list[bytes]:
    """A chat stream as a gateway sends it; event n is of the id `n/x y`."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    said = [
        json.dumps(head | {"choices": [{"index": 0, "delta": {"content": f"w{n} é"}, "finish_reason": None}]})
        for n in range(count)
    ]
    return [b"id: %d/x y\ndata: %b\n\n" % (n, text.encode()) for n, text in enumerate([*said, "[DONE]"])]


def named_events(names: list[tuple[str, dict[str, Any]]]) -> list[bytes]:
    return [
        b"id: %d/x y\nevent: %b\ndata: %b\n\n" % (n, name.encode(), json.dumps({"type": name, **more}).encode())
        for n, (name, more) in enumerate(names)
    ]


MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": []}
MESSAGES = named_events(
    [
        ("message_start", {"message": MESSAGE | {"usage": {"input_tokens": 1, "output_tokens": 0}}}),
        ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        *[("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": f"w{n} "}}) for n in range(3)],
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}),
        ("message_stop", {}),
    ]
)
OVERLOADED = {"error": {"message": "it stops", "type": "overloaded_error", "param": None, "code": "shutting_down"}}
BROKEN = {"error": {"message": "a fault", "type": "server_error", "param": None, "code": "internal_error"}}


@dataclass(frozen=True, kw_only=True)
class Act:
    """What the server does with one request.

    Attributes:
        after: Bytes of the body that it sends; None: all.
        how: Then: "end" the body, "close" the connection, or "reset" it.
        then: Sent after these bytes.
        status: Instead of a stream, with the headers.
    """

    after: int | None = None
    how: str = "end"
    then: bytes = b""
    status: int = 200
    headers: str = ""


@dataclass
class CuttingServer:
    """Serves `events` from the one after Last-Event-ID on, by its acts in turn; afterwards whole."""

    events: list[bytes]
    acts: list[Act] = field(default_factory=list)
    asked: list[tuple[str, bytes]] = field(default_factory=list)  # Last-Event-ID and body of each request
    kind: str = "text/event-stream; charset=utf-8"

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        # Closed alone it would still take one more.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                taken, _ = self._listener.accept()
            except OSError:
                return
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(taken,), daemon=True).start()

    def _serve(self, taken: socket.socket) -> None:
        with suppress(ConnectionError), taken, taken.makefile("rb") as lines:
            while self._answer(taken, lines):
                pass

    def _answer(self, taken: socket.socket, lines: Any) -> bool:
        head: dict[str, str] = {}
        if not lines.readline():
            return False
        while line := lines.readline().decode().strip():
            name, _, value = line.partition(":")
            head[name.lower()] = value.strip()
        last = head.get("last-event-id", "")
        self.asked.append((last, lines.read(int(head.get("content-length", 0)))))
        act = self.acts.pop(0) if self.acts else Act()
        if act.status != 200:
            body = json.dumps(BROKEN).encode()
            start = f"HTTP/1.1 {act.status} X\r\n{act.headers}content-type: application/json\r\n"
            taken.sendall(start.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
            return True
        body = b"".join(self.events[int(last.partition("/")[0]) + 1 if last else 0 :])
        sent = body if act.after is None else body[: act.after]
        if act.after != -1:
            start = f"HTTP/1.1 200 OK\r\n{act.headers}content-type: {self.kind}\r\ntransfer-encoding: chunked\r\n\r\n"
            pieces = [sent[at : at + 37] for at in range(0, len(sent), 37)] + [act.then] * bool(act.then)
            taken.sendall(start.encode() + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces))
        if act.how == "end":
            taken.sendall(b"0\r\n\r\n")
            return True
        if act.how == "reset":
            # What is on its way may be lost with the connection: as a killed process leaves it.
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False


@pytest.fixture
def server() -> Iterator[CuttingServer]:
    serving = CuttingServer(chat_events())
    yield serving
    with suppress(OSError):
        serving.close()


def bodies(kind: Any, url: str, count: int, before: Callable[[int], None], asked: Any = None) -> list[bytes]:
    """The whole bodies of so many POSTs of one resuming client, whichever kind it is; `before` is called for each."""
    client = resuming(kind(timeout=60, verify=False))

    def read() -> Iterator[bytes]:
        with client:
            for number in range(count):
                before(number)
                with client.stream("POST", url, json=asked or STREAMED) as response:
                    yield b"".join(response.iter_bytes())

    async def read_async() -> list[bytes]:
        found = []
        async with client:
            for number in range(count):
                before(number)
                async with client.stream("POST", url, json=asked or STREAMED) as response:
                    found.append(b"".join([chunk async for chunk in response.aiter_bytes()]))
        return found

    return list(read()) if isinstance(client, httpx.Client | httpx2.Client) else asyncio.run(read_async())


KINDS = [httpx.Client, httpx.AsyncClient, httpx2.Client, httpx2.AsyncClient]
STREAMED = {"model": "m", "messages": [], "stream": True}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eaas.client, "_FIRST_WAIT_S", 1e-3)


@pytest.mark.parametrize("how", ["close", "reset", "end"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_stream_cut_at_any_byte_is_whole_for_its_client(server: CuttingServer, kind: Any, how: str) -> None:
    whole = b"".join(server.events)
    draw = random.Random(SEED)
    # -1: no answer at all.
    edges = [len(b"".join(server.events[:n])) + d for n in range(EVENTS + 2) for d in (-1, 0, 1)]
    some = edges + draw.sample(range(len(whole)), 20)
    if (kind, how) == (httpx2.AsyncClient, "close"):
        some += range(draw.randrange(5), len(whole), 5)
    cuts = [at for at in some if (0 if how == "end" else -1) <= at <= len(whole)]

    def cut(number: int) -> None:
        server.acts[:] = [Act(after=cuts[number], how=how), Act(after=draw.randrange(1, 120), how=how)]
        server.asked.clear()

    for at, body in zip(cuts, bodies(kind, server.url, len(cuts), cut), strict=True):
        assert body == whole, f"seed {SEED}, cut at {at}: {body!r}"
    assert {body for _, body in server.asked} == {server.asked[0][1]}, "another body was sent"


def said_by_openai(server: CuttingServer, client: Any) -> list[str]:
    """What a client of openai, sync or async, sees of a chat stream."""
    if isinstance(client, openai.OpenAI):
        return [c.choices[0].delta.content or "" for c in client.chat.completions.create(**ASKED, stream=True)]

    async def read() -> list[str]:
        stream = await client.chat.completions.create(**ASKED, stream=True)
        return [chunk.choices[0].delta.content or "" async for chunk in stream]

    return asyncio.run(read())


@pytest.mark.parametrize("kind", [openai.OpenAI, openai.AsyncOpenAI])
def test_openais_clients_see_each_event_once(server: CuttingServer, kind: Any) -> None:
    draw = random.Random(SEED)
    most = len(b"".join(server.events)) // 2
    for _ in range(20):
        server.acts[:] = [Act(after=draw.randrange(-1, most), how=draw.choice(["close", "reset"])) for _ in range(4)]
        client = resuming(kind(base_url=server.url, **QUIET))
        assert type(client) is kind
        assert said_by_openai(server, client) == [f"w{n} é" for n in range(EVENTS)], f"seed {SEED}"


@pytest.mark.parametrize("kind", [anthropic.Anthropic, anthropic.AsyncAnthropic])
def test_anthropics_clients_see_each_event_once(server: CuttingServer, kind: Any) -> None:
    server.events = MESSAGES
    draw = random.Random(SEED)
    asked: Any = ASKED | {"max_tokens": 8}

    async def read(client: Any) -> str:
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_text()

    for _ in range(10):
        server.acts[:] = [Act(after=draw.randrange(-1, 300), how="close") for _ in range(3)]
        client = resuming(kind(base_url=server.url, **QUIET))
        if kind is anthropic.Anthropic:
            with client.messages.stream(**asked) as stream:
                text = stream.get_final_text()
        else:
            text = asyncio.run(read(client))
        assert text == "w0 w1 w2 ", f"seed {SEED}"


@pytest.mark.parametrize("kind", [openai.OpenAI, openai.AsyncOpenAI])
def test_a_stream_that_no_gateway_can_go_on_with_ends_as_the_client_raises_any_conflict(
    server: CuttingServer, kind: Any
) -> None:
    server.acts[:] = [Act(after=400, how="reset"), Act(status=409)]
    with pytest.raises(openai.ConflictError, match="a fault"):
        said_by_openai(server, resuming(kind(base_url=server.url, **QUIET)))
    assert len(server.asked) == 2, "a conflict does not pass: nothing is asked again"


def test_a_client_of_httpx_raises_httpxs_own_error(server: CuttingServer) -> None:
    server.acts[:] = [Act(after=400, how="close"), Act(status=409)]
    with pytest.raises(httpx.HTTPStatusError, match="409") as raised:
        bodies(httpx.Client, server.url, 1, lambda _: None)
    assert raised.value.response.json() == BROKEN


def test_refusals_that_pass_are_asked_again_and_retry_after_is_heeded(server: CuttingServer) -> None:
    passing = [Act(status=status, headers="retry-after: 0.3\r\n") for status in (503, 429)]
    # Before the first event, and in the middle.
    cut = Act(after=len(server.events[0]) + 5, how="close")
    server.acts[:] = [*passing, cut, *passing, Act(status=502), Act(status=504)]
    began_s = time.monotonic()
    (body,) = bodies(httpx.Client, server.url, 1, lambda _: None)
    assert body == b"".join(server.events)
    assert time.monotonic() - began_s >= 4 * 0.3
    assert [last for last, _ in server.asked] == ["", "", "", *["0/x y"] * 5]


def error_event(error: dict[str, Any], kind: bytes = b"") -> bytes:
    return kind + b"data: " + json.dumps(error, separators=(",", ":")).encode() + b"\n\n"


@pytest.mark.parametrize("kind", [b"", b"event: error\n", b"event: response.failed\ndata: {}\n\n"])
def test_a_stream_whose_gateway_stops_goes_on_at_another(server: CuttingServer, kind: bytes) -> None:
    stops = error_event(OVERLOADED, kind)
    one = len(server.events[0])
    # In two pieces, the second of which is not all there.
    server.acts[:] = [
        Act(after=one, then=stops),
        Act(after=one, then=stops[:-9], how="close"),
        Act(after=0, then=stops),
    ]
    assert bodies(httpx.Client, server.url, 1, lambda _: None) == [b"".join(server.events)]
    assert [last for last, _ in server.asked] == ["", "0/x y", "1/x y", "1/x y"]


def test_an_error_that_does_not_pass_is_told_as_it_came_and_asked_for_once(server: CuttingServer) -> None:
    fault = error_event(BROKEN)
    server.acts[:] = [Act(after=len(server.events[0]), then=fault)]
    assert bodies(httpx.Client, server.url, 1, lambda _: None) == [server.events[0] + fault]
    server.acts[:] = [Act(after=len(server.events[0]), then=fault)]
    with pytest.raises(openai.APIError, match="a fault"):
        said_by_openai(server, resuming(openai.OpenAI(base_url=server.url, **QUIET)))
    assert len(server.asked) == 2


def test_events_without_ids_are_never_asked_for_again(server: CuttingServer) -> None:
    server.events = [event.partition(b"\n")[2] for event in server.events]
    server.acts[:] = [Act(after=len(server.events[0]) + 5, how="close")]
    with pytest.raises(httpx.RemoteProtocolError):
        bodies(httpx.Client, server.url, 1, lambda _: None)
    assert len(server.asked) == 1
    # Nothing says that such a stream is not whole.
    server.acts[:] = [Act(after=len(server.events[0]))]
    assert bodies(httpx.Client, server.url, 1, lambda _: None) == [server.events[0]]


def test_requests_for_whole_answers_pass_through(server: CuttingServer) -> None:
    asked = {"model": "m", "stream": False}
    server.acts[:] = [Act(after=-1, how="close")]
    with pytest.raises(httpx.RemoteProtocolError):
        bodies(httpx.Client, server.url, 1, lambda _: None, asked)
    server.acts[:] = [Act(status=503)]
    assert bodies(httpx.Client, server.url, 1, lambda _: None, asked) == [json.dumps(BROKEN).encode()]
    assert len(server.asked) == 2


@pytest.mark.parametrize("how", ["close", "end"])
def test_patience_ends_and_begins_anew_with_each_event(server: CuttingServer, how: str) -> None:
    client = resuming(httpx.Client(timeout=60), patience_s=0.5)
    size = len(server.events[0])
    slow = [Act(status=503, headers="retry-after: 0.3\r\n")]
    server.acts[:] = [*slow, Act(after=size, how=how), *slow, Act(after=size, how=how), *slow, Act()]
    assert client.post(server.url, json=STREAMED).content == b"".join(server.events), "no pause over 0.5 s"
    server.acts[:] = [Act(after=size, how=how), *[Act(after=0, how=how)] * 10_000]
    before = len(server.asked)
    with pytest.raises(httpx.RemoteProtocolError):
        client.post(server.url, json=STREAMED)
    assert 2 < len(server.asked) - before < 100
    server.close()
    with pytest.raises(httpx.TransportError):
        client.post(server.url, json=STREAMED)
    with pytest.raises(httpx.UnsupportedProtocol):
        client.post("nothing://here", json=STREAMED)


def test_a_client_that_closes_its_stream_holds_no_connection(server: CuttingServer) -> None:
    server.acts[:] = [Act(after=len(server.events[0]), how="close")]
    http = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=1), headers={"x-mine": "1"})
    client = resuming(http)
    for _ in range(3):
        with client.stream("POST", server.url, json=STREAMED) as response:
            assert next(response.iter_bytes()) == server.events[0]
            assert response.request.headers["x-mine"] == "1"
    client.close()
    assert http.is_closed


def test_what_is_no_client_of_httpx_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match="socket does not rest on httpx"):
        resuming(socket.socket())
