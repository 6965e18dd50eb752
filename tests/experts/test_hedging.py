"""Promises about slow and silent servers: hedged soon, within a budget, and probed by copies that nobody waits for."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from experts.model import Dtype
from tests.experts.steps import OK, PENDING, Call, World, out_of_memory, shape_of
from tests.experts.test_steps import spread
from tests.sim.mutants import Mutant

TICK_NS = 50_000


def made(
    servers: int, replicas: int, seed: int, slots: int = 2, library: ctypes.CDLL | None = None
) -> tuple[World, np.random.Generator]:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=servers, seed=seed, slots=slots, library=library)
    spread(world, replicas)
    world.publish(world.add_client(), 1)
    return world, np.random.default_rng(seed)


def timed(world: World, rng: np.random.Generator, n: int = 8) -> int:
    """One exact call; its nanoseconds."""
    call = Call(world, 0, rng, n, 0, deadline_ns=20_000_000_000)
    began_ns = world.now_ns
    assert call.run(tick_ns=TICK_NS) == OK and call.exact()
    return world.now_ns - began_ns


@pytest.mark.parametrize("frozen_s", [0.5, 10.0])
def test_a_frozen_server_holds_up_one_call_for_a_moment_and_no_probe_holds_up_another(
    frozen_s: float,
) -> None:
    world, rng = made(servers=4, replicas=2, seed=1)
    for _ in range(50):
        timed(world, rng)
    world.servers[1].frozen = True
    began_ns, took_ns = world.now_ns, []
    while world.now_ns < began_ns + frozen_s * 1e9:
        took_ns.append(timed(world, rng))
        world.now_ns += 20_000_000
    assert took_ns[0] <= 1_500_000
    assert max(took_ns[1:]) <= 2 * TICK_NS
    probes = world.stats(0, 1).calls
    world.servers[1].frozen = False
    for _ in range(3):
        timed(world, rng)
    assert world.stats(0, 1).held_slots == 0
    assert world.stats(0, 1).calls > probes, "it is given rows again"
    world.close()


def test_a_new_server_that_freezes_before_its_first_answer_is_hedged_as_soon_as_any() -> None:
    world, rng = made(servers=2, replicas=2, seed=2)
    for _ in range(20):
        timed(world, rng)
    new = world.add_server()
    spread(world, 2, [0, 1, new])
    world.attach(0, new)
    world.publish(0, 2)
    world.servers[new].frozen = True
    took_ns = [timed(world, rng) for _ in range(20)]
    assert world.stats(0, new).held_slots, "it was asked"
    assert max(took_ns) <= 1_500_000
    world.close()


def test_while_nobody_is_known_a_silent_server_costs_a_quarter_of_a_second() -> None:
    world, rng = made(servers=2, replicas=2, seed=3)
    world.servers[0].frozen = True
    assert timed(world, rng) <= 260_000_000
    world.close()


def hedged(world: World, rng: np.random.Generator, calls: int) -> tuple[int, int]:
    """Calls while server 0 is stopped for a moment again and again, never so long that it is suspect: requests to
    both servers, and pairs that were sent a second time."""
    before = [world.stats(0, server) for server in range(2)]
    for _ in range(calls):
        thaw_ns = world.now_ns + int(rng.integers(2, 8)) * 1_000_000
        world.servers[0].frozen = rng.random() < 0.3
        call = Call(world, 0, rng, 4, 0)
        while call.step() == PENDING:
            if world.now_ns >= thaw_ns:
                world.servers[0].frozen = False
            world.step_servers()
            world.now_ns += TICK_NS
        assert call.status == OK and call.exact()
    world.servers[0].frozen = False
    after = [world.stats(0, server) for server in range(2)]
    requests = sum(now.calls - then.calls for now, then in zip(after, before, strict=True))
    return requests, sum(now.hedges - then.hedges for now, then in zip(after, before, strict=True))


def lose_a_request(world: World, rng: np.random.Generator) -> None:
    """What server 0 is asked in one call never comes there."""
    call = Call(world, 0, rng, 8, 0, deadline_ns=20_000_000_000)
    for slot in range(world.slots):
        world.links[0, 0].request.slot(slot)[:8] = 0
    assert call.run(tick_ns=TICK_NS) == OK and call.exact()
    assert world.stats(0, 0).held_slots == 1


@pytest.mark.parametrize("seed", range(4))
def test_hedges_are_at_most_one_request_in_twenty(seed: int) -> None:
    world, rng = made(servers=2, replicas=2, seed=seed)
    for _ in range(50):
        timed(world, rng)
    requests, _ = hedged(world, rng, 1500)
    hedges = sum(world.stats(0, server).extra for server in range(2))
    assert 10 < hedges <= 0.05 * requests + 10, f"seed {seed}: {hedges} of {requests}"
    world.close()


def test_without_the_budget_hedges_are_more(tmp_path: Path) -> None:
    mutant = Mutant(
        source="experts/native/client_exchange.cpp",
        says="client->hedge_credit.load(std::memory_order_relaxed) >= HEDGE_COST",
        instead="true",
    )
    world, rng = made(servers=2, replicas=2, seed=1, library=mutant.library(tmp_path))
    for _ in range(50):
        timed(world, rng)
    requests, _ = hedged(world, rng, 1500)
    assert sum(world.stats(0, server).extra for server in range(2)) > 0.05 * requests + 10
    world.close()


def test_one_lost_request_costs_its_server_a_second_and_changes_no_budget() -> None:
    world, rng = made(servers=2, replicas=2, seed=6, slots=4)
    for _ in range(60):
        timed(world, rng)
    _, before = hedged(world, rng, 600)
    lose_a_request(world, rng)
    world.now_ns += 1_100_000_000
    without = 0
    for number in range(600):
        pairs = world.stats(0, 0).pairs
        world.servers[0].frozen = number % 100 == 50
        timed(world, rng)
        world.servers[0].frozen = False
        world.step_servers()
        world.now_ns += 5_000_000
        without += world.stats(0, 0).pairs - pairs <= 1
    assert without <= 10, "it is given rows in nearly every call"
    assert (world.stats(0, 0).held_slots, world.stats(0, 0).lost_slots) == (1, 1)
    _, after = hedged(world, rng, 600)
    assert after <= 1.5 * before, f"{before} pairs were sent twice, and {after} after a lost request"
    world.close()


def test_a_probe_whose_reply_is_spoiled_is_counted_and_another_follows() -> None:
    world, rng = made(servers=2, replicas=2, seed=7, slots=4)
    for _ in range(60):
        timed(world, rng)
    lose_a_request(world, rng)
    world.now_ns += 1_100_000_000
    call = Call(world, 0, rng, 8, 0)
    world.step_servers()
    for slot in range(world.slots):
        world.links[0, 0].reply.slot(slot)[200] ^= 1
    assert call.run(tick_ns=TICK_NS) == OK and call.exact()
    for _ in range(60):
        timed(world, rng)
        world.now_ns += 100_000_000
    assert world.stats(0, 0).corrupt == 1
    asked = world.stats(0, 0).calls
    for _ in range(10):
        timed(world, rng)
    assert world.stats(0, 0).calls == asked + 10
    world.close()


def test_rows_of_a_suspect_server_go_elsewhere_whatever_the_budget() -> None:
    world, rng = made(servers=2, replicas=2, seed=5)
    for _ in range(20):
        timed(world, rng)
    took_ns = []
    for _ in range(30):
        world.servers[0].frozen = True
        took_ns.append(timed(world, rng))
        world.servers[0].frozen = False
        for _ in range(2):
            world.step_servers()
            timed(world, rng)
    assert max(took_ns) <= 100_000_000
    world.close()


def test_a_late_reply_is_read_without_memory_to_spare() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=8, slot_bytes=1 << 21)
    spread(world, 2)
    world.publish(world.add_client(), 1)
    rng = np.random.default_rng(8)
    timed(world, rng)
    world.servers[0].frozen = True
    timed(world, rng)
    call = Call(world, 0, rng, 8, 0)
    world.servers[0].frozen = False
    assert world.step_servers() == 2
    with out_of_memory():
        call.step()
    assert call.status == OK and call.exact()
    assert world.stats(0, 0).held_slots == 0
    world.close()
