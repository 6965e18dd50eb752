"""The local cluster as a launcher: what it says of its processes to a router that has just started."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eaas.cluster import local
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster, entries_after
from eaas.ops.running import load_words
from router.client import RouterClient
from router.host import host_id
from router.view import Model, View
from tests.router.test_service import SHAPE, RouterProcess, started, until

__all__ = ["started"]


def test_a_worker_that_has_joined_and_is_not_ready_yet_is_not_counted_twice_when_the_router_restarts(
    started: Callable[..., RouterProcess], tmp_path: Path
) -> None:
    router = started("--experts", "0", "--attention", "2", "--lease-s", "10")
    worker, watcher = RouterClient(router.address), RouterClient(router.address)
    cluster: Any = LocalCluster(
        ClusterConfig(model=tmp_path, served_model_name="m", experts=0, attention=2, endpoint=False)
    )
    # The router of this host watches the process that joins.
    joined, loading = os.getpid(), os.getppid()
    for pid in (joined, loading):
        cluster._children[pid] = SimpleNamespace(pool="attention", slot=0, pid=pid, ready=None)
    try:
        cluster._router_ready(SimpleNamespace(slot=0, address=router.address, ready={}))
        until(lambda: watcher.status().pools["attention"].starting == 2)
        worker.join(pool="attention", address="nowhere", pid=joined, host=host_id(), **SHAPE)
        worker.start()
        until(lambda: cluster._router.view is not None and cluster._router.view.pool("attention"))
        router.stop(signal.SIGKILL)
        router.start()
        seen = list[int]()
        until(lambda: seen.append(watcher.status().pools["attention"].starting) or seen[-1])
        assert seen[-1] == 1, "the one that has not joined"
        assert watcher.status().pools["attention"].live == 1
    finally:
        cluster._children.clear()
        cluster.stop()
        worker.close()
        watcher.close()


def test_what_a_router_is_told_that_lost_its_journal_is_what_is_served_and_stays() -> None:
    def model(number: int, name: str, **words: Any) -> Model:
        return Model(hash=f"h{number}", name=name, number=number, layers=1, experts=2, **words)

    served = (
        model(0, "mine", path="/mine"),
        model(1, "code", asleep=True),
        model(2, "old", leaving=True),
        model(3, "new"),
    )
    view = View(term=1, epoch=1, replicas_wanted=1, layers=1, experts=2, models=served)
    told = entries_after(
        view, {"expert": 4, "attention": 2, "attention:code": 3, "attention:old": 0}, ("mine", "/mine")
    )
    assert [(entry.model.name, entry.attention, entry.model.asleep) for entry in told] == [
        ("", 2, False),
        ("code", 3, False),
        ("new", 2, False),
    ]


def test_after_a_loss_of_the_journal_processes_are_of_the_model_that_is_the_first_then(
    tmp_path: Path,
) -> None:
    """The first that was named had been removed: to another's workers and servers no router would listen."""
    cluster: Any = LocalCluster(ClusterConfig(model=tmp_path, served_model_name="m"))
    try:
        for number, path in ((1, str(tmp_path)), (0, "/b")):
            cluster._models = (Model(hash="b", name="b", path="/b", number=number, layers=1, experts=2),)
            for pool in ("expert", "attention"):
                assert f"--model={path}" in cluster._arguments(pool, 0, 0)
    finally:
        cluster.stop()


def test_models_that_cannot_be_kept_keep_nothing_else_from_being_done(tmp_path: Path) -> None:
    cluster: Any = LocalCluster(ClusterConfig(model=tmp_path, served_model_name="m"))
    looked = list[int]()
    cluster._look_at_gateways = lambda view: looked.append(view.epoch)
    obstacle, kept = cluster.state_dir / "models.new", cluster.state_dir / "models.json"
    obstacle.mkdir()
    try:
        for epoch in (1, 2, 3):
            model = Model(hash="h", name="a", layers=1, experts=2)
            view = View(term=1, epoch=epoch, replicas_wanted=1, layers=1, experts=2, models=(model,))
            cluster._look_at(view)
            assert looked[-1] == epoch and kept.exists() == (epoch == 3)
            if epoch == 2:
                obstacle.rmdir()
    finally:
        cluster.stop()


def gateways(*members: tuple[int, str], models: tuple[Model, ...] = ()) -> Any:
    """A View of gateways of this host, each a pid and a state."""
    here = [SimpleNamespace(pid=pid, state=state, host=host_id()) for pid, state in members]
    return SimpleNamespace(pool=lambda _: here, models=models)


@pytest.mark.parametrize("which", ["a router that ended", "a gateway that ended", "a gateway that drains"])
def test_what_cannot_be_started_at_once_is_started_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    tried: list[str] = []

    def start(*, pool: str, **_: object) -> SimpleNamespace:
        tried.append(pool)
        if len(tried) < 4:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return SimpleNamespace(pool=pool, pid=2, pidfd=-1, ready_fd=-1)

    monkeypatch.setattr(local.Child, "start", start)
    monkeypatch.setattr(local, "RESTART_FIRST_S", 0.01)
    events: list[str] = []
    cluster: Any = LocalCluster(ClusterConfig(model=tmp_path, served_model_name="m"), on_event=events.append)
    # The supervisor does not run: its acts are carried out here.
    monkeypatch.setattr(cluster._selector, "register", lambda *_: None)
    cluster._gateway_address, cluster._router_addresses[0] = "127.0.0.1:1", "127.0.0.1:2"
    cluster._ready.set()
    pool = which.split()[1]
    child = SimpleNamespace(pool=pool, slot=0, pid=1, replaced=False, joined=True)
    cluster._children[1] = child
    try:
        if which.endswith("ended"):
            cluster._restart(child, -9)
        else:
            cluster._look_at_gateways(gateways((1, "draining")))
            for act in cluster._take_due():
                cluster._carry_out(act)
            assert not child.replaced, "nothing has come in its place"

        def again() -> bool:
            for act in cluster._take_due():
                cluster._carry_out(act)
            return 2 in cluster._children

        until(again)
        assert tried == [pool] * 4
        assert len(events) == 3 and all("could not be started" in event for event in events)
        assert not cluster._due, "it is started once"
        assert child.replaced == (which == "a gateway that drains")
    finally:
        cluster._children.clear()
        cluster.stop()


def test_what_ended_is_started_again_at_once_and_ever_more_slowly_only_while_it_keeps_dying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster: Any = LocalCluster(ClusterConfig(model=tmp_path, served_model_name="m"))
    now = SimpleNamespace(s=1.0)
    child, other = (SimpleNamespace(pool="gateway", slot=slot) for slot in (0, 1))
    try:
        with monkeypatch.context() as patched:
            patched.setattr(local, "time", SimpleNamespace(monotonic=lambda: now.s))
            pauses = []
            for _ in range(9):
                pauses.append(cluster._backoff_s(child))
                now.s += pauses[-1] + 1.8
            assert pauses == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.5, 3.1, 5.0, 5.0, 5.0])
            assert cluster._backoff_s(other) == 0.0
            now.s += 3.1
            assert cluster._backoff_s(child) == 5.0
            now.s += 5.0 + 5.1
            assert cluster._backoff_s(child) == 0.0
    finally:
        cluster.stop()


@pytest.fixture
def two_gateways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster with the gateways 1 and 2, both members, whose supervisor's acts are carried out by `see`."""
    monkeypatch.setattr(local, "SILENT_GATEWAY_S", 0.0)
    cluster: Any = LocalCluster(ClusterConfig(model=tmp_path, served_model_name="m", gateways=2), on_event=print)

    def see(*members: tuple[int, str]) -> set[int]:
        cluster._look_at_gateways(gateways(*members))
        for act in cluster._take_due():
            cluster._carry_out(act)
        return {pid for pid in (1, 2) if cluster._children[pid].sent}

    for pid in (1, 2):
        child = SimpleNamespace(pool="gateway", name=f"gateway/{pid}", slot=pid - 1, pid=pid, sent=[])
        child.send, child.replaced, child.joined = child.sent.append, False, False
        cluster._children[pid] = child
    yield SimpleNamespace(see=see, children=cluster._children, cluster=cluster)
    cluster._children.clear()
    cluster.stop()


def test_a_gateway_that_stays_silent_is_ended_once_another_serves(two_gateways: Any) -> None:
    see, children = two_gateways.see, two_gateways.children
    assert not see((1, "serving")), "the second has only not joined yet"
    assert not see((1, "serving"), (2, "serving"))
    assert not see((2, "draining")), "the other goes"
    assert not see(), "the last are silent: they hold streams that nobody else can go on with"
    assert not see((1, "serving"), (2, "serving")), "both are back"
    assert see((2, "serving")) == {1}
    assert children[1].sent == [signal.SIGKILL]


def test_a_gateway_that_was_silent_for_a_moment_is_let_be(two_gateways: Any) -> None:
    cluster = two_gateways.cluster
    two_gateways.see((1, "serving"), (2, "serving"))
    cluster._look_at_gateways(gateways((2, "serving")))
    due = cluster._take_due()
    assert not two_gateways.see((1, "serving"), (2, "serving")), "it has joined again"
    for act in due:
        cluster._carry_out(act)
    assert not two_gateways.children[1].sent


def test_it_says_which_models_come_and_go_once_it_is_ready(two_gateways: Any) -> None:
    cluster, said = two_gateways.cluster, list[str]()
    cluster._show = said.append
    a, b = Model(hash="A", name="a"), Model(hash="B", name="b", number=1)

    def see(*models: Model) -> list[str]:
        said.clear()
        cluster._tell_models(gateways(models=models))
        return said

    assert not see() and not see(a), "it begins with what it was started with"
    cluster._ready.set()
    assert not see(a)
    assert see(a, b) == ["model b added"]
    assert not see(a, replace(b, leaving=True)) and not see(a, replace(b, leaving=True, asleep=True))
    assert see(a) == ["model b removed"]


def test_a_cluster_is_ready_when_all_its_gateways_are(two_gateways: Any) -> None:
    cluster, (one, two) = two_gateways.cluster, two_gateways.children.values()
    one.ready, two.ready = {}, None
    assert "1 x gateway" in cluster._missing()
    two.ready = {}
    assert "gateway" not in cluster._missing()


def test_a_members_load_is_told_in_words() -> None:
    attention = {"running": 3.0, "waiting": 0.0, "kv_use": 0.123, "slow_link:expert/1": 1.0, "queue_s": 0.0}
    assert load_words(attention) == "3 running, 0 waiting, KV 12%"
    assert load_words({"busy": 0.25, "rows_per_s": 1234.5}) == "busy 25%, 1,234 rows/s"
    assert load_words({}) == ""
