"""What a View may change from one epoch to the next, and what it must look like at rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.view import EXPERT
from tests.sim.cluster.members import ExpertServer
from tests.sim.cluster.models import united

if TYPE_CHECKING:
    from tests.sim.cluster.judge import Judge
    from tests.sim.cluster.shell import Row, Shown


class Moves:
    """Judges what changed from one View to the next."""

    def __init__(self, judge: Judge) -> None:
        self.judge, self.world, self.config = judge, judge.world, judge.config
        self._formed = False

    def changed(self, last: Shown, shown: Shown, planned: bool) -> None:
        """A View follows another. planned: by no loss, so that nothing may be lost."""
        if planned:
            self._moved(last, shown)
        self._ordered(last, shown)
        self._drains(last, shown)
        # A fault that strikes before all is loaded moves copies.
        self._formed = self._formed or bool(self.judge.fenced or self.world.schedule.struck)
        if not self._formed:
            self._form(shown)

    def _moved(self, last: Shown, shown: Shown) -> None:
        """A planned move takes no expert below what is wanted, and never its last row."""
        replicas = self.config.replicas
        fits = not self.world.capacity and len(shown.experts) >= replicas
        if any(row.phase == "draining" for row in shown.experts):
            fits = False
        if not self.judge.wanted[EXPERT]:
            return
        depth = replicas if fits else 1
        had, has = _depths(last.experts, depth), _depths(shown.experts, depth)
        # What is removed goes; and a model has no more replicas than servers that hold it.
        models = self.judge.models
        spared = [models.forsaken(shown)] + [models.forsaken(shown) | self._scarce(shown)] * (depth - 1)
        for count in range(depth):
            lost = had[count] & ~has[count] & ~spared[count]
            if lost:
                promise = "a planned move empties no row" if not count else "a planned move costs no copy"
                self.judge.broken(promise, f"epoch {shown.epoch}: {lost:x} had {count + 1} replicas")

    def _scarce(self, shown: Shown) -> int:
        """Bits of models that fewer servers have opened than there are to be replicas."""
        servers = [self.world.members.get(row.incarnation) for row in shown.experts]
        return united(
            model
            for model in self.world.models[1:]
            if sum(isinstance(s, ExpertServer) and model.hash in s.opened for s in servers) < self.config.replicas
        )

    def _ordered(self, last: Shown, shown: Shown) -> None:
        """Copies of what is served meanwhile are ordered within the budget of their model."""
        had = has = 0
        for row in last.experts:
            if row.name in shown.rows:
                had |= row.serving
        for row in shown.experts:
            has |= row.serving
        served = had & has
        copies: list[tuple[int, int]] = []  # ordered, and on their way, of each server
        for row in shown.experts:
            was = last.rows.get(row.name)
            before = was.target if was is not None else 0
            process = self.world.members.get(row.incarnation)
            held = process.held if isinstance(process, ExpertServer) else 0
            # What the others hold the router knows from its journal alone.
            told = process is not None and process.told_salt == shown.salt
            copies.append((row.target & ~(before | held) & served, row.target & before & ~held if told else 0))
            known = self.judge.present[row.incarnation]
            if known.waits & ~row.target:
                known.waits = 0
        config = self.config
        for model in self.world.models if any(new for new, _ in copies) else ():
            ordered = sum((new & model.mask).bit_count() for new, _ in copies)
            on_the_way = sum((waiting & model.mask).bit_count() for _, waiting in copies)
            budget = max(1, min(config.copies_in_flight, config.bytes_in_flight // model.expert_bytes))
            if ordered and on_the_way + ordered > budget:
                self.judge.broken(
                    "bytes in flight stay within the budget",
                    f"{ordered} copies of {model.hash} ordered with {on_the_way} on their way, {budget} at once",
                )

    def _form(self, shown: Shown) -> None:
        """The first placement is a ring: a server shares experts with replicas - 1 neighbours on either side."""
        # Of another model some servers may have a part before others have opened it.
        servers = shown.of(self.world.models[0])
        if len(servers) != self.config.experts_wanted or any(row.serving != row.target for row in servers):
            return
        self._formed = True
        most = 2 * (self.config.replicas - 1)
        for row in servers:
            shared = sum(bool(row.serving & other.serving) for other in servers) - 1
            if not self.world.capacity and shared > most:
                self.judge.broken("copysets are few", f"{row.name} shares experts with {shared} others, at most {most}")

    def _drains(self, last: Shown, shown: Shown) -> None:
        """A pool shrinks one member at a time, from the newest ordered, and never below its wanted size."""
        for pool in self.judge.wanted:
            model = self.judge.models.of_group(pool)
            if model is not None and self.judge.models.leaves(model.hash):
                self._leaves(last, shown, pool)
                continue
            rows = self.judge.of_group(shown, pool)
            drained = [r for r in rows if r.phase == "draining" and not self._asked(r)]
            fresh = [r for r in drained if r.name in last.rows and last.rows[r.name].phase != "draining"]
            if not fresh:
                continue
            if len(drained) > 1:
                self.judge.broken("one change in flight", f"{[r.name for r in drained]} drain at once")
            live = sum(r.phase != "draining" for r in rows)
            if live < self.judge.wanted[pool]:
                self.judge.broken(
                    "no pool is drained below its size", f"{live} of {self.judge.wanted[pool]} in pool {pool}"
                )
            process = self.world.members.get(fresh[0].incarnation)
            if process is not None and not process.ordered:
                self.judge.broken("an operator's member stays", f"{fresh[0].name} drains")

    def _leaves(self, last: Shown, shown: Shown, pool: str) -> None:
        """Who asks for a model that leaves goes once none of them has anything to do."""
        rows = [row for row in self.judge.of_group(shown, pool) if not self._asked(row)]
        fresh = [r for r in rows if r.phase == "draining" and r.name in last.rows]
        if not any(last.rows[r.name].phase != "draining" for r in fresh) or self.judge.wanted[pool]:
            return
        for row in rows:
            load = self.judge.present[row.incarnation].load
            was = last.rows.get(row.name)
            if was is not None and was.phase != "draining" and load.get("running", 1) + load.get("waiting", 0):
                self.judge.broken("a model that leaves ends what it began", f"{row.name} drains with {load}")

    def _asked(self, row: Row) -> bool:
        known = self.judge.present.get(row.incarnation)
        return known is not None and known.asked_to_drain

    def uneven(self, servers: list[Row]) -> str:
        """Which experts have too few or too many replicas at rest, or which servers too many experts."""
        world = self.world
        models = world.models if len(world.models) == 1 else self.judge.models.live()
        asleep = self.judge.models.asleep(self.world.router.shown)
        models = [model for model in models if model.hash not in asleep]
        for model in models:
            mask = (1 << model.experts) - 1
            opened = [row for row in servers if model.hash in world.members[row.incarnation].opened]
            wanted = min(self.config.replicas, len(opened))
            for layer in range(model.layers if opened else 0):
                at = model.at + layer * model.experts
                held = [row.serving >> at & mask for row in opened]
                counts = [sum(bits >> expert & 1 for bits in held) for expert in range(model.experts)]
                redundant = self.config.redundant
                if min(counts) < wanted or (max(counts) > wanted and not redundant):
                    return f"layer {layer} of {model.hash} has {counts} replicas, {wanted} wanted"
                loads = [bits.bit_count() for bits in held]
                if max(loads) - min(loads) > 1 and not redundant:
                    return f"layer {layer} of {model.hash} is uneven: {loads}"
        return ""


def _depths(rows: list[Row], most: int) -> list[int]:
    """Experts with at least 1, 2, .. most rows."""
    depths = [0] * most
    for row in rows:
        bits = row.serving
        for count in range(most):
            depths[count], bits = depths[count] | bits, depths[count] & bits
    return depths
