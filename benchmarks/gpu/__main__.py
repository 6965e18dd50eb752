"""Everything that only a GPU can show, most valuable first, in about a quarter of an hour: `make gpu`.

python -m benchmarks.gpu                        all sections
python -m benchmarks.gpu ffn exchange           those two
python -m benchmarks.gpu --list                 what there is

Each section runs in a process group of its own with a time limit: one that hangs or crashes takes nothing with it, and
whatever it started ends with it. One that is asked for alone has all the time there is.
Every result is a JSON line of benchmarks/results/gpu.jsonl as soon as it is known; at the end, or when the run is told
to end before, comes one table of all figures: wanted, found, and ok, short, missing or not run. Nothing is installed
and no network is used: torch with CUDA and triton must be there. Exit code: 0, or 1 where a figure is short or missing,
2 without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.table import MISSING, SHORT, rows_of, text_of
from benchmarks.report import RESULTS, record
from eaas.cluster.mps import quit_mps
from p2p.cuda_driver import CudaDriver

ROOT = Path(__file__).resolve().parent.parent.parent
BUDGET_S = 960.0  # most of it is compiling; on an H100 with 16 cores all sections take some 800 s


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the run.

    Attributes:
        command: After `python -m`, or from `tool` on.
        limit_s: It is killed then.
        shows: In words, for --list.
        tool: A program that it takes, which runs python.
    """

    command: tuple[str, ...]
    limit_s: float
    shows: str
    tool: tuple[str, ...] = ()


def _own(name: str, limit_s: float, shows: str) -> Section:
    return Section(command=("benchmarks.gpu.section", name), limit_s=limit_s, shows=shows)


# Most of what tests take on a GPU is compiling, of which a process does one at a time.
SIDE_BY_SIDE = ("-n", str(min(15, os.cpu_count() or 1))) if importlib.util.find_spec("xdist") else ()
# Processes that wait for each other and take turns on one GPU: nobody else is to have turns meanwhile.
ALONE = ("tests/gpu/test_pool.py", "tests/gpu/test_serve.py")
PYTEST = ("pytest", "-q", "-p", "no:cacheprovider")
KERNELS = (*PYTEST, *SIDE_BY_SIDE, "tests/gpu", "-k", "not compile", *(f"--ignore={it}" for it in ALONE))

# Most valuable first: a run that is cut short keeps what it has.
SECTIONS: Mapping[str, Section] = {
    "ceilings": _own("ceilings", 40, "what the card can do at most: copy and bf16 matrix rates"),
    "compile": _own("compile", 120, "every production kernel by the triton that is here: counts, seconds, failures"),
    "kernels": Section(
        command=KERNELS,
        limit_s=240,
        shows="the kernels' tests, which elsewhere run in the interpreter, on this GPU",
    ),
    "ffn": _own("ffn", 120, "grouped FFN: right bits, bytes a second at decode, flops a second at prefill"),
    "exchange": _own(
        "exchange",
        90,
        "dispatch and combine over a loopback; host launches a step; a server lost in mid-step",
    ),
    "sharing": _own(
        "sharing",
        80,
        "two processes on this GPU with and without MPS: us a layer, windows by descriptor, a kill",
    ),
    "remote": _own(
        "remote",
        90,
        "decode and prefill over expert servers, as `eaas serve` has them, beside the same in one process",
    ),
    "linear": _own("linear", 40, "dense products: bytes a second at decode, flops a second at prefill"),
    "decode": _own("decode", 120, "greedy tokens equal over batch sizes; tokens a second of a Qwen3-30B-A3B shape"),
    "processes": Section(
        command=(*PYTEST, *ALONE),
        limit_s=240,
        shows="clients and servers in processes of their own: attached, moved, fenced, killed",
    ),
    "races": Section(
        tool=("compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9"),
        command=(*PYTEST, "-x", "tests/gpu/test_group.py"),
        limit_s=60,
        shows="races in shared memory, by compute-sanitizer where it is",
    ),
    "nvshmem": _own("nvshmem", 60, "kernels linked with NVSHMEM: puts and signals of one PE to itself"),
    "attention": _own("attention", 60, "paged attention and the small kernels: right values, bytes a second"),
}


def main() -> int:
    """Run the sections; the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    # Told to end, the run still says what it has.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run_sections(asked.sections or list(SECTIONS), asked.results)


def run_sections(names: Sequence[str], results: Path, budget_s: float = BUDGET_S) -> int:
    """Run some sections and print the table; the exit code."""
    end_s = time.monotonic() + budget_s
    records: list[Mapping[str, Any]] = []
    try:
        for name in names:
            left_s = end_s - time.monotonic()
            if left_s < 10:
                print(f"{name}: not run, no time left; alone: python -m benchmarks.gpu {name}", flush=True)
            else:
                limit_s = left_s if len(names) == 1 else min(SECTIONS[name].limit_s, left_s)
                run_section(name, limit_s, results, records)
    finally:
        rows = rows_of(records, {name: SECTIONS[name].limit_s for name in names})
        print(text_of(rows), flush=True)
    return 1 if {state for *_, state in rows} & {SHORT, MISSING} else 0


def what_is_missing() -> str:
    """Why nothing can be run here, or nothing."""
    try:
        import torch
        import triton
    except ImportError as error:
        return f"{error}. torch with CUDA and triton are needed: pip install torch (the default index on Linux)."
    if not torch.cuda.is_available():
        return f"torch {torch.__version__}, triton {triton.__version__}: needs 1 GPU, found 0."
    return ""


def run_section(name: str, limit_s: float, results: Path, records: list[Mapping[str, Any]]) -> None:
    """Run one section and keep its records: each as it comes, and at last one of how it ended."""
    section, began_s = SECTIONS[name], time.monotonic()
    if section.tool and shutil.which(section.tool[0]) is None:
        ended = {"section": name, "what": "section", "missing": f"{section.tool[0]} is not on PATH"}
        records.append(keep_result(ended, results))
        return
    environment = {word: value for word, value in os.environ.items() if word != "TRITON_INTERPRET"}
    scratch = tempfile.mkdtemp()
    process = subprocess.Popen(
        [*section.tool, sys.executable, "-m", *section.command],
        cwd=ROOT,
        env=environment | {"PYTHONUNBUFFERED": "1", "TMPDIR": scratch},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said: list[str] = []
    reader = threading.Thread(
        target=keep, args=(name, process.stdout, results, records, said), name="reader", daemon=True
    )
    reader.start()
    killed = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        killed = True
    finally:
        # With all that it has started, which would hold the GPU, and its output open.
        end_group(process)
        # An MPS daemon is in no group.
        for folder in Path(scratch).rglob("mps"):
            quit_mps(folder.parent)
        shutil.rmtree(scratch, ignore_errors=True)
    reader.join(5.0)
    ended = {
        "section": name,
        "what": "section",
        "exit_code": process.returncode,
        "killed": killed,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    if process.returncode:
        # The reason is mostly in the last lines.
        ended["said"] = said[-20:]
    records.append(keep_result(ended, results))


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a section."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        # It ended, and nothing is left of its group.
        pass
    process.wait()


def keep(name: str, lines: IO[str], results: Path, records: list[Mapping[str, Any]], said: list[str]) -> None:
    """Record a section's JSON lines as they come, print the others."""
    for line in lines:
        if line.startswith("{"):
            records.append(keep_result({"section": name, **json.loads(line)}, results))
        else:
            said.append(line.rstrip())
            print(line, end="", flush=True)


@functools.cache
def card() -> Mapping[str, Any]:
    """What this GPU is, by the driver: this process holds nothing on it."""
    gpu = CudaDriver.load().devices()[0]
    named = {"name": gpu.name, "sms": gpu.multiprocessors, "memory_gib": round(gpu.total_bytes / 2**30, 1)}
    return {"gpu": named, "cuda": importlib.import_module("torch").version.cuda}


def keep_result(result: Mapping[str, Any], results: Path) -> Mapping[str, Any]:
    """One line of gpu.jsonl, with what this GPU is; the result."""
    record("gpu", {**card(), **result}, ("triton",), results)
    return result


if __name__ == "__main__":
    sys.exit(main())
