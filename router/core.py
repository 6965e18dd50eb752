"""The router's state machine: step(config, state, event, now_s) -> (state, commands). Pure.

An event first changes the membership or what is known of a member; then, if anything that matters did change,
the placement follows (router.moves) and a new epoch is published. Leases are judged at ticks (router.leases),
and processes ordered when a pool is too small (router.launches).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from router import drains, launches, leases
from router.moves import follow
from router.records import fence, is_member, with_pulse, with_record
from router.state import (
    LAUNCHED_POOLS,
    NAMED_POOLS,
    Acked,
    Command,
    Config,
    Event,
    Exited,
    Join,
    Joined,
    LauncherAttached,
    LauncherDetached,
    Left,
    Loaded,
    MemberRecord,
    Model,
    Publish,
    Pulse,
    Refused,
    Renewed,
    Routed,
    Scale,
    Scaled,
    Stale,
    Started,
    State,
    Stranger,
    Suspected,
    Tick,
)
from router.view import ATTENTION, EXPERT, GATEWAY

# Incarnations: 20 bits of salt above 40 bits of counting, positive as a signed 64-bit number.
_COUNT_BITS = 40
_SALT_MASK = (1 << 20) - 1


def step(config: Config, state: State, event: Event, now_s: float) -> tuple[State, list[Command]]:
    """The state after an event, and what to do about it.

    Args:
        now_s: Clock of this event; one that steps back counts as standing still.

    Returns:
        The new state and the commands, in order. Commands are void unless the durable part of the state is
        committed.
    """
    commands: list[Command] = []
    before = state
    if now_s > state.now_s:
        state = replace(state, now_s=now_s)
    # Whatever comes first after a stall, no silence may be judged before the stall is taken off it.
    state = leases.excuse_stall(config, state)
    state = _apply(config, state, event, commands)
    # By far the most frequent events: they decide nothing, and touch nothing durable.
    quiet = isinstance(event, Renewed | Routed) and state.members is before.members
    if quiet or (isinstance(event, Acked) and not _awaits_acks(before, state)):
        return state, commands
    if (
        state.members is not before.members
        or state.pulses is not before.pulses
        or isinstance(event, Tick | Started)
    ):
        state = follow(config, state, commands)
    state = launches.order(config, state, commands)
    if isinstance(event, Started) or _public(before) != _public(state):
        state = replace(state, epoch=before.epoch + 1)
        commands.append(Publish(epoch=state.epoch))
    return state, commands


def _apply(config: Config, state: State, event: Event, commands: list[Command]) -> State:
    match event:
        case Renewed():
            return _renew(state, event, commands)
        case Tick():
            state = drains.shrink(leases.judge(config, state, commands))
            return drains.end_overdue(config, state, commands)
        case Started():
            pulses = {name: Pulse(renewed_s=state.now_s) for name in state.members}
            return replace(
                state,
                salt=state.salt or event.salt,
                term=state.term + 1,
                ticked_s=state.now_s,
                pulses=pulses,
                wanted=state.wanted or {name: config.wanted(name) for name in LAUNCHED_POOLS},
            )
        case Join():
            return _join(state, event, commands)
        case Acked():
            return _ack(state, event, commands)
        case Loaded():
            return _load(state, event, commands)
        case Routed():
            return _count(config, state, event, commands)
        case Scale():
            return _scale(config, state, event, commands)
        case Suspected():
            return leases.accuse(config, state, event, commands)
        case Left():
            return _leave(state, event, commands)
        case Exited():
            return _exit(config, state, event, commands)
        case LauncherAttached():
            return launches.attach(config, state, event)
        case LauncherDetached():
            return launches.detach(state, event.host)


def _awaits_acks(before: State, state: State) -> bool:
    """True if an ack can let something go on: a member became ready, or something waits for its ack."""
    return state.members is not before.members or any(record.retiring for record in state.members.values())


def _public(state: State) -> object:
    """What a View shows and a publication must follow; load is left out on purpose."""
    shown = [
        (
            record.name,
            record.ready,
            record.draining,
            state.pulses[name].suspect,
            record.target,
            record.serving,
        )
        for name, record in state.members.items()
    ]
    return state.model, shown


def _join(state: State, event: Join, commands: list[Command]) -> State:
    state = _forget_model(state)
    refusal = _refusal(state, event)
    if refusal:
        commands.append(Refused(message=refusal))
        return state
    known = state.model
    model = Model(
        hash=known.hash or event.model_hash,
        layers=known.layers or event.layers,
        experts=known.experts or event.experts,
    )
    number = state.named.get(event.pool, 0) + 1
    joined = state.joined + 1
    record = MemberRecord(
        name=f"{event.pool}/{number}",
        pool=event.pool,
        incarnation=(state.salt & _SALT_MASK) << _COUNT_BITS | joined,
        address=event.address,
        pid=event.pid,
        host=event.host,
        core=event.core,
        numerics_class=event.numerics_class,
        capacity=event.capacity,
        ready=event.pool == GATEWAY,
        ordered=launches.expects(state, event.host, event.pool),
        zone=event.zone,
    )
    # It has seen no View yet, so it cannot use routes older than the present epoch.
    pulse = Pulse(renewed_s=state.now_s, acked=state.epoch)
    state = replace(
        state,
        model=model,
        joined=joined,
        named={**state.named, event.pool: number},
        members={**state.members, record.name: record},
        pulses={**state.pulses, record.name: pulse},
    )
    commands.append(Joined(name=record.name, incarnation=record.incarnation))
    return launches.joined(state, event.host, event.pool)


def _forget_model(state: State) -> State:
    """With nobody left who holds a part of the model, the next joiner may bring another."""
    if any(record.pool != GATEWAY for record in state.members.values()):
        return state
    return replace(state, model=Model())


def _refusal(state: State, event: Join) -> str:
    if event.pool not in NAMED_POOLS:
        return f"pool {event.pool!r} is unknown; join one of {', '.join(NAMED_POOLS)}"
    if event.pool == EXPERT and not (event.layers > 0 and event.experts > 0):
        return (
            f"an expert server of {event.layers} layers with {event.experts} experts cannot be placed; "
            f"give the shape of its model"
        )
    known = state.model
    if event.model_hash and known.hash and event.model_hash != known.hash:
        return (
            f"model {event.model_hash} found, {known.hash} needed: this cluster serves another checkpoint. "
            f"Start this process with the same model folder, or a cluster of its own for this model."
        )
    for what, found, needed in (
        ("MoE layers", event.layers, known.layers),
        ("experts in each layer", event.experts, known.experts),
    ):
        if found and needed and found != needed:
            return f"{found} {what} found, {needed} needed: start this process with the model of the cluster"
    for record in state.members.values():
        if record.pool != event.pool or not record.numerics_class or not event.numerics_class:
            continue
        if record.numerics_class != event.numerics_class:
            return (
                f"numerics class {event.numerics_class} found, {record.numerics_class} needed, "
                f"as {record.name} has: equal bits need equal kernels. Start this process with the same "
                f"--dtype and instruction set."
            )
    return ""


def _renew(state: State, event: Renewed, commands: list[Command]) -> State:
    if not is_member(state, event.name, event.incarnation):
        commands.append(Stranger(name=event.name, incarnation=event.incarnation))
        return state
    pulse = state.pulses[event.name]
    state = with_pulse(state, event.name, replace(pulse, renewed_s=state.now_s, load=event.load))
    return drains.end_idle(state, event.name, commands)


def _ack(state: State, event: Acked, commands: list[Command]) -> State:
    if not is_member(state, event.name, event.incarnation):
        commands.append(Stranger(name=event.name, incarnation=event.incarnation))
        return state
    pulse = state.pulses[event.name]
    # An ack of an epoch that was never published is nonsense; taken at its word it would free weights in use.
    if not pulse.acked < event.epoch <= state.epoch:
        return state
    state = with_pulse(state, event.name, replace(pulse, acked=event.epoch))
    record = state.members[event.name]
    if record.pool == ATTENTION and not record.ready:
        state = with_record(state, replace(record, ready=True))
        state = launches.succeeded(state, ATTENTION)
    return state


def _load(state: State, event: Loaded, commands: list[Command]) -> State:
    if not is_member(state, event.name, event.incarnation):
        commands.append(Stranger(name=event.name, incarnation=event.incarnation))
        return state
    record = state.members[event.name]
    held = event.held & record.target
    if event.epoch < record.dropped_epoch:
        # The server may be unloading what it then held, so such a report can only take away.
        commands.append(Stale(name=event.name, epoch=event.epoch))
        held &= record.loaded
    if held == record.loaded:
        return state
    return with_record(state, replace(record, loaded=held))


def _count(config: Config, state: State, event: Routed, commands: list[Command]) -> State:
    if not is_member(state, event.name, event.incarnation):
        commands.append(Stranger(name=event.name, incarnation=event.incarnation))
        return state
    pairs = state.model.layers * state.model.experts
    if event.rows.shape != (pairs,):
        return state
    routed = event.rows.astype(np.float64)
    if state.routed is not None and state.routed.shape == routed.shape:
        routed += state.routed * 0.5 ** ((state.now_s - state.routed_s) / config.routed_half_life_s)
    routed.flags.writeable = False
    return replace(state, routed=routed, routed_s=state.now_s)


def _scale(config: Config, state: State, event: Scale, commands: list[Command]) -> State:
    if event.pool not in LAUNCHED_POOLS:
        names = ", ".join(LAUNCHED_POOLS)
        commands.append(Refused(message=f"pool {event.pool!r} has no size of its own; scale one of {names}"))
        return state
    least, most = config.bounds(event.pool)
    if not least <= event.wanted <= most:
        commands.append(
            Refused(
                message=f"{event.wanted} members of pool {event.pool!r} asked for; give {least} to {most}"
            )
        )
        return state
    if not event.drain_s > 0:
        commands.append(Refused(message=f"drain_s is {event.drain_s}; give more than 0"))
        return state
    commands.append(Scaled(pool=event.pool, wanted=event.wanted))
    state = replace(state, drain_s={**state.drain_s, event.pool: event.drain_s})
    if state.wanted.get(event.pool) == event.wanted:
        return state
    return replace(state, wanted={**state.wanted, event.pool: event.wanted})


def _leave(state: State, event: Left, commands: list[Command]) -> State:
    if not is_member(state, event.name, event.incarnation):
        commands.append(Stranger(name=event.name, incarnation=event.incarnation))
        return state
    record = state.members[event.name]
    if event.drain and record.pool in LAUNCHED_POOLS:
        return drains.begin(state, event.name)
    return fence(state, event.name, "left", commands)


def _exit(config: Config, state: State, event: Exited, commands: list[Command]) -> State:
    found = [r for r in state.members.values() if (r.host, r.pid) == (event.host, event.pid)]
    for record in found:
        state = fence(state, record.name, "its process ended", commands)
        if not record.ready:
            state = launches.failed(config, state, record.pool)
    known = any((gone.host, gone.pid) == (event.host, event.pid) for gone in state.gone)
    if event.pool and not known:
        state = launches.never_joined(config, state, event.host, event.pool)
    return state
