"""`eaas status` and `eaas scale`: the members and the pools of a cluster as tables, and waiting for a size."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from eaas.ops.terminal import table
from router.access import OPERATOR

if TYPE_CHECKING:
    from router.client import RouterClient
    from router.tls import Credentials
    from router.view import PoolSize

LOOK_S = 0.2


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


def operator_credentials(tls_dir: Path | None) -> Credentials | None:
    """What a command proves itself with to the router; None without a folder. Raises CredentialsInvalid."""
    # Here: gRPC takes a quarter of a second to import, and `eaas status` needs none of it.
    from router.tls import Credentials

    return Credentials(tls_dir / OPERATOR, OPERATOR) if tls_dir is not None else None


def wait_for_size(client: RouterClient, pool: str, wait_s: float) -> PoolSize:
    """The pool's size once it is what is wanted, or after `wait_s` as it is then. Raises RouterUnavailable."""
    until_s = time.monotonic() + wait_s
    while True:
        size = client.status().pools[pool]
        if not size.is_scaling or time.monotonic() >= until_s:
            return size
        time.sleep(min(LOOK_S, max(0.0, until_s - time.monotonic())))


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
