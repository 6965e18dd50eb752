"""Which replicas to add and drop so that the busiest server will be less busy. Pure.

Clients split rows over replicas as well as the placement lets them (waterfill); what is left to the router is to
see that it lets them. The cost of a placement is what the busiest server has to do when rows are split at best,
over what it would have to do were all servers equally busy: 1 is perfect. It is averaged over scenarios: the load
that was seen, and that load changed at random as much as it has been changing, so that a placement is prepared for
what comes and a change that only suits the last interval gains nothing.

A step adds one copy and, where its server is full, drops another there; steps are taken while they lower the cost,
within a budget of copies, and all of them only when together they are worth it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SCENARIOS = 8
SWEEPS = 12
# Of the busiest server's load: a step that gains less is not worth a copy, though the budget allows it.
LEAST_STEP = 0.002
CANDIDATES = 6
STEEPNESS = 12  # how much more a busy server counts than an idle one, when candidates are chosen


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that may get copies. room: experts of one layer that fit. speed: rows per second, relative to others.

    zone: what fails together; "" where unknown.
    """

    room: int
    speed: float = 1.0
    zone: str = ""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a placement must keep, and what a change must be worth.

    min_replicas: Copies that every expert has. neighbours: Servers with which one server may share experts that
    have no third holder: two losses at once lose only those. budget: Copies made by one change.
    least_gain: Of the cost; less is not worth a change.
    """

    min_replicas: int = 2
    neighbours: int = 4
    budget: int = 4
    least_gain: float = 0.03


@dataclass(frozen=True, kw_only=True)
class Move:
    """One copy of an expert, added to a server or dropped from it."""

    expert: int
    server: int
    add: bool


@dataclass(frozen=True, kw_only=True)
class Change:
    """What `improve` proposes: moves in order, and the cost without and with them."""

    moves: tuple[Move, ...]
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Load of one layer's experts as observed. load: [experts] rows an interval, smoothed.

    drift: standard deviation of an expert's log load from one interval to the next, beyond what counting explains.
    """

    load: Array
    drift: float = 0.2


def observe(seen: Seen | None, rows: Sequence[int] | Array) -> Seen:
    """What is known after another interval.

    Args:
        rows: [experts] rows of the interval, any unit that is proportional to time.

    Returns:
        The newest interval counts most: popularity moves more from one interval to the next than counting errs.
    """
    fresh = np.asarray(rows, np.float64)
    if seen is None or not seen.load.any():
        return Seen(load=fresh)
    if not fresh.any():
        return seen
    # Intervals differ in traffic; popularity is compared at equal totals.
    known = seen.load * (fresh.sum() / seen.load.sum())
    both = (fresh >= 32) & (known >= 32)
    drift = seen.drift
    if both.any():
        change = np.log(fresh[both] / known[both])
        excess = float(np.mean(change**2 - 1 / fresh[both] - 1 / known[both]))
        drift = float(np.sqrt(drift**2 + (max(0.0, excess) - drift**2) / 8))
    return Seen(load=known + 0.8 * (fresh - known), drift=drift)


def improve(
    *,
    load: Array,
    spread: Array | float,
    holders: Sequence[int],
    servers: Sequence[Server],
    rules: Rules = Rules(),
) -> Change:
    """Moves that make the busiest server of one layer less busy.

    Args:
        load: [experts] rows, in any unit.
        spread: Relative standard deviation that each expert's load is expected to have around `load`.
        holders: [experts] masks of indexes into `servers`.
        servers: At most 64.

    Returns:
        No moves where none are worth it. Every expert keeps rules.min_replicas servers, in two zones where it was
        in two; no server gets more neighbours than the rules allow; no server holds more than fits, unless it did.
    """
    total = float(load.sum())
    speed = np.array([server.speed for server in servers])
    if total <= 0 or not servers:
        return Change(moves=(), before=1.0, after=1.0)
    scenarios = scenarios_of(load, spread)
    flow = Flow(scenarios, speed)
    for expert, mask in enumerate(holders):
        flow.put(expert, mask)
    flow.settle(SWEEPS)
    before = flow.cost()
    if before < 1 + rules.least_gain:
        return Change(moves=(), before=before, after=before)
    search = _Search(flow=flow, holders=list(holders), servers=servers, rules=rules)
    moves: list[Move] = []
    for _ in range(rules.budget):
        step = search.best_step()
        if step is None:
            break
        moves += step
    after = search.flow.cost()
    if before - after < rules.least_gain * before:
        return Change(moves=(), before=before, after=before)
    return Change(moves=tuple(moves), before=before, after=after)


def scenarios_of(load: Array, spread: Array | float) -> Array:
    """[SCENARIOS, experts] loads, each scaled to a mean of 1 an expert; the first is `load` itself."""
    number = np.arange(SCENARIOS)[:, None] * 12.9898 + np.arange(len(load))[None, :] * 78.233
    # A hash, not a generator: the same decision from the same observation.
    uniform = np.modf(np.abs(np.sin(number + 1.0)) * 43758.5453)[0]
    deviation = np.sqrt(3.0) * (2 * uniform - 1) * spread
    deviation[0] = 0
    found = load * np.exp(deviation)
    return found / found.mean(1, keepdims=True)


class Flow:
    """Rows of several scenarios at once, split over replicas as well as the placement lets them.

    Experts with the same holders are one group; groups are lifted out and poured again in turn until the loads
    stand still, which is the least sum of load^2 / speed and so the least busiest server.
    """

    def __init__(self, load: Array, speed: Array) -> None:
        """
        Args:
            load: [scenarios, experts] rows.
            speed: [servers].
        """
        self.load, self.speed = load, speed
        self.fair = load.sum(1) / speed.sum()
        self.on_server = np.zeros((len(load), len(speed)))
        self.rows: dict[int, Array] = {}  # by mask: [scenarios, holders]
        self.members: Counter[int] = Counter()

    def copy(self) -> Flow:
        """One to try changes on."""
        other = Flow.__new__(Flow)
        other.load, other.speed, other.fair = self.load, self.speed, self.fair
        other.on_server, other.rows, other.members = self.on_server.copy(), dict(self.rows), self.members.copy()
        return other

    @property
    def level(self) -> Array:
        """[scenarios, servers] load over speed, 1 = the mean."""
        return self.on_server / self.speed / self.fair[:, None]

    def cost(self) -> float:
        """Of the busiest server, mean of the scenarios; plus what all have above the mean, to tell ways apart."""
        level = self.level
        above = np.maximum(level - 1, 0) @ (self.speed / self.speed.sum())
        return float(level.max(1).mean() + above.mean())

    def put(self, expert: int, mask: int) -> None:
        """Add an expert with its holders."""
        self._add(mask, self.load[:, expert, None] * np.full(mask.bit_count(), 1 / max(1, mask.bit_count())))
        self.members[mask] += 1

    def change(self, expert: int, old: int, new: int) -> None:
        """Give an expert other holders."""
        share = self.load[:, expert] / np.maximum(self.rows[old].sum(1), 1e-300)
        flow = self.rows[old] * share[:, None]
        self._add(old, -flow)
        self.members[old] -= 1
        if not self.members[old]:
            del self.members[old], self.rows[old]
        kept = {server: flow[:, i] for i, server in enumerate(indexes(old)) if new >> server & 1}
        none = np.zeros(len(flow))
        moved = np.stack([kept.get(server, none) for server in indexes(new)], 1)
        moved[:, 0] += self.load[:, expert] - moved.sum(1)
        self._add(new, moved)
        self.members[new] += 1

    def settle(self, sweeps: int) -> None:
        """Pour every group again, so many times at most."""
        groups = [(mask, indexes(mask)) for mask in self.rows if mask & (mask - 1)]
        for _ in range(sweeps):
            before = self.on_server.copy()
            for mask, servers in groups:
                self._pour(mask, servers)
            if np.abs(self.on_server - before).max() < 1e-3 * self.fair.min():
                return

    def _pour(self, mask: int, servers: list[int]) -> None:
        old = self.rows[mask]
        base = self.on_server[:, servers] - old
        speed = self.speed[servers]
        rows = old.sum(1)
        if len(servers) == 2:
            first = (base.sum(1) + rows) * (speed[0] / (speed[0] + speed[1])) - base[:, 0]
            first = np.minimum(np.maximum(first, 0), rows)
            new = np.stack([first, rows - first], 1)
        else:
            level = base / speed
            order = np.argsort(level, 1)
            base_up = np.take_along_axis(base, order, 1).cumsum(1)
            speed_up = speed[order].cumsum(1)
            # The water's height over the first j servers; it is least where it drowns just those.
            height = ((base_up + rows[:, None]) / speed_up).min(1, keepdims=True)
            new = np.maximum(height - level, 0) * speed
        self.on_server[:, servers] += new - old
        self.rows[mask] = new

    def _add(self, mask: int, rows: Array) -> None:
        self.rows[mask] = self.rows[mask] + rows if mask in self.rows else rows
        self.on_server[:, indexes(mask)] += rows


def indexes(mask: int) -> list[int]:
    """The set bits of a mask, lowest first."""
    found: list[int] = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


@dataclass
class _Search:
    """A placement while it is being improved."""

    flow: Flow
    holders: list[int]
    servers: Sequence[Server]
    rules: Rules

    def best_step(self) -> list[Move] | None:
        """Take the best of the likeliest steps; None where none is worth a copy."""
        now = self.flow.cost()
        best: tuple[float, list[Move], Flow] | None = None
        for expert, server in self._candidates():
            trial = self.flow.copy()
            moves = [Move(expert=expert, server=server, add=True)]
            if self._held(server) >= self.servers[server].room:
                spare = self._spare(server, expert)
                if spare is None:
                    continue
                moves.append(Move(expert=spare, server=server, add=False))
            for move in moves:
                mask = self.holders[move.expert]
                trial.change(move.expert, mask, mask ^ (1 << move.server))
            trial.settle(4)
            cost = trial.cost()
            if best is None or cost < best[0]:
                best = cost, moves, trial
        if best is None or now - best[0] < LEAST_STEP:
            return None
        for move in best[1]:
            self.holders[move.expert] ^= 1 << move.server
        self.flow = best[2]
        return best[1]

    def _held(self, server: int) -> int:
        return sum(mask >> server & 1 for mask in self.holders)

    def _candidates(self) -> list[tuple[int, int]]:
        """(expert, server) where a copy would take most from busy servers, by how steeply their weight rises."""
        weight = self.flow.level**STEEPNESS
        score = np.zeros((len(self.holders), len(self.servers)))
        for expert, mask in enumerate(self.holders):
            if not mask:
                continue
            held = indexes(mask)
            rows = self.flow.rows[mask]
            there = (rows * weight[:, held]).sum(1) / np.maximum(rows.sum(1), 1e-300)
            gain = np.maximum(there[:, None] - weight, 0) * self.flow.load[:, expert, None]
            score[expert] = gain.mean(0)
            score[expert, held] = 0
            if len(held) >= 8:
                score[expert] = 0
        best = np.argsort(score, axis=None)[::-1][:CANDIDATES]
        return [divmod(int(i), len(self.servers)) for i in best if score.flat[i] > 0]

    def _spare(self, server: int, wanted: int) -> int | None:
        """The copy on a server that is missed least, of those that may be dropped."""
        best: tuple[float, int] | None = None
        for expert, mask in enumerate(self.holders):
            if expert == wanted or not mask >> server & 1 or not self._may_drop(expert, server):
                continue
            rows = self.flow.rows[mask]
            column = indexes(mask).index(server)
            share = self.flow.load[:, expert] / np.maximum(rows.sum(1), 1e-300)
            missed = float((rows[:, column] * share).mean())
            if best is None or missed < best[0]:
                best = missed, expert
        return best[1] if best else None

    def _may_drop(self, expert: int, server: int) -> bool:
        left = self.holders[expert] & ~(1 << server)
        rules = self.rules
        if left.bit_count() < rules.min_replicas:
            return False
        zones = {self.servers[s].zone for s in indexes(self.holders[expert])}
        if len(zones) > 1 and rules.min_replicas > 1:
            if len({self.servers[s].zone for s in indexes(left)}) < 2:
                return False
        if left.bit_count() > rules.min_replicas or rules.min_replicas < 2:
            return True
        return all(len(self._neighbours(s) | (left & ~(1 << s) and set(indexes(left)) - {s})) <= rules.neighbours
                   for s in indexes(left))

    def _neighbours(self, server: int) -> set[int]:
        """Servers with which it alone holds some expert."""
        found: set[int] = set()
        for mask in self.holders:
            if mask >> server & 1 and mask.bit_count() <= self.rules.min_replicas:
                found.update(indexes(mask))
        return found - {server}
