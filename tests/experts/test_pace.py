"""Idle, slow link and slow expert are told apart: over synthetic series, and with a real server that is held up."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from experts.model import Dtype
from experts.pace import Observation, Pace, Track, load_entries, observe, observe_all
from tests.experts.exchange import exchange
from tests.experts.steps import to_bits
from tests.experts.test_processes import Cluster, settle

US = 1000


class Server:
    """A server's totals, one interval after another."""

    def __init__(self, seed: int = 0) -> None:
        self.totals, self.track, self.rng = Observation(), Track(), random.Random(seed)

    def interval(
        self,
        replies: int = 200,
        service_us: float = 300,
        away_us: float = 40,
        in_flight: int = 8,
        link_slow: bool = False,
        late: int = 0,
        unanswered: int = 0,
    ) -> Pace:
        found = self.totals
        service_ns = int(replies * service_us * US * self.rng.uniform(0.7, 1.4))
        self.totals = Observation(
            calls=found.calls + replies + unanswered,
            replies=found.replies + replies,
            in_flight=found.in_flight + replies * in_flight,
            service_ns=found.service_ns + service_ns,
            latency_ns=found.latency_ns + service_ns + int(replies * away_us * US * self.rng.uniform(0.7, 1.4)),
            late=late,
            link_slow=link_slow,
        )
        self.track = observe(self.track, self.totals)
        return self.track.pace

    def intervals(self, count: int, **fields: object) -> list[Pace]:
        return [self.interval(**fields) for _ in range(count)]  # type: ignore[arg-type]


@pytest.fixture
def server() -> Server:
    found = Server()
    assert found.intervals(20) == [Pace.OK] * 20
    return found


def test_a_server_that_is_never_called_is_idle() -> None:
    assert Server().intervals(3, replies=0) == [Pace.IDLE] * 3


def test_a_slow_expert_is_seen_after_three_intervals_and_cleared_after_three(server: Server) -> None:
    assert server.intervals(6, service_us=1500) == [Pace.OK] * 2 + [Pace.SLOW_EXPERT] * 4
    assert server.intervals(5) == [Pace.SLOW_EXPERT] * 2 + [Pace.OK] * 3


def test_a_slow_link_is_seen_by_the_time_away(server: Server) -> None:
    assert server.intervals(4, away_us=900)[-1] is Pace.SLOW_LINK


def test_a_monitor_accuses_the_link_and_never_acquits_it(server: Server) -> None:
    assert server.intervals(4, link_slow=True)[-1] is Pace.SLOW_LINK
    assert server.intervals(4)[-1] is Pace.OK
    # It watches requests: replies that come back slowly are the link's as well, whatever it says.
    assert server.intervals(4, away_us=900)[-1] is Pace.SLOW_LINK
    assert server.intervals(4)[-1] is Pace.OK
    # Only what the server itself measured makes it slow.
    assert server.intervals(4, service_us=1500, away_us=900)[-1] is Pace.SLOW_EXPERT


def test_slowness_does_not_become_usual(server: Server) -> None:
    assert server.intervals(500, service_us=1500)[-1] is Pace.SLOW_EXPERT
    # Between 4/3 and 2 times the usual it stays what it was, either way.
    assert server.intervals(20, service_us=600)[-1] is Pace.SLOW_EXPERT
    assert server.intervals(4)[-1] is Pace.OK
    assert server.intervals(20, service_us=360)[-1] is Pace.OK


def test_one_freeze_makes_nobody_slow(server: Server) -> None:
    for _ in range(10):
        assert server.interval(service_us=3000) is Pace.OK
        assert server.intervals(2) == [Pace.OK] * 2


def test_more_rows_are_no_slowness_and_fewer_no_speed(server: Server) -> None:
    assert set(server.intervals(20, service_us=9600, away_us=1280, in_flight=256)) == {Pace.OK}
    assert set(server.intervals(20)) == {Pace.OK}


def test_idle_hides_a_verdict_and_does_not_change_it(server: Server) -> None:
    server.intervals(4, service_us=1500)
    assert server.intervals(10, replies=0) == [Pace.IDLE] * 10
    assert server.interval(service_us=1500) is Pace.SLOW_EXPERT


def test_a_server_that_owes_a_reply_is_not_idle(server: Server) -> None:
    server.interval(replies=0, unanswered=1)
    assert server.interval(replies=0, late=1) is Pace.OK


def test_few_replies_are_added_up(server: Server) -> None:
    assert server.intervals(20, replies=3, service_us=1500)[-1] is Pace.SLOW_EXPERT


def test_a_server_attached_anew_begins_a_new_history(server: Server) -> None:
    server.totals = Observation()
    assert server.intervals(8, service_us=1500) == [Pace.OK] * 8


def test_the_load_report_names_who_gives_corrupt_replies_while_it_is_quarantined() -> None:
    track = observe(Track(), Observation(calls=9, corrupt=4, quarantined=True))
    assert load_entries({"expert/3": track})["corrupt:expert/3"] == 4.0
    track = observe(track, Observation(calls=9, corrupt=4))
    assert not any("corrupt" in word for word in load_entries({"expert/3": track}))


def test_the_load_report_counts_paces_and_names_the_slow(server: Server) -> None:
    server.intervals(4, service_us=1500)
    tracks = {"expert/1": server.track, "expert/2": Track(), "expert/3": Track(idle=False)}
    assert load_entries(tracks) == {
        "servers_idle": 1.0,
        "servers_ok": 1.0,
        "servers_slow_expert": 1.0,
        "slow_expert:expert/1": 1.0,
    }
    assert load_entries({}) == {}
    assert observe_all(tracks, {"expert/4": Observation()}).keys() == {"expert/4"}


class Pulses:
    """Holds a process up: stopped for 15 ms, then free for 3, and so on."""

    def __init__(self, pid: int) -> None:
        self.pid, self.ended = pid, threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self.ended.wait(0.003):
            os.kill(self.pid, signal.SIGSTOP)
            time.sleep(0.015)
            os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Pulses:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    running = Cluster(Dtype.BFLOAT16)
    yield running
    running.close()


def test_a_real_server_that_is_held_up_is_named_and_the_other_is_not(cluster: Cluster) -> None:
    servers = cluster.start(2, 1)
    client = cluster.client()
    settle(client, cluster.view())
    rng = np.random.default_rng(4)
    rows = to_bits(rng.standard_normal((40, cluster.shape.hidden)).astype(np.float32), cluster.dtype)
    experts = range(cluster.shape.experts)
    ids = np.array([rng.permutation(experts)[: cluster.shape.top_k] for _ in rows], np.uint16)
    weights = np.ones((40, cluster.shape.top_k), np.float32)
    tracks: dict[str, Track] = {}

    def intervals(count: int) -> list[tuple[Pace, ...]]:
        nonlocal tracks
        seen = []
        for _ in range(count):
            for _ in range(100):
                exchange(client, 0, rows, ids, weights)
            tracks = observe_all(tracks, client.observations())
            seen.append(tuple(track.pace for track in tracks.values()))
        return seen

    slow = (Pace.SLOW_EXPERT, Pace.SLOW_LINK)  # stopped while it computes, or before it takes rows up
    # A busy machine may hold up the other for a while as well, and for all of one round.
    for _ in range(3):
        intervals(8)
        with Pulses(servers[0].process.pid):
            seen = intervals(12)
        held_up, other = (sum(pace in slow for pace in paces) for paces in zip(*seen, strict=True))
        if held_up >= 3 and held_up >= 3 * other:
            break
    assert held_up >= 3 and held_up >= 3 * other, seen
    end_s = time.monotonic() + 60
    while tracks["expert/1"].pace is not Pace.OK and time.monotonic() < end_s:
        seen += intervals(1)
    assert tracks["expert/1"].pace is Pace.OK, seen
    idle = observe_all(tracks, client.observations())
    assert {track.pace for track in idle.values()} == {Pace.IDLE}
