"""The comparison with stock vLLM checks, measures and writes what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import http_pair, vllm
from benchmarks.readme import latest

FOUND = sorted(path.parents[1].name for path in vllm.ENVIRONMENTS.glob("*/bin/vllm"))


@pytest.mark.full(seconds=150)
@pytest.mark.timeout(900)
@pytest.mark.skipif(not FOUND, reason=f"needs vLLM's CPU build: make vllm; found none in {vllm.ENVIRONMENTS}")
def test_a_pool_is_measured_beside_stock_vllm(tmp_path: Path) -> None:
    options = ["--shape", "S", "--batch", "2", "--rounds", "2", "--tokens", "16", "--vllm", FOUND[-1]]
    vllm.main([*options, "--results", str(tmp_path)])
    [row] = [json.loads(line) for line in (tmp_path / "vllm.jsonl").read_text().splitlines()]
    assert set(row["tokens_per_s"]) == {"pool", "stock"}
    assert all(row[name]["min"] > 0 for name in ("ratio", "ratio_with_prefill"))
    assert row["first_token_agreement"] >= vllm.LEAST_AGREEMENT
    assert f"| {FOUND[-1]}, " in latest(tmp_path)


@pytest.mark.full(seconds=150)
@pytest.mark.timeout(900)
@pytest.mark.skipif(not FOUND, reason=f"needs vLLM's CPU build: make vllm; found none in {vllm.ENVIRONMENTS}")
def test_eaas_is_measured_beside_stock_vllm(tmp_path: Path) -> None:
    options = ["--shape", "S", "--streams", "2", "--prompt", "16,48", "--rounds", "2", "--vllm", FOUND[-1]]
    http_pair.main([*options, "--results", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "http_pair.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [16, 48]
    for row in rows:
        assert row["ratio"]["min"] > 0 and row["ratio_decoding"]["min"] > 0
        assert all(found[name]["p50"] > 0 for found in (row["ttft_ms"], row["itl_ms"]) for name in found)
    assert f"vLLM {FOUND[-1]} (bfloat16, " in latest(tmp_path)


def test_without_vllm_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm, "ENVIRONMENTS", tmp_path)
    with pytest.raises(SystemExit):
        vllm.main(["--vllm", "0.32.0"])
    assert "found none: make vllm VLLM=0.32.0" in capsys.readouterr().err
