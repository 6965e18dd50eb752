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

beside what their kind of fault has (eaas.ops.chaos.plan): times, by_s, share, peers, where, after, rail;
and raise ChaosRefused when nothing could be injected.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from eaas.ops.chaos.inject import ChaosRefused, open_injector
from eaas.ops.chaos.plan import TEXTS, WORDS, PlanInvalid, Select, plan_by_hand, words_of
from eaas.ops.chaos.runner import run_plan
from router.faults import FaultInvalid

Events = list[dict[str, Any]]


def clear(url: str = "", id: str = "", admin: str = "", key_file: str = "") -> list[str]:
    """End a fault, or all, before their time; ids of those ended. Good as a rollback."""
    with closing(open_injector(url, admin, Path(key_file) if key_file else None)) as injector:
        return injector.clear(id)


def _action(kind: str) -> Callable[..., Events]:
    def act(
        *,
        url: str = "",
        admin: str = "",
        key_file: str = "",
        target: str = "",
        pool: str = "",
        mode: str = "one",
        seed: int = 0,
        **options: Any,
    ) -> Events:
        unknown = sorted(set(options) - set(WORDS.values()))
        if unknown:
            raise ChaosRefused(f"{', '.join(unknown)} unknown; {kind} takes {', '.join(words_of(kind))}.")
        said = {word: options[field] for word, field in WORDS.items() if field in options}
        try:
            plan = plan_by_hand(kind, said, Select(target=target, pool=pool, mode=mode), seed)
        except (PlanInvalid, FaultInvalid) as error:
            raise ChaosRefused(str(error)) from None
        with closing(open_injector(url, admin, Path(key_file) if key_file else None)) as injector:
            events = run_plan(plan, injector)
        for event in events:
            if event.phase == "refused":
                raise ChaosRefused(event.text)
        return [event.to_dict() for event in events]

    act.__name__ = act.__qualname__ = kind.replace("-", "_")
    act.__doc__ = TEXTS[kind][0]
    return act


kill, freeze, slow, delay = _action("kill"), _action("freeze"), _action("slow"), _action("delay")
loss, partition, rail_down, corrupt = (_action(k) for k in ("loss", "partition", "rail-down", "corrupt"))
