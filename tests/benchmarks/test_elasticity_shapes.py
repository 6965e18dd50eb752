"""The table of loads made to defeat scaling counts what it says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import elasticity_shapes
from benchmarks.elasticity import burstier
from benchmarks.elasticity_shapes import SHAPES, demand_of, smallest
from benchmarks.readme import shapes_table


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_asks_the_same_of_the_same_seed_and_something_else_of_another(shape: str) -> None:
    seed = time.time_ns()
    demand = demand_of(shape, seed)
    assert demand.shape == (elasticity_shapes.STEPS,) and demand.min() >= 0 and demand.mean() > 1, seed
    assert np.array_equal(demand, demand_of(shape, seed)), seed
    assert not np.array_equal(demand, demand_of(shape, seed + 1)), seed


def test_more_burstiness_keeps_the_mean_and_scatters_more() -> None:
    seed = time.time_ns()
    demand = np.random.default_rng(seed).lognormal(2, 0.3, 2000)
    assert np.allclose(burstier(demand, 1.0), demand), seed
    more = burstier(demand, 2.0)
    assert more.mean() == pytest.approx(demand.mean()) and more.std() > 1.3 * demand.std(), seed


def test_the_smallest_fleet_that_stays_is_in_time_and_one_less_is_not() -> None:
    assert smallest([10.0] * 50, 0, 0.001) == 10
    # Late for one step of 50 with 10, which is more than 1% and less than 3%.
    bumps = [10.0] * 25 + [30.0] + [5.0] * 24
    assert smallest(bumps, 0, 0.001) > 25
    assert smallest(bumps, 0, 0.9) < 11


def test_the_table_is_recorded_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elasticity_shapes, "STEPS", 240)
    monkeypatch.setattr(elasticity_shapes, "LEARNED", 120)
    monkeypatch.setattr(elasticity_shapes, "SHAPES", {"ramps": elasticity_shapes.ramps})
    elasticity_shapes.main(["--seeds", "2", "--results", str(tmp_path)])
    row = json.loads((tmp_path / "elasticity_shapes.jsonl").read_text())
    found = row["shapes"]["ramps"]
    assert found["over_static"] == pytest.approx(found["ours"] / found["static"] - 1, abs=1e-3)
    assert 0 <= found["late"] <= 1 and found["over_static_most"] >= found["over_static"] - 1e-3
    (table,) = shapes_table([row])
    assert f"| ramps | {found['ours']:.1f} |" in table and "2 seeds" in table
