"""The doctor names every transport and rail with a figure or a reason, whatever lies among the devices."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from eaas.ops import doctor
from p2p.cuda_driver import PEER_ACCESS, PEER_ATOMICS, CudaMissing, DeviceFacts
from p2p.trial import Trial

MEASURED: Any = {"round_trip_us": 41.0, "bandwidth_bytes_per_s": 2e9}


def found(trials: dict[str, Trial], monkeypatch: pytest.MonkeyPatch) -> dict[str, doctor.Finding]:
    monkeypatch.setattr(doctor, "try_out", trials.__getitem__)
    monkeypatch.setattr(doctor, "_rails", lambda: ["eth0", "eth1"])
    return {finding.what: finding for finding in doctor._transports()}


def test_nixl_and_each_rail_appear_with_a_figure_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = {
        "shm": Trial(choice="shm", **MEASURED),
        "nixl": Trial(choice="nixl", **MEASURED),
        "nixl:eth0": Trial(choice="nixl:eth0", **MEASURED),
        "nixl:eth1": Trial(choice="nixl:eth1", problem="nobody answers"),
    }
    findings = found(trials, monkeypatch)
    for what in ("transport shm (one host)", "transport nixl (between hosts)", "rail eth0"):
        assert findings[what].usable and "41 us" in findings[what].found
    assert not findings["rail eth1"].usable and findings["rail eth1"].found == "nobody answers"


def test_without_nixl_its_reason_stands_there_and_no_rail(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = {
        "shm": Trial(choice="shm", **MEASURED),
        "nixl": Trial(choice="nixl", problem="not installed"),
    }
    findings = found(trials, monkeypatch)
    assert findings["transport nixl (between hosts)"].found == "not installed"
    assert not any(what.startswith("rail ") for what in findings)


def test_only_devices_that_are_up_are_rails(tmp_path: Path) -> None:
    for name, state in (("eth0", "up"), ("eth1", "down"), ("lo", "unknown")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    (tmp_path / "gone").mkdir()
    (tmp_path / "bonding_masters").write_text("\n")
    assert doctor._rails(tmp_path) == ["eth0", "lo"]


GPU = DeviceFacts(
    ordinal=1,
    name="H200",
    uuid=uuid.UUID(int=7),
    total_bytes=140 << 30,
    capability=(9, 0),
    multiprocessors=132,
    exports_fds=True,
    exports_rdma=True,
    exclusive=False,
    mps=False,
)


class Driver:
    """A driver of GPUs that reach each other one way."""

    version = (13, 0)

    def __init__(self, gpus: tuple[DeviceFacts, ...]) -> None:
        self.gpus = list(gpus)

    def devices(self) -> list[DeviceFacts]:
        return self.gpus

    def peer_has(self, ordinal: int, peer: int, attribute: int) -> bool:
        return (ordinal, peer, attribute) in {
            (1, 2, PEER_ACCESS),
            (1, 2, PEER_ATOMICS),
        }


def found_gpus(*gpus: DeviceFacts, monkeypatch: pytest.MonkeyPatch) -> dict[str, doctor.Finding]:
    monkeypatch.setattr(doctor.CudaDriver, "load", lambda: Driver(gpus))
    monkeypatch.setattr(doctor, "try_out", lambda choice: Trial(choice=choice, **MEASURED))
    return {finding.what: finding for finding in doctor._gpus()}


def test_a_gpu_is_described_with_its_driver_and_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = found_gpus(GPU, monkeypatch=monkeypatch)
    assert findings["GPU driver"].found == "for CUDA 13.0"
    assert findings["GPU 1"].usable
    for words in ("H200, 140 GiB", "132 multiprocessors", "compute capability 9.0", "memory can be shared"):
        assert words in findings["GPU 1"].found
    for what in ("transport cuda:1 (one host)", "transport nixl@cuda:1 (between hosts)"):
        assert "41 us" in findings[what].found


@pytest.mark.parametrize(
    "change, words",
    [
        ({"capability": (7, 5)}, "the kernels need 8.0: use another GPU"),
        ({"exports_fds": False}, "memory cannot be shared between processes"),
    ],
)
def test_a_gpu_that_cannot_serve_says_why(
    change: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = found_gpus(replace(GPU, **change), monkeypatch=monkeypatch)["GPU 1"]  # type: ignore[arg-type]
    assert not finding.usable and words in finding.found


@pytest.mark.parametrize(
    ("change", "control", "usable", "words"),
    [
        ({"mps": True, "exclusive": True}, False, True, "an MPS daemon runs for it"),
        ({}, True, True, "`eaas serve` starts nvidia-cuda-mps-control where"),
        (
            {},
            False,
            False,
            "refused: without nvidia-cuda-mps-control, which is not on PATH, they take turns of milliseconds",
        ),
        ({"name": "H100 MIG 1g.10gb"}, True, False, "a slice by MIG"),
        ({"exclusive": True}, True, False, "lets in one at a time, or none: nvidia-smi -c DEFAULT"),
    ],
)
def test_whether_processes_can_share_a_gpu_is_said_of_each(
    change: dict[str, object], control: bool, usable: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}" if control else None)
    finding = found_gpus(replace(GPU, **change), monkeypatch=monkeypatch)["several processes on GPU 1"]  # type: ignore[arg-type]
    assert finding.usable is usable and re.search(words, finding.found), finding


def test_pairs_of_gpus_are_told_by_what_kernels_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = found_gpus(GPU, replace(GPU, ordinal=2), monkeypatch=monkeypatch)
    there, back = findings["GPU 1 to GPU 2"], findings["GPU 2 to GPU 1"]
    assert there.usable and "reach its memory, with native atomics" in there.found
    assert not back.usable and "cannot serve together" in back.found


def test_without_a_driver_the_reason_stands_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise CudaMissing("no driver: install one")

    monkeypatch.setattr(doctor.CudaDriver, "load", load)
    (finding,) = doctor._gpus()
    assert (finding.what, finding.usable, finding.found) == ("GPU", False, "no driver: install one")


@pytest.mark.parametrize(
    "stated, usable, words",
    [
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n", True, "2.11.0+cu130, for CUDA 13.0"),
        (
            "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n",
            False,
            "2.13.0+cpu is built without CUDA",
        ),
    ],
)
def test_torch_is_read_and_not_imported(
    stated: str, usable: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(stated)
    origin = str(tmp_path / "__init__.py")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=origin))
    finding = doctor._torch()
    assert finding.usable is usable and words in finding.found
