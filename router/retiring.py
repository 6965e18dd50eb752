"""How one named member goes because somebody wants it to: to take its machine away, or to start it anew. Pure.

Its pool's wanted size stays. Where a launcher is attached it is ordered another process, and the named member drains
once that serves; to have it go without, make the pool smaller by one. Where nobody starts processes it drains at once.
In both cases an expert server holds what only it serves until others do, and the last attention worker waits for
another, however long that takes. A gateway drains by itself, once another listens in its place; a client at once, and
then joins anew. The router has nothing that must be had elsewhere first: its journal is on the disk, or in etcd, where
another leads next.

Whoever asks gives the operation an id. The member's record holds it, and so does what is remembered of who has gone: no
restart forgets it, and asking again changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from router import bitmap
from router.events import Command, Join, Refused, Retire, UnknownMember
from router.lifecycle import SALT_MASK, begin_drain, held_up
from router.models import group, members_of
from router.records import is_last_worker, peers, pool, replace, with_gone, with_record
from router.state import COUNT_BITS, LAUNCHED_POOLS, MemberRecord, State
from router.view import DRAINING, EXPERT, GATEWAY, GoneMember, Retirement

OPERATION = "an id of 1 to 128 printable characters"
# Whatever else is said of a gateway that has gone, it may have streams still.
_ENDED = ("left", "its process ended")


def is_operation(said: object) -> bool:
    """Whether it may be the id of an operation."""
    return isinstance(said, str) and 0 < len(said) <= 128 and said.isprintable()


def retire(state: State, event: Retire, commands: list[Command]) -> State:
    """Have a member go. Idempotent by operation."""
    record = state.members.get(event.name)
    named = [one.name for one in _known(state) if one.operation == event.operation]
    if not is_operation(event.operation):
        commands.append(Refused(message=f"operation {event.operation[:64]!r} found, {OPERATION} needed"))
    elif event.name in named:
        pass
    elif named:
        refusal = f"operation {event.operation} retires {named[0]}; give {event.name} one of its own"
        commands.append(Refused(message=refusal))
    elif event.router_pid:
        return _end_router(state, event)
    elif record is None:
        commands.append(UnknownMember(name=event.name, incarnation=0))
    elif record.operation:
        refusal = f"operation {record.operation} retires {event.name} already; follow that one"
        commands.append(Refused(message=refusal))
    else:
        state = state if record.pool in LAUNCHED_POOLS else begin_drain(state, event.name)
        retired = {"operation": event.operation, "asked_unix_s": event.unix_s, "surplus": False}
        return with_record(state, replace(state.members[event.name], **retired))
    return state


def _end_router(state: State, event: Retire) -> State:
    joined = state.joined + 1
    incarnation = (state.salt & SALT_MASK) << COUNT_BITS | joined
    asked: dict[str, Any] = {"operation": event.operation, "asked_unix_s": event.unix_s}
    gone = GoneMember(name=event.name, incarnation=incarnation, pid=event.router_pid, reason="retired", **asked)
    return replace(with_gone(state, gone), joined=joined)


def before(state: State, event: Join) -> dict[str, object]:
    """Of the record of a gateway that joins: what it was before, if it was being retired, fell silent for a lease, and
    still has the streams of its clients."""
    former = (gone for gone in reversed(state.gone) if (gone.host, gone.pid) == (event.host, event.pid))
    gone = next(former, None)
    # In containers every pid is 1, and the numbers of their namespaces come again: it may have been another's.
    if gone is None or not (event.pool == GATEWAY and gone.name.startswith(GATEWAY)):
        return {}
    if not gone.operation or gone.reason in _ENDED:
        return {}
    return {"draining": True, "operation": gone.operation, "asked_unix_s": gone.asked_unix_s}


def begin(state: State) -> State:
    """Let those drain whom nothing keeps any more."""
    for record in state.members.values():
        if record.operation and not record.draining and not _awaited(state, record):
            state = begin_drain(state, record.name)
    return state


def _awaited(state: State, record: MemberRecord) -> str:
    """What a member that is retired waits for, in words; empty: nothing keeps it from draining."""
    if record.draining and record.pool == EXPERT:
        return "verified copies of its experts elsewhere, and the last calls"
    if record.draining and record.pool == GATEWAY and all(other.draining for other in pool(state, GATEWAY)):
        return "another gateway that serves"
    own = group(state, record.pool, record.model)
    if is_last_worker(state, record.name) and state.wanted.get(own):
        return "another attention worker that serves"
    if record.draining:
        return "the end of what runs on it"
    if len(members_of(state, own)) > state.wanted.get(own, 0):
        return held_up(state, own)
    return "a process that takes its place" if state.launchers else ""


def _known(state: State) -> Iterator[MemberRecord | GoneMember]:
    """Members, then those who went, the latest first."""
    yield from state.members.values()
    yield from reversed(state.gone)


def retirement(state: State, name: str) -> Retirement | None:
    """How far the retirement of a member has come, under whatever name it is there now; None: nobody retires it."""
    operation = next((one.operation for one in _known(state) if one.operation and one.name == name), None)
    return next((_told(state, one) for one in _known(state) if one.operation == operation), None)


def retirements(state: State) -> tuple[Retirement, ...]:
    """Those that have not ended."""
    return tuple(_told(state, record) for record in state.members.values() if record.operation)


def _told(state: State, one: MemberRecord | GoneMember) -> Retirement:
    about: dict[str, Any] = {name: getattr(one, name) for name in ("name", "operation", "asked_unix_s")}
    if isinstance(one, GoneMember):
        if one.name.startswith(GATEWAY) and one.reason not in _ENDED:
            return Retirement(**about, state="gone", waits_for=f"word of its process, which was {one.reason}")
        return Retirement(**about, state="gone", safe_to_terminate=True)
    elsewhere = bitmap.union(other.serving for other in peers(state, one))
    load = state.liveness[one.name].load
    return Retirement(
        **about,
        state=DRAINING if one.draining else "waiting",
        waits_for=_awaited(state, one),
        only_here=(one.serving & ~elsewhere).bit_count(),
        running=int(load.get("running", 0) + load.get("waiting", 0)),
    )
