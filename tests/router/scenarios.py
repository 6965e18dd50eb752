"""Short stories with one right ending, told to a core: any core, so that planted faults meet them too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

from router.state import (
    Acked,
    Command,
    Config,
    Event,
    Exited,
    Join,
    Joined,
    Launch,
    LauncherAttached,
    Loaded,
    Refused,
    Renewed,
    Scale,
    Started,
    State,
    Stop,
    Tick,
)

Step = Callable[[Config, State, Event, float], tuple[State, list[Command]]]


class Told:
    """A core with a clock."""

    def __init__(self, step: Step, **settings: object) -> None:
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

    def renew(self, name: str, after_s: float = 0.0) -> None:
        self.give(Renewed(name=name, incarnation=self.state.members[name].incarnation), after_s)

    def ack(self, name: str) -> None:
        incarnation = self.state.members[name].incarnation
        self.give(Acked(name=name, incarnation=incarnation, epoch=self.state.epoch))

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


def a_stall_of_the_router_orders_only_what_was_lost(step: Step) -> None:
    """The router is frozen, a server dies meanwhile: its exit is the first that the router hears of."""
    told = cluster(step)
    commands = told.give(Exited(host="h", pid=1), after_s=3.0)
    assert [c.pool for c in commands if isinstance(c, Launch)] == ["expert"], commands


def silence_of_all_orders_nothing_at_first(step: Step) -> None:
    """A host too busy to answer gets no second set of processes, unless that lasts."""
    told = cluster(step)
    quiet_s = told.now_s
    orders: list[Launch] = []
    while not orders and told.now_s - quiet_s < 60:
        orders += [c for c in told.give(Tick(), after_s=0.1) if isinstance(c, Launch)]
    assert 10 < told.now_s - quiet_s < 11, f"ordered after {told.now_s - quiet_s:.1f} s of silence"
    assert len(told.state.members) == 3, "silence of all fences nobody"


def an_event_between_ticks_meets_the_same_doubt(step: Step) -> None:
    """Leases end between two ticks: what happens before the next one orders nothing in place of the silent."""
    told = cluster(step)
    for _ in range(20):
        told.give(Tick(), after_s=0.1)
    commands = told.give(Join(pool="gateway", address="a", pid=9, host="h"), after_s=0.05)
    assert not [c for c in commands if isinstance(c, Launch)], commands


def a_stall_ends_no_doubt(step: Step) -> None:
    """The router doubts itself, then is frozen: the first to speak afterwards condemns nobody else."""
    told = cluster(step)
    for _ in range(25):
        told.give(Tick(), after_s=0.1)
    told.renew("expert/2", after_s=20.0)
    told.give(Tick(), after_s=0.1)
    assert len(told.state.members) == 3, told.state.gone


def who_was_replaced_in_vain_costs_a_drain(step: Step) -> None:
    """A server with last replicas falls silent, is replaced, and comes back: the newest goes, nothing is lost."""
    told = cluster(step, replicas=1)
    for _ in range(40):
        told.renew("expert/2")
        told.renew("attention/1")
        told.give(Tick(), after_s=0.1)
    assert [start.pool for start in told.state.starts] == ["expert"]
    assert set(told.state.members) == {"expert/1", "expert/2", "attention/1"}, "silence took a last replica"
    told.join()
    for _ in range(40):
        for name in list(told.state.members):
            told.renew(name)
        told.load_all()
        told.ack("attention/1")
        serving = 0
        for record in told.state.members.values():
            serving |= record.serving
        assert serving == 0b11, "an expert is served by nobody"
        told.give(Tick(), after_s=0.1)
    assert set(told.state.members) == {"expert/1", "expert/2", "attention/1"}, list(told.state.members)
    assert not told.state.starts


def who_was_not_ordered_stays(step: Step) -> None:
    """An operator may run more servers than the router orders."""
    told = cluster(step)
    told.join()
    for _ in range(40):
        for name in list(told.state.members):
            told.renew(name)
        told.load_all()
        told.ack("attention/1")
        told.give(Tick(), after_s=0.1)
    assert "expert/3" in told.state.members
    assert not any(record.draining for record in told.state.members.values())


def a_pool_that_is_too_large_drains_one_at_a_time(step: Step) -> None:
    """Four expert servers, then two wanted: the newest go, one by one, and no expert is ever without a server."""
    told = cluster(step)
    told.give(Scale(pool="expert", wanted=4))
    for _ in range(2):
        assert told.state.starts, "two more are wanted and none was ordered"
        told.join()
    rest(told)
    told.give(Scale(pool="expert", wanted=2))
    went: list[str] = []
    for _ in range(60):
        before = set(told.state.members)
        rest(told, rounds=1)
        went += sorted(before - set(told.state.members))
        assert sum(record.draining for record in told.state.members.values()) <= 1
        serving = 0
        for record in told.state.members.values():
            serving |= record.serving
        assert serving == 0b11, "an expert is served by nobody"
    assert went == ["expert/4", "expert/3"], went


def a_draining_worker_ends_when_nothing_runs_on_it(step: Step) -> None:
    """An attention worker too many goes after it has heard of it and said that it is idle, and not before."""
    told = cluster(step)
    told.give(Scale(pool="attention", wanted=2))
    told.join("attention")
    rest(told)
    told.give(Scale(pool="attention", wanted=1))
    told.give(Tick(), after_s=0.1)
    record = told.state.members["attention/2"]
    assert record.draining and not told.state.members["attention/1"].draining
    for load in ({"running": 0.0}, {"running": 2.0}):
        told.give(Renewed(name=record.name, incarnation=record.incarnation, load=load), after_s=0.1)
        assert record.name in told.state.members, "ended before it heard, or with streams on it"
        told.ack(record.name)
    told.give(
        Renewed(name=record.name, incarnation=record.incarnation, load={"running": 0.0, "waiting": 1.0})
    )
    assert record.name in told.state.members, "ended with a stream that waits"
    commands = told.give(Renewed(name=record.name, incarnation=record.incarnation, load={"running": 0.0}))
    assert any(isinstance(c, Stop) and c.name == record.name for c in commands), commands
    assert record.name not in told.state.members


def a_drain_that_lasts_too_long_ends(step: Step) -> None:
    """A worker whose streams never end is ended after drain_s, whatever runs on it."""
    told = cluster(step)
    told.give(Scale(pool="attention", wanted=2))
    told.join("attention")
    rest(told)
    told.give(Scale(pool="attention", wanted=1, drain_s=3.0))
    began_s = told.now_s
    while "attention/2" in told.state.members:
        rest(told, rounds=1, load={"running": 1.0})
        assert told.now_s - began_s < 10, "never ended"
    assert 3 <= told.now_s - began_s < 3.5, f"ended after {told.now_s - began_s:.1f} s"


def a_pool_of_none_lets_everything_go(step: Step) -> None:
    """Scaled to zero, expert servers go one after the other; scaled up again, new ones are ordered."""
    told = Told(step, experts_wanted=2, replicas=2)
    told.give(LauncherAttached(host="h"))
    for pool in ("expert", "expert", "attention"):
        told.join(pool)
    rest(told)
    told.give(Scale(pool="expert", wanted=0))
    rest(told, rounds=40)
    assert set(told.state.members) == {"attention/1"}, list(told.state.members)
    commands = told.give(Scale(pool="expert", wanted=1))
    assert [c.pool for c in commands if isinstance(c, Launch)] == ["expert"], commands


def a_size_out_of_bounds_is_refused(step: Step) -> None:
    """What cannot be wanted is refused with the bounds, and changes nothing."""
    told = Told(step, experts_wanted=2, most={"expert": 4}, least={"expert": 1})
    for event in (
        Scale(pool="expert", wanted=5),
        Scale(pool="expert", wanted=0),
        Scale(pool="gateway", wanted=1),
    ):
        (refused,) = told.give(event)
        assert isinstance(refused, Refused), refused
        assert told.state.wanted == {"expert": 2, "attention": 1}


def rest(told: Told, rounds: int = 20, load: Mapping[str, float] | None = None) -> None:
    """Everyone speaks, loads and acks; nothing goes wrong."""
    for _ in range(rounds):
        for record in list(told.state.members.values()):
            told.give(Renewed(name=record.name, incarnation=record.incarnation, load=load or {}))
        told.load_all()
        for record in list(told.state.members.values()):
            if record.pool == "attention":
                told.ack(record.name)
        told.give(Tick(), after_s=0.1)


def cluster(step: Step, replicas: int = 2) -> Told:
    """Two expert servers and an attention worker, all serving, and a launcher with nothing to do."""
    told = Told(step, experts_wanted=2, replicas=replicas)
    for pool in ("expert", "expert", "attention"):
        told.join(pool)
    told.load_all()
    told.ack("attention/1")
    assert not any(isinstance(c, Launch) for c in told.give(LauncherAttached(host="h")))
    return told


STORIES = (
    a_late_report_brings_nothing_back,
    failed_starts_wait_longer_each_time,
    a_stall_of_the_router_orders_only_what_was_lost,
    silence_of_all_orders_nothing_at_first,
    an_event_between_ticks_meets_the_same_doubt,
    a_stall_ends_no_doubt,
    who_was_replaced_in_vain_costs_a_drain,
    who_was_not_ordered_stays,
    a_pool_that_is_too_large_drains_one_at_a_time,
    a_draining_worker_ends_when_nothing_runs_on_it,
    a_drain_that_lasts_too_long_ends,
    a_pool_of_none_lets_everything_go,
    a_size_out_of_bounds_is_refused,
)
