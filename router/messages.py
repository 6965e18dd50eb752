"""Between the router's own words and the messages of router.proto, for both of its ends: nothing else translates.

A dataclass and its message have fields of the same names, so one function writes and one reads all of them. What a
sender may say wrongly, and what is packed, has a function of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from itertools import islice
from typing import Any, Final, TypeVar

import numpy as np
from google.protobuf.message import Message

from router import bitmap, events
from router.faults import Fault, FaultsTaken, Injection
from router.proto import router_pb2 as pb
from router.view import GoneMember, Identity, Member, Model, PoolSize, Retirement, Status, View

SERVICE = "router.v1.Router"
# The name under which health says only whether a router leads. Clients choose among several routers by it: one
# that leads and cannot write its journal must still hear renewals.
LEADER = "router.v1.Leader"
# Trailing metadata of a refusal by a router that does not lead.
STANDBY = "router-standby"

# Of one load report: more than any role says, and numbers whose sums over all members stay exact enough.
_MOST_WORDS, _LONGEST_WORD, _MOST_LOAD = 256, 64, 1e15
# Of one report of counters: each server of the most that there may be, over four rails; and bytes of many years.
_MOST_TOTALS, _MOST_COUNTED, _MOST_COUNT = 512, 32, 1e21

_MESSAGES: Final[Mapping[type, type[Message]]] = {
    events.AddModel: pb.AddModelRequest,
    events.Exited: pb.ReportExitRequest,
    Fault: pb.Fault,
    FaultsTaken: pb.FaultsTaken,
    GoneMember: pb.Gone,
    Identity: pb.JoinReply,
    Injection: pb.Injection,
    events.Join: pb.JoinRequest,
    events.LauncherAttached: pb.LaunchesRequest,
    events.Left: pb.LeaveRequest,
    events.Loaded: pb.LoadedRequest,
    Member: pb.Member,
    Model: pb.Model,
    PoolSize: pb.Pool,
    Retirement: pb.Retirement,
    Status: pb.StatusReply,
    events.Suspected: pb.SuspectRequest,
    events.Totals: pb.Totals,
    View: pb.View,
}
_DATACLASSES: Final[Mapping[type[Message], type]] = {message: known for known, message in _MESSAGES.items()}

_BITMAPS = ("target", "serving")
_T = TypeVar("_T")


@lru_cache
def _shared(kind: type) -> tuple[str, ...]:
    """The fields that a dataclass and its message have in common."""
    there: Any = _MESSAGES[kind].DESCRIPTOR.fields_by_name
    return tuple(field.name for field in fields(kind) if field.name in there)


def to_message(value: Any, **more: Any) -> Any:
    """The message of a dataclass. more: fields that only the message has."""
    said = {name: _written(getattr(value, name)) for name in _shared(type(value))}
    return _MESSAGES[type(value)](**said, **more)


def _written(value: Any) -> Any:
    if type(value) in _MESSAGES:
        return to_message(value)
    if isinstance(value, Mapping):
        return {key: _written(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_written(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.astype("<u8").tobytes()
    return value


def from_message(kind: type[_T], message: Message, **given: Any) -> _T:
    """The dataclass in a message. given: fields that the message says otherwise. Raises as the dataclass does."""
    found = {name: _read(getattr(message, name)) for name in _shared(kind) if name not in given}
    return kind(**found, **given)


def _read(value: Any) -> Any:
    if isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, Message):
        return from_message(_DATACLASSES[type(value)], value)
    if isinstance(value, Mapping):
        return {key: _read(each) for key, each in value.items()}
    return tuple(_read(each) for each in value)


def packed(member: Member) -> Any:
    """The message of a member on a stream of Views: 61 of 15,616 experts take 30 bytes instead of 1,952."""
    bitmaps = {name: zlib.compress(getattr(member, name)) for name in _BITMAPS}
    return to_message(replace(member, **bitmaps))


def view_of_message(message: pb.View, before: View | None) -> View | None:
    """The View in a message of a stream, which may say only what differs from the one before; None: from another."""
    if message.since and (before is None or (before.epoch, before.salt) != (message.since, message.salt)):
        return None
    pairs = max((m.base + m.layers * m.experts for m in message.models), default=message.layers * message.experts)
    most = max(1, pairs // 8 + 1)
    for member in message.members:
        for name in _BITMAPS:
            setattr(member, name, zlib.decompressobj().decompress(getattr(member, name), most))
    view = from_message(View, message)
    if before is None or not message.since:
        return view
    members = {member.name: member for member in before.members} | {m.name: m for m in view.members}
    gone = frozenset(message.gone)
    return replace(view, members=tuple(m for m in members.values() if m.name not in gone))


def renewed_of(request: pb.RenewRequest) -> events.Renewed:
    """The event in a request, less what no load can be: negative, not finite, or too large to reckon with."""
    words = islice(request.load.items(), _MOST_WORDS)
    load = {word: x for word, x in words if len(word) <= _LONGEST_WORD and 0 <= x <= _MOST_LOAD}
    return events.Renewed(name=request.name, incarnation=request.incarnation, load=load, seen=request.seen)


def loaded_of(request: pb.LoadedRequest) -> events.Loaded:
    """The event in a request."""
    return from_message(events.Loaded, request, held=bitmap.from_bytes(request.bitmap))


def routed_of(request: pb.RenewRequest) -> events.Routed | None:
    """What a renewal says of rows sent, if it says anything whole."""
    whole = len(request.rows) == len(request.activated) and len(request.rows) % 4 == 0
    if not request.rows or not whole:
        return None
    return events.Routed(
        name=request.name,
        incarnation=request.incarnation,
        rows=np.frombuffer(request.rows, "<u4"),
        activated=np.frombuffer(request.activated, "<u4"),
    )


def totals_of(request: pb.RenewRequest) -> tuple[events.Totals, ...]:
    """What a renewal says of a member's counters, less what no counter can be."""
    return tuple(
        events.Totals(
            peer=each.peer,
            rail=each.rail,
            counted={word: x for word, x in islice(each.counted.items(), _MOST_COUNTED) if 0 <= x <= _MOST_COUNT},
        )
        for each in islice(request.totals, _MOST_TOTALS)
        if max(len(each.peer), len(each.rail)) <= _LONGEST_WORD
    )


def scale_of(request: pb.ScaleRequest) -> events.Scale:
    """The event in a request."""
    return events.Scale(pool=request.pool, wanted=request.wanted, drain_s=request.drain_s or events.DRAIN_S)


def taken_of(request: pb.WatchRequest) -> FaultsTaken | None:
    """What a watcher takes; None: it was not started with --allow-chaos."""
    return from_message(FaultsTaken, request.takes) if request.HasField("takes") else None


def launch_message(command: events.StartProcess | events.StopProcess) -> pb.LaunchCommand:
    """Wire form of an order to a launcher."""
    if isinstance(command, events.StartProcess):
        return pb.LaunchCommand(start=command.pool)
    return pb.LaunchCommand(stop=pb.Stop(name=command.name, pid=command.pid))


def launch_of(host: str, message: pb.LaunchCommand) -> events.StartProcess | events.StopProcess:
    """The order in a message to the launcher of a host."""
    if message.WhichOneof("command") == "start":
        return events.StartProcess(host=host, pool=message.start)
    return events.StopProcess(host=host, name=message.stop.name, pid=message.stop.pid)


def status_of(message: pb.StatusReply) -> Status:
    """The status in a message; rows that are not whole are none."""
    rows = message.rows if len(message.rows) % 8 == 0 else b""
    return from_message(Status, message, rows=np.frombuffer(rows, "<u8"))
