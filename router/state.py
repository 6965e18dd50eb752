"""What the router knows, and its settings. Pure data.

Times are seconds of one clock that counts suspend (CLOCK_BOOTTIME). A MemberRecord, the counters and the model are
durable: the journal holds them before anyone hears of them. Liveness, launches and the rest are forgotten by a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from router.scaling import Memory, Policy
from router.view import ATTENTION, CLIENT, EXPERT, GATEWAY, GoneMember, Model

# A client names servers by the bits of one 64-bit word (experts/native).
MOST_MEMBERS = 64
# What is kept of models must be of a size that the journal and every View can bear: the largest known has 61 layers
# with 384 experts, 23,424 pairs.
MOST_PAIRS, MOST_MODELS, MOST_EXPERT_BYTES = 1 << 20, 64, 1 << 40
# Incarnations: 20 bits of the term's salt above 40 bits of counting, positive as a signed 64-bit number.
COUNT_BITS = 40
LAUNCHED_POOLS = (EXPERT, ATTENTION)
NAMED_POOLS = (EXPERT, ATTENTION, GATEWAY, CLIENT)

# Settings of which 0 makes sense.
_MAY_BE_0 = frozenset({
    "experts_wanted", "attention_wanted", "most_prompt", "form_s", "form_each_s", "least_silence_s", "redundant",
    "balance_gain", "activation_rows", "sleep_after_s",
})  # fmt: skip


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
    # Expert servers of a pool, and no more: what clients can name.
    most_servers: int = MOST_MEMBERS
    # The first placement waits this long for the wanted servers, so that nobody loads what the next joiner takes.
    form_s: float = 3.0
    # And this much longer for each of them: so long a join takes, with all that others are told of it.
    form_each_s: float = 0.02
    # A process ordered from a launcher must join within this time.
    start_s: float = 60.0
    # After n failed starts in a row the next waits backoff_s * 2^(n-1), at most backoff_most_s.
    backoff_s: float = 0.5
    backoff_most_s: float = 30.0
    # Ticks come every 0.1 s; a longer gap is the router's own stall, and is taken off everyone's silence. It is less
    # than what lies between the renewal that is due and the verdict, 0.58 s at a lease of 2 s (router.liveness).
    tick_s: float = 0.1
    stall_s: float = 0.25
    # With more members than this, moves wait for the next tick instead of following each event at once: of 600 members
    # each time takes 15 ms, and as many reports may come in a second.
    most_prompt: int = 16
    # Nobody is fenced on suspicion before a silence of this: two renewals missed.
    least_silence_s: float = 0.5
    # When many fall silent at once the router doubts itself; 5 leases of hearing the others end the doubt.
    doubt_leases: float = 5.0
    # A copy ordered and not reported within this time is taken back and tried elsewhere; that server gets nothing new
    # for as long, then twice, then four times as long.
    move_s: float = 60.0
    # Copies on their way at once, of experts that are served meanwhile: 8 GiB are 1.3 s of a 50 Gbit/s link. An expert
    # that nobody serves waits for none of this.
    copies_in_flight: int = 256
    bytes_in_flight: int = 8 << 30
    # What was routed counts half after this long: balance follows minutes, not bursts.
    routed_half_life_s: float = 60.0
    # A batch that has any row of an expert reads its weights: b bytes at 44 GB/s, when a row takes b operations at
    # 413 Gflop/s, are as long as 9 rows.
    activation_rows: float = 9.0
    # Copies of each layer beyond the replicas, which balance may place: none unless asked for.
    redundant: int = 0
    # How often balance looks at the load, how many copies it makes of a layer at once, and what they must be worth.
    balance_s: float = 60.0
    balance_copies: int = 4
    balance_gain: float = 0.03
    # A model of which nobody has asked anything for so long is held by no server until somebody does; 0: never.
    sleep_after_s: float = 0.0
    # Name and folder by which processes were started with the first model, where nobody said them since.
    first_model: tuple[str, str] = ("", "")
    # Pools whose wanted size follows their load.
    autoscale: Mapping[str, Policy] = field(default_factory=dict[str, Policy])

    def __post_init__(self) -> None:
        for name, least in (("experts_wanted", 0), ("attention_wanted", 0), ("replicas", 1)):
            if getattr(self, name) < least:
                raise ConfigInvalid(f"{name} is {getattr(self, name)}; give at least {least}")
        if self.replicas > self.experts_wanted > 0:
            raise ConfigInvalid(
                f"{self.replicas} replicas of every expert need {self.replicas} expert servers; "
                f"{self.experts_wanted} wanted. Ask for {self.replicas} servers (--experts) or "
                f"{self.experts_wanted} replicas (--replicas)."
            )
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not (value > 0 or (value == 0 and name in _MAY_BE_0)):
                raise ConfigInvalid(f"{name} is {value}; give {'0 or more' if name in _MAY_BE_0 else 'more than 0'}")
        for name in self.autoscale:
            if name not in LAUNCHED_POOLS:
                raise ConfigInvalid(f"pool {name!r} cannot be scaled; give one of {', '.join(LAUNCHED_POOLS)}")
        for name in LAUNCHED_POOLS:
            least, most = self.bounds(name)
            bound = self._most_wanted(name)
            if not 0 <= least <= self.wanted(name) <= most <= bound:
                raise ConfigInvalid(
                    f"{self.wanted(name)} members wanted in pool {name!r}, between {least} and {most}: give 0 <= least "
                    f"<= wanted <= most <= {bound}"
                )
        if self.lease_s < 5 * self.tick_s:
            raise ConfigInvalid(f"lease_s is {self.lease_s}; give at least {5 * self.tick_s}: five ticks")

    @property
    def renew_s(self) -> float:
        """How often members renew: eight chances a lease."""
        return self.lease_s / 8

    def bounds(self, pool: str) -> tuple[int, int]:
        """Least and most members that may be wanted of a pool."""
        return self.least.get(pool, 0), self.most.get(pool, self._most_wanted(pool))

    def _most_wanted(self, pool: str) -> int:
        # The replacement of an expert server that drains must fit beside it, or the pool could never let it go.
        return self.most_servers - 1 if pool == EXPERT else MOST_MEMBERS

    def wanted(self, pool: str) -> int:
        """Size wanted of a pool at first; 0 for one whose processes the router does not order."""
        return {EXPERT: self.experts_wanted, ATTENTION: self.attention_wanted}.get(pool, 0)


@dataclass(frozen=True, kw_only=True)
class MemberRecord:
    """The durable part of a member. Bitmaps are ints (router.bitmap).

    share: what the placement gives it. target: what it must hold. loaded: the part of target that it holds, verified.
    serving: the part of loaded that may be asked of it. retiring: no longer serving since retiring_epoch, held until
    every attention member has acked that epoch. dropped_epoch: when target last lost something. ready: has served
    (expert), acked (attention) or joined (gateway). ordered: its process was ordered by a router of this journal.
    draining_epoch: the first whose View shows it draining. surplus: it drains because its pool was too large.
    operation: the id under which it is retired, since asked_unix_s; else empty. zone: what fails together. model: hash
    of the one with which it joined. opened: mask of the numbers of models of which a server can hold experts.
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
    surplus: bool = False
    operation: str = ""
    asked_unix_s: float = 0.0
    ordered: bool = False
    zone: str = ""
    model: str = ""
    opened: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SilenceHistogram:
    """The silences of one member so far. counts: the histogram. samples: sum of it."""

    counts: int = 0
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Load of one layer's experts as observed. load: [experts] rows an interval, smoothed.

    drift: standard deviation of an expert's log load from one interval to the next, beyond what counting explains.
    """

    load: NDArray[np.float64]
    drift: float = 0.2


@dataclass(frozen=True, kw_only=True)
class Liveness:
    """What is known of a member beside its record, and forgotten by a restart.

    silences: from one renewal to the next, so far. acked: newest epoch whose routes it uses. reported: newest epoch for
    which it said what it holds. report: number of what it said last of that. suspected_until_s: end of a peer's
    suspicion. drain_until_s: when a drain has lasted long enough, or None.

    journaled: it was a member when the term began. seen: newest epoch that it saw, as it said while the term began.
    told: it has said in this term what it holds, or joined in it. unknown: the part of that of which the journal does
    not know. foreign: epoch of the View, of another term, by which it said so.
    """

    renewed_s: float
    silences: SilenceHistogram = field(default_factory=SilenceHistogram)
    acked: int = 0
    reported: int = 0
    report: int = 0
    load: Mapping[str, float] = field(default_factory=dict[str, float])
    suspected_until_s: float = 0.0
    drain_until_s: float | None = None
    journaled: bool = False
    seen: int = 0
    told: bool = False
    unknown: int = 0
    foreign: int = -1


@dataclass(frozen=True, kw_only=True)
class FencedClient:
    """A member fenced while its process may still run, and use routes as old as `acked`, until its lease ends."""

    host: str
    pid: int
    acked: int
    until_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Copies ordered together of one server that it has not reported yet. since_s: it reported one, or the order."""

    copies: int
    since_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A process ordered and not yet a member."""

    host: str
    pool: str
    until_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """Failures in a row, and when the next may be tried."""

    count: int = 0
    next_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything. Mappings keep the order of joining and are never changed in place.

    Durable: salt, of the term, makes incarnations of different terms differ. joined: joins ever. named: names ever, by
    pool. wanted: size of each launched pool. models: by number (router.models); one without a name is the only one, and
    is as the first member to know it said, clients aside.

    fenced_clients: who may still use old routes though it is no member. suspects: who may be dead, or is suspected by
    a peer. silent: who looks dead by silence alone. standing: who says that its work loop stands still. corrupt_since:
    servers said to give corrupt replies, and since when. next_corruption_s: when the next may be fenced for that.
    doubting_s: since when the router doubts its own ears, or None.

    plan: what the last placement was made for. forming_s: since when the first placement waits. opening_s: the same of
    a model by its number, which waits for all servers to open it. busy_s: when somebody last had something to ask of a
    model, by its number. unloaded_epoch: the first without the latest that anyone was let unload. settled: nothing has
    changed since every move went as far as it may. batches: copies on their way, by server. stuck: servers that did not
    load what was ordered. taken_back: copies they were not given after all, ever.

    orphans: starts whose launcher went: not counted on, but known should they join after all.

    unheard: members of the journal of which this term waits to hear until unheard_until_s. behind: meanwhile somebody
    who is none said that it saw a later epoch. journaled: how many models the journal had when the term began.

    drain_s: longest drain of a pool's members. memories: of the policies that scale pools.

    routed: work of each (layer, expert), in rows, in the order of bitmaps, decayed since routed_s. seen: what balance
    knows of each layer, those of all models in a row, since balanced_s. balanced_layer: the next that it looks at.
    """

    salt: int = 0
    term: int = 0
    epoch: int = 0
    joined: int = 0
    named: Mapping[str, int] = field(default_factory=dict[str, int])
    models: tuple[Model, ...] = ()
    members: Mapping[str, MemberRecord] = field(default_factory=dict[str, MemberRecord])
    gone: tuple[GoneMember, ...] = ()
    wanted: Mapping[str, int] = field(default_factory=dict[str, int])
    now_s: float = 0.0
    ticked_s: float = 0.0
    liveness: Mapping[str, Liveness] = field(default_factory=dict[str, Liveness])
    fenced_clients: tuple[FencedClient, ...] = ()
    suspects: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    standing: frozenset[str] = frozenset()
    doubting_s: float | None = None
    corrupt_since: Mapping[str, float] = field(default_factory=dict[str, float])
    next_corruption_s: float = 0.0
    plan: object = None
    forming_s: float | None = None
    opening_s: Mapping[int, float] = field(default_factory=dict[int, float])
    busy_s: Mapping[int, float] = field(default_factory=dict[int, float])
    unloaded_epoch: int = 0
    settled: bool = field(default=False, compare=False)
    batches: Mapping[str, tuple[Batch, ...]] = field(default_factory=dict[str, tuple[Batch, ...]])
    stuck: Mapping[str, Failures] = field(default_factory=dict[str, Failures])
    taken_back: int = 0
    launchers: tuple[str, ...] = ()
    starts: tuple[Start, ...] = ()
    orphans: tuple[Start, ...] = ()
    failures: Mapping[str, Failures] = field(default_factory=dict[str, Failures])
    unheard: frozenset[str] = frozenset()
    unheard_until_s: float = 0.0
    behind: bool = False
    journaled: int = 0
    drain_s: Mapping[str, float] = field(default_factory=dict[str, float])
    routed: NDArray[np.float64] | None = field(default=None, compare=False)
    routed_s: float = 0.0
    seen: tuple[Seen, ...] = field(default=(), compare=False)
    balanced_layer: int = 0
    balanced_s: float = 0.0
    memories: Mapping[str, Memory] = field(default_factory=dict[str, Memory])
