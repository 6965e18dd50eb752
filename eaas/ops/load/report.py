"""Records into the figures that people compare, and those into a report: latencies, throughput, goodput, and what each
fault did. Pure.

Every latency is given twice: from sending, and from when the arrival process wanted the request sent. The two part
where the client was late, which a server under load can hide otherwise (coordinated omission). A report is plain data:
what --json writes, and all that the HTML page and the terminal's tables are made of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eaas.ops.chaos.plan import FaultEvent
from eaas.ops.load.record import StreamRecord, compare

VERSION = 1
# Throughput is back when a window reaches this share of what it was before the fault.
RECOVERED = 0.95


class NothingToJudge(ValueError):
    """The records say nothing about the question; the text says what is needed."""


@dataclass(frozen=True, kw_only=True)
class FaultSpan:
    """A fault on the time line of a run, in seconds since its start; a kill ends as it begins."""

    began_s: float
    ended_s: float
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How a run took one fault.

    Attributes:
        recovery_s: From the fault until a sliding window is back at RECOVERED of the rate before all faults; 0 where it
            never fell below, None where it never came back.
        stalls_s: Added stall of each stream that waited at some time soon after the fault.
    """

    fault: FaultSpan
    recovery_s: float | None
    stalls_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Output tokens per second around faults.

    Attributes:
        before: From the start to the first fault.
        during: From there until the last fault has ended and throughput is back (or the run is over).
        after: The rest; None: no rest.
        loss: Share of `before` that is missing in the `loss_s` seconds after the first fault; negative: it rose.
    """

    before: float
    during: float
    after: float | None
    loss: float
    loss_s: float
    recoveries: tuple[Recovery, ...]


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Mean and nearest-rank percentiles of values in one unit."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    most: float


def spans_of(events: Iterable[FaultEvent], over_s: float) -> list[FaultSpan]:
    """Faults that began, with their ends; one whose end nobody saw lasted until `over_s`, a kill for no time.

    Args:
        over_s: When the run was over, in seconds since its start.
    """
    began: dict[str, FaultEvent] = {}
    spans: list[FaultSpan] = []
    for event in events:
        if event.phase == "began":
            began[event.id] = event
        elif event.phase == "ended" and event.id in began:
            first = began.pop(event.id)
            spans.append(FaultSpan(began_s=first.at_s, ended_s=event.at_s, text=first.text))
    for left in began.values():
        ended_s = left.at_s if left.kind == "kill" else max(left.at_s, over_s)
        spans.append(FaultSpan(began_s=left.at_s, ended_s=ended_s, text=left.text))
    return sorted(spans, key=lambda span: span.began_s)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank quantile of sorted values: the least value that `share` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """Mean and percentiles; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Quantiles(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=quantile(ordered, 0.50),
        p95=quantile(ordered, 0.95),
        p99=quantile(ordered, 0.99),
        most=ordered[-1],
    )


def added_stalls(records: Iterable[StreamRecord], fault_s: float, window_s: float = 5.0) -> list[float]:
    """For each stream that waits at some time in the window after the fault: its longest such wait, less what is usual.

    Waits are those for the first piece, for each next one and for the end; one that touches the window counts whole,
    wherever it began or ended, and so does a stream that began after the fault. Usual is, of the first wait, the median
    over streams whose first wait does not touch the window; of the others, that stream's median gap, and nothing where
    fewer than three pieces came.

    Args:
        fault_s: When the fault began.
        window_s: Seconds after it in which a wait is taken for its effect.

    Returns:
        Seconds, one for each such stream; at least 0.
    """
    records = list(records)

    def touches(earlier: float, later: float) -> bool:
        return later > fault_s and earlier < fault_s + window_s

    calm = [
        ttft_s
        for record in records
        if (ttft_s := record.ttft_s) is not None
        and not touches(record.token_s[0] - ttft_s, record.token_s[0])
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
        self._sums: NDArray[np.float64] = np.concatenate(
            ([0.0], np.cumsum(np.asarray(weights, dtype=np.float64)[order]))
        )

    @property
    def last_s(self) -> float:
        """When the last token came; 0 without any."""
        return float(self._times[-1]) if len(self._times) else 0.0

    def rate(self, from_s: float, to_s: float) -> float:
        """Tokens per second that came in [from_s, to_s); 0 of an empty span."""
        if to_s <= from_s:
            return 0.0
        first, last = np.searchsorted(self._times, [from_s, to_s], side="left")
        return float(self._sums[last] - self._sums[first]) / (to_s - from_s)


def windows(
    records: Sequence[StreamRecord],
    faults: Sequence[FaultSpan],
    *,
    start_s: float = 0.0,
    end_s: float | None = None,
    loss_s: float = 30.0,
    slide_s: float = 1.0,
    stall_s: float = 5.0,
) -> Windows:
    """Throughput before, during and after faults, and how the run took each of them.

    Args:
        start_s: Where steady load begins; what came earlier is left out.
        end_s: Where it ends; default: the last token.
        loss_s: Span after the first fault over which the loss is counted, as far as the run goes.
        slide_s: Width of the window that slides on after a fault.
        stall_s: A fall of throughput or a silence within this after a fault is its effect.

    Raises:
        NothingToJudge: no fault, or no steady load before the first or after it.
    """
    if not faults:
        raise NothingToJudge("0 faults; at least 1 is needed for windows around it.")
    ordered = sorted(faults, key=lambda fault: fault.began_s)
    first_s = ordered[0].began_s
    line = Timeline(records)
    over_s = line.last_s if end_s is None else end_s
    before = line.rate(start_s, first_s)
    if not before or over_s <= first_s:
        raise NothingToJudge(
            f"{before:.3g} tokens/s from {start_s:g} s to the first fault at {first_s:g} s, and the run ends at "
            f"{over_s:g} s; tokens on both sides of the fault are needed."
        )
    recoveries = tuple(
        Recovery(
            fault=fault,
            recovery_s=_recovery(line, fault.began_s, over_s, before * RECOVERED, slide_s, stall_s),
            stalls_s=tuple(added_stalls(records, fault.began_s, stall_s)),
        )
        for fault in ordered
    )
    settled_s = first_s
    for one in recoveries:
        back_s = over_s if one.recovery_s is None else one.fault.began_s + one.recovery_s
        settled_s = max(settled_s, back_s, one.fault.ended_s)
    settled_s = min(max(settled_s, first_s + slide_s), over_s)
    loss_to_s = min(first_s + loss_s, over_s)
    return Windows(
        before=before,
        during=line.rate(first_s, settled_s),
        after=line.rate(settled_s, over_s) if over_s > settled_s else None,
        loss=1.0 - line.rate(first_s, loss_to_s) / before,
        loss_s=loss_to_s - first_s,
        recoveries=recoveries,
    )


def loss_between(
    run: Iterable[StreamRecord], reference: Iterable[StreamRecord], from_s: float, to_s: float
) -> float | None:
    """Share of the reference's tokens between two moments that the run lacks; None where the reference had none.

    Two runs of one open loop and seed were offered the same load at the same times, so its ups and downs cancel.
    """
    expected = Timeline(reference).rate(from_s, to_s)
    return 1.0 - Timeline(run).rate(from_s, to_s) / expected if expected else None


def _recovery(
    line: Timeline, fault_s: float, over_s: float, enough: float, slide_s: float, stall_s: float
) -> float | None:
    """Seconds from the fault to the first sliding window that is back, after the first that is not."""
    step_s = slide_s / 20.0
    fallen = False
    for number in range(math.floor(max(0.0, over_s - slide_s - fault_s) / step_s) + 1):
        after_s = number * step_s
        rate = line.rate(fault_s + after_s, min(fault_s + after_s + slide_s, over_s))
        if fallen and rate >= enough:
            return after_s
        if not fallen and after_s > stall_s:
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


def summarize(records: Sequence[StreamRecord], slo: Slo) -> Summary:
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
    positive = [value for value in values if value > 0]
    if not positive:
        return []
    edges = np.geomspace(min(positive), max(*positive, min(positive) * 1.01), bins + 1)
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was seen in one run.

    Attributes:
        end_s: When the last request was to be sent; throughput is steady until then.
        warmup_s: Left out of the throughput before the first fault.
        events: Of the chaos plan, on the run's clock. problem: why the plan broke off; empty: it did not.
        servers: Series of each expert server. expert_rows: by layer and expert. expert_rows_note: what they lack.
        cpu_s: CPU time that the client itself took.
    """

    records: Sequence[StreamRecord]
    end_s: float
    warmup_s: float = 0.0
    events: Sequence[FaultEvent] = ()
    problem: str = ""
    servers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    expert_rows: Sequence[Sequence[int]] = ()
    expert_rows_note: str = ""
    cpu_s: float = 0.0


def as_report(
    settings: Mapping[str, Any],
    run: Run,
    slo: Slo,
    reference: Sequence[StreamRecord] | None = None,
    sweep: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The whole report: JSON types only, seconds and tokens; what was not measured is absent.

    Args:
        settings: How the load was made.
        reference: Records of the same requests without faults.
        sweep: Points of the search for the knee.
    """
    summary = summarize(run.records, slo)
    step_s, rates = throughput(run.records)
    report: dict[str, Any] = {
        "version": VERSION,
        "settings": dict(settings),
        "slo": asdict(slo),
        "summary": asdict(summary),
        "throughput": {"step_s": step_s, "tokens_per_s": rates},
        "ttft_histogram": histogram([r.ttft_s for r in run.records if r.ttft_s is not None]),
        "itl_histogram": histogram([gap for record in run.records for gap in record.gaps_s]),
        "client_cpu_us_per_token": run.cpu_s / summary.output_tokens * 1e6 if summary.output_tokens else None,
        "sweep": list(sweep),
        "servers": {name: asdict(series) for name, series in run.servers.items()},
        "expert_rows": [list(layer) for layer in run.expert_rows],
        "expert_rows_note": run.expert_rows_note,
    }
    if run.events or run.problem:
        report["chaos"] = _chaos(run, reference)
    if reference is not None:
        verdict = asdict(compare(run.records, reference))
        verdict["differences"] = list(verdict["differences"][:20])
        report["verdict"] = verdict
        line = Timeline(reference)
        count = len(rates)
        report["throughput"]["reference_tokens_per_s"] = [
            line.rate(n * step_s, (n + 1) * step_s) for n in range(count)
        ]
    return report


def _chaos(run: Run, reference: Sequence[StreamRecord] | None) -> dict[str, Any]:
    spans = spans_of(run.events, run.end_s)
    said: dict[str, Any] = {
        "events": [event.to_dict() for event in run.events],
        "spans": [asdict(span) for span in spans],
        "problem": run.problem,
    }
    if not spans:
        return said
    try:
        found = windows(run.records, spans, start_s=min(run.warmup_s, spans[0].began_s / 2), end_s=run.end_s)
    except NothingToJudge as error:
        said["windows"] = None
        said["problem"] = run.problem or str(error)
        return said
    said["windows"] = asdict(found)
    for one, recovery in zip(said["windows"]["recoveries"], found.recoveries, strict=True):
        stalls = quantiles(recovery.stalls_s)
        one["stalls_s"] = asdict(stalls) if stalls is not None else None
    if reference is not None:
        first_s = spans[0].began_s
        said["loss_to_reference"] = loss_between(
            run.records, reference, first_s, min(first_s + found.loss_s, run.end_s)
        )
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
