"""Server-seconds of one pool of two models beside two pools of one each, at one SLO, over weeks and square waves.

The worlds of benchmarks.elasticity: servers as a fluid, an order serves 30 s later and is paid from its order, a token
is late when the backlog at its arrival is over 1 s of the capacity then present, and at most 0.1% of the tokens may be.
A server of the one pool serves tokens of both models alike. Model A's week is that of a seed, model B's that of the
next seed of the same group, so that no world is new; `apart` shifts B's by half a day, or a square wave by half its
period.

Two baselines: both sides scaled by router.scaling.decide as shipped, and both sides fleets that stay. Headroom is tuned
for each pool alone, and fleets are sized for each pool alone, until the SLO is just kept on the tuning seeds; figures
are read on the others. Or every headroom is the shipped one, and `late` says by how much each side keeps the SLO. B's
pool has the headroom that was tuned for A, whose weeks it shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.elasticity import (
    DAY,
    READING,
    SLO,
    STEP_S,
    TUNING,
    Outcome,
    by_policy,
    late_share,
    load_world,
    serve,
    static,
    tuned,
)
from benchmarks.elasticity_shapes import LEARNED, STEPS

# Low beside high, in a square wave; as in benchmarks.elasticity_shapes.
LOW = 0.1
# Fleets of few servers change by much at each step: a finer headroom means nothing.
RESOLUTION = 0.03
# Around the shipped headroom of 1.75; what is late even so is told by an error.
BRACKET = 1.2, 2.0


@lru_cache(maxsize=2)
def _world(path: Path) -> Any:
    return load_world(path)


def partner(seed: int) -> int:
    """The seed of model B where A has this one: the next of its group, and of the last one the first."""
    group = TUNING if seed in TUNING else READING
    return group[(group.index(seed) + 1) % len(group)]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What two models are asked for.

    period_s: Of a square wave; 0: the week. peak: Servers that one model needs at its peak. apart: whether one is low
    while the other is high. of: The models whose tokens are counted, "A", "B" or "AB".
    """

    trace: Path
    world: Path
    peak: float
    period_s: float = 0.0
    apart: bool = True
    of: str = "AB"

    @property
    def counted_from(self) -> int:
        """The first step that counts; what is before it is there to learn from."""
        return LEARNED if self.period_s else DAY

    def demand(self, seed: int) -> np.ndarray:
        """Servers' worth of work of all its models in each step, [steps] float64."""
        parts = [self._model(seed, model) for model in self.of]
        return np.sum(parts, axis=0)

    def same(self, seed: int) -> tuple[Load, int]:
        """A load and a seed with the same demand, one of all that have it: of weeks, B's is another seed's A."""
        if self.period_s or self.of == "AB":
            return self, seed
        if self.of == "B" and not self.apart:
            return replace(self, of="A", apart=True), partner(seed)
        return (replace(self, apart=True) if self.of == "A" else self), seed

    def _model(self, seed: int, model: str) -> np.ndarray:
        shifted = self.apart and model == "B"
        if not self.period_s:
            week = _world(self.world).week(self.trace, seed if model == "A" else partner(seed), peak=self.peak)
            return np.roll(week, DAY // 2) if shifted else week
        offset_s = np.random.default_rng(seed).uniform(0, self.period_s) + shifted * self.period_s / 2
        scatter = np.random.default_rng([seed, ord(model)]).lognormal(0, 0.05, STEPS)
        at_s = np.arange(STEPS) * float(STEP_S)
        high = (at_s + offset_s) % self.period_s < self.period_s / 2
        return np.where(high, self.peak, LOW * self.peak) * scatter


def outcome_of(load: Load, least: int, size: float, seed: int) -> Outcome:
    """One pool over one seed: scaled with a headroom, or, where least is 0, a fleet of that size that stays."""
    demand = load.demand(seed)
    plan = by_policy(demand, size, least=least) if least else static(demand, size)
    first = max(least, round(2 * load.peak)) if least else round(size)
    return serve(demand.tolist(), plan, first, load.counted_from)


class Weeks:
    """Tunes and reads pools, on workers of its own; what was served once is remembered."""

    def __init__(self, workers: Executor, shipped: float = 0.0) -> None:
        """
        Args:
            shipped: Headroom of every scaled pool; 0: each is tuned.
        """
        self._workers, self._shipped = workers, shipped
        self._served: dict[tuple[Load, int, int, float], Future[Outcome]] = {}

    def read(self, load: Load, least: int, size: float, seeds: Sequence[int] = READING) -> list[Outcome]:
        """The outcomes of some seeds."""
        return [future.result() for future in [self._serve(load, least, size, seed) for seed in seeds]]

    def _serve(self, load: Load, least: int, size: float, seed: int) -> Future[Outcome]:
        key = (*load.same(seed), least, size)
        if key not in self._served:
            self._served[key] = self._workers.submit(outcome_of, load, least, size, seed)
        return self._served[key]

    def headroom(self, load: Load, least: int) -> float:
        """The least with which the scaled pool keeps the SLO on the tuning seeds."""
        if self._shipped:
            return self._shipped

        def measure(headroom: float) -> float:
            return late_share(self.read(load, least, headroom, TUNING))

        low, high = BRACKET
        # What has learned that it is late too often takes more by itself, whatever it was told.
        return low if measure(low) <= SLO else tuned(measure, low, high, resolution=RESOLUTION)

    def fixed(self, load: Load, seeds: Sequence[int] = TUNING) -> int:
        """The smallest fleet that stays and keeps the SLO on these seeds."""

        def measure(size: float) -> float:
            return late_share(self.read(load, 0, size, seeds))

        return round(tuned(measure, max(1, round(load.peak / 2)), round(2.5 * load.peak) + 1, whole=True))


def _line(outcomes: Sequence[Outcome], paid: float, **figures: Any) -> dict[str, Any]:
    return {"paid": round(paid, 3), "late": round(late_share(outcomes), 6), **figures}


def _mean(outcomes: Sequence[Outcome]) -> float:
    return float(np.mean([outcome.paid for outcome in outcomes]))


def compare(weeks: Weeks, load: Load, least: int) -> dict[str, Any]:
    """Mean servers of two pools and of one, scaled and fixed, on one load; what one pool saves of two."""
    alone, other = replace(load, of="A"), replace(load, of="B")
    own, joint = weeks.headroom(alone, least), weeks.headroom(load, least)
    a, b, both = weeks.read(alone, least, own), weeks.read(other, least, own), weeks.read(load, least, joint)
    scaled = {
        "two": _line([*a, *b], _mean(a) + _mean(b), of_each=[round(_mean(a), 3), round(_mean(b), 3)], headroom=own),
        "one": _line(both, _mean(both), headroom=joint),
    }
    sizes, size = [weeks.fixed(alone), weeks.fixed(other)], weeks.fixed(load)
    apart = [weeks.read(part, 0, count) for part, count in zip((alone, other), sizes, strict=True)]
    fixed = {
        "two": _line([*apart[0], *apart[1]], sum(sizes), of_each=sizes),
        "one": _line(weeks.read(load, 0, size), size),
    }
    # Nobody knows this before the weeks have passed; it says what the granularity of the sizing hides.
    known = [weeks.fixed(part, READING) for part in (alone, other, load)]
    return {
        "scaled": scaled | {"saving": _saving(scaled)},
        "fixed": fixed | {"saving": _saving(fixed), "with_hindsight": {"two": known[:2], "one": known[2]}},
        "scaled_one_under_fixed_two": round(1 - scaled["one"]["paid"] / fixed["two"]["paid"], 4),
    }


def _saving(sides: dict[str, dict[str, Any]]) -> float:
    return round(1 - sides["one"]["paid"] / sides["two"]["paid"], 4)


def shown(name: str, found: dict[str, Any]) -> str:
    """One load's figures in words."""
    words = [f"{name}:"]
    for side in ("scaled", "fixed"):
        two, one = found[side]["two"], found[side]["one"]
        words.append(
            f"{side} two pools {two['paid']:.2f} ({two['late']:.2%} late), one pool {one['paid']:.2f} "
            f"({one['late']:.2%} late): {found[side]['saving']:.1%} fewer;"
        )
    return " ".join(words).rstrip(";")
