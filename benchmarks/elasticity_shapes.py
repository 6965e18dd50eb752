"""What scaling by the load costs on loads made to defeat it, beside the static fleet and who knows the next 40 s.

    python -m benchmarks.elasticity_shapes              # several minutes on one core; --seeds 1 for a look

Six hours to learn from, six that count, in steps of 10 s. Ours is what is shipped, at its own headroom: nothing is
tuned. Beside it the smallest fleets that stay and keep 0.1% of the tokens in time over all twelve hours, which ours
has only seen at their end, and the smallest that are no later than ours over the six that count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.elasticity import SLO, STEP_S, by_policy, knows_next, late_share, serve, static
from benchmarks.report import RESULTS, record
from router.scaling import Policy

LEARNED, STEPS = 6 * 3600 // STEP_S, 12 * 3600 // STEP_S
# Makes a demand [n], in servers, of the seconds [n] at which steps begin.
Shape = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def square(period_s: float, chance: np.random.Generator, at_s: np.ndarray) -> np.ndarray:
    """As long low as high."""
    return np.where((at_s + chance.uniform(0, period_s)) % period_s < period_s / 2, 40.0, 4.0)


def spikes(chance: np.random.Generator, at_s: np.ndarray) -> np.ndarray:
    """Ten to thirty seconds, six times an hour, six times as much."""
    load = np.full(len(at_s), 8.0)
    for begins in chance.integers(len(at_s), size=len(at_s) // 60):
        load[begins : begins + chance.integers(1, 4)] = 48.0
    return load


def ramps(chance: np.random.Generator, at_s: np.ndarray) -> np.ndarray:
    """Slowly up, down at once."""
    period_s = chance.uniform(1200, 3600)
    return 4 + 36 * ((at_s % period_s) / period_s)


def silence(chance: np.random.Generator, at_s: np.ndarray) -> np.ndarray:
    """Work without notice after minutes of none."""
    load, step = np.zeros(len(at_s)), 0
    while step < len(at_s):
        step += int(chance.exponential(30)) + 1
        length = int(chance.integers(1, 30))
        load[step : step + length] = chance.uniform(20, 40)
        step += length
    return load


def day(chance: np.random.Generator, at_s: np.ndarray) -> np.ndarray:
    """A slow wave without surprises: what scaling is for."""
    return 22 - 18 * np.cos(2 * np.pi * at_s / (6 * 3600) + chance.uniform(0, 2 * np.pi))


SHAPES: dict[str, Shape] = {
    **{f"square of {period_s} s": partial(square, period_s) for period_s in (20, 40, 60, 120, 300, 600)},
    "spikes": spikes,
    "ramps": ramps,
    "silence": silence,
    "slow wave": day,
}


def demand_of(shape: str, seed: int) -> np.ndarray:
    """Twelve hours [STEPS] of a shape, in servers, each step scattered by 5%."""
    chance = np.random.default_rng(seed)
    scatter = chance.lognormal(0, 0.05, STEPS)
    return SHAPES[shape](chance, np.arange(STEPS) * float(STEP_S)) * scatter


def smallest(demand: Sequence[float], counted_from: int, share: float) -> int:
    """The smallest fleet that stays and has no larger share of its tokens late."""
    low, high = 0, 1
    empty = np.empty(0)

    def late(size: int) -> float:
        return late_share([serve(demand, static(empty, size), size, counted_from)])

    while late(high) > share:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if late(middle) <= share else (middle, high)
    return high


def beside(demand: np.ndarray, counted_from: int) -> dict[str, float]:
    """Mean servers paid by ours, by both static fleets and by who knows the next 40 s; `late` is ours."""
    asked = demand.tolist()
    first = max(1, int(demand.max()))
    ours = serve(asked, by_policy(demand, Policy().headroom), first, counted_from)
    late = late_share([ours])
    knows = next(
        outcome
        for percent in range(70, 160, 2)
        if late_share([outcome := serve(asked, knows_next(demand, percent / 100), first, counted_from)]) <= SLO
    )
    return {
        "ours": ours.paid,
        "late": late,
        "static": smallest(asked, 0, SLO),
        "static_as_late": smallest(asked, counted_from, max(late, 1e-6)),
        "knows": knows.paid,
    }


def compare_shapes(seeds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Each shape's means over the seeds, and the dearest of them over static; printed as a table."""
    found: dict[str, dict[str, Any]] = {}
    print(f"{'':16} {'ours':>6} {'late':>7} {'static':>7} {'as late':>8} {'knows':>6} {'over static':>12} {'most':>7}")
    for shape in SHAPES:
        lines = [beside(demand_of(shape, seed), LEARNED) for seed in seeds]
        line = {word: round(float(np.mean([line[word] for line in lines])), 5) for word in lines[0]}
        line["over_static"] = round(line["ours"] / line["static"] - 1, 4)
        line["over_static_most"] = round(max(one["ours"] / one["static"] for one in lines) - 1, 4)
        found[shape] = line
        print(
            f"{shape:16} {line['ours']:6.1f} {line['late']:7.3%} {line['static']:7.1f} {line['static_as_late']:8.1f}"
            f" {line['knows']:6.1f} {line['over_static']:+12.1%} {line['over_static_most']:+7.1%}",
            flush=True,
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Compare on every shape; append one JSON line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=5, help="how many of each shape")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder that gets the JSON line")
    chosen = options.parse_args(argv)
    shapes = compare_shapes(range(chosen.seeds))
    record("elasticity_shapes", {"seeds": chosen.seeds, "shapes": shapes}, (), chosen.results)


if __name__ == "__main__":
    main()
