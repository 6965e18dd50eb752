"""Stories of copies on their way: what may be taken back."""

from __future__ import annotations

from router.events import Tick
from tests.router.told import Step, Told, cluster


def what_a_worker_may_still_ask_for_is_not_taken_back(step: Step) -> None:
    """A server says that it holds nothing any more; a worker that has not acked may go on asking it, however long."""
    told = cluster(step, move_s=1.0)
    told.loaded("expert/1", 0, told.state.epoch)
    assert told.state.members["expert/1"].serving == 0
    _pass(told, 5.0, worker_acks=False)
    assert told.state.members["expert/1"].target == 0b11, "unloaded while a worker asks for it"
    _pass(told, 5.0, worker_acks=True)
    assert told.state.taken_back, (
        "a copy that never arrives was not ordered elsewhere once nobody asks for it"
    )


def _pass(told: Told, seconds: float, worker_acks: bool) -> None:
    for _ in range(round(seconds / 0.1)):
        for name in list(told.state.members):
            told.renew(name)
        told.load_all(but="expert/1")
        if worker_acks:
            told.ack("attention/1")
        told.give(Tick(), after_s=0.1)


COPY_STORIES = (what_a_worker_may_still_ask_for_is_not_taken_back,)
