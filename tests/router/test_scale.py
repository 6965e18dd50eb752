"""The core alone with 600 members and 61 x 256 experts: what it takes to react is counted in events and calls."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from router import moves
from router.bitmap import everything, in_at_least
from router.core import step
from router.events import Acked, Command, Exited, Join, Publish, Renewed, Tick
from tests.router.told import Told, cluster

SERVERS, WORKERS, GATEWAYS, LAYERS, EXPERTS, HOST = 512, 64, 24, 61, 256, 8


def full() -> Told:
    """All serving, eight servers to a host, two replicas of every expert."""
    told = Told(step, experts_wanted=SERVERS, attention_wanted=WORKERS, replicas=2, most_servers=SERVERS + 1)
    capacity = 4 * LAYERS * EXPERTS // SERVERS
    for pool, count in (("expert", SERVERS), ("attention", WORKERS), ("gateway", GATEWAYS)):
        for _ in range(count):
            told.pids += 1
            host = f"host-{told.pids // HOST}"
            shape = {"layers": LAYERS, "experts": EXPERTS, "model_hash": "m", "zone": host}
            join = Join(pool=pool, address="a", pid=told.pids, host=host, capacity=capacity, **shape)  # type: ignore[arg-type]
            told.give(join)
    speak(told)
    speak(told)
    assert served(told) == everything(LAYERS, EXPERTS)
    return told


def speak(told: Told) -> int:
    """All load, renew and ack, and a tick passes; how many Views were published."""
    views: list[Command] = []
    for record in list(told.state.members.values()):
        if record.target != record.loaded:
            views += told.loaded(record.name, record.target, told.state.epoch)
        views += told.give(Renewed(name=record.name, incarnation=record.incarnation))
        acked = Acked(name=record.name, incarnation=record.incarnation, epoch=told.state.epoch)
        views += told.give(acked)
    views += told.give(Tick(), after_s=told.config.tick_s)
    return published(views)


def served(told: Told) -> int:
    """The experts that two servers may be asked for."""
    return in_at_least(2, [record.serving for record in told.state.members.values()])


def published(commands: list[Command]) -> int:
    return sum(isinstance(command, Publish) for command in commands)


@pytest.fixture(scope="module")
def formed() -> Told:
    return full()


@pytest.fixture
def told(formed: Told) -> Told:
    other = Told(step, **vars(formed.config))
    other.state, other.now_s, other.pids = formed.state, formed.now_s, formed.pids
    return other


def test_a_lost_host_is_told_with_each_exit_and_replaced_by_the_next_tick(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[int] = []
    place = moves.place
    monkeypatch.setattr(moves, "place", lambda **given: placed.append(1) or place(**given))
    lost = [r for r in told.state.members.values() if r.pool == "expert" and r.host == "host-20"]
    assert len(lost) == HOST
    for record in lost:
        assert published(told.give(Exited(host=record.host, pid=record.pid))) == 1
        assert record.name not in told.state.members
    assert not placed, "who is lost was not told before what it held was placed"
    assert published(told.give(Tick(), after_s=0.02)) == 1
    shares = in_at_least(2, [record.share for record in told.state.members.values()])
    assert (len(placed), shares) == (1, everything(LAYERS, EXPERTS))
    # The budget of copies that move at once is 256 of 488.
    views = sum(speak(told) for _ in range(4))
    assert served(told) == everything(LAYERS, EXPERTS)
    assert views <= 4, f"{views} Views for what four ticks brought"
    assert len(placed) == 1


def test_a_silent_host_is_told_before_what_it_held_is_placed(told: Told) -> None:
    lost = {r.name: r for r in told.state.members.values() if r.host == "host-20"}
    for _ in range(40):
        for record in list(told.state.members.values()):
            if record.name not in lost:
                told.give(Renewed(name=record.name, incarnation=record.incarnation))
        commands = told.give(Tick(), after_s=0.1)
        if lost.keys() - told.state.members.keys():
            break
    assert published(commands) == 1 and not lost.keys() & told.state.members.keys()
    targets = [record.target for record in told.state.members.values()]
    assert in_at_least(2, targets) != everything(LAYERS, EXPERTS), "the loss waited for a placement"
    told.give(Tick(), after_s=0.02)
    shares = [record.share for record in told.state.members.values()]
    assert in_at_least(2, shares) == everything(LAYERS, EXPERTS)


def calls(what: Callable[[], object]) -> int:
    """Calls of functions, built-in ones too."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        what()
    finally:
        sys.setprofile(None)
    return count


def test_a_renewal_costs_as_many_calls_among_600_members_as_among_4(told: Told) -> None:
    small = cluster(step, servers=3)

    def renewal(one: Told) -> int:
        record = one.state.members["expert/3"]
        renewed = Renewed(name=record.name, incarnation=record.incarnation, load={"busy": 0.5})
        acked = Acked(name=record.name, incarnation=record.incarnation, epoch=one.state.epoch)
        return calls(lambda: (one.give(renewed), one.give(acked)))

    assert renewal(told) == renewal(small)


def test_a_pool_without_room_is_placed_without_a_search_for_each_expert() -> None:
    """Some of its servers have come: to look for room anew for each expert that has none took minutes."""
    servers = {f"expert/{n}": 4 * LAYERS * EXPERTS // SERVERS for n in range(100)}
    zones = {name: f"zone-{n // HOST}" for n, name in enumerate(servers)}
    shape = {"layers": LAYERS, "experts": EXPERTS, "replicas": 1}
    count = calls(lambda: moves.place(**shape, capacity=servers, zones=zones))  # type: ignore[arg-type]
    assert count < 400_000, count
