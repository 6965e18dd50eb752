"""What a client has seen of its servers."""

from __future__ import annotations

import time
from dataclasses import dataclass

from experts.native import ServerStats
from experts.pace import Totals
from p2p.endpoint import Peer, Watched


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """What this client saw of one server. Latencies in microseconds, ring to accepted reply."""

    name: str
    rows: int
    pairs: int
    calls: int
    latency_us: float
    latency_max_us: float
    service_us: float
    hedges: int
    redispatches: int
    lost: int
    corrupt: int
    late_slots: int
    speed: float  # relative to the other servers, as rows are split by it
    totals: Totals


def report_of(name: str, stats: ServerStats, peer: Peer) -> ServerReport:
    """One server, in Python's words."""
    return ServerReport(
        name=name,
        rows=stats.rows,
        pairs=stats.pairs,
        calls=stats.calls,
        latency_us=stats.latency_ns / 1e3,
        latency_max_us=stats.latency_max_ns / 1e3,
        service_us=stats.service_ns / 1e3,
        hedges=stats.hedges,
        redispatches=stats.redispatches,
        lost=stats.lost,
        corrupt=stats.corrupt,
        late_slots=stats.late_slots,
        speed=stats.speed,
        totals=Totals(
            calls=stats.calls,
            replies=stats.replies,
            in_flight=stats.in_flight,
            latency_ns=stats.latency_sum_ns,
            service_ns=stats.service_sum_ns,
            late=stats.late_slots,
            link_slow=isinstance(peer, Watched) and peer.slow,
            corrupt=stats.corrupt,
            quarantined=time.monotonic_ns() < stats.quarantined_until_ns,
        ),
    )
