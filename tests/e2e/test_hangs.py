"""One thread stands still and its process lives on, leases and all: it is replaced, and no stream is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hang import NotPermitted, hanging, threads
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from experts.server import LANE_0
from router.client import RouterClient
from tests.e2e.calm import Calm
from tests.e2e.waiting import wait_for


@pytest.fixture(scope="module")
def calm(tiny: Path) -> Iterator[Calm]:
    config = ClusterConfig(
        model=tiny, served_name="tiny", experts=3, attention=1, replicas=2, port=0, cores=(0, 1)
    )
    with LocalCluster(config) as cluster:
        yield Calm(cluster)


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


def test_the_only_attention_worker_that_hangs_is_replaced_by_one_beside_it(calm: Calm) -> None:
    (name,) = _members(calm, "attention")
    # Its work is its first thread's.
    _hang_under_streams(calm, name, calm.cluster.pids()[name])


def test_one_of_two_attention_workers_hangs_idle_and_is_replaced(calm: Calm) -> None:
    router = RouterClient(calm.cluster.router_address)
    try:
        router.scale("attention", 2)
        wait_for(
            "two workers", lambda: list(_members(calm, "attention").values()) == ["serving"] * 2, calm.cluster
        )
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
