"""Faults that this process does to itself on command: kills, freezes, and filters on the frames that it sends.

Off until `allow` is called; then native/faults.h has the places where they strike. A freeze is ended by a small process
that was started before (p2p/thaw.py): nothing else can be relied on to be there.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from p2p import native, thaw

log = logging.getLogger(__name__)

_DECLARED = native.Declarations("p2p", "faults", "P2pFault")
_ORDER = _DECLARED.structures["P2pFault"]
_CODES: Final = _DECLARED.numbered("P2P_FAULT_")
_REAP_S = 5.0


class NotAllowed(RuntimeError):
    """Faults were not allowed in this process when it began."""


class NoSuchPlace(ValueError):
    """No point of that name."""


_library: ctypes.CDLL | None = None


def allow() -> None:
    """Let this process be told to hurt itself, from now on."""
    global _library
    _library = native.load()


def point(name: str) -> None:
    """A place where a kill or a freeze can strike."""
    if _library is not None:
        _library.p2p_fault_pass(name.encode())


def link(window: int, peer: str) -> None:
    """Frames for the member of that name are written to the window at this address, until `unlink`.

    Raises:
        MemoryError: there is none to note it.
    """
    if _library is not None and _library.p2p_fault_link(window, peer.encode()) != 0:
        raise MemoryError(f"no memory to note which window {peer} reads; free some, or raise the limit.")


def unlink(window: int) -> None:
    """On return nothing is written to the window any more. Before its memory goes."""
    if _library is not None:
        _library.p2p_fault_unlink(window)


def arm(
    number: int,
    kind: str,
    *,
    where: str = "",
    after: int = 0,
    by_s: float = 0.0,
    times: float = 1.0,
    share: float = 1.0,
    peers: Sequence[str] = (),
    seed: int = 0,
    waker: int = -1,
) -> None:
    """Arm a fault until `disarm`, or until it has struck.

    Args:
        number: Under which it is disarmed.
        kind: As native/faults.h names them, such as rail-down.
        where: The point of a kill or a freeze, or the rail that is down.
        peers: Members; only frames for them are hit. Empty: all.
        waker: Of a freeze: written to just before.

    Raises:
        NotAllowed: `allow` was not called.
        NoSuchPlace: no such point.
        MemoryError: there is none for the fault.
    """
    order = _ORDER(number, after, int(by_s * 1e9), seed, share, times, _CODES[kind.upper().replace("-", "_")], waker)
    lines = "\n".join(peers).encode()
    if code := _armory().p2p_fault_arm(ctypes.byref(order), where.encode(), lines):
        if code == native.P2P_E_MEMORY:
            raise MemoryError(f"no memory to arm fault {number}; nothing was armed. Free some, or raise the limit.")
        raise NoSuchPlace(f"there is no point {where!r} in this process's native code; see native/faults.h.")


def disarm(number: int) -> None:
    """Undo `arm`; what was delayed still comes at its time. Idempotent."""
    _armory().p2p_fault_disarm(number)


def _armory() -> ctypes.CDLL:
    if _library is None:
        raise NotAllowed("this process was not started with --allow-chaos.")
    return _library


def kill() -> None:
    """End this process as a crash would."""
    _armory()
    os.kill(os.getpid(), signal.SIGKILL)


class Waker:
    """Another process that ends a freeze of this one. Everything but `stop` may be left to native code.

    fd: A byte written there announces the freeze, which ends so many seconds later.
    """

    def __init__(self, for_s: float) -> None:
        """Raises NotAllowed, or OSError where no process can be started: then nothing may be frozen."""
        _armory()
        script = str(Path(thaw.__file__))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, str(os.getpid()), str(for_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            # A signal for this process's group must not stop the one that wakes it.
            start_new_session=True,
        )
        self.fd = self._process.stdin.fileno() if self._process.stdin else -1
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Freeze this process now; returns when it has been woken. Nothing after `close`."""
        # Held while this process is stopped: `close` must not send the waker away before.
        with self._lock:
            if self._process.stdin and not self._process.stdin.closed:
                os.write(self.fd, b"!")
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def close(self) -> None:
        """No freeze comes any more: leave no process behind. Idempotent."""
        with self._lock:
            if self._process.stdin:
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
                return
            log.error("waker_stuck pid=%d", self._process.pid)
