"""Small changes of the state that several parts of the core make. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from router import bitmap
from router.events import Command, Fenced
from router.models import group, named, width
from router.state import Config, FencedClient, Liveness, MemberRecord, State
from router.view import (
    ASKING_POOLS,
    ATTENTION,
    DRAINING,
    EXPERT,
    JOINING,
    SERVING,
    SUSPECT,
    WARMING,
    GoneMember,
    Member,
    Model,
    View,
)

_REMEMBERED = 64
_Whole = TypeVar("_Whole")
_Value = TypeVar("_Value")


def replace(whole: _Whole, **changes: object) -> _Whole:
    """A copy with some fields changed, as dataclasses.replace makes it, at a fifth of the cost.

    It sets no field twice and runs no __init__; the core spent half its time there.
    """
    changed = object.__new__(type(whole))
    changed.__dict__.update(whole.__dict__, **changes)
    return changed


def with_record(state: State, record: MemberRecord) -> State:
    """The state with one member's record replaced."""
    return replace(state, members={**state.members, record.name: record})


def with_liveness(state: State, name: str, liveness: Liveness) -> State:
    """The state with one member's liveness replaced."""
    return replace(state, liveness={**state.liveness, name: liveness})


def fence(config: Config, state: State, name: str, reason: str, commands: list[Command], ended: bool = False) -> State:
    """The state without a member. Its name and incarnation never return.

    Args:
        ended: It is proved, or it said itself, that it sends nothing more. Else it may use the routes that it has for
            as long as its lease would have lasted.
    """
    record, liveness = state.members[name], state.liveness[name]
    commands.append(Fenced(name=name, incarnation=record.incarnation, reason=reason))
    gone = GoneMember(
        name=name,
        incarnation=record.incarnation,
        host=record.host,
        pid=record.pid,
        reason=reason,
        operation=record.operation,
        asked_unix_s=record.asked_unix_s,
    )
    until_s = liveness.renewed_s + config.lease_s
    fenced_clients = state.fenced_clients
    if record.pool in ASKING_POOLS and record.ready and not ended and until_s > state.now_s:
        fenced_clients += (FencedClient(host=record.host, pid=record.pid, acked=liveness.acked, until_s=until_s),)
    return replace(
        with_gone(state, gone),
        members=_without(state.members, name),
        liveness=_without(state.liveness, name),
        batches=_without(state.batches, name),
        stuck=_without(state.stuck, name),
        suspects=state.suspects - {name},
        silent=state.silent - {name},
        standing=state.standing - {name},
        fenced_clients=fenced_clients,
    )


def with_gone(state: State, gone: GoneMember) -> State:
    """The state that remembers one more who went. Whoever asks how a retirement ended may ask long after: many programs
    that come and go crowd out none."""
    former, latest = state.gone[: 1 - _REMEMBERED], state.gone[1 - _REMEMBERED :]
    retired = tuple(one for one in former if one.operation)[-_REMEMBERED:]
    return replace(state, gone=(*retired, *latest, gone))


def _without(known: Mapping[str, _Value], name: str) -> Mapping[str, _Value]:
    return {n: value for n, value in known.items() if n != name} if name in known else known


def pool(state: State, name: str) -> list[MemberRecord]:
    """Records of one pool, in the order of joining."""
    return [record for record in state.members.values() if record.pool == name]


def doubts_itself(config: Config, state: State) -> bool:
    """True while the router must not yet take the silence of so many for theirs."""
    if state.doubting_s is None:
        return False
    return state.now_s - state.doubting_s < config.doubt_leases * config.lease_s


def acked_by_all(state: State) -> int:
    """The newest epoch that nobody who asks expert servers is behind, nor one that was fenced and may still run.

    One that is not ready has no streams, so it asks nobody for anything.
    """
    asking = [(r, state.liveness[r.name]) for r in state.members.values() if r.pool in ASKING_POOLS]
    # One that an older journal has as not ready may have become so since.
    acked = [liveness.acked for record, liveness in asking if record.ready or liveness.journaled]
    acked += [fenced.acked for fenced in state.fenced_clients]
    return min(acked, default=state.epoch + 1)


def phase(state: State, record: MemberRecord) -> str:
    """The word for a member's state."""
    if record.draining:
        return DRAINING
    if not record.ready:
        # Whatever is thought of it: nobody may give it anything yet.
        return WARMING if record.target or record.pool != EXPERT else JOINING
    return SUSPECT if record.name in state.suspects else SERVING


def view_of(config: Config, state: State, members: Iterable[MemberRecord] | None = None) -> View:
    """What everyone may see of the state. Args: members: those that it is to show; None: all."""
    models = named(config, state)
    first = models[0] if models else Model()
    return View(
        term=state.term,
        epoch=state.epoch,
        replicas_wanted=config.replicas,
        layers=first.layers,
        experts=first.experts,
        model_hash=first.hash,
        salt=state.salt,
        members=tuple(shown(state, r) for r in (state.members.values() if members is None else members)),
        models=models,
    )


def shown(state: State, record: MemberRecord) -> Member:
    """What everyone may see of a member."""
    count = width(state)
    return Member(
        name=record.name,
        pool=record.pool,
        state=phase(state, record),
        incarnation=record.incarnation,
        address=record.address,
        pid=record.pid,
        host=record.host,
        core=record.core,
        numerics_class=record.numerics_class,
        target=bitmap.to_bytes(record.target, 1, count),
        serving=bitmap.to_bytes(record.serving, 1, count),
        load=state.liveness[record.name].load,
        model=record.model,
    )


def by_class(records: Iterable[MemberRecord]) -> list[list[MemberRecord]]:
    """Members of each class, as they joined."""
    found: dict[str, list[MemberRecord]] = {}
    for record in records:
        found.setdefault(record.numerics_class, []).append(record)
    return list(found.values())


def peers(state: State, record: MemberRecord) -> list[MemberRecord]:
    """Expert servers that may hold replicas for this one's requests: those of its class that stay, it aside.

    Where there is none, those of all classes: nothing else can take over from the last of a class.
    """
    others = [r for r in pool(state, EXPERT) if r.name != record.name]
    kin = [r for r in others if r.numerics_class == record.numerics_class]
    lost = state.silent | state.standing
    staying = [r for r in kin if not r.draining and r.name not in lost]
    return kin if staying else others


def is_last_worker(state: State, name: str) -> bool:
    """True if it is an attention worker that serves, and no other of its model that does is heard of and at work."""
    if not state.members[name].ready or state.members[name].pool != ATTENTION:
        return False
    lost = state.silent | state.standing
    model = state.members[name].model
    others = (r for r in pool(state, ATTENTION) if r.name != name and r.model == model)
    return not any(record.ready and not record.draining and record.name not in lost for record in others)


def is_needed(state: State, record: MemberRecord) -> bool:
    """True if a member that goes must not yet: its experts, or the streams of one that is retired, have no other."""
    streams = record.operation and is_last_worker(state, record.name)
    streams = streams and state.wanted.get(group(state, record.pool, record.model))
    return bool(streams) or is_last_replica(state, record.name)


def is_last_replica(state: State, name: str) -> bool:
    """True if none of its peers that is heard of serves some expert that this member serves."""
    lost = state.silent | state.standing
    others = [r for r in peers(state, state.members[name]) if r.name not in lost]
    elsewhere = bitmap.union(record.serving for record in others)
    return bool(state.members[name].serving & ~elsewhere)
