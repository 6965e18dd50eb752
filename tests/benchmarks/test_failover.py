"""What failures cost: the commands over real processes, and their arithmetic."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path

import pytest

from benchmarks import failover, fault_points, readme, soak
from benchmarks.lane_share import VERSION_1, LaneShareUnavailable
from benchmarks.make_model import make_model
from eaas.ops.load.record import StreamRecord
from router.faults import POINTS, Fault

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = make_model("tiny", "qwen3_moe", tmp_path_factory.mktemp("model") / "tiny", seed=1, dtype="bfloat16")
    return ["--model", str(model), "--experts", "3", "--attention", "1", "--streams", "4", "--tokens", "32"]


def line(folder: Path, name: str) -> dict:
    (found,) = (folder / f"{name}.jsonl").read_text().splitlines()
    return json.loads(found)


def clean(row: dict) -> bool:
    return [row[name] for name in readme.SEEN] == [0, 0, 0, 0]


@pytest.mark.full(seconds=15)
def test_a_kill_is_measured_beside_a_calm_run(small: list[str], tmp_path: Path) -> None:
    failover.main([*small, "--seconds", "6", "--at", "3", "--results", str(tmp_path)])
    row = line(tmp_path, "failover")
    assert clean(row), row
    assert row["faults"] == row["pairs"] == 1 and row["tokens_per_s"] > 0
    assert len(row["loss_percent"]["each"]) == 1
    assert 0 <= row["redundant_s"]["max"] <= row["whole_s"]["max"]
    assert row["replacement_cpu_s"]["max"] > 0
    (table,) = readme.failover_table([row])
    assert "| kill | shared | 1 |" in table and "0, 0, 0, 0 |" in table


@pytest.mark.full(seconds=15)
def test_servers_are_held_to_a_share_of_a_core(small: list[str], tmp_path: Path) -> None:
    try:
        failover.main([*small, "--seconds", "6", "--at", "3", "--share", "0.05", "--results", str(tmp_path)])
    except LaneShareUnavailable as reason:
        pytest.skip(f"needs CPU quotas, found: {reason}")
    row = line(tmp_path, "failover")
    assert clean(row), row
    assert row["servers_busy_cores"] < 3 * 0.05 * 1.5
    assert not list(VERSION_1.glob("eaas-*")), "control groups were left"


@pytest.mark.full(seconds=15)
def test_each_kill_has_its_stalls(small: list[str], tmp_path: Path) -> None:
    failover.main([*small, "--what", "stalls", "--kills", "1", "--results", str(tmp_path)])
    row = line(tmp_path, "failover")
    assert clean(row), row
    assert row["faults"] == 1 and row["added_stall_ms"]["count"] >= 4, row
    assert row["worst_stall_ms"]["each"] == [pytest.approx(row["added_stall_ms"]["max"], abs=0.1)]


@pytest.mark.full(seconds=15)
def test_a_soak_checks_everything_and_leaves_its_plan_only_when_it_fails(small: list[str], tmp_path: Path) -> None:
    soak.main([*small, "--minutes", "0.1", "--results", str(tmp_path)])
    row = line(tmp_path, "soak")
    assert clean(row) and not row["amiss"], row
    assert not list(tmp_path.glob("*.toml"))


def test_the_worst_stall_of_each_fault_is_recorded_beside_those_of_all_streams() -> None:
    def one(slot: int, held_up_s: float) -> StreamRecord:
        times = [0.5 + 0.01 * slot + 0.1 * n for n in range(200)]
        return StreamRecord(
            prompt=slot, planned_s=0.0, sent_s=0.4, status=200, finish="length", ended_s=times[-1] + held_up_s,
            token_s=[at_s + held_up_s * (at_s > 10.0) for at_s in times], pieces=["x"] * 200,
        )  # fmt: skip

    records = [one(slot, 0.25 if slot == 7 else 0.0) for slot in range(150)]
    injections = [failover.Injection(victim="expert/1", injected_s=at_s) for at_s in (3.0, 9.0)]
    found = failover.faults_of([failover.Run(records=records, injections=injections)], "kill")
    assert found["added_stall_ms"]["p99"] == pytest.approx(0.0, abs=1.0), "one stream of 150"
    assert found["worst_stall_ms"]["each"] == pytest.approx([0.0, 250.0], abs=1.0)
    assert found["worst_stall_ms"]["p99"] == pytest.approx(250.0, abs=1.0)
    assert found["stream_s"]["p50"] > failover.STALL_WINDOW_S


def test_a_figure_over_its_bound_is_told() -> None:
    found = {"loss_percent": {"median": 0.9, "high": 2.1}}
    assert failover.beyond("kill", found) == ["loss_percent high: 2.1, at most 2 is promised"]


def test_serving_servers_are_counted_over_time() -> None:
    run = failover.Run(serving=[(float("-inf"), 4), (2.0, 3), (5.0, 4)])
    assert run.server_s(0.0, 10.0) == pytest.approx(4 * 2 + 3 * 3 + 4 * 5)
    assert run.server_s(3.0, 4.0) == pytest.approx(3.0)


def test_the_loss_is_what_lacks_of_the_calm_run() -> None:
    assert failover.share_lost(99.0, 100.0) == pytest.approx(1.0)
    assert failover.share_lost(101.0, 100.0) == pytest.approx(-1.0)


def test_a_seed_gives_one_campaign_of_every_point_by_kill_and_freeze() -> None:
    injections = [fault_points.Injection.of(7, number) for number in range(2 * len(POINTS))]
    again = [fault_points.Injection.of(7, number) for number in range(2 * len(POINTS))]
    assert [one.fault() for one in injections] == [one.fault() for one in again]
    assert {(one.point, one.kind) for one in injections} == {
        (point, kind) for point in POINTS for kind in ("kill", "freeze")
    }
    others = [fault_points.Injection.of(8, number).fault() for number in range(2 * len(POINTS))]
    assert [one.fault() for one in injections] != others


def test_a_seed_gives_one_soak_and_its_plan_says_all_of_it() -> None:
    steps = soak.plan(3, 10.0)
    assert steps == soak.plan(3, 10.0) != soak.plan(4, 10.0)
    assert {step.fault.kind for step in steps} >= {
        "kill",
        "freeze",
        "slow",
        "delay",
        "loss",
        "partition",
        "corrupt",
    }
    said = tomllib.loads(soak.as_toml(3, steps))
    assert said["seed"] == 3 and len(said["fault"]) == len(steps)
    for table, step in zip(said["fault"], steps, strict=True):
        assert (table["kind"], table["pool"], table["at"]) == (step.fault.kind, step.pool, f"{step.at_s}s")
        assert ("for" in table) == (step.fault.kind != "kill")


def test_what_is_held_too_much_is_named() -> None:
    before = {"gateway/1 (pid 5)": (20, 100.0), "router/0 (pid 6)": (10, 50.0), "expert/1 (pid 7)": (9, 60.0)}
    after = {
        "gateway/1 (pid 5)": (40, 100.0),
        "router/0 (pid 6)": (10, 150.0),
        "expert/9 (pid 9)": (99, 999.0),
    }
    found = soak.leaks(before, after)
    assert len(found) == 2, found
    assert "gateway/1 (pid 5): 20 file descriptors before, 40 after" in found[0]
    assert "50 MiB before, 150 after" in found[1]


def test_what_a_client_saw_is_put_to_the_fault_before_its_end() -> None:
    class Calm:
        reference = (StreamRecord(prompt=0, planned_s=0.0),)

        @staticmethod
        def compare(records: list[StreamRecord]) -> fault_points.Counts:
            return fault_points.Counts(failed=sum(one.failed for one in records))

    injections = [fault_points.Injection.of(1, number) for number in range(2)]
    hits = [
        fault_points.Hit(injection=injection, victim="expert/1", armed_s=at_s, injected_s=at_s + 0.1)
        for injection, at_s in zip(injections, (1.0, 3.0), strict=True)
    ]
    good = StreamRecord(
        prompt=0, planned_s=0.0, sent_s=0.0, status=200, finish="length", ended_s=2.0,
        token_s=[0.5, 0.6, 0.7, 1.9], pieces=list("abcd"),
    )  # fmt: skip
    bad = StreamRecord(prompt=0, planned_s=2.5, sent_s=2.5, ended_s=3.5, error="closed: gone")
    points = fault_points.by_point(Calm(), hits, [bad, good])  # pyright: ignore[reportArgumentType]
    assert (
        points[injections[0].point] | {"failed": 0, "kill": 1, "worst_kill_ms": 1100.0} == points[injections[0].point]
    )
    # It was sent before the injection and never answered: a second of waiting.
    assert (
        points[injections[1].point] | {"failed": 1, "kill": 1, "worst_kill_ms": 1000.0} == points[injections[1].point]
    )
    (table,) = readme.fault_points_table(
        [
            {
                "injected": 2,
                "streams": 1,
                "requests": 2,
                "seed": 1,
                "failed": 1,
                "lost": 0,
                "repeated": 0,
                "changed": 0,
                "points": points,
            }
        ]
    )
    assert "2 kills and freezes" in table and "1 failed, 0 lost" in table


def test_a_blow_is_told_to_the_router_in_its_own_words() -> None:
    fault = fault_points.Injection.of(1, 0).fault()
    assert Fault.from_dict(fault.to_dict()) == fault


def test_the_bootstrapped_interval_holds_the_median_and_repeats_by_seed() -> None:
    rng = random.Random(5)
    values = [rng.gauss(0.4, 1.0) for _ in range(40)]
    found = failover.bootstrap_interval(values, seed=1)
    assert found == failover.bootstrap_interval(values, seed=1)
    median, low, high = found
    assert low < median < high
    assert low < 0.4 < high
    with pytest.raises(ValueError, match="no median"):
        failover.bootstrap_interval([], seed=1)
    covered = 0
    for seed in range(200):
        rng = random.Random(seed)
        _, low, high = failover.bootstrap_interval([rng.gauss(0.0, 1.0) for _ in range(25)], seed, draws=400)
        covered += low <= 0.0 <= high
    assert 176 <= covered <= 199, f"95% intervals held the true median in {covered} of 200 samples"
