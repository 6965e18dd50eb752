"""`eaas load`: the command line of the load test."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from eaas.ops.terminal import DEFAULT_URL, failing_on, takes


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for, in the user's words."""

    url: Annotated[str, typer.Argument(help="Of any OpenAI-compatible endpoint, with or without /v1.")] = DEFAULT_URL
    rate: Annotated[float | None, typer.Option(help="Requests per second, in the mean; default 1.")] = None
    arrivals: Annotated[
        str,
        typer.Option(
            help="constant, poisson, gamma:SHAPE (below 1 is burstier), closed:STREAMS (each waits for its answer)."
        ),
    ] = "poisson"
    for_: Annotated[str | None, typer.Option("--for", help="Send for so long: 60s (the default), 500ms, 5m.")] = None
    requests: Annotated[int | None, typer.Option(min=1, help="Send no more than so many.")] = None
    model: Annotated[str, typer.Option(help="Default: the first that the endpoint lists.")] = ""
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions.")] = False
    prompts: Annotated[
        Path | None,
        typer.Option(help='Texts, one in a line, or JSON lines with "prompt" or "messages" and perhaps "max_tokens".'),
    ] = None
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of made-up prompts; default 32. Random words by seed.")
    ] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of each answer; default 64.")] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of full length, where the endpoint knows that word.")
    ] = False
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy; else each request has a seed.")] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, prompts and sampling.")] = 0
    slo_ttft: Annotated[str | None, typer.Option(help="Goodput counts requests up to this: 500ms.")] = None
    slo_tpot: Annotated[str | None, typer.Option(help="The same for the time of each output token.")] = None
    slo_e2e: Annotated[str | None, typer.Option(help="The same for the whole request.")] = None
    chaos: Annotated[
        Path | None, typer.Option(help="Plan of faults to inject meanwhile; see `eaas chaos run --help`.")
    ] = None
    reference: Annotated[
        bool, typer.Option("--reference", help="Send the same first without faults, and compare each text.")
    ] = False
    warmup: Annotated[str, typer.Option(help="Left out of the throughput before the first fault.")] = "2s"
    timeout: Annotated[str, typer.Option(help="Longest wait for a request to end.")] = "10m"
    api_key_env: Annotated[str, typer.Option(help="Environment variable with the endpoint's key.")] = "OPENAI_API_KEY"
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON; - prints it.")] = None
    records_file: Annotated[
        Path | None, typer.Option("--records", help="Write every request's record, one line of JSON each.")
    ] = None


_HINTS = get_type_hints(Options, include_extras=True)


@takes({one.name: (_HINTS[one.name], one.default) for one in fields(Options)})
def load(**given: Any) -> None:
    """Load an OpenAI-compatible endpoint and measure what its clients get, with faults on a time line if wanted.

    Latencies count from sending and from the planned time; they part where the client was late (coordinated
    omission). Ctrl-C, SIGTERM and SIGHUP stop sending, revert the faults and report.

    Examples:

      eaas load --rate 5 --for 30s

      eaas load http://127.0.0.1:8000 --arrivals closed:16 --requests 500 --slo-ttft 500ms --slo-tpot 50ms

      eaas load --rate 4 --for 60s --ignore-eos --chaos kill-one.toml --reference

    Exit codes: 0 every request succeeded (and with --reference gave the reference's text, with --chaos every fault was
    injected); 1 not so, or the endpoint can't be reached, or an option makes no sense (the reason is printed); 2 the
    command line can't be read.
    """
    import msgspec
    import uvloop

    from eaas.ops.load.client import EndpointUnreachable
    from eaas.ops.load.report import is_clean
    from eaas.ops.load.session import Session
    from eaas.ops.load.show import progress, tables

    options = Options(**given)
    # Tables go where a pipe does not expect them when the report itself is printed.
    console = Console(stderr=str(options.json_file) == "-")
    with failing_on(EndpointUnreachable, ValueError, OSError):
        with progress(console) as show:
            report, records = uvloop.run(Session(options, show).run())
        console.print(tables(report))
        if options.json_file is not None:
            text = json.dumps(report)
            if str(options.json_file) == "-":
                print(text)
            else:
                options.json_file.write_text(text)
        if options.records_file is not None:
            options.records_file.write_bytes(msgspec.json.Encoder().encode_lines(records))
    raise typer.Exit(0 if is_clean(report) else 1)
