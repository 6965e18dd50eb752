"""Two models on one pool: loads and figures are what the benchmark says, and its parts run over real processes."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks import readme, several_models, several_weeks
from benchmarks.elasticity import READING, TUNING
from benchmarks.make_model import make_model
from benchmarks.several_models import arrivals, fine_tune, private_bytes, resident_bytes
from benchmarks.several_weeks import Load, Weeks, compare, partner

WORLD = """
import numpy as np
def week(path, seed, peak=64.0, days=8):
    return np.random.default_rng(seed).uniform(0, peak, 8640 * 2)
"""


def load_of(folder: Path, **fields: object) -> Load:
    world = folder / "world.py"
    world.write_text(WORLD)
    return Load(trace=folder / "none.csv", world=world, **{"peak": 4.0, **fields})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("period_s", [0.0, 600.0])
def test_one_pool_is_asked_what_both_models_are_asked(tmp_path: Path, period_s: float) -> None:
    seed = time.time_ns() % 10 + READING[0]
    for apart in (True, False):
        parts = [load_of(tmp_path, period_s=period_s, apart=apart, of=of).demand(seed) for of in ("A", "B", "AB")]
        assert np.allclose(parts[0] + parts[1], parts[2]), (seed, apart)
        assert not np.allclose(parts[0], parts[1]), (seed, apart)


def test_models_are_apart_or_in_phase(tmp_path: Path) -> None:
    seed = time.time_ns()
    for apart in (True, False):
        a, b = (load_of(tmp_path, period_s=600.0, apart=apart, of=of).demand(seed) > 2 for of in ("A", "B"))
        assert a.mean() == pytest.approx(0.5, abs=0.02), seed
        # A wave turns within a step, where either may count as high.
        assert np.mean(a != b) == pytest.approx(1.0 if apart else 0.0, abs=0.04), (seed, apart)


def test_what_is_served_once_is_the_same_demand(tmp_path: Path) -> None:
    seed = time.time_ns() % 5
    for period_s in (0.0, 600.0):
        for apart in (True, False):
            for of in ("A", "B", "AB"):
                load = load_of(tmp_path, period_s=period_s, apart=apart, of=of)
                other, its = load.same(seed)
                assert np.array_equal(load.demand(seed), other.demand(its)), (seed, load)


def test_no_week_is_both_tuned_and_read() -> None:
    for group in (TUNING, READING):
        assert sorted(map(partner, group)) == list(group)
        assert all(partner(seed) != seed for seed in group)


def test_waves_by_turns_need_half_the_servers_and_waves_in_phase_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_weeks, "STEPS", 360)
    monkeypatch.setattr(several_weeks, "LEARNED", 180)
    with ThreadPoolExecutor(1) as workers:
        apart, in_phase = (
            compare(Weeks(workers, 1.75), load_of(tmp_path, period_s=600.0, apart=apart), 1) for apart in (True, False)
        )
    assert apart["fixed"]["saving"] > 0.3 > 0.15 > in_phase["fixed"]["saving"] >= -0.1
    assert apart["scaled"]["saving"] > in_phase["scaled"]["saving"]
    for found in (apart, in_phase):
        assert found["fixed"]["two"]["paid"] == sum(found["fixed"]["two"]["of_each"])
        assert found["scaled"]["two"]["paid"] == pytest.approx(sum(found["scaled"]["two"]["of_each"]), abs=0.01)


def test_a_fine_tune_differs_in_so_many_experts_and_in_nothing_else(tmp_path: Path) -> None:
    seed = time.time_ns()
    source = make_model("tiny", "qwen3_moe", tmp_path / "source", seed=1)
    changed = fine_tune(source, tmp_path / "tuned", 0.25, seed)
    assert changed == 8
    before, after = ((folder / "model.safetensors").read_bytes() for folder in (source, tmp_path / "tuned"))
    size = 8 + int.from_bytes(before[:8], "little")
    assert before[:size] == after[:size]
    differ: set[tuple[int, int]] = set()
    for name, tensor in json.loads(before[8:size]).items():
        if name == "__metadata__":
            continue
        begin, end = (size + offset for offset in tensor["data_offsets"])
        match = several_models.EXPERT_TENSOR.search(name)
        if before[begin:end] != after[begin:end]:
            assert match is not None, (seed, name)
            differ.add((int(match[1]), int(match[2])))
    assert len(differ) == changed, seed
    with pytest.raises(ValueError, match="no tensors such as"):
        bare = tmp_path / "bare"
        bare.mkdir()
        fine_tune(bare, tmp_path / "none", 0.1, seed)


def test_memory_counts_what_the_page_cache_holds(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    with path.open("wb") as file:
        file.write(b"x" * (1 << 20))
        file.seek(4 << 20)
        file.write(b"x" * (1 << 20))
    assert 2 << 20 <= resident_bytes(path) <= 3 << 20
    before = private_bytes(os.getpid())
    held = np.ones(64 << 20, np.uint8)
    assert private_bytes(os.getpid()) - before > 0.9 * held.nbytes


def test_requests_come_at_their_rates() -> None:
    seed = time.time_ns()
    times = arrivals(seed, 100.0, (50.0, 5.0))
    assert times == sorted(times) and times[0] > 0 and times[-1] < 200, seed
    early = sum(time_s < 100 for time_s in times)
    assert abs(early - 5000) < 500 and abs(len(times) - early - 500) < 150, seed


@pytest.mark.full(seconds=25)
def test_a_fine_tune_shares_its_experts_memory(tmp_path: Path) -> None:
    several_models.main(["--shape", "tiny", "--results", str(tmp_path), "memory"])
    row = json.loads((tmp_path / "several_models.jsonl").read_text())
    assert row["one"]["packs"] == 1 and row["two"]["packs"] == 2
    # 3 of 32 experts, and a manifest.
    assert 1.05 < row["ratio_of_resident"] < 1.15
    assert "3 of 32" in readme.several_tables([row])[0]


@pytest.mark.full(seconds=30)
def test_mixing_compares_texts_and_measures_both_costs(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--rounds", "1", "--results", str(tmp_path)]
    several_models.main([*options, "mixing", "--streams", "4", "--tokens", "48"])
    row = json.loads((tmp_path / "several_models.jsonl").read_text())
    assert set(row["tokens_per_s"]) == {"alone", "beside", "one", "mixed"}
    assert all(figure["median"] > 0 for figure in row["ratio"].values())
    assert readme.several_tables([row])
