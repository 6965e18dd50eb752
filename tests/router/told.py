"""A core with a clock, and what a healthy cluster says to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.events import (
    Acked,
    Command,
    Event,
    Join,
    Joined,
    LauncherAttached,
    Loaded,
    Renewed,
    Started,
    StartProcess,
    Tick,
)
from router.state import Config, State

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

    def load_all(self, but: str = "") -> None:
        for record in list(self.state.members.values()):
            if record.pool == "expert" and record.name != but and record.target != record.loaded:
                self.loaded(record.name, record.target, self.state.epoch)

    def renew(self, name: str, after_s: float = 0.0) -> None:
        self.give(Renewed(name=name, incarnation=self.state.members[name].incarnation), after_s)

    def ack(self, name: str) -> None:
        incarnation = self.state.members[name].incarnation
        self.give(Acked(name=name, incarnation=incarnation, epoch=self.state.epoch))

    def loaded(self, name: str, held: int, epoch: int) -> list[Command]:
        record = self.state.members[name]
        opened = tuple(model.hash for model in self.state.models if record.opened >> model.number & 1)
        report = Loaded(name=name, incarnation=record.incarnation, held=held, epoch=epoch, opened=opened)
        return self.give(report)


def lively(told: Told, seconds: float, dumb: str = "", step_s: float = 0.05) -> tuple[float, float]:
    """Everyone else renews on time, loads and acks. Returns after how long one of the dumb was suspect, and fenced."""
    names = dumb.split()
    suspect_s = fenced_s = 0.0
    began_s = min((told.state.liveness[n].renewed_s for n in names if n in told.state.liveness), default=0.0)
    ends_s = told.now_s + seconds - 1e-6
    while told.now_s < ends_s:
        told.now_s += step_s
        for record in list(told.state.members.values()):
            if record.name in names:
                continue
            if told.now_s - told.state.liveness[record.name].renewed_s > told.config.renew_s - 0.01:
                told.renew(record.name)
            if record.pool == "attention":
                told.ack(record.name)
        told.load_all()
        if told.now_s - told.state.ticked_s > told.config.tick_s - 0.01:
            told.give(Tick())
        if not suspect_s and told.state.suspects & set(names):
            suspect_s = told.now_s - began_s
        if not fenced_s and names and not set(names) <= set(told.state.members):
            fenced_s = told.now_s - began_s
    return suspect_s, fenced_s


def rest(told: Told, rounds: int = 20, load: Mapping[str, float] | None = None, but: str = "") -> None:
    """Everyone speaks, loads and acks; nothing goes wrong."""
    for _ in range(rounds):
        for record in list(told.state.members.values()):
            told.give(Renewed(name=record.name, incarnation=record.incarnation, load=load or {}))
        told.load_all(but)
        for record in list(told.state.members.values()):
            if record.pool == "attention":
                told.ack(record.name)
        told.give(Tick(), after_s=0.1)


def cluster(
    step: Step, replicas: int = 2, servers: int = 2, workers: int = 1, experts: int = 2, **settings: object
) -> Told:
    """Expert servers and attention workers, all serving, and a launcher with nothing to do."""
    expert_bytes = settings.pop("expert_bytes", 0)
    told = Told(step, experts_wanted=servers, attention_wanted=workers, replicas=min(replicas, servers), **settings)
    for pool in ("expert",) * servers + ("attention",) * workers:
        told.join(pool, experts=experts, expert_bytes=expert_bytes)
    told.load_all()
    for number in range(workers):
        told.ack(f"attention/{number + 1}")
    assert not any(isinstance(c, StartProcess) for c in told.give(LauncherAttached(host="h")))
    return told
