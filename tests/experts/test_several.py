"""A server of several models: each is opened, loaded, given and closed for itself, and none holds up another."""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import experts.__main__ as process
from experts import loading
from experts import weights as weights_module
from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.loading import Loader, Opened
from experts.model import Dtype, ExpertShape
from experts.pack import PackedExperts
from experts.server import ServerClosed
from experts.transfer import TAKERS
from experts.weights import Weights, WeightsUnavailable, manifest_from
from p2p.local import ShmEndpoint
from router import bitmap
from router.view import Member, Model, View
from tests.experts.checkpoint_files import write_model
from tests.experts.weights_world import CONFIG, PAIRS, SHAPE, SOON_S, Peer, World, same

CONFIG_B = CONFIG | {
    "num_hidden_layers": 4,
    "num_experts": 5,
    "hidden_size": 128,
    "moe_intermediate_size": 96,
}
SHAPE_B = ExpertShape.from_config(CONFIG_B)
PAIRS_B = [(layer, expert) for layer in range(SHAPE_B.layers) for expert in range(SHAPE_B.experts)]
BASE_B = len(PAIRS) + 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("several")
    return write_model(root / "a", CONFIG), write_model(root / "b", CONFIG_B, seed=1)


class Held:
    """Stands where a model of an expert server does."""

    def __init__(self, shape: ExpertShape, order: list[tuple[int, int, int]]) -> None:
        self.shape = shape
        self.at: set[tuple[int, int]] = set()
        self.order = order
        self.doubted: list[tuple[int, int]] = []

    def set_expert(self, layer: int, expert: int, gate_up: np.ndarray, down: np.ndarray) -> None:
        assert layer < self.shape.layers and expert < self.shape.experts
        self.at.add((layer, expert))
        self.order.append((self.shape.experts, layer, expert))

    def clear_expert(self, layer: int, expert: int) -> None:
        self.at.remove((layer, expert))

    def doubtful(self) -> tuple[int, int] | None:
        return self.doubted.pop() if self.doubted else None


class Server:
    """Stands where an expert server does: closes a model when it has no clients."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.clients = 0

    def close_model(self, model_hash: str) -> None:
        if self.clients:
            self.clients -= 1
            raise ValueError("it has clients")
        self.closed.append(model_hash)


class Pool:
    """A loader that joined with model A, and a second model B beside it in the View."""

    def __init__(self, world: World, b: Path) -> None:
        self.world, self.order = world, list[tuple[int, int, int]]()
        self.checkpoint_b = Checkpoint.open(b)
        self.whole_b = PackedExperts.open(self.checkpoint_b, SHAPE_B, Dtype.BFLOAT16, directory=b / "packed")
        self.a = Model(hash=world.whole.layout.fingerprint, layers=SHAPE.layers, experts=SHAPE.experts)
        self.b = Model(
            hash=self.whole_b.layout.fingerprint, name="b", path=str(b), number=1, base=BASE_B,
            layers=SHAPE_B.layers, experts=SHAPE_B.experts,
        )  # fmt: skip
        self.models: tuple[Model, ...] = (self.a, self.b)
        self.held_a, self.held_b = Held(SHAPE, self.order), Held(SHAPE_B, self.order)
        self.reports: list[tuple[int, int, tuple[str, ...]]] = []
        self.faults: list[str] = []
        self.loader = Loader(
            name="expert/9",
            server=self.held_a,
            weights=self.weights(world.whole, world.checkpoint),
            report=lambda held, epoch, opened: self.reports.append((bitmap.from_bytes(held), epoch, opened)),
            failed=self.faults.append,
        )
        world.undo.append(self.loader.close)
        self.epoch = 0

    def weights(self, packed: PackedExperts, checkpoint: Checkpoint | None) -> Weights:
        return Weights(name="expert/9", packed=packed, endpoint=None, checkpoint=checkpoint)

    def opened_b(self) -> Opened:
        return Opened(self.held_b, self.weights(self.whole_b, self.checkpoint_b))

    def bits(self, a: list[tuple[int, int]], b: list[tuple[int, int]]) -> int:
        return bitmap.of_pairs(a, SHAPE.experts) | bitmap.of_pairs(b, SHAPE_B.experts) << BASE_B

    def view(self, a: list[tuple[int, int]], b: list[tuple[int, int]], *others: Member) -> View:
        target = self.bits(a, b).to_bytes(8, "little")
        me = Member(
            name="expert/9", pool="expert", state="serving", incarnation=9, address="", pid=1, host="", target=target
        )  # fmt: skip
        self.epoch += 1
        view = self.world.view(*others, me, epoch=self.epoch)
        return replace(view, models=self.models, model_hash=self.a.hash)

    def want(self, a: list[tuple[int, int]], b: list[tuple[int, int]], *others: Member) -> None:
        self.loader.apply(self.view(a, b, *others))

    def reached(self, a: list[tuple[int, int]], b: list[tuple[int, int]], opened: tuple[str, ...]) -> None:
        wanted = (self.bits(a, b), self.epoch, opened)
        self.wait(lambda: self.reports and self.reports[-1] == wanted)
        assert self.held_a.at == set(a) and self.held_b.at == set(b)

    def wait(self, ready: Callable[[], object]) -> None:
        end_s = time.monotonic() + SOON_S
        while not ready():
            assert time.monotonic() < end_s, (self.reports[-3:], self.epoch, self.faults)
            time.sleep(0.005)


@pytest.fixture
def world(tmp_path: Path, models: tuple[Path, Path]) -> Iterator[World]:
    made = World(tmp_path, models[0])
    yield made
    made.close()


@pytest.fixture
def pool(world: World, models: tuple[Path, Path]) -> Pool:
    return Pool(world, models[1])


def serving(bits: int, packed: PackedExperts | None = None, **changed: Any) -> Member:
    fields = {
        "name": "expert/1", "pool": "expert", "state": "serving", "incarnation": 1, "address": "127.0.0.1:1", "pid": 1,
        "host": "", "serving": bits.to_bytes(8, "little"),
    }  # fmt: skip
    return Member(**(fields | changed), numerics_class=packed.layout.numerics_class if packed else "")


def test_whatever_views_say_each_open_model_reaches_its_target_and_none_that_is_not_open_is_touched(
    pool: Pool,
) -> None:
    seed = time.time_ns()
    draw = random.Random(seed)
    pool.loader.start()
    opens_at, last = draw.randrange(1, 8), ([], [])
    for turn in range(12):
        a, b = (sorted(draw.sample(all, draw.randrange(len(all) + 1))) for all in (PAIRS, PAIRS_B))
        if turn < opens_at:
            pool.want(a, b)
            if draw.random() < 0.5:
                pool.reached(a, [], ())
            assert not pool.held_b.at, f"seed {seed}"
        elif turn == opens_at:
            # For the View that is there, whose target names it.
            pool.loader.open(*pool.opened_b())
            a, b = last
            pool.reached(a, b, (pool.b.hash,))
        else:
            pool.want(a, b)
            if draw.random() < 0.5:
                pool.reached(a, b, (pool.b.hash,))
        last = a, b
    pool.reached(*last, (pool.b.hash,))
    for layer, expert in PAIRS_B:
        held = (layer, expert) in last[1]
        assert pool.loader.holds(pool.b.hash, layer, expert) == held, f"seed {seed}"
    assert not pool.faults, f"seed {seed}"


def test_what_nobody_serves_is_loaded_first_of_whichever_model(pool: Pool) -> None:
    seed = time.time_ns()
    draw = random.Random(seed)
    a, b = draw.sample(PAIRS, len(PAIRS) // 2), draw.sample(PAIRS_B, len(PAIRS_B) // 2)
    # What this server itself is said to serve, and does not hold, is served by nobody.
    other, own = serving(pool.bits(a, b)), serving(pool.bits(PAIRS, PAIRS_B), name="expert/9")
    view = pool.view(PAIRS, PAIRS_B, other)
    me = replace(view.members[-1], serving=own.serving)
    pool.loader.apply(replace(view, members=(other, me)))
    pool.loader.open(*pool.opened_b())
    pool.loader.start()
    pool.reached(PAIRS, PAIRS_B, (pool.b.hash,))
    served = [(SHAPE.experts, *pair) for pair in a] + [(SHAPE_B.experts, *pair) for pair in b]
    ranks = [place in served for place in pool.order]
    assert ranks == sorted(ranks) and len(set(ranks)) == 2, f"seed {seed}: {pool.order}"


def test_a_model_that_the_view_no_longer_wants_is_dropped_and_not_said_to_be_open(pool: Pool) -> None:
    pool.loader.start()
    pool.loader.open(*pool.opened_b())
    pool.want(PAIRS, PAIRS_B)
    pool.reached(PAIRS, PAIRS_B, (pool.b.hash,))
    leaving = replace(pool.b, leaving=True)
    pool.models = (pool.a, leaving)
    # Its last requests are answered.
    pool.want(PAIRS, PAIRS_B[:3])
    pool.reached(PAIRS, PAIRS_B[:3], (pool.b.hash,))
    pool.want(PAIRS, [])
    pool.reached(PAIRS, [], ())
    assert list(pool.loader.models) == [pool.a.hash]
    pool.models = (pool.a,)
    pool.want(PAIRS, [])
    pool.reached(PAIRS, [], ())
    assert not pool.faults


def test_a_process_without_experts_goes_on_and_one_ends_only_for_want_of_its_own_models(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "RETRY_S", 0.01)
    opened, tries = pool.opened_b(), [0]

    def nowhere(*of: object, **how: object) -> None:
        tries[0] += 1
        raise WeightsUnavailable("nobody has it")

    monkeypatch.setattr(opened.weights, "expert", nowhere)
    pool.loader.start()
    pool.loader.open(*opened)
    pool.want([], [])
    pool.reached([], [], (pool.b.hash,))
    pool.want([], PAIRS_B[:1])
    pool.wait(lambda: tries[0] > 3 * loading.TRIES)
    assert not pool.faults
    monkeypatch.setattr(pool.loader.models[pool.a.hash].weights, "expert", nowhere)
    pool.want(PAIRS[:1], PAIRS_B[:1])
    pool.wait(lambda: pool.faults)
    assert pool.faults == ["nobody has it"]


def test_a_server_whose_models_all_sleep_outlives_a_disk_that_fails_and_weights_that_nobody_has(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "RETRY_S", 0.01)
    pool.loader.start()
    pool.loader.open(*pool.opened_b())
    pool.want(PAIRS, PAIRS_B)
    pool.reached(PAIRS, PAIRS_B, (pool.b.hash,))
    awake, weights, tries = pool.models, pool.loader.models[pool.a.hash].weights, [0]

    def full() -> None:
        raise OSError(errno.ENOSPC, "no space is left")

    def nowhere(*of: object, **how: object) -> None:
        tries[0] += 1
        raise WeightsUnavailable("nobody has it")

    monkeypatch.setattr(weights.packed, "page_out", full)
    pool.models = tuple(replace(model, asleep=True) for model in awake)
    with caplog.at_level(logging.INFO):
        pool.want([], [])
        pool.reached([], [], (pool.b.hash,))
    said = [each.getMessage() for each in caplog.records if "paged_out" in each.getMessage()]
    assert sorted(line.split()[0] for line in said) == ["not_paged_out", "paged_out"], said
    monkeypatch.setattr(pool.loader.models[pool.a.hash].weights, "expert", nowhere)
    pool.models = awake
    pool.want(PAIRS, PAIRS_B[:1])
    pool.wait(lambda: tries[0] > 3 * loading.TRIES * len(PAIRS))
    pool.want(PAIRS, [])
    pool.wait(lambda: tries[0] > 6 * loading.TRIES * len(PAIRS))
    assert not pool.faults
    monkeypatch.undo()
    pool.want(PAIRS, PAIRS_B)
    pool.reached(PAIRS, PAIRS_B, (pool.b.hash,))


def test_what_rots_is_found_and_mended_while_another_model_is_loaded(pool: Pool) -> None:
    pool.loader.start()
    pool.want(PAIRS, [])
    pool.reached(PAIRS, [], ())
    packed = pool.world.whole
    layer, expert = PAIRS[-1]
    right, opened = bytes(packed.blob(layer, expert)), pool.opened_b()
    with packed.path.open("r+b", buffering=0) as file:
        file.seek(packed.layout.offset(layer, expert) + 4096)
        file.write(bytes(byte ^ 0xFF for byte in right[4096 : 4096 + 64]))
    pool.held_a.doubted = [(layer, expert)]
    pool.order.clear()
    pool.want(PAIRS, PAIRS_B)
    pool.loader.open(*opened)
    pool.reached(PAIRS, PAIRS_B, (pool.b.hash,))
    assert pool.loader.damaged == 1 and bytes(packed.blob(layer, expert)) == right
    assert pool.order.index((SHAPE.experts, layer, expert)) < len(PAIRS_B) and not pool.faults


class Opening:
    """What opens B, as a test says; and the thread that has it opened."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.server, self.asked = pool, Server(), list[Model]()
        self.act: Callable[[], Opened] = pool.opened_b
        self.others = process.OtherModels("expert/9", self.server, pool.loader, self.prepare)  # type: ignore[arg-type]
        pool.world.undo.append(self.others.close)

    def prepare(self, model: Model) -> Opened:
        self.asked.append(model)
        return self.act()

    def follow(self, a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
        view = self.pool.view(a, b)
        self.pool.loader.apply(view)
        self.others.apply(view)


def test_a_held_models_repair_goes_on_while_another_is_packed(pool: Pool) -> None:
    run, packed, done = Opening(pool), pool.world.whole, threading.Event()
    pool.loader.start()

    def act() -> Opened:
        assert done.wait(SOON_S)
        return pool.opened_b()

    run.act = act
    run.follow(PAIRS, PAIRS_B)
    pool.wait(lambda: run.asked)
    pool.reached(PAIRS, [], ())
    layer, expert = PAIRS[1]
    right = bytes(packed.blob(layer, expert))
    with packed.path.open("r+b", buffering=0) as file:
        file.seek(packed.layout.offset(layer, expert))
        file.write(bytes(byte ^ 0xFF for byte in right[:64]))
    pool.wait(lambda: pool.loader.damaged == 1 and bytes(packed.blob(layer, expert)) == right)
    run.follow(PAIRS[1:], PAIRS_B)
    pool.reached(PAIRS[1:], [], ())
    done.set()
    pool.reached(PAIRS[1:], PAIRS_B, (pool.b.hash,))
    assert run.asked == [pool.b]


def test_a_model_that_cannot_be_opened_is_said_once_and_tried_again_when_its_entry_changes_or_later(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_AGAIN_S", 0.01)
    monkeypatch.setattr(process, "_REFUSED_S", 3600.0)
    run = Opening(pool)
    pool.loader.start()

    def refuse() -> Opened:
        raise CheckpointInvalid("no such directory")

    def said() -> list[str]:
        return [each.getMessage() for each in caplog.records if "model_not_opened" in each.getMessage()]

    run.act = refuse
    with caplog.at_level(logging.WARNING):
        run.follow(PAIRS, [])
        pool.wait(lambda: said() == ["model_not_opened name=b reason=no such directory"])
        before = run.others._wake
        for _ in range(20):
            run.follow(PAIRS, [])
            pool.wait(lambda: not before.is_set())
        assert run.asked == [pool.b]
        # Another entry is another try at once.
        pool.b = replace(pool.b, path="/elsewhere")
        pool.models = (pool.a, pool.b)
        run.follow(PAIRS, [])
        pool.wait(lambda: len(run.asked) == 2)
        monkeypatch.setattr(process, "_REFUSED_S", 0.02)
        pool.b = replace(pool.b, path="/nowhere")
        pool.models = (pool.a, pool.b)
        run.follow(PAIRS, [])
        pool.wait(lambda: len(run.asked) > 5)
        assert len(said()) == 3
    run.act = pool.opened_b
    run.follow(PAIRS, PAIRS_B)
    pool.reached(PAIRS, PAIRS_B, (pool.b.hash,))


def test_whatever_opening_a_model_fails_of_others_are_opened_and_closed_and_it_is_tried_again(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seed = time.time_ns()
    fault = random.Random(seed).choice([MemoryError(), KeyError("gate"), RuntimeError(), AssertionError()])
    monkeypatch.setattr(process, "_AGAIN_S", 0.01)
    monkeypatch.setattr(process, "_REFUSED_S", 0.02)
    run = Opening(pool)
    pool.loader.start()

    def fail() -> Opened:
        raise fault

    run.act = fail
    with caplog.at_level(logging.WARNING):
        run.follow(PAIRS, PAIRS_B)
        pool.wait(lambda: len(run.asked) > 3)
    (said,) = [each for each in caplog.records if "model_not_opened" in each.getMessage()]
    assert repr(fault) in said.getMessage() and said.exc_info, f"seed {seed}"
    run.act = pool.opened_b
    pool.reached(PAIRS, PAIRS_B, (pool.b.hash,))
    pool.models = (pool.a,)
    run.follow(PAIRS, [])
    pool.wait(lambda: run.server.closed == [pool.b.hash])


def test_a_model_that_is_gone_is_closed_once_its_clients_are_and_one_that_comes_back_is_opened_anew(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_AGAIN_S", 0.01)
    run = Opening(pool)
    pool.loader.start()
    run.follow(PAIRS, PAIRS_B)
    pool.reached(PAIRS, PAIRS_B, (pool.b.hash,))
    run.server.clients, pool.models = 1 << 30, (pool.a,)
    run.follow(PAIRS, [])
    pool.reached(PAIRS, [], ())
    pool.wait(lambda: run.server.clients < (1 << 30) - 3)
    assert not run.server.closed
    # Its native part is still there.
    pool.models = (pool.a, pool.b)
    run.follow(PAIRS, PAIRS_B)
    pool.reached(PAIRS, PAIRS_B, (pool.b.hash,))
    assert len(run.asked) == 1
    run.server.clients, pool.models = 0, (pool.a,)
    run.follow(PAIRS, [])
    pool.wait(lambda: run.server.closed == [pool.b.hash])
    pool.models = (pool.a, replace(pool.b, leaving=True))
    run.follow(PAIRS, [])
    pool.models = (pool.a, pool.b)
    run.follow(PAIRS, PAIRS_B)
    pool.reached(PAIRS, PAIRS_B, (pool.b.hash,))
    assert len(run.asked) == 2 and not run.asked[-1].leaving


def test_ending_does_not_wait_for_packing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", crashed.append)
    run, done, ended = Opening(pool), threading.Event(), threading.Event()

    def act() -> Opened:
        done.wait(SOON_S)
        ended.set()
        raise ServerClosed("it was closed meanwhile")

    run.act = act
    run.follow(PAIRS, PAIRS_B)
    pool.wait(lambda: run.asked)
    run.others.close()
    assert not ended.is_set() and list(pool.loader.models) == [pool.a.hash]
    done.set()
    run.others._thread.join(SOON_S)
    assert not run.others._thread.is_alive() and not crashed


def test_a_model_of_which_experts_may_still_be_loaded_is_not_closed(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_AGAIN_S", 0.01)
    looks, wanted = [0], process.wanted_models

    def look(view: View, name: str) -> tuple[Model, ...]:
        looks[0] += 1
        return wanted(view, name)

    monkeypatch.setattr(process, "wanted_models", look)
    run = Opening(pool)
    run.follow([], [])
    pool.wait(lambda: pool.b.hash in pool.loader.models)
    pool.models = (pool.a,)
    run.follow([], [])
    began = looks[0]
    pool.wait(lambda: looks[0] > began + 3)
    assert not run.server.closed
    pool.loader.start()
    pool.wait(lambda: run.server.closed == [pool.b.hash])


def test_servers_are_asked_only_for_models_of_which_they_serve_something(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(weights_module, "manifest_of", lambda member, *_: asked.append(member.name))
    layout = pool.whole_b.layout
    only_a = serving(pool.bits(PAIRS, []), pool.whole_b)
    assert manifest_from(pool.view([], [], only_a), layout) is None and not asked
    both = serving(pool.bits(PAIRS, PAIRS_B[-1:]), pool.whole_b, name="expert/2")
    manifest_from(pool.view([], [], only_a, both), layout)
    assert asked == ["expert/2"]


def test_takers_of_one_model_leave_a_place_for_those_of_another(pool: Pool, tmp_path: Path) -> None:
    """A first load of one by all servers must not keep the other from being repaired."""
    giver = Peer(pool.world.whole, 1)
    pool.world.undo.append(giver.close)
    giver.sender._packed = lambda: [pool.world.whole, pool.whole_b]
    giver.sender._serves = lambda *of: True
    numerics = {"numerics_class": pool.whole_b.layout.numerics_class}
    member = giver.member(serving=pool.bits(PAIRS, PAIRS_B).to_bytes(8, "little"), **numerics)
    views = [pool.world.view(member), replace(pool.world.view(member), experts=SHAPE_B.experts)]
    endpoints, takers = [], []
    try:
        for number in range(TAKERS + 1):
            endpoints.append(ShmEndpoint(f"expert/{20 + number}", 20 + number))
            whole = (pool.world.whole, pool.whole_b)[number < TAKERS]
            packed = PackedExperts.begin(whole.manifest, tmp_path / str(number))
            takers.append(Weights(name="x", packed=packed, endpoint=endpoints[-1], checkpoint=None))
        view_b = replace(views[1], members=(replace(member, serving=bytes(b"\xff" * 8)),))
        for taker in takers[: TAKERS - 1]:
            assert same(taker.expert(0, 0, view_b), pool.whole_b.expert(0, 0))
        with pytest.raises(WeightsUnavailable, match=f"{TAKERS - 1} others are being given weights of model"):
            takers[TAKERS - 1].expert(0, 0, view_b)
        assert same(takers[TAKERS].expert(1, 2, views[0]), pool.world.whole.expert(1, 2))
        takers[0].rest()
        key = f"weights of model {pool.b.hash[:16]}"
        pool.wait(lambda: giver.sender._takers[key] <= TAKERS - 2)
        takers[TAKERS - 1]._rates.failed(member.name, 0.0)
        assert same(takers[TAKERS - 1].expert(0, 0, view_b), pool.whole_b.expert(0, 0))
    finally:
        for taker in takers:
            taker.rest()
        for endpoint in endpoints:
            endpoint.close()
