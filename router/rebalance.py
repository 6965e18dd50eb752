"""When replicas follow the load: one layer at a tick, only at rest, and only as few copies as are worth it. Pure."""

from __future__ import annotations

import numpy as np

from router.balance import Rules, Seen, Server, improve, observe
from router.classes import by_class
from router.records import evolve, pool
from router.state import Config, MemberRecord, State
from router.view import EXPERT


def rebalance(config: Config, state: State) -> State:
    """Look at the next layer of a round; every balance_s a round begins, with the load seen by then.

    Nothing is changed while anything moves, drains or is in doubt. A round's layers take a tick each: a search
    takes some hundredths of a second, during which the router hears nobody.
    """
    layers = state.model.layers
    if not config.redundant or state.routed is None or not layers:
        return state
    if len(state.seen) != layers or state.balanced_layer >= layers:
        if state.now_s - state.balanced_s < config.balance_s:
            return state
        return _observe(state)
    if not _is_at_rest(state):
        return state
    layer = state.balanced_layer
    for members in by_class(pool(state, EXPERT)):
        state = _improve(config, state, layer, members)
    return evolve(state, balanced_layer=layer + 1)


def _observe(state: State) -> State:
    layers, experts = state.model.layers, state.model.experts
    if state.routed is None or state.routed.shape != (layers * experts,):
        return state
    rows = state.routed.reshape(layers, experts)
    known: tuple[Seen | None, ...] = state.seen if len(state.seen) == layers else (None,) * layers
    seen = tuple(observe(was, now) for was, now in zip(known, rows, strict=True))
    return evolve(state, seen=seen, balanced_layer=0, balanced_s=state.now_s)


def _is_at_rest(state: State) -> bool:
    if state.suspects or state.batches or state.starts or not state.settled:
        return False
    return not any(
        record.draining or record.retiring or not record.ready for record in state.members.values()
    )


def _improve(config: Config, state: State, layer: int, records: list[MemberRecord]) -> State:
    """One class, of which each is taken to get its part of every expert's load."""
    experts = state.model.experts
    shift, mask = layer * experts, (1 << experts) - 1
    shares = [record.share >> shift & mask for record in records]
    holders = [sum((share >> expert & 1) << i for i, share in enumerate(shares)) for expert in range(experts)]
    if len(records) < 2 or not all(holders):
        return state
    # Redundant experts are spread as evenly as the others; what a layer has beyond that stays where it is.
    replicas = min(config.replicas, len(records))
    places = experts * replicas + config.redundant
    rooms = [places // len(records) + (i < places % len(records)) for i in range(len(records))]
    speeds = _speeds(state, records)
    servers = [
        Server(
            room=max(share.bit_count(), min(room, _fitting(state, record, layer))),
            speed=speed,
            zone=record.zone,
        )
        for record, share, room, speed in zip(records, shares, rooms, speeds, strict=True)
    ]
    seen = state.seen[layer]
    # Who was not asked for yet may be at any time; and a search divides by what it finds.
    load = np.maximum(seen.load, 0.01 * seen.load.mean())
    rules = Rules(min_replicas=replicas, budget=config.balance_copies, least_gain=config.balance_gain)
    change = improve(load=load, spread=seen.drift, holders=holders, servers=servers, rules=rules)
    if not change.moves:
        return state
    moved = dict(state.members)
    for move in change.moves:
        record = moved[records[move.server].name]
        bit = 1 << (shift + move.expert)
        moved[record.name] = evolve(record, share=record.share | bit if move.add else record.share & ~bit)
    return evolve(state, members=moved)


def _fitting(state: State, record: MemberRecord, layer: int) -> int:
    """Experts of one layer that fit on a server, if every layer gets the same."""
    layers = state.model.layers
    if not record.capacity:
        return state.model.experts
    return record.capacity // layers + (layer < record.capacity % layers)


def _speeds(state: State, records: list[MemberRecord]) -> list[float]:
    """Rows per busy second, as servers report it; who does not is taken for one like the others."""
    found = [state.pulses[record.name].load.get("speed", 0.0) for record in records]
    known = [speed for speed in found if speed > 0]
    usual = sum(known) / len(known) if known else 1.0
    return [speed if speed > 0 else usual for speed in found]
