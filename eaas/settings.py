"""The roles of a cluster with their options, and what is written from the options' declarations.

    python -m eaas.settings     writes docs/options.md and the chart's values.schema.json

Each option is declared once, by `router.options.option` in the config.py of the package whose it is; there it is also
read, from flags, environment and file. Here are the tables that need all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaas.cluster.config import ClusterConfig, PoolConfig
from eaas.gateway.config import GatewayOptions
from eaas.worker.config import WorkerOptions
from experts.config import ExpertOptions
from router.config import LauncherOptions, RouterOptions
from router.options import EXIT_CODES, Option, Options, options_of, title_of


@dataclass(frozen=True, kw_only=True)
class Role:
    """A process that `eaas NAME` starts. module: what runs it by `python -m`; empty: the command line itself."""

    options: type[Options]
    module: str = ""


ROLES = {
    "serve": Role(options=ClusterConfig),
    "pool": Role(options=PoolConfig),
    "router": Role(options=RouterOptions, module="router"),
    "expert": Role(options=ExpertOptions, module="experts"),
    "attention": Role(options=WorkerOptions, module="eaas.worker"),
    "gateway": Role(options=GatewayOptions, module="eaas.gateway"),
    "launcher": Role(options=LauncherOptions, module="router.launcher"),
}

_ROOT = Path(__file__).resolve().parent.parent
PAGE = _ROOT / "docs" / "options.md"
SCHEMA = _ROOT / "deploy" / "helm" / "eaas" / "values.schema.json"
# Roles that the chart runs, and options that its templates give, so that its values cannot.
_FIXED = {"router", "model", "host", "port", "advertise", "tls_dir", "log_format", "config", "ready_fd", "die_with"}
_CHART = {
    "router": {
        "admin_host", "admin_port", "admin_key_file", "store", "journal", "etcd", "etcd_tls_dir", "cluster", "number",
        "first_model", "experts", "attention", "replicas", "redundant_experts", "autoscale",
    },
    "expert": {"zone", "dtype", "device", "transport", "trust_network"},
    "attention": {"dtype", "device", "transport", "trust_network"},
    "gateway": {
        "tls_cert", "tls_key", "keys_file", "drain_s", "drain_on_term", "served_model_name", "listen_fd",
        "resume_key_file",
    },
}  # fmt: skip
# `helm --set` makes text of 12.5.
_JSON_TYPES = {bool: "boolean", int: "integer", float: ["number", "string"], str: "string", Path: "string"}

_INTRODUCTION = f"""# Options

Written from their declarations by `python -m eaas.settings`; change them there.

Each option of a role is a flag, a variable and a key of a file; the first of them that is there counts. Of the gateway,
for example, `--stall-s 20`, `EAAS_GATEWAY_STALL_S=20`, and with `--config eaas.toml`

```toml
[gateway]
stall_s = 20
```

Ends of names are units: `_s` seconds, `_bytes` bytes, `_tokens` tokens. Several values have commas between them, in the
file they are a list. An option that is on or off is turned off by `--no-` before its name. `eaas serve` and `eaas pool`
pass what they are told to every process that has the option, as flags (`ps` shows them); the variables and tables of
the other roles hold for those processes too.

{EXIT_CODES}
"""


def options_page() -> str:
    """docs/options.md: a table for each group of options, with the roles that have it."""
    groups: dict[type[Options], dict[str, dict[str, Option]]] = {}
    for role, one in ROLES.items():
        for name, option in options_of(one.options).items():
            groups.setdefault(option.owner, {}).setdefault(role, {})[name] = option
    parts = [_INTRODUCTION]
    for owner, by_role in groups.items():
        names = dict.fromkeys(name for options in by_role.values() for name in options)
        rows = [_row({role: options[name] for role, options in by_role.items()}) for name in names]
        has = ", ".join(f"`eaas {role}`" for role in by_role)
        role = next((role for role, one in ROLES.items() if one.options is owner), "")
        title = f"Of `eaas {role}` alone" if role else f"{title_of(owner)}\n\nOf {has}."
        head = "| option | value | default | what it does |\n|---|---|---|---|"
        parts.append("\n".join([f"## {title}\n", head, *rows]) + "\n")
    return "\n".join(parts)


def _row(by_role: dict[str, Option]) -> str:
    defaults = {role: one.default_text for role, one in by_role.items()}
    first = next(iter(by_role.values()))
    texts = set(defaults.values())
    default = texts.pop() if len(texts) == 1 else ", ".join(f"{text} ({role})" for role, text in defaults.items())
    shown = "on or off" if first.kind is bool else first.shown.replace("|", "\\|")
    default = default or ("off" if first.kind is bool else "needed" if first.is_needed else "")
    return f"| `{first.flag}` | {shown} | {default} | {first.help.replace('|', chr(92) + '|')} |"


def chart_schema() -> dict[str, Any]:
    """values.schema.json of the chart: the options that `ROLE.options` may hold, with type, bounds and help."""
    roles = {}
    for role, fixed in _CHART.items():
        found = options_of(ROLES[role].options)
        known = {name: _property(one) for name, one in found.items() if name not in fixed | _FIXED}
        options = {"type": "object", "additionalProperties": False, "properties": known}
        roles[role] = {"type": "object", "properties": {"options": options}}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": roles}


def _property(one: Option) -> dict[str, Any]:
    kind: dict[str, Any] = {"type": _JSON_TYPES[one.kind]}
    kind |= {"enum": list(one.choices)} if one.choices else {}
    bounds = {"minimum": one.least, "maximum": one.most, "exclusiveMinimum": one.above}
    kind |= {name: bound for name, bound in bounds.items() if bound is not None}
    if one.is_several:
        kind = {"type": "array", "items": kind}
    return {"description": one.help, **kind}


def main() -> None:
    """Write both files."""
    PAGE.write_text(options_page())
    SCHEMA.write_text(json.dumps(chart_schema(), indent=2) + "\n")


if __name__ == "__main__":
    main()
