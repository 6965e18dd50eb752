"""Whoever reads a log may stop reading: nothing that logs waits for it, and what was not kept is counted."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from router import logs
from router.client import RouterClient


@pytest.fixture
def stalled() -> Iterator[tuple[int, int]]:
    """The ends of a pipe that is full, to read from and to write to."""
    read, write = os.pipe()
    flags = fcntl.fcntl(write, fcntl.F_GETFL)
    fcntl.fcntl(write, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(write, b"." * 4096)
    fcntl.fcntl(write, fcntl.F_SETFL, flags)
    yield read, write
    for end in (read, write):
        with suppress(OSError):
            os.close(end)


def _read(read: int, until: str) -> str:
    text = ""
    while until not in text:
        text += os.read(read, 1 << 16).decode()
    return text.lstrip(".")


def test_nobody_waits_for_who_does_not_read_and_what_was_dropped_is_counted(
    stalled: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_LINES", 10)
    read, write = stalled
    lines = logs.Lines(write)
    began_s = time.monotonic()
    for number in range(25):
        lines.handle(logging.LogRecord("test", logging.INFO, __file__, 0, "line %d", (number,), None))
    lines.flush()
    assert time.monotonic() - began_s < 5.0
    found = _read(read, "count=").splitlines()
    assert found == [*(f"line {number}" for number in range(10)), "log_lines_dropped count=15"]
    lines.handle(logging.LogRecord("test", logging.INFO, __file__, 0, "it goes on", (), None))
    assert _read(read, "\n") == "it goes on\n"


def test_a_pipe_that_never_blocks_gets_every_line_whole(stalled: tuple[int, int]) -> None:
    read, write = stalled
    os.set_blocking(write, False)
    lines = logs.Lines(write)
    for number in range(3):
        lines.handle(logging.LogRecord("test", logging.INFO, __file__, 0, "line %d", (number,), None))
    time.sleep(0.1)
    assert _read(read, "line 2\n") == "line 0\nline 1\nline 2\n"


def test_what_ends_a_thread_is_a_line_like_others() -> None:
    code = """
import threading
from router import logs
logs.begin("json", "info")
thread = threading.Thread(target=lambda: 1 / 0, name="lane")
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    found = json.loads(line)
    assert (found["event"], found["thread"]) == ("uncaught", "lane") and "ZeroDivisionError" in line


def test_a_router_whose_log_stands_still_serves(stalled: tuple[int, int], tmp_path: Path) -> None:
    """Its first line finds no room; it used to end as a process whose loop hangs."""
    read, write = stalled
    told, tell = os.pipe()
    journal = ["--journal", str(tmp_path / "journal.db")]
    command = [sys.executable, "-m", "router", *journal, "--port", "0", "--ready-fd", str(tell)]
    process = subprocess.Popen(command, stderr=write, pass_fds=[tell])
    try:
        os.close(tell)
        assert select.select([told], [], [], 30.0)[0], "it waits for its log"
        with os.fdopen(told) as ready:
            client = RouterClient(json.loads(ready.readline())["address"])
        end_s = time.monotonic() + 2.5
        while time.monotonic() < end_s:
            client.status()
            time.sleep(0.1)
        client.close()
        os.close(write)
        assert process.poll() is None
        assert "ready address=" in _read(read, "ready address=")
    finally:
        process.kill()
        process.wait()
