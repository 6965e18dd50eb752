"""One child process of the local cluster: started with a readiness pipe, watched by a pidfd, ended by pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

READY_LINE_BYTES = 65536
LOG_TAIL_BYTES = 2000
_REAP_S = 0.2


class StartFailed(RuntimeError):
    """A process of the cluster did not become ready; the text says which one and why."""


@dataclass(kw_only=True)
class Child:
    """A started process. `ready` is its readiness report, {"name", "address", "pid", ...}, once it has made one."""

    pool: str
    slot: int
    pid: int
    pidfd: int
    ready_fd: int
    log: Path
    process: subprocess.Popen[bytes]
    ready: dict[str, object] | None = None
    replaced: bool = False  # its successor has been started
    pending: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(
        cls,
        *,
        pool: str,
        slot: int,
        module: str,
        arguments: Sequence[str],
        log: Path,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start `python -m module` in a session of its own, so that Ctrl-C reaches the launcher alone.

        Args: pass_fds: Descriptors that it inherits.
        """
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", module, *arguments, "--ready-fd", str(write_fd)]
        command += ["--die-with", str(os.getpid())]
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # Rows are computed by native lanes; numpy's own threads only spin when it is imported.
                    env={"OPENBLAS_NUM_THREADS": "1", **os.environ},
                    pass_fds=(write_fd, *pass_fds),
                    start_new_session=True,
                )
            try:
                pidfd = os.pidfd_open(process.pid)
            except OSError:
                process.kill()
                process.wait()
                raise
        except OSError:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        os.set_blocking(read_fd, False)
        return cls(
            pool=pool,
            slot=slot,
            pid=process.pid,
            pidfd=pidfd,
            ready_fd=read_fd,
            log=log,
            process=process,
        )

    def read_ready(self) -> None:
        """Take what the readiness pipe holds; sets `ready` on a full line.

        Raises:
            StartFailed: the process reported an error, or closed the pipe without a report.
        """
        try:
            chunk = os.read(self.ready_fd, READY_LINE_BYTES)
        except BlockingIOError:
            return
        self.pending += chunk
        if b"\n" not in self.pending and chunk and len(self.pending) < READY_LINE_BYTES:
            return
        self.close_ready()
        line = bytes(self.pending).partition(b"\n")[0]
        try:
            report = json.loads(line)
        except ValueError:
            raise StartFailed(
                f"{self.pool} ended before it was ready. Its last words:\n{self.tail()}"
            ) from None
        if "error" in report:
            raise StartFailed(f"{self.pool} could not start: {report['error']}")
        self.ready = report

    @property
    def name(self) -> str:
        """The member's name once it is ready, such as `expert/1`; before that its pool and pid."""
        return str(self.ready["name"]) if self.ready else f"{self.pool} (pid {self.pid})"

    @property
    def address(self) -> str:
        """host:port that the process reported; empty until it is ready."""
        return str(self.ready["address"]) if self.ready else ""

    def tail(self) -> str:
        """The end of the process's log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip() or "(nothing logged)"

    def send(self, number: signal.Signals) -> None:
        """Send a signal through the pidfd, which can never reach another process that took over the pid."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return  # It ended by itself: nothing left to signal.

    def reap(self) -> int:
        """Collect the exit status of a process known to have ended, and release its descriptors."""
        try:
            status = self.process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            # Somebody traces it, a debugger perhaps, and learns of its end first; its place is needed all the same.
            status = -signal.SIGKILL
        self.close_ready()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return status

    def close_ready(self) -> None:
        """Close the readiness pipe; safe to repeat."""
        if self.ready_fd >= 0:
            os.close(self.ready_fd)
            self.ready_fd = -1
