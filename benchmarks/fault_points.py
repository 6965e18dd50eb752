"""Kills and freezes at named points of the protocol, one after another, under streams: no client may see anything.

Each injection is armed in one process and happens by itself after some passes of its point: between a request's bytes
and its signal, with half a reply written, after a step and before its tokens are sent, and so on. The next follows once
every expert is on as many live servers as wanted and all workers are there. Whether it has happened is read from /proc.
What clients saw is compared with what they saw before the first injection.

    python -m benchmarks.fault_points --runs 1000 --seed 1   # half an hour at most
    python -m benchmarks.fault_points --runs 56 --seed 7     # four of each point

Injection number n of a seed is the same in every run: --first 118 --runs 1 repeats one (whom it meets in which state
is not in its power). Ends with exit code 1 when any client saw anything.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.closed_loop import LIMIT_S
from benchmarks.fault_experiment import Counts, FaultExperiment, fault_experiment, options, setting
from benchmarks.report import record
from eaas.ops.load.record import StreamRecord
from eaas.ops.load.report import added_stalls
from router.client import FaultRefused, RouterUnavailable
from router.faults import CLIENT_POINTS, SERVER_POINTS, Fault
from router.view import EXPERT

POINTS = (*CLIENT_POINTS, *SERVER_POINTS)
# Passed only while a server is new: a server is ended first, and its replacement gets the fault.
OF_NEWCOMERS = ("weights-loaded", "client-attached")
# About as many passes as there are in half a second under load, by point.
PASSES = {"step-before-tokens": 20, "step-after-tokens": 20, "weights-loaded": 2, "client-attached": 2}
PASSES_ELSE = 300
# Within the lease and beyond it, the short ones more often: (seconds, weight).
FREEZES = ((0.1, 4), (0.4, 4), (1.0, 2), (4.0, 1))
# An armed injection whose point is not passed by then is taken back and counted as missed.
HAPPENS_WITHIN_S = 3.0
NEWCOMER_WITHIN_S = 15.0
LOOK_S = 0.002
STALL_WINDOW_S = 5.0
# States of a process in /proc; empty: there is none.
GONE, FROZEN = ("", "Z", "X"), ("T", "t")
NAMES = {True: "kill", False: "freeze"}


@dataclass(frozen=True, kw_only=True)
class Injection:
    """What injection `number` of a seed is; the victim is drawn among those there then, with `draw`."""

    number: int
    point: str
    kind: str
    after: int
    for_s: float
    draw: random.Random

    @classmethod
    def of(cls, seed: int, number: int) -> Injection:
        """Every point in turn, alternately by kill and by freeze."""
        draw = random.Random(f"{seed} {number}")
        point = POINTS[number % len(POINTS)]
        spans, weights = zip(*FREEZES, strict=True)
        return cls(
            number=number,
            point=point,
            kind=NAMES[(number // len(POINTS)) % 2 == 0],
            after=draw.randrange(PASSES.get(point, PASSES_ELSE)),
            for_s=draw.choices(spans, weights)[0],
            draw=draw,
        )

    def fault(self) -> Fault:
        """As the router passes it on."""
        return Fault(
            id=f"point-{self.number}",
            kind=self.kind,
            where=self.point,
            after=self.after,
            for_s=self.for_s,
        )


@dataclass(frozen=True, kw_only=True)
class Hit:
    """An injection that was armed, on the clock of the records. injected_s: None: its point was not passed in time."""

    injection: Injection
    victim: str
    armed_s: float
    injected_s: float | None


def inject(experiment: FaultExperiment, injection: Injection) -> Hit:
    """Arm an injection in a process that will pass its point, and wait until it has happened, or will not."""
    experiment.wait("redundancy before the next injection", lambda: is_ready(experiment))
    if injection.point in OF_NEWCOMERS:
        victim = newcomer(experiment, injection)
    else:
        victim = injection.draw.choice(
            experiment.workers() if injection.point in CLIENT_POINTS else experiment.serving()
        )
    pid = next((m.pid for m in (experiment.view.members if experiment.view else ()) if m.name == victim), 0)
    armed_s = experiment.streams.now_s
    try:
        experiment.router.inject([victim], injection.fault())
    except FaultRefused:
        # A newcomer can be past its point, and even a member gone, by the time it would be told.
        return Hit(injection=injection, victim=victim, armed_s=armed_s, injected_s=None)
    end_s = time.monotonic() + HAPPENS_WITHIN_S
    while time.monotonic() < end_s:
        if state_of(pid) in (*GONE, *FROZEN):
            hit = Hit(injection=injection, victim=victim, armed_s=armed_s, injected_s=experiment.streams.now_s)
            experiment.wait(f"{victim} thawed or gone", lambda: state_of(pid) not in FROZEN)
            # The router keeps a freeze at a point until it cannot happen any more, and would refuse another.
            take_back(experiment, injection)
            return hit
        time.sleep(LOOK_S)
    take_back(experiment, injection)
    return Hit(injection=injection, victim=victim, armed_s=armed_s, injected_s=None)


def take_back(experiment: FaultExperiment, injection: Injection) -> None:
    """Disarm an injection, or forget it if it has happened."""
    # The router forgets what is over, and one that is late with its answer lets it end by itself.
    with contextlib.suppress(FaultRefused, RouterUnavailable):
        experiment.router.clear(injection.fault().id)


def is_ready(experiment: FaultExperiment) -> bool:
    """Whether one more loss leaves a live replica of everything, and a worker."""
    enough = min(experiment.config.experts, experiment.config.replicas + 1)
    return (
        experiment.is_redundant()
        and len(experiment.serving()) >= enough
        and len(experiment.workers()) == experiment.config.attention
    )


def newcomer(experiment: FaultExperiment, injection: Injection) -> str:
    """End a serving expert server; the name of what comes in its place, as soon as it is a member."""
    while True:
        experiment.wait("a whole pool", experiment.is_whole)
        before = experiment.serving()
        # Who was frozen for long may be fenced between the look and the order.
        with contextlib.suppress(FaultRefused):
            experiment.router.inject([injection.draw.choice(before)], Fault(id=f"room-{injection.number}", kind="kill"))
            break

    def joined() -> list[str]:
        found = experiment.view.pool(EXPERT) if experiment.view else ()
        return [m.name for m in found if m.name not in before]

    experiment.wait("a replacement", lambda: bool(joined()), NEWCOMER_WITHIN_S)
    return joined()[0]


def state_of(pid: int) -> str:
    """State of a process as /proc tells it; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def campaign(experiment: FaultExperiment, seed: int, first: int, runs: int, minutes: float = 0.0) -> list[Hit]:
    """Injections one after another until `runs` have happened, or the time is over. Streams run all the while."""
    hits: list[Hit] = []
    began_s, number, done = time.monotonic(), first, 0
    while done < runs and not (minutes and time.monotonic() - began_s > 60 * minutes):
        hits.append(inject(experiment, Injection.of(seed, number)))
        done += hits[-1].injected_s is not None
        number += 1
        if number - first > 2 * runs + 28:
            raise RuntimeError(f"{number - first} injections armed and only {done} happened: {missed(hits)}")
        if number % 50 == 0:
            spent_s = time.monotonic() - began_s
            print(
                f"{done} of {runs} injected in {spent_s:.0f} s; {experiment.compare(list(experiment.streams.ended))}",
                flush=True,
            )
    experiment.wait("a whole cluster after the last injection", experiment.is_whole)
    return hits


def missed(hits: Sequence[Hit]) -> Mapping[str, int]:
    """Injections that did not happen, by point."""
    found: defaultdict[str, int] = defaultdict(int)
    for hit in hits:
        found[hit.injection.point] += hit.injected_s is None
    return {point: count for point, count in found.items() if count}


def by_point(
    experiment: FaultExperiment, hits: Sequence[Hit], records: Sequence[StreamRecord]
) -> dict[str, dict[str, Any]]:
    """For each point: injections, what clients saw of them, and their worst added stall in milliseconds.

    A stream that saw something is put to the account of the last injection before its end.
    """
    found: dict[str, dict[str, Any]] = {
        point: {
            "armed": 0,
            "kill": 0,
            "freeze": 0,
            **asdict(Counts()),
            "worst_kill_ms": 0.0,
            "worst_freeze_ms": 0.0,
        }
        for point in POINTS
    }
    ordered = sorted(records, key=lambda one: one.ended_s or 0.0)
    ended_s = [one.ended_s or 0.0 for one in ordered]
    ends = [*(hit.armed_s for hit in hits[1:]), float("inf")]
    since = 0
    for hit, until_s in zip(hits, ends, strict=True):
        row = found[hit.injection.point]
        row["armed"] += 1
        upto = bisect_left(ended_s, until_s)
        for name, count in asdict(experiment.compare(ordered[since:upto])).items():
            row[name] += count
        if hit.injected_s is not None:
            row[hit.injection.kind] += 1
            window_s = min(STALL_WINDOW_S, until_s - hit.injected_s)
            # Streams of the next injections may have lived through this one as well.
            near = ordered[since : bisect_left(ended_s, hit.injected_s + window_s + LIMIT_S)]
            worst = max(added_stalls(near, hit.injected_s, window_s), default=0.0)
            name = f"worst_{hit.injection.kind}_ms"
            row[name] = max(row[name], round(1e3 * worst, 1))
        since = upto
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the campaign, and append one JSON line."""
    found = options(__doc__, streams=8, seconds=0)
    found.add_argument("--runs", type=int, default=28, help="injections that must happen")
    found.add_argument("--first", type=int, default=0, help="number of the first injection")
    found.add_argument("--minutes", type=float, default=0.0, help="end sooner than that many injections; 0: do not")
    chosen = found.parse_args(argv)
    began_s = time.monotonic()
    with fault_experiment(chosen, allow_chaos=True) as experiment:
        with experiment.streams.running():
            hits = campaign(experiment, chosen.seed, chosen.first, chosen.runs, chosen.minutes)
        records = list(experiment.streams.ended)
        counts, points = experiment.compare(records), by_point(experiment, hits, records)
    result = {
        **setting(chosen),
        "first": chosen.first,
        "injected": sum(hit.injected_s is not None for hit in hits),
        "missed": missed(hits),
        "requests": len(records),
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        **asdict(counts),
        "points": points,
    }
    record("fault_points", result, ("numpy", "grpcio"), chosen.results)
    if not counts.clean:
        sys.exit(1)


if __name__ == "__main__":
    main()
