"""What an expert server reports of its load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import experts.__main__ as process
from benchmarks.make_model import make_model
from experts.__main__ import Load
from experts.backend import ServerCounters
from experts.config import CHECKPOINT, ExpertOptions
from experts.cpu import CpuBackend
from experts.devices import Device
from experts.model import Dtype, ExpertShape
from experts.wire import WireShape
from router.client import JoinRefused
from router.events import Totals
from tests.experts.steps import shape_of

ACTIVATION_ROWS = 5  # experts/native/server.cpp


class Counted:
    """A server of two lanes whose counters a test sets."""

    cores = (0, 1)
    clients = ("attention/1",)

    def __init__(self, shape: ExpertShape | None = None) -> None:
        self.first, self.shape, self.dtype = self, shape or shape_of(), Dtype.FLOAT32
        self.found = {"rows": 0, "pairs": 0, "experts": 0, "busy_ns": 0, "work": 0}

    def counters(self) -> ServerCounters:
        return ServerCounters(**self.found)

    def work(self, *, rows: int, experts: int, busy_s: float) -> None:
        for name, more in (("rows", rows), ("pairs", 2 * rows), ("experts", experts)):
            self.found[name] += more
        self.found["busy_ns"] += int(busy_s * 1e9)
        self.found["work"] += (2 * rows + ACTIVATION_ROWS * experts) * self.shape.hidden * self.shape.intermediate // 64


class Told:
    """A router that hears totals."""

    def __init__(self) -> None:
        self.totals: list[Totals] = []

    def counted(self, totals: list[Totals]) -> None:
        self.totals += totals


class Compiling:
    """A server whose passes begin when it has been looked at three times; or which breaks then."""

    def __init__(self, why: str = "") -> None:
        self.looks, self.why, self.broken = 0, why, ""

    def turns(self) -> int | None:
        self.looks += 1
        self.broken = self.why if self.looks > 3 else ""
        return 7 if self.looks > 3 and not self.why else None


def test_a_server_is_ready_when_its_passes_run_and_not_before() -> None:
    server = Compiling()
    assert process._first_pass(server, process.Ending())  # type: ignore[arg-type]
    assert server.looks == 4
    with pytest.raises(process.StartFailed, match="the device is gone"):
        process._first_pass(Compiling("the device is gone"), process.Ending())  # type: ignore[arg-type]
    told, server = process.Ending(), Compiling()
    told.wanted.set()
    assert not process._first_pass(server, told)  # type: ignore[arg-type]
    assert server.looks == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(process.time, "monotonic", lambda: now_s[0])
    return now_s


def test_the_load_is_that_of_the_time_since_the_last_report(clock: list[float]) -> None:
    server = Counted()
    load = Load(server, Told())  # type: ignore[arg-type]
    clock[0] += 2
    assert load() == {"busy": 0, "rows_per_s": 0, "pairs_per_s": 0, "clients": 1}
    server.work(rows=100, experts=20, busy_s=0.5)
    clock[0] += 2
    found = load()
    assert (found["busy"], found["rows_per_s"], found["pairs_per_s"]) == (0.25, 50, 100)
    server.work(rows=1, experts=1, busy_s=3)
    clock[0] += 1
    assert load()["busy"] == 1, "a batch that began before the last report"


def test_speed_does_not_depend_on_how_rows_are_batched_and_follows_the_last_seconds(
    clock: list[float],
) -> None:
    """Pairs and weights read cost alike whether few rows activate many experts or many rows few."""
    server = Counted()
    load = Load(server, Told())  # type: ignore[arg-type]

    def report(rows: int, experts: int, cost_s: float) -> float:
        cost = 2 * rows + ACTIVATION_ROWS * experts
        server.work(rows=rows, experts=experts, busy_s=cost * cost_s)
        clock[0] += 0.5
        return load()["speed"]

    assert report(1000, 10, 1e-4) == pytest.approx(1e4 / 2, rel=1e-3)
    assert report(10, 100, 1e-4) == pytest.approx(1e4 / 2, rel=1e-3)
    clock[0] += 3600
    assert load()["speed"] == pytest.approx(1e4 / 2, rel=1e-3), "an idle hour forgets no speed"
    for _ in range(40):
        slow = report(1000, 10, 2e-4)
    assert slow == pytest.approx(0.5e4 / 2, rel=1e-2)


def test_the_router_hears_once_a_second_what_was_counted_since_the_process_began(clock: list[float]) -> None:
    server, told = Counted(), Told()
    load = Load(server, told)  # type: ignore[arg-type]
    for _ in range(8):
        server.work(rows=10, experts=3, busy_s=0.125)
        clock[0] += 0.25
        load()
    assert [totals.counted["rows"] for totals in told.totals] == [40, 80]
    assert [totals.counted["busy_s"] for totals in told.totals] == [0.5, 1.0]


def test_a_server_joins_with_as_many_experts_as_its_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[WireShape] = []
    joined: list[dict[str, Any]] = []

    class Small(CpuBackend):
        def reserve(self, wire: WireShape) -> int:
            reserved.append(wire)
            return 5

    class Router:
        def __init__(self, *of: object) -> None:
            """None is asked."""

        def join(self, **said: Any) -> None:
            joined.append(said)
            raise JoinRefused("enough was said")

        def close(self) -> None:
            """Nothing is open."""

    monkeypatch.setattr(Device, "backend", lambda device: Small())
    monkeypatch.setattr(process, "RouterClient", Router)
    model = make_model("tiny", "qwen3_moe", tmp_path / "model", seed=3, dtype="bfloat16")
    options = ExpertOptions(router="127.0.0.1:1", model=model, weights=CHECKPOINT)
    with pytest.raises(JoinRefused):
        process.serve(options, process.Ending())
    (said,), (wire,) = joined, reserved
    assert said["capacity"] == 5
    assert (said["layers"], said["experts"]) == (wire.shape.layers, wire.shape.experts)
