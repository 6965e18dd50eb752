"""A completions client on raw sockets: the load a benchmark makes must cost less than what it measures."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines.run import Speed


@dataclass(kw_only=True)
class StreamRecord:
    """One streamed completion: when it was sent, when its first and last bytes came (monotonic), and the bytes."""

    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    body: bytearray = field(default_factory=bytearray)
    done: bool = False

    def events(self) -> list[dict[str, Any]]:
        """What the stream said, in order."""
        return [json.loads(part[6:]) for part in bytes(self.body).split(b"\n") if part.startswith(b"data: {")]

    def texts(self) -> list[str]:
        """The delta texts in order."""
        return [choice["text"] for event in self.events() for choice in event["choices"]]


def stream_batch(
    address: tuple[str, int],
    model: str,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    timeout_s: float = 600.0,
) -> list[StreamRecord]:
    """Stream one greedy completion of exactly `tokens` tokens for every prompt, all at once.

    Args:
        address: Host and port of the gateway.
        model: Served model name.
        prompts: Token ids of each prompt.
        tokens: New tokens for each.

    Returns:
        A record for each prompt, in order.

    Raises:
        RuntimeError: a stream failed or did not end in time.
    """
    selector = selectors.DefaultSelector()
    records = []
    for prompt in prompts:
        body = json.dumps(
            {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            }
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        connection = socket.create_connection(address)
        record = StreamRecord(sent_s=time.monotonic())
        connection.sendall(head.encode() + body)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, record)
        records.append(record)
    deadline = time.monotonic() + timeout_s
    open_streams = len(records)
    while open_streams:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{open_streams} of {len(records)} streams had not ended after {timeout_s:.0f} s"
            )
        for key, _ in selector.select(1.0):
            connection, record = key.fileobj, key.data
            chunk = connection.recv(65536)  # type: ignore[union-attr]
            now = time.monotonic()
            record.first_s = record.first_s or now * (b"data: {" in chunk)
            record.last_s = now if chunk else record.last_s
            record.body += chunk
            if not chunk:
                selector.unregister(connection)
                connection.close()  # type: ignore[union-attr]
                open_streams -= 1
                record.done = b"data: [DONE]" in record.body
    selector.close()
    failed = [bytes(record.body[:500]) for record in records if not record.done]
    if failed:
        first = failed[0].decode(errors="replace")
        raise RuntimeError(f"{len(failed)} of {len(records)} streams failed; the first: {first}")
    counts = {record.events()[-1]["usage"]["completion_tokens"] for record in records}
    if counts != {tokens}:
        raise RuntimeError(f"streams of {sorted(counts)} tokens came where {tokens} were asked for")
    return records


def speed_of(records: Sequence[StreamRecord], tokens: int) -> Speed:
    """The speed of a batch of streams of `tokens` tokens each."""
    last_s = max(record.last_s for record in records)
    decode_s = last_s - min(record.first_s for record in records)
    whole_s = last_s - min(record.sent_s for record in records)
    return Speed(decode=len(records) * (tokens - 1) / decode_s, whole=len(records) * tokens / whole_s)
