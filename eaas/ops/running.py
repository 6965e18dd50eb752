"""The verbs for a cluster that runs: `eaas status`, `scale`, `roll` and `top`.

What they need of gRPC and of other libraries they import when they run, so that `eaas --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from eaas.cluster.status import GatewayUnreachable, RouterUnknown, fetch_status, router_address
from eaas.gateway.status import replicas_min
from eaas.ops.terminal import DEFAULT_URL, Url, console, fail, failing_on, table
from router.access import OPERATOR
from router.host import host_id
from router.view import ATTENTION, EXPERT, GATEWAY, SERVING, Member, PoolSize, View

if TYPE_CHECKING:
    from router.client import RouterClient
    from router.view import Retirement

# What `eaas roll` replaces, in this order.
ROLLED = ("router", EXPERT, ATTENTION, GATEWAY)
_LOOK_S = 0.2
_ROLL_LOOK_S = 0.1
# `eaas top` says after so long that there is nothing to show.
_FIRST_BOARD_S = 5.0
_Router = Annotated[str, typer.Option(help="HOST:PORT of the router; default: what the gateway says.")]
_TlsDir = Annotated[
    Path | None,
    typer.Option(help="TLS between the processes: a folder with one of each role, as `eaas certs` makes it."),
]


def status(
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the gateway says, as JSON.")] = False,
) -> None:
    """Show the members of a running cluster.

    Exits with 1 when the gateway can't be reached.
    """
    with failing_on(GatewayUnreachable):
        state = fetch_status(url)
    if as_json:
        print(json.dumps(state))
    else:
        console.print(status_table(state))
        if state["retirements"]:
            console.print(retirements_table(state["retirements"]))


def scale(
    pool: Annotated[str, typer.Argument(help="expert or attention; without it, the pools are shown.")] = "",
    size: Annotated[int | None, typer.Argument(min=0, help="Processes that the pool should have.")] = None,
    drain_s: Annotated[
        float, typer.Option(help="Longest wait for a process that goes to finish what runs on it.")
    ] = 30.0,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Return when the pool has its size; exit 1 if not within this.")
    ] = 0.0,
    router: _Router = "",
    tls_dir: _TlsDir = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Show the pools of a running cluster, or make one larger or smaller; requests go on meanwhile.

    Examples:

      eaas scale

      eaas scale expert 6

      eaas scale attention 2 --wait-s 60
    """
    if pool and size is None:
        raise fail(f"eaas scale {pool} lacks the size. Give it: eaas scale {pool} 2")
    with _client_of_router(router, tls_dir, url) as client:
        if size is None:
            console.print(pools_table(client.status().pools))
            return
        state = client.scale(pool, size, drain_s)
        if wait_s:
            state = wait_for_size(client, pool, wait_s)
    console.print(pools_table({pool: state}))
    if wait_s and state.is_scaling:
        raise fail(
            f"pool {pool} has {state.live} of {state.wanted} processes after {wait_s:g} s; it goes on changing"
        )


def retire(
    name: Annotated[str, typer.Argument(help="Member, such as expert/3 or router/0; with --here its pool.")],
    operation: Annotated[str, typer.Option(help="Id; asked again under it nothing more happens.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Return when its process may be ended.")] = False,
    longest_s: Annotated[float, typer.Option(min=0, help="With --wait: exit 1 if not within this.")] = 300.0,
    here: Annotated[
        bool, typer.Option("--here", help="That of this container, by its own --tls-dir.")
    ] = False,
    router: _Router = "",
    tls_dir: _TlsDir = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Have one process go by name once others serve its experts and streams; another takes its place.

    Examples:

      eaas retire expert/3 --wait

      eaas retire attention --here --wait --router eaas-router:7000 --tls-dir /tls
    """
    with _client_of_router(router, tls_dir, url, role=name if here else "") as client:
        if here:
            found = [m.name for m in client.status().view.pool(name) if m.host == host_id()]
            if len(found) != 1:
                raise fail(f"{len(found)} members of pool {name!r} are here, one needed; name one.")
            name = found[0]
        known = until_safe(client, name, operation, longest_s * wait)
    console.print(retirements_table([dataclasses.asdict(known)]))
    if wait and not known.safe_to_terminate:
        raise fail(f"{name} is not safe to terminate after {longest_s:g} s: it waits for {known.waits_for}.")


def roll(
    pools: Annotated[
        list[str] | None,
        typer.Argument(help="router, expert, attention, gateway; default: all, in this order."),
    ] = None,
    wait_s: Annotated[
        float, typer.Option(min=1, help="Longest for each process; exit 1 if not within this.")
    ] = 120.0,
    drain_s: Annotated[
        float, typer.Option(min=1, help="Longest wait for a process that goes to finish what runs on it.")
    ] = 30.0,
    router: _Router = "",
    tls_dir: _TlsDir = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Replace the processes of a running cluster one after another, as an upgrade does; requests go on meanwhile.

    Each is started anew from the code that is installed now, and takes over before the old one ends.

    Examples:

      eaas roll

      eaas roll expert attention --drain-s 10
    """
    wrong = [pool for pool in pools or () if pool not in ROLLED]
    if wrong:
        raise fail(f"{wrong[0]!r} is no pool; give some of {', '.join(ROLLED)}, or none for all.")
    with failing_on(RollFailed), _client_of_router(router, tls_dir, url) as client:
        Roll(url, client, wait_s=wait_s, drain_s=drain_s, show=console.out).roll(pools or ROLLED)


class RollFailed(RuntimeError):
    """A process was not replaced in time; the text says which, and what it waits for. The others are as they were."""


class Roll:
    """Replaces the processes of one cluster, one after another, while requests run.

    Expert servers and attention workers: another is started, then the old one drains (its experts are served and its
    streams go on elsewhere before it ends). The gateway: its launcher starts another on the same socket, and the old
    one ends with its last stream. The router: it ends and is started again on its journal; nobody on the token path
    asks it.
    """

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
            if pool == "router":
                self._router()
                continue
            for member in self._view().pool(pool):
                began_s = time.monotonic()
                self._member(member)
                self._show(f"{member.name} replaced in {time.monotonic() - began_s:.1f} s")

    def _member(self, member: Member) -> None:
        wanted = len(_serving(self._view(), member.pool))
        if member.pool != GATEWAY:
            wanted = self._client.status().pools[member.pool].wanted
            self._client.scale(member.pool, wanted, self._drain_s)
        known = until_safe(self._client, member.name, "", self._wait_s)
        if not known.safe_to_terminate:
            raise self._late(f"{member.name} waits for {known.waits_for}")

        def is_whole() -> bool:
            view = self._view(timeout_s=1.0)
            return len(_serving(view, member.pool)) >= wanted and _whole(view)

        self._wait_for(f"pool {member.pool} is not whole", is_whole)

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
        return {member["name"]: member for member in members if member["pool"] == "router"}

    def _view(self, timeout_s: float = 5.0) -> View:
        return self._client.status(timeout_s=timeout_s).view

    def _wait_for(self, else_: str, reached: Callable[[], bool]) -> None:
        from router.client import RouterUnavailable

        until_s = time.monotonic() + self._wait_s
        while True:
            # It may just be starting again.
            with suppress(RouterUnavailable):
                if reached():
                    return
            if time.monotonic() >= until_s:
                raise self._late(else_)
            time.sleep(_ROLL_LOOK_S)

    def _late(self, what: str) -> RollFailed:
        return RollFailed(
            f"After {self._wait_s:g} s {what}. See `eaas status` and `eaas scale`, then roll the rest again."
        )


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


@contextmanager
def _client_of_router(address: str, tls_dir: Path | None, url: str, role: str = "") -> Iterator[RouterClient]:
    """The router's client for a verb, which ends with status 1 where the router does not do as it asks. role: whose
    certificate is in `tls_dir` itself; empty: an operator's is in its folder there."""
    # gRPC takes a quarter of a second to import, and `eaas status` needs none of it.
    from router.client import OrderRefused, RouterClient, RouterUnavailable
    from router.tls import Credentials, CredentialsInvalid

    with failing_on(CredentialsInvalid, GatewayUnreachable, RouterUnknown, RouterUnavailable, OrderRefused):
        folder = tls_dir and (tls_dir if role else tls_dir / OPERATOR)
        proof = Credentials(folder, role or OPERATOR) if folder is not None else None
        with closing(RouterClient(address or router_address(url), proof)) as client:
            yield client


def top(url: Url = DEFAULT_URL) -> None:
    """Watch a running cluster, live: traffic, attention workers, the load of each layer on each expert server, and
    what happened. The same is shown by a browser at /dashboard of the gateway.

    Keys: q quits, p pauses, s sorts, ? explains. Exits with 1 when the gateway can't be reached. Where the gateway asks
    for a key, put it into EAAS_API_KEY.

    Example: eaas top --url http://127.0.0.1:8001
    """
    try:
        from eaas.ops.top import Feed, FeedRefused, Top
    except ModuleNotFoundError as error:
        raise fail(f"eaas top needs {error.name}, which is not installed: pip install 'eaas[top]'") from None

    with failing_on(FeedRefused):
        board = Feed(url).first(_FIRST_BOARD_S)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise fail(
            "eaas top draws on a terminal, and there is none here. Use eaas status, or /dashboard in a browser."
        )
    said = Top(Feed(url), board).run()
    if said:
        raise fail(said)


def headline(state: Mapping[str, Any]) -> str:
    """One line: whole or degraded, and in what."""
    members, wanted = state["members"], state["replicas_wanted"]
    serving = sum(member["pool"] == "expert" and member["state"] == "serving" for member in members)
    routers = {m["name"]: m["state"] for m in members if m["pool"] == "router"}
    # Standbys are well while one leads.
    well = ("serving", "standby") if "serving" in routers.values() else ()
    away = next((name for name, state in routers.items() if state not in well), "")
    held = state["replicas_min"]
    verdict = "DEGRADED" if away or not state["gateway"]["ready"] or (held or 0) < (wanted or 1) else "whole"
    text = (
        f"{state['model']}: {verdict}, {serving} expert servers serving, every expert on {held} of {wanted}"
    )
    return text + (f"; {away} does not answer, so this is as of epoch {state['epoch']}" if away else "")


def load_words(load: Mapping[str, float]) -> str:
    """What a member reports of its load, in words: what people ask for first, and nothing of its links."""
    said = (
        ("running", "{:.0f} running"),
        ("waiting", "{:.0f} waiting"),
        ("busy", "busy {:.0%}"),
        ("tokens_per_s", "{:,.0f} tokens/s"),
        ("rows_per_s", "{:,.0f} rows/s"),
        ("kv_use", "KV {:.0%}"),
        ("clients", "{:.0f} clients"),
    )
    return ", ".join(form.format(load[word]) for word, form in said if word in load)


def status_table(state: Mapping[str, Any]) -> Table:
    """Members of the cluster, one line each, by pool and number."""
    members = sorted(state["members"], key=lambda m: (m["pool"], int(m["name"].rpartition("/")[2])))
    rows = [
        (
            member["name"],
            member["state"],
            str(member["pid"] or "?"),
            "" if member["experts"] is None else str(member["experts"]),
            load_words(member["load"] or {}),
        )
        for member in members
    ]
    return table(("member", "state", "pid", "experts", "load"), rows, title=headline(state))


def retirements_table(retirements: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each member that is retired: since when, what is left, and under which operation."""
    head = ("retired", "state", "since", "waits for", "experts only here", "requests", "operation")
    rows = [
        (
            *(each["name"], "safe to terminate" if each["safe_to_terminate"] else each["state"]),
            time.strftime("%F %T", time.localtime(each["asked_unix_s"])),
            *map(str, (each["waits_for"], each["only_here"], each["running"], each["operation"])),
        )
        for each in retirements
    ]
    return table(head, rows)


def until_safe(client: RouterClient, name: str, operation: str, wait_s: float) -> Retirement:
    """Have a member go; how far it has come when its process may be ended, or after `wait_s`. Raises as the client."""
    from router.client import RouterUnavailable

    until_s = time.monotonic() + wait_s
    known = client.retire(name, operation)
    while not known.safe_to_terminate and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        # It may just be starting again.
        with suppress(RouterUnavailable):
            known = client.retire(name, known.operation, timeout_s=1.0)
    return known


def wait_for_size(client: RouterClient, pool: str, wait_s: float) -> PoolSize:
    """The pool's size once it is what is wanted, or after `wait_s` as it is then. Raises RouterUnavailable."""
    until_s = time.monotonic() + wait_s
    while True:
        size = client.status().pools[pool]
        if not size.is_scaling or time.monotonic() >= until_s:
            return size
        time.sleep(min(_LOOK_S, max(0.0, until_s - time.monotonic())))


def pools_table(pools: Mapping[str, PoolSize]) -> Table:
    """One line for each pool."""
    head = ("pool", "wanted", "live", "starting", "draining", "bounds", "held up")
    return table(
        head,
        (
            (
                name,
                *map(str, (size.wanted, size.live, size.starting, size.draining)),
                f"{size.least} to {size.most}",
                size.held_up,
            )
            for name, size in pools.items()
        ),
    )
