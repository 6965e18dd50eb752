"""Where the bytes of an expert come from: the fastest source that gives the right ones; nothing wrong is ever held."""

from __future__ import annotations

import importlib.util
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from experts import transfer
from experts import weights as weights_module
from experts.checkpoint import Checkpoint
from experts.manifest import PackLayout
from experts.model import Dtype
from experts.pack import PackedExperts
from experts.proto import experts_pb2 as pb
from experts.proto import experts_pb2_grpc as rpc
from experts.transfer import STREAM_S, TAKERS, WINDOW, SourceFailed, manifest_of
from experts.weights import CHECKPOINT, Rates, Weights, WeightsUnavailable, manifest_from
from p2p.endpoint import Status
from p2p.local import ShmEndpoint
from tests.experts.weights_world import PAIRS, SHAPE, SOON_S, Peer, World, same, write
from tests.p2p.one_host import retired_bytes


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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("weights") / "model")


@pytest.fixture
def world(tmp_path: Path, model: Path) -> Iterator[World]:
    made = World(tmp_path, model)
    yield made
    made.close()


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


def test_a_connection_that_takes_long_does_not_count_against_a_fast_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, pack_blob, packed = world.peer(1), weights_module.pack_blob, list[tuple[int, int]]()
    connect = peer.endpoint.connect

    def slow_pack(layout: PackLayout, checkpoint: Checkpoint, layer: int, expert: int) -> np.ndarray:
        packed.append((layer, expert))
        time.sleep(2.0)
        return pack_blob(layout, checkpoint, layer, expert)

    monkeypatch.setattr(weights_module, "pack_blob", slow_pack)
    peer.endpoint.connect = lambda *what: (time.sleep(2.5), connect(*what))[1]
    weights, view = world.weights(checkpoint=True), world.view(peer.member())
    for layer, expert in PAIRS:
        weights.expert(layer, expert, view)
    weights.rest()
    assert packed == PAIRS[:1]


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
    assert not peer.endpoint._peers and not world.endpoint._windows and not retired_bytes(world.endpoint)
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
    monkeypatch.setattr(transfer, "PIECE_S", 0.2)
    with pytest.raises(WeightsUnavailable, match="expert/1 put nothing for 0 s"):
        world.weights().expert(0, 0, world.view(silent.member()))
    monkeypatch.setattr(transfer, "PIECE_S", 1000.0)
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


def test_a_checkpoint_that_cannot_be_read_is_one_source_less(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: Any) -> np.ndarray:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(weights_module, "pack_blob", unreadable)
    weights, view = world.weights(checkpoint=True), world.view(world.peer(1).member())
    assert same(weights.expert(0, 0, view), world.whole.expert(0, 0))
    weights.rest()
    with pytest.raises(WeightsUnavailable, match=r"model: cannot be read: .*Input/output error"):
        world.weights(checkpoint=True, peers=False).expert(0, 1, view)


def test_what_reads_otherwise_than_it_was_written_is_not_held_and_not_its_sources_fault(world: World) -> None:
    weights, view = world.weights(), world.view(world.peer(1).member())
    fill = weights.packed.fill

    def spoilt(layer: int, expert: int, blob: np.ndarray) -> None:
        fill(layer, expert, blob)
        with weights.packed.path.open("r+b") as file:
            file.seek(weights.packed.layout.offset(layer, expert))
            file.write(b"bad")

    weights.packed.fill = spoilt
    with pytest.raises(WeightsUnavailable, match="reads otherwise than it was written"):
        weights.expert(0, 0, view)
    weights.packed.fill = fill
    assert same(weights.expert(0, 0, view), world.whole.expert(0, 0))
    weights.rest()


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
    for none in ({"name": "expert/9"}, {"numerics_class": "other"}):
        with pytest.raises(WeightsUnavailable, match="no source may be asked now"):
            world.weights().expert(0, 0, world.view(peer.member(**none)))
    file = write(world.root / "other") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + bytes(2))
    changed = Checkpoint.open(world.root / "other")
    # As where one of two packers is broken: what they packed differs, and only the manifest tells.
    changed.fingerprint = world.checkpoint.fingerprint
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
        return pb.GiveRequest(opening=pb.GiveOpening(server_incarnation=1, identity=identity, descriptor=descriptor))

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
    peer.service.sender = None
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
    source._channel.close()  # as the kernel does when a process is killed
    taker.close()
    end_s = time.monotonic() + SOON_S
    while peer.endpoint._peers and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not peer.endpoint._peers
    source._requests.put(None)


def test_a_giver_that_ends_says_so_to_its_takers(world: World) -> None:
    peer = world.peer(1)
    weights, view = world.weights(), world.view(peer.member())
    weights.expert(0, 0, view)
    peer.sender.close()
    with pytest.raises(WeightsUnavailable, match="UNAVAILABLE: expert/1 is ending"):
        weights.expert(0, 1, view)
    assert all(peer.endpoint.status(each) is Status.GONE for each in peer.endpoint._peers)
