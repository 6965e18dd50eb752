"""What a failure costs: throughput, stalls and time to full redundancy, and that no client sees anything else.

Four expert servers, every expert on two, two attention workers, 16 streams that ask without pause. Runs with and
without a fault alternate in one cluster, with the same prompts; a run that had a fault begins the next with the pool
whole again. The loss is what a run with a fault lacks of the tokens of the calm run beside it, in the window after the
fault, whatever the replacement's start took from the cores included. A stream lasts longer than the window in which
stalls are looked for, so that most of those that a fault finds live through all of it; --tokens says how long.
Where the host's speed drifts from minute to minute, beside_own_past is the steadier figure: each run's rate after the
moment over its own rate before, and what the runs with a fault lack of that beside the calm ones.

    python -m benchmarks.failover --what kill --pairs 12 --seconds 60 --at 20   # 26 minutes
    python -m benchmarks.failover --what freeze --pairs 12 --seconds 60 --at 20 # SIGSTOP for 10 s; slow: ten times
    python -m benchmarks.failover --what serial --pairs 3 --seconds 300 --at 10 # ten kills, evenly over the run
    python -m benchmarks.failover --what stalls --kills 200                     # 20 minutes: the stalls of each kill
    python -m benchmarks.failover --what kill --share 0.05 --pairs 12           # each server on a lane of its own

Servers that share cores lose no capacity when one of them dies: the others have its share of the cores at once. With
--share each expert server is held to that share of one core (a CPU quota of its process), so that servers are what
bounds throughput, a dead one is missed, and the figure is tokens per second and serving server.

Ends with exit code 1 when any client saw anything. A figure beyond its bound is told, and recorded as "over".
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.fault_experiment import Counts, FaultExperiment, fault_experiment, options, setting
from benchmarks.lane_share import LaneShare
from benchmarks.recovery import cpu_s
from benchmarks.report import record
from eaas.ops.load.record import StreamRecord
from eaas.ops.load.report import Timeline, added_stalls, quantiles
from router.faults import Fault
from router.view import EXPERT, SERVING

KINDS = ("kill", "freeze", "slow", "serial", "stalls")
FREEZE_S, SLOW_S, SLOW_TIMES = 10.0, 30.0, 10.0
SERIAL_KILLS = 10
# Of a run, until all streams are under way.
WARM_S = 2.0
STALL_WINDOW_S = 5.0
# Some ten seconds of one of 16 streams on two cores; with its prompt it fits the demonstration model's 2048.
TOKENS = 1024
# Of each kind of fault: figure, which of its values, and the most that it may be.
BOUNDS = {
    "kill": (("loss_percent", "median", 1.0), ("loss_percent", "high", 2.0)),
    "stalls": (("worst_stall_ms", "p99", 100.0), ("worst_stall_ms", "max", 300.0)),
    "freeze": (("worst_stall_ms", "max", 400.0),),
    "slow": (("loss_percent", "median", 5.0),),
    "serial": (("loss_percent", "median", 2.0),),
}


@dataclass(kw_only=True)
class Injection:
    """One fault of a run, on the run's clock.

    Attributes:
        redundant_s: Seconds until every expert was on its wanted live servers again.
        whole_s: Seconds until the pool had its size again.
        replacement_cpu_s: Processor time of the replacement by then.
    """

    victim: str
    injected_s: float
    redundant_s: float = 0.0
    whole_s: float = 0.0
    replacement_cpu_s: float = 0.0


@dataclass(kw_only=True)
class Run:
    """Streams of one run, its faults, its serving servers over time, and the cores that those kept busy (no fault)."""

    records: list[StreamRecord] = field(default_factory=list)
    injections: list[Injection] = field(default_factory=list)
    serving: list[tuple[float, int]] = field(default_factory=list)
    busy_cores: float = 0.0

    def rate(self, from_s: float, to_s: float) -> float:
        """Tokens per second between two moments."""
        return Timeline(self.records).rate(from_s, to_s)

    def change(self, at_s: float, to_s: float) -> float:
        """Tokens per second from a moment on, over those of as long before it as the run is old."""
        return self.rate(at_s, to_s) / self.rate(max(min(WARM_S, at_s / 2), 2 * at_s - to_s), at_s)

    def server_s(self, from_s: float, to_s: float) -> float:
        """Serving servers times seconds between two moments."""
        total, steps = 0.0, [*self.serving, (float("inf"), 0)]
        for (since_s, count), (until_s, _) in pairwise(steps):
            total += count * max(0.0, min(until_s, to_s) - max(since_s, from_s))
        return total


def begin_fault(experiment: FaultExperiment, what: str, victim: str) -> None:
    """Do it to a process; a frozen one is thawed by itself, if it is still there."""
    pid = experiment.cluster.pids()[victim]
    if what == "slow":
        fault = Fault(id=f"slow-{victim}", kind="slow", for_s=SLOW_S, times=SLOW_TIMES)
        experiment.router.inject([victim], fault)
        return
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGSTOP if what == "freeze" else signal.SIGKILL)
    if what != "freeze":
        os.close(pidfd)
        return

    def thaw() -> None:
        time.sleep(FREEZE_S)
        with contextlib.suppress(ProcessLookupError):  # It was replaced and ended.
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        os.close(pidfd)

    threading.Thread(target=thaw, daemon=True).start()


def inject(experiment: FaultExperiment, what: str, draw: random.Random) -> Injection:
    """Inject a fault into one expert server and wait for what it takes; the whole pool where one was lost."""
    experiment.wait("a whole pool", experiment.is_whole)
    before = set(experiment.serving())
    found = Injection(victim=draw.choice(sorted(before)), injected_s=experiment.streams.now_s)
    begin_fault(experiment, what, found.victim)
    if what == "slow":
        return found
    lost_s = experiment.wait(f"the end of {found.victim}", lambda: found.victim not in experiment.serving())
    found.redundant_s = lost_s + experiment.wait("redundancy", experiment.is_redundant)
    found.whole_s = found.redundant_s + experiment.wait("a whole pool", experiment.is_whole)
    pids = experiment.cluster.pids()
    found.replacement_cpu_s = sum(cpu_s(pids[name]) for name in set(experiment.serving()) - before)
    return found


def servers_cpu_s(experiment: FaultExperiment) -> float:
    """Processor time of all serving expert servers so far."""
    pids = experiment.cluster.pids()
    return sum(cpu_s(pids[name]) for name in experiment.serving())


@contextlib.contextmanager
def watched(experiment: FaultExperiment, run: Run) -> Iterator[None]:
    """Streams for the length of a `with`, and everything about them in `run` afterwards."""
    since = len(experiment.seen.views)
    first = len(experiment.serving())
    used_s, began_s = servers_cpu_s(experiment), time.monotonic()
    with experiment.streams.running():
        yield
    run.busy_cores = (servers_cpu_s(experiment) - used_s) / (time.monotonic() - began_s)
    run.records = list(experiment.streams.ended)
    zero_s = experiment.streams.zero_s
    run.serving = [(float("-inf"), first)]
    for at_s, view in experiment.seen.views[since:]:
        run.serving.append((at_s - zero_s, sum(m.state == SERVING for m in view.pool(EXPERT))))


def one_run(experiment: FaultExperiment, chosen: argparse.Namespace, what: str, draw: random.Random) -> Run:
    """Streams for the chosen time; `what` happens at its moment (nothing where it is empty)."""
    run = Run()
    experiment.wait("a whole pool", experiment.is_whole)
    with watched(experiment, run):
        began_s = time.monotonic()
        end_s, count = began_s + chosen.seconds, SERIAL_KILLS if what == "serial" else 1
        for number in range(count if what else 0):
            # Several share the rest of the run evenly, and none begins before the last one's loss is made good.
            due_s = began_s + chosen.at + number * (chosen.seconds - chosen.at) / count
            time.sleep(max(0.0, due_s - time.monotonic()))
            run.injections.append(inject(experiment, "kill" if what == "serial" else what, draw))
        time.sleep(max(0.0, end_s - time.monotonic()))
    if what == "slow":
        # The calm run that may be next must find nothing of it.
        experiment.router.clear()
    return run


def share_lost(faulty: float, calm: float) -> float:
    """What is missing of the calm figure, in percent."""
    return 100.0 * (1.0 - faulty / calm)


def in_pairs(experiment: FaultExperiment, chosen: argparse.Namespace) -> dict[str, Any]:
    """Runs with and without a fault by turns: loss by throughput, and by throughput per serving server."""
    draw = random.Random(chosen.seed)
    to_s = chosen.seconds if chosen.what == "serial" else min(chosen.seconds, chosen.at + chosen.window)
    losses, per_server, by_past, calm_rates, busy, runs = [], [], [], [], [], []
    counts, requests = Counts(), 0
    for number in range(chosen.pairs):
        pair: dict[str, Run] = {}
        for what in (chosen.what, "") if number % 2 == 0 else ("", chosen.what):
            pair[what] = one_run(experiment, chosen, what, draw)
            counts += experiment.compare(pair[what].records)
            requests += len(pair[what].records)
        faulty, calm = pair[chosen.what], pair[""]
        from_s = faulty.injections[0].injected_s
        calm_rates.append(calm.rate(from_s, to_s))
        losses.append(share_lost(faulty.rate(from_s, to_s), calm_rates[-1]))
        each = [run.rate(from_s, to_s) / run.server_s(from_s, to_s) for run in (faulty, calm)]
        per_server.append(share_lost(*each))
        by_past.append(share_lost(faulty.change(from_s, to_s), calm.change(from_s, to_s)))
        runs.append(faulty)
        busy.append(calm.busy_cores)
        print(
            f"pair {number + 1} of {chosen.pairs}: {losses[-1]:.2f}% lost, {per_server[-1]:.2f}% per server-second, "
            f"{by_past[-1]:.2f}% beside its own past; "
            f"{counts}",
            flush=True,
        )
    return {
        "window_s": round(to_s - chosen.at, 1),
        "pairs": chosen.pairs,
        "tokens_per_s": round(statistics.median(calm_rates), 1),
        "servers_busy_cores": round(statistics.median(busy), 3),
        "loss_percent": interval(losses, chosen.seed),
        "loss_percent_per_server_second": interval(per_server, chosen.seed),
        "loss_percent_beside_own_past": interval(by_past, chosen.seed),
        **faults_of(runs, chosen.what),
        "requests": requests,
        **asdict(counts),
    }


def interval(values: Sequence[float], seed: int) -> dict[str, Any]:
    """Median, its 95% interval, and every value."""
    median, low, high = bootstrap_interval(values, seed)
    return {
        "median": round(median, 3),
        "low": round(low, 3),
        "high": round(high, 3),
        "each": [round(value, 3) for value in values],
    }


def bootstrap_interval(
    values: Sequence[float], seed: int, *, level: float = 0.95, draws: int = 10_000
) -> tuple[float, float, float]:
    """The median of `values` (such as paired differences), and both ends of its percentile bootstrap interval.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("0 values have no median; at least 1 is needed.")
    found = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(found), size=(draws, len(found)))
    medians = np.sort(np.median(found[picks], axis=1))
    edge = (1.0 - level) / 2.0
    low, high = np.quantile(medians, [edge, 1.0 - edge])
    return float(np.median(found)), float(low), float(high)


def faults_of(runs: Sequence[Run], what: str) -> dict[str, Any]:
    """Added stalls, of all streams and of each fault the worst, and times of repair, over all faults of those runs."""
    injections = [one for run in runs for one in run.injections]
    # Many streams hide the few that a fault held up; the worst of each fault is what one fault costs.
    stalls = [
        [1e3 * stall for stall in added_stalls(run.records, one.injected_s, STALL_WINDOW_S)]
        for run in runs
        for one in run.injections
    ]
    worst = [max(each) for each in stalls if each]
    found: dict[str, Any] = {
        "faults": len(injections),
        "stream_s": spread([(one.ended_s or 0.0) - (one.sent_s or 0.0) for run in runs for one in run.records]),
        "added_stall_ms": spread([stall for each in stalls for stall in each]),
        "worst_stall_ms": {**spread(worst), "each": [round(stall, 1) for stall in worst]},
    }
    if what != "slow":
        found["redundant_s"] = spread([one.redundant_s for one in injections])
        found["whole_s"] = spread([one.whole_s for one in injections])
        found["replacement_cpu_s"] = spread([one.replacement_cpu_s for one in injections])
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the most of some values."""
    found = quantiles(values)
    if found is None:
        return {}
    return {
        "count": found["count"],
        "p50": round(found["p50"], 3),
        "p99": round(found["p99"], 3),
        "max": round(found["most"], 3),
    }


def stalls(experiment: FaultExperiment, chosen: argparse.Namespace) -> dict[str, Any]:
    """Kill after kill, each with its five seconds, and the added stalls of all of them."""
    draw, run = random.Random(chosen.seed), Run()
    with watched(experiment, run):
        for number in range(chosen.kills):
            # At no fixed moment of a step or of a lease.
            time.sleep(draw.uniform(0.5, 0.7))
            run.injections.append(inject(experiment, "kill", draw))
            since_s = experiment.streams.now_s - run.injections[-1].injected_s
            time.sleep(max(0.0, STALL_WINDOW_S - since_s))
            if (number + 1) % 20 == 0:
                print(
                    f"{number + 1} of {chosen.kills} kills; {experiment.compare(list(experiment.streams.ended))}",
                    flush=True,
                )
    seen = experiment.compare(run.records)
    return {**faults_of([run], "kill"), "requests": len(run.records), **asdict(seen)}


def beyond(what: str, result: Mapping[str, Any]) -> list[str]:
    """The figures of a result that are over their bounds, in words."""
    return [
        f"{figure} {value}: {result[figure][value]:g}, at most {most:g} is promised"
        for figure, value, most in BOUNDS[what]
        if result[figure][value] > most
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and append one JSON line."""
    found = options(__doc__, streams=16, seconds=12)
    found.set_defaults(tokens=TOKENS)
    found.add_argument("--what", default="kill", choices=KINDS)
    found.add_argument("--pairs", type=int, default=1, help="of a run with and one without the fault")
    found.add_argument("--at", type=float, default=4.0, help="second of the fault in its run")
    found.add_argument("--window", type=float, default=30.0, help="seconds after the fault that count for the loss")
    found.add_argument("--kills", type=int, default=20, help="of --what stalls")
    found.add_argument("--share", type=float, default=0.0, help="of a core for each expert server; 0: no limit")
    chosen = found.parse_args(argv)
    if chosen.at >= chosen.seconds:
        found.error(f"--at {chosen.at:g} lies behind the run's end; --seconds is {chosen.seconds:g}.")
    with contextlib.ExitStack() as closing:
        experiment = closing.enter_context(
            fault_experiment(chosen, **({"allow_chaos": True} if chosen.what == "slow" else {}))
        )
        if chosen.share:
            closing.enter_context(LaneShare(lambda: experiment.view, chosen.share))
        measure: Callable[[FaultExperiment, argparse.Namespace], dict[str, Any]]
        measure = stalls if chosen.what == "stalls" else in_pairs
        result = measure(experiment, chosen)
    limits = {"share_of_core": chosen.share} if chosen.share else {}
    result["over"] = beyond(chosen.what, result)
    record(
        "failover",
        {"what": chosen.what, **setting(chosen), **limits, **result},
        ("numpy", "grpcio"),
        chosen.results,
    )
    note(chosen, result)
    if not result["requests"] or any(result[name] for name in asdict(Counts())):
        sys.exit(1)


def note(chosen: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Say which figures are over their bounds, and what they can and cannot show on this machine."""
    for text in result["over"]:
        print(text)
    if result["stream_s"]["p50"] <= STALL_WINDOW_S:
        print(
            f"streams lasted {result['stream_s']['p50']:.1f} s, no longer than the {STALL_WINDOW_S:g} s in which "
            "stalls are looked for; give more --tokens."
        )
    cores = len(os.sched_getaffinity(0))
    if not chosen.share and chosen.experts > cores and chosen.what != "stalls":
        print(
            f"{chosen.experts} servers share {cores} cores: when one dies the others have its share at once, so that "
            "no capacity is lost. With --share each server has a lane of its own, and "
            "loss_percent_per_server_second is the figure to read."
        )


if __name__ == "__main__":
    main()
