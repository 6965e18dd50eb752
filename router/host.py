"""The two things a lease needs from this machine: a clock that counts suspend, and a name that makes pids
unique.
"""

from __future__ import annotations

import time
from pathlib import Path


def boot_s() -> float:
    """Seconds since boot, suspend included (CLOCK_BOOTTIME): a laptop's sleep must not stretch a lease."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def host_id() -> str:
    """Boot id and process-id namespace: two processes with equal (host_id, pid) are the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
