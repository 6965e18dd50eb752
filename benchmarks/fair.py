"""Tenants that share a cluster: whether each has its weight's part, and what background work costs the others.

A local cluster of the small model, with keys of weights 1 and 3. First both ask for far more than there is: counted are
the tokens, of prompts and answers, of what ended within a window. Then one asks now and then, alone and beside a
flood of background responses, in turn: measured is the time to its first token. The token ids of every answer are
compared with those to the same prompt on the idle cluster. And two programs of weights 1 and 3 have rows computed by
one expert server, whose bits are compared with those of a call alone. Ends with exit code 1 where anything differs or
fails.

    python -m benchmarks.fair shares --window-s 60
    python -m benchmarks.fair waits --window-s 10 --rounds 3 --rate 4
    python -m benchmarks.fair pools --window-s 30
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.report import record, spread
from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.gateway.keys import Key, digest_of, new_key, write_keys
from eaas.model.loader import resolve_model
from eaas.pool import Pool, connect

NAME = "fair"
WEIGHTS = {"one": 1, "three": 3}
PROMPTS = 64
CLIENTS = 24
MAX_RUNNING = 8
CALLS, ROWS = 8, 1024
TURNS = 4
LIMIT_S = 120.0


@dataclass(kw_only=True)
class World:
    """The cluster's gateway, the prompts, and what was answered to each on the idle cluster."""

    url: str
    keys: dict[str, str]
    bodies: list[dict[str, Any]]
    answers: list[list[int]] = field(default_factory=list[list[int]])
    wrong: list[str] = field(default_factory=list[str])

    def headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}"}

    def judge(self, number: int, ids: list[int]) -> None:
        """Compare an answer with the one that came of the idle cluster."""
        if ids != self.answers[number]:
            self.wrong.append(f"prompt {number}: {ids}, alone {self.answers[number]}")

    async def ask(self, client: httpx.AsyncClient, tenant: str, number: int) -> tuple[list[int], int]:
        """The tokens of one answer, and how many there are of prompt and answer."""
        reply = await client.post(f"{self.url}/v1/completions", json=self.bodies[number], headers=self.headers(tenant))
        if reply.status_code != 200:
            self.wrong.append(f"prompt {number}: {reply.status_code} {reply.text}")
            return self.answers[number], 0
        found = reply.json()
        return found["choices"][0]["token_ids"], found["usage"]["total_tokens"]

    async def first_token_s(self, client: httpx.AsyncClient, tenant: str, number: int) -> float:
        """Stream one answer; the time to its first token."""
        began_s, first_s, ids = time.monotonic(), 0.0, list[int]()
        body = {**self.bodies[number], "stream": True}
        async with client.stream(
            "POST", f"{self.url}/v1/completions", json=body, headers=self.headers(tenant)
        ) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    first_s = first_s or time.monotonic() - began_s
                    ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
        self.judge(number, ids)
        return first_s


def bodies(seed: int) -> list[dict[str, Any]]:
    """Greedy requests whose prompts and answers differ in length."""
    draw = random.Random(seed)
    return [
        {
            "model": NAME,
            "prompt": [draw.randrange(3, 250) for _ in range(draw.randrange(32, 257))],
            "max_tokens": draw.randrange(16, 65),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for _ in range(PROMPTS)
    ]


async def overload(world: World, client: httpx.AsyncClient, window_s: float) -> dict[str, int]:
    """Both tenants ask for more than there is; the tokens that each had in the window."""
    ended: list[tuple[float, str, int]] = []

    async def ask_on(tenant: str, seed: int) -> None:
        draw = random.Random(seed)
        while True:
            number = draw.randrange(PROMPTS)
            ids, tokens = await world.ask(client, tenant, number)
            world.judge(number, ids)
            ended.append((time.monotonic(), tenant, tokens))

    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask_on(tenant, seed)) for seed in range(CLIENTS) for tenant in WEIGHTS]
        await asyncio.sleep(window_s / 4)
        began_s = time.monotonic()
        await asyncio.sleep(window_s)
        for task in asking:
            task.cancel()
    had: Counter[str] = Counter()
    for ended_s, tenant, tokens in ended:
        if ended_s >= began_s:
            had[tenant] += tokens
    return dict(had)


async def now_and_then(world: World, client: httpx.AsyncClient, seed: int, rate: float, for_s: float) -> list[float]:
    """One tenant's times to the first token, at so many requests a second."""
    draw, asked = random.Random(seed), list[asyncio.Task[float]]()
    end_s = time.monotonic() + for_s
    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() < end_s:
            await asyncio.sleep(draw.expovariate(rate))
            asked.append(tasks.create_task(world.first_token_s(client, "three", draw.randrange(PROMPTS))))
    return [task.result() for task in asked]


async def flood(world: World, client: httpx.AsyncClient, jobs: int) -> list[str]:
    """Put background responses in, and wait until some of them run; their ids."""
    draw, ids = random.Random(1), list[str]()
    for _ in range(jobs):
        body = {
            "model": NAME,
            "input": " ".join(str(draw.randrange(1000)) for _ in range(100)),
            "background": True,
            "max_output_tokens": 1000,
            "ignore_eos": True,
        }
        reply = await client.post(f"{world.url}/v1/responses", json=body, headers=world.headers("one"))
        reply.raise_for_status()
        ids.append(reply.json()["id"])
    await asyncio.sleep(1.0)
    return ids


async def made(world: World, client: httpx.AsyncClient) -> float:
    """Output tokens since the gateway began."""
    page = (await client.get(f"{world.url}/metrics", headers=world.headers("one"))).text
    return float(re.findall(r"^vllm:generation_tokens_total\S* (\S+)", page, re.MULTILINE)[0])


async def answer_all(world: World, client: httpx.AsyncClient) -> None:
    """Note what comes of each prompt on an idle cluster."""
    for number in range(PROMPTS):
        ids, _ = await world.ask(client, "one", number)
        world.answers.append(ids)


async def shares(world: World, window_s: float) -> dict[str, Any]:
    """What each tenant has of a cluster that is asked for more than there is."""
    async with httpx.AsyncClient(timeout=LIMIT_S, limits=httpx.Limits(max_connections=None)) as client:
        await answer_all(world, client)
        had = await overload(world, client, window_s)
    return {"weights": WEIGHTS, "tokens": had, "ratio": round(had["three"] / had["one"], 3)}


async def waits(world: World, window_s: float, rounds: int, rate: float, jobs: int) -> dict[str, Any]:
    """What background work costs one that asks now and then. A round is TURNS windows alone and as many beside it."""
    async with httpx.AsyncClient(timeout=LIMIT_S, limits=httpx.Limits(max_connections=None)) as client:
        await answer_all(world, client)
        times = [[list[float]() for _ in range(rounds)] for _ in range(2)]
        tokens, ended = [0.0, 0.0], 0
        for turn in range(rounds * TURNS):
            # Which is first changes from turn to turn: a machine's speed may drift.
            for beside in (0, 1) if turn % 2 == 0 else (1, 0):
                ids = await flood(world, client, jobs) if beside else []
                before = await made(world, client)
                times[beside][turn // TURNS] += await now_and_then(world, client, turn, rate, window_s)
                tokens[beside] += await made(world, client) - before
                for id in ids:
                    url = f"{world.url}/v1/responses/{id}/cancel"
                    reply = await client.post(url, headers=world.headers("one"))
                    ended += reply.json().get("status") == "completed"
                await asyncio.sleep(1.0)
    alone, beside = ([float(np.percentile(waited, 99)) for waited in rounds_of] for rounds_of in times)
    whole = [float(np.percentile(np.concatenate(rounds_of), 99)) for rounds_of in times]
    return {
        "requests": [sum(map(len, rounds_of)) for rounds_of in times],
        "ttft_p50_s": [round(float(np.median(np.concatenate(rounds_of))), 5) for rounds_of in times],
        "ttft_p99_s": [spread(alone), spread(beside)],
        "ttft_p99_beside_over_alone": spread([b / a for a, b in zip(alone, beside, strict=True)]),
        "ttft_p99_beside_over_alone_of_all": round(whole[1] / whole[0], 3),
        "output_tokens_per_s": [round(count / window_s / rounds / TURNS, 1) for count in tokens],
        "jobs_ended": ended,
    }


def pools(router: str, window_s: float, wrong: list[str]) -> dict[str, Any]:
    """What programs of two weights have of one expert server, each with calls in flight all the time."""
    rows, ended = Counter[str](), threading.Event()

    def call_on(name: str, pool: Pool, seed: int) -> None:
        draw, shape = np.random.default_rng(seed), pool.shape
        x = draw.standard_normal((ROWS, shape.hidden), np.float32)
        ids = draw.permuted(np.tile(np.arange(shape.experts), (ROWS, 1)), axis=1)[:, : shape.top_k].copy()
        weights = draw.random((ROWS, shape.top_k), np.float32)
        alone = first.apply(0, x, ids, weights)
        ready.wait()
        out = np.empty_like(x)
        while not ended.is_set():
            pool.apply(0, x, ids, weights, out)
            rows[name] += ROWS
        if not np.array_equal(out, alone):
            wrong.append(f"rows of {name}, seed {seed}")

    with ExitStack() as closing:
        first = closing.enter_context(connect(router))
        ready = threading.Barrier(CALLS * len(WEIGHTS) + 1)
        threads: list[threading.Thread] = []
        for name, weight in WEIGHTS.items():
            pool = closing.enter_context(connect(router, weight=weight, calls=CALLS))
            threads += [threading.Thread(target=call_on, args=(name, pool, seed)) for seed in range(CALLS)]
        for thread in threads:
            thread.start()
        ready.wait()
        time.sleep(window_s / 4)
        before = rows.copy()
        time.sleep(window_s)
        had = rows - before
        ended.set()
        for thread in threads:
            thread.join()
    return {"weights": WEIGHTS, "rows": dict(had), "ratio": round(had["three"] / had["one"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("shares", "waits", "pools"))
    parser.add_argument("--model", type=Path, default=Path("demo"))
    parser.add_argument("--window-s", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=4.0, help="Requests a second of the one now and then.")
    parser.add_argument("--jobs", type=int, default=32, help="Background responses put in at once.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = {name: new_key() for name in WEIGHTS}
        path = Path(folder) / "keys.json"
        write_keys(
            path,
            [Key(name=name, sha256=digest_of(key), weight=WEIGHTS[name], operator=True) for name, key in keys.items()],
        )
        config = ClusterConfig(
            model=resolve_model(given.model), experts=1, replicas=1, served_model_name=NAME, port=0, keys_file=path
        )  # fmt: skip
        few = given.part == "shares"
        running = MAX_RUNNING if few else config.max_running
        with LocalCluster(replace(config, state_dir=Path(folder) / "state", max_running=running)) as cluster:
            world = World(url=cluster.url, keys=keys, bodies=bodies(0))
            if given.part == "pools":
                found = pools(cluster.router_address, given.window_s, world.wrong)
            elif few:
                found = asyncio.run(shares(world, given.window_s))
            else:
                found = asyncio.run(waits(world, given.window_s, given.rounds, given.rate, given.jobs))
    record(NAME, {**found, "wrong": len(world.wrong)})
    if world.wrong:
        print("\n".join(world.wrong[:10]), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
