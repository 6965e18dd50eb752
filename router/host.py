"""The two things a lease needs from this machine: a clock that counts suspend, and a name that makes pids
unique.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

HOST_VARIABLE = "EAAS_HOST"


def boot_s() -> float:
    """Seconds since boot, suspend included (CLOCK_BOOTTIME): a laptop's sleep must not stretch a lease."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def host_id() -> str:
    """Boot id and process-id namespace: two processes with equal (host_id, pid) are the same process.

    A process that a launcher started elsewhere has the launcher's name in EAAS_HOST instead, so that the launcher is
    told when to end it.
    """
    if os.environ.get(HOST_VARIABLE):
        return os.environ[HOST_VARIABLE]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
