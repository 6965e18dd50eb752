"""Between the router's own words and those of router.proto."""

from __future__ import annotations

from itertools import islice

import numpy as np

from router import bitmap
from router.events import DRAIN_S, Exited, Join, Launch, Loaded, Renewed, Routed, Scale, Stop, Totals
from router.pools import PoolSize, pool_size
from router.proto import router_pb2 as pb
from router.records import view_of
from router.state import LAUNCHED_POOLS, Config, State
from router.view import View

# What a core can add to its clock, and over 11 days.
LONGEST_DRAIN_S = 1e6
# Of one load report: more than any role says, and numbers whose sums over all members stay exact enough.
_MOST_WORDS, _LONGEST_WORD, _MOST_LOAD = 256, 64, 1e15
# Of one report of counters: each server of the most that there may be, over four rails; and bytes of many years.
_MOST_TOTALS, _MOST_COUNTED, _MOST_COUNT = 512, 32, 1e21


def view_message(view: View) -> pb.View:
    """Wire form of a View."""
    return pb.View(
        term=view.term,
        epoch=view.epoch,
        replicas_wanted=view.replicas_wanted,
        layers=view.layers,
        experts=view.experts,
        model_hash=view.model_hash,
        salt=view.salt,
        members=[
            pb.Member(
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
                load=m.load,
            )
            for m in view.members
        ],
    )


def status_message(
    config: Config, state: State, problem: str, leader: str, pid: int, rows: bytes = b""
) -> pb.StatusReply:
    """Wire form of everything that the router knows."""
    view = view_of(config, state)
    return pb.StatusReply(
        leader=leader,
        rows=rows,
        view=view_message(view),
        pools={name: pool_message(pool_size(config, state, name)) for name in LAUNCHED_POOLS},
        problem=problem,
        pid=pid,
        gone=[
            pb.Gone(name=g.name, incarnation=g.incarnation, pid=g.pid, reason=g.reason) for g in state.gone
        ],
    )


def launch_message(command: Launch | Stop) -> pb.LaunchCommand:
    """Wire form of an order to a launcher."""
    if isinstance(command, Launch):
        return pb.LaunchCommand(start=command.pool)
    return pb.LaunchCommand(stop=pb.Stop(name=command.name, pid=command.pid))


def join_event(request: pb.JoinRequest) -> Join:
    """The event in a request."""
    return Join(
        pool=request.pool,
        address=request.address,
        pid=request.pid,
        host=request.host,
        core=request.core,
        model_hash=request.model_hash,
        numerics_class=request.numerics_class,
        layers=request.layers,
        experts=request.experts,
        capacity=request.capacity,
        zone=request.zone,
        expert_bytes=request.expert_bytes,
        protocol=request.protocol,
    )


def renewed_event(request: pb.RenewRequest) -> Renewed:
    """The event in a request, less what no load can be: negative, not finite, or too large to reckon with."""
    words = islice(request.load.items(), _MOST_WORDS)
    load = {word: x for word, x in words if len(word) <= _LONGEST_WORD and 0 <= x <= _MOST_LOAD}
    return Renewed(name=request.name, incarnation=request.incarnation, load=load, seen=request.seen)


def loaded_event(request: pb.LoadedRequest) -> Loaded:
    """The event in a request."""
    return Loaded(
        name=request.name,
        incarnation=request.incarnation,
        held=bitmap.from_bytes(request.bitmap),
        epoch=request.epoch,
        salt=request.salt,
    )


def exit_event(request: pb.ReportExitRequest) -> Exited:
    """The event in a request."""
    return Exited(host=request.host, pid=request.pid, pool=request.pool)


def routed_event(request: pb.RenewRequest) -> Routed | None:
    """What a renewal says of rows sent, if it says anything whole."""
    whole = len(request.rows) == len(request.activated) and len(request.rows) % 4 == 0
    if not request.rows or not whole:
        return None
    return Routed(
        name=request.name,
        incarnation=request.incarnation,
        rows=np.frombuffer(request.rows, "<u4"),
        activated=np.frombuffer(request.activated, "<u4"),
    )


def totals_of(request: pb.RenewRequest) -> tuple[Totals, ...]:
    """What a renewal says of a member's counters, less what no counter can be."""
    return tuple(
        Totals(
            peer=each.peer,
            rail=each.rail,
            counted={
                word: x for word, x in islice(each.counted.items(), _MOST_COUNTED) if 0 <= x <= _MOST_COUNT
            },
        )
        for each in islice(request.totals, _MOST_TOTALS)
        if max(len(each.peer), len(each.rail)) <= _LONGEST_WORD
    )


def scale_event(request: pb.ScaleRequest) -> Scale:
    """The event in a request."""
    return Scale(pool=request.pool, wanted=request.wanted, drain_s=request.drain_s or DRAIN_S)


def pool_message(size: PoolSize) -> pb.Pool:
    """Wire form of a pool's sizes."""
    return pb.Pool(
        wanted=size.wanted,
        live=size.live,
        starting=size.starting,
        draining=size.draining,
        least=size.least,
        most=size.most,
        held_up=size.held_up,
    )
