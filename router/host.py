"""What a lease needs from this machine: a clock that counts suspend, a name that makes pids unique, and threads that
operators can tell apart.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

# Where a launcher that starts processes elsewhere writes under which host and pid such a process must join.
HOST_VARIABLE, PID_VARIABLE = "EAAS_HOST", "EAAS_PID"


def boot_s() -> float:
    """Seconds since boot, suspend included (CLOCK_BOOTTIME): a laptop's sleep must not stretch a lease."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def host_id() -> str:
    """Boot id and process-id namespace, or the launcher's name that is in EAAS_HOST.

    Two processes with equal (host_id, process_id) are the same process, and its launcher is who attached as host_id.
    """
    if os.environ.get(HOST_VARIABLE):
        return os.environ[HOST_VARIABLE]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def process_id() -> int:
    """Pid of this process, or the number in EAAS_PID beside EAAS_HOST: pids of several machines may be equal."""
    given = os.environ.get(PID_VARIABLE, "") if os.environ.get(HOST_VARIABLE) else ""
    return int(given) if given.isdecimal() and int(given) else os.getpid()


def name_thread() -> None:
    """Give the calling thread its name for the machine too, so that operators find it among those of its process."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(threading.current_thread().name)
