"""What a process of the cluster owes the one that started it: one line when it is ready, and an end with it."""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every process of the cluster takes from its launcher."""
    parser.add_argument("--ready-fd", type=int, default=-1, help="write one JSON line here when usable")
    parser.add_argument("--die-with", type=int, default=0, metavar="PID", help="stop when this parent ends")


def begin(options: argparse.Namespace, level: str = "info") -> None:
    """Log to stderr; with --die-with, get SIGTERM when the launcher ends, however and whenever it ends."""
    logging.basicConfig(level=level.upper(), stream=sys.stderr, format=_LOG_FORMAT)
    if options.die_with:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        # It may have ended before the request was made: then somebody else is the parent by now.
        if os.getppid() != options.die_with:
            sys.exit(f"the launcher (pid {options.die_with}) has ended; stopping")


def tell_ready(options: argparse.Namespace, name: str, address: str, **more: str) -> None:
    """Say to the launcher that this process is usable, under its member name, at host:port, and `more` of it."""
    _tell(options.ready_fd, {"name": name, "address": address, "pid": os.getpid(), **more})


def tell_failed(options: argparse.Namespace, reason: str) -> None:
    """Say to the launcher why this process could not start."""
    _tell(options.ready_fd, {"error": reason})


def _tell(ready_fd: int, line: Mapping[str, object]) -> None:
    if ready_fd < 0:
        return
    try:
        with os.fdopen(ready_fd, "w") as launcher:
            launcher.write(json.dumps(line) + "\n")
    except BrokenPipeError:
        logging.getLogger("router.child").info("launcher_gone pid=%d", os.getpid())
