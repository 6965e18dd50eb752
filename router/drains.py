"""How a pool shrinks: one member at a time drains, then its process is ended. Pure.

An expert server has drained when its experts are served elsewhere (router.moves); an attention worker when it has
said, after everyone was told to send it nothing new, that nothing runs on it. Whoever takes longer than the pool's
drain_s is ended all the same: streams of an attention worker go on elsewhere, and an expert server's experts too,
unless it holds the last replica of one.
"""

from __future__ import annotations

from dataclasses import replace

from router.leases import is_last_replica
from router.records import fence, pool, with_pulse, with_record
from router.state import DRAIN_S, LAUNCHED_POOLS, Command, Config, State, Stop
from router.view import ATTENTION


def begin(state: State, name: str) -> State:
    """Let a member drain. Idempotent."""
    record = state.members[name]
    if record.draining:
        return state
    until_s = state.now_s + state.drain_s.get(record.pool, DRAIN_S)
    state = with_pulse(state, name, replace(state.pulses[name], drain_until_s=until_s))
    # The publication of this very step is the first that shows it.
    return with_record(state, replace(record, draining=True, draining_epoch=state.epoch + 1))


def shrink(state: State) -> State:
    """Drain the newest member of a pool that has more than it should; one at a time, at rest.

    A member that nobody ordered is its operator's, and stays.
    """
    for name in LAUNCHED_POOLS:
        members = pool(state, name)
        if len(members) <= state.wanted[name] or any(start.pool == name for start in state.starts):
            continue
        if not all(r.ready and not r.draining and not state.pulses[r.name].suspect for r in members):
            continue
        if members[-1].ordered:
            state = begin(state, members[-1].name)
    return state


def end_idle(state: State, name: str, commands: list[Command]) -> State:
    """End an attention worker that drains and has just said that nothing runs on it."""
    record, pulse = state.members[name], state.pulses[name]
    if not record.draining or record.pool != ATTENTION or pulse.acked < record.draining_epoch:
        return state
    if pulse.load.get("running", 0) + pulse.load.get("waiting", 0) > 0:
        return state
    return end(state, name, "drained", commands)


def end_overdue(config: Config, state: State, commands: list[Command]) -> State:
    """End the members that have drained for too long."""
    for record in list(state.members.values()):
        if not record.draining:
            continue
        until_s = state.pulses[record.name].drain_until_s
        if until_s is None:
            # A restarted router does not know how long it has lasted.
            until_s = state.now_s + state.drain_s.get(record.pool, DRAIN_S)
            state = with_pulse(state, record.name, replace(state.pulses[record.name], drain_until_s=until_s))
        if state.now_s >= until_s and not is_last_replica(config, state, record.name):
            state = end(state, record.name, "its time to drain was over", commands)
    return state


def end(state: State, name: str, reason: str, commands: list[Command]) -> State:
    """Fence a member that drained, and have its process ended where a launcher can."""
    record = state.members[name]
    state = fence(state, name, reason, commands)
    if record.host in state.launchers:
        commands.append(Stop(host=record.host, name=name, pid=record.pid))
    return state
