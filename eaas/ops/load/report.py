"""Records into the figures that people compare, and those into a report: latencies, throughput, goodput, and what each
fault did. Pure.

Every latency is given twice: from sending, and from when the arrival process wanted the request sent. The two part
where the client was late, which a server under load can hide otherwise (coordinated omission). A report is plain data:
what --json writes, and all that the terminal's tables are made of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from eaas.ops.chaos.plan import FaultEvent
from eaas.ops.load.record import StreamRecord, compare

VERSION = 2
# Throughput is back when a window reaches this share of what it was before the fault.
RECOVERED = 0.95
# A fall of throughput or a silence within this after a fault is its effect.
STALL_S = 5.0
# Width of the window that slides on after a fault, and the span after the first over which the loss is counted.
_SLIDE_S, _LOSS_S = 1.0, 30.0


class NothingToCompare(ValueError):
    """The records say nothing about the question; the text says what is needed."""


class FaultSpan(TypedDict):
    """A fault on the time line of a run, in seconds since its start; a kill ends as it begins."""

    began_s: float
    ended_s: float
    text: str


def spans_of(events: Iterable[FaultEvent], over_s: float) -> list[FaultSpan]:
    """Faults that began, with their ends; one whose end nobody saw lasted until `over_s`, a kill for no time.

    Args:
        over_s: When the run was over, in seconds since its start.
    """
    began: dict[str, FaultEvent] = {}
    spans: list[FaultSpan] = []

    def add(first: FaultEvent, ended_s: float) -> None:
        spans.append({"began_s": first.at_s, "ended_s": ended_s, "text": first.text})

    for event in events:
        if event.phase == "began":
            began[event.id] = event
        elif event.phase == "ended" and event.id in began:
            add(began.pop(event.id), event.at_s)
    for left in began.values():
        add(left, left.at_s if left.kind == "kill" else max(left.at_s, over_s))
    return sorted(spans, key=lambda span: span["began_s"])


def quantiles(values: Iterable[float]) -> dict[str, float] | None:
    """Count, mean, nearest-rank percentiles (p50, p95, p99) and the most of values in one unit; None of nothing."""
    found = np.sort(np.fromiter(values, np.float64))
    if not len(found):
        return None
    shares = np.quantile(found, (0.50, 0.95, 0.99), method="inverted_cdf").tolist()
    named = dict(zip(("p50", "p95", "p99"), shares, strict=True))
    return {"count": len(found), "mean": float(found.mean()), **named, "most": float(found[-1])}


def added_stalls(records: Iterable[StreamRecord], fault_s: float, window_s: float = STALL_S) -> list[float]:
    """For each stream that waits at some time in the `window_s` seconds after a fault began: its longest such wait in
    seconds, less what is usual; at least 0.

    Waits are those for the first piece, for each next one and for the end; one that touches the window counts whole,
    wherever it began or ended, and so does a stream that began after the fault. Usual is, of the first wait, the median
    over streams whose first wait does not touch the window; of the others, that stream's median gap, and nothing where
    fewer than three pieces came."""
    records = list(records)

    def touches(earlier: float, later: float) -> bool:
        return later > fault_s and earlier < fault_s + window_s

    calm = [
        ttft_s
        for record in records
        if (ttft_s := record.ttft_s) is not None and not touches(record.token_s[0] - ttft_s, record.token_s[0])
    ]
    usual_ttft_s = median(calm) if calm else 0.0
    stalls: list[float] = []
    for record in records:
        sent_s, ended_s, times = record.sent_s, record.ended_s, record.token_s
        if sent_s is None or ended_s is None or not touches(sent_s, ended_s):
            continue
        usual_s = median(record.gaps_s) if len(times) >= 3 else 0.0
        points = [sent_s, *times, ended_s]
        waits = [
            later - earlier - (usual_s if number else usual_ttft_s)
            for number, (earlier, later) in enumerate(pairwise(points))
            if touches(earlier, later)
        ]
        stalls.append(max(0.0, *waits))
    return stalls


class Timeline:
    """Arrivals of all streams' output tokens, for rates between any two moments."""

    def __init__(self, records: Iterable[StreamRecord]) -> None:
        times: list[float] = []
        weights: list[float] = []
        for record in records:
            # Where a server puts several tokens into one piece, each piece stands for its share of them.
            pieces = len(record.token_s)
            times += record.token_s
            weights += [record.output_tokens / pieces if record.tokens and pieces else 1.0] * pieces
        order = np.argsort(np.asarray(times, dtype=np.float64), kind="stable")
        self._times: NDArray[np.float64] = np.asarray(times, dtype=np.float64)[order]
        self._sums: NDArray[np.float64] = np.append(0.0, np.cumsum(np.asarray(weights)[order]))
        # When the last token came; 0 without any.
        self.last_s = float(self._times[-1]) if times else 0.0

    def rate(self, from_s: float, to_s: float) -> float:
        """Tokens per second that came in [from_s, to_s); 0 of an empty span."""
        if to_s <= from_s:
            return 0.0
        first, last = np.searchsorted(self._times, [from_s, to_s], side="left")
        return float(self._sums[last] - self._sums[first]) / (to_s - from_s)

    def rates(self, step_s: float, count: int) -> list[float]:
        """The rate in each of `count` steps from the start."""
        return [self.rate(number * step_s, (number + 1) * step_s) for number in range(count)]


def windows(
    records: Sequence[StreamRecord], faults: Sequence[FaultSpan], *, start_s: float = 0.0, end_s: float | None = None
) -> dict[str, Any]:
    """Throughput before, during and after faults, and how the run took each of them; plain data.

    Args:
        start_s: Where steady load begins; what came earlier is left out.
        end_s: Where it ends; default: the last token.

    Returns:
        before: Tokens per second from the start to the first fault; during: from there until the last fault has ended
            and throughput is back (or the run is over); after: of the rest, None where there is none.
        loss: Share of `before` that is missing in the `loss_s` seconds after the first fault; negative: it rose.
        recoveries: For each fault {"fault", "recovery_s", "stalls_s"}. recovery_s: from the fault until a sliding
            window is back at RECOVERED of the rate before all faults; 0 where it never fell below, None where it never
            came back. stalls_s: quantiles of the added stalls of streams that waited soon after it.

    Raises:
        NothingToCompare: no fault, or no steady load before the first or after it.
    """
    if not faults:
        raise NothingToCompare("0 faults; at least 1 is needed for windows around it.")
    ordered = sorted(faults, key=lambda fault: fault["began_s"])
    first_s = settled_s = ordered[0]["began_s"]
    line = Timeline(records)
    over_s = line.last_s if end_s is None else end_s
    before = line.rate(start_s, first_s)
    if not before or over_s <= first_s:
        raise NothingToCompare(
            f"{before:.3g} tokens/s from {start_s:g} s to the first fault at {first_s:g} s, and the run ends at "
            f"{over_s:g} s; tokens on both sides of the fault are needed."
        )
    recoveries: list[dict[str, Any]] = []
    for fault in ordered:
        began_s = fault["began_s"]
        recovery_s = _recovery(line, began_s, over_s, before * RECOVERED)
        stalls_s = quantiles(added_stalls(records, began_s))
        recoveries.append({"fault": fault, "recovery_s": recovery_s, "stalls_s": stalls_s})
        settled_s = max(settled_s, fault["ended_s"], over_s if recovery_s is None else began_s + recovery_s)
    settled_s = min(max(settled_s, first_s + _SLIDE_S), over_s)
    loss_to_s = min(first_s + _LOSS_S, over_s)
    return {
        "before": before,
        "during": line.rate(first_s, settled_s),
        "after": line.rate(settled_s, over_s) if over_s > settled_s else None,
        "loss": 1.0 - line.rate(first_s, loss_to_s) / before,
        "loss_s": loss_to_s - first_s,
        "recoveries": recoveries,
    }


def _recovery(line: Timeline, fault_s: float, over_s: float, enough: float) -> float | None:
    """Seconds from the fault to the first sliding window that is back, after the first that is not."""
    step_s = _SLIDE_S / 20.0
    fallen = False
    for number in range(math.floor(max(0.0, over_s - _SLIDE_S - fault_s) / step_s) + 1):
        after_s = number * step_s
        rate = line.rate(fault_s + after_s, min(fault_s + after_s + _SLIDE_S, over_s))
        if fallen and rate >= enough:
            return after_s
        if not fallen and after_s > STALL_S:
            return 0.0
        fallen = fallen or rate < enough
    return None if fallen else 0.0


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
        # A single token has no time between tokens: nothing to break.
        found = (record.ttft_planned_s, record.tpot_s or 0.0, record.e2e_planned_s)
        limits = (self.ttft_s, self.tpot_s, self.e2e_s)
        return all(
            limit_s is None or (found_s is not None and found_s <= limit_s)
            for limit_s, found_s in zip(limits, found, strict=True)
        )


def summarize(records: Sequence[StreamRecord], slo: Slo) -> dict[str, Any]:
    """One run in figures; times in seconds, rates per second. Plain data.

    Latencies are those of requests that succeeded; a failed one is no fast one.

    Returns:
        duration_s: From the start to the last request's end.
        good: Requests that kept the SLO; goodput: those per second of the run.
        errors: Failed requests by kind.
        dispatch_s: Quantiles of the delay of sending after the planned time: the client's own lateness.
        ttft_s, e2e_s: From sending; ttft_planned_s, e2e_planned_s: from the planned time.
        itl_s: Each gap between two pieces of a stream. tpot_s: its mean over each request's tokens.
    """
    whole = [record for record in records if not record.failed]
    duration_s = max((record.ended_s or 0.0 for record in records), default=0.0)
    output = sum(record.output_tokens for record in records)
    good = sum(slo.kept(record) for record in records)
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0

    def over(records: Iterable[StreamRecord], name: str) -> dict[str, float] | None:
        return quantiles(found for record in records if (found := getattr(record, name)) is not None)

    return {
        "requests": len(records),
        "failed": len(records) - len(whole),
        "errors": dict(Counter(record.error_kind for record in records if record.failed).most_common()),
        "duration_s": duration_s,
        "prompt_tokens": sum(record.prompt_tokens or 0 for record in records),
        "output_tokens": output,
        "requests_per_s": len(whole) * per_s,
        "tokens_per_s": output * per_s,
        "good": good,
        "goodput": good * per_s,
        **{name: over(whole, name) for name in ("ttft_s", "ttft_planned_s", "tpot_s", "e2e_s", "e2e_planned_s")},
        "itl_s": quantiles(gap for record in whole for gap in record.gaps_s),
        "dispatch_s": over(records, "dispatch_s"),
    }


def throughput(records: Sequence[StreamRecord], most_points: int = 240) -> tuple[float, list[float]]:
    """Output tokens per second over time, as (width of a step in seconds, rate in each)."""
    line = Timeline(records)
    steps = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
    step_s = next((step for step in steps if line.last_s / step <= most_points), line.last_s / most_points)
    return step_s, line.rates(step_s, math.ceil(line.last_s / step_s) if line.last_s else 0)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was seen in one run.

    Attributes:
        end_s: When the last request was to be sent; throughput is steady until then.
        warmup_s: Left out of the throughput before the first fault.
        events: Of the chaos plan, on the run's clock. problem: why the plan broke off; empty: it did not.
        cpu_s: CPU time that the client itself took.
    """

    records: Sequence[StreamRecord]
    end_s: float
    warmup_s: float = 0.0
    events: Sequence[FaultEvent] = ()
    problem: str = ""
    cpu_s: float = 0.0


def as_report(
    settings: Mapping[str, Any], run: Run, slo: Slo, reference: Sequence[StreamRecord] | None = None
) -> dict[str, Any]:
    """The whole report: JSON types only, seconds and tokens; what was not measured is absent.
    Args: settings: how the load was made. reference: records of the same requests without faults."""
    summary = summarize(run.records, slo)
    step_s, rates = throughput(run.records)
    tokens = summary["output_tokens"]
    report: dict[str, Any] = {
        "version": VERSION,
        "settings": dict(settings),
        "slo": asdict(slo),
        "summary": summary,
        "throughput": {"step_s": step_s, "tokens_per_s": rates},
        "client_cpu_us_per_token": run.cpu_s / tokens * 1e6 if tokens else None,
    }
    if run.events or run.problem:
        report["chaos"] = _chaos(run, reference)
    if reference is not None:
        verdict = asdict(compare(run.records, reference))
        verdict["differences"] = list(verdict["differences"][:20])
        report["verdict"] = verdict
        report["throughput"]["reference_tokens_per_s"] = Timeline(reference).rates(step_s, len(rates))
    return report


def _chaos(run: Run, reference: Sequence[StreamRecord] | None) -> dict[str, Any]:
    spans = spans_of(run.events, run.end_s)
    said: dict[str, Any] = {"events": [event.to_dict() for event in run.events], "spans": spans, "problem": run.problem}
    if not spans:
        return said
    first_s = spans[0]["began_s"]
    try:
        found = windows(run.records, spans, start_s=min(run.warmup_s, first_s / 2), end_s=run.end_s)
    except NothingToCompare as error:
        return said | {"windows": None, "problem": run.problem or str(error)}
    said["windows"] = found
    if reference is not None:
        until_s = min(first_s + found["loss_s"], run.end_s)
        # Two runs of one open loop and seed were offered the same load at the same times, so its ups and downs cancel.
        expected = Timeline(reference).rate(first_s, until_s)
        lost = 1.0 - Timeline(run.records).rate(first_s, until_s) / expected if expected else None
        said["loss_to_reference"] = lost
    return said


def is_clean(report: Mapping[str, Any]) -> bool:
    """Whether every request succeeded, every fault could be injected, and every text is known to be the reference's."""
    verdict = report.get("verdict")
    chaos = report.get("chaos", {})
    same = verdict is None or (
        verdict["compared"] > 0
        and not (verdict["unmatched"] or verdict["lost"] or verdict["repeated"] or verdict["changed"])
    )
    injected = not chaos.get("problem") and all(e["phase"] != "refused" for e in chaos.get("events", ()))
    return bool(report["summary"]["requests"]) and not report["summary"]["failed"] and same and injected
