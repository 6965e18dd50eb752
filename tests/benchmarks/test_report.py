"""A result says what was run, and nothing of the folders of the machine that ran it."""

from __future__ import annotations

import json

from benchmarks.report import RESULTS, command_of


def test_of_an_absolute_path_only_the_name_is_kept() -> None:
    words = [
        "--world",
        "/somewhere/else/world.py",
        "--results=/a/b/out",
        "--seeds",
        "2",
        "--trace",
        "../data/x.csv",
    ]
    kept = "--world world.py --results=out --seeds 2 --trace ../data/x.csv"
    assert command_of("balance", words) == f"python -m benchmarks.balance {kept}"


def test_no_recorded_command_names_a_folder_of_this_machine() -> None:
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            words = json.loads(line)["command"].replace("=", " ").split()
            assert not [word for word in words if word.startswith("/")], f"{path.name}: {words}"
