"""Wakes a process that is stopped, when whoever ought to cannot.

`python -I -S thaw.py PID SECONDS`: one that stops itself, so long after a byte on stdin has said that it does. This one
ends with the process, or when it is no longer needed: both close the other end of its stdin.

`python -I -S thaw.py PIDFD,PIDFD,...`: those that another has stopped, as soon as that one closes the other end of
stdin, or is dead.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from pathlib import Path

_POLL_S = 0.005
# It stops at once after the byte; if it runs, somebody else has woken it.
_POLLS = 200


def main(pid: int, for_s: float) -> None:
    """Wait for the byte, then for so long, then until the process has really stopped; then wake it."""
    if not os.read(0, 1) or _left(for_s):
        return
    for _ in range(_POLLS):
        if _state(pid) in "Tt":
            # Nobody has closed the pipe, so this is still the process that holds its other end.
            os.kill(pid, signal.SIGCONT)
            return
        if _left(_POLL_S):
            return


def outlive(pidfds: list[int]) -> None:
    """Wait for the end of stdin; then wake them."""
    while os.read(0, 1):
        pass
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):  # It has ended.
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)


def _left(timeout_s: float) -> bool:
    return bool(select.select([0], [], [], timeout_s)[0])


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        outlive([int(number) for number in sys.argv[1].split(",")])
    else:
        main(int(sys.argv[1]), float(sys.argv[2]))
