"""What has happened since this process began, counted for its metrics. Pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.drains import OVERDUE
from router.events import Command, Fenced, Launch, Routed
from router.state import MemberRecord, State
from router.totals import Totals

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
            elif isinstance(command, Launch):
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
