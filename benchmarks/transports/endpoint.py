"""Any transport that is an Endpoint, by its Python calls: export_window, connect, put, signal, poll, progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.transports.side import SLOTS, Load, rounds, until
from p2p import native
from p2p.endpoint import Endpoint
from p2p.frame import PAYLOAD_OFFSET, SIGNAL_BYTES
from p2p.window import WindowLayout

_WAIT_NS = 5_000_000


class EndpointSide:
    """Frames sealed and opened by the native codec; bare payloads, neither sealed nor copied out, without `framed`."""

    pinned = True

    def __init__(self, endpoint: Endpoint[Any, Any], links: int, payload_bytes: int, framed: bool = True) -> None:
        self._endpoint = endpoint
        self._framed = framed
        self._layout = WindowLayout(slots=SLOTS, payload_bytes=payload_bytes)
        self._windows = [endpoint.export_window(self._layout.nbytes) for _ in range(links)]
        self._peers: list[Any] = []
        self._sent, self._taken = [0] * links, [0] * links
        self._library = native.load()
        self._frame = np.ones(PAYLOAD_OFFSET + payload_bytes, np.uint8)
        self._target = np.ones(payload_bytes, np.uint8)
        self._header, self._found = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
        # Asked once: an array's address takes as long as a call of the codec.
        kept = (self._frame, self._header, self._found, self._target)
        self._frame_at, self._header_at, *self._into = (array.ctypes.data for array in kept)
        self._slots = [self._layout.slot_offset(i) for i in range(SLOTS)]
        self._addresses = [window.address for window in self._windows]
        self._page = endpoint.page_address

    def offers(self) -> list[str]:
        """Descriptors."""
        return [window.descriptor.hex() for window in self._windows]

    def join(self, offers: Sequence[str]) -> None:
        """Connect to the windows of the other ends."""
        self._peers = [self._endpoint.connect(bytes.fromhex(offer)) for offer in offers]

    def drive(self, load: Load) -> list[int]:
        """As `Side.drive`."""
        links = range(len(self._peers))

        def post(number: int) -> None:
            for link in links:
                self._send(link, load.request_bytes, load.parked)

        def finish(number: int) -> None:
            for link in links:
                self._wait([link], load.parked)
                self._take(link)

        return rounds(load, post, finish)

    def serve(self, load: Load) -> None:
        """As `Side.serve`."""
        links = list(range(len(self._peers)))
        for _ in range(len(links) * load.count):
            link = self._wait(links, load.parked)
            # Served in turn: who has just been served is asked last.
            links.append(links.pop(links.index(link)))
            self._take(link)
            self._send(link, load.reply_bytes, load.parked)
        # What the transport still carries leaves only while this side makes progress.
        self._endpoint.progress()

    def close(self) -> None:
        """Close the endpoint."""
        self._endpoint.close()

    def _send(self, link: int, nbytes: int, parked: bool) -> None:
        self._sent[link] += 1
        sequence, peer = self._sent[link], self._peers[link]
        offset = self._slots[sequence % SLOTS]
        begin = PAYLOAD_OFFSET
        if self._framed:
            begin = SIGNAL_BYTES
            header = self._header
            header[1], header[2], header[3] = peer.incarnation, sequence, nbytes << 32
            header[5] = self._endpoint.incarnation
            self._library.p2p_frame_seal(self._frame_at, self._header_at)
        self._endpoint.put(peer, offset + begin, self._frame[begin : PAYLOAD_OFFSET + nbytes])
        self._endpoint.signal(peer, offset, sequence)
        if parked:
            self._library.p2p_bell_ring(peer.page_address, 0)

    def _wait(self, links: Sequence[int], parked: bool) -> int:
        """The first of the links that has its next frame."""
        page, found, seen = self._page, -1, 0

        def look() -> bool:
            nonlocal found, seen
            if parked:
                seen = self._library.p2p_bell_read(page, 0)
            self._endpoint.progress()
            for link in links:
                due = self._taken[link] + 1
                if self._windows[link].poll(self._slots[due % SLOTS], 1)[0] == due:
                    found = link
                    return True
            return False

        until(look, lambda: self._library.p2p_bell_wait(page, 0, seen, _WAIT_NS) if parked else None)
        return found

    def _take(self, link: int) -> None:
        self._taken[link] += 1
        if not self._framed:
            return
        due, own = self._taken[link], self._endpoint.incarnation
        slot = self._addresses[link] + self._slots[due % SLOTS]
        capacity, sender = self._layout.payload_bytes, self._peers[link].incarnation
        length = self._library.p2p_frame_open(slot, capacity, own, sender, due, *self._into)
        if length < 0:
            raise RuntimeError(f"a frame was refused with {length} (p2p/native/frame.h): the benchmark is wrong.")
