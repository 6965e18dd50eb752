"""Proof that a process of this host has ended, at once: its pidfd becomes readable."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

log = logging.getLogger(__name__)


class ExitWatch:
    """Watches processes on the running event loop; reports each that ends, once."""

    def __init__(self, on_exit: Callable[[int], None]) -> None:
        """Args: on_exit: called with the pid, on the event loop."""
        self._on_exit = on_exit
        self._watched: dict[int, int] = {}

    def watch(self, pid: int) -> None:
        """Watch one process of this host; one that has already ended is reported soon."""
        loop = asyncio.get_running_loop()
        if pid <= 0 or pid in self._watched:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            loop.call_soon(self._on_exit, pid)
            return
        except OSError as error:
            # Without pidfd (old kernel, too many files) the lease still ends; it only takes longer.
            log.warning("exit_not_watched pid=%d reason=%s", pid, error)
            return
        self._watched[pid] = fd
        loop.add_reader(fd, self._ended, pid)

    def forget(self, pid: int) -> None:
        """Stop watching. Idempotent."""
        fd = self._watched.pop(pid, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        """Stop watching everything."""
        for pid in list(self._watched):
            self.forget(pid)

    def _ended(self, pid: int) -> None:
        self.forget(pid)
        self._on_exit(pid)
