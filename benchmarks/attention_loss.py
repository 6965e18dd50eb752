"""What a client sees when an attention worker is killed, or frozen and woken, in the middle of its streams.

A local cluster with two attention workers serves a batch of streams again and again: greedy, sampled with a seed, with
two choices and a stop string, with log-probabilities, and sampled without a seed. At a random point of each batch one
worker gets SIGKILL, or SIGSTOP and a while later SIGCONT. Everything is compared with the same batch without a fault:
    failed    streams that did not end as they should,
    lost, repeated, changed    tokens (of a sampled stream without a seed only their number can be known),
    pause     the longest wait for a next event, or for the first, of any stream that had not ended when its worker
              got the signal. At most PAUSE_S is promised; a longer one is told.
Ends with exit code 1 when a stream failed, or a token was lost, repeated or changed.

With --backlog, instead: so many requests at once, whose prompts differ; while they queue both workers are killed,
one a second after the other. Counted are those that did not end as they should, or have not all their tokens.

    python -m benchmarks.attention_loss --kills 200 --freezes 50
    python -m benchmarks.attention_loss --backlog 300 --prompt-tokens 1900
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import RESULTS, record
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from eaas.model.loader import resolve_model

NAME = "attention_loss"
LIMIT_S = 60.0
# Some are woken before the router has given them up, some after, some are replaced while frozen.
FREEZES_S = (0.4, 0.8, 1.5, 3.0)
PAUSE_S = 1.0
BACKLOG_LIMIT_S = 900.0
APART_S = 1.0
KINDS = ("greedy", "seeded", "choices", "unseeded")


@dataclass(kw_only=True)
class Stream:
    """What one client saw: of each choice its text, its tokens with their log-probabilities, and its end.

    Attributes:
        sent_s, arrivals_s: When it asked, and when each event came (monotonic).
    """

    kind: str
    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[tuple[str, float]]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    problem: str = ""

    def take(self, event: Mapping[str, Any]) -> None:
        """Add one event of the stream."""
        for choice in event["choices"]:
            index, found = choice["index"], choice.get("logprobs") or {}
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.tokens.setdefault(index, []).extend(
                zip(found.get("tokens") or (), found.get("token_logprobs") or (), strict=True)
            )
            if choice["finish_reason"]:
                self.finish[index] = choice["finish_reason"]

    def pause_s(self, injected_s: float) -> float:
        """The longest wait for an event that ended after that moment; 0 when all had come by then."""
        waits = pairwise([self.sent_s, *self.arrivals_s])
        return max((later - earlier for earlier, later in waits if later > injected_s), default=0.0)


@dataclass(kw_only=True)
class Counts:
    """What went wrong."""

    failed: int = 0
    lost: int = 0
    repeated: int = 0
    changed: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.failed or self.lost or self.repeated or self.changed)

    def compare(self, found: Stream, wanted: Stream) -> None:
        """Count how a stream differs from the one without a fault."""
        if found.problem or found.finish.keys() != wanted.finish.keys():
            self.failed += 1
            self.problems.append(found.problem or f"{found.kind} ended with {found.finish}")
            return
        for index, tokens in wanted.tokens.items():
            got = found.tokens.get(index, [])
            self.lost += max(0, len(tokens) - len(got))
            self.repeated += max(0, len(got) - len(tokens))
            if found.kind != "unseeded":
                self.changed += sum(one != other for one, other in zip(got, tokens, strict=False))
                self.changed += (found.texts[index], found.finish[index]) != (
                    wanted.texts[index],
                    wanted.finish[index],
                )


def bodies(count: int, tokens: int, seed: int, stop: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests of each kind in turn."""
    draw = random.Random(seed)
    made: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        body: dict[str, Any] = {
            "model": NAME,
            "prompt": [draw.randrange(3, 250) for _ in range(draw.choice((8, 24, 100)))],
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
            "logprobs": 1,
            "temperature": 0 if kind == "greedy" else 0.9,
        }
        if kind in ("seeded", "choices"):
            body["seed"] = draw.randrange(1 << 30)
        if kind == "choices":
            body |= {"n": 2, "logprobs": 3, **({"stop": [stop]} if stop else {})}
        made.append((kind, body))
    return made


async def stream(
    address: tuple[str, int],
    kind: str,
    body: Mapping[str, Any],
    on_event: Callable[[], None],
    limit_s: float = LIMIT_S,
) -> Stream:
    """One streamed completion. Never raises: what went wrong is in ``problem``."""
    seen = Stream(kind=kind)
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
            try:
                seen.sent_s = time.monotonic()
                writer.write(head.encode() + content)
                done = False
                status = await reader.readline()
                if b" 200 " not in status:
                    _, _, why = (await reader.read()).partition(b"\r\n\r\n")
                    seen.problem = f"{status.decode().strip()}: {why.decode()[:300]}"
                while line := await reader.readline():
                    if line.startswith(b"data: [DONE]"):
                        done = True
                    elif line.startswith(b"data: "):
                        seen.arrivals_s.append(time.monotonic())
                        event = json.loads(line[6:])
                        if "error" in event:
                            seen.problem = f"error event: {event['error']['message']}"
                            break
                        seen.take(event)
                        on_event()
                if not done and not seen.problem:
                    seen.problem = "it ended without [DONE]"
            finally:
                writer.close()
    except (OSError, ValueError, TimeoutError) as error:
        seen.problem = repr(error)
    return seen


def batch(
    url: str,
    requests: Sequence[tuple[str, Mapping[str, Any]]],
    at: int = 0,
    inject: Callable[[], None] = lambda: None,
    limit_s: float = LIMIT_S,
) -> list[Stream]:
    """All requests at once; ``inject`` is called after so many events of all together."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    came = 0

    def on_event() -> None:
        nonlocal came
        came += 1
        if came == at:
            inject()

    async def run() -> list[Stream]:
        return await asyncio.gather(
            *(stream((host, int(port)), kind, body, on_event, limit_s) for kind, body in requests)
        )

    return asyncio.run(run())


class Experiment:
    """Injects faults into attention workers of one cluster, and keeps what its clients saw."""

    def __init__(self, cluster: LocalCluster, *, streams: int, tokens: int, seed: int) -> None:
        self._cluster = cluster
        self._draw = random.Random(seed)
        self._seed = seed
        plain = batch(cluster.url, bodies(streams, tokens, seed, ""))
        # A stop string that matches late in the answer, and across tokens.
        text = next((one.texts[0] for one in plain if one.kind == "choices"), "")
        self._requests = bodies(streams, tokens, seed, text[len(text) * 4 // 5 :][:4])
        self.calm = batch(cluster.url, self._requests)
        self._events = sum(len(one.arrivals_s) for one in self.calm)
        self.counts = Counts()
        self.pauses_s: dict[str, list[float]] = {"kill": [], "freeze": []}
        for one in self.calm:
            if one.problem:
                raise RuntimeError(f"seed {seed}: without a fault: {one.problem}")

    def inject(self, kind: str) -> None:
        """Kill a worker, or freeze it for a while, in the middle of a batch."""
        self._wait_until_whole()
        draw = self._draw
        pids = self._workers()
        victim = draw.choice(sorted(pids))
        pidfd = os.pidfd_open(pids[victim])
        frozen_s = draw.choice(FREEZES_S)
        injected_s: list[float] = []

        def act() -> None:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            injected_s.append(time.monotonic())
            if kind == "freeze":
                asyncio.get_running_loop().call_later(frozen_s, wake)

        def wake() -> None:
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            except ProcessLookupError:
                return  # It has been replaced.

        found = batch(self._cluster.url, self._requests, draw.randrange(len(self.calm), self._events * 3 // 4), act)
        # The batch may have ended before the worker was to wake.
        time.sleep(max(0.0, injected_s[0] + frozen_s - time.monotonic()) if kind == "freeze" else 0.0)
        wake()
        os.close(pidfd)
        for one, wanted in zip(found, self.calm, strict=True):
            self.counts.compare(one, wanted)
        self.pauses_s[kind].append(max(one.pause_s(injected_s[0]) for one in found))

    def _workers(self) -> dict[str, int]:
        return {n: pid for n, pid in self._cluster.pids().items() if n.startswith("attention/")}

    def _wait_until_whole(self) -> None:
        until_s = time.monotonic() + LIMIT_S
        while True:
            state = fetch_status(self._cluster.url)
            serving = {m["name"] for m in state["members"] if m["pool"] == "attention" and m["state"] == "serving"}
            ready = serving & set(state["gateway"]["attention_workers"]) & set(self._workers())
            if len(ready) >= self._cluster.config.attention:
                return
            if time.monotonic() > until_s:
                raise RuntimeError(f"seed {self._seed}: after {LIMIT_S:g} s only {sorted(ready)} serve")
            time.sleep(0.02)

    def result(self) -> dict[str, Any]:
        """The counts, and the pauses in seconds."""
        return {
            "failed": self.counts.failed,
            "lost": self.counts.lost,
            "repeated": self.counts.repeated,
            "changed": self.counts.changed,
            "pause_s": {kind: summary(values) for kind, values in self.pauses_s.items() if values},
            "problems": sorted(set(self.counts.problems))[:5],
        }


def backlog(cluster: LocalCluster, *, requests: int, prompt_tokens: int, tokens: int, seed: int) -> dict[str, Any]:
    """Kill both workers, one after the other, while requests queue; counts, and seconds until the last had ended."""
    draw = random.Random(seed)
    pidfds = [os.pidfd_open(pid) for name, pid in sorted(cluster.pids().items()) if name.startswith("attention/")]
    wanted = [
        (
            "greedy",
            {
                "model": NAME,
                "prompt": [draw.randrange(3, 250) for _ in range(prompt_tokens)],
                "max_tokens": tokens,
                "stream": True,
                "ignore_eos": True,
                "logprobs": 0,
                "temperature": 0,
            },
        )
        for _ in range(requests)
    ]
    left: list[int] = []

    def kill_both() -> None:
        until_s = time.monotonic() + LIMIT_S
        # What has not ended by then was accepted, and queues or is computed.
        while int(fetch_status(cluster.url)["gateway"]["running"]) < requests * 3 // 4:
            if time.monotonic() > until_s:
                raise RuntimeError(f"seed {seed}: {requests} requests are not a backlog; send more, or longer ones")
            time.sleep(0.02)
        for number, pidfd in enumerate(pidfds):
            time.sleep(APART_S if number else 0.0)
            left.append(int(fetch_status(cluster.url)["gateway"]["running"]))
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)

    began_s = time.monotonic()
    with ThreadPoolExecutor(1) as other:
        killed = other.submit(kill_both)
        found = batch(cluster.url, wanted, limit_s=BACKLOG_LIMIT_S)
        killed.result()
    problems = [one.problem or f"it has {len(one.tokens.get(0, ()))} tokens" for one in found if not whole(one, tokens)]
    return {
        "failed": len(problems),
        "in_progress": left,
        "took_s": round(time.monotonic() - began_s, 1),
        "problems": sorted(set(problems))[:5],
    }


def whole(one: Stream, tokens: int) -> bool:
    """Whether a stream of one choice ended as it should, with all its tokens."""
    return not one.problem and one.finish == {0: "length"} and len(one.tokens[0]) == tokens


def summary(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the greatest."""
    found = np.array(values)
    return {
        "p50": round(float(np.percentile(found, 50)), 3),
        "p99": round(float(np.percentile(found, 99)), 3),
        "max": round(float(found.max()), 3),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and append one JSON line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="demo", help="checkpoint folder, hub id, or demo")
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--freezes", type=int, default=50)
    options.add_argument("--experts", type=int, default=2)
    options.add_argument("--backlog", type=int, default=0, help="requests at once, with both workers killed")
    options.add_argument("--prompt-tokens", type=int, default=1900, help="of each request of the backlog")
    options.add_argument("--streams", type=int, default=8, help="in each batch")
    options.add_argument("--tokens", type=int, default=96, help="of each choice")
    options.add_argument("--seed", type=int, default=0, help="chooses victims, moments and prompts")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder that gets the JSON line")
    chosen = options.parse_args(argv)
    config = ClusterConfig(
        model=resolve_model(chosen.model),
        served_model_name=NAME,
        experts=chosen.experts,
        attention=2,
        port=0,
    )
    if chosen.backlog:
        made = {"requests": chosen.backlog, "prompt_tokens": chosen.prompt_tokens, "tokens": chosen.tokens}
        with LocalCluster(config) as cluster:
            found = backlog(cluster, **made, seed=chosen.seed)
        told = {
            "model": chosen.model,
            "experts": chosen.experts,
            "attention": 2,
            **made,
            "seed": chosen.seed,
            **found,
        }
        record(NAME, told, ("numpy", "uvicorn", "uvloop"), chosen.results)
        if found["failed"]:
            sys.exit(1)
        return
    with LocalCluster(config) as cluster:
        experiment = Experiment(cluster, streams=chosen.streams, tokens=chosen.tokens, seed=chosen.seed)
        order = ["kill"] * chosen.kills + ["freeze"] * chosen.freezes
        random.Random(chosen.seed).shuffle(order)
        for kind in order:
            experiment.inject(kind)
    result = {
        "model": chosen.model,
        "experts": chosen.experts,
        "attention": 2,
        "streams": chosen.streams,
        "tokens": chosen.tokens,
        "kills": chosen.kills,
        "freezes": chosen.freezes,
        "seed": chosen.seed,
        **experiment.result(),
    }
    record(NAME, result, ("numpy", "uvicorn", "uvloop"), chosen.results)
    for kind, pauses in result["pause_s"].items():
        if pauses["max"] > PAUSE_S:
            print(f"longest pause after a {kind}: {pauses['max']:g} s, at most {PAUSE_S:g} s is promised")
    if not experiment.counts.clean:
        sys.exit(1)


if __name__ == "__main__":
    main()
