"""How well the gateway predicts when requests end, and what polling by its word costs.

    python -m benchmarks.eta --trace AzureLLMInferenceTrace_conv.csv     # simulated: it, and loads drawn by seed
    python -m benchmarks.eta --loads none --live 300                      # a cluster of small processes here

Simulated workers decode their rows together, each step as long as they are many, one prompt by chunks beside them; what
finds no slot waits in order. Live, the predictor stands beside the client, is told what the gateway's is told (sent,
first token, end), and never sees where an answer will stop: a third of the requests end at their limit, the others at
stop tokens that are drawn by a random model sooner or later, long before the limit they name.

Every request is polled when the predictor says. Coverage is of what was told when it was submitted, and at polls. Time
lost is from its end to the poll that finds it; beside it that of the best fixed interval, and of the best exponential
backoff, that take as many polls of the same requests, their parameters found with all times known.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import heapq
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.make_model import SHAPES
from benchmarks.report import record
from benchmarks.setting import NAME, checkpoint, cluster, cores_of, parser
from eaas.gateway.eta import Estimate, Eta

# Of a simulated worker: rows at once, a step, what each row adds to it, tokens of a chunk of prompts and what it adds.
SLOTS, STEP_S, ROW_S, CHUNK, CHUNK_S = 32, 0.02, 0.0005, 512, 0.03
FACTORS = (1.25, 1.5, 2.0, 3.0)


class Asked(NamedTuple):
    """One request of a load: `output` tokens come of it, at most `limit`; those of one `alike` are similar."""

    at_s: float
    prompt: int
    output: int
    limit: int
    alike: str = ""


@dataclass
class Outcome:
    """What became of one request, and what was told of it when."""

    submitted_s: float
    ended_s: float = 0.0
    last_poll_s: float = 0.0
    told: list[tuple[float, Estimate]] = field(default_factory=list[tuple[float, Estimate]])

    @property
    def took_s(self) -> float:
        """From its submission to its end."""
        return self.ended_s - self.submitted_s


# -- simulated


@dataclass
class _Worker:
    """rows: (the step at which it ends, its request), a heap. prefill: tokens left of the prompt in hand."""

    now_s: float = 0.0
    steps: float = 0.0
    rows: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    waiting: list[int] = field(default_factory=list[int])
    prompt: int | None = None
    prefill: float = 0.0

    @property
    def step_s(self) -> float:
        return STEP_S + ROW_S * len(self.rows) + (CHUNK_S if self.prompt is not None else 0.0)

    @property
    def busy(self) -> int:
        return len(self.rows) + len(self.waiting) + (self.prompt is not None)

    def advance(self, now_s: float) -> None:
        steps = max(0.0, now_s - self.now_s) / self.step_s
        self.steps, self.prefill, self.now_s = self.steps + steps, self.prefill - steps * CHUNK, now_s

    def next_s(self) -> float:
        left = [max(0.0, self.prefill) / CHUNK] if self.prompt is not None else []
        left += [max(0.0, self.rows[0][0] - self.steps)] if self.rows else []
        return self.now_s + min(left, default=math.inf) * self.step_s


def simulate(load: Sequence[Asked], workers: int, eta: Eta) -> list[Outcome]:
    """Each request through a pool of workers, to the least busy one, polled when `eta` says."""
    pool, outcomes = [_Worker() for _ in range(workers)], [Outcome(one.at_s) for one in load]
    eta.workers = workers
    where: dict[int, tuple[_Worker, float]] = {}
    polls: list[tuple[float, int]] = []
    arrivals = iter(range(len(load)))
    arriving = next(arrivals, None)

    def ask(number: int, now_s: float) -> None:
        worker, first = where.get(number, (None, 0.0))
        made = 0
        if worker is not None:
            worker.advance(now_s)
            made = min(load[number].output - 1, 1 + int(worker.steps - first))
        estimate = eta.estimate(str(number), now_s, made=made)
        if estimate is None:
            outcomes[number].last_poll_s = now_s
            return
        outcomes[number].told.append((now_s, estimate))
        heapq.heappush(polls, (now_s + estimate.poll_after_s, number))

    def work(worker: _Worker, now_s: float) -> None:
        worker.advance(now_s)
        if worker.prompt is not None and worker.prefill <= 1e-6:
            number, worker.prompt = worker.prompt, None
            eta.began(str(number), now_s)
            where[number] = worker, worker.steps
            heapq.heappush(worker.rows, (worker.steps + load[number].output - 1, number))
        while worker.rows and worker.rows[0][0] <= worker.steps + 1e-6:
            number = heapq.heappop(worker.rows)[1]
            del where[number]
            outcomes[number].ended_s = now_s
            one = load[number]
            finish = "stop" if one.output < one.limit else "length"
            eta.ended(str(number), now_s, made=one.output, finish=finish)
        if worker.prompt is None and worker.waiting and len(worker.rows) < SLOTS:
            worker.prompt = worker.waiting.pop(0)
            worker.prefill = load[worker.prompt].prompt

    while True:
        next_s, worker = min(((worker.next_s(), worker) for worker in pool), key=lambda each: each[0])
        arrival_s = math.inf if arriving is None else load[arriving].at_s
        poll_s = polls[0][0] if polls else math.inf
        if next_s <= min(arrival_s, poll_s) and next_s < math.inf:
            work(worker, next_s)
        elif arriving is not None and arrival_s <= poll_s:
            one, number = load[arriving], arriving
            eta.submitted(str(number), one.at_s, prompt=one.prompt, limit=one.limit, alike=one.alike)
            least = min(pool, key=lambda worker: worker.busy)
            least.waiting.append(number)
            work(least, one.at_s)
            ask(number, one.at_s)
            arriving = next(arrivals, None)
        elif polls:
            ask(heapq.heappop(polls)[1], poll_s)
        else:
            return outcomes


def trace(path: Path, limit: int = 4096) -> list[Asked]:
    """The requests of a trace with the columns TIMESTAMP, ContextTokens and GeneratedTokens."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        Asked((at - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), limit)
        for at, row in zip(times, rows, strict=True)
        if int(row["GeneratedTokens"]) > 0
    ]


def draw(
    seed: int, requests: int, per_s: Callable[[float], float], median: Callable[[float], float]
) -> list[Asked]:
    """Requests at random times, of six kinds with outputs of other lengths, a third of them cut by low limits."""
    drawing, at_s, load = random.Random(seed), 0.0, list[Asked]()
    for _ in range(requests):
        at_s += drawing.expovariate(per_s(at_s))
        kind, limit = drawing.randrange(6), drawing.choice((128, 512, 2048, 4096, 4096, 4096))
        output = 1 + int(drawing.lognormvariate(math.log(median(at_s) * (0.4 + 0.4 * kind)), 0.8))
        prompt = 1 + int(drawing.lognormvariate(5.5, 1.0))
        load.append(Asked(at_s, prompt, min(output, limit), limit, f"kind {kind}"))
    return load


# -- judged


def coverage(outcomes: Sequence[Outcome], *, at_submission: bool) -> tuple[float, float]:
    """Shares of what was told that came by the median and by the 90th percentile."""
    told = [
        (outcome.ended_s - at_s, estimate)
        for outcome in outcomes
        for at_s, estimate in (outcome.told[:1] if at_submission else outcome.told[1:])
    ]
    p50 = sum(took_s <= estimate.p50_s for took_s, estimate in told)
    p90 = sum(took_s <= estimate.p90_s for took_s, estimate in told)
    return p50 / max(1, len(told)), p90 / max(1, len(told))


def backoff(took_s: Sequence[float], first_s: float, factor: float) -> tuple[float, float]:
    """Mean polls, and mean seconds lost, of polls `first_s` apart, each interval `factor` times the one before."""
    polls, lost_s = 0, 0.0
    for took in took_s:
        at_s = step_s = first_s
        polls += 1
        while at_s < took:
            step_s *= factor
            at_s += step_s
            polls += 1
        lost_s += at_s - took
    return polls / len(took_s), lost_s / len(took_s)


def lost_at(took_s: Sequence[float], mean_polls: float, factor: float) -> float:
    """Mean seconds lost by a backoff of that factor that takes no more than so many polls."""
    low, high = statistics.fmean(took_s) / 100, max(took_s)
    for _ in range(40):
        middle = math.sqrt(low * high)
        if backoff(took_s, middle, factor)[0] > mean_polls:
            low = middle
        else:
            high = middle
    return backoff(took_s, high, factor)[1]


def judge(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of one load."""
    took_s = [outcome.took_s for outcome in outcomes]
    polls = statistics.fmean(len(outcome.told) for outcome in outcomes)
    best_s, factor = min((lost_at(took_s, polls, factor), factor) for factor in FACTORS)
    found = {
        "requests": len(outcomes),
        "mean_s": statistics.fmean(took_s),
        "at_submission": dict(zip(("p50", "p90"), coverage(outcomes, at_submission=True), strict=True)),
        "at_polls": dict(zip(("p50", "p90"), coverage(outcomes, at_submission=False), strict=True)),
        "polls": polls,
        "lost_s": statistics.fmean(max(0.0, o.last_poll_s - o.ended_s) for o in outcomes),
        "lost_fixed_s": lost_at(took_s, polls, 1.0),
        "lost_exponential_s": best_s,
        "best_factor": factor,
    }
    return json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.4g}"))


# -- live


async def live(url: str, requests: int, seed: int, vocab: int) -> list[Outcome]:
    """Send requests at random times in two levels of load, and poll a predictor that is told of them."""
    drawing, eta = random.Random(seed), Eta()
    eta.workers = 1
    outcomes: list[Outcome] = []

    async def one(client: httpx.AsyncClient, number: int) -> None:
        kind, made = drawing.randrange(3), 0
        mean = drawing.choice((20, 60, 160))
        # One of so many tokens is the last, and the model is random.
        allowed = drawing.sample(range(vocab), mean)
        # Heavy tails: half of the limits that cut are below 32, one in a hundred over 600.
        limit = 768 if kind else min(768, int(16 * drawing.paretovariate(1.0)))
        prompt = [drawing.randrange(vocab) for _ in range(drawing.choice((16, 64, 256)))]
        body = {"model": NAME, "prompt": prompt, "max_tokens": limit, "stream": True, "ignore_eos": not kind}
        # One token an event: every token is shown by its id.
        body |= {"temperature": 1.0, "return_token_ids": True}
        body |= {"stop_token_ids": allowed[:1], "allowed_token_ids": allowed} if kind else {}
        id, outcome = str(number), Outcome(time.monotonic())
        outcomes.append(outcome)
        # Who is alike is known by a name, such as that of a key; not which limits will hold.
        alike = "limits" if not kind else f"stops {mean}"
        eta.submitted(id, outcome.submitted_s, prompt=len(prompt), limit=limit, alike=alike)

        async def polls() -> None:
            while (estimate := eta.estimate(id, time.monotonic(), made=made)) is not None:
                outcome.told.append((time.monotonic(), estimate))
                await asyncio.sleep(estimate.poll_after_s)
            outcome.last_poll_s = time.monotonic()

        polling, finish = asyncio.create_task(polls()), ""
        async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    made += len(choice.get("token_ids") or ())
                    finish = choice["finish_reason"] or finish
                    eta.began(id, time.monotonic())
        outcome.ended_s = time.monotonic()
        eta.ended(id, outcome.ended_s, made=made, finish=finish)
        await polling

    async with httpx.AsyncClient(timeout=600.0) as client, asyncio.TaskGroup() as group:
        for number in range(requests):
            group.create_task(one(client, number))
            await asyncio.sleep(drawing.expovariate(6.0 if number % 60 < 30 else 1.5))
    return outcomes


def main(argv: Sequence[str] | None = None) -> None:
    """Judge each load and append one JSON line each."""
    options = parser(__doc__)
    options.add_argument(
        "--trace", type=Path, help="CSV file of a trace: TIMESTAMP, ContextTokens, GeneratedTokens"
    )
    options.add_argument("--requests", type=int, default=6000, help="of each simulated load that is drawn")
    options.add_argument("--seed", type=int, help="of what is drawn; default: from the clock")
    options.add_argument(
        "--loads", choices=("all", "none"), default="all", help="simulated loads, or none of them"
    )
    options.add_argument("--live", type=int, default=0, help="requests to a cluster here; 0: no cluster")
    chosen = options.parse_args(argv)
    seed = time.time_ns() % 2**32 if chosen.seed is None else chosen.seed
    loads: dict[str, tuple[list[Asked], int]] = {}
    if chosen.loads == "all":
        n = chosen.requests
        if chosen.trace is not None:
            loads["conversation trace"] = trace(chosen.trace), 3
        loads["steady"] = draw(seed, n, lambda _: 5.0, lambda _: 150.0), 2
        loads["bursts"] = draw(seed, n, lambda at_s: 14.0 if at_s % 120 < 30 else 1.5, lambda _: 150.0), 2
        loads["drift"] = draw(seed, n, lambda _: 3.0, lambda at_s: 180.0 - 120.0 * math.cos(at_s / 63.7)), 2
    for name, (load, workers) in loads.items():
        began_s = time.process_time()
        outcomes = simulate(load, workers, Eta())
        spent_us = (time.process_time() - began_s) / sum(len(outcome.told) for outcome in outcomes) * 1e6
        found = {"load": name, "seed": seed, "workers": workers, **judge(outcomes)}
        # Of which the first 500 are learned from.
        settled = judge(outcomes[500:]) if len(outcomes) > 1000 else None
        record("eta", {**found, "after_500": settled, "us_an_estimate": round(spent_us)}, (), chosen.results)
    if chosen.live:
        run_live(chosen, seed)


def run_live(chosen: argparse.Namespace, seed: int) -> None:
    """The same against a cluster on this machine."""
    with (
        checkpoint(chosen.shape, chosen.checkpoints) as model,
        cluster(model, cores_of(chosen), servers=2, endpoint=True) as running,
    ):
        outcomes = asyncio.run(live(running.url, chosen.live, seed, SHAPES[chosen.shape].vocab))
    found = {"load": "live", "shape": chosen.shape, "seed": seed, "workers": 1, **judge(outcomes)}
    record("eta", {**found, "after_100": judge(outcomes[100:])}, (), chosen.results)


if __name__ == "__main__":
    main()
