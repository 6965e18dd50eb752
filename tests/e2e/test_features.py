"""Answers over every feature of the API are those of the calm run while faults are injected; a difference is seen."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.fault_experiment import fault_experiment, options
from benchmarks.features import drawn, rounds, told

ROUNDS = 6


@pytest.mark.full(seconds=40)
def test_every_feature_answers_as_in_calm_while_faults_are_injected(tmp_path: Path) -> None:
    seed = time.time_ns() // 1_000_000
    arguments = ["--experts", "3", "--seed", str(seed), "--results", str(tmp_path)]
    with fault_experiment(options(None, streams=2, seconds=0).parse_args(arguments), allow_chaos=True) as experiment:
        found = rounds(experiment, seed, ROUNDS)
    assert not found["differed"], f"python -m benchmarks.features --rounds {ROUNDS} --seed {seed}"
    assert set(found["statuses"]) == {"200"}, f"seed {seed}: {found['statuses']}"
    assert any(outcome.endswith("done") for outcome in found["outcomes"]), f"seed {seed}: no fault was injected"


def test_the_requests_are_of_every_kind() -> None:
    asked = [request for seed in range(100) for request in drawn(seed)]
    assert {path for path, _ in asked} == {"/v1/completions", "/v1/chat/completions", "/v1/responses"}
    fields = {name for _, body in asked for name in body}
    wanted = "n seed logprobs prompt_logprobs tools response_format guided_grammar guided_regex stop logit_bias stream"
    assert set(wanted.split()) <= fields and drawn(1) == drawn(1)


def test_choices_take_turns_and_a_lost_token_is_seen() -> None:
    def event(index: int, text: str) -> dict[str, object]:
        return {"choices": [{"index": index, "text": text}]}

    one, other = [event(0, "a"), event(1, "b"), event(0, "c")], [event(1, "b"), event(0, "a"), event(0, "c")]
    assert told(one) == told(other)
    assert told(one) != told([event(0, "c"), event(1, "b"), event(0, "a")])
    assert told(one) != told(one[:-1])
