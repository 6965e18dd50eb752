"""How a decode step's time grows with batch size, context length and number of expert servers, beside its floor.

The engine is driven directly over expert servers; one thing varies at a time. A step's time is the median over all
rounds' decoding steps. The floor (benchmarks/floor.py) is what the step's bytes take at the bandwidth, or its
operations at the peak, both measured in every round of this run; the experts that the rows really chose are counted
in a run of its own.

    python -m benchmarks.scaling --shape S --batch 1,2,4,8,16,32 --context 128,512,1024,2048,4096,8192

Appends JSON lines, and writes scaling-SHAPE.md and, where matplotlib is installed, scaling-SHAPE.svg beside them.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import floor
from benchmarks.engines.process import EngineProcess
from benchmarks.engines.run import prompts_for
from benchmarks.make_model import SHAPES
from benchmarks.report import record, spread
from benchmarks.scaling_report import plot, table
from benchmarks.setting import checkpoint, cluster, cores_of, interleave, numbers, parser, start_peers

KV_SLACK = 1024


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is measured: `sweep` is the thing that varies."""

    sweep: str
    servers: int
    batch: int
    context: int


def points(options: Any) -> list[Point]:
    """All points, in the order of the sweeps."""
    context = min(numbers(options.context))
    found = [
        Point(sweep="batch", servers=options.experts, batch=batch, context=context) for batch in numbers(options.batch)
    ]
    found += [
        Point(sweep="context", servers=options.experts, batch=batch, context=length)
        for batch in numbers(options.context_batch)
        for length in numbers(options.context)
    ]
    found += [
        Point(sweep="servers", servers=servers, batch=batch, context=context)
        for batch in numbers(options.servers_batch)
        for servers in numbers(options.servers)
    ]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every point; append JSON lines, write table and plot."""
    command = parser(__doc__)
    command.add_argument("--batch", default="1,2,4,8,16,32")
    command.add_argument("--context", default="128,512,1024,2048,4096,8192", help="tokens before each step")
    command.add_argument("--context-batch", default="1", help="batch sizes at which the context varies")
    command.add_argument("--servers", default="1,2,4,8")
    command.add_argument("--servers-batch", default="1,8", help="batch sizes at which the servers vary")
    command.add_argument("--experts", type=int, default=2, help="expert servers while others vary")
    command.add_argument("--tokens", type=int, default=48, help="steps of a round")
    options = command.parse_args(argv)
    wanted, cores = points(options), cores_of(options)
    length = max(point.context for point in wanted) + options.tokens
    overrides = {}
    if length > SHAPES[options.shape].max_model_len:
        overrides["max_position_embeddings"] = 1 << (length - 1).bit_length()
    room = {"kv_tokens": KV_SLACK + max(p.batch * (p.context + options.tokens) for p in wanted)}
    with checkpoint(options.shape, options.checkpoints, **overrides) as model:
        with EngineProcess("inproc", model, cores, **room, count_experts=True) as counting:
            distinct = {key: count(counting, key, options) for key in {(p.batch, p.context) for p in wanted}}
        rows: list[dict[str, Any]] = []
        for servers in sorted({point.servers for point in wanted}):
            here = [point for point in wanted if point.servers == servers]
            rows += measure(model, cores, servers, here, distinct, room, options)
    order = {(p.sweep, p.servers, p.batch, p.context): number for number, p in enumerate(wanted)}
    rows.sort(key=lambda row: order[row["sweep"], row["servers"], row["batch"], row["context"]])
    write(rows, options)


def prompts(key: tuple[int, int], number: int, options: Any) -> list[list[int]]:
    """Prompts whose mean context over the steps is the wanted one."""
    batch, context = key
    return prompts_for(batch, SHAPES[options.shape].vocab, number, max(1, context - options.tokens // 2))


def count(engine: EngineProcess, key: tuple[int, int], options: Any) -> float:
    """Distinct (layer, expert) pairs that a step's rows choose, mean over the steps of round 1."""
    return engine.experts_used(prompts(key, 1, options), options.tokens)["distinct_per_step"]


def measure(
    model: Path,
    cores: Sequence[int],
    servers: int,
    wanted: Sequence[Point],
    distinct: dict[tuple[int, int], float],
    room: dict[str, int],
    options: Any,
) -> list[dict[str, Any]]:
    """All points of one pool, interleaved with measurements of the machine; records and returns the results."""
    with contextlib.ExitStack() as closing:
        running = closing.enter_context(cluster(model, cores, servers=servers, endpoint=False))
        own = {"ours": {**room, "router": running.router_address}}
        engine = start_peers(["ours"], model, cores, closing, own)["ours"]

        def steps_s(key: tuple[int, int], number: int) -> list[float]:
            return engine.generate(prompts(key, number, options), options.tokens).decode_steps_s

        measures: dict[str, Any] = {
            "bandwidth": lambda number: [floor.bandwidth(len(cores))],
            "flops": lambda number: [floor.peak_flops(len(cores))],
        }
        for point in wanted:
            key = (point.batch, point.context)
            measures[str(key)] = lambda number, key=key: steps_s(key, number)
        pids = running.pids() | {"ours": engine.pid}
        found = interleave(measures, options.rounds, pids)
    bytes_per_s = statistics.median(rate for [rate] in found["bandwidth"])
    flops_per_s = statistics.median(rate for [rate] in found["flops"])
    results = []
    for point in wanted:
        key = (point.batch, point.context)
        step = floor.step_of(model, *key, distinct[key])
        floor_ms = step.seconds(bytes_per_s, flops_per_s) * 1e3
        step_ms = spread([statistics.median(steps) * 1e3 for steps in found[str(key)]])
        result = {
            "shape": options.shape,
            "sweep": point.sweep,
            "servers": servers,
            "batch": point.batch,
            "context": point.context,
            "threads": len(cores),
            "rounds": options.rounds,
            "step_ms": step_ms,
            "floor_ms": float(f"{floor_ms:.4g}"),
            "over_floor": float(f"{step_ms['median'] / floor_ms:.3g}"),
            "distinct_experts": round(distinct[key], 1),
            "floor_mb": round(step.nbytes / 1e6, 1),
            "floor_gflop": round(step.flops / 1e9, 3),
            "bandwidth_gb_per_s": round(bytes_per_s / 1e9, 1),
            "peak_gflop_per_s": round(flops_per_s / 1e9, 1),
        }
        record("scaling", result, (), options.results)
        results.append(result)
    return results


def write(rows: list[dict[str, Any]], options: Any) -> None:
    """The table, and the plot where it can be drawn."""
    (options.results / f"scaling-{options.shape}.md").write_text(table(rows))
    try:
        plot(rows, options.results / f"scaling-{options.shape}.svg")
    except ImportError:
        print("plot: skipped, needs the package matplotlib. Get it: pip install matplotlib", file=sys.stderr)


if __name__ == "__main__":
    main()
