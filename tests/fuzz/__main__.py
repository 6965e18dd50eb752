"""Fuzzing by the hour: `make fuzz ARGS="--seconds 600"`. The native targets beside the Python ones, each guided by its
own coverage; what they learn stays in build/fuzz for the next run. Exit status 1: something was found."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from p2p.build import ROOT, BuildFailed
from tests.fuzz import native
from tests.fuzz.targets import TARGETS

FOLDER = ROOT / "build" / "fuzz"
LONGEST = 800  # bytes of an input


def fuzz(name: str, command: list[str], seconds: int, *, guided: bool = True) -> bool:
    """Run one fuzzer and say what came of it; whether it found nothing."""
    corpus, found = FOLDER / "corpus" / name, FOLDER / "found"
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(exist_ok=True)
    limit = [f"-max_total_time={seconds}"]
    if guided:
        limit += [
            str(corpus),
            f"-max_len={LONGEST}",
            "-len_control=0",
            "-print_final_stats=1",
            "-timeout=60",
        ]
        limit += [f"-artifact_prefix={found}/{name}-"]
    done = subprocess.run(
        [*command, *limit],
        cwd=found,
        env=native.environment(),
        capture_output=True,
        text=True,
        errors="replace",
    )
    runs = re.findall(r"number_of_executed_units: (\d+)|^Done (\d+) runs", done.stderr, re.MULTILINE)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    verdict = "a finding" if done.returncode else "nothing found"
    coverage = f"{covered[-1]} edges" if covered else "blindly"
    counted = max(runs[-1]) if runs else "?"
    print(f"{name:12} {seconds:5} s, {counted} executions, {coverage}: {verdict}", flush=True)
    if done.returncode:
        print(
            f"{done.stderr[-6000:]}\nThe input is in {found}. Once mended, keep it in tests/fuzz/found/.",
            flush=True,
        )
    return done.returncode == 0


def main() -> int:
    """Fuzz; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for all of it (default 60)")
    parser.add_argument("--only", choices=["native", *TARGETS], help="one target")
    options = parser.parse_args()
    cxx = native.clang()
    if cxx is None:
        print(
            "needs clang with libFuzzer to guide the native targets, found none: random bytes instead.",
            flush=True,
        )
    with_atheris = importlib.util.find_spec("atheris") is not None
    if not with_atheris:
        print("needs atheris for the Python targets, found none: pip install -e '.[fuzz]'.", flush=True)

    def run_native() -> bool:
        if options.only not in (None, "native"):
            return True
        try:
            program = native.build(FOLDER / ("guided" if cxx else "blind"), cxx)
        except BuildFailed as failure:
            print(f"native: {failure}", flush=True)
            return False
        return fuzz("native", [str(program)], options.seconds, guided=cxx is not None)

    def run_python() -> bool:
        names = [name for name in TARGETS if with_atheris and options.only in (None, name)]
        command = [sys.executable, "-m", "tests.fuzz.guided"]
        clean = [fuzz(name, [*command, name], max(1, options.seconds // len(names))) for name in names]
        return all(clean)

    with ThreadPoolExecutor(2) as pool:
        halves = [pool.submit(run_native), pool.submit(run_python)]
        clean = [half.result() for half in halves]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
