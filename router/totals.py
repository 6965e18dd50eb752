"""What a member has counted since it began, as it tells the router for its metrics. Pure data.

Words of an expert server, of all its clients: calls, batches, rows, pairs, experts (activated, summed over batches),
received_bytes, sent_bytes (of rows, without headers), busy_s, not_held, invalid.

Of an attention worker, with each server that it asks (peer), and of all that it ever asked (no peer): calls, rows,
pairs, replies, latency_s and service_s (sums over replies), hedges, failovers, lost, corrupt, received_bytes,
sent_bytes. Of itself: computed_tokens, reused_tokens, preemptions, busy_s. With a rail named: sent_bytes that it
carried to the peer, and live, 1 or 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """One member's counters, by word. peer: what it did with that member alone; rail: over that rail alone."""

    peer: str = ""
    rail: str = ""
    counted: Mapping[str, float] = field(default_factory=dict[str, float])
