"""The comparison finds exactly what was done to a stream, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from eaas.ops.load.record import StreamRecord, compare
from eaas.ops.load.report import FaultSpan, NothingToCompare, added_stalls, quantiles, windows

WORDS = [f" w{number}" for number in range(50)]


def stream(pieces: list[str], prompt: int = 0, **changes: object) -> StreamRecord:
    """A whole stream with a piece every 10 ms."""
    times = [0.01 * (number + 1) for number in range(len(pieces))]
    whole = {"sent_s": 0.0, "tokens": len(pieces), "status": 200, "finish": "length", "ended_s": 1.0}
    return StreamRecord(prompt=prompt, planned_s=0.0, token_s=times, pieces=pieces, **(whole | changes))  # type: ignore[arg-type]


def paced(gaps_s: list[float], start_s: float = 0.0, ttft_s: float = 0.05, **changes: object) -> StreamRecord:
    """A stream whose pieces come after these gaps, the first at `start_s`."""
    at_s, times = start_s, [start_s]
    for gap_s in gaps_s:
        at_s += gap_s
        times.append(at_s)
    record = stream([" x"] * len(times), **{"ended_s": at_s, **changes})
    record.token_s, record.sent_s = times, start_s - ttft_s
    return record


@pytest.mark.parametrize("by_token", [True, False], ids=["tokens", "characters"])
@pytest.mark.parametrize("seed", range(40))
def test_one_act_on_a_stream_is_named_and_counted(seed: int, by_token: bool) -> None:
    rng = random.Random(seed)
    text = [f" {rng.randrange(10**5):05d}" for _ in range(rng.randrange(20, 120))]
    size = rng.randrange(1, 6)
    at = rng.randrange(size, len(text) - size)
    act = rng.choice(["lost", "repeated", "changed", "none"])
    changed = {
        "lost": text[:at] + text[at + size :],
        "repeated": text[:at] + text[at - size : at] + text[at:],
        "changed": [*text[:at], *[f" {rng.randrange(10**5):05d}" for _ in text[at:]]],
        "none": list(text),
    }[act]
    merged = ["".join(changed[i : i + 3]) for i in range(0, len(changed), 3)]
    run = stream(changed if by_token else merged, tokens=len(changed))
    verdict = compare([run], [stream(text)])
    expected = {
        "lost": (0, size, 0, 0),
        "repeated": (0, 0, size, 0),
        "changed": (0, 0, 0, 1),
        "none": (0,) * 4,
    }
    found = (verdict.failed, verdict.lost, verdict.repeated, verdict.changed)
    assert found == expected[act], f"seed {seed}: {act} of {size} at {at}: {verdict}"
    assert verdict.clean == (act == "none")
    if act != "none":
        assert verdict.differences[0].kind == act


def test_several_losses_and_repetitions_in_one_stream_all_count() -> None:
    changed = WORDS[:10] + WORDS[8:20] + WORDS[23:40] + WORDS[39:50]
    verdict = compare([stream(changed)], [stream(WORDS)])
    assert (verdict.lost, verdict.repeated, verdict.changed) == (3, 3, 0)


def test_a_stream_cut_short_has_lost_its_tail_unless_it_failed() -> None:
    cut = stream(WORDS[:40])
    assert compare([cut], [stream(WORDS)]).lost == 10
    failed = stream(WORDS[:40], finish=None, error="closed: by peer", tokens=None)
    verdict = compare([failed], [stream(WORDS)])
    assert (verdict.failed, verdict.lost, verdict.changed) == (1, 0, 0)


def test_what_a_failed_stream_did_send_is_still_compared() -> None:
    failed = stream([*WORDS[:20], *WORDS[18:40]], finish=None, tokens=None)
    verdict = compare([failed], [stream(WORDS)])
    assert (verdict.failed, verdict.repeated, verdict.lost) == (1, 2, 0)


@pytest.mark.parametrize(
    "change",
    [{"finish": "stop"}, {"tokens": 49}],
    ids=["finish reason", "token count with the same text"],
)
def test_the_same_text_with_another_end_has_changed(change: dict[str, Any]) -> None:
    assert compare([stream(WORDS, **change)], [stream(WORDS)]).changed == 1


def test_a_changed_last_token_is_no_loss_though_it_occurs_later() -> None:
    wanted = [*WORDS[:10], "a", "b", "c", "d", "e"]
    verdict = compare([stream([*WORDS[:10], "c"])], [stream(wanted)])
    assert (verdict.lost, verdict.changed) == (0, 1)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"error": "http 503: no replica", "status": 503}, "http 503"),
        ({"status": 429}, "http 429"),
        ({"finish": None}, "unfinished"),
        ({"error": "timeout: 30 s"}, "timeout"),
    ],
)
def test_every_way_to_fail_is_a_failure_by_kind(change: dict[str, Any], kind: str) -> None:
    record = stream(WORDS, **change)
    assert record.error_kind == kind
    assert compare([record], [stream(WORDS)]).failed == 1


def test_a_reference_that_failed_judges_nothing() -> None:
    verdict = compare([stream(WORDS), stream(WORDS, prompt=1)], [stream(WORDS, finish=None)])
    assert (verdict.compared, verdict.unmatched) == (0, 2)


def test_the_added_stall_is_the_longest_wait_after_the_fault_less_the_usual_one() -> None:
    steady = paced([0.1] * 100)
    stalled = paced([0.1] * 20 + [0.75] + [0.1] * 50)
    over_fault = paced([0.1] * 19 + [0.4] + [0.1] * 50)  # Silent from 1.9 s to 2.3 s.
    too_late = paced([0.1] * 90 + [0.9] + [0.1] * 5)
    begun_later = paced([0.5] * 3 + [1.5] + [0.5] * 3, start_s=3.0)
    begun_too_late = paced([0.1] * 10, start_s=9.0, ttft_s=1.9)
    ended_before = paced([0.1] * 10)
    records = [steady, stalled, over_fault, too_late, begun_later, begun_too_late, ended_before]
    assert added_stalls(records, 2.05) == pytest.approx([0.0, 0.65, 0.3, 0.0, 1.0], abs=1e-9)


def test_a_stall_that_comes_later_in_the_window_is_found_in_streams_shorter_than_it() -> None:
    """Sixteen clients, streams of 0.64 s one after another; at 11 s all are silent for 2 s. The fault was at 10 s."""
    records: list[StreamRecord] = []
    for slot in range(16):
        at_s = 0.04 * slot
        while at_s < 20.0:
            gaps = [0.01] * 63
            if at_s <= 11.0 < at_s + 0.63:
                gaps[int((11.0 - at_s) / 0.01)] += 2.0
            records.append(paced(gaps, start_s=at_s, ttft_s=0.01))
            at_s += sum(gaps) + 0.01
    stalls = added_stalls(records, 10.0)
    assert max(stalls) == pytest.approx(2.0)
    assert sum(stall > 1.9 for stall in stalls) >= 15, "one of them may just have ended"


def test_a_wait_for_the_first_piece_counts_less_the_calm_one() -> None:
    calm = [paced([0.1] * 5, start_s=at_s) for at_s in (1.0, 2.0, 3.0)]
    held_up = paced([0.1] * 5, start_s=11.5, ttft_s=1.25)
    begun_before = paced([0.1] * 5, start_s=10.5, ttft_s=0.85)
    unanswered = stream([], sent_s=12.0, ended_s=15.0, finish=None, error="closed: by peer")
    refused = stream([], sent_s=12.0, ended_s=12.01, finish=None, status=503)
    records = [*calm, held_up, begun_before, unanswered, refused]
    assert added_stalls(records, 10.0) == pytest.approx([1.2, 0.8, 2.95, 0.0])
    assert added_stalls([held_up], 10.0) == pytest.approx([1.25]), "nobody was calm: nothing is usual"


def test_a_wait_for_the_end_counts_however_it_ends() -> None:
    died = paced([0.1] * 20, ended_s=5.0, finish=None, error="closed: by peer")
    late = paced([0.1] * 20, ended_s=4.0)
    assert added_stalls([died, late], 2.05) == pytest.approx([2.9, 1.9])


def test_windows_measure_the_loss_and_the_way_back() -> None:
    # 100 tokens/s, silent from 20 to 21.5 s, then half speed until 25 s, then as before until 60 s.
    times = [0.01 * n for n in range(2000)] + [21.5 + 0.02 * n for n in range(175)]
    times += [25.0 + 0.01 * n for n in range(3500)]
    record = stream([" x"] * len(times), ended_s=60.0)
    record.token_s = times
    found = windows([record], [FaultSpan(began_s=20.0, ended_s=20.0, text="kill expert/1")], end_s=60.0)
    assert found["before"] == pytest.approx(100.0)
    assert found["loss"] == pytest.approx((150 + 175) / 3000)
    assert found["loss_s"] == 30.0
    (recovery,) = found["recoveries"]
    # The first 1 s window with 95 tokens begins 0.1 s before full speed is back.
    assert recovery["recovery_s"] == pytest.approx(4.9, abs=0.051)
    assert found["after"] == pytest.approx(100.0, rel=0.01)
    assert found["during"] == pytest.approx(175 / 4.9, rel=0.1)
    assert (recovery["stalls_s"]["count"], recovery["stalls_s"]["most"]) == (1, pytest.approx(1.5, abs=0.02))


def test_an_unharmed_run_has_no_recovery_to_make_and_a_dead_one_never_makes_it() -> None:
    steady = paced([0.01] * 6000)
    fault = FaultSpan(began_s=20.0, ended_s=25.0, text="")
    assert windows([steady], [fault])["recoveries"][0]["recovery_s"] == 0.0
    dead = paced([0.01] * 2000)
    found = windows([dead], [fault], end_s=60.0)
    assert found["recoveries"][0]["recovery_s"] is None
    assert found["loss"] == pytest.approx(1.0, abs=0.01)


def test_tokens_that_share_a_piece_all_count() -> None:
    record = paced([0.1] * 99, tokens=300)
    found = windows([record], [FaultSpan(began_s=5.0, ended_s=5.0, text="")], end_s=10.0)
    assert found["before"] == pytest.approx(30.0, rel=0.03)


def test_windows_need_load_on_both_sides_of_a_fault() -> None:
    with pytest.raises(NothingToCompare, match="at least 1 is needed"):
        windows([paced([0.1])], [])
    with pytest.raises(NothingToCompare, match="both sides"):
        windows([paced([0.1] * 10)], [FaultSpan(began_s=5.0, ended_s=5.0, text="")])


def test_percentiles_are_by_nearest_rank() -> None:
    expected = {"count": 100, "mean": 50.5, "p50": 50, "p95": 95, "p99": 99, "most": 100}
    assert quantiles(range(1, 101)) == expected
    assert quantiles([]) is None
