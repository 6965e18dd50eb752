"""Faults that the router passes on, done by this process to itself and reverted by itself.

faults = SelfInflicted(kinds=SERVER_FAULTS, points=SERVER_POINTS)   # where the process allows chaos, else None
router.start(..., faults=faults)
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from p2p import faults
from router.faults import Fault, FaultsTaken

log = logging.getLogger(__name__)

PROCESS_FAULTS: Final = ("kill", "freeze")
CLIENT_FAULTS: Final = (*PROCESS_FAULTS, "delay", "loss", "partition", "corrupt")
SERVER_FAULTS: Final = (*CLIENT_FAULTS, "slow")


class CannotDo(RuntimeError):
    """This process cannot do that fault to itself."""


@dataclass(frozen=True, kw_only=True)
class _Active:
    fault: Fault
    undo: Callable[[], None]
    timer: threading.Timer


class SelfInflicted:
    """The faults of one process; what `router.client.RouterClient.start` takes. For use from any thread."""

    def __init__(
        self, *, kinds: tuple[str, ...] = PROCESS_FAULTS, points: tuple[str, ...] = (), rails: tuple[str, ...] = ()
    ) -> None:
        """Allows faults in this process, for good.

        Args:
            kinds, points: That this kind of process can do, and passes.
            rails: Devices of its transport.
        """
        faults.allow()
        kinds = (*kinds, "rail-down") if rails else kinds
        self.takes = FaultsTaken(kinds=kinds, points=points, rails=rails)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._active: dict[str, _Active] = {}

    @property
    def active(self) -> int:
        """How many this process is under."""
        return len(self._active)

    def begin(self, fault: Fault) -> None:
        """Do it to this process, until its time is over; one of the same id is ended first.

        Raises:
            CannotDo: this process does not take it.
        """
        if refusal := self.takes.refusal(fault):
            raise CannotDo(f"this process {refusal}.")
        self.end(fault.id)
        if fault.kind == "freeze" and any(one.fault.kind == "freeze" for one in list(self._active.values())):
            # Whoever wakes it from one wakes it from both.
            raise CannotDo("this process is under another freeze.")
        log.warning("fault_began %s", fault)
        if fault.kind == "kill" and not fault.where:
            faults.kill()
        undo = self._do(fault)
        timer = threading.Timer(fault.lasts_s, self._end, (fault.id, "over", fault))
        timer.daemon = True
        with self._lock:
            self._active[fault.id] = _Active(fault=fault, undo=undo, timer=timer)
        timer.start()

    def end(self, fault_id: str) -> None:
        """Revert it now, or all with an empty id; nothing where it is over."""
        for id in [fault_id] if fault_id else list(self._active):
            self._end(id, "cleared")

    def _end(self, fault_id: str, how: str, only: Fault | None = None) -> None:
        """Revert what goes by that id; where `only` is given, nothing that began after it."""
        with self._lock:
            active = self._active.get(fault_id)
            if active is None or (only is not None and active.fault is not only):
                return
            del self._active[fault_id]
        active.timer.cancel()
        active.undo()
        log.warning("fault_ended id=%s kind=%s how=%s", fault_id, active.fault.kind, how)

    def _do(self, fault: Fault) -> Callable[[], None]:
        """Do it; returns what reverts it."""
        number = next(self._numbers)
        waker = faults.Waker(fault.for_s) if fault.kind == "freeze" else None
        if waker is not None and not fault.where:
            # Not on the thread that is to hear of its end, and after that thread has noted that it lasts.
            threading.Thread(target=waker.stop, name="fault-freeze", daemon=True).start()
            return waker.close
        faults.arm(
            number,
            fault.where if fault.kind == "corrupt" else fault.kind,
            where=fault.rail or fault.where,
            after=fault.after,
            by_s=fault.by_s,
            times=fault.times,
            share=fault.share,
            peers=fault.peers,
            seed=fault.seed,
            waker=waker.fd if waker is not None else -1,
        )

        def undo() -> None:
            faults.disarm(number)
            if waker is not None:
                waker.close()

        return undo
