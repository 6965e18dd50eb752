"""Memory or room on a disk runs out: what runs goes on, what cannot start says what it lacks."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.process import StartFailed
from router.client import RouterClient
from tests.e2e.calm import Calm
from tests.e2e.waiting import wait_for

pytestmark = pytest.mark.full(seconds=10)


@pytest.fixture(scope="module")
def calm(cluster: LocalCluster) -> Calm:
    return Calm(cluster)


@contextlib.contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size, for the length of a `with`."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system, found: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_process_that_gets_no_more_memory_changes_nothing(calm: Calm) -> None:
    """A new server asks for windows everywhere; the attention worker may map nothing more until the limit goes."""
    pids = calm.cluster.pids()
    worker = next(pid for name, pid in pids.items() if name.startswith("attention/"))
    victim = max(name for name in pids if name.startswith("expert/"))
    before = resource.prlimit(worker, resource.RLIMIT_AS)
    pages = int(Path(f"/proc/{worker}/statm").read_text().split()[0])

    def exhaust() -> None:
        resource.prlimit(worker, resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE"), before[1]))
        os.kill(pids[victim], signal.SIGKILL)

    try:
        calm.check(f"no memory left in attention worker {worker}", exhaust)
    finally:
        if worker in calm.cluster.pids().values():
            resource.prlimit(worker, resource.RLIMIT_AS, before)
    calm.wait_whole()
    calm.check("memory is back")


def test_servers_that_get_no_more_memory_change_nothing(calm: Calm) -> None:
    """Expert servers may map nothing more while the attention worker, and so every window, is replaced."""
    pids = calm.cluster.pids()
    servers = [pid for name, pid in pids.items() if name.startswith("expert/")][:2]
    before = {pid: resource.prlimit(pid, resource.RLIMIT_AS) for pid in servers}

    def exhaust() -> None:
        for pid in servers:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
            resource.prlimit(pid, resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE"), before[pid][1]))
        os.kill(calm.worker_pid(), signal.SIGKILL)

    try:
        calm.check(f"no memory left in expert servers {servers}", exhaust)
    finally:
        for pid in set(servers) & set(calm.cluster.pids().values()):
            resource.prlimit(pid, resource.RLIMIT_AS, before[pid])
    calm.wait_whole()
    calm.check("memory is back")


def test_a_full_journal_disk_under_streams_changes_nothing_and_heals(calm: Calm) -> None:
    """The router can write nothing while a server dies: it repairs nothing, and does once there is room."""
    pids = calm.cluster.pids()
    router, victim = pids["router/0"], min(name for name in pids if name.startswith("expert/"))
    before = resource.prlimit(router, resource.RLIMIT_FSIZE)
    client = RouterClient(calm.cluster.router_address)

    def fill() -> None:
        # No file of the router may grow: what a full disk does.
        resource.prlimit(router, resource.RLIMIT_FSIZE, (1, before[1]))
        os.kill(pids[victim], signal.SIGKILL)

    try:
        calm.check("no room for the journal", fill)
        wait_for(
            "the router's word on it",
            lambda: "cannot be written" in client.status().problem,
            calm.cluster,
        )
        resource.prlimit(router, resource.RLIMIT_FSIZE, before)
        calm.wait_whole()
        wait_for("a router that can write", lambda: client.status().problem == "")
        assert calm.cluster.pids()["router/0"] == router, "the router was ended"
    finally:
        resource.prlimit(router, resource.RLIMIT_FSIZE, before)
        client.close()
    calm.check("the journal has room")


def test_a_cache_disk_without_room_is_named_before_anything_serves(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ClusterConfig(model=tiny, served_model_name="tiny", experts=2, port=0, cores=(0, 1))
    with disk(tmp_path, "64k") as small:
        monkeypatch.setenv("XDG_CACHE_HOME", str(small))
        with pytest.raises(StartFailed) as refusal, LocalCluster(config):
            pass
        assert not list(small.rglob("*.partial")), "a half-written file was left"
    for word in (str(tmp_path), "are free", "XDG_CACHE_HOME"):
        assert word in str(refusal.value), refusal.value


def test_a_cache_disk_that_has_filled_up_keeps_no_replacement_from_serving(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that were packed once are mapped; nothing is written for a replacement."""
    config = ClusterConfig(model=tiny, served_model_name="tiny", experts=3, replicas=2, port=0, cores=(0, 1))
    with disk(tmp_path, "64m") as small:
        monkeypatch.setenv("XDG_CACHE_HOME", str(small))
        with LocalCluster(config) as cluster:
            calm = Calm(cluster)
            with pytest.raises(OSError, match="No space left"), (small / "filler").open("wb") as filler:
                while True:
                    filler.write(bytes(1 << 20))
                    filler.flush()
            pids = cluster.pids()
            victim = max(name for name in pids if name.startswith("expert/"))
            calm.check("no room for weights", lambda: os.kill(pids[victim], signal.SIGKILL))
            # The router hears of its end a moment later.
            wait_for("a whole pool without it", lambda: victim not in calm.serving() and calm.is_whole(), cluster)
