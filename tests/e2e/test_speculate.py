"""Tokens guessed ahead, over real processes that are killed meanwhile: every answer is that of a cluster without."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.speculate import compare
from eaas.model.loader import resolve_model


@pytest.mark.full(seconds=60)
def test_every_answer_is_that_without_guesses_though_servers_and_workers_are_killed() -> None:
    seed = time.time_ns() // 1_000_000
    found = compare(Path(resolve_model("demo")), seed, 12, kills=True)
    assert found["differed"] == [] and found["failed"] == 0, f"seed {seed}: {found}"
    assert found["killed"] >= 2 and found["drafted"] > found["accepted"] > 0, f"seed {seed}: {found}"
