"""Random faults for as long as it is told, streams all the while, and everything checked at the end.

Each fault is drawn from the seed alone; the next follows some time after the last, repaired or not, but a process is
ended or frozen only while its loss leaves a live replica of everything. Afterwards nothing may be left of it: every
stream is as it was in calm, every pool has its size, and the processes that lived through it hold no more file
descriptors, and little more memory, than before.

    make soak MINUTES=30
    python -m benchmarks.soak --minutes 30 --seed 7

The plan is written beside the results (soak-SEED.toml) before anything happens, in the form of `eaas chaos run`; the
same seed gives it again. Ends with exit code 1, naming seed and plan, when anything is amiss, or nothing was injected.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.fault_experiment import FaultExperiment, NotRepaired, fault_experiment, options, setting
from benchmarks.fault_points import is_ready
from benchmarks.report import record
from router.client import FaultRefused, RouterUnavailable
from router.faults import CLIENT_POINTS, SERVER_POINTS, Fault
from router.view import ATTENTION, EXPERT

ROUTER, GATEWAY = "router", "gateway"
# Means of the pauses between faults: mostly one at a time, sometimes several at once.
PAUSES_S = (0.2, 1.0, 3.0)
# Allocators keep what they once had; a leak goes on.
MEMORY_MIB, DESCRIPTORS = 64, 8
REFUSALS = (FaultRefused, RouterUnavailable)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One fault of a plan: `at_s` after its beginning, in a member of `pool` that is drawn with `dice`."""

    at_s: float
    pool: str
    fault: Fault
    dice: float


def plan(seed: int, minutes: float) -> list[Step]:
    """The faults of a seed, in order."""
    draw, steps, at_s = random.Random(seed), list[Step](), 0.0
    while True:
        at_s += draw.expovariate(1.0 / draw.choice(PAUSES_S)) + 0.1
        if at_s > 60.0 * minutes:
            return steps
        kind = draw.choices(("kill", "freeze", "slow", "delay", "loss", "partition", "corrupt"), (5, 5, 2, 1, 1, 1, 2))[
            0
        ]
        pool = draw.choices((EXPERT, ATTENTION, ROUTER, GATEWAY), (8, 4, 1, 1))[0]
        if pool == GATEWAY:
            kind = "freeze"
        elif pool == ROUTER:
            kind = draw.choice(("kill", "freeze"))
        elif pool == ATTENTION and kind not in ("kill", "freeze"):
            pool = EXPERT
        steps.append(
            Step(
                at_s=round(at_s, 3),
                pool=pool,
                fault=_fault(draw, kind, pool, f"soak-{len(steps)}"),
                dice=draw.random(),
            )
        )


def _fault(draw: random.Random, kind: str, pool: str, name: str) -> Fault:
    words: dict[str, Any] = {"seed": draw.randrange(1 << 32)}
    points = {EXPERT: SERVER_POINTS[:5], ATTENTION: CLIENT_POINTS}.get(pool, ())
    if kind in ("kill", "freeze") and points and draw.random() < 0.5:
        words |= {"where": draw.choice(points), "after": draw.randrange(50)}
    if kind != "kill":
        longest_s = 1.0 if pool == GATEWAY else 6.0
        words["for_s"] = round(draw.uniform(0.1, longest_s), 2)
    words |= {
        "slow": {"times": draw.choice((2.0, 10.0, 50.0))},
        "delay": {"by_s": draw.choice((0.001, 0.005, 0.05))},
        "loss": {"share": draw.choice((0.01, 0.1, 0.5))},
        "corrupt": {"share": draw.choice((0.01, 0.2)), "where": "wire"},
    }.get(kind, {})
    return Fault(id=name, kind=kind, **words)


def as_toml(seed: int, steps: Sequence[Step]) -> str:
    """The plan as `eaas chaos run` reads it."""
    names = {
        "for_s": "for",
        "by_s": "by",
        "times": "times",
        "share": "share",
        "where": "where",
        "after": "after",
    }
    lines = [f"seed = {seed}"]
    for step in steps:
        lines += [
            "",
            "[[fault]]",
            f'at = "{step.at_s}s"',
            f'kind = "{step.fault.kind}"',
            f'pool = "{step.pool}"',
        ]
        said = step.fault.to_dict()
        for field, word in names.items():
            if field not in said or (field == "for_s" and step.fault.kind == "kill"):
                continue
            value = said[field]
            text = f'"{value:g}s"' if field in ("for_s", "by_s") else f'"{value}"' if field == "where" else f"{value:g}"
            lines.append(f"{word} = {text}")
    return "\n".join(lines) + "\n"


def carry_out(experiment: FaultExperiment, step: Step) -> str:
    """Do one step; what came of it: "done", or why nothing was."""
    fault = step.fault
    takes_away = fault.kind in ("kill", "freeze", "partition") and step.pool in (EXPERT, ATTENTION)
    if takes_away and not is_ready(experiment):
        return "too little is left"
    if step.pool in (ROUTER, GATEWAY):
        found = [name for name in experiment.cluster.pids() if name.startswith(f"{step.pool}/")]
    else:
        found = experiment.serving() if step.pool == EXPERT else experiment.workers()
    if not found:
        return "nobody is there"
    victim = sorted(found)[int(step.dice * len(found))]
    if step.pool in (ROUTER, GATEWAY):
        return _by_signal(experiment.cluster.pids().get(victim, 0), fault)
    try:
        experiment.router.inject([victim], fault)
    except REFUSALS as error:
        return type(error).__name__
    return "done"


def _by_signal(pid: int, fault: Fault) -> str:
    """The router and the gateway get their signals from here: who passes orders on can't be told to freeze."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return "nobody is there"
    signal.pidfd_send_signal(pidfd, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def thaw() -> None:
        with contextlib.suppress(ProcessLookupError):  # It was ended.
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        os.close(pidfd)

    timer = threading.Timer(fault.for_s, thaw)
    timer.daemon = True
    timer.start()
    return "done"


def holdings(experiment: FaultExperiment) -> dict[str, tuple[int, float]]:
    """File descriptors and MiB of memory of this process and of each of the cluster's."""
    found = {}
    for name, pid in {**experiment.cluster.pids(), "launcher": os.getpid()}.items():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has just ended.
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            found[f"{name} (pid {pid})"] = (len(list(Path(f"/proc/{pid}/fd").iterdir())), resident / 2**20)
    return found


def leaks(before: Mapping[str, tuple[int, float]], after: Mapping[str, tuple[int, float]]) -> list[str]:
    """What those that lived all the while hold too much, in words."""
    return [
        f"{name}: {was[0]} file descriptors before, {now[0]} after; {was[1]:.0f} MiB before, {now[1]:.0f} after"
        for name, was in before.items()
        if (now := after.get(name))
        and (now[0] > was[0] + DESCRIPTORS or now[1] > was[1] + MEMORY_MIB)
        # This process keeps every record.
        and not (name.startswith("launcher") and now[0] <= was[0] + DESCRIPTORS)
    ]


def unproven(outcomes: Counter[str], requests: int) -> list[str]:
    """Why such a soak shows nothing, in words; empty: it does."""
    refused = sum(outcomes[error.__name__] for error in REFUSALS)
    reasons = {
        "no fault was injected": not outcomes["done"],
        f"{refused} faults were refused and {outcomes['done']} injected": refused > outcomes["done"],
        "no stream ended": not requests,
    }
    return [reason for reason, holds in reasons.items() if holds]


def soak(experiment: FaultExperiment, steps: Sequence[Step], minutes: float) -> dict[str, Any]:
    """Carry the plan out; what is amiss afterwards is in "amiss"."""
    outcomes: Counter[str] = Counter()
    amiss: list[str] = []
    with experiment.streams.running():
        # Connections of the streams and first growths are no leak.
        time.sleep(2.0)
        with contextlib.suppress(NotRepaired):  # Clients that are never answered are told of at the end.
            experiment.wait("an answer for each client", lambda: experiment.streams.is_warm)
        before, began_s = holdings(experiment), time.monotonic()
        for number, step in enumerate(steps):
            time.sleep(max(0.0, began_s + step.at_s - time.monotonic()))
            outcomes[carry_out(experiment, step)] += 1
            if (number + 1) % 100 == 0:
                counts = experiment.compare(list(experiment.streams.ended))
                print(f"{number + 1} of {len(steps)} faults, {step.at_s / 60:.1f} min: {counts}", flush=True)
                if not counts.clean:
                    break
        time.sleep(max(0.0, began_s + 60 * minutes - time.monotonic()))
        experiment.router.clear()
        try:
            whole_s = experiment.wait("a whole cluster after the last fault", experiment.is_whole)
        except NotRepaired as error:
            amiss.append(str(error))
            whole_s = -1.0
        time.sleep(2.0)
        after = holdings(experiment)
    counts = experiment.compare(experiment.streams.ended)
    if not counts.clean:
        amiss.append(f"clients saw {counts}")
    amiss += unproven(outcomes, len(experiment.streams.ended))
    amiss += leaks(before, after)
    return {
        "faults": outcomes["done"],
        "outcomes": dict(outcomes),
        "kinds": dict(Counter(f"{step.pool} {step.fault.kind}" for step in steps)),
        "requests": len(experiment.streams.ended),
        "whole_s": round(whole_s, 2),
        **asdict(counts),
        "amiss": amiss,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Soak, and append one JSON line."""
    found = options(__doc__, streams=8, seconds=0)
    found.add_argument("--minutes", type=float, default=1.0)
    chosen: argparse.Namespace = found.parse_args(argv)
    steps = plan(chosen.seed, chosen.minutes)
    chosen.results.mkdir(parents=True, exist_ok=True)
    path = chosen.results / f"soak-{chosen.seed}.toml"
    path.write_text(as_toml(chosen.seed, steps))
    print(f"seed {chosen.seed}: {len(steps)} faults in {chosen.minutes:g} minutes, plan {path}", flush=True)
    with fault_experiment(chosen, allow_chaos=True) as experiment:
        result = soak(experiment, steps, chosen.minutes)
    record("soak", {**setting(chosen), "minutes": chosen.minutes, **result}, ("numpy", "grpcio"), chosen.results)
    if result["amiss"]:
        print(
            f"seed {chosen.seed} failed: {'; '.join(result['amiss'])}\nplan: {path}\nagain: python -m benchmarks.soak "
            f"--seed {chosen.seed} --minutes {chosen.minutes:g}",
            file=sys.stderr,
        )
        sys.exit(1)
    path.unlink()


if __name__ == "__main__":
    main()
