"""A loader reports what it tested, where it is read from, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from experts import loading
from experts.checkpoint import Checkpoint
from experts.kernels import PackedExpert
from experts.loading import Loader
from experts.model import Dtype
from experts.pack import PackedExperts
from experts.weights import Weights, WeightsUnavailable
from router import bitmap
from router.view import Member, View
from tests.experts.checkpoint_files import fine_tune
from tests.experts.weights_world import PAIRS, SHAPE, SOON_S, World, write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("weights") / "model")


@pytest.fixture
def world(tmp_path: Path, model: Path) -> Iterator[World]:
    made = World(tmp_path, model)
    yield made
    made.close()


class Held:
    """Stands where an expert server does."""

    def __init__(self) -> None:
        self.at: dict[tuple[int, int], tuple[int, int]] = {}
        self.doubted: list[tuple[int, int]] = []

    def set_expert(self, layer: int, expert: int, gate_up: np.ndarray, down: np.ndarray) -> None:
        self.at[layer, expert] = (gate_up.ctypes.data, down.ctypes.data)

    def clear_expert(self, layer: int, expert: int) -> None:
        del self.at[layer, expert]

    def doubtful(self) -> tuple[int, int] | None:
        return self.doubted.pop() if self.doubted else None


class Loading:
    """A loader that follows Views, and what it reports."""

    def __init__(self, world: World, weights: Weights) -> None:
        self.world, self.held = world, Held()
        self.reports: list[tuple[bytes, int]] = []
        self.faults: list[str] = []
        self.loader = Loader(
            name="expert/9",
            server=self.held,
            weights=weights,
            report=lambda held, epoch, opened: self.reports.append((held, epoch)),
            failed=self.faults.append,
        )
        world.undo.append(self.loader.close)
        self.loader.start()

    def want(self, pairs: list[tuple[int, int]], epoch: int, *peers: Member) -> None:
        target = bitmap.to_bytes(bitmap.of_pairs(pairs, SHAPE.experts), SHAPE.layers, SHAPE.experts)
        me = Member(
            name="expert/9",
            pool="expert",
            state="warming",
            incarnation=9,
            address="",
            pid=1,
            host="",
            target=target,
        )
        self.loader.apply(self.world.view(*peers, me, epoch=epoch))

    def wait(self, ready: Callable[[], object]) -> None:
        end_s = time.monotonic() + SOON_S
        while not ready():
            assert time.monotonic() < end_s, (self.reports, self.faults)
            time.sleep(0.005)


def held_of(report: tuple[bytes, int]) -> list[tuple[int, int]]:
    return list(bitmap.pairs(bitmap.from_bytes(report[0]), SHAPE.experts))


def test_a_loader_serves_what_it_tested_and_drops_what_is_not_wanted(world: World) -> None:
    run = Loading(world, Weights(name="expert/9", packed=world.whole, endpoint=None, checkpoint=None))
    run.want(PAIRS[:5], 1)
    run.wait(lambda: run.reports and held_of(run.reports[-1]) == PAIRS[:5])
    for (layer, expert), at in run.held.at.items():
        wanted = world.whole.expert(layer, expert)
        assert at == (wanted.gate_up.ctypes.data, wanted.down.ctypes.data)
    run.want(PAIRS[3:7], 2)
    run.wait(lambda: held_of(run.reports[-1]) == PAIRS[3:7])
    assert sorted(run.held.at) == PAIRS[3:7] and run.reports[-1][1] == 2
    own = world.whole.layout.fingerprint
    assert run.loader.holds(own, *PAIRS[3]) and not run.loader.holds(own, *PAIRS[2])


def test_an_expert_mapped_at_another_ones_place_is_never_held(world: World) -> None:
    """The bytes are right, and not where they are looked for: only the self-test row can tell."""
    weights = Weights(name="expert/9", packed=world.whole, endpoint=None, checkpoint=world.checkpoint)
    expert = world.whole.expert
    world.whole.expert = lambda layer, number: expert(layer, 3 if (layer, number) == (0, 2) else number)
    run = Loading(world, weights)
    run.want(PAIRS, 1)
    run.wait(lambda: run.faults)
    assert "expert 2 of MoE layer 0 failed its self-test 3 times" in run.faults[0]
    assert "See to this machine's memory and processor" in run.faults[0]
    assert sorted(run.held.at) == PAIRS[:2]
    assert all(set(held_of(report)) <= set(PAIRS[:2]) for report in run.reports)


def test_an_expert_that_fails_its_self_test_once_is_had_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, right = iter((bytes(32),)), loading.answer_of
    monkeypatch.setattr(loading, "answer_of", lambda expert: next(answers, None) or right(expert))
    peer, asked = world.peer(1), []
    signal, peer.endpoint.signal = peer.endpoint.signal, lambda *what: (asked.append(what), signal(*what))
    run = Loading(world, world.weights())
    run.want(PAIRS, 1, peer.member())
    run.wait(lambda: run.reports and len(held_of(run.reports[-1])) == len(PAIRS))
    assert not run.faults and len(asked) == 3 * (len(PAIRS) + 1)


def test_a_server_without_weights_ends_but_one_that_holds_some_waits_for_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "RETRY_S", 0.01)
    poor = Loading(world, world.weights(peers=False))
    poor.want(PAIRS, 1)
    poor.wait(lambda: poor.faults)
    assert "expert 3 of MoE layer 1: no source may be asked now" in poor.faults[0]

    peer = world.peer(1)
    run = Loading(world, world.weights())
    run.want(PAIRS[:4], 1, peer.member())
    run.wait(lambda: run.reports and held_of(run.reports[-1]) == PAIRS[:4])
    run.want(PAIRS, 2)
    run.wait(lambda: len(run.reports) > 10)
    assert held_of(run.reports[-1]) == PAIRS[:4] and run.reports[-1][1] == 2
    run.want(PAIRS, 3, peer.member())
    run.wait(lambda: held_of(run.reports[-1]) == PAIRS)
    assert not run.faults


def test_weights_that_rot_after_loading_are_found_and_mended(world: World) -> None:
    """In the file that every server of a host maps: they all would answer alike, and wrongly."""
    weights = Weights(name="expert/9", packed=world.whole, endpoint=None, checkpoint=world.checkpoint)
    run = Loading(world, weights)
    run.want(PAIRS, 1)
    run.wait(lambda: run.reports and held_of(run.reports[-1]) == PAIRS)
    layer, expert = PAIRS[-1]
    right = bytes(world.whole.blob(layer, expert))
    with world.whole.path.open("r+b", buffering=0) as file:
        file.seek(world.whole.layout.offset(layer, expert) + 4096)
        file.write(bytes(byte ^ 0xFF for byte in right[4096 : 4096 + 2048]))
    assert bytes(world.whole.blob(layer, expert)) != right
    run.wait(lambda: run.loader.damaged == 1 and bytes(world.whole.blob(layer, expert)) == right)
    run.wait(lambda: sorted(run.held.at) == PAIRS and held_of(run.reports[-1]) == PAIRS)
    assert not run.faults


def test_weights_that_rot_at_a_sibling_that_lends_them_are_mended_in_the_own_file(world: World, tmp_path: Path) -> None:
    tune = Checkpoint.open(fine_tune(world.checkpoint.directory, tmp_path / "tune", PAIRS[:1]))
    base, packed = (
        PackedExperts.open(each, SHAPE, Dtype.BFLOAT16, directory=tmp_path / "cache")
        for each in (world.checkpoint, tune)
    )
    run = Loading(world, Weights(name="expert/9", packed=packed, endpoint=None, checkpoint=tune))
    run.want(PAIRS, 1)
    run.wait(lambda: run.reports and held_of(run.reports[-1]) == PAIRS)
    pair, lent = PAIRS[-1], run.held.at[PAIRS[-1]]
    assert lent[0] == packed.blob(*pair).ctypes.data
    right, at = bytes(packed.blob(*pair)), base.layout.offset(*pair)
    with base.path.open("r+b", buffering=0) as file:
        file.seek(at + 4096)
        file.write(bytes(byte ^ 0xFF for byte in right[4096 : 4096 + 2048]))
    run.wait(lambda: run.loader.damaged == 1 and run.held.at.get(pair, lent) != lent)
    run.wait(lambda: held_of(run.reports[-1]) == PAIRS)
    assert bytes(packed.blob(*pair)) == right and run.held.at[pair][0] == packed.blob(*pair).ctypes.data
    assert bytes(base.blob(*pair)) != right and not run.faults


def test_an_expert_whose_rows_are_not_finite_is_read_at_once_and_not_again_for_a_while_where_it_is_sound(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int]] = []
    weights = Weights(name="expert/9", packed=world.whole, endpoint=None, checkpoint=world.checkpoint)
    is_here = weights.is_here
    monkeypatch.setattr(weights, "is_here", lambda *pair: (read.append(pair), is_here(*pair))[1])
    # In its turn none would be read within an hour.
    monkeypatch.setattr(loading, "SCRUB_SHARE", 1e-9)
    run = Loading(world, weights)
    run.want(PAIRS, 1)
    run.wait(lambda: run.reports and held_of(run.reports[-1]) == PAIRS)
    run.wait(lambda: read)
    read.clear()
    sound, (layer, expert) = PAIRS[2], PAIRS[-1]
    run.held.doubted = [sound]
    run.wait(lambda: read == [sound])
    right = bytes(world.whole.blob(layer, expert))
    with world.whole.path.open("r+b", buffering=0) as file:
        file.seek(world.whole.layout.offset(layer, expert) + 4096)
        file.write(bytes(byte ^ 0xFF for byte in right[4096 : 4096 + 2048]))
    run.held.doubted = [(layer, expert), sound]
    run.wait(lambda: run.loader.damaged == 1 and bytes(world.whole.blob(layer, expert)) == right)
    run.wait(lambda: sorted(run.held.at) == PAIRS and not run.held.doubted)
    assert read.count(sound) == 1 and (layer, expert) in read and not run.faults


def test_damaged_weights_that_nobody_has_are_not_served_and_the_router_hears_of_it(world: World) -> None:
    run = Loading(world, Weights(name="expert/9", packed=world.whole, endpoint=None, checkpoint=None))
    run.want(PAIRS, 1)
    run.wait(lambda: run.reports and held_of(run.reports[-1]) == PAIRS)
    layer, expert = PAIRS[0]
    start = world.whole.layout.offset(layer, expert)
    with world.whole.path.open("r+b", buffering=0) as file:
        file.seek(start)
        right = file.read(64)
        file.seek(start)
        file.write(bytes(64))
    try:
        run.wait(lambda: held_of(run.reports[-1]) == PAIRS[1:])
        assert sorted(run.held.at) == PAIRS[1:]
    finally:
        with world.whole.path.open("r+b", buffering=0) as file:
            file.seek(start)
            file.write(right)
    run.wait(lambda: held_of(run.reports[-1]) == PAIRS)
    assert not run.faults


def test_while_one_expert_cannot_be_had_the_others_are_read_and_damage_is_reported_before_it_is_mended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Having it anew may take long: the router hears of it before that begins."""
    weights = Weights(name="expert/9", packed=world.whole, endpoint=None, checkpoint=None)
    whole, mend = weights.expert, threading.Event()

    def expert(layer: int, number: int, view: View, anew: bool = False) -> PackedExpert:
        if (layer, number) == PAIRS[-1]:
            raise WeightsUnavailable("nobody has it")
        if run.loader.damaged:
            mend.wait(SOON_S)
        return whole(layer, number, view, anew=anew)

    monkeypatch.setattr(weights, "expert", expert)
    run = Loading(world, weights)
    run.want(PAIRS, 1)
    run.wait(lambda: run.reports and held_of(run.reports[-1]) == PAIRS[:-1])
    start = world.whole.layout.offset(*PAIRS[0])
    with world.whole.path.open("r+b", buffering=0) as file:
        file.seek(start)
        right = file.read(64)
        file.seek(start)
        file.write(bytes(64))
    try:
        run.wait(lambda: held_of(run.reports[-1]) == PAIRS[1:-1])
    finally:
        with world.whole.path.open("r+b", buffering=0) as file:
            file.seek(start)
            file.write(right)
        mend.set()
    run.wait(lambda: held_of(run.reports[-1]) == PAIRS[:-1])
    assert not run.faults
