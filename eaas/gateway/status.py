"""GET /status: the cluster as one JSON object, for people and for ``eaas status``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from router import bitmap
from router.view import ATTENTION, EXPERT, SERVING, Member, Retirement, View, of_model


@dataclass(frozen=True, kw_only=True)
class RouterStatus:
    """A router as the gateway last saw it. pid: None until it first answered. state: "serving", "standby" or
    "unreachable"."""

    name: str = "router/0"
    pid: int | None
    address: str
    state: str


def copies(view: View) -> tuple[int, int]:
    """Servers that hold the expert which has the fewest, and how many (layer, expert) pairs have so few."""
    held = (bitmap.from_bytes(member.serving) for member in view.pool(EXPERT))
    return bitmap.copies(held, bitmap.everything(view.layers, view.experts))


def sleeps(view: View) -> bool:
    """Whether no server is to hold anything, for every model sleeps."""
    return bool(view.models) and all(model.asleep for model in view.models)


def replicas_min(view: View) -> int:
    """Servers that hold the expert which has the fewest, of any model that stays; 0 when one is held by none. As many
    as are wanted, where none is to be held."""
    if sleeps(view):
        return view.replicas_wanted
    each = [copies(of_model(view, model.hash))[0] for model in view.models if not (model.leaving or model.asleep)]
    return min(each, default=copies(view)[0])


def model_facts(view: View, nameless: str = "") -> list[dict[str, Any]]:
    """Each model of a View. state: "serving", "loading", "asleep" or "leaving". replicas: servers that hold the expert
    which has the fewest. workers: attention workers that serve. nameless: what one without a name is called."""
    found: list[dict[str, Any]] = []
    for model in view.models:
        own = of_model(view, model.hash)
        held = 0 if model.asleep else copies(own)[0]
        workers = sum(member.state == SERVING for member in own.pool(ATTENTION))
        state = "leaving" if model.leaving else "asleep" if model.asleep else "serving" if held else "loading"
        name = model.name or nameless or model.hash[:16]
        found.append(asdict(model) | {"name": name, "state": state, "replicas": held, "workers": workers})
    return found


def _member(member: Member, names: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": member.name,
        "pool": member.pool,
        "model": names.get(member.model) if member.pool == ATTENTION else None,
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
    """The whole answer. Args: view: newest View, or None before the first. gateway: the gateway's own figures; with
    "name", "pid" and "address". routers: the one that leads first. retirements: of members that are told to go and have
    not gone."""
    own = {"model": None, "incarnation": None, "experts": None, "load": {}}
    models = model_facts(view, model) if view is not None else []
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
        names = {it["hash"]: it["name"] for it in models}
        members.extend(_member(member, names) for member in view.members if member.name != gateway["name"])
    return {
        "model": model,
        "epoch": view.epoch if view is not None else None,
        "term": view.term if view is not None else None,
        "replicas_wanted": view.replicas_wanted if view is not None else None,
        "replicas_min": replicas_min(view) if view is not None else 0,
        "models": models,
        "gateway": dict(gateway),
        "members": members,
        "retirements": [asdict(each) for each in retirements],
    }
