"""Arrivals have the statistics that their name promises, and prompts the length that was asked for."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from eaas.ops.load.workload import (
    Arrivals,
    TokenCost,
    Workload,
    WorkloadInvalid,
    read_arrivals,
    read_prompts,
    schedule,
    word_prompts,
)


@pytest.mark.parametrize(
    ("text", "variation"), [("constant", 0.0), ("poisson", 1.0), ("gamma:0.25", 2.0), ("gamma:4", 0.5)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_gaps_have_the_rate_and_the_burstiness_of_their_name(text: str, variation: float, seed: int) -> None:
    times = schedule(read_arrivals(text), 50.0, seed, for_s=None, requests=40_000)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(times) == 40_000 and times == sorted(times)
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.05), f"seed {seed}"
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.05, abs=1e-6), f"seed {seed}"


def test_the_same_seed_gives_the_same_times_and_another_seed_others() -> None:
    first, again, other = (
        schedule(read_arrivals("poisson"), 10.0, seed, for_s=30.0, requests=None) for seed in (7, 7, 8)
    )
    assert first == again != other
    assert all(0 <= at_s < 30.0 for at_s in first)
    assert 200 < len(first) < 400


def test_a_longer_schedule_begins_as_the_shorter_one() -> None:
    short, long = (schedule(read_arrivals("gamma:0.5"), 10.0, 3, for_s=None, requests=n) for n in (100, 3000))
    assert long[:100] == short


def test_whichever_end_comes_first_ends_the_schedule() -> None:
    constant = read_arrivals("constant")
    assert schedule(constant, 10.0, 0, for_s=1.0, requests=None) == pytest.approx([n / 10 for n in range(10)])
    assert len(schedule(constant, 10.0, 0, for_s=1.0, requests=4)) == 4
    assert len(schedule(constant, 10.0, 0, for_s=0.5, requests=400)) == 5


@pytest.mark.parametrize("text", ["uniform", "gamma", "gamma:0", "gamma:nan", "closed", "closed:0", "poisson:3"])
def test_what_is_no_arrival_process_is_refused(text: str) -> None:
    with pytest.raises(WorkloadInvalid, match=r"closed:STREAMS"):
        read_arrivals(text)


def test_a_schedule_without_end_or_rate_is_refused() -> None:
    poisson = Arrivals(kind="poisson")
    with pytest.raises(WorkloadInvalid, match="no end"):
        schedule(poisson, 1.0, 0, for_s=None, requests=None)
    with pytest.raises(WorkloadInvalid, match="over 0"):
        schedule(poisson, 0.0, 0, for_s=1.0, requests=None)
    with pytest.raises(WorkloadInvalid, match="Lower the rate"):
        schedule(poisson, 1e5, 0, for_s=1e5, requests=None)


def test_made_up_prompts_differ_and_repeat_by_seed() -> None:
    cost = TokenCost.of_probes((16, 35), (80, 163))
    assert (cost.fixed, cost.per_word) == (3.0, 2.0)
    prompts, again, other = word_prompts(1, 33, cost), word_prompts(1, 33, cost), word_prompts(2, 33, cost)
    assert prompts(5) == again(5) != prompts(6)
    assert prompts(5) != other(5)
    assert len(prompts(5).text.split()) == 15


def test_prompts_of_a_file_are_texts_or_json_lines() -> None:
    found = read_prompts(["ROMEO:\n", "\n", '{"prompt": "x", "max_tokens": 3}', '{"messages": [{"role": "user"}]}'])
    assert [(p.text, p.max_tokens, len(p.messages)) for p in found] == [
        ("ROMEO:", None, 0),
        ("x", 3, 0),
        ("", None, 1),
    ]
    for bad in (['{"text": 1}'], ["{"], []):
        with pytest.raises(WorkloadInvalid):
            read_prompts(bad)


def test_a_body_is_greedy_or_seeded_so_that_it_can_be_sent_again() -> None:
    fields = {"model": "m", "prompts": read_prompts(["hi"]).__getitem__, "distinct": 1}
    greedy = json.loads(Workload(chat=False, **fields).body(0))  # type: ignore[arg-type]
    assert greedy["prompt"] == "hi" and greedy["temperature"] == 0 and "seed" not in greedy
    assert greedy["stream"] and greedy["stream_options"] == {"include_usage": True}
    drawn = Workload(chat=True, temperature=0.8, seed=5, options=(("ignore_eos", True),), **fields)  # type: ignore[arg-type]
    said = json.loads(drawn.body(0))
    assert said["messages"] == [{"role": "user", "content": "hi"}]
    assert (said["seed"], said["ignore_eos"]) == (5, True)
    assert drawn.index(7) == 0
