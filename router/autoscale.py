"""Pools whose wanted size follows their load. Pure."""

from __future__ import annotations

from router.events import Command, Scaled
from router.records import evolve
from router.scaling import Memory, decide
from router.signals import pool_signals
from router.state import Config, State


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
            state = evolve(state, wanted={**state.wanted, name: wanted})
    return evolve(state, memories=memories)
