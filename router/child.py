"""What every process of the cluster has in common: its start, its log, and what it owes the one that started it."""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from router import logs
from router.config import ChildOptions
from router.options import read
from router.tls import Credentials

log = logging.getLogger("router.child")

_PR_SET_PDEATHSIG = 1
_T = TypeVar("_T", bound=ChildOptions)


def start(
    role: str,
    kind: type[_T],
    run: Callable[[_T], int],
    refusals: tuple[type[Exception], ...],
    *,
    orphaned: signal.Signals = signal.SIGTERM,
    arguments: Sequence[str] | None = None,
) -> int:
    """Read this process's options, log to stderr, and run. Returns the exit code.

    Args:
        run: Serves until told to end, and returns the exit code.
        refusals: What it raises where it cannot start; the text says why, to the log and to the launcher.
        orphaned: The signal to end by when the launcher ends, with --die-with. A process that is frozen takes SIGKILL
            alone; one that has something to say to its clients needs SIGTERM.
        arguments: Without the program's name; default: this process's.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        options = read(kind, role, words, os.environ)
    except ValueError as error:
        logs.begin(logs.TEXT, "info")
        return _refused(_ready_fd(words), error)
    logs.begin(options.log_format, options.log_level)
    if options.die_with:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, orphaned, 0, 0, 0)
        # It may have ended before the request was made: then somebody else is the parent by now.
        if os.getppid() != options.die_with:
            sys.exit(f"the launcher (pid {options.die_with}) has ended; stopping")
    try:
        return run(options)
    except refusals as error:
        return _refused(options.ready_fd, error)


def on_signals(act: Callable[[], None], *numbers: signal.Signals) -> None:
    """From now on call `act`, on a thread of its own, for each of these signals. For the main thread alone.

    A handler in Python runs wherever the main thread is, which may hold the very lock that `act` needs, as that of an
    Event on which it waits; and not before native code returns. What C writes to a socket waits for neither.
    """
    read, write = socket.socketpair()
    write.setblocking(False)
    signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)

    def follow() -> None:
        # The other end lives as long as this thread.
        with write:
            while True:
                if read.recv(1)[0] not in numbers:
                    continue
                try:
                    act()
                except Exception:
                    log.exception("signal_not_followed")

    threading.Thread(target=follow, name="signals", daemon=True).start()


def credentials(options: ChildOptions, role: str) -> Credentials | None:
    """What --tls-dir holds; None without it. Raises CredentialsInvalid."""
    return Credentials(options.tls_dir, role) if options.tls_dir else None


def tell_ready(options: ChildOptions, name: str, address: str, **more: str) -> None:
    """Say to the launcher that this process is usable, under its member name, at host:port, and `more` of it."""
    _tell(options.ready_fd, {"name": name, "address": address, "pid": os.getpid(), **more})


def _refused(ready_fd: int, error: Exception) -> int:
    log.error("cannot_start reason=%s", error)
    _tell(ready_fd, {"error": str(error)})
    return 1


def _ready_fd(words: Sequence[str]) -> int:
    """The descriptor that the launcher reads, of a command line that makes no sense otherwise."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ready-fd", type=int, default=-1)
    return parser.parse_known_args(words)[0].ready_fd


def _tell(ready_fd: int, line: Mapping[str, object]) -> None:
    if ready_fd < 0:
        return
    try:
        with os.fdopen(ready_fd, "w") as launcher:
            launcher.write(json.dumps(line) + "\n")
    except BrokenPipeError:
        log.info("launcher_gone pid=%d", os.getpid())
