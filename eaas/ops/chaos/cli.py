"""`eaas chaos`: faults by hand or by plan, what is injected now, and an end to it."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from eaas.ops.chaos.plan import (
    TEXTS,
    FaultEvent,
    Plan,
    PlanInvalid,
    Select,
    by_hand,
    in_words,
    plan_by_hand,
    read_plan,
    words_of,
)
from eaas.ops.terminal import DEFAULT_URL, Url, errors, failing_on, say, takes
from router import child
from router.faults import KINDS, POINT_WAIT_S, Fault, FaultInvalid

_EXIT = "Exit codes: 0 done, 1 refused (the reason is printed), 2 the command line can't be read, 130 interrupted."
chaos_app = typer.Typer(
    no_args_is_help=True,
    help="Break a running cluster on purpose. Every fault reverts by itself, at the end of its time or on Ctrl-C; a "
    "kill lasts.\n\n"
    "kill and freeze work on every local cluster; the rest, and every fault through --admin, needs one started with "
    "`eaas serve --allow-chaos`.\n\n" + _EXIT,
)
_Admin = Annotated[
    str, typer.Option(help="http://HOST:PORT of a router's admin listener instead, for clusters on other hosts.")
]
_KeyFile = Annotated[Path | None, typer.Option(help="File with the key that --admin wants.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, one line for each event.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would happen; nothing does.")]
_REACH: dict[str, tuple[Any, Any]] = {
    "url": (Url, DEFAULT_URL),
    "admin": (_Admin, ""),
    "key_file": (_KeyFile, None),
    "as_json": (_Json, False),
}
_WHOM: dict[str, tuple[Any, Any]] = {
    "member": (Annotated[str, typer.Argument(help="A member, such as expert/3; `eaas status` lists them.")], ""),
    "target": (Annotated[str, typer.Option(help="The same, as an option.")], ""),
    "pool": (Annotated[str, typer.Option(help="Some of a pool instead: expert, attention, gateway or router.")], ""),
    "mode": (Annotated[str, typer.Option(help="Of the pool: one, all, fixed:2 or percent:25.")], "one"),
}
# By the words of a plan, in the order of the help.
_OWN: dict[str, Any] = {
    "for": Annotated[str | None, typer.Option("--for", help="Until it reverts: 30s, 500ms, 2m.")],
    "times": Annotated[float | None, typer.Option(help="How many times longer its work takes.")],
    "by": Annotated[str | None, typer.Option(help="Added to every frame: 5ms.")],
    "share": Annotated[float | None, typer.Option(help="Of the frames that are hit, 0 to 1.")],
    "peers": Annotated[list[str] | None, typer.Option(help="Only links to this member; may be given again.")],
    "where": Annotated[
        str | None,
        typer.Option(
            help="kill, freeze: a point of the protocol; waits until the member passes it. corrupt: wire, rows or nan."
        ),
    ],
    "after": Annotated[int | None, typer.Option(help="Passes of the point that are let go first.")],
    "rail": Annotated[str | None, typer.Option(help="Device that goes down.")],
}
_WITHIN = Annotated[
    str | None, typer.Option(help="Longest wait for the point that --where names: 30s; at most 60s, the default.")
]
_SEED = (Annotated[int, typer.Option(min=0, help="Of the choice, and of what is random in the fault.")], 0)


def _add_verb(kind: str) -> None:
    """A verb for a kind of fault, with the options that the kind takes."""
    text, example = TEXTS[kind]
    # A parameter must not be named by a keyword of Python's.
    names = {word: "for_" if word == "for" else word for word in words_of(kind)}
    own = {name: (_OWN[word], by_hand(kind, word)) for word, name in names.items()}
    if kind in ("kill", "freeze"):
        own["within"] = (_WITHIN, None)

    @chaos_app.command(kind, help=f"{text}\n\nExample: eaas chaos {example}\n\n{_EXIT}")
    @takes({**_WHOM, **own, "seed": _SEED, "dry_run": (_DryRun, False), **_REACH})
    def verb(**given: Any) -> None:
        said = {word: given[name] for word, name in names.items()}
        with failing_on(PlanInvalid, FaultInvalid):
            if given["member"] and given["target"]:
                raise PlanInvalid(f"two targets given, {given['member']} and {given['target']}; one is needed.")
            if not (given["member"] or given["target"] or given["pool"]):
                raise PlanInvalid(
                    f"{kind} whom? Name a member (`eaas status` lists them), or --pool expert for one of a pool. "
                    f"Example: eaas chaos {example}"
                )
            select = Select(target=given["member"] or given["target"], pool=given["pool"], mode=given["mode"])
            plan = plan_by_hand(kind, said, select, given["seed"], given.get("within") or POINT_WAIT_S)
        _carry_out(plan, given["dry_run"], **{name: given[name] for name in _REACH})


for _kind in KINDS:
    _add_verb(_kind)


@chaos_app.command()
def run(
    plan: Annotated[Path, typer.Argument(help="TOML file with \\[\\[fault]] tables.")],
    dry_run: _DryRun = False,
    url: Url = DEFAULT_URL,
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
    with failing_on(PlanInvalid):
        steps = read_plan(plan)
    _carry_out(steps, dry_run, url, admin, key_file, as_json)


@chaos_app.command("list")
def list_faults(url: Url = DEFAULT_URL, admin: _Admin = "", key_file: _KeyFile = None, as_json: _Json = False) -> None:
    """Show the faults that last.

    Example: eaas chaos list --json
    """
    from eaas.ops.chaos.inject import ChaosRefused, open_injector

    with failing_on(ChaosRefused), closing(open_injector(url, admin, key_file)) as injector:
        found = [one for one in injector.faults() if one["remaining_s"] != 0]
    if as_json:
        print(json.dumps(found))
        return
    for one in found:
        left = "until it is cleared" if one["remaining_s"] is None else f"{one['remaining_s']:.1f} s left"
        say(f"{one['fault']['id']}  {in_words(one['names'], Fault.from_dict(one['fault']))}, {left}")
    if not found:
        say("nothing is injected")


@chaos_app.command()
def clear(
    id: Annotated[str, typer.Argument(help="Of a fault, as `eaas chaos list` shows; without it, all.")] = "",
    url: Url = DEFAULT_URL,
    admin: _Admin = "",
    key_file: _KeyFile = None,
    as_json: _Json = False,
) -> None:
    """End faults before their time; of a local cluster, frozen processes too, whoever froze them.

    Example: eaas chaos clear fault-3
    """
    from eaas.ops.chaos.inject import ChaosRefused, open_injector

    with failing_on(ChaosRefused), closing(open_injector(url, admin, key_file)) as injector:
        cleared = injector.clear(id)
        if id and not cleared:
            raise ChaosRefused(f"No fault {id!r} lasts; `eaas chaos list` shows those that do.")
    if as_json:
        print(json.dumps(cleared))
    else:
        say(f"cleared {', '.join(cleared)}" if cleared else "nothing is injected")


def _carry_out(plan: Plan, dry_run: bool, url: str, admin: str, key_file: Path | None, as_json: bool) -> None:
    from eaas.ops.chaos.inject import ChaosRefused, open_injector
    from eaas.ops.chaos.runner import rehearse, run_plan

    def tell(event: FaultEvent) -> None:
        if as_json:
            print(json.dumps(event.to_dict()), flush=True)
        elif event.phase == "refused":
            said = f"{event.at_s:7.1f} s  [bold red]refused[/] {escape(event.text)}"
            errors.print(said, highlight=False, soft_wrap=True)
        else:
            say(f"{event.at_s:7.1f} s  {event.text}")

    stop = threading.Event()
    with failing_on(ChaosRefused), closing(open_injector(url, admin, key_file)) as injector:
        if dry_run:
            steps = rehearse(plan, injector)
            for step in steps:
                if as_json:
                    print(json.dumps(step))
                else:
                    say(f"{step['at_s']:7.1f} s  {'would ' if step['targets'] else ''}{step['text']}")
            raise typer.Exit(0 if all(step["targets"] for step in steps) else 1)
        child.on_signals(stop.set, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        events = run_plan(plan, injector, on_event=tell, stop=stop)
    if stop.is_set():
        raise typer.Exit(130)
    raise typer.Exit(1 if any(event.phase == "refused" for event in events) else 0)
