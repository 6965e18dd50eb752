"""Benchmark results as data: one JSON line a measurement, with what is needed to judge it later."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of the rounds, to five digits."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def percentiles(values: np.ndarray) -> dict[str, float]:
    """p50 and p99, to four digits."""
    return {f"p{percent}": float(f"{np.percentile(values, percent):.4g}") for percent in (50, 99)}


def hardware() -> dict[str, Any]:
    """Processor, cores and memory of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return {
        "cpu": named,
        "cores": len(os.sched_getaffinity(0)),
        "isa": [flag for flag in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def command_of(benchmark: str, words: Sequence[str]) -> str:
    """What was run. Of an absolute path only the name is kept: folders of one machine say nothing elsewhere."""
    named = [
        option + equals + (Path(value).name if value.startswith("/") else value)
        for option, equals, value in (("", "", w) if "=" not in w else w.partition("=") for w in words)
    ]
    return " ".join(["python", "-m", f"benchmarks.{benchmark}", *named])


def record(benchmark: str, result: Mapping[str, Any], packages: Sequence[str] = (), folder: Path = RESULTS) -> None:
    """Print one result and append it to `folder`/`benchmark`.jsonl."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    line = {
        "benchmark": benchmark,
        "commit": commit or "unknown",
        "command": command_of(benchmark, sys.argv[1:]),
        "hardware": hardware(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", *packages)},
        **result,
    }
    folder.mkdir(exist_ok=True)
    text = json.dumps(line)
    with (folder / f"{benchmark}.jsonl").open("a") as file:
        file.write(text + "\n")
    print(text, flush=True)
