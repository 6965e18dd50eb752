"""Stories of copies on their way: what may be taken back."""

from __future__ import annotations

from dataclasses import replace

from router.events import Tick
from tests.router.told import Step, Told, cluster, lively, rest


def what_a_worker_may_still_ask_for_is_not_taken_back(step: Step) -> None:
    """A server says that it holds nothing any more; a worker that has not acked may go on asking it, however long."""
    told = cluster(step, move_s=1.0)
    told.loaded("expert/1", 0, told.state.epoch)
    assert told.state.members["expert/1"].serving == 0
    _pass(told, 5.0, worker_acks=False)
    assert told.state.members["expert/1"].target == 0b11, "unloaded while a worker asks for it"
    _pass(told, 5.0, worker_acks=True)
    assert told.state.taken_back, "a copy that never arrives was not ordered elsewhere once nobody asks for it"


def what_a_worker_may_still_ask_for_makes_no_room(step: Step) -> None:
    """A full server says that it does not hold what it retires: another copy takes that place only after the ack."""
    told = Told(step, experts_wanted=2)
    told.join(capacity=1)
    told.join(capacity=2)
    told.join("attention")
    told.load_all()
    told.ack("attention/1")
    epoch = told.state.epoch
    given = {"expert/1": (0b10, 0b01, 0b01), "expert/2": (0b01, 0b11, 0b10)}
    members = {
        name: replace(told.state.members[name], share=share, target=target, loaded=target, serving=serving, retiring=0)
        for name, (share, target, serving) in given.items()
    }
    told.state = replace(told.state, members={**told.state.members, **members}, settled=False)
    told.loaded("expert/1", 0, epoch)
    told.give(Tick(), after_s=0.1)
    assert told.state.members["expert/1"].target == 0b01, "unloaded while a worker asks for it"
    told.ack("attention/1")
    told.give(Tick(), after_s=0.1)
    assert told.state.members["expert/1"].target == 0b10, "never unloaded"


def copies_too_many_are_let_go(step: Step) -> None:
    """What one in doubt held alone was copied, and then it speaks again."""
    told = cluster(step, replicas=1, experts=6)
    until_s = told.now_s + 5.0
    while "expert/1" not in told.state.suspects and told.now_s < until_s:
        lively(told, 0.1, "expert/1")
    lively(told, 0.1, "expert/1")
    assert told.state.members["expert/2"].share.bit_count() == 6, "no copy was made of what one in doubt holds"
    rest(told)
    servers = [told.state.members[name] for name in ("expert/1", "expert/2")]
    for held in ("share", "target", "serving"):
        counts = [sum(getattr(record, held) >> expert & 1 for record in servers) for expert in range(6)]
        assert counts == [1] * 6, f"{held}: {counts}"


def what_is_ordered_again_at_once_has_its_time(step: Step) -> None:
    """Nobody serves it, so it is ordered again as soon as it was taken back; not at every tick from then on."""
    told = Told(step, experts_wanted=1, replicas=1, move_s=1.0)
    told.join()
    for seconds in range(4):
        assert told.state.taken_back == 2 * seconds, f"{told.state.taken_back} copies taken back in {seconds} s"
        for _ in range(10):
            told.renew("expert/1")
            told.give(Tick(), after_s=0.101)


def _pass(told: Told, seconds: float, worker_acks: bool) -> None:
    for _ in range(round(seconds / 0.1)):
        for name in list(told.state.members):
            told.renew(name)
        told.load_all(but="expert/1")
        if worker_acks:
            told.ack("attention/1")
        told.give(Tick(), after_s=0.1)


COPY_STORIES = (
    what_a_worker_may_still_ask_for_is_not_taken_back,
    what_a_worker_may_still_ask_for_makes_no_room,
    copies_too_many_are_let_go,
    what_is_ordered_again_at_once_has_its_time,
)
