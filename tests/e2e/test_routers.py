"""Routers on a real etcd may die, freeze or lose it: behind the gateway nothing changes, and one truth goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status, router_address
from eaas.ops.running import Roll
from router.client import RouterClient
from router.view import Status, View
from tests.e2e.clients import Seen, stream_all
from tests.e2e.test_failures import CLIENTS, PROMPTS, TOKENS, assert_whole, whole_pool
from tests.e2e.waiting import wait_for
from tests.etcd import EtcdProcess, etcd_process
from tests.host_stalls import HostStalls

pytestmark = pytest.mark.full(seconds=15)

TTL_S = 2.0
# etcd looks for ended leases twice a second and takes a little to agree; this machine may be busy.
SLACK_S = 3.0


@dataclass(kw_only=True)
class World:
    etcd: EtcdProcess
    cluster: LocalCluster
    client: RouterClient
    views: list[tuple[float, View]]  # Each that was published, and when it was seen here.

    def status(self) -> Status:
        return self.client.status(timeout_s=20.0)

    def strike(self, act: Callable[[], object], at: int) -> list[Seen]:
        """Stream all clients; `act()` at chunk number `at`."""

        def on_token(count: int) -> None:
            if count == at:
                act()

        return stream_all(self.cluster.url, "tiny", PROMPTS, TOKENS, on_token)


@pytest.fixture(scope="module")
def world(tiny: Path) -> Iterator[World]:
    with etcd_process() as etcd:
        config = ClusterConfig(
            model=tiny,
            served_model_name="tiny",
            experts=4,
            replicas=2,
            port=0,
            cores=(0, 1),
            routers=2,
            etcd=etcd.url,
            leader_ttl_s=TTL_S,
        )
        with LocalCluster(config) as cluster:
            client = RouterClient(cluster.router_address)
            views: list[tuple[float, View]] = []
            client.start(on_view=lambda view: views.append((time.monotonic(), view)))
            wait_for("a whole pool", lambda: whole_pool(cluster), cluster)
            yield World(etcd=etcd, cluster=cluster, client=client, views=views)
            epochs = [(view.term, view.epoch) for _, view in views]
            assert epochs == sorted(epochs), "an epoch or a term went back"
            client.close()


@pytest.fixture(scope="module")
def calm(world: World) -> list[Seen]:
    """What every client sees when nothing fails."""
    seen = stream_all(world.cluster.url, "tiny", PROMPTS, TOKENS)
    assert_whole(seen)
    return seen


def members(status: Status) -> list[tuple[str, int]]:
    return [(member.name, member.incarnation) for member in status.view.members]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_leader_is_followed_and_nobody_notices(world: World, calm: list[Seen], number: signal.Signals) -> None:
    before = world.status()
    struck_s: list[float] = []

    def strike() -> None:
        struck_s.append(time.monotonic())
        os.kill(before.pid, number)

    with HostStalls() as stalls:
        struck = world.strike(strike, at=CLIENTS * TOKENS // 4)
        assert_whole(struck)
        assert [one.texts for one in struck] == [one.texts for one in calm], f"leader {number.name}, tokens changed"

        def taken_over() -> list[float]:
            return [seen_s for seen_s, view in world.views if view.term > before.view.term]

        end_s = time.monotonic() + 20
        while not taken_over():
            assert time.monotonic() < end_s, "no other leader within 20 s"
            struck = world.strike(lambda: None, at=0)
            assert [one.texts for one in struck] == [one.texts for one in calm], "tokens changed without a leader"
    if number is signal.SIGSTOP and before.pid in world.cluster.pids().values():
        os.kill(before.pid, signal.SIGCONT)
    took_s = taken_over()[0] - struck_s[0]
    still = f"{took_s:.1f} s with a lease of {TTL_S} s (the host stood still for {stalls.seconds:.1f} s)"
    assert took_s <= TTL_S + SLACK_S + stalls.seconds, still
    after = world.status()
    assert after.view.term > before.view.term
    assert after.view.epoch > before.view.epoch
    assert members(after) == members(before), "a member was lost with the leader"
    wait_for("both routers again", lambda: {"router/0", "router/1"} <= set(world.cluster.pids()), world.cluster)
    # The new leader repairs as the old one did.
    victim = next(pid for name, pid in world.cluster.pids().items() if name.startswith("expert/"))
    struck = world.strike(lambda: os.kill(victim, signal.SIGKILL), at=CLIENTS * 2)
    assert [one.texts for one in struck] == [one.texts for one in calm]
    wait_for("4 serving members under the new leader", lambda: whole_pool(world.cluster), world.cluster)


def test_etcd_may_die_and_return_while_requests_run(world: World, calm: list[Seen]) -> None:
    """It is away for longer than the leader's lease: nobody leads, and nobody is missed."""
    before = world.status()
    struck = world.strike(world.etcd.kill, at=CLIENTS * 2)
    assert_whole(struck)
    assert [one.texts for one in struck] == [one.texts for one in calm], "etcd killed, tokens changed"
    time.sleep(TTL_S)
    struck = world.strike(world.etcd.start, at=CLIENTS * 4)
    assert [one.texts for one in struck] == [one.texts for one in calm], "etcd away, tokens changed"
    # It hears its members first.
    wait_for("the new term to publish", lambda: world.status().view.epoch > before.view.epoch, world.cluster)
    after = world.status()
    assert after.view.term > before.view.term
    assert members(after) == members(before)
    assert fetch_status(world.cluster.url)["gateway"]["ready"]


def test_every_router_is_rolled_and_not_the_leader_alone(world: World, calm: list[Seen]) -> None:
    wait_for("both routers", lambda: {"router/0", "router/1"} <= set(world.cluster.pids()), world.cluster)
    before = world.cluster.pids()
    # As the command does, which knows a gateway only.
    client = RouterClient(router_address(world.cluster.url))
    lines: list[str] = []
    roll = Roll(world.cluster.url, client, wait_s=60, drain_s=10, show=lines.append)
    thread = threading.Thread(target=roll.roll, args=(["router", "gateway"],))
    try:
        struck = world.strike(thread.start, at=CLIENTS * 2)
        thread.join()
    finally:
        client.close()
    assert [one.texts for one in struck] == [one.texts for one in calm], "tokens changed"
    assert sorted(line.partition(" ")[0] for line in lines) == ["gateway/1", "router/0", "router/1"]
    after = world.cluster.pids()
    for name in ("router/0", "router/1"):
        assert after[name] != before[name], f"{name} is the process that it was"


def test_what_a_cluster_kept_in_etcd_goes_with_it(tiny: Path) -> None:
    from router.etcd import Etcd, get

    with etcd_process() as etcd:
        config = ClusterConfig(
            model=tiny,
            served_model_name="tiny",
            experts=1,
            replicas=1,
            endpoint=False,
            attention=0,
            etcd=etcd.url,
        )
        with LocalCluster(config):
            assert Etcd(etcd.url).txn([], [get("/eaas/", prefix=True)])[1][0].get("kvs")
        assert not Etcd(etcd.url).txn([], [get("/eaas/", prefix=True)])[1][0].get("kvs")
