"""The elasticity benchmark counts as its rules say, by examples small enough to compute by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import elasticity
from benchmarks.elasticity import Outcome, late_part, late_share, read_trace, serve, tuned
from benchmarks.elasticity_live import Stream, compared, streams_of
from router.scaling import Signals


@pytest.mark.parametrize(
    ("demand", "capacity", "backlog", "late_s", "after"),
    [
        (10.0, 10.0, 0.0, 0.0, 0.0),
        (8.0, 10.0, 0.0, 0.0, 0.0),
        # 1 more than capacity: the backlog passes 1 s of 10 servers only at the very end.
        (11.0, 10.0, 0.0, 0.0, 10.0),
        # 5 more: 10 server-seconds after 2 s, so 8 s are late.
        (15.0, 10.0, 0.0, 8.0, 50.0),
        # 50 wait, 5 a second are worked off: down to 10 after 8 s.
        (5.0, 10.0, 50.0, 8.0, 0.0),
        (10.0, 10.0, 50.0, 10.0, 50.0),
        # Without a server everything is late.
        (1.0, 0.0, 0.0, 10.0, 10.0),
        (0.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_a_token_is_late_behind_more_than_a_second_of_work(
    demand: float, capacity: float, backlog: float, late_s: float, after: float
) -> None:
    assert late_part(demand, capacity, backlog) == (late_s, after)


def test_servers_are_paid_from_their_order_and_serve_30_s_later() -> None:
    seen: list[Signals] = []

    def plan(signals: Signals, step: int) -> int:
        seen.append(signals)
        return [1, 3, 3, 3, 3, 1, 1][step]

    outcome = serve([2.0] * 7, plan, first=1, counted_from=0)
    # Ordered at step 1, they serve from step 4; given back at step 5 they are gone at once.
    assert [signals.live for signals in seen] == [1, 1, 1, 1, 3, 3, 1]
    assert [signals.starting for signals in seen] == [0, 0, 2, 2, 0, 0, 0]
    assert outcome.paid == pytest.approx((1 + 3 + 3 + 3 + 3 + 1 + 1) / 7)
    assert outcome.wanted == [1, 3, 3, 3, 3, 1, 1]
    assert outcome.changes == [2]
    # Demand 2, capacity 1: late after 1 s in step 0 and throughout steps 1 to 3, with 40 server-seconds waiting. Three
    # servers take 1 a second off, and stay over their 3 s; then one server falls behind again.
    assert outcome.late == 2.0 * (9 + 10 + 10 + 10 + 10 + 10 + 10)
    assert outcome.tokens == 2.0 * 70
    assert [signals.queue_s for signals in seen] == [0.0, 10.0, 20.0, 30.0, 40.0 / 3, 10.0, 40.0]
    assert {signals.busy for signals in seen[1:]} == {1.0}


def test_an_order_taken_back_is_never_served() -> None:
    lives = []

    def plan(signals: Signals, step: int) -> int:
        lives.append(signals.live)
        return [4, 3, 3, 3, 3, 3][step]

    serve([1.0] * 6, plan, first=2, counted_from=0)
    assert lives == [2, 2, 2, 3, 3, 3]


def test_the_first_day_is_left_out() -> None:
    outcome = serve([10.0] * 5 + [1.0] * 5, lambda signals, step: 4, first=4, counted_from=5)
    assert outcome.tokens == 5 * 10.0 and outcome.paid == 4


def test_busy_and_backlog_are_all_that_a_plan_learns() -> None:
    seen: list[Signals] = []

    def plan(signals: Signals, step: int) -> int:
        seen.append(signals)
        return 4

    serve([2.0, 6.0, 1.0], plan, first=4, counted_from=0)
    assert [signals.busy for signals in seen] == [0.0, 0.5, 1.0]
    assert [signals.backlog_tokens for signals in seen] == [0.0, 0.0, 20.0 * elasticity.TOKENS_PER_S]


def test_the_least_that_keeps_the_slo_is_found() -> None:
    assert tuned(lambda size: 0.01 if size < 23 else 0.0004, 4, 64, whole=True) == 23
    found = tuned(lambda headroom: 0.1 * np.exp(-4 * headroom), 0.5, 3.0)
    assert 0.1 * np.exp(-4 * found) <= elasticity.SLO < 0.1 * np.exp(-4 * (found - 0.02))
    with pytest.raises(ValueError, match="give two around"):
        tuned(lambda headroom: 0.5, 1.0, 2.0)


def test_shares_are_of_all_tokens_together() -> None:
    outcomes = [
        Outcome(late=1.0, tokens=10.0, changes=[], wanted=[]),
        Outcome(tokens=90.0, changes=[], wanted=[]),
    ]
    assert late_share(outcomes) == 0.01


def test_both_kinds_of_trace_are_read(tmp_path: Path) -> None:
    azure, mooncake, neither = tmp_path / "a", tmp_path / "m", tmp_path / "n"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9305900,396,109\n"
    )
    lines = [{"timestamp": at, "input_length": 7, "output_length": 5, "hash_ids": []} for at in (3000, 0, 27482)]
    mooncake.write_text("".join(json.dumps(line) + "\n" for line in lines))
    neither.write_text("time,tokens\n")
    assert [(r.at_s, r.prompt, r.output) for r in read_trace(azure)] == [(0.0, 374, 44), (4.25, 396, 109)]
    assert [r.at_s for r in read_trace(mooncake)] == [0.0, 3.0, 27.482]
    with pytest.raises(ValueError, match="Mooncake JSONL"):
        read_trace(neither)


def stream(*events: str, tokens: int = 2) -> Stream:
    return Stream(
        due_s=0.0,
        prompt=[1],
        tokens=tokens,
        body=bytearray("".join(f"data: {e}\n\n" for e in events), "utf8"),
    )


def test_the_comparison_counts_failed_and_changed_streams() -> None:
    def said(text: str) -> str:
        return json.dumps({"choices": [{"text": text}]})

    usage = json.dumps({"choices": [], "usage": {"completion_tokens": 2}})
    whole = (said("a"), said("b"), usage, "[DONE]")
    record = [stream(*whole) for _ in range(6)]
    found = [
        stream(*whole),
        stream(said("a"), said("c"), usage, "[DONE]"),
        stream(said("a"), said("b"), usage),
        stream(said("a"), json.dumps({"error": {}}), "[DONE]"),
        stream(*whole, tokens=3),
        stream(),
    ]
    result = compared(record, found)
    assert (result["failed"], result["changed"], result["compared"]) == (4, 1, 2)
    assert result["failed_fixed"] == 0


def test_the_replay_is_the_first_ten_minutes_compressed() -> None:
    requests = [elasticity.Request(at_s=at_s, prompt=640, output=320) for at_s in (0.0, 300.0, 599.0, 601.0)]
    streams = streams_of(requests)
    assert [s.due_s for s in streams] == [0.0, 30.0, 59.9]
    assert {len(s.prompt) for s in streams} == {20} and {s.tokens for s in streams} == {10}
    assert [s.prompt for s in streams] == [s.prompt for s in streams_of(requests)]
