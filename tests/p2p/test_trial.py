"""A trial of a transport measures, or says why not, and ends within its limit whatever the other process does."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest

from p2p.trial import LIMIT_S, try_out

pytestmark = pytest.mark.alone


def test_shared_memory_works_and_is_measured() -> None:
    trial = try_out("shm")
    assert trial.usable, trial.problem
    assert trial.round_trip_us > 0 and trial.bandwidth_bytes_per_s > 0


def test_an_unknown_transport_says_why() -> None:
    assert "pigeon" in try_out("pigeon").problem


@pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu13") is None,
    reason="needs the package nixl-cu13 (pip install --no-deps nixl-cu13), found none",
)
def test_an_unknown_rail_says_why() -> None:
    assert "nosuchrail" in try_out("nixl:nosuchrail").problem


@pytest.mark.parametrize(
    "does",
    ["exec sleep 60", "head -n 1 > /dev/null; exec sleep 60", "exit 1", "echo nonsense; exec sleep 60"],
)
def test_another_process_that_does_not_answer_ends_the_trial_within_its_limit(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.write_text(f"#!/bin/sh\n{does}\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(other))
    began_s = time.monotonic()
    assert try_out("shm", limit_s=0.5).problem
    # Otherwise it waits for the sleeper, or for good.
    assert time.monotonic() - began_s < LIMIT_S


def test_a_process_that_cannot_be_started_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert "No such file" in try_out("shm").problem
