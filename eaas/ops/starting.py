"""Verbs that start a cluster: look at the model, pack its experts, start, and run until Ctrl-C; and the demonstration,
in which an expert server dies in mid-stream and the text does not change."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from eaas import native
from eaas.cluster.config import ClusterConfig, PoolConfig
from eaas.cluster.local import LocalCluster, entries_of
from eaas.cluster.process import StartFailed, StateDirUnusable
from eaas.cluster.status import fetch_status
from eaas.gateway.dashboard.board import many
from eaas.model.families import spec_of
from eaas.model.loader import DEMO, resolve_model
from eaas.model.tokenizer import Tokenizer, TokenizerInvalid
from eaas.ops.load.client import Client, Endpoint
from eaas.ops.load.record import StreamRecord
from eaas.ops.terminal import READY, console, failing_on, say, table
from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.devices import Device
from experts.formats import experts_dtype
from experts.manifest import PackLayout
from experts.model import ConfigInvalid, ExpertShape
from experts.native import IsaUnavailable
from experts.pack import PackedExperts, PackUnavailable, layout_of
from experts.pack import Progress as Packing
from p2p.native import NativeMissing
from router import child
from router.tls import CredentialsInvalid
from router.view import CLIENT

PACK_ERRORS = (CheckpointInvalid, ConfigInvalid, IsaUnavailable, NativeMissing, PackUnavailable)
# The model cannot be found, an option makes no sense, or a process does not start.
START_ERRORS = (StartFailed, StateDirUnusable, CredentialsInvalid, ValueError)
_PROMPT = "ROMEO:\n"
_REPLACEMENT_LIMIT_S = 30.0
_ANSWER_LIMIT_S = 120.0
_LINE_EVERY_S = 10.0


def with_model(config: ClusterConfig) -> ClusterConfig:
    """The same with the folders and names of its models. Raises ModelNotFound."""
    if config.models:
        found = (replace(each, path=resolve_model(str(each.path))) for each in config.served)
        return replace(config, models=tuple(map(str, found)))
    asked = str(config.model)
    folder = resolve_model(asked)
    name = config.served_model_name or (asked if asked == DEMO else folder.name)
    return replace(config, model=folder, served_model_name=name)


def pack_experts(model: Path, dtype: str, devices: Sequence[str]) -> ExpertShape:
    """Pack a model's experts as servers on these devices read them, saying how far it is, so that all of this host map
    the same file.

    Raises: one of PACK_ERRORS.
    """
    checkpoint = Checkpoint.open(model)
    shape = ExpertShape.from_config(checkpoint.config)
    kept = {device: experts_dtype(dtype, checkpoint.config, Device.parse(device).keeps) for device in devices}
    if not shape.plain and any(Device.parse(device).runs_kernels for device in devices):
        raise ConfigInvalid(
            f"experts of {shape.architecture} are computed by CPUs alone. Serve them with --device cpu."
        )
    if len(set(kept.values())) > 1:
        said = ", ".join(f"{element.label} on {device}" for device, element in kept.items())
        raise ConfigInvalid(
            f"experts are kept as {said}; one model has one type. Name devices of one kind, or --dtype bfloat16."
        )
    (element,) = set(kept.values())
    with _packing(layout_of(shape, element, checkpoint.fingerprint)) as progress:
        PackedExperts.open(checkpoint, shape, element, progress=progress)
    return shape


@contextmanager
def _packing(layout: PackLayout) -> Iterator[Packing]:
    """What shows packing: a bar on a terminal, a line now and then in a log."""
    began_s = said_s = time.monotonic()
    whole = layout.count * layout.blob_bytes

    def line(done: int, total: int) -> None:
        nonlocal said_s
        now_s, ready = time.monotonic(), done * layout.blob_bytes
        if now_s - said_s >= _LINE_EVERY_S:
            said_s, rate = now_s, ready / (now_s - began_s)
            say(
                f"packing experts: {done} of {total}, {ready / 1e9:.1f} of {whole / 1e9:.1f} GB, {rate / 1e6:.0f} MB/s,"
                f" {(whole - ready) / rate:.0f} s left"
            )

    if not console.is_terminal:
        yield line
        return
    shown = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    title = TextColumn("packing experts {task.description}")
    with Progress(title, BarColumn(), *shown, console=console, transient=True) as bar:
        task, each = bar.add_task("", total=whole), layout.blob_bytes
        yield lambda done, total: bar.update(task, completed=done * each, description=f"{done} of {total}")


def prepare_model(config: ClusterConfig) -> None:
    """Find what is wrong with the models before any process starts, and pack their experts once, so that every expert
    server of the host maps the same files."""
    with failing_on(*PACK_ERRORS, TokenizerInvalid):
        # Here too, though others compute: what is wrong with it is said before any of them starts.
        native.load()
        entries_of(config)
        for each in config.served:
            spec = spec_of(Checkpoint.open(each.path).config)
            if spec.beyond_gpus and any(Device.parse(device).runs_kernels for device in config.device):
                raise ConfigInvalid(
                    f"{spec.architecture} has {spec.beyond_gpus}, which GPUs do not compute. Serve it with --device "
                    "cpu."
                )
            Tokenizer.load(each.path)
        for each in config.served:
            pack_experts(each.path, config.dtype, config.device)


def run_cluster(
    config: ClusterConfig, *, show: Callable[[str], None], on_ready: Callable[[LocalCluster], None]
) -> None:
    """Run a cluster until SIGINT, SIGTERM or SIGHUP; one that comes while it starts ends it at once.
    Args: show: gets a line for each event. on_ready: called once, when the cluster can answer. Raises StartFailed,
    StateDirUnusable, CredentialsInvalid, ValueError: as LocalCluster does."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    child.on_signals(stop.set, *numbers)
    cluster = LocalCluster(config, on_event=show)
    try:
        _start_or_stop(cluster, stop)
        for number in numbers:
            # Again: Ray puts handlers of its own before them, which print a stack.
            signal.signal(number, signal.getsignal(number))
        if not stop.is_set():
            on_ready(cluster)
            stop.wait()
    finally:
        cluster.stop()


def _start_or_stop(cluster: LocalCluster, stop: threading.Event) -> None:
    """Start the cluster, giving up at once when `stop` comes first. Raises StartFailed."""
    failures: list[StartFailed] = []

    def start() -> None:
        try:
            cluster.start()
        except StartFailed as failure:
            failures.append(failure)
        finally:
            done.set()

    done = threading.Event()
    threading.Thread(target=start, name="start", daemon=True).start()
    while not done.wait(0.05):
        if stop.is_set():
            return
    if failures:
        raise failures[0]


def run_pool(options: PoolConfig, show: Callable[[str], None]) -> None:
    """Run the pool until Ctrl-C, and say how to connect. Raises: one of PACK_ERRORS or START_ERRORS."""
    config = with_model(options.cluster())
    entries_of(config)
    shapes = [(each, pack_experts(each.path, config.dtype, config.device)) for each in config.served]

    def tell(cluster: LocalCluster) -> None:
        tls = None if config.tls_dir is None else str(config.tls_dir / CLIENT)
        proof = f', tls_dir="{tls}"' if tls else ""
        options = {"router": cluster.router_address} | ({"tls": tls} if tls else {})
        held, ways = list[str](), ""
        for it, shape in shapes:
            held.append(f"{shape.layers} x {shape.experts} experts of {it.name}")
            told = json.dumps({"eaas": options | ({"model": it.name} if config.models else {})})
            ways += f"  vllm serve {it.path} --additional-config '{told}'\n"
        said = (
            f" {' and '.join(held)} on {many(config.experts, 'server')}, router at {cluster.router_address}, "
            f"logs in {cluster.state_dir}. Ctrl-C stops it. Connect:\n{ways}"
            f'  eaas.integrations.transformers.connect("{cluster.router_address}", model{proof})'
        )
        console.print(READY + said, highlight=False, soft_wrap=True)

    run_cluster(config, show=show, on_ready=tell)


def run_demo(config: ClusterConfig, *, tokens: int, seed: int) -> bool:
    """Stream once without a fault and once with an expert server killed midway; print both and a table.

    Returns:
        Whether the two texts are equal, token for token.
    """
    kill_at = Random(seed).randrange(tokens // 4, tokens // 2)
    with LocalCluster(config, on_event=lambda _: None) as cluster:
        console.print(f"{config.experts} expert servers, each expert on {config.replicas}; the text without a fault:\n")
        calm = asyncio.run(complete(cluster.url, config.served_model_name, tokens))
        console.print(calm.text, style="dim", markup=False, highlight=False)
        members = fetch_status(cluster.url)["members"]
        victim = next(member for member in members if member["name"].startswith("expert/"))
        killed_s, killed_at = 0.0, 0

        def kill(pieces: int) -> None:
            nonlocal killed_s, killed_at
            os.kill(victim["pid"], signal.SIGKILL)
            killed_s, killed_at = time.monotonic(), pieces

        console.print(f"\nThe same again, with one server killed (SIGKILL) after {kill_at} tokens:\n")
        killed = asyncio.run(complete(cluster.url, config.served_model_name, tokens, kill_at, kill))
        at = len("".join(killed.pieces[:killed_at]))
        console.print(killed.text[:at], end="", markup=False, highlight=False)
        console.print(f"[bold red]<{victim['name']} killed>[/]", end="", highlight=False)
        console.print(killed.text[at:], markup=False, highlight=False)
        replacement_s = _wait_whole(cluster, config, victim["name"]) - killed_s
    same = calm.pieces == killed.pieces
    rows = (
        ("tokens", str(tokens)),
        ("equal, token for token", Text("yes", "green") if same else Text("NO", "red")),
        ("longest gap without a fault", f"{1e3 * max(calm.gaps_s, default=0.0):.1f} ms"),
        ("longest gap with the kill (the stall)", f"{1e3 * max(killed.gaps_s, default=0.0):.1f} ms"),
        ("all servers and replicas back after", f"{replacement_s:.2f} s"),
    )
    shown = table(("", ""), rows)
    shown.show_header = False
    console.print(shown)
    return same


async def complete(
    url: str, model: str, tokens: int, after: int = 0, act: Callable[[int], None] = lambda pieces: None
) -> StreamRecord:
    """Stream one greedy completion of exactly `tokens` tokens; call `act` when more than `after` pieces have come.
    Raises RuntimeError: the stream failed."""
    asked = {"model": model, "prompt": _PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
    client, record = Client(Endpoint.of_url(url), _ANSWER_LIMIT_S), StreamRecord(prompt=0, planned_s=0.0)
    stream = asyncio.create_task(client.stream(json.dumps(asked | {"ignore_eos": True}).encode(), record))
    while client.pieces <= after and not stream.done():
        await asyncio.sleep(0.001)
    act(len(record.pieces))
    await stream
    client.close()
    if record.failed:
        raise RuntimeError(f"The stream failed: {record.error}")
    return record


def _wait_whole(cluster: LocalCluster, config: ClusterConfig, lost: str) -> float:
    """Wait until the pool has its wanted size without `lost` and every expert its replicas; the time it was seen."""
    deadline = time.monotonic() + _REPLACEMENT_LIMIT_S
    while time.monotonic() < deadline:
        state = fetch_status(cluster.url)
        serving = [m for m in state["members"] if m["name"].startswith("expert/") and m["state"] == "serving"]
        if (
            len(serving) == config.experts
            and lost not in {member["name"] for member in serving}
            and state["replicas_min"] >= config.replicas
        ):
            return time.monotonic()
        time.sleep(0.02)
    raise RuntimeError(
        f"{_REPLACEMENT_LIMIT_S:.0f} s after the kill the pool is not whole again: {fetch_status(cluster.url)}"
    )
