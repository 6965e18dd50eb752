"""What scaling servers by the load saves over a static fleet that meets the same SLO.

    python -m benchmarks.elasticity --trace AzureLLMInferenceTrace_conv.csv --world elastic_week.py
    python -m benchmarks.elasticity --live --trace FILE         # real processes: benchmarks/elasticity_live.py

A week is made from an hour's trace by the world's `week(csv, seed)`: servers' worth of work in each 10 s. It is served
as a fluid: backlog grows by demand less capacity, and a token is late when the backlog at its arrival is over 1 s of
the capacity then present. router.scaling.decide, as shipped, sees what a live pool would report (busy, backlog, age of
the queue) and nothing else. An ordered server is paid from its order and serves 30 s later; one given back is free at
once. Headroom is tuned per policy until 0.1% of the tokens are late on seeds 0-4; figures are read on seeds 5-14, the
first day left out.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.elasticity_plot import plot
from benchmarks.engines.process import available_cores
from benchmarks.report import RESULTS, record
from router.scaling import Memory, Policy, Signals, decide

STEP_S = 10
START_STEPS = 3
DAY = 86400 // STEP_S
SLO = 0.001
TUNING, READING = range(5), range(5, 15)
UNITS = {"server": 1, "node of 8": 8, "two nodes (16)": 16, "rack of 32": 32, "monolith of 64": 64}
# Of every policy; 64 servers are the peak (99.9%) of the demand, not its most.
MOST = 192
# What a busy server does; any number gives the same figures.
TOKENS_PER_S = 1000.0
# Plans how many servers are wanted, from what a pool reports and the number of the step.
Plan = Callable[[Signals, int], int]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a trace: seconds after the first, prompt and new tokens."""

    at_s: float
    prompt: int
    output: int


@dataclass(kw_only=True)
class Outcome:
    """Of one fleet over one week, the first day left out. late, tokens: in server-seconds of work.

    changes: by hour. wanted: servers paid in each step, all days.
    """

    late: float = 0.0
    tokens: float = 0.0
    paid: float = 0.0
    changes: list[int]
    wanted: list[int]


def read_trace(path: Path) -> list[Request]:
    """The requests of an Azure CSV or a Mooncake JSONL, told apart by their first line; in order of arrival.

    Raises:
        ValueError: neither.
    """
    with path.open(newline="") as file:
        first = file.readline()
        file.seek(0)
        if first.startswith("{"):
            lines = [json.loads(line) for line in file]
            rows = [(line["timestamp"] / 1e3, line["input_length"], line["output_length"]) for line in lines]
        elif "TIMESTAMP" in first:
            # Seven digits of a second are one more than fromisoformat takes.
            rows = [
                (
                    datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
                    int(row["ContextTokens"]),
                    int(row["GeneratedTokens"]),
                )
                for row in csv.DictReader(file)
            ]
        else:
            raise ValueError(
                f"{path} begins with {first[:60]!r}; give an Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens) or a "
                "Mooncake JSONL (timestamp, input_length, output_length)."
            )
    rows.sort()
    return [Request(at_s=at_s - rows[0][0], prompt=prompt, output=output) for at_s, prompt, output in rows]


def late_part(demand: float, capacity: float, backlog: float) -> tuple[float, float]:
    """One step of the fluid: seconds in which an arriving token is late, and the backlog after it.

    Args:
        demand, capacity: Servers. backlog: Server-seconds at the beginning.
    """
    grows = demand - capacity
    if backlog > capacity:
        late_s = min(STEP_S, (capacity - backlog) / grows) if grows < 0 else STEP_S
    else:
        late_s = STEP_S - min(STEP_S, (capacity - backlog) / grows) if grows > 0 else 0.0
    return late_s, max(0.0, backlog + grows * STEP_S)


def serve(demand: Sequence[float], plan: Plan, first: int = 64, counted_from: int = DAY) -> Outcome:
    """Serve a demand [steps] with the fleet that a plan wants; `first` servers at the beginning."""
    hours = max(1, math.ceil((len(demand) - counted_from) * STEP_S / 3600))
    outcome = Outcome(changes=[0] * hours, wanted=[])
    live = wanted = first
    orders: list[tuple[int, int]] = []  # (step from which they serve, servers), oldest first
    backlog, busy, served = 0.0, 0.0, 0.0
    for step, asked in enumerate(demand):
        while orders and orders[0][0] <= step:
            live += orders.pop(0)[1]
        signals = Signals(
            wanted=wanted,
            live=live,
            starting=wanted - live,
            busy=busy,
            backlog_tokens=backlog * TOKENS_PER_S,
            tokens_per_s=served / STEP_S * TOKENS_PER_S,
            queue_s=backlog / live if live else None,
        )
        size = plan(signals, step)
        if size > wanted:
            orders.append((step + START_STEPS, size - wanted))
        elif size < wanted:
            # What has not started yet is the first to go.
            surplus = wanted - size
            while surplus and orders:
                since, count = orders.pop()
                if count > surplus:
                    orders.append((since, count - surplus))
                surplus -= min(count, surplus)
            live -= surplus
        late_s, after = late_part(asked, live, backlog)
        served = asked * STEP_S + backlog - after
        busy = served / (live * STEP_S) if live else 0.0
        backlog = after
        if step >= counted_from:
            outcome.late += asked * late_s
            outcome.tokens += asked * STEP_S
            outcome.paid += size
            outcome.changes[(step - counted_from) * STEP_S // 3600] += size != wanted
        wanted = size
        outcome.wanted.append(size)
    outcome.paid /= max(1, len(demand) - counted_from)
    return outcome


# Plans, made for one week each: the demand is there for those that know the future.


def by_policy(demand: np.ndarray, headroom: float, unit: int = 1, least: int = 0) -> Plan:
    """What is shipped; at least a unit."""
    del demand
    policy = Policy(headroom=headroom, unit=unit, least=max(unit, least), most=MOST, start_s=START_STEPS * STEP_S)
    memory = Memory()

    def plan(signals: Signals, step: int) -> int:
        nonlocal memory
        wanted, memory = decide(policy, signals, memory, step * STEP_S)
        return wanted

    return plan


def static(demand: np.ndarray, headroom: float) -> Plan:
    """Always as many."""
    del demand
    return lambda signals, step: round(headroom)


def knows_next(demand: np.ndarray, headroom: float) -> Plan:
    """Knows each step until a server ordered now serves, to the token; changes as often as it likes."""
    padded = np.append(demand, np.full(START_STEPS, demand[-1]))
    ahead = np.lib.stride_tricks.sliding_window_view(padded, START_STEPS + 1).max(axis=1)
    wanted = np.ceil(ahead * headroom).astype(int).tolist()
    return lambda signals, step: wanted[step]


def knows_trend(demand: np.ndarray, headroom: float) -> Plan:
    """Knows the mean of the 5 minutes around each step, not what scatters within; changes as often as it likes."""
    half = 15
    padded = np.pad(demand, half, mode="edge")
    mean = np.convolve(padded, np.ones(2 * half + 1) / (2 * half + 1), "valid")
    wanted = np.ceil(mean * headroom).astype(int).tolist()
    return lambda signals, step: wanted[min(step + START_STEPS, len(wanted) - 1)]


_weeks: dict[int, np.ndarray] = {}


def run(plan_for: Callable[[np.ndarray, float], Plan], headroom: float, seed: int) -> Outcome:
    """One policy over the week of a seed."""
    demand = _weeks[seed]
    return serve(demand.tolist(), plan_for(demand, headroom))


def late_share(outcomes: Sequence[Outcome]) -> float:
    """Late tokens over all tokens of several weeks."""
    return sum(outcome.late for outcome in outcomes) / sum(outcome.tokens for outcome in outcomes)


def tuned(
    measure: Callable[[float], float],
    low: float,
    high: float,
    whole: bool = False,
    resolution: float = 0.005,
) -> float:
    """A headroom between two that just keeps the SLO: to the resolution, or the least whole number.

    Args:
        measure: Gives the late share of a headroom; it falls as that rises.

    Raises:
        ValueError: the answer does not lie between them.
    """
    resolution = 1 if whole else resolution
    over, under = measure(low), measure(high)
    if not under <= SLO < over:
        raise ValueError(f"{over:.3%} late at {low}, {under:.3%} at {high}; give two around {SLO:.1%}")
    while high - low > resolution and (whole or under < 0.97 * SLO):
        # The share falls about exponentially: the straight line through both logarithms, and never near an end.
        part = math.log(over / SLO) / math.log(over / max(under, 1e-7))
        middle = low + (high - low) * min(max(part, 0.1), 0.9)
        if whole:
            middle = min(max(math.floor(middle), low + 1), high - 1)
        share = measure(middle)
        if share > SLO:
            low, over = middle, share
        else:
            high, under = middle, share
    return high


def load_world(path: Path) -> ModuleType:
    """The module that makes the weeks."""
    spec = importlib.util.spec_from_file_location("elastic_week", path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(f"{path} is no Python file; give --world the file that defines week(csv, seed)")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_weeks(world: ModuleType, requests: Sequence[Request], seeds: Sequence[int]) -> None:
    """Make the week of each seed from a trace of any format."""
    began = datetime.datetime(2023, 1, 1)
    with tempfile.TemporaryDirectory(prefix="eaas-elasticity-") as folder:
        path = Path(folder) / "trace.csv"
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
            for r in requests:
                stamp = began + datetime.timedelta(seconds=r.at_s)
                rows.writerow([stamp.isoformat(" ", "microseconds"), r.prompt, r.output])
        for seed in seeds:
            _weeks[seed] = world.week(path, seed)


def burstier(demand: np.ndarray, power: float) -> np.ndarray:
    """The same mean and ten-minute trend with each step's share of that trend raised to a power: 1 changes nothing."""
    steps = 600 // STEP_S
    padded = np.pad(demand, (steps // 2, steps - steps // 2 - 1), mode="edge")
    trend = np.convolve(padded, np.ones(steps) / steps, "valid")
    changed = trend * np.power(demand / np.maximum(trend, 1e-9), power)
    return changed * (demand.mean() / changed.mean())


def figures(outcomes: Sequence[Outcome], headroom: float) -> dict[str, Any]:
    """One policy's line, over the seeds for reading."""
    return {
        "headroom": round(headroom, 4),
        "paid": round(float(np.mean([outcome.paid for outcome in outcomes])), 2),
        "late": round(late_share(outcomes), 6),
        "changes_per_h": round(float(np.mean([outcome.changes for outcome in outcomes])), 1),
        "changes_most_h": max(max(outcome.changes) for outcome in outcomes),
    }


def compare(cores: int) -> tuple[dict[str, dict[str, Any]], dict[str, list[int]]]:
    """Tune and read every policy: its figures by name, and what it paid in each step of the first week read."""
    plans: Mapping[str, tuple[Callable[[np.ndarray, float], Plan], float, float]] = {
        "static": (static, 32, 128),
        **{name: (partial(by_policy, unit=unit), 1.6 / unit**0.4, 2.1) for name, unit in UNITS.items()},
        "knows the 5-minute mean": (knows_trend, 1.3, 3.0),
        "knows the next 40 s": (knows_next, 0.7, 1.2),
    }
    found: dict[str, dict[str, Any]] = {}
    wanted: dict[str, list[int]] = {}
    with ProcessPoolExecutor(cores) as pool:
        for name, (plan_for, low, high) in plans.items():

            def measure(headroom: float, plan_for: Callable[..., Plan] = plan_for) -> float:
                return late_share(list(pool.map(partial(run, plan_for, headroom), TUNING)))

            headroom = tuned(measure, low, high, plan_for is static)
            outcomes = list(pool.map(partial(run, plan_for, headroom), READING))
            found[name] = figures(outcomes, headroom)
            wanted[name] = outcomes[0].wanted
            if name == "static":

                def hindsight(size: float) -> float:
                    return late_share(list(pool.map(partial(run, static, size), READING)))

                found[name]["paid_with_hindsight"] = tuned(hindsight, low, high, True)
            found[name]["saving"] = round(1 - found[name]["paid"] / found["static"]["paid"], 4)
            print(f"{name:24} {found[name]}", flush=True)
    return found, wanted


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the policies; append one JSON line and draw one day."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--trace", type=Path, required=True, help="Azure CSV or Mooncake JSONL")
    options.add_argument("--burstiness", type=float, default=1.0, help="power on what differs from the trend")
    options.add_argument("--world", type=Path, default=Path("../shared/bench/elastic_week.py"))
    options.add_argument("--live", action="store_true", help="replay the trace against real processes")
    options.add_argument("--threads", type=int, default=0, help="cores to use; 0: all that are allowed")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder that gets the JSON line")
    chosen = options.parse_args(argv)
    requests = read_trace(chosen.trace)
    cores = available_cores(chosen.threads)
    if chosen.live:
        from benchmarks.elasticity_live import replay

        record("elasticity", {"measure": "live", **replay(requests, cores)}, (), chosen.results)
        return
    make_weeks(load_world(chosen.world), requests, [*TUNING, *READING])
    for seed, demand_of_week in _weeks.items():
        _weeks[seed] = burstier(demand_of_week, chosen.burstiness)
    found, wanted = compare(len(cores))
    demand = {seed: float(_weeks[seed][DAY:].mean()) for seed in READING}
    result = {
        "measure": "week",
        "trace": chosen.trace.name,
        "requests": len(requests),
        **({"burstiness": chosen.burstiness} if chosen.burstiness != 1 else {}),
        "seeds": {"tuned": list(TUNING), "read": list(READING)},
        "bound": {"mean_demand": round(float(np.mean(list(demand.values()))), 2)},
        "policies": found,
    }
    record("elasticity", result, (), chosen.results)
    try:
        plot(_weeks[READING[0]], wanted, chosen.results)
    except ImportError:
        print("plot: skipped, needs the package matplotlib. Get it: pip install matplotlib", file=sys.stderr)


if __name__ == "__main__":
    main()
