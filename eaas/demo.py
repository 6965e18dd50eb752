"""The demonstration: an expert server dies in mid-stream and the text does not change."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status

PROMPT = "ROMEO:\n"
REPLACEMENT_LIMIT_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """What one client saw: the chunks' texts and when each arrived (monotonic seconds)."""

    texts: tuple[str, ...]
    times_s: tuple[float, ...]

    @property
    def text(self) -> str:
        """The whole completion."""
        return "".join(self.texts)

    @property
    def longest_gap_ms(self) -> float:
        """Longest silence between two chunks."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0) * 1e3


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
        calm = complete(cluster, config.served_model_name, tokens, lambda _: None)
        console.print(calm.text, style="dim", markup=False, highlight=False)
        killed: dict[str, Any] = {}

        def kill_midway(index: int) -> None:
            if index == kill_at:
                victim = next(
                    m for m in fetch_status(cluster.url)["members"] if m["name"].startswith("expert/")
                )
                os.kill(victim["pid"], signal.SIGKILL)
                killed.update(name=victim["name"], at_s=time.monotonic())

        console.print(f"\nThe same again, with one server killed (SIGKILL) after {kill_at} tokens:\n")
        struck = complete(cluster, config.served_model_name, tokens, kill_midway)
        at = len("".join(struck.texts[: kill_at + 1]))
        console.print(struck.text[:at], end="", markup=False, highlight=False)
        console.print(f"[bold red]<{killed['name']} killed>[/]", end="", highlight=False)
        console.print(struck.text[at:], markup=False, highlight=False)
        replacement_s = _wait_whole(cluster, config, killed["name"]) - killed["at_s"]
    same = calm.texts == struck.texts
    table = Table(show_header=False)
    table.add_row("tokens", str(tokens))
    table.add_row("equal, token for token", "[green]yes[/]" if same else "[red]NO[/]")
    table.add_row("longest gap without a fault", f"{calm.longest_gap_ms:.1f} ms")
    table.add_row("longest gap with the kill (the stall)", f"{struck.longest_gap_ms:.1f} ms")
    table.add_row("all servers and replicas back after", f"{replacement_s:.2f} s")
    console.print(table)
    return same


def complete(cluster: LocalCluster, model: str, tokens: int, on_token: Callable[[int], None]) -> Stream:
    """Stream one greedy completion of exactly `tokens` tokens; `on_token` is called with each chunk's number."""
    texts, times_s = [], []
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    for index, event in enumerate(_events(cluster.url, body)):
        texts.append(event["choices"][0]["text"])
        times_s.append(time.monotonic())
        on_token(index)
    return Stream(texts=tuple(texts), times_s=tuple(times_s))


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(
                f"The gateway answered {response.status}: {response.read().decode(errors='replace')}"
            )
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if data:
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(f"The stream ended with an error: {event['error']['message']}")
                yield event
        raise RuntimeError("The stream ended without [DONE].")
    finally:
        connection.close()


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
