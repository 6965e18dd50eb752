"""What the router knows, what can happen to it, and what it can order. Pure data.

Times are seconds of one clock that counts suspend (CLOCK_BOOTTIME). A MemberRecord, the counters and the
model are durable: the journal holds them before anyone hears of them. Pulses, launches and the rest are
forgotten by a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from router.view import ATTENTION, EXPERT, GATEWAY

# A client names servers by the bits of one 64-bit word (experts/native).
MOST_MEMBERS = 64
DRAIN_S = 30.0
LAUNCHED_POOLS = (EXPERT, ATTENTION)
NAMED_POOLS = (EXPERT, ATTENTION, GATEWAY)


class ConfigInvalid(ValueError):
    """A setting, or two together, make no sense."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the router.

    experts_wanted, attention_wanted: Size wanted of each pool when a journal begins; afterwards State.wanted counts.
    least, most: Bounds of it, by pool. replicas: Copies wanted of every expert.
    """

    experts_wanted: int = 1
    attention_wanted: int = 1
    replicas: int = 1
    least: Mapping[str, int] = field(default_factory=dict[str, int])
    most: Mapping[str, int] = field(default_factory=dict[str, int])
    lease_s: float = 2.0
    # The first placement waits this long for the wanted servers, so that nobody loads what the next joiner
    # takes.
    form_s: float = 3.0
    # A process ordered from a launcher must join within this time.
    start_s: float = 60.0
    # After n failed starts in a row the next waits backoff_s * 2^(n-1), at most backoff_most_s.
    backoff_s: float = 0.5
    backoff_most_s: float = 30.0
    # Ticks come every 0.1 s; a longer gap is the router's own stall, and is taken off everyone's silence.
    tick_s: float = 0.1
    stall_s: float = 0.5
    # When many fall silent at once the router doubts itself; 5 leases of news from the others end the doubt.
    doubt_leases: float = 5.0
    # What was routed counts half after this long: balance follows minutes, not bursts.
    routed_half_life_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("experts_wanted", "attention_wanted", "replicas"):
            least = 1 if name == "replicas" else 0
            if getattr(self, name) < least:
                raise ConfigInvalid(f"{name} is {getattr(self, name)}; give at least {least}")
        if self.replicas > self.experts_wanted > 0:
            raise ConfigInvalid(
                f"{self.replicas} replicas of every expert need {self.replicas} expert servers; "
                f"{self.experts_wanted} wanted. Ask for {self.replicas} servers (--experts) or "
                f"{self.experts_wanted} replicas (--replicas)."
            )
        for name in (
            "lease_s",
            "start_s",
            "backoff_s",
            "backoff_most_s",
            "tick_s",
            "stall_s",
            "doubt_leases",
            "routed_half_life_s",
        ):
            if not getattr(self, name) > 0:
                raise ConfigInvalid(f"{name} is {getattr(self, name)}; give more than 0")
        for name in LAUNCHED_POOLS:
            least, most = self.bounds(name)
            if not 0 <= least <= self.wanted(name) <= most <= MOST_MEMBERS:
                raise ConfigInvalid(
                    f"{self.wanted(name)} members wanted in pool {name!r}, between {least} and {most}: give 0 <= least "
                    f"<= wanted <= most <= {MOST_MEMBERS}"
                )
        if self.lease_s < 5 * self.tick_s:
            raise ConfigInvalid(f"lease_s is {self.lease_s}; give at least {5 * self.tick_s}: five ticks")

    @property
    def renew_s(self) -> float:
        """How often members renew: four chances a lease."""
        return self.lease_s / 4

    def bounds(self, pool: str) -> tuple[int, int]:
        """Least and most members that may be wanted of a pool."""
        return self.least.get(pool, 0), self.most.get(pool, MOST_MEMBERS)

    def wanted(self, pool: str) -> int:
        """Size wanted of a pool at first; 0 for one whose processes the router does not order."""
        return {EXPERT: self.experts_wanted, ATTENTION: self.attention_wanted}.get(pool, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The model that is served, as the first member to know it said. Empty and 0: not known yet."""

    hash: str = ""
    layers: int = 0
    experts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberRecord:
    """The durable part of a member. Bitmaps are ints (router.bitmap).

    share: what the placement gives it. target: what it must hold. loaded: the part of target that it holds,
        verified.
    serving: the part of loaded that may be asked of it. retiring: no longer serving since retiring_epoch,
        held until
    every attention member has acked that epoch. dropped_epoch: when target last lost something.
    ready: has served (expert), acked (attention) or joined (gateway). ordered: its process was ordered by a router
        of this journal. draining_epoch: the first whose View shows it draining. zone: what fails together.
    """

    name: str
    pool: str
    incarnation: int
    address: str
    pid: int
    host: str
    core: int = -1
    numerics_class: str = ""
    capacity: int = 0
    share: int = 0
    target: int = 0
    loaded: int = 0
    serving: int = 0
    retiring: int = 0
    retiring_epoch: int = 0
    dropped_epoch: int = 0
    ready: bool = False
    draining: bool = False
    draining_epoch: int = 0
    ordered: bool = False
    zone: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """The rest of a member. acked: newest epoch whose routes it uses. accused_until_s: end of a peer's
    suspicion. drain_until_s: when a drain has lasted long enough, or None.
    """

    renewed_s: float
    acked: int = 0
    load: Mapping[str, float] = field(default_factory=dict[str, float])
    suspect: bool = False
    accused_until_s: float = 0.0
    drain_until_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone:
    """A member that went, and why."""

    name: str
    incarnation: int
    host: str
    pid: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A process ordered and not yet a member."""

    host: str
    pool: str
    until_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """Failed starts in a row, and when the next may be tried."""

    count: int = 0
    next_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything. salt: makes incarnations of different journals differ. joined: joins ever. named: names
    ever, by pool.

    wanted: size of each launched pool (durable). drain_s: longest drain of a pool's members.

    routed: rows sent to each (layer, expert), in the order of bitmaps, decayed since routed_s. plan: what the last
    placement was made for. forming_s: since when the first placement waits. doubting_s:
        since when
    the router doubts its own ears, or None. Mappings keep the order of joining and are never changed in
    place.
    """

    salt: int = 0
    term: int = 0
    epoch: int = 0
    joined: int = 0
    named: Mapping[str, int] = field(default_factory=dict[str, int])
    model: Model = field(default_factory=Model)
    members: Mapping[str, MemberRecord] = field(default_factory=dict[str, MemberRecord])
    gone: tuple[Gone, ...] = ()
    now_s: float = 0.0
    ticked_s: float = 0.0
    pulses: Mapping[str, Pulse] = field(default_factory=dict[str, Pulse])
    plan: object = None
    forming_s: float | None = None
    doubting_s: float | None = None
    launchers: tuple[str, ...] = ()
    starts: tuple[Start, ...] = ()
    failures: Mapping[str, Failures] = field(default_factory=dict[str, Failures])
    wanted: Mapping[str, int] = field(default_factory=dict[str, int])
    drain_s: Mapping[str, float] = field(default_factory=dict[str, float])
    routed: NDArray[np.float64] | None = field(default=None, compare=False)
    routed_s: float = 0.0


# What can happen.


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The router itself started, with the journal's state. salt: used if that is the journal's first
    start.
    """

    salt: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """A process asks to be a member."""

    pool: str
    address: str
    pid: int
    host: str
    core: int = -1
    model_hash: str = ""
    numerics_class: str = ""
    layers: int = 0
    experts: int = 0
    capacity: int = 0
    zone: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewed:
    """A member lives, and this is its load."""

    name: str
    incarnation: int
    load: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True, slots=True)
class Acked:
    """A member uses the routes of this epoch, and none older."""

    name: str
    incarnation: int
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """What an attention worker sent since it last said so, for each (layer, expert) in the order of bitmaps.

    rows, activated: [layers * experts] uint32, rows and batches that had any.
    """

    name: str
    incarnation: int
    rows: NDArray[np.uint32] = field(compare=False)
    activated: NDArray[np.uint32] = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """An expert server holds these experts, verified, having applied the target of that epoch."""

    name: str
    incarnation: int
    held: int
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspected:
    """A peer saw a member misbehave."""

    name: str
    incarnation: int
    by: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """A member goes: at once, or once its experts are served elsewhere."""

    name: str
    incarnation: int
    drain: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Exited:
    """A process is proved to have ended. pool: what it was started for, or empty."""

    host: str
    pid: int
    pool: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A pool must have another size. drain_s: longest drain of a member that it no longer needs."""

    pool: str
    wanted: int
    drain_s: float = DRAIN_S


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherAttached:
    """A launcher can start processes on a host; starting: by pool, those that it started and that have not
    joined.
    """

    host: str
    starting: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherDetached:
    """The launcher of a host is gone."""

    host: str


Event = (
    Started
    | Tick
    | Join
    | Renewed
    | Acked
    | Routed
    | Loaded
    | Suspected
    | Left
    | Exited
    | Scale
    | LauncherAttached
    | LauncherDetached
)


# What the router orders, or answers.


@dataclass(frozen=True, kw_only=True, slots=True)
class Publish:
    """Everyone must see the new epoch, once it is durable."""

    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """Answer to Join."""

    name: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Answer to Join or Scale: what was found, what is needed, what to do."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """Answer to Scale: this size is wanted now."""

    pool: str
    wanted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stranger:
    """Answer to an event of a member that is none: it is fenced, or never was."""

    name: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stale:
    """Answer to Loaded: the target has lost experts since that epoch, so nothing new was taken from the
    report.
    """

    name: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fenced:
    """A member has gone, for ever."""

    name: str
    incarnation: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The launcher of a host must start a process for a pool."""

    host: str
    pool: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """The launcher of a host must end the process of a member that is fenced or has drained."""

    host: str
    name: str
    pid: int


Command = Publish | Joined | Refused | Scaled | Stranger | Stale | Fenced | Launch | Stop
