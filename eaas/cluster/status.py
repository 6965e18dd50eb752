"""The cluster's state as the gateway tells it: fetched over HTTP and shown as a table."""

from __future__ import annotations

import json
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
    base = url if "://" in url else f"http://{url}"
    base = base.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{base}/status", timeout=timeout_s) as response:
            return json.load(response)
    except (OSError, ValueError) as error:
        raise GatewayUnreachable(
            f"No EaaS gateway answers at {url} ({error}). Start one with `eaas serve`, or name it with --url."
        ) from None


def headline(state: Mapping[str, Any]) -> str:
    """One line: whole or degraded, and in what."""
    members, wanted = state["members"], state["replicas_wanted"]
    serving = sum(member["pool"] == "expert" and member["state"] == "serving" for member in members)
    away = next((m["name"] for m in members if m["pool"] == "router" and m["state"] != "serving"), "")
    held = state["replicas_min"]
    verdict = "DEGRADED" if away or not state["gateway"]["ready"] or (held or 0) < (wanted or 1) else "whole"
    text = (
        f"{state['model']}: {verdict}, {serving} expert servers serving, every expert on {held} of {wanted}"
    )
    return text + (f"; {away} does not answer, so this is as of epoch {state['epoch']}" if away else "")


def status_table(state: Mapping[str, Any]) -> Table:
    """Members of the cluster, one line each, by pool and number."""
    table = Table(title=headline(state), title_justify="left")
    for heading in ("member", "state", "pid", "experts", "load"):
        table.add_column(heading)
    for member in sorted(state["members"], key=lambda m: (m["pool"], int(m["name"].rpartition("/")[2]))):
        load = ", ".join(f"{key} {value:.4g}" for key, value in sorted((member["load"] or {}).items()))
        experts = "" if member["experts"] is None else str(member["experts"])
        table.add_row(member["name"], member["state"], str(member["pid"] or "?"), experts, load)
    return table
