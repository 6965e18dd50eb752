"""The metrics under the names that vLLM gave them, which dashboards and the Gateway API inference extension read.

Each means what it means there, summed over the attention workers behind this gateway; `model_name` is the served name.
Those of vLLM that have no counterpart here are left out rather than faked; docs/metrics.md lists what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from eaas.gateway.fleet import Seen, kv_use

FINISHES = ("stop", "length", "abort", "error")


class Buckets(Protocol):
    """A histogram as it is shown."""

    total: float

    def buckets(self) -> list[tuple[str, float]]: ...


def vllm_families(
    model_name: str,
    *,
    workers: Sequence[Seen],
    waiting: int,
    counters: Mapping[str, float],
    finished: Mapping[str, int],
    histograms: Mapping[str, tuple[str, Buckets]],
) -> Iterable[Metric]:
    """All families.

    Args:
        workers: Those connected.
        waiting: Choices without a worker.
        counters: By the name after ``vllm:``.
        finished: Choices that have ended, by reason.
        histograms: Help and figures, by the name after ``vllm:``.
    """
    labels = ["model_name"]
    for name, text, value in (
        ("num_requests_running", "Requests in steps.", sum(worker.running for worker in workers)),
        (
            "num_requests_waiting",
            "Requests that are queued.",
            waiting + sum(worker.waiting for worker in workers),
        ),
        ("kv_cache_usage_perc", "KV blocks held, 1 is all.", kv_use(workers)),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=labels)
        gauge.add_metric([model_name], value)
        yield gauge
    cache = GaugeMetricFamily(
        "vllm:cache_config_info", "The KV cache, in labels.", labels=[*labels, "block_size", "num_gpu_blocks"]
    )
    if workers:
        blocks, block_tokens = sum(worker.kv_blocks for worker in workers), workers[0].block_tokens
        cache.add_metric([model_name, str(block_tokens), str(blocks)], 1.0)
    yield cache
    for name, value in counters.items():
        family = CounterMetricFamily(f"vllm:{name}", _TEXTS[name], labels=labels)
        family.add_metric([model_name], value)
        yield family
    success = CounterMetricFamily(
        "vllm:request_success", "Choices that have ended.", labels=["finished_reason", *labels]
    )
    for reason in FINISHES:
        success.add_metric([reason, model_name], finished.get(reason, 0))
    yield success
    for name, (text, histogram) in histograms.items():
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=labels)
        family.add_metric([model_name], histogram.buckets(), histogram.total)
        yield family


_TEXTS = {
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Requests put back for want of KV blocks.",
    "prefix_cache_queries": "Tokens of prompts looked for in the KV cache.",
    "prefix_cache_hits": "Tokens of prompts found in the KV cache.",
}
