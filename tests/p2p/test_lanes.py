"""Lanes: every lane runs, barriers hold, pins are given back; the native stress passes under sanitizers."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2p import native
from p2p.build import COMMON, ROOT, compiler
from tests.p2p.one_host import tasks

pytestmark = pytest.mark.alone

STRESS = Path(__file__).parent / "native_stress.cpp"


class Pool:
    """A native lane pool for Python functions."""

    def __init__(self, count: int, cores: list[int] | None = None) -> None:
        self.library = native.load()
        array = (ctypes.c_int32 * count)(*cores) if cores else None
        ctypes.set_errno(0)
        self.pool = self.library.p2p_lanes_new(count, array)

    def run(self, function: Callable[[int], None]) -> int:
        errors: list[BaseException] = []

        def guarded(_: int | None, lane: int) -> None:
            try:
                function(lane)
            except BaseException as error:
                errors.append(error)

        entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32)(guarded)
        result = self.library.p2p_lanes_run(self.pool, entry, None)
        assert not errors, errors
        return result

    def barrier(self, lane: int) -> None:
        self.library.p2p_lanes_barrier(self.pool, lane)

    def free(self) -> None:
        self.library.p2p_lanes_free(self.pool)
        self.pool = None


@pytest.fixture
def make_pool() -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make(*arguments: object) -> Pool:
        pools.append(Pool(*arguments))  # type: ignore[arg-type]
        return pools[-1]

    yield make
    for pool in pools:
        pool.free()


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_every_lane_runs_once_and_the_caller_is_lane_0(make_pool: Callable[..., Pool], lanes: int) -> None:
    pool = make_pool(lanes)
    for _ in range(20):
        seen: dict[int, int] = {}
        assert pool.run(lambda lane, seen=seen: seen.update({lane: threading.get_native_id()})) == 0
        assert sorted(seen) == list(range(lanes))
        assert seen[0] == threading.get_native_id() and len(set(seen.values())) == lanes


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_no_lane_passes_a_barrier_before_all_have_come(make_pool: Callable[..., Pool], lanes: int) -> None:
    pool = make_pool(lanes)
    came = [0] * lanes

    def phases(lane: int) -> None:
        for phase in range(1, 101):
            if phase % 25 == lane:
                time.sleep(0.002)
            came[lane] = phase
            pool.barrier(lane)
            assert min(came) >= phase, f"lane {lane} passed barrier {phase} alone: {came}"
            pool.barrier(lane)

    assert pool.run(phases) == 0
    assert came == [100] * lanes


def test_lanes_are_pinned_and_the_caller_gets_its_affinity_back() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    pool = Pool(2, [core, core])
    found: dict[int, set[int]] = {}
    pool.run(lambda lane: found.update({lane: os.sched_getaffinity(0)}))
    assert found == {0: {core}, 1: {core}}
    pool.free()
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("count, cores", [(0, None), (257, None), (1, [100_000]), (1, [1023])])
def test_impossible_pools_are_refused(make_pool: Callable[..., Pool], count: int, cores: list[int] | None) -> None:
    assert 1023 not in os.sched_getaffinity(0)
    assert make_pool(count, cores).pool is None
    assert ctypes.get_errno() == errno.EINVAL


def test_a_pool_runs_one_function_at_a_time(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(2)
    results = []
    assert pool.run(lambda lane: results.append(pool.run(lambda _: None)) if lane == 0 else None) == 0
    assert results == [-30]
    assert pool.run(lambda _: None) == 0


def test_free_ends_every_thread() -> None:
    # Those of other tests may end meanwhile.
    of_others = tasks()
    for _ in range(5):
        pool = Pool(4)
        own = tasks() - of_others
        assert len(own) == 3
        pool.run(lambda _: None)
        names = sorted(Path(f"/proc/self/task/{task}/comm").read_text() for task in own)
        assert names == ["p2p-lane-1\n", "p2p-lane-2\n", "p2p-lane-3\n"]
        pool.free()
        deadline_s = time.monotonic() + 60
        while tasks() - of_others and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert not tasks() - of_others


def test_idle_lanes_use_no_cpu_time(make_pool: Callable[..., Pool]) -> None:
    of_others = tasks()
    pool = make_pool(3)
    own = tasks() - of_others
    assert len(own) == 2

    def used_s() -> float:
        # Of the lanes alone: other tests' threads may still run in this process.
        ran = [Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0] for task in own]
        return sum(map(int, ran)) / 1e9

    pool.run(lambda _: None)
    time.sleep(0.05)
    before_s = used_s()
    time.sleep(0.3)
    assert used_s() - before_s < 0.03


@pytest.mark.full(seconds=40)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_native_code_passes_its_stress_under_sanitizers(tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "stress"
    sources = [str(STRESS), *map(str, sorted((ROOT / "p2p" / "native").glob("*.cpp")))]
    flags = [*COMMON, "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-I", str(ROOT)]
    built = subprocess.run([*compiler(), *flags, *sources, "-o", str(program)], capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip(f"needs the {sanitizer} sanitizer runtime, found none")
    assert built.returncode == 0, built.stderr
    # One runtime in a process: `make check-native` preloads another.
    alone = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([str(program)], env=alone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
