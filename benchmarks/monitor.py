"""What watching a channel costs: nanoseconds a write, with its monitor on and off.

Alone, in a loop of nothing else; and beside the copy of the write's bytes through memory beyond the caches, where the
monitor's own lines are cold. On and off take turns; a figure is the median over the rounds of their difference.

    python -m benchmarks.monitor
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.probe import BEYOND_CACHE, compiled
from benchmarks.report import RESULTS, record, spread
from p2p import native
from p2p.monitor import Monitor

DEPTH = 4
WRITES = 4096  # of a round that only tells the monitor
SIZES = (4 << 10, 64 << 10)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and append one JSON line."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--rounds", type=int, default=201, help="of on and off in turn")
    command.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = command.parse_args(argv)
    library = compiled("monitor.cpp", native.LIBRARY)
    library.monitor_loop.restype = ctypes.c_uint64
    to, source = np.ones(BEYOND_CACHE, np.uint8), np.ones(BEYOND_CACHE, np.uint8)
    with new_monitor() as monitor:
        alone = cost(library, monitor, options.rounds, WRITES, 64 << 10)
        beside = {
            f"{size >> 10} KB": cost(library, monitor, options.rounds, (16 << 20) // size, size, to, source)
            for size in SIZES
        }
    result = {
        "rounds": options.rounds,
        "depth": DEPTH,
        "alone": alone,
        "beside_copy": beside,
    }
    record("monitor", result, (), options.results)


@contextmanager
def new_monitor() -> Iterator[Monitor]:
    """A monitor of a channel that whoever asks drives."""
    library = native.load()
    address = library.p2p_monitor_new()
    try:
        yield Monitor(address)
    finally:
        library.p2p_monitor_free(address)


def cost(
    library: ctypes.CDLL,
    monitor: Monitor,
    rounds: int,
    writes: int,
    size: int,
    to: np.ndarray | None = None,
    source: np.ndarray | None = None,
) -> dict[str, dict[str, float] | float]:
    """Nanoseconds a write with the monitor on, with it off, and the median of their differences by round."""
    memory = [ctypes.c_void_p(array.ctypes.data if array is not None else None) for array in (to, source)]

    def loop(address: int) -> float:
        sizes = [ctypes.c_uint64(value) for value in (writes, size, DEPTH)]
        room = ctypes.c_uint64(BEYOND_CACHE)
        return library.monitor_loop(ctypes.c_void_p(address or None), *sizes, *memory, room) / writes

    on, off = [], []
    for round_ in range(rounds + 1):
        turns = [(on, monitor.address), (off, 0)]
        for times, address in turns if round_ % 2 else turns[::-1]:
            times.append(loop(address))
    extra = [with_ns - without_ns for with_ns, without_ns in zip(on[1:], off[1:], strict=True)]
    return {
        "on_ns": spread(on[1:]),
        "off_ns": spread(off[1:]),
        "extra_ns": round(statistics.median(extra), 2),
    }


if __name__ == "__main__":
    main()
