"""What has happened since this process began, counted for its metrics. Pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from router.events import Command, Fenced, Launch
from router.state import State


class Counts:
    """Events by pool. Forgotten by a restart, as counters of Prometheus may be."""

    def __init__(self) -> None:
        self.scale_changes: Counter[str] = Counter()
        self.fenced: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.failed_ticks = 0

    def note(self, before: State, after: State, commands: Iterable[Command]) -> None:
        """Count what one step did."""
        if after.wanted is not before.wanted:
            self.scale_changes.update(
                pool for pool, wanted in after.wanted.items() if before.wanted.get(pool, wanted) != wanted
            )
        for command in commands:
            if isinstance(command, Fenced):
                self.fenced[command.name.partition("/")[0]] += 1
            elif isinstance(command, Launch):
                self.launches[command.pool] += 1
