"""Native code under AddressSanitizer and UndefinedBehaviorSanitizer: `make check-native`.

The libraries are built in a copy of this tree, so that those in use stay as they are. The tests that run native code
run there; then random bytes go to every place where native code reads what a peer wrote.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from p2p.build import ROOT, compiler

COPY = ROOT / "build" / "sanitized"
COPIED = ("p2p", "experts", "router", "eaas", "tests", "benchmarks", "pyproject.toml")
TESTS = (
    *(f"tests/p2p/test_{name}.py" for name in ("doorbell", "frame", "lanes", "shm", "sim", "window")),
    *(f"tests/experts/test_{name}.py" for name in ("apply", "int8", "kernels", "models", "pack", "server", "steps")),
    *(f"tests/eaas/test_{name}.py" for name in ("decoder", "sampler")),
    "tests/fuzz",
)
# A sanitizer's own memory is far beyond any limit that a test could set; and mutants are libraries of their own, linked
# without a sanitizer's.
UNSUITED = "not without_memory and not without_its_care"
FUZZ_S = 20


def copy() -> None:
    """Bring the copy up to date; objects built there before stay."""
    for path in COPY.rglob("*"):
        if path.is_file() and "build" not in path.relative_to(COPY).parts and path.suffix != ".so":
            path.unlink()
    for name in COPIED:
        source = ROOT / name
        if source.is_file():
            shutil.copy(source, COPY / name)
        else:
            ignored = shutil.ignore_patterns("*.so", "build", "__pycache__")
            shutil.copytree(source, COPY / name, ignore=ignored, dirs_exist_ok=True)


def main() -> int:
    """The exit status: of the first part that failed, or 0."""
    COPY.mkdir(parents=True, exist_ok=True)
    copy()
    environment = {**os.environ, "PYTHONPATH": str(COPY)}
    print(f"Building with sanitizers in {COPY.relative_to(ROOT)}: some minutes the first time.", flush=True)
    python = [sys.executable, "-m"]
    built = subprocess.run([*python, "tests.fuzz.native"], cwd=COPY, env=environment, stdout=subprocess.PIPE, text=True)
    if built.returncode:
        return built.returncode
    runtime = subprocess.run([*compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    # Python is no sanitized program: its runtime comes first by force, and what it never frees is no leak.
    # PYTHONMALLOC: so that bytes and arrays of Python, too, have guarded ends.
    preloaded = {
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    tests = [*python, "pytest", *TESTS, "-x", "-k", UNSUITED, "-p", "no:cacheprovider"]
    tested = subprocess.run(tests, cwd=COPY, env={**environment, **preloaded})
    if tested.returncode:
        return tested.returncode
    found = sorted(map(str, (ROOT / "tests" / "fuzz" / "found").glob("native-*")))
    return subprocess.run([Path(built.stdout.strip()), *found, f"-max_total_time={FUZZ_S}"]).returncode


if __name__ == "__main__":
    sys.exit(main())
