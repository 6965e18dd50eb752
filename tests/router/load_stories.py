"""Stories of sizes and their bounds, and of places that follow zones and load, told to any core."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from router.events import (
    Exited,
    Join,
    Joined,
    LauncherAttached,
    Refused,
    Renewed,
    Routed,
    Scale,
    Scaled,
    Started,
    StartProcess,
    Tick,
)
from router.scaling import Policy
from router.state import MOST_MEMBERS, Config, ConfigInvalid, State
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
        assert {name: record.share for name, record in told.state.members.items()} == shares, "moved meanwhile"


def pools_follow_their_load(step: Step) -> None:
    """Busy servers order more at once, within the bounds; idle ones go, one at a time."""
    policy = Policy(least=2, most=4, sample_s=1.0, start_s=2.0, trend_s=20.0, burst_s=5.0, hold_s=5.0)
    told = cluster(step, servers=2, most={"expert": 3}, autoscale={"expert": policy})
    for _ in range(100):
        for record in list(told.state.members.values()):
            told.give(Renewed(name=record.name, incarnation=record.incarnation, load={"busy": 0.95}))
        commands = told.give(Tick(), after_s=0.1)
        if any(isinstance(c, StartProcess) for c in commands):
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


def nothing_of_any_size_is_kept(step: Step) -> None:
    """What would make the journal or a View as large as a process says is refused, and changes nothing."""
    fields = {"address": "a", "pid": 1, "host": "h", "layers": 2, "experts": 4}
    for pool in ("expert", "attention", "gateway"):
        for changes, words in (
            ({"layers": 2**31, "experts": 2**31}, "layers"),
            ({"layers": 2000, "experts": 2000}, "2000 layers with 2000 experts"),
            ({"layers": -1}, "layers -1 found"),
            ({"capacity": 2**63}, "capacity"),
            ({"expert_bytes": 2**63}, "expert_bytes"),
            ({"pid": -1}, "pid -1 found"),
            *(
                ({what: "x" * 257}, f"{what} of 257 characters")
                for what in ("address", "host", "zone", "model_hash", "numerics_class")
            ),
        ):
            told = Told(step)
            before = told.state
            commands = told.give(Join(**{"pool": pool, **fields, **changes}))  # type: ignore[arg-type]
            assert [type(c) for c in commands] == [Refused] and words in commands[0].message, (pool, commands)
            assert told.state == before, f"kept of a {pool} with {changes}"
    told = Told(step)
    told.join("attention", layers=1 << 20, experts=0)
    commands = told.give(Join(**{"pool": "gateway", **fields, "layers": 0, "experts": 1 << 20}))  # type: ignore[arg-type]
    assert [type(c) for c in commands] == [Refused], "each may say one half of the shape"
    told.give(LauncherAttached(host="h", starting={"expert": 2**40}))
    assert len(told.state.starts) <= 2 * MOST_MEMBERS


def no_more_expert_servers_than_a_client_can_name(step: Step) -> None:
    """The last that fits joins, the next is refused; one that joins anew takes its own place."""
    told = Told(step)
    for _ in range(MOST_MEMBERS):
        told.join()
    for pid, joins in ((1000, False), (1, True)):
        commands = told.give(Join(pool="expert", address="a", pid=pid, host="h", layers=1, experts=2))
        assert isinstance(commands[0], Refused) != joins, commands
        assert joins == any(isinstance(c, Joined) for c in commands)
    assert sum(r.pool == "expert" for r in told.state.members.values()) == MOST_MEMBERS
    try:
        Config(experts_wanted=MOST_MEMBERS)
    except ConfigInvalid:
        return
    raise AssertionError("no room for a replacement beside a server that drains")


def a_drain_needs_a_time_and_a_word(step: Step) -> None:
    """No drain lasts for ever, and a worker that says nothing of its streams is not taken for idle."""
    told = cluster(step, workers=2)
    for drain_s in (0.0, float("nan"), float("inf"), 1e7):
        commands = told.give(Scale(pool="attention", wanted=1, drain_s=drain_s))
        assert [type(c) for c in commands] == [Refused], (drain_s, commands)
    told.give(Scale(pool="attention", wanted=1))
    told.state = replace(told.state, members={n: replace(r, ordered=True) for n, r in told.state.members.items()})
    rest(told)
    (drains,) = [r.name for r in told.state.members.values() if r.draining]
    rest(told, load={"busy": 0.0})
    assert drains in told.state.members, "ended though it never said that nothing runs on it"
    rest(told, load={"running": 0.0})
    assert drains not in told.state.members


def replicas_lie_in_two_zones(step: Step) -> None:
    """From nothing, after a join to each zone, and after a loss in each: no expert has all its copies in one zone."""
    told = Told(step, experts_wanted=4, replicas=2)
    for zone in "aabb":
        told.join(layers=2, experts=12, zone=zone)
    rest(told)
    apart(told, "from nothing")
    for zone in "ab":
        told.join(layers=2, experts=12, zone=zone)
        rest(told)
    apart(told, "after two joins")
    for name in ("expert/1", "expert/3"):
        told.give(Exited(host="h", pid=told.state.members[name].pid))
        rest(told)
    apart(told, "after two losses")


def apart(told: Told, when: str) -> None:
    """Every expert is served in two zones."""
    for bit in range(told.state.models[0].layers * told.state.models[0].experts):
        zones = [record.zone for record in told.state.members.values() if record.serving >> bit & 1]
        assert {*zones} == {"a", "b"} and len(zones) == 2, f"{when} expert {bit} is served in {zones}"


def what_balance_placed_stays(step: Step) -> None:
    """A restart of the router moves nothing at all; a join takes no redundant copy away."""
    for event in ("restart", "join"):
        told = cluster(step, servers=3, replicas=1, experts=8, redundant=3, balance_s=5.0)
        for _ in range(30):
            route(told, hot=3)
            lively(told, 1)
        shares = {name: record.share for name, record in told.state.members.items()}
        copies = sum(share.bit_count() for share in shares.values())
        assert copies > 8, "balance placed nothing: the story tells nothing"
        if event == "join":
            told.join(experts=8)
        else:
            kept = ("salt", "term", "epoch", "joined", "named", "models", "members", "gone", "wanted")
            told.state = State(**{name: getattr(told.state, name) for name in kept})
            told.give(Started(salt=2))
            rest(told, rounds=3)
            assert {name: record.share for name, record in told.state.members.items()} == shares
        found = sum(record.share.bit_count() for record in told.state.members.values())
        assert found == copies, f"{copies} copies before the {event}, {found} after"


def a_slow_spell_is_soon_forgiven(step: Step) -> None:
    """A server that loads nothing for long is tried again within four times move_s, however often it was late."""
    told = cluster(step, servers=3, replicas=2, experts=6, move_s=1.0, copies_in_flight=1)
    told.give(Exited(host="h", pid=told.state.members["expert/1"].pid))
    slow = "expert/2"
    for _ in range(400):
        rest(told, rounds=1, but=slow)
        wait_s = max((f.next_s - told.now_s for f in told.state.stuck.values()), default=0.0)
        assert wait_s <= 4.0, f"gets nothing new for {wait_s:.1f} s"
    assert told.state.stuck, "it was never late: the story tells nothing"
    rest(told, rounds=100)
    assert told.state.members[slow].serving == 0b111111, "it recovered, and did not get its copies"


def who_was_late_once_is_given_the_time_for_it(step: Step) -> None:
    """One silence of 0.34 s among 240 of 0.25 s is an excess of 0.09 s: condemned after 0.25 + 6 * 2.3 * 0.09 s."""
    told = cluster(step, servers=4)
    lively(told, 60)
    told.renew("expert/4")
    lively(told, 0.34, dumb="expert/4", step_s=0.085)
    told.renew("expert/4")
    _, fenced_s = lively(told, 4, dumb="expert/4")
    assert 1.49 < fenced_s < 2.2, f"fenced after {fenced_s:.2f} s"


def route(told: Told, hot: int) -> None:
    """The attention worker sent rows: to one expert twenty times as many as to any other."""
    pairs = told.state.models[0].layers * told.state.models[0].experts
    rows = np.full(pairs, 100, np.uint32)
    rows[hot] = 2000
    record = told.state.members["attention/1"]
    told.give(Routed(name=record.name, incarnation=record.incarnation, rows=rows, activated=np.minimum(rows, 20)))


LOAD_STORIES = (
    replicas_follow_the_load,
    balance_waits_for_rest,
    pools_follow_their_load,
    nothing_of_any_size_is_kept,
    no_more_expert_servers_than_a_client_can_name,
    a_drain_needs_a_time_and_a_word,
    replicas_lie_in_two_zones,
    what_balance_placed_stays,
    a_slow_spell_is_soon_forgiven,
    who_was_late_once_is_given_the_time_for_it,
)
