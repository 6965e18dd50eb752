"""No test falls out of `make test-all`: its shards hold each test once, whatever their number."""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.shards import COLLECTED, divide, parse_shard, seconds_of, shard_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("count", [1, 2, 6, 7])
def test_each_collected_test_is_in_one_shard(request: pytest.FixtureRequest, count: int) -> None:
    collected = request.config.stash[COLLECTED]
    assert request.node in collected
    shards = [shard_of(collected, number, count) for number in range(1, count + 1)]
    held = Counter(item.nodeid for shard in shards for item in shard)
    assert held == Counter(item.nodeid for item in collected)


def test_every_test_of_the_full_tier_says_what_it_takes(request: pytest.FixtureRequest) -> None:
    for item in request.config.stash[COLLECTED]:
        assert seconds_of(item) > 0, item.nodeid


def test_shards_cost_about_the_same() -> None:
    source = random.Random(1)
    costs = {f"test_{number}.py": source.expovariate(0.1) for number in range(200)}
    shards = divide(costs, 6)
    totals = [sum(costs[name] for name in shard) for shard in shards]
    assert max(totals) - min(totals) < 1.0, totals
    assert shards == divide(dict(reversed(costs.items())), 6), "the order of the files matters"


@pytest.mark.parametrize("text", ["", "3", "0/6", "7/6", "1/0", "-1/6", "a/b", "1/6/2"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="a shard such as 3/6 needed"):
        parse_shard(text)


@pytest.mark.full(seconds=12)
def test_the_option_runs_one_shard(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "shards.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests" / name)
    names = "abcde"
    for name in names:
        (tmp_path / "tests" / f"test_{name}.py").write_text(f"def test_{name}(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n")
    ran = []
    for number in (1, 2, 3):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-p",
            "no:cacheprovider",
            "--shard",
            f"{number}/3",
            "tests",
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        ran += re.findall(r"::test_(.) PASSED", done.stdout)
    assert sorted(ran) == list(names)
