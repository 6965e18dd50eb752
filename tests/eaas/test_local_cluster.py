"""The local cluster as a launcher: what it says of its processes to a router that has just started."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from router.client import RouterClient
from router.host import host_id
from tests.router.test_service import SHAPE, RouterProcess, started, until

__all__ = ["started"]


def test_a_worker_that_has_joined_and_is_not_ready_yet_is_not_counted_twice_when_the_router_restarts(
    started: Callable[..., RouterProcess], tmp_path: Path
) -> None:
    router = started("--experts", "0", "--attention", "2", "--lease-s", "10")
    worker, watcher = RouterClient(router.address), RouterClient(router.address)
    cluster = LocalCluster(
        ClusterConfig(model=tmp_path, served_name="m", experts=0, attention=2, endpoint=False)
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
