"""The cluster of EaaS behind an endpoint, where there is one: its faults by plan, the reports of its expert servers
and the rows of each expert, all on the load's clock.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eaas.cluster.status import GatewayUnreachable, fetch_status
from eaas.ops.chaos.plan import FaultEvent

_EVERY_S = 1.0


class AdminUnreachable(RuntimeError):
    """The router's admin listener did not answer; the text says what to check."""


class PlanRun:
    """A plan that runs beside the load, in a thread, as faults block while they last.

    Attributes:
        events: What came of it, on the load's clock.
        problem: Why it broke off; empty: it did not.
    """

    def __init__(self, path: Path, url: str, clock: Callable[[], float]) -> None:
        """Args: url: of the gateway. clock: seconds since the load's start. Raises PlanInvalid."""
        # Here rather than in the thread: importing takes long enough to make faults late and the load uneven.
        from eaas.ops.chaos.plan import read_plan
        from eaas.ops.chaos.runner import run_plan

        plan, stop = read_plan(path), threading.Event()
        self._clock, self.stop = clock, stop.set
        self._carry_out = lambda: run_plan(plan, url, on_event=self._on_event, stop=stop)
        self.events: list[FaultEvent] = []
        self.problem = ""

    def _on_event(self, event: FaultEvent) -> None:
        text = event.text if event.phase == "refused" else f"{event.kind} {', '.join(event.targets)}"
        # Stamped here: the plan's own clock began some time after it was asked to.
        self.events.append(replace(event, at_s=self._clock(), text=text))

    async def run(self) -> None:
        """Carry it out until its end, or until `stop` reverts what lasts."""
        try:
            await asyncio.to_thread(self._carry_out)
        except Exception as error:
            # The load goes on; whoever reads the report is told that the faults did not.
            self.problem = f"{type(error).__name__}: {error}"


@dataclass(kw_only=True)
class ServerSeries:
    """One expert server's reports. at_s: since the load's start. busy: 0 to 1 of its lanes."""

    at_s: list[float] = field(default_factory=list)
    rows_per_s: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


async def watch_members(url: str, clock: Callable[[], float], servers: dict[str, ServerSeries]) -> None:
    """Add what each expert server reports every second, until cancelled; of an endpoint that is no EaaS nothing."""
    try:
        (await asyncio.to_thread(fetch_status, url))["members"]
    except (GatewayUnreachable, KeyError, TypeError):
        return
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            members = (await asyncio.to_thread(fetch_status, url, _EVERY_S))["members"]
        except GatewayUnreachable:
            continue  # The plan may have injected just that; the gap in the samples shows it.
        now_s = clock()
        for member in members:
            load = member["load"]
            if member["pool"] == "expert" and load:
                series = servers.setdefault(member["name"], ServerSeries())
                series.at_s.append(now_s)
                series.rows_per_s.append(load.get("rows_per_s", 0.0))
                series.busy.append(load.get("busy", 0.0))


def expert_rows(admin: str, key: str = "") -> list[list[int]]:
    """Rows sent to each expert since the router began, by layer, from its admin listener.

    Raises:
        AdminUnreachable: nothing answers there, or it refuses.
    """
    base = admin if "://" in admin else f"http://{admin}"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{base.rstrip('/')}/admin/experts", headers=headers)
        with urllib.request.urlopen(request, timeout=5.0) as response:
            return json.load(response)["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdminUnreachable(
            f"No router answers at {admin}/admin/experts ({error}). Start the cluster with --admin-port and give the "
            f"address that it prints."
        ) from None


def rows_between(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> tuple[list[list[int]], str]:
    """Rows of each expert between two tables of `expert_rows`, and what they lack, in words; empty: nothing.

    A count that went down, or a table that is gone, tells of a router that began anew.
    """
    # Nothing was said before: nothing had been sent.
    base = before or [[0] * len(layer) for layer in after]
    same_shape = [len(layer) for layer in base] == [len(layer) for layer in after]
    between = [
        [late - early for late, early in zip(*pair, strict=True)] for pair in zip(after, base, strict=True)
    ] if same_shape else []  # fmt: skip
    if not same_shape or any(rows < 0 for layer in between for rows in layer):
        return [list(layer) for layer in after], "The router began anew meanwhile: rows since then only."
    return between, ""
