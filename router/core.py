"""The router's state machine: step(config, state, event, now_s) -> (state, commands). Pure.

An event first changes the membership or what is known of a member; then, if anything that matters did change,
the placement follows (router.moves) and a new epoch is published. Leases are judged at ticks (router.liveness),
and processes ordered when a pool is too small (router.lifecycle).
"""

from __future__ import annotations

from dataclasses import replace as with_fields

import numpy as np

from router import events, lifecycle, models, moves, retiring
from router.balance import rebalance
from router.liveness import discount_stall, judge_corruption, judge_silence, record_suspicion, renew
from router.pools import autoscale
from router.records import fence, pool, replace, with_liveness, with_record
from router.state import (
    COUNT_BITS,
    LAUNCHED_POOLS,
    MOST_EXPERT_BYTES,
    MOST_PAIRS,
    NAMED_POOLS,
    Config,
    Liveness,
    MemberRecord,
    State,
)
from router.view import ASKING_POOLS, ATTENTION, CLIENT, EXPERT, GATEWAY, PROTOCOL, Model, can_mix

_LONGEST = 256


def step(config: Config, state: State, event: events.Event, now_s: float) -> tuple[State, list[events.Command]]:
    """The state after an event, and what to do about it.

    Args:
        now_s: Clock of this event; one that steps back counts as standing still.

    Returns:
        The new state and the commands, in order. Commands are void unless the durable part of the state is
        committed.
    """
    commands: list[events.Command] = []
    before = state
    if now_s > state.now_s:
        state = replace(state, now_s=now_s)
    # Whatever comes first after a stall, no silence may be judged before the stall is taken off it.
    state = discount_stall(config, state)
    state = _apply(config, state, event, commands)
    if commands and isinstance(commands[-1], events.UnknownMember | events.Refused):
        return state, commands
    state, begins = lifecycle.catch_up(state, event)
    if state.unheard:
        return state, commands
    ticked = isinstance(event, events.Tick)
    if not ticked and not begins and _decides_nothing(before, state, event):
        return state, commands
    state = lifecycle.take_back_drains(config, state)
    if not state.settled or _is_stirred(before, state, event) or (ticked and state.stuck):
        # Where there are many members, placing takes so long that one tick does it for all that happened before; and
        # who is lost is said first.
        waits = not ticked or any(isinstance(command, events.Fenced) for command in commands)
        if waits and not begins and len(state.members) > config.most_prompt:
            state = replace(state, settled=False)
        else:
            state = moves.follow(config, state, commands)
    state = lifecycle.order_starts(config, state, commands)
    if begins or _shows_another(before, state):
        state = replace(state, epoch=state.epoch + 1)
        commands.append(events.Publish(epoch=state.epoch))
    return state, commands


def _apply(config: Config, state: State, event: events.Event, commands: list[events.Command]) -> State:
    if isinstance(
        event, events.Renewed | events.Acked | events.Loaded | events.Routed | events.Suspected | events.Left
    ):
        record = state.members.get(event.name)
        # Nobody but that incarnation speaks under its name.
        if record is None or record.incarnation != event.incarnation:
            commands.append(events.UnknownMember(name=event.name, incarnation=event.incarnation))
            return lifecycle.note_unknown_member(state, event) if isinstance(event, events.Renewed) else state
    match event:
        case events.Renewed():
            state = models.wake(renew(config, state, event), state.members[event.name])
            return lifecycle.end_idle(config, state, event.name, commands)
        case events.Tick() if state.unheard:
            return replace(state, ticked_s=state.now_s)
        case events.Tick():
            state = judge_corruption(config, judge_silence(config, state, commands), commands)
            state = lifecycle.shrink_pools(lifecycle.end_leaving(retiring.begin(state)))
            state = models.put_to_sleep(config, state)
            state = moves.take_back_late_copies(config, lifecycle.end_overdue(config, state, commands))
            return rebalance(config, autoscale(config, state, commands))
        case events.Started():
            return lifecycle.begin_term(config, state, event)
        case events.Join():
            return _join(config, state, event, commands)
        case events.Acked():
            return _ack(state, event)
        case events.Loaded():
            return _load(state, event, commands)
        case events.Routed():
            return _count(config, state, event)
        case events.Scale():
            return _scale(config, state, event, commands)
        case events.AddModel():
            return models.add(config, state, event, commands)
        case events.RemoveModel():
            return models.remove(config, state, event, commands)
        case events.Retire():
            return retiring.retire(state, event, commands)
        case events.Suspected():
            return record_suspicion(config, state, event)
        case events.Left():
            return _leave(config, state, event, commands)
        case events.Exited():
            return _exit(config, state, event, commands)
        case events.LauncherAttached():
            return lifecycle.attach_launcher(config, state, event)
        case events.LauncherDetached():
            return lifecycle.detach_launcher(state, event.host)


def _decides_nothing(before: State, state: State, event: events.Event) -> bool:
    """True for by far the most events: what a member says on which nothing waits, and that touches nothing durable.

    An unchanged part of the state is the same object: nothing need be compared.
    """
    if state.members is not before.members or state.suspects is not before.suspects:
        return False
    if state.models is not before.models:
        return False
    if isinstance(event, events.Acked):
        # Only for the acks of those who ask does anything wait.
        if state.liveness is before.liveness or state.members[event.name].pool not in ASKING_POOLS:
            return True
        return not any(r.retiring for r in state.members.values())
    return isinstance(event, events.Renewed | events.Routed | events.Loaded) and state.silent is before.silent


def _is_stirred(before: State, state: State, event: events.Event) -> bool:
    """True if anything changed on which a placement or a move depends."""
    return (
        state.members is not before.members
        or state.suspects is not before.suspects
        or state.silent is not before.silent
        or state.fenced_clients is not before.fenced_clients
        or state.wanted is not before.wanted
        or state.models is not before.models
        or isinstance(event, events.Acked)
    )


def _shows_another(before: State, state: State) -> bool:
    """True if a View shows something else than before, load aside, so that a publication must follow."""
    if state.suspects is not before.suspects:
        return True
    # One that has gone gives up its name unseen.
    if state.models is not before.models and models.listed(state) != models.listed(before):
        return True
    if state.members is before.members:
        return False
    if state.members.keys() != before.members.keys():
        return True
    for name, record in state.members.items():
        was = before.members[name]
        if record is not was and (
            record.serving != was.serving
            or record.target != was.target
            # Taken back and ordered again at once: the server reports for a View that says so, or is never believed.
            or record.dropped_epoch != was.dropped_epoch
            or record.ready != was.ready
            or record.draining != was.draining
        ):
            return True
    return False


def _join(config: Config, state: State, event: events.Join, commands: list[events.Command]) -> State:
    forgotten = _forget_model(state, event)
    refusal = _refusal(config, forgotten, event)
    if refusal:
        commands.append(events.Refused(message=refusal))
        return state
    former, state = models.find(state, "") or Model(), forgotten
    known = asked = _asked(state, event) or Model()
    # A client only asks: the cluster's own members say what is served.
    if event.pool != CLIENT:
        asked = with_fields(
            known,
            hash=known.hash or event.model_hash,
            layers=known.layers or event.layers,
            experts=known.experts or event.experts,
            expert_bytes=known.expert_bytes or event.expert_bytes,
        )
    if _is_another(former, asked) and len(state.models) < 2:
        # Nobody has the experts that they ask for any more.
        for record in [record for record in state.members.values() if record.pool in ASKING_POOLS]:
            state = fence(config, state, record.name, "the cluster serves another model now", commands)
    for member in list(state.members.values()):
        same = (member.host, member.pid, member.pool) == (event.host, event.pid, event.pool)
        # One process may be several clients.
        if same and event.pid > 0 and event.pool != CLIENT:
            # Its process is no other, and what it was told as another it may still use for a while.
            state = fence(config, state, member.name, "its process joined anew", commands)
    if asked != known:
        state = models.with_model(state, asked)
    own = models.group(state, event.pool, asked.hash)
    number = state.named.get(event.pool, 0) + 1
    joined = state.joined + 1
    record = MemberRecord(
        name=f"{event.pool}/{number}",
        pool=event.pool,
        incarnation=(state.salt & lifecycle.SALT_MASK) << COUNT_BITS | joined,
        address=event.address,
        pid=event.pid,
        host=event.host,
        core=event.core,
        numerics_class=event.numerics_class,
        capacity=event.capacity,
        ready=event.pool == GATEWAY,
        ordered=lifecycle.expects_start(state, event.host, own),
        zone=event.zone,
        model=asked.hash,
        opened=1 << asked.number,
    )
    record = replace(record, **retiring.before(state, event))
    # It has seen no View yet, so it cannot use routes older than the present epoch.
    liveness = Liveness(renewed_s=state.now_s, acked=state.epoch, told=True)
    state = replace(
        state,
        joined=joined,
        named={**state.named, event.pool: number},
        members={**state.members, record.name: record},
        liveness={**state.liveness, record.name: liveness},
    )
    commands.append(events.Joined(name=record.name, incarnation=record.incarnation))
    return lifecycle.fill_start(state, event.host, own)


def _is_another(one: Model, other: Model) -> bool:
    pairs = ((one.hash, other.hash), (one.layers, other.layers), (one.experts, other.experts))
    return any(known and said and known != said for known, said in pairs)


def _forget_model(state: State, event: events.Join) -> State:
    """With nobody left who holds a part of a model that nobody named, the next who does may bring another. Clients hold
    none."""
    # Nor do workers before the first server: of which of several models the first to come is, is chance.
    brings = event.pool == EXPERT and not state.named.get(EXPERT)
    held = any(record.pool in LAUNCHED_POOLS for record in state.members.values()) and not brings
    if held or event.pool not in LAUNCHED_POOLS or any(model.name for model in state.models):
        return state
    return replace(state, models=(), routed=None, seen=()) if state.models else state


def _asked(state: State, event: events.Join) -> Model | None:
    """The model that one who joins means: by its hash, or the first; a client may also say no more than a shape."""
    first = models.find(state, "")
    if first is None or not event.model_hash:
        alike = (m for m in models.served(state) if (m.layers, m.experts) == (event.layers, event.experts))
        return next(alike, first) if event.pool == CLIENT else first
    return models.find(state, event.model_hash) or (None if first.hash else first)


def _refusal(config: Config, state: State, event: events.Join) -> str:
    if event.pool not in NAMED_POOLS:
        return f"pool {event.pool[:_LONGEST]!r} is unknown; join one of {', '.join(NAMED_POOLS)}"
    if event.protocol != PROTOCOL:
        return (
            f"protocol {event.protocol or 'none'} found, {PROTOCOL} needed: this process and the router are of "
            f"versions that do not understand each other. Start both from the same release."
        )
    known = _asked(state, event) or Model()
    oversized = _oversized(known, event)
    if oversized:
        return oversized
    if event.pool == EXPERT and not (event.layers > 0 and event.experts > 0):
        return (
            f"an expert server of {event.layers} layers with {event.experts} experts cannot be placed; "
            f"give the shape of its model"
        )
    if event.model_hash and state.models and not known.hash and state.models[0].hash:
        served = ", ".join(model.hash for model in models.served(state))
        return (
            f"model {event.model_hash} found, {served} needed: this cluster serves another checkpoint. "
            f"Start this process with the same model folder, add the model (eaas models add), or start a cluster "
            f"of its own for it."
        )
    # One that replaces a worker whose streams go on is let in.
    replaces = event.pool == ATTENTION and state.wanted.get(models.group(state, ATTENTION, known.hash))
    if known.leaving and event.pool in ASKING_POOLS and not replaces:
        return f"model {known.name} was removed: add it again (eaas models add), or ask for another"
    for what, found, needed in (
        ("MoE layers", event.layers, known.layers),
        ("experts in each layer", event.experts, known.experts),
    ):
        if found and needed and found != needed:
            return f"{found} {what} found, {needed} needed: start this process with the model of the cluster"
    if event.pool == CLIENT and not pool(state, EXPERT):
        return (
            "no expert server is a member, and a client does not say which model is served. Start expert "
            "servers (eaas pool MODEL), then connect again."
        )
    if event.pool == EXPERT:
        others = [r for r in pool(state, EXPERT) if (r.host, r.pid) != (event.host, event.pid)]
        if len(others) >= config.most_servers:
            return (
                f"{len(others)} expert servers found, room for {config.most_servers}: attention workers name no more. "
                f"End one of them first, or serve with fewer that have more memory."
            )
    # What clients say of themselves binds no other: each is held to the servers that it asks.
    alike = EXPERT if event.pool == CLIENT else event.pool
    for record in state.members.values():
        if record.pool != alike or not record.numerics_class or not event.numerics_class:
            continue
        if not can_mix(record.numerics_class, event.numerics_class):
            return (
                f"numerics class {event.numerics_class} found, one of the format of {record.numerics_class} needed, "
                f"as {record.name} has: other numbers make another model. Start this process with the same --dtype."
            )
    return ""


def _oversized(known: Model, event: events.Join) -> str:
    """Why what a Join says is kept by nobody: bitmaps, the journal and every View would be as large as it says."""
    for what in ("address", "host", "zone", "model_hash", "numerics_class"):
        found = len(getattr(event, what))
        if found > _LONGEST:
            return f"{what} of {found} characters found, at most {_LONGEST} needed: give a shorter one"
    for what, found, most in (
        ("pid", event.pid, (1 << 63) - 1),
        ("layers", event.layers, MOST_PAIRS),
        ("experts", event.experts, MOST_PAIRS),
        ("capacity", event.capacity, MOST_PAIRS),
        ("expert_bytes", event.expert_bytes, MOST_EXPERT_BYTES),
    ):
        if not 0 <= found <= most:
            return f"{what} {found} found, 0 to {most} needed: check how this process was started"
    # Members may each know one half of the shape.
    layers, experts = known.layers or event.layers, known.experts or event.experts
    if layers * experts > MOST_PAIRS:
        return (
            f"{layers} layers with {experts} experts found, at most {MOST_PAIRS} experts in all needed: "
            f"check the model folder"
        )
    return ""


def _ack(state: State, event: events.Acked) -> State:
    liveness = state.liveness[event.name]
    if liveness.journaled and not event.epoch:
        # It uses no routes at all, of no term.
        return with_liveness(state, event.name, replace(liveness, journaled=False))
    # Another term's routes are not those of this one, whatever their number.
    if event.salt not in (0, state.salt):
        return state
    # An ack of an epoch that was never published is nonsense; taken at its word it would free weights in use.
    if not liveness.acked < event.epoch <= state.epoch:
        return state
    state = with_liveness(state, event.name, replace(liveness, acked=event.epoch))
    record = state.members[event.name]
    # While it was not ready nobody waited for it: it may now use only what was not given up meanwhile.
    if record.pool in ASKING_POOLS and not record.ready and event.epoch >= state.unloaded_epoch:
        state = with_record(state, replace(record, ready=True))
        state = lifecycle.forgive_failed_starts(state, models.group(state, record.pool, record.model))
    return state


def _load(state: State, event: events.Loaded, commands: list[events.Command]) -> State:
    record = state.members[event.name]
    if event.salt not in (0, state.salt):
        # Said to another term: much may have happened since.
        commands.append(events.Stale(name=event.name, epoch=event.epoch))
        return state
    hashes = (record.model, *event.opened)
    opened = sum(1 << model.number for model in state.models if model.hash in hashes) or record.opened
    liveness = state.liveness[event.name]
    # What it says of others was said by a View that had other models there. So may be those that came after the
    # journal, by a View of another term: that of its first report, and of all until it follows one of this.
    foreign = liveness.foreign if liveness.told else event.epoch
    sure = state.models[: state.journaled] if event.epoch <= max(foreign, liveness.seen) else state.models
    known = models.bits_of(model for model in sure if opened >> model.number & 1)
    event = with_fields(event, held=event.held & known)
    unknown = lifecycle.held_beyond_journal(state, event)
    if event.epoch < liveness.reported or 0 < event.number < liveness.report:
        # Overtaken by a newer report of the same server.
        commands.append(events.Stale(name=event.name, epoch=event.epoch))
        return state
    if event.epoch > liveness.reported or not liveness.told:
        reported = max(liveness.reported, min(event.epoch, state.epoch))
        told = replace(liveness, reported=reported, told=True, unknown=unknown, foreign=foreign)
        state = with_liveness(state, event.name, told)
    if event.number > liveness.report:
        state = with_liveness(state, event.name, replace(state.liveness[event.name], report=event.number))
    held = event.held & record.target
    # What it tells a term first it holds until a View of that term, for it follows no other any more.
    if event.epoch < record.dropped_epoch and (liveness.told or not event.salt):
        # The server may be unloading what it then held, so such a report can only take away.
        commands.append(events.Stale(name=event.name, epoch=event.epoch))
        held &= record.loaded
    if held != record.loaded or opened != record.opened:
        state = with_record(state, replace(record, loaded=held, opened=opened))
    return state if state.unheard or liveness.told else lifecycle.keep_held(state, event.name, unknown)


def _count(config: Config, state: State, event: events.Routed) -> State:
    model = models.find(state, state.members[event.name].model) or Model()
    pairs = model.layers * model.experts
    if event.rows.shape != (pairs,) or event.activated.shape != (pairs,):
        return state
    routed = np.zeros(models.width(state))
    if state.routed is not None:
        fading = 0.5 ** ((state.now_s - state.routed_s) / config.routed_half_life_s)
        routed[: len(state.routed)] = state.routed * fading
    routed[model.base : model.base + pairs] += event.rows + config.activation_rows * event.activated
    routed.flags.writeable = False
    # A request may begin and end between two reports of what runs.
    busy_s = {**state.busy_s, model.number: state.now_s}
    return replace(state, routed=routed, routed_s=state.now_s, busy_s=busy_s)


def _scale(config: Config, state: State, event: events.Scale, commands: list[events.Command]) -> State:
    if refusal := _size_refusal(config, state, event):
        commands.append(events.Refused(message=refusal))
        return state
    commands.append(events.Scaled(pool=event.pool, wanted=event.wanted))
    state = replace(state, drain_s={**state.drain_s, event.pool: event.drain_s})
    if state.wanted.get(event.pool) == event.wanted:
        return state
    return replace(state, wanted={**state.wanted, event.pool: event.wanted})


def _size_refusal(config: Config, state: State, event: events.Scale) -> str:
    if event.pool not in (pools := models.groups(state)):
        return f"pool {event.pool!r} has no size of its own; scale one of {', '.join(pools)}"
    least, most = config.bounds(event.pool.partition(":")[0])
    if not least <= event.wanted <= most:
        return f"{event.wanted} members of pool {event.pool!r} asked for; give {least} to {most}"
    if not 0 < event.drain_s <= events.LONGEST_DRAIN_S:
        return f"drain_s is {event.drain_s}; give more than 0 and at most {events.LONGEST_DRAIN_S:.0f}"
    return ""


def _leave(config: Config, state: State, event: events.Left, commands: list[events.Command]) -> State:
    if event.drain:
        return lifecycle.begin_drain(state, event.name)
    return fence(config, state, event.name, "left", commands, ended=True)


def _exit(config: Config, state: State, event: events.Exited, commands: list[events.Command]) -> State:
    fenced_clients = tuple(g for g in state.fenced_clients if (g.host, g.pid) != (event.host, event.pid))
    if len(fenced_clients) < len(state.fenced_clients):
        state = replace(state, fenced_clients=fenced_clients)
    found = [r for r in state.members.values() if (r.host, r.pid) == (event.host, event.pid)]
    for record in found:
        state = fence(config, state, record.name, "its process ended", commands, ended=True)
        if not record.ready:
            own = models.group(state, record.pool, record.model)
            state = lifecycle.note_failed_start(config, state, own)
    known = any((gone.host, gone.pid) == (event.host, event.pid) for gone in state.gone)
    if event.pool and not known:
        # It never joined.
        state = lifecycle.fill_start(state, event.host, event.pool)
        state = lifecycle.note_failed_start(config, state, event.pool)
    return state
