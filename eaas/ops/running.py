"""The verbs for a cluster that runs: `eaas status`, `scale`, `retire`, `roll`, `models` and `top`.

What they need of gRPC and of other libraries they import when they run, so that `eaas --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from eaas.cluster.status import GatewayUnreachable, RouterUnknown, fetch_status, router_address
from eaas.gateway.status import model_facts, replicas_min
from eaas.ops.terminal import DEFAULT_URL, Url, console, fail, failing_on, say, table
from experts.config import MOST_WEIGHT
from router import bitmap
from router.access import OPERATOR
from router.host import host_id
from router.view import (
    ATTENTION,
    DRAINING,
    EXPERT,
    FOR,
    GATEWAY,
    SERVING,
    Member,
    Model,
    PoolSize,
    View,
    launched_pool,
    of_model,
)

if TYPE_CHECKING:
    from router.client import RouterClient
    from router.view import Retirement

# What `eaas roll` replaces, in this order.
ROLLED = ("router", EXPERT, ATTENTION, GATEWAY)
models_app = typer.Typer(
    no_args_is_help=True, help="Show the models of a running cluster, add one to its pool, or remove one."
)
_LOOK_S = 0.2
_ROLL_LOOK_S = 0.1
# A router with a launcher orders within a tick what lacks.
_ORDERED_S = 5.0
_SAY_S = 5.0
# `eaas top` says after so long that there is nothing to show.
_FIRST_BOARD_S = 5.0
_Router = Annotated[str, typer.Option(help="HOST:PORT of the router; default: what the gateway says.")]
_TlsDir = Annotated[
    Path | None,
    typer.Option(help="TLS between the processes: a folder with one of each role, as `eaas certs` makes it."),
]


def status(
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the gateway says, as JSON.")] = False,
) -> None:
    """Show the members of a running cluster, and its models where there are several.

    Exits with 1 when the gateway can't be reached.
    """
    with failing_on(GatewayUnreachable):
        state = fetch_status(url)
    if as_json:
        print(json.dumps(state))
    else:
        console.print(status_table(state))
        if len(state["models"]) > 1:
            console.print(models_table(state["models"]))
        if state["retirements"]:
            console.print(retirements_table(state["retirements"]))


def scale(
    pool: Annotated[str, typer.Argument(help="expert or attention; without it, the pools are shown.")] = "",
    size: Annotated[int | None, typer.Argument(min=0, help="Processes that the pool should have.")] = None,
    drain_s: Annotated[
        float, typer.Option(help="Longest wait for a process that goes to finish what runs on it.")
    ] = 30.0,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Return when the pool has its size; exit 1 if not within this.")
    ] = 0.0,
    router: _Router = "",
    tls_dir: _TlsDir = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Show the pools of a running cluster, or make one larger or smaller; requests go on meanwhile.

    Examples:

      eaas scale

      eaas scale expert 6

      eaas scale attention 2 --wait-s 60
    """
    if pool and size is None:
        raise fail(f"eaas scale {pool} lacks the size. Give it: eaas scale {pool} 2")
    with _client_of_router(router, tls_dir, url) as client:
        if size is None:
            console.print(pools_table(client.status().pools))
            return
        state = client.scale(pool, size, drain_s)
        if wait_s:
            state = wait_for_size(client, pool, wait_s)
    console.print(pools_table({pool: state}))
    if wait_s and state.is_scaling:
        raise fail(f"pool {pool} has {state.live} of {state.wanted} processes after {wait_s:g} s; it goes on changing")


def retire(
    name: Annotated[str, typer.Argument(help="Member, such as expert/3 or router/0; with --here its pool.")],
    operation: Annotated[str, typer.Option(help="Id; asked again under it nothing more happens.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Return when its process may be ended.")] = False,
    longest_s: Annotated[float, typer.Option(min=0, help="With --wait: exit 1 if not within this.")] = 300.0,
    here: Annotated[bool, typer.Option("--here", help="That of this container, by its own --tls-dir.")] = False,
    router: _Router = "",
    tls_dir: _TlsDir = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Have one process go by name once others serve its experts and streams; another takes its place.

    Examples:

      eaas retire expert/3 --wait

      eaas retire attention --here --wait --router eaas-router:7000 --tls-dir /tls
    """
    with _client_of_router(router, tls_dir, url, role=name if here else "") as client:
        if here:
            found = [m.name for m in client.status().view.pool(name) if m.host == host_id()]
            if len(found) != 1:
                raise fail(f"{len(found)} members of pool {name!r} are here, one needed; name one.")
            name = found[0]
        known = until_safe(client, name, operation, longest_s * wait)
    console.print(retirements_table([dataclasses.asdict(known)]))
    if wait and not known.safe_to_terminate:
        raise fail(f"{name} is not safe to terminate after {longest_s:g} s: it waits for {known.waits_for}.")


def roll(
    pools: Annotated[
        list[str] | None, typer.Argument(help="router, expert, attention, gateway; default: all, in this order.")
    ] = None,
    wait_s: Annotated[float, typer.Option(min=1, help="Longest for each process; exit 1 if not within this.")] = 120.0,
    drain_s: Annotated[
        float, typer.Option(min=1, help="Longest wait for a process that goes to finish what runs on it.")
    ] = 30.0,
    router: _Router = "",
    tls_dir: _TlsDir = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Replace the processes of a running cluster one after another, as an upgrade does; requests go on meanwhile.

    Each is started anew from the code that is installed now, and takes over before the old one ends.

    Examples:

      eaas roll

      eaas roll expert attention --drain-s 10
    """
    wrong = [pool for pool in pools or () if pool not in ROLLED]
    if wrong:
        raise fail(f"{wrong[0]!r} is no pool; give some of {', '.join(ROLLED)}, or none for all.")
    with failing_on(RollFailed), _client_of_router(router, tls_dir, url) as client:
        Roll(url, client, wait_s=wait_s, drain_s=drain_s, show=console.out).roll(pools or ROLLED)


class RollFailed(RuntimeError):
    """A process was not replaced in time; the text says which, and what it waits for. The others are as they were."""


class Roll:
    """Replaces the processes of one cluster, one after another, while requests run.

    Each drains once another is started; but a router ends, and its launcher starts it again on its journal.
    """

    def __init__(
        self, url: str, client: RouterClient, *, wait_s: float, drain_s: float, show: Callable[[str], None]
    ) -> None:
        """Args: url: of the gateway. wait_s: longest for each process. drain_s: longest drain of one, before what runs
        on it is moved. show: gets a line for each process replaced."""
        self._url, self._client = url, client
        self._wait_s, self._drain_s, self._show = wait_s, drain_s, show

    def roll(self, pools: Sequence[str]) -> None:
        """Replace every process of these pools, in this order.

        Raises:
            RollFailed: not in time. RouterUnavailable, GatewayUnreachable: not to be reached.
        """
        for pool in pools:
            if pool == "router":
                self._router()
                continue
            for member in self._view().pool(pool):
                began_s = time.monotonic()
                self._member(member)
                self._show(f"{member.name} replaced in {time.monotonic() - began_s:.1f} s")

    def _member(self, member: Member) -> None:
        view = self._view()
        pool = launched_pool(view, member)
        wanted = len(_serving(view, pool))
        if pool != GATEWAY:
            wanted = self._client.status().pools[pool].wanted
            self._client.scale(pool, wanted, self._drain_s)
        known = until_safe(self._client, member.name, "", self._wait_s)
        if not known.safe_to_terminate:
            raise self._late(f"{member.name} waits for {known.waits_for}")

        def is_whole() -> bool:
            view = self._view(timeout_s=1.0)
            return len(_serving(view, pool)) >= wanted and _whole(view)

        self._wait_for(f"pool {pool} is not whole", is_whole)

    def _router(self) -> None:
        # The leader last: else each that goes may be the one that has just taken over.
        for name, router in reversed(self._routers().items()):
            began_s = time.monotonic()
            if router["pid"] is None:
                raise RollFailed(f"{name} at {router['address']} does not answer. See `eaas status`.")
            _terminate(router["pid"], name)

            def is_back(name: str = name, pid: int = router["pid"]) -> bool:
                routers = self._routers()
                led = any(router["state"] == SERVING for router in routers.values())
                return led and routers[name]["pid"] != pid

            self._wait_for(f"{name} has not come back", is_back)
            self._show(f"{name} replaced in {time.monotonic() - began_s:.1f} s")

    def _routers(self) -> dict[str, dict[str, Any]]:
        members = fetch_status(self._url)["members"]
        return {member["name"]: member for member in members if member["pool"] == "router"}

    def _view(self, timeout_s: float = 5.0) -> View:
        return self._client.status(timeout_s=timeout_s).view

    def _wait_for(self, else_: str, reached: Callable[[], bool]) -> None:
        if not _within(self._wait_s, reached):
            raise self._late(else_)

    def _late(self, what: str) -> RollFailed:
        return RollFailed(
            f"After {self._wait_s:g} s {what}. See `eaas status` and `eaas scale`, then roll the rest again."
        )


def _serving(view: View, pool: str) -> list[Member]:
    return [it for it in view.members if launched_pool(view, it) == pool and it.state == SERVING]


def _whole(view: View) -> bool:
    return not view.pool(EXPERT) or replicas_min(view) >= min(view.replicas_wanted, len(view.pool(EXPERT)))


def _within(wait_s: float, reached: Callable[[], bool]) -> bool:
    """Whether something that the router is asked for has come about before so long."""
    from router.client import RouterUnavailable

    until_s = time.monotonic() + wait_s
    while True:
        # It may just be starting again.
        with suppress(RouterUnavailable):
            if reached():
                return True
        if time.monotonic() >= until_s:
            return False
        time.sleep(_ROLL_LOOK_S)


def _terminate(pid: int, name: str) -> None:
    """SIGTERM to a router of this host. Raises RollFailed."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise RollFailed(f"{name} (pid {pid}) is not on this host ({error}). Restart it where it runs.") from None
    try:
        # The pid is the gateway's word: it must name a router.
        if b"router" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            raise RollFailed(f"Pid {pid} is no router of this host. Restart {name} where it runs.")
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    finally:
        os.close(pidfd)


@contextmanager
def _client_of_router(address: str, tls_dir: Path | None, url: str, role: str = "") -> Iterator[RouterClient]:
    """The router's client for a verb, which ends with status 1 where the router does not do as it asks. role: whose
    certificate is in `tls_dir` itself; empty: an operator's is in its folder there."""
    # gRPC takes a quarter of a second to import, and `eaas status` needs none of it.
    from router.client import OrderRefused, RouterClient, RouterUnavailable
    from router.tls import Credentials, CredentialsInvalid

    with failing_on(CredentialsInvalid, GatewayUnreachable, RouterUnknown, RouterUnavailable, OrderRefused):
        folder = tls_dir and (tls_dir if role else tls_dir / OPERATOR)
        proof = Credentials(folder, role or OPERATOR) if folder is not None else None
        with closing(RouterClient(address or router_address(url), proof)) as client:
            yield client


@models_app.command("list")
def list_models(router: _Router = "", tls_dir: _TlsDir = None, url: Url = DEFAULT_URL) -> None:
    """Show the models that the pool of expert servers serves."""
    with _client_of_router(router, tls_dir, url) as client:
        console.print(models_table(model_facts(client.status().view)))


@models_app.command("add")
def add_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="NAME=PATH",
            help="Name in requests, and checkpoint folder, hub id, or `demo`: expert servers open the same path.",
        ),
    ],
    weight: Annotated[
        int | None, typer.Option(min=1, max=MOST_WEIGHT, help="Of its rows on a server. Default: as it is now, or 1.")
    ] = None,
    attention: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Attention workers; 0: it is for programs that ask the pool themselves. Default: as many as are "
            "wanted of it now; of a new one 1, or 0 where no gateway is.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="As the pool was started: auto, bfloat16, float32 or int8.")] = "auto",
    wait_s: Annotated[float, typer.Option(min=0, help="Exit 1 if it does not answer within this.")] = 600.0,
    router: _Router = "",
    tls_dir: _TlsDir = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Serve one more model on the pool; requests for others go on meanwhile.

    Its experts are packed here first, so that expert servers of this host only map them. Returns when the model
    answers; where nothing starts its attention workers, when every expert is served, and says how to start one. Of a
    model that is served already it changes weight, folder and workers, and says what they were.

    Examples:

      eaas models add tuned=./tuned

      eaas models add tuned=./tuned --attention 0 --router 127.0.0.1:7000
    """
    from eaas.model.families import spec_of
    from eaas.model.loader import ModelNotFound, resolve_model
    from eaas.model.tokenizer import Tokenizer, TokenizerInvalid
    from eaas.ops.starting import PACK_ERRORS, pack_experts
    from experts.checkpoint import read_config
    from experts.pack import model_entry

    name, _, path = model.partition("=")
    if not name or not path:
        raise fail(f"{model!r} is no NAME=PATH. Give one, such as tuned=./tuned")
    began_s = time.monotonic()
    with failing_on(ModelNotFound, TokenizerInvalid, *PACK_ERRORS), _client_of_router(router, tls_dir, url) as client:
        folder = resolve_model(path)
        added, numerics_class = model_entry(name, folder, dtype, weight or 1)
        status = client.status()
        known = next((it for it in status.view.models if it.hash == added.hash), None)
        if weight is None and known is not None:
            added = dataclasses.replace(added, weight=known.weight)
        pool = f"{ATTENTION}:{name}" if known is None or known.number else ATTENTION
        size, has_gateway = status.pools.get(pool), bool(status.view.pool(GATEWAY))
        wanted = size.wanted if size is not None else int(has_gateway)
        workers = wanted if attention is None else attention
        if workers:
            # Here too: what is wrong with it is said before a worker starts.
            spec_of(read_config(folder))
            Tokenizer.load(folder)
        if wrong := _unfit(status.view, added, numerics_class):
            raise fail(wrong)
        pack_experts(folder, dtype, ["cpu"])
        added = client.add_model(added, workers, numerics_class)
        if known is not None and not known.leaving:
            told = ("weight", known.weight, added.weight), ("folder", known.path, added.path), (pool, wanted, workers)
            changed = [f"{what} was {old}, is {new} now" for what, old, new in told if old != new]
            say(f"{name}: it was served here already; {'; '.join(changed) or 'nothing has changed'}")

        def loaded() -> str:
            view = of_model(client.status(timeout_s=1.0).view, added.hash)
            held = bitmap.union(bitmap.from_bytes(member.serving) for member in view.pool(EXPERT)).bit_count()
            whole = view.layers * view.experts
            return "" if held == whole > 0 else f"{held} of {whole} experts served"

        if _told_within(wait_s, name, loaded):
            raise fail(
                f"not every expert of {name} is served after {wait_s:g} s; loading goes on. See `eaas models list`;"
                " the logs of expert servers say model_not_opened where one cannot serve it, and why."
            )
        served_s = time.monotonic() - began_s
        say(f"{name}: {added.layers * added.experts} experts served after {served_s:.1f} s")
        if not workers:
            answers = f"; gateways list it, and requests there wait until `eaas scale {pool} 1`" if has_gateway else ""
            say(f"{name}: programs that ask the pool have it{answers}")
            return
        if not _within(_ORDERED_S, lambda: (s := client.status(timeout_s=1.0).pools[pool]).starting + s.live > 0):
            say(
                f"{name}: nothing has begun to start an attention worker of it. Where no launcher does, start one by "
                f"hand: eaas attention --router {router or 'HOST:PORT'} --model {folder}"
            )
            return
        if lack := _told_within(wait_s - served_s, name, lambda: _unanswered(client, added, pool)):
            raise fail(
                f"{name} does not answer after {wait_s:g} s: {lack}. It may yet; see `eaas status`, `eaas scale`, and"
                " the logs of attention workers and gateways, which say model_not_served where one cannot read it."
            )
    done = "answers" if has_gateway else "has workers, and no gateway that could ask them,"
    say(f"{name}: {done} after {time.monotonic() - began_s:.1f} s")


def _unanswered(client: RouterClient, model: Model, pool: str) -> str:
    """What lacks before requests for a model are answered, in words; empty where nothing does."""
    status = client.status(timeout_s=1.0)
    size = status.pools[pool]
    if not _serving(status.view, pool):
        return f"no worker of pool {pool} serves, {size.live} joined and {size.starting} starting"
    gateways = [it for it in status.view.pool(GATEWAY) if it.state != DRAINING]
    without = [it.name for it in gateways if not it.load.get(f"{FOR}{model.number}")]
    return f"{', '.join(without)} without it" if without else ""


def _told_within(wait_s: float, name: str, lacks: Callable[[], str]) -> str:
    """Wait until nothing lacks of a model, saying now and then what does; what lacks at the end, empty if nothing."""
    lack, began_s = "no word from the router", time.monotonic()
    said_s = began_s

    def reached() -> bool:
        nonlocal lack, said_s
        lack, now_s = lacks(), time.monotonic()
        if lack and now_s - said_s >= _SAY_S:
            said_s = now_s
            say(f"{name}: {lack}, after {now_s - began_s:.0f} s")
        return not lack

    _within(wait_s, reached)
    return lack


def _unfit(view: View, added: Model, numerics_class: str) -> str:
    """Why a model cannot be served beside those of a View; empty where nothing speaks against it."""
    classes = {member.numerics_class for member in view.pool(EXPERT)}
    if classes and numerics_class not in classes:
        return (
            f"experts of {added.name} would be computed in {numerics_class}; the pool's servers compute in "
            f"{', '.join(sorted(classes))} alone. Give the --dtype with which the pool was started, run this on a host "
            "of the pool, or serve this model on a pool of its own."
        )
    return ""


@models_app.command("remove")
def remove_model(
    name: Annotated[str, typer.Argument(help="As `eaas models list` shows it.")],
    wait_s: Annotated[float, typer.Option(min=0, help="Exit 1 if it is not gone within this.")] = 600.0,
    router: _Router = "",
    tls_dir: _TlsDir = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Serve a model no more: new requests for it are refused, those under way end, then its experts are dropped."""
    began_s = time.monotonic()
    with _client_of_router(router, tls_dir, url) as client:
        if any(model.name == name and not model.number for model in client.status().view.models):
            raise fail(
                f"{name} is the model with which every process of this cluster is started, and which requests mean "
                "that name none: it stays. Let it sleep (--sleep-after-s), or start a cluster without it."
            )
        gone = client.remove_model(name).hash
        ended = _within(wait_s, lambda: all(model.hash != gone for model in client.status(timeout_s=1.0).view.models))
    if not ended:
        raise fail(f"{name} still has work after {wait_s:g} s; it goes when that has ended.")
    say(f"{name}: removed after {time.monotonic() - began_s:.1f} s")


def models_table(models: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each model, of `model_facts`."""
    rows: list[tuple[str, ...]] = []
    for it in models:
        size, held = f"{it['layers']} x {it['experts']}", decimal(it["layers"] * it["experts"] * it["expert_bytes"])
        figures = (str(it[word]) for word in ("weight", "replicas", "workers"))
        rows.append((it["name"], it["state"], size, held, *figures, it["path"]))
    head = ("model", "state", "layers x experts", "bytes", "weight", "replicas", "workers", "folder")
    return table(head, rows)


def top(
    model: Annotated[str, typer.Option(help="Of several, the one to show; default: the first.")] = "",
    url: Url = DEFAULT_URL,
) -> None:
    """Watch a running cluster, live: traffic, attention workers, the load of each layer on each expert server, and
    what happened. The same is shown by a browser at /dashboard of the gateway.

    Keys: q quits, p pauses, s sorts, m shows the next model, ? explains. Exits with 1 when the gateway can't be
    reached. Where the gateway asks for a key, put it into EAAS_API_KEY.

    Example: eaas top --url http://127.0.0.1:8001
    """
    try:
        from eaas.ops.top import Feed, FeedRefused, Top
    except ModuleNotFoundError as error:
        raise fail(f"eaas top needs {error.name}, which is not installed: pip install 'eaas[top]'") from None

    with failing_on(FeedRefused):
        board = Feed(url, model).first(_FIRST_BOARD_S)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise fail("eaas top draws on a terminal, and there is none here. Use eaas status, or /dashboard in a browser.")
    said = Top(Feed(url, model), board).run()
    if said:
        raise fail(said)


def headline(state: Mapping[str, Any]) -> str:
    """One line: whole or degraded, and in what."""
    from eaas.gateway.dashboard.board import many

    members, wanted = state["members"], state["replicas_wanted"]
    serving = sum(member["pool"] == "expert" and member["state"] == "serving" for member in members)
    routers = {m["name"]: m["state"] for m in members if m["pool"] == "router"}
    # Standbys are well while one leads.
    well = ("serving", "standby") if "serving" in routers.values() else ()
    away = next((name for name, state in routers.items() if state not in well), "")
    held = state["replicas_min"]
    lacks = [f"{it['name']} has no attention worker" for it in state["models"] if not (it["workers"] or it["leaving"])]
    # A gateway is ready for the other models where one has no worker.
    lacks = lacks if state["gateway"]["ready"] else [f"{state['gateway']['name']} waits: {state['gateway']['reason']}"]
    verdict = "DEGRADED" if away or lacks or (held or 0) < (wanted or 1) else "whole"
    asleep = [model["state"] == "asleep" for model in state["models"]]
    served = f"{len(asleep)} models" if len(asleep) > 1 else state["model"]
    served += "" if not any(asleep) else " (asleep)" if all(asleep) else f" ({sum(asleep)} asleep)"
    text = f"{served}: {verdict}, {many(serving, 'expert server')} serving"
    if not (asleep and all(asleep)):
        text += f", every expert {'of those awake ' if any(asleep) else ''}on {held} of {wanted}"
    text += "".join(f"; {lack}" for lack in lacks)
    return text + (f"; {away} does not answer, so this is as of epoch {state['epoch']}" if away else "")


def load_words(load: Mapping[str, float]) -> str:
    """What a member reports of its load, in words: what people ask for first, and nothing of its links."""
    said = (
        ("running", "{:.0f} running"),
        ("waiting", "{:.0f} waiting"),
        ("busy", "busy {:.0%}"),
        ("tokens_per_s", "{:,.0f} tokens/s"),
        ("rows_per_s", "{:,.0f} rows/s"),
        ("kv_use", "KV {:.0%}"),
        ("clients", "clients {:.0f}"),
    )
    return ", ".join(form.format(load[word]) for word, form in said if word in load)


def status_table(state: Mapping[str, Any]) -> Table:
    """Members of the cluster, one line each, by pool and number."""
    members = sorted(state["members"], key=lambda m: (m["pool"], int(m["name"].rpartition("/")[2])))
    several = len(state["models"]) > 1
    rows = [
        (
            member["name"],
            *([member.get("model") or ""] if several else ()),
            member["state"],
            str(member["pid"] or "?"),
            "" if member["experts"] is None else str(member["experts"]),
            load_words(member["load"] or {}),
        )
        for member in members
    ]
    head = ("member", *(["model"] if several else ()), "state", "pid", "experts", "load")
    return table(head, rows, title=headline(state))


def retirements_table(retirements: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each member that is retired: since when, what is left, and under which operation."""
    head = ("retired", "state", "since", "waits for", "experts only here", "requests", "operation")
    rows = [
        (
            *(each["name"], "safe to terminate" if each["safe_to_terminate"] else each["state"]),
            time.strftime("%F %T", time.localtime(each["asked_unix_s"])),
            *map(str, (each["waits_for"], each["only_here"], each["running"], each["operation"])),
        )
        for each in retirements
    ]
    return table(head, rows)


def until_safe(client: RouterClient, name: str, operation: str, wait_s: float) -> Retirement:
    """Have a member go; how far it has come when its process may be ended, or after `wait_s`. Raises as the client."""
    from router.client import RouterUnavailable

    until_s = time.monotonic() + wait_s
    known = client.retire(name, operation)
    while not known.safe_to_terminate and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        # It may just be starting again.
        with suppress(RouterUnavailable):
            known = client.retire(name, known.operation, timeout_s=1.0)
    return known


def wait_for_size(client: RouterClient, pool: str, wait_s: float) -> PoolSize:
    """The pool's size once it is what is wanted, or after `wait_s` as it is then. Raises RouterUnavailable."""
    until_s = time.monotonic() + wait_s
    while (size := client.status().pools[pool]).is_scaling and (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(_LOOK_S, left_s))
    return size


def pools_table(pools: Mapping[str, PoolSize]) -> Table:
    """One line for each pool."""
    head = ("pool", "wanted", "live", "starting", "draining", "bounds", "held up")
    return table(
        head,
        (
            (
                name,
                *map(str, (size.wanted, size.live, size.starting, size.draining)),
                f"{size.least} to {size.most}",
                size.held_up,
            )
            for name, size in pools.items()
        ),
    )
