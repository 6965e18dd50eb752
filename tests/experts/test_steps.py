"""Promises of dispatch, combine and failover, kept by the native code stepped under a clock of our own."""

from __future__ import annotations

import mmap
import time

import numpy as np
import pytest

from experts.model import CHOICES, Dtype
from p2p import native as p2p_native
from tests.experts.steps import LOST, MEMORY, OK, PENDING, Call, World, out_of_memory, shape_of

SHAPES = (
    {"hidden": 48, "intermediate": 40, "experts": 8, "top_k": 2},
    {"hidden": 33, "intermediate": 17, "experts": 5, "top_k": 3},
    {"hidden": 128, "intermediate": 96, "experts": 16, "top_k": 4},
    {"hidden": 7, "intermediate": 1, "experts": 3, "top_k": 1},
)


def spread(world: World, replicas: int, servers: list[int] | None = None) -> None:
    """Every expert on `replicas` servers, in turn."""
    servers = list(range(len(world.servers))) if servers is None else servers
    for layer in range(world.shape.layers):
        for expert in range(world.shape.experts):
            for copy in range(replicas):
                world.hold(servers[(expert + layer + copy) % len(servers)], layer, expert)


@pytest.mark.parametrize("dtype", CHOICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("servers", "replicas"), [(1, 1), (2, 1), (4, 2)])
def test_any_layout_gives_the_bits_of_one_process(
    dtype: Dtype, shape: dict[str, int], servers: int, replicas: int
) -> None:
    seed = 11 * servers + replicas
    world = World(shape=shape_of(**shape), dtype=dtype, servers=servers, seed=seed)
    spread(world, replicas)
    client = world.add_client(lanes=min(2, servers))
    world.publish(client, 1)
    rng = np.random.default_rng(seed)
    for n in (1, 2, 5, 17):
        call = Call(world, client, rng, n, int(rng.integers(world.shape.layers)))
        assert call.run() == OK, f"seed {seed}, n {n}"
        assert call.exact(), f"seed {seed}, n {n}"
    world.close()


def test_a_prefill_is_cut_into_chunks_that_fit_and_gives_the_same_bits() -> None:
    world = World(
        shape=shape_of(hidden=256, intermediate=32),
        dtype=Dtype.BFLOAT16,
        servers=2,
        seed=3,
        slot_bytes=1 << 15,
    )
    spread(world, 1)
    client = world.add_client(max_tokens=600)
    world.publish(client, 1)
    call = Call(world, client, np.random.default_rng(3), 600, 1)
    assert call.run() == OK
    assert call.exact()
    assert world.stats(client, 0).calls + world.stats(client, 1).calls >= 600 * 2 * 256 * 4 // (1 << 15)
    world.close()


@pytest.mark.parametrize(("bell_lanes", "rung"), [(8, 3), (1, 0)])
def test_an_answer_rings_the_lane_that_waits_or_the_last_there_is(bell_lanes: int, rung: int) -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=0, seed=2)
    page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    client = world.add_client(lanes=4)
    world.attach(client, world.add_server(), lane=3, page=page.ctypes.data, bell_lanes=bell_lanes)
    spread(world, 1)
    world.publish(client, 1)
    call = Call(world, client, np.random.default_rng(2), 2, 1)
    assert call.run() == OK and call.exact()
    assert [lane for lane in range(8) if p2p_native.load().p2p_bell_read(page.ctypes.data, lane)] == [rung]
    world.close()


def test_a_row_goes_to_a_server_once() -> None:
    world = World(shape=shape_of(top_k=4), dtype=Dtype.FLOAT32, servers=1, seed=5)
    spread(world, 1)
    client = world.add_client()
    world.publish(client, 1)
    assert Call(world, client, np.random.default_rng(5), 10, 0).run() == OK
    assert (world.stats(client, 0).rows, world.stats(client, 0).pairs) == (10, 40)
    world.close()


@pytest.mark.parametrize("seed", range(30))
def test_servers_that_die_or_freeze_change_no_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = World(shape=shape_of(), dtype=Dtype.BFLOAT16, servers=4, seed=seed, slot_bytes=2048)
    spread(world, 2)
    client = world.add_client(lanes=int(rng.integers(1, 3)))
    world.publish(client, 1)
    victim = int(rng.integers(4))
    for number in range(12):
        call = Call(world, client, rng, int(rng.integers(1, 30)), int(rng.integers(2)))
        for tick in range(100_000):
            if number == 4 and tick == 1:
                if seed % 2:
                    world.kill(victim)
                else:
                    world.servers[victim].frozen = True
            if number == 8:
                world.servers[victim].frozen = False
            if call.step() != PENDING:
                break
            world.step_servers()
            world.now_ns += 50_000
        assert call.status == OK, f"seed {seed}, call {number}"
        assert call.exact(), f"seed {seed}, call {number}"
    world.close()


def test_a_killed_server_costs_a_few_milliseconds() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=1)
    spread(world, 2)
    client = world.add_client()
    world.publish(client, 1)
    rng = np.random.default_rng(1)
    assert Call(world, client, rng, 8, 0).run() == OK
    call = Call(world, client, rng, 8, 0)
    world.kill(0)
    began_ns = world.now_ns
    assert call.run() == OK
    assert call.exact()
    assert world.now_ns - began_ns <= 10_000_000
    assert world.stats(client, 0).redispatches > 0
    world.close()


def test_a_frozen_server_is_avoided_and_its_slot_comes_back_with_the_late_reply() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=2)
    spread(world, 2)
    client = world.add_client()
    world.publish(client, 1)
    rng = np.random.default_rng(2)
    for _ in range(3):
        assert Call(world, client, rng, 8, 0).run() == OK
    world.servers[0].frozen = True
    call = Call(world, client, rng, 8, 0)
    began_ns = world.now_ns
    assert call.run() == OK
    assert call.exact()
    # Hedged after the least time: every reply so far came within the first tick.
    assert 1_000_000 <= world.now_ns - began_ns < 2_000_000
    assert world.stats(client, 0).held_slots == 1
    asked = world.stats(client, 0).calls
    for _ in range(5):
        call = Call(world, client, rng, 8, 0)
        assert call.run() == OK
        assert call.exact()
    assert world.stats(client, 0).calls == asked, "a server that owes a reply was asked again"
    world.servers[0].frozen = False
    assert world.step_servers() == 1
    for _ in range(3):
        call = Call(world, client, rng, 8, 0)
        assert call.run() == OK
        assert call.exact()
    assert world.stats(client, 0).held_slots == 0
    assert world.stats(client, 0).calls > asked
    world.close()


def test_without_a_live_replica_a_call_is_lost_at_its_deadline_and_the_next_succeeds() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=1, seed=4)
    spread(world, 1)
    client = world.add_client()
    world.publish(client, 1)
    rng = np.random.default_rng(4)
    call = Call(world, client, rng, 4, 0, deadline_ns=50_000_000)
    world.kill(0)
    began_ns = world.now_ns
    assert call.run() == LOST
    assert call.untouched()
    assert 50_000_000 <= world.now_ns - began_ns <= 51_000_000
    new = world.add_server()
    spread(world, 1, [new])
    world.attach(client, new)
    world.publish(client, 2)
    call = Call(world, client, rng, 4, 0)
    assert call.run() == OK
    assert call.exact()
    world.close()


def test_a_lost_call_says_which_tokens_it_was_lost_for() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=21)
    spread(world, 1)
    client = world.add_client()
    world.publish(client, 1)
    call = Call(world, client, np.random.default_rng(21), 12, 0, deadline_ns=50_000_000)
    world.kill(0)
    assert call.run() == LOST
    rows = np.full(64, 7, np.uint8)
    assert world.library.expert_client_missing(world.clients[client], rows.ctypes.data, 11) == 0
    assert (rows == 7).all()
    assert world.library.expert_client_missing(world.clients[client], rows.ctypes.data, 64) == 12
    needed = [any((0, int(expert)) in world.servers[0].held for expert in ids) for ids in call.ids]
    assert rows[:12].tolist() == needed and 0 < sum(needed) < 12
    world.close()


def test_routes_published_during_a_call_rescue_it() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=1, seed=6)
    spread(world, 1)
    client = world.add_client()
    world.publish(client, 1)
    call = Call(world, client, np.random.default_rng(6), 4, 0)
    world.kill(0)
    for _ in range(100):
        assert call.step() == PENDING
        world.now_ns += 100_000
    new = world.add_server()
    spread(world, 1, [new])
    world.attach(client, new)
    world.publish(client, 2, without={0})
    assert call.run() == OK
    assert call.exact()
    assert world.adopted(client) == 2
    world.close()


def test_routes_are_adopted_at_once_when_idle_and_after_the_call_when_busy() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=7)
    spread(world, 2)
    client = world.add_client()
    world.publish(client, 1)
    assert world.adopted(client) == 1
    call = Call(world, client, np.random.default_rng(7), 4, 0)
    world.publish(client, 2, without={0})
    world.library.expert_client_remove_server(world.clients[client], world.links[client, 0].index)
    assert world.adopted(client) == 1
    assert world.library.expert_client_server_idle(world.clients[client], world.links[client, 0].index) == 0
    assert call.run() == OK
    assert call.exact()
    assert world.adopted(client) == 2
    assert world.library.expert_client_server_idle(world.clients[client], world.links[client, 0].index) == 1
    world.close()


def test_an_expert_that_a_server_no_longer_holds_is_asked_of_another() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=8)
    spread(world, 2)
    client = world.add_client()
    world.publish(client, 1)
    for expert in range(8):
        world.drop(0, 0, expert)
    call = Call(world, client, np.random.default_rng(8), 8, 0)
    assert call.run() == OK
    assert call.exact()
    assert world.stats(client, 0).redispatches > 0
    world.close()


def test_a_refusal_bars_only_the_expert_that_is_not_held() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=12)
    for expert in range(8):
        world.hold(0 if expert == 0 else 1, 0, expert)
    world.hold(0, 0, 3)
    client = world.add_client()
    world.publish(client, 1)
    world.drop(0, 0, 3)
    call = Call(world, client, np.random.default_rng(12), 16, 0)
    began_ns = world.now_ns
    assert call.run() == OK
    assert call.exact()
    assert world.stats(client, 0).redispatches > 0
    assert world.now_ns - began_ns <= 10_000_000
    world.close()


def test_a_late_refusal_by_old_routes_bars_nothing_and_their_epoch_is_not_given_up_before() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=13)
    spread(world, 1, [0])
    client = world.add_client()
    world.publish(client, 1)
    rng = np.random.default_rng(13)
    for _ in range(3):
        assert Call(world, client, rng, 8, 0).run() == OK
    world.servers[0].frozen = True
    call = Call(world, client, rng, 16, 0)
    for tick in range(400):
        assert call.step() == PENDING
        world.step_servers()
        if tick == 300:
            # Expert 3 moves, make before break.
            world.hold(1, 0, 3)
            world.servers[0].held.discard((0, 3))
            world.publish(client, 2)
        assert world.adopted(client) == 1, "what is asked by routes of epoch 1 has no answer yet"
        world.now_ns += 100_000
    assert world.stats(client, 0).hedges > 0, "the new routes are in use"
    world.drop(0, 0, 3)
    world.servers[0].frozen = False
    began_ns = world.now_ns
    assert call.run() == OK
    assert call.exact()
    assert world.now_ns - began_ns <= 10_000_000
    assert world.adopted(client) == 2
    world.close()


def test_an_epoch_is_adopted_within_a_call_that_has_nothing_out_by_older_routes() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=1, seed=14)
    spread(world, 1)
    client = world.add_client()
    world.publish(client, 1)
    call = Call(world, client, np.random.default_rng(14), 4, 0)
    world.kill(0)
    world.now_ns += 10_000_000
    assert call.step() == PENDING
    world.publish(client, 2, without={0})
    assert call.step() == PENDING
    # The replacement may need the room of what epoch 2 took away.
    assert world.adopted(client) == 2
    world.close()


@pytest.mark.parametrize("way", ["request", "reply"])
def test_one_corrupt_frame_costs_a_sole_replica_one_more_try(way: str) -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=1, seed=15)
    spread(world, 1)
    client = world.add_client()
    world.publish(client, 1)
    rng = np.random.default_rng(15)
    assert Call(world, client, rng, 8, 0).run() == OK
    call = Call(world, client, rng, 8, 0)
    began_ns = world.now_ns
    if way == "request":
        world.links[client, 0].request.slot(0)[300] ^= 1
    world.step_servers()
    if way == "reply":
        world.links[client, 0].reply.slot(0)[300] ^= 1
    assert call.run() == OK
    assert call.exact()
    assert world.now_ns - began_ns <= 10_000_000
    assert world.stats(client, 0).corrupt == (way == "reply")
    for _ in range(3):
        call = Call(world, client, rng, 8, 0)
        assert call.run() == OK
        assert call.exact()
    assert world.stats(client, 0).held_slots == 0
    world.close()


def test_a_torn_reply_is_judged_once_and_its_slot_is_not_used_again_in_that_call() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=1, seed=16)
    spread(world, 1)
    client = world.add_client()
    world.publish(client, 1)
    rng = np.random.default_rng(16)
    call = Call(world, client, rng, 8, 0)
    world.step_servers()
    slot = world.links[client, 0].reply.slot(0)
    slot[300] ^= 1
    assert call.step() == PENDING
    asked = world.links[client, 0].request.slot(0).tobytes()
    slot[300] ^= 1
    for _ in range(100):
        assert call.step() == PENDING
        world.now_ns += 100_000
    assert world.links[client, 0].request.slot(0).tobytes() == asked, "the slot was used again"
    assert world.stats(client, 0).corrupt == 1
    assert call.run() == OK
    assert call.exact()
    world.close()


def test_a_server_that_understands_nothing_is_asked_until_the_deadline_with_pauses() -> None:
    world = World(shape=shape_of(experts=1, top_k=1), dtype=Dtype.FLOAT32, servers=1, seed=17)
    spread(world, 1)
    client = world.add_client()
    world.publish(client, 1)
    call = Call(world, client, np.random.default_rng(17), 4, 0, deadline_ns=500_000_000)
    while call.status == PENDING:
        for slot in range(2):
            world.links[client, 0].request.slot(slot)[300] ^= 1
        world.step_servers()
        world.now_ns += 100_000
        call.step()
    assert call.status == LOST
    assert call.untouched()
    assert 18 <= world.stats(client, 0).calls <= 20
    world.close()


@pytest.mark.parametrize("owed_for_ms", [5, 60])
def test_rows_behind_the_slots_of_a_late_server_go_to_a_new_replica(owed_for_ms: int) -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=18, slot_bytes=1024)
    spread(world, 1, [0])
    client = world.add_client()
    world.publish(client, 1)
    rng = np.random.default_rng(18)
    for _ in range(3):
        assert Call(world, client, rng, 8, 0).run() == OK
    world.servers[0].frozen = True
    assert Call(world, client, rng, 20, 0, deadline_ns=owed_for_ms * 1_000_000).run() == LOST
    call = Call(world, client, rng, 4, 0)
    for _ in range(500):
        assert call.step() == PENDING
        world.now_ns += 100_000
    assert world.stats(client, 0).held_slots == 2
    spread(world, 1, [1])
    world.publish(client, 2)
    began_ns = world.now_ns
    assert call.run() == OK
    assert call.exact()
    assert world.now_ns - began_ns <= 10_000_000
    world.close()


def test_a_call_without_memory_fails_and_leaves_nothing_to_the_next() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=19)
    spread(world, 1)
    client = world.add_client()
    world.publish(client, 1)
    rng = np.random.default_rng(19)
    call = Call(world, client, rng, 16, 0, begun_under=out_of_memory())
    assert call.status == MEMORY
    assert call.untouched()
    call = Call(world, client, rng, 16, 0)
    assert call.run() == OK
    assert call.exact()
    assert world.stats(client, 0).pairs + world.stats(client, 1).pairs == 32
    world.close()


def test_a_call_waits_for_lost_experts_as_long_as_its_caller_has_patience_and_tells_whose_rows_wait() -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=31)
    spread(world, 2)
    client = world.add_client()
    handle, rng = world.clients[client], np.random.default_rng(31)
    for server in range(2):
        world.drop(server, 0, 3)
    world.publish(client, 1)
    world.library.expert_client_set_patience(handle, 10**8)
    began_ns = world.now_ns
    call = Call(world, client, rng, 16, 0, deadline_ns=10**10)
    assert call.run() == LOST
    assert 10**8 <= world.now_ns - began_ns < 2 * 10**8, "it waited on, or not at all"
    rows = np.zeros(16, np.uint8)
    assert world.library.expert_client_missing(handle, rows.ctypes.data, 16) == 16
    assert (rows == (call.ids == 3).any(axis=1)).all(), "rows are blamed that need nothing that is lost"
    for server in range(2):
        world.hold(server, 0, 3)
    call = Call(world, client, rng, 16, 0, deadline_ns=10**10)
    assert call.status == PENDING
    world.publish(client, 2)
    assert call.run() == OK
    assert call.exact()
    world.close()


def test_a_server_tells_which_expert_gave_rows_that_are_not_finite() -> None:
    """Both map the same damaged weights and agree on every bit: only their digests can tell."""
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=29)
    spread(world, 2)
    world.weights.down[0, 3].view(np.uint8)[:] = 0xFF
    client = world.add_client()
    world.publish(client, 1)
    call = Call(world, client, np.random.default_rng(29), 40, 0)
    assert call.run() == OK
    assert np.isnan(call.out).any()
    for server in world.servers:
        assert world.library.expert_server_take_doubtful(server.handle, 0) == 3
        assert world.library.expert_server_take_doubtful(server.handle, 0) == -1
    world.close()


@pytest.mark.parametrize("seed", range(20))
def test_two_clients_share_servers_and_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = World(shape=shape_of(), dtype=Dtype.BFLOAT16, servers=2, seed=seed)
    spread(world, 1)
    clients = [world.add_client(), world.add_client()]
    for client in clients:
        world.publish(client, 1)
    for _ in range(5):
        calls = [Call(world, client, rng, int(rng.integers(1, 20)), int(rng.integers(2))) for client in clients]
        while any(call.status == PENDING for call in calls):
            for call in calls:
                if call.status == PENDING and rng.random() < 0.7:
                    call.step()
            if rng.random() < 0.5:
                world.step_servers()
            world.now_ns += 100_000
        assert all(call.status == OK and call.exact() for call in calls), f"seed {seed}"
    world.close()


@pytest.mark.parametrize("where", range(128 + 64 + 64 + 256))
def test_a_request_with_any_byte_flipped_is_refused_and_asked_elsewhere(where: int) -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=9)
    spread(world, 2)
    client = world.add_client()
    world.publish(client, 1)
    rng = np.random.default_rng(9)
    call = Call(world, client, rng, 4, 0)
    link = world.links[client, 0]
    link.request.slot(0)[where] ^= 1 << (where % 8)
    world.step_servers()
    link.request.slot(0)[where] ^= 1 << (where % 8)
    assert call.run() == OK, f"byte {where}"
    assert call.exact(), f"byte {where}"
    for _ in range(4):
        call = Call(world, client, rng, 4, 0)
        assert call.run() == OK, f"byte {where}"
        assert call.exact(), f"byte {where}"
    world.close()


@pytest.mark.parametrize("where", range(128 + 64 + 128))
def test_a_reply_with_any_byte_flipped_is_never_used(where: int) -> None:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=2, seed=10)
    spread(world, 2)
    client = world.add_client()
    world.publish(client, 1)
    # The first reply tells the client how soon the next is due.
    assert Call(world, client, np.random.default_rng(10), 4, 0).run() == OK
    call = Call(world, client, np.random.default_rng(10), 4, 0)
    world.step_servers()
    slot = world.links[client, 0].reply.slot(0)
    slot[where] ^= 1 << (where % 8)
    assert call.run() == OK, f"byte {where}"
    assert call.exact(), f"byte {where}"
    # The rest of the signal line is not part of the frame.
    if where >= 64:
        assert world.stats(client, 0).corrupt > 0, f"byte {where}"
    slot[where] ^= 1 << (where % 8)
    for _ in range(4):
        call = Call(world, client, np.random.default_rng(10), 4, 0)
        assert call.run() == OK, f"byte {where}"
        assert call.exact(), f"byte {where}"
    assert world.stats(client, 0).held_slots == 0
    world.close()


@pytest.mark.parametrize(
    ("weights", "slot_bytes"),
    [((1, 3), 1 << 13), ((1, 1), 1 << 13), ((1000, 250), 1 << 13), ((1, 1), 1 << 12)],
)
def test_clients_that_want_more_than_a_batch_holds_have_rows_by_their_weights(
    weights: tuple[int, int], slot_bytes: int
) -> None:
    """However large the requests of each, of which the last may have smaller slots. And bits as alone."""
    seed = time.time_ns()
    rng = np.random.default_rng(seed)
    shape = shape_of(hidden=32, intermediate=8, experts=4, top_k=2)
    world = World(shape=shape, dtype=Dtype.FLOAT32, servers=1, seed=seed, slots=8, slot_bytes=1 << 13)
    spread(world, 1)
    clients = [world.add_client(max_tokens=4000, weight=weights[0])]
    world.slot_bytes = slot_bytes
    clients.append(world.add_client(max_tokens=4000, weight=weights[1]))
    for client in clients:
        world.publish(client, 1)
    # Each has far more to ask than is computed here, and fills its slots before each batch.
    calls = [Call(world, client, rng, 4000, 0, deadline_ns=10**15) for client in clients]
    asked = [[0, 0]]
    while max(asked[-1]) < 7000:
        for call in calls * 8:
            assert call.step() == PENDING
        world.step_servers()
        world.now_ns += 1000
        asked.append([world.stats(client, 0).pairs for client in clients])
    # Once its slots are full, a client asks for as much as it is given.
    had = [last - first for first, last in zip(asked[2], asked[-1], strict=True)]
    assert had[1] / had[0] == pytest.approx(weights[1] / weights[0], rel=0.05), f"{had}, seed {seed}"
    for call in calls:
        while call.step() == PENDING:
            world.step_servers()
    assert [call.status for call in calls] == [OK, OK] and all(call.exact() for call in calls), f"seed {seed}"
    world.close()


@pytest.mark.parametrize(("weights", "requests"), [((1, 1), 2), ((1, 4), 5), ((2, 1), 3)])
def test_a_batch_has_a_request_of_each_client_and_more_of_those_that_weigh_more(
    weights: tuple[int, int], requests: int
) -> None:
    """However many wait and fit, so that none delays another by more than its part."""
    rng = np.random.default_rng(0)
    shape = shape_of(hidden=32, intermediate=8, experts=4, top_k=2)
    world = World(shape=shape, dtype=Dtype.FLOAT32, servers=1, seed=0, slots=8, slot_bytes=1 << 13)
    spread(world, 1)
    clients = [world.add_client(max_tokens=4000, weight=weight) for weight in weights]
    for client in clients:
        world.publish(client, 1)
    calls = [Call(world, client, rng, 4000, 0) for client in clients]
    for _ in range(5):
        for call in calls * 8:
            call.step()
        assert world.step_servers() == requests
    world.close()


def test_who_was_alone_before_and_who_comes_have_their_parts_at_once() -> None:
    rng = np.random.default_rng(0)
    shape = shape_of(hidden=32, intermediate=8, experts=4, top_k=2)
    world = World(shape=shape, dtype=Dtype.FLOAT32, servers=1, seed=0, slots=8, slot_bytes=1 << 13)
    spread(world, 1)
    first, second = world.add_client(max_tokens=4000), world.add_client(max_tokens=4000)
    for client in (first, second):
        world.publish(client, 1)
    assert Call(world, first, rng, 4000, 0).run() == OK
    before = world.stats(first, 0).pairs
    calls = [Call(world, client, rng, 4000, 0) for client in (first, second)]
    for _ in range(40):
        for call in calls * 8:
            assert call.step() == PENDING
        world.step_servers()
    had = world.stats(first, 0).pairs - before, world.stats(second, 0).pairs
    assert had[0] == pytest.approx(had[1], rel=0.1) and had[0], had
    world.close()


def test_what_a_client_did_not_ask_for_is_not_made_up_for() -> None:
    """Who comes back after a while has its part from then on; and who is alone is not held back by its weight."""
    rng = np.random.default_rng(0)
    shape = shape_of(hidden=32, intermediate=8, experts=4, top_k=2)
    world = World(shape=shape, dtype=Dtype.FLOAT32, servers=1, seed=0, slots=8, slot_bytes=1 << 14)
    spread(world, 1)
    light, heavy = world.add_client(max_tokens=400), world.add_client(max_tokens=400, weight=1000)
    for client in (light, heavy):
        world.publish(client, 1)
    batches = 0
    for _ in range(20):
        alone = Call(world, light, rng, 400, 0)
        while alone.step() == PENDING:
            batches += world.step_servers() > 0
    assert batches < 20 * 5, "800 pairs are two batches"
    late, first = Call(world, light, rng, 400, 0), Call(world, heavy, rng, 400, 0)
    for call in (late, first):
        call.step()
    world.step_servers()
    for call in (late, first):
        call.step()
    had = [world.stats(client, 0).pairs for client in (light, heavy)]
    assert 0 < had[0] - 20 * 800 <= had[1], had
    world.close()
