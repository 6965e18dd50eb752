"""Promises of pools that hold several numerics classes: each has replicas of its own, as far as its servers go."""

from __future__ import annotations

import random

import pytest

from router.bitmap import to_bytes
from router.core import step
from router.events import Exited, Left, Scale, Tick
from router.records import view_of
from router.view import Member, View, can_mix, can_talk, carrier_of, class_for, covering, format_of, narrowed
from tests.router.told import Told, lively, rest

CPU, CUDA, OTHER_CPU = "cpu-bf16-fma-1", "cuda-sm90-bf16-triton3.6-1", "cpu-bf16-vdpbf16-1"
EXPERTS = 6
ALL = (1 << EXPERTS) - 1


def mixed(*classes: str, replicas: int = 2, **settings: object) -> Told:
    """Expert servers of these classes, and an attention worker of each, all serving."""
    capacity = settings.pop("capacity", 0)
    told = Told(step, experts_wanted=len(classes), replicas=replicas, attention_wanted=0, **settings)
    for name in classes:
        told.join(experts=EXPERTS, numerics_class=name, capacity=capacity)
    for name in dict.fromkeys(classes):
        told.join("attention", experts=EXPERTS, numerics_class=name)
    rest(told)
    return told


def copies(told: Told, numerics_class: str) -> list[int]:
    """On how many servers of a class each expert is served."""
    servers = [r for r in told.state.members.values() if r.pool == "expert"]
    own = [r.serving for r in servers if r.numerics_class == numerics_class]
    return [sum(held >> expert & 1 for held in own) for expert in range(EXPERTS)]


def test_each_class_holds_every_expert_as_often_as_wanted() -> None:
    told = mixed(CPU, CUDA, CPU, CUDA, CPU)
    assert copies(told, CPU) == copies(told, CUDA) == [2] * EXPERTS


def test_a_class_of_one_server_holds_every_expert_once_beside_the_others() -> None:
    told = mixed(CPU, CPU, CUDA)
    assert copies(told, CPU) == [2] * EXPERTS
    assert copies(told, CUDA) == [1] * EXPERTS


def test_a_class_that_comes_later_gets_copies_of_its_own_and_takes_none() -> None:
    told = mixed(CPU, CPU)
    before = {r.name: r.share for r in told.state.members.values()}
    told.join(experts=EXPERTS, numerics_class=CUDA)
    rest(told)
    assert copies(told, CUDA) == [1] * EXPERTS
    assert {name: told.state.members[name].share for name in before} == before


def test_a_loss_is_made_good_within_the_class() -> None:
    told = mixed(CPU, CPU, CPU, CUDA, CUDA, CUDA)
    before = {r.name: r.share for r in told.state.members.values() if r.numerics_class == CPU}
    told.give(Exited(host="h", pid=4))
    rest(told)
    assert copies(told, CUDA) == [2] * EXPERTS
    assert {name: told.state.members[name].share for name in before} == before


def test_a_class_without_room_holds_what_fits() -> None:
    told = mixed(CPU, CPU, CUDA, replicas=1, capacity=4)
    assert copies(told, CPU) == [1] * EXPERTS
    assert sum(copies(told, CUDA)) == 4
    view = view_of(told.config, told.state)
    assert covering(view) == {CPU}


def test_the_last_of_a_class_drains_once_other_classes_hold_all() -> None:
    told = mixed(CPU, CPU, CUDA)
    last = "expert/3"
    told.give(Left(name=last, incarnation=told.state.members[last].incarnation, drain=True))
    rest(told)
    assert last not in told.state.members
    # One of two waits for the other.
    told = mixed(CPU, CUDA, CUDA, replicas=1)
    first = next(r.name for r in told.state.members.values() if r.numerics_class == CUDA)
    told.give(Left(name=first, incarnation=told.state.members[first].incarnation, drain=True))
    for _ in range(3):
        told.give(Tick(), after_s=0.1)
    assert first in told.state.members, "it went before its class had copies elsewhere"
    rest(told)
    assert first not in told.state.members and copies(told, CUDA) == [1] * EXPERTS


def test_a_silent_last_replica_stays_while_its_class_can_copy_and_goes_where_only_others_can() -> None:
    told = mixed(CPU, CPU, CUDA)
    _, fenced_s = lively(told, 20.0, dumb="expert/3")
    assert fenced_s, "the last server of a class was kept though it never spoke again"
    told = mixed(CPU, CPU, CUDA, CUDA, replicas=1)
    silent = "expert/3"
    held = told.state.members[silent].serving
    lively(told, 20.0, dumb=silent)
    assert silent not in told.state.members
    assert held and copies(told, CUDA) == [1] * EXPERTS


def test_a_pool_shrinks_by_servers_that_are_not_the_last_of_their_class() -> None:
    told = mixed(CPU, CPU, CUDA)
    for record in list(told.state.members.values()):
        told.state.members[record.name].__dict__["ordered"] = True
    told.give(Scale(pool="expert", wanted=2, drain_s=60.0))
    rest(told)
    left = sorted(r.numerics_class for r in told.state.members.values() if r.pool == "expert")
    assert left == [CPU, CUDA]


def test_whatever_comes_and_goes_each_class_is_whole_again() -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    draw = random.Random(seed)
    told = mixed(CPU, CUDA, OTHER_CPU)
    for _ in range(40):
        servers = [r for r in told.state.members.values() if r.pool == "expert"]
        if len(servers) < 3 or draw.random() < 0.5:
            told.join(experts=EXPERTS, numerics_class=draw.choice([CPU, CUDA, OTHER_CPU]))
        else:
            told.give(Exited(host="h", pid=draw.choice(servers).pid))
        rest(told, rounds=25)
        found: dict[str, int] = {}
        for record in told.state.members.values():
            if record.pool == "expert":
                found[record.numerics_class] = found.get(record.numerics_class, 0) + 1
        for name, count in found.items():
            assert copies(told, name) == [min(2, count)] * EXPERTS, f"seed {seed}: {name} of {found}"


def member(name: str, numerics_class: str, held: int) -> Member:
    serving = to_bytes(held, 1, EXPERTS)
    return Member(
        name=name, pool="expert", state="serving", incarnation=1, address="a", pid=1, host="h",
        numerics_class=numerics_class, serving=serving,
    )  # fmt: skip


def view(*members: Member) -> View:
    return View(term=1, epoch=1, replicas_wanted=1, layers=1, experts=EXPERTS, members=members)


def test_a_worker_asks_its_own_class_else_one_that_it_can_talk_with() -> None:
    cpu, cuda = member("expert/1", CPU, ALL), member("expert/2", CUDA, ALL)
    part = member("expert/3", OTHER_CPU, 1)
    assert class_for(view(cpu, cuda, part), OTHER_CPU) == OTHER_CPU
    assert class_for(view(cuda, part, cpu), "cpu-bf16-torch-1") == CPU, "one that covers the model goes first"
    assert class_for(view(cuda, part), CPU) is None, "one that does not cover the model is no help"
    assert class_for(view(cuda, part), OTHER_CPU) == OTHER_CPU, "its own will be whole"
    assert class_for(view(cuda), CPU) is None
    assert class_for(view(), CPU) is None
    assert covering(view(cpu, cuda, part)) == {CPU, CUDA}
    assert narrowed(view(cpu, cuda, part), CUDA) == view(cuda)
    assert narrowed(view(cpu, cuda), None) == view()


@pytest.mark.parametrize(
    ("one", "other", "mix", "talk"),
    [
        (CPU, OTHER_CPU, True, True),
        (CPU, CUDA, True, False),
        ("cpu-f32-fma-1", CPU, False, False),
        ("cpu-int8-g64-1", CPU, False, False),
        ("", CUDA, True, True),
        ("odd", "other", False, False),
        ("odd", "odd", True, True),
    ],
)
def test_who_can_mix_and_who_can_talk(one: str, other: str, mix: bool, talk: bool) -> None:
    assert (can_mix(one, other), can_talk(one, other)) == (mix, talk)
    assert (can_mix(other, one), can_talk(other, one)) == (mix, talk)


def test_a_name_tells_carrier_and_format() -> None:
    assert [carrier_of(name) for name in (CPU, CUDA)] == ["cpu", "cuda"]
    assert [format_of(name) for name in (CPU, CUDA, "cpu-int8-g64-1", "odd")] == ["bf16", "bf16", "int8", ""]
