"""What this machine can do, measured beside what depends on it; and lanes that run native loops together."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from p2p.build import ROOT, run_compiler

_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # such as 32768K
_ITERATIONS = 500_000  # some 5 ms
_READ_BYTES = 64 << 20
_REGISTER_BITS = {"avx512": 512, "avx2": 256, "portable": 128}


def last_cache_bytes() -> int:
    """Of the last-level cache; 32 MiB where the system does not tell."""
    return int(_LAST_CACHE.read_text().strip().removesuffix("K")) << 10 if _LAST_CACHE.exists() else 32 << 20


# Bytes of weights in turn: twice the last-level cache, so that none is found there. No more than 512 MiB, for a larger
# cache is shared by more hosts than this.
BEYOND_CACHE = min(max(2 * last_cache_bytes(), _READ_BYTES), 512 << 20)


@cache
def library() -> ctypes.CDLL:
    """probe.cpp, compiled for this machine.

    Raises:
        BuildFailed: no compiler, or it refused the file.
    """
    loaded = compiled("probe.cpp")
    loaded.probe_rate.restype = ctypes.c_double
    return loaded


def compiled(name: str, *links: Path) -> ctypes.CDLL:
    """A source file of this folder, compiled for this machine and linked against shared objects.

    Raises:
        BuildFailed: no compiler, or it refused the file.
    """
    with tempfile.TemporaryDirectory(prefix="eaas-probe-") as folder:
        path, source = Path(folder) / "probe.so", ROOT / "benchmarks" / name
        flags = [
            "-std=c++20",
            "-O3",
            "-march=native",
            "-ffp-contract=off",
            "-shared",
            "-fPIC",
            "-I",
            str(ROOT),
            str(source),
        ]
        flags += [*map(str, links), *(f"-Wl,-rpath,{link.parent}" for link in links)]
        run_compiler([*flags, "-o", str(path)])
        return ctypes.CDLL(str(path))


def huge(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] in huge pages where the host has them, as the decoder keeps its weights."""
    memory = mmap.mmap(-1, nbytes + (4 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % (2 << 20)
    return whole[start : start + nbytes]


def pointer(array: np.ndarray, element: int = 0) -> ctypes.c_void_p:
    """Address of one element, as ctypes wants it."""
    return ctypes.c_void_p(array.ctypes.data + element * array.itemsize)


def part(count: int, lane: int, lanes: int) -> tuple[int, int]:
    """The contiguous share of one lane, as native code splits it."""
    return count * lane // lanes, count * (lane + 1) // lanes


@cache
def _memory() -> np.ndarray:
    memory = huge(BEYOND_CACHE // _READ_BYTES * _READ_BYTES)
    memory[:] = 1
    return memory


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Bytes per second and operations per second that this machine showed."""

    bandwidth: float
    flops: float

    def seconds(self, nbytes: float, flops: float) -> float:
        """Least time for that many bytes of memory and operations, whichever takes longer."""
        return max(nbytes / self.bandwidth, flops / self.flops)


class Lanes:
    """Threads pinned to cores, which start native work together.

    Args:
        cores: One for each lane.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self.count = len(cores)
        self._pool = ThreadPoolExecutor(self.count)
        self._barrier = threading.Barrier(self.count)
        self._memory, self._at = _memory(), 0

        def pin(core: int) -> None:
            os.sched_setaffinity(0, {core})
            self._barrier.wait()

        list(self._pool.map(pin, cores))

    def seconds(self, work: Callable[[int], object]) -> float:
        """Run work(lane) on every lane at once: the time of the slowest."""

        def timed(lane: int) -> float:
            self._barrier.wait()
            started = time.perf_counter()
            work(lane)
            return time.perf_counter() - started

        return max(self._pool.map(timed, range(self.count)))

    def floor(self, isa: str, dot: bool) -> Floor:
        """Measure bandwidth and arithmetic of all lanes, a few milliseconds each.

        Args:
            isa: Instruction set of the code that is to be judged: "portable", "avx2" or "avx512".
            dot: Whether its products are of bfloat16 pairs, where that instruction set has an instruction for them.
        """
        native = library()
        # Another piece than the last time.
        start, share = self._at, _READ_BYTES // self.count // 512 * 512
        self._at = (start + _READ_BYTES) % len(self._memory)

        def read(lane: int) -> None:
            native.probe_read(pointer(self._memory, start + lane * share), ctypes.c_uint64(share))

        flops = [0.0] * self.count

        def compute(lane: int) -> None:
            flops[lane] = native.probe_rate(ctypes.c_uint64(_ITERATIONS), _REGISTER_BITS[isa], int(dot))

        bandwidth = share * self.count / self.seconds(read)
        elapsed = self.seconds(compute)
        return Floor(bandwidth=bandwidth, flops=sum(flops) / elapsed)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()
