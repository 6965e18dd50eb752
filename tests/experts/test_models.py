"""Promises of a server that has several models: each is served as if it were alone, but for time, which is shared."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from experts import native
from experts.accounts import server_totals
from experts.backend import ServerCounters
from experts.cpu import CpuBackend
from experts.model import CHOICES, Dtype, ExpertShape
from experts.proto import experts_pb2 as pb
from experts.server import ExpertServer, HeldModel, ServerClosed
from experts.transfer import Refused
from experts.wire import VERSION, Status, WireShape
from p2p import native as p2p_native
from p2p.frame import Header
from p2p.local import LocalPeer, ShmEndpoint
from p2p.window import WindowLayout
from tests.experts.steps import ARGUMENT, OK, PENDING, Call, Weights, World, shape_of, sizes_of
from tests.experts.wire_codec import PAIR, Request, encode_request
from tests.p2p.frame_reference import open_frame, seal_frame
from tests.sim.mutants import Mutant

FULL, BUSY = -3, -5
FIRST, SECOND = "ab" * 32, "cd" * 32
LAYOUT = WindowLayout(slots=2, payload_bytes=4096)
NATIVE = "experts/native/server.cpp"


def drawn_shape(rng: np.random.Generator) -> ExpertShape:
    """With rows, tiles and strides of any width."""
    return shape_of(
        layers=int(rng.integers(1, 4)),
        experts=int(rng.integers(4, 9)),
        hidden=int(rng.integers(20, 200)),
        intermediate=int(rng.integers(20, 160)),
        top_k=int(rng.integers(1, 5)),
    )


def hold_all(world: World) -> None:
    """On every server."""
    for server, layer, expert in itertools.product(
        range(len(world.servers)), range(world.shape.layers), range(world.shape.experts)
    ):
        world.hold(server, layer, expert)


def client_of(world: World, **more: Any) -> int:
    """One that knows every server to hold everything, which they do."""
    hold_all(world)
    client = world.add_client(**more)
    world.publish(client, 1)
    return client


def together(calls: list[Call], serve: Callable[[], object]) -> None:
    """Until all of them have ended."""
    for _ in range(10_000):
        for call in calls:
            if call.status == PENDING:
                call.step()
                call.world.now_ns += 10_000
        if all(call.status != PENDING for call in calls):
            return
        serve()
    raise AssertionError("calls do not end")


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("dtype", CHOICES)
def test_rows_of_two_models_in_one_batch_have_the_bits_that_they_have_alone(dtype: Dtype, lanes: int) -> None:
    seed = time.time_ns()
    rng = np.random.default_rng(seed)
    for shapes in ([drawn_shape(rng), drawn_shape(rng)], [drawn_shape(rng)] * 2):
        world = World(shape=shapes[0], dtype=dtype, servers=1, seed=seed, lanes=lanes)
        models = [world, world.beside(shapes[1])]
        for model in models:
            client_of(model)
        serve = world.run_servers if lanes > 1 else world.step_servers
        for turn in range(6):
            # Few enough at first that they are one batch whichever is dear.
            rows = rng.integers(1, 24 if turn else 2, 2)
            layer = int(rng.integers(min(shape.layers for shape in shapes)))
            draws = [int(rng.integers(1 << 32)) for _ in models]
            calls = [
                Call(model, 0, np.random.default_rng(draw), int(n), layer, deadline_ns=10**15)
                for model, draw, n in zip(models, draws, rows, strict=True)
            ]
            if lanes == 1 and not turn:
                assert world.step_servers() == 2, "the requests of both make one batch"
            together(calls, serve)
            for model, call, draw, n in zip(models, calls, draws, rows, strict=True):
                assert call.status == OK and call.exact(), f"model {model.model}, turn {turn}, seed {seed}"
                alone = World(shape=model.shape, dtype=dtype, servers=1, seed=model.seed)
                client_of(alone)
                same = Call(alone, 0, np.random.default_rng(draw), int(n), layer)
                assert same.run() == OK and same.out.tobytes() == call.out.tobytes(), f"seed {seed}"
                alone.close()
        world.close()


def test_sixteen_models_share_batches() -> None:
    seed = time.time_ns()
    rng = np.random.default_rng(seed)
    world = World(shape=drawn_shape(rng), dtype=Dtype.BFLOAT16, servers=1, seed=seed)
    models = [world, *(world.beside(drawn_shape(rng)) for _ in range(15))]
    assert [model.model for model in models] == list(range(16))
    server, sizes = world.servers[0].handle, sizes_of(world.shape)
    assert world.library.expert_server_add_model(server, *sizes, world.dtype, 99, None) == FULL
    for model in models:
        client_of(model)
    for _ in range(3):
        calls = [Call(model, 0, rng, int(rng.integers(1, 9)), 0) for model in models]
        together(calls, world.step_servers)
        assert all(call.status == OK and call.exact() for call in calls), f"seed {seed}"
    world.close()


def answer_to(world: World, payload: bytes, sequence: int) -> int:
    """The status that a client's server gives a request of these bytes."""
    link, server = world.links[0, 0], world.servers[0]
    header = Header(incarnation=server.incarnation, sequence=sequence, length=len(payload), sender=1000)
    memory = link.request.slot(0)
    seal_frame(memory.data, header, payload)
    p2p_native.load().p2p_signal_store(memory.ctypes.data, sequence)
    assert world.step_servers() == 1
    reply = open_frame(link.reply.slot(0).data, world.slot_bytes, 1000, server.incarnation, sequence)
    return int.from_bytes(reply.payload[42:44], "little")


def test_a_request_is_judged_by_the_model_of_whom_it_comes_from() -> None:
    seed = time.time_ns()
    rng = np.random.default_rng(seed)
    first, second = drawn_shape(rng), drawn_shape(rng)
    second = replace(second, hidden=first.hidden + 1)
    world = World(shape=first, dtype=Dtype.FLOAT32, servers=1, seed=seed)
    models = [world, world.beside(second)]
    for model in models:
        client_of(model)
    sequence = itertools.count(1)
    for own, other in (models, models[::-1]):
        for shape, model_hash in itertools.product((own, other), (own.model_hash, other.model_hash)):
            wire = WireShape(shape=shape.shape, dtype=own.dtype, model_hash=model_hash)
            rows = rng.standard_normal((2, wire.shape.hidden)).astype(np.float32)
            asked = Request(layer=0, rows=rows, pairs=np.zeros(1, PAIR))
            found = answer_to(own, encode_request(wire, asked), next(sequence))
            right = shape is own and model_hash == own.model_hash
            assert found == (Status.OK if right else Status.INVALID), f"seed {seed}"
    world.close()


def remove(world: World, model: int) -> int:
    return world.library.expert_server_remove_model(world.servers[0].handle, model)


def test_a_model_goes_when_nobody_asks_for_it_and_nothing_of_it_is_held_and_leaves_nothing() -> None:
    seed = time.time_ns()
    rng = np.random.default_rng(seed)
    world = World(shape=drawn_shape(rng), dtype=Dtype.FLOAT32, servers=1, seed=seed)
    other = world.beside(drawn_shape(rng))
    handle, gone = world.servers[0].handle, other.model
    client_of(world)
    client_of(other)
    assert Call(other, 0, rng, 3, 0).run() == OK
    assert [remove(world, model) for model in (0, gone, gone + 1, 16, 2**32 - 1)] == [
        ARGUMENT, BUSY, ARGUMENT, ARGUMENT, ARGUMENT
    ]  # fmt: skip
    held = sorted(other.servers[0].held)
    for layer, expert in held[1:]:
        other.drop(0, layer, expert)
    world.library.expert_server_remove_client(handle, other.links[0, 0].place)
    assert remove(world, gone) == BUSY, "an expert of it is held"
    other.drop(0, *held[0])
    other.add_client()
    assert remove(world, gone) == BUSY, "a client asks for it"
    world.library.expert_server_remove_client(handle, other.links[1, 0].place)
    assert remove(world, gone) == OK
    assert remove(world, gone) == ARGUMENT
    weights = world.weights.gate_up[0, 0].ctypes.data
    assert world.library.expert_server_set_expert(handle, gone, 0, 0, weights, weights) == ARGUMENT
    link = world.links[0, 0]
    theirs = native.ClientLink(
        rx=link.request.address, rx_bytes=link.request.nbytes, tx=link.reply.address, tx_bytes=link.reply.nbytes,
        client_incarnation=1000, client_lanes=1, bell_lanes=1, weight=1, slots=world.slots,
        slot_bytes=world.slot_bytes, model=gone,
    )  # fmt: skip
    assert world.library.expert_server_add_client(handle, theirs) == ARGUMENT
    call = Call(world, 0, rng, 3, 0)
    assert call.run() == OK and call.exact(), f"the first is served as before, seed {seed}"
    # Who comes next has its number, and none of what it had.
    next_one = world.beside(drawn_shape(rng))
    assert next_one.model == gone
    client_of(next_one)
    call = Call(next_one, 0, rng, 3, 0)
    assert call.run() == OK and call.exact(), f"seed {seed}"
    world.close()


def test_counters_of_a_server_are_of_all_its_models_and_comparable() -> None:
    seed = time.time_ns()
    rng = np.random.default_rng(seed)
    world = World(shape=drawn_shape(rng), dtype=Dtype.BFLOAT16, servers=1, seed=seed)
    models = [world, world.beside(drawn_shape(rng))]
    for model in models:
        client_of(model)
    work = 0
    for model in models:
        before = native.values_of(world.counters(0))
        together([Call(model, 0, rng, int(rng.integers(1, 9)), 0)], world.step_servers)
        now = native.values_of(world.counters(0))
        part = {word: now[word] - before[word] for word in now}
        hidden, stats = model.shape.hidden, model.stats(0, 0)
        assert (part["rows"], part["pairs"], part["requests"]) == (stats.rows, stats.pairs, stats.calls)
        assert part["received_bytes"] == stats.rows * hidden * 2, f"seed {seed}"
        assert part["sent_bytes"] == stats.pairs * hidden * 4, f"seed {seed}"
        work += -(-hidden * model.shape.intermediate // 64) * (part["pairs"] + 5 * part["experts"])
        assert now["work"] == work and part["batches"] == 1, f"seed {seed}"
    # In one batch they are counted as in two.
    before = native.values_of(world.counters(0))
    pairs = sum(model.stats(0, 0).pairs for model in models)
    together([Call(model, 0, rng, int(rng.integers(1, 9)), 0) for model in models], world.step_servers)
    now = native.values_of(world.counters(0))
    assert now["batches"] - before["batches"] == 1 and now["busy_ns"] > before["busy_ns"], f"seed {seed}"
    assert now["pairs"] - before["pairs"] == sum(model.stats(0, 0).pairs for model in models) - pairs
    totals = server_totals(ServerCounters(**now)).counted
    assert [totals[word] for word in ("received_bytes", "sent_bytes")] == [
        now[word] for word in ("received_bytes", "sent_bytes")
    ]
    world.close()


def test_doubts_are_told_of_the_model_whose_rows_were_not_finite() -> None:
    seed = time.time_ns()
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=1, seed=seed)
    other = world.beside(shape_of(experts=6, hidden=70))
    other.weights.down[0, 3].view(np.uint8)[:] = 0xFF
    for model in (world, other):
        client_of(model)
    calls = [Call(model, 0, np.random.default_rng(seed), 40, 0) for model in (world, other)]
    together(calls, world.step_servers)
    assert calls[0].exact() and np.isnan(calls[1].out).any(), f"seed {seed}"
    take = world.library.expert_server_take_doubtful
    assert [take(world.servers[0].handle, model) for model in (0, 1, 1, 2, 99)] == [-1, 3, -1, -1, -1]
    world.close()


def asking(cheap_first: bool, ratio: int, seed: int, library: Any = None) -> dict[str, World]:
    """Two models of one server by their names; a pair of the dear one costs `ratio` times as much."""
    cheap, dear = (shape_of(hidden=32, intermediate=size, experts=4) for size in (8, 8 * ratio))
    first, second = (cheap, dear) if cheap_first else (dear, cheap)
    world = World(shape=first, dtype=Dtype.FLOAT32, servers=1, seed=seed, slots=8, slot_bytes=1 << 13, library=library)
    both = [world, world.beside(second)]
    return dict(zip(("cheap", "dear") if cheap_first else ("dear", "cheap"), both, strict=True))


def pairs_had(models: dict[str, World], rng: np.random.Generator) -> dict[str, int]:
    """Pairs computed of each model while clients of both want more than there is time for."""
    calls = []
    for model in models.values():
        client_of(model, max_tokens=6000)
        calls.append(Call(model, 0, rng, 6000, 0, deadline_ns=10**15))
    seen: list[list[int]] = []
    while not seen or max(seen[-1]) < 10_000:
        for call in calls * 8:
            assert call.step() == PENDING
        calls[0].world.step_servers()
        seen.append([model.stats(0, 0).pairs for model in models.values()])
    had = [last - first for first, last in zip(seen[2], seen[-1], strict=True)]
    return dict(zip(models, had, strict=True))


@pytest.mark.parametrize("cheap_first", [True, False])
def test_clients_of_two_models_share_time_and_not_pairs(cheap_first: bool) -> None:
    seed = time.time_ns()
    models = asking(cheap_first, 4, seed)
    had = pairs_had(models, np.random.default_rng(seed))
    assert had["cheap"] / had["dear"] == pytest.approx(4, rel=0.1), f"{had}, seed {seed}"
    next(world for world in models.values() if world.model == 0).close()


def requests_of_a_batch(models: dict[str, World], rng: np.random.Generator) -> list[int]:
    """What a batch takes of a client of the dear model alone; and where one of the cheap model, which weighs a
    thousandth, asks beside it.
    """
    client_of(models["cheap"])
    client_of(models["dear"], max_tokens=4000, weight=1000)
    much = Call(models["dear"], 0, rng, 4000, 0, deadline_ns=10**15)
    taken = []
    for beside in (False, True):
        if beside:
            Call(models["cheap"], 0, rng, 20, 0, deadline_ns=10**15)
        for _ in range(8):
            much.step()
        taken.append(models["dear"].step_servers())
    return taken


@pytest.mark.parametrize("cheap_first", [True, False])
def test_a_batch_has_as_much_work_as_the_cheapest_model_that_asks_may_have(cheap_first: bool) -> None:
    """So a prefill of a dear model delays another's decoding no longer than one of that other's own."""
    seed = time.time_ns()
    models = asking(cheap_first, 16, seed)
    alone, beside = requests_of_a_batch(models, np.random.default_rng(seed))
    assert alone == 8, f"all of its slots where nobody else asks, seed {seed}"
    assert beside <= 2, f"seed {seed}"
    next(world for world in models.values() if world.model == 0).close()


# ---- the server's Python half


class Meddling(ShmEndpoint):
    """An endpoint during whose connecting something else happens."""

    meanwhile: Callable[[], object] | None = None

    def connect(self, descriptor: bytes, timeout_s: float = 5.0) -> LocalPeer:
        peer = super().connect(descriptor, timeout_s)
        if self.meanwhile:
            self.meanwhile()
        return peer


@pytest.fixture
def ends() -> Iterator[tuple[ExpertServer, Meddling, ShmEndpoint]]:
    endpoint, client = Meddling("expert/5", 5), ShmEndpoint("attention/9", 9)
    server = ExpertServer(endpoint=endpoint, shape=shape_of(), dtype=Dtype.FLOAT32, model_hash=FIRST, config=b"1")
    yield server, endpoint, client
    server.close()
    endpoint.close()
    client.close()


def opened(server: ExpertServer) -> HeldModel:
    shape = shape_of(layers=3, experts=5, hidden=33, intermediate=17)
    return server.open_model(shape=shape, dtype=Dtype.FLOAT32, model_hash=SECOND, config=b"2")


def attach(server: ExpertServer, client: ShmEndpoint, model: HeldModel, model_hash: str) -> pb.AttachReply:
    window, shape = client.export_window(LAYOUT.nbytes), model.shape
    CpuBackend().prepare(window, LAYOUT)
    request = pb.AttachRequest(
        wire_version=VERSION, name="attention/9", incarnation=9, server_incarnation=5, model_hash=model_hash,
        layers=shape.layers, experts=shape.experts, hidden=shape.hidden, top_k=shape.top_k, dtype=model.dtype,
        reply_descriptor=window.descriptor, lanes=1, slots=LAYOUT.slots, slot_bytes=LAYOUT.payload_bytes,
    )  # fmt: skip
    return server.attach(request)


def test_a_client_attaches_to_a_model_by_its_hash_and_by_that_ones_shape(
    ends: tuple[ExpertServer, Meddling, ShmEndpoint],
) -> None:
    server, _, client = ends
    second = opened(server)
    for model, model_hash, said in (
        (server.first, SECOND, r"layers 2 \(here 3\), experts 8 \(here 5\), hidden 48 \(here 33\)"),
        (second, FIRST, r"layers 3 \(here 2\)"),
        (second, "ef" * 32, rf"model hash {'ef' * 32} \(here {FIRST} or {SECOND}\)"),
    ):
        with pytest.raises(Refused, match=said) as refusal:
            attach(server, client, model, model_hash)
        assert refusal.value.code is grpc.StatusCode.FAILED_PRECONDITION
    for model in (server.first, second):
        assert attach(server, client, model, model.model_hash).server_incarnation == 5


def test_a_model_describes_itself_where_it_is_asked_for(
    ends: tuple[ExpertServer, Meddling, ShmEndpoint],
) -> None:
    server, _, _ = ends
    opened(server)
    for asked, config, named in (("", b"1", FIRST), (FIRST, b"1", FIRST), (SECOND, b"2", SECOND)):
        found = server.describe(pb.DescribeRequest(server_incarnation=5, model_hash=asked))
        assert (found.config, found.model_hash) == (config, named)
    with pytest.raises(Refused, match=f"model ef is asked for; here is {FIRST} and {SECOND}.") as refusal:
        server.describe(pb.DescribeRequest(server_incarnation=5, model_hash="ef"))
    assert refusal.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_model_is_closed_when_it_has_no_clients_and_no_experts(
    ends: tuple[ExpertServer, Meddling, ShmEndpoint],
) -> None:
    server, endpoint, client = ends
    second = opened(server)
    with pytest.raises(ValueError, match=f"model {SECOND[:16]} is open in expert/5 already"):
        opened(server)
    weights = Weights(second.shape, second.dtype, 1)
    second.set_expert(2, 4, weights.gate_up[2, 4], weights.down[2, 4])
    with pytest.raises(ValueError, match="expert 5 of layer 0 is outside"):
        second.set_expert(0, 5, weights.gate_up[2, 4], weights.down[2, 4])
    with pytest.raises(ValueError, match="model 1 has clients or experts"):
        server.close_model(SECOND)
    second.clear_expert(2, 4)
    attach(server, client, second, SECOND)
    with pytest.raises(ValueError, match="model 1 has clients or experts"):
        server.close_model(SECOND)
    attach(server, client, server.first, FIRST)  # in place of that
    with pytest.raises(ValueError, match="but of the first, which stays"):
        server.close_model(FIRST)
    endpoint.meanwhile = lambda: server.close_model(SECOND)
    with pytest.raises(Refused, match=f"model {SECOND[:16]} was closed here") as refusal:
        attach(server, client, second, SECOND)
    assert refusal.value.code is grpc.StatusCode.UNAVAILABLE
    endpoint.meanwhile = None
    assert server.clients == ("attention/9",), "who was attached to the first stays so"
    with pytest.raises(ValueError, match=f"model {SECOND[:16]} is not open in expert/5"):
        server.close_model(SECOND)
    with pytest.raises(ServerClosed, match=f"model {SECOND[:16]} was closed"):
        second.set_expert(2, 4, weights.gate_up[2, 4], weights.down[2, 4])
    second.clear_expert(2, 4)
    assert second.doubtful() is None
    again = opened(server)
    again.set_expert(2, 4, weights.gate_up[2, 4], weights.down[2, 4])
    server.close()
    server.close_model(SECOND)
    with pytest.raises(ServerClosed):
        again.set_expert(2, 4, weights.gate_up[2, 4], weights.down[2, 4])
    with pytest.raises(ServerClosed, match="expert/5 was closed; no model can be opened"):
        opened(server)


def test_a_server_has_room_for_sixteen_models(ends: tuple[ExpertServer, Meddling, ShmEndpoint]) -> None:
    server, _, _ = ends
    for number in range(15):
        server.open_model(shape=shape_of(), dtype=Dtype.FLOAT32, model_hash=f"{number:016x}", config=b"")
    with pytest.raises(ValueError, match="has no place beside 16 models"):
        opened(server)


# ---- planted faults

JUDGED = Mutant(source=NATIVE, says="request_valid(job.model->shape,", instead="request_valid(server->models[0].shape,")
MIXED = Mutant(source=NATIVE, says="uint64_t(&model - server->models) << 56 | ", instead="")
ROWS = Mutant(
    source=NATIVE,
    says="const uint64_t row_bytes = model.shape.row_bytes();",
    instead="const uint64_t row_bytes = server->models[0].shape.row_bytes();",
)
ACTIVATIONS = Mutant(
    source=NATIVE,
    says="act += count * model.act_stride() * model.element();",
    instead="act += count * server->models[0].act_stride() * model.element();",
)
REPLIES = Mutant(
    source=NATIVE,
    says="const WireShape& shape = job.model->shape;",
    instead="const WireShape& shape = server->models[0].shape;",
)
ASKED = Mutant(source=NATIVE, says="return client.attached && client.link.model == index;", instead="return false;")
HELD = Mutant(source=NATIVE, says="{ return expert.gate_up; }", instead="{ return !&expert; }")
FIRST_GOES = Mutant(source=NATIVE, says="if (!index || !is_open", instead="if (!is_open")
PAIRS = Mutant(
    source=NATIVE,
    says="const uint64_t cost = model_of(server, client).cost;",
    instead="const uint64_t cost = PAIR_COST;",
)
BATCHES = Mutant(source=NATIVE, says="BATCH_PAIRS * cheapest", instead="BATCH_PAIRS * PAIR_COST")
DOUBTS = Mutant(
    source=NATIVE, says="m.any_doubtful.store(true);", instead="server->models[0].any_doubtful.store(true);"
)


def served_right(library: Any, shapes: list[ExpertShape], lanes: int = 1) -> bool:
    """Whether both of two models that share a batch get what they get alone."""
    seed = time.time_ns()
    world = World(shape=shapes[0], dtype=Dtype.FLOAT32, servers=1, seed=seed, lanes=lanes, library=library)
    models = [world, world.beside(shapes[1])]
    for model in models:
        client_of(model)
    calls = [Call(model, 0, np.random.default_rng(seed), 12, 0) for model in models]
    for _ in range(50):
        world.run_servers() if lanes > 1 else world.step_servers()
        for call in calls:
            if call.status == PENDING:
                call.step()
    right = all(call.status == OK and call.exact() for call in calls)
    world.close()
    return right


def in_two_shapes(library: Any, lanes: int = 1) -> bool:
    shapes = [shape_of(hidden=20, intermediate=60), shape_of(hidden=90, intermediate=130)]
    return served_right(library, shapes, lanes)


def by_two_lanes(library: Any) -> bool:
    return in_two_shapes(library, 2)


def in_one_shape(library: Any) -> bool:
    return served_right(library, [shape_of()] * 2)


def refused_where_busy(library: Any) -> bool:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=1, seed=1, library=library)
    held, asked = world.beside(shape_of()), world.beside(shape_of())
    held.hold(0, 0, 0)
    asked.add_client()
    right = [remove(world, model) for model in (0, 1, 2)] == [ARGUMENT, BUSY, BUSY]
    world.close()
    return right


def shared_by_cost(library: Any) -> bool:
    models = asking(True, 4, 1, library)
    had = pairs_had(models, np.random.default_rng(1))
    models["cheap"].close()
    return had["cheap"] / had["dear"] == pytest.approx(4, rel=0.1)


def bounded_by_cost(library: Any) -> bool:
    models = asking(False, 16, 1, library)
    taken = requests_of_a_batch(models, np.random.default_rng(1))
    models["dear"].close()
    return taken[0] == 8 and taken[1] <= 2


def doubted(library: Any) -> bool:
    world = World(shape=shape_of(), dtype=Dtype.FLOAT32, servers=1, seed=1, library=library)
    other = world.beside(shape_of())
    other.weights.down[0, 3].view(np.uint8)[:] = 0xFF
    client_of(other)
    assert Call(other, 0, np.random.default_rng(1), 40, 0).run() == OK
    found = world.library.expert_server_take_doubtful(world.servers[0].handle, 1)
    world.close()
    return found == 3


@pytest.mark.full(seconds=60)
@pytest.mark.parametrize(
    ("mutant", "kept"),
    [
        (JUDGED, in_two_shapes), (MIXED, in_one_shape), (ROWS, in_two_shapes), (ACTIVATIONS, by_two_lanes),
        (REPLIES, in_two_shapes), (ASKED, refused_where_busy), (HELD, refused_where_busy),
        (FIRST_GOES, refused_where_busy), (PAIRS, shared_by_cost), (BATCHES, bounded_by_cost), (DOUBTS, doubted),
    ],
    ids=[
        "judged by the first", "mixed", "rows of the first", "activations of the first", "replies of the first",
        "goes with a client", "goes with an expert", "the first goes", "pairs alike", "batches of pairs",
        "doubts of the first",
    ],
)  # fmt: skip
def test_without_its_care_a_server_of_several_models_fails(
    mutant: Mutant, kept: Callable[[Any], bool], tmp_path: Path
) -> None:
    assert kept(None), "the promise holds without the mutant"
    assert not kept(mutant.library(tmp_path)), "the mutant survives"
