"""Throughput against attention workers x expert servers, with a monolithic fleet beside: measured up to 8 processes,
simulated to 64 servers from costs measured in the same run.

Measured: every fleet runs on the cores of this machine, so more processes do not mean more speed here. What they show
is the work: tokens per second and CPU time a token of all processes together, with as many whole engines (each with
every expert, none talking to another) beside, each with the same batch.

Simulated (benchmarks/fleet.py): every process has a core, and memory, of its own. Its costs: a worker's own
computation and a hand-over with empty experts, and an expert's weights and rows by least squares over batches, all on
one core. The link between hosts is not in it.

    python -m benchmarks.scaling_law --shape S --batch 8 --fleets 1x1,1x2,2x1,2x2,4x2,2x4,4x4
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.process import EngineProcess, cpu_s
from benchmarks.engines.run import prompts_for
from benchmarks.fleet import Costs, Shape, simulate
from benchmarks.make_model import SHAPES
from benchmarks.report import record, spread
from benchmarks.setting import (
    HttpEndpoint,
    checkpoint,
    cluster,
    cores_of,
    interleave,
    numbers,
    parser,
    start_peers,
)

KV_TOKENS = 16384
SIMULATED = (1, 2, 4, 8, 16, 32, 64)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure costs and fleets, simulate the rest; append JSON lines, write table and plot."""
    command = parser(__doc__)
    command.add_argument("--batch", type=int, default=8, help="sequences of each worker")
    command.add_argument("--tokens", type=int, default=48, help="new tokens of each sequence")
    command.add_argument("--fleets", default="1x1,1x2,2x1,2x2,4x2,2x4,4x4", help="workers x servers of each")
    command.set_defaults(rounds=5)
    options = command.parse_args(argv)
    fleets = [tuple(numbers(fleet.replace("x", ","))) for fleet in options.fleets.split(",")]
    cores = cores_of(options)
    if len(cores) < 2:
        sys.exit(f"{len(cores)} core found, 2 needed: one for a worker and one for a server.")
    with checkpoint(options.shape, options.checkpoints) as model:
        costs, alone_s = measured_costs(model, cores, options)
        rows = [measured_fleet(model, cores, workers, servers, options) for workers, servers in fleets]
    law = simulated(costs, alone_s, options)
    write(rows, law, costs, options)


def measured_costs(model: Path, cores: Sequence[int], options: Any) -> tuple[Costs, float]:
    """The costs on one core, and the step of a whole engine there at the same batch, in seconds."""
    shape = SHAPES[options.shape]
    batches = sorted({1, options.batch, 4 * options.batch})
    room = {"kv_tokens": KV_TOKENS}

    def prompts(batch: int, number: int) -> list[list[int]]:
        return prompts_for(batch, shape.vocab, number)

    with EngineProcess("inproc", model, cores[:1], **room, count_experts=True) as counting:
        distinct = {
            batch: counting.experts_used(prompts(batch, 1), options.tokens)["distinct_per_step"] for batch in batches
        }
    with (
        checkpoint(options.shape, options.checkpoints, moe_intermediate_size=1) as empty,
        contextlib.ExitStack() as closing,
    ):
        pool = closing.enter_context(cluster(empty, cores[1:2], servers=1, endpoint=False))
        engines = {
            "whole": closing.enter_context(EngineProcess("inproc", model, cores[:1], **room)),
            "empty": closing.enter_context(EngineProcess("inproc", empty, cores[:1], **room)),
        }
        own = {"ours": room | {"router": pool.router_address}}
        engines |= {"handed": start_peers(["ours"], empty, cores[:1], closing, own)["ours"]}

        def step_s(name: str, batch: int, number: int) -> float:
            run = engines[name].generate(prompts(batch, number), options.tokens)
            return statistics.median(run.decode_steps_s)

        wanted = [(name, batch) for name in ("whole", "empty") for batch in batches]
        wanted.append(("handed", options.batch))
        measures = {
            f"{name} {batch}": lambda number, name=name, batch=batch: step_s(name, batch, number)
            for name, batch in wanted
        }
        pids = pool.pids() | {name: engine.pid for name, engine in engines.items()}
        found = {key: statistics.median(steps) for key, steps in interleave(measures, options.rounds, pids).items()}
    # Whole less empty: each distinct expert's weights once, and each row, over all layers.
    work = np.array([(distinct[batch], batch * shape.top_k * shape.layers) for batch in batches], float)
    excess = np.array([max(0.0, found[f"whole {batch}"] - found[f"empty {batch}"]) for batch in batches])
    (expert_s, row_s), *_ = np.linalg.lstsq(work / excess[:, None], np.ones(len(batches)), rcond=None)
    costs = Costs(
        worker_s=found[f"empty {options.batch}"] / shape.layers,
        handover_s=max(0.0, found[f"handed {options.batch}"] - found[f"empty {options.batch}"]) / shape.layers,
        pass_s=0.0,
        expert_s=max(0.0, float(expert_s)),
        row_s=max(0.0, float(row_s)),
    )
    result = {"measure": "costs", "shape": options.shape, "batch": options.batch, "rounds": options.rounds}
    result |= {f"{name[:-2]}_us": round(value * 1e6, 3) for name, value in asdict(costs).items()}
    result |= {"steps_ms": {key: round(value * 1e3, 3) for key, value in found.items()}}
    record("scaling_law", result, (), options.results)
    return costs, found[f"whole {options.batch}"]


def measured_fleet(model: Path, cores: Sequence[int], workers: int, servers: int, options: Any) -> dict[str, Any]:
    """One fleet through HTTP, in turns with as many whole engines as it has workers; records and returns it."""
    vocab = SHAPES[options.shape].vocab
    streams = workers * options.batch
    with contextlib.ExitStack() as closing:
        running = closing.enter_context(
            cluster(model, cores, servers=servers, workers=workers, endpoint=True, kv_tokens=KV_TOKENS // workers)
        )
        endpoint = HttpEndpoint.of(running)
        engines = [
            closing.enter_context(EngineProcess("inproc", model, cores, kv_tokens=KV_TOKENS // workers))
            for _ in range(workers)
        ]
        ours = running.pids()
        pids = ours | {f"whole/{number}": engine.pid for number, engine in enumerate(engines)}

        def fleet(number: int) -> tuple[float, float]:
            before_s = sum(map(cpu_s, ours.values()))
            speed = endpoint.speed(prompts_for(streams, vocab, number), options.tokens)
            spent_s = sum(map(cpu_s, ours.values())) - before_s
            return speed.whole, spent_s / (streams * options.tokens)

        def whole(number: int) -> tuple[float, float]:
            prompts = prompts_for(streams, vocab, number)
            before_s = sum(cpu_s(engine.pid) for engine in engines)
            rates = [0.0] * workers

            def run(which: int) -> None:
                part = prompts[which * options.batch : (which + 1) * options.batch]
                rates[which] = engines[which].generate(part, options.tokens).speed.whole

            threads = [threading.Thread(target=run, args=(which,)) for which in range(workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            spent_s = sum(cpu_s(engine.pid) for engine in engines) - before_s
            return sum(rates), spent_s / (streams * options.tokens)

        found = interleave({"fleet": fleet, "whole": whole}, options.rounds, pids)
    result: dict[str, Any] = {
        "measure": "fleet",
        "shape": options.shape,
        "workers": workers,
        "servers": servers,
        "batch": options.batch,
        "tokens": options.tokens,
        "cores": len(cores),
        "rounds": options.rounds,
    }
    for name, values in found.items():
        result[f"{name}_tokens_per_s"] = spread([rate for rate, _ in values])
        result[f"{name}_cpu_us_per_token"] = spread([spent * 1e6 for _, spent in values])
    pairs = zip(found["fleet"], found["whole"], strict=True)
    result["speed_over_whole"] = spread([ours[0] / theirs[0] for ours, theirs in pairs])
    record("scaling_law", result, (), options.results)
    return result


def simulated(costs: Costs, alone_s: float, options: Any) -> list[dict[str, Any]]:
    """Every fleet of up to 64 servers and workers; records and returns it."""
    dims = SHAPES[options.shape]
    shape = Shape(layers=dims.layers, experts=dims.experts, top_k=dims.top_k)
    rows = []
    for servers in SIMULATED:
        for workers in SIMULATED:
            outcome = simulate(costs, shape, workers=workers, servers=servers, batch=options.batch)
            processes = workers + servers
            rows.append(
                {
                    "workers": workers,
                    "servers": servers,
                    "tokens_per_s": round(outcome.tokens_per_s, 1),
                    "step_ms": round(outcome.step_s * 1e3, 3),
                    "servers_busy": round(outcome.busy, 3),
                    "requests_per_group": round(outcome.requests_per_group, 2),
                    "monolithic_tokens_per_s": round(processes * options.batch / alone_s, 1),
                }
            )
    record(
        "scaling_law",
        {"measure": "simulated", "shape": options.shape, "batch": options.batch, "fleets": rows},
        (),
        options.results,
    )
    return rows


def write(rows: list[dict[str, Any]], law: list[dict[str, Any]], costs: Costs, options: Any) -> None:
    """Table of everything, and the plot where it can be drawn."""
    lines = [
        f"Costs on one core, us: {', '.join(f'{name[:-2]} {value * 1e6:.1f}' for name, value in asdict(costs).items())}"
        f" (worker, hand-over: a layer at batch {options.batch}).",
        "",
        "Measured, all processes on the same cores; whole: as many engines as workers, each with every expert:",
        "",
        "| workers x servers | tokens/s | whole | ratio | CPU us a token | whole |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [
            row[name]["median"]
            for name in (
                "fleet_tokens_per_s",
                "whole_tokens_per_s",
                "speed_over_whole",
                "fleet_cpu_us_per_token",
                "whole_cpu_us_per_token",
            )
        ]
        lines.append(
            f"| {row['workers']} x {row['servers']} | {figures[0]:.0f} | {figures[1]:.0f} | {figures[2]:.2f} | "
            f"{figures[3]:.0f} | {figures[4]:.0f} |"
        )
    lines += [
        "",
        "Simulated, each process on a core and memory of its own: tokens/s (over as many whole engines):",
        "",
        "| servers | " + " | ".join(f"{workers} workers" for workers in SIMULATED) + " |",
        "|---" * (len(SIMULATED) + 1) + "|",
    ]
    for servers in SIMULATED:
        here = [row for row in law if row["servers"] == servers]
        cells = [
            f"{row['tokens_per_s']:.0f} ({row['tokens_per_s'] / row['monolithic_tokens_per_s']:.2f})" for row in here
        ]
        lines.append(f"| {servers} | " + " | ".join(cells) + " |")
    (options.results / f"scaling_law-{options.shape}.md").write_text("\n".join(lines) + "\n")
    try:
        plot(law, options)
    except ImportError:
        print("plot: skipped, needs the package matplotlib. Get it: pip install matplotlib", file=sys.stderr)


def plot(law: list[dict[str, Any]], options: Any) -> None:
    """Simulated tokens per second against servers, a line for each number of workers, the monolithic fleet beside.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for workers in SIMULATED:
        line = [row for row in law if row["workers"] == workers]
        axes.plot(
            [row["workers"] + row["servers"] for row in line],
            [row["tokens_per_s"] for row in line],
            marker=".",
            label=f"{workers} workers",
        )
    whole = sorted({(row["workers"] + row["servers"], row["monolithic_tokens_per_s"]) for row in law})
    axes.plot(*zip(*whole, strict=True), color="black", linestyle="--", label="monolithic")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("processes, each on a core of its own")
    axes.set_ylabel("tokens/s, simulated")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    axes.set_title(f"shape {options.shape}, batch {options.batch} a worker, from costs measured on one core")
    figure.savefig(options.results / f"scaling_law-{options.shape}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
