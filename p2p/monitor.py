"""Window monitors seen from Python.

What is measured, and when a channel is called slow, is defined in native/monitor.h. The native code that drives a
channel owns its monitor; here it is read by address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import NamedTuple

from p2p import native


class ChannelState(IntEnum):
    """As native/monitor.h defines them."""

    OK = 0
    SLOW = 1


class MonitorState(NamedTuple):
    """One channel now (P2pMonitorState). Bandwidths in bytes per second, over 8 writes and over 50 ms; 0: not known."""

    bandwidth: int
    mean_bandwidth: int
    outstanding: int
    most_outstanding: int
    writes: int
    bytes: int
    anomalies: int
    changed_ns: int
    state: ChannelState


class Monitor:
    """A native monitor that somebody else owns.

    Args:
        address: 0: one that is off.
        guard: Entered for each reading: keeps the monitor there meanwhile, or raises. Nothing: it outlives this.
    """

    def __init__(self, address: int, guard: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.address = address
        self._guard = guard
        self._library = native.load()

    def read(self) -> MonitorState:
        """The channel's state; any thread."""
        words = (ctypes.c_uint64 * len(MonitorState._fields))()
        with self._guard():
            self._library.p2p_monitor_read(self.address, words)
        *numbers, state = words
        return MonitorState(*numbers, state=ChannelState(state))
