"""The cluster's state as the gateway tells it: fetched over HTTP and shown as a table."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from rich.table import Table

# The key that verbs of the command line send to a gateway.
KEY_VARIABLE = "EAAS_API_KEY"


class GatewayUnreachable(RuntimeError):
    """No gateway answered at the address; the text says what to check."""


class RouterUnknown(RuntimeError):
    """The gateway does not know its router; the text says what to do."""


def asking(url: str, body: bytes | None = None) -> urllib.request.Request:
    """A GET, or a POST of JSON, with the key of EAAS_API_KEY where there is one."""
    key = os.environ.get(KEY_VARIABLE, "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return urllib.request.Request(url, body, headers | ({"content-type": "application/json"} if body else {}))


def fetch_status(url: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """{"model", "epoch", "gateway": {...}, "members": [...]} from the gateway at `url`.

    Raises:
        GatewayUnreachable: nothing answers there, or something that is no EaaS gateway.
    """
    base = url if "://" in url else f"http://{url}"
    base = base.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(asking(f"{base}/status"), timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):
            raise GatewayUnreachable(f"The gateway at {url} answers {error.code} to /status.") from None
        raise GatewayUnreachable(
            f"The gateway at {url} asks for an operator's key (status {error.code}). Put one that "
            f"`eaas keys new FILE NAME --operator` made into {KEY_VARIABLE}."
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLError):
            raise GatewayUnreachable(
                f"What answers at {url} is not trusted ({error}). If it is yours, name the CA that signed its "
                "certificate: SSL_CERT_FILE=certs/ca/ca.pem; and its certificate must be for that name."
            ) from None
        raise GatewayUnreachable(
            f"No EaaS gateway answers at {url} ({error}). Start one with `eaas serve`, or name it with --url."
        ) from None


def router_address(url: str) -> str:
    """host:port of the router of the gateway at `url`; of several, all with commas between.

    Raises:
        GatewayUnreachable: no gateway there. RouterUnknown: one without a router.
    """
    members = fetch_status(url)["members"]
    address = ",".join(member["address"] for member in members if member["pool"] == "router")
    if not address:
        raise RouterUnknown(f"The gateway at {url} names no router; name it with --router HOST:PORT.")
    return address


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
    table = Table(title=headline(state), title_justify="left")
    for heading in ("member", "state", "pid", "experts", "load"):
        table.add_column(heading)
    for member in sorted(state["members"], key=lambda m: (m["pool"], int(m["name"].rpartition("/")[2]))):
        load = load_words(member["load"] or {})
        experts = "" if member["experts"] is None else str(member["experts"])
        table.add_row(member["name"], member["state"], str(member["pid"] or "?"), experts, load)
    return table
