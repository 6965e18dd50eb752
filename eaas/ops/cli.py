"""The command line: `eaas VERB`.

Heavy imports stay inside the verbs, so that `eaas --help` answers at once and no process pays for another's
libraries.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from eaas.ops.certs import certs
from eaas.ops.chaos.cli import chaos_app
from eaas.ops.keys import keys_app
from eaas.ops.load.cli import load
from eaas.ops.roll_command import roll
from eaas.ops.terminal import DEFAULT_URL, fail
from eaas.ops.top.cli import top

if TYPE_CHECKING:
    from router.options import Options

app = typer.Typer(
    name="eaas",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(roll)
app.add_typer(chaos_app, name="chaos")
app.command()(load)
app.command()(certs)
app.add_typer(keys_app, name="keys")
app.command()(top)
console = Console()


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(f"eaas {metadata.version('eaas')}")
        raise typer.Exit()


@app.callback()
def every_verb(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve Mixture-of-Experts models as attention workers and expert servers: when one fails, no client notices.

    Exit codes: 0 done, 1 it failed or an option makes no sense (the reason is printed), 2 the command line can't be
    read.
    """


Url = Annotated[str, typer.Option(help="Address of the gateway, as `eaas serve` prints it.")]
TlsDir = Annotated[
    Path | None,
    typer.Option(help="TLS between the processes: a folder with one of each role, as `eaas certs` makes it."),
]
T = TypeVar("T", bound="Options")
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _own(verb: str, kind: type[T], words: list[str]) -> T:
    """The options of a verb that reads them itself; exits with the reason where they make no sense."""
    from router.options import read

    try:
        return read(kind, verb, words, os.environ)
    except ValueError as error:
        raise fail(str(error)) from None


@app.command(context_settings=PASS_ON, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Serve a model: a router, expert servers, attention workers and the HTTP gateway (`eaas serve --help`)."""
    from eaas.cluster.config import ClusterConfig

    config = _own("serve", ClusterConfig, context.args)
    from eaas.cluster.local import LocalCluster
    from eaas.ops.starting import START_ERRORS, prepare_model, run_cluster, with_model

    def tell(cluster: LocalCluster) -> None:
        # What curl needs beside the address.
        needed = ' -H "authorization: Bearer $EAAS_API_KEY"' if config.asks_for_keys else ""
        admin = "https" if config.tls_dir else "http"
        console.print(
            f"[bold green]ready[/] {config.served_model_name} at {cluster.url}/v1 "
            f"({config.experts} expert servers, {config.replicas} replicas), logs in {cluster.state_dir}. "
            "Ctrl-C stops it. Try:\n"
            f"  curl{needed} {cluster.url}/v1/completions -H 'content-type: application/json' "
            f'-d \'{{"model": "{config.served_model_name}", "prompt": "ROMEO:", "max_tokens": 64}}\'\n'
            f"  eaas status --url {cluster.url}"
            + "".join(f"\nadmin: {admin}://{address}" for address in cluster.admin_addresses),
            highlight=False,
            soft_wrap=True,
        )
        if not config.experts:
            proof = f" --tls-dir {shlex.quote(str(config.tls_dir))}" if config.tls_dir else ""
            # Asked by the router's address, which needs no key of the gateway's.
            console.print(
                "No expert server runs, so requests wait for one: "
                f"eaas scale expert 2 --router {cluster.router_address}{proof}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    try:
        config = with_model(config)
        prepare_model(config.model, config.dtype)
        run_cluster(config, show=_show_event, on_ready=tell)
    except START_ERRORS as error:
        raise fail(str(error)) from None


@app.command(context_settings=PASS_ON, add_help_option=False)
def pool(context: typer.Context) -> None:
    """Serve the experts of a model alone, for a model that runs elsewhere (`eaas pool --help`)."""
    from eaas.cluster.config import PoolConfig

    options = _own("pool", PoolConfig, context.args)
    from eaas.ops.pool import run_pool
    from eaas.ops.starting import PACK_ERRORS, START_ERRORS

    try:
        run_pool(options, _show_event)
    except (*PACK_ERRORS, *START_ERRORS) as error:
        raise fail(str(error)) from None


def _show_event(text: str) -> None:
    console.print(f"[dim]{text}[/]", highlight=False)


def _role(verb: str, text: str) -> None:
    """Add a verb that runs one role alone, for several hosts; the role itself reads its options."""

    @app.command(
        verb, context_settings=PASS_ON, add_help_option=False, help=f"{text} (`eaas {verb} --help`)."
    )
    def run(context: typer.Context) -> None:
        from eaas.settings import ROLES

        # Here already: help and mistakes need none of the role's libraries.
        _own(verb, ROLES[verb].options, context.args)
        os.execv(sys.executable, [sys.executable, "-m", ROLES[verb].module, *context.args])


_role("router", "Run the router alone")
_role("expert", "Run one expert server and join it to a router")
_role("attention", "Run one attention worker and join it to a router")
_role("gateway", "Run the HTTP gateway and join it to a router")
_role("launcher", "Carry out the router's orders for processes with a command or a webhook")


@app.command()
def status(
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the gateway says, as JSON.")] = False,
) -> None:
    """Show the members of a running cluster.

    Exits with 1 when the gateway can't be reached.
    """
    from eaas.cluster.status import GatewayUnreachable, fetch_status
    from eaas.ops.status import status_table

    try:
        state = fetch_status(url)
    except GatewayUnreachable as error:
        raise fail(str(error)) from None
    if as_json:
        print(json.dumps(state))
    else:
        console.print(status_table(state))


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Argument(help="Folder with config.json, that file, or `demo`.")],
    hardware: Annotated[
        str, typer.Option(help="a100, h100, h200, h20, or a TOML file with the numbers of one.")
    ],
    expert_hardware: Annotated[str, typer.Option(help="Of expert servers; default: the same.")] = "",
    tpot_ms: Annotated[float, typer.Option(help="Longest time for an output token.")] = 50.0,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens before an output token, mean; default: 2048, or as many as fit."),
    ] = None,
    devices: Annotated[int, typer.Option(min=1, max=512, help="Most devices in all.")] = 64,
    replicas: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    overlap: Annotated[
        bool, typer.Option(help="Two half batches under way: one computes while one waits.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how many expert servers each attention worker needs, and whether two kinds of process pay at all.

    A prediction from bytes, operations and links for decoding, from the model's config.json alone. What a failure
    costs is not in it: that is the other reason for two kinds of process.

    Examples:

      eaas plan demo --hardware h100

      eaas plan ./Qwen3-30B-A3B --hardware h200 --tpot-ms 30 --context 4096
    """
    from eaas.model.resolve import ModelNotFound
    from eaas.ops.plan import as_dict, plan_table, read_hardware, read_work, verdict
    from eaas.ops.planner import Task, plan

    try:
        attention = read_hardware(hardware)
        expert = read_hardware(expert_hardware) if expert_hardware else attention
        work = read_work(model)
        before = min(2048, work.max_context - 1) if context is None else context
        task = Task(tpot_s=tpot_ms / 1e3, context=before, devices=devices, replicas=replicas, overlap=overlap)
        found = plan(work, attention, expert, task)
    except (ModelNotFound, ValueError) as error:
        raise fail(str(error)) from None
    if as_json:
        print(json.dumps(as_dict(found)))
    else:
        console.print(plan_table(found))
        console.print(verdict(found), highlight=False)


@app.command()
def scale(
    pool: Annotated[str, typer.Argument(help="expert or attention; without it, the pools are shown.")] = "",
    size: Annotated[int | None, typer.Argument(min=0, help="Processes that the pool should have.")] = None,
    drain_s: Annotated[
        float, typer.Option(help="Longest wait for a process that goes to finish what runs on it.")
    ] = 30.0,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Return when the pool has its size; exit 1 if not within this.")
    ] = 0.0,
    router: Annotated[
        str, typer.Option(help="HOST:PORT of the router; default: what the gateway says.")
    ] = "",
    tls_dir: TlsDir = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Show the pools of a running cluster, or make one larger or smaller; requests go on meanwhile.

    Examples:

      eaas scale

      eaas scale expert 6

      eaas scale attention 2 --wait-s 60
    """
    from eaas.cluster.status import GatewayUnreachable, RouterUnknown, router_address
    from eaas.ops.status import operator_credentials, pools_table, wait_for_size
    from router.client import RouterClient, RouterUnavailable, ScaleRefused
    from router.tls import CredentialsInvalid

    if pool and size is None:
        raise fail(f"eaas scale {pool} lacks the size. Give it: eaas scale {pool} 2")
    try:
        client = RouterClient(router or router_address(url), operator_credentials(tls_dir))
        try:
            if size is None:
                console.print(pools_table(client.status().pools))
                return
            state = client.scale(pool, size, drain_s)
            if wait_s:
                state = wait_for_size(client, pool, wait_s)
        finally:
            client.close()
    except (CredentialsInvalid, GatewayUnreachable, RouterUnknown, RouterUnavailable, ScaleRefused) as error:
        raise fail(str(error)) from None
    console.print(pools_table({pool: state}))
    if wait_s and state.is_scaling:
        raise fail(
            f"pool {pool} has {state.live} of {state.wanted} processes after {wait_s:g} s; it goes on changing"
        )


@app.command("make-model")
def make_model_command(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    shape: Annotated[str, typer.Option(help="tiny, S (188 M parameters) or L (1.52 B).")] = "tiny",
    arch: Annotated[str, typer.Option(help="qwen3_moe, mixtral, qwen2_moe or olmoe.")] = "qwen3_moe",
    seed: Annotated[int, typer.Option(help="The same seed gives the same file everywhere.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write a checkpoint with random weights, tokenizer included, which transformers loads too.

    Example: eaas make-model --shape S --arch qwen3_moe --out ./S --seed 1
    """
    from eaas.model.make_model import make_model

    try:
        make_model(shape, arch, out, seed, dtype)
    except (ValueError, OSError) as error:
        raise fail(str(error)) from None
    console.print(f"wrote {out}")


@app.command()
def demo(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, hub id, or `demo`.")] = "demo",
    tokens: Annotated[int, typer.Option(min=8, max=1024, help="Tokens to stream.")] = 200,
    seed: Annotated[int, typer.Option(help="Chooses the moment of the kill.")] = 0,
) -> None:
    """Kill an expert server (SIGKILL) in mid-stream and compare the text with a fault-free run, token for token.

    Exits with 0 when they are equal.
    """
    from eaas.cluster.config import ClusterConfig
    from eaas.ops.demo import run_demo
    from eaas.ops.starting import START_ERRORS, prepare_model, with_model

    try:
        config = with_model(ClusterConfig(model=Path(model), experts=4, port=0))
        prepare_model(config.model, config.dtype)
        same = run_demo(config, tokens=tokens, seed=seed, console=console)
    except START_ERRORS as error:
        raise fail(str(error)) from None
    raise typer.Exit(0 if same else 1)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine can do: compiler, native libraries, instruction sets, cores, memory, transports.

    Exits with 1 when something that serving needs is missing.
    """
    from eaas.ops.doctor import examine, report_table

    findings = examine()
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings]))
    else:
        console.print(report_table(findings))
    raise typer.Exit(0 if all(finding.usable or not finding.required for finding in findings) else 1)


def main() -> None:
    """Entry point of the `eaas` command."""
    app()


if __name__ == "__main__":
    main()
