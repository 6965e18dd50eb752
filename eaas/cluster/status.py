"""The cluster's state as the gateway tells it: fetched over HTTP and shown as a table."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from rich.table import Table


class GatewayUnreachable(RuntimeError):
    """No gateway answered at the address; the text says what to check."""


def fetch_status(url: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """{"model", "epoch", "gateway": {...}, "members": [...]} from the gateway at `url`.

    Raises:
        GatewayUnreachable: nothing answers there, or something that is no EaaS gateway.
    """
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/status", timeout=timeout_s) as response:
            return json.load(response)
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise GatewayUnreachable(
            f"No EaaS gateway answers at {url} ({error}). Start one with `eaas serve`, or name it with --url."
        ) from None


def status_table(state: Mapping[str, Any]) -> Table:
    """Members of the cluster, one line each."""
    table = Table(title=f"{state['model']}, epoch {state['epoch']}", title_justify="left")
    for heading in ("member", "state", "pid", "incarnation", "experts", "load"):
        table.add_column(heading)
    for member in state["members"]:
        load = ", ".join(f"{key} {_brief(value)}" for key, value in (member.get("load") or {}).items())
        experts = member.get("experts")
        table.add_row(
            member["name"],
            member["state"],
            str(member["pid"]),
            f"{member.get('incarnation') or 0:x}",
            "" if experts is None else str(experts),
            load,
        )
    return table


def _brief(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
