"""Whether anything stays behind: 500 streams at once, 200 of them cancelled at random, 20 read slowly, for minutes.

A local cluster serves wave after wave. Before the first counted wave (one has warmed everything up) and after the last,
with nothing in progress, this is read of each process: file descriptors, threads, resident memory; of each attention
worker: requests running and waiting, and the share of KV blocks in use; of the gateway: requests, choices, paused and
waiting ones, tokens owed.

    python -m benchmarks.leaks --minutes 10

Ends with exit code 1 when a stream ended otherwise than it should, or something is held that was not before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.report import RESULTS, record
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from eaas.model.loader import resolve_model

NAME = "leaks"
LIMIT_S = 300.0
# A slow reader takes so many bytes, so often.
SIP_BYTES, SIP_S = 512, 0.25
# Allocators keep what they once had; a leak goes on.
GROWTH = {"fds": 2.0, "threads": 2.0, "rss_mib": 64.0}
GAUGES = ("eaas_running", "eaas_choices", "eaas_waiting", "eaas_paused", "eaas_owed_tokens")


async def client(address: tuple[str, int], tokens: int, kind: str, draw: random.Random) -> str:
    """One stream; returns how it ended: done, cancelled, or what went wrong."""
    body = {
        "model": NAME,
        "prompt": [draw.randrange(3, 250) for _ in range(draw.choice((8, 40, 120)))],
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": draw.choice((0, 0.8)),
    }
    if kind == "slow":
        # Some 2 KB an event: more than the buffers between take.
        body |= {"logprobs": 5, "max_tokens": 8 * tokens}
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    cancelled_after = draw.randrange(0, tokens) if kind == "cancelled" else -1
    tail, events = b"", 0
    try:
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(*address, limit=1 << 12)
            try:
                writer.write(head.encode() + content)
                while True:
                    if events >= cancelled_after >= 0:
                        return "cancelled"
                    part = await reader.read(SIP_BYTES if kind == "slow" else 1 << 16)
                    if not part:
                        break
                    events += part.count(b"data: {")
                    tail = (tail + part)[-400:]
                    if kind == "slow" and draw.random() < 0.2:
                        await asyncio.sleep(SIP_S)
                return "done" if b"data: [DONE]" in tail else f"{kind}: {tail[-200:].decode(errors='replace')}"
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        return f"{kind}: {error!r}"


def wave(url: str, *, streams: int, cancelled: int, slow: int, tokens: int, seed: int) -> Counter[str]:
    """All streams at once, to their ends."""
    draw = random.Random(seed)
    kinds = ["cancelled"] * cancelled + ["slow"] * slow
    kinds += ["plain"] * (streams - len(kinds))
    draw.shuffle(kinds)
    host, _, port = url.removeprefix("http://").rpartition(":")

    async def run() -> Counter[str]:
        clients = (client((host, int(port)), tokens, kind, random.Random(draw.random())) for kind in kinds)
        return Counter(await asyncio.gather(*clients))

    return asyncio.run(run())


def reading(cluster: LocalCluster) -> dict[str, dict[str, float]]:
    """What each process holds, once nothing is in progress."""
    until_s = time.monotonic() + 30.0
    while True:
        found = {name: process(pid) for name, pid in cluster.pids().items()}
        with urllib.request.urlopen(f"{cluster.url}/metrics") as page:
            samples = re.findall(r"^(\w+)\{.*\} (\S+)$", page.read().decode(), re.M)
        gauges = {name: float(value) for name, value in samples if name in GAUGES}
        for member in fetch_status(cluster.url)["members"]:
            if member["pool"] == "attention":
                load = {key: member["load"].get(key, -1.0) for key in ("running", "waiting", "kv_use")}
                found.setdefault(member["name"], {}).update(load)
            if member["pool"] == "gateway":
                found.setdefault(member["name"], {}).update(gauges)
        if held(found) == 0 or time.monotonic() > until_s:
            return found
        time.sleep(0.25)


def held(found: Mapping[str, Mapping[str, float]]) -> float:
    """Requests, slots and blocks in use: 0 when nothing is in progress."""
    words = (*GAUGES, "running", "waiting", "kv_use")
    return sum(abs(of.get(word, 0.0)) for of in found.values() for word in words)


def left(before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What stayed behind, in words: work in progress, processes replaced, descriptors, threads and memory."""
    said = [
        f"{what} holds requests, slots or blocks" for what, of in (("before", before), ("after", after)) if held(of)
    ]
    if before.keys() != after.keys():
        said.append(f"{sorted(before)} began, {sorted(after)} are there")
    for name in before.keys() & after.keys():
        for what, most in GROWTH.items():
            was, now = before[name].get(what, 0.0), after[name].get(what, 0.0)
            if now > was + most:
                said.append(f"{name}: {what} {was:g} before, {now:g} after")
    return said


def process(pid: int) -> dict[str, float]:
    """Descriptors, threads and resident memory of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "fds": float(len(list(Path(f"/proc/{pid}/fd").iterdir()))),
        "threads": float(status["Threads"]),
        "rss_mib": round(int(status["VmRSS"].split()[0]) / 1024, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and append one JSON line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="demo", help="checkpoint folder, hub id, or demo")
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--streams", type=int, default=500)
    options.add_argument("--cancelled", type=int, default=200)
    options.add_argument("--slow", type=int, default=20)
    options.add_argument("--tokens", type=int, default=48, help="of each stream")
    options.add_argument("--attention", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--results", type=Path, default=RESULTS, help="folder that gets the JSON line")
    chosen = options.parse_args(argv)
    config = ClusterConfig(
        model=resolve_model(chosen.model),
        served_model_name=NAME,
        experts=2,
        attention=chosen.attention,
        # So few that one wave uses every block: memory touched for the first time is no leak.
        kv_tokens=16384,
        port=0,
    )
    sizes = {name: getattr(chosen, name) for name in ("streams", "cancelled", "slow", "tokens")}
    ends: Counter[str] = Counter()
    with LocalCluster(config) as cluster:
        wave(cluster.url, **sizes, seed=chosen.seed)
        before = reading(cluster)
        began_s, waves = time.monotonic(), 0
        while time.monotonic() - began_s < 60.0 * chosen.minutes:
            waves += 1
            ends += wave(cluster.url, **sizes, seed=chosen.seed + waves)
        after = reading(cluster)
    result = {
        "model": chosen.model,
        "attention": chosen.attention,
        **sizes,
        "seed": chosen.seed,
        "seconds": round(time.monotonic() - began_s, 1),
        "waves": waves,
        "ends": dict(ends.most_common(5)),
        "before": before,
        "after": after,
    }
    record(NAME, result, ("numpy", "uvicorn", "uvloop"), chosen.results)
    amiss = [f"{count} streams ended with {end}" for end, count in ends.items() if end not in ("done", "cancelled")]
    amiss += left(before, after)
    if amiss or not ends["done"]:
        print("; ".join(amiss) or "no stream was served to its end", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
