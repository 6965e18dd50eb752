"""Ten minutes of a trace, compressed, against real processes: a fixed pool first, then one that follows the load.

Both get the same prompts at the same times. The fixed pool's texts are the record that the other's are compared with,
and its load says how much work a server may do until six are needed: two cores cannot hold six full ones. Of the
policy every time is divided by the compression, as the trace is; nothing else differs from what is shipped.
"""

from __future__ import annotations

import json
import selectors
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.model.loader import DEMO, resolve_model
from router.client import RouterClient, RouterUnavailable
from router.scaling import Memory, Policy, Signals, decide, signals_of
from router.view import EXPERT, SERVING, SUSPECT, Status

SPEEDUP = 10
SPAN_S = 600
LEAST, MOST = 1, 6
# Of a request's tokens: the demonstration model has 2,048 positions, and this machine two cores.
SHRINK = 32
TICK_S = 0.1
DRAIN_S = 5.0
NAME = "demo"
VOCAB = 1024


class Asked(Protocol):
    """A request of a trace."""

    @property
    def at_s(self) -> float: ...
    @property
    def prompt(self) -> int: ...
    @property
    def output(self) -> int: ...


@dataclass(kw_only=True)
class Stream:
    """One streamed completion."""

    due_s: float
    prompt: list[int]
    tokens: int
    body: bytearray = field(default_factory=bytearray)
    took_s: float = 0.0

    def text(self) -> str | None:
        """All that it said; None if it failed or did not bring every token."""
        parts = [part[6:] for part in bytes(self.body).split(b"\n") if part.startswith(b"data: ")]
        if not parts or parts[-1].strip() != b"[DONE]":
            return None
        events = [json.loads(part) for part in parts[:-1]]
        if any("error" in event for event in events):
            return None
        if events[-1]["usage"]["completion_tokens"] != self.tokens:
            return None
        return "".join(choice["text"] for event in events for choice in event["choices"])


def streams_of(requests: Sequence[Asked], seed: int = 1) -> list[Stream]:
    """The first ten minutes of a trace, compressed and scaled down; prompts are random tokens."""
    chance = np.random.default_rng(seed)
    return [
        Stream(
            due_s=request.at_s / SPEEDUP,
            prompt=chance.integers(300, VOCAB, size=min(max(request.prompt // SHRINK, 4), 512)).tolist(),
            tokens=min(max(request.output // SHRINK, 2), 64),
        )
        for request in requests
        if request.at_s < SPAN_S
    ]


def send(url: str, streams: Sequence[Stream], limit_s: float = 60.0) -> None:
    """Ask for every stream when it is due, whatever became of those before, and read them to their ends."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    began_s, waiting, open_streams = time.monotonic(), list(streams)[::-1], 0
    with selectors.DefaultSelector() as selector:
        while waiting or open_streams:
            now_s = time.monotonic() - began_s
            if now_s > streams[-1].due_s + limit_s:
                return
            while waiting and waiting[-1].due_s <= now_s:
                connection = socket.create_connection((host, int(port)))
                connection.sendall(asked(waiting[-1]))
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, waiting.pop())
                open_streams += 1
            pause_s = waiting[-1].due_s - now_s if waiting else 0.5
            for key, _ in selector.select(max(0.0, min(pause_s, 0.5))):
                stream, connection = key.data, key.fileobj
                try:
                    piece = connection.recv(65536)  # type: ignore[union-attr]
                except ConnectionError:
                    piece = b""  # Ended without [DONE]: counted as failed.
                stream.body += piece
                if not piece:
                    selector.unregister(connection)
                    connection.close()  # type: ignore[union-attr]
                    stream.took_s = time.monotonic() - began_s - stream.due_s
                    open_streams -= 1


def asked(stream: Stream) -> bytes:
    """The request for one stream."""
    body = json.dumps(
        {
            "model": NAME,
            "prompt": stream.prompt,
            "max_tokens": stream.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def signals_from(status: Status, full: float) -> Signals:
    """What a router's status says of the expert pool. full: the busy part of its lane that fills a server."""
    size = status.pools[EXPERT]
    loads: dict[str, list[Any]] = {}
    serving = 0
    for member in status.view.members:
        if member.state in (SERVING, SUSPECT):
            serving += member.pool == EXPERT
            load = dict(member.load)
            if member.pool == EXPERT and "busy" in load:
                load["busy"] /= full
            loads.setdefault(member.pool, []).append(load)
    coming = size.starting + max(0, size.live - serving)
    return signals_of(EXPERT, loads, wanted=size.wanted, live=serving, starting=coming, draining=size.draining)


class Follower(threading.Thread):
    """Reads the pool's load at every tick, and has it scaled to what the policy wants."""

    def __init__(self, router: RouterClient, policy: Policy | None, full: float) -> None:
        super().__init__(name="follower", daemon=True)
        self.router, self.policy, self.full = router, policy, full
        self.sizes: list[tuple[float, int]] = []
        self.loads: list[float] = []
        self.whys: list[str] = []
        self.ended = threading.Event()

    def run(self) -> None:
        memory, began_s = Memory(), time.monotonic()
        while not self.ended.wait(TICK_S):
            try:
                signals = signals_from(self.router.status(timeout_s=1.0), self.full)
                self.loads.append((signals.busy or 0.0) * signals.live)
                if not self.sizes or signals.live != self.sizes[-1][1]:
                    self.sizes.append((round(time.monotonic() - began_s, 1), signals.live))
                if self.policy is None:
                    continue
                wanted, memory = decide(self.policy, signals, memory, time.monotonic())
                if wanted != signals.wanted:
                    self.router.scale(EXPERT, wanted, drain_s=DRAIN_S)
                    self.whys.append(f"{time.monotonic() - began_s:.1f} s: {memory.why}")
            except RouterUnavailable as error:
                print(f"router: {error}", file=sys.stderr)


def against(
    cores: Sequence[int], streams: Sequence[Stream], servers: int, policy: Policy | None, full: float
) -> Follower:
    """Send all streams to a new cluster of `servers` expert servers, scaled by a policy or left alone."""
    config = ClusterConfig(
        model=resolve_model(DEMO),
        served_model_name=NAME,
        experts=servers,
        replicas=1,
        expert_lanes=1,
        port=0,
        cores=tuple(cores),
    )
    with LocalCluster(config) as cluster:
        router = RouterClient(cluster.router_address)
        follower = Follower(router, policy, full)
        follower.start()
        send(cluster.url, streams)
        # Without load the pool is back at its least soon: the shrinking is part of what is shown.
        ends_s = time.monotonic() + 120
        while policy is not None and follower.sizes[-1][1] > LEAST and time.monotonic() < ends_s:
            time.sleep(0.1)
        follower.ended.set()
        follower.join()
        router.close()
    return follower


def replay(requests: Sequence[Asked], cores: Sequence[int]) -> dict[str, Any]:
    """Replay against a fixed pool and against one that scales, and compare what clients saw."""
    record, streams = streams_of(requests), streams_of(requests)
    fixed = against(cores, record, MOST, None, 1.0)
    # The load's 95% point, with the headroom, needs all six.
    full = max(statistics.quantiles(fixed.loads, n=20)[-1] * Policy().headroom / MOST, 1e-4)
    shipped = Policy()
    policy = Policy(
        least=LEAST,
        most=MOST,
        start_s=shipped.start_s / SPEEDUP,
        sample_s=shipped.sample_s / SPEEDUP,
        trend_s=shipped.trend_s / SPEEDUP,
        burst_s=shipped.burst_s / SPEEDUP,
        hold_s=shipped.hold_s / SPEEDUP,
        clear_s=shipped.clear_s / SPEEDUP,
        changes_per_h=shipped.changes_per_h * SPEEDUP,
    )
    scaled = against(cores, streams, LEAST, policy, full)
    for why in scaled.whys:
        print(why, file=sys.stderr)
    return compared(record, streams) | {
        "speedup": SPEEDUP,
        "full_at": round(full, 4),
        "sizes": scaled.sizes,
        "changes": len(scaled.whys),
    }


def compared(record: Sequence[Stream], streams: Sequence[Stream]) -> dict[str, Any]:
    """What clients saw: streams that failed, and texts that differ from the record's."""
    expected, found = [s.text() for s in record], [s.text() for s in streams]
    pairs = [(e, f) for e, f in zip(expected, found, strict=True) if e is not None and f is not None]
    return {
        "requests": len(streams),
        "failed": sum(text is None for text in found),
        "failed_fixed": sum(text is None for text in expected),
        "compared": len(pairs),
        "changed": sum(e != f for e, f in pairs),
        "tokens": sum(s.tokens for s, text in zip(streams, found, strict=True) if text is not None),
        "took_p99_s": round(statistics.quantiles([s.took_s for s in streams], n=100)[-1], 2),
    }
