"""The attention worker's end: expert calls that kernels make, so that a step with its calls is one captured graph.

A call is four launches: `dispatch`, two of `wait_replies` (which also redispatches), `combine`. None of their arguments
changes when servers come, go or fail: that is written into tables. All calls of one client run one after another, those
of two micro-batches too: its windows are in one call's use.

Servers and routes change from any thread. What changes waits until no step is under way, and is then written in the
order of the steps: the routes of one step are those of one epoch. The thread of the steps calls `begin`, launches
`enqueue`, waits for the device, and calls `end`. A slot that still owes a reply is not used again before `reclaim` has
seen the reply, or `link` gives the place new windows.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from experts.backend import LinkRefused, ServerLink, ServerState, ServerStats
from experts.gpu.combine import combine
from experts.gpu.dispatch import dispatch
from experts.gpu.layout import ClientWord, ExchangeShape, Mark, ReportWord, SeenWord, Verdict
from experts.gpu.patience import Patience, run_s
from experts.gpu.tables import ClientTables, fill, host_words
from experts.gpu.wait_replies import take_back, wait_replies
from experts.gpu.words import CLIENT
from experts.routes import Table, busiest, speeds_of, spread, work_of

COUNT_S = 0.5  # between two looks at what the device counted, while steps run
# Activating an expert reads its weights: 2 bytes for the 2 operations of each pair, 395 TFLOP/s over 2.15 TB/s.
ACTIVATION_PAIRS = 180.0
LEAST_GAIN = 0.03  # of a step's time with the experts, for which another order of replicas is published


class Link(NamedTuple):
    """One server as its client sees it, in the order of `PeerWord`."""

    request: int  # address of this client's request window at the server
    reply: int  # address of the server's reply window here
    incarnation: int  # the server's, u64
    live: bool = True  # whether it may be asked


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What became of a step's calls.

    Attributes:
        lost: Tokens with an expert that nobody answered for in time: their rows are NaN.
        corrupt: Tokens with an answer that was not whole: their rows are NaN. Run the step again.
        redispatched: Pairs that were sent again.
        retired: Slots that were put aside.
        verdicts: By place, what went wrong with a server.
    """

    lost: tuple[int, ...] = ()
    corrupt: tuple[int, ...] = ()
    redispatched: int = 0
    retired: int = 0
    verdicts: dict[int, frozenset[Verdict]] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether every row of the step is right."""
        return not self.lost and not self.corrupt


class GpuClient:
    """Expert calls of one attention worker: `experts.backend.ClientBackend`.

    Args:
        servers: Places for servers, at most 64.
        replicas: Of an expert, at most 8.
        incarnation: This client's own, u64.
        device: A GPU, or "cpu" in the interpreter.
        rounds: How often missing pairs go to the next replica.
        clock: Seconds of the device's clock in one of the host's.
    """

    handle = 0

    def __init__(
        self, shape: ExchangeShape, *, servers: int, replicas: int, incarnation: int,
        device: torch.device | str, rounds: int = 8, clock: float = 1.0,
    ) -> None:  # fmt: skip
        self.shape, self.device, self._clock = shape, torch.device(device), clock
        self.tables = ClientTables(
            shape, servers=servers, replicas=replicas, rounds=rounds, incarnation=incarnation, device=device,
        )  # fmt: skip
        self._patience = Patience(servers)
        # Where steps are launched: what is written into tables keeps their order.
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.adopted_epoch = 0
        self._written: list[Link | None] = [None] * servers
        self._routes = torch.full((shape.layers, shape.experts, replicas), -1, dtype=torch.int32)
        self._step = host_words(3, self.device)  # its number, its budget, and that of one run
        # Guards all below, and is held while a step is under way only for moments.
        self._lock = threading.Lock()
        self._in_step = False
        self._links: dict[int, ServerLink] = {}
        self._leaving: set[int] = set()
        self._changed: set[int] = set()
        self._pending: tuple[int, Table] | None = None
        self._table: Table | None = None
        # Of each expert, what it took of late; even, before anything is known.
        self._work = np.ones((shape.layers, shape.experts))
        self._seen = np.zeros((servers, SeenWord.WORDS), np.int64)
        # The same when speeds were judged last.
        self._judged = self._seen.copy()
        self._speed = np.ones(servers)
        self._routed = np.zeros((2, shape.layers, shape.experts), np.uint32)
        self._counted_s = time.monotonic()
        self._corrupt, self._lost, self._late = (np.zeros(servers, np.int64) for _ in range(3))
        with torch.cuda.stream(self.stream):
            # Compiled and loaded now: a late reply is no time for it.
            self.reclaim()

    # -- steps, from one thread ----------------------------------------------------------------------------------

    def begin(self, deadline_s: float) -> None:
        """A step comes: its expert calls end within `deadline_s` of the first."""
        with self._lock:
            self._adopt()
            self._in_step = True
        with torch.cuda.stream(self.stream):
            if self._late.any():
                # What came after the last step's end.
                self.reclaim()
            # The last step has ended, so that its copy has, too.
            self._step[0] += 1
            self._step[1] = int(deadline_s * self._clock * 1e9)
            self._step[2] = int(run_s(deadline_s) * self._clock * 1e9)
            self.tables.control[ClientWord.STEP : ClientWord.RUN_NS + 1].copy_(self._step, non_blocking=True)

    def enqueue(
        self, layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, n_rows: torch.Tensor,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Launch one expert call; may be captured. Its arguments, and what it raises, are those of `dispatch` and
        `combine`."""
        dispatch(self.tables, layer, rows, ids, n_rows)
        wait_replies(self.tables, layer, rows, ids, n_rows)
        combine(self.tables, layer, rows, ids, weights, n_rows, out)

    def end(self) -> StepReport:
        """The step is over, and the device has been waited for: what became of its calls."""
        report = self.report()
        retired = self.retired() if report.retired or self._late.any() else {}
        if retired:
            with torch.cuda.stream(self.stream):
                self.reclaim()
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

    def report(self) -> StepReport:
        """What became of the calls since the last report. Wait for the step first: nothing may be running."""
        words = self.tables.report.tolist()
        self.tables.report.zero_()
        head, flags = ReportWord.WORDS, words[ReportWord.WORDS :]
        marks = words[head + self.tables.servers :]
        return StepReport(
            lost=tuple(token for token, mark in enumerate(marks) if mark & Mark.LOST),
            corrupt=tuple(token for token, mark in enumerate(marks) if mark & Mark.CORRUPT),
            redispatched=words[ReportWord.REDISPATCHED],
            retired=words[ReportWord.RETIRED],
            verdicts={
                place: frozenset(verdict for verdict in Verdict if flags[place] >> verdict & 1)
                for place in range(self.tables.servers)
                if flags[place]
            },
        )

    def reclaim(self) -> None:
        """Take back slots whose late reply has come since; a server that owes none is trusted again."""
        reclaim_kernel[(1,)](
            self.tables.peers, self.tables.suspect, self.tables.owed, self.tables.control,
            **self.tables.constants(reclaim_kernel.arg_names), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def retired(self) -> dict[int, int]:
        """Slots put aside, by place. Asks the device."""
        owed = (self.tables.owed.cpu() != 0).sum(dim=1).tolist()
        return {place: count for place, count in enumerate(owed) if count}

    def apply(self, *arguments: object, **named: object) -> NoReturn:
        raise TypeError("rows in the host's memory cannot be sent from a GPU's client; serve with --device cpu.")

    # -- servers, from any thread --------------------------------------------------------------------------------

    def add_server(self, link: ServerLink) -> int:
        """The next step sees it."""
        self.shape.require_windows(link.slots, request_bytes=link.tx_bytes, reply_bytes=link.rx_bytes)
        with self._lock:
            free = set(range(self.tables.servers)) - self._links.keys() - self._leaving
            if not free:
                raise LinkRefused(f"all {self.tables.servers} places for servers are taken.")
            place = min(free)
            self._links[place] = link
            self._changed.add(place)
            self._corrupt[place] = self._lost[place] = self._late[place] = 0
            self._seen[place] = self._judged[place] = 0
            self._patience.forget(place)
            self._speed[place] = 1.0
            self._settle()
        return place

    def remove_server(self, place: int) -> None:
        with self._lock:
            if self._links.pop(place, None) is not None:
                self._leaving.add(place)
                self._changed.add(place)
                self._settle()

    def is_idle(self, place: int) -> bool:
        with self._lock:
            self._leaving -= {place} - self._changed
            return place not in self._links and place not in self._changed

    def publish(self, epoch: int, table: Table) -> None:
        """Use these routes from the next step on.

        Each step asks the first live replica; which that is follows the servers' speeds and the experts' work.
        """
        ordered = spread(table, self._work, self._speed)
        with self._lock:
            self._table = ordered
            self._pending = (epoch, ordered)
            self._settle()

    def take_routed(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """What steps of the last COUNT_S asked may come with the next time."""
        with self._lock:
            if not self._in_step:
                self._count()
            taken, self._routed = self._routed, np.zeros_like(self._routed)
            seen = self._seen.copy()
        self._rebalance(taken, seen)
        return taken[0].ravel(), taken[1].ravel()

    def stats(self, place: int) -> ServerStats:
        with self._lock:
            replies, pairs, service_ns = self._seen[place, : SeenWord.SERVICE_NS + 1].tolist()
            late = int(self._late[place])
            return ServerStats(
                state=ServerState.ATTACHED if place in self._links else ServerState.EMPTY,
                speed=float(self._speed[place]),
                replies=replies,
                calls=replies,
                pairs=pairs,
                in_flight=pairs,
                service_sum_ns=service_ns,
                corrupt=int(self._corrupt[place]),
                lost=int(self._lost[place]),
                held_slots=late,
                lost_slots=late,
            )

    def close(self) -> None:
        """Nothing to free: tables go with this object."""

    def _count(self) -> None:
        """Add up what the device has counted; the lock is held and no step is under way."""
        self._counted_s = time.monotonic()
        with torch.cuda.stream(self.stream):
            self._routed += self.tables.routed[:2].cpu().numpy().astype(np.uint32)
            fill(self.tables.routed[:2], 0)
            self._seen = self.tables.seen.cpu().numpy().copy()
            took = self.tables.took.cpu().numpy().copy()
            fill(self.tables.took, 0)
            # What was seen of whoever had these places before.
            took[list(self._changed)] = self._seen[list(self._changed)] = 0
            self._patience.learn(took)
            self.tables.limits.copy_(torch.from_numpy(self._patience.limits_ns()))

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
            found = speeds_of(work_of(table, work, self.tables.servers).sum(axis=0), service_ns)
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
                self.link(place, link and Link(request=link.tx, reply=link.rx, incarnation=link.server_incarnation))
            routes = None
            if self._pending is not None:
                table = self._pending[1]
                # Whoever is awaited, or is nobody, has no place.
                routes = torch.from_numpy(np.where(table < self.tables.servers, table, 255).astype(np.int32))
                routes[routes == 255] = -1
            self.write_tables(routes)
        if self.stream is not None:
            self.stream.synchronize()
        self._changed.clear()
        if self._pending is not None:
            self.adopted_epoch, self._pending = self._pending[0], None

    # -- tables, where steps are launched and between them ---------------------------------------------------------

    def link(self, place: int, link: Link | None) -> None:
        """Put a server with new windows in a place, or nobody; `write_tables` lets the next step see it.

        The windows that the place had before must be out of everyone's reach: its slots are taken to be free.

        Raises:
            ValueError: no such place, or an address is not a multiple of 64.
        """
        if not 0 <= place < self.tables.servers:
            raise ValueError(f"place is {place}; 0 to {self.tables.servers - 1} exist.")
        if link is not None and (link.request % 64 or link.reply % 64):
            raise ValueError(f"windows at {link.request:#x} and {link.reply:#x}; multiples of 64 bytes are needed.")
        self._written[place] = link
        self.tables.forget(place)

    def write_tables(self, routes: Sequence[Sequence[Sequence[int]]] | torch.Tensor | None = None) -> None:
        """Let the steps launched from now on see the links, and these routes or those there were.

        Args:
            routes: [layers, experts, replicas]: places in order of preference, then -1.

        Raises:
            ValueError: the routes are not of this shape, or name a place that does not exist.
        """
        if routes is not None:
            self._routes = torch.as_tensor(routes, dtype=torch.int32).contiguous().cpu()
        self.tables.publish([link or (0, 0, 0, 0) for link in self._written], self._routes)


@triton.jit
def reclaim_kernel(
    peers, suspect, owed, control,
    SERVERS: tl.constexpr, SLOTS: tl.constexpr, REPLY_STRIDE: tl.constexpr, WIDTH: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Between steps: what came late, and what was not sound."""
    take_back(peers, suspect, owed, tl.load(control + CLIENT.COPY), SERVERS, SLOTS, REPLY_STRIDE, WIDTH, True)
