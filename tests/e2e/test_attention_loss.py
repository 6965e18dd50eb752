"""An attention worker killed or frozen in mid-stream changes nothing; the seed is another each day."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from benchmarks.attention_loss import Counts, Experiment, Stream, backlog
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.model.loader import resolve_model


@pytest.mark.full(seconds=20)
@pytest.mark.parametrize("attention", [1, 2])
def test_an_attention_worker_lost_or_frozen_changes_no_token(tiny: Path, attention: int) -> None:
    seed = datetime.datetime.now(datetime.UTC).date().toordinal()
    config = ClusterConfig(
        model=tiny, served_model_name="attention_loss", experts=2, attention=attention, port=0, cores=(0, 1)
    )
    with LocalCluster(config) as cluster:
        experiment = Experiment(cluster, streams=8, tokens=48, seed=seed)
        for kind in ("kill", "freeze", "kill", "freeze"):
            experiment.inject(kind)
    found = experiment.counts
    assert found == Counts(), f"seed {seed}: {found}"
    # Alone, a worker that was killed is missed until its replacement has started.
    longest_s = max(max(pauses) for pauses in experiment.pauses_s.values())
    assert longest_s < (5.0 if attention == 2 else 20.0), f"seed {seed}: a pause of {longest_s:.2f} s"


@pytest.mark.full(seconds=20)
def test_two_workers_killed_a_second_apart_under_a_long_queue_cost_no_request() -> None:
    # Tried one after another, those that were lost twice would wait for longer than the deadline.
    config = ClusterConfig(
        model=resolve_model("demo"),
        served_model_name="attention_loss",
        experts=2,
        attention=2,
        port=0,
        cores=(0, 1),
        step_tokens=32,
        deadline_s=4.0,
    )
    with LocalCluster(config) as cluster:
        found = backlog(cluster, requests=40, prompt_tokens=1900, tokens=2, seed=1)
    assert (found["failed"], found["problems"]) == (0, []), found
    assert found["in_progress"][1] > 20, f"{found}: the queue was too short to tell"


def test_the_experiment_counts_what_is_wrong() -> None:
    wanted = Stream(kind="seeded", texts={0: "abc"}, finish={0: "length"})
    wanted.tokens = {0: [("a", -1.0), ("b", -1.5), ("c", -2.0)]}
    counts = Counts()
    counts.compare(wanted, wanted)
    assert counts == Counts()
    short = Stream(kind="seeded", texts={0: "ab"}, finish={0: "length"}, tokens={0: wanted.tokens[0][:2]})
    counts.compare(short, wanted)
    assert (counts.lost, counts.changed) == (1, 1)
    twice = Stream(kind="unseeded", texts={0: "aabc"}, finish={0: "length"})
    twice.tokens = {0: [("a", -1.0), *wanted.tokens[0]]}
    counts.compare(twice, wanted)
    assert counts.repeated == 1
    counts.compare(Stream(kind="seeded", problem="it ended without [DONE]"), wanted)
    assert counts.failed == 1
