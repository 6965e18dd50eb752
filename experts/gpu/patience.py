"""How long a client waits for a server, learned from how long its replies took. Pure.

Policy, for a request of `size`, the power of two of the pairs that its client then has in flight at that server:

- q99: 99 of 100 recent replies of that server and size came within this time. A size that was never seen is reckoned
  from the nearest: of a larger one as it is, of a smaller one as many times longer as that is smaller, and no more is
  waited for it than for one of whom nothing is known. It counts up to
  LONG_TIMES that of the best server: who freezes often earns no patience by it.
- Hedge after 2 * q99, at least HEDGE_FLOOR_NS: the pairs go to another replica as well, and the first sound reply
  counts. Credit pays for it, so that such pairs are at most 5% of all: a call earns HEDGE_EARNED for each of its pairs
  as long as there is credit for fewer than HEDGE_CALLS such calls, and a pair that goes out again costs HEDGE_COST.
- Suspect after 4 * q99, at least SUSPECT_FLOOR_NS: the pairs go to another replica at no cost, and the server is asked
  only for want of another, until its late reply is seen.
- While a server has not answered yet, both come after UNKNOWN_NS. Neither comes after more than a quarter of the time
  that the step still waits for anybody: one of RUNS parts of its deadline, at least LEAST_RUN_S as far as that goes.
  The others are for other runs of it, by the routes that were made meanwhile, which a step under way cannot see.

What waits at the server ahead of a request is not asked for: it is in the times. A reply says how long its own pass
took, but not how long that before it did, and whoever is late says nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SIZES = 10  # fewer than 16 pairs, then by octaves
LEAST_PAIRS = 16
STEPS = 64  # quarter octaves from 16 us to 1 s; what is less or more counts in the first or the last
HEDGE_FLOOR_NS = 1_000_000
# Nobody is suspect for passes that have come to take 20 ms: a request may see the end of one, and all of its own.
SUSPECT_FLOOR_NS = 50_000_000
UNKNOWN_NS = 250_000_000
LONG_TIMES = 4
HEDGE_EARNED, HEDGE_COST, HEDGE_CALLS = 50, 1000, 8
RUNS, LEAST_RUN_S = 8, 2.0
_FADE = 256  # replies of a size: then what came before counts half
_WELL_KNOWN = 32  # replies of a size, to be measured by
EDGES_NS = (np.arange(STEPS) % 4 + 5) << (np.arange(STEPS) // 4 + 12)  # where each step ends


def run_s(deadline_s: float) -> float:
    """How long one run of a step waits for anybody."""
    return max(deadline_s / RUNS, min(deadline_s, LEAST_RUN_S))


class Patience:
    """What is known of each server's reply times, and the limits that follow."""

    def __init__(self, servers: int) -> None:
        self._counts = np.zeros((servers, SIZES, STEPS), np.int64)

    def learn(self, counts: NDArray[np.int64]) -> None:
        """Add replies, int64 [servers, SIZES, STEPS]."""
        self._counts >>= np.minimum(counts.sum(axis=2) // _FADE, 62)[:, :, None]
        self._counts += counts
        while (full := self._counts.sum(axis=2) >= 2 * _FADE).any():
            self._counts[full] >>= 1

    def forget(self, server: int) -> None:
        """Another server has its place."""
        self._counts[server] = 0

    def limits_ns(self) -> NDArray[np.int64]:
        """After what time a request is hedged and its server suspect: int64 [servers, SIZES, 2]."""
        q99 = self._q99_ns()
        known = (q99 > 0)[:, :, None]
        floors = np.array([HEDGE_FLOOR_NS, SUSPECT_FLOOR_NS])
        limits = np.where(known, np.maximum(q99[:, :, None] * np.array([2, 4]), floors), UNKNOWN_NS)
        seen = (self._counts.sum(axis=2) > 0)[:, :, None]
        return np.where(seen, limits, np.minimum(limits, UNKNOWN_NS))

    def _q99_ns(self) -> NDArray[np.int64]:
        """int64 [servers, SIZES]; 0: nothing is known of that server."""
        total = self._counts.sum(axis=2)
        # One reply beside the hundredth: of few replies a single one that a stall held up says nothing.
        most = np.where(total < 8, 0, 1 + total // 100)
        above = self._counts[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
        step = np.maximum((above > most[:, :, None]).sum(axis=2) - 1, 0)
        seen = np.where(total > 0, EDGES_NS[step], 0)
        known = seen.copy()
        for off in range(1, SIZES):
            for to, found in ((known[:, :-off], seen[:, off:]), (known[:, off:], seen[:, :-off] << off)):
                np.copyto(to, found, where=to == 0)
        never = np.iinfo(np.int64).max
        least = np.where(total >= _WELL_KNOWN, seen, never // LONG_TIMES).min(axis=0)
        return np.minimum(known, LONG_TIMES * least)
