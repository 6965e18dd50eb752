"""How members get from what they hold to what the placement wants: make before break. Pure.

For each (layer, expert), the servers whose share holds it must load and serve it before any other server
stops:

    share -> target (load it) -> loaded (verified) -> serving (published)
    not in share, made elsewhere -> retiring (published without it) -> all attention members acked -> out of
    target

All experts of all layers and models move at once: each line below is one set operation on a bitmap of the whole pool.
Each numerics class is placed by itself, and moves within itself; and in it each model by itself, on the servers that
opened it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router import bitmap, lifecycle
from router.bitmap import by_layer, in_at_least, lowest, union
from router.events import Command
from router.models import awake, bits_of, served
from router.placement import place
from router.records import acked_by_all, by_class, peers, pool, replace, with_record
from router.state import Batch, Config, Failures, MemberRecord, State
from router.view import EXPERT, Model


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a placement was made for: servers, those that get nothing, and the models.

    servers: name, capacity, zone, numerics class, and mask of the models that it opened. clean: nobody was in doubt
    when it was made.
    """

    servers: tuple[tuple[str, int, str, str, int], ...]
    doubtful: frozenset[str]
    models: tuple[Model, ...]
    replicas: int
    redundant: int
    clean: bool = field(default=False, compare=False)


def follow(config: Config, state: State, commands: list[Command]) -> State:
    """Place anew if the servers changed, and let every move go as far as it may."""
    before = state
    state = _place(config, state)
    # Of a model that sleeps nobody holds what it is given, nor of one that went what is left.
    unwanted = ~bits_of(awake(state))
    shares = {record.name: record.share for record in pool(state, EXPERT)}
    records = [replace(r, share=r.share & ~unwanted) if r.share & unwanted else r for r in pool(state, EXPERT)]
    classes = {members[0].numerics_class: members for members in by_class(records)}
    made = {name: _made(state, members) for name, members in classes.items()}
    for name, members in classes.items():
        if all(record.draining for record in members):
            made[name] = _made_elsewhere(state, name, made)
    made = {name: held | unwanted for name, held in made.items()}
    full = {
        name: in_at_least(config.replicas, [record.share for record in members]) | unwanted
        for name, members in classes.items()
    }
    acked = acked_by_all(state)
    ordered = allowed_copies(config, state, records)
    for record in records:
        own = record.numerics_class
        yielded = made[own] | _yielded(config, state, record)
        advanced = _advance(state, record, yielded, full[own], acked, ordered.get(record.name, 0))
        if advanced is not record:
            state = with_record(state, replace(advanced, share=shares[record.name]))
        if advanced.ready and not record.ready:
            state = lifecycle.forgive_failed_starts(state, EXPERT)
        if advanced.dropped_epoch > record.dropped_epoch:
            state = replace(state, unloaded_epoch=advanced.dropped_epoch)
        if advanced.draining and not advanced.target and state.liveness[record.name].told:
            state = lifecycle.end_member(config, state, record.name, "drained", commands)
    state = watch_copies(state)
    waits = state.forming_s is not None or state.opening_s
    settled = not waits and state.members is before.members and state.plan is before.plan
    return state if state.settled == settled else replace(state, settled=settled)


def _place(config: Config, state: State) -> State:
    placeable = [record for record in pool(state, EXPERT) if not record.draining]
    state = _form(config, state, placeable)
    if state.forming_s is not None:
        return state
    state = _open(config, state, placeable)
    plan = Plan(
        servers=tuple((r.name, r.capacity, r.zone, r.numerics_class, r.opened) for r in placeable),
        doubtful=frozenset(
            r.name for r in placeable if r.name in state.suspects or r.name in state.silent or is_shunned(state, r.name)
        ),
        models=tuple(model for model in served(state) if model.number not in state.opening_s),
        replicas=config.replicas,
        redundant=config.redundant,
    )
    if plan == state.plan:
        return state
    if _stands(state, plan, placeable):
        return replace(state, plan=replace(plan, clean=True))
    shares = dict.fromkeys(state.members, 0)
    for model, members in _rows(plan, placeable):
        placed = place(
            layers=model.layers,
            experts=model.experts,
            replicas=plan.replicas,
            capacity={r.name: r.capacity for r in members},
            current={r.name: model.take(r.share) for r in members},
            doubtful=plan.doubtful,
            zones={r.name: r.zone for r in members},
            redundant=plan.redundant,
        )
        for name, bits in placed.items():
            shares[name] |= model.put(bits)
    members = {
        name: record if record.share == shares[name] else replace(record, share=shares[name])
        for name, record in state.members.items()
    }
    return replace(state, members=members, plan=replace(plan, clean=not plan.doubtful))


def _rows(plan: Plan, placeable: list[MemberRecord]) -> list[tuple[Model, list[MemberRecord]]]:
    """The placements that make the whole: each model on the servers of one class that opened it."""
    found = [
        (model, [record for record in members if record.opened >> model.number & 1])
        for members in by_class(placeable)
        for model in plan.models
    ]
    return [(model, members) for model, members in found if members]


def _open(config: Config, state: State, placeable: list[MemberRecord]) -> State:
    """The first placement of a model waits for the servers that open it too, but not for long."""
    placed = union(record.share for record in placeable)
    longest_s = config.form_s + config.form_each_s * len(placeable)
    waiting: dict[int, float] = {}
    for model in served(state):
        opened = sum(record.opened >> model.number & 1 for record in placeable)
        since_s = state.opening_s.get(model.number, state.now_s)
        # One that nobody has opened is placed on nobody, whatever is waited for.
        begun = opened and not model.take(placed)
        if begun and opened < len(placeable) and state.now_s - since_s < longest_s:
            waiting[model.number] = since_s
    return state if waiting == state.opening_s else replace(state, opening_s=waiting)


def _stands(state: State, plan: Plan, placeable: list[MemberRecord]) -> bool:
    """True if what is placed may stay: only doubts changed and every expert is held beyond them, or a new term knows
    no plan and finds every expert in place, as often and in as many zones as there are to be."""
    was = state.plan
    if was is None:
        unknown = plan.doubtful or state.stuck or not placeable
        return not unknown and all(_is_placed(plan, *row) for row in _rows(plan, placeable))
    if not isinstance(was, Plan) or not was.clean or replace(was, doubtful=plan.doubtful) != plan:
        return False
    for model, members in _rows(plan, placeable):
        held = union(record.share for record in members if record.name not in plan.doubtful)
        if model.take(held) != bitmap.everything(model.layers, model.experts):
            return False
    return bool(placeable)


def _is_placed(plan: Plan, model: Model, members: list[MemberRecord]) -> bool:
    everything = bitmap.everything(model.layers, model.experts)
    shares = [model.take(record.share) for record in members]
    zones = {record.zone: 0 for record in members}
    for record, share in zip(members, shares, strict=True):
        zones[record.zone] |= share
    copies = min(plan.replicas, len(shares))
    # Copies for balance are where load is, not where room is: without them, no layer is nearer to any server.
    counts = zip(*(by_layer(share, model.layers, model.experts) for share in shares), strict=True)
    even = plan.redundant or all(max(layer) - min(layer) <= 1 for layer in counts)
    apart = in_at_least(min(2, copies, len(zones)), [*zones.values()])
    beyond = sum(share.bit_count() for share in shares) - copies * everything.bit_count()
    return (
        bool(everything)
        and all(shares)
        and bool(even)
        and in_at_least(copies, shares) == apart == everything
        and beyond <= plan.redundant * model.layers
    )


def _form(config: Config, state: State, placeable: list[MemberRecord]) -> State:
    """The first placement waits for the wanted servers, but not for long."""
    since_s = state.now_s if state.forming_s is None else state.forming_s
    placed = any(record.share for record in placeable)
    waits = placeable and not placed and len(placeable) < state.wanted[EXPERT]
    longest_s = config.form_s + config.form_each_s * state.wanted[EXPERT]
    if waits and state.now_s - since_s < longest_s:
        return state if state.forming_s == since_s else replace(state, forming_s=since_s)
    return state if state.forming_s is None else replace(state, forming_s=None)


def _made(state: State, records: list[MemberRecord]) -> int:
    """The experts that every server of the placement holds, one of which is beyond doubt."""
    covered = unmade = 0
    for record in records:
        held = record.share & record.target & record.loaded
        unmade |= record.share & ~held
        if record.name not in state.suspects:
            covered |= held
    return covered & ~unmade


def _made_elsewhere(state: State, own: str, made: Mapping[str, int]) -> int:
    """What a class of which every server drains may let go: what others have made; all, where nobody is to serve."""
    return union(held for name, held in made.items() if name != own) if state.wanted[EXPERT] else -1


def _yielded(config: Config, state: State, record: MemberRecord) -> int:
    """Experts that a server without room may let go before they are made elsewhere, so that full servers can exchange.

    They stay with as many others as there are to be replicas; where nothing else moves any more, with one fewer.
    """
    wanted, unwanted = record.share & ~record.target, record.target & ~record.share
    if not wanted or not unwanted or room(record):
        return 0
    servers = peers(state, record)
    others = [r.serving for r in servers if r.name not in state.suspects]
    thinner = unwanted & in_at_least(max(1, config.replicas - 1), others)
    free = unwanted & in_at_least(config.replicas, others)
    # What it lets go already it goes on letting go, or it would serve it again and nobody got anywhere.
    begun = record.retiring & thinner
    if not free | begun and not any(r.retiring or r.target & ~r.loaded for r in servers):
        free = thinner
    if begun:
        return begun
    return lowest(free, wanted.bit_count())


def _advance(state: State, record: MemberRecord, made: int, full: int, acked: int, ordered: int) -> MemberRecord:
    held = record.loaded & record.target
    spare = record.target & ~record.share & made
    crowded = bool(record.capacity) and (record.target | record.share).bit_count() > record.capacity
    if not record.draining and not crowded:
        # A copy too many is better than one too few, while there is room for it.
        spare &= full | ~held
    serving = held & ~spare
    # Whatever no longer serves, moved or not reported any more, somebody may still ask for.
    withdrawn = record.serving & record.target & ~serving
    retiring = (record.retiring & record.target & ~serving) | withdrawn
    next_epoch = state.epoch + 1
    retiring_epoch = next_epoch if withdrawn else record.retiring_epoch
    if retiring_epoch <= acked:
        retiring = 0
    dropped = spare & ~retiring
    target = record.target & ~dropped
    wanted = record.share & ~target & ordered
    if record.capacity:
        room = record.capacity - target.bit_count()
        if room < wanted.bit_count():
            # What somebody may still ask for stays, even if the server says that it does not hold it.
            unwanted = target & ~(record.share | held | retiring)
            dropped |= unwanted
            target &= ~unwanted
            wanted = lowest(wanted, record.capacity - target.bit_count())
    target |= wanted
    loaded, serving, retiring = held & ~dropped, serving & ~dropped, retiring & ~dropped
    ready = record.ready or bool(serving) or (state.forming_s is None and not record.share)
    was = (record.target, record.loaded, record.serving, record.retiring, record.ready)
    if (target, loaded, serving, retiring, ready) == was and not dropped:
        return record
    return replace(
        record,
        target=target,
        loaded=loaded,
        serving=serving,
        retiring=retiring,
        retiring_epoch=retiring_epoch,
        dropped_epoch=next_epoch if dropped else record.dropped_epoch,
        ready=ready,
    )


# A server that was slow for a while may have recovered: it is tried again within four times move_s.
_DOUBLINGS = 2


def allowed_copies(config: Config, state: State, records: list[MemberRecord]) -> dict[str, int]:
    """The copies that each server may be told to load now.

    An expert that nobody of the server's class serves waits for nothing. The others share what is left of their model's
    budget: first those with fewer copies than wanted, and while any of these is left, none that only moves. One that
    looks dead gets nothing: it would hold the budget of those that could load.
    """
    lost = state.silent | state.standing
    heard = [r for r in records if r.name not in lost]
    wanted = {r.name: lowest(r.share & ~r.target, room(r)) for r in heard if r.share & ~r.target}
    if not wanted:
        return {}
    known: dict[str, int] = {}
    short: dict[str, int] = {}
    for members in by_class(records):
        held = union(record.serving for record in members)
        targets = [record.target for record in members if record.name not in state.suspects]
        thin = held & ~in_at_least(config.replicas, targets)
        known |= {record.name: held for record in members}
        short |= {record.name: thin for record in members}
    allowed = {name: bits & ~known[name] for name, bits in wanted.items()}
    for model in served(state):
        # Each model has a budget of its own: one that comes whole does not hold up the repair of another.
        own = bits_of([model])
        on_the_way = sum((record.target & ~record.loaded & own).bit_count() for record in records)
        free = copies_budget(config, model) - on_the_way
        queue = {name: bits & short[name] & own for name, bits in wanted.items() if bits & short[name] & own}
        queue = queue or {n: bits & known[n] & own for n, bits in wanted.items() if bits & known[n] & own}
        left = len(queue)
        for name, bits in queue.items():
            chosen = lowest(bits, max(0, -(-free // left)))
            allowed[name] |= chosen
            free -= chosen.bit_count()
            left -= 1
    return allowed


def copies_budget(config: Config, model: Model) -> int:
    """Copies of a model that may be on their way at once: at least one, or nothing would ever move."""
    if not model.expert_bytes:
        return config.copies_in_flight
    return max(1, min(config.copies_in_flight, config.bytes_in_flight // model.expert_bytes))


def room(record: MemberRecord) -> int:
    """How many of the copies that a server lacks it could take now."""
    if not record.capacity:
        return record.share.bit_count()
    return max(0, record.capacity - (record.target & (record.share | record.loaded | record.retiring)).bit_count())


def watch_copies(state: State) -> State:
    """Note what was ordered and what arrived."""
    batches = dict(state.batches)
    arrived: set[str] = set()
    for record in pool(state, EXPERT):
        # What somebody may still ask for is not taken back, so neither is it waited for.
        missing = record.target & ~(record.loaded | record.serving | record.retiring)
        known = state.batches.get(record.name, ())
        if not missing and not known:
            continue
        kept: list[Batch] = []
        for batch in known:
            copies = batch.copies & missing
            if copies == batch.copies:
                kept.append(batch)
            elif copies:
                kept.append(Batch(copies=copies, since_s=state.now_s))
            missing &= ~copies
        if missing:
            kept.append(Batch(copies=missing, since_s=state.now_s))
        batches[record.name] = tuple(kept)
        if not kept and any(batch.copies & record.loaded for batch in known):
            arrived.add(record.name)
    watched = {name: kept for name, kept in batches.items() if kept}
    if watched == state.batches:
        return state
    if arrived & state.stuck.keys():
        state = replace(state, stuck={n: f for n, f in state.stuck.items() if n not in arrived})
    return replace(state, batches=watched)


def take_back_late_copies(config: Config, state: State) -> State:
    """Take back the copies that have not arrived in time; their server gets nothing new for a while."""
    for name, batches in state.batches.items():
        late = union(b.copies for b in batches if state.now_s - b.since_s >= config.move_s)
        if not late:
            continue
        record = state.members[name]
        failures = state.stuck.get(name, Failures())
        if not is_shunned(state, name):
            # What was ordered before, and comes late one after the other, is the same failure.
            wait_s = config.move_s * 2.0 ** min(failures.count, _DOUBLINGS)
            failures = Failures(count=failures.count + 1, next_s=state.now_s + wait_s)
        left = replace(record, share=record.share & ~late, target=record.target & ~late, dropped_epoch=state.epoch + 1)
        state = with_record(state, left)
        state = replace(
            state,
            stuck={**state.stuck, name: failures},
            taken_back=state.taken_back + late.bit_count(),
            plan=None,
            unloaded_epoch=state.epoch + 1,
            # What is ordered of it again at once, for nobody serves it, waits from then on.
            batches={**state.batches, name: tuple(batch for batch in batches if not batch.copies & late)},
        )
    return state


def is_shunned(state: State, name: str) -> bool:
    """True while a server gets nothing new, for it did not load what was ordered."""
    failures = state.stuck.get(name)
    return failures is not None and state.now_s < failures.next_s
