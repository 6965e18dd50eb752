"""Doorbells: no ring between look and sleep is lost, nobody sleeps long, bad pages and lanes do no harm."""

from __future__ import annotations

import struct
import threading
import time

import numpy as np
import pytest

from p2p import native
from tests.host_stalls import bounded

pytestmark = pytest.mark.alone

PAGE = 4096
LANE = 3


@pytest.fixture
def page() -> np.ndarray:
    memory = np.zeros(PAGE + 64, np.uint8)
    skip = -memory.ctypes.data % 64
    memory = memory[skip : skip + PAGE]
    assert native.load().p2p_bell_init(memory.ctypes.data, 7, 63) == 0
    return memory


def wait(address: int, lane: int, seen: int, timeout_ns: int) -> bool:
    return bool(native.load().p2p_bell_wait(address, lane, seen, timeout_ns))


def ring(address: int, lane: int) -> None:
    native.load().p2p_bell_ring(address, lane)


def read(address: int, lane: int) -> int:
    return native.load().p2p_bell_read(address, lane)


def sleeping(page: np.ndarray, lane: int) -> int:
    return int(page.view("<u4")[16 * (1 + lane) + 1])


def test_a_ring_after_the_look_and_before_the_wait_is_not_slept_through(page: np.ndarray) -> None:
    address = page.ctypes.data
    waits_s = []
    for _ in range(5):
        seen = read(address, LANE)
        ring(address, LANE)
        started_s = time.monotonic()
        assert wait(address, LANE, seen, 5_000_000)
        waits_s.append(time.monotonic() - started_s)
        assert sleeping(page, LANE) == 0
    # A ring slept through costs the whole 5 ms every time; a busy machine may cost as much once.
    assert min(waits_s) < 0.004, waits_s


def test_a_ring_ends_the_wait(page: np.ndarray) -> None:
    address = page.ctypes.data
    stopping = threading.Event()

    def ringer() -> None:
        while not stopping.wait(0.0005):
            ring(address, LANE)

    thread = threading.Thread(target=ringer)
    thread.start()

    def median_s() -> float:
        waits_s = []
        for _ in range(100):
            started_s = time.monotonic()
            wait(address, LANE, read(address, LANE), 5_000_000)
            waits_s.append(time.monotonic() - started_s)
        return sorted(waits_s)[50]

    # Without a wake every wait that begins asleep takes the whole 5 ms. A machine that is busy for
    # a while spoils a round.
    medians_s = [median_s()]
    while medians_s[-1] >= 0.0035 and len(medians_s) < 3:
        medians_s.append(median_s())
    stopping.set()
    thread.join()
    assert medians_s[-1] < 0.0035, medians_s


def test_no_wait_is_longer_than_5_ms(page: np.ndarray) -> None:
    address = page.ctypes.data
    waits_s = []
    for _ in range(5):
        started_s = time.monotonic()
        assert not wait(address, LANE, read(address, LANE), 10**10)
        waits_s.append(time.monotonic() - started_s)
        assert sleeping(page, LANE) == 0, "no ringer pays for a wake that nobody needs"
    assert 0.004 < min(waits_s) < 0.02, waits_s


def test_the_first_ring_finds_the_sleeper_and_later_ones_need_not_wake(page: np.ndarray) -> None:
    library, address = native.load(), page.ctypes.data
    seen = library.p2p_bell_prepare(address, LANE)
    assert sleeping(page, LANE) == 1
    library.p2p_bell_ring(address, LANE)
    assert sleeping(page, LANE) == 0, "whoever clears the flag pays for the wake"
    assert library.p2p_bell_sleep(address, LANE, seen, 5_000_000) == 1
    library.p2p_bell_prepare(address, LANE)
    library.p2p_bell_cancel(address, LANE)
    assert sleeping(page, LANE) == 0


def test_lanes_have_bells_of_their_own(page: np.ndarray) -> None:
    library, address = native.load(), page.ctypes.data
    for lane in range(63):
        before = [library.p2p_bell_read(address, other) for other in range(63)]
        library.p2p_bell_ring(address, lane)
        after = [library.p2p_bell_read(address, other) for other in range(63)]
        assert after == [count + (other == lane) for other, count in enumerate(before)]


def test_a_null_page_and_a_lane_out_of_range_do_no_harm(page: np.ndarray) -> None:
    before = page.tobytes()
    for address, lane in ((0, 0), (page.ctypes.data, 63), (page.ctypes.data, 2**32 - 1)):
        ring(address, lane)
        with bounded(0.05):
            assert not wait(address, lane, 0, 10**10)
        assert read(address, lane) == 0
    assert page.tobytes() == before


def test_a_page_belongs_to_one_incarnation(page: np.ndarray) -> None:
    library, address = native.load(), page.ctypes.data
    assert library.p2p_bell_init(address, 7, 0) == library.p2p_bell_init(address, 7, 64) == -1
    assert page[:32].tobytes() == struct.pack("<IIQQII", 0x42503250, 1, 7, 0, 0, 63)


def test_the_heartbeat_rises(page: np.ndarray) -> None:
    library, address = native.load(), page.ctypes.data
    library.p2p_bell_beat(address)
    library.p2p_bell_beat(address)
    assert library.p2p_bell_heartbeat(address) == 2
    library.p2p_bell_beat(None)
    assert library.p2p_bell_heartbeat(None) == 0
