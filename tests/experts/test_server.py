"""Promises of the server's Python half: what fails leaves nothing behind, and nothing outlives what it uses."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from experts import __main__ as process
from experts import native
from experts.config import ExpertOptions
from experts.model import Dtype
from experts.proto import experts_pb2 as pb
from experts.server import ExpertServer, ServerClosed
from experts.transfer import Refused
from experts.wire import VERSION
from p2p.endpoint import Status
from p2p.local import LocalPeer, LocalWindow, ShmEndpoint
from p2p.window import WindowLayout
from router.view import Identity
from tests.experts.steps import shape_of
from tests.experts.test_service import write_checkpoint
from tests.p2p.one_host import retired_bytes

FINGERPRINT = "ab" * 32
LAYOUT = WindowLayout(slots=2, payload_bytes=4096)


class Endpoint(ShmEndpoint):
    """One whose calls can be made to fail, or to come at a bad time."""

    poor = False
    server: ExpertServer | None = None

    def export_window(self, nbytes: int, incarnation: int | None = None) -> LocalWindow:
        if self.poor:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().export_window(nbytes, incarnation)

    def connect(self, descriptor: bytes, timeout_s: float = 5.0) -> LocalPeer:
        peer = super().connect(descriptor, timeout_s)
        if self.server:
            self.server.close()
        return peer


class Guarded:
    """The native library, where whoever uses a server that was freed gets a KeyError, and no crash."""

    def __init__(self) -> None:
        self._library = native.load()
        self._freed: set[int] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        def guarded(first: int, *others: object) -> object:
            if first in self._freed:
                raise KeyError(f"{name} of a server that was freed")
            if name == "expert_server_free":
                self._freed.add(first)
            found = function(first, *others)
            if name == "expert_server_new":
                self._freed.discard(found)
            return found

        return guarded


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ExpertServer, Endpoint, ShmEndpoint]]:
    library = Guarded()
    monkeypatch.setattr(native, "load", lambda: library)
    endpoint, client = Endpoint("expert/5", 5), ShmEndpoint("attention/9", 9)
    server = ExpertServer(endpoint=endpoint, shape=shape_of(), dtype=Dtype.FLOAT32, model_hash=FINGERPRINT)
    yield server, endpoint, client
    server.close()
    endpoint.close()
    client.close()


def request_for(server: ExpertServer, window: LocalWindow) -> pb.AttachRequest:
    shape = server.first.shape
    return pb.AttachRequest(
        wire_version=VERSION,
        name="attention/9", incarnation=9, server_incarnation=5, model_hash=FINGERPRINT,
        layers=shape.layers, experts=shape.experts, hidden=shape.hidden, top_k=shape.top_k,
        dtype=server.first.dtype, reply_descriptor=window.descriptor, lanes=1, slots=LAYOUT.slots,
        slot_bytes=LAYOUT.payload_bytes,
    )  # fmt: skip


def test_an_attach_that_fails_halfway_lets_go_of_the_clients_window(
    ends: tuple[ExpertServer, Endpoint, ShmEndpoint],
) -> None:
    server, endpoint, client = ends
    endpoint.poor = True
    window = client.export_window(LAYOUT.nbytes)
    with pytest.raises((Refused, OSError)) as refusal:
        server.attach(request_for(server, window))
    assert client.status(window) is Status.GONE
    window.close()
    assert retired_bytes(client) == 0
    assert isinstance(refusal.value, Refused)
    assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_server_that_was_closed_is_asked_in_vain(
    ends: tuple[ExpertServer, Endpoint, ShmEndpoint],
) -> None:
    server, _, client = ends
    server.close()
    server.close()
    assert server.counters().rows == 0
    server.set_lease(0)
    server.first.clear_expert(0, 0)
    assert server.first.doubtful() is None
    with pytest.raises(ServerClosed):
        server.first.set_expert(0, 0, np.zeros(1, np.uint8), np.zeros(1, np.uint8))
    with pytest.raises(Refused) as refusal:
        server.attach(request_for(server, client.export_window(LAYOUT.nbytes)))
    assert refusal.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_server_closed_during_an_attach_is_not_touched_again(
    ends: tuple[ExpertServer, Endpoint, ShmEndpoint],
) -> None:
    server, endpoint, client = ends
    endpoint.server = server
    window = client.export_window(LAYOUT.nbytes)
    with pytest.raises(Refused) as refusal:
        server.attach(request_for(server, window))
    assert refusal.value.code is grpc.StatusCode.UNAVAILABLE
    assert client.status(window) is Status.GONE
    assert not endpoint._windows


def test_a_server_that_can_serve_no_more_says_why(
    ends: tuple[ExpertServer, Endpoint, ShmEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _, _ = ends
    until = threading.Event()

    def run(max_ns: int) -> bool:
        if not until.wait(60.0):
            raise AssertionError("nobody went on")
        raise RuntimeError("the GPU fell off the bus")

    monkeypatch.setattr(server._rows, "run", run)
    server.start()
    assert server.broken == ""
    until.set()
    server._thread.join(60.0)  # type: ignore[union-attr]
    assert server.broken == "expert/5 serves no more: the GPU fell off the bus"


@pytest.mark.parametrize("fault", ["", "the GPU fell off the bus"])
def test_an_ending_process_frees_its_server_after_those_who_call_it(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to end, or because its server cannot serve any more: then the exit code is to say so."""
    write_checkpoint(tmp_path / "model", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    events: list[str] = []
    ending = process.Ending()

    class Router:
        """A router client that only listens."""

        def __init__(self, address: str, credentials: None) -> None:
            self.loaded = lambda held, epoch: None

        def join(self, **asked: Any) -> Identity:
            return Identity(name="expert/5", incarnation=5, term=1, lease_s=2.0, renew_s=0.5)

        def start(self, **callbacks: Any) -> None:
            services[0].server.broken = fault  # type: ignore[union-attr]
            if not fault:
                ending.wanted.set()

        def lease_held(self) -> bool:
            return True

        def renew_now(self) -> None:
            return

        def leave(self, timeout_s: float) -> None:
            events.append("leave")

        def close(self) -> None:
            events.append("router closed")

    class Server(ExpertServer):
        """A server that says when it is closed, and who could still reach it."""

        def close(self) -> None:
            events.append(f"server closed, {services[0].server is None=}")
            super().close()

    services: list[process.ExpertsService] = []

    class Service(process.ExpertsService):
        def __init__(self) -> None:
            super().__init__()
            services.append(self)

    monkeypatch.setattr(process, "RouterClient", Router)
    monkeypatch.setattr(process, "ExpertServer", Server)
    monkeypatch.setattr(process, "ExpertsService", Service)
    monkeypatch.setattr(process.child, "tell_ready", lambda *said: None)
    options = ExpertOptions(
        router="127.0.0.1:1",
        model=tmp_path / "model",
        dtype="float32",
        slots=4,
        weights="checkpoint",
    )
    process.serve(options, ending)
    assert ending.fault == fault
    assert events[:3] == ["leave", "router closed", "server closed, services[0].server is None=True"], events
