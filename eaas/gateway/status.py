"""GET /status: the cluster as one JSON object, for people and for ``eaas status``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from router import bitmap
from router.view import EXPERT, Member, Retirement, View


@dataclass(frozen=True, kw_only=True)
class RouterStatus:
    """A router as the gateway last saw it. pid: None until it first answered. state: "serving", "standby" or
    "unreachable".
    """

    name: str = "router/0"
    pid: int | None
    address: str
    state: str


def everything(view: View) -> int:
    """Bitmap of all (layer, expert) pairs."""
    return (1 << view.layers * view.experts) - 1


def copies(view: View) -> tuple[int, int]:
    """Servers that hold the expert which has the fewest, and how many (layer, expert) pairs have so few."""
    return bitmap.copies((bitmap.from_bytes(m.serving) for m in view.pool(EXPERT)), everything(view))


def replicas_min(view: View) -> int:
    """Servers that hold the expert which has the fewest; 0 when some expert is held by none."""
    return copies(view)[0]


def _member(member: Member) -> dict[str, Any]:
    return {
        "name": member.name,
        "pool": member.pool,
        "pid": member.pid,
        "state": member.state,
        # Text: above 2^53 a JSON number loses digits in many readers.
        "incarnation": f"{member.incarnation:x}",
        "address": member.address,
        # (layer, expert) pairs that may be asked of an expert server; other pools hold none.
        "experts": member.serving_count if member.pool == EXPERT else None,
        "numerics_class": member.numerics_class,
        "load": dict(member.load),
    }


def cluster_status(
    *,
    model: str,
    view: View | None,
    gateway: Mapping[str, Any],
    routers: Sequence[RouterStatus],
    retirements: Sequence[Retirement] = (),
) -> dict[str, Any]:
    """The whole answer.

    Args:
        view: Newest View, or None before the first.
        gateway: The gateway's own figures; with "name", "pid" and "address".
        routers: The one that leads first.
        retirements: Of members that are told to go and have not gone.
    """
    own = {"incarnation": None, "experts": None, "load": {}}
    members: list[dict[str, Any]] = [
        *({"pool": "router", **own, **asdict(router)} for router in routers),
        {
            "name": gateway["name"],
            "pool": "gateway",
            "state": "serving" if gateway["ready"] else "waiting",
            **own,
            "pid": gateway["pid"],
            "address": gateway["address"],
            "load": {"running": gateway["running"], "waiting": gateway["waiting"]},
        },
    ]
    if view is not None:
        # What it knows of itself is newer than what the router does.
        members.extend(_member(member) for member in view.members if member.name != gateway["name"])
    return {
        "model": model,
        "epoch": view.epoch if view is not None else None,
        "term": view.term if view is not None else None,
        "replicas_wanted": view.replicas_wanted if view is not None else None,
        "replicas_min": replicas_min(view) if view is not None else 0,
        "gateway": dict(gateway),
        "members": members,
        "retirements": [asdict(each) for each in retirements],
    }
