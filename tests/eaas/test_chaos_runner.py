"""Plans carried out on a cluster that only writes down what is done to it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from eaas.ops.chaos import runner
from eaas.ops.chaos.inject import ChaosRefused
from eaas.ops.chaos.plan import FaultEvent, parse_plan
from router.faults import Fault

# They take a Record for a way to a cluster.
rehearse: Any = runner.rehearse
run_plan: Any = runner.run_plan

PLAN = """
seed = 3
[[fault]]
at = "0s"
kind = "slow"
target = "expert/1"
times = 5
for = "0.2s"
[[fault]]
at = "0.1s"
kind = "kill"
pool = "expert"
[[fault]]
at = "0.15s"
kind = "freeze"
target = "expert/7"
[[fault]]
at = "0.15s"
kind = "loss"
target = "expert/2"
for = "60s"
"""


class Record:
    """Every call that an Injector gets."""

    def __init__(self, over: set[str] | None = None) -> None:
        self.done: list[tuple[str, ...]] = []
        self.refuses_end = False
        self._over = over or set()

    def members(self) -> list[dict[str, Any]]:
        return [{"name": f"expert/{n}", "pool": "expert", "state": "serving", "pid": n} for n in (1, 2, 3)]

    def inject(self, names: Sequence[str], fault: Fault) -> tuple[str, str]:
        self.done.append(("inject", fault.kind, *names))
        return f"id-{fault.kind}", f"{fault.kind} {names}"

    def over(self) -> set[str]:
        return self._over

    def end(self, id: str, early: bool) -> str:
        self.done.append(("end", id, "early" if early else "in time"))
        if self.refuses_end:
            raise ChaosRefused("the router is away")
        return "over"

    def clear(self, id: str) -> list[str]:
        return []

    def faults(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        self.done.append(("close",))


def killed(record: Record) -> str:
    return next(call[2] for call in record.done if call[:2] == ("inject", "kill"))


def test_faults_begin_and_end_in_the_order_of_their_times_and_a_stop_ends_the_rest() -> None:
    record, stop, told = Record(), threading.Event(), []

    def on_event(event: FaultEvent) -> None:
        told.append(event)
        if event.phase == "ended":
            stop.set()

    events = run_plan(parse_plan(PLAN), record, on_event=on_event, stop=stop)
    assert events == told
    assert [(event.phase, event.kind) for event in events] == [
        ("began", "slow"),
        ("began", "kill"),
        ("refused", "freeze"),
        ("began", "loss"),
        ("ended", "slow"),
        ("ended", "loss"),
    ]
    assert record.done == [
        ("inject", "slow", "expert/1"),
        ("inject", "kill", killed(record)),
        ("inject", "loss", "expert/2"),
        ("end", "id-slow", "in time"),
        ("end", "id-loss", "early"),
    ]
    assert "No member 'expert/7'" in events[2].text
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    for event, least_s in zip(events, (0.0, 0.1, 0.15, 0.15, 0.2, 0.2), strict=True):
        assert event.at_s >= least_s, event


def test_a_stop_while_a_plan_is_late_is_the_end_of_it() -> None:
    class Late(Record):
        def inject(self, names: Sequence[str], fault: Fault) -> tuple[str, str]:
            stop.set()
            return super().inject(names, fault)

    table = '[[fault]]\nat = "0s"\nkind = "{}"\ntarget = "expert/1"\n'
    record, stop = Late(), threading.Event()
    events = run_plan(parse_plan(table.format("slow") + 20 * table.format("kill")), record, stop=stop)
    assert [(event.phase, event.kind) for event in events] == [("began", "slow"), ("ended", "slow")]
    assert record.done == [("inject", "slow", "expert/1"), ("end", "id-slow", "early")]


def test_what_fails_in_the_telling_ends_every_fault() -> None:
    record = Record()
    record.refuses_end = True

    def on_event(event: FaultEvent) -> None:
        if event.kind == "loss":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_plan(parse_plan(PLAN), record, on_event=on_event)
    assert {call[1] for call in record.done if call[0] == "end"} == {"id-slow", "id-loss"}


def test_an_end_that_is_refused_says_so() -> None:
    record, stop = Record(), threading.Event()
    record.refuses_end = True
    events = run_plan(parse_plan(PLAN), record, on_event=lambda event: event.kind == "loss" and stop.set(), stop=stop)
    assert events[-1].phase == "ended"
    assert "cannot be cleared, and ends by itself: the router is away" in events[-1].text


def test_a_fault_that_someone_else_ended_is_over_before_its_time() -> None:
    record = Record(over={"id-loss"})
    events = run_plan(parse_plan(PLAN), record)
    assert events[-1].kind == "loss" and events[-1].phase == "ended"
    assert events[-1].at_s < 30, "it lasts 60 s unless seen to be over"


def test_a_kill_at_a_point_says_that_it_waits_and_is_cleared_when_its_limit_is_over() -> None:
    record = Record()
    plan = '[[fault]]\nat = "0s"\nkind = "kill"\ntarget = "expert/1"\nwhere = "computed"\nwithin = "0.2s"'
    events = run_plan(parse_plan(plan), record)
    assert [event.phase for event in events] == ["began", "ended"] and 0.2 <= events[1].at_s < 20
    assert events[0].text.endswith("waits for that point, at most 0.2 s")
    assert record.done == [("inject", "kill", "expert/1"), ("end", "id-kill", "early")]


def test_a_rehearsal_names_those_whom_the_seed_chooses_and_touches_nobody() -> None:
    record = Record()
    steps = rehearse(parse_plan(PLAN), record)
    assert record.done == []
    assert [step["at_s"] for step in steps] == [0.0, 0.1, 0.15, 0.15]
    assert steps[0]["targets"] == ["expert/1"] and steps[0]["text"] == "slow expert/1 times 5 for 0.2 s"
    assert steps[2]["targets"] == [] and "No member 'expert/7'" in steps[2]["text"]
    stop = threading.Event()
    run_plan(parse_plan(PLAN), record, on_event=lambda event: event.kind == "loss" and stop.set(), stop=stop)
    assert steps[1]["targets"] == [killed(record)], "what the rehearsal said is what the run does"
