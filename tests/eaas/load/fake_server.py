"""An OpenAI-compatible server that does to each stream what its prompt asks for, and writes down what it did."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Served:
    """The server's own record of one request: its body, and when each text was written (monotonic)."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    connection: int
    texts: list[str] = field(default_factory=list)
    written_s: list[float] = field(default_factory=list)


class FakeServer:
    """Prompts are programs of words: `say:N` texts, `pause:MS`, `again:N` the last N once more, `skip:N` leaves out N,
    `otherwise` goes on with another text, `status:503`, `after:S` its Retry-After, `error` in the stream, `drop` the
    connection, `silent` ends without [DONE], `unfinished` without a finish reason, `close` ends by closing, `merge:N`
    texts to an event, `crlf`, `split` sends single bytes, `usage:N` counts N tokens, `plain` answers without a stream.
    Other words mean nothing.

    Attributes:
        script: What every prompt is taken for; empty: what it says.
        key: Asked of every request, in lower case; empty: none is.
        members: Said by /status, as a gateway of EaaS does; empty: it is none.
    """

    def __init__(self) -> None:
        self.served: list[Served] = []
        self.script = ""
        self.members: list[dict[str, Any]] = []
        self.max_model_len = 2048
        self.key = ""
        self.port = 0
        self._connections = 0
        self._loop = asyncio.new_event_loop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, ready: threading.Event) -> None:
        async def main() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            self._stop = asyncio.Event()
            ready.set()
            await self._stop.wait()
            server.close()

        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(main())
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = head[0].split(" ")
                if self.key and headers.get("authorization") != f"bearer {self.key}":
                    await self._answer(writer, "401 Unauthorized", {"error": {"message": "no key"}})
                    continue
                if method == "GET":
                    said: dict[str, Any] = {"data": [{"id": "fake", "max_model_len": self.max_model_len}]}
                    if path == "/status" and self.members:
                        said = {"members": self.members}
                    await self._answer(writer, "200 OK", said)
                    continue
                served = Served(path=path, body=json.loads(body), headers=headers, connection=number)
                self.served.append(served)
                await self._stream(writer, served)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, status: str, said: dict[str, Any]) -> None:
        text = json.dumps(said)
        writer.write(
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()
        )
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, served: Served) -> None:
        chat = served.path.endswith("/chat/completions")
        said = served.body["messages"][-1]["content"] if chat else served.body["prompt"]
        words = [tuple(word.split(":")) for word in (self.script or said).split()]
        names = {word[0] for word in words}
        for name, *number in words:
            if name == "status":
                refusal = {"error": {"message": f"refused with {number[0]}"}}
                after = next((f"\r\nretry-after: {word[1]}" for word in words if word[0] == "after"), "")
                served.written_s.append(time.monotonic())
                await self._answer(writer, f"{number[0]} No{after}", refusal)
                return
        if "plain" in names:
            await self._answer(writer, "200 OK", {"choices": [{"text": "all at once"}]})
            return
        chunked = "close" not in names
        ending = "\r\n" if "crlf" in names else "\n"
        framing = "transfer-encoding: chunked" if chunked else "connection: close"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n\r\n".encode())

        async def put(said: Any) -> None:
            text = said if isinstance(said, str) else json.dumps(said)
            event = f"data: {text}{ending}{ending}".encode()
            for part in [event[i : i + 1] for i in range(len(event))] if "split" in names else [event]:
                writer.write(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
                await writer.drain()

        async def say(texts: list[str]) -> None:
            served.texts += texts
            served.written_s += [time.monotonic()] * len(texts)
            text = "".join(texts)
            key = {"delta": {"content": text}} if chat else {"text": text}
            await put({"choices": [{"index": 0, **key, "finish_reason": None}], "usage": None})

        if chat:
            await put({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        merge = next((int(word[1]) for word in words if word[0] == "merge"), 1)
        at, other = 0, ""
        for name, *number in words:
            if name == "say" and number:
                texts = [f" t{n}{other}" for n in range(at, at + int(number[0]))]
                at += int(number[0])
                for i in range(0, len(texts), merge):
                    await say(texts[i : i + merge])
            elif name == "again" and number:
                for text in served.texts[-int(number[0]) :]:
                    await say([text])
            elif name == "skip":
                at += int(number[0])
            elif name == "pause":
                await asyncio.sleep(int(number[0]) / 1e3)
            elif name == "otherwise":
                other = "?"
            elif name == "error":
                await put({"error": {"message": "no replica is left", "type": "server_error"}})
            elif name == "drop":
                writer.transport.abort()
                raise ConnectionResetError("as asked")
        if "error" not in names and "unfinished" not in names:
            key = {"delta": {}} if chat else {"text": ""}
            await put({"choices": [{"index": 0, **key, "finish_reason": "length"}]})
        if "error" not in names:
            tokens = next((int(word[1]) for word in words if word[0] == "usage"), len(served.texts))
            usage = {"prompt_tokens": 3 + 2 * len(said.split()), "completion_tokens": tokens}
            await put({"choices": [], "usage": usage})
            if "silent" not in names:
                await put("[DONE]")
        if chunked:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        else:
            raise ConnectionResetError("closed, as announced")


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """A server that runs meanwhile, in a thread of its own."""
    server, ready = FakeServer(), threading.Event()
    thread = threading.Thread(target=server.run, args=(ready,), daemon=True)
    thread.start()
    ready.wait(60)
    try:
        yield server
    finally:
        server.stop()
        thread.join(60)
