"""Promises of the order in which replicas are asked: the same replicas, and servers that end together."""

from __future__ import annotations

import random

import numpy as np

from experts.routes import AWAITED, MOST_REPLICAS, NO_SERVER, busiest, speeds_of, spread, work_of


def fresh_seed() -> int:
    return random.SystemRandom().randrange(1 << 31)


def table_of(source: np.random.Generator, layers: int, experts: int, servers: int, replicas: int) -> np.ndarray:
    """Random replicas, in the order of places, as views list them."""
    table = np.full((layers, experts, MOST_REPLICAS), NO_SERVER, np.uint8)
    for layer in range(layers):
        for expert in range(experts):
            table[layer, expert, :replicas] = np.sort(source.permutation(servers)[:replicas])
    return table


def test_the_order_changes_and_the_replicas_do_not() -> None:
    seed = fresh_seed()
    source = np.random.default_rng(seed)
    table = table_of(source, 3, 20, 5, 2)
    # Nobody at all; awaited alone; one, and one that is awaited.
    table[0, 0] = NO_SERVER
    table[1, 1] = [NO_SERVER] * (MOST_REPLICAS - 1) + [AWAITED]
    table[2, 2] = [3] + [NO_SERVER] * (MOST_REPLICAS - 2) + [AWAITED]
    ordered = spread(table, source.random((3, 20)), 0.2 + source.random(5))
    assert (np.sort(ordered, axis=2) == np.sort(table, axis=2)).all(), f"seed {seed}"
    assert (ordered[0, 0] == NO_SERVER).all()
    assert ordered[1, 1, -1] == AWAITED and ordered[2, 2, 0] == 3, f"seed {seed}"


def test_servers_that_all_hold_the_same_share_the_work_by_their_speeds() -> None:
    seed = fresh_seed()
    source = np.random.default_rng(seed)
    table = table_of(source, 2, 256, 3, 3)
    work, speed = np.ones((2, 256)) + source.random((2, 256)), np.array([1.0, 2.0, 1.0])
    given = work_of(spread(table, work, speed), work, 3)
    assert np.allclose(given / given.sum(axis=1, keepdims=True), speed / speed.sum(), atol=0.02), f"seed {seed}"
    # In the order of places the first had it all.
    assert (work_of(table, work, 3)[:, 1:] == 0).all()


def test_no_order_of_random_replicas_is_worse_than_that_of_places() -> None:
    seed = fresh_seed()
    source = np.random.default_rng(seed)
    for _ in range(20):
        table = table_of(source, 2, 64, 4, 2)
        work, speed = source.exponential(size=(2, 64)), source.uniform(0.5, 2, 4)
        found = busiest(spread(table, work, speed), work, speed)
        fair = float((work.sum(axis=1) / speed.sum()).sum())
        assert fair <= found * (1 + 1e-9), f"seed {seed}"
        assert found <= min(1.5 * fair, busiest(table, work, speed)), f"seed {seed}"


def test_speed_is_work_over_time_and_unknown_without_either() -> None:
    found = speeds_of(np.array([300.0, 100.0, 0.0, 5.0]), np.array([100, 100, 100, 0]))
    assert found[:2].tolist() == [1.5, 0.5]
    assert np.isnan(found[2:]).all()
    bounded = speeds_of(np.array([1e9, 1.0] + [1.0] * 20), np.full(22, 100))
    assert bounded.max() == 8 and bounded.min() == 1 / 8
