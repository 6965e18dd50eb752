"""What a cluster has on this host: child processes, and the folder of its journal and logs.

A child is started with a readiness pipe, watched by a pidfd, and ended through it. The folder is never in a temporary
one: whatever ages files away there would take a running cluster's. Each cluster has one of its own under
$XDG_STATE_HOME/eaas, and a lock on it for life: a folder whose lock can be had is of one that ended.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from eaas.cluster.mps import quit_mps

logger = logging.getLogger(__name__)

READY_LINE_BYTES = 65536
LOG_TAIL_BYTES = 2000
_REAP_S = 0.2
_PREFIX = "cluster-"


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
    joined: bool = False  # of a gateway: it has been seen among the members
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
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start `python -m eaas module` in a session of its own, so that Ctrl-C reaches the launcher alone.

        Args: environment: Beside the launcher's own. pass_fds: Descriptors that it inherits.
        """
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "eaas", module, *arguments, "--ready-fd", str(write_fd)]
        command += ["--die-with", str(os.getpid())]
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # Rows are computed by native lanes; numpy's own threads only spin when it is imported.
                    env={"OPENBLAS_NUM_THREADS": "1", **os.environ, **environment},
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
        return cls(pool=pool, slot=slot, pid=process.pid, pidfd=pidfd, ready_fd=read_fd, log=log, process=process)

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
            raise StartFailed(f"{self.pool} ended before it was ready. Its last words:\n{self.tail()}") from None
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
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip() or "(nothing logged)"

    def send(self, number: signal.Signals) -> None:
        """Send a signal through the pidfd, which can never reach another process that took over the pid."""
        with suppress(ProcessLookupError):  # It ended by itself: nothing left to signal.
            signal.pidfd_send_signal(self.pidfd, number)

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


class StateDirUnusable(OSError):
    """No folder can be had there; the text says where, why, and what to do."""


def default_root() -> Path:
    """$XDG_STATE_HOME/eaas, by default ~/.local/state/eaas."""
    found = os.environ.get("XDG_STATE_HOME", "")
    # Relative ones are to be ignored, says the XDG Base Directory Specification.
    return (Path(found) if os.path.isabs(found) else Path.home() / ".local" / "state") / "eaas"  # noqa: PTH117


class StateDir:
    """One cluster's folder, at `path`. `close` removes it."""

    def __init__(self, root: Path | None = None) -> None:
        """Remove what ended clusters left under `root`, and make a folder there.

        Raises:
            StateDirUnusable: it cannot be made or locked.
        """
        root = root or default_root()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Between making a folder and locking it nobody may sweep.
            with _locked(root):
                _sweep(root)
                self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
                self._lock = _lock(self.path)
        except (OSError, RuntimeError) as error:
            raise StateDirUnusable(
                f"{root} cannot hold the cluster's journal and logs: {error}. Name another folder with --state-dir."
            ) from error

    def ensure(self) -> None:
        """Make the folder again if somebody has removed it, with a lock of its own. Raises OSError."""
        if self._lock < 0 or self.path.is_dir():
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self.path.parent):
            self.path.mkdir(mode=0o700)
            try:
                lock = _lock(self.path)
            except OSError:
                # Without a lock it is nobody's; the next call tries again.
                self.path.rmdir()
                raise
            os.close(self._lock)
            self._lock = lock
        logger.warning("state_dir_made_anew path=%s", self.path)

    def close(self) -> None:
        """Remove the folder and give up its lock. Idempotent."""
        if self._lock >= 0:
            # Of a daemon that runs on, its folder is the only handle: whoever sweeps next tries again.
            if quit_mps(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def keep_secret(path: Path, secret: bytes) -> None:
    """Write a file for its owner's eyes alone, where there is none. Raises OSError."""
    if not path.exists():
        with open(path, "wb", opener=partial(os.open, mode=0o600)) as file:
            file.write(secret)


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            lock = _lock(folder)
        except OSError:
            # It is in use, or somebody else's.
            continue
        # One whose launcher was killed still runs.
        if quit_mps(folder):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int:
    """A descriptor that holds the lock until it is closed, or its process has ended. Raises OSError: another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
