"""Who is alive and at work: silence, suspicion, leases, and when the router rather doubts itself. Pure.

Silences are judged at ticks; between them nobody falls silent. A member that renews and says that its work loop stands
still is as good as dead, on its own word: no doubt holds that up. The last of a pool is not fenced for either while it
may be of use: a server with last replicas never; an attention worker that stands still when another serves in its
place, and one that is silent while a gateway hears it, likewise.
"""

from __future__ import annotations

from dataclasses import replace

from router import launches
from router.classes import peers
from router.events import Command, Renewed, Stop, Stranger, Suspected
from router.records import doubts_itself, evolve, fence, is_member, pool, with_pulse
from router.state import LAUNCHED_POOLS, Config, State
from router.suspicion import DEAD, SUSPECT, heard, suspicion
from router.view import ATTENTION, GATEWAY, HEARS, STANDS


def judge(config: Config, state: State, commands: list[Command]) -> State:
    """Mark suspects; fence those who look dead or whose lease ended."""
    state = _weigh(config, evolve(state, ticked_s=state.now_s))
    state = _replace_standing(config, state, commands)
    if any(ghost.until_s <= state.now_s for ghost in state.ghosts):
        state = evolve(state, ghosts=tuple(ghost for ghost in state.ghosts if ghost.until_s > state.now_s))
    nobody_speaks = state.doubting_s is not None and len(state.silent) == len(state.members)
    if not state.silent or nobody_speaks or doubts_itself(config, state):
        return state
    for name in list(state.members):
        if name not in state.silent or is_last_replica(state, name):
            continue
        if is_last_worker(state, name) and _is_heard(config, state, name):
            continue
        silence_s = state.now_s - state.pulses[name].renewed_s
        state = _end(config, state, name, f"silent for {silence_s:.2f} s", commands)
    return state


def _replace_standing(config: Config, state: State, commands: list[Command]) -> State:
    """Fence who says that its work loop stands still, once nobody needs it: others are ordered in its place before."""
    for name in [name for name in state.members if name in state.standing]:
        stands_s = state.pulses[name].load[STANDS]
        # What nobody replaces for so long serves nobody either, and holds up whoever waits for its word.
        if is_last_replica(state, name) or (is_last_worker(state, name) and stands_s < config.start_s):
            continue
        state = _end(config, state, name, f"its work loop stood still for {stands_s:.2f} s", commands)
    return state


def _end(config: Config, state: State, name: str, reason: str, commands: list[Command]) -> State:
    record = state.members[name]
    state = fence(config, state, name, reason, commands)
    if record.host in state.launchers and record.pool in LAUNCHED_POOLS:
        commands.append(Stop(host=record.host, name=name, pid=record.pid))
    return state if record.ready else launches.failed(config, state, record.pool)


def is_last_worker(state: State, name: str) -> bool:
    """True if it is an attention worker that serves, and no other that does is heard of and at work."""
    if not state.members[name].ready or state.members[name].pool != ATTENTION:
        return False
    lost = state.silent | state.standing
    others = (record for record in pool(state, ATTENTION) if record.name != name)
    return not any(record.ready and not record.draining and record.name not in lost for record in others)


def _is_heard(config: Config, state: State, name: str) -> bool:
    """Whether a gateway that has just renewed says that it hears an attention worker."""
    word = HEARS + name
    return any(
        word in state.pulses[gateway.name].load
        and state.now_s - state.pulses[gateway.name].renewed_s < config.lease_s
        for gateway in pool(state, GATEWAY)
    )


def renewed(config: Config, state: State, event: Renewed) -> State:
    """A member spoke: from now on it is not silent; a suspicion ends at the next tick."""
    name = event.name
    pulse = state.pulses[name]
    rhythm = heard(pulse.rhythm, state.now_s - pulse.renewed_s, config.lease_s)
    state = with_pulse(state, name, evolve(pulse, renewed_s=state.now_s, rhythm=rhythm, load=event.load))
    if name in state.silent:
        state = evolve(state, silent=state.silent - {name})
    return state


def accuse(config: Config, state: State, event: Suspected, commands: list[Command]) -> State:
    """A peer's suspicion holds for one lease; it is evidence, and fences nobody."""
    if not is_member(state, event.name, event.incarnation):
        commands.append(Stranger(name=event.name, incarnation=event.incarnation))
        return state
    until_s = state.now_s + config.lease_s
    state = with_pulse(state, event.name, evolve(state.pulses[event.name], accused_until_s=until_s))
    return evolve(state, suspects=state.suspects | {event.name})


def excuse_stall(config: Config, state: State) -> State:
    """Take the router's own stall, if it just ended, off everyone's silence and off its own doubt."""
    gap_s = state.now_s - state.ticked_s
    if gap_s <= config.stall_s:
        return state
    # While the router did not run, nobody could reach it: that part of their silence is its own.
    stall_s = gap_s - config.tick_s
    pulses = {
        name: evolve(pulse, renewed_s=min(state.now_s, pulse.renewed_s + stall_s))
        for name, pulse in state.pulses.items()
    }
    ghosts = tuple(replace(ghost, until_s=ghost.until_s + stall_s) for ghost in state.ghosts)
    doubting_s = None if state.doubting_s is None else state.doubting_s + stall_s
    return evolve(
        state,
        ticked_s=state.now_s,
        pulses=pulses,
        ghosts=ghosts,
        doubting_s=doubting_s,
        unheard_until_s=state.unheard_until_s + stall_s,
    )


def is_last_replica(state: State, name: str) -> bool:
    """True if none of its peers that is heard of serves some expert that this member serves."""
    elsewhere = 0
    for record in peers(state, state.members[name]):
        if record.name not in state.silent and record.name not in state.standing:
            elsewhere |= record.serving
    return bool(state.members[name].serving & ~elsewhere)


def _weigh(config: Config, state: State) -> State:
    """Judge every silence anew, and whether so many at once are rather the router's own."""
    suspects: list[str] = []
    silent: list[str] = []
    standing: list[str] = []
    missed = 0
    for name, pulse in state.pulses.items():
        silence_s = state.now_s - pulse.renewed_s
        stands = STANDS in pulse.load and state.members[name].pool in LAUNCHED_POOLS
        if stands:
            standing.append(name)
        if silence_s <= config.renew_s and state.now_s >= pulse.accused_until_s and not stands:
            continue
        found = suspicion(pulse.rhythm, silence_s, lease_s=config.lease_s, renew_s=config.renew_s)
        if found > SUSPECT or state.now_s < pulse.accused_until_s or stands:
            suspects.append(name)
        if (found > DEAD and silence_s >= config.least_silence_s) or silence_s > config.lease_s:
            silent.append(name)
        # Who fell silent together is not judged together, as some are given more time: all of them have missed two
        # renewals before the first looks dead.
        missed += silence_s > 2 * config.renew_s
    if len(suspects) != len(state.suspects) or not state.suspects.issuperset(suspects):
        state = evolve(state, suspects=frozenset(suspects))
    if len(silent) != len(state.silent) or not state.silent.issuperset(silent):
        state = evolve(state, silent=frozenset(silent))
    if state.standing or standing:
        state = evolve(state, standing=frozenset(standing))
    doubts = missed >= 2 and 4 * missed > len(state.members)
    if doubts != (state.doubting_s is not None):
        state = evolve(state, doubting_s=state.now_s if doubts else None)
    return state
