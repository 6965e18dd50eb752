"""What the gateway counts, and its /metrics page. One event loop writes; no locks on the token path.

Beside its own names the page has those that vLLM gave, which dashboards and the Gateway API inference extension read.
Each means what it means there, summed over the attention workers behind this gateway; those of vLLM that have no
counterpart here are left out rather than faked. docs/metrics.md lists what there is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from eaas.gateway.failover import Sequence as TokenSequence
from eaas.gateway.link import WorkerLink
from eaas.worker.protocol import WorkerLoad

TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
ITL_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
E2E_BOUNDS_S = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
WINDOW_S = 60.0
# Shown from the start: a counter that begins with its first event hides that event from rate().
REPLAYS = (
    "worker_lost", "silent", "drained", "shared", "resumed", "overloaded", "class_lost", "expert_lost",
    "shutting_down", "token_gap",
)  # fmt: skip
REFUSALS = ("requests", "tokens", "key", "key_requests", "key_tokens")
FINISHES = ("stop", "length", "abort", "error")
# A percentile of the newest so many says enough; memory stays bounded.
MOST_KEPT = 4096
# Workers whose counters are remembered: one that comes back must not be counted twice.
_REMEMBERED = 256
_NOTHING = WorkerLoad()


class Histogram:
    """Counts of values by upper bound: one bisect and two additions for each observation."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Args: bounds: in the unit of what is observed."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
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


class Ledger:
    """Sums of counters over all workers ever heard, so that they only rise though workers come and go.

    Attributes:
        preemptions: Requests put back for want of KV blocks.
        looked_up, reused: Tokens of prompts looked for in the KV cache, and found.
        joined, kept, told: Choices answered by runs in progress and by ended ones, and tokens told so.
    """

    def __init__(self) -> None:
        self.preemptions = self.looked_up = self.reused = self.joined = self.kept = self.told = 0
        self._last: dict[int, WorkerLoad] = {}

    def heard(self, incarnation: int, load: WorkerLoad | None) -> None:
        """Add what a worker has counted since the last time, over whichever connection. Args: load: its newest."""
        if load is None:
            return
        last = self._last.pop(incarnation, _NOTHING)
        self._last[incarnation] = load
        for name in ("preemptions", "looked_up", "reused", "joined", "kept", "told"):
            risen = max(0, getattr(load, name) - getattr(last, name))
            setattr(self, name, getattr(self, name) + risen)
        if len(self._last) > _REMEMBERED:
            del self._last[next(iter(self._last))]


class GatewayMetrics:
    """Counters of one model at one gateway, and a prometheus-client collector of these and of other models'."""

    def __init__(self, model_name: str = "", ttft_target_s: float = 1.0, tpot_target_s: float = 0.1) -> None:
        """Args: model_name: as clients name it. ttft_target_s, tpot_target_s: a choice within both is good."""
        self.model_name = model_name
        self._ttft_target_s, self._tpot_target_s = ttft_target_s, tpot_target_s
        self.requests: Counter[tuple[str, int]] = Counter()  # answered, by endpoint and HTTP status
        self.replays: Counter[str] = Counter()  # choices handed on to another attention worker, by reason
        self.refused: Counter[str] = Counter()  # requests refused at admission, by the bound that was reached
        self.finished: Counter[str] = Counter()  # choices that ended: stop, length, abort or error
        # What these count: see _COUNTERS.
        self.prompt_tokens = self.output_tokens = self.stale_tokens = self.class_crossings = self.dropped = 0
        self.resumes = self.disconnects = self.silences = self.pauses = self.slow_readers = self.ended = self.good = 0
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.itl = Histogram(ITL_BOUNDS_S)
        self.tpot = Histogram(ITL_BOUNDS_S)
        self.e2e = Histogram(E2E_BOUNDS_S)
        self.served = Histogram(E2E_BOUNDS_S)
        self.decode = Histogram(E2E_BOUNDS_S)
        self.prompt_lengths = Histogram(TOKEN_BOUNDS)
        self.output_lengths = Histogram(TOKEN_BOUNDS)
        self.token_limits = Histogram(TOKEN_BOUNDS)
        self.recent_ttft = Recent()
        # Of each choice that ended: its tokens after the first, over the time that they took.
        self.recent_tpot = Recent()
        self.ledger = Ledger()
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        # The connected attention workers, and the choices that wait for one.
        self.workers: Callable[[], Sequence[WorkerLink]] = list
        self.waiting: Callable[[], int] = int
        # Of other models, on the same page.
        self.others: Callable[[], Iterable[GatewayMetrics]] = tuple
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_request(self, endpoint: str, status: int, took_s: float) -> None:
        """Count one answered request by endpoint and HTTP status (499: the client went away), and its seconds."""
        self.requests[endpoint, status] += 1
        self.e2e.observe(took_s)
        if status == 200:
            self.served.observe(took_s)

    def count_whole(self, reason: str, now_s: float, sequence: TokenSequence) -> None:
        """Count one choice that was generated to its end, at monotonic time ``now_s``."""
        output = len(sequence.log.output)
        decode_s = now_s - sequence.first_s
        self.finished[reason] += 1
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

    def count_refused(self, reason: str) -> None:
        """Count one request refused at admission, by the bound that was reached."""
        self.refused[reason] += 1

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: registering must not run the gauges."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All families with the samples of every model, read at the moment of the scrape."""
        families = {family.name: family for family in self._families()}
        for other in self.others():
            for family in other._families():
                families[family.name].samples += family.samples
        return families.values()

    def _families(self) -> Iterable[Metric]:
        workers = self.workers()
        for worker in workers:
            self.ledger.heard(worker.incarnation, worker.load)
        for family in self._own(workers):
            named = ({"model": self.model_name, **sample.labels} for sample in family.samples)
            family.samples = [s._replace(labels=of) for s, of in zip(family.samples, named, strict=True)]
            yield family
        yield from self._vllm(workers)

    def _own(self, workers: Sequence[WorkerLink]) -> Iterable[Metric]:
        answered = {(endpoint, str(status)): n for (endpoint, status), n in sorted(self.requests.items())}
        tokens = {"prompt": self.prompt_tokens, "output": self.output_tokens}
        for name, text, labels, counts in (
            ("requests", "Requests answered, by endpoint and HTTP status.", ("endpoint", "status"), answered),
            ("replays", "Choices handed on to another attention worker.", ("reason",), _all(REPLAYS, self.replays)),
            ("refused", "Requests refused at admission, by the bound that was reached.", ("reason",),
             _all(REFUSALS, self.refused)),
            ("tokens", "Tokens of served requests, by kind.", ("kind",), tokens),
        ):  # fmt: skip
            yield _family(CounterMetricFamily, f"eaas_{name}", text, labels, counts)
        for name, text, attribute in _COUNTERS:
            yield CounterMetricFamily(f"eaas_{name}", text, value=attrgetter(attribute)(self))
        for name, (text, read) in self.gauges.items():
            yield GaugeMetricFamily(name, text, value=read())
        for name, text, histogram in (
            ("ttft", "From admission to the first token.", self.ttft),
            ("itl", "Between two tokens of a choice.", self.itl),
            ("e2e", "From admission to the end of the request.", self.e2e),
        ):
            yield _histogram(f"eaas_{name}_seconds", text, {}, histogram)
        for name, text, read in _OF_WORKERS:
            values = {worker.name: read(worker) for worker in workers}
            yield _family(GaugeMetricFamily, f"eaas_worker_{name}", text, ("worker",), values)

    def _vllm(self, workers: Sequence[WorkerLink]) -> Iterable[Metric]:
        model, loads, ledger = self.model_name, [_load(worker) for worker in workers], self.ledger
        queued = self.waiting() + sum(load.waiting for load in loads)
        labels, of_model = ("model_name",), {"model_name": model}
        for kind, name, text, value in (
            (GaugeMetricFamily, "num_requests_running", "Requests in steps.", sum(x.running for x in loads)),
            (GaugeMetricFamily, "num_requests_waiting", "Requests that are queued.", queued),
            (GaugeMetricFamily, "kv_cache_usage_perc", "KV blocks held, 1 is all.", kv_use(workers)),
            (CounterMetricFamily, "prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            (CounterMetricFamily, "generation_tokens", "Tokens generated.", self.output_tokens),
            (CounterMetricFamily, "num_preemptions", "Requests put back for want of KV blocks.", ledger.preemptions),
            (CounterMetricFamily, "prefix_cache_queries", "Tokens of prompts looked for in the KV cache.",
             ledger.looked_up),
            (CounterMetricFamily, "prefix_cache_hits", "Tokens of prompts found in the KV cache.", ledger.reused),
        ):  # fmt: skip
            yield _family(kind, f"vllm:{name}", text, labels, {model: value})
        names = ("model_name", "block_size", "num_gpu_blocks")
        sizes = [worker.hello.block_tokens for worker in workers if worker.hello]
        blocks = {(model, str(sizes[0]), str(sum(map(_kv_blocks, workers)))): 1.0} if sizes else {}
        yield _family(GaugeMetricFamily, "vllm:cache_config_info", "The KV cache, in labels.", names, blocks)
        ends = {(reason, model): self.finished[reason] for reason in FINISHES}
        names = ("finished_reason", "model_name")
        yield _family(CounterMetricFamily, "vllm:request_success", "Choices that have ended.", names, ends)
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From admission to the first token.", self.ttft),
            ("inter_token_latency_seconds", "Between two tokens of a choice.", self.itl),
            ("request_time_per_output_token_seconds", "Mean over a choice's tokens.", self.tpot),
            ("e2e_request_latency_seconds", "Of requests answered with 200.", self.served),
            ("request_decode_time_seconds", "From first to last token.", self.decode),
            ("request_prompt_tokens", "Tokens of a prompt.", self.prompt_lengths),
            ("request_generation_tokens", "Tokens of a choice.", self.output_lengths),
            ("request_max_num_generation_tokens", "Tokens allowed a choice.", self.token_limits),
        ):
            yield _histogram(f"vllm:{name}", text, of_model, histogram)


# Name after eaas_, meaning, and attribute of GatewayMetrics.
_COUNTERS = (
    ("stale_tokens", "Tokens refused: an old attempt, or not the next index.", "stale_tokens"),
    ("class_crossings", "Choices that went on in another numerics class.", "class_crossings"),
    ("dropped_experts", "Requests answered without some lost experts, as they allowed.", "dropped"),
    ("resumes", "Streams that a client went on with after a cut.", "resumes"),
    ("runs_joined", "Choices told by runs in progress, which had begun for another connection.", "ledger.joined"),
    ("runs_kept", "Choices that went on where a run had ended.", "ledger.kept"),
    ("resumed_tokens", "Tokens told so that nothing was computed for.", "ledger.told"),
    ("disconnects", "Requests whose client went away.", "disconnects"),
    ("silences", "Workers found silent with work.", "silences"),
    ("pauses", "Streams paused until their client had read what it had.", "pauses"),
    ("choices_ended", "Choices that ended with their last token.", "ended"),
    ("choices_good", "Choices that ended within the targets of TTFT and TPOT.", "good"),
    ("slow_readers", "Streams ended because their client read too slowly.", "slow_readers"),
)
_OF_WORKERS: tuple[tuple[str, str, Callable[[WorkerLink], float]], ...] = (
    ("running", "Requests in the steps of a worker.", lambda worker: _load(worker).running),
    ("waiting", "Requests in the queue of a worker.", lambda worker: _load(worker).waiting),
    ("kv_use", "Share of a worker's KV blocks that are held.", lambda worker: _load(worker).kv_use),
    ("outstanding_tokens", "Tokens still to be computed there, as reckoned.", lambda worker: worker.outstanding),
)  # fmt: skip


def _load(worker: WorkerLink) -> WorkerLoad:
    return worker.load or _NOTHING


def _kv_blocks(worker: WorkerLink) -> int:
    return worker.hello.kv_tokens // worker.hello.block_tokens if worker.hello else 0


def kv_use(workers: Sequence[WorkerLink]) -> float:
    """Share of all KV blocks that are held, 0 to 1; 0 where there are none."""
    blocks = sum(map(_kv_blocks, workers))
    held = sum(_load(worker).kv_use * _kv_blocks(worker) for worker in workers)
    return held / blocks if blocks else 0.0


def _all(known: Iterable[str], counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted({**dict.fromkeys(known, 0), **counts}.items()))


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Mapping[Any, float],
) -> Metric:
    """Args: samples: by the value of the label, or by the values of all of them."""
    family = kind(name, text, labels=labels)
    for values, value in samples.items():
        family.add_metric([values] if isinstance(values, str) else values, value)
    return family


def _histogram(name: str, text: str, labels: Mapping[str, str], histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), histogram.buckets(), histogram.total)
    return family
