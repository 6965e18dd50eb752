"""What the gateway counts, and its /metrics page. One event loop writes; no locks on the token path."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from eaas.gateway.fleet import Ledger, Seen
from eaas.gateway.sequence import Sequence as TokenSequence
from eaas.gateway.vllm_metrics import vllm_families

TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
ITL_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
E2E_BOUNDS_S = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
WINDOW_S = 60.0
# Shown from the start: a counter that begins with its first event hides that event from rate().
REPLAYS = (
    "worker_lost",
    "silent",
    "drained",
    "shared",
    "resumed",
    "overloaded",
    "class_lost",
    "expert_lost",
    "shutting_down",
    "token_gap",
)
REFUSALS = ("requests", "tokens", "key", "key_requests", "key_tokens")
# A percentile of the newest so many says enough; memory stays bounded.
MOST_KEPT = 4096


class Histogram:
    """Counts of values by upper bound: one bisect and two additions for each observation."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Args: bounds: in the unit of what is observed."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative (upper bound, count) pairs, as Prometheus wants them."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
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

    def __init__(self, model_name: str = "", ttft_target_s: float = 1.0, tpot_target_s: float = 0.1) -> None:
        """Args: model_name: as clients name it. ttft_target_s, tpot_target_s: a choice within both is good."""
        self.model_name = model_name
        self._ttft_target_s, self._tpot_target_s = ttft_target_s, tpot_target_s
        self.requests: dict[tuple[str, int], int] = {}
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.stale_tokens = 0
        self.replays: dict[str, int] = {}
        self.class_crossings = 0
        self.dropped = 0
        self.disconnects = 0
        self.refused: dict[str, int] = {}
        self.silences = 0
        self.pauses = 0
        self.slow_readers = 0
        # Choices that ended, and of them those within the targets of TTFT and TPOT.
        self.ended = 0
        self.good = 0
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.itl = Histogram(ITL_BOUNDS_S)
        self.e2e = Histogram(E2E_BOUNDS_S)
        self.recent_ttft = Recent()
        # Of each choice that ended: its tokens after the first, over the time that they took.
        self.recent_tpot = Recent()
        self.finished: dict[str, int] = {}
        self.decode = Histogram(E2E_BOUNDS_S)
        self.tpot = Histogram(ITL_BOUNDS_S)
        self.served = Histogram(E2E_BOUNDS_S)
        self.prompt_lengths = Histogram(TOKEN_BOUNDS)
        self.output_lengths = Histogram(TOKEN_BOUNDS)
        self.token_limits = Histogram(TOKEN_BOUNDS)
        self.ledger = Ledger()
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        # The connected attention workers, and the choices that wait for one.
        self.workers: Callable[[], Sequence[Seen]] = list
        self.waiting: Callable[[], int] = int
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_request(self, endpoint: str, status: int, took_s: float) -> None:
        """Count one answered request by endpoint and HTTP status (499: the client went away), and its seconds."""
        self.requests[endpoint, status] = self.requests.get((endpoint, status), 0) + 1
        self.e2e.observe(took_s)
        if status == 200:
            self.served.observe(took_s)

    def count_end(self, reason: str) -> None:
        """Count one choice that has ended: stop, length, abort or error."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def count_whole(self, reason: str, now_s: float, sequence: TokenSequence) -> None:
        """Count one choice that was generated to its end, at monotonic time ``now_s``."""
        output = len(sequence.log.output)
        decode_s = now_s - sequence.first_s
        self.count_end(reason)
        self.decode.observe(decode_s)
        self.prompt_lengths.observe(len(sequence.log.prompt))
        self.output_lengths.observe(output)
        self.token_limits.observe(sequence.params.max_tokens)
        tpot_s = decode_s / (output - 1) if output > 1 else 0.0
        if output > 1:
            self.tpot.observe(tpot_s)
            self.recent_tpot.add(now_s, tpot_s)
        ttft_s = sequence.first_s - sequence.started_s
        self.ended += 1
        self.good += ttft_s <= self._ttft_target_s and tpot_s <= self._tpot_target_s

    def count_replay(self, reason: str) -> None:
        """Count one choice handed on to another attention worker."""
        self.replays[reason] = self.replays.get(reason, 0) + 1

    def count_refused(self, reason: str) -> None:
        """Count one request refused at admission, by the bound that was reached."""
        self.refused[reason] = self.refused.get(reason, 0) + 1

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
        for reason, count in sorted({**dict.fromkeys(REPLAYS, 0), **self.replays}.items()):
            replays.add_metric([reason], count)
        yield replays
        refused = CounterMetricFamily(
            "eaas_refused", "Requests refused at admission, by the bound that was reached.", labels=["reason"]
        )
        for reason, count in sorted({**dict.fromkeys(REFUSALS, 0), **self.refused}.items()):
            refused.add_metric([reason], count)
        yield refused
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
            (
                "eaas_dropped_experts",
                "Requests answered without some lost experts, as they allowed.",
                self.dropped,
            ),
            ("eaas_disconnects", "Requests whose client went away.", self.disconnects),
            ("eaas_silences", "Workers found silent with work.", self.silences),
            ("eaas_pauses", "Streams paused until their client had read what it had.", self.pauses),
            ("eaas_choices_ended", "Choices that ended with their last token.", self.ended),
            ("eaas_choices_good", "Choices that ended within the targets of TTFT and TPOT.", self.good),
            ("eaas_slow_readers", "Streams ended because their client read too slowly.", self.slow_readers),
        ):
            yield CounterMetricFamily(name, text, value=count)
        for name, (text, read) in self.gauges.items():
            yield GaugeMetricFamily(name, text, value=read())
        for name, text, histogram in (
            ("eaas_ttft_seconds", "From admission to the first token.", self.ttft),
            ("eaas_itl_seconds", "Between two tokens of a choice.", self.itl),
            ("eaas_e2e_seconds", "From admission to the end of the request.", self.e2e),
        ):
            yield HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.total)
        workers = self.workers()
        for worker in workers:
            self.ledger.heard(worker.incarnation, worker.load)
        yield from _worker_gauges(workers)
        yield from vllm_families(
            self.model_name,
            workers=workers,
            waiting=self.waiting(),
            counters={
                "prompt_tokens": self.prompt_tokens,
                "generation_tokens": self.output_tokens,
                "num_preemptions": self.ledger.preemptions,
                "prefix_cache_queries": self.ledger.looked_up,
                "prefix_cache_hits": self.ledger.reused,
            },
            finished=self.finished,
            histograms={
                "time_to_first_token_seconds": ("From admission to the first token.", self.ttft),
                "inter_token_latency_seconds": ("Between two tokens of a choice.", self.itl),
                "request_time_per_output_token_seconds": ("Mean over a choice's tokens.", self.tpot),
                "e2e_request_latency_seconds": ("Of requests answered with 200.", self.served),
                "request_decode_time_seconds": ("From first to last token.", self.decode),
                "request_prompt_tokens": ("Tokens of a prompt.", self.prompt_lengths),
                "request_generation_tokens": ("Tokens of a choice.", self.output_lengths),
                "request_max_num_generation_tokens": ("Tokens allowed a choice.", self.token_limits),
            },
        )


def _worker_gauges(workers: Sequence[Seen]) -> Iterable[Metric]:
    for name, text, read in (
        ("running", "Requests in the steps of a worker.", lambda worker: worker.running),
        ("waiting", "Requests in the queue of a worker.", lambda worker: worker.waiting),
        ("kv_use", "Share of a worker's KV blocks that are held.", lambda worker: worker.kv_use),
        (
            "outstanding_tokens",
            "Tokens still to be computed there, as reckoned.",
            lambda worker: worker.outstanding,
        ),
    ):
        gauge = GaugeMetricFamily(f"eaas_worker_{name}", text, labels=["worker"])
        for worker in workers:
            gauge.add_metric([worker.name], read(worker))
        yield gauge
