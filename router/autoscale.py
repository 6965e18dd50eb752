"""Pools whose wanted size follows their load. Pure."""

from __future__ import annotations

from router.events import Command, Scaled
from router.records import evolve
from router.scaling import Memory, decide, signals_of
from router.state import Config, State


def autoscale(config: Config, state: State, commands: list[Command]) -> State:
    """Ask the policy of each pool that has one; what it wants is wanted as if somebody had asked for it."""
    if not config.autoscale:
        return state
    loads: dict[str, list[dict[str, float]]] = {}
    counts: dict[tuple[str, str], int] = {}
    for record in state.members.values():
        if record.name in state.silent:
            continue
        phase = "draining" if record.draining else "live" if record.ready else "starting"
        counts[record.pool, phase] = counts.get((record.pool, phase), 0) + 1
        if phase == "live":
            loads.setdefault(record.pool, []).append(dict(state.pulses[record.name].load))
    memories = dict(state.memories)
    for name, policy in config.autoscale.items():
        ordered = sum(start.pool == name for start in state.starts)
        was = state.wanted[name]
        signals = signals_of(
            name,
            loads,
            wanted=was,
            live=counts.get((name, "live"), 0),
            starting=counts.get((name, "starting"), 0) + ordered,
            draining=counts.get((name, "draining"), 0),
        )
        wanted, memories[name] = decide(policy, signals, memories.get(name, Memory()), state.now_s)
        least, most = config.bounds(name)
        wanted = min(max(wanted, least), most)
        if wanted != was:
            commands.append(Scaled(pool=name, wanted=wanted, why=memories[name].why))
            state = evolve(state, wanted={**state.wanted, name: wanted})
    return evolve(state, memories=memories)
