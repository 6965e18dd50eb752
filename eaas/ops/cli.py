"""The command line: `eaas VERB`.

Heavy imports stay inside the verbs, so that `eaas --help` answers at once and no process pays for another's libraries.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

import eaas.beside  # noqa: F401
from eaas.ops.chaos.cli import chaos_app
from eaas.ops.credentials import certs, keys_app
from eaas.ops.inspection import inspect_app
from eaas.ops.load.cli import load
from eaas.ops.running import models_app, retire, roll, scale, status, top
from eaas.ops.terminal import READY, Json, console, failing_on

if TYPE_CHECKING:
    from eaas.ops.planner import Hardware, Work
    from router.options import Options

app = typer.Typer(
    name="eaas",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for verb in (status, scale, retire, roll, top, load, certs):
    app.command()(verb)
app.add_typer(chaos_app, name="chaos")
app.add_typer(keys_app, name="keys")
app.add_typer(inspect_app, name="inspect")
app.add_typer(models_app, name="models")


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


T = TypeVar("T", bound="Options")
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _own(verb: str, kind: type[T], words: list[str]) -> T:
    """The options of a verb that reads them itself; exits with the reason where they make no sense."""
    from router.options import read

    with failing_on(ValueError):
        return read(kind, verb, words, os.environ)


@app.command(context_settings=PASS_ON, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Serve a model: a router, expert servers, attention workers and the HTTP gateway (`eaas serve --help`)."""
    from eaas.cluster.config import ClusterConfig

    config = _own("serve", ClusterConfig, context.args)
    from eaas.cluster.local import LocalCluster
    from eaas.gateway.dashboard.board import many
    from eaas.ops.starting import START_ERRORS, prepare_model, run_cluster, with_model

    def tell(cluster: LocalCluster) -> None:
        # What curl needs beside the address.
        needed = ' -H "authorization: Bearer $EAAS_API_KEY"' if config.asks_for_keys else ""
        admin = "https" if config.tls_dir else "http"
        names = [each.name for each in config.served]
        said = (
            f" {' and '.join(names)} at {cluster.url}/v1 "
            f"({many(config.experts, 'expert server')}, {many(config.replicas, 'replica')}), "
            f"logs in {cluster.state_dir}. Ctrl-C stops it. Try:\n"
            + "".join(
                f"  curl{needed} {cluster.url}/v1/completions -H 'content-type: application/json' "
                f'-d \'{{"model": "{name}", "prompt": "ROMEO:", "max_tokens": 64}}\'\n'
                for name in names
            )
            + f"  eaas status --url {cluster.url}"
            + "".join(f"\nadmin: {admin}://{address}" for address in cluster.admin_addresses)
        )
        console.print(READY + said, highlight=False, soft_wrap=True)
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

    with failing_on(*START_ERRORS):
        config = with_model(config)
        prepare_model(config)
        run_cluster(config, show=_show_event, on_ready=tell)


@app.command(context_settings=PASS_ON, add_help_option=False)
def pool(context: typer.Context) -> None:
    """Serve the experts of a model alone, for a model that runs elsewhere (`eaas pool --help`)."""
    from eaas.cluster.config import PoolConfig

    options = _own("pool", PoolConfig, context.args)
    from eaas.ops.starting import PACK_ERRORS, START_ERRORS, run_pool

    with failing_on(*PACK_ERRORS, *START_ERRORS):
        run_pool(options, _show_event)


def _show_event(text: str) -> None:
    console.print(text, style="dim", markup=False, highlight=False)


def _role(verb: str, text: str) -> None:
    """Add a verb that runs one role alone, for several hosts; the role itself reads its options."""

    @app.command(verb, context_settings=PASS_ON, add_help_option=False, help=f"{text} (`eaas {verb} --help`).")
    def run(context: typer.Context) -> None:
        from eaas.settings import ROLES

        # Here already: help and mistakes need none of the role's libraries.
        _own(verb, ROLES[verb].options, context.args)
        os.execv(sys.executable, [sys.executable, "-m", "eaas", ROLES[verb].module, *context.args])


_role("router", "Run the router alone")
_role("expert", "Run one expert server and join it to a router")
_role("attention", "Run one attention worker and join it to a router")
_role("gateway", "Run the HTTP gateway and join it to a router")
_role("launcher", "Carry out the router's orders for processes with a command or a webhook")


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Argument(help="Folder with config.json, that file, or `demo`.")],
    hardware: Annotated[str, typer.Option(help="a100, h100, h200, h20, or a TOML file with the numbers of one.")],
    expert_hardware: Annotated[str, typer.Option(help="Of expert servers; default: the same.")] = "",
    tpot_ms: Annotated[float, typer.Option(help="Longest time for an output token.")] = 50.0,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens before an output token, mean; default: 2048, or as many as fit.")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, max=512, help="Most devices in all.")] = 64,
    replicas: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    overlap: Annotated[bool, typer.Option(help="Two half batches under way: one computes while one waits.")] = False,
    as_json: Json = False,
) -> None:
    """Say how many expert servers each attention worker needs, and whether two kinds of process pay at all.

    A prediction from bytes, operations and links for decoding, from the model's config.json alone. What a failure
    costs is not in it: that is the other reason for two kinds of process.

    Examples:

      eaas plan demo --hardware h100

      eaas plan ./Qwen3-30B-A3B --hardware h200 --tpot-ms 30 --context 4096
    """
    from eaas.model.loader import ModelNotFound
    from eaas.ops.planner import Task, as_dict, plan, plan_table, verdict

    with failing_on(ModelNotFound, ValueError):
        attention = _read_hardware(hardware)
        expert = _read_hardware(expert_hardware) if expert_hardware else attention
        work = _read_work(model)
        before = min(2048, work.max_context - 1) if context is None else context
        task = Task(tpot_s=tpot_ms / 1e3, context=before, devices=devices, replicas=replicas, overlap=overlap)
        found = plan(work, attention, expert, task)
    if as_json:
        print(json.dumps(as_dict(found)))
    else:
        console.print(plan_table(found))
        console.print(verdict(found), highlight=False)


def _read_work(model: str) -> Work:
    """The work of a model, from its config.json alone: no weights are needed. Args: model: a folder with config.json,
    that file itself, or "demo". Raises ValueError: not JSON. ModelNotFound: no such model. ConfigInvalid: it cannot be
    served."""
    from eaas.model.families import spec_of
    from eaas.model.loader import read_object, resolve_model
    from eaas.ops.planner import Work

    path = Path(model).expanduser()
    if not path.is_file():
        path = resolve_model(model) / "config.json"
    return Work.of(spec_of(read_object(path) or {}))


def _read_hardware(name: str) -> Hardware:
    """A known device by its name, or one described by a TOML file with Hardware's fields. Raises ValueError: neither;
    or a field is missing, unknown or no number."""
    from eaas.ops.planner import KNOWN, Hardware

    if name in KNOWN:
        return KNOWN[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(
            f"hardware {name!r} is neither known ({', '.join(KNOWN)}) nor a TOML file. A file has the lines "
            + ", ".join(f"{field.name} = ..." for field in dataclasses.fields(Hardware))
        )
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as TOML: {error}") from error
    found.setdefault("name", path.stem)
    try:
        return Hardware(**found)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


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
    from eaas.ops.starting import START_ERRORS, prepare_model, run_demo, with_model

    with failing_on(*START_ERRORS):
        config = with_model(ClusterConfig(model=Path(model), experts=4, port=0))
        prepare_model(config)
        same = run_demo(config, tokens=tokens, seed=seed)
    raise typer.Exit(0 if same else 1)


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, hub id, or `demo`; default: this machine.")] = "",
    experts: Annotated[int, typer.Option(min=1, help="Of a model: expert servers.")] = 2,
    replicas: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    redundant_experts: Annotated[int, typer.Option(min=0, help="Copies in each layer beyond those.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float32 or int8.")] = "auto",
    as_json: Json = False,
) -> None:
    """Say what this machine can do: compiler, native libraries, instruction sets, cores, memory, transports.

    Or what a checkpoint is, from its headers: whether it is whole and served, and what each process loads of it.

    Exits with 1 when something that serving needs is missing.

    Examples:

      eaas doctor

      eaas doctor ./Qwen3-30B-A3B --experts 4
    """
    if model:
        from eaas.ops.doctor_model import examine_model

        findings = examine_model(model, dtype=dtype, experts=experts, replicas=replicas, redundant=redundant_experts)
    else:
        from eaas.ops.doctor import examine

        findings = examine()
    from eaas.ops.doctor import report_table

    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        console.print(report_table(findings))
    raise typer.Exit(0 if all(finding.usable or not finding.required for finding in findings) else 1)


def main() -> None:
    """Entry point of the `eaas` command."""
    app()


if __name__ == "__main__":
    main()
