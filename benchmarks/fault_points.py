"""Kills and freezes at named points of the protocol, one after another, under streams: no client may see anything.

Each blow is armed in one process and strikes by itself after some passes of its point: between a request's bytes and
its signal, with half a reply written, after a step and before its tokens are sent, and so on. The next follows once
every expert is on as many live servers as wanted and all workers are there. Whether it struck is read from /proc.
What clients saw is compared with what they saw before the first blow.

    python -m benchmarks.fault_points --runs 1000 --seed 1   # half an hour at most
    python -m benchmarks.fault_points --runs 56 --seed 7     # four of each point

Blow number n of a seed is the same in every run: --first 118 --runs 1 repeats one (whom it meets in which state is not
in its power). Ends with exit code 1 when any client saw anything.
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
from benchmarks.report import record
from benchmarks.struck import Counts, Struck, options, setting, struck_cluster
from eaas.ops.load.record import StreamRecord
from eaas.ops.load.report import added_stalls
from router.client import FaultRefused, RouterUnavailable
from router.faults import CLIENT_POINTS, SERVER_POINTS, Fault
from router.view import EXPERT

POINTS = (*CLIENT_POINTS, *SERVER_POINTS)
# Passed only while a server is new: a server is ended first, and its replacement struck.
OF_NEWCOMERS = ("weights-loaded", "client-attached")
# About as many passes as there are in half a second under load, by point.
PASSES = {"step-before-tokens": 20, "step-after-tokens": 20, "weights-loaded": 2, "client-attached": 2}
PASSES_ELSE = 300
# Within the lease and beyond it, the short ones more often: (seconds, weight).
FREEZES = ((0.1, 4), (0.4, 4), (1.0, 2), (4.0, 1))
# An armed blow whose point is not passed by then is taken back and counted as missed.
STRIKES_WITHIN_S = 3.0
NEWCOMER_WITHIN_S = 15.0
LOOK_S = 0.002
STALL_WINDOW_S = 5.0
# States of a process in /proc; empty: there is none.
GONE, FROZEN = ("", "Z", "X"), ("T", "t")
NAMES = {True: "kill", False: "freeze"}


@dataclass(frozen=True, kw_only=True)
class Blow:
    """What blow `number` of a seed is; the victim is drawn among those there then, with `draw`."""

    number: int
    point: str
    kind: str
    after: int
    for_s: float
    draw: random.Random

    @classmethod
    def of(cls, seed: int, number: int) -> Blow:
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
    """A blow that was armed, on the clock of the records. struck_s: None: its point was not passed in time."""

    blow: Blow
    victim: str
    armed_s: float
    struck_s: float | None


def strike(struck: Struck, blow: Blow) -> Hit:
    """Arm a blow in a process that will pass its point, and wait until it has struck, or will not."""
    struck.wait("redundancy before the next blow", lambda: is_ready(struck))
    if blow.point in OF_NEWCOMERS:
        victim = newcomer(struck, blow)
    else:
        victim = blow.draw.choice(struck.workers() if blow.point in CLIENT_POINTS else struck.serving())
    pid = next((m.pid for m in (struck.view.members if struck.view else ()) if m.name == victim), 0)
    armed_s = struck.streams.now_s
    try:
        struck.router.inject([victim], blow.fault())
    except FaultRefused:
        # A newcomer can be past its point, and even a member gone, by the time it would be told.
        return Hit(blow=blow, victim=victim, armed_s=armed_s, struck_s=None)
    end_s = time.monotonic() + STRIKES_WITHIN_S
    while time.monotonic() < end_s:
        if state_of(pid) in (*GONE, *FROZEN):
            hit = Hit(blow=blow, victim=victim, armed_s=armed_s, struck_s=struck.streams.now_s)
            struck.wait(f"{victim} thawed or gone", lambda: state_of(pid) not in FROZEN)
            # The router keeps a freeze at a point until it could not strike any more, and would refuse another.
            take_back(struck, blow)
            return hit
        time.sleep(LOOK_S)
    take_back(struck, blow)
    return Hit(blow=blow, victim=victim, armed_s=armed_s, struck_s=None)


def take_back(struck: Struck, blow: Blow) -> None:
    """Disarm a blow, or forget it if it has struck."""
    # The router forgets what is over, and one that is late with its answer lets it end by itself.
    with contextlib.suppress(FaultRefused, RouterUnavailable):
        struck.router.clear(blow.fault().id)


def is_ready(struck: Struck) -> bool:
    """Whether one more loss leaves a live replica of everything, and a worker."""
    enough = min(struck.config.experts, struck.config.replicas + 1)
    return (
        struck.is_redundant()
        and len(struck.serving()) >= enough
        and len(struck.workers()) == struck.config.attention
    )


def newcomer(struck: Struck, blow: Blow) -> str:
    """End a serving expert server; the name of what comes in its place, as soon as it is a member."""
    while True:
        struck.wait("a whole pool", struck.is_whole)
        before = struck.serving()
        # Who was frozen for long may be fenced between the look and the order.
        with contextlib.suppress(FaultRefused):
            struck.router.inject([blow.draw.choice(before)], Fault(id=f"room-{blow.number}", kind="kill"))
            break

    def joined() -> list[str]:
        found = struck.view.pool(EXPERT) if struck.view else ()
        return [m.name for m in found if m.name not in before]

    struck.wait("a replacement", lambda: bool(joined()), NEWCOMER_WITHIN_S)
    return joined()[0]


def state_of(pid: int) -> str:
    """State of a process as /proc tells it; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def campaign(struck: Struck, seed: int, first: int, runs: int, minutes: float = 0.0) -> list[Hit]:
    """Blows one after another until `runs` have struck, or the time is over. Streams run all the while."""
    hits: list[Hit] = []
    began_s, number, done = time.monotonic(), first, 0
    while done < runs and not (minutes and time.monotonic() - began_s > 60 * minutes):
        hits.append(strike(struck, Blow.of(seed, number)))
        done += hits[-1].struck_s is not None
        number += 1
        if number - first > 2 * runs + 28:
            raise RuntimeError(f"{number - first} blows armed and only {done} struck: {missed(hits)}")
        if number % 50 == 0:
            spent_s = time.monotonic() - began_s
            print(
                f"{done} of {runs} struck in {spent_s:.0f} s; {struck.judge(list(struck.streams.ended))}",
                flush=True,
            )
    struck.wait("a whole cluster after the last blow", struck.is_whole)
    return hits


def missed(hits: Sequence[Hit]) -> Mapping[str, int]:
    """Blows that did not strike, by point."""
    found: defaultdict[str, int] = defaultdict(int)
    for hit in hits:
        found[hit.blow.point] += hit.struck_s is None
    return {point: count for point, count in found.items() if count}


def by_point(
    struck: Struck, hits: Sequence[Hit], records: Sequence[StreamRecord]
) -> dict[str, dict[str, Any]]:
    """For each point: blows, what clients saw of them, and their worst added stall in milliseconds.

    A stream that saw something is put to the account of the last blow before its end.
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
        row = found[hit.blow.point]
        row["armed"] += 1
        upto = bisect_left(ended_s, until_s)
        for name, count in asdict(struck.judge(ordered[since:upto])).items():
            row[name] += count
        if hit.struck_s is not None:
            row[hit.blow.kind] += 1
            window_s = min(STALL_WINDOW_S, until_s - hit.struck_s)
            # Streams of the next blows may have lived through this one as well.
            near = ordered[since : bisect_left(ended_s, hit.struck_s + window_s + LIMIT_S)]
            worst = max(added_stalls(near, hit.struck_s, window_s), default=0.0)
            name = f"worst_{hit.blow.kind}_ms"
            row[name] = max(row[name], round(1e3 * worst, 1))
        since = upto
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the campaign, and append one JSON line."""
    found = options(__doc__, streams=8, seconds=0)
    found.add_argument("--runs", type=int, default=28, help="blows that must strike")
    found.add_argument("--first", type=int, default=0, help="number of the first blow")
    found.add_argument(
        "--minutes", type=float, default=0.0, help="end sooner than that many blows; 0: do not"
    )
    chosen = found.parse_args(argv)
    began_s = time.monotonic()
    with struck_cluster(chosen, allow_chaos=True) as struck:
        with struck.streams.running():
            hits = campaign(struck, chosen.seed, chosen.first, chosen.runs, chosen.minutes)
        records = list(struck.streams.ended)
        counts, points = struck.judge(records), by_point(struck, hits, records)
    result = {
        **setting(chosen),
        "first": chosen.first,
        "struck": sum(hit.struck_s is not None for hit in hits),
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
