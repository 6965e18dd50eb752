"""What is run to prove something fails when it finds the contrary, and when it finds nothing at all."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import attention_loss, failover, lane_share, leaks, soak
from benchmarks.fault_experiment import Counts
from router.client import FaultRefused
from router.faults import Fault

ZEROS = {"failed": 0, "lost": 0, "repeated": 0, "changed": 0}


def code_of(main: Callable[[list[str]], None], *words: str) -> int:
    try:
        main(list(words))
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


@pytest.mark.parametrize(("found", "code"), [({}, 0), ({"failed": 1}, 1), ({"changed": 2}, 1), ({"requests": 0}, 1)])
def test_failover_ends_with_1_when_clients_saw_something_or_nobody_asked(
    found: dict[str, int], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = {"count": 1, "p50": 9.0, "p99": 9.0, "max": 999.0}
    result = {"stream_s": spread, "worst_stall_ms": spread, "requests": 5, **ZEROS, **found}
    monkeypatch.setattr(failover, "fault_experiment", lambda chosen: contextlib.nullcontext())
    monkeypatch.setattr(failover, "stalls", lambda experiment, chosen: result)
    assert code_of(failover.main, "--what", "stalls", "--results", str(tmp_path)) == code
    assert "worst_stall_ms max: 999" in (tmp_path / "failover.jsonl").read_text()


@pytest.mark.parametrize(("found", "code"), [({}, 0), ({"lost": 1}, 1)])
def test_attention_loss_ends_with_1_when_a_stream_was_harmed(
    found: dict[str, Any],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Experiment(attention_loss.Experiment):
        def __init__(self, *_: object, **__: object) -> None:
            self.counts = attention_loss.Counts(**found)
            self.pauses_s = {"kill": [0.2, 1.2]}

    monkeypatch.setattr(attention_loss, "LocalCluster", contextlib.nullcontext)
    monkeypatch.setattr(attention_loss, "Experiment", Experiment)
    words = ("--kills", "0", "--freezes", "0", "--results", str(tmp_path))
    assert code_of(attention_loss.main, *words) == code
    assert "after a kill: 1.2 s, at most 1 s is promised" in capsys.readouterr().out


def test_a_pause_before_the_first_event_counts() -> None:
    held_up = attention_loss.Stream(kind="greedy", sent_s=10.0, arrivals_s=[12.5, 12.6])
    assert held_up.pause_s(10.1) == pytest.approx(2.5)
    assert held_up.pause_s(12.55) == pytest.approx(0.1)
    assert held_up.pause_s(13.0) == 0.0


@pytest.mark.parametrize(
    ("end", "after", "code"),
    [
        ("done", {}, 0),
        ("cancelled", {}, 1),
        ("plain: it ended", {}, 1),
        ("done", {"kv_use": 0.1}, 1),
        ("done", {"fds": 23.0}, 1),
        ("done", {"rss_mib": 165.0}, 1),
    ],
)
def test_leaks_ends_with_1_when_something_stays_behind_or_no_stream_was_served(
    end: str, after: dict[str, float], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"fds": 20.0, "threads": 5.0, "rss_mib": 100.0, "kv_use": 0.0}
    readings = [{"attention/1": before}, {"attention/1": before | after}]
    cluster = contextlib.nullcontext(SimpleNamespace(url="http://127.0.0.1:1"))
    monkeypatch.setattr(leaks, "LocalCluster", lambda config: cluster)
    monkeypatch.setattr(leaks, "reading", lambda cluster: readings.pop(0))
    monkeypatch.setattr(leaks, "wave", lambda url, **_: time.sleep(0.001) or Counter({end: 3}))
    assert code_of(leaks.main, "--minutes", "0.0001", "--results", str(tmp_path)) == code


def test_a_soak_in_which_every_fault_is_refused_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class FaultExperiment:
        def __init__(self) -> None:
            self.streams, self.cluster, self.router = self, self, self
            self.ended: list[Any] = []

        @contextlib.contextmanager
        def running(self) -> Iterator[None]:
            yield

        def pids(self) -> dict[str, int]:
            return {}

        def inject(self, *_: object) -> None:
            raise FaultRefused("not allowed")

        def clear(self) -> None: ...

        def serving(self) -> list[str]:
            return ["expert/1"]

        def compare(self, records: object) -> Counts:
            return Counts()

        def wait(self, *_: object) -> float:
            return 0.0

        def is_whole(self) -> bool:
            return True

    monkeypatch.setattr(soak, "is_ready", lambda experiment: True)
    steps = [soak.Step(at_s=0.0, pool="expert", fault=Fault(id="a", kind="kill"), dice=0.0)]
    found = soak.soak(FaultExperiment(), steps, 0.0)  # pyright: ignore[reportArgumentType]
    assert found["amiss"] == [
        "no fault was injected",
        "1 faults were refused and 0 injected",
        "no stream ended",
    ]
    assert soak.unproven(Counter({"done": 3, "FaultRefused": 2, "too little is left": 9}), 5) == []


def test_a_server_that_was_not_held_to_its_share_ends_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = [SimpleNamespace(pid=1)]

    def hold(self: lane_share.LaneShare, pid: int) -> None:
        if pid == 2:
            raise lane_share.LaneShareUnavailable("no quota for 2")

    monkeypatch.setattr(lane_share.LaneShare, "_hold", hold)
    view: Any = SimpleNamespace(pool=lambda name: members)
    unavailable = pytest.raises(lane_share.LaneShareUnavailable, match="no quota for 2")
    with unavailable, lane_share.LaneShare(lambda: view, 0.5) as share:
        members.append(SimpleNamespace(pid=2))
        share._thread.join(60)
