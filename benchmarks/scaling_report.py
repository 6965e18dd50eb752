"""Results of benchmarks.scaling as a Markdown table and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SWEEPS = (("batch", "batch size"), ("context", "context, tokens"), ("servers", "expert servers"))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Every point: time of a decode step, its spread over rounds, its floor and what the floor is made of."""
    first = rows[0]
    lines = [
        f"# A decode step on shape {first['shape']}, {first['threads']} threads",
        "",
        "Median of a step, least and greatest round; floor = the longer of bytes over bandwidth and operations over "
        "peak, both measured in the same run (benchmarks/floor.py says how bytes are counted).",
        "",
        "| varies | expert servers | batch | context | step, ms | floor, ms | step / floor | distinct experts "
        "| MB | GFLOP | GB/s | GFLOP/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        step = row["step_ms"]
        cells = [
            row["sweep"],
            row["servers"],
            row["batch"],
            row["context"],
            f"{step['median']:.2f} ({step['min']:.2f} to {step['max']:.2f})",
            f"{row['floor_ms']:.2f}",
            f"{row['over_floor']:.2f}",
            row["distinct_experts"],
            row["floor_mb"],
            row["floor_gflop"],
            row["bandwidth_gb_per_s"],
            row["peak_gflop_per_s"],
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """One panel for each thing that varies: steps as lines with their spread, floors dashed.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    shown = [sweep for sweep in SWEEPS if any(row["sweep"] == sweep[0] for row in rows)]
    figure = Figure(figsize=(4.5 * len(shown), 3.6), layout="constrained")
    for number, (sweep, label) in enumerate(shown, 1):
        axes = figure.add_subplot(1, len(shown), number)
        here = [row for row in rows if row["sweep"] == sweep]
        # What does not vary names the line; where batch sizes vary there is one line.
        batches = [0] if sweep == "batch" else sorted({row["batch"] for row in here})
        for colour, batch in enumerate(batches):
            line = [row for row in here if batch in (0, row["batch"])]
            places = [row[sweep] for row in line]
            step = [row["step_ms"]["median"] for row in line]
            below = [row["step_ms"]["median"] - row["step_ms"]["min"] for row in line]
            above = [row["step_ms"]["max"] - row["step_ms"]["median"] for row in line]
            name = f", batch {batch}" if batch else ""
            axes.errorbar(
                places,
                step,
                yerr=[below, above],
                color=f"C{colour}",
                marker="o",
                capsize=3,
                label=f"step{name}",
            )
            floors = [row["floor_ms"] for row in line]
            axes.plot(places, floors, color=f"C{colour}", linestyle="--", label=f"floor{name}")
        axes.set_xscale("log", base=2)
        ticks = sorted({row[sweep] for row in here})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel(label)
        axes.set_ylabel("ms a step")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle(f"Decode step, shape {rows[0]['shape']}, {rows[0]['threads']} threads")
    figure.savefig(out, metadata={"Date": None})
