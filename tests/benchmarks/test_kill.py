"""The README's picture: what is kept of a load report, and what is drawn and said of it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from benchmarks import kill, readme

REPORT: dict[str, Any] = {
    "settings": {"rate": 4.0},
    "summary": {"requests": 40, "failed": 0},
    "throughput": {"step_s": 0.5, "tokens_per_s": [100.0, 300.0] * 4, "reference_tokens_per_s": [200.0] * 8},
    "verdict": {"compared": 40, "lost": 0, "repeated": 1, "changed": 2},
    "chaos": {
        "spans": [{"text": "kill <expert>", "began_s": 2.0, "ended_s": 2.0}],
        "windows": {"recoveries": [{"stalls_s": {"most": 0.1642}}]},
    },
}


def test_the_line_below_the_picture_says_what_clients_saw() -> None:
    said = readme.kill_line({**kill.result_of(REPORT, 4), "hardware": {"cores": 2, "cpu": "CPU"}})
    assert "40 streams, 4 new ones a second" in said and "one of 4 expert servers" in said
    assert "0 requests failed, 0 tokens were lost, 1 repeated, 2 texts changed" in said
    assert "164 ms" in said


def test_the_picture_is_sound_and_shows_both_runs_and_the_fault() -> None:
    drawn = ET.fromstring(kill.picture(kill.result_of(REPORT, 4)))
    paths = {found.get("class"): found.get("d", "") for found in drawn.iter("{http://www.w3.org/2000/svg}path")}
    # Of eight half seconds four points, all alike: the mean of a second is 200 in both runs.
    assert paths["run"] == paths["calm"] and paths["run"].count("L") == 3
    assert any(found.text == "kill <expert>" for found in drawn.iter("{http://www.w3.org/2000/svg}text"))


@pytest.mark.parametrize("lacking", ["chaos", "verdict"])
def test_a_report_without_a_fault_or_a_reference_is_refused(lacking: str) -> None:
    with pytest.raises(ValueError, match="--chaos and --reference"):
        kill.result_of({name: part for name, part in REPORT.items() if name != lacking}, 4)


@pytest.mark.parametrize("high", [1, 0.003, 97, 123456])
def test_ticks_are_few_and_round(high: float) -> None:
    ticks = kill.nice_ticks(high)
    assert 3 <= len(ticks) <= 7
    assert ticks[0] == 0 and ticks[-1] <= high
    assert all(float(f"{tick:.1e}") == pytest.approx(tick) for tick in ticks)
