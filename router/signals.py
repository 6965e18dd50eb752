"""From what the router knows to what the policy of router.scaling judges. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from router.pools import pool_size
from router.scaling import Signals, signals_of
from router.state import Config, State


def pool_signals(config: Config, state: State, name: str) -> Signals:
    """One launched pool at this moment.

    Who drains is asked no more, so its load says nothing of what the others will have to do; who is not ready yet has
    none. A gateway's queue counts however many workers there are.
    """
    loads: dict[str, list[Mapping[str, float]]] = {}
    warming = 0
    for record in state.members.values():
        if record.draining:
            continue
        if record.ready:
            loads.setdefault(record.pool, []).append(state.pulses[record.name].load)
        else:
            warming += record.pool == name
    size = pool_size(config, state, name)
    return signals_of(
        name,
        loads,
        wanted=size.wanted,
        live=size.live - warming,
        starting=size.starting + warming,
        draining=size.draining,
    )
