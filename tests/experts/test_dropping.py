"""Terms of experts that nobody has are left out where the caller allows it, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from experts.model import Dtype
from experts.routes import AWAITED, DROPPED, KEEP, MAY_DROP, NO_SERVER, empty_table, table_of
from router.view import Member, View
from tests.experts.steps import LOST, OK, PENDING, Call, World, shape_of

DEADLINE_NS = 10**9
LATEST_NS = 20_000_000  # of a call that waits for nothing


def halves(seed: int) -> tuple[World, int]:
    """Two servers, each with every other expert; one client."""
    world = World(
        shape=shape_of(hidden=48, intermediate=40, experts=8, top_k=3),
        dtype=Dtype.BFLOAT16,
        servers=2,
        seed=seed,
    )
    for layer in range(world.shape.layers):
        for expert in range(world.shape.experts):
            world.hold(expert % 2, layer, expert)
    return world, world.add_client()


def without(call: Call, lost: np.ndarray) -> np.ndarray:
    """What the model computes where the weights of these pairs, bool [n, top_k], are zero."""
    gates = np.where(lost, np.float32(0), call.gates)
    return call.world.weights.reference(call.layer, call.x, call.ids, gates, call.before)


@pytest.mark.parametrize("when", ["before the call", "during the call", "unnamed by the routes"])
def test_what_nobody_has_is_left_out_at_once_and_the_rest_is_exact(when: str) -> None:
    for seed in range(20):
        world, client = halves(seed)
        world.publish(client, 1)
        if when == "before the call":
            world.kill(1)
        elif when == "unnamed by the routes":
            world.publish(client, 2, without={1})
        rng = np.random.default_rng(seed)
        drop = np.full(6, MAY_DROP, np.uint8)
        began_ns = world.now_ns
        call = Call(world, client, rng, 6, 0, deadline_ns=DEADLINE_NS, drop=drop)
        if when == "during the call":
            world.servers[1].frozen = True
            assert call.step() == PENDING
            world.kill(1)
        assert call.run() == OK, f"seed {seed}"
        lost = call.ids % 2 == 1
        assert np.array_equal(call.out, without(call, lost)), f"seed {seed}"
        assert drop.tolist() == np.where(lost.any(axis=1), DROPPED, MAY_DROP).tolist(), f"seed {seed}"
        assert world.now_ns - began_ns < LATEST_NS, f"seed {seed}: it waited"
        world.close()


def test_a_row_that_does_not_allow_it_fails_the_call_and_only_it_is_missing() -> None:
    world, client = halves(1)
    world.publish(client, 1)
    world.kill(1)
    drop = np.array([KEEP, MAY_DROP] * 4, np.uint8)
    call = Call(world, client, np.random.default_rng(1), 8, 0, deadline_ns=DEADLINE_NS, drop=drop)
    assert call.run() == LOST
    assert call.untouched()
    missing = np.zeros(8, np.uint8)
    assert world.library.expert_client_missing(world.clients[client], missing.ctypes.data, 8) == 8
    needs = (call.ids % 2 == 1).any(axis=1)
    assert needs[::2].any(), "no row needs what is lost"
    assert missing.tolist() == [int(needs[n] and n % 2 == 0) for n in range(8)]
    assert (drop[::2] == KEEP).all()
    world.close()


def test_what_a_live_server_has_is_waited_for() -> None:
    """A frozen server is no lost one."""
    world, client = halves(2)
    world.publish(client, 1)
    world.servers[1].frozen = True
    drop = np.full(5, MAY_DROP, np.uint8)
    call = Call(world, client, np.random.default_rng(2), 5, 0, deadline_ns=DEADLINE_NS, drop=drop)
    for _ in range(DEADLINE_NS // 2_000_000):
        assert call.step() == PENDING
        world.step_servers()
        world.now_ns += 1_000_000
    world.servers[1].frozen = False
    assert call.run() == OK
    assert call.exact()
    assert (drop == MAY_DROP).all()
    world.close()


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_replica_that_is_not_attached_yet_is_waited_for(epoch: int) -> None:
    """Nor is anything left out while the cluster is not known whole for the first time: epoch 0."""
    world, client = halves(3)
    table = empty_table(world.shape)
    table[:, ::2, 0] = world.links[client, 0].index
    if epoch:
        table[:, 1::2, -1] = AWAITED
    library, handle = world.library, world.clients[client]
    library.expert_client_publish_routes(handle, epoch, table.ctypes.data)
    drop = np.full(5, MAY_DROP, np.uint8)
    call = Call(world, client, np.random.default_rng(3), 5, 0, deadline_ns=DEADLINE_NS, drop=drop)
    for _ in range(100):
        assert call.step() == PENDING
        world.step_servers()
        world.now_ns += 1_000_000
    world.publish(client, epoch + 1)
    assert call.run() == OK
    assert call.exact()
    assert (drop == MAY_DROP).all()
    world.close()


def test_the_table_names_whoever_is_attached_and_says_who_is_awaited() -> None:
    shape = shape_of(hidden=8, intermediate=8, experts=4, top_k=1)
    pairs = shape.layers * shape.experts

    def member(number: int, experts: set[int]) -> Member:
        serving = sum(1 << bit for bit in range(pairs) if bit % shape.experts in experts)
        return Member(
            name=f"expert/{number}",
            pool="expert",
            state="serving",
            incarnation=number,
            address="",
            pid=1,
            host="here",
            serving=serving.to_bytes(-(-pairs // 8), "little"),
        )

    members = (member(1, {0, 1}), member(2, {1, 2}), member(3, {2}))
    view = View(term=1, epoch=1, replicas_wanted=2, layers=shape.layers, experts=shape.experts, members=members)
    rest = [NO_SERVER] * 6
    for given_up, last in ((set[str](), AWAITED), ({"expert/2"}, NO_SERVER)):
        table = table_of(shape, view, {"expert/1": 5, "expert/3": 7}, given_up)
        for layer in range(shape.layers):
            assert table[layer].tolist() == [
                [5, *rest, NO_SERVER],
                [5, *rest, last],
                [7, *rest, last],
                [NO_SERVER, *rest, NO_SERVER],
            ]
