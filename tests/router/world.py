"""A cluster by seed: processes, late messages, a clock that jumps; and the judge of the router.

The judge uses the world's own record: what each process truly holds, which routes each attention worker truly
uses, when each was truly last heard.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from router.journal import Journal
from router.records import view_of
from router.state import (
    Acked,
    Command,
    Config,
    Event,
    Exited,
    Fenced,
    Join,
    Joined,
    Launch,
    LauncherAttached,
    LauncherDetached,
    Left,
    Loaded,
    Publish,
    Renewed,
    Started,
    State,
    Stranger,
    Suspected,
    Tick,
)
from router.view import ATTENTION, EXPERT, View

Step = Callable[[Config, State, Event, float], tuple[State, list[Command]]]
HOSTS = ("host-a", "host-b")


class Violation(AssertionError):
    """The router broke a promise."""


@dataclass
class Process:
    """One process as it truly is."""

    pool: str
    host: str
    pid: int
    name: str = ""
    incarnation: int = 0
    alive: bool = True
    frozen: bool = False
    epoch: int = 0
    target: int = 0
    held: int = 0
    routes: dict[str, int] = field(default_factory=dict)
    outbox: list[Event] = field(default_factory=list)
    heard_s: float = 0.0


class World:
    """Processes, a router core, and everything between them."""

    def __init__(self, step: Step, seed: int) -> None:
        self.step = step
        self.seed = seed
        self.dice = random.Random(seed)
        wanted = self.dice.randint(1, 5)
        self.layers, self.experts = self.dice.randint(1, 3), self.dice.randint(2, 8)
        self.config = Config(
            experts_wanted=wanted,
            attention_wanted=self.dice.randint(1, 2),
            replicas=self.dice.randint(1, min(3, wanted)),
        )
        self.capacity = 0
        if self.dice.random() < 0.2:
            spare = self.dice.randint(0, 2)
            self.capacity = self.layers * (-(-self.experts * self.config.replicas // wanted) + spare)
        self.now_s = self.dice.uniform(0, 1000)
        self.state = State()
        self.processes: list[Process] = []
        self.exits: list[Process] = []
        self.launches: list[tuple[Launch, float]] = []
        self.pids = 100
        self.names: set[str] = set()
        self.incarnations: set[int] = set()
        self.fenced: set[int] = set()
        self.view: View | None = None
        self.ticked_s = self.now_s
        self.doubt_s: float | None = None
        self.events = 0
        self.journal = Journal(Path(":memory:")) if seed % 10 == 0 else None
        self.give(Started(salt=seed + 1))
        for host in HOSTS[: self.dice.randint(1, 2)]:
            self.give(LauncherAttached(host=host))

    # Events.

    def give(self, event: Event) -> list[Command]:
        """Let the router see an event, then judge what it did."""
        before = self.state
        self._before(event)
        self.state, commands = self.step(self.config, before, event, self.now_s)
        self.events += 1
        if self.journal is not None:
            self.journal.save(before, self.state)
        for command in commands:
            if isinstance(command, Launch):
                self.launches.append((command, self.state.now_s + self.config.start_s))
        self._judge(before, event, commands)
        return commands

    def restart_router(self) -> None:
        """Kill the router; the next one knows what the journal holds."""
        journal = self.journal
        if journal is None:
            journal = Journal(Path(":memory:"))
            journal.save(State(), self.state)
        self.state = journal.load()
        self.launches.clear()
        for process in self.processes:
            process.heard_s = self.now_s
        self.ticked_s, self.doubt_s = self.now_s, None
        self.give(Started(salt=self.seed + 2))
        if self.dice.random() < 0.8:
            self.give(LauncherAttached(host=HOSTS[0]))

    def act(self) -> None:
        """One random thing happens."""
        (action,) = self.dice.choices(list(ACTIONS), weights=list(ACTIONS.values()))
        getattr(self, action)()

    def some(self, *, pool: str = "", running: bool = True) -> Process | None:
        """A random member process."""
        found = [
            p
            for p in self.processes
            if p.name and p.alive and (not running or not p.frozen) and (not pool or p.pool == pool)
        ]
        return self.dice.choice(found) if found else None

    def tick(self) -> None:
        self.now_s += self.dice.choice((0.05, 0.1, 0.1, 0.3, 0.3, 0.45))
        self.give(Tick())

    def jump(self) -> None:
        self.now_s += self.dice.choice((-5.0, -0.5, 3.0, 30.0))
        if self.dice.random() < 0.5:
            self.give(Tick())

    def start(self) -> None:
        if not self.launches:
            return
        launch, _ = self.launches.pop(self.dice.randrange(len(self.launches)))
        self.pids += 1
        if self.dice.random() < 0.15:
            self.give(Exited(host=launch.host, pid=self.pids, pool=launch.pool))
            return
        self.join(launch.pool, launch.host)

    def join(self, pool: str, host: str) -> Process:
        self.pids += 1
        process = Process(pool=pool, host=host, pid=self.pids)
        self.processes.append(process)
        commands = self.give(
            Join(
                pool=pool,
                address="",
                pid=process.pid,
                host=host,
                model_hash="m",
                layers=self.layers,
                experts=self.experts,
                capacity=self.capacity if pool == EXPERT else 0,
            )
        )
        joined = next(c for c in commands if isinstance(c, Joined))
        process.name, process.incarnation = joined.name, joined.incarnation
        process.heard_s = self.state.now_s
        self.check(joined.name not in self.names, f"name {joined.name} given twice")
        self.check(
            joined.incarnation not in self.incarnations, f"incarnation {joined.incarnation} given twice"
        )
        self.names.add(joined.name)
        self.incarnations.add(joined.incarnation)
        return process

    def surplus(self) -> None:
        if sum(p.alive for p in self.processes) < 9:
            self.join(EXPERT, "host-c")

    def see(self, process: Process | None = None) -> None:
        process = process or self.some()
        if process is None or self.view is None:
            return
        member = self.view.member(process.name)
        if member is None or member.incarnation != process.incarnation:
            return
        process.epoch = self.view.epoch
        if process.pool == EXPERT:
            process.target = int.from_bytes(member.target, "little")
            process.held &= process.target
            process.outbox.append(self.report(process))
        elif process.pool == ATTENTION:
            process.routes = {m.name: int.from_bytes(m.serving, "little") for m in self.view.pool(EXPERT)}
            process.outbox.append(
                Acked(name=process.name, incarnation=process.incarnation, epoch=process.epoch)
            )

    def report(self, process: Process) -> Loaded:
        return Loaded(
            name=process.name, incarnation=process.incarnation, held=process.held, epoch=process.epoch
        )

    def load(self, process: Process | None = None, share: float = 0.7) -> None:
        process = process or self.some(pool=EXPERT)
        if process is None or process.target == process.held:
            return
        missing = process.target & ~process.held
        chosen = sum(1 << i for i in range(missing.bit_length()) if self.dice.random() < share) & missing
        process.held |= chosen
        process.outbox.append(self.report(process))

    def deliver(self, process: Process | None = None) -> None:
        process = process or self.some()
        if process is not None and process.outbox:
            self.give(process.outbox.pop(0))

    def renew(self, process: Process | None = None) -> None:
        process = process or self.some()
        if process is not None:
            if process.incarnation not in self.fenced:
                process.heard_s = max(self.now_s, self.state.now_s)
            self.give(Renewed(name=process.name, incarnation=process.incarnation, load={"busy": 0.5}))

    def renew_all(self) -> None:
        for process in self.processes:
            if process.alive and not process.frozen:
                self.renew(process)

    def kill(self) -> None:
        process = self.some(running=False)
        if process is not None:
            process.alive = False
            self.exits.append(process)

    def prove_exit(self) -> None:
        if self.exits:
            process = self.exits.pop(self.dice.randrange(len(self.exits)))
            self.give(Exited(host=process.host, pid=process.pid, pool=self.dice.choice(("", process.pool))))
            self.check(
                self.view is None or self.view.member(process.name) is None,
                f"{process.name} still shown after its exit was proved",
            )

    def freeze(self) -> None:
        process = self.some()
        if process is not None:
            process.frozen = True

    def thaw(self) -> None:
        for process in self.processes:
            if process.frozen and self.dice.random() < 0.5:
                process.frozen = False

    def accuse(self) -> None:
        process = self.some(running=False)
        if process is not None:
            self.give(
                Suspected(name=process.name, incarnation=process.incarnation, by="attention/1", reason="slow")
            )

    def drain(self) -> None:
        process = self.some(pool=EXPERT)
        if process is not None:
            self.give(Left(name=process.name, incarnation=process.incarnation, drain=True))

    def leave(self) -> None:
        process = self.some()
        if process is not None:
            process.alive = False
            self.give(Left(name=process.name, incarnation=process.incarnation, drain=False))

    def relaunch(self) -> None:
        host = self.dice.choice(HOSTS)
        self.launches = [(launch, until_s) for launch, until_s in self.launches if launch.host != host]
        if self.dice.random() < 0.4:
            self.give(LauncherDetached(host=host))
        else:
            self.give(LauncherAttached(host=host))

    def lie(self) -> None:
        """Someone speaks under another's name, or acks what never was."""
        process = self.some(running=False)
        if process is None:
            return
        self.give(Tick())
        wrong = process.incarnation + self.dice.choice((-1, 1))
        everything = (1 << (self.layers * self.experts)) - 1
        event = self.dice.choice(
            (
                Loaded(name=process.name, incarnation=wrong, held=everything, epoch=self.state.epoch),
                Acked(name=process.name, incarnation=wrong, epoch=self.state.epoch),
                Renewed(name=process.name, incarnation=wrong),
                Left(name=process.name, incarnation=wrong, drain=False),
            )
        )
        before = replace(self.state, now_s=max(self.state.now_s, self.now_s))
        commands = self.give(event)
        self.check(any(isinstance(c, Stranger) for c in commands), f"{event} was taken for a member's")
        after = self.state
        self.check(
            (before.members, before.pulses, before.epoch) == (after.members, after.pulses, after.epoch),
            f"{event} of a stranger changed the state",
        )
        self.give(Acked(name=process.name, incarnation=process.incarnation, epoch=self.state.epoch + 50))

    # After the faults.

    def calm(self) -> None:
        """Faults stop; everything must come back within a bounded time."""
        for process in self.processes:
            # Some vanish for good, and nobody can prove that they ended.
            process.alive = process.alive and not (process.frozen and self.dice.random() < 0.5)
            process.frozen = False
        for host in HOSTS[:1]:
            self.launches = [(launch, until_s) for launch, until_s in self.launches if launch.host != host]
            self.give(LauncherAttached(host=host))
        self.now_s = max(self.now_s, self.state.now_s)
        for _ in range(400):
            while self.exits:
                self.prove_exit()
            while self.launches:
                launch, _ = self.launches.pop()
                self.join(launch.pool, launch.host)
            for process in self.processes:
                if process.alive:
                    self.renew(process)
                    self.see(process)
                    self.load(process, share=1.0)
                    while process.outbox:
                        self.deliver(process)
            self.now_s += 0.4
            self.give(Tick())
            if not self.unrest():
                return
            self.processes = [p for p in self.processes if p.alive and p.incarnation not in self.fenced]
        raise Violation(f"seed {self.seed}: 160 s after the faults stopped, {self.unrest()}")

    def unrest(self) -> str:
        """What is not as it should be at rest; empty if all is well."""
        view = self.view
        if view is None:
            return "nothing was ever published"
        servers = [m for m in view.pool(EXPERT) if m.state != "draining"]
        if (
            len(servers) < self.config.experts_wanted
            or len(view.pool(ATTENTION)) < self.config.attention_wanted
        ):
            return f"pools are short: {[m.name for m in view.members]}"
        for m in view.members:
            if m.state != "serving":
                return f"{m.name} is {m.state}"
            if m.target != m.serving:
                return f"{m.name} serves {m.serving.hex()} of {m.target.hex()}"
        mask = (1 << self.experts) - 1
        for layer in range(self.layers):
            counts = [len(view.replicas(layer, expert)) for expert in range(self.experts)]
            if set(counts) != {min(self.config.replicas, len(servers))}:
                return f"layer {layer} has {counts} replicas"
            loads = [(_bits(m.serving) >> (layer * self.experts) & mask).bit_count() for m in servers]
            if max(loads) - min(loads) > 1:
                return f"layer {layer} is uneven: {loads}"
        return ""

    # The judge.

    def check(self, kept: bool, promise: str) -> None:
        if not kept:
            raise Violation(f"seed {self.seed}, event {self.events}: {promise}")

    def _before(self, event: Event) -> None:
        """The world's own account of silence, as the rules of leases have it."""
        now_s = max(self.now_s, self.state.now_s)
        stall_s = now_s - self.ticked_s - self.config.tick_s
        members = [p for p in self.processes if p.name in self.state.members]
        if now_s - self.ticked_s > self.config.stall_s:
            self.ticked_s = now_s
            for p in members:
                p.heard_s = min(now_s, p.heard_s + stall_s)
            if self.doubt_s is not None:
                self.doubt_s += stall_s
        if not isinstance(event, Tick):
            return
        self.ticked_s = now_s
        if self.many(members):
            self.doubt_s = now_s if self.doubt_s is None else self.doubt_s
        else:
            self.doubt_s = None

    def late(self, members: list[Process]) -> list[Process]:
        now_s = max(self.now_s, self.state.now_s)
        return [p for p in members if now_s - p.heard_s > self.config.lease_s]

    def many(self, members: list[Process]) -> bool:
        """True if so many have missed two renewals that it is rather the router's fault."""
        now_s = max(self.now_s, self.state.now_s)
        missed = [p for p in members if now_s - p.heard_s > 2 * self.config.renew_s]
        return len(missed) >= 2 and 4 * len(missed) > len(self.state.members)

    def _judge_launch(self, command: Launch) -> None:
        """No process is ordered in place of one that may be presumed alive."""
        members = [p for p in self.processes if p.name in self.state.members]
        late = self.late(members)
        patience_s = self.config.doubt_leases * self.config.lease_s
        if self.doubt_s is not None and self.state.now_s - self.doubt_s < patience_s:
            late = []
        lost = {p.name for p in late} | {n for n, r in self.state.members.items() if r.draining}
        filled = sum(p.pool == command.pool and p.name not in lost for p in members)
        filled += sum(start.pool == command.pool for start in self.state.starts)
        wanted = self.config.wanted(command.pool)
        self.check(filled <= wanted, f"{filled} {command.pool} processes where {wanted} are wanted")

    def _judge(self, before: State, event: Event, commands: list[Command]) -> None:
        published = [c.epoch for c in commands if isinstance(c, Publish)]
        self.check(
            self.state.epoch == before.epoch + len(published) and len(published) <= 1,
            f"epoch {before.epoch} -> {self.state.epoch} with {published}",
        )
        if isinstance(event, Started):
            self.check(len(published) == 1, "a new term did not publish")
        for command in commands:
            if isinstance(command, Fenced):
                self._judge_fence(before, event, command)
            if isinstance(command, Launch):
                self._judge_launch(command)
        ordered = [
            launch for launch, until_s in self.launches if launch.pool == EXPERT and self.now_s < until_s
        ]
        self.check(len(ordered) <= self.config.experts_wanted, f"{len(ordered)} starts ordered at once")
        if not published:
            return
        last, self.view = self.view, view_of(self.config, self.state)
        if last is not None:
            self.check(self.view.epoch > last.epoch, f"epoch {last.epoch} then {self.view.epoch}")
            self._judge_move(last, self.view, any(isinstance(c, Fenced) for c in commands), event)
        self._judge_view(self.view)

    def _judge_fence(self, before: State, event: Event, command: Fenced) -> None:
        self.fenced.add(command.incarnation)
        process = next((p for p in self.processes if p.incarnation == command.incarnation), None)
        if process is None:
            return
        if command.reason == "drained":
            for other in self.processes:
                record = self.state.members.get(other.name)
                if other.alive and record is not None and record.ready:
                    self.check(
                        not other.routes.get(process.name), f"{process.name} went, {other.name} asks it"
                    )
        drained = command.reason == "drained" or before.members[process.name].draining
        if not isinstance(event, Tick) or drained:
            return
        now_s = self.state.now_s
        self.check(
            now_s - process.heard_s > self.config.lease_s,
            f"{process.name} fenced after {now_s - process.heard_s:.2f} s of silence",
        )
        patience_s = self.config.doubt_leases * self.config.lease_s
        self.check(
            self.doubt_s is None or now_s - self.doubt_s >= patience_s,
            f"{process.name} fenced while the router must doubt itself",
        )
        elsewhere = 0
        for name, record in before.members.items():
            if name != process.name:
                elsewhere |= record.serving
        last = before.members[process.name].serving & ~elsewhere
        self.check(not last, f"{process.name} fenced for silence with last replicas {last:x}")

    def _judge_move(self, last: View, view: View, fenced: bool, event: Event) -> None:
        """Only a loss may cost copies: a planned move never takes an expert below what is wanted."""
        if fenced or isinstance(event, Loaded | Started):
            return
        for layer in range(min(last.layers, view.layers)):
            for expert in range(view.experts):
                had, has = len(last.replicas(layer, expert)), len(view.replicas(layer, expert))
                fits = not self.capacity and len(view.pool(EXPERT)) >= self.config.replicas
                least = min(had, self.config.replicas if fits else 1)
                draining = [m for m in view.pool(EXPERT) if m.state == "draining"]
                if draining:
                    least = min(least, 1)
                self.check(has >= least, f"a move took ({layer}, {expert}) from {had} to {has} replicas")

    def _judge_view(self, view: View) -> None:
        by_incarnation = {p.incarnation: p for p in self.processes if p.name}
        for member in view.members:
            self.check(member.incarnation not in self.fenced, f"fenced {member.name} is shown")
            target, serving = _bits(member.target), _bits(member.serving)
            self.check(not serving & ~target, f"{member.name} serves outside its target")
            if self.capacity and member.pool == EXPERT:
                self.check(target.bit_count() <= self.capacity, f"{member.name} is over its capacity")
            process = by_incarnation.get(member.incarnation)
            if process is not None and process.alive:
                lacking = serving & ~process.held
                self.check(not lacking, f"{member.name} is said to serve {lacking:x}, which it does not hold")
        for worker in self.processes:
            if worker.pool != ATTENTION or not worker.alive or worker.name not in self.state.members:
                continue
            if not self.state.members[worker.name].ready:
                continue
            for name, bits in worker.routes.items():
                member = view.member(name)
                if member is not None:
                    unloaded = bits & ~_bits(member.target)
                    self.check(
                        not unloaded, f"{worker.name} still asks {name} for {unloaded:x}, out of target"
                    )


def _bits(bitmap: bytes) -> int:
    return int.from_bytes(bitmap, "little")


ACTIONS = {
    "tick": 30,
    "renew": 20,
    "renew_all": 12,
    "see": 30,
    "load": 25,
    "deliver": 40,
    "start": 14,
    "kill": 3,
    "prove_exit": 4,
    "freeze": 3,
    "thaw": 3,
    "accuse": 2,
    "drain": 1.5,
    "leave": 1,
    "surplus": 1,
    "jump": 1.5,
    "restart_router": 1.5,
    "relaunch": 1.5,
    "lie": 2,
}


def run(step: Step, seed: int, events: int) -> int:
    """Run one seed: faults for a number of actions, then calm. Returns how many events the core saw."""
    world = World(step, seed)
    for _ in range(events):
        world.act()
    world.calm()
    return world.events
