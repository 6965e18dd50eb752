"""One engine in a process of its own, asked over pipes in JSON lines.

Its own process, because threads are pinned and pools spin: our lanes pin the thread that calls them, and OpenMP's
threads inherit that. Asked nothing, an engine sleeps in a read; `settle` waits until all of them do.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.run import Run

ROOT = Path(__file__).resolve().parents[2]
# Package -> how to get it, for engines that need one.
NEEDS = {
    "transformers": ("transformers", "pip install -e '.[bench]'"),
    "llamacpp": (
        "llama_cpp",
        "pip install -e '.[bench]' (compiles llama.cpp: a C++ compiler, 10 to 20 minutes)",
    ),
}
END_S = 10.0
IDLE_S, IDLE_SHARE, IDLE_LIMIT_S = 0.05, 0.05, 10.0


class EngineFailed(RuntimeError):
    """An engine's process refused, failed or ended; the text holds its last words."""


def missing(engine: str) -> str | None:
    """Why an engine cannot run here and what to do about it; None where it can."""
    package, command = NEEDS.get(engine, ("", ""))
    if not package or importlib.util.find_spec(package) is not None:
        return None
    return f"{engine}: skipped, needs the package {package}, which is not installed. Get it: {command}"


class EngineProcess:
    """`python -m benchmarks.engines NAME`, ready to be asked. Use as a context manager."""

    def __init__(self, name: str, model: Path, cores: Sequence[int], **options: object) -> None:
        """Start it and wait until its model is loaded.

        Args:
            name: "ours", "inproc", "transformers" or "llamacpp".
            cores: That it may use; a thread for each.
            options: Further arguments of its constructor, as JSON.

        Raises:
            EngineFailed: it did not start.
        """
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="eaas-engine-")
        self._log = Path(self._folder.name) / "log"
        asked = {"name": name, "model": str(model), "cores": list(cores), "options": options}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engines", json.dumps(asked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
            )
        try:
            self.facts: dict[str, Any] = self._answer()
        except EngineFailed:
            self.close()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        """As `BenchmarkEngine.generate`."""
        return Run(**self._ask("generate", prompts=prompts, tokens=tokens))

    def logits(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """As `BenchmarkEngine.logits`."""
        path = Path(self._folder.name) / "logits.npy"
        self._ask("logits", prompts=prompts, out=str(path))
        return np.load(path)

    def experts_used(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
        """As `Driven.experts_used`."""
        return self._ask("experts_used", prompts=prompts, tokens=tokens)

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._folder.cleanup()

    def _ask(self, verb: str, **arguments: object) -> Any:
        try:
            self._process.stdin.write(json.dumps([verb, arguments]).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except BrokenPipeError:
            raise EngineFailed(f"{self.name} has ended. Its last words:\n{self._tail()}") from None
        return self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise EngineFailed(f"{self.name} has ended. Its last words:\n{self._tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{self.name}: {answer['error']}\n{self._tail()}")
        return answer["result"]

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process so far, user and system, to the nanosecond."""
    # clock_getcpuclockid(3): the complement of the pid, and CPUCLOCK_SCHED.
    return time.clock_gettime((~pid << 3) | 2)


def settle(pids: Mapping[str, int]) -> None:
    """Wait until none of these processes uses a core: OpenMP's threads spin on for a while after their work.

    Raises:
        EngineFailed: one does not come to rest, so that it would be measured together with the next.
    """
    end_s = time.monotonic() + IDLE_LIMIT_S
    while True:
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        time.sleep(IDLE_S)
        busy = [name for name, pid in pids.items() if cpu_s(pid) - before[name] > IDLE_S * IDLE_SHARE]
        if not busy:
            return
        if time.monotonic() > end_s:
            raise EngineFailed(f"{', '.join(busy)} still uses the CPU {IDLE_LIMIT_S:g} s after its round.")


def available_cores(threads: int = 0) -> list[int]:
    """The first `threads` cores that this process may use; all of them for 0."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[:threads] if threads else cores
