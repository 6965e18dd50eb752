"""Between faults and those of router.proto."""

from __future__ import annotations

from dataclasses import dataclass

from router.faults import Fault, FaultsTaken
from router.proto import router_pb2 as pb


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


def fault_message(fault: Fault) -> pb.Fault:
    """Wire form of a fault."""
    return pb.Fault(
        id=fault.id,
        kind=fault.kind,
        for_s=fault.for_s,
        by_s=fault.by_s,
        times=fault.times,
        share=fault.share,
        peers=fault.peers,
        where=fault.where,
        after=fault.after,
        rail=fault.rail,
        seed=fault.seed,
    )


def fault_of(message: pb.Fault) -> Fault:
    """The fault in a message. Raises FaultInvalid."""
    return Fault(
        id=message.id,
        kind=message.kind,
        for_s=message.for_s,
        by_s=message.by_s,
        times=message.times,
        share=message.share,
        peers=tuple(message.peers),
        where=message.where,
        after=message.after,
        rail=message.rail,
        seed=message.seed,
    )


def injection_message(injection: Injection) -> pb.Injection:
    """Wire form of an injection."""
    return pb.Injection(
        fault=fault_message(injection.fault),
        names=injection.names,
        began_s=injection.began_s,
        ends_s=injection.ends_s,
        remaining_s=injection.remaining_s,
    )


def injection_of(message: pb.Injection) -> Injection:
    """The injection in a message. Raises FaultInvalid."""
    return Injection(
        fault=fault_of(message.fault),
        names=tuple(message.names),
        began_s=message.began_s,
        ends_s=message.ends_s,
        remaining_s=message.remaining_s,
    )


def taken_message(taken: FaultsTaken) -> pb.FaultsTaken:
    """Wire form of what a process takes."""
    return pb.FaultsTaken(kinds=taken.kinds, points=taken.points, rails=taken.rails)


def taken_of(request: pb.WatchRequest) -> FaultsTaken | None:
    """What a watcher takes; None: it was not started with --allow-chaos."""
    if not request.HasField("takes"):
        return None
    takes = request.takes
    return FaultsTaken(kinds=tuple(takes.kinds), points=tuple(takes.points), rails=tuple(takes.rails))
