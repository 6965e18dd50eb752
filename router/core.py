"""The router's state machine: step(config, state, event, now_s) -> (state, commands). Pure.

An event first changes the membership or what is known of a member; then, if anything that matters did change,
the placement follows (router.moves) and a new epoch is published. Leases are judged at ticks (router.liveness),
and processes ordered when a pool is too small (router.lifecycle).
"""

from __future__ import annotations

from router import lifecycle, moves, retiring
from router.balance import rebalance
from router.events import (
    LONGEST_DRAIN_S,
    Acked,
    Command,
    Event,
    Exited,
    Fenced,
    Join,
    Joined,
    LauncherAttached,
    LauncherDetached,
    Left,
    Loaded,
    Publish,
    Refused,
    Renewed,
    Retire,
    Routed,
    Scale,
    Scaled,
    Stale,
    Started,
    Suspected,
    Tick,
    UnknownMember,
)
from router.liveness import discount_stall, judge_corruption, judge_silence, record_suspicion, renew
from router.pools import autoscale
from router.records import fence, is_member, pool, replace, with_liveness, with_record
from router.state import (
    COUNT_BITS,
    LAUNCHED_POOLS,
    NAMED_POOLS,
    Config,
    Liveness,
    MemberRecord,
    Model,
    State,
)
from router.view import ASKING_POOLS, CLIENT, EXPERT, GATEWAY, PROTOCOL, can_mix

# What is kept of a process must be of a size that the journal and every View can bear: the largest model known has
# 61 layers with 384 experts, 23,424 pairs.
_MOST_PAIRS = 1 << 20
_MOST_EXPERT_BYTES = 1 << 40
_LONGEST = 256


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
    state = discount_stall(config, state)
    state = _apply(config, state, event, commands)
    if commands and isinstance(commands[-1], UnknownMember | Refused):
        return state, commands
    state, begins = lifecycle.catch_up(config, state, event)
    if state.unheard:
        return state, commands
    ticked = isinstance(event, Tick)
    if not ticked and not begins and _decides_nothing(before, state, event):
        return state, commands
    state = lifecycle.take_back_drains(config, state)
    if not state.settled or _is_stirred(before, state, event) or (ticked and state.stuck):
        # Where there are many members, placing takes so long that one tick does it for all that happened before; and
        # who is lost is said first.
        waits = not ticked or any(isinstance(command, Fenced) for command in commands)
        if waits and not begins and len(state.members) > config.most_prompt:
            state = replace(state, settled=False)
        else:
            state = moves.follow(config, state, commands)
    state = lifecycle.order_starts(config, state, commands)
    if begins or _shows_another(before, state):
        state = replace(state, epoch=state.epoch + 1)
        commands.append(Publish(epoch=state.epoch))
    return state, commands


def _apply(config: Config, state: State, event: Event, commands: list[Command]) -> State:
    if isinstance(event, Renewed | Acked | Loaded | Routed | Suspected | Left) and not is_member(
        state, event.name, event.incarnation
    ):
        commands.append(UnknownMember(name=event.name, incarnation=event.incarnation))
        return lifecycle.note_unknown_member(state, event) if isinstance(event, Renewed) else state
    match event:
        case Renewed():
            return lifecycle.end_idle(config, renew(config, state, event), event.name, commands)
        case Tick() if state.unheard:
            return replace(state, ticked_s=state.now_s)
        case Tick():
            state = judge_corruption(config, judge_silence(config, state, commands), commands)
            state = lifecycle.shrink_pools(retiring.begin(state))
            state = moves.take_back_late_copies(config, lifecycle.end_overdue(config, state, commands))
            return rebalance(config, autoscale(config, state, commands))
        case Started():
            return lifecycle.begin_term(config, state, event)
        case Join():
            return _join(config, state, event, commands)
        case Acked():
            return _ack(state, event)
        case Loaded():
            return _load(state, event, commands)
        case Routed():
            return _count(config, state, event)
        case Scale():
            return _scale(config, state, event, commands)
        case Retire():
            return retiring.retire(state, event, commands)
        case Suspected():
            return record_suspicion(config, state, event)
        case Left():
            return _leave(config, state, event, commands)
        case Exited():
            return _exit(config, state, event, commands)
        case LauncherAttached():
            return lifecycle.attach_launcher(config, state, event)
        case LauncherDetached():
            return lifecycle.detach_launcher(state, event.host)


def _decides_nothing(before: State, state: State, event: Event) -> bool:
    """True for by far the most events: what a member says on which nothing waits, and that touches nothing durable.

    An unchanged part of the state is the same object: nothing need be compared.
    """
    if state.members is not before.members or state.suspects is not before.suspects:
        return False
    if isinstance(event, Acked):
        # Only for the acks of those who ask does anything wait.
        if state.liveness is before.liveness or state.members[event.name].pool not in ASKING_POOLS:
            return True
        return not any(r.retiring for r in state.members.values())
    return isinstance(event, Renewed | Routed | Loaded) and state.silent is before.silent


def _is_stirred(before: State, state: State, event: Event) -> bool:
    """True if anything changed on which a placement or a move depends."""
    return (
        state.members is not before.members
        or state.suspects is not before.suspects
        or state.silent is not before.silent
        or state.fenced_clients is not before.fenced_clients
        or state.wanted is not before.wanted
        or isinstance(event, Acked)
    )


def _shows_another(before: State, state: State) -> bool:
    """True if a View shows something else than before, load aside, so that a publication must follow."""
    if state.suspects is not before.suspects or state.model is not before.model:
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


def _join(config: Config, state: State, event: Join, commands: list[Command]) -> State:
    forgotten = _forget_model(state, event)
    refusal = _refusal(config, forgotten, event)
    if refusal:
        commands.append(Refused(message=refusal))
        return state
    former_model, state = state.model, forgotten
    known = model = state.model
    # A client only asks: the cluster's own members say what is served.
    if event.pool != CLIENT:
        model = Model(
            hash=known.hash or event.model_hash,
            layers=known.layers or event.layers,
            experts=known.experts or event.experts,
            expert_bytes=known.expert_bytes or event.expert_bytes,
        )
    if _is_another(former_model, model):
        # Nobody has the experts that they ask for any more.
        for client in pool(state, CLIENT):
            state = fence(config, state, client.name, "the cluster serves another model now", commands)
    for former in list(state.members.values()):
        same = (former.host, former.pid, former.pool) == (event.host, event.pid, event.pool)
        # One process may be several clients.
        if same and event.pid > 0 and event.pool != CLIENT:
            # Its process is no other, and what it was told as another it may still use for a while.
            state = fence(config, state, former.name, "its process joined anew", commands)
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
        ordered=lifecycle.expects_start(state, event.host, event.pool),
        zone=event.zone,
    )
    record = replace(record, **retiring.before(state, event))
    # It has seen no View yet, so it cannot use routes older than the present epoch.
    liveness = Liveness(renewed_s=state.now_s, acked=state.epoch, told=True)
    state = replace(
        state,
        model=known if model == known else model,
        joined=joined,
        named={**state.named, event.pool: number},
        members={**state.members, record.name: record},
        liveness={**state.liveness, record.name: liveness},
    )
    commands.append(Joined(name=record.name, incarnation=record.incarnation))
    return lifecycle.fill_start(state, event.host, event.pool)


def _is_another(one: Model, other: Model) -> bool:
    pairs = ((one.hash, other.hash), (one.layers, other.layers), (one.experts, other.experts))
    return any(known and said and known != said for known, said in pairs)


def _forget_model(state: State, event: Join) -> State:
    """With nobody left who holds a part of the model, the next who does may bring another. Clients hold none."""
    held = any(record.pool in LAUNCHED_POOLS for record in state.members.values())
    known = state.model.hash or state.model.layers
    if held or not known or event.pool not in LAUNCHED_POOLS:
        return state
    return replace(state, model=Model(), routed=None, seen=())


def _refusal(config: Config, state: State, event: Join) -> str:
    if event.pool not in NAMED_POOLS:
        return f"pool {event.pool[:_LONGEST]!r} is unknown; join one of {', '.join(NAMED_POOLS)}"
    if event.protocol != PROTOCOL:
        return (
            f"protocol {event.protocol or 'none'} found, {PROTOCOL} needed: this process and the router are of "
            f"versions that do not understand each other. Start both from the same release."
        )
    oversized = _oversized(state.model, event)
    if oversized:
        return oversized
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


def _oversized(known: Model, event: Join) -> str:
    """Why what a Join says is kept by nobody: bitmaps, the journal and every View would be as large as it says."""
    for what in ("address", "host", "zone", "model_hash", "numerics_class"):
        found = len(getattr(event, what))
        if found > _LONGEST:
            return f"{what} of {found} characters found, at most {_LONGEST} needed: give a shorter one"
    for what, found, most in (
        ("pid", event.pid, (1 << 63) - 1),
        ("layers", event.layers, _MOST_PAIRS),
        ("experts", event.experts, _MOST_PAIRS),
        ("capacity", event.capacity, _MOST_PAIRS),
        ("expert_bytes", event.expert_bytes, _MOST_EXPERT_BYTES),
    ):
        if not 0 <= found <= most:
            return f"{what} {found} found, 0 to {most} needed: check how this process was started"
    # Members may each know one half of the shape.
    layers, experts = known.layers or event.layers, known.experts or event.experts
    if layers * experts > _MOST_PAIRS:
        return (
            f"{layers} layers with {experts} experts found, at most {_MOST_PAIRS} experts in all needed: "
            f"check the model folder"
        )
    return ""


def _ack(state: State, event: Acked) -> State:
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
        state = lifecycle.forgive_failed_starts(state, record.pool)
    return state


def _load(state: State, event: Loaded, commands: list[Command]) -> State:
    record = state.members[event.name]
    if event.salt not in (0, state.salt):
        # Said to another term: much may have happened since.
        commands.append(Stale(name=event.name, epoch=event.epoch))
        return state
    unknown = lifecycle.held_beyond_journal(state, event)
    liveness = state.liveness[event.name]
    if event.epoch < liveness.reported or 0 < event.number < liveness.report:
        # Overtaken by a newer report of the same server.
        commands.append(Stale(name=event.name, epoch=event.epoch))
        return state
    if event.epoch > liveness.reported or not liveness.told:
        reported = max(liveness.reported, min(event.epoch, state.epoch))
        state = with_liveness(
            state, event.name, replace(liveness, reported=reported, told=True, unknown=unknown)
        )
    if event.number > liveness.report:
        state = with_liveness(state, event.name, replace(state.liveness[event.name], report=event.number))
    held = event.held & record.target
    # What it tells a term first it holds until a View of that term, for it follows no other any more.
    if event.epoch < record.dropped_epoch and (liveness.told or not event.salt):
        # The server may be unloading what it then held, so such a report can only take away.
        commands.append(Stale(name=event.name, epoch=event.epoch))
        held &= record.loaded
    if held != record.loaded:
        state = with_record(state, replace(record, loaded=held))
    return state if state.unheard or liveness.told else lifecycle.keep_held(state, event.name, unknown)


def _count(config: Config, state: State, event: Routed) -> State:
    pairs = state.model.layers * state.model.experts
    if event.rows.shape != (pairs,) or event.activated.shape != (pairs,):
        return state
    routed = event.rows + config.activation_rows * event.activated
    if state.routed is not None and state.routed.shape == routed.shape:
        routed += state.routed * 0.5 ** ((state.now_s - state.routed_s) / config.routed_half_life_s)
    routed.flags.writeable = False
    return replace(state, routed=routed, routed_s=state.now_s)


def _scale(config: Config, state: State, event: Scale, commands: list[Command]) -> State:
    if refusal := _size_refusal(config, event):
        commands.append(Refused(message=refusal))
        return state
    commands.append(Scaled(pool=event.pool, wanted=event.wanted))
    state = replace(state, drain_s={**state.drain_s, event.pool: event.drain_s})
    if state.wanted.get(event.pool) == event.wanted:
        return state
    return replace(state, wanted={**state.wanted, event.pool: event.wanted})


def _size_refusal(config: Config, event: Scale) -> str:
    if event.pool not in LAUNCHED_POOLS:
        return f"pool {event.pool!r} has no size of its own; scale one of {', '.join(LAUNCHED_POOLS)}"
    least, most = config.bounds(event.pool)
    if not least <= event.wanted <= most:
        return f"{event.wanted} members of pool {event.pool!r} asked for; give {least} to {most}"
    if not 0 < event.drain_s <= LONGEST_DRAIN_S:
        return f"drain_s is {event.drain_s}; give more than 0 and at most {LONGEST_DRAIN_S:.0f}"
    return ""


def _leave(config: Config, state: State, event: Left, commands: list[Command]) -> State:
    if event.drain:
        return lifecycle.begin_drain(state, event.name)
    return fence(config, state, event.name, "left", commands, ended=True)


def _exit(config: Config, state: State, event: Exited, commands: list[Command]) -> State:
    fenced_clients = tuple(g for g in state.fenced_clients if (g.host, g.pid) != (event.host, event.pid))
    if len(fenced_clients) < len(state.fenced_clients):
        state = replace(state, fenced_clients=fenced_clients)
    found = [r for r in state.members.values() if (r.host, r.pid) == (event.host, event.pid)]
    for record in found:
        state = fence(config, state, record.name, "its process ended", commands, ended=True)
        if not record.ready:
            state = lifecycle.note_failed_start(config, state, record.pool)
    known = any((gone.host, gone.pid) == (event.host, event.pid) for gone in state.gone)
    if event.pool and not known:
        # It never joined.
        state = lifecycle.fill_start(state, event.host, event.pool)
        state = lifecycle.note_failed_start(config, state, event.pool)
    return state
