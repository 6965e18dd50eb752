"""What a member says with its next renewal, beside its load. For use from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from router.events import Totals
from router.proto import router_pb2 as pb


class News:
    """Kept until a renewal takes it. What an unanswered one said is lost: nothing but balance and metrics needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routed: tuple[NDArray[np.uint32], NDArray[np.uint32]] | None = None
        self._totals: tuple[Totals, ...] = ()

    def routed(self, rows: NDArray[np.uint32], activated: NDArray[np.uint32]) -> None:
        """Add rows sent, and batches that had any, [layers * experts], to those not told yet."""
        with self._lock:
            if self._routed is not None:
                rows, activated = rows + self._routed[0], activated + self._routed[1]
            self._routed = (rows, activated)

    def counted(self, totals: Iterable[Totals]) -> None:
        """Replace the counters not told yet."""
        with self._lock:
            self._totals = tuple(totals)

    def forget(self) -> None:
        """Nothing of it is to be said under another name."""
        with self._lock:
            self._routed, self._totals = None, ()

    def take_into(self, request: pb.RenewRequest) -> None:
        """Move everything into a request."""
        with self._lock:
            routed, self._routed = self._routed, None
            totals, self._totals = self._totals, ()
        if routed is not None:
            request.rows, request.activated = (part.astype("<u4").tobytes() for part in routed)
        request.totals.extend(
            pb.Totals(peer=each.peer, rail=each.rail, counted=each.counted) for each in totals
        )
