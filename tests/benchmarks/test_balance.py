"""The balance benchmark on a small world of its own: it measures and writes what it promises."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from benchmarks import balance

WORLD = """
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class World:
    experts: int = 32
    servers: int = 8
    slots: int = 80
    min_replicas: int = 2
    clients: int = 2
    rows: int = 2048
    steps: int = 2
    intervals: int = 120
    zipf: float = 0.8
    slow_servers: int = 0
    expert_bytes: int = 1 << 20

    @property
    def speed(self):
        return np.where(np.arange(self.servers) < self.slow_servers, 0.5, 1.0)

    def batches(self, seed):
        rng = np.random.default_rng(seed)
        popularity = np.arange(1, self.experts + 1) ** -self.zipf
        for _ in range(self.intervals):
            size = (self.steps, self.clients)
            yield rng.multinomial(self.rows // self.clients, popularity / popularity.sum(), size=size)
"""


def test_ours_is_within_its_bound_and_moves_little(tmp_path: Path) -> None:
    world = tmp_path / "world.py"
    world.write_text(WORLD)
    options = ["--world", str(world), "--seeds", "2", "--intervals", "6", "--processes", "1"]
    balance.main([*options, "--setting", "default", "--results", str(tmp_path)])
    [row] = [json.loads(line) for line in (tmp_path / "balance.jsonl").read_text().splitlines()]
    ours, even = row["policies"]["ours"], row["policies"]["eplb_even"]
    assert row["setting"] == "default" and row["seeds"] == 2
    assert 1 <= ours["over_bound"]["mean"] < 1.03
    assert row["bound"]["mean"] <= ours["mean"] < even["mean"]
    assert ours["gb_per_interval"] < even["gb_per_interval"]
    assert row["bound_gap"] < 1e-3
    assert len(row["by_interval"]["ours"]) == 6
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / "balance.svg").exists() == drawn
