"""The demonstration: an expert server dies in mid-stream and the text does not change."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from random import Random

from rich.console import Console
from rich.table import Table

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from eaas.ops.load.client import Client, Endpoint
from eaas.ops.load.record import StreamRecord

PROMPT = "ROMEO:\n"
REPLACEMENT_LIMIT_S = 30.0
_LIMIT_S = 120.0


def run_demo(config: ClusterConfig, *, tokens: int, seed: int, console: Console) -> bool:
    """Stream once without a fault and once with an expert server killed midway; print both and a table.

    Returns:
        Whether the two texts are equal, token for token.
    """
    kill_at = Random(seed).randrange(tokens // 4, tokens // 2)
    with LocalCluster(config, on_event=lambda _: None) as cluster:
        console.print(
            f"{config.experts} expert servers, each expert on {config.replicas}; the text without a fault:\n"
        )
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
    table = Table(show_header=False)
    table.add_row("tokens", str(tokens))
    table.add_row("equal, token for token", "[green]yes[/]" if same else "[red]NO[/]")
    table.add_row("longest gap without a fault", f"{1e3 * max(calm.gaps_s, default=0.0):.1f} ms")
    table.add_row("longest gap with the kill (the stall)", f"{1e3 * max(killed.gaps_s, default=0.0):.1f} ms")
    table.add_row("all servers and replicas back after", f"{replacement_s:.2f} s")
    console.print(table)
    return same


async def complete(
    url: str, model: str, tokens: int, after: int = 0, act: Callable[[int], None] = lambda pieces: None
) -> StreamRecord:
    """Stream one greedy completion of exactly `tokens` tokens; call `act` when more than `after` pieces have come.

    Raises:
        RuntimeError: the stream failed.
    """
    asked = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
    client, record = Client(Endpoint.of_url(url), _LIMIT_S), StreamRecord(prompt=0, planned_s=0.0)
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
    deadline = time.monotonic() + REPLACEMENT_LIMIT_S
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
        f"{REPLACEMENT_LIMIT_S:.0f} s after the kill the pool is not whole again: {fetch_status(cluster.url)}"
    )
