"""A work loop that hangs is found by its own counter, and one that is only slow is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from router.heartbeat import Heartbeat, OwnTime, Standing

pytestmark = pytest.mark.alone


def _stood(standing: Standing, samples: int, idle: bool, elapsed_s: float = 0.0) -> float:
    elapsed_s = elapsed_s or standing.sample_s
    return [standing.sample(7, elapsed_s, lambda: idle) for _ in range(samples)][-1]


def test_a_loop_stands_when_its_process_does_nothing_for_the_bound_and_whatever_it_does_at_the_longest() -> None:
    standing = Standing(bound_s=0.5, longest_s=30.0)
    assert _stood(standing, 6, idle=True) == 0.0
    assert _stood(standing, 1, idle=True) > 0.5
    assert standing.sample(8, standing.sample_s, lambda: True) == 0.0, "it goes on"
    assert _stood(standing, 295, idle=False) == 0.0, "a long step"
    assert _stood(standing, 10, idle=False) > 30.0
    assert standing.sample(None, standing.sample_s, lambda: True) == 0.0, "there is no loop any more"


def test_time_in_which_the_process_itself_stood_still_is_not_the_loops() -> None:
    standing = Standing(bound_s=0.5, longest_s=30.0)
    assert _stood(standing, 3, idle=True, elapsed_s=60.0) == 0.0


def _watched(work: Callable[[threading.Event, list[int]], None], wanted: bool, for_s: float) -> bool:
    """Whether a loop that does this is found to stand within that time; that it is not is waited for to the end."""
    count, ended = [0], threading.Event()
    thread = threading.Thread(target=work, args=(ended, count))
    heartbeat = Heartbeat(lambda: count[0], bound_s=0.4, longest_s=60.0)
    thread.start()
    heartbeat.start()
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s and not (wanted and heartbeat.stands_s):
        time.sleep(0.01)
    found = heartbeat.stands_s > 0
    ended.set()
    thread.join()
    heartbeat.close()
    return found


def test_a_loop_that_waits_for_what_never_comes_is_found_and_one_that_computes_or_turns_idle_is_not() -> None:
    def hang(ended: threading.Event, count: list[int]) -> None:
        ended.wait()

    def compute(ended: threading.Event, count: list[int]) -> None:
        while not ended.is_set():
            sum(range(10_000))

    def idle(ended: threading.Event, count: list[int]) -> None:
        while not ended.wait(0.1):
            count[0] += 1

    assert _watched(hang, wanted=True, for_s=60.0)
    assert not _watched(compute, wanted=False, for_s=1.0)
    assert not _watched(idle, wanted=False, for_s=1.0)


def test_one_of_two_loops_that_stands_is_found_whichever_it_is() -> None:
    for standing in (0, 1):
        counts = [0, 0]
        loops = [partial(counts.__getitem__, loop) for loop in (0, 1)]
        heartbeat = Heartbeat(*loops, bound_s=0.4, longest_s=60.0)
        heartbeat.start()
        end_s = time.monotonic() + 60.0
        while time.monotonic() < end_s and not heartbeat.stands_s:
            counts[1 - standing] += 1
            time.sleep(0.02)
        heartbeat.close()
        assert heartbeat.stands_s > 0.4, standing


def test_own_time_leaves_out_what_the_process_stood_still_and_never_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    own_time = OwnTime()
    assert own_time() == 100.0
    own_time.sample()
    now_s[0] += 0.4
    assert own_time() == 100.4
    now_s[0] += 35.0
    stood = own_time()
    assert stood == 100.5, "whoever wakes first already knows"
    own_time.sample()
    assert own_time() == stood
    now_s[0] += 0.25
    assert own_time() == stood + 0.25
