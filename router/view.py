"""What the router tells everyone: who is a member, and which experts may be asked of whom. Pure.

A numerics class is a name for members that compute the same bits: words between dashes, such as cpu-bf16-fma-1 or
cuda-sm90-bf16-triton3.6-1: first what carries rows, and among the others the format of numbers. Members of one carrier
and one format can talk with each other; those of another format serve another model. A pool may hold several classes;
a request stays in the class in which it began, so each class has a placement, and what another class holds is no
replica to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from router import bitmap
from router.access import ATTENTION, CLIENT, EXPERT, GATEWAY

# A client asks expert servers as attention workers do, and serves nobody: no gateway sends it anything.
ASKING_POOLS = (ATTENTION, CLIENT)
POOLS = (EXPERT, ATTENTION, GATEWAY)

# Of the calls between a member and the router; who says another is refused.
PROTOCOL = 3

JOINING = "joining"
WARMING = "warming"
SERVING = "serving"
SUSPECT = "suspect"
DRAINING = "draining"

# Words of a load report. STANDS: seconds for which the loop that does this member's work has stood still, where that is
# longer than it ever may. HEARS and a name: a gateway has lately heard from that attention worker. CORRUPTS and a name:
# a client's count of that server's replies that failed a check. REACHES and a pace: servers that a client asks.
# FOR and the number of a model: what a gateway holds for it, and one more while it takes new requests for it; with a
# colon and a word behind it, that word of it alone.
STANDS = "stands_s"
FOR = "model:"
HEARS = "hears:"
CORRUPTS = "corrupt:"
REACHES = "servers_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One process of the cluster, as a View shows it.

    target: bitmap of the experts that it must hold. serving: bitmap of those that may be asked of it. state: "joining",
    "warming", "serving", "suspect" or "draining"; a member that has gone is in no View. core: first core of its lanes,
    -1 if unpinned. load: whatever it last reported. model: hash of the one that it asks for; empty where it said none.
    """

    name: str
    pool: str
    state: str
    incarnation: int
    address: str
    pid: int
    host: str
    core: int = -1
    numerics_class: str = ""
    target: bytes = b""
    serving: bytes = b""
    load: Mapping[str, float] = field(default_factory=dict[str, float])
    model: str = ""

    @property
    def serving_count(self) -> int:
        """Number of (layer, expert) pairs that may be asked of this member."""
        return bitmap.from_bytes(self.serving).bit_count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One of the models that a pool serves, as a View shows it.

    name: Under which requests ask for it; empty: gateways have it from their own options. path: Checkpoint folder;
    empty where nobody said it. number: Of this model, which no other is ever given. base: Bit of its first expert in
    bitmaps of the whole pool. weight: Of its rows beside other models' on a server. leaving: it takes no new requests,
    and goes with its last attention worker. asleep: nobody has asked for it for long, so that no server holds it; it
    comes back with the next request.
    """

    hash: str = ""
    name: str = ""
    path: str = ""
    number: int = 0
    base: int = 0
    layers: int = 0
    experts: int = 0
    expert_bytes: int = 0
    weight: int = 1
    leaving: bool = False
    asleep: bool = False

    def take(self, bits: int) -> int:
        """The part of a whole pool's bitmap that is this model's, in its own coordinates."""
        return bits >> self.base & bitmap.everything(self.layers, self.experts)

    def put(self, bits: int) -> int:
        """A bitmap of this model as the part of a whole pool's."""
        return bits << self.base


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The cluster at one epoch. Views are ordered by epoch; a later one replaces an earlier one whole.

    salt: Of the term, which a restored journal may count like another, and from a lower epoch on where it knows none of
    those who saw a higher one. models: by number; layers, experts and model_hash are those of the first. With several
    models bitmaps are of the whole pool, and pairs can be read in the part that `of_model` cuts out.
    """

    term: int
    epoch: int
    replicas_wanted: int
    layers: int
    experts: int
    model_hash: str = ""
    salt: int = 0
    members: tuple[Member, ...] = ()
    models: tuple[Model, ...] = ()

    def pool(self, name: str) -> tuple[Member, ...]:
        """Members of one pool, in the order in which they joined."""
        return tuple(member for member in self.members if member.pool == name)

    def member(self, name: str) -> Member | None:
        """The member of that name, or None if it has gone."""
        return next((member for member in self.members if member.name == name), None)

    def replicas(self, layer: int, expert: int) -> tuple[Member, ...]:
        """Members that may be asked for one expert of one layer."""
        bit = layer * self.experts + expert
        byte, mask = bit >> 3, 1 << (bit & 7)
        return tuple(m for m in self.members if byte < len(m.serving) and m.serving[byte] & mask)

    def target_pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        """The (layer, expert) pairs that a member must hold; empty if it is none."""
        member = self.member(name)
        return tuple(bitmap.pairs(bitmap.from_bytes(member.target), self.experts)) if member else ()


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What the router calls this process. Neither the name nor the incarnation is ever used again."""

    name: str
    incarnation: int
    term: int
    lease_s: float
    renew_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSize:
    """One launched pool at one moment.

    live: members that are not draining. starting: ordered from a launcher, not yet members. least, most: bounds of
    wanted. held_up: why a pool that has more than it should, or one to replace, lets nobody go; else empty.
    """

    wanted: int
    live: int
    starting: int
    draining: int
    least: int
    most: int
    held_up: str = ""

    @property
    def is_scaling(self) -> bool:
        """True until the pool has the size that is wanted."""
        return self.live != self.wanted or self.starting > 0 or self.draining > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GoneMember:
    """A member that went, and why. host, and the operation that retired it: only the router itself knows them."""

    name: str
    incarnation: int
    host: str = ""
    pid: int
    reason: str
    operation: str = ""
    asked_unix_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Retirement:
    """How far a member that was told to go has come.

    state: "waiting" for another to take its place, "draining", or "gone". safe_to_terminate: nobody needs its process
        any more. waits_for: in words. only_here: (layer, expert) pairs that nobody else serves. running: requests that
        it last said it has, waiting ones too.
    """

    name: str
    operation: str
    state: str
    asked_unix_s: float
    safe_to_terminate: bool = False
    waits_for: str = ""
    only_here: int = 0
    running: int = 0


NO_ROWS: NDArray[np.uint64] = np.zeros(0, np.uint64)


@dataclass(frozen=True, kw_only=True)
class Status:
    """Everything the router knows.

    problem: empty when it is healthy. gone: the latest, oldest first. pid: the router's own process. leader: address of
        the one that leads; empty if there is only one. rows: [layers * experts] sent to each expert since this router
        began; empty where that was not asked for, or nothing is known. retirements: that have not ended.
    """

    view: View
    pools: Mapping[str, PoolSize]
    problem: str
    gone: tuple[GoneMember, ...]
    pid: int
    leader: str
    rows: NDArray[np.uint64] = field(compare=False)
    retirements: tuple[Retirement, ...] = ()


_FORMATS = frozenset({"f32", "bf16", "int8", "fp8", "mxfp4", "int4", "int4g32"})


def carrier_of(numerics_class: str) -> str:
    """What carries rows: "cpu", "cuda", "interpreter"."""
    return numerics_class.partition("-")[0]


def format_of(numerics_class: str) -> str:
    """The format of numbers, "" where the name tells none."""
    return next((word for word in numerics_class.split("-") if word in _FORMATS), "")


def can_mix(one: str, other: str) -> bool:
    """Whether members of these classes may serve one model; an empty name is not checked."""
    return not one or not other or one == other or (bool(format_of(one)) and format_of(one) == format_of(other))


def can_talk(one: str, other: str) -> bool:
    """Whether an attention worker of the one class can ask an expert server of the other."""
    return can_mix(one, other) and (not one or not other or carrier_of(one) == carrier_of(other))


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


def of_model(view: View, hash: str) -> View:
    """The View of one model alone: its experts' bitmaps, and of those who ask only who asks for it.

    Of a model that the View does not know nobody holds anything. Where one model is all there is, the View itself.
    """
    if not view.models or (len(view.models) == 1 and not view.models[0].base and hash in ("", view.models[0].hash)):
        return view
    model = next((model for model in view.models if model.hash == hash), Model(hash=hash))
    members = tuple(
        replace(member, **{name: _cut(model, getattr(member, name)) for name in ("target", "serving")})
        for member in view.members
        if member.pool not in ASKING_POOLS or member.model in ("", hash)
    )
    return replace(
        view,
        layers=model.layers,
        experts=model.experts,
        model_hash=model.hash,
        models=(replace(model, base=0),),
        members=members,
    )


def launched_pool(view: View, member: Member) -> str:
    """Of which launched pool a member is: attention workers of each model but the first have their own."""
    model = next((model for model in view.models if member.pool == ATTENTION and model.hash == member.model), None)
    return f"{ATTENTION}:{model.name}" if model is not None and model.number else member.pool


def _cut(model: Model, whole: bytes) -> bytes:
    return bitmap.to_bytes(model.take(bitmap.from_bytes(whole)), model.layers, model.experts)


def narrowed(view: View, numerics_class: str | None) -> View:
    """The View without the expert servers of other classes."""
    members = tuple(m for m in view.members if m.pool != EXPERT or m.numerics_class == numerics_class)
    return view if len(members) == len(view.members) else replace(view, members=members)
