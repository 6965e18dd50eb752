"""Requests that may be what brings workers down, tried by halves where they can take no other with them. Pure.

A worker that dies loses every request that it was computing, and does not say which was the cause. Whoever has been
lost so more than once is a suspect. Suspects are tried in groups, a worker kept for each group: half of them first;
a group that brings its worker down is tried again by halves, down to one request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from eaas.gateway.choice_of_worker import choose
from eaas.gateway.link import WorkerLink
from eaas.gateway.sequence import Sequence


class Trial:
    """The group that is tried, if any, and the worker kept for it."""

    def __init__(self) -> None:
        # Of the group, those that have neither a token yet nor left.
        self._tried: dict[str, Sequence] = {}
        self._kept: WorkerLink | None = None
        # Nobody but the group waits at the worker that is kept.
        self._ours = False

    def __bool__(self) -> bool:
        """Whether a group is being tried."""
        return bool(self._tried)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._tried

    def worker(self, links: list[WorkerLink], sequence: Sequence) -> WorkerLink | None:
        """The worker of these for a choice; None when the one that it could have is kept for others."""
        if sequence not in self:
            return choose([link for link in links if link is not self._kept], sequence.prefix)
        return self._kept if self._kept in links else choose(links, sequence.prefix)

    def admits(
        self,
        sequence: Sequence,
        link: WorkerLink,
        suspects: Callable[[], list[Sequence]],
        others: Iterable[Sequence],
    ) -> bool:
        """Whether a suspect may go to a worker now: with its group, once nobody else there waits for a first token.

        From its turn on the worker is kept for its group.

        Args:
            suspects: Gives all that wait for their turn, the first in line first; `sequence` is one of them.
            others: All choices.
        """
        if not self._tried:
            waiting = suspects()
            most = sequence.trial_most or -(-len(waiting) // 2)
            group = [sequence, *(s for s in waiting if s is not sequence and (s.trial_most or most) >= most)]
            self._tried = {s.id: s for s in group[:most]}
        if sequence not in self:
            return False
        # Looked at once in a round: for each of the group it would take time by the square of how many there are.
        first = sequence is next(iter(self._tried.values()))
        if link is not self._kept or (first and not self._ours):
            self._kept = link
            self._ours = not any(x.link is link and x.prefill and x not in self for x in others)
        return self._ours

    def lost(self, sequence: Sequence, of: int) -> bool:
        """Note that a worker died while it computed `sequence`; True if nothing else can have been the cause.

        Args:
            of: How many it was computing that had no token yet.
        """
        if sequence not in self:
            return False
        sequence.trial_most = max(1, of // 2)
        return of == 1

    def leave(self, sequence: Sequence) -> bool:
        """Take out one that has its token, or has gone; True if another may have its turn now."""
        if not self._tried:
            return False
        if self._tried.pop(sequence.id, None) is not None and not self._tried:
            self._kept, self._ours = None, False
        return True
