"""`make gpu` without a GPU: its table from records, its limits, and that no section can hang it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as run
from benchmarks.gpu.table import MISSING, NOT_RUN, OK, RULES, SHORT, rows_of, text_of

ENDED = {"what": "section", "exit_code": 0, "killed": False, "seconds": 3.0}
ROOT = Path(__file__).parents[2]


def states(records: list[dict], *sections: str) -> dict[str, str]:
    return {row[0]: row[3] for row in rows_of(records, dict.fromkeys(sections, 60.0))}


def decode(tokens: int, share: float, goal: float = 0.85) -> dict:
    return {
        "section": "ffn", "what": "decode", "shape": "X", "weights": "bfloat16", "tokens": tokens, "goal": goal,
        "share_of_copy": share, "us": 9.0, "weight_mb": 600.0, "reached": share >= goal,
    }  # fmt: skip


def test_each_figure_is_ok_short_missing_or_not_run() -> None:
    records = [decode(1, 0.9), decode(16, 0.7), {"section": "ffn", **ENDED}]
    found = states(records, "ffn", "ceilings")
    assert found["ffn: decode, X, bfloat16, 1"] == OK
    assert found["ffn: decode, X, bfloat16, 16"] == SHORT
    assert found["ffn: prefill"] == MISSING and found["ffn: rows against double"] == MISSING
    assert found["ceilings: copy"] == NOT_RUN and found["ceilings"] == NOT_RUN
    assert found["ffn"] == OK
    (row,) = [row for row in rows_of(records, {"ffn": 60.0}) if row[0].endswith("16")]
    assert row[1:3] == ("85% of the copy rate", "70%, 9.0 us of 600.0 MB")
    assert "70%, 9.0 us" in text_of([row])


def test_a_figure_measured_again_counts_as_it_was_last() -> None:
    assert states([decode(1, 0.9), decode(1, 0.2)], "ffn")["ffn: decode, X, bfloat16, 1"] == SHORT


def test_a_check_that_no_rule_knows_has_a_row() -> None:
    records = [{"section": "nvshmem", "what": "puts", "holds": False}]
    assert states(records, "nvshmem")["nvshmem: puts"] == SHORT


def test_a_record_that_is_not_as_expected_costs_its_own_row_alone() -> None:
    odd = {"section": "ffn", "what": "decode", "shape": "Y", "goal": "much"}
    found = states([odd, decode(1, 0.9)], "ffn")
    assert found["ffn: decode, Y, None, None"] == MISSING and found["ffn: decode, X, bfloat16, 1"] == OK


def test_every_rule_is_of_a_section_that_there_is() -> None:
    assert {rule.section for rule in RULES} <= set(run.SECTIONS)


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, run.Section]:
    """Programs in place of the sections, by name."""
    (tmp_path / "programs").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "programs"))
    monkeypatch.setattr(run, "quit_mps", lambda folder: (tmp_path / "quit").write_text(str(folder)))
    monkeypatch.setattr(run, "card", lambda: {"gpu": {"name": "none"}})
    texts = {
        "well": 'print(\'{"what": "copy", "tb_per_s": 4.1}\'); print(\'words\')',
        "ill": "raise SystemExit('it broke')",
        # Its child holds its output, and outlives it where nobody ends it.
        "hangs": (
            "import subprocess, sys, time\n"
            'print(\'{"what": "first", "holds": true}\', flush=True)\n'
            "import pathlib, tempfile; (pathlib.Path(tempfile.mkdtemp()) / 'mps').mkdir()\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
            "time.sleep(600)"
        ),
    }
    for name, text in texts.items():
        (tmp_path / "programs" / f"section_{name}.py").write_text(text)
    made = {name: run.Section(command=(f"section_{name}",), limit_s=20, shows="") for name in texts}
    made["hangs"] = run.Section(command=("section_hangs",), limit_s=3, shows="")
    made["tool"] = run.Section(command=("section_well",), limit_s=5, shows="", tool=("no-such-tool",))
    monkeypatch.setattr(run, "SECTIONS", made)
    return made


@pytest.mark.usefixtures("sections")
def test_a_section_that_hangs_is_ended_with_its_children_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    assert run.run_sections(["hangs", "ill", "tool", "well"], tmp_path) == 1
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    ends = {line["section"]: line for line in lines if line["what"] == "section"}
    assert ends["hangs"]["killed"] and not ends["ill"]["killed"] and ends["well"]["exit_code"] == 0
    assert "it broke" in ends["ill"]["said"] and ends["tool"]["missing"] == "no-such-tool is not on PATH"
    assert {"first", "copy"} <= {line["what"] for line in lines}, "what came before is kept"
    child = int((tmp_path / "child").read_text())
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()
    told = Path((tmp_path / "quit").read_text())
    assert not told.parent.exists(), "its daemon is told to end, and its folder is gone"
    table = capsys.readouterr().out
    for words in ("killed after", "short", "hangs: first"):
        assert words in table
    assert time.monotonic() - began_s < 120, "it came to an end"


@pytest.mark.usefixtures("sections")
def test_what_there_is_no_time_for_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.run_sections(["well"], tmp_path, budget_s=5) == 0
    assert "well: not run, no time left" in capsys.readouterr().out


def test_the_list_names_every_section_without_a_gpu() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--list"], cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ,
    )  # fmt: skip
    assert [line.split()[0] for line in ended.stdout.splitlines()] == list(run.SECTIONS)
