"""Short stories with one right ending, told to a core: any core, so that planted faults meet them too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from router.state import (
    Command,
    Config,
    Event,
    Exited,
    Join,
    Joined,
    Launch,
    LauncherAttached,
    Loaded,
    Started,
    State,
    Tick,
)

Step = Callable[[Config, State, Event, float], tuple[State, list[Command]]]


class Told:
    """A core with a clock."""

    def __init__(self, step: Step, **settings: float) -> None:
        self.step = step
        self.config = Config(**settings)  # type: ignore[arg-type]
        self.state = State()
        self.now_s = 100.0
        self.pids = 0
        self.give(Started(salt=1))

    def give(self, event: Event, after_s: float = 0.0) -> list[Command]:
        self.now_s += after_s
        self.state, commands = self.step(self.config, self.state, event, self.now_s)
        return commands

    def join(self, pool: str = "expert", **fields: object) -> str:
        self.pids += 1
        shape = {"layers": 1, "experts": 2, "model_hash": "m", **fields}
        asked = Join(pool=pool, address="a", pid=self.pids, host="h", **shape)  # type: ignore[arg-type]
        commands = self.give(asked)
        return next(c.name for c in commands if isinstance(c, Joined))

    def load_all(self) -> None:
        for record in list(self.state.members.values()):
            if record.pool == "expert":
                self.loaded(record.name, record.target, self.state.epoch)

    def loaded(self, name: str, held: int, epoch: int) -> list[Command]:
        incarnation = self.state.members[name].incarnation
        return self.give(Loaded(name=name, incarnation=incarnation, held=held, epoch=epoch))


def a_late_report_brings_nothing_back(step: Step) -> None:
    """A server asked anew for what it unloaded does not serve it by a report from before."""
    told = Told(step)
    told.join()
    told.load_all()
    before = told.state.epoch
    told.join()
    told.load_all()
    kept = told.state.members["expert/1"].target
    assert kept.bit_count() == 1, "the newcomer must take one of two experts"
    told.give(Exited(host="h", pid=2))
    record = told.state.members["expert/1"]
    assert record.target == 0b11, "what the lost server held must be loaded again"
    told.loaded("expert/1", 0b11, before)
    assert told.state.members["expert/1"].serving == kept, "a report from before the unloading was believed"
    told.loaded("expert/1", 0b11, told.state.epoch)
    assert told.state.members["expert/1"].serving == 0b11


def failed_starts_wait_longer_each_time(step: Step) -> None:
    """A process that dies before it joins is started again, but ever later, up to a bound."""
    told = Told(step)
    told.give(LauncherAttached(host="h"))
    waits_s = []
    for pid in range(20):
        began_s = told.now_s
        commands = told.give(Exited(host="h", pid=1000 + pid, pool="expert"))
        while not any(isinstance(c, Launch) and c.pool == "expert" for c in commands):
            commands = told.give(Tick(), after_s=0.1)
            assert told.now_s - began_s < 60, "never tried again"
        waits_s.append(told.now_s - began_s)
    assert waits_s[0] < 1, f"first retry after {waits_s[0]:.1f} s"
    assert all(later >= earlier - 0.2 for earlier, later in pairwise(waits_s)), waits_s
    assert 29 < waits_s[-1] < 31, f"last retry after {waits_s[-1]:.1f} s"


STORIES = (a_late_report_brings_nothing_back, failed_starts_wait_longer_each_time)
