"""Stories of terms that begin: on the journal as it was, and on an older one."""

from __future__ import annotations

from dataclasses import replace

from router.events import Acked, AddModel, Join, Joined, Loaded, Publish, Renewed, Started, Tick
from router.records import acked_by_all
from router.state import State
from router.view import Model
from tests.router.told import Step, Told, cluster, rest


def _restart(told: Told, journal: State) -> None:
    """The router starts again with what a journal holds."""
    told.state = State(
        salt=journal.salt,
        term=journal.term,
        epoch=journal.epoch,
        joined=journal.joined,
        named=journal.named,
        wanted=journal.wanted,
        models=journal.models,
        members=journal.members,
        gone=journal.gone,
    )
    told.give(Started(salt=journal.salt))


def _say(told: Told, name: str, seen: int, held: int | None = None) -> list[object]:
    """A member is heard; a server says what it holds."""
    incarnation = told.state.members[name].incarnation
    given: list[object] = [*told.give(Renewed(name=name, incarnation=incarnation, seen=seen))]
    if held is not None:
        salt = told.state.salt
        given += told.give(Loaded(name=name, incarnation=incarnation, held=held, epoch=seen, salt=salt))
    return given


def a_term_publishes_above_every_epoch_that_was_seen(step: Step) -> None:
    """Its journal is older than the cluster: members ignore what is lower, so it waits until all were heard."""
    told = cluster(step)
    seen = told.state.epoch + 40
    _restart(told, told.state)
    assert not any(isinstance(c, Publish) for c in _say(told, "attention/1", seen))
    assert not any(isinstance(c, Publish) for c in _say(told, "expert/1", seen - 1, 0b11))
    (published,) = [c for c in _say(told, "expert/2", seen - 2, 0b11) if isinstance(c, Publish)]
    assert published.epoch == told.state.epoch == seen + 1


def a_term_waits_a_lease_for_those_it_does_not_hear(step: Step) -> None:
    told = cluster(step)
    _restart(told, told.state)
    _say(told, "attention/1", 0)
    for _ in range(19):
        assert not told.give(Tick(), after_s=0.1)
    told.give(Tick(), after_s=0.1)
    assert any(isinstance(c, Publish) for c in told.give(Tick(), after_s=0.1)) or not told.state.unheard


def who_is_heard_late_raises_the_epoch_all_the_same(step: Step) -> None:
    told = cluster(step)
    _restart(told, told.state)
    while told.state.unheard:
        told.give(Tick(), after_s=0.1)
    seen = told.state.epoch + 40
    assert Publish(epoch=seen + 1) in _say(told, "attention/1", seen)
    told.join("client", experts=2)
    assert not any(isinstance(c, Publish) for c in _say(told, "client/1", seen + 90)), "any program may be one"


def what_an_older_journal_does_not_know_is_kept_until_all_acked(step: Step) -> None:
    """A server has loaded since the copy was made, and a worker asks it for that."""
    told = cluster(step, replicas=1)
    first = told.state.members["expert/1"].serving
    seen = told.state.epoch + 5
    _restart(told, told.state)
    worker = told.state.members["attention/1"].incarnation
    _say(told, "attention/1", seen)
    _say(told, "expert/2", seen, told.state.members["expert/2"].loaded)
    _say(told, "expert/1", seen, 0b11)
    for _ in range(25):
        for name in told.state.members:
            _say(told, name, seen)
        told.give(Tick(), after_s=0.1)
        # What it acked in another term says nothing of this one, whatever its number.
        told.give(Acked(name="attention/1", incarnation=worker, epoch=told.state.epoch, salt=77))
        assert told.state.members["expert/1"].target == 0b11, "unloaded while a worker asks for it"
    told.give(Acked(name="attention/1", incarnation=worker, epoch=told.state.epoch, salt=told.state.salt))
    told.give(Tick(), after_s=0.1)
    assert told.state.members["expert/1"].target == first


def what_was_not_heard_in_one_term_is_kept_in_the_next(step: Step) -> None:
    """A term on an older journal forgets what a server holds that it does not hear; the next term hears it."""
    told = cluster(step, replicas=1)
    held, seen = 0b11, told.state.epoch + 5
    _restart(told, told.state)
    for name in ("attention/1", "expert/2"):
        _say(told, name, seen, told.state.members[name].loaded if name == "expert/2" else None)
    while told.state.unheard:
        told.give(Tick(), after_s=0.1)
    _restart(told, told.state)
    for name in told.state.members:
        _say(told, name, seen, {"expert/1": held, "expert/2": told.state.members[name].loaded}.get(name))
    for _ in range(15):
        for name in told.state.members:
            told.renew(name)
        told.give(Tick(), after_s=0.1)
        assert told.state.members["expert/1"].target & held == held, "unloaded while a worker asks for it"


def who_is_not_in_the_journal_may_ask_for_a_lease(step: Step) -> None:
    """A worker joined after the copy was made: it is no member, and asks by the routes that it has for a lease."""
    told = cluster(step, replicas=1, workers=0)
    first, seen = told.state.members["expert/1"].serving, told.state.epoch + 5
    _restart(told, told.state)
    for tenths in range(25):
        for name in told.state.members:
            _say(told, name, seen, 0b11 if name == "expert/1" else told.state.members[name].loaded)
        told.give(Tick(), after_s=0.1)
        target = told.state.members["expert/1"].target
        assert target == 0b11 or tenths >= 19, f"unloaded after {tenths / 10} s"
    assert target == first


def a_worker_without_routes_holds_nobody_up_in_the_next_term(step: Step) -> None:
    """It waits for a server that is gone, whose experts find room only once others let go of theirs."""
    told = cluster(step)
    told.join("attention")
    _restart(told, told.state)
    for name in told.state.members:
        _say(told, name, 0, 0b11 if name.startswith("expert") else None)
    assert acked_by_all(told.state) == 0
    worker = told.state.members["attention/2"].incarnation
    told.give(Acked(name="attention/2", incarnation=worker, epoch=0))
    for _ in range(25):
        for name in told.state.members:
            told.renew(name)
        told.ack("attention/1")
        told.give(Tick(), after_s=0.1)
    assert not told.state.fenced_clients and acked_by_all(told.state) > 0


def what_was_said_to_another_term_is_not_believed(step: Step) -> None:
    told = cluster(step)
    _restart(told, told.state)
    for name, held in (("attention/1", None), ("expert/1", 0b11), ("expert/2", 0b11)):
        _say(told, name, told.state.epoch, held)
    record = told.state.members["expert/1"]
    late = Loaded(name="expert/1", incarnation=record.incarnation, held=0, epoch=told.state.epoch, salt=77)
    told.give(late)
    assert told.state.members["expert/1"].loaded == record.loaded


def no_incarnation_is_given_twice(step: Step) -> None:
    """Two terms begin on the same copy of a journal, and even draw the same salt."""
    told = cluster(step)
    journal, given = told.state, set[int]()
    for _ in range(2):
        journal = replace(journal, salt=told.state.salt)
        _restart(told, journal)
        commands = told.give(Join(pool="expert", address="a", pid=77, host="h", layers=1, experts=2))
        (joined,) = [c for c in commands if isinstance(c, Joined)]
        assert joined.incarnation not in given
        given.add(joined.incarnation)


def a_copy_taken_back_and_ordered_again_at_once_is_shown(step: Step) -> None:
    """The only server got nothing loaded in time: without a View that says so its reports would stay stale."""
    told = Told(step, move_s=1.0)
    told.join()
    for _ in range(100):
        told.renew("expert/1")
        told.give(Tick(), after_s=0.1)
        if told.state.taken_back:
            break
    for _ in range(100):
        told.renew("expert/1")
        told.give(Tick(), after_s=0.1)
        record = told.state.members["expert/1"]
        assert record.dropped_epoch <= told.state.epoch, "nobody was told"
    told.loaded("expert/1", record.target, told.state.epoch)
    assert told.state.members["expert/1"].serving == record.target


def copies_that_lie_unevenly_are_spread_by_the_next_term(step: Step) -> None:
    """Three of four experts on one server, as a loss left them and a term that ended before it spread them."""
    told = cluster(step, replicas=1, experts=4)
    uneven = {"expert/1": 0b0111, "expert/2": 0b1000}
    members = {
        name: replace(record, **dict.fromkeys(("share", "target", "loaded", "serving"), uneven[name]))
        if name in uneven
        else record
        for name, record in told.state.members.items()
    }
    _restart(told, replace(told.state, members=members))
    for name in told.state.members:
        _say(told, name, told.state.epoch, uneven.get(name))
    rest(told, 60)
    held = [told.state.members[name].serving.bit_count() for name in uneven]
    assert held == [2, 2], "one server does the work of two"


def what_a_server_says_by_a_view_of_another_term_is_said_of_no_later_model(step: Step) -> None:
    """There the bits of a model that came after the copy was made were others': it lay behind one that went since."""
    told = cluster(step, replicas=1)
    seen = told.state.epoch + 5
    _restart(told, told.state)
    later = Model(hash="n", name="model-n", layers=1, experts=2)
    told.give(AddModel(model=later, attention=1, again=True))
    for name in ("attention/1", "expert/2"):
        _say(told, name, seen, told.state.members[name].loaded if name == "expert/2" else None)
    record = told.state.members["expert/1"]
    said = {"name": "expert/1", "incarnation": record.incarnation, "salt": told.state.salt, "opened": ("n",)}
    told.give(Renewed(name="expert/1", incarnation=record.incarnation, seen=seen))
    for number in (1, 2):
        told.give(Loaded(**said, held=0b1100 | record.loaded, epoch=seen, number=number))
        held = told.state.members["expert/1"].loaded
        assert held >> 2 == 0, f"{held:b}: what was said by another View was believed"
    assert told.state.epoch > seen
    told.give(Tick(), after_s=10.0)
    told.give(Loaded(**said, held=told.state.members["expert/1"].target, epoch=told.state.epoch, number=3))
    assert told.state.members["expert/1"].loaded >> 2, "by a View of this term it is"


def what_a_server_held_last_may_be_of_a_later_view_than_what_it_said_last(step: Step) -> None:
    """A copy ordered by another term's View may arrive, and be told, when this term has heard of an older one."""
    told = cluster(step, replicas=1)
    seen = told.state.epoch + 5
    _restart(told, told.state)
    told.give(AddModel(model=Model(hash="n", name="model-n", layers=1, experts=2), attention=1, again=True))
    for name in ("attention/1", "expert/2"):
        _say(told, name, seen, told.state.members["expert/2"].loaded if name == "expert/2" else None)
    record = told.state.members["expert/1"]
    said = {"name": "expert/1", "incarnation": record.incarnation, "salt": told.state.salt, "opened": ("n",)}
    told.give(Renewed(name="expert/1", incarnation=record.incarnation, seen=seen))
    told.give(Loaded(**said, held=record.loaded, epoch=seen - 3, number=1))
    told.give(Tick(), after_s=10.0)
    assert told.state.members["expert/1"].target >> 2, "it is to hold the later model"
    told.give(Loaded(**said, held=0b1100 | record.loaded, epoch=seen, number=2))
    assert not told.state.members["expert/1"].loaded >> 2, "what was said by another View was believed"


TERM_STORIES = (
    what_a_server_held_last_may_be_of_a_later_view_than_what_it_said_last,
    what_a_server_says_by_a_view_of_another_term_is_said_of_no_later_model,
    a_term_publishes_above_every_epoch_that_was_seen,
    a_term_waits_a_lease_for_those_it_does_not_hear,
    who_is_heard_late_raises_the_epoch_all_the_same,
    what_an_older_journal_does_not_know_is_kept_until_all_acked,
    what_was_not_heard_in_one_term_is_kept_in_the_next,
    who_is_not_in_the_journal_may_ask_for_a_lease,
    a_worker_without_routes_holds_nobody_up_in_the_next_term,
    what_was_said_to_another_term_is_not_believed,
    no_incarnation_is_given_twice,
    a_copy_taken_back_and_ordered_again_at_once_is_shown,
    copies_that_lie_unevenly_are_spread_by_the_next_term,
)
