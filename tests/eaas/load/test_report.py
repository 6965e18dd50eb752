"""Every figure of a report is the one that follows from the records; the tables show it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from eaas.ops.chaos.plan import FaultEvent
from eaas.ops.load.record import StreamRecord
from eaas.ops.load.report import (
    Run,
    Slo,
    as_report,
    is_clean,
    spans_of,
    summarize,
    throughput,
)
from eaas.ops.load.show import less, tables


def record(
    planned_s: float,
    *,
    late_s: float = 0.0,
    first_s: float = 0.1,
    gap_s: float = 0.05,
    n: int = 5,
    **fields: Any,
) -> StreamRecord:
    """Sent late by `late_s`, first piece after `first_s`, then one each `gap_s`."""
    sent_s = planned_s + late_s
    times = [sent_s + first_s + gap_s * k for k in range(n)]
    said: dict[str, Any] = {
        "prompt": 0,
        "status": 200,
        "finish": "length",
        "tokens": n,
        "ended_s": times[-1] + 0.01,
    } | fields
    return StreamRecord(planned_s=planned_s, sent_s=sent_s, token_s=times, pieces=["x"] * n, prompt_tokens=3, **said)


def shown(report: dict[str, Any]) -> str:
    """The report as a wide terminal shows it."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables(report))
    return console.export_text()


def test_latencies_count_from_sending_and_from_the_planned_time() -> None:
    found = summarize([record(1.0, late_s=0.5), record(2.0)], Slo())
    assert found["dispatch_s"]["most"] == pytest.approx(0.5)
    assert (found["ttft_s"]["p50"], found["ttft_s"]["most"]) == pytest.approx((0.1, 0.1))
    assert (found["ttft_planned_s"]["p50"], found["ttft_planned_s"]["most"]) == pytest.approx((0.1, 0.6))
    assert found["e2e_s"]["most"] == pytest.approx(0.31)
    assert found["e2e_planned_s"]["most"] == pytest.approx(0.81)


def test_time_per_output_token_counts_tokens_and_time_between_pieces_counts_pieces() -> None:
    found = summarize([record(0.0, n=5, gap_s=0.06, tokens=13)], Slo())
    assert found["itl_s"]["mean"] == pytest.approx(0.06)
    assert found["tpot_s"]["mean"] == pytest.approx(4 * 0.06 / 12)
    assert found["output_tokens"] == 13


def test_goodput_counts_what_kept_every_limit_from_its_planned_time() -> None:
    records = [
        record(0.0),
        record(1.0, late_s=0.2),
        record(2.0, gap_s=0.5),
        record(3.0, error="stream: no", finish=None),
        record(4.0, n=1),
    ]
    limits = Slo(ttft_s=0.25, tpot_s=0.1)
    assert [limits.kept(one) for one in records] == [True, False, False, False, True]
    found = summarize(records, limits)
    assert found["good"] == 2
    assert found["goodput"] == pytest.approx(2 / found["duration_s"])
    assert (found["failed"], found["errors"]) == (1, {"stream": 1})
    assert Slo(e2e_s=0.3).kept(records[0]) is False


def test_a_failed_request_makes_no_latency_look_better() -> None:
    found = summarize([record(0.0), record(0.0, first_s=0.001, error="closed: x")], Slo())
    assert found["ttft_s"]["count"] == 1


def test_nothing_at_all_is_a_report_too() -> None:
    report = as_report({}, Run(records=[], end_s=0.0), Slo())
    assert not is_clean(report)
    assert "0 output tokens" in shown(report)


def test_throughput_over_time_holds_every_token() -> None:
    records = [record(0.3 * n, n=20, gap_s=0.03, tokens=40) for n in range(30)]
    step_s, rates = throughput(records)
    assert sum(rates) * step_s == pytest.approx(30 * 40, rel=0.01)


def event(at_s: float, phase: str, id: str, kind: str, text: str = "") -> FaultEvent:
    return FaultEvent(at_s=at_s, phase=phase, id=id, kind=kind, targets=(), text=text or f"{kind} {id}")


def test_faults_have_their_ends_and_a_kill_has_none() -> None:
    events = [
        event(1.0, "began", "a", "freeze"), event(2.0, "began", "b", "kill"), event(3.0, "ended", "a", "freeze"),
        event(4.0, "began", "c", "slow"), event(5.0, "refused", "", "kill"),
    ]  # fmt: skip
    assert [(s["began_s"], s["ended_s"], s["text"]) for s in spans_of(events, 9.0)] == [
        (1.0, 3.0, "freeze a"), (2.0, 2.0, "kill b"), (4.0, 9.0, "slow c"),
    ]  # fmt: skip
    assert spans_of([], 9.0) == []


def whole_report() -> dict[str, Any]:
    records = [record(0.1 * n, n=10, gap_s=0.02, prompt=n) for n in range(100)]
    faulty = [record(0.1 * n, n=10, gap_s=0.02, prompt=n) for n in range(100)]
    faulty[40].token_s[3:] = [at_s + 0.3 for at_s in faulty[40].token_s[3:]]
    faulty[50].pieces[3] = "y<script>"
    killed = event(4.15, "began", "1", "kill", "kill expert/<1>")
    run = Run(
        records=faulty, end_s=10.0, events=[killed],
        cpu_s=0.01,
    )  # fmt: skip
    return as_report({"endpoint": "http://h", "model": "m"}, run, Slo(ttft_s=0.5), reference=records)


def test_a_report_tells_what_a_fault_did() -> None:
    report = whole_report()
    text = json.dumps(report)
    assert json.dumps(json.loads(text)) == text, "plain JSON"
    assert (report["verdict"]["changed"], report["verdict"]["lost"]) == (1, 0)
    assert not is_clean(report)
    windows = report["chaos"]["windows"]
    assert windows["recoveries"][0]["stalls_s"]["most"] == pytest.approx(0.3)
    assert windows["before"] == pytest.approx(100.0, rel=0.1)
    assert report["chaos"]["loss_to_reference"] == pytest.approx(0.0, abs=0.02)
    assert report["client_cpu_us_per_token"] == pytest.approx(0.01 / 1000 * 1e6)


def test_the_tables_show_the_faults_and_the_first_differences() -> None:
    text = shown(whole_report())
    for needle in ("kill expert/<1>", "First differences", "y<script>", "TTFT <= 500 ms"):
        assert needle in text, f"{needle} is missing in\n{text}"


def test_a_plan_that_could_not_be_carried_out_is_not_clean() -> None:
    good = [record(0.1 * n, prompt=n) for n in range(50)]
    refused = event(1.0, "refused", "", "kill", "kill: no member")
    assert is_clean(as_report({}, Run(records=good, end_s=5.0), Slo()))
    assert not is_clean(as_report({}, Run(records=good, end_s=5.0, events=[refused]), Slo()))
    assert not is_clean(as_report({}, Run(records=good, end_s=5.0, problem="no gateway"), Slo()))


def test_a_run_of_which_something_was_not_compared_is_not_clean() -> None:
    good = [record(0.1 * n, prompt=n) for n in range(3)]
    bad = [record(0.1 * n, prompt=n, status=503, finish=None) for n in range(3)]
    run = Run(records=good, end_s=1.0)
    assert is_clean(as_report({}, run, Slo(), reference=good))
    assert not is_clean(as_report({}, run, Slo(), reference=bad)), "no reference was whole"
    assert not is_clean(as_report({}, run, Slo(), reference=good[:2])), "one text has no reference"


@pytest.mark.parametrize(
    ("loss", "said"),
    [(-1.23, "no dip against before"), (0.0, "no dip against before"), (0.05, "5.00% less than before")],
)
def test_a_load_that_rose_is_no_dip(loss: float, said: str) -> None:
    assert less(loss, "before") == said
