"""Stories of several models that come and go, and of what each has of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from router.events import (
    AddModel,
    Command,
    Exited,
    Fenced,
    Join,
    Joined,
    LauncherDetached,
    Left,
    Loaded,
    Refused,
    RemoveModel,
    Renewed,
    Routed,
    Scale,
    StartProcess,
    Tick,
)
from router.models import listed
from router.view import Model
from tests.router.told import Step, Told, cluster, lively, rest


def added(told: Told, hash: str = "n", experts: int = 2, attention: int = 1, expert_bytes: int = 1000) -> list[Command]:
    """An operator adds a model; the servers have opened it."""
    model = Model(hash=hash, name=f"model-{hash}", layers=1, experts=experts, expert_bytes=expert_bytes)
    commands = told.give(AddModel(model=model, attention=attention))
    for record in [record for record in told.state.members.values() if record.pool == "expert"]:
        opened = tuple(known.hash for known in told.state.models if record.opened >> known.number & 1)
        told.give(
            Loaded(
                name=record.name,
                incarnation=record.incarnation,
                held=record.loaded,
                epoch=told.state.epoch,
                opened=(*opened, hash),
            )
        )
    return commands


def both(step: Step, workers: int = 1, ordered: bool = True, **settings: object) -> Told:
    """A cluster that serves a second model, with workers of its own. ordered: a launcher started these."""
    told = cluster(step, **settings)  # type: ignore[arg-type]
    if not ordered:
        told.give(LauncherDetached(host="h"))
    added(told, attention=workers)
    for _ in range(workers):
        told.join("attention", model_hash="n")
    rest(told)
    return told


def models(told: Told) -> dict[str, tuple[int, int, bool]]:
    """Number, base and whether it leaves, by hash."""
    return {model.hash: (model.number, model.base, model.leaving) for model in told.state.models}


def a_second_model_is_served_beside_the_first(step: Step) -> None:
    told = both(step)
    assert models(told) == {"m": (0, 0, False), "n": (1, 2, False)}
    assert [told.state.members[f"expert/{n}"].serving for n in (1, 2)] == [0b1111, 0b1111]
    assert dict(told.state.wanted) == {"expert": 2, "attention": 1, "attention:model-n": 1}


def a_model_that_comes_again_has_its_bits_again(step: Step) -> None:
    """And another that came meanwhile has others."""
    told = both(step)
    told.give(RemoveModel(name="model-n"))
    rest(told, rounds=60, load={"running": 0.0})
    assert [told.state.members[f"expert/{n}"].target for n in (1, 2)] == [0b11, 0b11], "it is held still"
    assert "attention/2" not in told.state.members
    added(told, "o", experts=3)
    added(told)
    assert models(told) == {"m": (0, 0, False), "n": (1, 2, False), "o": (2, 4, False)}
    rest(told)
    assert [told.state.members[f"expert/{n}"].serving for n in (1, 2)] == [0b1111111] * 2


def a_model_that_leaves_ends_what_it_began(step: Step) -> None:
    """Its experts stay while anybody of its workers has something to do; then they go at once."""
    # An operator's own, of which no pool rids itself otherwise.
    told = both(step, workers=2, ordered=False)
    told.give(RemoveModel(name="n"))
    for _ in range(20):
        for name in ("attention/2", "attention/3"):
            incarnation = told.state.members[name].incarnation
            running = float(name == "attention/3")
            told.give(Renewed(name=name, incarnation=incarnation, load={"running": running, "waiting": 0.0}))
        told.give(Tick(), after_s=0.05)
        told.ack("attention/2")
        assert not any(record.draining for record in told.state.members.values()), "a stream runs"
        assert told.state.members["expert/1"].serving == 0b1111
        assert [model.leaving for model in listed(told.state)] == [False, True]
    refused = told.give(Join(pool="client", address="a", pid=9, host="h", model_hash="n", layers=1, experts=2))
    assert isinstance(refused[0], Refused), refused
    # Whoever was fenced may ask for as long as its lease would have lasted.
    rest(told, rounds=60, load={"running": 0.0})
    assert set(told.state.members) == {"expert/1", "expert/2", "attention/1"}
    assert told.state.members["expert/1"].target == 0b11
    assert "attention:model-n" not in told.state.wanted
    assert [model.hash for model in listed(told.state)] == ["m"], "its bits are nobody's, so no View need say whose"


def each_model_keeps_its_last_worker(step: Step) -> None:
    """The only worker of a model is not fenced for silence before its replacement had its time to start."""
    told = both(step, servers=4)
    lively(told, 5, dumb="attention/2")
    assert "attention/2" in told.state.members, told.state.gone


def rows_count_for_their_own_model(step: Step) -> None:
    told = both(step)
    for name, rows in (("attention/1", (1, 2)), ("attention/2", (40, 80))):
        sent = np.array(rows, np.uint32)
        incarnation = told.state.members[name].incarnation
        told.give(Routed(name=name, incarnation=incarnation, rows=sent, activated=np.zeros(2, np.uint32)))
    assert told.state.routed is not None
    assert told.state.routed.round().tolist() == [1, 2, 40, 80]


def a_model_that_comes_holds_up_no_repair(step: Step) -> None:
    """Its first copies are many and on their way; another's lost replicas are ordered all the same."""
    told = cluster(step, servers=3, experts=6, copies_in_flight=2, expert_bytes=1000)
    added(told, experts=12)
    told.give(Tick(), after_s=10.0)
    for record in list(told.state.members.values()):
        told.renew(record.name)
    told.give(Tick(), after_s=0.1)
    away = [(record.target & ~record.loaded).bit_count() for record in told.state.members.values()]
    assert sum(away) > 2, away
    told.give(Exited(host="h", pid=1))
    told.ack("attention/1")
    first = [record.target & ~record.loaded & 0b111111 for record in told.state.members.values()]
    assert any(first), "the repair waits for copies of another model"


def copies_on_their_way_are_as_many_as_their_own_bytes_allow(step: Step) -> None:
    """A model with experts of three times the bytes has a third of the first's copies on their way."""
    told = cluster(step, servers=3, bytes_in_flight=6000, expert_bytes=1000)
    added(told, experts=12, expert_bytes=3000)
    told.give(Tick(), after_s=10.0)
    rest(told)
    told.give(Exited(host="h", pid=1))
    short = told.state.members["expert/2"].share & ~told.state.members["expert/2"].loaded
    assert (short >> 2).bit_count() > 2, f"{short:x}"
    for _ in range(20):
        away = [(record.target & ~record.loaded) >> 2 for record in told.state.members.values()]
        assert sum(bits.bit_count() for bits in away) <= 2, away
        rest(told, rounds=1)


def workers_of_a_model_drain_for_as_long_as_their_own_pool_lets_them(step: Step) -> None:
    told = both(step, workers=2)
    told.give(Scale(pool="attention", wanted=1, drain_s=100.0))
    told.give(Scale(pool="attention:model-n", wanted=1, drain_s=1.0))
    rest(told, rounds=25, load={"running": 1.0})
    workers = [name for name in told.state.members if name.startswith("attention")]
    assert len(workers) == 2, f"{workers}: one has drained for longer than it may"


def a_model_that_nobody_can_open_disturbs_no_rest(step: Step) -> None:
    """Its folder is on no host, say: the others are placed and balanced as if it were not there."""
    told = cluster(step, workers=1)
    told.give(AddModel(model=Model(hash="n", name="other", layers=1, experts=2), attention=0))
    rest(told)
    assert told.state.settled
    epoch = told.state.epoch
    rest(told)
    assert told.state.epoch == epoch


def a_model_under_another_name_has_the_workers_of_that_name_alone(step: Step) -> None:
    told = both(step)
    told.give(RemoveModel(name="model-n"))
    renamed = Model(hash="n", name="other", layers=1, experts=2)
    commands = told.give(AddModel(model=renamed, attention=1))
    assert not [command for command in commands if isinstance(command, StartProcess)], commands
    assert dict(told.state.wanted) == {"expert": 2, "attention": 1, "attention:other": 1}


def load_of_a_model_is_not_taken_for_that_of_another(step: Step) -> None:
    """One goes and another comes between two looks at the load, with as many layers, of more experts."""
    told = both(step, servers=3, redundant=1, balance_s=10.0)

    def asked(name: str, experts: int) -> None:
        rows = np.full(experts, 1000, np.uint32)
        incarnation = told.state.members[name].incarnation
        told.give(Routed(name=name, incarnation=incarnation, rows=rows, activated=rows))

    asked("attention/1", 2)
    asked("attention/2", 2)
    rest(told, load={"running": 0.0})
    told.give(RemoveModel(name="n"))
    rest(told, rounds=30, load={"running": 0.0})
    added(told, "o", experts=5)
    told.join("attention", model_hash="o", experts=5)
    rest(told, rounds=10)
    asked("attention/3", 5)
    for _ in range(5):
        asked("attention/1", 2)
        rest(told)
    assert [len(seen.load) for seen in told.state.seen] == [2, 5]


def a_model_sleeps_under_nobody_who_drains(step: Step) -> None:
    """A worker that drains goes on with what it has begun."""
    told = both(step, workers=2, sleep_after_s=1.0)
    told.give(Left(name="attention/2", incarnation=told.state.members["attention/2"].incarnation, drain=True))
    for _ in range(20):
        for record in list(told.state.members.values()):
            load = {"running": float(record.name in ("attention/1", "attention/2"))}
            told.give(Renewed(name=record.name, incarnation=record.incarnation, load=load))
            if record.pool == "attention":
                told.ack(record.name)
        told.give(Tick(), after_s=0.1)
        assert not any(model.asleep for model in told.state.models), "a stream runs"
    rest(told, load={"running": 0.0})
    assert all(model.asleep for model in told.state.models)


def a_model_wakes_at_once_though_some_server_never_opened_it(step: Step) -> None:
    told = cluster(step, sleep_after_s=1.0)
    model = Model(hash="n", name="model-n", layers=1, experts=2)
    told.give(AddModel(model=model, attention=1))
    opens = told.state.members["expert/1"]
    said = {"name": opens.name, "incarnation": opens.incarnation, "held": opens.loaded}
    told.give(Loaded(**said, epoch=told.state.epoch, opened=("n",)))  # type: ignore[arg-type]
    told.join("attention", model_hash="n")
    rest(told, rounds=60, load={"running": 1.0})
    assert told.state.members["expert/1"].serving == 0b1111
    rest(told, load={"running": 0.0})
    assert told.state.members["expert/1"].target == 0
    incarnation = told.state.members["attention/2"].incarnation
    told.give(Renewed(name="attention/2", incarnation=incarnation, load={"running": 1.0}))
    assert told.state.members["expert/1"].target == 0b1100, "it waits for a server that will never open it"


def the_workers_of_one_model_judge_for_themselves(step: Step) -> None:
    """A server whose experts of one model are damaged goes, though more workers ask it for one that is sound."""
    told = both(step, servers=5, workers=3)
    for _ in range(60):
        for record in list(told.state.members.values()):
            load = {"servers_ok": 5.0} | ({"corrupt:expert/1": 3.0} if record.name == "attention/1" else {})
            told.give(Renewed(name=record.name, incarnation=record.incarnation, load=load))
        told.load_all()
        for record in list(told.state.members.values()):
            if record.pool == "attention":
                told.ack(record.name)
        fenced = [c.name for c in told.give(Tick(), after_s=0.1) if isinstance(c, Fenced)]
        if fenced:
            assert fenced == ["expert/1"]
            return
    raise AssertionError("it gives damaged rows for ever")


def a_worker_of_no_model_that_is_served_is_refused(step: Step) -> None:
    told = both(step)
    for hash, joins in (("n", True), ("o", False)):
        asked = Join(pool="attention", address="a", pid=9, host="h", model_hash=hash)
        assert any(isinstance(command, Joined) for command in told.give(asked)) == joins


def who_starts_the_router_brings_back_no_model_that_was_removed(step: Step) -> None:
    """It repeats what it remembers: of a model that the journal knows that changes nothing, whatever became of it."""
    told = both(step)
    told.give(Scale(pool="attention:model-n", wanted=3))
    again = AddModel(model=replace(told.state.models[1], weight=7), attention=1, again=True)
    for rounds in (0, 60):
        before = told.state
        told.give(again)
        assert (told.state.models, told.state.wanted) == (before.models, before.wanted)
        told.give(RemoveModel(name="n"))
        rest(told, rounds=rounds, load={"running": 0.0})
    told.give(again)
    assert [model.hash for model in listed(told.state)] == ["m"], "an operator had removed it"


def a_journal_that_is_lost_loses_no_model(step: Step) -> None:
    """The first, which nobody named, keeps its place, though a worker of another is the first to come."""
    told = both(step)
    told.give(AddModel(model=Model(hash="m", name="model-m", layers=1, experts=2), attention=1))
    for names in (("", "model-n"), ("model-m", "model-n")):
        remembered = [replace(m, name=n) for m, n in zip(told.state.models, names, strict=True)]
        lost = Told(step, experts_wanted=2, replicas=2)
        for model in remembered:
            lost.give(AddModel(model=model, attention=1, again=True))
        for pool, hash in (("attention", "n"), ("expert", "m"), ("expert", "m"), ("attention", "m")):
            lost.join(pool, model_hash=hash)
        assert [(model.hash, model.name) for model in lost.state.models] == [*zip("mn", names, strict=True)]
        assert dict(lost.state.wanted) == {"expert": 2, "attention": 1, "attention:model-n": 1}


def a_worker_that_comes_first_does_not_say_which_model_is_the_first(step: Step) -> None:
    """Of several models' processes any may come first; servers are of the first model."""
    told = Told(step)
    told.join("attention", model_hash="n")
    told.join("expert", model_hash="m")
    assert [model.hash for model in told.state.models] == ["m"]
    assert "attention/1" not in told.state.members
    added(told)
    told.join("attention", model_hash="n")
    told.join("attention")
    assert [model.hash for model in told.state.models] == ["m", "n"]
    # Once there was a server it is known, whoever is left.
    told.give(Exited(host="h", pid=2))
    refused = told.give(Join(pool="expert", address="a", pid=9, host="h", model_hash="o", layers=1, experts=2))
    assert isinstance(refused[0], Refused), refused


SEVERAL_STORIES = (
    who_starts_the_router_brings_back_no_model_that_was_removed,
    a_journal_that_is_lost_loses_no_model,
    a_worker_that_comes_first_does_not_say_which_model_is_the_first,
    a_second_model_is_served_beside_the_first,
    a_model_that_comes_again_has_its_bits_again,
    a_model_that_leaves_ends_what_it_began,
    each_model_keeps_its_last_worker,
    rows_count_for_their_own_model,
    a_model_that_comes_holds_up_no_repair,
    copies_on_their_way_are_as_many_as_their_own_bytes_allow,
    workers_of_a_model_drain_for_as_long_as_their_own_pool_lets_them,
    a_model_that_nobody_can_open_disturbs_no_rest,
    a_model_under_another_name_has_the_workers_of_that_name_alone,
    load_of_a_model_is_not_taken_for_that_of_another,
    a_model_sleeps_under_nobody_who_drains,
    a_model_wakes_at_once_though_some_server_never_opened_it,
    the_workers_of_one_model_judge_for_themselves,
    a_worker_of_no_model_that_is_served_is_refused,
)
