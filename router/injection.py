"""Faults on their way to members, and what was injected: the part of the router's shell that breaks things on purpose.

Nothing here touches the core: a fault is told to the process that it names, over the stream on which that process
watches the View, and to nobody else. That process ends it by itself; what is kept here is for whoever looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from router.faults import LONGEST_S, POINT_WAIT_S, Fault, FaultInvalid, FaultRefused, FaultsTaken, Injection
from router.messages import to_message
from router.proto import router_pb2 as pb

log = logging.getLogger(__name__)

MOST_ACTIVE = 64
MOST_NAMES = 256
_REMEMBERED = 256
_LONGEST_WORD = 128
# A member opens its stream again within half a second when it has joined, or the router has come back.
_LISTENING_S = 2.0
_MOMENT_S = 0.01
# A stream whose reader is frozen may be full.
_TELL_S = 1.0


class TooManyFaults(FaultRefused):
    """So many are active already."""


class ChaosNotAllowed(FaultRefused):
    """The router, or a member named, was not started with --allow-chaos."""


class KeyNeeded(FaultRefused):
    """Only the admin listener, which asks for its key, takes faults."""


@dataclass
class _Told:
    fault: Fault
    names: tuple[str, ...]
    at_s: float
    until_s: float


class Watcher:
    """One member's stream: what it is yet to be told, and what it does on command (None: nothing)."""

    def __init__(self, incarnation: int, takes: FaultsTaken | None) -> None:
        self.incarnation, self.takes = incarnation, takes
        self.orders: list[pb.FaultOrder] = []
        self.changed = asyncio.Event()
        # Set while all that was to be told is on its way.
        self.told = asyncio.Event()
        self.told.set()

    def tell(self, order: pb.FaultOrder) -> None:
        """Have the stream carry this."""
        self.orders.append(order)
        self.told.clear()
        self.changed.set()

    def take(self) -> list[pb.FaultOrder]:
        """What is to be sent now."""
        self.changed.clear()
        taken, self.orders = self.orders, []
        return taken


class Injections:
    """The router's list of faults. For its event loop alone.

    Args:
        allowed: The router was started with --allow-chaos.
        members: Incarnations of those of now, by name.
        term: The router's: ids that it gives are given once, whoever leads.
    """

    def __init__(
        self,
        allowed: bool,
        members: Callable[[], Mapping[str, int]],
        term: Callable[[], int],
    ) -> None:
        self.allowed = allowed
        self.keyed = False
        self.counts: Counter[str] = Counter()
        self._members, self._term = members, term
        # All that say that they are the member: none who comes later takes the place of one that is there.
        self._watchers: dict[str, list[Watcher]] = {}
        # By id, and the latest that are over.
        self._active: dict[str, _Told] = {}
        self._over: deque[_Told] = deque(maxlen=_REMEMBERED)
        # Ids, an empty one for all, and until when a member that was away may be under such a fault.
        self._cleared: dict[str, float] = {}
        self._number = 0

    def attach(self, name: str, watcher: Watcher) -> None:
        """A member watches; it is told of the faults meant for it until `detach`, and what was cleared meanwhile."""
        self._watchers.setdefault(name, []).append(watcher)
        under = {id for id, told in self._active.items() if name in told.names}
        for fault_id, until_s in self._cleared.items():
            # One of that id, or any, that began since: it was there to be told.
            if watcher.takes and time.monotonic() < until_s and not (fault_id in under if fault_id else under):
                watcher.tell(pb.FaultOrder(end=fault_id))

    def detach(self, name: str, watcher: Watcher) -> None:
        """Its stream has ended; another may have come already."""
        self._watchers[name].remove(watcher)
        if not self._watchers[name]:
            del self._watchers[name]

    def require_no_key(self) -> None:
        """For callers that bring no key. Raises KeyNeeded."""
        if self.keyed:
            raise KeyNeeded("this router takes faults only over its admin listener, with the key of that.")

    async def inject(self, names: Sequence[str], fault: Fault) -> Injection:
        """Tell each member named; nobody is told unless all can be.

        Args:
            fault: An empty id is replaced.

        Raises:
            ChaosNotAllowed, TooManyFaults, FaultRefused, FaultInvalid: the text says what was found and needed.
        """
        self._require_allowed()
        end_s = time.monotonic() + _LISTENING_S
        while self._deaf(names) and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        injection = self._inject(tuple(dict.fromkeys(names)), fault)
        # It does not answer before: this router may be the next to be killed.
        watchers = [(name, watcher) for name in injection.names for watcher in self._listening(name)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(self._told_or_gone(*each) for each in watchers)), _TELL_S)
        told = {name for name, watcher in watchers if watcher.told.is_set()}
        # Who has gone meanwhile may have been told to.
        if untold := [name for name in injection.names if name not in told and name in self._members()]:
            self.clear(injection.fault.id)
            raise FaultRefused(f"{', '.join(untold)} could not be told: the fault is taken back. Try again.")
        return injection

    async def _told_or_gone(self, name: str, watcher: Watcher) -> None:
        """Until all is on its way to a member, or it is none any more.

        What a kill ends may be gone before its stream says that the order went out.
        """
        while not watcher.told.is_set() and self._members().get(name) == watcher.incarnation:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(watcher.told.wait(), _MOMENT_S)

    def _inject(self, names: tuple[str, ...], fault: Fault) -> Injection:
        self._forget()
        if not 1 <= len(names) <= MOST_NAMES or len(fault.peers) > MOST_NAMES:
            raise FaultInvalid(f"{len(names)} targets and {len(fault.peers)} peers; 1 to {MOST_NAMES} are needed.")
        if any(len(word) > _LONGEST_WORD for word in (fault.id, fault.rail)):
            raise FaultInvalid(f"an id or a rail is longer than {_LONGEST_WORD} characters.")
        if len(self._active) >= MOST_ACTIVE:
            raise TooManyFaults(
                f"{len(self._active)} faults are active, of {MOST_ACTIVE}; clear some, or let them end."
            )
        if fault.id in self._active:
            raise FaultInvalid(f"a fault {fault.id!r} is active already; clear it, or give another id.")
        watchers = [watcher for name in names for watcher in self._takers(name, fault)]
        if unknown := sorted(set(fault.peers) - set(self._members())):
            raise FaultInvalid(f"{', '.join(unknown)} is no member; there are {self._listed()}.")
        drawn = not fault.id
        while not fault.id or (drawn and fault.id in self._active):
            self._number += 1
            fault = replace(fault, id=f"fault-{self._term()}-{self._number}")
        for watcher in watchers:
            watcher.tell(pb.FaultOrder(begin=to_message(fault)))
        now_s = time.monotonic()
        told = _Told(fault=fault, names=names, at_s=now_s, until_s=now_s + fault.lasts_s)
        self._active[fault.id] = told
        self.counts[fault.kind] += 1
        # So that its end is logged when it comes, whoever looks.
        asyncio.get_running_loop().call_later(fault.lasts_s + _MOMENT_S, self._forget)
        log.warning("fault_began id=%s kind=%s names=%s %s", fault.id, fault.kind, ",".join(names), fault)
        return self._shown(told)

    def clear(self, fault_id: str = "") -> list[str]:
        """End a fault, or all, before their time; the ids of those known to this router that were active.

        Members are told whether it is known or not: a router before this one may have begun it.

        Raises:
            ChaosNotAllowed: the router was not started so.
        """
        self._require_allowed()
        self._forget()
        for watcher in (w for watchers in self._watchers.values() for w in watchers if w.takes):
            watcher.tell(pb.FaultOrder(end=fault_id))
        now_s = time.monotonic()
        kept = {id: until_s for id, until_s in self._cleared.items() if until_s > now_s and id != fault_id}
        self._cleared = dict([*kept.items(), (fault_id, now_s + LONGEST_S + POINT_WAIT_S)][-_REMEMBERED:])
        ended = [id for id in self._active if fault_id in ("", id)]
        for id in ended:
            self._end(id, "cleared")
        return ended

    def known(self) -> list[Injection]:
        """Those that are active and the latest that are over, oldest first."""
        self._forget()
        told = sorted([*self._over, *self._active.values()], key=lambda told: told.at_s)
        return [self._shown(each) for each in told]

    @property
    def active(self) -> int:
        """How many last."""
        self._forget()
        return len(self._active)

    def _require_allowed(self) -> None:
        if not self.allowed:
            raise ChaosNotAllowed("this router was not started with --allow-chaos: nothing can be injected.")

    def _deaf(self, names: Sequence[str]) -> bool:
        members = self._members()
        return any(name in members and not self._listening(name) for name in names)

    def _listening(self, name: str) -> list[Watcher]:
        incarnation = self._members().get(name)
        return [watcher for watcher in self._watchers.get(name, ()) if watcher.incarnation == incarnation]

    def _takers(self, name: str, fault: Fault) -> list[Watcher]:
        if name not in self._members():
            raise FaultInvalid(f"{name!r} is no member; there are {self._listed()}.")
        watchers = self._listening(name)
        if not watchers:
            raise FaultRefused(f"{name} does not listen now (it is starting, or cut off); try again.")
        takes = next((watcher.takes for watcher in watchers if watcher.takes), None)
        if takes is None:
            raise ChaosNotAllowed(f"{name} was not started with --allow-chaos.")
        if refusal := takes.refusal(fault):
            raise FaultInvalid(f"{name} {refusal}.")
        for told in self._active.values():
            # Whoever ends one of them wakes the process from the other.
            if fault.kind == "freeze" == told.fault.kind and name in told.names:
                raise FaultRefused(f"{name} is under the freeze {told.fault.id} already; clear it, or let it end.")
        return watchers

    def _listed(self) -> str:
        return ", ".join(sorted(self._members())) or "none"

    def _forget(self) -> None:
        now_s, members = time.monotonic(), self._members()
        for id, told in list(self._active.items()):
            if now_s >= told.until_s or not any(name in members for name in told.names):
                self._end(id, "over")

    def _end(self, id: str, how: str) -> None:
        told = self._active.pop(id)
        told.until_s = min(told.until_s, time.monotonic())
        self._over.append(told)
        log.warning("fault_ended id=%s kind=%s how=%s", id, told.fault.kind, how)

    def _shown(self, told: _Told) -> Injection:
        now_s, unix_s = time.monotonic(), time.time()
        return Injection(
            fault=told.fault,
            names=told.names,
            began_s=unix_s - (now_s - told.at_s),
            ends_s=unix_s - (now_s - told.until_s),
            remaining_s=max(0.0, told.until_s - now_s),
        )
