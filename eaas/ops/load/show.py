"""A load test on a terminal: a line while it runs, tables when it is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from eaas.ops.load.client import Client
from eaas.ops.load.driver import Driver
from eaas.ops.load.html import LATENCIES, less, number, seconds


class Ticker:
    """The line of progress; silent where nobody looks."""

    def __init__(self, console: Console) -> None:
        self._live = (
            Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        )
        self._before = (0.0, 0)

    def __enter__(self) -> Ticker:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, title: str, driver: Driver, client: Client) -> None:
        """Show the run as it is now."""
        if self._live is None:
            return
        (before_s, before), now_s = self._before, client.now_s
        if now_s <= before_s or client.pieces < before:
            before_s, before = 0.0, 0
        rate = (client.pieces - before) / max(1e-3, now_s - before_s)
        # A second's mean; the line is drawn more often than that.
        if now_s - before_s >= 1.0:
            self._before = now_s, client.pieces
        failed = f", [bold red]{driver.failed} failed[/]" if driver.failed else ""
        self._live.update(
            Text.from_markup(
                f"{title}: {now_s:.0f} s, {len(driver.records)} sent, {driver.in_flight} in flight, "
                f"{client.pieces} tokens, {rate:.0f}/s{failed}"
            ),
            refresh=True,
        )


def tables(report: Mapping[str, Any]) -> Group:
    """The report for a terminal."""
    summary, parts = report["summary"], []
    head = Table(show_header=False, title=_title(report), title_justify="left")
    cpu = report["client_cpu_us_per_token"]
    for name, text in (
        (
            "requests",
            f"{summary['requests']} in {summary['duration_s']:.1f} s, {number(summary['requests_per_s'])}/s",
        ),
        ("output tokens", f"{summary['output_tokens']}, {number(summary['tokens_per_s'])}/s"),
        (
            "goodput",
            f"{number(summary['goodput'])} requests/s, {summary['good']} of {summary['requests']}{_slo(report)}",
        ),
        ("failed", _failures(summary)),
        ("this client", f"{cpu:.0f} µs of CPU for each token" if cpu is not None else ""),
    ):
        head.add_row(name, text)
    parts.append(head)
    latency = Table()
    for heading in ("", "mean", "p50", "p95", "p99", "longest"):
        latency.add_column(heading, justify="left" if not heading else "right")
    for name, key in LATENCIES:
        if found := summary[key]:
            latency.add_row(name, *(seconds(found[word]) for word in ("mean", "p50", "p95", "p99", "most")))
    parts.append(latency)
    if report["sweep"]:
        parts.append(_sweep(report))
    if "chaos" in report:
        parts.append(_chaos(report["chaos"]))
    if "verdict" in report:
        parts.append(_verdict(report["verdict"]))
    return Group(*parts)


def _title(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    return f"{settings['model']} at {settings['endpoint']}"


def _slo(report: Mapping[str, Any]) -> str:
    limits = [
        f"{name.removesuffix('_s').upper()} <= {seconds(limit)}"
        for name, limit in report["slo"].items()
        if limit is not None
    ]
    return f" with {', '.join(limits)}" if limits else " (no limit was given: every success counts)"


def _failures(summary: Mapping[str, Any]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary["errors"].items())
    return f"[bold red]{summary['failed']}[/] ({kinds})" if summary["failed"] else "[green]0[/]"


def _sweep(report: Mapping[str, Any]) -> Table:
    table = Table(title=f"knee: {report['settings']['rate']} requests/s", title_justify="left")
    for heading in ("requests/s", "goodput", "kept"):
        table.add_column(heading, justify="right")
    for point in sorted(report["sweep"], key=lambda point: point["rate"]):
        kept = "[green]yes[/]" if point["kept"] else "[red]no[/]"
        table.add_row(f"{point['rate']:.3g}", f"{point['goodput']:.3g}", kept)
    return table


def _chaos(chaos: Mapping[str, Any]) -> Group:
    table = Table()
    for heading in ("fault", "began", "throughput back after", "added stall p50", "p99", "longest"):
        table.add_column(heading)
    found, parts = chaos.get("windows"), []
    for one in found["recoveries"] if found else ():
        stalls = one["stalls_s"]
        cells = [seconds(stalls[key]) for key in ("p50", "p99", "most")] if stalls else ["", "", ""]
        fault = one["fault"]
        table.add_row(fault["text"], f"{fault['began_s']:.2f} s", seconds(one["recovery_s"]), *cells)
    if found:
        lost = chaos.get("loss_to_reference")
        beside = f", {less(lost, 'the reference')}" if lost is not None else ""
        after = number(found["after"]) if found["after"] is not None else "none"
        parts += [
            table,
            Text(
                f"tokens/s before {number(found['before'])}, during {number(found['during'])}, after {after}; in the "
                f"{found['loss_s']:.3g} s after the first fault {less(found['loss'], 'before')}{beside}"
            ),
        ]
    refused = [f"refused: {event['text']}" for event in chaos["events"] if event["phase"] == "refused"]
    parts += [Text(text, style="bold red") for text in (*refused, chaos["problem"]) if text]
    return Group(*parts)


def _verdict(verdict: Mapping[str, Any]) -> Group:
    clean = not any(verdict[key] for key in ("failed", "lost", "repeated", "changed"))
    text = Text(
        f"against the reference: {verdict['failed']} failed, {verdict['lost']} tokens lost, "
        f"{verdict['repeated']} repeated, {verdict['changed']} streams changed; {verdict['compared']} compared, "
        f"{verdict['unmatched']} not",
        style="bold green" if clean else "bold red",
    )
    shown = [
        Text(
            f"  request {one['prompt']}, character {one['at']}: {one['kind']} {one['tokens']}, {one['text']}"
        )
        for one in verdict["differences"][:5]
    ]
    return Group(text, *shown)
