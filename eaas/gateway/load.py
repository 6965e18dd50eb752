"""What a gateway reports of its load, from which the router and autoscalers judge whether workers are missing."""

from __future__ import annotations

import time

from eaas.gateway.worker_pool import WorkerPool
from router.view import HEARS

# Workers with work speak every 50 ms.
_HEARD_S = 1.0


class GatewayLoad:
    """The load report that goes with each lease renewal; called on the router client's thread."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def __call__(self) -> dict[str, float]:
        """running: choices at a worker. waiting: those without one; backlog_tokens: to be computed for these, and
        queue_s: the age of the oldest. ttft_p99_s, tpot_p99_s: of the last minute, absent when nothing ended in it.
        hears:NAME: 1 for each attention worker that spoke in the last second.
        """
        now_s = time.monotonic()
        waiting = self._pool.queue()
        oldest_s = min((sequence.waiting_since_s for sequence in waiting), default=now_s)
        load = {
            "running": float(self._pool.running - len(waiting)),
            "waiting": float(len(waiting)),
            "backlog_tokens": float(sum(self._pool.cost_of(sequence) for sequence in waiting)),
            "queue_s": now_s - oldest_s,
        }
        for name, seen in (
            ("ttft_p99_s", self._pool.metrics.recent_ttft),
            ("tpot_p99_s", self._pool.metrics.recent_tpot),
        ):
            p99_s = seen.p99_s(now_s)
            if p99_s is not None:
                load[name] = p99_s
        heard = (link for link in self._pool.links() if now_s - link.heard_s < _HEARD_S)
        return load | {HEARS + link.name: 1.0 for link in heard}
