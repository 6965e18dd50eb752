"""Incast, simulated: 32 clients send much to 8 servers at once, and now and then something small that is urgent.

Frames go through tests.sim.network, whose clock is virtual, by way of a link to each server that carries one chunk
after the other at a fixed rate and loses none. A client may have as many chunks on their way to a server as it has
slots there: that is all that stands before a small request. Payloads are markers; only the time that a chunk's bytes
would take is spent.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from p2p.frame import Header, open_frame, seal_frame
from p2p.window import WindowLayout
from tests.sim.network import SimNetwork

CLIENTS: Final = 32
SERVERS: Final = 8
LINK_BYTES_PER_S: Final = 12.5e9  # 100 Gbit/s
BULK_BYTES: Final = 2 << 20  # of each client for each server
SMALL_BYTES: Final = 4096
SMALL_EVERY_NS: Final = 500_000  # of each client, on average
LOOK_EVERY_NS: Final = 2_000  # of a server, at its slots
SEED: Final = 1
# (slots of a client at a server, bytes of a chunk); the last has all under way at once.
CONFIGURATIONS: Final = ((1, 64 << 10), (4, 64 << 10), (1, 512 << 10), (4, 512 << 10))

_MARKER: Final = b"chunk..."


def results(seed: int = SEED) -> Iterator[dict[str, Any]]:
    """What became of each configuration, as records."""
    for slots, chunk_bytes in CONFIGURATIONS:
        yield {"measure": "incast", "seed": seed, **Incast(seed, slots, chunk_bytes).run()}


class Incast:
    """One run: every client sends all its chunks as fast as its slots allow."""

    def __init__(self, seed: int, slots: int, chunk_bytes: int, bulk_bytes: int = BULK_BYTES) -> None:
        self._slots, self._chunk_bytes, self._bulk_bytes = slots, chunk_bytes, bulk_bytes
        self._random = random.Random(seed)
        self._network = SimNetwork(seed)
        # The last slot is for what is small.
        self._layout = WindowLayout(slots=slots + 1, payload_bytes=len(_MARKER))
        servers = [self._network.endpoint(f"server-{i}", 100 + i) for i in range(SERVERS)]
        self._clients = [self._network.endpoint(f"client-{i}", 1000 + i) for i in range(CLIENTS)]
        windows = [server.export_window(self._layout.nbytes) for _ in self._clients for server in servers]
        self._links = [
            (window, self._clients[i // SERVERS].connect(window.descriptor)) for i, window in enumerate(windows)
        ]
        self._left = [bulk_bytes // chunk_bytes] * len(windows)
        self._missing = sum(self._left)
        self._sequences = [0] * len(windows)
        self._small_under_way: set[int] = set()
        self._small_ns: list[int] = []
        self._free_ns = [0] * SERVERS  # when a server's link has carried all that was given to it
        self._done_ns = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = 0

    def run(self) -> dict[str, Any]:
        """Until everything has arrived: the share of its link that each server got, and what small requests took."""
        for link in range(len(self._links)):
            for slot in range(self._slots):
                self._next_chunk(link, slot)
        for client in range(CLIENTS):
            self._after(self._pause_ns(), lambda client=client: self._small(client))
        while self._events:
            at_ns, _, act = heapq.heappop(self._events)
            self._network.advance(at_ns - self._network.now())
            act()
        small_us = sorted(ns / 1e3 for ns in self._small_ns)
        share = CLIENTS * self._bulk_bytes / (self._done_ns / 1e9) / LINK_BYTES_PER_S
        return {
            "clients": CLIENTS,
            "servers": SERVERS,
            "slots": self._slots,
            "chunk_bytes": self._chunk_bytes,
            "of_link": float(f"{share:.3g}"),
            "small_us": {"p50": small_us[len(small_us) // 2], "p99": small_us[len(small_us) * 99 // 100]},
        }

    def _after(self, ns: int, act: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (self._network.now() + ns, self._numbers, act))

    def _pause_ns(self) -> int:
        return round(self._random.expovariate(1 / SMALL_EVERY_NS))

    def _small(self, client: int) -> None:
        """Send something small to some server, and again later, for as long as chunks arrive."""
        if not self._missing:
            return
        link, began_ns = client * SERVERS + self._random.randrange(SERVERS), self._network.now()

        def arrived() -> None:
            self._small_under_way.remove(link)
            self._small_ns.append(self._network.now() - began_ns)

        if link not in self._small_under_way:
            self._small_under_way.add(link)
            self._send(link, self._slots, SMALL_BYTES, arrived)
        self._after(self._pause_ns(), lambda: self._small(client))

    def _next_chunk(self, link: int, slot: int) -> None:
        """The slot is free: fill it again, as long as there are chunks."""

        def arrived() -> None:
            self._missing -= 1
            self._done_ns = self._network.now()
            self._next_chunk(link, slot)

        if self._left[link]:
            self._left[link] -= 1
            self._send(link, slot, self._chunk_bytes, arrived)

    def _send(self, link: int, slot: int, nbytes: int, arrived: Callable[[], None]) -> None:
        """Queue a frame for the server's link; arrived() once the server has taken it."""
        server, now_ns = link % SERVERS, self._network.now()
        self._free_ns[server] = max(now_ns, self._free_ns[server]) + round(nbytes / LINK_BYTES_PER_S * 1e9)
        self._after(self._free_ns[server] - now_ns, lambda: self._leave(link, slot, arrived))

    def _leave(self, link: int, slot: int, arrived: Callable[[], None]) -> None:
        window, peer = self._links[link]
        client = self._clients[link // SERVERS]
        self._sequences[link] += 1
        sequence, offset = self._sequences[link], self._layout.slot_offset(slot)
        frame = memoryview(bytearray(self._layout.stride_bytes))
        header = Header(
            incarnation=window.incarnation, sender=client.incarnation, sequence=sequence, length=len(_MARKER)
        )
        seal_frame(frame, header, _MARKER)
        client.put(peer, offset, frame)
        client.signal(peer, offset, sequence)

        def look() -> None:
            if window.poll(offset, 1)[0] != sequence:
                self._after(LOOK_EVERY_NS, look)
                return
            slot_bytes = window.memory[offset : offset + self._layout.stride_bytes].data
            open_frame(slot_bytes, len(_MARKER), window.incarnation, client.incarnation, sequence)
            arrived()

        self._after(LOOK_EVERY_NS, look)
