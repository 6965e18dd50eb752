"""What the fallback library is made of: a server's loop and a client's call, in Python and numpy."""

from __future__ import annotations

import ctypes
import itertools
import select
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experts.kernels import PackedExpert, ffn
from experts.native import ServerCounters, ServerStats
from experts.routes import AWAITED, DROPPED, MOST_REPLICAS, NO_SERVER
from experts.waterfill import SERVERS, pour
from experts.wire import (
    PAIR,
    Reply,
    Request,
    Status,
    WireInvalid,
    WireShape,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    rows_digest,
)
from p2p import doorbell
from p2p.frame import FrameInvalid, Header, load_signal, open_frame, seal_frame, store_signal
from p2p.window import WindowLayout

WAIT_NS = 5_000_000
OVERDUE_NS = 2_000_000_000
STALL_NS = 500_000_000
PAUSE_S = 0.002  # before it is asked again what was spoiled on its way
CHUNK_BYTES = 512 << 10
EQUAL = (1.0,) * SERVERS  # speeds: a server is not timed here


def view_at(address: int, nbytes: int) -> memoryview:
    """Memory at an address, writable."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class SlotView:
    """Slots of a window at an address."""

    def __init__(self, address: int, layout: WindowLayout) -> None:
        whole = view_at(address, layout.nbytes)
        starts = [layout.slot_offset(index) for index in range(layout.slots)]
        self.slots = [whole[start : start + layout.stride_bytes] for start in starts]


@dataclass
class ServerSide:
    """One client of a server."""

    link: Any
    requests: SlotView
    replies: SlotView
    done: list[int]


class ServerEnd:
    """A server's state and its loop."""

    def __init__(self, wire: WireShape, incarnation: int, page: int) -> None:
        self.wire, self.incarnation, self.page = wire, incarnation, page
        self.lock = threading.Lock()
        self.clients: dict[int, ServerSide] = {}
        self.experts: dict[tuple[int, int], PackedExpert] = {}
        self.lease_ns = (1 << 64) - 1
        self.stopped = False
        self.counters = ServerCounters()

    def run(self, max_ns: int) -> int:
        """Serve for at most that long; 1 when stopped."""
        until_ns = time.monotonic_ns() + max_ns
        while not self.stopped and time.monotonic_ns() < until_ns:
            doorbell.beat(self.page)
            seen = doorbell.read(self.page, 0)
            if not self.step():
                doorbell.wait(self.page, 0, seen, WAIT_NS)
        return int(self.stopped)

    def step(self) -> int:
        """Answer what is ready; number of requests."""
        answered = 0
        with self.lock:
            if time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= self.lease_ns:
                return 0
            for client in self.clients.values():
                for index, slot in enumerate(client.requests.slots):
                    sequence = load_signal(slot)
                    if sequence != client.done[index]:
                        client.done[index] = sequence
                        self._answer(client, index, sequence)
                        answered += 1
        return answered

    def _answer(self, client: ServerSide, index: int, sequence: int) -> None:
        began_ns, link = time.monotonic_ns(), client.link
        request, attempt = None, 0
        try:
            frame = open_frame(
                client.requests.slots[index],
                link.slot_bytes,
                self.incarnation,
                link.client_incarnation,
                sequence,
            )
            attempt = frame.header.attempt
            request = decode_request(self.wire, frame.payload, link.slot_bytes)
            reply = self._compute(request)
        except (FrameInvalid, WireInvalid):
            reply = Reply(status=Status.INVALID, rows=np.empty((0, self.wire.shape.hidden), np.float32))
        names = {Status.OK: "requests", Status.NOT_HELD: "not_held", Status.INVALID: "invalid"}
        setattr(self.counters, names[reply.status], getattr(self.counters, names[reply.status]) + 1)
        payload = encode_reply(self.wire, request, reply)
        header = Header(
            incarnation=link.client_incarnation,
            sequence=sequence,
            attempt=attempt,
            length=len(payload),
            sender=self.incarnation,
        )
        seal_frame(client.replies.slots[index], header, payload)
        # Signal last: the client may read the reply as soon as it changes.
        store_signal(client.replies.slots[index], sequence)
        doorbell.ring(link.bell_page or 0, min(request.reply_lane if request else 0, link.bell_lanes - 1))
        self.counters.busy_ns += time.monotonic_ns() - began_ns

    def _compute(self, request: Request) -> Reply:
        out = np.empty((len(request.pairs), self.wire.shape.hidden), np.float32)
        for expert in np.unique(request.pairs["expert"]):
            packed = self.experts.get((request.layer, int(expert)))
            if packed is None:
                return Reply(status=Status.NOT_HELD, rows=out[:0])
            chosen = request.pairs["expert"] == expert
            out[chosen] = ffn(packed, request.rows[request.pairs["row"][chosen]])
        self.counters.rows += len(request.rows)
        self.counters.pairs += len(request.pairs)
        return Reply(status=Status.OK, rows=out, digest=rows_digest(out))


@dataclass
class Place:
    """One server of a client."""

    link: Any
    requests: SlotView
    replies: SlotView
    sequence: int = 0
    gone: bool = False
    waiting: dict[int, _Sent] = field(default_factory=dict)
    stats: ServerStats = field(default_factory=ServerStats)


@dataclass
class _Sent:
    """One request in a slot; a call of 0 is over."""

    call: int
    sequence: int
    sent_ns: int
    request: Request
    pairs: NDArray[np.int64]


class ClientEnd:
    """A client's state and its calls."""

    def __init__(self, wire: WireShape, incarnation: int, page: int, most_tokens: int) -> None:
        self.wire, self.incarnation, self.page, self.most_tokens = wire, incarnation, page, most_tokens
        self.lock = threading.Lock()
        self.places: dict[int, Place] = {}
        self.leaving: set[int] = set()
        self.left: set[int] = set()
        self.routes = np.full((wire.shape.layers, wire.shape.experts, MOST_REPLICAS), NO_SERVER, np.uint8)
        self.pending: tuple[int, NDArray[np.uint8]] | None = None
        self.routed_rows = np.zeros((wire.shape.layers, wire.shape.experts), np.uint32)
        self.routed_calls = np.zeros_like(self.routed_rows)
        self.epoch = 0
        self.in_call = False
        self.calls, self.turns = itertools.count(1), itertools.count()

    def adopt(self) -> None:
        """Take up pending routes, and between calls let go of servers; under the lock."""
        if self.pending:
            (self.epoch, self.routes), self.pending = self.pending, None
        if not self.in_call:
            for index in self.leaving:
                self.places.pop(index, None)
            self.left |= self.leaving
            self.leaving = set()

    def call(
        self,
        layer: int,
        rows: NDArray[Any],
        ids: NDArray[np.uint16],
        drop: NDArray[np.uint8] | None,
        deadline_ns: int,
    ) -> NDArray[np.float32] | None:
        """Rows of every pair, [n, top_k, hidden]; None where some were lost. `drop`: as expert_call's."""
        with self.lock:
            self.adopt()
            self.in_call = True
            chosen, counts = np.unique(ids, return_counts=True)
            self.routed_rows[layer, chosen] += counts.astype(np.uint32)
            self.routed_calls[layer, chosen] += 1
        try:
            return self._call(next(self.calls), layer, rows, ids, drop, deadline_ns)
        finally:
            with self.lock:
                self.in_call = False
                self.adopt()

    def _call(
        self,
        call: int,
        layer: int,
        rows: NDArray[Any],
        ids: NDArray[np.uint16],
        drop: NDArray[np.uint8] | None,
        deadline_ns: int,
    ) -> NDArray[np.float32] | None:
        top_k = self.wire.shape.top_k
        result = np.empty((ids.size, self.wire.shape.hidden), np.float32)
        missing = np.ones(ids.size, bool)
        refused: set[tuple[int, int]] = set()
        now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        while missing.any():
            before_ns, now_ns = now_ns, time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            if now_ns - before_ns > STALL_NS:
                # Time in which nobody here could have heard an answer is taken off the wait for it.
                deadline_ns += now_ns - before_ns
            if now_ns >= deadline_ns:
                return None
            if self.pending:
                with self.lock:
                    self.adopt()
                refused.clear()
            doorbell.beat(self.page)
            seen = doorbell.read(self.page, 0)
            moved = self._collect(call, result, missing, refused)
            if drop is not None and self.epoch:
                gone = missing & np.repeat(drop != 0, top_k) & self._unserved(layer, ids.ravel())
                result[gone], missing[gone], moved = 0, False, moved or bool(gone.any())
                drop[np.flatnonzero(gone) // top_k] = DROPPED
            asked = np.zeros(ids.size, bool)
            for place in self.places.values():
                for sent in place.waiting.values():
                    if sent.call == call and now_ns - sent.sent_ns < OVERDUE_NS:
                        asked[sent.pairs] = True
            for index, pairs in self._choose(
                layer, ids.ravel(), np.flatnonzero(missing & ~asked), refused, now_ns
            ):
                moved |= self._send(
                    call, index, layer, rows, ids.ravel(), pairs[: self._room(top_k)], deadline_ns
                )
            if not moved:
                doorbell.wait(self.page, 0, seen, WAIT_NS)
        return result.reshape(len(rows), top_k, -1)

    def _unserved(self, layer: int, ids: NDArray[np.uint16]) -> NDArray[np.bool_]:
        """Of these experts those with no live replica, attached or awaited."""
        live = [index for index, place in self.places.items() if not place.gone]
        served: NDArray[np.bool_] = np.logical_or.reduce(
            np.isin(self.routes[layer], [*live, AWAITED]), axis=1
        )
        return ~served[ids]

    def _room(self, top_k: int) -> int:
        slot_bytes = min([CHUNK_BYTES, *(place.link.slot_bytes for place in self.places.values())])
        per_pair = max(self.wire.shape.hidden * 4, self.wire.row_bytes + PAIR.itemsize)
        return max(top_k, (slot_bytes - 192) // per_pair)

    def _choose(
        self,
        layer: int,
        ids: NDArray[np.uint16],
        open_pairs: NDArray[np.int64],
        refused: set[tuple[int, int]],
        now_ns: int,
    ) -> list[tuple[int, NDArray[np.int64]]]:
        late = {
            index
            for index, place in self.places.items()
            if any(now_ns - sent.sent_ns >= OVERDUE_NS for sent in place.waiting.values())
        }
        ready = {
            index
            for index, place in self.places.items()
            if not place.gone and len(place.waiting) < place.link.slots
        }
        pairs_of: dict[int, list[int]] = {}
        for pair in open_pairs:
            pairs_of.setdefault(int(ids[pair]), []).append(int(pair))
        masks = []
        for expert in pairs_of:
            able = {int(i) for i in self.routes[layer, expert]} & ready
            able = {index for index in able if (index, expert) not in refused}
            # A late server only where no other replica exists.
            masks.append(sum(1 << index for index in able - late or able))
        counts = [len(pairs) for pairs in pairs_of.values()]
        turn = (self.incarnation + next(self.turns)) & 0xFFFFFFFF
        chosen: dict[int, list[int]] = {}
        for pairs, rows in zip(pairs_of.values(), pour(counts, masks, EQUAL, turn=turn), strict=True):
            first = 0
            for index, count in rows.items():
                chosen.setdefault(index, []).extend(pairs[first : first + count])
                first += count
        return [(index, np.sort(pairs)) for index, pairs in chosen.items()]

    def _send(
        self,
        call: int,
        index: int,
        layer: int,
        rows: NDArray[Any],
        ids: NDArray[np.uint16],
        pairs: NDArray[np.int64],
        deadline_ns: int,
    ) -> bool:
        place = self.places[index]
        slot = next(slot for slot in range(place.link.slots) if slot not in place.waiting)
        tokens, row_of = np.unique(pairs // self.wire.shape.top_k, return_inverse=True)
        listed = np.zeros(len(pairs), PAIR)
        listed["row"], listed["expert"] = row_of, ids[pairs]
        listed["k_slot"] = pairs % self.wire.shape.top_k
        request = Request(layer=layer, rows=rows[tokens], pairs=listed, reply_lane=0)
        payload = encode_request(self.wire, request)
        now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        place.sequence += 1
        header = Header(
            incarnation=place.link.server_incarnation,
            sequence=place.sequence,
            length=len(payload),
            remaining_ns=max(0, deadline_ns - now_ns),
            sender=self.incarnation,
        )
        seal_frame(place.requests.slots[slot], header, payload)
        # Signal last: the server may read the request as soon as it changes.
        store_signal(place.requests.slots[slot], place.sequence)
        doorbell.ring(place.link.bell_page or 0, 0)
        place.waiting[slot] = _Sent(call, place.sequence, now_ns, request, pairs)
        place.stats.calls += 1
        place.stats.rows += len(tokens)
        place.stats.pairs += len(pairs)
        return True

    def _collect(
        self,
        call: int,
        result: NDArray[np.float32],
        missing: NDArray[np.bool_],
        refused: set[tuple[int, int]],
    ) -> bool:
        moved = False
        for index, place in self.places.items():
            for slot, sent in list(place.waiting.items()):
                if load_signal(place.replies.slots[slot]) != sent.sequence:
                    continue
                reply = self._read(place, slot, sent) if sent.call == call else None
                del place.waiting[slot]
                moved = True
                if reply is not None and reply.status is Status.OK:
                    result[sent.pairs] = reply.rows
                    missing[sent.pairs] = False
                elif reply is not None and reply.status is Status.NOT_HELD:
                    refused |= {(index, int(expert)) for expert in sent.request.pairs["expert"]}
                    place.stats.redispatches += len(sent.pairs)
                elif sent.call == call:
                    time.sleep(PAUSE_S)
            moved |= self._bury(place)
        return moved

    def _read(self, place: Place, slot: int, sent: _Sent) -> Reply | None:
        try:
            frame = open_frame(
                place.replies.slots[slot],
                place.link.slot_bytes,
                self.incarnation,
                place.link.server_incarnation,
                sent.sequence,
            )
            return decode_reply(self.wire, frame.payload, sent.request)
        except (FrameInvalid, WireInvalid):
            place.stats.corrupt += 1
            return None

    def _bury(self, place: Place) -> bool:
        if place.gone or place.link.liveness_fd < 0 or not place.waiting:
            return False
        poller = select.poll()
        poller.register(place.link.liveness_fd, select.POLLRDHUP)
        if poller.poll(0):
            place.gone = True
            place.waiting.clear()
        return place.gone
