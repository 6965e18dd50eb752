"""Which attention worker takes a choice: the least busy, or the one that may know the prompt's beginning. Pure.

Workers keep the blocks of prompts that they have computed and share them (prefix reuse), so prompts that begin alike
should meet. Each beginning has its own order of the workers (rendezvous hashing: when one comes or goes, only what
was or becomes its own moves), and goes to the first in that order that is not clearly busier than the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

# Four blocks of 16: what is shared of less saves less than a decoding step costs.
PREFIX_TOKENS = 64
_SPREAD = 1.25
# One step's rows: on an idle pool any work at all would be "clearly busier".
_SLACK_TOKENS = 512


class Choosable(Protocol):
    """A worker as it is chosen."""

    incarnation: int
    outstanding: int
    chosen: int


W = TypeVar("W", bound=Choosable)


def beginning(prompt: Sequence[int]) -> int | None:
    """A number for how a prompt begins, the same in every process; None for one too short to matter."""
    return hash(tuple(prompt[:PREFIX_TOKENS])) if len(prompt) >= PREFIX_TOKENS else None


def choose(workers: Sequence[W], prefix: int | None) -> W | None:
    """The worker for a prompt that begins so; None when there is none to choose from.

    ``outstanding`` counts tokens still to be computed. The beginning's own worker is passed over while it has more
    than 1.25 times the mean and one step beside. Of equals the one chosen longest ago is taken.
    """
    if prefix is not None and workers:
        mean = sum(worker.outstanding for worker in workers) / len(workers)
        free = [worker for worker in workers if worker.outstanding <= _SPREAD * mean + _SLACK_TOKENS]
        # Whoever has the least is never above the bound.
        return max(free, key=lambda worker: hash((prefix, worker.incarnation)))
    return min(workers, key=lambda worker: (worker.outstanding, worker.chosen), default=None)
