"""Stories of sizes and places that follow the load, told to any core."""

from __future__ import annotations

import numpy as np

from router.events import Launch, Renewed, Routed, Scaled, Tick
from router.scaling import Policy
from tests.router.told import Step, Told, cluster, lively, rest


def replicas_follow_the_load(step: Step) -> None:
    """An expert that everyone asks for gets more replicas, within the copies allowed, and nothing else is lost."""
    told = cluster(step, servers=4, replicas=1, experts=8, redundant=4, balance_s=10.0)
    for second in range(120):
        hot = 3 if second < 30 else 5
        route(told, hot)
        lively(told, 1)
        serving = [record.serving for record in told.state.members.values()]
        copies = [sum(bits >> expert & 1 for bits in serving) for expert in range(8)]
        assert min(copies) >= 1, f"an expert is served by nobody: {copies}"
        assert sum(copies) <= 8 + 4, f"more copies than allowed: {copies}"
        assert second % 30 < 29 or copies[hot] >= 3 or 29 < second < 119, f"the busiest is {hot}: {copies}"


def balance_waits_for_rest(step: Step) -> None:
    """While a copy is on its way, or a server in doubt, no replica moves for balance."""
    told = cluster(step, servers=4, replicas=1, experts=8, redundant=4, balance_s=10.0)
    route(told, hot=3)
    told.join(experts=8)
    shares = {name: record.share for name, record in told.state.members.items()}
    for _ in range(30):
        route(told, hot=3)
        for record in list(told.state.members.values()):
            told.renew(record.name)
        told.give(Tick(), after_s=1.0)
        assert {name: record.share for name, record in told.state.members.items()} == shares, (
            "moved meanwhile"
        )


def pools_follow_their_load(step: Step) -> None:
    """Busy servers order more at once, within the bounds; idle ones go, one at a time."""
    policy = Policy(least=2, most=4, sample_s=1.0, start_s=2.0, trend_s=20.0, burst_s=5.0, hold_s=5.0)
    told = cluster(step, servers=2, most={"expert": 3}, autoscale={"expert": policy})
    for _ in range(100):
        for record in list(told.state.members.values()):
            told.give(Renewed(name=record.name, incarnation=record.incarnation, load={"busy": 0.95}))
        commands = told.give(Tick(), after_s=0.1)
        if any(isinstance(c, Launch) for c in commands):
            break
    assert [(c.wanted, bool(c.why)) for c in commands if isinstance(c, Scaled)] == [(3, True)], commands
    assert told.state.wanted["expert"] == 3
    told.join()
    rest(told)
    for _ in range(1000):
        rest(told, rounds=1, load={"busy": 0.1})
        live = [r for r in told.state.members.values() if r.pool == "expert"]
        assert len(live) >= 2
    assert told.state.wanted["expert"] == 2 and len(live) == 2, "the idle server was kept"


def route(told: Told, hot: int) -> None:
    """The attention worker sent rows: to one expert twenty times as many as to any other."""
    pairs = told.state.model.layers * told.state.model.experts
    rows = np.full(pairs, 100, np.uint32)
    rows[hot] = 2000
    record = told.state.members["attention/1"]
    told.give(
        Routed(name=record.name, incarnation=record.incarnation, rows=rows, activated=np.minimum(rows, 20))
    )


LOAD_STORIES = (replicas_follow_the_load, balance_waits_for_rest, pools_follow_their_load)
