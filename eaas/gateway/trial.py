"""One request at a time that may be what brings workers down, tried where it can take no other with it. Pure.

A worker that dies in a prefill loses every request that waits there for its first token, and does not say which was
the cause. Whoever has been lost so more than once is tried alone; those who have a token from this attempt may stay.
"""

from __future__ import annotations

from collections.abc import Iterable

from eaas.gateway.choice_of_worker import choose
from eaas.gateway.sequence import Sequence
from eaas.gateway.worker_link import WorkerLink


class Trial:
    """The choice that is tried, if any, and the worker kept for it."""

    def __init__(self) -> None:
        self.tried: Sequence | None = None
        self._kept: WorkerLink | None = None

    def worker(self, links: list[WorkerLink], sequence: Sequence) -> WorkerLink | None:
        """The worker of these for a choice; None when the one that it could have is kept for another."""
        if sequence is not self.tried:
            return choose([link for link in links if link is not self._kept], sequence.prefix)
        return self._kept if self._kept in links else choose(links, sequence.prefix)

    def admits(self, sequence: Sequence, link: WorkerLink, others: Iterable[Sequence]) -> bool:
        """Whether a suspect may go to a worker now: when its turn has come, and nothing there waits for a first token.

        From its turn on the worker is kept for it.
        """
        self.tried = self.tried or sequence
        if sequence is not self.tried:
            return False
        self._kept = link
        return not any(other.link is link and other.prefill for other in others)

    def end(self) -> None:
        """It has its token, or has gone: the next may have its turn."""
        self.tried = self._kept = None
