"""The simulated cluster from the command line: many seeds, one seed again, planted mutants."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from eaas.ops.chaos.plan import PlanInvalid, read_plan
from tests.sim.cluster import runner
from tests.sim.cluster.mutation import run_mutants
from tests.sim.cluster.planned import check
from tests.sim.cluster.shrink import shrink
from tests.sim.cluster.world import LIVENESS

_EXAMPLES = """
  python -m tests.sim --seeds 2000 --events 5000           2,000 runs of 5,000 core events, two at a time
  python -m tests.sim --replay 17 --mode safety --events 5000 --keep 3,17
  python -m tests.sim --plan PLAN.toml --seed 3            the faults that `eaas chaos run PLAN.toml` injects
  python -m tests.sim --mutants                            every planted mutant of the core must be noticed

Exit codes: 0 every promise held (or every mutant was noticed), 1 not so, 2 bad usage."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim",
        description="Simulate whole clusters by seed and check every promise after every event.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=200, help="number of runs (default 200)")
    parser.add_argument("--first", type=int, help="seed of the first run (default: drawn from the clock, and printed)")
    parser.add_argument("--events", type=int, default=5000, help="core events of each run (default 5000)")
    parser.add_argument(
        "--mode",
        choices=("both", *runner.MODES),
        default="both",
        help="faults to the end, or until all must come back",
    )
    parser.add_argument("--models", type=int, default=0, help="of each pool (default: as many as its seed says)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="make one run again and show it")
    parser.add_argument("--keep", help="numbers of the faults that strike in a replay, as 3,17, or none")
    parser.add_argument("--plan", type=Path, help="a chaos plan: its faults strike and no others")
    parser.add_argument("--seed", type=int, help="with --plan: one run, of this seed; default: --seeds of them")
    parser.add_argument("--mutants", nargs="?", const="", metavar="NAME", help="run the planted mutants")
    options = parser.parse_args(arguments)
    if options.first is None:
        # Only runs that nobody has made before show anything of the core.
        options.first = fresh_seed()
    if options.replay is not None and options.mode == "both":
        options.mode = runner.MODES[options.replay % 2]
    if options.plan is not None:
        try:
            options.chaos = check(read_plan(options.plan))
        except PlanInvalid as error:
            parser.error(str(error))
    return options


def fresh_seed() -> int:
    """A seed that nobody has run before: milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def planned(options: argparse.Namespace) -> int:
    """A plan's faults, by one seed or by many."""
    totals = runner.Totals()
    if options.seed is None:
        print(f"first seed {options.first}", flush=True)
    seeds = range(options.first, options.first + options.seeds) if options.seed is None else [options.seed]
    for seed in seeds:
        job = runner.Job(seed=seed, mode=LIVENESS, events=0, plan=options.chaos, plan_path=str(options.plan))
        result = runner.run(job)
        totals.add(result)
        if result.promise:
            runner.show(result)
        elif options.seed is not None:
            runner.show_faults(result)
    print(totals)
    return 1 if totals.broken else 0


def replay(options: argparse.Namespace) -> int:
    """One run, shown."""
    keep = None
    if options.keep is not None:
        keep = frozenset(int(n) for n in options.keep.split(",")) if options.keep != "none" else frozenset[int]()
    job = runner.Job(seed=options.replay, mode=options.mode, events=options.events, keep=keep, models=options.models)
    result = runner.run(job)
    totals = runner.Totals()
    totals.add(result)
    if result.promise:
        runner.show(result)
    print(totals)
    return 1 if result.promise else 0


def many(options: argparse.Namespace) -> int:
    """All seeds; the first failing one is shrunk."""
    totals = runner.Totals()
    print(f"first seed {options.first}", flush=True)
    todo = runner.jobs(options.first, options.seeds, options.events, options.mode, options.models)
    for result in runner.run_all(todo, options.jobs):
        totals.add(result)
        if result.promise:
            runner.show(result)
    print(totals)
    if not totals.broken:
        return 0
    failed = totals.broken[0]
    smallest = shrink(failed, runner.run)
    print(f"\nsmallest schedule found: {len(smallest.struck)} of {len(failed.struck)} faults")
    runner.show(smallest)
    return 1


def main() -> int:
    options = parse(sys.argv[1:])
    if options.mutants is not None:
        return run_mutants(options.mutants, options.jobs)
    if options.plan is not None:
        return planned(options)
    return many(options) if options.replay is None else replay(options)


if __name__ == "__main__":
    sys.exit(main())
