"""What the router answers, in the words of its clients. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from router.pools import PoolSize
from router.proto import router_pb2 as pb
from router.view import Member, View


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What the router calls this process. Neither the name nor the incarnation is ever used again."""

    name: str
    incarnation: int
    term: int
    lease_s: float
    renew_s: float


@dataclass(frozen=True)
class StartProcess:
    """The pool needs one more process on this host."""

    pool: str


@dataclass(frozen=True)
class StopProcess:
    """This member is fenced and its process may still be there: end it."""

    name: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class GoneMember:
    """A member that went, and why."""

    name: str
    incarnation: int
    pid: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Status:
    """Everything the router knows.

    problem: empty when it is healthy. gone: the latest, oldest first. pid: the router's own process. leader: address of
        the one that leads; empty if there is only one. rows: [layers * experts] sent to each expert since this router
        began; empty where that was not asked for, or nothing is known.
    """

    view: View
    pools: Mapping[str, PoolSize]
    problem: str
    gone: tuple[GoneMember, ...]
    pid: int
    leader: str
    rows: NDArray[np.uint64] = field(compare=False)


def view_of(message: pb.View) -> View:
    """The View in a message."""
    members = tuple(
        Member(
            name=m.name,
            pool=m.pool,
            state=m.state,
            incarnation=m.incarnation,
            address=m.address,
            pid=m.pid,
            host=m.host,
            core=m.core,
            numerics_class=m.numerics_class,
            target=m.target,
            serving=m.serving,
            load=dict(m.load),
        )
        for m in message.members
    )
    return View(
        term=message.term,
        epoch=message.epoch,
        salt=message.salt,
        replicas_wanted=message.replicas_wanted,
        layers=message.layers,
        experts=message.experts,
        model_hash=message.model_hash,
        members=members,
    )


def pool_of(message: pb.Pool) -> PoolSize:
    """The sizes in a message."""
    return PoolSize(
        wanted=message.wanted,
        live=message.live,
        starting=message.starting,
        draining=message.draining,
        least=message.least,
        most=message.most,
        held_up=message.held_up,
    )


def status_of(message: pb.StatusReply) -> Status:
    """The status in a message; rows that are not whole are none."""
    rows = message.rows if len(message.rows) % 8 == 0 else b""
    return Status(
        view=view_of(message.view),
        pools={name: pool_of(pool) for name, pool in message.pools.items()},
        problem=message.problem,
        gone=tuple(
            GoneMember(name=g.name, incarnation=g.incarnation, pid=g.pid, reason=g.reason)
            for g in message.gone
        ),
        pid=message.pid,
        leader=message.leader,
        rows=np.frombuffer(rows, "<u8"),
    )
