"""How well the gateway predicts when requests end, and what polling by its word costs.

    python -m benchmarks.eta --trace AzureLLMInferenceTrace_conv.csv     # simulated: it, and loads drawn by seed
    python -m benchmarks.eta --loads none --live 300                      # a cluster of small processes here

Simulated workers decode their rows together, each step as long as they are many, one prompt by chunks beside them; what
finds no slot waits in order. Live, a client asks by HTTP for responses in the background, of a fresh cluster for each
load, and polls when `openai-poll-after-ms` says; the judge is the client's clock. Patterns that nobody but the sampler
reads make outputs as long as those of the trace.

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


def draw(seed: int, requests: int, per_s: Callable[[float], float], median: Callable[[float], float]) -> list[Asked]:
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


async def live(url: str, load: Sequence[Asked]) -> list[Outcome]:
    """Ask for each in the background, and poll when told to; a stream of its last event alone says when it ended."""
    outcomes = [Outcome(0.0) for _ in load]

    async def one(client: httpx.AsyncClient, number: int, asked: Asked) -> None:
        outcome, letters = outcomes[number], f"{number:04}" * (1 + asked.prompt // 4)
        # The pattern alone says how long it becomes, and nobody but the sampler reads that.
        pattern = {"regex": f"[ab]{{{max(1, asked.output - 1)}}}"}
        body = {"model": NAME, "input": letters[: asked.prompt], "max_output_tokens": asked.limit}
        body |= {"background": True, "structured_outputs": pattern}
        reply = await client.post(f"{url}/v1/responses", json=body)
        reply.raise_for_status()
        outcome.submitted_s = now_s = time.monotonic()
        at = f"{url}/v1/responses/{reply.json()['id']}"

        async def ends() -> None:
            last = await client.get(at, params={"stream": "true", "starting_after": "999999999"})
            outcome.ended_s = time.monotonic()
            if b"response.completed" not in last.content:
                raise RuntimeError(f"a response ended otherwise than whole: {last.text}")

        ending = asyncio.create_task(ends())
        while "eaas_eta" in (found := reply.json()):
            after_s = int(reply.headers["openai-poll-after-ms"]) / 1000
            eta = found["eaas_eta"]
            outcome.told.append((now_s, Estimate(eta["p50_s"], eta["p90_s"], after_s)))
            await asyncio.sleep(now_s + after_s - time.monotonic())
            reply = await client.get(at)
            reply.raise_for_status()
            now_s = time.monotonic()
        outcome.last_poll_s = now_s
        await ending

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=600.0, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        began_s = time.monotonic()
        for number, asked in enumerate(load):
            await asyncio.sleep(began_s + asked.at_s - time.monotonic())
            group.create_task(one(client, number, asked))
    return outcomes


def scaled(
    seed: int, requests: int, per_s: Callable[[float], float], lengths: Sequence[Asked], by: float
) -> list[Asked]:
    """Requests at random times, as long as those that come one after another somewhere in a trace, times `by`, and as
    fit into half of a context of 2,048 tokens."""
    drawing, at_s, load = random.Random(seed), 0.0, list[Asked]()
    first = drawing.randrange(max(1, len(lengths) - requests))
    for one in lengths[first : first + requests]:
        at_s += drawing.expovariate(per_s(at_s))
        output, limit = max(2, int(one.output * by)), min(1000, int(one.limit * by))
        load.append(Asked(at_s, max(1, min(1000, int(one.prompt * by))), min(output, limit), limit))
    return load


def main(argv: Sequence[str] | None = None) -> None:
    """Judge each load and append one JSON line each."""
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, help="CSV file of a trace: TIMESTAMP, ContextTokens, GeneratedTokens")
    options.add_argument("--requests", type=int, default=6000, help="of each simulated load that is drawn")
    options.add_argument("--seed", type=int, help="of what is drawn; default: from the clock")
    options.add_argument("--loads", choices=("all", "none"), default="all", help="simulated loads, or none of them")
    options.add_argument("--live", type=int, default=0, help="requests to clusters here; 0: no cluster")
    options.add_argument("--rate", type=float, default=3.0, help="of these, a second")
    options.add_argument("--scale", type=float, default=1.0, help="their lengths, of those that they are drawn as")
    chosen = options.parse_args(argv)
    seed = time.time_ns() % 2**32 if chosen.seed is None else chosen.seed
    loads: dict[str, tuple[list[Asked], int]] = {}
    n = chosen.requests
    drawn = draw(seed, n, lambda _: 5.0, lambda _: 150.0)
    if chosen.loads == "all":
        if chosen.trace is not None:
            loads["conversation trace"] = trace(chosen.trace), 3
        loads["steady"] = drawn, 2
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
        run_live(chosen, seed, trace(chosen.trace) if chosen.trace else drawn)


def run_live(chosen: argparse.Namespace, seed: int, lengths: Sequence[Asked]) -> None:
    """The same by HTTP, at a cluster on this machine that is fresh for each load."""
    rate = chosen.rate
    arrivals = {"Poisson": lambda _: rate, "bursts": lambda at_s: 3.0 * rate if at_s % 40 < 10 else rate / 3}
    for name, per_s in arrivals.items():
        load = scaled(seed, chosen.live, per_s, lengths, chosen.scale)
        with (
            checkpoint(chosen.shape, chosen.checkpoints) as model,
            cluster(model, cores_of(chosen), servers=2, endpoint=True) as running,
        ):
            outcomes = asyncio.run(live(running.url, load))
        setup = {
            "load": f"live, {name}",
            "shape": chosen.shape,
            "seed": seed,
            "rate": rate,
            "scale": chosen.scale,
        }
        settled = judge(outcomes[chosen.live // 3 :])
        record("eta", {**setup, **judge(outcomes), "settled": settled}, (), chosen.results)


if __name__ == "__main__":
    main()
