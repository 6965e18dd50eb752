"""Kill and freeze processes of this host by their pid: what a crash and a hung host look like from outside.

It needs nothing of the cluster but the gateway's list of pids, and works on the router and the gateway as well, and
while the router is dead.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from eaas.chaos.targets import ChaosRefused, members_of, pids_of
from p2p import thaw

_MODULES = (b"router", b"experts", b"eaas.engine", b"eaas.gateway")


def kill_member(url: str, target: str) -> int:
    """End member `target` of the cluster behind `url` with SIGKILL; returns its pid.

    Raises:
        ChaosRefused: no such member, no gateway, or a process of another host or user.
    """
    return kill_pids(pids_of(members_of(url)), [target])[target]


def freeze_member(url: str, target: str, for_s: float) -> bool:
    """Stop member `target` with SIGSTOP for `for_s` seconds; it is thawed even when interrupted.

    Returns:
        True when the process was thawed alive, False when it was replaced in the meantime.

    Raises:
        ChaosRefused: as for `kill_member`.
    """
    frozen = Frozen(pids_of(members_of(url)), [target])
    try:
        frozen.wait(for_s)
    finally:
        ended = frozen.thaw()
    return not ended


def kill_pids(pids: Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
    """End members with SIGKILL; returns their pids. Raises ChaosRefused, before any is killed if one is unknown.

    Args:
        pids: Of every member, by name.
    """
    with _opened(pids, names) as opened:
        for name, pidfd in opened.items():
            _send(pidfd, signal.SIGKILL, name)
    return {name: pids[name] for name in names}


def stopped(pids: Mapping[str, int]) -> list[str]:
    """Members that are stopped now, whoever did that."""
    return [name for name, pid in pids.items() if _is_stopped(pid)]


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


class Frozen:
    """Members stopped with SIGSTOP, until `thaw`, or until this process ends, even by SIGKILL."""

    def __init__(self, pids: Mapping[str, int], names: Sequence[str], *, stop: bool = True) -> None:
        """Args: pids: of every member, by name. stop: False: others have stopped them, or will at once.

        Raises:
            ChaosRefused: one cannot be frozen; then none is.
        """
        self._opened: dict[str, int] = {}
        self._pids = pids
        self._waker: subprocess.Popen[bytes] | None = None
        with _opened(pids, names) as opened:
            try:
                if stop and opened:
                    self._waker = _waker(list(opened.values()))
                for name, pidfd in opened.items():
                    if stop and _is_stopped(pids[name]):
                        # Whoever wakes it from one freeze wakes it from both.
                        raise ChaosRefused(f"{name} is frozen already; clear that, or let it end.")
                    # Kept before it is stopped, so that whatever interrupts this thaws it.
                    self._opened[name] = os.dup(pidfd)
                    if stop:
                        _send(pidfd, signal.SIGSTOP, name)
            except BaseException:
                self.thaw()
                raise

    def lasts(self) -> bool:
        """Whether one of them is stopped still."""
        return any(_is_stopped(self._pids[name]) for name in self._opened)

    def wait(self, for_s: float) -> None:
        """Until one of them has ended, at most `for_s` seconds."""
        select.select([*self._opened.values()], [], [], for_s)

    def thaw(self) -> list[str]:
        """Let them go on; returns those that have ended meanwhile."""
        ended: list[str] = []
        while self._opened:
            name, pidfd = self._opened.popitem()
            # Looked at before it may run again: one that was replaced is killed, or ends as soon as it wakes.
            if select.select([pidfd], [], [], 0)[0]:
                ended.append(name)
            with suppress(ProcessLookupError):  # It was fenced and ended: nothing to thaw.
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)
        waker, self._waker = self._waker, None
        if waker is not None:
            # Waited for: a waker that is late must not end the next freeze.
            waker.communicate()
        return sorted(ended)


def _waker(pidfds: list[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(thaw.__file__)), ",".join(map(str, pidfds))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=pidfds,
        # A signal for this process's group must not end the one that outlives it.
        start_new_session=True,
    )


@contextmanager
def _opened(pids: Mapping[str, int], names: Sequence[str]) -> Iterator[dict[str, int]]:
    opened: dict[str, int] = {}
    try:
        for name in names:
            opened[name] = _open_member(pids, name)
        yield opened
    finally:
        for pidfd in opened.values():
            os.close(pidfd)


def _open_member(pids: Mapping[str, int], target: str) -> int:
    pid = pids.get(target)
    if not pid:
        raise ChaosRefused(f"No member {target!r} here; name one of: {', '.join(pids) or 'nobody'}.")
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise ChaosRefused(f"{target} (pid {pid}) has just ended, or runs on another host.") from None
    # The pid is the gateway's word; make sure that it still names a process of ours before a signal goes there.
    with suppress(OSError), Path(f"/proc/{pid}/cmdline").open("rb") as file:
        command = file.read().split(b"\0")
        if any(module in command for module in _MODULES):
            return pidfd
    os.close(pidfd)
    raise ChaosRefused(
        f"Pid {pid} is not a process of EaaS on this host; {target} runs elsewhere or has ended."
    )


def _send(pidfd: int, number: signal.Signals, target: str) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        raise ChaosRefused(f"{target} has ended by itself.") from None
    except PermissionError:
        raise ChaosRefused(
            f"{target} belongs to another user; run this as the user who started the cluster."
        ) from None
