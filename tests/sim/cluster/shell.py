"""The router's shell as the simulator has it: what router/service.py does, without gRPC and files."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, get_args

from router import bitmap
from router.events import (
    Acked,
    Command,
    Event,
    LauncherDetached,
    Publish,
    Renewed,
    Started,
    StartProcess,
    StopProcess,
    Tick,
    UnknownMember,
)
from router.journal import Journal
from router.models import listed
from router.records import phase, view_of
from router.state import State
from router.view import EXPERT, of_model
from tests.sim.cluster.network import LOST, ROUTER

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.cluster.launcher import Launcher
    from tests.sim.cluster.members import Process
    from tests.sim.cluster.models import TrueModel
    from tests.sim.cluster.world import World

NOTHING = 1 << 20  # commits that a journal lost of which nothing is left
LOOK_EVERY = 250  # events between two looks at everything
_KINDS: dict[type, int] = {kind: number for number, kind in enumerate(get_args(Event))}


class Row:
    """One member as everyone sees it."""

    __slots__ = ("incarnation", "model", "name", "phase", "pool", "serving", "target")

    def __init__(
        self, name: str, pool: str, incarnation: int, phase: str, target: int, serving: int, model: str
    ) -> None:
        self.name, self.pool, self.incarnation = name, pool, incarnation
        self.phase, self.target, self.serving = phase, target, serving
        self.model = model


class Shown:
    """What was published: rows by name, in the order of joining; their bitmaps in the world's coordinates."""

    __slots__ = ("_parts", "_view", "_world", "epoch", "experts", "models", "rows", "salt")

    def __init__(self, world: World, state: State) -> None:
        self._world = world
        self.epoch, self.salt, self.models = state.epoch, state.salt, listed(state)
        # Of several models, whoever follows one reads the true View.
        self._view = view_of(world.config, state) if len(world.models) > 1 else None
        self._parts: dict[str, list[Row]] = {}
        self.rows = {
            n: Row(n, r.pool, r.incarnation, phase(state, r), self.told(r.target), self.told(r.serving), r.model)
            for n, r in state.members.items()
        }
        self.experts = [row for row in self.rows.values() if row.pool == EXPERT]

    def told(self, bits: int) -> int:
        """A bitmap of the router's in the world's coordinates."""
        if self._view is None or not bits:
            return bits
        found, known = 0, 0
        for model in self.models:
            found |= model.take(bits) << self._world.judge.models.true(model.hash).at
            known |= model.put(bitmap.everything(model.layers, model.experts))
        if bits & ~known:
            self._world.judge.broken("no bit is of no model", f"epoch {self.epoch}: {bits & ~known:x}")
        return found

    def said(self, bits: int) -> int:
        """A bitmap of the world's as whoever follows this View says it to the router."""
        if self._view is None:
            return bits
        said = 0
        for model in self.models:
            true = self._world.judge.models.true(model.hash)
            said |= model.put((bits & true.mask) >> true.at)
        return said

    def of(self, model: TrueModel) -> list[Row]:
        """Expert servers as those see them who follow one model."""
        if self._view is None:
            return self.experts
        if model.hash not in self._parts:
            self._parts[model.hash] = [
                Row(
                    *(row.name, row.pool, row.incarnation, row.state),
                    *(bitmap.from_bytes(bits) << model.at for bits in (row.target, row.serving)),
                    row.model,
                )
                for row in of_model(self._view, model.hash).pool(EXPERT)
            ]
        return self._parts[model.hash]

    def pool(self, name: str) -> list[Row]:
        """Rows of one pool."""
        return [row for row in self.rows.values() if row.pool == name]


class Packet:
    """A message to the router. answer: called at the sender with the commands, or None if nothing was done."""

    __slots__ = ("answer", "event", "sender")

    def __init__(self, event: Event, sender: int, answer: Callable[[list[Command] | None], None] | None = None) -> None:
        self.event, self.sender, self.answer = event, sender, answer


class Router:
    """The router's process: it is up, stalled or down; its journal takes writes or does not."""

    def __init__(self, world: World, dice: Random) -> None:
        self.world = world
        self.dice = Random(f"{world.seed} router")
        self.config = world.config
        self.state = State()
        # Every tenth run writes the real journal at each commit; the others when the router restarts.
        self.journal = Journal(Path(":memory:")) if world.seed % 10 == 0 else None
        self.events = 0
        self.trace = 0
        self.up = False
        self.life = 0  # of this router process
        self.stalled_s = 0.0
        self.clock_s = dice.uniform(10.0, 1000.0)  # its clock less the world's
        self.unwritable = 0  # faults that keep the journal from being written
        self.problem = False
        self.commits: deque[State] = deque(maxlen=60)
        self.older = 0  # commits that the journal will have lost at the next start
        self.restored = 0  # starts with such a journal
        self.shown: Shown | None = None
        self.launchers: dict[str, Launcher] = {}
        self.detaching: set[str] = set()  # hosts whose launcher is gone, which could not be written down yet
        self.last: deque[tuple[float, Event, list[Command]]] = deque(maxlen=40)
        self.past: list[Event] = []  # what was said lately, to be said again much later

    def start(self, _: Any = None) -> None:
        """Start the process: the next term, from what the journal holds."""
        if self.unwritable:
            self.world.at(self.world.now_s + 0.5, self.start, None)
            return
        journal = self.journal
        if journal is None:
            journal = Journal(Path(":memory:"))
            journal.save(State(), self.state)
            self.state = journal.load()
            journal.close()
        else:
            self.state = journal.load()
        older, self.older = self.older, 0
        if older:
            self._put_back(older)
        self.up, self.problem = True, False
        self.life += 1
        self.stalled_s = 0.0
        self.launchers.clear()
        self.detaching.clear()
        models = self.world.judge.models
        named = models.remembered(Random(f"{self.world.seed} remembered {self.life}"))
        self.world.judge.router_started(self.state, restored=bool(older))
        self.give(Started(salt=(self.world.seed * 1_000_003 + self.life) & 0xFFFFF))
        for entry in named:
            self.give(entry)
        self.world.at(self.world.now_s + self.config.tick_s, self.tick, self.life)

    def _put_back(self, older: int) -> None:
        """Instead of the journal, a copy of it that is some commits older."""
        copy = self.commits[-min(older, len(self.commits))] if older < NOTHING else State()
        self.restored += 1
        journal = Journal(Path(":memory:"))
        journal.save(State(), copy)
        self.state = journal.load()
        if self.journal is None:
            journal.close()
        else:
            self.journal.close()
            self.journal = journal

    def end(self) -> None:
        """The process is killed."""
        self.up = False
        self.shown = None

    def tick(self, life: int) -> None:
        """Ticks come at their pace while the process runs."""
        if life != self.life or not self.up:
            return
        world = self.world
        if self.stalled_s > world.now_s:
            world.at(self.stalled_s, self.tick, life)
            return
        if self.problem and not self.unwritable:
            self.problem = False
        self.give(Tick())
        world.at(world.now_s + self.config.tick_s + 0.01 * self.dice.random(), self.tick, life)

    def give(self, event: Event) -> list[Command] | None:
        """Let the core see an event, commit, carry out. None: it could not be written, so nothing happened."""
        world, before = self.world, self.state
        now_s = world.now_s + self.clock_s
        judge = world.judge
        self.events += 1
        kept = judge.hearing.kept() if self.unwritable or self.problem else None
        judge.hearing.before(event, now_s)
        state, commands = world.step(self.config, before, event, now_s)
        self.last.append((world.now_s, event, commands))
        self.trace = hash((self.trace, _KINDS[type(event)], state.epoch, state.joined, len(commands), now_s))
        if kept is not None and self._cannot_write(before, state, commands):
            self.problem = True
            judge.hearing.undo(kept)
            return None
        if self.journal is not None:
            self.journal.save(before, state)
        changed = state.members is not before.members or state.wanted is not before.wanted
        changed = changed or state.models is not before.models
        if changed or state.epoch != before.epoch:
            self.commits.append(state)
        self.state = state
        if commands:
            judge.after(before, event, commands)
            for command in commands:
                self._carry_out(command)
        else:
            judge.after_nothing(before, event)
        if self.events % LOOK_EVERY == 0:
            judge.look_at_all()
        return commands

    def _cannot_write(self, before: State, state: State, commands: list[Command]) -> bool:
        if self.problem and any(type(c) is Publish for c in commands):
            return True
        same = before.members is state.members and before.wanted is state.wanted
        return bool(self.unwritable) and not (same and _counters(before) == _counters(state))

    def _carry_out(self, command: Command) -> None:
        kind = type(command)
        if kind is Publish:
            self.shown = Shown(self.world, self.state)
            self.world.judge.published(self.shown)
            for process in self.world.processes.values():
                if process.name and not process.view_coming:
                    self.show_to(process)
        elif kind is StartProcess or kind is StopProcess:
            launcher = self.launchers.get(command.host)
            if launcher is None and command.host in self.detaching:
                return  # the core does not know yet
            if launcher is None:
                self.world.judge.broken("orders go to attached launchers", f"{command} has nobody to take it")
            else:
                launcher.order(command)

    def show_to(self, process: Process) -> None:
        """Send the newest View on a watcher's stream; what is published until it arrives follows it."""
        process.view_coming = True
        world = self.world
        shows = self.up and self.shown is not None
        delay_s = world.network.delay(ROUTER, process.uid, process.dice) if shows else LOST
        if delay_s < 0:
            # The stream breaks and is opened again.
            world.at(world.now_s + 0.3 + 0.2 * process.dice.random(), self._show_again, (process, process.stream))
        else:
            world.at(world.now_s + delay_s, process.view_arrives, (self.shown, process.stream))

    def _show_again(self, what: tuple[Process, int]) -> None:
        process, stream = what
        if process.uid in self.world.processes and stream == process.stream:
            if self.shown is None or self.stalled_s > self.world.now_s:
                self.world.at(self.world.now_s + 0.3, self._show_again, what)
            else:
                self.show_to(process)

    # What members ask.

    def take(self, packet: Packet) -> None:
        """A message arrives."""
        world = self.world
        if self.stalled_s > world.now_s:
            world.at(self.stalled_s, self.take, packet)
            return
        world.happened += 1
        if world.is_premature(packet.event):
            return
        commands = self.give(packet.event) if self.up else None
        if packet.answer is not None:
            delay_s = world.network.delay(ROUTER, packet.sender, self.dice)
            if delay_s >= 0:
                world.at(world.now_s + delay_s, packet.answer, commands)

    def take_renewal(self, what: tuple[Process, int, int, int, Acked, float]) -> None:
        """A renewal arrives; as in the real shell it is a Renewed, then an Acked."""
        process, serial, incarnation, seen, ack, sent_s = what
        acked = ack.epoch
        world = self.world
        now_s = world.now_s
        if self.stalled_s > now_s:
            late_s = sent_s + self.config.lease_s / 2
            if serial >= 0 and self.stalled_s > late_s:
                # The sender gives up; its message waits in the router's socket all the same.
                world.at(late_s, process.renew_failed, serial)
                serial = -1
            world.at(self.stalled_s, self.take_renewal, (process, serial, incarnation, seen, ack, sent_s))
            return
        world.happened += 1
        fenced = failed = not self.up
        if self.up:
            renewed = Renewed(name=process.name, incarnation=incarnation, load=process.load, seen=seen)
            commands = self.give(renewed)
            failed = commands is None
            if not failed:
                fenced = any(type(c) is UnknownMember for c in commands)
                if not fenced:
                    if acked > process.ack_given:
                        process.ack_given = acked
                        self.remember(ack)
                    failed = self.give(ack) is None
                    if not failed and serial >= 0 and (routed := process.routed()) is not None:
                        self.give(routed)
        if serial < 0:
            return
        delay_s = world.network.delay(ROUTER, process.uid, process.dice)
        if delay_s < 0:
            world.at(max(now_s, sent_s + self.config.lease_s / 2), process.renew_failed, serial)
        elif failed:
            world.at(now_s + delay_s, process.renew_failed, serial)
        else:
            world.at(now_s + delay_s, process.renewed, (serial, fenced, self.state.salt))

    def remember(self, event: Event) -> None:
        """Keep a message for a fault that delivers it again, long after."""
        self.past.append(event)
        if len(self.past) > 200:
            del self.past[:100]

    def detach(self, launcher: Launcher) -> None:
        """A launcher's stream has ended."""
        if self.up and self.launchers.get(launcher.host) is launcher:
            del self.launchers[launcher.host]
            self._say_detached((launcher.host, self.life))

    def _say_detached(self, what: tuple[str, int]) -> None:
        """Until it can be written down."""
        host, life = what
        self.detaching.discard(host)
        if not self.up or life != self.life or host in self.launchers:
            return
        self.detaching.add(host)
        if self.give(LauncherDetached(host=host)) is None:
            self.world.at(self.world.now_s + self.config.tick_s, self._say_detached, what)
            return
        self.detaching.remove(host)


def _counters(state: State) -> tuple[object, ...]:
    return state.salt, state.term, state.epoch, state.joined, state.models
