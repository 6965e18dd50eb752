"""What every process of the cluster has in common: its options, its log, and what it owes the one that started it."""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from router import logs
from router.exposure import LOOPBACK
from router.tls import Credentials

_PR_SET_PDEATHSIG = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every process of the cluster takes from its launcher."""
    parser.add_argument("--ready-fd", type=int, default=-1, help="write one JSON line here when usable")
    parser.add_argument("--die-with", type=int, default=0, metavar="PID", help="stop when this parent ends")
    parser.add_argument(
        "--allow-chaos",
        action="store_true",
        help="take faults that are injected on purpose (default: refuse)",
    )
    parser.add_argument(
        "--tls-dir",
        type=Path,
        metavar="DIR",
        help="ca.pem, cert.pem and key.pem of this process's role, as `eaas certs` makes them: TLS with every other "
        "process, both ways (default: none, on loopback only)",
    )
    parser.add_argument(
        "--log-format",
        choices=logs.FORMATS,
        default=logs.TEXT,
        help="json: one object for each line of the log",
    )


def add_listener(parser: argparse.ArgumentParser) -> None:
    """Add the options of a process that other processes connect to, beside its port."""
    parser.add_argument(
        "--host",
        default=LOOPBACK,
        help=f"IP address to listen on (default {LOOPBACK}); one that other machines can reach needs --tls-dir",
    )
    parser.add_argument(
        "--advertise",
        default="",
        metavar="NAME",
        help="name or address under which others reach this process (default: that of --host)",
    )


def credentials(options: argparse.Namespace, role: str) -> Credentials | None:
    """What --tls-dir holds; None without it. Raises CredentialsInvalid."""
    return Credentials(options.tls_dir, role) if options.tls_dir else None


def begin(
    options: argparse.Namespace, level: str = "info", *, orphaned: signal.Signals = signal.SIGTERM
) -> None:
    """Log to stderr; with --die-with, end when the launcher ends, however and whenever it ends.

    Args:
        orphaned: The signal to end by. A process that is frozen takes SIGKILL alone; one that has something to say to
            its clients needs SIGTERM.
    """
    logs.begin(options.log_format, level)
    if options.die_with:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, orphaned, 0, 0, 0)
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
