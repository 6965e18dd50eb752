"""CPU cores for lanes, as command lines name them."""

from __future__ import annotations

import os


def named_cores(text: str) -> tuple[int, ...]:
    """Cores named like "0,1", in that order; all that this process may use where nothing is named.

    Raises:
        ValueError: not core numbers, a core twice, or one that this process may not use.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if not text:
        return tuple(allowed)
    try:
        named = tuple(int(core) for core in text.split(","))
    except ValueError:
        raise ValueError(
            f"--cores {text}: core numbers with commas between them are needed, as in 0,1."
        ) from None
    foreign = [core for core in named if core not in allowed]
    if foreign or len(set(named)) < len(named):
        raise ValueError(f"--cores {text}: name each once, among those this process may use: {allowed}.")
    return named
