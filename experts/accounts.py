"""What both ends of the expert protocol count: for metrics in the words of router/events.py, and for experts.pace."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from experts.backend import ServerCounters, ServerStats
from experts.model import Dtype, ExpertShape
from experts.pace import Observation
from p2p.endpoint import Peer, Watched
from router.events import Totals

if TYPE_CHECKING:
    from p2p.nixl_native import RailCounts

# Names of servers that left, whose counters are still told: the series of others end.
_REMEMBERED: Final = 64


@runtime_checkable
class Railed(Protocol):
    """An endpoint whose writes go over named rails."""

    rails: tuple[str, ...]

    def rail_counts(self, peer: Peer) -> Iterable[RailCounts]:
        """In the order of the peer's rails; empty once this side disconnected."""
        ...


def server_totals(counters: ServerCounters, damaged: int = 0) -> Totals:
    """An expert server's counters. Args: damaged: experts found so since they were loaded."""
    same = ("batches", "rows", "pairs", "experts", "not_held", "invalid", "received_bytes", "sent_bytes")
    return Totals(
        counted={word: float(getattr(counters, word)) for word in same}
        | {"calls": float(counters.requests), "damaged": float(damaged), "busy_s": counters.busy_ns / 1e9}
    )


def observation_of(stats: ServerStats, peer: Peer) -> Observation:
    """What tells how fast a server answers, and whether its link is why, as of now."""
    return Observation(
        calls=stats.calls,
        replies=stats.replies,
        in_flight=stats.in_flight,
        latency_ns=stats.latency_sum_ns,
        service_ns=stats.service_sum_ns,
        late=stats.held_slots,
        link_slow=isinstance(peer, Watched) and peer.slow,
        corrupt=stats.corrupt,
        quarantined=time.monotonic_ns() < stats.quarantined_until_ns,
    )


class Accounts:
    """What a client did with each server since it began, with those that have left too. One thread at a time."""

    def __init__(self, shape: ExpertShape, dtype: Dtype, endpoint: object) -> None:
        """Args: endpoint: asked for its rails where it has any."""
        self._row_bytes, self._reply_bytes = shape.hidden * dtype.nbytes, shape.hidden * 4
        self._endpoint = endpoint
        self._left: dict[str, dict[str, float]] = {}
        self._all_left: dict[str, float] = {}

    def leave(self, name: str, stats: ServerStats) -> None:
        """Keep what was done over a link that ends; one server may have had several."""
        counted = self._counted(stats)
        self._left[name] = _sum(self._left.pop(name, {}), counted)
        self._all_left = _sum(self._all_left, counted)
        if len(self._left) > _REMEMBERED:
            del self._left[next(iter(self._left))]

    def totals(self, links: Iterable[tuple[str, ServerStats, Peer]]) -> list[Totals]:
        """Of all servers together first, then of each, then of each of its rails.

        Args:
            links: Name, counters and peer of each server that is attached, or that still has an answer to give.
        """
        seen = [(name, self._counted(stats), peer) for name, stats, peer in links]
        everything, each = self._all_left, dict(self._left)
        for name, counted, _ in seen:
            everything = _sum(everything, counted)
            each[name] = _sum(each.get(name, {}), counted)
        rails = [rail for name, _, peer in seen for rail in self._rails(name, peer)]
        return [
            Totals(counted=everything),
            *(Totals(peer=name, counted=counted) for name, counted in each.items()),
            *rails,
        ]

    def _counted(self, stats: ServerStats) -> dict[str, float]:
        return {
            "calls": stats.calls,
            "rows": stats.rows,
            "pairs": stats.pairs,
            "replies": stats.replies,
            "latency_s": stats.latency_sum_ns / 1e9,
            "service_s": stats.service_sum_ns / 1e9,
            "hedges": stats.hedges,
            "failovers": stats.redispatches,
            "lost": stats.lost,
            "corrupt": stats.corrupt,
            "sent_bytes": stats.rows * self._row_bytes,
            # Pairs answered: those sent, less what went elsewhere for want of an answer.
            "received_bytes": max(0, stats.pairs - stats.redispatches - stats.lost) * self._reply_bytes,
        }

    def _rails(self, name: str, peer: Peer) -> list[Totals]:
        if not isinstance(self._endpoint, Railed):
            return []
        names = self._endpoint.rails
        return [
            Totals(
                peer=name,
                # Rails that the transport chose itself have no name but their number.
                rail=(names[number] if number < len(names) else "") or f"rail-{number}",
                counted={"sent_bytes": float(count.sent_bytes), "live": float(count.live)},
            )
            for number, count in enumerate(self._endpoint.rail_counts(peer))
        ]


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {word: one.get(word, 0.0) + value for word, value in other.items()} if other else dict(one)
