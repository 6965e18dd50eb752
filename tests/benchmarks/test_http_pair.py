"""What is said of EaaS beside vLLM follows from what came on the wire, and when."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import decode, http_pair, vllm
from benchmarks.http_client import StreamRecord
from benchmarks.readme import latest
from benchmarks.report import record


def stream(sent_s: float, at_s: list[float], tokens_of: list[int]) -> StreamRecord:
    """A stream of which pieces of so many tokens came at these times, and its count with the last one."""
    body = bytearray()
    arrivals = []
    for when_s, tokens in zip(at_s, tokens_of, strict=True):
        body += b'data: {"choices": [{"text": "a"}]}\n\n' * tokens
        arrivals.append((when_s, tokens))
    body += b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'
    arrivals += [(at_s[-1] + 0.5, 1), (at_s[-1] + 0.5, 0)]
    return StreamRecord(sent_s=sent_s, arrivals=arrivals, body=body, done=True)


def test_waits_are_between_pieces_that_bring_tokens() -> None:
    # Headers alone come first; then two tokens in one piece; the count at the end brings none.
    seen = stream(10.0, [10.5, 11.0, 11.25, 12.0], [0, 1, 2, 1])
    assert seen.ttft_s == 1.0
    assert seen.itl_s == [0.25, 0.75]


def test_ratios_are_of_paired_rounds_and_waits_of_all_streams(tmp_path: Path) -> None:
    seed = time.time_ns()
    rng = np.random.default_rng(seed)
    gap_s = rng.uniform(0.01, 0.1, size=3)
    times = {"eaas": gap_s, "vllm": 3 * gap_s[::-1]}

    def round_of(gap: float) -> list[StreamRecord]:
        at_s = [0.0 + gap * (i + 1) for i in range(5)]
        return [stream(0.0, at_s, [1] * 5), stream(0.0, at_s, [1] * 5)]

    came = {name: [round_of(gap) for gap in gaps] for name, gaps in times.items()}
    found = http_pair.result(came, 5)
    # Half a second passes between the last token and the end.
    wholes = (5 * times["vllm"] + 0.5) / (5 * times["eaas"] + 0.5)
    assert found["ratio"]["median"] == pytest.approx(np.median(wholes), rel=1e-3), f"seed {seed}"
    assert found["ratio"]["max"] == pytest.approx(np.max(wholes), rel=1e-3), f"seed {seed}"
    decoding = (4 * times["vllm"] + 0.5) / (4 * times["eaas"] + 0.5)
    assert found["ratio_decoding"]["min"] == pytest.approx(np.min(decoding), rel=1e-3), f"seed {seed}"
    assert found["ttft_ms"]["vllm"]["p50"] == pytest.approx(3e3 * np.median(gap_s), rel=1e-3), f"seed {seed}"
    assert found["itl_ms"]["eaas"]["p50"] == pytest.approx(1e3 * np.median(gap_s), rel=1e-3), f"seed {seed}"
    facts = {"version": "0.32.0", "dtype": "bfloat16", "bind": "0-1", "preload": ""}
    line = {"shape": "S", "prompt": 16, "streams": 2, "tokens": 5, "experts": 2, "threads": 2, "rounds": 3}
    record(
        "http_pair",
        {**line, "version": "0.32.0", "vllm_dtype": "bfloat16", "vllm": facts, **found},
        (),
        tmp_path,
    )
    assert json.loads((tmp_path / "http_pair.jsonl").read_text())["ratio"] == found["ratio"]
    page = latest(tmp_path)
    assert "vLLM 0.32.0 (bfloat16, threads on cores 0-1)" in page and "| 16, 2 | " in page


def test_without_vllm_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm, "ENVIRONMENTS", tmp_path)
    with pytest.raises(SystemExit):
        http_pair.main(["--vllm", "0.32.0"])
    assert "found none: make vllm VLLM=0.32.0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        decode.main(["--peers", "vllm,other"])
    assert "--peers other: known are inproc, transformers, llamacpp, vllm" in capsys.readouterr().err
