"""Streams that are cancelled or read slowly leave nothing behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from benchmarks.leaks import held, reading, wave
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from tests.e2e.test_failures import wait_for

pytestmark = pytest.mark.full(seconds=25)

SEED = 11


def test_streams_cancelled_and_read_slowly_leave_no_block_slot_or_descriptor(tiny: Path) -> None:
    sizes = {"streams": 60, "cancelled": 24, "slow": 3, "tokens": 24}
    config = ClusterConfig(model=tiny, served_model_name="leaks", experts=2, port=0, cores=(0, 1))
    with LocalCluster(config) as cluster:
        wave(cluster.url, **sizes, seed=SEED)
        before = reading(cluster)
        for number in range(1, 4):
            ends = wave(cluster.url, **sizes, seed=SEED + number)
            # One that is to be cancelled may come in one piece.
            assert ends["done"] + ends["cancelled"] == 60, f"seed {SEED + number}: {ends}"
        after = reading(cluster)
        assert held(before) == held(after) == 0, f"seed {SEED}: {after}"
        for name, figures in before.items():
            for what in ("fds", "threads"):
                assert after[name][what] <= figures[what] + 2, f"seed {SEED}: {name} {what}"

        # A gateway that is killed takes nothing of its workers with it.
        gateway = next(name for name in cluster.pids() if name.startswith("gateway/"))
        ended = threading.Thread(target=wave, args=(cluster.url,), kwargs={**sizes, "seed": SEED, "tokens": 800})
        ended.start()
        wait_for("streams", lambda: sum(f.get("running", 0) for f in _loads(cluster)) > 5, cluster)
        os.kill(cluster.pids()[gateway], signal.SIGKILL)
        ended.join()
        wait_for("another gateway", lambda: _another(cluster, gateway), cluster)
        assert held(reading(cluster)) == 0
        assert set(wave(cluster.url, **sizes, seed=SEED)) == {"done", "cancelled"}


def _loads(cluster: LocalCluster) -> list[dict[str, float]]:
    from eaas.cluster.status import fetch_status

    return [m["load"] for m in fetch_status(cluster.url)["members"] if m["pool"] == "attention"]


def _another(cluster: LocalCluster, gateway: str) -> bool:
    return any(name.startswith("gateway/") and name != gateway for name in cluster.pids())
