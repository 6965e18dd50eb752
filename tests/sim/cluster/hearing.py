"""The world's account of silence: who was truly heard when, by the router's clock, less the router's own stalls.

Verdicts on silence are checked against it, not against what the core remembers. The suspicion of a silence is
computed anew here, from the silences themselves, where the core has a histogram; the core may be more patient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from router.events import Event, Join, Renewed, Tick
from router.state import Config

if TYPE_CHECKING:
    from tests.sim.cluster.members import Process

_LEARNED = 200
_MOST = 800  # beyond it the core forgets the older half, at its own pace
_DEAD = 8.0


class Known:
    """A member as the judge knows it: what the router was told and said, and when it was heard."""

    __slots__ = (
        "acked",
        "asked_to_drain",
        "begun",
        "heard_s",
        "host",
        "load",
        "model",
        "name",
        "opened",
        "order",
        "pid",
        "pool",
        "process",
        "silences",
        "waits",
        "waits_since_s",
    )

    def __init__(self, name: str, event: Join, heard_s: float, process: Process | None) -> None:
        self.name, self.pool, self.host, self.pid = name, event.pool, event.host, event.pid
        self.model = event.model_hash
        self.load: Mapping[str, float] = {}  # as it last said in this term
        self.opened = {event.model_hash}  # models of which it ever said that it can hold experts
        self.heard_s, self.process = heard_s, process
        self.silences: list[float] = []
        self.asked_to_drain = False
        self.acked = False
        self.begun = False  # it has acked and was shown as ready, so that streams may run on it
        self.waits = 0  # copies ordered of it that it does not hold, and since when just these
        self.waits_since_s = 0.0
        self.order = (0, 0)  # when a copy was last taken back of it, and what it was to hold then


class Hearing:
    """present: members that were not fenced, by incarnation. doubt_s: since when the router must doubt itself.

    fenced_clients: those fenced that may still run: (what is known of them, when their lease ends).
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.present: dict[int, Known] = {}
        self.fenced_clients: dict[int, tuple[Known, float]] = {}
        self.now_s = self.ticked_s = 0.0
        self.began_s = 0.0  # the term, less stalls
        self.judged_s = 0.0  # the last tick, when the core looks at what is late
        self.doubt_s: float | None = None
        self.excused = False

    def restart(self, now_s: float) -> None:
        """A new term hears everybody anew: how they spoke and since when they load is not known."""
        self.now_s = self.ticked_s = self.judged_s = self.began_s = now_s
        self.doubt_s = None
        for known in self.present.values():
            known.heard_s = now_s
            known.silences = []
            known.load = {}
            known.waits_since_s = now_s
        end_s = now_s + self.config.lease_s
        self.fenced_clients = {number: (known, end_s) for number, (known, _) in self.fenced_clients.items()}

    def forget(self, present: dict[int, Known]) -> None:
        """The journal is an older copy: these are its members; who else was one may run until its lease has ended."""
        end_s = self.now_s + self.config.lease_s
        for number, known in self.present.items():
            if number not in present:
                self.fenced_clients[number] = (known, end_s)
        self.present.clear()
        for number, known in present.items():
            self.fenced_clients.pop(number, None)
            known.heard_s = known.waits_since_s = self.now_s
            known.silences = []
            self.present[number] = known

    def before(self, event: Event, now_s: float) -> None:
        """An event is about to be given to the core."""
        if now_s < self.now_s:
            now_s = self.now_s
        self.now_s = now_s
        gap_s = now_s - self.ticked_s
        self.excused = gap_s > self.config.stall_s
        if self.excused:
            stall_s = gap_s - self.config.tick_s
            self.ticked_s = now_s
            for known in self.present.values():
                known.heard_s = min(now_s, known.heard_s + stall_s)
            self.began_s += stall_s
            if self.doubt_s is not None:
                self.doubt_s += stall_s
            self.fenced_clients = {
                number: (known, end_s + stall_s) for number, (known, end_s) in self.fenced_clients.items()
            }
        kind = type(event)
        if kind is Renewed:
            known = self.present.get(event.incarnation)
            if known is not None and known.name == event.name:
                known.silences.append(now_s - known.heard_s)
                known.heard_s = now_s
        elif kind is Tick:
            self.ticked_s = self.judged_s = now_s
            if self._many_missed():
                self.doubt_s = now_s if self.doubt_s is None else self.doubt_s
            else:
                self.doubt_s = None

    def _many_missed(self) -> bool:
        end_s = self.now_s - 2 * self.config.renew_s
        missed = sum(known.heard_s < end_s for known in self.present.values())
        return missed >= 2 and 4 * missed > len(self.present)

    def kept(self) -> tuple[object, ...]:
        """What `before` may change, for `undo`."""
        heard = [(known, known.heard_s, len(known.silences)) for known in self.present.values()]
        return self.now_s, self.ticked_s, self.doubt_s, self.fenced_clients, heard

    def undo(self, kept: tuple[object, ...]) -> None:
        """The event could not be written down: nothing has happened."""
        self.now_s, self.ticked_s, self.doubt_s, self.fenced_clients, heard = kept
        for known, heard_s, count in heard:
            known.heard_s = heard_s
            del known.silences[count:]

    def doubts(self) -> bool:
        """True while so many are silent that the router must blame itself."""
        # Equal sums of floats differ in their last bits.
        patience_s = self.config.doubt_leases * self.config.lease_s - 1e-6
        return self.doubt_s is not None and self.now_s - self.doubt_s < patience_s

    def patience_s(self, known: Known) -> float:
        """The shortest silence for which a member may be taken for dead."""
        config = self.config
        silences = known.silences
        if len(silences) < _LEARNED:
            return config.lease_s - 1e-6
        if len(silences) > _MOST:
            return min(config.least_silence_s, config.lease_s) - 1e-6
        ordered = sorted(max(silence, config.renew_s) for silence in silences)
        percentile_s = ordered[math.ceil(0.99 * len(ordered)) - 1]
        beyond = [silence - percentile_s for silence in ordered if silence > percentile_s]
        mean_s = max(config.lease_s / 50, sum(beyond) / len(beyond) if beyond else 0.0)
        dead_s = percentile_s + (_DEAD - 2) * math.log(10) * mean_s
        return min(config.lease_s, max(config.least_silence_s, dead_s)) - 1e-6

    def may_be_dead(self, known: Known) -> bool:
        """Whether the silence of a member, as the last tick found it, is long enough to take it for dead."""
        silence_s = self.ticked_s - known.heard_s
        return silence_s >= min(self.config.least_silence_s, self.config.lease_s) and silence_s >= self.patience_s(
            known
        )
