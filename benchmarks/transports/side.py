"""What every measured transport offers: one process's end of its links, to drive a load or to serve it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

SLOTS = 4
SILENCE_S = 10.0


class Missing(Exception):
    """This transport cannot run here; the text says why and what to do about it."""


class Silent(RuntimeError):
    """The other side of a measurement said nothing for `SILENCE_S`."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Closed loop: a request to each link, a reply from each.

    Args:
        request_bytes: Driver to server.
        reply_bytes: Server to driver.
        depth: Requests under way on each link, at most SLOTS.
        count: Requests on each link.
        parked: Waiters sleep in the kernel, where the transport lets them choose.
        cores: Of all processes, by index; a transport that does not pin ignores them.
    """

    request_bytes: int
    reply_bytes: int
    depth: int
    count: int
    parked: bool
    cores: Sequence[int]


class Side(Protocol):
    """One process's end of a transport: process 0 is the hub, each other has one link, to the hub."""

    # Whether drive and serve run on the core that the load names.
    pinned: bool

    def offers(self) -> list[str]:
        """What the other end of each link needs to know, in the order of links."""
        ...

    def join(self, offers: Sequence[str]) -> None:
        """Take up the offers of the other ends, in the order of links."""
        ...

    def drive(self, load: Load) -> list[int]:
        """Send every request: ns from each to the last of its replies."""
        ...

    def serve(self, load: Load) -> None:
        """Answer every request of the load."""
        ...

    def close(self) -> None: ...


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Run the calling thread on one core for the length of a `with`; None: where it likes."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def rounds(load: Load, post: Callable[[int], None], finish: Callable[[int], None]) -> list[int]:
    """The driver's loop: post(i) sends request i, finish(i) returns when all its replies are there.

    Returns:
        ns from each post to its finish.
    """
    began = [0] * load.count
    for number in range(load.count + load.depth - 1):
        if number < load.count:
            began[number] = time.perf_counter_ns()
            post(number)
        done = number + 1 - load.depth
        if done >= 0:
            finish(done)
            began[done] = time.perf_counter_ns() - began[done]
    return began


def until(found: Callable[[], Any], rest: Callable[[], Any]) -> None:
    """Ask found() until it is true, with rest() in between.

    Raises:
        Silent: that took longer than SILENCE_S.
    """
    limit = time.monotonic() + SILENCE_S
    asked = 0
    while not found():
        rest()
        asked += 1
        if asked % 256 == 0 and time.monotonic() > limit:
            raise Silent(f"nothing came for {SILENCE_S:.0f} s; the other process has ended or is stuck.")
