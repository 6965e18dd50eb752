"""The router's core, one promise at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.bitmap import from_bytes, pairs
from router.core import step
from router.events import Acked, Exited, Join, Refused, Renewed, Tick
from router.moves import allowed_copies
from router.records import acked_by_all, phase, view_of
from router.state import Config, ConfigInvalid
from router.view import WARMING
from tests.router.scenarios import STORIES, Step, Told
from tests.router.told import cluster, lively


@pytest.mark.parametrize("story", STORIES)
def test_stories_end_well(story: object) -> None:
    assert callable(story)
    story(step)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts_wanted": 2, "replicas": 3}, "3 replicas of every expert need 3 expert servers; 2 wanted"),
        ({"replicas": 0}, "replicas is 0; give at least 1"),
        ({"attention_wanted": -1}, "attention_wanted is -1; give at least 0"),
        ({"lease_s": 0.0}, "lease_s is 0.0; give more than 0"),
        ({"lease_s": 0.2}, "lease_s is 0.2; give at least 0.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigInvalid, match=message):
        Config(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_hash": "other"}, "model other found, m needed"),
        ({"layers": 3}, "3 MoE layers found, 2 needed"),
        ({"experts": 5}, "5 experts in each layer found, 4 needed"),
        (
            {"numerics_class": "cpu-f32"},
            "numerics class cpu-f32 found, one of the format of cpu-bf16 needed, as expert/1 has",
        ),
        ({"pool": "gpu"}, "pool 'gpu' is unknown; join one of expert, attention, gateway, client"),
        ({"layers": 0, "experts": 0}, "an expert server of 0 layers with 0 experts cannot be placed"),
    ],
)
def test_who_does_not_fit_is_refused_and_changes_nothing(changes: dict[str, object], message: str) -> None:
    told = Told(step)
    fields = {
        "pool": "expert",
        "address": "a",
        "pid": 1,
        "host": "h",
        "layers": 2,
        "experts": 4,
        "model_hash": "m",
        "numerics_class": "cpu-bf16",
    }
    told.give(Join(**fields))  # type: ignore[arg-type]
    before = told.state
    (refused,) = told.give(Join(**{**fields, **changes}))  # type: ignore[arg-type]
    assert isinstance(refused, Refused)
    assert refused.message.startswith(message)
    assert told.state == before


def test_another_model_may_come_when_nobody_holds_the_old_one() -> None:
    told = Told(step)
    told.join()
    told.give(Exited(host="h", pid=1))
    told.join(model_hash="new", layers=5, experts=7)
    assert (told.state.models[0].hash, told.state.models[0].layers, told.state.models[0].experts) == (
        "new",
        5,
        7,
    )


def test_nobody_loads_before_the_wanted_servers_are_there() -> None:
    told = Told(step, experts_wanted=3, replicas=2)
    told.join(experts=6)
    told.join(experts=6)
    assert [m.state for m in view_of(told.config, told.state).members] == ["joining", "joining"]
    told.join(experts=6)
    assert [m.state for m in view_of(told.config, told.state).members] == ["warming"] * 3
    assert {r.target.bit_count() for r in told.state.members.values()} == {4}


def test_the_first_placement_does_not_wait_for_ever() -> None:
    told = Told(step, experts_wanted=3, replicas=2)
    name = told.join()
    for _ in range(40):
        incarnation = told.state.members[name].incarnation
        told.give(Renewed(name=name, incarnation=incarnation), after_s=0.1)
        told.give(Tick())
    assert told.state.members[name].target == 0b11


def test_survivors_are_told_at_once_to_load_what_was_lost() -> None:
    told = Told(step, experts_wanted=3, replicas=2)
    for _ in range(3):
        told.join(experts=6)
    told.load_all()
    told.give(Exited(host="h", pid=1))
    assert [r.target for r in told.state.members.values()] == [0b111111, 0b111111]


def test_an_attention_worker_serves_once_it_acked() -> None:
    told = Told(step)
    told.join("attention")
    told.join("expert")
    record = told.state.members["attention/1"]
    assert view_of(told.config, told.state).members[0].state == "warming"
    told.give(Acked(name=record.name, incarnation=record.incarnation, epoch=told.state.epoch))
    assert view_of(told.config, told.state).members[0].state == "serving"


def test_a_client_is_waited_for_like_a_worker_and_counts_as_none() -> None:
    told = Told(step, attention_wanted=0, experts_wanted=1, replicas=1)
    told.join("expert")
    name = told.join("client")
    told.load_all()
    assert phase(told.state, told.state.members[name]) == "warming"
    told.ack(name)
    assert phase(told.state, told.state.members[name]) == "serving"
    acked = acked_by_all(told.state)
    told.load_all()
    told.join("expert")
    told.load_all()
    assert told.state.epoch > acked_by_all(told.state) == acked, "what it may still ask for could be unloaded"
    assert not any(record.draining for record in told.state.members.values())


def test_one_process_may_be_several_clients() -> None:
    told = Told(step)
    told.join()
    for number in (1, 2):
        told.give(Join(pool="client", address="", pid=7, host="h"))
        assert ["expert/1", *(f"client/{n}" for n in range(1, number + 1))] == list(told.state.members)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_view_says_who_may_be_asked(replicas: int) -> None:
    told = Told(step, experts_wanted=2, replicas=replicas)
    told.join(layers=2, experts=3)
    told.join(layers=2, experts=3)
    told.load_all()
    view = view_of(told.config, told.state)
    for layer in range(2):
        for expert in range(3):
            named = {m.name for m in view.replicas(layer, expert)}
            assert named == {
                m.name for m in view.members if (layer, expert) in pairs(from_bytes(m.serving), view.experts)
            }
            assert len(named) == replicas
    assert view.target_pairs("expert/1") == tuple(pairs(from_bytes(view.members[0].target), view.experts))
    assert view.members[0].serving_count == 6 * replicas // 2


def silent(step: Step, servers: int, dumb: int, replicas: int, seconds: float) -> set[str]:
    """Who is left when `dumb` of the servers say nothing for that long."""
    told = Told(step, experts_wanted=servers, replicas=replicas)
    names = [told.join(experts=8) for _ in range(servers)]
    told.load_all()
    for _ in range(round(seconds * 10)):
        for name in names[dumb:]:
            told.give(Renewed(name=name, incarnation=told.state.members[name].incarnation))
        told.give(Tick(), after_s=0.1)
    return set(told.state.members)


def test_one_silent_server_is_fenced_at_the_end_of_its_lease() -> None:
    assert len(silent(step, servers=4, dumb=1, replicas=2, seconds=1.9)) == 4
    assert len(silent(step, servers=4, dumb=1, replicas=2, seconds=2.3)) == 3


def test_many_silent_servers_make_the_router_doubt_itself_first() -> None:
    assert len(silent(step, servers=4, dumb=2, replicas=2, seconds=9)) == 4
    assert len(silent(step, servers=4, dumb=4, replicas=2, seconds=60)) == 4, "nobody spoke: it is the observer"


def test_who_is_not_ready_is_not_shown_as_usable_whatever_is_thought_of_it() -> None:
    told = cluster(step)
    told.join("attention")
    lively(told, 2.0, "attention/2")
    assert "attention/2" in told.state.suspects
    assert phase(told.state, told.state.members["attention/2"]) == WARMING


def test_last_replicas_are_copied_not_fenced() -> None:
    """Silence alone never costs an expert; here nobody loads the copies."""
    assert len(silent(step, servers=4, dumb=1, replicas=1, seconds=60)) == 4


def test_who_looks_dead_holds_no_budget_of_copies() -> None:
    """With one copy at a time, the server that is heard loads, and not the one before it that never will."""
    told = cluster(step, replicas=1, servers=3, copies_in_flight=1)
    shares = {"expert/1": 0b01, "expert/2": 0b10, "expert/3": 0}
    members = dict(told.state.members)
    for name, share in shares.items():
        serving = 0b11 if name == "expert/3" else 0
        members[name] = replace(members[name], share=share, target=serving, loaded=serving, serving=serving, retiring=0)
    records = [members[name] for name in shares]
    state = replace(told.state, members=members)
    assert allowed_copies(told.config, state, records) == {"expert/1": 0b01, "expert/2": 0}
    state = replace(state, silent=frozenset({"expert/1"}))
    assert allowed_copies(told.config, state, records) == {"expert/2": 0b10}
