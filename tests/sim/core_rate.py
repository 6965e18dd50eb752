"""How many events a second of CPU the router's core decides: python -m tests.sim.core_rate

The events are those of the simulated cluster, with every fault; they are recorded first and decided again by the
core alone, so that neither the world nor its judge is timed.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter

from router.core import step
from router.events import Command, Event
from router.state import Config, State
from tests.sim.cluster.runner import jobs, run

SEEDS = 60
EVENTS = 1000
ROUNDS = 7


def record(seeds: int, events: int) -> list[tuple[Config, State, Event, float]]:
    """Every step that the worlds of these seeds asked for."""
    steps: list[tuple[Config, State, Event, float]] = []

    def recording(config: Config, state: State, event: Event, now_s: float) -> tuple[State, list[Command]]:
        steps.append((config, state, event, now_s))
        return step(config, state, event, now_s)

    for job in jobs(1000, seeds, events, "both"):
        run(job, recording)
    return steps


def main() -> None:
    steps = record(SEEDS, EVENTS)
    rates: list[float] = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        for config, state, event, now_s in steps:
            step(config, state, event, now_s)
        rates.append(len(steps) / (time.process_time() - began_s))
    spent: Counter[str] = Counter()
    for config, state, event, now_s in steps:
        began_ns = time.process_time_ns()
        step(config, state, event, now_s)
        spent[type(event).__name__] += time.process_time_ns() - began_ns
    counts = Counter(type(event).__name__ for _, _, event, _ in steps)
    print(f"{statistics.median(rates):,.0f} events per CPU second, median of {ROUNDS} (worst {min(rates):,.0f})")
    for name, count in counts.most_common():
        print(f"{name:16} {count:8}  {spent[name] / count / 1000:7.1f} us each")


if __name__ == "__main__":
    main()
