"""How long this host held everybody up: what a bound of time, judged in one try, must not charge to the product."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Self

# Waking late by less than this is what every host does.
_USUAL_S = 0.005


class HostStalls:
    """A thread that sleeps a millisecond at a time, and adds up by how much it wakes too late.

    It asks for next to no time of a core, so it is late only when the host gives no time to anybody new.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._done.wait(0.001):
            now_s = time.monotonic()
            late_s = now_s - before_s - 0.001
            if late_s > _USUAL_S:
                self.seconds += late_s
            before_s = now_s


@contextlib.contextmanager
def bounded(bound_s: float) -> Iterator[None]:
    """What is done inside keeps the bound, in one try; time in which the host stood still counts against nobody."""
    with HostStalls() as stalls:
        began_s = time.monotonic()
        yield
        took_s = time.monotonic() - began_s
    assert took_s < bound_s + stalls.seconds, (
        f"{took_s:.3f} s, less than {bound_s} s is promised (the host stood still for {stalls.seconds:.3f} s)"
    )
