"""Processes that share a GPU do so under MPS, which is started for them, ended with them, or asked for in words.

The driver is the strict stand-in of tests/p2p; nvidia-cuda-mps-control is a script that records what it is told.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eaas.cluster import local, mps
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.process import StartFailed, StateDir
from p2p.cuda_driver import CudaDriver
from tests.p2p.conftest import stand_in

__all__ = ["stand_in"]

GPU_A, GPU_B = (f"GPU-{byte * 4}-{byte * 2}-{byte * 2}-{byte * 2}-{byte * 6}" for byte in ("a0", "a1"))


class Host:
    """A host with two GPUs, a folder of programs, and what MPS was told there."""

    def __init__(self, folder: Path, driver: CudaDriver) -> None:
        self.driver, self.programs, self.state = driver, folder / "bin", folder / "state"
        self.programs.mkdir()
        self.heard = folder / "heard"

    def install(self, ends_with: int = 0) -> None:
        """The control program: it leaves a process behind that holds its output, as a daemon may."""
        program = self.programs / mps.CONTROL
        program.write_text(
            "#!/bin/sh\n"
            f'if [ "$1" = -d ]; then echo "$1 $CUDA_MPS_PIPE_DIRECTORY $CUDA_VISIBLE_DEVICES" >> {self.heard}\n'
            f"sleep 30 & echo $! > {self.heard}.pid\n"
            f'[ {ends_with} = 0 ] || echo "no permission"; exit {ends_with}; fi\n'
            f'echo "$(cat) $CUDA_MPS_PIPE_DIRECTORY" >> {self.heard}; kill $(cat {self.heard}.pid)\n'
        )
        program.chmod(0o755)

    def told(self) -> list[str]:
        return self.heard.read_text().splitlines() if self.heard.exists() else []

    def cluster(self, *devices: str, **options: Any) -> LocalCluster:
        sizes: dict[str, Any] = {"experts": 2, "attention": 1, "port": 0} | options
        config = ClusterConfig(model=self.state, served_model_name="m", device=devices, state_dir=self.state, **sizes)
        return LocalCluster(config)


@pytest.fixture
def host(tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path, CudaDriver.load(str(stand_in)))
    monkeypatch.setattr(mps.CudaDriver, "load", lambda: made.driver)
    monkeypatch.setenv("PATH", f"{made.programs}:/usr/bin:/bin")
    monkeypatch.delenv(mps.PIPES, raising=False)
    return made


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """By pool, what its processes got; none of them is really started."""
    seen: dict[str, dict[str, str]] = {}

    def start(*, pool: str, environment: dict[str, str], **_: object) -> None:
        seen[pool] = dict(environment)
        raise OSError("not in this test")

    monkeypatch.setattr(local.Child, "start", start)
    return seen


def test_it_is_started_once_reaches_those_that_compute_and_is_ended(
    host: Host, environments: dict[str, dict[str, str]]
) -> None:
    host.install()
    cluster: Any = host.cluster("cuda:0")
    folder = str(cluster.state_dir / "mps")
    with pytest.raises(StartFailed, match="router could not be started: not in this test"):
        cluster.start()
    # The start has failed: whatever was begun has an end.
    assert host.told() == [f"-d {folder} {GPU_A},{GPU_B}", f"quit -t 5 {folder}"]
    assert not cluster.state_dir.exists()
    for pool in ("expert", "attention"):
        with pytest.raises(StartFailed):
            cluster._spawn(pool, 0, port=0)
        assert environments[pool] == {
            "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder,
            "CUDA_VISIBLE_DEVICES": f"{GPU_A},{GPU_B}",
        }  # fmt: skip
    assert environments["router"] == {}
    assert mps.PIPES not in os.environ


def test_what_a_killed_launcher_left_is_ended_by_the_next(host: Host) -> None:
    host.install()
    left = host.cluster("cuda")
    mps.ready_gpus(left.config, left.state_dir)
    os.close(left._state._lock)
    left._state._lock = -1
    StateDir(host.state).close()
    assert host.told()[-1] == f"quit -t 5 {left.state_dir / 'mps'}"
    left.stop()


def test_the_processes_of_a_gpu_are_counted_as_far_as_pools_may_grow(host: Host) -> None:
    for options, shared in (
        ({}, {0: 2, 1: 1}),
        ({"experts": 1, "replicas": 1}, {0: 1, 1: 1}),
        ({"experts": 1, "replicas": 1, "autoscale": ("expert:1..2",)}, {0: 2, 1: 1}),
        ({"attention": 0}, {0: 1, 1: 1}),
    ):
        cluster = host.cluster("cuda:0", "cuda:1", **options)
        assert cluster.config.gpus == shared, options
        cluster.stop()


def test_where_each_process_has_its_own_gpu_none_is_started(host: Host) -> None:
    host.install()
    for devices, options in (
        (("cuda:0", "cuda:1"), {"attention": 0}),
        (("cuda:1", "cuda:0"), {"experts": 1, "replicas": 1}),
        (("cpu",), {}),
        (("interpreter",), {}),
    ):
        cluster = host.cluster(*devices, **options)
        assert mps.ready_gpus(cluster.config, cluster.state_dir) == {}
        cluster.stop()
    assert host.told() == []


@pytest.mark.parametrize("by", ["environment", "attribute"])
def test_one_that_runs_is_used_and_left_alone(host: Host, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host.install()
    if by == "environment":
        monkeypatch.setenv(mps.PIPES, "/run/mps")
    else:
        found = [replace(gpu, mps=True) for gpu in host.driver.devices()]
        monkeypatch.setattr(host.driver, "devices", lambda: found)
    cluster = host.cluster("cuda:0")
    assert mps.ready_gpus(cluster.config, cluster.state_dir) == {}
    cluster.stop()
    assert host.told() == []


@pytest.mark.parametrize("why", ["no program", "no permission", "a slice"])
def test_without_it_a_shared_gpu_is_refused_in_words(host: Host, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {
        "no program": "nvidia-cuda-mps-control, which comes with NVIDIA's driver .* is not on PATH",
        "no permission": "nvidia-cuda-mps-control -d ended with 3: no permission",
        "a slice": "device 0 .* is a slice of a GPU",
    }[why]
    if why != "no program":
        host.install(ends_with=3)
    if why == "a slice":
        found = [replace(gpu, name="H100 MIG 1g.10gb") for gpu in host.driver.devices()]
        monkeypatch.setattr(host.driver, "devices", lambda: found)
    cluster = host.cluster("cuda:0")
    with pytest.raises(
        StartFailed,
        match=rf"3 processes would share device 0 .* {words}.* as many GPUs as there are processes, 3",
    ):
        cluster.start()
    assert not cluster.state_dir.exists(), "nothing is left"
    assert len(host.told()) == (2 if why == "no permission" else 0)


def test_gpus_that_are_not_there_or_do_not_reach_each_other_are_refused(host: Host) -> None:
    library: Any = host.driver._library
    cluster = host.cluster("cuda:0", "cuda:1")
    library.fake_cuda_part(1)
    try:
        with pytest.raises(StartFailed, match=r"device 0 .* does not reach the memory of device 1 .*doctor` lists"):
            cluster.start()
    finally:
        library.fake_cuda_part(0)
    with pytest.raises(StartFailed, match=r"GPUs: .* device 2: .*Choose a device that nvidia-smi"):
        host.cluster("cuda:1", "cuda:2").start()


def test_a_successor_gets_the_device_of_the_one_that_was_told_to_stop(host: Host) -> None:
    cluster: Any = host.cluster("cuda:0", "cuda:1", "cpu", attention=0)
    begun: list[int] = []
    cluster._spawn = lambda pool, slot, port: begun.append(slot)
    for slot in range(2):
        cluster._children[slot + 1] = SimpleNamespace(
            pool="expert", slot=slot, pid=slot + 1, replaced=False, send=lambda number: None
        )
    cluster._obey(local.StopProcess(host="h", name="expert/1", pid=1))
    cluster._obey(local.StartProcess(host="h", pool="expert"))
    assert begun == [0]
    # One that is drained leaves later: its successor is on the device that it leaves, and not on another process's.
    leaving = SimpleNamespace(pid=2, host=local.host_id(), state="draining")
    cluster._router = SimpleNamespace(view=SimpleNamespace(members=[leaving]))
    cluster._children[1].replaced = False
    cluster._obey(local.StartProcess(host="h", pool="expert"))
    assert begun == [0, 1]
    cluster._router = None
    cluster._children.clear()
    cluster.stop()
