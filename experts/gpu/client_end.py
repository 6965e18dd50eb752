"""An attention worker's side of a device library: links and routes from any thread, steps from one.

What changes about servers waits until no step is under way, and is then written in the order of the steps: the routes
of one step are those of one epoch. The thread of the steps calls `begin`, launches, waits for the device, and `end`.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import torch
from numpy.typing import NDArray

from experts.gpu.client import DeviceClient, Link, StepReport
from experts.gpu.layout import ExchangeShape, SeenWord, Verdict, power_of_two
from experts.native import ServerLink
from experts.routes import MOST_REPLICAS, busiest, speeds_of, spread, work_of

MOST_SERVERS = {"cuda": 32, "cpu": 4}
PATIENCE_S = {"cuda": 0.005, "cpu": 10.0}
# Beyond it, for a server without which a row is lost: as long as processes that take turns on one GPU may need. A
# step that waits sees no change of servers, so it ends long before its deadline, and is run again.
ALONE_S = {"cuda": 0.25, "cpu": 0.0}
# Seconds of the device's clock in one. The interpreter's is a counter that each look moves on by 20 us; a look takes it
# five to twenty milliseconds.
CLOCK = {"cuda": 1.0, "cpu": 0.004}

COUNT_S = 0.5  # between two looks at what the device counted, while steps run
# Activating an expert reads its weights: 2 bytes for the 2 operations of each pair, 395 TFLOP/s over 2.15 TB/s.
ACTIVATION_PAIRS = 180.0
LEAST_GAIN = 0.03  # of a step's time with the experts, for which another order of replicas is published

_FULL, _ARGUMENT = -3, -2
_EMPTY, _ATTACHED = 0, 1


class ClientEnd:
    """Expert calls of one attention worker, and what its client's threads say about servers."""

    def __init__(
        self, shape: ExchangeShape, incarnation: int, most_tokens: int, device: torch.device
    ) -> None:
        self.shape = shape
        self.adopted_epoch = 0
        self._device, self._places = device, MOST_SERVERS[device.type]
        self._calls = DeviceClient(
            shape,
            servers=self._places,
            replicas=MOST_REPLICAS,
            # Steps come in sizes that are powers of two, whatever of them counts.
            tokens=power_of_two(most_tokens),
            incarnation=incarnation,
            device=device,
            patience_s=PATIENCE_S[device.type] * CLOCK[device.type],
            alone_s=ALONE_S[device.type] * CLOCK[device.type],
        )
        # Where steps are launched: what is written into tables keeps their order.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Guards all below, and is held while a step is under way only for moments.
        self._lock = threading.Lock()
        self._in_step = False
        self._links: dict[int, ServerLink] = {}
        self._leaving: set[int] = set()
        self._changed: set[int] = set()
        self._pending: tuple[int, NDArray[np.uint8]] | None = None
        self._table: NDArray[np.uint8] | None = None
        # Of each expert, what it took of late; even, before anything is known.
        self._work = np.ones((shape.layers, shape.experts))
        self._seen = np.zeros((self._places, SeenWord.WORDS), np.int64)
        # The same when speeds were judged last.
        self._judged = self._seen.copy()
        self._speed = np.ones(self._places)
        self._routed = np.zeros((2, shape.layers, shape.experts), np.uint32)
        self._counted_s = time.monotonic()
        self._corrupt = np.zeros(self._places, np.int64)
        self._lost = np.zeros(self._places, np.int64)
        self._late = np.zeros(self._places, np.int64)

    # -- steps, from one thread ----------------------------------------------------------------------------------

    def begin(self, deadline_s: float) -> None:
        """A step comes: its expert calls end within `deadline_s` of the first."""
        with self._lock:
            self._adopt()
            self._in_step = True
        with torch.cuda.stream(self.stream):
            if self._late.any():
                # What came after the last step's end.
                self._calls.reclaim()
            self._calls.begin(deadline_s * CLOCK[self._device.type])

    def enqueue(
        self,
        layer: int,
        rows: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        n_rows: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Launch one expert call on the current stream; may be captured. See `DeviceClient.enqueue`."""
        self._calls.enqueue(layer, rows, ids, weights, n_rows, out)

    def end(self) -> StepReport:
        """The step is over, and the device has been waited for: what became of its calls."""
        report = self._calls.report()
        retired = self._calls.retired() if report.retired or self._late.any() else {}
        if retired:
            with torch.cuda.stream(self.stream):
                self._calls.reclaim()
        with self._lock:
            self._in_step = False
            for place, verdicts in report.verdicts.items():
                self._corrupt[place] += Verdict.CORRUPT in verdicts
                self._lost[place] += Verdict.MISSING in verdicts
            self._late[:] = 0
            for place, count in retired.items():
                self._late[place] = count
            if time.monotonic() - self._counted_s > COUNT_S:
                self._count()
            self._adopt()
        return report

    # -- servers, from any thread --------------------------------------------------------------------------------

    def add_server(self, link: ServerLink) -> int:
        """A place for a server; or a code of client.h."""
        windows = (link.tx_bytes, self.shape.request_window), (link.rx_bytes, self.shape.reply_window)
        if link.slots != self.shape.slots or any(found < needed.nbytes for found, needed in windows):
            return _ARGUMENT
        with self._lock:
            taken = self._links.keys() | self._leaving
            place = next((place for place in range(self._places) if place not in taken), _FULL)
            if place >= 0:
                self._links[place] = link
                self._changed.add(place)
                self._corrupt[place] = self._lost[place] = self._late[place] = 0
                self._seen[place] = self._judged[place] = 0
                self._speed[place] = 1.0
                self._settle()
        return place

    def remove_server(self, place: int) -> None:
        """Ask nothing of it any more; `is_idle` says when its windows are nobody's."""
        with self._lock:
            if self._links.pop(place, None) is not None:
                self._leaving.add(place)
                self._changed.add(place)
                self._settle()

    def is_idle(self, place: int) -> bool:
        """Whether no step can still touch the windows of a place."""
        with self._lock:
            self._leaving -= {place} - self._changed
            return place not in self._links and place not in self._changed

    def publish(self, epoch: int, routes: NDArray[np.uint8]) -> None:
        """Use these routes, uint8 [layers, experts, MOST_REPLICAS] of experts.routes, from the next step on.

        Each step asks the first live replica; which that is follows the servers' speeds and the experts' work.
        """
        ordered = spread(routes, self._work, self._speed)
        with self._lock:
            self._table = ordered
            self._pending = (epoch, ordered)
            self._settle()

    def take_routed(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Rows asked of each expert since the last time, and steps that asked any: [layers, experts] each.

        What steps of the last COUNT_S asked may come with the next time.
        """
        with self._lock:
            if not self._in_step:
                self._count()
            taken, self._routed = self._routed, np.zeros_like(self._routed)
            seen = self._seen.copy()
        self._rebalance(taken, seen)
        return taken[0], taken[1]

    def _count(self) -> None:
        """Add up what the device has counted; the lock is held and no step is under way."""
        self._counted_s = time.monotonic()
        with torch.cuda.stream(self.stream):
            self._routed += np.stack(self._calls.take_routed())
            self._seen = self._calls.seen()
        # What was seen of whoever had these places before.
        self._seen[list(self._changed)] = 0

    def _rebalance(self, routed: NDArray[np.uint32], seen: NDArray[np.int64]) -> None:
        """Have another order of replicas, where what was counted since the last time makes it worth it.

        On the caller's thread, which is no step's: it takes milliseconds.
        """
        if not routed.any():
            return
        work = routed[0] + ACTIVATION_PAIRS * routed[1]
        with self._lock:
            table = self._table
            if table is None:
                return
            self._work = (self._work + work) / 2
            service_ns = np.maximum(seen - self._judged, 0)[:, SeenWord.SERVICE_NS]
            found = speeds_of(work_of(table, work, self._places).sum(axis=0), service_ns)
            self._judged = seen
            self._speed = np.where(np.isnan(found), self._speed, (self._speed + found) / 2)
            speed = self._speed
        ordered = spread(table, self._work, speed)
        if busiest(ordered, self._work, speed) >= (1 - LEAST_GAIN) * busiest(table, self._work, speed):
            return
        with self._lock:
            # Newer routes go before, and are in that order already.
            if self._table is table:
                epoch = self._pending[0] if self._pending else self.adopted_epoch
                self._table, self._pending = ordered, (epoch, ordered)
                self._settle()

    def stats(self, place: int) -> dict[str, float]:
        """What was seen of a server, by the names of ServerStats."""
        with self._lock:
            here = place in self._links
            return {
                "state": _ATTACHED if here else _EMPTY,
                "speed": float(self._speed[place]),
                "replies": int(self._seen[place, SeenWord.REPLIES]),
                "calls": int(self._seen[place, SeenWord.REPLIES]),
                "pairs": int(self._seen[place, SeenWord.PAIRS]),
                "in_flight": int(self._seen[place, SeenWord.PAIRS]),
                "service_sum_ns": int(self._seen[place, SeenWord.SERVICE_NS]),
                "corrupt": int(self._corrupt[place]),
                "lost": int(self._lost[place]),
                "late_slots": int(self._late[place]),
                "lost_slots": int(self._late[place]),
            }

    def _settle(self) -> None:
        if not self._in_step:
            self._adopt()

    def _adopt(self) -> None:
        """Write what waits into the tables; the lock is held and no step is under way."""
        if not self._changed and self._pending is None:
            return
        with torch.cuda.stream(self.stream):
            for place in self._changed:
                link = self._links.get(place)
                self._calls.link(
                    place, link and Link(request=link.tx, reply=link.rx, incarnation=link.server_incarnation)
                )
            routes = None
            if self._pending is not None:
                table = self._pending[1]
                # Whoever is awaited, or is nobody, has no place.
                routes = torch.from_numpy(np.where(table < self._places, table, 255).astype(np.int32))
                routes[routes == 255] = -1
            self._calls.publish(routes)
        if self.stream is not None:
            self.stream.synchronize()
        self._changed.clear()
        if self._pending is not None:
            self.adopted_epoch, self._pending = self._pending[0], None
