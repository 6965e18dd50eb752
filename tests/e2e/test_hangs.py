"""One thread stands still and its process lives on, leases and all: it is replaced, and no stream is told."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.hang import NotPermitted, hanging, threads
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from experts.server import LANE_0
from router.client import LEASE_THREAD, RouterClient
from tests.e2e.calm import Calm
from tests.e2e.waiting import wait_for


@pytest.fixture(scope="module")
def calm(cluster: LocalCluster) -> Calm:
    return Calm(cluster)


def _members(calm: Calm, pool: str) -> dict[str, str]:
    members = fetch_status(calm.cluster.url)["members"]
    return {member["name"]: member["state"] for member in members if member["pool"] == pool}


def _hang_under_streams(calm: Calm, name: str, tid: int) -> None:
    """Streams say the same while that member's work thread stands, and another serves in its place."""
    pool = name.partition("/")[0]
    with contextlib.ExitStack() as stopped:
        try:
            calm.check(f"{name} hangs", lambda: stopped.enter_context(hanging(tid)))
        except AssertionError as error:
            if NotPermitted.__name__ in str(error):
                pytest.skip(f"needs ptrace, found: {error}")
            raise
        size = {"expert": calm.cluster.config.experts, "attention": 1}[pool]

        def replaced() -> bool:
            found = _members(calm, pool)
            return name not in found and list(found.values()).count("serving") >= size

        wait_for(f"{name} replaced", replaced, calm.cluster)
    calm.check(f"after {name}")


def test_an_expert_server_whose_loop_hangs_is_replaced_unseen(calm: Calm) -> None:
    name = calm.serving()[0]
    (tid,) = threads(calm.cluster.pids()[name], LANE_0)
    _hang_under_streams(calm, name, tid)


def test_an_expert_server_whose_first_thread_hangs_is_replaced_unseen(calm: Calm) -> None:
    """Its lanes go on and its lease is renewed, but nobody tells native code that the lease holds: it falls silent."""
    name = calm.serving()[0]
    _hang_under_streams(calm, name, calm.cluster.pids()[name])


def test_the_only_attention_worker_that_hangs_is_replaced_by_one_beside_it(calm: Calm) -> None:
    (name,) = _members(calm, "attention")
    # Its work is its first thread's.
    _hang_under_streams(calm, name, calm.cluster.pids()[name])


@pytest.mark.full(seconds=6)
def test_one_of_two_attention_workers_hangs_idle_and_is_replaced(calm: Calm) -> None:
    router = RouterClient(calm.cluster.router_address)
    try:
        router.scale("attention", 2)
        wait_for("two workers", lambda: list(_members(calm, "attention").values()) == ["serving"] * 2, calm.cluster)
        name = next(iter(_members(calm, "attention")))
        try:
            with hanging(calm.cluster.pids()[name]):
                wait_for("it is fenced", lambda: name not in _members(calm, "attention"), calm.cluster)
        except NotPermitted as error:
            pytest.skip(f"needs ptrace, found: {error}")
        gone = {one.name: one.reason for one in router.status().gone}
        assert gone[name].startswith("its work loop stood still for "), gone
    finally:
        router.close()
    calm.check("one of two hung")


def _hang_first_thread(calm: Calm, pool: str) -> None:
    """The first thread of a process, its event loop, stands until that process has ended; another then serves."""
    (name,) = [name for name in calm.cluster.pids() if name.startswith(pool)]
    pid = calm.cluster.pids()[name]
    try:
        with hanging(pid):
            wait_for(f"{name} ended", lambda: pid not in calm.cluster.pids().values(), calm.cluster)
    except NotPermitted as error:
        pytest.skip(f"needs ptrace, found: {error}")
    wait_for(
        f"another {pool}",
        lambda: any(one.startswith(f"{pool}/") for one in calm.cluster.pids()),
        calm.cluster,
    )


@pytest.mark.full(seconds=12)
def test_a_gateway_whose_event_loop_hangs_is_started_again_and_says_the_same(calm: Calm) -> None:
    _hang_first_thread(calm, "gateway")
    wait_for("it answers", lambda: fetch_status(calm.cluster.url)["gateway"]["ready"], calm.cluster)
    calm.check("after the gateway hung")


@pytest.mark.full(seconds=8)
def test_a_router_whose_event_loop_hangs_is_started_again_unseen(calm: Calm) -> None:
    calm.check("the router hangs", lambda: _hang_first_thread(calm, "router"))


@pytest.mark.full(seconds=8)
def test_the_only_attention_worker_is_not_fenced_for_its_silence_while_its_tokens_flow(calm: Calm) -> None:
    """Its lease is not renewed any more, and gateways hear it: it goes when another serves."""
    router = RouterClient(calm.cluster.router_address)
    seen: list[dict[str, str]] = []
    router.start(on_view=lambda view: seen.append({m.name: m.state for m in view.pool("attention")}))
    try:
        router.scale("attention", 1)
        wait_for("one worker", lambda: list(_members(calm, "attention").values()) == ["serving"], calm.cluster)
        (name,) = _members(calm, "attention")
        (tid,) = threads(calm.cluster.pids()[name], LEASE_THREAD)
        seen.clear()
        with contextlib.ExitStack() as stopped:
            try:
                stopped.enter_context(hanging(tid))
            except NotPermitted as error:
                pytest.skip(f"needs ptrace, found: {error}")
            while name in _members(calm, "attention"):
                calm.check("silent to the router alone")
        assert all("serving" in states.values() or states.get(name) == "suspect" for states in seen), seen
        gone = {one.name: one.reason for one in router.status().gone}
        assert gone[name].startswith("silent for "), gone
    finally:
        router.close()


@pytest.mark.full(seconds=14)
def test_time_in_which_the_whole_host_stood_still_counts_against_no_request(tiny: Path) -> None:
    """All processes are stopped for longer than a token may take, in several moments of a step."""
    config = ClusterConfig(
        model=tiny,
        served_model_name="tiny",
        experts=2,
        attention=1,
        replicas=2,
        port=0,
        cores=(0, 1),
        deadline_s=1.5,
    )
    with LocalCluster(config) as cluster:
        calm = Calm(cluster)

        def stand() -> None:
            pids = list(cluster.pids().values())
            try:
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(2.2)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)

        for at in (0.02, 0.5):
            calm.check(f"the host stands at {at:.0%}", stand, at)
