"""A client's split of its rows over replicas: whole, even, cheap in activations, and the same in Python."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from experts import native
from experts.model import Dtype
from tests.experts.steps import OK, Call, World, shape_of
from tests.experts.waterfill_reference import EXPERT_COST, SERVERS, split_rows

REPLICAS = 8
SEEDS = range(60)


def shipped(
    counts: NDArray[np.uint32], masks: list[int], speed: NDArray[np.float64], cost: float, turn: int = 0
) -> NDArray[np.int64]:
    """[experts, 64] rows, by the native code."""
    rows = np.full((len(counts), REPLICAS), 7, np.uint32)
    servers = np.array(masks, np.uint64)
    arrays = (counts.ctypes.data, servers.ctypes.data, speed.ctypes.data)
    assert native.load().expert_waterfill(len(counts), *arrays, cost, turn, rows.ctypes.data) == 0
    found = np.zeros((len(counts), SERVERS), np.int64)
    for expert, mask in enumerate(masks):
        holders = [server for server in range(SERVERS) if mask >> server & 1]
        found[expert, holders] = rows[expert, : len(holders)]
        assert not rows[expert, len(holders) :].any()
    return found


def batch(
    seed: int, servers: int = 8, experts: int = 24, rows: int = 600
) -> tuple[NDArray[np.uint32], list[int], NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    masks = []
    for _ in range(experts):
        held = rng.choice(servers, size=rng.integers(1, min(4, servers) + 1), replace=False)
        masks.append(int(sum(1 << int(server) for server in held)))
    popularity = rng.random(experts) ** 3
    counts = rng.multinomial(rows, popularity / popularity.sum()).astype(np.uint32)
    speed = np.ones(SERVERS)
    if seed % 2:
        speed[:servers] = rng.choice([0.25, 0.5, 1.0, 1.5], size=servers)
    return counts, masks, speed


def bound(counts: NDArray[np.uint32], masks: list[int], speed: NDArray[np.float64], servers: int) -> float:
    """Time of the busiest server under the best split: what the most confined set of servers must do (min-cut)."""
    worst = 0.0
    for size in range(1, servers + 1):
        for chosen in combinations(range(servers), size):
            inside = sum(1 << server for server in chosen)
            rows = sum(int(n) for n, mask in zip(counts, masks, strict=True) if not mask & ~inside)
            worst = max(worst, rows / float(speed[list(chosen)].sum()))
    return worst


@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_goes_to_one_server_that_may_compute_it(seed: int) -> None:
    counts, masks, speed = batch(seed)
    masks[0] = 0
    for cost in (0.0, EXPERT_COST):
        rows = shipped(counts, masks, speed, cost, turn=seed)
        assert not rows[0].any(), f"seed {seed}"
        assert (rows[1:].sum(1) == counts[1:]).all(), f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_busiest_server_is_as_idle_as_the_replicas_allow(seed: int) -> None:
    counts, masks, speed = batch(seed, servers=6)
    busiest = (shipped(counts, masks, speed, 0.0)[:, :6].sum(0) / speed[:6]).max()
    least = bound(counts, masks, speed, 6)
    # A row more, where rounding leaves one, weighs most on the slowest server.
    assert least - 1e-9 <= busiest <= 1.01 * least + 1.5 / speed[:6].min(), f"seed {seed}: {busiest} for {least}"


@pytest.mark.parametrize("seed", SEEDS)
def test_python_finds_the_same_split(seed: int) -> None:
    for experts, rows, cost in (
        (24, 600, 0.0),
        (24, 600, EXPERT_COST),
        (40, 64, EXPERT_COST),
        (8, 8, EXPERT_COST),
    ):
        counts, masks, speed = batch(seed, experts=experts, rows=rows)
        native_rows = shipped(counts, masks, speed, cost, turn=seed)
        python_rows = split_rows(counts.tolist(), masks, speed.tolist(), cost, seed)
        for expert, found in enumerate(python_rows):
            expected = {server: int(n) for server, n in enumerate(native_rows[expert]) if n}
            assert found == expected, f"seed {seed}, expert {expert}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_small_batch_activates_no_expert_twice(seed: int) -> None:
    """Eight tokens: a second read of an expert's weights costs more than its one or two rows."""
    counts, masks, _ = batch(seed, servers=8, experts=60, rows=64)
    counts = np.minimum(counts, 2).astype(np.uint32)
    rows = shipped(counts, masks, np.ones(SERVERS), EXPERT_COST)
    assert ((rows > 0).sum(1) <= 1).all(), f"seed {seed}"


def test_activations_are_spread_where_they_cost_most() -> None:
    """16 experts of one row on 4 servers that all hold them: 4 activations each."""
    rows = shipped(np.ones(16, np.uint32), [0b1111] * 16, np.ones(SERVERS), EXPERT_COST)
    assert (rows[:, :4] > 0).sum(0).tolist() == [4, 4, 4, 4]


def test_a_slow_server_gets_less_work_and_not_none() -> None:
    speed = np.ones(SERVERS)
    speed[1] = 0.5
    rows = shipped(np.array([300, 300], np.uint32), [0b11, 0b11], speed, 0.0)
    assert rows[:, :2].sum(0).tolist() == [400, 200]


def test_a_slow_server_does_not_end_last_for_an_expert_that_others_hold() -> None:
    """20 experts of two rows on four servers, of which one is eight times slower: one expert takes it longer than all
    of them take the others."""
    speed = np.ones(SERVERS)
    speed[1] = 0.125
    masks = [0b11 << at % 3 for at in range(20)]
    for turn in range(32):
        rows = shipped(np.full(20, 2, np.uint32), masks, speed, EXPERT_COST, turn)
        assert not rows[:, 1].any(), f"turn {turn}"
    alone = shipped(np.full(20, 2, np.uint32), [*masks[:19], 0b10], speed, EXPERT_COST)
    assert alone[:, 1].tolist() == [0] * 19 + [2], "what nobody else holds"


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_ends_last_could_not_be_relieved_by_leaving_one_of_its_experts_to_another(seed: int) -> None:
    """Of a slow server whose experts all have others: every way to move one of them whole ends no sooner."""
    rng = np.random.default_rng(seed)
    servers = int(rng.integers(2, 6))
    masks = [
        int(sum(1 << int(at) for at in rng.choice(servers, 2, replace=False))) for _ in range(int(rng.integers(3, 24)))
    ]
    counts = rng.integers(1, 4, len(masks)).astype(np.uint32)
    speed = np.ones(SERVERS)
    slow = int(rng.integers(servers))
    speed[slow] = 0.125
    rows = shipped(counts, masks, speed, EXPERT_COST, seed)[:, :servers]

    def times(split: NDArray[np.int64]) -> NDArray[np.float64]:
        return (split.sum(0) + EXPERT_COST * (split > 0).sum(0)) / speed[:servers]

    # Rounding and one expert's own weight are what the others may be off by.
    others = np.delete(times(rows), slow).max()
    without = rows.copy()
    for expert in np.flatnonzero(rows[:, slow]):
        (other,) = (at for at in range(servers) if masks[expert] >> at & 1 and at != slow)
        without[expert, other] += without[expert, slow]
        without[expert, slow] = 0
    assert times(rows)[slow] <= max(others, times(without).max()) + 1e-9, f"seed {seed}"


def test_rows_flow_through_experts_that_neighbours_share() -> None:
    """A chain: what is too much at its one end leaves over three hops."""
    rows = shipped(np.array([160, 80, 80, 0], np.uint32), [0b1, 0b11, 0b110, 0b1100], np.ones(SERVERS), 0.0)
    assert rows[:, :4].sum(0).max() == 160
    rows = shipped(np.array([60, 60, 60, 60], np.uint32), [0b1, 0b11, 0b110, 0b1100], np.ones(SERVERS), 0.0)
    assert rows[:, :4].sum(0).tolist() == [60, 60, 60, 60]


@pytest.mark.parametrize("servers", [(0, 1, 2, 3), (2, 3, 40, 63)])
def test_odd_rows_of_many_clients_do_not_meet(servers: tuple[int, ...]) -> None:
    """64 clients with one row each for an expert that four servers hold."""
    mask = sum(1 << server for server in servers)

    def one(turn: int) -> NDArray[np.int64]:
        return shipped(np.ones(1, np.uint32), [mask], np.ones(SERVERS), EXPERT_COST, turn)[0]

    total = sum(one(turn) for turn in range(64))[list(servers)]
    assert total.sum() == 64 and total.min() >= 8, total
    assert (one(3) == one(3)).all()


@pytest.mark.parametrize(
    ("times", "before", "after"),
    [
        ([10, 10, 10, 20], [1, 1, 1, 1], [1, 1, 1, 0.5]),  # half as fast
        ([10, 10, 10, 12], [1, 1, 1, 1], [1, 1, 1, 1]),  # noise
        ([10, 10, 10, 12], [1, 1, 1, 0.5], [1, 1, 1, 10 / 12]),  # better, and not yet well
        ([10, 10, 10, 10.5], [1, 1, 1, 0.5], [1, 1, 1, 1]),  # well again
        ([10, 10, 10, 0], [1, 1, 1, 0.5], [1, 1, 1, 1]),  # another server in its place: unknown
        ([10, 10, 10, 10_000], [1, 1, 1, 1], [1, 1, 1, 0.125]),  # slow is not dead
    ],
)
def test_speeds_follow_service_times_with_hysteresis(
    times: list[float], before: list[float], after: list[float]
) -> None:
    ns, speed = np.array(times, float), np.array(before, float)
    assert native.load().expert_weigh(len(ns), ns.ctypes.data, speed.ctypes.data) == 0
    assert speed == pytest.approx(after)


@pytest.mark.parametrize(
    ("mask", "speed", "cost"),
    [((1 << 9) - 1, 1.0, 0.0), (3, 0.0, 0.0), (3, float("nan"), 0.0), (3, 1.0, -1.0)],
)
def test_nonsense_is_refused(mask: int, speed: float, cost: float) -> None:
    counts, masks = np.ones(1, np.uint32), np.array([mask], np.uint64)
    speeds, rows = np.full(SERVERS, speed), np.zeros(REPLICAS, np.uint32)
    arrays = (counts.ctypes.data, masks.ctypes.data, speeds.ctypes.data)
    assert native.load().expert_waterfill(1, *arrays, cost, 0, rows.ctypes.data) == -2


def test_a_call_splits_an_expert_whose_rows_are_many_and_keeps_the_bits() -> None:
    world = World(shape=shape_of(experts=1, top_k=1), dtype=Dtype.BFLOAT16, servers=3, seed=5)
    for server in range(3):
        world.hold(server, 0, 0)
    client = world.add_client(max_tokens=64)
    world.publish(client, 1)
    call = Call(world, client, np.random.default_rng(5), 60, 0)
    assert call.run() == OK
    assert call.exact()
    assert [world.stats(client, server).pairs for server in range(3)] == [20, 20, 20]
    few = Call(world, client, np.random.default_rng(6), 5, 0)
    assert few.run() == OK
    assert few.exact()
    assert sorted(world.stats(client, server).pairs for server in range(3)) == [20, 20, 25], "not worth a split"
    world.close()
