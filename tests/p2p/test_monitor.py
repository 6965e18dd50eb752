"""The window monitor: its definition against a slow reference, what it must not call slow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.monitor import new_monitor
from p2p import native
from p2p.monitor import ChannelState, Monitor, MonitorState

W = 8
MS = 1_000_000
KB = 1024
MBIT_S = 125_000  # bytes per second


class Fed:
    """A native monitor with a feeder's calls."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor, self.library = monitor, native.load()

    def posted(self, now_ns: int, size: int) -> None:
        self.library.p2p_monitor_posted(self.monitor.address, now_ns, size)

    def completed(self, now_ns: int, size: int) -> None:
        self.library.p2p_monitor_completed(self.monitor.address, now_ns, size)

    def read(self) -> MonitorState:
        return self.monitor.read()


@pytest.fixture
def fed() -> Iterator[Fed]:
    with new_monitor() as monitor:
        yield Fed(monitor)


class Reference:
    """The definition of native/monitor.h, computed anew from whole lists, in exact fractions."""

    def __init__(self) -> None:
        self.outstanding, self.mark_ns = 0, 0
        self.window: list[tuple[int, int, int]] = []  # bytes, busy ns, outstanding before
        self.open: list[tuple[int, int, int]] = []
        self.buckets: list[list[tuple[int, int, int]]] = []
        self.evidence: list[tuple[int, int, int]] = []
        self.slow, self.anomalies = False, 0

    def posted(self, now_ns: int, size: int) -> None:
        if self.outstanding == 0:
            self.mark_ns = now_ns
        self.outstanding += size

    def completed(self, now_ns: int, size: int) -> None:
        before, self.outstanding = self.outstanding, self.outstanding - size
        self.window.append((size, now_ns - self.mark_ns, before))
        if len(self.window) > W:
            left = self.window.pop(0)
            self.open += [] if self.slow else [left]
        self.judge()
        self.mark_ns = now_ns

    def usual(self) -> list[tuple[int, int, int]]:
        return [write for bucket in self.buckets for write in bucket]

    def low(self, writes: list[tuple[int, int, int]], most: int) -> bool:
        usual = self.usual()
        usual_ns = sum(w[1] for w in usual)
        took_ns, bandwidth = self.rate(writes)
        _, mean = self.rate(usual)
        longer = most / bandwidth > 2 * max(w[2] for w in usual) / mean if bandwidth else most > 0
        return bandwidth < mean / 2 and longer and took_ns > Fraction(usual_ns * len(writes), 2 * len(usual))

    def good(self, writes: list[tuple[int, int, int]]) -> bool:
        bandwidth, mean, usual = self.rate(writes)[1], self.rate(self.usual())[1], self.usual()
        most = max(w[2] for w in writes)
        return bandwidth >= mean * Fraction(3, 4) or most / bandwidth <= max(w[2] for w in usual) / mean

    @staticmethod
    def rate(writes: list[tuple[int, int, int]]) -> tuple[int, Fraction]:
        took_ns = sum(w[1] for w in writes)
        return took_ns, Fraction(sum(w[0] for w in writes), took_ns)

    def judge(self) -> None:
        known = sum(w[1] for w in self.usual()) >= 50 * MS
        if self.evidence:
            self.evidence.append(self.window[-1])
        elif len(self.window) == W and known and sum(w[1] for w in self.window):
            most = max(w[2] for w in self.window)
            raised = self.good(self.window) if self.slow else self.low(self.window, most)
            self.evidence = list(self.window) if raised else []
        if self.evidence:
            self.weigh()
        if not self.evidence and sum(w[1] for w in self.open) >= Fraction(50 * MS, 16):
            self.buckets.append(self.open)
            self.open = []
            while sum(w[1] for bucket in self.buckets[1:] for w in bucket) >= 50 * MS:
                self.buckets.pop(0)

    def weigh(self) -> None:
        took_ns = sum(w[1] for w in self.evidence)
        if self.slow:
            if len(self.evidence) >= 2 * W and took_ns >= 50 * MS:
                self.slow = not self.good(self.evidence)
                self.evidence = []
            return
        rest, most = list(self.evidence), max(w[2] for w in self.evidence)
        longest = max(rest, key=lambda w: w[1])
        rest.remove(longest)
        rest_ns = took_ns - longest[1]
        enough = len(self.evidence) >= 2 * W and rest_ns >= 10 * MS and rest_ns >= 2 * longest[1]
        if enough and self.low(rest, most):
            self.slow, self.anomalies, self.open, self.evidence = True, self.anomalies + 1, [], []
        elif (enough and self.rate(rest)[1] >= self.rate(self.usual())[1] * Fraction(3, 4)) or (
            len(self.evidence) >= 8 * W and took_ns >= 50 * MS
        ):
            self.evidence = []


# Phases of a channel's life: (writes, nanoseconds for each, bytes of each, how many in flight, ns of a pause after)
PHASES = st.lists(
    st.tuples(
        st.integers(1, 60),
        st.sampled_from([0, 1, 900, 60_000, 300_000, 1_000_000, 2_500_000, 7_000_000, 90_000_000]),
        st.sampled_from([1, 4 * KB, 60_000, 256 * KB]),
        st.integers(1, 12),
        st.sampled_from([0, 0, 5_000, 80 * MS]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(phases=PHASES, seed=st.integers(0, 2**32))
def test_the_native_monitor_says_what_its_definition_says(phases: list, seed: int) -> None:
    rng = random.Random(seed)
    flying: list[int] = []  # bytes
    now_ns, reference = 10**9, Reference()
    with new_monitor() as monitor:
        fed = Fed(monitor)
        for writes, each_ns, size, depth, pause_ns in phases:
            for _ in range(writes):
                while len(flying) < depth:
                    flying.append(rng.randint(1, 2 * size))
                    fed.posted(now_ns, flying[-1])
                    reference.posted(now_ns, flying[-1])
                now_ns += rng.randint(0, 2 * each_ns)
                bytes_ = flying.pop(rng.randrange(len(flying)))
                fed.completed(now_ns, bytes_)
                reference.completed(now_ns, bytes_)
                found = fed.read()
                assert (found.state == ChannelState.SLOW, found.anomalies, found.outstanding) == (
                    reference.slow,
                    reference.anomalies,
                    reference.outstanding,
                ), f"seed {seed}"
            now_ns += pause_ns
        usual = reference.usual()
        if sum(w[1] for w in usual) >= 50 * MS:
            mean = sum(w[0] for w in usual) * 1e9 / sum(w[1] for w in usual)
            assert abs(fed.read().mean_bandwidth - mean) <= 1
            assert fed.read().most_outstanding == max(w[2] for w in usual)


Rate = Callable[[float], float]


class Link:
    """A first-in first-out link whose bytes per second depend on the second, and a sender."""

    def __init__(self, fed: Fed, rate: Rate, seed: int = 0, latency_ns: int = 50_000) -> None:
        self.fed, self.rate, self.rng, self.latency_ns = fed, rate, random.Random(seed), latency_ns
        self.now_ns, self.free_ns, self.outstanding = 0, 0, 0
        self.flying: list[tuple[int, int]] = []
        self.writes = 0
        self.turns: list[tuple[int, ChannelState, int]] = []  # when, to what, after how many writes

    def post(self, size: int) -> None:
        self.fed.posted(self.now_ns, size)
        begin_ns = max(self.now_ns, self.free_ns)
        self.free_ns = begin_ns + int(size / self.rate(begin_ns / 1e9) * 1e9 * self.rng.uniform(1, 1.1))
        self.flying.append((self.free_ns + self.latency_ns, size))
        self.outstanding += size

    def complete(self) -> None:
        done_ns, size = self.flying.pop(0)
        self.now_ns = max(self.now_ns, done_ns)
        self.outstanding -= size
        self.writes += 1
        self.fed.completed(self.now_ns, size)
        state = self.fed.read().state
        if state != (self.turns[-1][1] if self.turns else ChannelState.OK):
            self.turns.append((self.now_ns, state, self.writes))

    def saturate(self, until_s: float, size: Callable[[], int], cap: int) -> None:
        while self.now_ns < until_s * 1e9:
            wanted = size()
            while self.flying and self.outstanding + wanted > cap:
                self.complete()
            self.post(wanted)

    def pace(self, until_s: float, size: int, every_ns: int, cap: int) -> None:
        next_ns = self.now_ns
        while self.now_ns < until_s * 1e9:
            while self.flying and (self.flying[0][0] <= next_ns or self.outstanding + size > cap):
                self.complete()
            self.now_ns = max(self.now_ns, next_ns)
            self.post(size)
            next_ns += every_ns


def step(before: float, after: float, at_s: float) -> Rate:
    """Mbit/s that change once."""
    return lambda second: (before if second < at_s else after) * MBIT_S


@pytest.mark.parametrize("cap", [1, 256 * KB, 1024 * KB], ids=["one at a time", "256 KB", "1 MB"])
@pytest.mark.parametrize("size", [4 * KB, 64 * KB, 256 * KB, 0], ids=["4 KB", "64 KB", "256 KB", "mixed"])
def test_a_step_from_200_to_80_mbit_is_flagged_within_some_writes_and_recovery_seen(
    fed: Fed, size: int, cap: int
) -> None:
    back_s = 3.0
    link = Link(fed, lambda s: (80 if 1 <= s < back_s else 200) * MBIT_S, seed=size + cap)
    link.saturate(4.0, lambda: size or link.rng.randint(4 * KB, 256 * KB), cap)
    assert [state for _, state, _ in link.turns] == [ChannelState.SLOW, ChannelState.OK], f"seed {size + cap}"
    (slow_ns, _, _), (ok_ns, _, _) = link.turns
    mean_size = size or 130 * KB
    # What was in the link; then two windows, more of mixed sizes, and at least 10 ms, or 50.
    room_ns = (30 * mean_size + cap) / (80 * MBIT_S) * 1e9 + 60 * MS
    assert 0 < slow_ns - 10**9 <= room_ns and 0 < ok_ns - back_s * 1e9 <= room_ns
    assert fed.read().anomalies == 1


@pytest.mark.parametrize("offered", [50, 100, 150])
def test_a_paced_sender_s_slow_link_is_flagged(fed: Fed, offered: int) -> None:
    link = Link(fed, step(200, 80, at_s=1.0))
    link.pace(3.0, 64 * KB, every_ns=int(64 * KB / (offered * MBIT_S) * 1e9), cap=512 * KB)
    assert [state for _, state, _ in link.turns] == [ChannelState.SLOW]
    assert link.turns[0][0] < 1.25e9


def test_a_slow_link_does_not_become_the_usual_one(fed: Fed) -> None:
    link = Link(fed, step(200, 80, at_s=1.0))
    link.saturate(20.0, lambda: 64 * KB, cap=256 * KB)
    assert [state for _, state, _ in link.turns] == [ChannelState.SLOW]
    assert fed.read().mean_bandwidth > 180 * MBIT_S


def test_recovery_is_at_three_quarters(fed: Fed) -> None:
    rates = [(1, 200), (2, 80), (3, 120), (4, 165)]
    link = Link(fed, lambda s: next((rate for end, rate in rates if s < end), 165) * MBIT_S)
    link.saturate(4.0, lambda: 64 * KB, cap=256 * KB)
    assert [(int(at / 1e9), state) for at, state, _ in link.turns] == [
        (1, ChannelState.SLOW),
        (3, ChannelState.OK),
    ]


def test_no_anomaly_without_cause(fed: Fed) -> None:
    """Pauses, bursts, one stall, smaller writes and a shallower queue are all the same link."""
    link = Link(fed, step(200, 200, 0))
    for second in range(1, 30):
        kind = second % 5
        if kind == 0:
            link.now_ns += link.rng.randint(1, 10**9)
        elif kind == 1:
            link.free_ns = link.now_ns + 700 * MS
        elif kind == 2:
            for _ in range(300):
                link.post(4 * KB)
        most = {0: 128 * KB, 1: 8 * KB, 2: 128 * KB, 3: 2 * KB, 4: 512 * KB}[kind]
        cap = {0: 256 * KB, 1: 256 * KB, 2: 1, 3: 1, 4: 1024 * KB}[kind]
        link.saturate(link.now_ns / 1e9 + 0.3, lambda most=most: link.rng.randint(1, most), cap)
        while link.flying:
            link.complete()
    assert link.turns == []


def test_a_fresh_channel_has_no_anomaly_and_no_mean(fed: Fed) -> None:
    link = Link(fed, step(200, 8, at_s=0.015))
    link.saturate(0.015, lambda: 64 * KB, cap=256 * KB)
    assert link.writes < W and fed.read().bandwidth == 0
    link.saturate(0.05, lambda: 64 * KB, cap=256 * KB)
    assert fed.read().mean_bandwidth == 0 and fed.read().anomalies == 0


def test_a_null_monitor_is_one_that_is_off() -> None:
    off = Fed(Monitor(0))
    off.posted(1, 1)
    off.completed(2, 1)
    assert off.read().writes == 0
    off.library.p2p_monitor_free(None)
