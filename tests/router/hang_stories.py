"""Members that renew and say that their work loop stands still, and attention workers that are silent and at work."""

from __future__ import annotations

from router.events import Command, Fenced, Renewed, Scale, StartProcess, Suspected, Tick
from router.view import HEARS, STANDS
from tests.router.told import Step, Told, cluster, lively, rest


def _say(told: Told, name: str, **load: float) -> None:
    told.give(Renewed(name=name, incarnation=told.state.members[name].incarnation, load=load))


def _tick(told: Told, **standing: float) -> list[Command]:
    """A tenth of a second in which all renew; those that are named say for how long they have stood."""
    for name in list(told.state.members):
        stands_s = standing.get(name.replace("/", "_"))
        _say(told, name, **({STANDS: stands_s} if stands_s else {}))
    return told.give(Tick(), after_s=0.1)


def who_says_that_its_loop_stands_is_replaced_at_the_next_tick(step: Step) -> None:
    for name, pool in (("expert/1", "expert"), ("attention/1", "attention")):
        told = cluster(step, servers=3, workers=2)
        commands = _tick(told, **{name.replace("/", "_"): 0.7})
        fenced = [c for c in commands if isinstance(c, Fenced)]
        assert [(c.name, c.reason) for c in fenced] == [(name, "its work loop stood still for 0.70 s")], commands
        assert [c.pool for c in commands if isinstance(c, StartProcess)] == [pool], commands


def who_stands_with_last_replicas_goes_when_others_have_them(step: Step) -> None:
    told = cluster(step, replicas=1)
    assert not [c for c in _tick(told, expert_1=0.7) if isinstance(c, Fenced)]
    assert "expert/1" in told.state.suspects, "its experts must be copied"
    for _ in range(3):
        told.load_all()
        for name in told.state.members:
            if name.startswith("attention"):
                told.ack(name)
        _tick(told, expert_1=1.0)
    assert "expert/1" not in told.state.members, "others serve what it held"


def the_last_worker_that_stands_goes_when_another_serves(step: Step) -> None:
    told = cluster(step)
    ordered = [c for _ in range(5) for c in _tick(told, attention_1=0.7) if isinstance(c, StartProcess)]
    assert [c.pool for c in ordered] == ["attention"], "one is started beside it, and no more"
    assert "attention/1" in told.state.members
    second = told.join("attention")
    _tick(told, attention_1=0.9)
    assert "attention/1" in told.state.members, "the other does not serve yet"
    told.ack(second)
    _tick(told, attention_1=1.0)
    assert "attention/1" not in told.state.members


def a_last_worker_that_nobody_replaces_does_not_stand_for_ever(step: Step) -> None:
    told = cluster(step)
    _tick(told, attention_1=told.config.start_s + 1)
    assert "attention/1" not in told.state.members


def a_loop_that_goes_on_after_all_stays(step: Step) -> None:
    told = cluster(step)
    _tick(told, attention_1=0.7)
    rest(told, 3)
    assert "attention/1" in told.state.members and not told.state.suspects and not told.state.standing


def _silent_worker(step: Step, heard: bool, rounds: int, told: Told | None = None) -> Told:
    """The last worker says nothing for so many tenths of a second; a gateway hears it, or does not."""
    told = told or cluster(step)
    gateway = told.join("gateway")
    rest(told, 1)
    for _ in range(rounds):
        for name in ("expert/1", "expert/2"):
            told.renew(name)
        _say(told, gateway, **({HEARS + "attention/1": 1.0} if heard else {}))
        told.give(Tick(), after_s=0.1)
    return told


def the_last_worker_is_not_fenced_for_silence_before_another_serves(step: Step) -> None:
    for heard in (True, False):
        told = _silent_worker(step, heard, 40)
        assert "attention/1" in told.state.suspects
        told.ack(told.join("attention"))
        lively(told, 1.0, dumb="attention/1")
        assert "attention/1" not in told.state.members, "another serves"


def a_last_worker_that_nobody_replaces_is_silent_for_ever_only_where_a_gateway_hears_it(step: Step) -> None:
    for heard in (True, False):
        told = _silent_worker(step, heard, 620)
        assert ("attention/1" in told.state.members) == heard


def a_last_worker_that_nobody_is_to_replace_is_fenced_for_its_silence(step: Step) -> None:
    told = cluster(step)
    told.give(Scale(pool="attention", wanted=0))
    told = _silent_worker(step, False, 40, told)
    assert "attention/1" not in told.state.members


def what_a_peer_suspects_is_fenced_by_nobody(step: Step) -> None:
    told = cluster(step, workers=2)
    incarnation = told.state.members["attention/1"].incarnation
    told.give(Suspected(name="attention/1", incarnation=incarnation, by="gateway/1", reason="silent"))
    assert "attention/1" in told.state.suspects
    rest(told, 40)
    assert "attention/1" in told.state.members and not told.state.suspects


HANG_STORIES = (
    who_says_that_its_loop_stands_is_replaced_at_the_next_tick,
    who_stands_with_last_replicas_goes_when_others_have_them,
    the_last_worker_that_stands_goes_when_another_serves,
    a_last_worker_that_nobody_replaces_does_not_stand_for_ever,
    a_loop_that_goes_on_after_all_stays,
    the_last_worker_is_not_fenced_for_silence_before_another_serves,
    a_last_worker_that_nobody_replaces_is_silent_for_ever_only_where_a_gateway_hears_it,
    a_last_worker_that_nobody_is_to_replace_is_fenced_for_its_silence,
    what_a_peer_suspects_is_fenced_by_nobody,
)
