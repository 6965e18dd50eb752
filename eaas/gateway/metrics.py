"""What the gateway counts, and its /metrics page. One event loop writes; no locks on the token path."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
ITL_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
E2E_BOUNDS_S = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
WINDOW_S = 60.0
# A percentile of the newest so many says enough; memory stays bounded.
MOST_KEPT = 4096


class Histogram:
    """Counts of durations by upper bound: one bisect and two additions for each observation."""

    __slots__ = ("bounds_s", "counts", "total_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_s = tuple(bounds_s)
        self.counts = [0] * (len(self.bounds_s) + 1)
        self.total_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one duration in seconds."""
        self.counts[bisect_left(self.bounds_s, duration_s)] += 1
        self.total_s += duration_s

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative (upper bound, count) pairs, as Prometheus wants them."""
        names = [*(str(bound) for bound in self.bounds_s), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self.counts), strict=True)]


class Recent:
    """Durations seen in the last WINDOW_S seconds, the newest MOST_KEPT of them. Any thread may read."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=MOST_KEPT)

    def add(self, at_s: float, duration_s: float) -> None:
        """Take in one duration in seconds, that ended at monotonic time ``at_s``."""
        self._seen.append((at_s, duration_s))

    def p99_s(self, now_s: float) -> float | None:
        """The 99th percentile (nearest rank); None when nothing ended in the window."""
        found = sorted(duration_s for at_s, duration_s in list(self._seen) if now_s - at_s <= WINDOW_S)
        return found[math.ceil(0.99 * len(found)) - 1] if found else None


class GatewayMetrics:
    """Counters of one gateway. Also a prometheus-client collector."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.stale_tokens = 0
        self.replays: dict[str, int] = {}
        self.class_crossings = 0
        self.disconnects = 0
        self.refused = 0
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.itl = Histogram(ITL_BOUNDS_S)
        self.e2e = Histogram(E2E_BOUNDS_S)
        self.recent_ttft = Recent()
        # Of each choice that ended: its tokens after the first, over the time that they took.
        self.recent_tpot = Recent()
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_request(self, endpoint: str, status: int) -> None:
        """Count one answered request by endpoint and HTTP status (499: the client went away)."""
        self.requests[endpoint, status] = self.requests.get((endpoint, status), 0) + 1

    def count_replay(self, reason: str) -> None:
        """Count one choice handed on to another attention worker."""
        self.replays[reason] = self.replays.get(reason, 0) + 1

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: registering must not run the gauges."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All families, read at the moment of the scrape."""
        requests = CounterMetricFamily(
            "eaas_requests", "Requests answered, by endpoint and HTTP status.", labels=["endpoint", "status"]
        )
        for (endpoint, status), count in sorted(self.requests.items()):
            requests.add_metric([endpoint, str(status)], count)
        yield requests
        replays = CounterMetricFamily(
            "eaas_replays", "Choices handed on to another attention worker.", labels=["reason"]
        )
        for reason, count in sorted(self.replays.items()):
            replays.add_metric([reason], count)
        yield replays
        tokens = CounterMetricFamily("eaas_tokens", "Tokens of served requests, by kind.", labels=["kind"])
        tokens.add_metric(["prompt"], self.prompt_tokens)
        tokens.add_metric(["output"], self.output_tokens)
        yield tokens
        for name, text, count in (
            (
                "eaas_stale_tokens",
                "Tokens refused: an old attempt, or not the next index.",
                self.stale_tokens,
            ),
            ("eaas_class_crossings", "Choices that went on in another numerics class.", self.class_crossings),
            ("eaas_disconnects", "Requests whose client went away.", self.disconnects),
            ("eaas_refused", "Requests refused at admission.", self.refused),
        ):
            yield CounterMetricFamily(name, text, value=count)
        for name, (text, read) in self.gauges.items():
            yield GaugeMetricFamily(name, text, value=read())
        for name, text, histogram in (
            ("eaas_ttft_seconds", "From admission to the first token.", self.ttft),
            ("eaas_itl_seconds", "Between two tokens of a choice.", self.itl),
            ("eaas_e2e_seconds", "From admission to the end of the request.", self.e2e),
        ):
            yield HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.total_s)
