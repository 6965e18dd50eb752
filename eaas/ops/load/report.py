"""A run as plain data: what --json writes, and all that the HTML page and the table are made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from eaas.ops.load.judge import (
    FaultNote,
    NothingToJudge,
    Timeline,
    compare,
    loss_between,
    quantiles,
    spans_of,
    windows,
)
from eaas.ops.load.measures import Slo, histogram, summarise, throughput
from eaas.ops.load.record import StreamRecord

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was seen in one run.

    Attributes:
        end_s: When the last request was to be sent; throughput is steady until then.
        warmup_s: Left out of the throughput before the first fault.
        notes: Events of the chaos plan. problem: why the plan broke off; empty: it did not.
        servers: Series of each expert server. expert_rows: by layer and expert. expert_rows_note: what they lack.
        cpu_s: CPU time that the client itself took.
    """

    records: Sequence[StreamRecord]
    end_s: float
    warmup_s: float = 0.0
    notes: Sequence[FaultNote] = ()
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
    summary = summarise(run.records, slo)
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
    if run.notes or run.problem:
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
    spans = spans_of(run.notes, run.end_s)
    said: dict[str, Any] = {
        "events": [asdict(note) for note in run.notes],
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
