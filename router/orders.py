"""Copies on their way: how many at once, which first, and what becomes of one that does not arrive. Pure."""

from __future__ import annotations

from router.bitmap import lowest
from router.classes import by_class
from router.records import evolve, pool, with_record
from router.state import Batch, Config, Failures, MemberRecord, State
from router.view import EXPERT

# A server that was slow for a while may have recovered: it is tried again within four times move_s.
_DOUBLINGS = 2


def allowed(config: Config, state: State, records: list[MemberRecord]) -> dict[str, int]:
    """The copies that each server may be told to load now.

    An expert that nobody of the server's class serves waits for nothing. The others share what is left of the budget:
    first those with fewer copies than wanted, and while any of these is left, none that only moves. One that looks
    dead gets nothing: it would hold the budget of those that could load.
    """
    lost = state.silent | state.standing
    heard = [r for r in records if r.name not in lost]
    wanted = {r.name: lowest(r.share & ~r.target, room(r)) for r in heard if r.share & ~r.target}
    if not wanted:
        return {}
    served: dict[str, int] = {}
    short: dict[str, int] = {}
    for members in by_class(records):
        held = 0
        for record in members:
            held |= record.serving
        targets = [record.target for record in members if record.name not in state.suspects]
        thin = held & ~in_at_least(config.replicas, targets)
        served |= {record.name: held for record in members}
        short |= {record.name: thin for record in members}
    on_the_way = sum((record.target & ~record.loaded).bit_count() for record in records)
    allowed = {name: bits & ~served[name] for name, bits in wanted.items()}
    free = budget(config, state) - on_the_way
    queue = {name: bits & short[name] for name, bits in wanted.items() if bits & short[name]}
    queue = queue or {name: bits & served[name] for name, bits in wanted.items() if bits & served[name]}
    left = len(queue)
    for name, bits in queue.items():
        chosen = lowest(bits, max(0, -(-free // left)))
        allowed[name] |= chosen
        free -= chosen.bit_count()
        left -= 1
    return allowed


def budget(config: Config, state: State) -> int:
    """Copies that may be on their way at once: at least one, or nothing would ever move."""
    if not state.model.expert_bytes:
        return config.copies_in_flight
    return max(1, min(config.copies_in_flight, config.bytes_in_flight // state.model.expert_bytes))


def room(record: MemberRecord) -> int:
    """How many of the copies that a server lacks it could take now."""
    if not record.capacity:
        return record.share.bit_count()
    return max(
        0, record.capacity - (record.target & (record.share | record.loaded | record.retiring)).bit_count()
    )


def in_at_least(count: int, held: list[int]) -> int:
    """The experts that are in at least so many of these bitmaps."""
    at_least = [-1] + [0] * count
    for bits in held:
        for n in range(count, 0, -1):
            at_least[n] |= at_least[n - 1] & bits
    return at_least[-1]


def watch(state: State) -> State:
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
        state = evolve(state, stuck={n: f for n, f in state.stuck.items() if n not in arrived})
    return evolve(state, batches=watched)


def give_up(config: Config, state: State) -> State:
    """Take back the copies that have not arrived in time; their server gets nothing new for a while."""
    for name, batches in state.batches.items():
        late = 0
        for batch in batches:
            if state.now_s - batch.since_s >= config.move_s:
                late |= batch.copies
        if not late:
            continue
        record = state.members[name]
        failures = state.stuck.get(name, Failures())
        if not is_shunned(state, name):
            # What was ordered before, and comes late one after the other, is the same failure.
            wait_s = config.move_s * 2.0 ** min(failures.count, _DOUBLINGS)
            failures = Failures(count=failures.count + 1, next_s=state.now_s + wait_s)
        state = with_record(
            state,
            evolve(
                record,
                share=record.share & ~late,
                target=record.target & ~late,
                dropped_epoch=state.epoch + 1,
            ),
        )
        state = evolve(
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
