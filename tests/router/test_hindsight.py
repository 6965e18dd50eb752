"""Over what it has seen the policy is never dearer than a fleet that stays, whatever the load does."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.elasticity import Outcome, late_share, serve, static
from router.scaling import FORECAST, LATE_SHARE, LEARN_S, STEADY, Memory, Policy, Signals, decide

# Six hours to learn from, six to judge, in samples of 10 s.
LEARNED, STEPS = 2160, 4320
Shape = Callable[[np.random.Generator, np.ndarray], np.ndarray]


def square(period_s: float) -> Shape:
    """As long low as high."""
    return lambda chance, at_s: np.where(
        (at_s + chance.uniform(0, period_s)) % period_s < period_s / 2, 40.0, 4.0
    )


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


SHAPES: dict[str, Shape] = {
    **{f"square of {period_s} s": square(period_s) for period_s in (20, 60, 120, 300, 600)},
    "spikes": spikes,
    "ramps": ramps,
    "silence": silence,
}


def by_load(demand: list[float], counted_from: int) -> Outcome:
    policy, memory = Policy(most=128), Memory()

    def plan(signals: Signals, step: int) -> int:
        nonlocal memory
        wanted, memory = decide(policy, signals, memory, step * 10.0)
        return wanted

    return serve(demand, plan, 40, counted_from)


def late_when(size: int, demand: list[float], counted_from: int) -> float:
    """The share of tokens that a fleet of this size would have late."""
    return late_share([serve(demand, static(np.empty(0), size), size, counted_from)])


def enough(demand: list[float]) -> int:
    """The smallest fleet that keeps its time over all of a demand."""
    return next(size for size in range(1, 129) if late_when(size, demand, 0) <= LATE_SHARE)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_costs_no_more_than_a_fleet_that_stays_sized_on_the_same_history(shape: str) -> None:
    seed = time.time_ns()
    chance = np.random.default_rng(seed)
    scatter = chance.lognormal(0, 0.05, STEPS)
    demand = (SHAPES[shape](chance, np.arange(STEPS) * 10.0) * scatter).tolist()
    # Over the whole of it, which the policy knows only at the end.
    size = enough(demand)
    ours = by_load(demand, LEARNED)
    late = late_share([ours])
    assert ours.paid <= 1.03 * size + 0.5, f"{shape}, seed {seed}: {ours.paid:.1f} paid, {size} is enough"
    # What comes in the second half may be above anything that the first has shown: then a fleet sized on the first, to
    # the server, is late as well.
    known = late_when(enough(demand[:LEARNED]) - 1, demand, LEARNED)
    assert late <= max(6 * LATE_SHARE, 1.5 * known), (
        f"{shape}, seed {seed}: {late:.2%} late with {ours.paid:.1f}, {size} is enough; {known:.2%} with what was seen"
    )


def test_what_is_remembered_does_not_grow() -> None:
    policy, memory, sizes = Policy(), Memory(), []
    for step in range(3000):
        _, memory = decide(policy, Signals(wanted=9, live=9, busy=0.5, queue_s=0.0), memory, step * 10.0)
        seen = memory.past.seen
        arrays = (seen.late, seen.paid, seen.queue, *seen.wants, *seen.held)
        sizes.append(sum(array.nbytes for array in arrays))
    assert max(sizes) == sizes[-1] == sizes[100] < 150_000


def test_without_history_a_restarted_router_decides_as_on_the_first_day() -> None:
    policy, memory = Policy(), Memory()
    for step in range(int(LEARN_S / 10) + 100):
        said = Signals(wanted=40, live=40, busy=0.9 if step % 30 < 15 else 0.1, queue_s=0.0)
        _, memory = decide(policy, said, memory, step * 10.0)
    assert memory.past.chosen == STEADY, memory.why
    forgot = Memory()
    for step in range(20):
        _, forgot = decide(policy, Signals(wanted=4, live=4, busy=0.5, queue_s=0.0), forgot, step * 10.0)
    assert forgot.past.chosen == FORECAST and "2.0 x 1.75" in forgot.why, forgot.why


def test_what_fully_busy_servers_lack_is_learned_though_no_queue_tells() -> None:
    """Expert servers report no queue: a pool that was too small for hours still grows."""
    policy, memory, wanted = Policy(most=32), Memory(), 4
    for step in range(2 * int(LEARN_S / 10)):
        said = Signals(wanted=wanted, live=wanted, busy=min(1.0, 12.0 / wanted))
        if step < LEARN_S / 10:
            _, memory = decide(policy, said, memory, step * 10.0)
        else:
            wanted, memory = decide(policy, said, memory, step * 10.0)
    assert 12 < wanted <= 21, memory.why
