"""Records into the figures that people compare: latencies, throughput, goodput, errors. Pure.

Every latency is given twice: from sending, and from when the arrival process wanted the request sent. The two part
where the client was late, which a server under load can hide otherwise (coordinated omission).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from eaas.ops.load.judge import Quantiles, Timeline, quantiles
from eaas.ops.load.record import StreamRecord


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What a request must keep to be a good one; None: anything goes. All from its planned time, in seconds."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def kept(self, record: StreamRecord) -> bool:
        """Whether a request succeeded and kept every limit."""
        if record.failed:
            return False
        ttft_s, e2e_s = planned_ttft_s(record), planned_e2e_s(record)
        return all(
            limit_s is None or (found_s is not None and found_s <= limit_s)
            for limit_s, found_s in (
                (self.ttft_s, ttft_s),
                # A single token has no time between tokens: nothing to break.
                (self.tpot_s, tpot_s(record) or 0.0),
                (self.e2e_s, e2e_s),
            )
        )


def planned_ttft_s(record: StreamRecord) -> float | None:
    """From the planned time to the first piece."""
    return record.token_s[0] - record.planned_s if record.token_s else None


def planned_e2e_s(record: StreamRecord) -> float | None:
    """From the planned time to the end."""
    return record.ended_s - record.planned_s if record.ended_s is not None else None


def tpot_s(record: StreamRecord) -> float | None:
    """Mean seconds for each output token after the first; None with fewer than two tokens."""
    if record.output_tokens < 2 or len(record.token_s) < 2:
        return None
    return (record.token_s[-1] - record.token_s[0]) / (record.output_tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run in figures; times in seconds, rates per second.

    Attributes:
        duration_s: From the start to the last request's end.
        good: Requests that kept the SLO; goodput: those per second of the run.
        dispatch_s: Delay of sending after the planned time: the client's own lateness.
        ttft_s, e2e_s: From sending; ttft_planned_s, e2e_planned_s: from the planned time.
        itl_s: Each gap between two pieces of a stream. tpot_s: its mean over each request's tokens.
        errors: Failed requests by kind.
    """

    requests: int
    failed: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    tokens_per_s: float
    good: int
    goodput: float
    ttft_s: Quantiles | None
    ttft_planned_s: Quantiles | None
    itl_s: Quantiles | None
    tpot_s: Quantiles | None
    e2e_s: Quantiles | None
    e2e_planned_s: Quantiles | None
    dispatch_s: Quantiles | None


def summarise(records: Sequence[StreamRecord], slo: Slo) -> Summary:
    """The figures of a run. Latencies are those of requests that succeeded; a failed one is no fast one."""
    whole = [record for record in records if not record.failed]
    duration_s = max((record.ended_s or 0.0 for record in records), default=0.0)
    output = sum(record.output_tokens for record in records)
    good = sum(slo.kept(record) for record in records)
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    sent = [(record, record.sent_s) for record in whole if record.sent_s is not None]
    return Summary(
        requests=len(records),
        failed=len(records) - len(whole),
        errors=dict(Counter(record.error_kind for record in records if record.failed).most_common()),
        duration_s=duration_s,
        prompt_tokens=sum(record.prompt_tokens or 0 for record in records),
        output_tokens=output,
        requests_per_s=len(whole) * per_s,
        tokens_per_s=output * per_s,
        good=good,
        goodput=good * per_s,
        ttft_s=quantiles(found for record in whole if (found := record.ttft_s) is not None),
        ttft_planned_s=quantiles(found for record in whole if (found := planned_ttft_s(record)) is not None),
        itl_s=quantiles(gap for record in whole for gap in record.gaps_s),
        tpot_s=quantiles(found for record in whole if (found := tpot_s(record)) is not None),
        e2e_s=quantiles(record.ended_s - at_s for record, at_s in sent if record.ended_s is not None),
        e2e_planned_s=quantiles(found for record in whole if (found := planned_e2e_s(record)) is not None),
        dispatch_s=quantiles(
            record.sent_s - record.planned_s for record in records if record.sent_s is not None
        ),
    )


def throughput(records: Sequence[StreamRecord], most_points: int = 240) -> tuple[float, list[float]]:
    """Output tokens per second over time, as (width of a step in seconds, rate in each)."""
    line = Timeline(records)
    steps = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
    step_s = next((step for step in steps if line.last_s / step <= most_points), line.last_s / most_points)
    count = math.ceil(line.last_s / step_s) if line.last_s else 0
    return step_s, [line.rate(number * step_s, (number + 1) * step_s) for number in range(count)]


def histogram(values: Sequence[float], bins: int = 40) -> list[tuple[float, float, int]]:
    """(from, to, count) of logarithmic bins that hold all positive values; what is not positive is in the first."""
    positive = sorted(value for value in values if value > 0)
    if not positive:
        return []
    low, high = positive[0], max(positive[-1], positive[0] * 1.01)
    ratio = (high / low) ** (1.0 / bins)
    counts = [0] * bins
    for value in values:
        place = int(math.log(value / low) / math.log(ratio)) if value > low else 0
        counts[min(bins - 1, place)] += 1
    return [(low * ratio**n, low * ratio ** (n + 1), count) for n, count in enumerate(counts)]
