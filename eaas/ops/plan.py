"""`eaas plan`: reads a model's configuration and hardware numbers, and shows what eaas.ops.planner makes of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from eaas.model.families import spec_of
from eaas.model.resolve import resolve_model
from eaas.ops.planner import KNOWN, Fleet, Hardware, Plan, Work
from eaas.ops.terminal import table

_CONFIG_LIMIT_BYTES = 16 << 20


class PlanInputInvalid(ValueError):
    """The model's configuration or the hardware's numbers cannot be read; the text says which and why."""


def read_work(model: str) -> Work:
    """The work of a model, from its config.json alone: no weights are needed.

    Args:
        model: A folder with config.json, that file itself, or "demo".

    Raises:
        PlanInputInvalid: not JSON. ModelNotFound: no such model. ConfigInvalid: it cannot be served.
    """
    path = Path(model).expanduser()
    if not path.is_file():
        path = resolve_model(model) / "config.json"
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_CONFIG_LIMIT_BYTES))
    except (OSError, ValueError) as error:
        raise PlanInputInvalid(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanInputInvalid(f"{path}: an object is needed, found {type(config).__name__}")
    return Work.of(spec_of(config))


def read_hardware(name: str) -> Hardware:
    """A known device by its name, or one described by a TOML file with Hardware's fields.

    Raises:
        PlanInputInvalid: neither; or a field is missing, unknown or no number.
    """
    if name in KNOWN:
        return KNOWN[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise PlanInputInvalid(
            f"hardware {name!r} is neither known ({', '.join(KNOWN)}) nor a TOML file. A file has the lines "
            + ", ".join(f"{field.name} = ..." for field in fields(Hardware))
        )
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanInputInvalid(f"{path} cannot be read as TOML: {error}") from error
    found.setdefault("name", path.stem)
    try:
        return Hardware(**found)
    except TypeError as error:
        raise PlanInputInvalid(f"{path}: {error}") from error


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan for --json."""
    return {
        **asdict(plan),
        **{
            kind: asdict(fleet) | {"tokens_per_s": fleet.tokens_per_s, "per_price": fleet.per_price}
            for kind, fleet in (("disaggregated", plan.disaggregated), ("monolithic", plan.monolithic))
            if fleet is not None
        },
    }


def verdict(plan: Plan) -> str:
    """One paragraph: what to run, and why."""
    split, whole = plan.disaggregated, plan.monolithic
    if plan.pays and split is not None:
        each = split.servers / split.workers
        text = f"Yes: {split.workers} attention workers and {split.servers} expert servers, {each:.2g} for each worker."
        text += f" {plan.gain:+.0%} tokens for the price" if whole is not None else ""
    else:
        devices = 0 if whole is None else whole.workers
        text = f"No: speed alone does not pay for two kinds of process; a monolithic fleet of {devices} does better."
        text += (
            f" Disaggregated, tokens for the price change by {plan.gain:+.0%}" if split is not None else ""
        )
    return f"{text.rstrip('.')}: {plan.why}."


def plan_table(plan: Plan) -> Table:
    """Both fleets beside each other."""
    fleets = (plan.disaggregated, plan.monolithic)
    rows: list[tuple[str, Callable[[Fleet], str]]] = [
        (
            "devices",
            lambda f: f"{f.workers} + {f.servers} expert servers" if f.servers else str(f.workers),
        ),
        ("sequences of each worker", lambda f: f"{f.batch:,}"),
        ("time for a token", lambda f: f"{f.tpot_s * 1e3:.1f} ms"),
        ("tokens/s", lambda f: f"{f.tokens_per_s:,.0f}"),
        ("tokens/s for a unit of price", lambda f: f"{f.per_price:,.1f}"),
        ("attention devices busy", lambda f: f"{f.attention_busy:.0%}"),
        ("expert devices busy", lambda f: f"{f.experts_busy:.0%}"),
        ("network and hand-over of a step", lambda f: f"{f.network_s * 1e3:.1f} ms"),
    ]
    return table(
        ("", "disaggregated", "monolithic"),
        ([title, *("cannot" if fleet is None else show(fleet) for fleet in fleets)] for title, show in rows),
    )
