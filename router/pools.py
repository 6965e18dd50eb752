"""How large a pool is and should be; what its members report of their load; when its size follows that. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from router import bitmap
from router.events import Command, Scaled
from router.lifecycle import held_up
from router.records import pool, replace
from router.scaling import Memory, Signals, decide, signals_of
from router.state import LAUNCHED_POOLS, MOST_MEMBERS, Config, ConfigInvalid, State
from router.view import ATTENTION, GATEWAY, PoolSize

# Load words that tell how long or how full, not how much: of several members the worst counts. The others add up.
LEVELS = frozenset({"queue_s", "kv_use", "ttft_p99_s", "tpot_p99_s"})


def pool_size(config: Config, state: State, name: str) -> PoolSize:
    """The sizes of one launched pool."""
    members = pool(state, name)
    draining = sum(record.draining for record in members)
    least, most = config.bounds(name)
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

    A word that nobody reports is absent. What waits at a gateway waits for an attention worker, so it counts as load
    of that pool: with no worker left it is the only one that anybody reports.
    """
    pools = (ATTENTION, GATEWAY) if name == ATTENTION else (name,)
    total: dict[str, float] = {}
    for record in state.members.values():
        if record.pool not in pools:
            continue
        for word, value in state.liveness[record.name].load.items():
            # A gateway's running streams run on attention workers, which report them.
            if not math.isfinite(value) or (record.pool == GATEWAY and word == "running"):
                continue
            known = total.get(word, 0.0)
            total[word] = max(known, value) if word in LEVELS else known + value
    return total


def replicas_min(state: State) -> int:
    """Servers that may be asked for the expert which has the fewest; 0 when some expert can be asked of none."""
    everything = bitmap.everything(state.model.layers, state.model.experts)
    return bitmap.copies((record.serving for record in state.members.values()), everything)[0]


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
    for record in state.members.values():
        if record.name in state.silent or record.name in state.standing:
            continue
        if record.draining:
            draining += record.pool == name
        elif record.ready:
            loads.setdefault(record.pool, []).append(state.liveness[record.name].load)
        else:
            starting += record.pool == name
    return signals_of(
        name,
        loads,
        wanted=state.wanted[name],
        live=len(loads.get(name, ())),
        starting=starting,
        draining=draining,
    )


def autoscale(config: Config, state: State, commands: list[Command]) -> State:
    """Ask the policy of each pool that has one; what it wants is wanted as if somebody had asked for it."""
    if not config.autoscale:
        return state
    memories = dict(state.memories)
    for name, policy in config.autoscale.items():
        wanted, memories[name] = decide(
            policy, pool_signals(state, name), memories.get(name, Memory()), state.now_s
        )
        least, most = config.bounds(name)
        wanted = min(max(wanted, least), most)
        if wanted != state.wanted[name]:
            commands.append(Scaled(pool=name, wanted=wanted, why=memories[name].why))
            state = replace(state, wanted={**state.wanted, name: wanted})
    return replace(state, memories=memories)
