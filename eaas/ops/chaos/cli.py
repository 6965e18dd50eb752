"""`eaas chaos`: faults by hand or by plan, what is injected now, and an end to it."""

from __future__ import annotations

import inspect
import json
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from router.faults import KINDS

DEFAULT_URL = "http://127.0.0.1:8000"
_EXIT = "Exit codes: 0 done, 1 refused (the reason is printed), 2 the command line can't be read, 130 interrupted."
chaos_app = typer.Typer(
    no_args_is_help=True,
    help="Break a running cluster on purpose. Every fault reverts by itself, at the end of its time or on Ctrl-C; a "
    "kill lasts.\n\n"
    "kill and freeze work on every local cluster; the rest, and every fault through --admin, needs one started with "
    "`eaas serve --allow-chaos`.\n\n" + _EXIT,
)
console = Console()
errors = Console(stderr=True)

_Url = Annotated[str, typer.Option(help="Address of the gateway, as `eaas serve` prints it.")]
_Admin = Annotated[
    str,
    typer.Option(help="http://HOST:PORT of a router's admin listener instead, for clusters on other hosts."),
]
_KeyFile = Annotated[Path | None, typer.Option(help="File with the key that --admin wants.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, one line for each event.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would happen; nothing does.")]
_REACH: dict[str, tuple[Any, Any]] = {
    "url": (_Url, DEFAULT_URL),
    "admin": (_Admin, ""),
    "key_file": (_KeyFile, None),
    "as_json": (_Json, False),
}
_WHOM: dict[str, tuple[Any, Any]] = {
    "member": (
        Annotated[str, typer.Argument(help="A member, such as expert/3; `eaas status` lists them.")],
        "",
    ),
    "target": (Annotated[str, typer.Option(help="The same, as an option.")], ""),
    "pool": (
        Annotated[str, typer.Option(help="Some of a pool instead: expert, attention, gateway or router.")],
        "",
    ),
    "mode": (Annotated[str, typer.Option(help="Of the pool: one, all, fixed:2 or percent:25.")], "one"),
}
# By the words of router.faults, in the order of the help; None: left to the fault's own default.
_OWN: dict[str, tuple[Any, Any]] = {
    "for_s": (Annotated[str | None, typer.Option("--for", help="Until it reverts: 30s, 500ms, 2m.")], "10s"),
    "times": (Annotated[float | None, typer.Option(help="How many times longer its work takes.")], 10.0),
    "by_s": (Annotated[str | None, typer.Option("--by", help="Added to every frame: 5ms.")], "5ms"),
    "share": (Annotated[float | None, typer.Option(help="Of the frames that are hit, 0 to 1.")], 0.1),
    "peers": (
        Annotated[list[str] | None, typer.Option(help="Only links to this member; may be given again.")],
        None,
    ),
    "where": (
        Annotated[
            str | None,
            typer.Option(
                help="kill, freeze: a point of the protocol; waits until the member passes it. corrupt: wire, rows or "
                "nan."
            ),
        ],
        None,
    ),
    "after": (Annotated[int | None, typer.Option(help="Passes of the point that are let go first.")], None),
    "within": (
        Annotated[
            str | None,
            typer.Option(
                help="Longest wait for the point that --where names: 30s; at most 60s, the default."
            ),
        ],
        None,
    ),
    "rail": (Annotated[str | None, typer.Option(help="Device that goes down.")], None),
}
_SEED = (Annotated[int, typer.Option(min=0, help="Of the choice, and of what is random in the fault.")], 0)
_TEXTS = {
    "kill": ("End processes with SIGKILL, as a crash would.", "kill expert/1"),
    "freeze": ("Stop processes with SIGSTOP for a while, as a hung host would.", "freeze expert/2 --for 5s"),
    "slow": (
        "Make expert servers take longer for their work.",
        "slow --pool expert --mode percent:25 --times 10",
    ),
    "delay": ("Make every frame from and to members late.", "delay expert/1 --by 5ms --for 30s"),
    "loss": ("Lose a share of the frames from and to members.", "loss expert/1 --share 0.1 --seed 7"),
    "partition": ("Cut members off from the others, or from some.", "partition expert/1 --peers attention/1"),
    "rail-down": ("Take a rail of members down.", "rail-down expert/1 --rail eth1"),
    "corrupt": ("Damage a share of the frames.", "corrupt expert/1 --where rows --share 0.01 --dry-run"),
}


def fail(message: str) -> typer.Exit:
    """Print why a verb failed; raise the result."""
    errors.print("[bold red]eaas:[/]", escape(message), highlight=False, soft_wrap=True)
    return typer.Exit(1)


def _add_verb(kind: str) -> None:
    """A verb for a kind of fault, with the options that the kind takes."""
    text, example = _TEXTS[kind]
    words = KINDS[kind] if kind == "kill" else KINDS[kind] | {"for_s"}
    words |= {"within"} if kind in ("kill", "freeze") else frozenset[str]()
    own = {word: option for word, option in _OWN.items() if word in words}
    if kind == "corrupt":
        own["where"] = (own["where"][0], "wire")
    options = {**_WHOM, **own, "seed": _SEED, "dry_run": (_DryRun, False), **_REACH}

    def verb(**given: Any) -> None:
        from eaas.ops.chaos.plan import WORDS, Plan, PlanInvalid, Select, Step, fault_of, seconds
        from router.faults import FaultInvalid

        said = {word: given[name] for word, name in WORDS.items() if given.get(name) is not None}
        try:
            if given["member"] and given["target"]:
                raise PlanInvalid(
                    f"two targets given, {given['member']} and {given['target']}; one is needed."
                )
            if not (given["member"] or given["target"] or given["pool"]):
                raise PlanInvalid(
                    f"{kind} whom? Name a member (`eaas status` lists them), or --pool expert for one of a pool. "
                    f"Example: eaas chaos {example}"
                )
            select = Select(target=given["member"] or given["target"], pool=given["pool"], mode=given["mode"])
            fault = fault_of(kind, given["seed"], said)
            within = {"within_s": seconds(given["within"])} if given.get("within") else {}
            step = Step(at_s=0.0, select=select, fault=fault, **within)
        except (PlanInvalid, FaultInvalid) as error:
            raise fail(str(error)) from None
        plan = Plan(seed=given["seed"], steps=(step,))
        _carry_out(plan, given["dry_run"], **{name: given[name] for name in _REACH})

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in options.items()
    ]
    verb.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    chaos_app.command(kind, help=f"{text}\n\nExample: eaas chaos {example}\n\n{_EXIT}")(verb)


for _kind in KINDS:
    _add_verb(_kind)


@chaos_app.command()
def run(
    plan: Annotated[Path, typer.Argument(help="TOML file with \\[\\[fault]] tables.")],
    dry_run: _DryRun = False,
    url: _Url = DEFAULT_URL,
    admin: _Admin = "",
    key_file: _KeyFile = None,
    as_json: _Json = False,
) -> None:
    """Carry out a plan, and wait until its last fault is over.

    \\[\\[fault]] has at = "20s", kind = "kill", target = "expert/3" or pool = "expert" and mode = "fixed:2", and what
    the verbs take: for, by, times, share, peers, where, after, rail. The file's seed fixes every choice.

    Example: eaas chaos run PLAN.toml --dry-run

    Exit codes: 0 every fault was injected, 1 one was refused, 2 the command line can't be read, 130 interrupted.
    """
    from eaas.ops.chaos.plan import PlanInvalid, read_plan

    try:
        _carry_out(read_plan(plan), dry_run, url, admin, key_file, as_json)
    except PlanInvalid as error:
        raise fail(str(error)) from None


@chaos_app.command("list")
def list_faults(
    url: _Url = DEFAULT_URL, admin: _Admin = "", key_file: _KeyFile = None, as_json: _Json = False
) -> None:
    """Show the faults that last.

    Example: eaas chaos list --json
    """
    from eaas.ops.chaos.inject import open_injector
    from eaas.ops.chaos.plan import in_words
    from eaas.ops.chaos.targets import ChaosRefused
    from router.faults import Fault

    try:
        with closing(open_injector(url, admin, key_file)) as injector:
            found = [one for one in injector.faults() if one["remaining_s"] != 0]
    except ChaosRefused as error:
        raise fail(str(error)) from None
    if as_json:
        print(json.dumps(found))
        return
    for one in found:
        left = "until it is cleared" if one["remaining_s"] is None else f"{one['remaining_s']:.1f} s left"
        _print(f"{one['fault']['id']}  {in_words(one['names'], Fault.from_dict(one['fault']))}, {left}")
    if not found:
        _print("nothing is injected")


@chaos_app.command()
def clear(
    id: Annotated[str, typer.Argument(help="Of a fault, as `eaas chaos list` shows; without it, all.")] = "",
    url: _Url = DEFAULT_URL,
    admin: _Admin = "",
    key_file: _KeyFile = None,
    as_json: _Json = False,
) -> None:
    """End faults before their time; of a local cluster, frozen processes too, whoever froze them.

    Example: eaas chaos clear fault-3
    """
    from eaas.ops.chaos.inject import open_injector
    from eaas.ops.chaos.targets import ChaosRefused

    try:
        with closing(open_injector(url, admin, key_file)) as injector:
            cleared = injector.clear(id)
    except ChaosRefused as error:
        raise fail(str(error)) from None
    if id and not cleared:
        raise fail(f"No fault {id!r} lasts; `eaas chaos list` shows those that do.")
    if as_json:
        print(json.dumps(cleared))
    else:
        _print(f"cleared {', '.join(cleared)}" if cleared else "nothing is injected")


def _carry_out(plan: Any, dry_run: bool, url: str, admin: str, key_file: Path | None, as_json: bool) -> None:
    from eaas.ops.chaos.inject import open_injector
    from eaas.ops.chaos.runner import FaultEvent, rehearse, run_plan
    from eaas.ops.chaos.targets import ChaosRefused

    def tell(event: FaultEvent) -> None:
        if as_json:
            print(json.dumps(event.to_dict()), flush=True)
        elif event.phase == "refused":
            said = f"{event.at_s:7.1f} s  [bold red]refused[/] {escape(event.text)}"
            errors.print(said, highlight=False, soft_wrap=True)
        else:
            _print(f"{event.at_s:7.1f} s  {event.text}")

    stop = threading.Event()
    try:
        with closing(open_injector(url, admin, key_file)) as injector:
            if dry_run:
                steps = rehearse(plan, injector)
            else:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, lambda *_: stop.set())
                events = run_plan(plan, injector, on_event=tell, stop=stop)
    except ChaosRefused as error:
        raise fail(str(error)) from None
    if not dry_run:
        if stop.is_set():
            raise typer.Exit(130)
        raise typer.Exit(1 if any(event.phase == "refused" for event in events) else 0)
    for step in steps:
        if as_json:
            print(json.dumps(step))
        else:
            _print(f"{step['at_s']:7.1f} s  {'would ' if step['targets'] else ''}{step['text']}")
    raise typer.Exit(0 if all(step["targets"] for step in steps) else 1)


def _print(text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)
