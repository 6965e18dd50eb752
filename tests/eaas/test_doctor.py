"""The doctor names every transport and rail with a figure or a reason, whatever lies among the devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from eaas import doctor
from p2p.trial import Trial

MEASURED = {"round_trip_us": 41.0, "bandwidth_bytes_per_s": 2e9}


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
