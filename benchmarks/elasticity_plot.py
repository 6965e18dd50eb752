"""One day of demand, and what each fleet paid for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

STEPS_PER_H = 360
SHOWN = {"static": "C3", "rack of 32": "C1", "server": "C0"}


def plot(demand: np.ndarray, wanted: Mapping[str, Sequence[int]], folder: Path) -> None:
    """Draw folder/elasticity.svg: the third day of a week [steps of 10 s].

    Args:
        demand: Servers' worth of work in each step.
        wanted: Servers paid in each step, by policy.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    day = slice(48 * STEPS_PER_H, 72 * STEPS_PER_H)
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.add_subplot()
    # Means of a minute: 8640 points would make a file of a megabyte.
    hours = np.arange(24 * 60) / 60
    axes.fill_between(hours, demand[day].reshape(-1, 6).mean(axis=1), color="0.75", label="demand")
    for name, colour in SHOWN.items():
        size = np.asarray(wanted[name][day]).reshape(-1, 6).mean(axis=1)
        label = f"by load, unit: {name}" if name != "static" else name
        axes.plot(hours, size, color=colour, linewidth=1.0, label=label)
    axes.set_xlim(0, 24)
    axes.set_ylim(0)
    axes.set_xlabel("hour of the day")
    axes.set_ylabel("servers")
    axes.set_title("Servers paid under one SLO: at most 0.1% of the tokens late")
    axes.legend(loc="upper left", fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "elasticity.svg", metadata={"Date": None})
