"""A chaos plan that runs beside a load, and its events on the load's clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eaas.ops.load.judge import FaultNote

if TYPE_CHECKING:
    from eaas.ops.chaos.runner import FaultEvent


class PlanRun:
    """A plan in a thread of its own, as faults block while they last."""

    def __init__(self, path: Path, url: str, clock: Callable[[], float]) -> None:
        """Args: url: of the gateway. clock: seconds since the load's start.

        Raises:
            PlanInvalid (of eaas.ops.chaos.plan): no such plan.
        """
        # Here rather than in the thread: importing takes long enough to make faults late and the load uneven.
        from eaas.ops.chaos.plan import read_plan
        from eaas.ops.chaos.runner import run_plan

        self._run_plan: Callable[..., list[FaultEvent]] = run_plan
        self._plan, self._url, self._clock = read_plan(path), url, clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self.notes: list[FaultNote] = []
        self.problem = ""

    def start(self) -> None:
        """Begin; the plan's times count from now."""
        self._thread.start()

    def stop(self) -> None:
        """Revert what lasts and inject nothing more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        def on_event(event: FaultEvent) -> None:
            refused = event.phase == "refused"
            note = FaultNote(
                # Stamped here: the plan's own clock began some time after it was asked to.
                at_s=self._clock(),
                phase=event.phase,
                id=event.id,
                kind=event.kind,
                text=event.text if refused else f"{event.kind} {', '.join(event.targets)}",
            )
            self.notes.append(note)

        try:
            self._run_plan(self._plan, self._url, on_event=on_event, stop=self._stop)
        except Exception as error:
            # The load goes on; whoever reads the report is told that the faults did not.
            self.problem = f"{type(error).__name__}: {error}"
