"""What a View may change from one epoch to the next, and what it must look like at rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.state import LAUNCHED_POOLS
from router.view import EXPERT
from tests.sim.cluster.members import EXPERT_BYTES, ExpertServer

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
        for count in range(depth):
            lost = had[count] & ~has[count]
            if lost:
                promise = "a planned move empties no row" if not count else "a planned move costs no copy"
                self.judge.broken(promise, f"epoch {shown.epoch}: {lost:x} had {count + 1} replicas")

    def _ordered(self, last: Shown, shown: Shown) -> None:
        """Copies of what is served meanwhile are ordered within the budget."""
        had = has = 0
        for row in last.experts:
            if row.name in shown.rows:
                had |= row.serving
        for row in shown.experts:
            has |= row.serving
        served = had & has
        ordered = on_the_way = 0
        for row in shown.experts:
            was = last.rows.get(row.name)
            before = was.target if was is not None else 0
            process = self.world.members.get(row.incarnation)
            held = process.held if isinstance(process, ExpertServer) else 0
            ordered += (row.target & ~(before | held) & served).bit_count()
            if process is not None and process.told_salt == shown.salt:
                # What the others hold the router knows from its journal alone.
                on_the_way += (row.target & before & ~held).bit_count()
            known = self.judge.present[row.incarnation]
            if known.waits & ~row.target:
                known.waits = 0
        config = self.config
        budget = max(1, min(config.copies_in_flight, config.bytes_in_flight // EXPERT_BYTES))
        if ordered and on_the_way + ordered > budget:
            self.judge.broken(
                "bytes in flight stay within the budget",
                f"{ordered} copies ordered with {on_the_way} on their way, {budget} at once",
            )

    def _form(self, shown: Shown) -> None:
        """The first placement is a ring: a server shares experts with replicas - 1 neighbours on either side."""
        servers = shown.experts
        if len(servers) != self.config.experts_wanted or any(row.serving != row.target for row in servers):
            return
        self._formed = True
        most = 2 * (self.config.replicas - 1)
        for row in servers:
            shared = sum(bool(row.serving & other.serving) for other in servers) - 1
            if not self.world.capacity and shared > most:
                self.judge.broken(
                    "copysets are few", f"{row.name} shares experts with {shared} others, at most {most}"
                )

    def _drains(self, last: Shown, shown: Shown) -> None:
        """A pool shrinks one member at a time, from the newest ordered, and never below its wanted size."""
        for pool in LAUNCHED_POOLS:
            rows = shown.pool(pool)
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

    def _asked(self, row: Row) -> bool:
        known = self.judge.present.get(row.incarnation)
        return known is not None and known.asked_to_drain

    def uneven(self, servers: list[Row]) -> str:
        """Which experts have too few or too many replicas at rest, or which servers too many experts."""
        world = self.world
        mask = (1 << world.experts) - 1
        wanted = min(self.config.replicas, len(servers))
        for layer in range(world.layers if servers else 0):
            held = [row.serving >> layer * world.experts & mask for row in servers]
            counts = [sum(bits >> expert & 1 for bits in held) for expert in range(world.experts)]
            redundant = self.config.redundant
            if min(counts) < wanted or (max(counts) > wanted and not redundant):
                return f"layer {layer} has {counts} replicas, {wanted} wanted"
            loads = [bits.bit_count() for bits in held]
            if max(loads) - min(loads) > 1 and not redundant:
                return f"layer {layer} is uneven: {loads}"
        return ""


def _depths(rows: list[Row], most: int) -> list[int]:
    """Experts with at least 1, 2, .. most rows."""
    depths = [0] * most
    for row in rows:
        bits = row.serving
        for count in range(most):
            depths[count], bits = depths[count] | bits, depths[count] & bits
    return depths
