"""Faults as plain functions, which chaostoolkit can call: arguments and results are what JSON can say.

    {"type": "action", "name": "one server dies",
     "provider": {"type": "python", "module": "eaas.ops.chaos.actions", "func": "kill",
                  "arguments": {"url": "http://127.0.0.1:8000", "pool": "expert", "seed": 7}}}

Each returns when its fault is over, with what came of it; with "background": true chaostoolkit goes on meanwhile. All
take:

    url         of the gateway, on this host; or
    admin       of a router's admin listener, with key_file
    target      one member, "expert/3"; or
    pool, mode  some of a pool: "one", "all", "fixed:2", "percent:25"
    seed        of the choice, and of what is random in the fault
    for_s       seconds, or "30s"

and raise ChaosRefused when nothing could be injected.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from eaas.ops.chaos.inject import open_injector
from eaas.ops.chaos.plan import Plan, PlanInvalid, Select, Step, fault_of
from eaas.ops.chaos.runner import run_plan
from eaas.ops.chaos.targets import ChaosRefused
from router.faults import FaultInvalid

Events = list[dict[str, Any]]


def kill(*, where: str = "", after: int = 0, **whom: Any) -> Events:
    """End processes with SIGKILL: now, or `after` passes of a point of the protocol (`where`)."""
    return _one("kill", {"where": where, "after": after}, **whom)


def freeze(*, for_s: float | str = 10.0, where: str = "", after: int = 0, **whom: Any) -> Events:
    """Stop processes with SIGSTOP for a while."""
    return _one("freeze", {"for": for_s, "where": where, "after": after}, **whom)


def slow(*, times: float = 10.0, for_s: float | str = 10.0, **whom: Any) -> Events:
    """Make expert servers take `times` as long for their work."""
    return _one("slow", {"for": for_s, "times": times}, **whom)


def delay(
    *, by_s: float | str = 0.005, for_s: float | str = 10.0, peers: list[str] | None = None, **whom: Any
) -> Events:
    """Make frames late by `by_s`, on links to `peers` or on all."""
    return _one("delay", {"for": for_s, "by": by_s, "peers": peers or []}, **whom)


def loss(
    *, share: float = 0.1, for_s: float | str = 10.0, peers: list[str] | None = None, **whom: Any
) -> Events:
    """Lose a share of the frames, on links to `peers` or on all."""
    return _one("loss", {"for": for_s, "share": share, "peers": peers or []}, **whom)


def partition(*, for_s: float | str = 10.0, peers: list[str] | None = None, **whom: Any) -> Events:
    """Cut members off from `peers`, or from all others."""
    return _one("partition", {"for": for_s, "peers": peers or []}, **whom)


def rail_down(*, rail: str = "", for_s: float | str = 10.0, **whom: Any) -> Events:
    """Take a rail of members down."""
    return _one("rail-down", {"for": for_s, "rail": rail}, **whom)


def corrupt(
    *,
    where: str = "wire",
    share: float = 0.1,
    for_s: float | str = 10.0,
    peers: list[str] | None = None,
    **whom: Any,
) -> Events:
    """Damage a share of the frames after their checksum ("wire"), or of the rows before it ("rows", "nan")."""
    return _one("corrupt", {"for": for_s, "where": where, "share": share, "peers": peers or []}, **whom)


def clear(url: str = "", id: str = "", admin: str = "", key_file: str = "") -> list[str]:
    """End a fault, or all, before their time; ids of those ended. Good as a rollback."""
    with closing(open_injector(url, admin, Path(key_file) if key_file else None)) as injector:
        return injector.clear(id)


def _one(
    kind: str,
    options: dict[str, Any],
    *,
    url: str = "",
    admin: str = "",
    key_file: str = "",
    target: str = "",
    pool: str = "",
    mode: str = "one",
    seed: int = 0,
) -> Events:
    try:
        select = Select(target=target, pool=pool, mode=mode)
        step = Step(at_s=0.0, select=select, fault=fault_of(kind, seed, options))
    except (PlanInvalid, FaultInvalid) as error:
        raise ChaosRefused(str(error)) from None
    with closing(open_injector(url, admin, Path(key_file) if key_file else None)) as injector:
        events = run_plan(Plan(seed=seed, steps=(step,)), injector)
    for event in events:
        if event.phase == "refused":
            raise ChaosRefused(event.text)
    return [event.to_dict() for event in events]
