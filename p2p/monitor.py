"""Window monitors seen from Python: their state, their records, and a trace of the 50 ms around each anomaly.

What is measured, and when a channel is called slow, is defined in native/monitor.h. The native code that drives a
channel owns its monitor; here it is read by address:

    recorder = Recorder(Monitor(address), peer="10.0.0.7", folder=Path("traces"))
    recorder.poll()             # a few times a second: the ring holds only so many writes
"""

from __future__ import annotations

import ctypes
import heapq
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2p import native

RING_RECORDS: Final = 4096
AROUND_NS: Final = 25_000_000
# A slow channel may complete nothing for longer than that: so many writes before its anomaly are shown anyway.
WRITES_BEFORE: Final = 32
# Of one trace, some 5 MB.
MOST_WRITES: Final = 16384

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


class Recorder:
    """Keeps a channel's latest writes and dumps those around each anomaly. For one thread."""

    def __init__(
        self,
        monitor: Monitor,
        *,
        peer: str,
        folder: Path,
        most_dumps: int = 16,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """
        Args:
            peer: Names the traces, after the time.
            folder: Made when the first trace is written.
            most_dumps: Traces of this peer that stay there; older ones are deleted. At most about 5 MB each.
            clock_ns: The feeder's clock.
        """
        if most_dumps < 1:
            raise ValueError(f"most_dumps is {most_dumps}; 1 or more is needed.")
        self._monitor, self._peer, self._folder = monitor, peer, folder
        self._most_dumps, self._clock_ns = most_dumps, clock_ns
        self._kept: Records = np.zeros(0, RECORD)
        self._anomalies: list[int] = []  # when each one began whose trace is not written yet
        self._slow = False

    def poll(self) -> list[Path]:
        """Take over what was recorded; write the traces that are complete by now.

        Raises:
            OSError: a trace can't be written. It is not tried again.
        """
        now_ns = self._clock_ns()
        while len(fresh := self._monitor.drain()):
            slow = fresh["state"] == ChannelState.SLOW
            began = slow & ~np.concatenate([[self._slow], slow[:-1]])
            self._anomalies += [int(at) for at in fresh["completed_ns"][began]]
            self._slow = bool(slow[-1])
            self._kept = np.concatenate([self._kept, fresh])[-MOST_WRITES:]
        written: list[Path] = []
        while self._anomalies and self._anomalies[0] + AROUND_NS <= now_ns:
            written.append(self._dump(self._anomalies.pop(0)))
        self._forget(min([now_ns, *self._anomalies]))
        return written

    def _forget(self, before_ns: int) -> None:
        keep = self._kept["completed_ns"] >= max(0, before_ns - AROUND_NS)
        keep[-WRITES_BEFORE:] = True
        if self._anomalies:
            keep[max(0, _position(self._kept, before_ns) - WRITES_BEFORE) :] = True
        self._kept = self._kept[keep]

    def _dump(self, at_ns: int) -> Path:
        done_ns, at = self._kept["completed_ns"], _position(self._kept, at_ns)
        around = (done_ns + np.uint64(AROUND_NS) >= at_ns) & (done_ns <= at_ns + AROUND_NS)
        around[max(0, at - WRITES_BEFORE) : at] = True
        name = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in self._peer)
        self._folder.mkdir(parents=True, exist_ok=True)
        # Times of equal length: the names sort by them.
        path = self._folder / f"{name}@{time.time_ns()}.trace.json"
        path.write_text(json.dumps(chrome_trace(self._kept[around], at_ns, self._peer), allow_nan=False))
        for old in sorted(self._folder.glob(f"{name}@*.trace.json"))[: -self._most_dumps]:
            old.unlink()
        return path


def _position(records: Records, at_ns: int) -> int:
    return int(np.searchsorted(records["completed_ns"], at_ns))


def chrome_trace(records: Records, anomaly_ns: int, peer: str) -> dict[str, Any]:
    """Records as a Chrome trace, which Perfetto and chrome://tracing open. Pure.

    One slice for each write, from post to completion, on rows such that none overlaps another; counters for
    bandwidth and bytes outstanding; a mark where the anomaly was declared. Times in microseconds from the first post.
    """
    posted = [int(at) for at in records["posted_ns"]]
    origin_ns = min([anomaly_ns, *posted])

    def event(phase: str, name: str, at_ns: int, **fields: Any) -> dict[str, Any]:
        return {"ph": phase, "name": name, "ts": (at_ns - origin_ns) / 1e3, "pid": 1, "tid": 0, **fields}

    events = [
        event("M", "process_name", origin_ns, args={"name": f"channel to {peer}"}),
        event("i", "anomaly", anomaly_ns, s="g"),
    ]
    free: list[tuple[int, int]] = []  # (end of its last write, row)
    for index in sorted(range(len(records)), key=posted.__getitem__):
        record, begin_ns = records[index], posted[index]
        end_ns = max(begin_ns, int(record["completed_ns"]))
        row = heapq.heappop(free)[1] if free and free[0][0] <= begin_ns else len(free) + 1
        heapq.heappush(free, (end_ns, row))
        size = {"bytes": int(record["bytes"])}
        events.append(event("X", "write", begin_ns, tid=row, dur=(end_ns - begin_ns) / 1e3, args=size))
    for record in records:
        at_ns = int(record["completed_ns"])
        bandwidth, outstanding = float(record["bandwidth"]) / 1e6, int(record["outstanding"])
        events.append(event("C", "bandwidth", at_ns, args={"MB/s": bandwidth}))
        events.append(event("C", "outstanding", at_ns, args={"bytes": outstanding}))
        if record["dropped"]:
            events.append(event("i", f"{record['dropped']} writes not recorded", at_ns, s="g"))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"peer": peer}}
