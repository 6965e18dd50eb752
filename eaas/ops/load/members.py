"""How the load spread behind an EaaS gateway: rows of each expert server over time, rows of each expert over a run."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eaas.cluster.status import GatewayUnreachable, fetch_status

_EVERY_S = 1.0


@dataclass(kw_only=True)
class ServerSeries:
    """One expert server's reports. at_s: since the load's start. busy: 0 to 1 of its lanes."""

    at_s: list[float] = field(default_factory=list)
    rows_per_s: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


class MemberWatch:
    """Samples GET /status of a gateway every second, in a thread; of another endpoint it sees nothing, and says so."""

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self._url, self._clock = url, clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="members", daemon=True)
        self.servers: dict[str, ServerSeries] = {}

    def start(self) -> bool:
        """Begin, if the endpoint is one of EaaS."""
        try:
            fetch_status(self._url)["members"]
        except (GatewayUnreachable, KeyError, TypeError):
            return False
        self._thread.start()
        return True

    def stop(self) -> None:
        """No more samples."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            try:
                members = fetch_status(self._url, timeout_s=_EVERY_S)["members"]
            except GatewayUnreachable:
                continue  # It may be what the plan has struck; the gap in the samples shows it.
            now_s = self._clock()
            for member in members:
                load = member["load"]
                if member["pool"] == "expert" and load:
                    series = self.servers.setdefault(member["name"], ServerSeries())
                    series.at_s.append(now_s)
                    series.rows_per_s.append(load.get("rows_per_s", 0.0))
                    series.busy.append(load.get("busy", 0.0))


def rows_between(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> tuple[list[list[int]], str]:
    """Rows of each expert between two tables of `expert_rows`, and what they lack, in words; empty: nothing.

    A count that went down, or a table that is gone, tells of a router that began anew.
    """
    if before and not (
        [len(layer) for layer in before] == [len(layer) for layer in after]
        and all(
            late >= early
            for pair in zip(after, before, strict=True)
            for late, early in zip(*pair, strict=True)
        )
    ):
        return [list(layer) for layer in after], "The router began anew meanwhile: rows since then only."
    # Nothing was said before: nothing had been sent.
    base = before or [[0] * len(layer) for layer in after]
    return [
        [late - early for late, early in zip(*pair, strict=True)] for pair in zip(after, base, strict=True)
    ], ""


class AdminUnreachable(RuntimeError):
    """The router's admin listener did not answer; the text says what to check."""


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
