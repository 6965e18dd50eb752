"""The newest results of benchmarks.p2p as one plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.readme import P2P, newest

TITLES = {"1to1": "1 to 1", "4to1": "4 to 1", "1to4": "1 to 4"}
MEASURES = {"latency": ("p50", "round trip, µs"), "bandwidth": ("gb_per_s", "bandwidth, GB/s")}


def plot(folder: Path) -> None:
    """Draw folder/p2p.svg: a row for each measure, a column for each topology, a line for each transport.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    rows = [row for row in newest("p2p", P2P, folder) if row.get("measure") in MEASURES]
    columns = [name for name in TITLES if any(row["topology"] == name for row in rows)]
    if not columns:
        return
    names = list(dict.fromkeys(name for row in rows for name in row["transports"]))
    figure = Figure(figsize=(4.5 * len(columns) + 1.5, 7), layout="constrained")
    for number, (measure, (field, label)) in enumerate(MEASURES.items()):
        for column, topology in enumerate(columns):
            axes = figure.add_subplot(len(MEASURES), len(columns), number * len(columns) + column + 1)
            here = [row for row in rows if row["topology"] == topology and row["measure"] == measure]
            for colour, name in enumerate(names):
                line = [row for row in here if name in row["transports"]]
                draw(axes, line, name, field, f"C{colour}")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("bytes")
            axes.set_ylabel(label)
            axes.set_title(TITLES[topology])
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0] and not figure.legends:
                figure.legend(loc="outside right center", fontsize="small")
    hardware = rows[0]["hardware"]
    figure.suptitle(f"{hardware['cpu']}, {hardware['cores']} cores: medians of interleaved rounds, least to greatest")
    figure.savefig(folder / "p2p.svg", metadata={"Date": None})


def draw(axes: Any, rows: list[dict[str, Any]], name: str, field: str, colour: str) -> None:
    """One transport's medians and their spread."""
    if not rows:
        return
    figures = [row["transports"][name] for row in rows]
    middle = [figure[field] for figure in figures]
    below = [max(0.0, figure[field] - figure["spread"]["min"]) for figure in figures]
    above = [max(0.0, figure["spread"]["max"] - figure[field]) for figure in figures]
    places = [row["bytes"] for row in rows]
    axes.errorbar(places, middle, yerr=[below, above], color=colour, marker=".", capsize=2, label=name)
