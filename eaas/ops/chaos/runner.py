"""Carry out a plan on a cluster that runs, at the plan's times; whatever ends the run ends its faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from eaas.ops.chaos.inject import ChaosRefused, Injector, names_of, open_injector
from eaas.ops.chaos.plan import FaultEvent, Plan, PlanInvalid, Step, choose, in_words

_LOOK_S = 0.5


def run_plan(
    plan: Plan,
    url: str | Injector,
    *,
    on_event: Callable[[FaultEvent], object] = lambda event: None,
    stop: threading.Event | None = None,
) -> list[FaultEvent]:
    """Inject the faults of a plan when they are due, and wait until the last is over; all events, in the order in which
    they came. Args: url: of the gateway of a local cluster, or a way to another. Raises ChaosRefused: nobody answers
    there.

    Members are chosen when a fault is due, among those there then. Whatever ends this early (`stop`, Ctrl-C, a failure
    of `on_event`) ends the faults that last."""
    run = _Run(open_injector(url) if isinstance(url, str) else url, plan, on_event)
    try:
        run.carry_out(stop or threading.Event())
    finally:
        run.revert()
        if isinstance(url, str):
            run.injector.close()
    return run.events


def targets_of(plan: Plan, number: int, step: Step, injector: Injector) -> list[str]:
    """Whom a step hits, were it due now. Raises PlanInvalid, ChaosRefused. Args: number: Of the step in its plan; each
    has dice of its own, so that one left out changes no other."""
    dice = Random(f"{plan.seed} fault {number}")
    return choose(step.select, names_of(injector.members(), step.select.pool), dice)


class _Run:
    def __init__(self, injector: Injector, plan: Plan, on_event: Callable[[FaultEvent], object]) -> None:
        self.injector = injector
        self.events: list[FaultEvent] = []
        self._plan, self._on_event = plan, on_event
        self._began_s = time.monotonic()
        # When each is over by itself, with its event.
        self._active: list[tuple[float, FaultEvent]] = []
        # Those that wait for a point of the protocol, by their ids.
        self._waiting: dict[str, Step] = {}

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def carry_out(self, stop: threading.Event) -> None:
        """Until the last fault is over, or `stop` is set."""
        due = list(enumerate(self._plan.steps))
        # Looked at here too: a plan that is late waits for nothing.
        while (due or self._active) and not stop.is_set():
            next_s = min([step.at_s for _, step in due[:1]] + [end_s for end_s, _ in self._active])
            wait_s = next_s - self._now_s()
            if wait_s > 0:
                # Looking takes a moment, and must not make the next step late.
                if not stop.wait(min(wait_s, _LOOK_S)) and self._active and wait_s > 2 * _LOOK_S:
                    self._look()
                continue
            if due and due[0][1].at_s <= next_s:
                self._begin(*due.pop(0))
            else:
                self._active.sort(key=lambda active: active[0])
                event = self._active.pop(0)[1]
                # Its process would go on waiting for the point.
                self._add(self._ended(event, early=event.id in self._waiting))

    def revert(self) -> None:
        """End what lasts, now."""
        active, self._active = self._active, []
        # All of them before anybody is told: telling may be what failed.
        for event in [self._ended(event, early=True) for _, event in active]:
            self._add(event)

    def _begin(self, number: int, step: Step) -> None:
        names: list[str] = []
        try:
            names = targets_of(self._plan, number, step, self.injector)
            id, text = self.injector.inject(names, step.fault)
        except (PlanInvalid, ChaosRefused) as error:
            phase, id, text = "refused", "", f"{step.fault.kind}: {error}"
        else:
            phase = "began"
        event = FaultEvent(
            at_s=self._now_s(), phase=phase, id=id, kind=step.fault.kind, targets=tuple(names), text=text
        )
        if phase == "began" and step.waits:
            text = f"{text}: waits for that point, at most {step.within_s:g} s"
            event = replace(event, text=text)
            self._waiting[id] = step
        if phase == "began" and step.lasts_s:
            self._active.append((event.at_s + step.lasts_s, event))
        self._add(event)

    def _look(self) -> None:
        """See which are over before their time: their process has gone, or someone else has cleared them."""
        try:
            known = self.injector.over()
        except ChaosRefused:
            return  # The router is away. Each process ends its faults by itself; time will tell.
        over = [active for active in self._active if active[1].id in known]
        self._active = [active for active in self._active if active not in over]
        for _, event in over:
            self._add(self._ended(event, early=False))

    def _ended(self, event: FaultEvent, early: bool) -> FaultEvent:
        what = f"{event.kind} of {', '.join(event.targets)}"
        try:
            text = f"{what}: {self.injector.end(event.id, early)}"
        except ChaosRefused as error:
            text = f"{what} cannot be cleared, and ends by itself: {error}"
        return replace(event, at_s=self._now_s(), phase="ended", text=text)

    def _add(self, event: FaultEvent) -> None:
        self.events.append(event)
        self._on_event(event)


def rehearse(plan: Plan, injector: Injector) -> list[dict[str, Any]]:
    """What a plan would do were it carried out on the cluster as it is now; nothing is done. Returns: {"at_s", "fault",
    "targets", "text"} of each step; without targets where the text says why it cannot be."""
    rehearsed: list[dict[str, Any]] = []
    for number, step in enumerate(plan.steps):
        fault = {word: value for word, value in step.fault.to_dict().items() if word != "id"}
        said: dict[str, Any] = {"at_s": step.at_s, "fault": fault}
        try:
            names = targets_of(plan, number, step, injector)
            said |= {"targets": names, "text": in_words(names, step.fault)}
        except PlanInvalid as error:
            said |= {"targets": [], "text": str(error)}
        rehearsed.append(said)
    return rehearsed
