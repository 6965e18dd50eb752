"""From counters read about once a second to rates and latencies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eaas.gateway.dashboard.board import Point

# Rates and latencies are of this long, or of what was seen: long enough for a percentile, short enough for a fault.
WINDOW_S = 10.0
# Curves show two minutes.
MOST_POINTS = 120
_MOST_READINGS = 16


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Counters at one moment; all only rise.

    at_s: monotonic. wall_s: since 1970. ended: choices that ended; good: of them, those within the targets. ttft, itl:
    histogram counts, one for each bound and one above all.
    """

    at_s: float
    wall_s: float
    requests: int
    failed: int
    tokens: int
    ended: int
    good: int
    went_on: int
    ttft: tuple[int, ...]
    itl: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Means and percentiles over the window. window_s: what it really was."""

    window_s: float = 0.0
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    ended_per_s: float = 0.0
    good_per_s: float = 0.0
    failed: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Past:
    """The last readings, and a point for each second before."""

    ttft_bounds_s: tuple[float, ...]
    itl_bounds_s: tuple[float, ...]
    readings: tuple[Reading, ...] = ()
    points: tuple[Point, ...] = ()

    def read(self, reading: Reading) -> Past:
        """With one reading more; the oldest are forgotten."""
        points = self.points
        if self.readings and reading.at_s > self.readings[-1].at_s:
            points = (*points, self._point(self.readings[-1], reading))[-MOST_POINTS:]
        kept = [r for r in self.readings if reading.at_s - r.at_s <= WINDOW_S + 0.5]
        return Past(
            ttft_bounds_s=self.ttft_bounds_s,
            itl_bounds_s=self.itl_bounds_s,
            readings=(*kept, reading)[-_MOST_READINGS:],
            points=points,
        )

    def rates(self) -> Rates:
        """Of the window that ends with the newest reading."""
        if len(self.readings) < 2:
            return Rates()
        old, new = self.readings[0], self.readings[-1]
        window_s = new.at_s - old.at_s
        ttft, itl = _change(old.ttft, new.ttft), _change(old.itl, new.itl)
        return Rates(
            window_s=window_s,
            requests_per_s=(new.requests - old.requests) / window_s,
            tokens_per_s=(new.tokens - old.tokens) / window_s,
            ended_per_s=(new.ended - old.ended) / window_s,
            good_per_s=(new.good - old.good) / window_s,
            failed=new.failed - old.failed,
            ttft_p50_s=quantile(self.ttft_bounds_s, ttft, 0.5),
            ttft_p99_s=quantile(self.ttft_bounds_s, ttft, 0.99),
            itl_p50_s=quantile(self.itl_bounds_s, itl, 0.5),
            itl_p99_s=quantile(self.itl_bounds_s, itl, 0.99),
        )

    def _point(self, old: Reading, new: Reading) -> Point:
        elapsed_s = new.at_s - old.at_s
        return Point(
            at_s=new.wall_s,
            tokens_per_s=(new.tokens - old.tokens) / elapsed_s,
            requests_per_s=(new.requests - old.requests) / elapsed_s,
            itl_p99_s=quantile(self.itl_bounds_s, _change(old.itl, new.itl), 0.99),
        )


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """A quantile of what a histogram counted, as if spread evenly within each bucket; None when it counted nothing.

    Args:
        bounds: Upper bounds, rising. counts: For each bound, and one above all, of which only the lower end is known.
        share: 0 to 1.
    """
    total = sum(counts)
    if not total:
        return None
    left = share * total
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and left <= count:
            return lower + (bound - lower) * left / count
        left -= count
        lower = bound
    return lower


def _change(old: Sequence[int], new: Sequence[int]) -> list[int]:
    return [after - before for before, after in zip(old, new, strict=True)]
