"""Everything that only a GPU can show, most valuable first, in under eight minutes: `make gpu`.

python -m benchmarks.gpu                        all sections
python -m benchmarks.gpu ffn exchange           those two
python -m benchmarks.gpu --list                 what there is

Each section runs in a process of its own with a time limit: one that hangs or crashes takes nothing with it. One that
is asked for alone has all the time there is.
Every result is a JSON line of benchmarks/results/gpu.jsonl as soon as it is known. Nothing is installed and no
network is used: torch with CUDA and triton must be there. Exit code: 0, or 1 when a section failed or a check
did not hold, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.report import RESULTS, record

ROOT = Path(__file__).resolve().parent.parent.parent
BUDGET_S = 460.0  # eight minutes, less what starting and stopping takes


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the run.

    Attributes:
        command: After `python -m`.
        limit_s: It is killed then.
        shows: In words, for --list.
    """

    command: tuple[str, ...]
    limit_s: float
    shows: str


# Most of what tests take on a GPU is compiling, of which a process does one at a time.
SIDE_BY_SIDE = ("-n", "8") if importlib.util.find_spec("xdist") else ()
# Processes that wait for each other and take turns on one GPU: nobody else is to have turns meanwhile.
ALONE = ("tests/gpu/test_pool.py", "tests/gpu/test_serve.py")
PYTEST = ("pytest", "-q", "-p", "no:cacheprovider")

# Most valuable first: a run that is cut short keeps what it has.
SECTIONS: Mapping[str, Section] = {
    "ceilings": Section(
        command=("benchmarks.gpu.section", "ceilings"),
        limit_s=40,
        shows="what the card can do at most: copy and bf16 matrix rates",
    ),
    "kernels": Section(
        command=(
            *PYTEST,
            *SIDE_BY_SIDE,
            "tests/gpu",
            "-k",
            "not compile",
            *(f"--ignore={it}" for it in ALONE),
        ),
        limit_s=120,
        shows="the kernels' tests, which elsewhere run in the interpreter, on this GPU",
    ),
    "ffn": Section(
        command=("benchmarks.gpu.section", "ffn"),
        limit_s=120,
        shows="grouped FFN: right bits, bytes a second at decode, flops a second at prefill",
    ),
    "exchange": Section(
        command=("benchmarks.gpu.section", "exchange"),
        limit_s=90,
        shows="dispatch and combine over a loopback; host launches a step; a server lost in mid-step",
    ),
    "processes": Section(
        command=(*PYTEST, *ALONE),
        limit_s=60,
        shows="clients and servers in processes of their own: attached, moved, fenced, killed",
    ),
    "decode": Section(
        command=("benchmarks.gpu.section", "decode"),
        limit_s=120,
        shows="greedy tokens equal over batch sizes; tokens a second of a Qwen3-30B-A3B shape",
    ),
    "attention": Section(
        command=("benchmarks.gpu.section", "attention"),
        limit_s=60,
        shows="paged attention and the small kernels: right values, bytes a second",
    ),
}


def main() -> int:
    """Run the sections; the exit code."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; none: all")
    options.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder that gets gpu.jsonl")
    asked = options.parse_args()
    if asked.list:
        for name, section in SECTIONS.items():
            print(f"{name:12}at most {section.limit_s:.0f} s: {section.shows}")
        return 0
    unknown = sorted(set(asked.sections) - set(SECTIONS))
    if unknown:
        options.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}.")
    missing = what_is_missing()
    if missing:
        print(missing, file=sys.stderr)
        return 2
    end_s = time.monotonic() + BUDGET_S
    failed = []
    for name in asked.sections or SECTIONS:
        left_s = end_s - time.monotonic()
        if left_s < 10:
            print(f"{name}: not run, no time left; alone: python -m benchmarks.gpu {name}", flush=True)
            failed.append(name)
        elif not run_section(
            name, left_s if len(asked.sections) == 1 else min(SECTIONS[name].limit_s, left_s), asked.results
        ):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all sections passed", flush=True)
    return 1 if failed else 0


def what_is_missing() -> str:
    """Why nothing can be run here, or nothing."""
    try:
        import torch
        import triton
    except ImportError as error:
        return (
            f"{error}. torch with CUDA and triton are needed: pip install torch (the default index on Linux)."
        )
    if not torch.cuda.is_available():
        return f"torch {torch.__version__}, triton {triton.__version__}: needs 1 GPU, found 0."
    return ""


def run_section(name: str, limit_s: float, results: Path) -> bool:
    """Run one section and keep its lines; whether it ended well and every check of it held."""
    began_s = time.monotonic()
    environment = {word: value for word, value in os.environ.items() if word != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "-m", *SECTIONS[name].command],
        cwd=ROOT,
        env=environment | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    killer = threading.Timer(limit_s, process.kill)
    killer.start()
    with process.stdout or sys.stdin as lines:
        holds, said = keep(name, lines, results)
    code = process.wait()
    killer.cancel()
    seconds = time.monotonic() - began_s
    ended = {
        "section": name,
        "what": "section",
        "exit_code": code,
        "seconds": round(seconds, 1),
        "checks": holds,
    }
    if code:
        # The reason is mostly in the last lines.
        ended["said"] = said[-20:]
    keep_result(ended, results)
    return code == 0 and holds


def keep(name: str, lines: IO[str], results: Path) -> tuple[bool, Sequence[str]]:
    """Record a section's JSON lines as they come, print the others: whether all checks held, and what was said."""
    holds, said = True, []
    for line in lines:
        if line.startswith("{"):
            result = json.loads(line)
            holds &= bool(result.get("holds", True))
            keep_result({"section": name, **result}, results)
        else:
            said.append(line.rstrip())
            print(line, end="", flush=True)
    return holds, said


def keep_result(result: Mapping[str, Any], results: Path) -> None:
    """One line of gpu.jsonl, with what this GPU is."""
    import torch

    gpu = torch.cuda.get_device_properties(0)
    named = {
        "name": gpu.name,
        "sms": gpu.multi_processor_count,
        "memory_gib": round(gpu.total_memory / 2**30, 1),
    }
    record("gpu", {"gpu": named, "cuda": torch.version.cuda, **result}, ("triton",), results)


if __name__ == "__main__":
    sys.exit(main())
