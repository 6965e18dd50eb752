"""CPU cores for lanes."""

from __future__ import annotations

import os
from collections.abc import Sequence


def named_cores(named: Sequence[int]) -> tuple[int, ...]:
    """The cores that were named, in that order; all that this process may use where none was.

    Raises:
        ValueError: a core twice, or one that this process may not use.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if set(named) - set(allowed) or len(set(named)) < len(named):
        text = ",".join(map(str, named))
        raise ValueError(f"--cores {text}: name each once, among those this process may use: {allowed}.")
    return tuple(named or allowed)
