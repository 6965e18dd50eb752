"""What can happen to the router, and what it orders or answers. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from router.view import PROTOCOL, Model

DRAIN_S = 30.0
# What a core can add to its clock, and over 11 days.
LONGEST_DRAIN_S = 1e6

# What can happen.


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The router itself started, with the journal's state. salt: random, of 20 bits."""

    salt: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """A process asks to be a member.

    pool: "expert", "attention", "gateway" or "client". address: where peers reach this member; opaque to the router.
    pid, host: of the member's process. core: first core of its lanes, -1 if unpinned. model_hash: fingerprint of the
    checkpoint; that of every other member; empty: not checked. numerics_class: of the format of the pool's, such as
    bf16; empty: not checked. layers, experts: shape of the placement (MoE layers, logical experts a layer); 0: not
    checked. capacity: (layer, expert) pairs that this server can hold; 0: all. zone: what fails together with it, such
    as a rack; empty: nothing known. expert_bytes: weights of one expert of one layer, as this server loads them; 0: not
    known.
    """

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
    expert_bytes: int = 0
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewed:
    """A member lives, and this is its load. seen: epoch of the newest View that it has."""

    name: str
    incarnation: int
    load: Mapping[str, float] = field(default_factory=dict[str, float])
    seen: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Acked:
    """A member uses the routes of this epoch, and none older. salt: of the term that published it; 0: not said."""

    name: str
    incarnation: int
    epoch: int
    salt: int = 0


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
class Totals:
    """What a member has counted since it began, by word, as it tells the router for its metrics.

    peer: What it did with that member alone. rail: Over that rail alone.

    Words of an expert server, of all its clients: calls, batches, rows, pairs, experts (activated, summed over
    batches), received_bytes, sent_bytes (of rows, without headers), busy_s, not_held, invalid. Of an attention worker,
    with each server that it asks (peer), and of all that it ever asked (no peer): calls, rows, pairs, replies,
    latency_s and service_s (sums over replies), hedges, failovers, lost, corrupt, received_bytes, sent_bytes. Of
    itself: computed_tokens, reused_tokens, drafted_tokens, accepted_tokens, preemptions, busy_s. With a rail named:
    sent_bytes that it carried to the peer, and live, 1 or 0.
    """

    peer: str = ""
    rail: str = ""
    counted: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """An expert server holds these experts, verified, having applied the target of that epoch.

    salt: of the term to which it says so; 0: not said. number: of the server's reports, which rises; 0: not said.
    opened: hashes of the models of which it can hold experts, beyond its own.
    """

    name: str
    incarnation: int
    held: int
    epoch: int
    salt: int = 0
    number: int = 0
    opened: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspected:
    """A peer saw a member misbehave."""

    name: str
    incarnation: int
    by: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """A member goes: at once, or (drain) once its experts are served elsewhere."""

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
class AddModel:
    """The pool must serve one more model, or know one under other words. attention: workers wanted of it.

    numerics_class: of its experts, on the servers that are to hold them; empty: not said. again: whoever starts the
    router repeats what was served before, which changes nothing of a model that the journal knows, removed or not.
    """

    model: Model
    attention: int
    numerics_class: str = ""
    again: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoveModel:
    """A model, by its name or hash, must take no new requests, and go."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Retire:
    """A named member must go once others do all of its work.

    operation: an id that whoever asks chose. unix_s: now, for people. router_pid: where the name is the router's own.
    """

    name: str
    operation: str
    unix_s: float = 0.0
    router_pid: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherAttached:
    """A launcher can start processes on a host; starting: by pool, those that it started and that have not joined."""

    host: str
    starting: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherDetached:
    """The launcher of a host is gone."""

    host: str


Event = (
    Started | Tick | Join | Renewed | Acked | Routed | Loaded | Suspected | Left | Exited | Scale | AddModel
    | RemoveModel | Retire | LauncherAttached | LauncherDetached
)  # fmt: skip


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
    """Answer to Join, Scale, Retire, AddModel or RemoveModel: what was found, what is needed, what to do."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """Answer to Scale: this size is wanted now. why: in words, where the load asked for it rather than anybody."""

    pool: str
    wanted: int
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serves:
    """Answer to AddModel and RemoveModel: the model as it is served now."""

    model: Model


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownMember:
    """Answer to an event of a member that is none: it is fenced, or never was. incarnation: 0 where none was said."""

    name: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stale:
    """Answer to Loaded: the target has lost experts since that epoch, so nothing new was taken from the report."""

    name: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fenced:
    """A member has gone, for ever."""

    name: str
    incarnation: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StartProcess:
    """The launcher of a host must start one more process for a pool."""

    host: str
    pool: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StopProcess:
    """The launcher of a host must end the process of a member that is fenced or has drained; it may be gone."""

    host: str
    name: str
    pid: int


Command = Publish | Joined | Refused | Scaled | Serves | UnknownMember | Stale | Fenced | StartProcess | StopProcess
