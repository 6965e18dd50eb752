"""A completions client on raw sockets: the load a benchmark makes must cost less than what it measures."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.engines.run import Speed


@dataclass(kw_only=True)
class StreamRecord:
    """One streamed completion: when it was sent, what came, and when (monotonic).

    Attributes:
        arrivals: Time of each piece that came, and the events that it held.
    """

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    done: bool = False

    @property
    def first_s(self) -> float:
        """When the first event came."""
        return next(at_s for at_s, events in self.arrivals if events)

    @property
    def last_s(self) -> float:
        """When the last piece came."""
        return self.arrivals[-1][0]

    @property
    def ttft_s(self) -> float:
        """From when it was sent until the first event."""
        return self.first_s - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Waits between the pieces that brought tokens; several tokens that came in one piece were one wait."""
        left = sum(bool(event["choices"]) for event in self.events())
        came = []
        for at_s, events in self.arrivals:
            if events and left > 0:
                came.append(at_s)
            left -= events
        return [later - earlier for earlier, later in pairwise(came)]

    def events_until(self, at_s: float) -> int:
        """Events that had come at that time."""
        return sum(events for came_s, events in self.arrivals if came_s <= at_s)

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
            raise RuntimeError(f"{open_streams} of {len(records)} streams had not ended after {timeout_s:.0f} s")
        for key, _ in selector.select(1.0):
            connection, record = key.fileobj, key.data
            chunk = connection.recv(65536)  # type: ignore[union-attr]
            now = time.monotonic()
            record.body += chunk
            if chunk:
                record.arrivals.append((now, chunk.count(b"data: {")))
            else:
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
    """The speed of a batch of streams of `tokens` tokens each.

    Requests arrive one after the other, so the first streams begin while later prompts are still computed:
    decoding counts from when every stream has its first token, less the tokens that some had by then.

    Raises:
        RuntimeError: nothing came after that.
    """
    begun_s = max(record.first_s for record in records)
    last_s = max(record.last_s for record in records)
    if last_s <= begun_s:
        raise RuntimeError(f"{tokens} tokens are too few to time: a stream came in one piece. Ask for more.")
    decoded = sum(tokens - record.events_until(begun_s) for record in records)
    whole_s = last_s - min(record.sent_s for record in records)
    return Speed(decode=decoded / (last_s - begun_s), whole=len(records) * tokens / whole_s)
