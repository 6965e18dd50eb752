"""What happened since this process began, and how well replicas cover experts, for the metrics. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router import bitmap
from router.events import Command, Fenced, Routed, StartProcess, Totals
from router.lifecycle import OVERDUE
from router.records import pool
from router.state import Config, MemberRecord, State
from router.view import EXPERT

# Why members are ended that did not go by themselves, by the first words of the reason given.
EVICTIONS: Final = {
    "its process ended": "ended",
    "silent": "silent",
    "its work loop": "hung",
    "its process joined anew": "rejoined",
    OVERDUE: "overdue",
}


class Counts:
    """Events by pool. Forgotten by a restart, as counters of Prometheus may be."""

    def __init__(self) -> None:
        self.scale_changes: Counter[str] = Counter()
        self.fenced: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.evictions: Counter[tuple[str, str]] = Counter()
        # Copies of experts that servers loaded, gave up, and loaded while they served already.
        self.loaded = self.unloaded = self.migrated = 0
        # What members that are there count themselves.
        self.totals: dict[str, tuple[Totals, ...]] = {}
        self.failed_ticks = 0
        # By (layer, expert) in the order of bitmaps; empty before any.
        self.rows: NDArray[np.uint64] = np.zeros(0, np.uint64)

    def note(self, before: State, after: State, commands: Iterable[Command]) -> None:
        """Count what one step did."""
        if after.wanted is not before.wanted:
            self.scale_changes.update(
                pool for pool, wanted in after.wanted.items() if before.wanted.get(pool, wanted) != wanted
            )
        if after.members is not before.members:
            self._note_copies(before.members, after.members)
        for command in commands:
            if isinstance(command, Fenced):
                pool = command.name.partition("/")[0]
                self.fenced[pool] += 1
                self.evictions.update(
                    (pool, why) for words, why in EVICTIONS.items() if command.reason.startswith(words)
                )
                self.totals.pop(command.name, None)
            elif isinstance(command, StartProcess):
                self.launches[command.pool] += 1

    def _note_copies(self, before: Mapping[str, MemberRecord], after: Mapping[str, MemberRecord]) -> None:
        for name, record in after.items():
            former = before.get(name)
            if former is None or former is record:
                continue
            came = (record.loaded & ~former.loaded).bit_count()
            self.loaded += came
            # A server that is new takes its first experts: they are placed, not moved.
            self.migrated += came if former.ready else 0
            held, holds = former.loaded | former.retiring, record.loaded | record.retiring
            self.unloaded += (held & ~holds).bit_count()

    def add_totals(self, name: str, totals: tuple[Totals, ...]) -> None:
        """Take what a member has counted; the newest is all that counts."""
        self.totals[name] = totals

    def add_rows(self, state: State, routed: Routed) -> None:
        """Count rows that an attention worker sent to each expert."""
        pairs = (state.model.layers * state.model.experts,)
        if routed.rows.shape == pairs:
            # Of another model the experts are others.
            self.rows = (self.rows if self.rows.shape == pairs else np.zeros(pairs, np.uint64)) + routed.rows


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """One moment's placement and load.

    servers: names of the expert members. lost: (layer, expert) pairs that no member may be asked for. below: those
    with fewer replicas than wanted, the lost ones too. load: [layers, servers] rows per second, as they fall on
    servers when each expert's are split evenly over its replicas; of the last minute or two.
    """

    servers: tuple[str, ...]
    lost: int
    below: int
    load: NDArray[np.float64]

    @property
    def balancedness(self) -> float | None:
        """Mean over the greatest load of a server: 1 when all are as busy, 1/servers when one does everything; of all
        layers together, each weighted with its load. None while there is no load.
        """
        if not self.load.any():
            return None
        busiest = self.load.max(axis=1)
        return float(self.load.mean(axis=1).sum() / busiest.sum())


def coverage(config: Config, state: State) -> Coverage:
    """Of the present state. More copies than there are servers wanted are not wanted of any expert."""
    layers, experts = state.model.layers, state.model.experts
    members = pool(state, EXPERT)
    serving = np.zeros((len(members), layers * experts), bool)
    for row, record in zip(serving, members, strict=True):
        row[:] = _bits(bitmap.to_bytes(record.serving, layers, experts), layers * experts)
    copies = serving.sum(axis=0)
    wanted = min(config.replicas, max(1, state.wanted.get(EXPERT, config.replicas)))
    load = np.zeros((layers, len(members)))
    if state.routed is not None and state.routed.shape == copies.shape and members:
        age_s = max(0.0, state.now_s - state.routed_s)
        # A steady rate adds up to rate * half life / ln 2.
        rate = np.log(2) / config.routed_half_life_s * 0.5 ** (age_s / config.routed_half_life_s)
        each = state.routed * rate / np.maximum(copies, 1)
        load = (serving * each).reshape(len(members), layers, experts).sum(axis=2).T
    return Coverage(
        servers=tuple(record.name for record in members),
        lost=int((copies == 0).sum()),
        below=int((copies < wanted).sum()),
        load=load,
    )


def _bits(held: bytes, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(held, np.uint8), count=count, bitorder="little").astype(bool)
