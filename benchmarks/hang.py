"""Stop one thread of a process, and no other, as a deadlock would: by ptrace, from a process of its own.

    with hanging(tid): ...    # the thread goes on afterwards, if it still can

A thread that is stopped so holds what it held; its process goes on around it, and keeps its lease.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# PTRACE_SEIZE stops nothing by itself and PTRACE_INTERRUPT only the one thread. Whoever traces must be told of the
# thread's end: the parent of a process whose first thread is traced learns of its end only then.
_TRACER = """
import ctypes, os, sys
libc, tid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
for request in (0x4206, 0x4207):
    if libc.ptrace(request, tid, None, None):
        sys.exit("ptrace: " + os.strerror(ctypes.get_errno()))
print("stopped", flush=True)
while True:
    try:
        _, status = os.waitpid(tid, 0x40000000)
    except ChildProcessError:
        break
    if os.WIFEXITED(status) or os.WIFSIGNALED(status):
        break
"""


class NotPermitted(RuntimeError):
    """This process may not trace the thread; the text says why."""


@contextlib.contextmanager
def hanging(tid: int) -> Iterator[None]:
    """Have one thread stand still for the length of a `with`.

    Raises:
        NotPermitted: ptrace is not allowed here, or the thread is gone.
    """
    tracer = subprocess.Popen(
        [sys.executable, "-c", _TRACER, str(tid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if tracer.stdout is None or tracer.stdout.readline() != "stopped\n":
            _, why = tracer.communicate(timeout=10)
            raise NotPermitted(f"thread {tid} cannot be stopped: {why.strip() or 'its tracer said nothing'}")
        yield
    finally:
        # A tracer that ends lets go of what it traced.
        tracer.kill()
        tracer.communicate()


def threads(pid: int, name: str) -> list[int]:
    """Threads of a process that have that name (at most 15 characters count)."""
    tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))
    return [int(task.name) for task in tasks if (task / "comm").read_text().strip() == name[:15]]
