"""Who there is to hit: the members of a cluster as its gateway, or its router's admin listener, names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eaas.cluster.status import GatewayUnreachable, fetch_status

# A process on its way in or out is no target of a choice among a pool; by its name it can be hit all the same.
_USABLE = ("serving", "suspect", "unreachable", "waiting")


class ChaosRefused(RuntimeError):
    """The fault can't be injected; the text says why."""


def members_of(url: str, timeout_s: float = 5.0) -> list[dict[str, Any]]:
    """The members of the cluster behind the gateway at `url`, router and gateway among them.

    Raises:
        ChaosRefused: no gateway answers there.
    """
    try:
        return fetch_status(url, timeout_s)["members"]
    except GatewayUnreachable as error:
        raise ChaosRefused(str(error)) from None


def names_of(members: Iterable[Mapping[str, Any]], pool: str = "") -> list[str]:
    """Names of members, by pool and number; of a pool, only those at work.

    Args:
        members: With "name", "pool" and "state" each.
    """
    found = [m["name"] for m in members if not pool or (m["pool"] == pool and m["state"] in _USABLE)]
    return sorted(found, key=lambda name: (name.partition("/")[0], int(name.partition("/")[2])))


def pids_of(members: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Pids by name, of those that are known."""
    return {member["name"]: member["pid"] for member in members if member["pid"]}
