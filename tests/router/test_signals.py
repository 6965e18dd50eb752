"""What the policy hears of a pool."""

from __future__ import annotations

from dataclasses import replace

from router.pools import pool_signals
from router.scaling import Signals
from router.state import Liveness, MemberRecord, Start, State


def cluster(loads: dict[str, dict[str, float]], **marked: frozenset[str]) -> State:
    """Members by name with their load. draining, warming: names of those that are."""
    members = {
        name: MemberRecord(
            name=name,
            pool=name.partition("/")[0],
            incarnation=1,
            address="",
            pid=1,
            host="h",
            ready=name not in marked.get("warming", ()),
            draining=name in marked.get("draining", ()),
        )
        for name in loads
    }
    liveness = {name: Liveness(renewed_s=0.0, load=load) for name, load in loads.items()}
    return State(members=members, liveness=liveness, wanted={"expert": 4, "attention": 2})


def test_who_serves_who_comes_and_who_goes_are_told_apart() -> None:
    state = cluster(
        {
            "expert/1": {"busy": 0.5, "rows_per_s": 100.0},
            "expert/2": {"busy": 0.7, "rows_per_s": 140.0},
            "expert/3": {"busy": 0.0},
            "expert/4": {"busy": 1.0, "rows_per_s": 900.0},
        },
        warming=frozenset({"expert/3"}),
        draining=frozenset({"expert/4"}),
    )
    state = replace(state, starts=(Start(host="h", pool="expert", until_s=9.0),))
    assert pool_signals(state, "expert") == Signals(
        wanted=4, live=2, starting=2, draining=1, busy=0.6, tokens_per_s=240.0
    )


def test_what_waits_at_gateways_and_workers_is_the_queue_of_the_attention_pool() -> None:
    state = cluster(
        {
            "attention/1": {"busy": 0.9, "backlog_tokens": 100.0, "queue_s": 0.25, "tokens_per_s": 50.0},
            "gateway/1": {"running": 3.0, "waiting": 2.0, "backlog_tokens": 30.0, "queue_s": 1.5},
        }
    )
    signals = pool_signals(state, "attention")
    assert (signals.wanted, signals.live) == (2, 1)
    assert (signals.busy, signals.backlog_tokens, signals.queue_s, signals.tokens_per_s) == (
        0.9,
        130,
        1.5,
        50,
    )


def test_an_empty_pool_hears_that_requests_wait_and_silence_is_not_nothing() -> None:
    state = cluster({"gateway/1": {"waiting": 1.0, "backlog_tokens": 12.0, "queue_s": 0.1}})
    for pool in ("expert", "attention"):
        signals = pool_signals(state, pool)
        assert (signals.live, signals.backlog_tokens, signals.queue_s) == (0, 12.0, 0.1), pool
    signals = pool_signals(cluster({"attention/1": {}}), "attention")
    assert (signals.busy, signals.backlog_tokens, signals.queue_s, signals.kv_use) == (None,) * 4
