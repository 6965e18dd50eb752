"""`eaas roll`: every process of a running cluster replaced by a new one, one after another, while requests run.

Expert servers and attention workers: another is started, then the old one drains (its experts are served and its
streams go on elsewhere before it ends). The gateway: its launcher starts another on the same socket, and the old one
ends with its last stream. The router: it ends and is started again on its journal; nobody on the token path asks it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from eaas.cluster.status import fetch_status
from eaas.gateway.status import replicas_min
from router.client import RouterClient, RouterUnavailable
from router.view import ATTENTION, DRAINING, EXPERT, GATEWAY, SERVING, Member, View

ROUTER = "router"
ROLES = (ROUTER, EXPERT, ATTENTION, GATEWAY)
_LOOK_S = 0.1


class RollFailed(RuntimeError):
    """A process was not replaced in time; the text says which, and what it waits for. The others are as they were."""


class Roll:
    """Replaces the processes of one cluster."""

    def __init__(
        self, url: str, client: RouterClient, *, wait_s: float, drain_s: float, show: Callable[[str], None]
    ) -> None:
        """Args:
        url: Of the gateway.
        wait_s: Longest for each process.
        drain_s: Longest drain of one, before what runs on it is moved.
        show: Gets a line for each process replaced.
        """
        self._url, self._client = url, client
        self._wait_s, self._drain_s, self._show = wait_s, drain_s, show

    def roll(self, pools: Sequence[str]) -> None:
        """Replace every process of these pools, in this order.

        Raises:
            RollFailed: not in time. RouterUnavailable, GatewayUnreachable: not to be reached.
        """
        for pool in pools:
            if pool == ROUTER:
                self._router()
                continue
            for member in self._view().pool(pool):
                began_s = time.monotonic()
                if pool == GATEWAY:
                    self._gateway(member)
                else:
                    self._member(member)
                self._show(f"{member.name} replaced in {time.monotonic() - began_s:.1f} s")

    def _member(self, member: Member) -> None:
        wanted = self._client.status().pools[member.pool].wanted
        self._client.scale(member.pool, wanted, self._drain_s)
        self._client.replace(member)
        self._wait(
            f"{member.name} has not drained, or its pool is not whole",
            lambda view: (
                view.member(member.name) is None
                and len(_serving(view, member.pool)) >= wanted
                and _whole(view)
            ),
        )

    def _gateway(self, member: Member) -> None:
        def gone(view: View) -> bool:
            left = [m for m in view.pool(GATEWAY) if (m.host, m.pid) == (member.host, member.pid)]
            for one in left:
                # Silent for longer than its lease it joins again, under another name.
                if one.state != DRAINING:
                    self._client.replace(one)
            return not left

        self._wait(f"{member.name} still answers what it has begun", gone)
        self._wait("no gateway serves", lambda view: bool(_serving(view, GATEWAY)))

    def _router(self) -> None:
        # The leader last: else each that goes may be the one that has just taken over.
        for name, router in reversed(self._routers().items()):
            began_s = time.monotonic()
            if router["pid"] is None:
                raise RollFailed(f"{name} at {router['address']} does not answer. See `eaas status`.")
            _terminate(router["pid"], name)

            def is_back(name: str = name, pid: int = router["pid"]) -> bool:
                routers = self._routers()
                led = any(router["state"] == SERVING for router in routers.values())
                return led and routers[name]["pid"] != pid

            self._wait_for(f"{name} has not come back", is_back)
            self._show(f"{name} replaced in {time.monotonic() - began_s:.1f} s")

    def _routers(self) -> dict[str, dict[str, Any]]:
        members = fetch_status(self._url)["members"]
        return {member["name"]: member for member in members if member["pool"] == ROUTER}

    def _view(self) -> View:
        return self._client.status().view

    def _wait(self, else_: str, reached: Callable[[View], bool]) -> None:
        self._wait_for(else_, lambda: reached(self._client.status(timeout_s=1.0).view))

    def _wait_for(self, else_: str, reached: Callable[[], bool]) -> None:
        until_s = time.monotonic() + self._wait_s
        while True:
            # It may just be starting again.
            with suppress(RouterUnavailable):
                if reached():
                    return
            if time.monotonic() >= until_s:
                raise RollFailed(
                    f"After {self._wait_s:g} s {else_}. See `eaas status` and `eaas scale`, then roll the rest again."
                )
            time.sleep(_LOOK_S)


def _serving(view: View, pool: str) -> list[Member]:
    return [member for member in view.pool(pool) if member.state == SERVING]


def _whole(view: View) -> bool:
    return not view.pool(EXPERT) or replicas_min(view) >= min(view.replicas_wanted, len(view.pool(EXPERT)))


def _terminate(pid: int, name: str) -> None:
    """SIGTERM to a router of this host. Raises RollFailed."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise RollFailed(
            f"{name} (pid {pid}) is not on this host ({error}). Restart it where it runs."
        ) from None
    try:
        # The pid is the gateway's word: it must name a router.
        if b"router" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            raise RollFailed(f"Pid {pid} is no router of this host. Restart {name} where it runs.")
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    finally:
        os.close(pidfd)
