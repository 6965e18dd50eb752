"""Who is alive: leases, silence, suspicion, and when the router rather doubts itself. Pure."""

from __future__ import annotations

from dataclasses import replace

from router import launches
from router.records import fence, is_late, is_member, pool, with_pulse
from router.state import Command, Config, State, Stop, Stranger, Suspected
from router.view import EXPERT


def judge(config: Config, state: State, commands: list[Command]) -> State:
    """Take off the router's own stalls, mark suspects, fence those whose lease ended."""
    state = _excuse_stall(config, state)
    state = _mark_suspects(config, state)
    late = [name for name in state.members if is_late(config, state, name)]
    state = _doubt(state, len(late))
    if _doubts(config, state, len(late)):
        return state
    for name in late:
        if _is_last_replica(config, state, name):
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


def _excuse_stall(config: Config, state: State) -> State:
    gap_s = state.now_s - state.ticked_s
    state = replace(state, ticked_s=state.now_s)
    if gap_s <= config.stall_s:
        return state
    # While the router did not run, nobody could reach it: that part of their silence is its own.
    pulses = {
        name: replace(pulse, renewed_s=min(state.now_s, pulse.renewed_s + gap_s - config.tick_s))
        for name, pulse in state.pulses.items()
    }
    return replace(state, pulses=pulses)


def _mark_suspects(config: Config, state: State) -> State:
    changed = dict(state.pulses)
    for name, pulse in state.pulses.items():
        silent = state.now_s - pulse.renewed_s > config.lease_s / 2
        suspect = silent or state.now_s < pulse.accused_until_s
        if suspect != pulse.suspect:
            changed[name] = replace(pulse, suspect=suspect)
    return replace(state, pulses=changed) if changed != state.pulses else state


def _doubt(state: State, late: int) -> State:
    """Two or more, and over a quarter, silent at once: more likely the observer than they."""
    if late >= 2 and 4 * late > len(state.members):
        return state if state.doubting_s is not None else replace(state, doubting_s=state.now_s)
    return state if state.doubting_s is None else replace(state, doubting_s=None)


def _doubts(config: Config, state: State, late: int) -> bool:
    if state.doubting_s is None:
        return False
    others_speak = late < len(state.members)
    return not others_speak or state.now_s - state.doubting_s < config.doubt_leases * config.lease_s


def _is_last_replica(config: Config, state: State, name: str) -> bool:
    elsewhere = 0
    for record in pool(state, EXPERT):
        if record.name != name and not is_late(config, state, record.name):
            elsewhere |= record.serving
    return bool(state.members[name].serving & ~elsewhere)
