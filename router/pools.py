"""A pool's size, load, coverage and what it has been through; when its size follows its load. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router import bitmap
from router.events import Command, Fenced, Routed, Scaled, StartProcess, Totals
from router.lifecycle import OVERDUE, held_up
from router.models import awake, bits_of, find, group, groups, members_of, served, width
from router.records import pool, replace
from router.scaling import Memory, Signals, decide, signals_of
from router.state import LAUNCHED_POOLS, MOST_MEMBERS, Config, ConfigInvalid, MemberRecord, State
from router.view import ATTENTION, EXPERT, FOR, GATEWAY, PoolSize

# Load words that tell how long or how full, not how much: of several members the worst counts. The others add up.
LEVELS = frozenset({"queue_s", "kv_use", "ttft_p99_s", "tpot_p99_s"})


def pool_size(config: Config, state: State, name: str) -> PoolSize:
    """The sizes of one launched pool."""
    members = members_of(state, name)
    draining = sum(record.draining for record in members)
    least, most = config.bounds(name.partition(":")[0])
    wanted = state.wanted.get(name, config.wanted(name))
    return PoolSize(
        wanted=wanted,
        live=len(members) - draining,
        starting=sum(start.pool == name for start in state.starts),
        draining=draining,
        least=least,
        most=most,
        held_up=held_up(state, name) if len(members) > wanted else "",
    )


def pool_load(state: State, name: str) -> dict[str, float]:
    """What the members of a pool report, by word: the worst of a level, the sum of the rest.

    A word that nobody reports is absent. What waits at a gateway for a model waits for an attention worker of it, so it
    counts as load of that pool: with no worker left it is the only one that anybody reports.
    """
    gates = members_of(state, GATEWAY) if name.partition(":")[0] == ATTENTION else []
    total: dict[str, float] = {}
    for record in (*members_of(state, name), *gates):
        for word, value in _load_for(state, name, record).items():
            # A gateway's running streams run on attention workers, which report them.
            if not math.isfinite(value) or (record.pool == GATEWAY and word == "running"):
                continue
            known = total.get(word, 0.0)
            total[word] = max(known, value) if word in LEVELS else known + value
    return total


def _load_for(state: State, name: str, record: MemberRecord) -> Mapping[str, float]:
    """A member's report; of a gateway that tells models apart, the part that attention workers of that pool do."""
    load = state.liveness[record.name].load
    model = next((m for m in state.models if group(state, ATTENTION, m.hash) == name), None)
    if record.pool != GATEWAY or model is None:
        return load
    own = f"{FOR}{model.number}:"
    return {word.removeprefix(own): load[word] for word in load if word.startswith(own)} or load


def replicas_min(config: Config, state: State) -> int:
    """Servers that may be asked for the expert which has the fewest; 0 when some expert can be asked of none. As many
    as are wanted, where all models sleep and none is to be held."""
    models = served(state)
    if models and all(model.asleep for model in models):
        return config.replicas
    return bitmap.copies((r.serving for r in state.members.values()), bits_of(awake(state)))[0]


def moves_in_flight(state: State) -> int:
    """(layer, expert) pairs that some server is loading, or has been told to give up and still holds."""
    loading = sum((r.target & ~r.loaded).bit_count() for r in state.members.values())
    return loading + sum(r.retiring.bit_count() for r in state.members.values())


def autoscale_bounds(asked: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Bounds by pool, from words such as "expert:1..6" on the command line.

    Raises:
        ConfigInvalid: no such words, a pool twice, or bounds that hold nothing.
    """
    bounds: dict[str, tuple[int, int]] = {}
    for words in asked:
        match = re.fullmatch(r"([a-z]+):(\d{1,9})\.\.(\d{1,9})", words, re.ASCII)
        if match is None or match[1] not in LAUNCHED_POOLS:
            raise ConfigInvalid(
                f"--autoscale {words!r} found; give one of {', '.join(LAUNCHED_POOLS)} with its least and most "
                f"processes, such as {LAUNCHED_POOLS[0]}:1..6"
            )
        least, most = int(match[2]), int(match[3])
        if not least <= most or not 1 <= most <= MOST_MEMBERS:
            raise ConfigInvalid(
                f"--autoscale {words} found; give bounds with least <= most, and most from 1 to {MOST_MEMBERS}"
            )
        if match[1] in bounds:
            raise ConfigInvalid(f"--autoscale names pool {match[1]} twice; give one range for each pool")
        bounds[match[1]] = (least, most)
    return bounds


def pool_signals(state: State, name: str) -> Signals:
    """One launched pool at this moment.

    Who drains is asked no more, so its load says nothing of what the others will have to do; who is not ready yet has
    none, and who is silent may be gone, or stands still. A gateway's queue counts however many workers there are.
    """
    loads: dict[str, list[Mapping[str, float]]] = {}
    starting = sum(start.pool == name for start in state.starts)
    draining = 0
    own = {record.name for record in members_of(state, name)}
    base = name.partition(":")[0]
    for record in state.members.values():
        if record.name in state.silent or record.name in state.standing:
            continue
        # What waits for one model's workers is no load of another's.
        if record.pool == ATTENTION == base and record.name not in own:
            continue
        if record.draining:
            draining += record.name in own
        elif record.ready:
            loads.setdefault(record.pool, []).append(_load_for(state, name, record))
        else:
            starting += record.name in own
    return signals_of(
        base, loads, wanted=state.wanted[name], live=len(loads.get(base, ())), starting=starting, draining=draining
    )


def autoscale(config: Config, state: State, commands: list[Command]) -> State:
    """Ask the policy of each pool that has one; what it wants is wanted as if somebody had asked for it."""
    if not config.autoscale:
        return state
    memories = dict(state.memories)
    leaving = {group(state, ATTENTION, model.hash) for model in state.models if model.leaving}
    for name in groups(state):
        policy = config.autoscale.get(name.partition(":")[0])
        if policy is None or name in leaving:
            continue
        wanted, memories[name] = decide(policy, pool_signals(state, name), memories.get(name, Memory()), state.now_s)
        least, most = config.bounds(name.partition(":")[0])
        wanted = min(max(wanted, least), most)
        if wanted != state.wanted[name]:
            commands.append(Scaled(pool=name, wanted=wanted, why=memories[name].why))
            state = replace(state, wanted={**state.wanted, name: wanted})
    return replace(state, memories=memories)


# Why members are ended that did not go by themselves, by the first words of the reason given.
EVICTIONS: Final = {
    "its process ended": "ended",
    "silent": "silent",
    "its work loop": "hung",
    "its process joined anew": "rejoined",
    OVERDUE: "overdue",
}


class Counts:
    """Events by pool. Forgotten by a restart, as counters of Prometheus may be."""

    def __init__(self) -> None:
        self.scale_changes: Counter[str] = Counter()
        self.fenced: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.evictions: Counter[tuple[str, str]] = Counter()
        # Copies of experts that servers loaded, gave up, and loaded while they served already.
        self.loaded = self.unloaded = self.migrated = 0
        # How long each model took, by number, when it was last woken; and those that are not whole yet, since.
        self.wake_s: dict[int, float] = {}
        self._woken_s: dict[int, float] = {}
        self._said: dict[str, Callable[[], tuple[Totals, ...]]] = {}
        self.failed_ticks = 0
        # By (layer, expert) in the order of bitmaps; empty before any.
        self.rows: NDArray[np.uint64] = np.zeros(0, np.uint64)

    def note(self, before: State, after: State, commands: Iterable[Command]) -> None:
        """Count what one step did."""
        if after.wanted is not before.wanted:
            self.scale_changes.update(
                pool for pool, wanted in after.wanted.items() if before.wanted.get(pool, wanted) != wanted
            )
        if after.models is not before.models:
            slept = {model.number for model in before.models if model.asleep}
            woken = (model.number for model in after.models if model.number in slept and not model.asleep)
            self._woken_s |= dict.fromkeys(woken, after.now_s)
        if after.members is not before.members:
            self._note_copies(before.members, after.members)
            self._note_woken(after)
        for command in commands:
            if isinstance(command, Fenced):
                pool = command.name.partition("/")[0]
                self.fenced[pool] += 1
                self.evictions.update(
                    (pool, why) for words, why in EVICTIONS.items() if command.reason.startswith(words)
                )
                self._said.pop(command.name, None)
            elif isinstance(command, StartProcess):
                self.launches[command.pool] += 1

    def _note_woken(self, state: State) -> None:
        for number in [*self._woken_s]:
            if not bits_of([state.models[number]]) & ~bitmap.union(record.serving for record in state.members.values()):
                self.wake_s[number] = state.now_s - self._woken_s.pop(number)

    def _note_copies(self, before: Mapping[str, MemberRecord], after: Mapping[str, MemberRecord]) -> None:
        for name, record in after.items():
            former = before.get(name)
            if former is None or former is record:
                continue
            came = (record.loaded & ~former.loaded).bit_count()
            self.loaded += came
            # A server that is new takes its first experts: they are placed, not moved.
            self.migrated += came if former.ready else 0
            held, holds = former.loaded | former.retiring, record.loaded | record.retiring
            self.unloaded += (held & ~holds).bit_count()

    def add_totals(self, name: str, totals: Callable[[], tuple[Totals, ...]]) -> None:
        """Take what a member has counted, to be read when somebody asks; the newest is all that counts."""
        self._said[name] = totals

    @property
    def totals(self) -> dict[str, tuple[Totals, ...]]:
        """What members that are there count themselves, by name."""
        return {name: totals() for name, totals in self._said.items()}

    def add_rows(self, state: State, routed: Routed) -> None:
        """Count rows that an attention worker sent to each expert."""
        model = find(state, state.members[routed.name].model) if routed.name in state.members else None
        if model is None or routed.rows.shape != (model.layers * model.experts,):
            return
        known, self.rows = self.rows, np.zeros(width(state), np.uint64)
        if len(known) <= len(self.rows):
            self.rows[: len(known)] = known
        self.rows[model.base :][: len(routed.rows)] += routed.rows


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """One moment's placement and load.

    servers: names of the expert members. lost: (layer, expert) pairs that no member may be asked for. below: those
    with fewer replicas than wanted, the lost ones too. load: [layers, servers] rows per second, as they fall on
    servers when each expert's are split evenly over its replicas; of the last minute or two. The layers are those of
    all models in a row; rows of any but the first count as many of its own as they have bytes of weights to read.
    """

    servers: tuple[str, ...]
    lost: int
    below: int
    load: NDArray[np.float64]

    @property
    def balancedness(self) -> float | None:
        """Mean over the greatest load of a server: 1 when all are as busy, 1/servers when one does everything; of all
        layers together, each weighted with its load. None while there is no load."""
        if not self.load.any():
            return None
        busiest = self.load.max(axis=1)
        return float(self.load.mean(axis=1).sum() / busiest.sum())


def coverage(config: Config, state: State) -> Coverage:
    """Of the present state. More copies than there are servers wanted are not wanted of any expert."""
    members = pool(state, EXPERT)
    wanted = min(config.replicas, max(1, state.wanted.get(EXPERT, config.replicas)))
    lost = below = 0
    loads: list[NDArray[np.float64]] = [np.zeros((0, len(members)))]
    for model in (models := awake(state)):
        pairs = model.layers * model.experts
        serving = np.zeros((len(members), pairs), bool)
        for row, record in zip(serving, members, strict=True):
            held = np.frombuffer(bitmap.to_bytes(model.take(record.serving), 1, pairs), np.uint8)
            row[:] = np.unpackbits(held, count=pairs, bitorder="little")
        copies = serving.sum(axis=0)
        lost, below = lost + int((copies == 0).sum()), below + int((copies < wanted).sum())
        load = np.zeros((model.layers, len(members)))
        if state.routed is not None and len(state.routed) >= model.base + pairs and members:
            age_s = max(0.0, state.now_s - state.routed_s)
            # A steady rate adds up to rate * half life / ln 2.
            rate = np.log(2) / config.routed_half_life_s * 0.5 ** (age_s / config.routed_half_life_s)
            rate *= model.expert_bytes / models[0].expert_bytes if models[0].expert_bytes else 1.0
            each = state.routed[model.base :][:pairs] * rate / np.maximum(copies, 1)
            load = (serving * each).reshape(len(members), model.layers, model.experts).sum(axis=2).T
        loads.append(load)
    return Coverage(
        servers=tuple(record.name for record in members), lost=lost, below=below, load=np.concatenate(loads)
    )
