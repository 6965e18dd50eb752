"""Faults injected on purpose: the words for one act on one process. Pure.

A fault travels from whoever injects it to the router, and from there to the member that it names; that process applies
it and reverts it by itself when `for_s` is over, whoever else is dead by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Protocol

# What each kind does, and the options that it takes beside for_s and seed.
KINDS: Final[Mapping[str, frozenset[str]]] = {
    "kill": frozenset({"where", "after"}),
    "freeze": frozenset({"where", "after"}),
    "slow": frozenset({"times"}),
    "delay": frozenset({"by_s", "peers"}),
    "loss": frozenset({"share", "peers"}),
    "partition": frozenset({"peers"}),
    "rail-down": frozenset({"rail"}),
    "corrupt": frozenset({"share", "where", "peers"}),
}
# Where in the protocol a kill or a freeze can strike: in the client of experts, and in their server.
CLIENT_POINTS: Final = (
    "request-half-written", "request-before-signal", "request-after-signal", "reply-taken", "combined",
    "step-before-tokens", "step-after-tokens",
)  # fmt: skip
SERVER_POINTS: Final = (
    "request-taken", "computed", "reply-half-written", "reply-before-signal", "reply-after-signal", "weights-loaded",
    "client-attached",
)  # fmt: skip
POINTS: Final = (*CLIENT_POINTS, *SERVER_POINTS)
# Where a corruption strikes: rows after their checksum, rows before it, or NaN in place of rows.
CORRUPTIONS: Final = ("wire", "rows", "nan")
LONGEST_S: Final = 3600.0
MOST_TIMES: Final = 1000.0
MOST_DELAY_S: Final = 60.0
# A kill or a freeze at a point that is not passed within this time does not happen.
POINT_WAIT_S: Final = 60.0


class FaultTaker(Protocol):
    """What a process has that does faults to itself."""

    @property
    def takes(self) -> FaultsTaken:
        """What may be asked of it."""
        ...

    @property
    def active(self) -> int:
        """How many faults it is under."""
        ...

    def begin(self, fault: Fault) -> None:
        """Do it, and revert it when its time is over. Does not wait for that."""
        ...

    def end(self, fault_id: str) -> None:
        """Revert it now, or all with an empty id; nothing where it is over."""
        ...


class FaultInvalid(ValueError):
    """No such fault; the text says what was found and what is needed."""


class FaultRefused(Exception):
    """Nothing was injected; the text says why and what would be needed."""


@dataclass(frozen=True, kw_only=True)
class FaultsTaken:
    """What a process does to itself on command: kinds of faults, points of a kill or a freeze, and its rails."""

    kinds: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    rails: tuple[str, ...] = ()

    def refusal(self, fault: Fault) -> str:
        """Why the process does not take this fault; empty if it does."""
        if fault.kind not in self.kinds:
            return f"takes no {fault.kind}; it takes {', '.join(self.kinds)}"
        if fault.kind in ("kill", "freeze") and fault.where and fault.where not in self.points:
            return f"never passes {fault.where}; it passes {', '.join(self.points) or 'no point'}"
        if fault.kind == "rail-down" and fault.rail not in self.rails:
            rails = ", ".join(rail or "the one of UCX's choice, given as an empty name" for rail in self.rails)
            return f"has no rail {fault.rail!r}; it has {rails or 'none, for its transport is shared memory'}"
        return ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One act on one process.

    Attributes:
        id: Of the injection; every process that it hits gets the same.
        kind: One of KINDS.
        for_s: After so long it reverts by itself; a kill does not. A freeze at a point: from when it strikes.
        by_s: Added to every frame (delay).
        times: How many times longer a server's work takes (slow).
        share: Of the frames that are hit, 0 to 1 (loss, corrupt).
        peers: Names of members; only links to them are hit. Empty: all.
        where: A point (kill, freeze; empty: at once) or a place of corruption.
        after: Passes of the point that are let go first.
        rail: Device of the rail that goes down.
        seed: Of whatever is random in it.
    """

    id: str
    kind: str
    for_s: float = 10.0
    by_s: float = 0.0
    times: float = 1.0
    share: float = 1.0
    peers: tuple[str, ...] = ()
    where: str = ""
    after: int = 0
    rail: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise FaultInvalid(f"{self.kind!r} is no fault; give one of {', '.join(KINDS)}.")
        self._within("for_s", self.for_s, 0.0, LONGEST_S)
        self._within("by_s", self.by_s, 0.0, MOST_DELAY_S)
        self._within("times", self.times, 1.0, MOST_TIMES)
        self._within("share", self.share, 0.0, 1.0)
        self._within("after", self.after, 0, 1 << 31)
        self._within("seed", self.seed, 0, (1 << 64) - 1)
        allowed = KINDS[self.kind] | {"id", "kind", "for_s", "seed"}
        for field in fields(self):
            if field.name not in allowed and getattr(self, field.name) != field.default:
                raise FaultInvalid(
                    f"{self.kind} takes no {field.name}; it takes {', '.join(sorted(allowed - {'id', 'kind'}))}."
                )
        places = CORRUPTIONS if self.kind == "corrupt" else ("", *POINTS)
        if "where" in allowed and self.where not in places:
            raise FaultInvalid(
                f"{self.kind} at {self.where!r} is unknown; give one of {', '.join(filter(None, places))}."
            )

    def _within(self, name: str, value: float, least: float, most: float) -> None:
        if not least <= value <= most:
            raise FaultInvalid(f"{name} is {value}; {least:g} to {most:g} is needed.")

    @property
    def lasts_s(self) -> float:
        """After so long nothing of it is left."""
        if self.kind in ("kill", "freeze") and self.where:
            return POINT_WAIT_S + (self.for_s if self.kind == "freeze" else 0.0)
        return 0.0 if self.kind == "kill" else self.for_s

    def to_dict(self) -> dict[str, Any]:
        """Its fields, without those that say nothing."""
        found = asdict(self)
        return {
            field.name: found[field.name]
            for field in fields(self)
            if field.name in ("id", "kind", "for_s") or found[field.name] != field.default
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Fault:
        """What `to_dict` made, or somebody else's words.

        Raises:
            FaultInvalid: an unknown word, or a value that makes no sense.
        """
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(found) - set(known))
        if unknown:
            raise FaultInvalid(f"{', '.join(unknown)} unknown; a fault has {', '.join(known)}.")
        values: dict[str, Any] = dict(found)
        for name, value in values.items():
            default = "" if name in ("id", "kind") else known[name].default
            if name == "peers":
                values[name] = _names(value)
            elif isinstance(value, bool) or not isinstance(
                value, (int, float) if isinstance(default, float) else type(default)
            ):
                raise FaultInvalid(f"{name} is {value!r}; {type(default).__name__} is needed.")
        for name in ("id", "kind"):
            if name not in values:
                raise FaultInvalid(f"{name} is missing.")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One fault and the members that were told of it.

    began_s, ends_s: since 1970, by the router's clock; the end is that of a fault that nobody ends before.
    remaining_s: 0 once it is over.
    """

    fault: Fault
    names: tuple[str, ...]
    began_s: float
    ends_s: float
    remaining_s: float

    @property
    def active(self) -> bool:
        """False once it is over."""
        return self.remaining_s > 0


def _names(found: Any) -> tuple[str, ...]:
    names: list[Any] = list(found) if isinstance(found, list | tuple) else [None]  # pyright: ignore[reportUnknownArgumentType]
    if not all(isinstance(name, str) for name in names):
        raise FaultInvalid(f"peers is {found!r}; a list of members' names is needed.")
    return tuple(names)
