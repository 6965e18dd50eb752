"""Endpoints of one host, in this process and in others, for tests that hold for shm and cuda alike."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from p2p.cuda import CudaEndpoint
from p2p.cuda_driver import CudaDriver
from p2p.descriptor import decode
from p2p.local import ShmEndpoint

CHILD_PROGRAM = Path(__file__).parent / "peer_process.py"
ROOT = Path(__file__).parents[2]
COUNTED = ("handles", "ranges", "mappings", "pinned", "streams", "contexts")


def retired_bytes(endpoint: Any) -> int:
    """Memory of an endpoint's closed windows which their peers may still write."""
    return sum(window.held_bytes for window in endpoint._retired)


class OneHost:
    """A transport of one host: shm, or cuda over the stand-in that is named."""

    def __init__(self, stand_in: Path | None = None) -> None:
        self.stand_in = stand_in
        self.driver = CudaDriver.load(str(stand_in)) if stand_in else None

    @property
    def name(self) -> str:
        return "CUDA" if self.driver else "SHM"

    def endpoint(self, name: str, incarnation: int, lanes: int = 1, **options: Any) -> Any:
        if self.driver:
            return CudaEndpoint(name, incarnation, lanes, driver=self.driver, **options)
        return ShmEndpoint(name, incarnation, lanes, **options)

    def child(self, role: str) -> contextlib.AbstractContextManager[Child]:
        return child(role, *([str(self.stand_in)] if self.stand_in else []))

    def live(self) -> dict[str, int]:
        """What the driver holds for this process: nothing of it for shm."""
        if not self.driver:
            return {}
        return {what: self.driver._library.fake_cuda_live(what.encode()) for what in COUNTED}


class Child:
    """A process of its own that plays one role of peer_process.py."""

    def __init__(self, *arguments: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(CHILD_PROGRAM), *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment)

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[Child]:
    """A child for the length of a block, killed at its end."""
    process = Child(*arguments)
    try:
        yield process
    finally:
        process.kill()
        for pipe in (process.process.stdin, process.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def hangs_up(fd: int, timeout_s: float) -> bool:
    """Whether the other side of a link lets go in time."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(timeout_s * 1000))


def open_fds() -> set[tuple[str, str]]:
    """This process's file descriptors, each with what it is open on.

    What is in one such set and not in an earlier one is new; leftovers of other tests may be closed meanwhile.
    """
    found = set()
    for fd in list(Path("/proc/self/fd").iterdir()):
        # The listing's own is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found.add((fd.name, str(fd.readlink())))
    return found


def tasks() -> set[str]:
    """The ids of this process's threads, as the kernel sees them."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


def forge(descriptor: bytes, **changes: object) -> bytes:
    """A descriptor that differs from another, and is whole."""
    return replace(decode(descriptor), **changes).encode()  # type: ignore[arg-type]
