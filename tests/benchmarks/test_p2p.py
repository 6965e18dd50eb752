"""benchmarks.p2p over real processes: every transport that this machine has, each figure finite and in its place."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import p2p
from benchmarks.p2p_incast import Incast

pytestmark = pytest.mark.alone

BRIEF = ["--rounds", "2", "--cell-s", "0.001", "--latency", "8,3000", "--bandwidth", "70000"]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "p2p.jsonl").read_text().splitlines()]


def measured(
    folder: Path, capsys: pytest.CaptureFixture[str], what: str, topology: str, transports: list[str]
) -> list[dict]:
    """Rows of a brief run, in which no transport is missing unless the command said so."""
    options = ["--what", what, "--topology", topology, "--transports", ",".join(transports)]
    p2p.main([*BRIEF, *options, "--results", str(folder)])
    said = capsys.readouterr().err
    rows = lines(folder)
    for row in rows:
        if row["measure"] in ("latency", "bandwidth"):
            assert {*row["transports"]} == {name for name in transports if f"{name}, " not in said}
    return rows


@pytest.mark.full(seconds=15)
def test_round_trips_and_bandwidth_of_every_transport_between_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = measured(tmp_path, capsys, "latency,bandwidth,idle", "1to1", list(p2p.TRANSPORTS))
    cells = [(row["measure"], row["bytes"]) for row in rows[:-1]]
    assert cells == [("latency", 8), ("latency", 3000), ("bandwidth", 70000)]
    for row in rows[:-1]:
        assert row["topology"] == "1to1" and {"commit", "command", "hardware", "versions"} <= set(row)
        assert {"shm-parked", "shm-python", "grpc", "gloo"} <= set(row["transports"])
        for figures in row["transports"].values():
            names = {"p50", "p99"} if row["measure"] == "latency" else {"gb_per_s"}
            assert set(figures) == names | {"requests", "spread"}
            assert all(math.isfinite(figures[name]) and figures[name] > 0 for name in names)
            assert 0 < figures["spread"]["min"] <= figures["spread"]["median"] <= figures["spread"]["max"]
        assert all(figures["median"] > 0 for figures in row["times_slower"].values())
    assert rows[-1]["measure"] == "idle"
    assert all(0 <= share < math.inf for share in rows[-1]["cpu_share"].values())


@pytest.mark.full(seconds=5)
@pytest.mark.parametrize("topology", ["4to1", "1to4"])
def test_a_hub_and_four_others_exchange_every_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], topology: str
) -> None:
    transports = ["shm-parked", "shm-python", "grpc", "gloo"]
    rows = measured(tmp_path, capsys, "latency,bandwidth", topology, transports)
    assert [row["topology"] for row in rows] == [topology] * 3
    assert all(set(row["transports"]) == set(transports) for row in rows)


def test_polling_processes_without_a_core_each_are_skipped_with_what_they_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    options = ["--what", "latency", "--topology", "1to1", "--transports", "shm,shm-parked"]
    p2p.main([*BRIEF, *options, "--results", str(tmp_path)])
    assert "shm, 2 processes: skipped, 2 polling processes need as many cores, found 1" in capsys.readouterr().err
    assert all(set(row["transports"]) == {"shm-parked"} for row in lines(tmp_path))


def test_copies_are_compared_at_equal_footprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p, "last_cache_bytes", lambda: 1 << 20)
    p2p.main([*BRIEF, "--what", "copies", "--results", str(tmp_path)])
    rows = lines(tmp_path)
    assert [(row["bytes"], row["footprint"]) for row in rows] == [
        (nbytes, footprint) for nbytes in (4096, 65536, 524288) for footprint in ("warm", "4 x L3")
    ]
    for row in rows:
        assert set(row["gb_per_s"]) == {"copy_out", "put", "put_sealed", "copy_in", "open", "checksum"}
        assert set(row["of_memcpy"]) == {"put", "put_sealed", "open"}
        figures = [*row["gb_per_s"].values(), *row["of_memcpy"].values()]
        assert all(figure["median"] > 0 and math.isfinite(figure["median"]) for figure in figures)


def test_what_is_small_waits_for_what_others_have_under_way_and_a_seed_gives_one_run() -> None:
    few, many = (Incast(7, slots, 64 << 10, bulk_bytes=256 << 10).run() for slots in (1, 4))
    assert few == Incast(7, 1, 64 << 10, bulk_bytes=256 << 10).run(), "seed 7 gave two runs"
    assert few["small_us"]["p50"] < many["small_us"]["p50"]
    assert all(0 < run["of_link"] <= 1 for run in (few, many))
