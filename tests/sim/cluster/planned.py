"""The faults of a chaos plan, the same file that `eaas chaos run` carries out, on the simulated cluster."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from eaas.ops.chaos.plan import Plan, PlanInvalid, Step, choose, in_words
from router.view import GATEWAY
from tests.sim.cluster.faults import FORM_S, Schedule
from tests.sim.cluster.members import ExpertServer, Process
from tests.sim.cluster.network import ROUTER, Filter

if TYPE_CHECKING:
    from tests.sim.cluster.world import World

KINDS = ("kill", "freeze", "slow", "delay", "loss", "partition")
ROUTER_NAME = "router/0"
# As long as its launcher takes to start it again.
_ROUTER_AWAY_S = 1.0


def check(plan: Plan) -> Plan:
    """The plan, if the simulator can express it. Raises PlanInvalid, naming what it cannot."""
    for step in plan.steps:
        kind, where = step.fault.kind, step.fault.where
        if kind not in KINDS:
            raise PlanInvalid(f"{kind} cannot be simulated; the simulator has {', '.join(KINDS)}.")
        if where:
            raise PlanInvalid(f"{kind} at {where} cannot be simulated: its calls have no such points; leave where out.")
    return plan


class Planned(Schedule):
    """Strikes as a plan says, from when the cluster has formed."""

    def __init__(self, world: World, plan: Plan) -> None:
        super().__init__(world, None, pace=1.0)
        self.plan = plan

    def start(self) -> None:
        """Every fault is on its way."""
        for number, step in enumerate(self.plan.steps):
            self.world.at(FORM_S + step.at_s, self._due, (number, step))

    def _due(self, what: tuple[int, Step]) -> None:
        number, step = what
        world = self.world
        there = {p.name: p for p in world.alive()}
        names = [*there, ROUTER_NAME] if world.router.up else list(there)
        try:
            chosen = choose(step.select, names, Random(f"{self.plan.seed} {world.seed} fault {number}"))
            for name in chosen:
                self._act(number, step, name, there.get(name))
        except PlanInvalid as refused:
            kind, said = "refused", f"{step.fault.kind}: {refused}"
        else:
            kind, said = step.fault.kind, in_words(chosen, step.fault)
        self.counts[kind] += 1
        self.struck.append((number, world.now_s, kind, said))

    def _act(self, number: int, step: Step, name: str, process: Process | None) -> None:
        """One member's part; the router's where `process` is None."""
        world, fault = self.world, step.fault
        now_s, router = world.now_s, world.router
        if fault.kind == "kill":
            if process is not None:
                process.end(True)
            else:
                router.end()
                self.heal(_ROUTER_AWAY_S, router.start)
        elif fault.kind == "freeze":
            end_s = now_s + fault.for_s
            self.healed_s = max(self.healed_s, end_s)
            if process is not None:
                process.asleep_s = max(process.asleep_s, end_s)
            else:
                router.stalled_s = max(router.stalled_s, end_s)
        elif fault.kind == "slow":
            if not isinstance(process, ExpertServer):
                raise PlanInvalid(f"{name} is no expert server, and only these can be slow.")
            self._slow(process, fault.times, fault.for_s)
        else:
            if process is None or process.pool == GATEWAY:
                raise PlanInvalid(f"{name} has no links that dispatch; name an expert server or attention worker.")
            self._filter((number, name), process, step)

    def _slow(self, server: ExpertServer, times: float, for_s: float) -> None:
        server.factor *= times

        def heal(_: object) -> None:
            server.factor /= times

        self.heal(for_s, heal)

    def _filter(self, key: tuple[int, str], process: Process, step: Step) -> None:
        world, fault, uid = self.world, step.fault, process.uid

        def hits(one: int, other: int) -> bool:
            """Links between expert servers and attention workers alone: what is filtered is their frames."""
            if uid not in (one, other):
                return False
            peer = world.processes.get(other if one == uid else one)
            if peer is None or ROUTER in (one, other) or peer.pool == GATEWAY:
                return False
            return not fault.peers or peer.name in fault.peers

        share = 1.0 if fault.kind == "partition" else fault.share if fault.kind == "loss" else 0.0
        network = world.network
        network.filters[key] = Filter(hits, share, fault.by_s)
        network.look()

        def heal(_: object) -> None:
            del network.filters[key]
            network.look()

        self.heal(fault.for_s, heal)
