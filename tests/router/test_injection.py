"""Faults on their way: who is told, who is not, and why; with a real router process and real clients."""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from router.client import FaultRefused, RouterClient
from router.faults import KINDS, POINT_WAIT_S, POINTS, Fault, FaultInvalid, FaultsTaken
from router.injection import MOST_ACTIVE, Injections, Watcher
from router.messages import from_message, to_message
from router.proto import router_pb2 as pb
from tests.router.test_service import HOST, RouterProcess, until


class Taker:
    """A process that would hurt itself, and only writes down that it is told to."""

    def __init__(self, **takes: tuple[str, ...]) -> None:
        self.takes = FaultsTaken(kinds=tuple(KINDS), **takes)
        self.told: list[Fault | str] = []
        self.active = 0

    def begin(self, fault: Fault) -> None:
        self.told.append(fault)
        self.active += 1

    def end(self, fault_id: str) -> None:
        self.told.append(fault_id)
        self.active -= 1


class Member:
    """A gateway, so that nothing need be loaded."""

    def __init__(self, router: RouterProcess, taker: Taker | None, number: int) -> None:
        self.client, self.taker = RouterClient(router.address), taker
        self.name = self.client.join(pool="gateway", address="nowhere", pid=2_000_000 + number, host=HOST).name
        self.client.start(faults=taker)

    @property
    def told(self) -> list[Fault | str]:
        assert self.taker is not None
        return self.taker.told


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterProcess]:
    made = RouterProcess(tmp_path, "--allow-chaos", "--admin-port", "0")
    yield made
    if made.process is not None and made.process.poll() is None:
        made.stop(signal.SIGKILL)


@pytest.fixture
def join(router: RouterProcess) -> Iterator[Callable[[Taker | None], Member]]:
    members: list[Member] = []

    def make(taker: Taker | None) -> Member:
        members.append(Member(router, taker, len(members)))
        return members[-1]

    yield make
    for member in members:
        member.client.close()


Join = Callable[[Taker | None], Member]


def test_each_member_named_is_told_at_once_and_nobody_else(join: Join) -> None:
    first, second, third = (join(Taker()) for _ in range(3))
    fault = Fault(id="", kind="loss", share=0.25, peers=(third.name,), for_s=30.0, seed=(1 << 64) - 1)
    began_s = time.monotonic()
    given = first.client.inject([first.name, second.name, first.name], fault)
    until(lambda: first.told and second.told)
    told = Fault.from_dict(fault.to_dict() | {"id": given})
    assert (first.told, second.told, third.told) == ([told], [told], [])
    (known,) = third.client.faults()
    assert (known.fault, known.names, known.active) == (told, (first.name, second.name), True)
    assert 29 - (time.monotonic() - began_s) < known.remaining_s <= 30
    assert known.ends_s - known.began_s == pytest.approx(30)
    assert third.client.clear(given) == [given]
    until(lambda: first.told[1:] == [given] == second.told[1:])
    assert [known.active for known in third.client.faults()] == [False]
    assert third.client.clear() == []


def test_no_id_that_is_made_up_is_that_of_an_active_fault(join: Join) -> None:
    member = join(Taker())
    (term, number) = member.client.inject([member.name], Fault(id="", kind="slow", times=2.0)).split("-")[1:]
    taken = f"fault-{term}-{int(number) + 1}"
    assert member.client.inject([member.name], Fault(id=taken, kind="slow", times=2.0)) == taken
    assert member.client.inject([member.name], Fault(id="", kind="slow", times=2.0)) != taken
    assert sum(known.active for known in member.client.faults()) == 3
    member.client.clear()


def test_a_fault_says_the_same_after_its_way(join: Join) -> None:
    for fault in (
        Fault(id="a", kind="freeze", where="computed", after=7, for_s=0.5),
        Fault(id="b", kind="rail-down", rail="eth0"),
        Fault(id="c", kind="slow", times=3.5),
        Fault(id="d", kind="corrupt", where="nan", share=0.5, peers=("x", "y"), seed=9),
        Fault(id="e", kind="delay", by_s=0.25),
    ):
        assert from_message(Fault, to_message(fault)) == fault
    assert {field.name for field in fields(Fault)} == {f.name for f in to_message(fault).DESCRIPTOR.fields}


def test_what_cannot_be_done_is_refused_and_nobody_is_told(join: Join) -> None:
    willing = join(Taker(points=("computed",), rails=("eth0",)))
    unwilling = join(None)
    for names, fault, words in (
        ([], Fault(id="a", kind="kill"), "0 targets"),
        (
            ["gateway/9"],
            Fault(id="a", kind="kill"),
            "'gateway/9' is no member; there are gateway/1, gateway/2",
        ),
        (
            [willing.name, unwilling.name],
            Fault(id="a", kind="kill"),
            "gateway/2 was not started with --allow-chaos",
        ),
        ([willing.name], Fault(id="a", kind="loss", peers=("expert/8",)), "expert/8 is no member"),
        (
            [willing.name],
            Fault(id="a", kind="kill", where="combined"),
            "never passes combined; it passes computed",
        ),
        ([willing.name], Fault(id="a", kind="rail-down", rail="eth1"), "has no rail 'eth1'; it has eth0"),
        ([willing.name], Fault(id="a" * 129, kind="kill"), "longer than 128"),
    ):
        with pytest.raises(FaultRefused, match=words):
            willing.client.inject(names, fault)
    assert willing.told == [] == willing.client.faults()
    willing.client.inject([willing.name], Fault(id="a", kind="loss"))
    with pytest.raises(FaultRefused, match="'a' is active already"):
        willing.client.inject([willing.name], Fault(id="a", kind="loss"))


def test_no_more_are_active_than_the_limit(join: Join) -> None:
    member = join(Taker())
    for number in range(MOST_ACTIVE):
        member.client.inject([member.name], Fault(id=str(number), kind="loss", for_s=60.0))
    with pytest.raises(FaultRefused, match=f"{MOST_ACTIVE} faults are active"):
        member.client.inject([member.name], Fault(id="more", kind="loss"))
    member.client.clear("3")
    member.client.inject([member.name], Fault(id="more", kind="loss", for_s=0.1))
    until(lambda: sum(known.active for known in member.client.faults()) == MOST_ACTIVE - 1)
    member.client.inject([member.name], Fault(id="again", kind="loss"))
    assert len(member.client.clear()) == MOST_ACTIVE


def test_a_router_that_does_not_allow_chaos_passes_nothing_on(tmp_path: Path) -> None:
    router = RouterProcess(tmp_path)
    member = Member(router, Taker(), 0)
    try:
        for act in (
            lambda: member.client.inject([member.name], Fault(id="a", kind="kill")),
            member.client.clear,
        ):
            with pytest.raises(FaultRefused, match="router was not started with --allow-chaos"):
                act()
        assert member.client.faults() == [] == member.told
    finally:
        member.client.close()
        router.stop(signal.SIGKILL)


def test_a_router_that_came_back_finds_its_members_again(router: RouterProcess, join: Join) -> None:
    member = join(Taker())
    member.client.inject([member.name], Fault(id="a", kind="loss", for_s=60.0))
    router.stop(signal.SIGKILL)
    until(lambda: member.told)
    router.start()
    assert member.client.faults() == [], "what was injected is the member's to end"
    member.client.inject([member.name], Fault(id="b", kind="loss", for_s=60.0))
    until(lambda: len(member.told) == 2)


def test_a_router_that_came_back_clears_what_it_never_heard_of(router: RouterProcess, join: Join) -> None:
    member = join(Taker())
    first = member.client.inject([member.name], Fault(id="", kind="loss", for_s=60.0))
    router.stop(signal.SIGKILL)
    router.start()
    assert member.client.clear() == []
    until(lambda: member.told[1:] == [""])
    until(lambda: member.client.clear("x") == [] and "x" in member.told)
    second = member.client.inject([member.name], Fault(id="", kind="loss", for_s=60.0))
    assert second != first, "an id is given once, whoever gives it"


def test_a_fault_that_a_process_cannot_do_leaves_it_a_member(join: Join) -> None:
    class Broken(Taker):
        def begin(self, fault: Fault) -> None:
            super().begin(fault)
            raise OSError("no process can be started")

    member = join(Broken())
    for number in range(2):
        member.client.inject([member.name], Fault(id=str(number), kind="loss"))
    until(lambda: len(member.told) == 2)


def test_faults_are_counted_and_members_report_theirs(router: RouterProcess, join: Join) -> None:
    member = join(Taker())
    for number in range(3):
        member.client.inject([member.name], Fault(id=str(number), kind="loss", for_s=60.0))
    member.client.clear("0")

    def load() -> object:
        found = member.client.status().view.member(member.name)
        return found and dict(found.load)

    until(lambda: load() == {"faults": 2.0})
    with urllib.request.urlopen(f"http://{router.admin}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    assert 'eaas_faults_injected_total{kind="loss"} 3.0' in lines
    assert 'eaas_faults_injected_total{kind="kill"} 0.0' in lines
    assert "eaas_faults_active 2.0" in lines


def test_a_member_that_is_gone_is_under_no_fault(join: Join) -> None:
    member, other = join(Taker()), join(Taker())
    member.client.inject([member.name], Fault(id="a", kind="loss", for_s=60.0))
    member.client.leave()
    until(lambda: not any(known.active for known in other.client.faults()))


class Scene:
    """The list of faults with one member, whose streams are played by hand."""

    def __init__(self) -> None:
        self.members = {"expert/1": 7}
        self.injections = Injections(True, lambda: self.members, lambda: 3)

    def watch(self, *, takes: bool = True) -> Watcher:
        watcher = Watcher(7, FaultsTaken(kinds=tuple(KINDS)) if takes else None)
        self.injections.attach("expert/1", watcher)
        return watcher

    async def inject(self, *watchers: Watcher, **fault: object) -> list[pb.FaultOrder]:
        """Inject, those streams carrying what there is; returns what was carried."""
        begun = asyncio.create_task(self.injections.inject(["expert/1"], Fault(**{"id": "", **fault})))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        carried = [order for watcher in watchers for order in self.carry(watcher)]
        await begun
        return carried

    def carry(self, watcher: Watcher) -> list[pb.FaultOrder]:
        taken = watcher.take()
        watcher.told.set()
        return taken


def test_what_a_stream_did_not_carry_was_not_injected() -> None:
    async def scene() -> None:
        scene = Scene()
        watcher = scene.watch()
        with pytest.raises(FaultRefused, match="expert/1 could not be told: the fault is taken back"):
            await scene.inject(kind="partition", for_s=60.0)
        assert not scene.injections.active
        scene.injections.detach("expert/1", watcher)
        (end,) = scene.carry(scene.watch())
        assert end.end == "fault-3-1", "should it have come through after all"

    asyncio.run(scene())


def test_who_dies_of_what_it_was_told_is_not_waited_for() -> None:
    """Its stream ended with it, before that said that the order was on its way."""

    async def scene() -> None:
        scene = Scene()
        watcher = scene.watch()
        begun = asyncio.create_task(scene.injections.inject(["expert/1"], Fault(id="", kind="kill")))
        await asyncio.sleep(0.05)
        (order,) = watcher.take()
        scene.injections.detach("expert/1", watcher)
        assert not begun.done(), "nobody has said yet that it is gone"
        scene.members.clear()
        injection = await asyncio.wait_for(begun, 0.5)
        assert injection.names == ("expert/1",) and order.begin.kind == "kill"

    asyncio.run(scene())


def test_who_was_away_when_a_fault_was_cleared_is_told_on_its_return() -> None:
    async def scene() -> None:
        scene = Scene()
        watcher = scene.watch()
        await scene.inject(watcher, id="x", kind="delay", by_s=1.0, for_s=3600.0)
        scene.injections.detach("expert/1", watcher)
        assert scene.injections.clear("x") == ["x"]
        watcher = scene.watch()
        assert [order.end for order in scene.carry(watcher)] == ["x"]
        await scene.inject(watcher, id="x", kind="loss", for_s=60.0)
        scene.injections.detach("expert/1", watcher)
        assert not scene.carry(scene.watch()), "one of that id has begun since"
        assert not scene.carry(scene.watch(takes=False)), "who takes none is under none"

    asyncio.run(scene())


def test_another_stream_in_a_members_name_takes_nothing_from_it() -> None:
    async def scene() -> None:
        scene = Scene()
        watcher, other = scene.watch(), scene.watch(takes=False)
        assert [order.WhichOneof("order") for order in await scene.inject(watcher, kind="loss")] == ["begin"]
        scene.injections.detach("expert/1", other)
        assert [order.WhichOneof("order") for order in await scene.inject(watcher, kind="loss")] == ["begin"]

    asyncio.run(scene())


def test_a_process_is_frozen_once_at_a_time() -> None:
    async def scene() -> None:
        scene = Scene()
        watcher = scene.watch()
        await scene.inject(watcher, id="long", kind="freeze", for_s=60.0)
        with pytest.raises(FaultRefused, match="expert/1 is under the freeze long already"):
            await scene.inject(watcher, kind="freeze", for_s=1.0)
        scene.injections.clear("long")
        await scene.inject(watcher, kind="freeze", for_s=1.0)

    asyncio.run(scene())


def test_a_fault_lasts_as_long_as_anything_of_it_can_come() -> None:
    assert Fault(id="a", kind="loss", for_s=3.0).lasts_s == 3.0
    assert Fault(id="a", kind="kill", for_s=3.0).lasts_s == 0.0
    assert Fault(id="a", kind="kill", where="computed").lasts_s == POINT_WAIT_S
    assert Fault(id="a", kind="freeze", where="computed", for_s=3.0).lasts_s == POINT_WAIT_S + 3.0
    with pytest.raises(FaultInvalid, match="slow takes no peers"):
        Fault(id="a", kind="slow", times=2.0, peers=("x",))


def test_native_code_knows_every_point() -> None:
    header = (Path(__file__).parents[2] / "p2p" / "native" / "faults.h").read_text()
    assert [point for point in POINTS if f'"{point}"' not in header] == []
