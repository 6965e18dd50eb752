"""A whole cluster on one clock, by seed: router core, members, launchers, network, clients.

Everything that happens is an entry of one heap. Nothing here depends on the machine, on the wall clock or on
the order of a set: the same seed gives the same run. Each process draws from dice of its own, so that a fault
taken out of the schedule leaves the rest of the run as it was, as far as it can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from random import Random
from typing import Any

from eaas.ops.chaos.plan import Plan
from router.events import AddModel, Command, Event, Join, RemoveModel
from router.scaling import Policy
from router.state import LAUNCHED_POOLS, Config, State
from router.view import ATTENTION, EXPERT, GATEWAY
from tests.sim.cluster.clients import Clients, Gateway
from tests.sim.cluster.faults import FORM_S, Schedule
from tests.sim.cluster.judge import Judge, Violation
from tests.sim.cluster.launcher import Launcher
from tests.sim.cluster.ledger import Ledger
from tests.sim.cluster.members import ExpertServer, Process
from tests.sim.cluster.models import EXPERT_BYTES, FIRST, TrueModel, drawn
from tests.sim.cluster.network import ROUTER, Network
from tests.sim.cluster.planned import Planned
from tests.sim.cluster.shell import Packet, Router
from tests.sim.cluster.workers import Worker

Step = Callable[[Config, State, Event, float], tuple[State, list[Command]]]
SAFETY, LIVENESS = "safety", "liveness"
HOSTS = ("host-a", "host-b", "host-c")
# After the last fault all must be well within this time, and then stay so; a server that did not load what it was
# told gets nothing new for up to 4 times move_s.
SETTLE_TICKS = 900
SETTLE_MOVES = 8
REST_S = 4.0
# After a plan, requests are served for this long, and none may fail.
SERVED_S = 30.0
POLICY = Policy(least=1, most=16, sample_s=1.0, start_s=2.0, trend_s=20.0, burst_s=5.0, hold_s=5.0, changes_per_h=20)
_CLASSES: dict[str, type[Process]] = {EXPERT: ExpertServer, ATTENTION: Worker, GATEWAY: Gateway}


class World:
    """One run.

    mode: "safety" has faults to the end; "liveness" stops them for the last third, and all must come back. events:
    core events of the run. keep: numbers of the faults that strike; None = all. plan: its faults strike and no others,
    and the run ends when all has come back after the last; for mode "liveness". models: how many a pool may have to
    serve; 0: one for half of the seeds, two or three for the others.
    """

    def __init__(
        self,
        step: Step,
        seed: int,
        mode: str,
        events: int,
        keep: frozenset[int] | None = None,
        plan: Plan | None = None,
        models: int = 0,
    ) -> None:
        dice = Random(f"{seed} shape")
        self.step, self.seed, self.mode, self.events_wanted = step, seed, mode, events
        self.now_s = 0.0
        self.happened = 0  # messages delivered and calls completed
        self.heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = 0
        self._spawned = 0
        wanted = dice.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8))
        layers, experts = dice.randint(1, 3), dice.randint(2, 8)
        others = Random(f"{seed} models")
        count = others.choice((1, 1, 2, 3))
        # Whether it is known by its name, or its first server says what it is.
        name = others.choice(("", "model-0")) if (models or count) > 1 else ""
        first = TrueModel(hash=FIRST, name=name, layers=layers, experts=experts)
        self.models = drawn(first, models or count, others)
        self.config = Config(
            experts_wanted=wanted,
            attention_wanted=dice.randint(1, 3),
            replicas=dice.randint(1, min(3, wanted)),
            start_s=15.0,
            backoff_most_s=8.0,
            move_s=dice.choice((2.0, 5.0, 20.0)),
            copies_in_flight=dice.choice((1, 4, 256)),
            bytes_in_flight=dice.choice((2, 1000, 1000)) * EXPERT_BYTES,
            redundant=dice.choice((0, 0, 1, experts)),
            balance_s=dice.choice((2.0, 8.0)),
            most_prompt=dice.choice((0, 16)),
            most={EXPERT: 10},
            # Load is never at rest, so what follows it cannot be asked to be.
            autoscale={EXPERT: POLICY} if mode == SAFETY and dice.random() < 0.25 else {},
        )
        self.capacity = 0
        self.pair_s = dice.choice((0.01, 0.05, 0.25))  # seconds to load one expert
        if dice.random() < 0.4:
            spare = dice.randint(0, 1)
            self.capacity = layers * (-(-experts * self.config.replicas // wanted) + spare)
            # Placements change while copies are on their way: then room is scarcest.
            self.pair_s *= dice.choice((1.0, 4.0))
        if len(self.models) > 1:
            # Experts of some models fill the budget, and of others do not.
            scarce = others.choice((2, 6, 1000)) * EXPERT_BYTES
            # Where experts load fast enough for whoever wakes a model to have its answer in time.
            sleeps = self.pair_s < 0.1 and others.random() < 0.4
            sleep_after_s = others.choice((0.5, 3.0)) if sleeps else 0.0
            self.config = replace(self.config, bytes_in_flight=scarce, sleep_after_s=sleep_after_s)
            if others.random() < 0.8:
                # Servers with a bound hold one model alone.
                self.capacity = 0
        self.step_s = dice.choice((0.2, 0.35, 0.5))  # seconds between two tokens of a stream
        self.network = Network()
        self.processes: dict[int, Process] = {}  # those alive
        self.members: dict[int, Process] = {}  # by incarnation, dead ones too
        self.judge = Judge(self)
        self.ledger = Ledger(self)
        self.router = Router(self, dice)
        self.launchers = [Launcher(self, host, -1 - i) for i, host in enumerate(HOSTS[: dice.randint(1, 3)])]
        self.clients = Clients(self, rate=dice.uniform(0.5, 2.0) * self.config.attention_wanted)
        schedule = Schedule(self, keep, pace=dice.choice((0.2, 0.4, 0.8, 1.6)))
        self.plan = plan
        self.schedule = schedule if plan is None else Planned(self, plan)
        self.gateways = dice.randint(1, 2)
        self.converged_s = -1.0  # how long everything took to come back

    def at(self, when_s: float, act: Callable[[Any], None], what: Any) -> None:
        """Do something at a time."""
        self._order += 1
        heappush(self.heap, (when_s, self._order, act, what))

    def spawn(self, pool: str, host: str, *, ordered: bool = False, model: TrueModel | None = None) -> Process:
        """Start a process of a launched pool on a host; it asks to join."""
        self._spawned += 1
        process = _CLASSES[pool.partition(":")[0]](self, self._spawned, pool, host, ordered, model)
        self.processes[process.uid] = process
        process.join(None)
        return process

    def alive(self, pool: str = "") -> list[Process]:
        """Processes that are members as far as they know, oldest first."""
        return [p for p in self.processes.values() if p.name and (not pool or p.pool == pool)]

    def operate(self, event: AddModel | RemoveModel) -> None:
        """An operator gives an order."""
        self.router.take(Packet(event, ROUTER))

    def is_premature(self, event: Event) -> bool:
        """Whether it is said while the router, of an older journal, does not know the first model.

        An operator looks first; and a worker that joined with nobody there would itself say which model is served.
        """
        state = self.router.state
        known = state.models
        # With nobody there a model that nobody named is forgotten.
        held = any(model.name for model in known) or any(r.pool in LAUNCHED_POOLS for r in state.members.values())
        if known and known[0].layers and held:
            return False
        if isinstance(event, Join):
            return event.model_hash != FIRST
        return isinstance(event, AddModel) and event.model.hash != FIRST

    def run(self) -> None:
        """Everything, to the end. Raises Violation."""
        try:
            self._begin()
            if self.plan is not None:
                self._until_s(FORM_S + self.plan.end_s)
                self._recover()
                self._until_s(self.now_s + SERVED_S)
            elif self.mode == SAFETY:
                self._until(lambda: self.router.events >= self.events_wanted)
            else:
                self._until(lambda: self.router.events >= self.events_wanted * 2 // 3)
                self._recover()
                self._until(lambda: self.router.events >= self.events_wanted)
            self.judge.look_at_all()
            self.ledger.close()
        except Violation:
            raise
        except Exception as error:
            # A core that fails outright has broken its promise to answer.
            raise self.judge.violation("the core answers", f"{type(error).__name__}: {error}") from error

    def _begin(self) -> None:
        self.router.start()
        for launcher in self.launchers:
            launcher.attach(None)
        for _ in range(self.gateways):
            self.spawn(GATEWAY, HOSTS[0])
        if len(self.models) > 1:
            dice = Random(f"{self.seed} operator")
            if self.models[0].name:
                self.at(3.0 * dice.random(), self.operate, self.models[0].added(self.config.attention_wanted))
            for model in self.models[1:]:
                if dice.random() < 0.8:
                    self.at(FORM_S * (0.5 + dice.random()), self.operate, model.added(model.attention))
        self.clients.start()
        self.schedule.start()

    def _until(self, done: Callable[[], bool]) -> None:
        heap = self.heap
        while not done():
            # The end is looked for now and then: the heap is never empty, the router ticks.
            for _ in range(64):
                self.now_s, _, act, what = heappop(heap)
                act(what)

    def _until_s(self, end_s: float) -> None:
        self._until(lambda: self.now_s >= end_s)

    def _recover(self) -> None:
        """Faults stop; all must come back within a bounded time, and stay."""
        self.schedule.stop()
        # Who spoke to the router last while messages were lost is heard again within a lease.
        self._until_s(self.schedule.healed_s + self.config.lease_s)
        began_s = self.now_s
        self._settle("the faults stopped")
        self.converged_s = self.now_s - began_s
        self._rest()
        self.ledger.all_must_succeed_from(self.now_s)
        if len(self.models) > 1:
            self._change_models()

    def _change_models(self) -> None:
        """Models come and go where nothing is wrong: the others' experts stay where they are, and requests end well."""
        models, dice = self.judge.models, Random(f"{self.seed} changes")
        for _ in range(2):
            live = models.live()
            away = [model for model in self.models if model not in live]
            if away and (len(live) < 2 or dice.random() < 0.5):
                changed = dice.choice(away)
                order: AddModel | RemoveModel = changed.added(dice.randint(1, 2))
            else:
                changed = dice.choice(live)
                order = RemoveModel(name=changed.hash)
            held = self._held_beside(changed)
            self.operate(order)
            self._settle(f"{order}")
            stays = not (self.config.redundant or self.config.sleep_after_s)
            if stays and self._held_beside(changed) != held:
                self.judge.broken("a model moves no other", f"{held} became {self._held_beside(changed)}: {order}")
            self._rest()

    def _held_beside(self, model: TrueModel) -> dict[str, int]:
        """What the servers serve of all models but one."""
        shown = self.router.shown
        held = {row.name: row.serving & ~model.mask for row in shown.experts} if shown is not None else {}
        return {name: bits for name, bits in held.items() if bits}

    def _settle(self, since: str) -> None:
        ticks = SETTLE_TICKS + round(SETTLE_MOVES * self.config.move_s / self.config.tick_s)
        end_s = self.now_s + ticks * self.config.tick_s
        while (unrest := self.judge.unrest()) and self.now_s < end_s:
            self._until_s(self.now_s + 0.5)
        if unrest:
            self.judge.broken("all comes back", f"{ticks} ticks after {since}, {unrest}")

    def _rest(self) -> None:
        epoch = self.router.state.epoch
        self._until_s(self.now_s + REST_S)
        # A round goes from layer to layer, with so many copies in each.
        moving_s = sum(model.layers for model in self.models) * self.config.balance_copies * self.pair_s
        follows = bool(self.config.redundant or self.config.sleep_after_s)
        end_s = self.now_s + (REST_S + moving_s) * follows
        while (unrest := self.judge.unrest()) and self.now_s < end_s:
            # Replicas follow the load, and a model wakes with it; a move for it does not last.
            self._until_s(self.now_s + 0.1)
        if unrest:
            self.judge.broken("what came back stays", f"{REST_S} s after all was well, {unrest}")
        if self.router.state.epoch != epoch and not follows:
            self.judge.broken("what came back stays", f"epoch {epoch} became {self.router.state.epoch} at rest")
