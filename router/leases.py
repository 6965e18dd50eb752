"""Who is alive: leases, silence, suspicion, and when the router rather doubts itself. Pure."""

from __future__ import annotations

from dataclasses import replace

from router import launches
from router.records import (
    doubts_itself,
    fence,
    is_late,
    is_member,
    is_suspicious,
    late_members,
    pool,
    with_pulse,
)
from router.state import Command, Config, State, Stop, Stranger, Suspected
from router.view import EXPERT


def judge(config: Config, state: State, commands: list[Command]) -> State:
    """Mark suspects, fence those whose lease ended."""
    state = _mark_suspects(config, replace(state, ticked_s=state.now_s))
    late = late_members(config, state)
    state = _doubt(state, late)
    nobody_speaks = state.doubting_s is not None and len(late) == len(state.members)
    if nobody_speaks or doubts_itself(config, state, late):
        return state
    for name in late:
        if is_last_replica(config, state, name):
            continue
        record = state.members[name]
        state = fence(state, name, f"silent for {config.lease_s} s", commands)
        if record.host in state.launchers:
            commands.append(Stop(host=record.host, name=name, pid=record.pid))
        if not record.ready:
            state = launches.failed(config, state, record.pool)
    return state


def accuse(config: Config, state: State, event: Suspected, commands: list[Command]) -> State:
    """A peer's suspicion holds for one lease; it is evidence, and fences nobody."""
    if not is_member(state, event.name, event.incarnation):
        commands.append(Stranger(name=event.name, incarnation=event.incarnation))
        return state
    pulse = state.pulses[event.name]
    until_s = state.now_s + config.lease_s
    return with_pulse(state, event.name, replace(pulse, suspect=True, accused_until_s=until_s))


def excuse_stall(config: Config, state: State) -> State:
    """Take the router's own stall, if it just ended, off everyone's silence and off its own doubt."""
    gap_s = state.now_s - state.ticked_s
    if gap_s <= config.stall_s:
        return state
    # While the router did not run, nobody could reach it: that part of their silence is its own.
    stall_s = gap_s - config.tick_s
    pulses = {
        name: replace(pulse, renewed_s=min(state.now_s, pulse.renewed_s + stall_s))
        for name, pulse in state.pulses.items()
    }
    doubting_s = None if state.doubting_s is None else state.doubting_s + stall_s
    return replace(state, ticked_s=state.now_s, pulses=pulses, doubting_s=doubting_s)


def _mark_suspects(config: Config, state: State) -> State:
    changed = dict(state.pulses)
    for name, pulse in state.pulses.items():
        silent = state.now_s - pulse.renewed_s > config.lease_s / 2
        suspect = silent or state.now_s < pulse.accused_until_s
        if suspect != pulse.suspect:
            changed[name] = replace(pulse, suspect=suspect)
    return replace(state, pulses=changed) if changed != state.pulses else state


def _doubt(state: State, late: list[str]) -> State:
    if is_suspicious(state, late) == (state.doubting_s is not None):
        return state
    return replace(state, doubting_s=state.now_s if state.doubting_s is None else None)


def is_last_replica(config: Config, state: State, name: str) -> bool:
    """True if nobody else who is heard of serves some expert that this member serves."""
    elsewhere = 0
    for record in pool(state, EXPERT):
        if record.name != name and not is_late(config, state, record.name):
            elsewhere |= record.serving
    return bool(state.members[name].serving & ~elsewhere)
