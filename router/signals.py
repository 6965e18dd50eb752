"""From what the router knows to what the policy of router.scaling judges. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from router.scaling import Signals, signals_of
from router.state import State


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
            loads.setdefault(record.pool, []).append(state.pulses[record.name].load)
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
