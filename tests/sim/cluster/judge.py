"""The judge of the router core: every promise, after every event, from the world's own record."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from router.events import (
    Acked,
    AddModel,
    Command,
    Event,
    Exited,
    Fenced,
    Join,
    Joined,
    Left,
    Loaded,
    Publish,
    Refused,
    RemoveModel,
    Renewed,
    Retire,
    Routed,
    Scale,
    Scaled,
    Serves,
    Started,
    StartProcess,
    StopProcess,
    Suspected,
    Tick,
    UnknownMember,
)
from router.retiring import retirement
from router.state import LAUNCHED_POOLS, State
from router.view import ATTENTION, EXPERT, GATEWAY
from tests.sim.cluster.clients import Gateway
from tests.sim.cluster.hearing import Hearing, Known
from tests.sim.cluster.members import ExpertServer, Process
from tests.sim.cluster.models import Models, united
from tests.sim.cluster.moves import Moves
from tests.sim.cluster.workers import Worker

if TYPE_CHECKING:
    from tests.sim.cluster.shell import Row, Shown
    from tests.sim.cluster.world import World

_WATCH_S = 1.0
_NAMED = frozenset((Renewed, Acked, Loaded, Suspected, Left, Routed))


class Violation(AssertionError):
    """A promise was broken."""

    def __init__(self, promise: str, story: str, seed: int, mode: str, events: int) -> None:
        super().__init__(f"seed {seed}, {mode}, event {events}: {promise}: {story}")
        self.promise, self.story, self.seed, self.mode, self.events = promise, story, seed, mode, events


class Judge:
    """present: members that were not fenced, by incarnation, in the order of joining. told: exits that were proved."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.config = world.config
        self.hearing = Hearing(world.config)
        self.present = self.hearing.present
        self.fenced: set[int] = set()
        self.names: set[str] = set()
        self.incarnations: set[int] = set()
        self.wanted = {pool: world.config.wanted(pool) for pool in LAUNCHED_POOLS}
        self.everyone: dict[int, Known] = {}
        self.retired: dict[str, Known] = {}  # whom each operation retires, as its operator was answered
        self.waits = False  # this term has published nothing yet
        self.shown: Shown | None = None
        self.epoch = 0
        self._planned = True
        self.moves = Moves(self)
        self.models = Models(self)
        self._wanted_before = self.wanted[EXPERT]
        self.changes = 0  # of wanted sizes by load, in this term; no run lasts an hour
        self.corrupt = 0  # fenced for their replies, in this term

    def broken(self, promise: str, text: str) -> NoReturn:
        """Raise the Violation."""
        raise self.violation(promise, text)

    def violation(self, promise: str, text: str) -> Violation:
        """That a promise was broken, here and now."""
        world = self.world
        return Violation(promise, text, world.seed, world.mode, world.router.events)

    def router_started(self, state: State, restored: bool) -> None:
        """A new term begins, with what its journal holds."""
        self.changes = self.corrupt = 0
        self.hearing.restart(self.world.now_s + self.world.router.clock_s)
        self.waits = True
        self.models.restarted(state, restored)
        if restored:
            self._forget(state)

    def _forget(self, state: State) -> None:
        """The journal is an older copy: what was decided since is unknown to the router."""
        present = {r.incarnation: self.everyone[r.incarnation] for r in state.members.values()}
        self.hearing.forget(present)
        self.fenced = set(self.everyone) - present.keys()
        self.names = {known.name for known in present.values()}
        self.wanted = {pool: self.config.wanted(pool) for pool in LAUNCHED_POOLS} | dict(state.wanted)
        self.epoch, self.shown = state.epoch, None
        known = {one.operation for one in (*state.members.values(), *state.gone)}
        self.retired = {operation: one for operation, one in self.retired.items() if operation in known}

    def _begun(self, state: State) -> None:
        """A term with members publishes once it has heard them, or a lease has passed."""
        if not state.members:
            self.broken("a new term publishes", f"epoch {state.epoch}")

    # After an event.

    def after_nothing(self, before: State, event: Event) -> None:
        """The core saw an event and ordered nothing."""
        router = self.world.router
        if router.state.epoch != before.epoch:
            self.broken("an epoch is published", f"{before.epoch} became {router.state.epoch} in silence")
        if type(event) in _NAMED and event.incarnation not in self.present:
            self.broken("strangers are told so", f"{event} was taken for a member's")
        self._noted(event)
        if router.state.wanted is not before.wanted:
            self.models.resized(before, router.state)
        if type(event) is Acked and event.epoch > before.epoch:
            self._unchanged(before, event)
        elif type(event) is Exited:
            self._exited(event)
        elif type(event) is Started:
            self._begun(router.state)
        elif type(event) is Retire:
            self._retired(event)

    def after(self, before: State, event: Event, commands: list[Command]) -> None:
        """The core saw an event and ordered something."""
        state = self.world.router.state
        published = 0
        fences = []
        # Who is fenced in the step that also grows the pool was judged before.
        self._wanted_before = self.wanted[EXPERT]
        for command in commands:
            kind = type(command)
            if kind is Publish:
                published += 1
                expected = (
                    before.epoch < command.epoch if self.world.router.restored else before.epoch + 1 == command.epoch
                )
                if not expected or command.epoch <= self.epoch:
                    self.broken("epochs only rise", f"{self.epoch}, then {before.epoch}, then {command.epoch}")
            elif kind is Fenced:
                fences.append(command)
            elif kind is Joined:
                self.models.note(state)
                self._joined(event, command)
            elif kind is Serves:
                self.models.serves(event, command)
            elif kind is UnknownMember:
                self._stranger(before, event)
            elif kind is Refused and isinstance(event, Retire):
                self._unchanged(before, event)
            elif kind is Refused and isinstance(event, Join | AddModel | RemoveModel):
                self.models.refused(event, command)
                self._unchanged(before, event)
            elif kind is Scaled:
                self._scaled(event, command)
            elif kind is Refused and isinstance(event, Scale):
                least, most = self.config.bounds(event.pool)
                if event.pool in self.wanted and least <= event.wanted <= most:
                    self.broken("a size within its bounds is taken", f"{event}: {command.message}")
        if published > 1 or (not published and state.epoch != before.epoch):
            self.broken("epochs only rise", f"{before.epoch} became {state.epoch} with {published} publications")
        if isinstance(event, Started) and not published:
            self._begun(state)
        for command in fences:
            self._fence(before, event, command)
        self._noted(event)
        if state.wanted is not before.wanted:
            self.models.resized(before, state)
        starts = [command for command in commands if type(command) is StartProcess]
        if starts:
            self._launches(starts)
        for command in commands:
            if type(command) is StopProcess and command.name in state.members:
                self.broken("only fenced members are ended", f"{command}")
        if published:
            # The first View of a term shows what was lost before it.
            self._planned = not (fences or self.waits or isinstance(event, Loaded))
        if type(event) is Exited:
            self._exited(event)
        elif type(event) is Acked and event.epoch > before.epoch:
            self._unchanged(before, event)
        elif type(event) is Retire and not any(type(c) in (Refused, UnknownMember) for c in commands):
            self._retired(event)

    def of_group(self, shown: Shown, group: str) -> list[Row]:
        """Rows of one launched pool."""
        return [row for row in shown.rows.values() if self.models.group(row.pool, row.model) == group]

    def _retired(self, event: Retire) -> None:
        """An operator was told that a member goes under his operation."""
        known = self.retired.get(event.operation)
        if known is None:
            known = next((known for known in self.present.values() if known.name == event.name), None)
            if known is None:
                return  # A journal that was put back still knows it; the world does not.
            others = [operation for operation, other in self.retired.items() if other is known]
            if others:
                self.broken("one operation retires a member", f"{event} beside {others}")
            self.retired[event.operation] = known
        elif known.name != event.name:
            self.broken("an operation retires one member", f"{event}, not {known.name}")

    def _retirements_last(self, state: State) -> None:
        """No retirement is forgotten, and nobody is said to be safe to end who is a member, or holds streams."""
        for operation, known in self.retired.items():
            found, name = retirement(state, known.name), known.name
            if found is None or found.operation != operation:
                self.broken("no retirement is forgotten", f"{operation} of {name}: {found}")
            process = known.process
            if not found.safe_to_terminate or process is None or not process.living:
                continue
            if process.incarnation in self.present or (isinstance(process, Gateway) and process.requests):
                self.broken("who is safe to end does nothing any more", f"{name}, now {process.name}")

    def _scaled(self, event: Event, command: Scaled) -> None:
        """A pool has another wanted size: somebody asked, or its load did, within its bounds and its rate."""
        self.wanted[command.pool] = command.wanted
        least, most = self.config.bounds(command.pool)
        if not least <= command.wanted <= most:
            self.broken("sizes stay within their bounds", f"{command}, {least} to {most}")
        if isinstance(event, Scale):
            return
        policy = self.config.autoscale.get(command.pool)
        self.changes += 1
        if policy is None or not command.why:
            self.broken("sizes change for a reason", f"{command} at {event}")
        if self.changes > policy.changes_per_h:
            self.broken("scaling stays within its rate", f"{self.changes} changes within an hour")

    def _noted(self, event: Event) -> None:
        """What a member has told the router."""
        if type(event) is Acked and 0 < event.epoch <= self.epoch and event.incarnation in self.present:
            self.present[event.incarnation].acked = True
        elif type(event) is Loaded and event.incarnation in self.present:
            # Whatever it says, it is at work.
            self.present[event.incarnation].waits_since_s = self.hearing.now_s
            self.present[event.incarnation].opened.update(event.opened)
        elif type(event) is Renewed and event.incarnation in self.present:
            self.present[event.incarnation].load = event.load
        elif type(event) is Left and event.drain and event.incarnation in self.present:
            self.present[event.incarnation].asked_to_drain = True
        elif type(event) is Retire:
            for known in self.present.values():
                known.asked_to_drain = known.asked_to_drain or known.name == event.name

    def _joined(self, event: Event, command: Joined) -> None:
        if command.name in self.names or command.incarnation in self.incarnations:
            self.broken("names and incarnations are given once", f"{command} again")
        self.names.add(command.name)
        self.incarnations.add(command.incarnation)
        process = self.world.processes.get(event.pid - 1000)
        # Workers that replace lost ones are let in, for the streams that go on.
        wanted = self.world.router.state.wanted.get(self.models.group(ATTENTION, event.model_hash), 0)
        if event.pool == ATTENTION and self.models.leaves(event.model_hash) and not wanted:
            self.broken("nobody begins to ask for a model that leaves", f"{command} at {event}")
        known = Known(command.name, event, self.hearing.now_s, process)
        self.present[command.incarnation] = self.everyone[command.incarnation] = known

    def _stranger(self, before: State, event: Event) -> None:
        if isinstance(event, Retire):
            if any(known.name == event.name for known in self.present.values()):
                self.broken("members are no strangers", f"{event}")
        elif event.incarnation in self.present and self.present[event.incarnation].name == event.name:
            self.broken("members are no strangers", f"{event}")
        self._unchanged(before, event)

    def _unchanged(self, before: State, event: Event) -> None:
        state = self.world.router.state
        same = before.members == state.members and before.wanted == state.wanted
        if not same or not (self.hearing.excused or before.liveness == state.liveness):
            self.broken("stale events change nothing", f"{event} changed the state")

    def _fence(self, before: State, event: Event, command: Fenced) -> None:
        known = self.present.pop(command.incarnation, None)
        if known is None:
            self.broken("a member is fenced once", f"{command}")
        self.fenced.add(command.incarnation)
        hearing = self.hearing
        record = before.members[known.name]
        if not isinstance(event, Exited | Left):
            hearing.fenced_clients[command.incarnation] = (known, known.heard_s + self.config.lease_s)
        if command.reason == "drained" or record.draining:
            # One that has nothing to hand over drains within the step that asks it to.
            if not record.draining and not isinstance(event, Left | Tick):
                self.broken("who drained was asked to", f"{command}")
            if command.reason == "drained" and known.pool == EXPERT:
                for name, bits in self._routes_to(known.name, command.incarnation):
                    self.broken("who drained is asked no more", f"{name} asks {known.name} for {bits:x}")
            return
        if isinstance(event, Exited):
            if (event.host, event.pid) != (known.host, known.pid) or (
                known.process is not None and known.process.living
            ):
                self.broken("only who ended is fenced for it", f"{command}: {event}")
            return
        if isinstance(event, Left) or (isinstance(event, Join) and (event.host, event.pid) == (known.host, known.pid)):
            return
        if not isinstance(event, Tick):
            self.broken("a fence has a reason", f"{command} at {event}")
        silence_s, patience_s = hearing.now_s - known.heard_s, hearing.patience_s(known)
        if command.reason == "gave corrupt replies":
            self._fenced_as_corrupt(before, known)
        elif silence_s < patience_s:
            self.broken(
                "nobody is fenced while it may live",
                f"{command}: {silence_s:.3f} s, {patience_s:.3f} s needed",
            )
        elif hearing.doubts():
            self.broken("an observer doubts itself first", f"{command} of {len(before.members)}")
        elsewhere = 0
        for name, other in before.members.items():
            if name != known.name:
                elsewhere |= other.serving
        if record.serving & ~elsewhere:
            self.broken(
                "silence takes no last replica",
                f"{command}: {record.serving & ~elsewhere:x} is served nowhere",
            )

    def _fenced_as_corrupt(self, before: State, known: Known) -> None:
        """Fenced for its replies: rightly, unless most workers lie; and no other server was missing or going."""
        members = [r for r in before.members.values() if r.incarnation in self.present]
        judges = [self.present[r.incarnation].process for r in members if r.pool == ATTENTION and r.ready]
        right = isinstance(known.process, ExpertServer) and known.process.ever_corrupt
        for model in self.world.models:
            # Those of each model judge for themselves: its experts may be damaged, and another's sound.
            workers = [worker for worker in judges if worker is None or worker.model is model]
            liars = sum(isinstance(worker, Worker) and known.name in worker.slandered for worker in workers)
            right = right or 2 * liars > len(workers)
        if not right:
            self.broken("who gives right replies is not fenced for wrong ones", f"{known.name}, by {judges}")
        others = [record for record in members if record.pool == EXPERT]
        if len(others) + 1 < self._wanted_before or any(not r.ready or r.draining for r in others):
            self.broken("none is fenced for its replies while another is missing", f"{known.name}")
        self.corrupt += 1
        if self.corrupt > 1:
            self.broken("an hour lies between two that are fenced for their replies", f"{known.name}")

    def _routes_to(self, name: str, incarnation: int) -> list[tuple[str, int]]:
        """Workers, members still or with a lease that has not ended, that ask a server, and what for."""
        found = []
        for process in self.world.processes.values():
            if isinstance(process, Worker) and self._counts(process):
                link = process.links.get(name)
                bits = process.routes.get(name, 0)
                if bits and link is not None and link.incarnation == incarnation:
                    found.append((process.name, bits))
        return found

    def _counts(self, worker: Worker) -> bool:
        """Whether a worker may ask for something: no gateway gives anything to one that was never shown serving."""
        known = self.present.get(worker.incarnation)
        if known is not None:
            return known.begun
        known, end_s = self.hearing.fenced_clients.get(worker.incarnation, (None, 0.0))
        return known is not None and known.begun and self.hearing.now_s < end_s

    def _launches(self, starts: list[StartProcess]) -> None:
        """No process is ordered in place of one that may be presumed alive."""
        state, hearing = self.world.router.state, self.hearing
        doubts = hearing.doubts()
        for pool in {command.pool for command in starts}:
            filled = sum(start.pool == pool for start in state.starts)
            for known in self.present.values():
                record = state.members.get(known.name)
                if (
                    self.models.group(known.pool, known.model) == pool
                    and record is not None
                    and not (record.draining or known.asked_to_drain)
                ):
                    filled += doubts or not hearing.may_be_dead(known)
            if filled > self.wanted[pool]:
                self.broken("no more are ordered than wanted", f"{filled} in pool {pool}, {self.wanted[pool]} wanted")

    # What was published.

    def published(self, shown: Shown) -> None:
        """A View went out."""
        last, self.shown = self.shown, shown
        if self.waits:
            # Until now nothing was taken back.
            self.waits = False
            for known in self.present.values():
                known.waits_since_s = self.hearing.now_s
        self.epoch = shown.epoch
        self.models.published(shown)
        members = self.world.members
        for row in shown.rows.values():
            if row.incarnation in self.fenced or row.incarnation not in self.present:
                self.broken("no row names a fenced incarnation", f"{row.name}")
            known = self.present[row.incarnation]
            if row.phase in ("serving", "suspect"):
                if row.pool == ATTENTION and not known.acked:
                    self.broken("who is not ready is not shown as usable", f"{row.name} is {row.phase}")
                known.begun = True
            if row.pool != EXPERT:
                continue
            if row.serving & ~row.target:
                self.broken("who serves is to hold", f"{row.name} serves {row.serving & ~row.target:x} too many")
            closed = united(m for m in self.world.models[1:] if m.hash not in known.opened)
            if row.target & closed:
                self.broken("a model is placed on who opened it", f"{row.name} is to hold {row.target & closed:x}")
            capacity = self.world.capacity
            if capacity and row.target.bit_count() > capacity:
                self.broken("nobody is over capacity", f"{row.name} has {row.target.bit_count()} of {capacity}")
            if row.serving:
                self._check_held(row, members.get(row.incarnation))
        if last is None:
            return
        for row in last.experts:
            now = shown.rows.get(row.name)
            if now is None:
                continue
            shrunk = row.target & ~now.target
            process = members.get(row.incarnation)
            # Who has not told this term what it holds does not follow its Views.
            if shrunk and process is not None and process.told_salt == shown.salt:
                for name, bits in self._routes_to(row.name, row.incarnation):
                    if bits & shrunk:
                        self.broken(
                            "nothing is unloaded before all acked",
                            f"{name} asks {row.name} for {bits & shrunk:x}, out of its target",
                        )
        if last.salt == shown.salt:
            for hash in self.models.asleep(shown) - self.models.asleep(last):
                if self.models.busy(hash):
                    self.broken("only what nobody asks sleeps", f"{hash}, asked by {self.models.busy(hash)}")
        self.moves.changed(last, shown, self._planned)

    def _check_held(self, row: Row, process: Process | None) -> None:
        # A server whose answer to its Join was lost has no name yet, and nothing either.
        held = process.held if isinstance(process, ExpertServer) else 0
        if self.world.router.restored and process and process.told_salt != self.world.router.state.salt:
            # An older journal says what it held once. It refuses the rest, and follows no View before it was heard.
            return
        if row.serving & ~held and (process is None or process.living):
            self.broken("rows name servers that hold verified weights", f"{row.name} lacks {row.serving & ~held:x}")

    # What members and launchers do.

    def unloading(self, server: ExpertServer, bits: int) -> None:
        """A server is about to unload experts."""
        if server.incarnation not in self.present:
            return
        for name, routed in self._routes_to(server.name, server.incarnation):
            if routed & bits:
                self.broken(
                    "nothing is unloaded before all acked",
                    f"{server.name} drops {routed & bits:x}, asked by {name}",
                )
        for process in self.world.processes.values():
            if isinstance(process, Worker) and self._counts(process):
                for dispatch in process.flights.values():
                    asked = any(bits >> pair[2] & 1 for pair in dispatch.pairs)
                    if dispatch.link.server is server and asked:
                        self.broken("nothing is unloaded before all acked", f"{process.name} has calls in flight")

    def _exited(self, event: Exited) -> None:
        for known in self.present.values():
            if (known.host, known.pid) == (event.host, event.pid):
                self.broken("whose exit is proved is gone", f"{known.name} is still a member")

    # Now and then, and at rest.

    def look_at_all(self) -> None:
        """Everything again, whatever changed."""
        self.world.ledger.look()
        shown, state = self.shown, self.world.router.state
        if shown is None or not self.world.router.up:
            return
        if self.waits:
            if self.world.router.problem or self.world.router.unwritable:
                self.hearing.began_s = self.hearing.now_s
            if self.hearing.now_s - self.hearing.began_s > self.config.lease_s + 3 * self.config.tick_s:
                self.broken("a new term publishes", "nothing, for more than a lease")
            return
        members = {record.incarnation for record in state.members.values()}
        if members != set(self.present):
            self.broken("members are those that joined", f"{members ^ set(self.present)}")
        for hash in self.models.asleep(shown):
            if self.models.busy(hash):
                self.broken("whoever asks wakes a model", f"{hash} sleeps, asked by {self.models.busy(hash)}")
        self._retirements_last(state)
        if state.wanted and dict(state.wanted) != self.wanted:
            self.broken("wanted sizes last", f"{dict(state.wanted)} for {self.wanted}")
        for row in shown.experts:
            record = state.members.get(row.name)
            if record is None:
                continue
            if (shown.told(record.serving), shown.told(record.target)) != (row.serving, row.target):
                self.broken("what changes is published", f"{row.name}")
            if row.serving:
                self._check_held(row, self.world.members.get(row.incarnation))
            self._watch(row)

    def _watch(self, row: Row) -> None:
        """Copies that do not come are taken back."""
        known, process = self.present[row.incarnation], self.world.members.get(row.incarnation)
        now_s = self.hearing.judged_s
        record = self.world.router.state.members[row.name]
        # What is to be let go stays until the acks, whoever says that he does not hold it.
        waits = row.target & ~(
            self.shown.told(record.retiring) | (process.held if isinstance(process, ExpertServer) else 0)
        )
        told = process is not None and process.told_salt == self.world.router.state.salt
        if waits != known.waits or not told or self.world.router.problem or self.world.router.unwritable:
            # A server that has said nothing in this term is known from the journal alone. A router that cannot write
            # takes nothing back; and what was ordered after a stall has waited from then on, not from the tick before.
            known.waits, known.waits_since_s = waits, self.hearing.now_s
        elif known.order[0] < record.dropped_epoch and known.order[1] == row.target:
            # Taken back, and ordered again at once, for nobody serves it.
            known.waits_since_s = self.hearing.now_s
        elif waits and now_s - known.waits_since_s > self.config.move_s + _WATCH_S:
            self.broken(
                "a copy that does not come is taken back",
                f"{row.name} lacks {waits:x} for {now_s - known.waits_since_s:.1f} s",
            )
        known.order = record.dropped_epoch, row.target

    def unrest(self) -> str:
        """What is not as it should be at rest; empty if all is well."""
        shown, router = self.shown, self.world.router
        if shown is None or not router.up or router.problem:
            return "the router is not up"
        starting = [p.pid for p in self.world.processes.values() if not p.name]
        if starting or any(launcher.starting.total() for launcher in self.world.launchers):
            return f"processes start: {starting}"
        unaware = [p.name for p in self.world.processes.values() if p.incarnation not in self.present]
        if unaware:
            return f"{unaware} do not know that they are fenced"
        if not shown.pool(GATEWAY):
            # Clients start one when they ask next.
            return "no gateway is a member"
        rows = {pool: [r for r in self.of_group(shown, pool) if r.phase != "draining"] for pool in self.wanted}
        for pool in self.wanted:
            found, wanted = rows[pool], self.wanted[pool]
            if len(found) < wanted:
                return f"{len(found)} of {wanted} in pool {pool}"
            # One that joined while its launcher was away counts as its operator's.
            if len(found) > wanted and any(router.state.members[row.name].ordered for row in found):
                return f"{len(found)} in pool {pool}, {wanted} wanted"
        for row in shown.rows.values():
            stays = self.models.awaits_one_who_can(shown, row)
            if row.phase != "serving" and not stays:
                return f"{row.name} is {row.phase}"
            if router.state.members[row.name].operation and not stays:
                return f"{row.name} is retired and has not gone"
            if row.pool == EXPERT and row.target != row.serving:
                return f"{row.name} serves {row.serving:x} of {row.target:x}"
        for row in shown.rows.values():
            process = self.world.members.get(row.incarnation)
            if process is None or not process.living:
                return f"{row.name} is dead"
            if isinstance(process, Gateway) and process.drains:
                # It heard so from a term that an older journal has forgotten since.
                return f"{row.name} drains and has not gone"
            if row.pool == ATTENTION and process.acked < shown.epoch:
                return f"{row.name} has acked {process.acked} of {shown.epoch}"
            for link in process.links.values() if isinstance(process, Worker) else ():
                if self.world.now_s < link.distrusted_s:
                    # It may yet be fenced for the replies that it gave.
                    return f"{row.name} distrusts {link.name}"
        return self.models.unrest(shown) or self.moves.uneven(rows[EXPERT])
