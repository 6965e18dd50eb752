"""Small changes of the state that several parts of the core make. Pure."""

from __future__ import annotations

from dataclasses import replace

from router import bitmap
from router.state import Command, Config, Fenced, Gone, MemberRecord, Pulse, State
from router.view import ATTENTION, DRAINING, EXPERT, JOINING, SERVING, SUSPECT, WARMING, Member, View

_REMEMBERED = 64


def is_member(state: State, name: str, incarnation: int) -> bool:
    """True if that incarnation is a member: nobody else speaks under its name."""
    record = state.members.get(name)
    return record is not None and record.incarnation == incarnation


def with_record(state: State, record: MemberRecord) -> State:
    """The state with one member's record replaced."""
    return replace(state, members={**state.members, record.name: record})


def with_pulse(state: State, name: str, pulse: Pulse) -> State:
    """The state with one member's pulse replaced."""
    return replace(state, pulses={**state.pulses, name: pulse})


def fence(state: State, name: str, reason: str, commands: list[Command]) -> State:
    """The state without a member. Its name and incarnation never return."""
    record = state.members[name]
    commands.append(Fenced(name=name, incarnation=record.incarnation, reason=reason))
    gone = Gone(name=name, incarnation=record.incarnation, host=record.host, pid=record.pid, reason=reason)
    return replace(
        state,
        members={n: r for n, r in state.members.items() if n != name},
        pulses={n: p for n, p in state.pulses.items() if n != name},
        gone=(*state.gone, gone)[-_REMEMBERED:],
    )


def pool(state: State, name: str) -> list[MemberRecord]:
    """Records of one pool, in the order of joining."""
    return [record for record in state.members.values() if record.pool == name]


def is_late(config: Config, state: State, name: str) -> bool:
    """True if a member's lease has ended, whether or not it may be fenced for it."""
    return state.now_s - state.pulses[name].renewed_s > config.lease_s


def late_members(config: Config, state: State) -> list[str]:
    """Names of those whose lease has ended."""
    return [name for name in state.members if is_late(config, state, name)]


def is_suspicious(state: State, late: list[str]) -> bool:
    """Two or more, and over a quarter, silent at once: more likely the observer than they."""
    return len(late) >= 2 and 4 * len(late) > len(state.members)


def doubts_itself(config: Config, state: State, late: list[str]) -> bool:
    """True while the router must not yet take the silence of so many for theirs."""
    if not is_suspicious(state, late):
        return False
    # An event between ticks may be the first to see it.
    since_s = state.now_s if state.doubting_s is None else state.doubting_s
    return state.now_s - since_s < config.doubt_leases * config.lease_s


def acked_by_all(state: State) -> int:
    """The newest epoch that no attention member is behind."""
    acked = [state.pulses[record.name].acked for record in pool(state, ATTENTION)]
    return min(acked, default=state.epoch + 1)


def phase(record: MemberRecord, pulse: Pulse) -> str:
    """The word for a member's state."""
    if record.draining:
        return DRAINING
    if pulse.suspect:
        return SUSPECT
    if record.ready:
        return SERVING
    return WARMING if record.target or record.pool != EXPERT else JOINING


def view_of(config: Config, state: State) -> View:
    """What everyone may see of the state."""
    layers, experts = state.model.layers, state.model.experts
    return View(
        term=state.term,
        epoch=state.epoch,
        replicas_wanted=config.replicas,
        layers=layers,
        experts=experts,
        model_hash=state.model.hash,
        members=tuple(
            Member(
                name=record.name,
                pool=record.pool,
                state=phase(record, state.pulses[name]),
                incarnation=record.incarnation,
                address=record.address,
                pid=record.pid,
                host=record.host,
                core=record.core,
                numerics_class=record.numerics_class,
                target=bitmap.to_bytes(record.target, layers, experts),
                serving=bitmap.to_bytes(record.serving, layers, experts),
                load=state.pulses[name].load,
            )
            for name, record in state.members.items()
        ),
    )
