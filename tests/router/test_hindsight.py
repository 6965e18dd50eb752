"""Over what it has seen the policy is never dearer than a fleet that stays, whatever the load does."""

from __future__ import annotations

import time

import numpy as np
import pytest

from benchmarks.elasticity import by_policy, late_share, serve, static
from benchmarks.elasticity_shapes import LEARNED, SHAPES, demand_of, smallest
from router.scaling import FORECAST, LATE_SHARE, LEARN_S, STEADY, Memory, Policy, Signals, decide


def late_when(size: int, demand: list[float], counted_from: int) -> float:
    """The share of tokens that a fleet of this size would have late."""
    return late_share([serve(demand, static(np.empty(0), size), size, counted_from)])


@pytest.mark.parametrize("shape", SHAPES)
def test_it_costs_no_more_than_a_fleet_that_stays_sized_on_the_same_history(shape: str) -> None:
    seed = time.time_ns()
    asked = demand_of(shape, seed)
    demand = asked.tolist()
    # Over the whole of it, which the policy knows only at the end.
    size = smallest(demand, 0, LATE_SHARE)
    ours = serve(demand, by_policy(asked, Policy().headroom), int(asked.max()), LEARNED)
    late = late_share([ours])
    assert ours.paid <= 1.03 * size + 0.5, f"{shape}, seed {seed}: {ours.paid:.1f} paid, {size} is enough"
    # What comes in the second half may be above anything that the first has shown: then a fleet sized on the first, to
    # the server, is late as well.
    known = late_when(smallest(demand[:LEARNED], 0, LATE_SHARE) - 1, demand, LEARNED)
    assert late <= max(6 * LATE_SHARE, 1.5 * known), (
        f"{shape}, seed {seed}: {late:.2%} late with {ours.paid:.1f}, {size} is enough; {known:.2%} with what was seen"
    )


@pytest.mark.parametrize(
    ("shape", "seed"),
    [
        # What follows a forecast may not shrink as often as it would; a queue that is not late is no need; a pool that
        # has just turned from one to the other has the size of what it followed before.
        ("ramps", 1795802412338254848),
        ("square of 20 s", 1795802412338254850),
        ("slow wave", 1795802635112571078),
    ],
)
def test_loads_that_were_dear_once_are_not(shape: str, seed: int) -> None:
    asked = demand_of(shape, seed)
    demand = asked.tolist()
    ours = serve(demand, by_policy(asked, Policy().headroom), int(asked.max()), LEARNED)
    size = smallest(demand, 0, LATE_SHARE)
    assert ours.paid <= 1.03 * size, f"{ours.paid:.1f} paid, {size} is enough"
    assert late_share([ours]) <= 6 * LATE_SHARE


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
