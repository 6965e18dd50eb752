"""The measured processes, as the command that measures sees them."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.transports.side import Load, Missing
from p2p.build import ROOT

# Importing torch in five processes at once may take long; one that has ended is noticed at once.
ANSWER_S = 120.0


class ProcessFailed(RuntimeError):
    """A measured process refused, failed, ended or kept silent; the text holds its last words."""


class MeasuredProcess:
    """`python -m benchmarks.transports`, asked over pipes in JSON lines."""

    def __init__(self, index: int, options: Mapping[str, Any]) -> None:
        self._index = index
        self._log = tempfile.NamedTemporaryFile("w+", prefix="eaas-p2p-")  # noqa: SIM115 (lives as long as this)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transports", json.dumps({"index": index, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
        )

    def ask(self, verb: str, **arguments: object) -> None:
        """Send a request; `answer` waits for what comes of it."""
        if self._process.stdin is None:
            raise ProcessFailed(f"process {self._index} has no stdin.")
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([verb, arguments]).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """The next result.

        Raises:
            Missing: the transport cannot run here.
            ProcessFailed: anything else.
        """
        if self._process.stdout is None:
            raise ProcessFailed(f"process {self._index} has no stdout.")
        readable, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            what = "has ended" if readable else f"said nothing for {ANSWER_S:.0f} s"
            raise ProcessFailed(f"process {self._index} {what}. Its last words:\n{self._tail()}")
        answer = json.loads(line)
        if "missing" in answer:
            raise Missing(answer["missing"])
        if "error" in answer:
            raise ProcessFailed(f"process {self._index}: {answer['error']}\n{self._tail()}")
        return answer["result"]

    def close(self) -> None:
        """End it."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.close()

    def _tail(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-3000:]


class Star:
    """A hub and `others` processes, each with one link to the hub in every transport. Use as a context manager."""

    def __init__(self, others: int, payload_bytes: int, loops: Path) -> None:
        options = {"others": others, "payload_bytes": payload_bytes, "loops": str(loops)}
        self.others = others
        self._all: list[MeasuredProcess] = []
        try:
            for index in range(1 + others):
                self._all.append(MeasuredProcess(index, options))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Star:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self, transport: str) -> None:
        """Join every link of a transport.

        Raises:
            Missing: it cannot run here.
        """
        for process in self._all:
            process.ask("open", transport=transport)
        of_hub, *of_leaves = _answers(self._all)
        joined = [[offer for [offer] in of_leaves], *([offer] for offer in of_hub)]
        for process, offers in zip(self._all, joined, strict=True):
            process.ask("join", transport=transport, offers=offers)
        _answers(self._all)

    def run(self, transport: str, load: Load, hub_drives: bool, pause_s: float = 0.0) -> tuple[list[Any], list[Any]]:
        """Let one side drive a load and the other serve it.

        Args:
            pause_s: For which the servers wait before anything is sent.

        Returns:
            Answers of the drivers, answers of the servers.
        """
        hub, leaves = self._all[:1], self._all[1:]
        drivers, servers = (hub, leaves) if hub_drives else (leaves, hub)
        arguments = {"transport": transport, "load": asdict(load)}
        for server in servers:
            server.ask("serve", **arguments)
        time.sleep(pause_s)
        for driver in drivers:
            driver.ask("drive", **arguments)
        answers = _answers([*drivers, *servers])
        return answers[: len(drivers)], answers[len(drivers) :]

    def close(self) -> None:
        """End every process."""
        for process in self._all:
            process.close()


def _answers(processes: Sequence[MeasuredProcess]) -> list[Any]:
    """One from each; of all failures the first that is not another's silence."""
    answers, failures = [], []
    for process in processes:
        try:
            answers.append(process.answer())
        except (Missing, ProcessFailed) as failure:
            failures.append(failure)
    if failures:
        raise min(failures, key=lambda failure: "Silent" in str(failure))
    return answers
