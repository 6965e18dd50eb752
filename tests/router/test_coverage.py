"""How well experts are covered, how even their load is, and what the router counts of its members."""

from __future__ import annotations

import math
from random import Random

import numpy as np

from router.events import Fenced, Totals
from router.lifecycle import DRAINED, OVERDUE
from router.messages import totals_of
from router.metrics import RouterMetrics
from router.pools import Counts, coverage
from router.proto import router_pb2 as pb
from router.records import replace
from router.state import Config, Liveness, MemberRecord, Model, State


def server(name: str, held: int, **more: object) -> MemberRecord:
    fields: dict[str, object] = {"loaded": held, "target": held, "serving": held, "ready": True, **more}
    return MemberRecord(
        name=name, pool="expert", incarnation=1, address="", pid=1, host="", **fields  # pyright: ignore
    )  # fmt: skip


def world(layers: int, experts: int, held: list[int], **more: object) -> State:
    members = {f"expert/{n}": server(f"expert/{n}", bits) for n, bits in enumerate(held)}
    return State(
        models=(Model(hash="m", layers=layers, experts=experts),),
        members=members,
        liveness={name: Liveness(renewed_s=0.0) for name in members},
        wanted={"expert": len(held)},
        **more,  # pyright: ignore
    )


def test_lost_and_rare_experts_are_counted_over_random_placements() -> None:
    """Against the plain count (the seed is in the message)."""
    for seed in range(200):
        random = Random(seed)
        layers, experts, servers = random.randint(1, 4), random.randint(1, 9), random.randint(0, 5)
        pairs = layers * experts
        held = [random.getrandbits(pairs) for _ in range(servers)]
        found = coverage(Config(experts_wanted=3, replicas=2), world(layers, experts, held))
        copies = [sum(bits >> pair & 1 for bits in held) for pair in range(pairs)]
        wanted = min(2, max(1, servers))
        assert found.lost == copies.count(0), f"seed {seed}"
        assert found.below == sum(count < wanted for count in copies), f"seed {seed}"


def test_load_falls_on_servers_as_replicas_share_it() -> None:
    """Two layers of two experts. Of layer 0 expert 0 is on both servers, expert 1 on the second alone."""
    routed = np.array([60.0, 20.0, 0.0, 40.0])
    state = world(2, 2, [0b0101, 0b1011], routed=routed, routed_s=5.0, now_s=5.0)
    config = Config(experts_wanted=2, replicas=1, routed_half_life_s=60.0)
    rate = math.log(2) / 60
    found = coverage(config, state)
    assert np.allclose(found.load, np.array([[30, 50], [0, 40]]) * rate)
    assert found.servers == ("expert/0", "expert/1")
    assert math.isclose(found.balancedness or 0, (40 + 20) / (50 + 40))
    # A steady rate of one row a second adds up to what is shown as one.
    steady = sum(0.5 ** (age_s / 60) for age_s in range(3600))
    assert math.isclose(steady * rate, 1.0, rel_tol=0.01)
    later = coverage(config, replace(state, now_s=65.0))
    assert np.allclose(later.load, found.load / 2), "half of it has faded"


def test_one_server_that_does_everything_is_as_bad_as_can_be() -> None:
    routed = np.array([8.0, 0.0, 0.0, 0.0])
    state = world(1, 4, [0b0001, 0b0010, 0b0100, 0b1000], routed=routed)
    assert coverage(Config(experts_wanted=4), state).balancedness == 0.25


def test_without_load_or_model_there_is_no_balance_and_nothing_is_lost() -> None:
    assert coverage(Config(), world(1, 2, [0b11])).balancedness is None
    nobody = coverage(Config(), State())
    assert (nobody.lost, nobody.below, nobody.balancedness) == (0, 0, None)


def test_copies_are_counted_as_they_come_and_go() -> None:
    counts = Counts()
    start = world(1, 4, [0b0011, 0b0000])
    fresh = replace(start.members["expert/1"], ready=False)
    start = replace(start, members={**start.members, "expert/1": fresh})
    loaded = replace(
        start,
        members={
            "expert/0": server("expert/0", 0b0111),
            "expert/1": replace(fresh, loaded=0b1000, ready=True),
        },
    )
    counts.note(start, loaded, [])
    assert (counts.loaded, counts.migrated, counts.unloaded) == (2, 1, 0), "the new server's first is no move"
    retiring = replace(loaded.members["expert/0"], loaded=0b0110, retiring=0b0001)
    still = replace(loaded, members={**loaded.members, "expert/0": retiring})
    counts.note(loaded, still, [])
    assert counts.unloaded == 0, "it holds that until everyone has stopped asking for it"
    gone = replace(still, members={**still.members, "expert/0": replace(retiring, retiring=0)})
    counts.note(still, gone, [])
    assert (counts.loaded, counts.migrated, counts.unloaded) == (2, 1, 1)


def test_evictions_are_told_from_orderly_ends_and_take_the_counters_along() -> None:
    counts = Counts()
    reasons = ("silent for 0.61 s", "its process ended", "its process joined anew", OVERDUE, DRAINED, "left")
    for number in range(len(reasons)):
        counts.add_totals(f"expert/{number}", lambda: (Totals(counted={"rows": 1.0}),))
    state = State()
    for number, reason in enumerate(reasons):
        counts.note(state, state, [Fenced(name=f"expert/{number}", incarnation=1, reason=reason)])
    assert dict(counts.evictions) == {("expert", why): 1 for why in ("silent", "ended", "rejoined", "overdue")}
    assert counts.fenced["expert"] == len(reasons)
    assert counts.totals == {}


def test_what_no_counter_can_be_is_left_out() -> None:
    request = pb.RenewRequest(
        totals=[
            pb.Totals(counted={"rows": 5.0, "pairs": -1.0, "busy_s": math.nan, "calls": math.inf}),
            pb.Totals(peer="x" * 100, counted={"rows": 1.0}),
            *(pb.Totals(peer=f"expert/{n}", counted={"rows": 1.0}) for n in range(1000)),
        ]
    )
    found = totals_of(request)
    assert found[0] == Totals(counted={"rows": 5.0})
    assert len(found) <= 512 and all(len(each.peer) <= 64 for each in found)


def test_rails_and_slow_links_have_their_series() -> None:
    """Over the nixl transport; and a worker that finds a server slow says so with its load."""
    state = world(1, 2, [0b11])
    worker = MemberRecord(name="attention/7", pool="attention", incarnation=2, address="", pid=2, host="", ready=True)
    load = {"busy": 0.5, "slow_link:expert/0": 1.0, "corrupt:expert/0": 3.0}
    state = replace(
        state,
        members={**state.members, worker.name: worker},
        liveness={**state.liveness, worker.name: Liveness(renewed_s=0.0, load=load)},
    )
    counts = Counts()
    counts.add_totals(
        worker.name,
        lambda: (
            Totals(counted={"failovers": 4.0}),
            Totals(peer="expert/0", counted={"replies": 2.0, "latency_s": 0.5}),
            Totals(peer="expert/0", rail="mlx5_0", counted={"sent_bytes": 9.0, "live": 1.0}),
            Totals(peer="expert/0", rail="mlx5_1", counted={"sent_bytes": 1.0, "live": 0.0}),
        ),
    )
    page = RouterMetrics(Config(), lambda: state, counts, lambda: "").page().decode().splitlines()
    for line in (
        'eaas_rail_bytes_total{member="attention/7",peer="expert/0",rail="mlx5_0"} 9.0',
        'eaas_rail_live{member="attention/7",peer="expert/0",rail="mlx5_1"} 0.0',
        'eaas_link_slow{part="link",server="expert/0",worker="attention/7"} 1.0',
        'eaas_failovers_total{worker="attention/7"} 4.0',
        'eaas_link_latency_seconds_sum{server="expert/0",worker="attention/7"} 0.5',
        'eaas_member_load{member="attention/7",pool="attention",signal="busy"} 0.5',
    ):
        assert line in page, line
    assert not [line for line in page if "corrupt:" in line or "slow_link" in line]
