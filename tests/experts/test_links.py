"""Promises of a client's links: nothing that one server does or lacks costs another, and nothing is left behind."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import grpc
import numpy as np
import pytest

from experts.client import ExpertClient
from experts.cpu import CpuBackend
from experts.links import ATTACH_S, CONNECT_BACK_S, AttachFailed, config_of
from experts.model import Dtype, ExpertShape
from experts.proto import experts_pb2 as pb
from experts.proto import experts_pb2_grpc as rpc
from experts.server import ExpertServer, ExpertsService
from experts.wire import VERSION
from p2p.descriptor import Descriptor, Transport
from p2p.local import LocalPeer, LocalWindow, ShmEndpoint
from p2p.shm_link import new_token
from router.view import Member, View
from tests.experts.exchange import exchange
from tests.experts.steps import Weights, shape_of
from tests.host_stalls import bounded
from tests.p2p.one_host import retired_bytes

pytestmark = pytest.mark.alone

FINGERPRINT = "ab" * 32
SHAPE = shape_of()
EVERY = b"\xff" * 8
# For what is promised to be quick: on a quiet machine it takes a few milliseconds.
SOON_S = 1.0


class PoorEndpoint(ShmEndpoint):
    """An endpoint whose system runs out of memory a number of times."""

    failures = 0

    def export_window(self, nbytes: int, incarnation: int | None = None) -> LocalWindow:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().export_window(nbytes, incarnation)


class Frozen(rpc.ExpertsServicer):
    """Answers an Attach with the window of an endpoint that takes connections and never speaks."""

    def __init__(self, wire_version: int = VERSION) -> None:
        self.wire_version = wire_version
        self.weights: list[int] = []
        name = b"\0p2p-" + new_token().hex().encode()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(name)
        self.listener.listen(8)
        offer = Descriptor(
            transport=Transport.SHM, incarnation=8, nbytes=4096, address=name, name="x", token=new_token()
        )
        self.descriptor = offer.encode()

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        self.weights.append(request.weight)
        return pb.AttachReply(
            request_descriptor=self.descriptor,
            server_incarnation=8,
            cores=[-1],
            wire_version=self.wire_version,
        )


class World:
    """Servers and clients in this process."""

    def __init__(self) -> None:
        self.weights = Weights(SHAPE, Dtype.FLOAT32, 1)
        self.epoch = 0
        self.undo: list[Callable[[], object]] = []

    def listen(self, service: rpc.ExpertsServicer) -> str:
        control = grpc.server(ThreadPoolExecutor(4))
        rpc.add_ExpertsServicer_to_server(service, control)
        address = f"127.0.0.1:{control.add_insecure_port('127.0.0.1:0')}"
        control.start()
        self.undo.append(lambda: control.stop(0).wait(60))
        return address

    def server(self, incarnation: int) -> tuple[ExpertServer, str]:
        """One that holds everything."""
        endpoint = ShmEndpoint(f"expert/{incarnation}", incarnation)
        server = ExpertServer(endpoint=endpoint, shape=SHAPE, dtype=Dtype.FLOAT32, model_hash=FINGERPRINT)
        for key, gate_up in self.weights.gate_up.items():
            server.first.set_expert(*key, gate_up, self.weights.down[key])
        server.start()
        self.undo += [endpoint.close, server.close]
        service = ExpertsService()
        service.server = server
        return server, self.listen(service)

    def deaf(self) -> str:
        """An address that takes connections and never answers."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.undo.append(listener.close)
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def client(
        self,
        on_adopted: Callable[[int], None] | None = None,
        incarnation: int = 100,
        shape: ExpertShape = SHAPE,
        fingerprint: str = FINGERPRINT,
    ) -> tuple[ExpertClient, PoorEndpoint]:
        endpoint = PoorEndpoint(f"attention/{incarnation}", incarnation)
        client = ExpertClient(
            endpoint=endpoint,
            shape=shape,
            dtype=Dtype.FLOAT32,
            model_hash=fingerprint,
            incarnation=incarnation,
            on_adopted=on_adopted,
        )
        self.undo += [endpoint.close, client.close]
        return client, endpoint

    def view(self, *members: tuple[int, str, bytes]) -> View:
        """A newer View of (incarnation, address, serving)."""
        self.epoch += 1
        return View(
            term=1,
            epoch=self.epoch,
            replicas_wanted=1,
            layers=SHAPE.layers,
            experts=SHAPE.experts,
            members=tuple(
                Member(
                    name=f"expert/{incarnation}", pool="expert", state="serving", incarnation=incarnation,
                    address=address, pid=1, host="here", serving=serving,
                )
                for incarnation, address, serving in members
            ),
        )  # fmt: skip

    def check(self, client: ExpertClient, deadline_s: float = 10.0, weights: Weights | None = None) -> None:
        """One call with the reference's bits."""
        weights = weights or self.weights
        shape, rng = weights.shape, np.random.default_rng(self.epoch)
        rows = rng.standard_normal((5, shape.hidden)).astype(np.float32)
        ids = np.stack([rng.permutation(shape.experts)[: shape.top_k] for _ in range(5)]).astype(np.uint16)
        gates = rng.random((5, shape.top_k), dtype=np.float32)
        out = np.zeros((5, shape.hidden), np.float32)
        wanted = weights.reference(1, rows, ids, gates, out)
        found = exchange(client, 1, rows, ids, gates, deadline_s)
        assert found.tobytes() == wanted.tobytes(), f"seed {self.epoch}"


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for undo in reversed(made.undo):
        undo()


def until(true: Callable[[], object], within_s: float = 60.0) -> bool:
    """Whether it becomes true in time."""
    end_s = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.005)
    return True


def hold_up(endpoint: ShmEndpoint, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[LocalPeer]]:
    """Lets no disconnect end until the event is set; the list is of those that were asked for."""
    let_go, asked, disconnect = threading.Event(), [], endpoint.disconnect

    def disconnect_slowly(peer: LocalPeer) -> None:
        asked.append(peer)
        let_go.wait()
        disconnect(peer)

    monkeypatch.setattr(endpoint, "disconnect", disconnect_slowly)
    return let_go, asked


def test_one_server_serves_clients_of_two_models(world: World) -> None:
    server, address = world.server(5)
    other = Weights(shape_of(hidden=80, intermediate=24), Dtype.FLOAT32, 2)
    fingerprint = "cd" * 32
    model = server.open_model(
        shape=other.shape, dtype=Dtype.FLOAT32, model_hash=fingerprint, config=b'{"of": "the other"}'
    )
    for key, gate_up in other.gate_up.items():
        model.set_expert(*key, gate_up, other.down[key])
    view = world.view((5, address, EVERY))
    first, _ = world.client()
    second, _ = world.client(incarnation=101, shape=other.shape, fingerprint=fingerprint)
    for client in (first, second):
        client.apply_view(view)
        assert until(lambda client=client: client.covers)
    for _ in range(5):
        world.check(first)
        world.check(second, weights=other)
    (member,) = view.members
    assert config_of(member, None, fingerprint) == {"of": "the other"} and config_of(member, None) == {}
    with pytest.raises(AttachFailed, match="FAILED_PRECONDITION: model ef is asked for; here is"):
        config_of(member, None, "ef")


def test_a_client_answers_while_its_links_close_and_closes_each_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [(5 + i, world.server(5 + i)[1], EVERY) for i in range(4)]
    client, endpoint = world.client()
    client.apply_view(world.view(*members))
    assert until(lambda: client.adopted_epoch == 1)
    peers, windows = list(endpoint._peers), list(endpoint._windows)
    let_go, asked = hold_up(endpoint, monkeypatch)
    with ThreadPoolExecutor(1) as lease:
        try:
            client.apply_view(world.view(members[0]))
            assert until(lambda: asked), "nothing was disconnected"
            (name,) = lease.submit(client.stats).result(60)
            assert name == "expert/5"
            world.check(client)
            closing = threading.Thread(target=client.close)
            closing.start()
            assert lease.submit(client.stats).result(60) is not None
            closing.join(0.3)
            assert closing.is_alive(), "the client was closed before its links were"
        finally:
            let_go.set()
        closing.join(60)
    assert not closing.is_alive()
    assert sorted(map(id, asked)) == sorted(map(id, peers))
    assert not endpoint._peers and not endpoint._windows
    assert all(window._memory is None for window in windows if window not in endpoint._retired)


def test_a_server_answers_while_its_clients_links_close_and_closes_each_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, address = world.server(5)
    clients = [world.client(incarnation=100 + i) for i in range(3)]
    view = world.view((5, address, EVERY))
    for client, _ in clients:
        client.apply_view(view)
        assert until(lambda client=client: client.adopted_epoch == 1)
    peers = list(server._endpoint._peers)  # pyright: ignore[reportAttributeAccessIssue]
    let_go, asked = hold_up(server._endpoint, monkeypatch)  # pyright: ignore[reportArgumentType]
    with ThreadPoolExecutor(1) as lease:
        try:
            for client, endpoint in clients[:2]:
                client.close()
                endpoint.close()
            lease.submit(server.reap).result(60)
            assert server.clients == ("attention/102",)
            assert until(lambda: asked), "nothing was disconnected"
            lease.submit(server.counters).result(60)
            lease.submit(server.set_lease, 1 << 62).result(60)
            world.check(clients[2][0])
            closing = threading.Thread(target=server.close)
            closing.start()
            closing.join(0.3)
            assert closing.is_alive(), "the server was closed before its links were"
            assert lease.submit(server.counters).result(60).rows
        finally:
            let_go.set()
        closing.join(60)
    assert not closing.is_alive()
    assert sorted(map(id, asked)) == sorted(map(id, peers))
    assert not server._endpoint._peers  # pyright: ignore[reportAttributeAccessIssue]


def test_a_server_s_own_connection_ends_while_the_client_still_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, address = world.server(5)
    found, connect = [], server._endpoint.connect

    def connect_watched(descriptor: bytes, timeout_s: float = 5.0) -> object:
        found.append(timeout_s)
        return connect(descriptor, timeout_s)

    monkeypatch.setattr(server._endpoint, "connect", connect_watched)
    client, _ = world.client()
    client.apply_view(world.view((5, address, EVERY)))
    assert until(lambda: client.adopted_epoch == 1)
    assert found == [CONNECT_BACK_S] and CONNECT_BACK_S < ATTACH_S


def test_want_of_memory_ends_when_memory_is_back(world: World) -> None:
    _, address = world.server(5)
    client, endpoint = world.client()
    endpoint.failures = 2
    client.apply_view(world.view((5, address, EVERY)))
    assert until(lambda: client.adopted_epoch == 1), "no link was tried again"
    world.check(client)


def test_links_are_let_go_and_made_whatever_is_raised_between(world: World) -> None:
    (_, first), (_, second) = world.server(5), world.server(6)
    broken: list[int] = []

    def adopted(epoch: int) -> None:
        if epoch in (2, 3) and broken.count(epoch) < 3:
            broken.append(epoch)
            raise RuntimeError("planted")

    client, endpoint = world.client(adopted)
    client.apply_view(world.view((5, first, EVERY)))
    assert until(lambda: client.attached == ("expert/5",))
    for members in ((), ((6, second, EVERY),)):
        try:
            client.apply_view(world.view(*members))
        except RuntimeError as error:
            assert "planted" in str(error)
    assert broken
    assert until(lambda: client.attached == ("expert/6",))
    world.check(client)
    assert until(lambda: len(endpoint._peers) == 1 and len(endpoint._windows) == 1), "the first link leaked"


def test_a_server_that_drains_serves_until_its_heir_is_attached(world: World) -> None:
    (_, old), (_, heir) = world.server(5), world.server(6)
    client, _ = world.client()
    client.apply_view(world.view((5, old, EVERY)))
    assert until(lambda: client.adopted_epoch == 1)
    client.apply_view(world.view((5, old, b""), (6, "127.0.0.1:1", EVERY)))
    time.sleep(0.6)
    assert client.adopted_epoch == 1
    assert client.attached == ("expert/5",)
    world.check(client)
    client.apply_view(world.view((5, old, b""), (6, heir, EVERY)))
    assert until(lambda: client.adopted_epoch == 3)
    assert client.attached == ("expert/6",)
    world.check(client)


def test_a_server_that_nobody_reaches_keeps_no_route_of_others_in_use(world: World) -> None:
    (_, first), (_, second) = world.server(5), world.server(6)
    dead = (7, "127.0.0.1:1", EVERY)
    client, _ = world.client()
    client.apply_view(world.view((5, first, EVERY), dead))
    assert until(lambda: client.covers)
    assert client.adopted_epoch == 0, "begun before every server was attached"
    client.apply_view(world.view((5, first, EVERY), (6, second, EVERY)))
    assert until(lambda: client.adopted_epoch == 2)
    client.apply_view(world.view((5, first, b""), (6, second, EVERY), dead))
    assert until(lambda: client.adopted_epoch == 3), "others serve all: the first need not wait to unload"
    world.check(client)
    client.apply_view(world.view((5, first, b""), dead))
    assert until(lambda: client.adopted_epoch == 4), "nobody is left who had it"
    client.apply_view(world.view((5, first, EVERY), dead))
    assert until(lambda: client.covers)
    world.check(client)


def test_a_server_that_does_not_answer_delays_no_other_and_no_newer_view(world: World) -> None:
    (_, good), (_, newer) = world.server(5), world.server(6)
    client, _ = world.client()
    deaf = [(10 + i, world.deaf(), EVERY) for i in range(9)]
    with bounded(ATTACH_S):
        client.apply_view(world.view(*deaf, (5, good, EVERY)))
        assert until(lambda: client.covers)
        world.check(client)
        client.apply_view(world.view((6, newer, EVERY)))
        assert until(lambda: client.adopted_epoch == 2)
    assert client.attached == ("expert/6",)
    with bounded(SOON_S):  # Closing waits for no server that does not answer.
        client.close()


def test_a_server_frozen_in_the_handshake_costs_no_more_than_an_attach(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    service = Frozen()
    world.undo.append(service.listener.close)
    client, endpoint = world.client()
    with bounded(ATTACH_S + SOON_S):
        client.apply_view(world.view((8, world.listen(service), EVERY)))
        assert until(lambda: "attach_failed" in caplog.text)
    client.apply_view(world.view())
    assert until(lambda: not endpoint._windows, ATTACH_S + SOON_S)


def test_a_server_of_another_release_is_not_used_whichever_side_is_newer(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    newer, address = world.server(7)
    newer._backend = CpuBackend()
    newer._backend.wire_version = VERSION + 1
    # It does not know the word, as none did at first, and lets everybody in.
    older = Frozen(wire_version=0)
    world.undo.append(older.listener.close)
    client, _ = world.client()
    client.apply_view(world.view((7, address, EVERY), (8, world.listen(older), EVERY)))
    for words in (
        f"asks for wire version {VERSION} (here {VERSION + 1})",
        f"wire version 0 found, {VERSION} needed",
    ):
        assert until(lambda words=words: words in caplog.text), caplog.text
    assert not client.attached and not newer.clients
    newer._backend = CpuBackend()
    client.apply_view(world.view((7, address, EVERY)))
    assert until(lambda: client.attached == ("expert/7",))
    world.check(client)


def test_a_withdrawn_window_is_replaced_and_the_reply_window_waits_for_the_servers_hang_up(
    world: World,
) -> None:
    server, address = world.server(5)
    client, endpoint = world.client()
    client.apply_view(world.view((5, address, EVERY)))
    assert until(lambda: client.adopted_epoch == 1)
    (before,) = server._clients.values()
    with server._lock:
        # It still holds the client's window, so it might write to it: only its own is gone. Native code lets
        # go first, for what is closed may be unmapped at once.
        del server._clients["attention/100"]
        server._rows.remove_client(before.place)
        before.window.close()
    assert until(lambda: len(server.clients) == 1), "the loss of an idle link went unseen"
    assert until(lambda: client.attached == ("expert/5",))
    assert retired_bytes(endpoint) == before.peer.nbytes
    server._endpoint.disconnect(before.peer)
    endpoint.progress()
    assert retired_bytes(endpoint) == 0
    world.check(client)


def test_a_weight_that_changes_is_told_to_servers_that_are_attached_from_then_on(world: World) -> None:
    service = Frozen(wire_version=VERSION + 1)
    world.undo.append(service.listener.close)
    address = world.listen(service)
    client, _ = world.client()
    first, second = Random(seed := time.time_ns() % 2**31).sample(range(1, 1001), 2)
    client.weight = first
    client.apply_view(world.view((8, address, EVERY)))
    assert until(lambda: service.weights)
    assert service.weights[0] == first, seed
    client.weight = second
    count = len(service.weights) + 1
    client.apply_view(world.view((9, address, EVERY)))
    assert until(lambda: len(service.weights) > count)
    assert service.weights[-1] == second, seed
