"""Several routers, one truth: real routers on a real etcd, killed, frozen, stopped, and cut off from it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.access import RouterAddressInvalid, target_of
from router.client import RouterClient, RouterUnavailable
from router.etcd import Etcd, get, pairs
from router.etcd_store import prefix_of
from router.events import StartProcess
from router.journal import Journal
from router.proto import router_pb2 as pb
from router.proto import router_pb2_grpc as rpc
from router.service import NotLeading, RouterService
from router.state import Config
from router.view import PROTOCOL
from tests.etcd import EtcdProcess, etcd_process
from tests.host_stalls import bounded
from tests.router.test_service import HOST, SHAPE, Server, complete, until

pytestmark = pytest.mark.alone

TTL_S = 2.0
# etcd looks for ended leases twice a second and takes a little to agree; this machine may be busy.
SLACK_S = 3.0


class RouterProcess:
    """`python -m router --store etcd`."""

    def __init__(self, etcd: str, cluster: str, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._flags = ["--store", "etcd", "--etcd", etcd, "--cluster", cluster, *flags]
        self.start()

    def start(self) -> None:
        ready, told = os.pipe()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "router", "--port", str(self.port), "--die-with", str(os.getpid())),
                *("--ready-fd", str(told), *self._flags),
            ],
            pass_fds=[told],
        )
        os.close(told)
        with os.fdopen(ready) as line:
            self.said = json.loads(line.readline())
        self.pid = self.process.pid

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> int:
        self.send(number)
        return self.process.wait(timeout=60)


class Routers:
    """Routers of one cluster, and a direct line to each, by which they are judged."""

    def __init__(self, etcd: str, cluster: str, count: int, *flags: str) -> None:
        self.etcd, self.cluster = etcd, cluster
        self.all = [RouterProcess(etcd, cluster, *flags) for _ in range(count)]
        self.address = ",".join(router.address for router in self.all)
        self.channels = [grpc.insecure_channel(router.address) for router in self.all]

    def leader(self) -> RouterProcess | None:
        leading = [router for router in self.all if router.process.poll() is None and health(router) == "SERVING"]
        assert len(leading) <= 1, f"{len(leading)} routers lead"
        return leading[0] if leading else None

    def await_leader(self, *, but: RouterProcess | None = None, seconds: float = 60) -> RouterProcess:
        found: list[RouterProcess] = []

        def led() -> bool:
            found[:] = [r for r in self.all if r is not but and health(r) == "SERVING"]
            return bool(found)

        until(led, seconds)
        return found[0]

    def stub(self, router: RouterProcess) -> rpc.RouterStub:
        return rpc.RouterStub(self.channels[self.all.index(router)])

    def commits(self) -> list[tuple[int, int]]:
        """(term, epoch) of every commit ever, as etcd remembers them."""
        etcd, key = Etcd(self.etcd), f"{prefix_of(self.cluster)}state/counters"
        _, (answer,) = etcd.txn([], [get(key)])
        found: list[tuple[int, int]] = []
        revision = int(pairs(answer)[key]["mod_revision"])
        while revision > 0:
            query = get(key)["request_range"] | {"revision": str(revision)}
            kv = pairs(etcd.call("kv/range", query)).get(key)
            if kv is None:
                break
            counters = json.loads(kv["value"])
            found.append((counters["term"], counters["epoch"]))
            revision = int(kv["mod_revision"]) - 1
        return found[::-1]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for router in self.all:
            if router.process.poll() is None:
                router.end()


def health(router: RouterProcess, name: str = "") -> str:
    """What a router says of itself; "" if it does not answer."""
    with grpc.insecure_channel(router.address) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=name)
            stub: Any = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(request, timeout=5)
        except grpc.RpcError:
            return ""
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


@pytest.fixture(scope="module")
def running() -> Iterator[EtcdProcess]:
    with etcd_process() as process:
        yield process


Start = Callable[..., Routers]


@pytest.fixture
def started(running: EtcdProcess, request: pytest.FixtureRequest) -> Iterator[Start]:
    with ExitStack() as closing:

        def start(count: int = 2, *flags: str, etcd: str = running.url) -> Routers:
            name = "".join(letter if letter.isalnum() else "." for letter in request.node.name)
            flags = ("--leader-ttl-s", str(TTL_S), "--lease-s", "1", "--experts", "2", *flags)
            routers = Routers(etcd, name, count, *flags)
            closing.callback(routers.close)
            return routers

        yield start


def assert_one_truth(commits: list[tuple[int, int]], terms: int) -> None:
    """Each term's commits lie together, and the epoch only rises."""
    assert commits == sorted(commits), f"a deposed leader wrote: {commits}"
    assert [epoch for _, epoch in commits] == sorted(epoch for _, epoch in commits), commits
    assert {term for term, _ in commits} == set(range(1, terms + 1)), commits


def test_a_killed_leader_is_followed_within_its_lease(started: Start) -> None:
    routers = started(2, "--replicas", "2")
    leader = routers.await_leader()
    attention, servers = Server(routers, "attention"), [Server(routers) for _ in range(2)]
    until(lambda: complete(attention.client, 2, 2))
    launcher = RouterClient(routers.address)
    ordered: list[object] = []
    threading.Thread(target=lambda: [ordered.append(c) for c in launcher.launches(HOST)], daemon=True).start()
    assert launcher.status().pid == leader.pid
    before = attention.views[-1]
    with bounded(TTL_S + SLACK_S):
        leader.end(signal.SIGKILL)
        second = routers.await_leader(but=leader)
    until(lambda: attention.views[-1].term == before.term + 1)
    after = attention.views[-1]
    assert after.epoch > before.epoch
    assert launcher.status().pid == second.pid
    identities = [(m.name, m.incarnation, m.serving) for m in before.members]
    assert [(m.name, m.incarnation, m.serving) for m in after.members] == identities
    time.sleep(2.0)
    assert not any(each.fenced for each in (attention, *servers)), "two leases on, all still renew"
    assert all(each.client.lease_held() for each in servers)
    # The new leader repairs, by a launcher that has followed it.
    lost = servers.pop()
    lost.die()
    launcher.report_exit(HOST, lost.pid)
    until(lambda: StartProcess(host=HOST, pool="expert") in ordered)
    servers.append(Server(routers))
    assert servers[-1].name == "expert/3"
    until(lambda: complete(attention.client, 2, 2))
    # The first returns as a standby.
    leader.start()
    assert launcher.status().leader == second.address
    assert health(leader) == "NOT_SERVING"
    epochs = [(view.term, view.epoch) for view in attention.views]
    assert epochs == sorted(epochs)
    assert_one_truth(routers.commits(), 2)
    for each in (attention, *servers):
        each.die()
    launcher.close()


@pytest.mark.full(seconds=8)
def test_a_leader_that_was_frozen_neither_writes_nor_publishes(started: Start) -> None:
    routers = started()
    leader = routers.await_leader()
    server = Server(routers)
    until(lambda: complete(server.client, 1, 1))
    # Seen directly, as by a client that has not noticed: what it publishes, and what it answers when it wakes.
    published: list[tuple[int, int]] = []
    ended: list[grpc.StatusCode] = []

    def watch() -> None:
        try:
            stream = routers.stub(leader).Watch(pb.WatchRequest())
            published.extend((view.term, view.epoch) for view in stream)
        except grpc.RpcError as error:
            ended.append(error.code())

    threading.Thread(target=watch, daemon=True).start()
    until(lambda: published)
    leader.send(signal.SIGSTOP)
    try:
        waiting = [
            routers.stub(leader).Join.future(
                pb.JoinRequest(protocol=PROTOCOL, pool="expert", address="a", pid=n, host=HOST, **SHAPE),
                timeout=60,
            )
            for n in range(1, 4)
        ]
        renewal = routers.stub(leader).Renew(
            iter([pb.RenewRequest(name=server.name, incarnation=server.incarnation)]), timeout=60
        )
        # What it sent before may still be on its way here.
        known: list[tuple[int, int]] = []
        while known != published:
            known = list(published)
            time.sleep(0.5)
        second = routers.await_leader(but=leader)
        until(lambda: server.views[-1].term == 2)
        server.client.report_exit(HOST, server.pid)
        until(lambda: server.fenced)
    finally:
        leader.send(signal.SIGCONT)
    for each in (*waiting, renewal):
        assert each.code() is grpc.StatusCode.UNAVAILABLE, each.code()
        assert "this router is a standby" in each.details()
    until(lambda: ended == [grpc.StatusCode.UNAVAILABLE])
    assert published == known, "published while it did not lead"
    until(lambda: health(leader) == "NOT_SERVING")
    assert health(second) == "SERVING"
    # Who leads it reads only once it has stepped down.
    until(lambda: routers.stub(leader).Status(pb.StatusRequest()).leader == second.address)
    status = routers.stub(leader).Status(pb.StatusRequest())
    assert (status.problem, len(status.view.members)) == ("", 0)
    assert_one_truth(routers.commits(), 2)
    # And back: what it forgot it reads again.
    second.end()
    routers.await_leader(but=second)
    until(lambda: server.client.status().view.term == 3)
    assert [g.name for g in server.client.status().gone] == [server.name]
    server.die()


def test_an_orderly_stop_hands_over_at_once(started: Start) -> None:
    routers = started(3, "--leader-ttl-s", "60")
    leader = routers.await_leader()
    for _ in range(2):
        assert leader.end(signal.SIGTERM) == 0
        leader = routers.await_leader(but=leader, seconds=30)
        routers.all = [router for router in routers.all if router.process.poll() is None]


def test_a_call_in_progress_when_the_lease_ends_decides_nothing(tmp_path: Path) -> None:
    """Admitted while this router led, carried on when it does no more: even what writes nothing is refused."""

    class Lease:
        leader, problem, held = "127.0.0.1:2", "", True

        def leads(self) -> bool:
            return self.held

    async def scene() -> None:
        lease: Any = Lease()
        call: Any = None
        service = RouterService(Config(), Journal(tmp_path / "journal"), election=lease)
        service.lead()
        joined = await service.Join(pb.JoinRequest(protocol=PROTOCOL, pool="gateway", host=HOST, pid=1), call)

        async def renewals() -> AsyncIterator[pb.RenewRequest]:
            yield pb.RenewRequest(name=joined.name, incarnation=joined.incarnation)
            lease.held = False
            yield pb.RenewRequest(name=joined.name, incarnation=joined.incarnation)

        answers = service.Renew(renewals(), call)
        assert not (await anext(answers)).fenced
        with pytest.raises(NotLeading, match=r"this router is a standby; 127[.]0[.]0[.]1:2 leads"):
            await anext(answers)
        service.step_down()

    asyncio.run(scene())


def test_a_standby_says_who_leads_and_decides_nothing(started: Start) -> None:
    routers = started()
    leader = routers.await_leader()
    standby = next(router for router in routers.all if router is not leader)
    stub = routers.stub(standby)
    refused = [
        (stub.Join, pb.JoinRequest(protocol=PROTOCOL, pool="gateway", host=HOST, pid=1)),
        (stub.Scale, pb.ScaleRequest(pool="expert", wanted=3)),
        (stub.ReportExit, pb.ReportExitRequest(host=HOST, pid=1)),
    ]
    for method, request in refused:
        with pytest.raises(grpc.RpcError, match=f"standby; {leader.address} leads") as refusal:
            method(request, timeout=60)
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    for stream in (
        stub.Watch(pb.WatchRequest()),
        stub.Renew(iter([pb.RenewRequest()])),
        stub.Launches(pb.LaunchesRequest(host=HOST)),
    ):
        with pytest.raises(grpc.RpcError, match="standby"):
            next(iter(stream))
    assert stub.Status(pb.StatusRequest()).leader == leader.address
    assert [health(standby, name) for name in ("", "router.v1.Router", "router.v1.Leader")] == ["NOT_SERVING"] * 3
    # A client that knows only the standby waits, and says what it waited for.
    client = RouterClient(standby.address)
    with pytest.raises(RouterUnavailable):
        client.join(pool="gateway", address="a", pid=1, host=HOST, timeout_s=1.0)
    client.close()


@pytest.mark.full(seconds=12)
@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_without_etcd_nobody_decides_and_nobody_is_fenced(started: Start, fault: str) -> None:
    with etcd_process() as etcd:
        routers = started(etcd=etcd.url)
        routers.await_leader()
        attention, server = Server(routers, "attention"), Server(routers)
        until(lambda: complete(attention.client, 1, 1))
        before = attention.views[-1]
        etcd.kill() if fault == "killed" else etcd.freeze()
        # The leader steps down before etcd could have ended its lease.
        until(lambda: routers.leader() is None, TTL_S + SLACK_S)
        for router in routers.all:
            until(lambda router=router: "cannot be asked who leads" in status(routers, router).problem)
        time.sleep(2.0)
        assert attention.views[-1].epoch == before.epoch, "published without a commit"
        assert not any(each.fenced for each in (attention, server))
        assert server.client.lease_held(), "a router that does not answer never ends a lease"
        etcd.start() if fault == "killed" else etcd.thaw()
        leader = routers.await_leader(seconds=TTL_S + 60)
        until(lambda: attention.views[-1].term > before.term)
        assert attention.views[-1].epoch > before.epoch
        time.sleep(1.5)
        assert not any(each.fenced for each in (attention, server))
        assert status(routers, leader).problem == ""
        assert Server(routers).name == "expert/2"
        commits = routers.commits()
        assert_one_truth(commits, commits[-1][0])
        for each in (attention, server):
            each.die()


@pytest.mark.full(seconds=8)
def test_a_short_absence_of_etcd_changes_no_leader(started: Start) -> None:
    with etcd_process() as etcd:
        routers = started(2, "--leader-ttl-s", "30", etcd=etcd.url)
        leader = routers.await_leader()
        server = Server(routers)
        until(lambda: complete(server.client, 1, 1))
        etcd.kill()
        other = RouterClient(routers.address)
        with pytest.raises(RouterUnavailable, match=r"etcd at .* cannot be used"):
            other.join(pool="expert", address="a", pid=1, host=HOST, **SHAPE)
        until(lambda: "cannot be used" in other.status().problem)
        time.sleep(1.5)
        assert not server.fenced, "renewals go on while etcd is away"
        etcd.start()
        until(lambda: other.status().problem == "")
        assert other.join(pool="expert", address="a", pid=1, host=HOST, **SHAPE).name == "expert/2"
        assert routers.leader() is leader
        assert_one_truth(routers.commits(), 1)
        other.close()
        server.die()


def status(routers: Routers, router: RouterProcess) -> pb.StatusReply:
    return routers.stub(router).Status(pb.StatusRequest(), timeout=60, wait_for_ready=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--etcd", "http://127.0.0.1:1"], "etcd at http://127.0.0.1:1 cannot be asked who leads"),
        (["--etcd", "http://10.1.1.1:2379"], "in the clear to another host"),
        (["--etcd", "http://127.0.0.1:1", "--cluster", "a/b"], "cluster name 'a/b' found"),
        (["--etcd", "http://127.0.0.1:1", "--leader-ttl-s", "1"], "a leader's lease of 1.0 s found; give 2"),
    ],
)
def test_a_start_that_fails_says_why(flags: list[str], message: str) -> None:
    ready, told = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "router", "--store", "etcd", "--ready-fd", str(told), *flags], pass_fds=[told]
    )
    os.close(told)
    with os.fdopen(ready) as line:
        said = json.loads(line.readline())
    assert message in said["error"]
    assert process.wait(timeout=60) == 1


def test_a_store_without_its_address_is_refused() -> None:
    for flags, message in (
        (["--store", "etcd"], "needs --etcd"),
        ([], "needs --journal"),
        (["--journal", "j", "--etcd", "http://127.0.0.1:1"], "--etcd without --store etcd"),
        (["--journal", "j", "--admin-key-file", "key"], "--admin-key-file without --admin-port"),
    ):
        done = subprocess.run([sys.executable, "-m", "router", *flags], capture_output=True, text=True)
        assert (done.returncode, message in done.stderr) == (1, True), done.stderr


def test_a_list_of_routers_that_cannot_be_followed_is_refused() -> None:
    assert target_of("router.example:7000") == "router.example:7000"
    assert target_of("127.0.0.1:7000, 10.0.0.2:7001") == "ipv4:127.0.0.1:7000,10.0.0.2:7001"
    assert target_of("[::1]:7000,[fe80::1]:7001") == "ipv6:[::1]:7000,[fe80::1]:7001"
    for address in ("a:7000,b:7000", "127.0.0.1:7000,127.0.0.1", "127.0.0.1:7000,[::1]:7000", "127.0.0.1:1,"):
        with pytest.raises(RouterAddressInvalid, match="IP:PORT needed"):
            RouterClient(address)


@pytest.mark.parametrize("module", ["experts", "eaas.worker", "eaas.gateway"])
def test_every_role_refuses_such_a_list(module: str) -> None:
    command = [sys.executable, "-m", module, "--router", "a:7000,b:7000", "--model", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "IP:PORT needed" in done.stderr) == (1, True), done.stderr
