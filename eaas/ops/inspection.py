"""The verbs that look into a model while it serves: `eaas inspect start`, `status`, `stop` and `report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from eaas.cluster.status import GatewayRefused, GatewayUnreachable, ask_gateway
from eaas.ops.terminal import DEFAULT_URL, Json, Url, console, failing_on, say, table

inspect_app = typer.Typer(
    no_args_is_help=True,
    help="Record what the model computes while it serves: hidden states, gates, experts, logits.\n\n"
    "Attention workers must have been started with --inspect-folder, which is where their files go. Where the gateway "
    "asks for keys, an operator's is needed, in EAAS_API_KEY.",
)
_PATH = "/admin/inspect"
_TIMEOUT_S = 10.0
# Where several gateways share an address, a new connection goes to any of them, and one of them has the inspection.
_ASKS = 32
_Of = Annotated[str | None, typer.Option("--model", help="Of several models, this one; default: the gateway's own.")]
_Id = Annotated[str | None, typer.Argument(metavar="[ID]", help="Default: that under way, else that begun last.")]


@inspect_app.command()
def start(
    tap: Annotated[
        list[str],
        typer.Option(
            help="embed, layers.N.attention, layers.N.gate, layers.N.experts, layers.N.expert.E, layers.N.residual, "
            "final_norm or logits; N: a number, a range such as 0-3, or *. Several: --tap A --tap B."
        ),
    ],
    request: Annotated[
        list[str] | None,
        typer.Option(help="Record the requests of these ids, which clients give as X-Request-Id or are told."),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="And this share of the others; default: all, or none if --request."),
    ] = None,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Mean, rms, greatest magnitude and non-finite count of each row.")
    ] = False,
    sink: Annotated[
        str, typer.Option(help="safetensors, npy, arrow, spans (statistics of traced requests) or views.")
    ] = "safetensors",
    policy: Annotated[
        str, typer.Option(help="Where the sink is too slow: drop-oldest, drop-newest, or block: serving waits.")
    ] = "drop-oldest",
    ring_mb: Annotated[int, typer.Option(min=1, max=16384, help="MiB at each worker for what waits.")] = 256,
    for_s: Annotated[float, typer.Option(min=0.1, max=86400, help="Then it ends by itself.")] = 3600.0,
    model: _Of = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Begin an inspection at a gateway. One is under way at a time.

    Examples:

      eaas inspect start --tap 'layers.*.residual' --tap logits --request my-request

      eaas inspect start --tap 'layers.*.gate' --tap 'layers.*.experts' --sink views --share 0.1
    """
    body = {
        "taps": tap,
        "requests": request or [],
        "share": share,
        "statistics": statistics,
        "sink": sink,
        "policy": policy,
        "ring_bytes": ring_mb << 20,
        "for_s": for_s,
        "model": model,
    }
    with failing_on(GatewayUnreachable):
        asked = {name: value for name, value in body.items() if value is not None}
        _show(ask_gateway(url, _PATH, "POST", asked, _TIMEOUT_S), as_json)


@inspect_app.command()
def status(id: _Id = None, model: _Of = None, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Show how the inspection goes, or how the last one went."""
    _show(_found(url, "GET", id, model), as_json)


@inspect_app.command()
def stop(id: _Id = None, model: _Of = None, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """End the inspection; returns when workers have written what they have."""
    _show(_found(url, "DELETE", id or _found(url, "GET", None, model)["id"], model), as_json)


@inspect_app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Of an inspection, with files of safetensors.")],
    model: Annotated[str, typer.Option(help="Checkpoint folder, hub id, or `demo`.")] = "demo",
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("logit-lens.html"),
    most_rows: Annotated[int, typer.Option(min=1, help="Positions shown of all requests.")] = 512,
) -> None:
    """Write a page that shows, layer by layer, what the model would say next: a logit lens, and how its gates drift.

    Examples:

      eaas inspect report ./seen/inspect-1a2b3c4d --model ./Qwen3-30B-A3B
    """
    from eaas.model.loader import resolve_model
    from eaas.ops.logit_lens import logit_lens

    with failing_on(OSError, ValueError):
        logit_lens(folder, resolve_model(model), out, most_rows)
    say(f"written: {out}")


def _found(url: str, method: str, id: str | None, model: str | None) -> dict[str, Any]:
    """What the gateway answers that has the inspection; where none is named, that under way, else the last."""
    path = f"{_PATH}?{urlencode({name: it for name, it in (('id', id), ('model', model)) if it})}"
    found: list[dict[str, Any]] = []
    with failing_on(GatewayUnreachable):
        for left in reversed(range(_ASKS)):
            try:
                found.append(ask_gateway(url, path, method, timeout_s=_TIMEOUT_S))
                if id or found[-1]["under_way"]:
                    return found[-1]
            except GatewayRefused:
                if not left and not found:
                    raise
    return min(found, key=lambda state: state["age_s"])


def _show(state: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(state))
        return
    title = f"{state['id']}, {'under way' if state['under_way'] else 'ended'}: {', '.join(state['taps'])}"
    counts = ("produced", "delivered", "dropped")
    rows = [
        [it["name"], *(f"{it[what]:,}" for what in counts), ": ".join(filter(None, (it["folder"], it["fault"])))]
        for it in state["workers"]
    ]
    head = ["worker", "records", "delivered", "dropped", "folder, and what is wrong"]
    console.print(table(head, rows, title=title))
