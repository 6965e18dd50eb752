"""Processes that are members: they join, renew, follow the View, and end."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from router.events import Acked, Command, Event, Exited, Join, Joined, Loaded, Routed, Stale, UnknownMember
from router.view import ATTENTION, EXPERT
from tests.sim.cluster.models import FIRST, TrueModel, united
from tests.sim.cluster.network import ROUTER
from tests.sim.cluster.shell import Packet, Shown

if TYPE_CHECKING:
    from tests.sim.cluster.workers import Dispatch
    from tests.sim.cluster.world import World

_RETRY_MOST_S = 0.5
_JOIN_S = 5.0
_ROW_S = 0.005
IDLE: dict[str, float] = {}


class Process:
    """One process as it truly is.

    heard_s: router's clock when the router last heard it. spoke_s: when it last tried to speak. acked: newest epoch
    that it has told; ack_given: newest that the router was told. asleep_s: frozen until then.
    """

    capacity = 0

    def __init__(
        self, world: World, uid: int, group: str, host: str, ordered: bool, model: TrueModel | None = None
    ) -> None:
        self.world, self.uid, self.host, self.ordered = world, uid, host, ordered
        self.group, self.pool = group, group.partition(":")[0]
        self.model = model or world.models[0]
        self.dice = Random(f"{world.seed} process {uid}")
        self.pid = 1000 + uid
        self.name = ""
        self.incarnation = 0
        self.living = True
        self.asleep_s = 0.0
        self.proved = False
        self.epoch = 0
        self.acked = 0
        self.ack_given = 0
        self.salts: dict[int, int] = {}  # of the Views seen, by epoch
        self.spoke_s = self.heard_s = world.now_s
        self.load = IDLE
        self.view: Shown | None = None
        self.view_coming = False
        self.stream = 0
        self.told_salt = 0  # of the term that knows what it holds
        self._serial = 0
        self._speaking = False
        self._hurry = False

    # Joining.

    def join(self, _: Any) -> None:
        """Ask to be a member."""
        world = self.world
        if not self.living:
            return
        self._serial += 1
        event = Join(
            pool=self.pool,
            address="",
            pid=self.pid,
            host=self.host,
            model_hash=self.model.hash,
            layers=self.model.layers,
            experts=self.model.experts,
            capacity=self.capacity,
            expert_bytes=self.model.expert_bytes if self.pool == EXPERT else 0,
            zone=self.host,
        )
        serial = self._serial
        self.tell(event, lambda commands: self._joined(serial, commands))
        world.at(world.now_s + _JOIN_S, self._join_failed, serial)

    def _joined(self, serial: int, commands: list[Command] | None) -> None:
        world = self.world
        if not self.living or serial != self._serial:
            return
        if commands is None:
            # The router is away or cannot write: the process waits for it.
            self._serial += 1
            world.at(world.now_s + _RETRY_MOST_S, self.join, None)
            return
        if self.asleep_s > world.now_s:
            world.at(self.asleep_s, lambda _: self._joined(serial, commands), None)
            return
        joined = next((c for c in commands if isinstance(c, Joined)), None)
        if joined is None:
            # Its model is none that is served, or the judge would not have let that pass.
            self.end(True)
            return
        self.name, self.incarnation = joined.name, joined.incarnation
        self.told_salt = self.incarnation >> 40
        self.spoke_s = world.now_s
        world.members[self.incarnation] = self
        self._serial += 1
        self.begin()
        world.router.show_to(self)
        self.renew(self._serial)

    def _join_failed(self, serial: int) -> None:
        if self.living and serial == self._serial:
            # The answer was lost: this process ends, and with it the member that it may have become.
            self.end(True)

    def begin(self) -> None:
        """What a new member does first."""

    # Speaking.

    def tell(self, event: Event, answer: Any = None) -> bool:
        """Send the router something; False if it is lost."""
        world = self.world
        delay_s = world.network.delay(self.uid, ROUTER, self.dice)
        if delay_s < 0:
            return False
        world.at(world.now_s + delay_s, world.router.take, Packet(event, self.uid, answer))
        if world.network.again(self.dice) and not isinstance(event, Join):
            late_s = delay_s + 4.0 * self.dice.random()
            world.at(world.now_s + late_s, world.router.take, Packet(event, self.uid))
        return True

    def renew(self, serial: int) -> None:
        """Keep the lease; the ack goes with it."""
        if serial != self._serial or not self.living:
            return
        world = self.world
        now_s = world.now_s
        if self.asleep_s > now_s:
            world.at(self.asleep_s, self.renew, serial)
            return
        serial = self._serial = serial + 1
        self._speaking, self._hurry = True, False
        self.load = self.measure()
        network = world.network
        delay_s = network.delay(self.uid, ROUTER, self.dice)
        if delay_s < 0:
            world.at(now_s + world.config.lease_s / 2, self.renew_failed, serial)
            return
        salt = self.salts.get(self.acked, 0)
        ack = Acked(name=self.name, incarnation=self.incarnation, epoch=self.acked, salt=salt)
        renewal = (self, serial, self.incarnation, self.epoch, ack, now_s)
        world.at(now_s + delay_s, world.router.take_renewal, renewal)
        if not network.calm and network.again(self.dice):
            late_s = now_s + delay_s + 4.0 * self.dice.random()
            world.at(late_s, world.router.take_renewal, (self, -1, *renewal[2:]))

    def measure(self) -> dict[str, float]:
        """The load report."""
        return IDLE

    def routed(self) -> Routed | None:
        """What was sent to each expert since it was last told, now and then."""
        return None

    def renew_failed(self, serial: int) -> None:
        """No answer in time, or a refusal."""
        if serial != self._serial or not self.living:
            return
        world = self.world
        if self.asleep_s > world.now_s:
            world.at(self.asleep_s, self.renew_failed, serial)
            return
        # An unanswered attempt counts too: only this process's own silence ends its lease.
        self.spoke_s = world.now_s
        self._speaking = False
        world.at(world.now_s + min(world.config.renew_s, _RETRY_MOST_S), self.renew, serial)

    def renewed(self, what: tuple[int, bool, int]) -> None:
        """The router's answer."""
        serial, fenced, salt = what
        world = self.world
        if serial != self._serial or not self.living:
            return
        now_s = world.now_s
        if self.asleep_s > now_s:
            world.at(self.asleep_s, self.renewed, what)
            return
        world.happened += 1
        self.spoke_s = now_s
        if fenced:
            self.fenced()
            return
        self._speaking = False
        self.spoken(salt)
        world.at(now_s if self._hurry else now_s + world.config.renew_s, self.renew, serial)

    def spoken(self, salt: int) -> None:
        """The router, in the term of this salt, has just been told that this process lives."""

    def wake(self) -> None:
        """Renew now: there is something to tell."""
        if self._speaking:
            self._hurry = True
        else:
            self._serial += 1
            self.world.at(self.world.now_s, self.renew, self._serial)

    def lease_held(self) -> bool:
        """False when this process itself was silent for a lease."""
        return self.world.now_s - self.spoke_s < self.world.config.lease_s

    def fenced(self) -> None:
        """The router has said that this member is no more."""
        self.end(True)

    # The View.

    def view_arrives(self, what: tuple[Shown, int]) -> None:
        """A View came on a watch stream."""
        world = self.world
        shown, stream = what
        if not self.living or stream != self.stream:
            return
        if self.asleep_s > world.now_s:
            world.at(self.asleep_s, self.view_arrives, what)
            return
        world.happened += 1
        self.view_coming = False
        if (self.view is None or shown.epoch > self.view.epoch) and self.follows(shown):
            self.view = shown
            self.epoch = shown.epoch
            self.salts[shown.epoch] = shown.salt
            self.see(shown)
        newest = world.router.shown
        if self.living and (newest is None or newest.epoch > shown.epoch):
            world.router.show_to(self)

    def follows(self, shown: Shown) -> bool:
        """Whether it may follow a newer View."""
        return True

    def see(self, shown: Shown) -> None:
        """Follow a newer View."""

    # Ending.

    def end(self, proved: bool) -> None:
        """This process is no more. proved: someone saw it end and will say so."""
        if not self.living:
            return
        self.living = False
        self.proved = proved
        world = self.world
        world.processes.pop(self.uid, None)
        if not proved:
            return
        self.hang_up()
        for launcher in world.launchers:
            if launcher.host == self.host:
                launcher.saw_exit(self)
        # The router watches the processes of its own host.
        if self.host == "host-a" and self.dice.random() < 0.5:
            world.at(world.now_s + 0.02 * self.dice.random(), self._seen_by_router, None)

    def hang_up(self) -> None:
        """Tell those who are connected, as the kernel does."""

    def _seen_by_router(self, _: Any) -> None:
        router, world = self.world.router, self.world
        if not router.up or router.stalled_s > world.now_s:
            # A restarted router looks again at every process that its journal names.
            world.at(max(router.stalled_s, world.now_s + 0.2), self._seen_by_router, None)
        elif router.give(Exited(host=self.host, pid=self.pid)) is None:
            world.at(world.now_s + 0.1, self._seen_by_router, None)


class ExpertServer(Process):
    """An expert server: what it truly holds, and what it answers.

    target: as the newest View says. held: verified experts. broken_s: loading fails until then. factor: how many
    times slower than usual it works. corrupt: its replies fail every check. opened: models of which it can hold
    experts; open_s: seconds that opening one takes, for those that suit it.
    """

    def __init__(
        self, world: World, uid: int, group: str, host: str, ordered: bool, model: TrueModel | None = None
    ) -> None:
        super().__init__(world, uid, group, host, ordered, model)
        self.capacity = world.capacity
        self.opened = {FIRST}
        opens = Random(f"{world.seed} opens {uid}")
        # A server with a bound opens no second model; of others some lack the folder, or compute other numbers.
        self.open_s = {
            m.hash: opens.uniform(0.05, 2.0) for m in world.models[1:] if not self.capacity and opens.random() < 0.9
        }
        self._opening: set[str] = set()
        self.target = 0
        self.held = 0
        self.broken_s = 0.0
        self.factor = 1.0
        self.corrupt = False
        self.ever_corrupt = False
        self.served = 0  # rows since they were last measured
        self._measured_s = world.now_s
        self._loading = 0
        self._loaded_s = 0.0  # when it will have loaded that
        self._report: Loaded | None = None
        self._reports = 0

    def measure(self) -> dict[str, float]:
        elapsed_s = max(self.world.now_s - self._measured_s, 1e-3)
        rows, self.served, self._measured_s = self.served, 0, self.world.now_s
        busy = min(1.0, _ROW_S * self.factor * rows / elapsed_s)
        return {"busy": busy, "rows_per_s": rows / elapsed_s, "speed": 1 / (_ROW_S * self.factor)}

    def hang_up(self) -> None:
        for worker in self.world.alive(ATTENTION):
            if not self.world.network.is_cut(self.uid, worker.uid):
                self.world.at(self.world.now_s + 0.01 * self.dice.random(), worker.hung_up, self.incarnation)

    def see(self, shown: Shown) -> None:
        row = shown.rows.get(self.name)
        target = row.target if row is not None and row.incarnation == self.incarnation else 0
        listed = {model.hash for model in shown.models} if len(self.world.models) > 1 else {FIRST}
        for hash in self.open_s if len(self.world.models) > 1 else ():
            if hash in listed and hash not in self.opened and hash not in self._opening:
                self._opening.add(hash)
                self.world.at(self.world.now_s + self.open_s[hash], self._open, hash)
        unloaded = self.held & ~target
        if unloaded:
            self.world.judge.unloading(self, unloaded)
            self.held &= target
        self.target = target
        self.opened &= listed | {FIRST}
        if self._missing():
            if not self._loading:
                self._load()
        else:
            self._tell_held()

    def _missing(self) -> int:
        """What it is to hold, could, and does not."""
        models = self.world.models
        can = united(m for m in models if m.hash in self.opened) if len(models) > 1 else -1
        return self.target & ~self.held & can

    def _open(self, hash: str) -> None:
        """A model is open; whoever is in doubt looks whether it is still listed."""
        world = self.world
        if not self.living:
            return
        if self.asleep_s > world.now_s:
            world.at(self.asleep_s, self._open, hash)
            return
        self._opening.discard(hash)
        if self.view is not None and hash in {model.hash for model in self.view.models}:
            self.opened.add(hash)
            self._tell_held()
            if self._missing() and not self._loading:
                self._load()

    def unopened(self) -> str:
        """What it has not opened yet, or has to tell of that."""
        if len(self.world.models) == 1 or self.view is None:
            return ""
        listed = {model.hash for model in self.view.models}
        waits = [hash for hash in self.open_s if (hash in listed) != (hash in self.opened)]
        return ", ".join(waits) or ("" if self._report is None else "and has to tell it")

    def _load(self) -> None:
        missing = self._missing()
        # It says what it has well before the router would take the copies back; only a slow server does not.
        in_time = int(self.world.config.move_s / 2 / self.world.pair_s)
        chosen, count = 0, max(1, min(in_time, self.dice.choice((1, 4, 100))))
        while missing and count:
            lowest = missing & -missing
            chosen |= lowest
            missing ^= lowest
            count -= 1
        self._loading = chosen
        world = self.world
        self._loaded_s = world.now_s + world.pair_s * self.factor * chosen.bit_count()
        world.at(self._loaded_s, self._loaded, self._loaded_s)

    def quicken(self, _: Any) -> None:
        """It works at its usual pace from now on, on what it is loading too."""
        self.factor, world = 1.0, self.world
        end_s = world.now_s + world.pair_s * self._loading.bit_count()
        if self._loading and end_s < self._loaded_s:
            self._loaded_s = end_s
            world.at(end_s, self._loaded, end_s)

    def _loaded(self, due_s: float) -> None:
        world = self.world
        if not self.living or due_s != self._loaded_s:
            return
        if self.asleep_s > world.now_s:
            world.at(self.asleep_s, self._loaded, due_s)
            return
        chosen, self._loading = self._loading, 0
        if self.broken_s <= world.now_s:
            # Weights that do not verify are fetched again; a target may have shrunk meanwhile.
            self.held |= chosen & self._missing()
        if self._missing():
            self._tell_held()
            self._load()
        else:
            self._tell_held()

    def _tell_held(self) -> None:
        self._report = self._held_now(self.told_salt)
        self.wake()

    def _held_now(self, salt: int) -> Loaded:
        self._reports += 1
        held = self.view.said(self.held) if self.view is not None else self.held
        return Loaded(
            name=self.name, incarnation=self.incarnation, held=held, epoch=self.epoch, salt=salt,
            number=self._reports, opened=tuple(sorted(self.opened - {FIRST})),
        )  # fmt: skip

    def follows(self, shown: Shown) -> bool:
        # What a term that has not been told holds for nothing may be asked of it.
        return shown.salt == self.told_salt

    def spoken(self, salt: int) -> None:
        if salt != self.told_salt:
            self._report = self._held_now(salt)
        report = self._report
        if report is None:
            return
        self.world.router.remember(report)
        self.tell(report, lambda commands: self._report_answered(report, commands))

    def _report_answered(self, report: Loaded, commands: list[Command] | None) -> None:
        if commands is None or self._report is not report:
            return
        self._report = None
        if report.salt != self.told_salt and not any(isinstance(c, UnknownMember) for c in commands):
            self.told_salt = report.salt
            # What was published before is nothing to follow: a new stream begins with the newest.
            self.stream += 1
            self.world.router.show_to(self)
        if any(isinstance(c, Stale) for c in commands) or any(isinstance(c, UnknownMember) for c in commands):
            self.world.happened += 1

    def serve(self, dispatch: Dispatch) -> None:
        """A request has been worked on: answer with a row for each pair, or with what is not held."""
        world = self.world
        if not self.living:
            return
        if self.asleep_s > world.now_s:
            world.at(self.asleep_s, self.serve, dispatch)
            return
        world.happened += 1
        if not self.lease_held():
            # It may have been fenced meanwhile; the client asks another.
            return
        self.served += len(dispatch.pairs)
        held, found = self.held, []
        for token, k, bit, value in dispatch.pairs:
            found.append((token, k, bit, expert_row(bit, value) if held >> bit & 1 else -1))
        delay_s = world.network.delay(self.uid, dispatch.link.worker.uid, self.dice)
        if delay_s >= 0:
            world.at(world.now_s + delay_s, dispatch.link.worker.replied, (dispatch, found))
            if not world.network.calm and world.network.again(self.dice):
                late_s = world.now_s + delay_s + 2.0 * self.dice.random()
                world.at(late_s, dispatch.link.worker.replied, (dispatch, found))


def expert_row(bit: int, value: int) -> int:
    """What the true weights of an expert make of a row."""
    return (value * (2 * bit + 3) + 7919 * (bit + 1)) & 0xFFFFFFFF
