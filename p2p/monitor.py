"""Window monitors seen from Python: their state and their records.

What is measured, and when a channel is called slow, is defined in native/monitor.h. The native code that drives a
channel owns its monitor; here it is read by address, its records a few times a second: the ring holds only so many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2p import native

RING_RECORDS: Final = 4096

RECORD: Final = np.dtype(
    [
        ("posted_ns", "<u8"),
        ("completed_ns", "<u8"),
        ("bytes", "<u8"),
        ("outstanding", "<u8"),
        ("bandwidth", "<u8"),
        ("state", "<u4"),
        ("dropped", "<u4"),
    ]
)
Records = NDArray[np.void]


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
    dropped: int
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

    def drain(self) -> Records:
        """Take the oldest records, at most RING_RECORDS; one thread at a time."""
        found = np.zeros(RING_RECORDS, RECORD)
        with self._guard():
            count = self._library.p2p_monitor_drain(self.address, found.ctypes.data, len(found))
        return found[:count]


@contextmanager
def new_monitor(ring_records: int = RING_RECORDS) -> Iterator[Monitor]:
    """A monitor for a channel that Python drives.

    Raises:
        ValueError: ring_records is out of range.
    """
    library = native.load()
    address = library.p2p_monitor_new(ring_records)
    if not address:
        raise ValueError(f"{ring_records} records were asked for; 1 to {1 << 20}, and memory, are needed.")
    try:
        yield Monitor(address)
    finally:
        library.p2p_monitor_free(address)
