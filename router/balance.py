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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router.bitmap import indexes
from router.models import awake, width
from router.records import by_class, pool, replace
from router.state import Config, MemberRecord, Seen, State
from router.view import EXPERT, Model

Array = NDArray[np.float64]

SCENARIOS = 8
# Scenarios change the load by this much more than it has been changing: a copy made early costs as much as one
# made late.
MARGIN = 2.0
SWEEPS = 12
# Of the busiest server's load: a step that gains less is not worth a copy, though the budget allows it.
LEAST_STEP = 0.002
CANDIDATES = 32
SPARES = 2
# Servers with which one server may share experts that have no third holder: two losses at once lose only those.
NEIGHBOURS = 4
SETTLE = 4
MOST_REPLICAS = 8  # of one expert: a client's routes have room for no more
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

    min_replicas: Copies that every expert has. budget: Copies made by one change. least_gain: Of the cost; less is not
    worth a change.
    """

    min_replicas: int = 2
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
    *, load: Array, spread: Array | float, holders: Sequence[int], servers: Sequence[Server], rules: Rules = Rules()
) -> Change:
    """Moves that make the busiest server of one layer less busy.

    Args:
        load: [experts] rows, in any unit.
        spread: Relative standard deviation that each expert's load is expected to have around `load`.
        holders: [experts] masks of indexes into `servers`.
        servers: At most 64.

    Returns:
        No moves where none are worth it. Every expert keeps rules.min_replicas servers, in two zones where it was
        in two; no server gets more than NEIGHBOURS; no server holds more than fits, unless it did.
    """
    total = float(load.sum())
    speed = np.array([server.speed for server in servers])
    if total <= 0 or not servers:
        return Change(moves=(), before=1.0, after=1.0)
    flow = Flow(scenarios_of(load, MARGIN * spread).T.copy(), speed)
    for expert, mask in enumerate(holders):
        flow.put(expert, mask)
    flow.settle(SWEEPS)
    before = float(flow.cost().mean())
    if before < 1 + rules.least_gain:
        return Change(moves=(), before=before, after=before)
    search = _Search(flow=flow, holders=list(holders), servers=servers, rules=rules)
    moves: list[Move] = []
    for _ in range(rules.budget):
        step = search.best_step()
        if step is None:
            break
        moves += step
    after = float(search.flow.cost().mean())
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
    """Rows split over replicas as well as a placement lets them, in many worlds at once.

    A world is one load of the experts; worlds may differ in placement too. Experts with the same holders are one
    group; groups are lifted out and poured again in turn until the loads stand still, which is the least sum of
    load^2 / speed, and so the least busiest server.
    """

    def __init__(self, load: Array, speed: Array) -> None:
        """
        Args:
            load: [experts, worlds] rows.
            speed: [servers].
        """
        self.load, self.speed = load, speed
        self.on_server = np.zeros((len(speed), load.shape[1]))
        self.groups: dict[int, Array] = {}  # by mask of holders: [holders, worlds] rows

    def select(self, worlds: NDArray[np.intp]) -> Flow:
        """These worlds, in this order, as often as they are named."""
        chosen = Flow(self.load[:, worlds], self.speed)
        chosen.on_server = self.on_server[:, worlds]
        groups = {mask: rows[:, worlds] for mask, rows in self.groups.items()}
        chosen.groups = {mask: rows for mask, rows in groups.items() if rows.any()}
        return chosen

    @property
    def level(self) -> Array:
        """[servers, worlds] load over speed, 1 = were all equally busy."""
        return self.on_server / self.speed[:, None] * (self.speed.sum() / self.load.sum(0))

    def cost(self) -> Array:
        """[worlds] level of the busiest server; plus the mean of what servers have above 1, to tell ways apart."""
        level = self.level
        return level.max(0) + (self.speed / self.speed.sum()) @ np.maximum(level - 1, 0)

    def put(self, expert: int, mask: int, worlds: slice = slice(None)) -> None:
        """Add an expert with its holders, evenly."""
        rows = np.zeros((mask.bit_count(), self.load.shape[1]))
        rows[:, worlds] = self.load[expert, worlds] / mask.bit_count()
        self._add(mask, rows)

    def lift(self, expert: int, mask: int, worlds: slice = slice(None)) -> None:
        """Take an expert out."""
        rows = np.zeros((mask.bit_count(), self.load.shape[1]))
        rows[:, worlds] = self.flow(expert, mask)[:, worlds]
        self._add(mask, -rows)

    def flow(self, expert: int, mask: int) -> Array:
        """[holders, worlds] its part of its group's rows."""
        rows = self.groups.get(mask)
        if rows is None:
            # Nothing was asked of any expert with these holders.
            return np.zeros((mask.bit_count(), self.load.shape[1]))
        return rows * (self.load[expert] / np.maximum(rows.sum(0), 1e-300))

    def settle(self, sweeps: int, within: float = 1e-3) -> None:
        """Pour every group again, so many times at most, until no server's load changes by more than `within`."""
        groups = [(mask, indexes(mask)) for mask in self.groups if mask & (mask - 1)]
        enough = within * self.load.sum(0).min() / self.speed.sum()
        for _ in range(sweeps):
            before = self.on_server.copy()
            for mask, servers in groups:
                if len(servers) == 2:
                    self._level_two(self.groups[mask], *servers)
                else:
                    self._level_all(self.groups[mask], servers)
            if np.abs(self.on_server - before).max() < enough:
                return

    def _level_two(self, rows: Array, one: int, two: int) -> None:
        share = self.speed[one] / (self.speed[one] + self.speed[two])
        to_one = (self.on_server[one] + self.on_server[two]) * share
        to_one -= self.on_server[one]
        np.minimum(to_one, rows[1], out=to_one)
        np.maximum(to_one, -rows[0], out=to_one)
        rows[0] += to_one
        rows[1] -= to_one
        self.on_server[one] += to_one
        self.on_server[two] -= to_one

    def _level_all(self, rows: Array, servers: list[int]) -> None:
        base = self.on_server[servers] - rows
        speed = self.speed[servers][:, None]
        level = base / speed
        order = np.argsort(level, 0)
        base_up = np.take_along_axis(base, order, 0).cumsum(0)
        # The water's height over the first j servers; it is least where it drowns just those.
        height = ((base_up + rows.sum(0)) / speed[order, 0].cumsum(0)).min(0)
        rows[:] = np.maximum(height - level, 0) * speed
        self.on_server[servers] = base + rows

    def _add(self, mask: int, rows: Array) -> None:
        self.groups[mask] = self.groups[mask] + rows if mask in self.groups else rows
        self.on_server[indexes(mask)] += rows


@dataclass
class _Search:
    """A placement while it is being improved."""

    flow: Flow
    holders: list[int]
    servers: Sequence[Server]
    rules: Rules

    def best_step(self) -> list[Move] | None:
        """Take the best of the likeliest steps; None where none is worth a copy."""
        steps = self._candidates()
        if not steps:
            return None
        worlds = self.flow.load.shape[1]
        trial = self.flow.select(np.tile(np.arange(worlds), len(steps)))
        for number, step in enumerate(steps):
            here = slice(number * worlds, (number + 1) * worlds)
            for move in step:
                mask = self.holders[move.expert]
                trial.lift(move.expert, mask, here)
                trial.put(move.expert, mask ^ (1 << move.server), here)
        trial.settle(SETTLE)
        cost = trial.cost().reshape(len(steps), worlds).mean(1)
        best = int(cost.argmin())
        if self.flow.cost().mean() - cost[best] < LEAST_STEP:
            return None
        for move in steps[best]:
            self.holders[move.expert] ^= 1 << move.server
        self.flow = trial.select(np.arange(best * worlds, (best + 1) * worlds))
        self.flow.settle(SETTLE)
        return steps[best]

    def _candidates(self) -> list[list[Move]]:
        """Copies that would take most from busy servers, by how steeply their weight rises; with what gives way."""
        weight = self.flow.level**STEEPNESS
        score = np.zeros((len(self.holders), len(self.servers)))
        for expert, mask in enumerate(self.holders):
            # An expert that lacks a replica is the placement's to repair.
            if not max(1, self.rules.min_replicas) <= mask.bit_count() < MOST_REPLICAS:
                continue
            held = indexes(mask)
            rows = self.flow.flow(expert, mask)
            gain = (rows * weight[held]).sum(0) - rows.sum(0) * weight
            score[expert] = np.maximum(gain, 0).mean(1)
            score[expert, held] = 0
        on_server = [sum(mask >> server & 1 for mask in self.holders) for server in range(len(self.servers))]
        steps: list[list[Move]] = []
        for place in np.argsort(score, axis=None)[::-1]:
            if len(steps) >= CANDIDATES or score.flat[place] <= 0:
                break
            expert, server = divmod(int(place), len(self.servers))
            add = Move(expert=expert, server=server, add=True)
            if on_server[server] >= self.servers[server].room:
                steps += [[add, drop] for drop in self._drops(server, expert)]
            else:
                steps.append([add])
        return steps

    def _drops(self, server: int, wanted: int) -> list[Move]:
        """The copies on a server that are missed least, of those that may be dropped."""
        missed: list[tuple[float, int]] = []
        for expert, mask in enumerate(self.holders):
            if expert == wanted or mask.bit_count() <= self.rules.min_replicas:
                continue
            if mask >> server & 1 and self._may_drop(expert, server):
                rows = self.flow.flow(expert, mask).mean(1)
                missed.append((float(rows[indexes(mask).index(server)]), expert))
        return [Move(expert=expert, server=server, add=False) for _, expert in sorted(missed)[:SPARES]]

    def _may_drop(self, expert: int, server: int) -> bool:
        left = self.holders[expert] & ~(1 << server)
        rules = self.rules
        if left.bit_count() < rules.min_replicas:
            return False
        if self._zones(left) < min(2, rules.min_replicas, self._zones(self.holders[expert])):
            return False
        if left.bit_count() > rules.min_replicas or rules.min_replicas < 2:
            return True
        # Its last copies tie these servers together.
        return all(
            len(self._neighbours(server) | {*indexes(left)} - {server}) <= NEIGHBOURS for server in indexes(left)
        )

    def _zones(self, mask: int) -> int:
        return len({self.servers[server].zone for server in indexes(mask)})

    def _neighbours(self, server: int) -> set[int]:
        """Servers with which it alone holds some expert."""
        found: set[int] = set()
        for mask in self.holders:
            if mask >> server & 1 and mask.bit_count() <= self.rules.min_replicas:
                found.update(indexes(mask))
        return found - {server}


def rebalance(config: Config, state: State) -> State:
    """Look at the next layer of a round; every balance_s a round begins, with the load seen by then.

    Nothing is changed while anything moves, drains or is in doubt. A round's layers take a tick each: a search
    takes some hundredths of a second, during which the router hears nobody.
    """
    layers = [(model, layer) for model in awake(state) for layer in range(model.layers)]
    if not config.redundant or state.routed is None or not layers:
        return state
    # What is known may be of a model that has gone since, though there are as many layers.
    known = [len(seen.load) for seen in state.seen] == [model.experts for model, _ in layers]
    if not known or state.balanced_layer >= len(layers):
        if state.now_s - state.balanced_s < config.balance_s:
            return state
        return _observe(state if known else replace(state, seen=()))
    if not _is_at_rest(state):
        return state
    model, layer = layers[state.balanced_layer]
    for members in by_class(pool(state, EXPERT)):
        opened = [record for record in members if record.opened >> model.number & 1]
        state = _improve(config, state, model, layer, opened)
    return replace(state, balanced_layer=state.balanced_layer + 1)


def _observe(state: State) -> State:
    if state.routed is None or len(state.routed) < width(state):
        return state
    rows = [
        layer
        for model in awake(state)
        for layer in state.routed[model.base :][: model.layers * model.experts].reshape(model.layers, -1)
    ]
    known: tuple[Seen | None, ...] = state.seen or (None,) * len(rows)
    seen = tuple(observe(was, now) for was, now in zip(known, rows, strict=True))
    return replace(state, seen=seen, balanced_layer=0, balanced_s=state.now_s)


def _is_at_rest(state: State) -> bool:
    if state.suspects or state.batches or state.starts or not state.settled:
        return False
    return not any(record.draining or record.retiring or not record.ready for record in state.members.values())


def _improve(config: Config, state: State, model: Model, layer: int, records: list[MemberRecord]) -> State:
    """One class, of which each is taken to get its part of every expert's load."""
    experts = model.experts
    shift, mask = model.base + layer * experts, (1 << experts) - 1
    shares = [record.share >> shift & mask for record in records]
    holders = [sum((share >> expert & 1) << i for i, share in enumerate(shares)) for expert in range(experts)]
    if len(records) < 2 or not all(holders):
        return state
    # Redundant experts are spread as evenly as the others; what a layer has beyond that stays where it is.
    replicas = min(config.replicas, len(records))
    places = experts * replicas + config.redundant
    rooms = [places // len(records) + (i < places % len(records)) for i in range(len(records))]
    speeds = _speeds(state, records)
    servers = [
        Server(room=max(share.bit_count(), min(room, _fitting(model, record, layer))), speed=speed, zone=record.zone)
        for record, share, room, speed in zip(records, shares, rooms, speeds, strict=True)
    ]
    seen = state.seen[state.balanced_layer]
    # Who was not asked for yet may be at any time; and a search divides by what it finds.
    load = np.maximum(seen.load, 0.01 * seen.load.mean())
    rules = Rules(min_replicas=replicas, budget=config.balance_copies, least_gain=config.balance_gain)
    change = improve(load=load, spread=seen.drift, holders=holders, servers=servers, rules=rules)
    if not change.moves:
        return state
    moved = dict(state.members)
    for move in change.moves:
        record = moved[records[move.server].name]
        bit = 1 << (shift + move.expert)
        moved[record.name] = replace(record, share=record.share | bit if move.add else record.share & ~bit)
    return replace(state, members=moved)


def _fitting(model: Model, record: MemberRecord, layer: int) -> int:
    """Experts of one layer that fit on a server, if every layer gets the same."""
    layers = model.layers
    if not record.capacity:
        return model.experts
    return record.capacity // layers + (layer < record.capacity % layers)


def _speeds(state: State, records: list[MemberRecord]) -> list[float]:
    """Rows per busy second, as servers report it; who does not is taken for one like the others."""
    found = [state.liveness[record.name].load.get("speed", 0.0) for record in records]
    known = [speed for speed in found if speed > 0]
    usual = sum(known) / len(known) if known else 1.0
    return [speed if speed > 0 else usual for speed in found]
