"""The verbs that look into a model while it serves: `eaas inspect start`, `status`, `stop` and `report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from eaas.cluster.status import GatewayUnreachable, ask_gateway
from eaas.ops.terminal import DEFAULT_URL, Json, Url, console, failing_on, say, table

inspect_app = typer.Typer(
    no_args_is_help=True,
    help="Record what the model computes while it serves: hidden states, gates, experts, logits.\n\n"
    "Attention workers must have been started with --inspect-folder, which is where their files go. Where the gateway "
    "asks for keys, an operator's is needed, in EAAS_API_KEY.",
)
_PATH = "/admin/inspect"
_TIMEOUT_S = 10.0


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
        typer.Option(
            help="Record the requests of these ids, which clients give as X-Request-Id or are told."
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="And this share of the others; default: all, or none if --request."),
    ] = None,
    statistics: Annotated[
        bool,
        typer.Option("--statistics", help="Mean, rms, greatest magnitude and non-finite count of each row."),
    ] = False,
    sink: Annotated[
        str, typer.Option(help="safetensors, npy, arrow, spans (statistics of traced requests) or views.")
    ] = "safetensors",
    policy: Annotated[
        str,
        typer.Option(help="Where the sink is too slow: drop-oldest, drop-newest, or block: serving waits."),
    ] = "drop-oldest",
    ring_mb: Annotated[int, typer.Option(min=1, max=16384, help="MiB at each worker for what waits.")] = 256,
    for_s: Annotated[float, typer.Option(min=0.1, max=86400, help="Then it ends by itself.")] = 3600.0,
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
    }
    _show(_asked(url, "POST", {name: value for name, value in body.items() if value is not None}), as_json)


@inspect_app.command()
def status(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Show how the inspection goes, or how the last one went."""
    _show(_asked(url, "GET"), as_json)


@inspect_app.command()
def stop(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """End the inspection; returns when workers have written what they have."""
    _show(_asked(url, "DELETE"), as_json)


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


def _asked(url: str, method: str, body: Any = None) -> dict[str, Any]:
    with failing_on(GatewayUnreachable):
        return ask_gateway(url, _PATH, method, body, _TIMEOUT_S)


def _show(state: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(state))
    else:
        console.print(_table(state))


def _table(state: dict[str, Any]) -> Table:
    title = f"{state['id']}, {'under way' if state['under_way'] else 'ended'}: {', '.join(state['taps'])}"
    rows = [
        [
            worker["name"],
            *(f"{worker[what]:,}" for what in ("produced", "delivered", "dropped")),
            worker["fault"] or worker["folder"],
        ]
        for worker in state["workers"]
    ]
    return table(["worker", "records", "delivered", "dropped", "folder, or what is wrong"], rows, title=title)
