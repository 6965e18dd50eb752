"""Promises about replies that are damaged before they are sealed, or are not finite: none is summed unconfirmed."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from experts.model import Dtype
from experts.native import ServerStats
from experts.report import report_of
from experts.wire import VERSION
from p2p import native as p2p_native
from tests.experts.messages import HEADER, rows_digest
from tests.experts.steps import LOST, OK, PENDING, Call, World, shape_of, to_bits
from tests.experts.test_steps import spread
from tests.sim.mutants import Mutant

Change = Callable[[NDArray[np.float32]], None]
FRAME, PAYLOAD, ROWS = 64, 128, 192


def rewrite(world: World, server: int, change: Change, *, digest_too: bool, slot: int = 0) -> bool:
    """Change the rows of a server's newest reply, then seal it anew; False where there is none with rows."""
    memory = world.links[0, server].reply.slot(slot)
    header = memory[PAYLOAD:ROWS].copy().view(HEADER)
    if header["magic"][0] == 0 or header["status"][0]:
        return False
    count, hidden = int(header["pairs"][0]), world.shape.hidden
    rows = memory[ROWS : ROWS + count * hidden * 4].view(np.float32).reshape(count, hidden)
    change(rows)
    if digest_too:
        header["digest"] = rows_digest(rows)
        memory[PAYLOAD:ROWS] = header.view(np.uint8)
    fields = memory[FRAME:PAYLOAD].copy()
    p2p_native.load().p2p_frame_seal(memory.ctypes.data, fields.ctypes.data)
    return True


def flip(row: int, column: int, bit: int) -> Change:
    def change(rows: NDArray[np.float32]) -> None:
        rows.view(np.uint32)[row % len(rows), column] ^= np.uint32(1 << bit)

    return change


def not_finite(value: float) -> Change:
    def change(rows: NDArray[np.float32]) -> None:
        rows[0, 3] = value

    return change


def made(
    servers: int,
    replicas: int,
    seed: int,
    lanes: int = 1,
    slots: int = 2,
    library: ctypes.CDLL | None = None,
    dtype: Dtype = Dtype.FLOAT32,
    tokens: int = 64,
) -> tuple[World, np.random.Generator]:
    world = World(shape=shape_of(), dtype=dtype, servers=servers, seed=seed, slots=slots, library=library)
    spread(world, replicas)
    world.publish(world.add_client(max_tokens=tokens, lanes=lanes), 1)
    return world, np.random.default_rng(seed)


def answer(world: World, changes: dict[int, Change], *, digest_too: bool) -> None:
    """One step of all servers; those named give what is changed."""
    before = {s: world.links[0, s].reply.slot(i)[:8].tobytes() for s in changes for i in (0,)}
    world.step_servers()
    for server, change in changes.items():
        for slot in range(world.slots):
            memory = world.links[0, server].reply.slot(slot)
            if slot or memory[:8].tobytes() != before[server]:
                rewrite(world, server, change, digest_too=digest_too, slot=slot)


@pytest.mark.parametrize("seed", range(40))
def test_a_bit_that_flips_between_kernel_and_seal_never_reaches_an_answer(seed: int) -> None:
    world, rng = made(servers=2, replicas=2, seed=seed)
    call = Call(world, 0, rng, 8, 0)
    change = flip(int(rng.integers(8)), int(rng.integers(world.shape.hidden)), int(rng.integers(32)))
    answer(world, {seed % 2: change}, digest_too=False)
    assert call.run() == OK and call.exact(), f"seed {seed}"
    assert world.stats(0, seed % 2).corrupt == 1, f"seed {seed}"
    assert world.stats(0, 1 - seed % 2).corrupt == 0, f"seed {seed}"
    world.close()


def test_a_reply_of_another_release_is_not_used_and_says_nothing_against_its_server() -> None:
    world, rng = made(servers=2, replicas=2, seed=2)
    call = Call(world, 0, rng, 8, 0)
    world.step_servers()
    memory = world.links[0, 0].reply.slot(0)
    header = memory[PAYLOAD:ROWS].view(HEADER)
    header["version"] = VERSION + 1
    fields = memory[FRAME:PAYLOAD].copy()
    p2p_native.load().p2p_frame_seal(memory.ctypes.data, fields.ctypes.data)
    assert call.run() == OK and call.exact()
    assert [world.stats(0, server).corrupt for server in range(2)] == [0, 0]
    assert world.stats(0, 0).redispatches
    world.close()


def test_two_flips_of_one_bit_in_a_column_or_in_a_row_and_two_rows_exchanged_are_noticed() -> None:
    def twice(*places: tuple[int, int]) -> Change:
        def change(rows: NDArray[np.float32]) -> None:
            for place in places:
                rows.view(np.uint32)[place] ^= np.uint32(1 << 13)

        return change

    def exchange(rows: NDArray[np.float32]) -> None:
        rows[[0, 1]] = rows[[1, 0]]

    for change in (twice((0, 5), (1, 5)), twice((0, 5), (0, 7)), exchange):
        world, rng = made(servers=1, replicas=1, seed=3)
        call = Call(world, 0, rng, 8, 0)
        answer(world, {0: change}, digest_too=False)
        assert call.run() == OK and call.exact()
        assert world.stats(0, 0).corrupt == 1
        world.close()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_row_that_is_not_finite_is_asked_of_the_other_replica_and_counted_against_the_first(
    value: float, lanes: int
) -> None:
    world, rng = made(servers=2, replicas=2, seed=4, lanes=lanes)
    call = Call(world, 0, rng, 8, 0)
    answer(world, {0: not_finite(value)}, digest_too=True)
    assert call.run() == OK and call.exact()
    assert [world.stats(0, server).corrupt for server in range(2)] == [1, 0]
    world.close()


def run_with(world: World, call: Call, changes: dict[int, Change]) -> int:
    """To the end, every reply of those servers changed."""
    while call.status == PENDING:
        answer(world, changes, digest_too=True)
        world.now_ns += 100_000
        call.step()
    return call.status


@pytest.mark.parametrize("servers", [1, 2])
def test_what_every_replica_says_bit_for_bit_is_the_models_own_answer(servers: int) -> None:
    world, rng = made(servers=servers, replicas=servers, seed=5)
    call = Call(world, 0, rng, 1, 0, deadline_ns=50_000_000)

    def change(rows: NDArray[np.float32]) -> None:
        rows[:, 3] = np.nan

    assert run_with(world, call, dict.fromkeys(range(servers), change)) == OK
    assert np.isnan(call.out[:, 3]).all() and np.isfinite(np.delete(call.out, 3, axis=1)).all()
    assert not any(world.stats(0, server).corrupt for server in range(servers))
    world.close()


def test_rows_that_are_not_finite_and_differ_are_never_used() -> None:
    world, rng = made(servers=2, replicas=2, seed=6)
    call = Call(world, 0, rng, 1, 0, deadline_ns=50_000_000)
    assert run_with(world, call, {0: not_finite(np.nan), 1: not_finite(np.inf)}) == LOST
    assert call.untouched()
    world.close()


def test_three_corrupt_replies_in_a_minute_and_a_server_is_the_last_choice_until_the_minute_is_over() -> None:
    world, rng = made(servers=2, replicas=2, seed=7)
    for number in range(3):
        assert not world.stats(0, 0).quarantined_until_ns, f"after {number}"
        call = Call(world, 0, rng, 8, 0)
        answer(world, {0: flip(0, 1, 2)}, digest_too=False)
        assert call.run() == OK and call.exact()
    asked = world.stats(0, 0).calls
    for _ in range(20):
        call = Call(world, 0, rng, 8, 0)
        assert call.run() == OK and call.exact()
        world.now_ns += 2_000_000_000
    assert world.stats(0, 0).quarantined_until_ns > world.now_ns and world.stats(0, 0).calls == asked
    # Where nobody else has an expert it is asked all the same, and each reply judged.
    world.kill(1)
    call = Call(world, 0, rng, 8, 0)
    assert call.run() == OK and call.exact()
    assert world.stats(0, 0).calls > asked
    world.now_ns += 60_000_000_000
    assert world.stats(0, 0).quarantined_until_ns <= world.now_ns
    assert Call(world, 0, rng, 8, 0).run() == OK
    world.close()


def test_a_quarantine_that_is_over_is_no_longer_reported_though_no_call_was_made_since() -> None:
    def reported(for_s: float) -> bool:
        stats = ServerStats(quarantined_until_ns=time.monotonic_ns() + int(for_s * 1e9))
        return report_of("expert/1", stats, object()).totals.quarantined  # pyright: ignore[reportArgumentType]

    assert reported(60.0) and not reported(-0.001)


def spoil(world: World, call: Call, pick: Callable[[], bool]) -> int:
    """To the end, a bit of those replies flipped on the wire that `pick` says."""
    links = [link for (_, _), link in sorted(world.links.items())]
    slots = [link.reply.slot(i) for link in links for i in range(world.slots)]
    while call.step() == PENDING:
        signals = [slot[:8].tobytes() for slot in slots]
        world.step_servers()
        for slot, signal in zip(slots, signals, strict=True):
            if slot[:8].tobytes() != signal and pick():
                slot[200] ^= 1
        world.now_ns += 100_000
    return call.status


@pytest.mark.parametrize(("share", "calls"), [(0.2, 300), (0.5, 100)])
def test_while_every_server_lives_no_share_of_spoiled_replies_loses_a_call(share: float, calls: int) -> None:
    world, rng = made(servers=4, replicas=2, seed=8, slots=4)
    for number in range(calls):
        call = Call(world, 0, rng, 8, 0, deadline_ns=2_000_000_000)
        assert spoil(world, call, lambda: rng.random() < share) == OK, f"seed 8, call {number}"
        assert call.exact(), f"seed 8, call {number}"
    assert sum(world.stats(0, server).corrupt for server in range(4)) > share * calls
    world.close()


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_sole_replica_whose_every_slot_was_spoiled_is_asked_again_soon(slots: int) -> None:
    world, rng = made(servers=1, replicas=1, seed=9, slots=slots)
    call = Call(world, 0, rng, 8, 0, deadline_ns=10_000_000_000)
    left, began_ns = iter(range(slots)), world.now_ns
    assert spoil(world, call, lambda: next(left, None) is not None) == OK and call.exact()
    assert world.stats(0, 0).corrupt == slots
    assert world.now_ns - began_ns <= 60_000_000
    world.close()


def test_a_row_that_is_not_finite_is_asked_for_again_where_the_other_replica_has_died() -> None:
    world, rng = made(servers=2, replicas=2, seed=10)
    call = Call(world, 0, rng, 8, 0)
    answer(world, {0: not_finite(np.nan)}, digest_too=True)
    world.kill(1)
    assert call.run() == OK and call.exact()
    assert world.stats(0, 0).corrupt == 1
    world.close()


def test_the_models_own_rows_that_are_not_finite_wait_for_no_silent_replica() -> None:
    world, rng = made(servers=2, replicas=2, seed=11, slots=4)
    for _ in range(20):
        assert Call(world, 0, rng, 8, 0).run() == OK
    world.servers[1].frozen = True

    def change(rows: NDArray[np.float32]) -> None:
        rows[:, 3] = np.inf

    took_ns = []
    for _ in range(5):
        began_ns, call = world.now_ns, Call(world, 0, rng, 8, 0)
        assert run_with(world, call, {0: change}) == OK
        assert np.isinf(call.out[:, 3]).all() and np.isfinite(np.delete(call.out, 3, axis=1)).all()
        took_ns.append(world.now_ns - began_ns)
    assert took_ns[0] <= 100_000_000 and max(took_ns[1:]) <= 5_000_000
    assert world.stats(0, 0).corrupt == 0
    world.close()


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_row_that_is_not_finite_when_it_comes_in_is_nobodys_fault(servers: int, dtype: Dtype) -> None:
    world, rng = made(servers=servers, replicas=servers, seed=13, dtype=dtype)
    for value in to_bits(np.array([np.nan, np.inf, -np.inf]), dtype):
        call = Call(world, 0, rng, 8, 0, spoilt=lambda x, value=value: x.__setitem__((2, 5), value))
        assert call.run() == OK
        assert not np.isfinite(call.out[2]).all()
        assert np.isfinite(np.delete(call.out, 2, axis=0)).all()
    for server in range(servers):
        stats = world.stats(0, server)
        assert (stats.corrupt, stats.redispatches) == (0, 0), f"server {server}"
    world.close()


def test_many_rows_that_are_not_finite_cost_time_by_their_number_and_not_by_its_square() -> None:
    def cost_s(rows: int) -> float:
        world, rng = made(servers=2, replicas=2, seed=14, tokens=rows)

        def change(found: NDArray[np.float32]) -> None:
            found[:, 3] = np.nan

        call = Call(world, 0, rng, rows, 0, deadline_ns=10**10)
        began_s = time.process_time()
        assert run_with(world, call, {0: change, 1: change}) == OK
        took_s = time.process_time() - began_s
        assert np.isnan(call.out[:, 3]).all() and np.isfinite(np.delete(call.out, 3, axis=1)).all()
        assert not any(world.stats(0, server).corrupt for server in range(2))
        world.close()
        return took_s

    few, many = min(cost_s(256) for _ in range(2)), cost_s(8192)
    # 32 times as long where each row costs the same; the square would be a thousand times.
    assert many < 200 * few, f"256 rows took {few:.4f} s, 8,192 rows {many:.4f} s"


DIGEST = Mutant(
    source="experts/native/client_exchange.cpp",
    says="if (digest.sum != header.digest) {",
    instead="if (false) {",
)
FINITE = Mutant(
    source="experts/native/client_exchange.cpp",
    says="if (!digest.finite && !finite_row(row, hidden) && finite_input(call, shape, pair)) {",
    instead="if (false) {",
)
ALONE = Mutant(
    source="experts/native/client_plan.cpp",
    says="if (confirmed || (repeated && alone))",
    instead="if (confirmed || alone)",
)


@pytest.mark.parametrize(
    ("mutant", "change"),
    [
        pytest.param(DIGEST, flip(0, 3, 29), id="digest"),
        pytest.param(FINITE, not_finite(np.nan), id="finite"),
        pytest.param(ALONE, not_finite(np.nan), id="asked twice"),
    ],
)
def test_without_a_check_a_damaged_row_is_summed(mutant: Mutant, change: Change, tmp_path: Path) -> None:
    world, rng = made(servers=1, replicas=1, seed=12, library=mutant.library(tmp_path))
    call = Call(world, 0, rng, 8, 0)
    answer(world, {0: change}, digest_too=mutant is not DIGEST)
    assert call.run() == OK and not call.exact(), "the mutant survives"
    world.close()
