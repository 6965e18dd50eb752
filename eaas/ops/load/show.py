"""A report for people: tables on a terminal. Pure, but for `progress`, the line that a terminal shows meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from eaas.gateway.dashboard.board import seconds
from eaas.ops.load.client import Client
from eaas.ops.load.driver import Driver
from eaas.ops.terminal import table

_LATENCIES = (
    ("TTFT", "ttft_s"),
    ("TTFT from the planned time", "ttft_planned_s"),
    ("ITL", "itl_s"),
    ("TPOT", "tpot_s"),
    ("E2E", "e2e_s"),
    ("E2E from the planned time", "e2e_planned_s"),
    ("dispatch delay", "dispatch_s"),
)
_STYLES = {"": "", "good": "bold green", "bad": "bold red"}


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, Driver, Client], None]]:
    """The line of progress: what is given shows the run as it is now. Silent where nobody looks."""
    if not console.is_terminal:
        yield lambda title, driver, client: None
        return
    before_s, before = 0.0, 0
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(title: str, driver: Driver, client: Client) -> None:
            nonlocal before_s, before
            now_s, pieces = client.now_s, client.pieces
            if now_s <= before_s or pieces < before:
                before_s, before = 0.0, 0
            rate = (pieces - before) / max(1e-3, now_s - before_s)
            # A second's mean; the line is drawn more often than that.
            if now_s - before_s >= 1.0:
                before_s, before = now_s, pieces
            text = Text(
                f"{title}: {now_s:.0f} s, {len(driver.records)} sent, {driver.in_flight} in flight, "
                f"{pieces} tokens, {rate:.0f}/s"
            )
            if driver.failed:
                text.append(f", {driver.failed} failed", "bold red")
            live.update(text, refresh=True)

        yield show


def tables(report: Mapping[str, Any]) -> Group:
    """The report for a terminal."""
    settings, summary = report["settings"], report["summary"]
    title = f"{settings.get('model', '')} at {settings.get('endpoint', '')}"
    top = Table(show_header=False, title=title, title_justify="left")
    for name, figure, detail, mood in _figures(report):
        top.add_row(name, Text(figure, _STYLES[mood]), detail)
    latencies = [
        [name, *(seconds(summary[key][word]) for word in ("mean", "p50", "p95", "p99", "most"))]
        for name, key in _LATENCIES
        if summary[key]
    ]
    words = ("prompt", "kind", "at", "tokens", "text")
    found = [[str(one[word]) for word in words] for one in report.get("verdict", {}).get("differences", ())]
    return Group(
        top,
        *(_faults(report["chaos"]) if "chaos" in report else ()),
        *_part("Latency", ("", "mean", "p50", "p95", "p99", "longest"), latencies),
        *_part("First differences from the reference", ("request", "kind", "at character", "tokens", "found"), found),
    )


def _part(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Table]:
    """A table; none without rows."""
    cells = [[Text(cell) for cell in row] for row in rows]
    return [table(head, cells, title=title, figures=True)] if cells else []  # pyright: ignore[reportArgumentType]


def number(value: float) -> str:
    """A figure for people."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """What matters most, each as (name, figure, detail, mood)."""
    summary, verdict, cpu_us = report["summary"], report.get("verdict"), report["client_cpu_us_per_token"]
    requests = summary["requests"]
    limits = ", ".join(
        f"{name.removesuffix('_s').upper()} <= {seconds(limit)}"
        for name, limit in report["slo"].items()
        if limit is not None
    )
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary["errors"].items())
    kept = f"with {limits}" if limits else "(no limit was given: every success counts)"
    found = [
        ("tokens/s", number(summary["tokens_per_s"]), f"{summary['output_tokens']} output tokens", ""),
        ("requests/s", number(summary["requests_per_s"]), f"{requests} in {summary['duration_s']:.1f} s", ""),
        ("goodput, requests/s", number(summary["goodput"]), f"{summary['good']} of {requests} {kept}", ""),
        *(
            (f"{name} p99", seconds(summary[key]["p99"]), f"p50 {seconds(summary[key]['p50'])}", "")
            for name, key in (("TTFT", "ttft_s"), ("ITL", "itl_s"))
            if summary[key]
        ),
    ]
    failures = f"of {requests}" + (f": {kinds}" if kinds else "")
    counts = [("failed", summary["failed"], failures)]
    if verdict is not None:
        compared = f"{verdict['compared']} compared with the reference, {verdict['unmatched']} not"
        named = (("tokens lost", "lost"), ("tokens repeated", "repeated"), ("streams changed", "changed"))
        counts += [(name, verdict[key], compared) for name, key in named]
    found += [(name, str(count), detail, "bad" if count else "good") for name, count, detail in counts]
    if cpu_us is not None:
        found.append(("this client", f"{cpu_us:.0f} µs", "of CPU for each token", ""))
    return found


def less(loss: float, than: str) -> str:
    """A share that is missing, beside what; a negative one is the load's own rise, and nothing that a fault gave."""
    return f"no dip against {than}" if loss <= 0 else f"{loss:.2%} less than {than}"


def _faults(chaos: Mapping[str, Any]) -> list[Text | Table]:
    """Lines, each in the style of its mood, and a table."""
    notes = [(f"refused: {event['text']}", "bad") for event in chaos["events"] if event["phase"] == "refused"]
    notes += [(chaos["problem"], "bad")] if chaos["problem"] else []
    found, lost = chaos.get("windows"), chaos.get("loss_to_reference")
    rows: list[list[str]] = []
    if found:
        after = number(found["after"]) if found["after"] is not None else "none"
        beside = f", {less(lost, 'the reference')}" if lost is not None else ""
        said = (
            f"Tokens/s before {number(found['before'])}, during {number(found['during'])}, after {after}. In the "
            f"{found['loss_s']:.3g} s after the first fault {less(found['loss'], 'before')}{beside}."
        )
        notes.insert(0, (said, ""))
        for one in found["recoveries"]:
            stalls, back_s = one["stalls_s"], one["recovery_s"]
            cells = [seconds(stalls[key]) for key in ("p50", "p99", "most")] if stalls else ["", "", ""]
            back = "never" if back_s is None else seconds(back_s)
            rows.append([one["fault"]["text"], f"{one['fault']['began_s']:.2f} s", back, *cells])
    head = ("fault", "began", "throughput back after", "added stall p50", "p99", "longest")
    return [*(Text(text, _STYLES[mood]) for text, mood in notes), *_part("Faults", head, rows)]
