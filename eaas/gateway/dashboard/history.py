"""What has happened, told from the Views that the router published one after another. Pure.

`follow` compares each View with the one before; what a View does not say (why a member went, sizes wanted, whether
the router answers) comes from `learn`. Everything kept is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from eaas.gateway.dashboard.board import (
    BAD,
    GAINED,
    GIVEN_UP,
    GOOD,
    INFO,
    TAKEN_OVER,
    WARN,
    Happening,
    listed,
    many,
    seconds,
)
from eaas.gateway.status import RouterStatus, copies, sleeps
from router import bitmap
from router.view import ATTENTION, DRAINING, EXPERT, SERVING, SUSPECT, GoneMember, Member, PoolSize, Retirement, View

MOST_HAPPENINGS = 200
# A lost server keeps its column, and a change its mark, for as long as an operator needs to see it.
SHOWN_S = 60.0
MARKED_S = 30.0
# Whoever joins later than this replaces nobody.
REPLACEMENT_S = 600.0
_MOST_LOST = 64
# Changes of the placement that come one after another are one move.
_ONE_MOVE_S = 5.0
_READY = frozenset({SERVING, SUSPECT, DRAINING})


@dataclass(frozen=True, kw_only=True)
class ClusterSnapshot:
    """The cluster at one moment: the newest View known, and what only a router that answers tells.

    heard: a router answered just now. routers: the one that leads first. gone: the latest, oldest first. retirements:
    that have not ended. problem: why the router cannot decide; empty when it can. rows: [layers * experts] sent to each
    expert since the router began; None where that is not known.
    """

    view: View | None
    heard: bool
    routers: tuple[RouterStatus, ...] = ()
    pools: Mapping[str, PoolSize] = field(default_factory=dict[str, PoolSize])
    gone: tuple[GoneMember, ...] = ()
    retirements: tuple[Retirement, ...] = ()
    problem: str = ""
    rows: NDArray[np.uint64] | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A member that went without having drained. reason: empty until known. replacement: who serves in its place."""

    member: Member
    at_s: float
    reason: str = ""
    replacement: str = ""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A recent change of one cell."""

    kind: str
    at_s: float


@dataclass(frozen=True, kw_only=True)
class Move:
    """Copies gained and given up by server, in changes of the placement that came one after another."""

    last_s: float
    gained: Mapping[str, int]
    given_up: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class History:
    """The last View, and what changed before. happenings: newest first. marks: by (server, layer).

    formed: the placement has been whole. short_s: since when some expert has too few copies; None: none has.
    """

    view: View | None = None
    happenings: tuple[Happening, ...] = ()
    lost: tuple[Lost, ...] = ()
    marks: Mapping[tuple[str, int], Mark] = field(default_factory=dict[tuple[str, int], Mark])
    move: Move | None = None
    formed: bool = False
    short_s: float | None = None
    wanted: Mapping[str, int] = field(default_factory=dict[str, int])
    away_s: Mapping[str, float] = field(default_factory=dict[str, float])

    def tell(self, at_s: float, kind: str, mood: str, text: str, who: str = "") -> History:
        """With one happening more."""
        happening = Happening(at_s=at_s, kind=kind, mood=mood, text=text, who=who)
        return replace(self, happenings=(happening, *self.happenings)[:MOST_HAPPENINGS])

    def unreplaced(self, pool: str) -> list[Lost]:
        """Lost members of a pool in whose place nobody serves, oldest first."""
        return [lost for lost in self.lost if lost.member.pool == pool and not lost.replacement]


def follow(history: History, view: View, now_s: float) -> History:
    """The history with a newer View. now_s: since 1970."""
    before = history.view
    history = replace(
        history,
        view=view,
        marks={place: mark for place, mark in history.marks.items() if now_s - mark.at_s <= MARKED_S},
        lost=tuple(x for x in history.lost if now_s - x.at_s <= REPLACEMENT_S)[-_MOST_LOST:],
    )
    if before is None:
        held = many(len(view.pool(EXPERT)), "expert server")
        workers = many(len(view.pool(ATTENTION)), "attention worker")
        history = history.tell(now_s, "begins", INFO, f"this gateway follows {held} and {workers}")
    else:
        if view.term != before.term:
            history = history.tell(now_s, "term", INFO, f"a router began term {view.term}")
        known = {member.name: member for member in before.members}
        present = {member.name for member in view.members}
        for member in before.members:
            if member.name not in present:
                history = _went(history, view, member, now_s)
        for member in view.members:
            history = _became(history, known.get(member.name), member, now_s)
        history = _moved(history, known, view, now_s)
    return _redundancy(history, view, now_s)


def learn(history: History, snapshot: ClusterSnapshot, now_s: float) -> History:
    """The history with what the router says beside its View."""
    history = _explain(history, snapshot)
    for router in snapshot.routers:
        since_s = history.away_s.get(router.name)
        if router.state == "unreachable" and since_s is None:
            history = replace(history, away_s={**history.away_s, router.name: now_s})
            text = f"{router.name} does not answer: requests go on, nothing is replaced"
            history = history.tell(now_s, "router-away", BAD, text, router.name)
        elif router.state != "unreachable" and since_s is not None:
            left = {name: at_s for name, at_s in history.away_s.items() if name != router.name}
            history = replace(history, away_s=left)
            text = f"{router.name} answers again, after {seconds(now_s - since_s)}"
            history = history.tell(now_s, "router-back", GOOD, text, router.name)
    wanted = {name: size.wanted for name, size in snapshot.pools.items()}
    for name, size in wanted.items():
        was = history.wanted.get(name, size)
        if was != size:
            text = f"pool {name} scales from {was} to {size}"
            history = history.tell(now_s, "scaled", INFO, text)
    return replace(history, wanted=wanted) if wanted else history


def _went(history: History, view: View, member: Member, now_s: float) -> History:
    if member.state == DRAINING:
        return history.tell(now_s, "left", INFO, f"{member.name} has drained and left", member.name)
    history = replace(history, lost=(*history.lost, Lost(member=member, at_s=now_s))[-_MOST_LOST:])
    text = f"{member.name} lost"
    if member.pool == EXPERT:
        history, successors = _take_over(history, view, member, now_s)
        if successors:
            text += f"; its experts go on at {listed(successors)}"
        elif member.serving_count:
            text += "; no other server had its experts"
    return history.tell(now_s, "lost", BAD, text, member.name)


def _take_over(history: History, view: View, member: Member, now_s: float) -> tuple[History, list[str]]:
    """Mark the cells that serve a lost server's experts from now on."""
    held = bitmap.from_bytes(member.serving)
    marks = dict(history.marks)
    successors: list[str] = []
    for other in view.pool(EXPERT):
        shared = held & bitmap.from_bytes(other.serving)
        successors += [other.name] if shared else []
        for layer, count in enumerate(bitmap.by_layer(shared, view.layers, view.experts)):
            if count:
                marks[other.name, layer] = Mark(kind=TAKEN_OVER, at_s=now_s)
    return replace(history, marks=marks), successors


def _became(history: History, was: Member | None, member: Member, now_s: float) -> History:
    """Tell of a member's new state, if it has one."""
    name, before = member.name, was.state if was is not None else ""
    if member.state == before:
        return history
    told = {
        SUSPECT: ("suspect", WARN, f"{name} is suspect: silent, or reported"),
        DRAINING: ("drains", INFO, f"{name} drains"),
    }.get(member.state)
    if member.state == SERVING:
        back = {SUSPECT: ("well", GOOD, f"{name} is well again"), DRAINING: ("stays", INFO, f"{name} stays after all")}
        told = back.get(before)
        if told is None:
            return _serves(history, member, now_s)
    elif told is None and was is None:
        told = ("joined", INFO, f"{name} joined")
    return history.tell(now_s, *told, name) if told else history


def _serves(history: History, member: Member, now_s: float) -> History:
    name = member.name
    waiting = history.unreplaced(member.pool)
    if not waiting:
        return history.tell(now_s, "serves", GOOD, f"{name} serves", name)
    lost = waiting[0]
    text = f"{name} serves in place of {lost.member.name}, {seconds(now_s - lost.at_s)} after its loss"
    lasting = tuple(replace(x, replacement=name) if x is lost else x for x in history.lost)
    return replace(history, lost=lasting).tell(now_s, "replaced", GOOD, text, name)


def _moved(history: History, known: Mapping[str, Member], view: View, now_s: float) -> History:
    marks = dict(history.marks)
    gained: dict[str, int] = {}
    given_up: dict[str, int] = {}
    for member in view.pool(EXPERT):
        was = known.get(member.name)
        if was is None or was.state not in _READY or member.serving == was.serving:
            continue
        old, new = bitmap.from_bytes(was.serving), bitmap.from_bytes(member.serving)
        for bits, counted, kind in ((old & ~new, given_up, GIVEN_UP), (new & ~old, gained, GAINED)):
            if bits:
                counted[member.name] = bits.bit_count()
            for layer, count in enumerate(bitmap.by_layer(bits, view.layers, view.experts)):
                place = member.name, layer
                # What repair does at once must not hide whom the loss fell on.
                if count and (place not in marks or marks[place].kind != TAKEN_OVER):
                    marks[place] = Mark(kind=kind, at_s=now_s)
    if not gained and not given_up:
        return history
    move = history.move
    if move is not None and now_s - move.last_s <= _ONE_MOVE_S:
        rest = tuple(x for x in history.happenings if (x.kind, x.at_s) != ("moved", move.last_s))
        history = replace(history, happenings=rest)
        gained = dict(Counter(move.gained) + Counter(gained))
        given_up = dict(Counter(move.given_up) + Counter(given_up))
    move = Move(last_s=now_s, gained=gained, given_up=given_up)
    history = replace(history, marks=marks, move=move)
    return history.tell(now_s, "moved", INFO, _move_text(move, view.epoch))


def _move_text(move: Move, epoch: int) -> str:
    names = sorted({*move.gained, *move.given_up}, key=lambda name: int(name.rpartition("/")[2]))
    parts: list[str] = []
    for name in names:
        signs = [
            f"{sign}{counted[name]}" for sign, counted in (("+", move.gained), ("−", move.given_up)) if name in counted
        ]
        parts.append(f"{name} {' '.join(signs)}")
    return f"copies moved: {listed(parts)} (epoch {epoch})"


def _redundancy(history: History, view: View, now_s: float) -> History:
    if not view.layers * view.experts or sleeps(view):
        return history
    least, short = copies(view)
    if least >= view.replicas_wanted:
        if history.formed and history.short_s is not None:
            on = many(view.replicas_wanted, "server")
            text = f"every expert is on {on} again, after {seconds(now_s - history.short_s)}"
            history = history.tell(now_s, "redundant", GOOD, text)
        return replace(history, formed=True, short_s=None)
    if history.formed and history.short_s is None:
        history = replace(history, short_s=now_s)
    last = history.happenings[0].kind if history.happenings else ""
    if history.formed and not least and last != "experts-gone":
        text = f"{many(short, 'expert')} on no server: requests that need them wait"
        history = history.tell(now_s, "experts-gone", BAD, text)
    return history


def _explain(history: History, snapshot: ClusterSnapshot) -> History:
    """Say why members went, now that the router has told."""
    reasons = {gone.incarnation: gone.reason for gone in snapshot.gone}
    untold = {
        x.member.name: reasons[x.member.incarnation]
        for x in history.lost
        if not x.reason and reasons.get(x.member.incarnation)
    }
    if not untold:
        return history
    lost = tuple(replace(x, reason=untold.get(x.member.name, x.reason)) for x in history.lost)
    happenings = tuple(
        replace(x, text=x.text.replace(f"{x.who} lost", f"{x.who} lost ({untold[x.who]})", 1))
        if x.kind == "lost" and x.who in untold
        else x
        for x in history.happenings
    )
    return replace(history, lost=lost, happenings=happenings)
