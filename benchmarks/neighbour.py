"""A process that keeps one core busy while others are measured."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1000000): pass\n"


@contextlib.contextmanager
def busy_core(core: int | None) -> Iterator[None]:
    """Keep a core busy with a loop of plain Python for the length of a `with`; None: do nothing."""
    if core is None:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", _SPIN])
    try:
        os.sched_setaffinity(process.pid, {core})
        yield
    finally:
        process.kill()
        process.wait()
