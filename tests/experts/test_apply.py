"""Calls of callers with arrays of their own: any number of rows, either type, pairs without an expert."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from experts.model import CHOICES, Dtype
from tests.experts.steps import (
    ARGUMENT,
    LOST,
    MEMORY,
    NO_EXPERT,
    OK,
    Call,
    World,
    out_of_memory,
    shape_of,
    to_bits,
)
from tests.sim.mutants import Mutant

TOKENS = 5  # of one call
CANARY = 7.0


def made(dtype: Dtype, servers: int = 2, replicas: int = 1, lanes: int = 1, **more: Any) -> World:
    """Servers that hold every expert, and a client of them."""
    world = World(shape=shape_of(top_k=3), dtype=dtype, servers=servers, seed=3, **more)
    for layer in range(world.shape.layers):
        for expert in range(world.shape.experts):
            for copy in range(replicas):
                world.hold((expert + copy) % servers, layer, expert)
    world.publish(world.add_client(max_tokens=TOKENS, lanes=lanes), 1)
    return world


@contextmanager
def running(world: World) -> Iterator[None]:
    """The servers, on a thread of their own and by the machine's clock."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            world.now_ns = time.monotonic_ns()
            world.step_servers()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def apply(
    world: World, rows: NDArray[Any], ids: NDArray[Any], weights: NDArray[np.float32], out: NDArray[Any],
    *, layer: int = 0, wait_s: float = 20.0,
) -> int:  # fmt: skip
    """Its code. float32, or bfloat16 as uint16."""
    return world.library.expert_apply(
        world.clients[0], layer, rows.ctypes.data, int(rows.itemsize == 2), len(rows), ids.ctypes.data, ids.itemsize,
        weights.ctypes.data, out.ctypes.data, int(out.itemsize == 2), int(wait_s * 1e9),
    )  # fmt: skip


def drawn(world: World, n: int, without: float = 0.2) -> tuple[NDArray[Any], ...]:
    """Rows that bfloat16 holds exactly, ids, weights, and what is to come of them."""
    rng = np.random.default_rng(n)
    shape = world.shape
    bits = to_bits(rng.standard_normal((n, shape.hidden)), Dtype.BFLOAT16)
    rows = (bits.astype(np.uint32) << 16).view(np.float32)
    ids = np.array([rng.permutation(shape.experts)[: shape.top_k] for _ in range(n)], np.uint16)
    ids = ids.reshape(n, shape.top_k)
    ids[rng.random(ids.shape) < without] = NO_EXPERT
    weights = rng.random(ids.shape, np.float32)
    wanted = world.weights.reference(
        0, to_bits(rows, world.dtype), ids, weights, np.zeros((n, shape.hidden), np.float32)
    )
    return rows, ids, weights, wanted


@pytest.mark.parametrize("dtype", CHOICES)
@pytest.mark.parametrize("lanes", [1, 2])
def test_any_number_of_rows_of_either_type_gives_the_bits_of_one_process(dtype: Dtype, lanes: int) -> None:
    world = made(dtype, lanes=lanes)
    with running(world):
        for n in (0, 1, TOKENS, TOKENS + 1, 3 * TOKENS + 2, 1):
            rows, ids, weights, wanted = drawn(world, n)
            # Of a pair without an expert nothing is read.
            weights = np.where(ids == NO_EXPERT, np.float32(np.nan), weights)
            for given in (rows, to_bits(rows, Dtype.BFLOAT16)):
                for kind in (np.uint16, np.int16, np.int32, np.int64):
                    out = np.full(rows.shape, CANARY, np.float32)
                    assert apply(world, given, ids.astype(np.int16).astype(kind), weights, out) == OK
                    assert out.tobytes() == wanted.tobytes(), f"{n} rows, ids {kind}"
                rounded = np.full(rows.shape, CANARY, np.float16).view(np.uint16)
                assert apply(world, given, ids, weights, rounded) == OK
                assert rounded.tobytes() == to_bits(wanted, Dtype.BFLOAT16).tobytes(), f"{n} rows"
            assert apply(world, rows, ids, weights, rows) == OK
            assert rows.tobytes() == wanted.tobytes(), "out may be the rows themselves"
    world.close()


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_rows_round_to_nearest_and_ties_to_even_both_ways(dtype: Dtype) -> None:
    world = made(dtype)
    rows, ids, weights, _ = drawn(world, 4, without=0)
    rows = np.random.default_rng(1).standard_normal(rows.shape).astype(np.float32)
    rows[0, :2] = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)  # ties
    with running(world):
        out, same, half = np.zeros_like(rows), np.zeros_like(rows), np.zeros(rows.shape, np.uint16)
        assert apply(world, rows, ids, weights, out) == OK
        assert apply(world, to_bits(rows, dtype), ids, weights, same) == OK
        assert apply(world, rows, ids, weights, half) == OK
    assert out.tobytes() == same.tobytes()
    assert half.tobytes() == to_bits(out, Dtype.BFLOAT16).tobytes()
    world.close()


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_rows_that_are_not_finite_are_sent_to_nobody_and_are_nan(dtype: Dtype) -> None:
    world = made(dtype)
    rows, ids, weights, wanted = drawn(world, 12, without=0)
    bad = {1: np.nan, 4: np.inf, 7: -np.inf} | ({9: 3.4e38} if dtype is Dtype.BFLOAT16 else {})
    for row, value in bad.items():
        rows[row, row] = value
    out = np.full(rows.shape, CANARY, np.float32)
    with running(world):
        assert apply(world, rows, ids, weights, out) == OK
    assert np.isnan(out[list(bad)]).all(), "3.4e38 is infinite in bfloat16"
    good = [row for row in range(12) if row not in bad]
    assert out[good].tobytes() == wanted[good].tobytes()
    stats = [world.stats(0, server) for server in range(2)]
    assert sum(s.pairs for s in stats) == len(good) * world.shape.top_k
    assert not any(s.corrupt or s.redispatches for s in stats)
    assert not any(world.library.expert_server_take_doubtful(s.handle, 0) >= 0 for s in world.servers)
    world.close()


def test_a_call_of_nothing_but_pairs_without_an_expert_needs_no_server() -> None:
    world = made(Dtype.BFLOAT16)
    world.publish(0, 2, without={0, 1})
    rows, _, weights, _ = drawn(world, 12)
    nothing = np.full(weights.shape, -1, np.int64)
    out = np.full(rows.shape, CANARY, np.float32)
    assert apply(world, rows, nothing, weights, out) == OK
    assert not out.any()
    assert apply(world, np.full_like(rows, np.nan), np.zeros_like(nothing), weights, out) == OK
    assert np.isnan(out).all()
    call = Call(world, 0, np.random.default_rng(1), 4, 0, without=1)
    assert call.run() == OK and call.exact()
    assert not any(world.stats(0, server).calls for server in range(2))
    routed = np.ones((2, world.shape.layers, world.shape.experts), np.uint32)
    world.library.expert_client_take_routed(world.clients[0], routed[0].ctypes.data, routed[1].ctypes.data)
    assert not routed.any()
    world.close()


def test_what_is_refused_or_lost_leaves_out_as_it_was() -> None:
    world = made(Dtype.FLOAT32)
    rows, ids, weights, wanted = drawn(world, 12, without=0)
    out = np.full(rows.shape, CANARY, np.float32)
    for row, expert in ((0, 8), (11, 8), (5, -2), (11, 1 << 40), (3, 65535)):
        wrong = ids.astype(np.int64)
        wrong[row, 1] = expert
        with running(world):
            assert apply(world, rows, wrong, weights, out) == ARGUMENT, f"expert {expert}"
    assert apply(world, rows, ids, weights, out, layer=2) == ARGUMENT
    assert apply(world, rows, ids.astype(np.int8), weights, out) == ARGUMENT
    # The first part is answered; nobody holds what the last one needs.
    ids[:-1] %= 4
    ids[-1] = 4
    world.publish(0, 2, without={0, 1})
    assert apply(world, rows, ids, weights, out, wait_s=0.05) == LOST
    assert (out == CANARY).all()
    world.publish(0, 3)
    with running(world):
        assert apply(world, rows, ids, weights, out) == OK
    wanted = world.weights.reference(0, rows, ids, weights, np.zeros_like(wanted))
    assert out.tobytes() == wanted.tobytes()
    world.close()


def test_a_call_without_memory_is_refused_and_the_next_one_answered() -> None:
    world = made(Dtype.FLOAT32)
    many = np.zeros((200_000, world.shape.hidden), np.float32)
    ids = np.full((len(many), world.shape.top_k), -1, np.int16)
    weights = np.zeros(ids.shape, np.float32)
    with out_of_memory():
        code = apply(world, many, ids, weights, many)
    assert code == MEMORY
    assert apply(world, many, ids, weights, many) == OK
    world.close()


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_server_changes_no_bit_where_pairs_have_no_expert(lanes: int, seed: int) -> None:
    world = made(Dtype.BFLOAT16, servers=3, replicas=2, lanes=lanes)
    rng = np.random.default_rng(seed)
    for step in range(4):
        call = Call(world, 0, rng, TOKENS, step % 2, without=0.4)
        if step == 1:
            world.kill(0)
        assert call.run() == OK and call.exact(), f"seed {seed}, call {step}"
    routed = np.zeros((2, world.shape.layers, world.shape.experts), np.uint32)
    world.library.expert_client_take_routed(world.clients[0], routed[0].ctypes.data, routed[1].ctypes.data)
    assert 0 < routed[0].sum() < 4 * TOKENS * world.shape.top_k
    world.close()


def test_a_probe_carries_a_row_that_has_an_expert() -> None:
    """A server that owes a reply is asked for a copy of one pair: not of one that nobody computes."""
    world = made(Dtype.FLOAT32, servers=2, replicas=2)
    world.servers[0].frozen = True
    rng = np.random.default_rng(5)
    for step in range(200):
        call = Call(world, 0, rng, TOKENS, 0, without=0.9, deadline_ns=10**10)
        assert call.run(tick_ns=20_000_000) == OK and call.exact(), f"call {step}"
    assert world.stats(0, 0).calls == world.slots, "what it owes, and a probe"
    world.close()


_SOURCE = "experts/native/client.cpp"
WEIGHED = Mutant(source=_SOURCE, says="staging.weights[row * top_k + k] = 0;", instead=";")
SENT = Mutant(source=_SOURCE, says="std::fill_n(chosen, top_k, EXPERTS_NO_EXPERT);", instead="")
IN_PARTS = Mutant(source=_SOURCE, says="staging.sums.data() + at * hidden;", instead="staging.sums.data();")


@pytest.mark.full(seconds=12)
@pytest.mark.parametrize("mutant", [None, WEIGHED, SENT, IN_PARTS], ids=["none", "weighed", "sent", "in parts"])
def test_without_its_care_a_call_gives_other_bits(mutant: Mutant | None, tmp_path: Path) -> None:
    world = made(Dtype.BFLOAT16, library=mutant and mutant.library(tmp_path))
    rows, ids, weights, wanted = drawn(world, 12)
    weights[ids == NO_EXPERT] = np.nan
    rows[2, 2] = np.nan
    out = np.zeros_like(rows)
    with running(world):
        assert apply(world, rows, ids, weights, out) == OK
    finite = np.delete(np.arange(12), 2)
    sent = sum(world.stats(0, server).pairs for server in range(2))
    kept = sent == (ids[finite] != NO_EXPERT).sum() and out[finite].tobytes() == wanted[finite].tobytes()
    assert kept == (mutant is None), "the mutant survives"
    world.close()
