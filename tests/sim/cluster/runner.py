"""Runs of many seeds over some processes, their totals, and what a failing one shows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from zlib import crc32

from eaas.ops.chaos.plan import Plan
from router.core import step as core_step
from tests.sim.cluster.judge import Violation
from tests.sim.cluster.world import LIVENESS, SAFETY, Step, World

MODES = (SAFETY, LIVENESS)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to be made. keep: numbers of the faults that strike; None = all. plan: its faults alone; from a file.
    models: of its pool; 0: as many as the seed says.
    """

    seed: int
    mode: str
    events: int
    keep: frozenset[int] | None = None
    plan: Plan | None = None
    plan_path: str = ""
    models: int = 0

    def command(self) -> str:
        """What replays it."""
        if self.plan is not None:
            return f"python -m tests.sim --plan {self.plan_path} --seed {self.seed}"
        text = f"python -m tests.sim --replay {self.seed} --mode {self.mode} --events {self.events}"
        text += f" --models {self.models}" if self.models else ""
        if self.keep is None:
            return text
        return f"{text} --keep {','.join(map(str, sorted(self.keep))) or 'none'}"


@dataclass(kw_only=True)
class Result:
    """What came of one run. last: the last core events before a violation."""

    job: Job
    core_events: int = 0
    world_events: int = 0
    trace: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    struck: list[tuple[int, float, str, str]] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    virtual_s: float = 0.0
    converged_s: float = 0.0
    promise: str = ""
    story: str = ""
    last: list[str] = field(default_factory=list)


def run(job: Job, step: Step = core_step) -> Result:
    """Make one run. A broken promise is in the result."""
    result = Result(job=job)
    world = World(step, job.seed, job.mode, job.events, job.keep, job.plan, job.models)
    try:
        world.run()
    except Violation as violation:
        result.promise, result.story = violation.promise, violation.story
        for now_s, event, commands in world.router.last:
            ordered = f" -> {', '.join(map(str, commands))}" if commands else ""
            result.last.append(f"{now_s:9.3f}  {event}{ordered}")
    result.core_events, result.world_events = world.router.events, world.happened
    result.trace = world.router.trace & 0xFFFFFFFFFFFFFFFF
    result.virtual_s, result.converged_s = world.now_s, world.converged_s
    result.requests, result.tokens = world.ledger.ends, world.ledger.tokens
    result.faults, result.struck = world.schedule.counts, world.schedule.struck
    return result


def jobs(first: int, seeds: int, events: int, mode: str, models: int = 0) -> Iterator[Job]:
    """One job for each seed; with mode "both" seeds take turns."""
    for seed in range(first, first + seeds):
        yield Job(seed=seed, mode=MODES[seed % 2] if mode == "both" else mode, events=events, models=models)


def run_all(todo: Iterable[Job], processes: int) -> Iterator[Result]:
    """Make runs in several processes, in the order of the jobs."""
    if processes == 1:
        yield from map(run, todo)
        return
    with get_context("fork").Pool(processes) as pool:
        yield from pool.imap(run, todo, chunksize=2)


class Totals:
    """Sums over runs."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.seeds = self.core_events = self.world_events = self.tokens = 0
        self.trace = 0
        self.faults: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.virtual_s = self.converged_s = 0.0
        self.broken: list[Result] = []

    def add(self, result: Result) -> None:
        """Count in a run."""
        self.seeds += 1
        self.core_events += result.core_events
        self.world_events += result.world_events
        self.tokens += result.tokens
        self.trace = crc32(result.trace.to_bytes(8, "little"), self.trace)
        self.faults += result.faults
        self.requests += result.requests
        self.virtual_s += result.virtual_s
        self.converged_s = max(self.converged_s, result.converged_s)
        if result.promise:
            self.broken.append(result)

    def __str__(self) -> str:
        took_s = time.perf_counter() - self.began_s
        events = self.core_events + self.world_events
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        ends = ", ".join(f"{how} {count}" for how, count in sorted(self.requests.items()))
        return (
            f"seeds {self.seeds}, violations {len(self.broken)}, trace {self.trace:08x}\n"
            f"events seen by the core {self.core_events:,} ({self.core_events / took_s:,.0f}/s), and in the world "
            f"{self.world_events:,} (together {events / took_s:,.0f}/s); {took_s:.1f} s of work, "
            f"{self.virtual_s:,.0f} s of the clusters' time\n"
            f"faults {self.faults.total():,}: {faults}\n"
            f"requests: {ends}; tokens {self.tokens:,}; all was well at most {self.converged_s:.1f} s after the faults"
        )


def show_faults(result: Result) -> None:
    """Print which faults struck in a run, and when."""
    print("faults that struck:")
    for number, now_s, kind, what in result.struck:
        print(f"  {number:4}  {now_s:8.3f} s  {kind}: {what}")


def show(result: Result) -> None:
    """Print what went wrong in a run, and how to see it again."""
    print(f"seed {result.job.seed}, {result.job.mode}, event {result.core_events}")
    print(f"broken: {result.promise}\n  {result.story}")
    show_faults(result)
    print("last events of the core:")
    for line in result.last[-20:]:
        print(f"  {line}")
    print(f"replay: {result.job.command()}", flush=True)
