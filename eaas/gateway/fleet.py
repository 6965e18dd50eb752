"""What the attention workers say of their load, as one gateway shows it: together, and each. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eaas.worker.protocol import WorkerLoad

# Workers whose counters are remembered: one that comes back must not be counted twice.
_REMEMBERED = 256
_NOTHING = WorkerLoad()


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One connected worker. kv_blocks: all that it has, of block_tokens each. load: None before it said anything."""

    name: str
    incarnation: int
    kv_blocks: int
    block_tokens: int
    outstanding: int
    load: WorkerLoad | None

    @property
    def running(self) -> int:
        """Requests in its steps."""
        return self.load.running if self.load else 0

    @property
    def waiting(self) -> int:
        """Requests in its queue."""
        return self.load.waiting if self.load else 0

    @property
    def kv_use(self) -> float:
        """Share of its KV blocks that are held, 0 to 1."""
        return self.load.kv_use if self.load else 0.0


def kv_use(workers: Iterable[Seen]) -> float:
    """Share of all KV blocks that are held, 0 to 1; 0 where there are none."""
    known = list(workers)
    blocks = sum(worker.kv_blocks for worker in known)
    return sum(worker.kv_use * worker.kv_blocks for worker in known) / blocks if blocks else 0.0


class Ledger:
    """Sums of counters over all workers ever heard, so that they only rise though workers come and go.

    Attributes:
        preemptions: Requests put back for want of KV blocks.
        looked_up, reused: Tokens of prompts looked for in the KV cache, and found.
    """

    def __init__(self) -> None:
        self.preemptions = self.looked_up = self.reused = 0
        self._last: dict[int, WorkerLoad] = {}

    def heard(self, incarnation: int, load: WorkerLoad | None) -> None:
        """Add what a worker has counted since the last time, over whichever connection. Args: load: its newest."""
        if load is None:
            return
        last = self._last.pop(incarnation, _NOTHING)
        self._last[incarnation] = load
        self.preemptions += max(0, load.preemptions - last.preemptions)
        self.looked_up += max(0, load.looked_up - last.looked_up)
        self.reused += max(0, load.reused - last.reused)
        if len(self._last) > _REMEMBERED:
            del self._last[next(iter(self._last))]
