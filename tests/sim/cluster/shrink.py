"""The smallest fault schedule that still breaks the same promise: delta debugging.

Source: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE TSE 28(2), 2002 (ddmin).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.sim.cluster.runner import Result

MOST_RUNS = 200


def shrink(failed: Result, run: Callable[[object], Result], most_runs: int = MOST_RUNS) -> Result:
    """Leave out faults of a failing run while the same promise is broken.

    Args:
        run: Makes a run (runner.run, perhaps with a step of its own).

    Returns:
        The smallest failing run found; the given one if none is smaller.
    """
    best = failed
    left = most_runs

    def fails(keep: list[int]) -> Result | None:
        nonlocal left
        left -= 1
        result = run(replace(failed.job, keep=frozenset(keep)))
        return result if result.promise == failed.promise else None

    kept = [number for number, *_ in failed.struck]
    parts = 1
    while kept and left > 0:
        size = -(-len(kept) // parts)
        chunks = [kept[at : at + size] for at in range(0, len(kept), size)]
        for chunk in chunks:
            rest = [number for number in kept if number not in chunk]
            if left > 0 and (found := fails(rest)) is not None:
                # Faults that came after the broken promise, or struck nobody, fall out as well.
                struck = {number for number, *_ in found.struck}
                kept, best = [number for number in rest if number in struck], found
                parts = max(parts - 1, 1)
                break
        else:
            if parts >= len(kept):
                break
            parts = min(2 * parts, len(kept))
    if best is failed:
        return failed
    smallest = fails(kept)
    return smallest if smallest is not None else best
