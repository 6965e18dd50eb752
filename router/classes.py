"""Numerics classes: members of one compute the same bits. A pool may hold several, each with replicas of its own. Pure.

A name is words between dashes, such as cpu-bf16-fma-1 or cuda-sm90-bf16-triton3.6-1: first what carries rows, and
among the others the format of numbers. Members of one carrier and one format can talk with each other; those of
another format serve another model. A request stays in the class in which it began, so each class has a placement:
what is held by another class is no replica to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from router import bitmap
from router.records import pool
from router.state import MemberRecord, State
from router.view import EXPERT, View

_FORMATS = frozenset({"f32", "bf16", "int8"})


def carrier_of(numerics_class: str) -> str:
    """What carries rows: "cpu", "cuda", "interpreter"."""
    return numerics_class.partition("-")[0]


def format_of(numerics_class: str) -> str:
    """The format of numbers, "" where the name tells none."""
    return next((word for word in numerics_class.split("-") if word in _FORMATS), "")


def can_mix(one: str, other: str) -> bool:
    """Whether members of these classes may serve one model; an empty name is not checked."""
    return (
        not one or not other or one == other or (bool(format_of(one)) and format_of(one) == format_of(other))
    )


def can_talk(one: str, other: str) -> bool:
    """Whether an attention worker of the one class can ask an expert server of the other."""
    return can_mix(one, other) and (not one or not other or carrier_of(one) == carrier_of(other))


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


def is_last_replica(state: State, name: str) -> bool:
    """True if none of its peers that is heard of serves some expert that this member serves."""
    lost = state.silent | state.standing
    others = [r for r in peers(state, state.members[name]) if r.name not in lost]
    elsewhere = bitmap.union(record.serving for record in others)
    return bool(state.members[name].serving & ~elsewhere)


def covering(view: View) -> frozenset[str]:
    """Classes whose expert servers serve every expert of the model."""
    everything = bitmap.everything(view.layers, view.experts)
    served: dict[str, int] = {}
    for member in view.pool(EXPERT):
        held = bitmap.from_bytes(member.serving)
        served[member.numerics_class] = served.get(member.numerics_class, 0) | held
    return frozenset(name for name, held in served.items() if held == everything)


def class_for(view: View, own: str) -> str | None:
    """The class of expert servers that a worker of class `own` is to ask: its own, once there is a server of it.

    Else one that it can talk with and that covers the model; None while there is none.
    """
    if any(member.numerics_class == own for member in view.pool(EXPERT)):
        return own
    return min((name for name in covering(view) if can_talk(own, name)), default=None)


def narrowed(view: View, numerics_class: str | None) -> View:
    """The View without the expert servers of other classes."""
    members = tuple(m for m in view.members if m.pool != EXPERT or m.numerics_class == numerics_class)
    return view if len(members) == len(view.members) else replace(view, members=members)
