"""The router as its members meet it: a real process, real sockets, the real client."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.client import JoinRefused, RouterClient, RouterUnavailable
from router.events import AddModel, StartProcess, StopProcess
from router.host import host_id
from router.journal import entries_text
from router.view import Identity, Model, View
from tests.host_stalls import bounded

pytestmark = pytest.mark.alone

HOST = "a-host-of-this-test"
SHAPE = {"layers": 2, "experts": 6, "model_hash": "m"}


class Reachable(Protocol):
    """A router, or several, by address."""

    address: str


class RouterProcess:
    """`python -m router`, started, killed and started again on one port and journal."""

    def __init__(self, folder: Path, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.journal = folder / "journal"
        self.flags = flags
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        ready, told = os.pipe()
        command = [sys.executable, "-m", "router", "--port", str(self.port), "--journal", str(self.journal)]
        self.process = subprocess.Popen(
            [*command, "--ready-fd", str(told), "--die-with", str(os.getpid()), *self.flags],
            pass_fds=[told],
            text=True,
        )
        os.close(told)
        with os.fdopen(ready) as line:
            said = json.loads(line.readline())
        self.admin = said.pop("admin", "")
        assert said == {"name": "router/0", "address": self.address, "pid": self.process.pid}

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


class Server:
    """An expert server, or attention worker, without experts or attention."""

    def __init__(self, router: Reachable, pool: str = "expert", *, loads: bool = True) -> None:
        self.loads = loads
        self.views: list[View] = []
        self.fenced: list[str] = []
        self.client = RouterClient(router.address)
        self.pool = pool
        self.pid = 1_000_000 + id(self) % 1_000_000
        self.name = self.client.join(pool=pool, address="nowhere", pid=self.pid, host=HOST, **SHAPE).name
        self.client.start(on_view=self.see, load=lambda: {"busy": 0.25}, on_fenced=self.fenced.append)

    @property
    def incarnation(self) -> int:
        identity = self.client.identity
        assert identity is not None
        return identity.incarnation

    def see(self, view: View) -> None:
        self.views.append(view)
        identity = self.client.identity
        assert identity is not None
        member = view.member(identity.name)
        if member is None or not self.loads:
            return
        if self.pool == "expert":
            self.client.loaded(member.target, view.epoch)
        else:
            self.client.ack(view.epoch)

    def die(self) -> None:
        self.client.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., RouterProcess]]:
    routers: list[RouterProcess] = []

    def start(*flags: str) -> RouterProcess:
        routers.append(RouterProcess(tmp_path, *flags))
        return routers[-1]

    yield start
    for router in routers:
        if router.process is not None and router.process.poll() is None:
            router.process.kill()
            router.process.wait()


def until(what: Callable[[], object], seconds: float = 60.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline_s, f"not within {seconds} s"
        time.sleep(0.01)


def complete(client: RouterClient, servers: int, replicas: int) -> bool:
    view = client.view
    if view is None or [m.state for m in view.pool("expert")] != ["serving"] * servers:
        return False
    return all(len(view.replicas(layer, expert)) == replicas for layer in range(2) for expert in range(6)) and all(
        m.target == m.serving for m in view.pool("expert")
    )


def test_a_lost_server_is_replaced_and_every_expert_keeps_a_replica(
    started: Callable[..., RouterProcess],
) -> None:
    router = started("--experts", "3", "--replicas", "2", "--lease-s", "1")
    attention = Server(router, "attention")
    servers = [Server(router) for _ in range(3)]
    until(lambda: complete(attention.client, 3, 2))

    launcher = RouterClient(router.address)
    ordered: list[object] = []
    threading.Thread(target=lambda: [ordered.append(c) for c in launcher.launches(HOST)], daemon=True).start()
    time.sleep(0.2)
    lost = servers.pop(0)
    lost.die()
    assert launcher.report_exit(HOST, lost.pid) == lost.name
    until(lambda: ordered == [StartProcess(host=HOST, pool="expert")])
    until(lambda: complete(attention.client, 2, 2))
    servers.append(Server(router))
    until(lambda: complete(attention.client, 3, 2))
    assert servers[-1].name == "expert/4", "a name is never given twice"

    def fewest(view: View) -> int:
        return min(len(view.replicas(layer, expert)) for layer in range(2) for expert in range(6))

    # From the first view on that had every replica.
    whole = next(number for number, view in enumerate(attention.views) if fewest(view) == 2)
    for view in attention.views[whole:]:
        assert fewest(view) >= 1, view.epoch
    # A stream that opens again begins with the View that was seen last.
    epochs = [view.epoch for view in attention.views]
    assert epochs == sorted(epochs)
    status = launcher.status()
    assert status.problem == ""
    assert {name: size.wanted for name, size in status.pools.items()} == {"expert": 3, "attention": 1}
    assert [(g.name, g.reason) for g in status.gone] == [(lost.name, "its process ended")]
    for each in (*servers, attention):
        each.die()
    launcher.close()


def test_silence_fences_and_orders_the_process_ended(started: Callable[..., RouterProcess]) -> None:
    router = started("--experts", "2", "--replicas", "2", "--lease-s", "0.6", "--attention", "0")
    kept, others = Server(router), [Server(router, "gateway") for _ in range(3)]
    frozen = Server(router)
    until(lambda: complete(kept.client, 2, 2))
    launcher = RouterClient(router.address)
    ordered: list[object] = []
    threading.Thread(target=lambda: [ordered.append(c) for c in launcher.launches(HOST)], daemon=True).start()
    time.sleep(0.2)
    frozen.die()
    until(lambda: StopProcess(host=HOST, name=frozen.name, pid=frozen.pid) in ordered)
    until(lambda: StartProcess(host=HOST, pool="expert") in ordered)
    with pytest.raises(StopIteration):
        next(m for m in launcher.status().view.members if m.name == frozen.name)
    for each in (kept, *others):
        each.die()
    launcher.close()


def test_a_process_of_this_host_is_fenced_when_it_exits(started: Callable[..., RouterProcess]) -> None:
    router = started("--lease-s", "60")
    process = subprocess.Popen(["sleep", "60"])
    client = RouterClient(router.address)
    fenced: list[str] = []
    name = client.join(pool="expert", address="a", pid=process.pid, host=host_id(), **SHAPE).name
    client.start(on_fenced=fenced.append)
    process.kill()
    process.wait()
    until(lambda: any(g.name == name for g in client.status().gone), 30)
    client.close()


def test_a_fenced_member_is_told_and_may_join_as_another(started: Callable[..., RouterProcess]) -> None:
    router = started("--lease-s", "1")
    server = Server(router)
    assert server.client.lease_held()
    server.client.report_exit(HOST, server.pid)
    until(lambda: server.fenced)
    assert server.client.fenced
    assert not server.client.lease_held()
    first = server.client.identity
    again = server.client.join(pool="expert", address="b", pid=server.pid, host=HOST, **SHAPE)
    assert first is not None
    assert (again.name, again.incarnation != first.incarnation) == ("expert/2", True)
    until(lambda: complete(server.client, 1, 1))
    assert server.client.lease_held()
    server.die()


def fenced_server(router: RouterProcess) -> Server:
    """A server that serves, is reported dead, and has been told so."""
    server = Server(router)
    until(lambda: complete(server.client, 1, 1))
    server.client.report_exit(HOST, server.pid)
    until(lambda: server.fenced)
    return server


def test_a_view_that_overtakes_the_reply_to_a_join_is_shown_after_it(
    started: Callable[..., RouterProcess],
) -> None:
    server = fenced_server(started("--lease-s", "1"))
    stub = server.client._stub
    ask = stub.Join

    def slowly(*arguments: object, **options: object) -> object:
        reply = ask(*arguments, **options)
        until(lambda: server.views[-1].member(reply.name) is not None)
        return reply

    stub.Join = slowly
    server.client.join(pool="expert", address="b", pid=server.pid, host=HOST, **SHAPE)
    until(lambda: complete(server.client, 1, 1))
    server.die()


def test_a_report_of_a_new_member_is_not_sent_under_its_old_name(
    started: Callable[..., RouterProcess],
) -> None:
    server = Server(started("--lease-s", "1"))
    until(lambda: complete(server.client, 1, 1))
    renew, asked, answered = server.client._renew, threading.Event(), threading.Event()

    def slowly(identity: Identity) -> None:
        renew(identity)
        asked.set()
        answered.wait(60)

    server.client._renew = slowly
    until(asked.is_set)
    server.client.report_exit(HOST, server.pid)
    again = server.client.join(pool="expert", address="b", pid=server.pid, host=HOST, **SHAPE)
    until(lambda: server.views[-1].member(again.name) is not None and server.client._loaded is not None)
    answered.set()
    until(lambda: complete(server.client, 1, 1))
    server.die()


def test_a_drained_server_goes_only_when_others_serve_its_experts(
    started: Callable[..., RouterProcess],
) -> None:
    router = started("--experts", "2", "--lease-s", "1")
    attention, first, second = Server(router, "attention"), Server(router), Server(router)
    until(lambda: complete(attention.client, 2, 1))
    known = len(attention.views)
    first.client.leave(drain=True)
    until(lambda: first.fenced)
    until(lambda: complete(attention.client, 1, 1))
    for view in attention.views[known:]:
        assert all(view.replicas(layer, expert) for layer in range(2) for expert in range(6))
    for each in (attention, first, second):
        each.die()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.full(seconds=4))])
def test_a_restarted_router_is_not_noticed(started: Callable[..., RouterProcess], number: int) -> None:
    router = started("--experts", "2", "--replicas", "2", "--lease-s", "1")
    attention, servers = Server(router, "attention"), [Server(router) for _ in range(2)]
    until(lambda: complete(attention.client, 2, 2))
    before = attention.views[-1]
    assert router.process is not None
    assert attention.client.status().pid == router.process.pid
    router.stop(number)
    time.sleep(1.5)
    for server in servers:
        assert server.client.lease_held(), "a router that is away ends no lease"
    router.start()
    until(lambda: attention.views[-1].term == before.term + 1)
    assert attention.client.status().pid == router.process.pid
    time.sleep(1.5)
    after = attention.views[-1]
    assert after.epoch > before.epoch
    identities = [(m.name, m.incarnation, m.serving) for m in before.members]
    assert [(m.name, m.incarnation, m.serving) for m in after.members] == identities
    assert not any(each.fenced for each in (attention, *servers))
    servers.append(Server(router))
    assert servers[-1].name == "expert/3"
    until(lambda: complete(attention.client, 3, 2))
    for each in (attention, *servers):
        each.die()


def test_on_an_older_journal_the_cluster_goes_on(started: Callable[..., RouterProcess]) -> None:
    """It is put back from a copy: members that saw later epochs follow again, and no incarnation is given twice."""
    router = started("--experts", "3", "--replicas", "2", "--lease-s", "1")
    attention = Server(router, "attention")
    servers = [Server(router) for _ in range(3)]
    until(lambda: complete(attention.client, 3, 2))
    router.stop()
    copy = router.journal.read_bytes()
    router.start()
    # After the copy one goes and two come, so that the copy names one that is gone and lacks two that serve.
    gone = servers.pop(0)
    gone.client.leave()
    gone.die()
    servers += [Server(router) for _ in range(2)]
    until(lambda: complete(attention.client, 4, 2))
    given = {server.incarnation for server in [attention, gone, *servers]}
    known, view = [attention, *servers[:2]], attention.client.view
    assert view is not None
    router.stop(signal.SIGKILL)
    for left in router.journal.parent.glob("journal-*"):
        left.unlink()
    router.journal.write_bytes(copy)
    router.start()

    until(lambda: complete(attention.client, 2, 2))
    assert not any(server.fenced for server in known), "a member of the journal was lost"
    newest = attention.client.view
    assert newest is not None and newest.epoch > view.epoch, f"{newest} after {view.epoch}"
    until(lambda: all(server.fenced for server in servers[2:]))
    # The next that join are others, though the journal counts as it did.
    joined = [Server(router) for _ in range(2)]
    assert not given & {server.incarnation for server in joined}
    until(lambda: complete(attention.client, 4, 2))
    joined[0].client.report_exit(HOST, joined[0].pid)
    until(lambda: complete(attention.client, 3, 2))
    for server in [attention, *servers, *joined]:
        server.die()


@pytest.mark.parametrize("copy", [True, False], ids=["older", "none"])
def test_whoever_is_no_member_follows_a_router_that_lost_its_journal(
    started: Callable[..., RouterProcess], copy: bool
) -> None:
    """Views count from a lower epoch then. Who watches follows them, and a program that joined is to join anew."""
    router = started("--experts", "1", "--lease-s", "1")
    router.stop()
    kept = router.journal.read_bytes()
    router.start()
    watcher, server = RouterClient(router.address), Server(router)
    watcher.start()
    until(lambda: complete(watcher, 1, 1))
    program, fenced = RouterClient(router.address), list[str]()
    program.join(pool="client", address="", **SHAPE)
    program.start(on_fenced=fenced.append)
    until(lambda: program.view is not None and program.view.pool("client"))
    for _ in range(3):
        Server(router).client.leave()
    assert watcher.view is not None
    until(lambda: watcher.view.epoch > 10 and len(watcher.view.pool("expert")) == 1)
    before = watcher.view
    router.stop(signal.SIGKILL)
    for left in router.journal.parent.glob("journal*"):
        left.unlink()
    if copy:
        router.journal.write_bytes(kept)
    router.start()
    until(lambda: watcher.view.salt != before.salt)
    assert watcher.view.epoch < before.epoch
    until(lambda: fenced and server.fenced)
    joined = Server(router)
    until(lambda: complete(watcher, 1, 1))
    assert [member.name for member in watcher.view.members] == [joined.name]
    for each in (server, joined):
        each.die()
    for client in (watcher, program):
        client.close()


def test_models_that_the_journal_does_not_know_are_served_from_the_start(
    started: Callable[..., RouterProcess], tmp_path: Path
) -> None:
    """Whoever comes first; and one that was removed stays removed while the journal knows that."""
    served = [Model(hash=hash, name=hash, layers=2, experts=6) for hash in ("m", "n")]
    file = tmp_path / "models"
    text = entries_text(AddModel(model=model, attention=0) for model in served)
    file.write_text(text)
    router = started("--models-file", str(file))
    client = RouterClient(router.address)
    client.join(pool="attention", address="a", pid=1, host=HOST, **{**SHAPE, "model_hash": "n"})
    assert [model.name for model in client.status().view.models] == ["m", "n"]
    client.leave()
    client.remove_model("n")
    router.stop()
    router.start()
    assert [model.name for model in client.status().view.models] == ["m"]
    client.close()
    router.stop()
    for damaged in ("[{}]", text.replace('"layers": 2', '"layers": "2"')):
        file.write_text(damaged)
        ready, told = os.pipe()
        words = ["--journal", str(tmp_path / "other"), "--models-file", str(file), "--ready-fd", str(told)]
        with subprocess.Popen([sys.executable, "-m", "router", *words], pass_fds=[told]) as process:
            os.close(told)
            with os.fdopen(ready) as line:
                assert f"--models-file {file} cannot be read" in json.loads(line.readline())["error"]
            assert process.wait(timeout=60) == 1


def test_a_router_that_cannot_write_publishes_nothing_and_says_so(
    started: Callable[..., RouterProcess],
) -> None:
    router = started("--lease-s", "0.6")
    server = Server(router)
    until(lambda: complete(server.client, 1, 1))
    assert router.process is not None
    epoch = server.client.status().view.epoch
    limit = resource.prlimit(router.process.pid, resource.RLIMIT_FSIZE)
    # No file of the router may grow: what a full disk does.
    resource.prlimit(router.process.pid, resource.RLIMIT_FSIZE, (1, limit[1]))
    other = RouterClient(router.address)
    with pytest.raises(RouterUnavailable, match=r"journal .* cannot be written"):
        other.join(pool="expert", address="a", pid=1, host=HOST, **SHAPE)
    channel = grpc.insecure_channel(router.address)
    health: Any = health_pb2_grpc.HealthStub(channel)

    def condition() -> int:
        return health.Check(health_pb2.HealthCheckRequest(service="router.v1.Router")).status

    until(lambda: condition() == health_pb2.HealthCheckResponse.NOT_SERVING)
    time.sleep(1.0)
    assert "cannot be written" in other.status().problem
    assert other.status().view.epoch == epoch
    assert server.views[-1].epoch == epoch
    resource.prlimit(router.process.pid, resource.RLIMIT_FSIZE, limit)
    until(lambda: condition() == health_pb2.HealthCheckResponse.SERVING)
    assert other.status().problem == ""
    assert other.join(pool="expert", address="a", pid=1, host=HOST, **SHAPE).name == "expert/2"
    assert not server.fenced, "renewals go on while the journal does not"
    channel.close()
    other.close()
    server.die()


def test_who_does_not_fit_is_told_why(started: Callable[..., RouterProcess]) -> None:
    router = started()
    server, other = Server(router), RouterClient(router.address)
    with pytest.raises(JoinRefused, match="5 experts in each layer found, 6 needed"):
        other.join(pool="expert", address="a", pid=1, host=HOST, layers=2, experts=5, model_hash="m")
    with pytest.raises(JoinRefused, match="model x found, m needed"):
        other.join(pool="attention", address="a", pid=1, host=HOST, model_hash="x")
    other.close()
    server.die()


def test_no_router_is_a_clear_error() -> None:
    client = RouterClient("127.0.0.1:1")
    with pytest.raises(RouterUnavailable, match=r"the router at 127\.0\.0\.1:1 did not answer"):
        client.join(pool="expert", address="a", timeout_s=0.3, **SHAPE)
    with pytest.raises(RouterUnavailable):
        client.status(timeout_s=0.3)
    client.close()


def test_the_service_describes_itself(started: Callable[..., RouterProcess]) -> None:
    router = started()
    with grpc.insecure_channel(router.address) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        (reply,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in reply.list_services_response.service}
    assert {"router.v1.Router", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--experts", "2", "--replicas", "3"], "3 replicas of each expert need 3 expert servers"),
        (["--journal", "/no/such/folder/journal"], "See that its folder exists"),
        (["--lease-s", "-1"], "--lease-s -1.0: more than 0 is needed"),
    ],
)
def test_a_start_that_fails_says_why(tmp_path: Path, flags: list[str], message: str) -> None:
    said, status = failing(tmp_path, flags)
    assert message in said
    assert status == 1


def test_a_port_in_use_is_named(started: Callable[..., RouterProcess], tmp_path: Path) -> None:
    router = started()
    said, status = failing(tmp_path, ["--port", str(router.port), "--journal", str(tmp_path / "another")])
    assert f"port {router.port} of 127.0.0.1 cannot be used" in said
    assert status == 1


def test_a_second_router_on_one_journal_is_refused(started: Callable[..., RouterProcess], tmp_path: Path) -> None:
    router = started()
    said, _ = failing(tmp_path, ["--journal", str(router.journal)])
    assert "is used by another router" in said


def failing(folder: Path, flags: list[str]) -> tuple[str, int]:
    """The error that a router which must not start writes to its parent, and its exit status."""
    ready, told = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "router", "--journal", str(folder / "own"), "--ready-fd", str(told), *flags],
        pass_fds=[told],
    )
    os.close(told)
    with os.fdopen(ready) as line:
        said = json.loads(line.readline())
    return said["error"], process.wait(timeout=60)


def test_signals_stop_the_router_within_a_second(started: Callable[..., RouterProcess]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        router = started()
        server = Server(router)
        until(lambda server=server: server.views)
        with bounded(1.0):
            assert router.stop(number) == 0
        server.die()
        router.journal.unlink()
