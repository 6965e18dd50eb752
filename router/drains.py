"""How a pool shrinks: one member at a time drains, then its process is ended. Pure.

An expert server has drained when its experts are served elsewhere (router.moves); an attention worker when it has
said, having seen itself shown as draining, that nothing runs on it: a gateway that sends it a stream later, from an
older View, has the stream go on elsewhere. Whoever takes longer than the pool's
drain_s is ended all the same: streams of an attention worker go on elsewhere, and an expert server's experts too,
unless it holds the last replica of one. A gateway drains by itself, once another listens in its place, and then leaves.
"""

from __future__ import annotations

from collections import Counter

from router.events import DRAIN_S, Command, Stop
from router.launches import live
from router.leases import is_last_replica
from router.records import evolve, fence, pool, with_pulse, with_record
from router.state import LAUNCHED_POOLS, Config, MemberRecord, State
from router.view import ASKING_POOLS, ATTENTION, GATEWAY

DRAINED = "drained"
OVERDUE = "its time to drain was over"
# Reasons for which a member has gone as it was told to.
ORDERLY = frozenset({DRAINED, OVERDUE})


def begin(state: State, name: str, surplus: bool = False) -> State:
    """Let a member drain. Idempotent; one that was asked to go stays asked.

    Args:
        surplus: Only because its pool is too large: this is taken back should the pool be too small again.
    """
    record = state.members[name]
    if record.draining:
        return with_record(state, evolve(record, surplus=False)) if record.surplus and not surplus else state
    until_s = state.now_s + state.drain_s.get(record.pool, DRAIN_S)
    state = with_pulse(state, name, evolve(state.pulses[name], drain_until_s=until_s))
    # The publication of this very step is the first that shows it.
    draining = evolve(record, draining=True, surplus=surplus, draining_epoch=state.epoch + 1)
    return with_record(state, draining)


def take_back(config: Config, state: State) -> State:
    """Let members that drain as surplus stay, newest drain first, where their pool has become too small."""
    surplus = [r for r in state.members.values() if r.surplus and r.name not in state.silent]
    for name in LAUNCHED_POOLS if surplus else ():
        missing = state.wanted[name] - live(config, state, name)
        draining = sorted((r for r in surplus if r.pool == name), key=lambda r: -r.draining_epoch)
        for record in draining[: max(0, missing)]:
            state = with_record(state, evolve(record, draining=False, surplus=False))
    return state


def shrink(state: State) -> State:
    """Drain one member of a pool that has more than it should; one at a time, at rest. First those to be replaced.

    A member that nobody ordered is its operator's, and stays unless it is to be replaced.
    """
    for name in LAUNCHED_POOLS:
        members = pool(state, name)
        if len(members) <= state.wanted[name] or held_up(state, name):
            continue
        leaving = next((record for record in members if record.leaving), None)
        ordered = [record for record in members if record.ordered]
        if leaving is not None:
            state = begin(state, leaving.name)
        elif ordered:
            zones = Counter(record.zone for record in members)
            classes = Counter(record.numerics_class for record in members)
            # The last of a class goes last, for its requests would have to leave the class. Of equals the last: what
            # runs longest is known best.
            least = min(
                reversed(ordered),
                key=lambda record: (classes[record.numerics_class] == 1, _worth(state, record, zones)),
            )
            state = begin(state, least.name, surplus=True)
    return state


def held_up(state: State, name: str) -> str:
    """Why no member of a pool may begin to drain now, in words; empty if one may."""
    if any(start.pool == name for start in state.starts):
        return "a process is starting"
    for record in pool(state, name):
        if record.draining:
            return f"{record.name} drains"
        if not record.ready:
            return f"{record.name} does not serve yet"
        if record.name in state.suspects:
            corrupt = record.name in state.accused
            return f"{record.name} is suspect" + (": it is said to give corrupt replies" if corrupt else "")
    return ""


def _worth(state: State, record: MemberRecord, zones: Counter[str]) -> float:
    """What the pool would lose: streams that must end or move; of experts, a place in a zone that has few."""
    if record.pool == ATTENTION:
        load = state.pulses[record.name].load
        return load.get("running", 0) + load.get("waiting", 0)
    return -zones[record.zone]


def end_idle(config: Config, state: State, name: str, commands: list[Command]) -> State:
    """End a client of expert servers that drains and has just said that nothing runs on it."""
    record, pulse = state.members[name], state.pulses[name]
    if not record.draining or record.pool not in ASKING_POOLS or pulse.acked < record.draining_epoch:
        return state
    # A report without the word says nothing of what runs.
    if pulse.load.get("running", 1) + pulse.load.get("waiting", 0) > 0:
        return state
    return end(config, state, name, DRAINED, commands)


def end_overdue(config: Config, state: State, commands: list[Command]) -> State:
    """End the members that have drained for too long."""
    for record in state.members.values():
        if not record.draining or record.pool == GATEWAY:
            continue
        until_s = state.pulses[record.name].drain_until_s
        if until_s is None:
            # A restarted router does not know how long it has lasted.
            until_s = state.now_s + state.drain_s.get(record.pool, DRAIN_S)
            state = with_pulse(state, record.name, evolve(state.pulses[record.name], drain_until_s=until_s))
        if state.now_s >= until_s and not is_last_replica(state, record.name):
            state = end(config, state, record.name, OVERDUE, commands)
    return state


def end(config: Config, state: State, name: str, reason: str, commands: list[Command]) -> State:
    """Fence a member that drained, and have its process ended where a launcher can."""
    record = state.members[name]
    state = fence(config, state, name, reason, commands)
    if record.host in state.launchers:
        commands.append(Stop(host=record.host, name=name, pid=record.pid))
    return state
