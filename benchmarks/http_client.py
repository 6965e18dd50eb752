"""A completions client on raw sockets: the load a benchmark makes must cost less than what it measures."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class StreamRecord:
    """One streamed completion: when it was sent, when each token came (monotonic seconds), and the bytes."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    done: bool = False

    def texts(self) -> list[str]:
        """The delta texts in order."""
        events = [part[6:] for part in bytes(self.body).split(b"\n") if part.startswith(b"data: {")]
        return [choice["text"] for event in events for choice in json.loads(event)["choices"]]


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
            record.token_s += [now] * chunk.count(b"data: {")
            record.body += chunk
            if not chunk:
                selector.unregister(connection)
                connection.close()  # type: ignore[union-attr]
                open_streams -= 1
                record.done = b"data: [DONE]" in record.body
    selector.close()
    failed = [bytes(record.body[:500]) for record in records if not record.done]
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(records)} streams failed; the first: {failed[0].decode(errors='replace')}"
        )
    return records


def tokens_per_second(records: Sequence[StreamRecord]) -> float:
    """Decoding speed of a batch: tokens after each stream's first, over the time from the first to the last token."""
    first = min(record.token_s[0] for record in records)
    last = max(record.token_s[-1] for record in records)
    return sum(len(record.token_s) - 1 for record in records) / (last - first)
