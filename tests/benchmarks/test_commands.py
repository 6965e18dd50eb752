"""Each benchmark command, over real processes, on the tiny shape: it checks, measures and writes what it promises."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import decode, gateway, handover, recovery, scaling, trace, weights
from benchmarks.engines.process import missing
from benchmarks.hang import NotPermitted
from benchmarks.make_model import make_model

PEERS = [name for name in decode.PEERS if missing(name) is None]


def lines(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.full(seconds=30)
def test_decode_compares_every_engine_that_is_installed(tmp_path: Path) -> None:
    options = [
        "--shape",
        "tiny",
        "--batch",
        "3",
        "--rounds",
        "1",
        "--tokens",
        "512",
        "--results",
        str(tmp_path),
    ]
    decode.main([*options, "--peers", ",".join(PEERS)])
    [row] = lines(tmp_path, "decode")
    assert row["batch"] == 3
    assert set(row["tokens_per_s"]) == {"http", "ours", *PEERS}
    assert row["checked"]["inproc"] == {"logits": "identical"}
    assert all(figure["median"] > 0 for figure in row["tokens_per_s"].values())
    assert "ours/inproc" in row["ratio"]


@pytest.mark.full(seconds=7)
def test_decode_runs_beside_a_busy_core(tmp_path: Path) -> None:
    options = [
        "--shape",
        "tiny",
        "--batch",
        "1",
        "--rounds",
        "1",
        "--tokens",
        "512",
        "--results",
        str(tmp_path),
    ]
    decode.main([*options, "--peers", "", "--busy-core"])
    [row] = lines(tmp_path, "decode")
    assert row["busy_core"] == max(os.sched_getaffinity(0))


def test_a_peer_that_is_not_installed_is_skipped_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for peer, package in (("transformers", "transformers"), ("llamacpp", "llama_cpp")):
        line = missing(peer)
        assert line is not None
        assert f"{peer}: skipped, needs the package {package}" in line
        assert "pip install" in line
    assert missing("inproc") is None


def test_handover_measures_each_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shape", "tiny", "--rounds", "1", "--tokens", "8", "--results", str(tmp_path)]
    handover.main([*options, "--pools", "1x1,2x1,1x4096"])
    assert [(row["servers"], row["lanes_per_server"]) for row in lines(tmp_path, "handover")] == [
        (1, 1),
        (2, 1),
    ]
    assert "1x4096: skipped, needs 4096 cores" in capsys.readouterr().out


def test_gateway_counts_the_cpu_time_of_its_process(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--rounds", "1", "--tokens", "512", "--results", str(tmp_path)]
    gateway.main([*options, "--streams", "2"])
    [row] = lines(tmp_path, "gateway")
    assert row["gateway_cpu_us_per_token"]["min"] > 0
    assert row["ratio"]["http/ours"]["median"] > 0


@pytest.mark.full(seconds=10)
def test_scaling_writes_every_point_with_its_floor(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--rounds", "1", "--tokens", "8", "--results", str(tmp_path)]
    sweeps = ["--batch", "1,4", "--context", "32,64", "--servers", "1,2", "--servers-batch", "1"]
    scaling.main([*options, *sweeps])
    rows = lines(tmp_path, "scaling")
    found = {(row["sweep"], row["servers"], row["batch"], row["context"]) for row in rows}
    assert found == {
        *(("batch", 2, batch, 32) for batch in (1, 4)),
        *(("context", 2, 1, context) for context in (32, 64)),
        *(("servers", servers, 1, 32) for servers in (1, 2)),
    }
    # One row takes top_k = 2 experts in each of 4 layers: the count is exact.
    assert {row["distinct_experts"] for row in rows if row["batch"] == 1} == {8.0}
    assert all(row["step_ms"]["median"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert (tmp_path / "scaling-tiny.md").read_text().count("\n| ") == 1 + len(rows)


def test_trace_accounts_for_a_steps_time_lane_by_lane(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shape", "tiny", "--rounds", "1", "--results", str(tmp_path), "--threads", "1"]
    trace.main([*options, "--batch", "2", "--servers", "0,1"])
    local, remote = lines(tmp_path, "trace")
    assert (local["servers"], remote["servers"]) == (0, 1)
    for row, phases in ((local, {"gate_up", "down", "gather"}), (remote, {"plan", "send", "reply"})):
        [lane] = row["lanes_us"]
        assert phases | {"norm", "project", "attend", "output", "gate", "combine", "head"} <= set(lane)
        assert 0 < sum(lane.values()) < row["step_us"]["max"]
    assert "tiny, batch 2, 1 servers" in capsys.readouterr().out


def test_trace_shows_steps_that_compute_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shape", "tiny", "--rounds", "1", "--results", str(tmp_path), "--threads", "1"]
    trace.main([*options, "--batch", "1", "--servers", "0", "--prefill", "600"])
    [row] = lines(tmp_path, "trace")
    [lane] = row["lanes_us"]
    assert row["prefill"] == 600 and 0 < sum(lane.values()) < row["step_us"]["max"]
    assert "tiny, batch 1, 0 servers, prompts of 600: " in capsys.readouterr().out


@pytest.mark.full(seconds=9)
def test_recovery_times_each_phase_of_a_replacement(tmp_path: Path) -> None:
    make_model("tiny", "qwen3_moe", tmp_path / "tiny", seed=1)
    options = ["--model", str(tmp_path / "tiny"), "--kills", "1", "--experts", "3", "--streams", "2"]
    recovery.main([*options, "--tokens", "16", "--results", str(tmp_path)])
    for row, pool in zip(lines(tmp_path, "recovery"), ("expert", "attention"), strict=True):
        worst = {phase: found["worst"] for phase, found in row["seconds"].items()}
        assert row["pool"] == pool
        assert 0 < worst["gone"] <= worst["joined"] <= worst["whole"]
        assert worst["start_cpu"] > 0 and "fault" not in row
    try:
        recovery.main([*options, "--fault", "hang", "--pools", "expert", "--results", str(tmp_path / "hung")])
    except NotPermitted as error:
        pytest.skip(f"needs ptrace, found: {error}")
    [row] = lines(tmp_path / "hung", "recovery")
    worst = {phase: found["worst"] for phase, found in row["seconds"].items()}
    assert row["fault"] == "hang" and 0.25 < worst["gone"] <= worst["whole"], row


@pytest.mark.full(seconds=10)
def test_weights_are_had_from_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # so that what the command sets is undone
    weights.main(["--shape", "tiny", "--rounds", "1", "--tokens", "512", "--results", str(tmp_path)])
    [row] = lines(tmp_path, "weights")
    assert set(row["replica_s"]) == {"packed", "checkpoint", "peer"}
    assert row["figures"]["peer"]["tokens_per_s"]["median"] > 0
