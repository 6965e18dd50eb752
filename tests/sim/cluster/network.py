"""Links of the simulated cluster: how late a message comes, and whether at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

ROUTER = 0
LOST = -1.0
_NEAR_S = 0.0004
_SPREAD_S = 0.004


@dataclass(frozen=True, slots=True)
class Filter:
    """What the messages suffer of which `hits(source, target)` is true: odds of a loss, and a delay."""

    hits: Callable[[int, int], bool]
    loss: float
    delay_s: float


class Network:
    """Delay, loss, repetition and cuts between endpoints; an endpoint is a number, the router's is 0.

    loss, repeat: odds of a message. tail_s: one message in eight is up to this much later than the rest, so that
    it is overtaken. slow_s: what every message of an endpoint takes longer. A cut is one-way; faults may overlap.
    filters: by whoever set them.
    """

    __slots__ = (
        "_cuts",
        "_dumb",
        "calm",
        "filters",
        "loss",
        "lost",
        "repeat",
        "repeated",
        "slow_s",
        "tail_s",
    )

    def __init__(self) -> None:
        self.loss = 0.0
        self.repeat = 0.0
        self.tail_s = 0.0
        self.slow_s: dict[int, float] = {}
        self.filters: dict[object, Filter] = {}
        self._cuts: Counter[tuple[int, int]] = Counter()
        self._dumb: Counter[int] = Counter()
        self.calm = True
        self.lost = 0
        self.repeated = 0

    def delay(self, source: int, target: int, dice: Random) -> float:
        """Seconds until a message is there, or LOST."""
        delay_s = _NEAR_S + _SPREAD_S * dice.random()
        if self.calm:
            return delay_s
        if (source, target) in self._cuts or source in self._dumb:
            self.lost += 1
            return LOST
        if self.loss and dice.random() < self.loss:
            self.lost += 1
            return LOST
        if self.tail_s and dice.random() < 0.125:
            delay_s += self.tail_s * dice.random()
        if self.slow_s:
            delay_s += self.slow_s.get(source, 0.0) + self.slow_s.get(target, 0.0)
        for filter in self.filters.values():
            if filter.hits(source, target):
                if filter.loss and dice.random() < filter.loss:
                    self.lost += 1
                    return LOST
                delay_s += filter.delay_s
        return delay_s

    def again(self, dice: Random) -> bool:
        """Whether this message comes twice."""
        if self.calm or not self.repeat or dice.random() >= self.repeat:
            return False
        self.repeated += 1
        return True

    def is_cut(self, one: int, other: int) -> bool:
        """Whether either way between two endpoints is cut."""
        if self.calm:
            return False
        cuts, dumb = self._cuts, self._dumb
        if (one, other) in cuts or (other, one) in cuts or one in dumb or other in dumb:
            return True
        return any(filter.loss == 1.0 and filter.hits(one, other) for filter in self.filters.values())

    def cut(self, source: int, target: int) -> None:
        """Lose everything from one endpoint to another."""
        self._cuts[source, target] += 1
        self.calm = False

    def join(self, source: int, target: int) -> None:
        """End one cut."""
        self._cuts[source, target] -= 1
        if not self._cuts[source, target]:
            del self._cuts[source, target]
        self.look()

    def mute(self, source: int, step: int) -> None:
        """Lose everything that an endpoint says (step 1), or end that (step -1)."""
        self._dumb[source] += step
        if not self._dumb[source]:
            del self._dumb[source]
        self.look()

    def look(self) -> None:
        """See again whether anything is wrong."""
        noisy = self.loss or self.repeat or self.tail_s or self.slow_s
        self.calm = not (self._cuts or self._dumb or self.filters or noisy)
