"""Where the bytes of an expert come from: the fastest source that gives the right ones; nothing wrong is ever held."""

from __future__ import annotations

import importlib.util
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from experts import fetch, loading
from experts.checkpoint import Checkpoint
from experts.fetch import SourceFailed, manifest_of
from experts.give import STREAM_S, TAKERS, WINDOW, Giver
from experts.kernels import PackedExpert
from experts.loading import Loader
from experts.model import Dtype, ExpertShape
from experts.pack import PackedExperts
from experts.proto import experts_pb2 as pb
from experts.proto import experts_pb2_grpc as rpc
from experts.server import ExpertsService
from experts.weights import CHECKPOINT, Rates, Weights, WeightsUnavailable, manifest_from
from p2p import ShmEndpoint, Status
from router import bitmap
from router.view import Member, View
from tests.experts.checkpoint_files import QWEN3, write_model

# Of three pieces, the last one short.
CONFIG = QWEN3 | {"hidden_size": 512, "moe_intermediate_size": 704}
SHAPE = ExpertShape.from_config(CONFIG)
PAIRS = [(layer, expert) for layer in range(SHAPE.layers) for expert in range(SHAPE.experts)]
SOON_S = 10.0


def test_sources_are_each_measured_once_and_then_the_fastest_is_asked() -> None:
    rates, names = Rates(), [CHECKPOINT, "expert/1", "expert/2"]
    assert rates.order(names, 0) == names
    rates.measured(CHECKPOINT, 100, 1.0)
    assert rates.order(names, 0)[0] == "expert/1"
    rates.measured("expert/1", 300, 1.0)
    # A server that nobody measured counts as the best that was, and comes behind it.
    assert rates.order(names, 0) == ["expert/1", "expert/2", CHECKPOINT]
    rates.measured("expert/1", 50, 1.0)
    assert rates.order(names, 0) == [CHECKPOINT, "expert/1", "expert/2"]


def test_a_source_that_is_not_used_is_tried_again_some_day() -> None:
    rates, asked = Rates(), []
    for _ in range(500):
        name = rates.order([CHECKPOINT, "expert/1"], 0)[0]
        asked.append(name)
        rates.measured(name, 1000 if name == CHECKPOINT else 100, 1.0)
    # 1.01 ** 231 is 10.
    assert asked.count("expert/1") == 3


def test_a_source_that_failed_is_spared_for_a_while_and_one_that_lied_for_ever() -> None:
    rates = Rates()
    rates.measured("expert/1", 1000, 1.0)
    rates.failed("expert/1", 5.0)
    rates.failed("expert/2", math.inf)
    names = ["expert/1", "expert/2", "expert/3"]
    assert rates.order(names, 4.9) == ["expert/3"]
    assert rates.order(names, 5.0) == ["expert/1", "expert/3"]


class Peer:
    """A server that gives what it has packed, and serves no rows."""

    def __init__(
        self, packed: PackedExperts, incarnation: int, opener: Callable[..., Any] = ShmEndpoint
    ) -> None:
        self.packed = packed
        self.endpoint = opener(f"expert/{incarnation}", incarnation)
        self.served = set(PAIRS)
        self.giver = Giver(
            endpoint=self.endpoint, packed=packed, serves=lambda layer, expert: (layer, expert) in self.served
        )
        self.service = ExpertsService()
        self.service.giver = self.giver
        self.control = grpc.server(ThreadPoolExecutor(8))
        rpc.add_ExpertsServicer_to_server(self.service, self.control)
        self.address = f"127.0.0.1:{self.control.add_insecure_port('127.0.0.1:0')}"
        self.control.start()

    def member(self, **changed: Any) -> Member:
        held = bitmap.to_bytes(bitmap.of_pairs(PAIRS, SHAPE.experts), SHAPE.layers, SHAPE.experts)
        fields = {
            "name": self.endpoint.name, "pool": "expert", "state": "serving", "address": self.address, "pid": 1,
            "incarnation": self.endpoint.incarnation, "host": "here", "target": held, "serving": held,
            "numerics_class": self.packed.layout.numerics_class,
        }  # fmt: skip
        return Member(**(fields | changed))

    def close(self) -> None:
        self.control.stop(0).wait(SOON_S)
        self.giver.close()
        self.endpoint.close()


class World:
    """A checkpoint, its packed file, servers that have it, and a host that has nothing."""

    def __init__(self, root: Path, model: Path) -> None:
        self.checkpoint = Checkpoint.open(model)
        self.root, self.undo = root, []
        self.whole = PackedExperts.open(self.checkpoint, SHAPE, Dtype.BFLOAT16, directory=model / "packed")
        self.endpoint = ShmEndpoint("expert/9", 9)

    def peer(self, incarnation: int) -> Peer:
        made = Peer(self.whole, incarnation)
        self.undo.append(made.close)
        return made

    def weights(self, checkpoint: bool = False, peers: bool = True) -> Weights:
        return Weights(
            name="expert/9",
            packed=PackedExperts.begin(self.whole.manifest, self.root / "begun"),
            endpoint=self.endpoint if peers else None,
            checkpoint=self.checkpoint if checkpoint else None,
        )

    def view(self, *members: Member, epoch: int = 1) -> View:
        return View(
            term=1,
            epoch=epoch,
            replicas_wanted=1,
            layers=SHAPE.layers,
            experts=SHAPE.experts,
            members=members,
        )

    def close(self) -> None:
        self.endpoint.close()
        for undo in self.undo:
            undo()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("weights") / "model", CONFIG)


@pytest.fixture
def world(tmp_path: Path, model: Path) -> Iterator[World]:
    made = World(tmp_path, model)
    yield made
    made.close()


def same(found: PackedExpert, wanted: PackedExpert) -> bool:
    return np.array_equal(found.gate_up, wanted.gate_up) and np.array_equal(found.down, wanted.down)


@pytest.mark.parametrize(("checkpoint", "peers"), [(False, True), (True, False), (True, True)])
def test_every_source_fills_the_file_that_packing_makes(world: World, checkpoint: bool, peers: bool) -> None:
    assert world.whole.layout.blob_bytes > 2 * WINDOW.payload_bytes
    weights, view = world.weights(checkpoint, peers), world.view(world.peer(1).member())
    for layer, expert in PAIRS:
        assert same(weights.expert(layer, expert, view), world.whole.expert(layer, expert))
    weights.rest()
    assert weights.packed.path.read_bytes() == world.whole.path.read_bytes()
    # Another server of the host needs nobody.
    beside = world.weights(peers=False)
    assert same(beside.expert(1, 3, view), world.whole.expert(1, 3))


@pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu13") is None,
    reason="needs the package nixl-cu13 (pip install --no-deps nixl-cu13), found none",
)
def test_weights_come_over_nixl_too(world: World) -> None:
    from p2p.nixl import NixlEndpoint

    peer = Peer(world.whole, 1, NixlEndpoint)
    world.endpoint.close()
    world.endpoint = NixlEndpoint("expert/9", 9)
    weights, view = world.weights(), world.view(peer.member())
    for layer, expert in PAIRS:
        assert same(weights.expert(layer, expert, view), world.whole.expert(layer, expert))
    peer.close()
    with pytest.raises(WeightsUnavailable, match="expert/1: "):
        weights.expert(0, 0, view, anew=True)
    weights.rest()


def test_a_window_is_given_back_by_both_ends(world: World) -> None:
    peer = world.peer(1)
    weights, view = world.weights(), world.view(peer.member())
    weights.expert(0, 0, view)
    assert len(peer.endpoint._peers) == 1 and len(world.endpoint._windows) == 1
    weights.rest()
    world.endpoint.progress()
    assert not peer.endpoint._peers and not world.endpoint._windows and not world.endpoint.retired_bytes
    weights.expert(0, 1, view)
    weights.rest()


def test_bytes_written_to_a_place_that_went_bad_are_the_right_ones(world: World) -> None:
    weights, view = world.weights(checkpoint=True), world.view(world.peer(1).member())
    weights.expert(0, 0, view)
    at = weights.packed.layout.offset(0, 0)
    with weights.packed.path.open("r+b") as file:
        file.seek(at)
        file.write(b"bad")
    assert same(weights.expert(0, 0, view), world.whole.expert(0, 0))
    weights.rest()


def test_a_server_that_does_not_serve_an_expert_is_not_believed_to_have_it(world: World) -> None:
    peer = world.peer(1)
    peer.served.discard((1, 2))
    weights, view = world.weights(), world.view(peer.member())
    with pytest.raises(WeightsUnavailable, match="NOT_FOUND: expert 2 of MoE layer 1 is not served here"):
        weights.expert(1, 2, view)
    assert weights.packed.is_hole(1, 2)
    with pytest.raises(WeightsUnavailable, match="no source may be asked now"):
        weights.expert(1, 2, view)
    assert same(weights.expert(1, 2, world.view(world.peer(2).member())), world.whole.expert(1, 2))
    weights.rest()


@pytest.mark.parametrize("fault", ["short", "bit", "other expert"])
def test_wrong_bytes_are_never_written_and_their_source_never_asked_again(world: World, fault: str) -> None:
    bad, good = world.peer(8), world.peer(1)
    right_put = bad.endpoint.put

    def put(peer: Any, offset: int, source: np.ndarray) -> None:
        piece = source.copy()
        if fault == "bit":
            piece[-1] ^= 0x80
        elif fault == "short":
            piece = piece[:-1]
        else:
            piece = world.whole.blob(1, 3)[: len(piece)]
        right_put(peer, offset, piece)

    bad.endpoint.put = put
    weights = world.weights()
    with pytest.raises(WeightsUnavailable, match="expert/8 gave wrong bytes"):
        weights.expert(0, 0, world.view(bad.member()))
    assert weights.packed.is_hole(0, 0)
    bad.endpoint.put = right_put
    with pytest.raises(WeightsUnavailable, match="no source may be asked now"):
        weights.expert(0, 0, world.view(bad.member()))
    assert same(weights.expert(0, 0, world.view(bad.member(), good.member())), world.whole.expert(0, 0))
    weights.rest()


def test_a_silent_source_is_given_up_and_ending_does_not_wait_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = world.peer(1)
    silent.endpoint.signal = lambda *_: None
    monkeypatch.setattr(fetch, "PIECE_S", 0.2)
    with pytest.raises(WeightsUnavailable, match="expert/1 put nothing for 0 s"):
        world.weights().expert(0, 0, world.view(silent.member()))
    monkeypatch.setattr(fetch, "PIECE_S", 1000.0)
    weights = world.weights()
    threading.Timer(0.2, weights.stop).start()
    with pytest.raises(WeightsUnavailable, match="this server is ending"):
        weights.expert(0, 0, world.view(silent.member()))


def test_a_full_disk_is_said_and_costs_no_source_its_name(world: World) -> None:
    weights, view = world.weights(checkpoint=True), world.view(world.peer(1).member())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    fill, weights.packed.fill = weights.packed.fill, full
    with pytest.raises(WeightsUnavailable, match=r"cannot be written: .*No space left"):
        weights.expert(0, 0, view)
    weights.packed.fill = fill
    assert same(weights.expert(0, 0, view), world.whole.expert(0, 0))


def test_what_is_meant_for_another_server_model_or_packing_is_refused(world: World) -> None:
    peer, layout = world.peer(1), world.whole.layout
    assert manifest_of(peer.member(), layout) == world.whole.manifest
    with pytest.raises(SourceFailed, match="FAILED_PRECONDITION: incarnation 2"):
        manifest_of(peer.member(incarnation=2), layout)
    view = world.view(peer.member(incarnation=2), peer.member(numerics_class="other"), peer.member())
    assert manifest_from(view, layout) == world.whole.manifest
    assert manifest_from(world.view(peer.member(serving=b"")), layout) is None
    with pytest.raises(WeightsUnavailable, match="FAILED_PRECONDITION"):
        world.weights().expert(0, 0, world.view(peer.member(incarnation=2)))
    file = write_model(world.root / "other", CONFIG) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + bytes(2))
    changed = Checkpoint.open(world.root / "other")
    assert changed.fingerprint == world.checkpoint.fingerprint, "its digest samples tensors' beginnings only"
    packed = PackedExperts.open(changed, SHAPE, Dtype.BFLOAT16, directory=world.root / "changed")
    weights = Weights(name="expert/9", packed=packed, endpoint=world.endpoint, checkpoint=None)
    with pytest.raises(WeightsUnavailable, match=r"FAILED_PRECONDITION: .* with manifest"):
        weights.expert(0, 0, world.view(peer.member()), anew=True)


def refusal(peer: Peer, timeout_s: float | None, *requests: pb.GiveRequest) -> str:
    """What Give answers to these."""
    with grpc.insecure_channel(peer.address) as channel, pytest.raises(grpc.RpcError) as refused:
        rpc.ExpertsStub(channel).Give(iter(requests), timeout=timeout_s)
    return f"{refused.value.code().name}: {refused.value.details()}"


def test_requests_out_of_bounds_are_refused(world: World) -> None:
    peer = world.peer(1)

    def opening(nbytes: int = WINDOW.nbytes) -> pb.GiveRequest:
        descriptor = world.endpoint.export_window(nbytes).descriptor
        identity = world.whole.manifest.identity
        return pb.GiveRequest(
            opening=pb.GiveOpening(server_incarnation=1, identity=identity, descriptor=descriptor)
        )

    for wrong in (
        {"nbytes": 0},
        {"nbytes": WINDOW.payload_bytes + 1},
        {"nbytes": 10, "offset": world.whole.layout.blob_bytes - 9},
        {"nbytes": 10, "offset": (1 << 64) - 1},
        {"nbytes": 10, "sequence": 0},
    ):
        piece = pb.Piece(**({"sequence": 1, "layer": 0, "expert": 0, "offset": 0} | wrong))
        said = refusal(peer, 10, opening(), pb.GiveRequest(piece=piece))
        assert said.startswith("INVALID_ARGUMENT: piece"), wrong
    for layer, expert in ((2, 0), (0, 4), (1 << 31, 1 << 31)):
        piece = pb.Piece(sequence=1, layer=layer, expert=expert, nbytes=1)
        assert refusal(peer, 10, opening(), pb.GiveRequest(piece=piece)).startswith("NOT_FOUND")
    assert refusal(peer, 10, opening(4096)).startswith("INVALID_ARGUMENT: a window of 4096 bytes was offered")
    assert refusal(peer, 10, pb.GiveRequest(piece=pb.Piece(sequence=1))).startswith("FAILED_PRECONDITION")
    assert refusal(peer, 10).startswith("FAILED_PRECONDITION")
    assert refusal(peer, None, opening()).startswith("INVALID_ARGUMENT: a deadline")
    assert refusal(peer, STREAM_S + 60, opening()).startswith("INVALID_ARGUMENT: a deadline")
    peer.service.giver = None
    assert refusal(peer, 10, opening()).startswith("UNAVAILABLE: This process is no member")
    assert not peer.endpoint._peers


def test_takers_beyond_the_limit_are_sent_elsewhere_until_one_ends(world: World) -> None:
    peer = world.peer(1)
    view = world.view(peer.member())
    takers = [world.weights() for _ in range(TAKERS)]
    for taker in takers:
        taker.expert(0, 0, view, anew=True)
    with pytest.raises(WeightsUnavailable, match="RESOURCE_EXHAUSTED: 4 others are being given weights"):
        world.weights().expert(0, 0, view, anew=True)
    takers[0].rest()
    assert same(world.weights().expert(0, 0, view, anew=True), world.whole.expert(0, 0))
    for taker in takers:
        taker.rest()


def test_a_taker_that_goes_leaves_nothing_at_its_source(world: World) -> None:
    peer = world.peer(1)
    taker = ShmEndpoint("expert/10", 10)
    weights = Weights(name="x", packed=world.weights().packed, endpoint=taker, checkpoint=None)
    weights.expert(0, 0, world.view(peer.member()), anew=True)
    source = weights._sources["expert/1"]
    source._stream._channel.close()  # as the kernel does when a process is killed
    taker.close()
    end_s = time.monotonic() + SOON_S
    while peer.endpoint._peers and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not peer.endpoint._peers
    source._stream._requests.put(None)


class Held:
    """Stands where an expert server does."""

    def __init__(self) -> None:
        self.at: dict[tuple[int, int], tuple[int, int]] = {}

    def set_expert(self, layer: int, expert: int, gate_up: int, down: int) -> None:
        self.at[layer, expert] = (gate_up, down)

    def clear_expert(self, layer: int, expert: int) -> None:
        del self.at[layer, expert]


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
            report=lambda held, epoch: self.reports.append((held, epoch)),
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
    run.wait(lambda: run.reports and run.reports[-1][1] == 1)
    assert held_of(run.reports[-1]) == PAIRS[:5]
    for (layer, expert), at in run.held.at.items():
        wanted = world.whole.expert(layer, expert)
        assert at == (wanted.gate_up.ctypes.data, wanted.down.ctypes.data)
    run.want(PAIRS[3:7], 2)
    run.wait(lambda: run.reports[-1][1] == 2)
    assert held_of(run.reports[-1]) == PAIRS[3:7] == sorted(run.held.at)
    assert run.loader.holds(*PAIRS[3]) and not run.loader.holds(*PAIRS[2])


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


def test_an_expert_that_fails_its_self_test_once_is_had_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    run.wait(lambda: run.reports)
    run.want(PAIRS, 2)
    run.wait(lambda: len(run.reports) > 10)
    assert held_of(run.reports[-1]) == PAIRS[:4] and run.reports[-1][1] == 2
    run.want(PAIRS, 3, peer.member())
    run.wait(lambda: run.reports[-1][1] == 3)
    assert held_of(run.reports[-1]) == PAIRS and not run.faults


def test_a_giver_that_ends_says_so_to_its_takers(world: World) -> None:
    peer = world.peer(1)
    weights, view = world.weights(), world.view(peer.member())
    weights.expert(0, 0, view)
    peer.giver.close()
    with pytest.raises(WeightsUnavailable, match="UNAVAILABLE: expert/1 is ending"):
        weights.expert(0, 1, view)
    assert all(peer.endpoint.status(each) is Status.GONE for each in peer.endpoint._peers)
