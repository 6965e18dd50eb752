"""The command line: `eaas VERB`.

Heavy imports stay inside the verbs, so that `eaas --help` answers at once and no process pays for another's
libraries.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eaas.ops.certs import certs
from eaas.ops.chaos.cli import chaos_app
from eaas.ops.keys import keys_app
from eaas.ops.load.cli import load
from eaas.ops.pool import pool
from eaas.ops.roll_command import roll
from eaas.ops.terminal import DEFAULT_URL, fail
from eaas.ops.top.cli import top

app = typer.Typer(
    name="eaas",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(pool)
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
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder, hub id, or `demo`, the built-in model.")
    ] = "demo",
    experts: Annotated[int, typer.Option(help="Expert servers.")] = 2,
    attention: Annotated[int, typer.Option(help="Attention workers.")] = 1,
    replicas: Annotated[
        int, typer.Option(help="Servers that hold each expert; 2 survive any single loss.")
    ] = 2,
    redundant_experts: Annotated[
        int, typer.Option(min=0, help="Copies in each layer beyond the replicas; they follow the load.")
    ] = 0,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port of the HTTP endpoint; 0 takes a free one.")
    ] = 8000,
    host: Annotated[
        str,
        typer.Option(
            help="IP address to listen on; beyond loopback it needs --tls-cert, --tls-key and --keys-file."
        ),
    ] = "127.0.0.1",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float32, int8, or auto: what the checkpoint says.")
    ] = "auto",
    served_model_name: Annotated[
        str, typer.Option(help="Name that clients use; default: the model's own.")
    ] = "",
    cores: Annotated[str, typer.Option(help="CPU cores to use, such as 0,1; default: all allowed.")] = "",
    expert_lanes: Annotated[
        int, typer.Option(min=0, help="Cores of each expert server; 0 deals them out among the servers.")
    ] = 0,
    transport: Annotated[
        str, typer.Option(help="How processes reach each other: shm, nixl, or nixl:eth0,eth1 (its rails).")
    ] = "shm",
    device: Annotated[
        str,
        typer.Option(
            help="What computes, dealt out in each pool: cpu, GPUs as cuda:0,cuda:1, both as cuda:0,cpu, or "
            "interpreter (the GPUs' kernels on the CPU, very slowly)."
        ),
    ] = "cpu",
    kv_tokens: Annotated[int, typer.Option(min=16, help="Tokens of KV cache per attention worker.")] = 65536,
    deadline_s: Annotated[
        float, typer.Option(help="Longest wait for a lost expert or worker to return.")
    ] = 30.0,
    routers: Annotated[int, typer.Option(help="Routers; one leads, the others take over. Needs --etcd.")] = 1,
    etcd: Annotated[
        str, typer.Option(help="Keep the routers' state in etcd, such as http://127.0.0.1:2379.")
    ] = "",
    autoscale: Annotated[
        list[str] | None,
        typer.Option(
            help="POOL:LEAST..MOST, such as expert:1..6: its size follows its load; once for each pool."
        ),
    ] = None,
    admin_port: Annotated[
        int | None,
        typer.Option(help="Port of scaling, health and metrics of the router over HTTP; 0 takes a free one."),
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that requests to --admin-port must bring.")
    ] = None,
    allow_chaos: Annotated[
        bool, typer.Option("--allow-chaos", help="Take faults injected on purpose.")
    ] = False,
    trace_url: Annotated[
        str,
        typer.Option(help="Send traces there by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces."),
    ] = "",
    trace_share: Annotated[
        float, typer.Option(help="Share of requests traced, 0 to 1, where the client does not say.")
    ] = 1.0,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM chain: the endpoint speaks HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of --tls-cert.")] = None,
    keys_file: Annotated[
        Path | None, typer.Option(help="Who may ask: API keys, as `eaas keys` makes them.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that requests must bring, instead of --keys-file; may be given again. Who sees this host's "
            "processes sees it."
        ),
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(help="Prefix of every path, such as /llm, where a proxy passes requests on with it."),
    ] = "",
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Longest prompt and output together; default: what the model allows."),
    ] = None,
    allowed_origins: Annotated[
        str,
        typer.Option(help="Pages of these origins may ask from a browser: https://a.example,...; * for any."),
    ] = "",
    trust_request_chat_template: Annotated[
        bool, typer.Option(help="Requests may bring a chat template of their own.")
    ] = False,
    return_tokens_as_token_ids: Annotated[
        bool, typer.Option(help="Log-probabilities name tokens token_id:7 where a request does not say.")
    ] = False,
    enable_force_include_usage: Annotated[
        bool, typer.Option(help="Every chunk of every stream has its usage.")
    ] = False,
    max_logprobs: Annotated[
        int | None,
        typer.Option(
            min=-1, help="Likeliest tokens told beside each, at most; default: 20; -1: up to 4,096."
        ),
    ] = None,
    tls_dir: TlsDir = None,
    log_format: Annotated[str, typer.Option(help="text, or json: one object for each line.")] = "text",
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder for journal and logs; default: $XDG_STATE_HOME/eaas.")
    ] = None,
) -> None:
    """Serve a model: a router, expert servers, attention workers and the HTTP gateway, each its own process.

    Examples:

      eaas serve

      eaas serve ./my-checkpoint --experts 4 --replicas 2 --port 8001
    """
    from eaas.cluster.local import LocalCluster
    from eaas.cluster.process import StartFailed
    from eaas.cluster.state_dir import StateDirUnusable
    from eaas.gateway.keys import digest_of
    from eaas.ops.starting import prepare_model, start_or_stop
    from router.tls import CredentialsInvalid

    config = cluster_config(
        model,
        experts,
        attention,
        replicas,
        port,
        host,
        dtype,
        served_model_name,
        cores,
        kv_tokens,
        deadline_s,
        expert_lanes,
        transport,
        routers,
        etcd,
        tuple(autoscale or ()),
        admin_port,
        admin_key_file,
        redundant_experts,
        allow_chaos,
        device,
        trace_url=trace_url,
        trace_share=trace_share,
        tls_cert=tls_cert,
        tls_key=tls_key,
        keys_file=keys_file,
        api_key_digests=tuple(digest_of(key) for key in api_key or ()),
        root_path=root_path,
        max_model_len=max_model_len,
        allowed_origins=allowed_origins,
        trust_request_chat_template=trust_request_chat_template,
        return_tokens_as_token_ids=return_tokens_as_token_ids,
        enable_force_include_usage=enable_force_include_usage,
        max_logprobs=max_logprobs,
        tls_dir=tls_dir,
        log_format=log_format,
        state_dir=state_dir,
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    prepare_model(config.model, config.dtype)
    try:
        cluster = LocalCluster(
            config, on_event=lambda text: console.print(f"[dim]{text}[/]", highlight=False)
        )
    except (CredentialsInvalid, StateDirUnusable) as error:
        raise fail(str(error)) from None
    # What curl needs beside the address.
    needed = ' -H "authorization: Bearer $EAAS_API_KEY"' if config.asks_for_keys else ""
    try:
        start_or_stop(cluster, stop)
        if not stop.is_set():
            console.print(
                f"[bold green]ready[/] {config.served_name} at {cluster.url}/v1 "
                f"({experts} expert servers, {replicas} replicas), logs in {cluster.state_dir}. Ctrl-C stops it. Try:\n"
                f"  curl{needed} {cluster.url}/v1/completions -H 'content-type: application/json' "
                f'-d \'{{"model": "{config.served_name}", "prompt": "ROMEO:", "max_tokens": 64}}\'\n'
                f"  eaas status --url {cluster.url}"
                + "".join(
                    f"\nadmin: {'https' if config.tls_dir else 'http'}://{address}"
                    for address in cluster.admin_addresses
                ),
                highlight=False,
                soft_wrap=True,
            )
            if not experts:
                proof = f" --tls-dir {shlex.quote(str(config.tls_dir))}" if config.tls_dir else ""
                # Asked by the router's address, which needs no key of the gateway's.
                console.print(
                    "No expert server runs, so requests wait for one: "
                    f"eaas scale expert 2 --router {cluster.router_address}{proof}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
            stop.wait()
    except StartFailed as error:
        raise fail(str(error)) from None
    finally:
        cluster.stop()


def cluster_config(
    model: str, experts: int, attention: int, replicas: int, port: int, host: str, dtype: str, name: str, cores: str,
    kv_tokens: int, deadline_s: float, expert_lanes: int, transport: str, routers: int = 1, etcd: str = "",
    autoscale: tuple[str, ...] = (), admin_port: int | None = None, admin_key_file: Path | None = None,
    redundant: int = 0, allow_chaos: bool = False, device: str = "cpu", **more: Any,
):  # fmt: skip
    """The cluster's configuration from the command line; exits with the reason where it makes no sense."""
    from eaas.cluster.config import ClusterConfig
    from eaas.model.resolve import ModelNotFound, resolve_model
    from p2p.cores import named_cores

    try:
        folder = resolve_model(model)
        return ClusterConfig(
            model=folder,
            served_name=name or (model if model == "demo" else folder.name),
            experts=experts,
            attention=attention,
            replicas=replicas,
            host=host,
            port=port,
            dtype=dtype,
            cores=named_cores(cores),
            expert_lanes=expert_lanes,
            transport=transport,
            devices=tuple(device.split(",")),
            kv_tokens=kv_tokens,
            deadline_s=deadline_s,
            routers=routers,
            etcd=etcd,
            autoscale=autoscale,
            admin_port=admin_port,
            admin_key_file=admin_key_file,
            redundant_experts=redundant,
            allow_chaos=allow_chaos,
            **more,
        )
    except (ModelNotFound, ValueError) as error:
        raise fail(str(error)) from None


def _role(verb: str, module: str, text: str) -> None:
    """Add a verb that runs one role alone, for several hosts; the role's own parser explains its options."""

    @app.command(verb, context_settings=PASS_ON, add_help_option=False, help=text)
    def run(context: typer.Context) -> None:
        os.execv(sys.executable, [sys.executable, "-m", module, *context.args])


_role("router", "router", "Run the router alone (`eaas router --help` lists its options).")
_role("expert", "experts", "Run one expert server and join it to a router.")
_role("attention", "eaas.attention", "Run one attention worker and join it to a router.")
_role("gateway", "eaas.gateway", "Run the HTTP gateway and join it to a router.")
_role(
    "launcher", "router.launcher", "Carry out the router's orders for processes with a command or a webhook."
)


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
    from eaas.cluster.process import StartFailed
    from eaas.ops.demo import run_demo
    from eaas.ops.starting import prepare_model

    config = cluster_config(model, 4, 1, 2, 0, "127.0.0.1", "auto", "", "", 65536, 30.0, 0, "shm")
    prepare_model(config.model, config.dtype)
    try:
        same = run_demo(config, tokens=tokens, seed=seed, console=console)
    except StartFailed as error:
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
