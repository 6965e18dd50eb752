"""A report for people: the same parts as tables on a terminal, and with charts as one HTML page that needs nothing else
(inline SVG, light and dark). Pure, but for `progress`, the line that a terminal shows meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from eaas.gateway.dashboard.board import seconds
from eaas.ops.load.client import Client
from eaas.ops.load.driver import Driver
from eaas.ops.terminal import table

_WIDTH, _HEIGHT = 860, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 22, 34
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--dim:#667079;--line:#d9dee3;--back:#fff;--card:#f6f8fa;--a:#1f6feb;
--b:#9aa4ae;--bad:#cf222e;--good:#1a7f37;--band:#cf222e22}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9198a1;--line:#30363d;--back:#0d1117;--card:#161b22;
--a:#58a6ff;--b:#6e7681;--bad:#ff7b72;--good:#56d364;--band:#ff7b7233}}
body{margin:0 auto;max-width:920px;padding:24px 16px 64px;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:32px 0 6px}p{margin:4px 0;color:var(--dim)}
.tiles{display:flex;flex-wrap:wrap;gap:8px;margin:18px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 14px;min-width:104px}
.tile b{display:block;font-size:20px;font-variant-numeric:tabular-nums}.tile span{color:var(--dim);font-size:12px}
.tile small{display:block;color:var(--dim);font-size:11px}
.bad,.bad b{color:var(--bad)}.good b{color:var(--good)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px 4px 0;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}th{font-weight:600;color:var(--dim);font-size:12px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--dim);font:11px system-ui,sans-serif}
.grid{stroke:var(--line)}.run{stroke:var(--a);fill:none;stroke-width:1.8;stroke-linejoin:round}
.ref{stroke:var(--b);fill:none;stroke-width:1.3;stroke-dasharray:4 3}.bar{fill:var(--a)}
.band{fill:var(--band)}.mark{stroke:var(--bad);stroke-width:1.4}svg .fault{fill:var(--bad)}.dot{fill:var(--a)}
.dot.broke{fill:var(--bad)}
"""
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


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of the report. notes: lines, each with its mood, "good", "bad" or none. chart: SVG, for the page alone."""

    title: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[tuple[str, str]] = ()
    chart: str = ""


def tables(report: Mapping[str, Any]) -> Group:
    """The report for a terminal."""
    settings = report["settings"]
    top = Table(
        show_header=False,
        title=f"{settings.get('model', '')} at {settings.get('endpoint', '')}",
        title_justify="left",
    )
    for name, figure, detail, mood in _figures(report):
        top.add_row(name, Text(figure, _STYLES[mood]), detail)
    shown: list[Any] = [top]
    for part in _parts(report):
        shown += [Text(text, _STYLES[mood]) for text, mood in part.notes]
        if part.rows:
            rows = [[Text(cell) for cell in row] for row in part.rows]
            shown.append(table(part.head, rows, title=part.title, figures=True))  # pyright: ignore[reportArgumentType]
    return Group(*shown)


def page(report: Mapping[str, Any]) -> str:
    """The report as a page."""
    settings = report["settings"]
    said = ", ".join(f"{name} {value}" for name, value in settings.items() if name != "endpoint")
    tiles = "".join(
        f'<div class="tile {mood}"><b>{escape(figure)}</b><span>{name}</span><small>{escape(detail)}</small></div>'
        for name, figure, detail, mood in _figures(report)
    )
    body = [f"<h1>Load on {escape(str(settings.get('endpoint', '')))}</h1><p>{escape(said)}</p>"]
    body.append(f'<div class="tiles">{tiles}</div>')
    for part in _parts(report):
        body.append(f"<h2>{part.title}</h2>{part.chart}")
        body += [f'<p class="{mood}">{escape(text)}</p>' for text, mood in part.notes]
        if part.rows:
            cells = [("th", part.head), *(("td", row) for row in part.rows)]
            lines = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in cells)
            body.append(f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>")
    text = "\n".join(body)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>Load report</title>'
        f"<style>{_STYLE}</style></head><body>\n{text}\n</body></html>\n"
    )


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


def _parts(report: Mapping[str, Any]) -> list[_Part]:
    summary, sweep, rows = report["summary"], report["sweep"], report["expert_rows"]
    parts = [_Part(title="Output tokens per second", chart=_throughput(report))]
    if chaos := report.get("chaos"):
        parts.append(_faults(chaos))
    latencies = [
        [name, *(seconds(summary[key][word]) for word in ("mean", "p50", "p95", "p99", "most"))]
        for name, key in _LATENCIES
        if summary[key]
    ]
    parts.append(_Part(title="Latency", head=("", "mean", "p50", "p95", "p99", "longest"), rows=latencies))
    for title, key in (("Time to first token", "ttft_histogram"), ("Time between tokens", "itl_histogram")):
        if report[key]:
            parts.append(_Part(title=title, chart=_histogram(report[key])))
    if sweep:
        points = sorted(sweep, key=lambda point: point["rate"])
        tried = [[f"{p['rate']:.3g}", f"{p['goodput']:.3g}", "yes" if p["kept"] else "no"] for p in points]
        title = f"Goodput by rate; knee: {report['settings'].get('rate', '?')} requests/s"
        parts.append(
            _Part(title=title, head=("requests/s", "goodput", "kept"), rows=tried, chart=_sweep(points))
        )
    if report["servers"]:
        parts.append(_Part(title="Rows per second of each expert server", chart=_servers(report)))
    if any(any(layer) for layer in rows) or report["expert_rows_note"]:
        notes = [(report["expert_rows_note"], "")] if report["expert_rows_note"] else []
        parts.append(_Part(title="Rows of each expert", notes=notes, chart=_experts(rows) if rows else ""))
    if differences := report.get("verdict", {}).get("differences", ()):
        words = ("prompt", "kind", "at", "tokens", "text")
        parts.append(
            _Part(
                title="First differences from the reference",
                head=("request", "kind", "at character", "tokens", "found"),
                rows=[[str(one[word]) for word in words] for one in differences],
            )
        )
    return parts


def less(loss: float, than: str) -> str:
    """A share that is missing, beside what; a negative one is the load's own rise, and nothing that a fault gave."""
    return f"no dip against {than}" if loss <= 0 else f"{loss:.2%} less than {than}"


def _faults(chaos: Mapping[str, Any]) -> _Part:
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
    return _Part(title="Faults", head=head, rows=rows, notes=notes)


def nice_ticks(high: float, count: int = 5) -> list[float]:
    """Round numbers that cover [0, high)."""
    raw = max(high, 1e-12) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    return [n * step for n in range(math.floor(high / step + 1e-9) + 1)]


class _Chart:
    """Axes, and what is drawn between them."""

    def __init__(self, most_x: float, most_y: float, label: str) -> None:
        self._parts: list[str] = []
        self._most_x, self._most_y, self._label = max(most_x, 1e-9), max(most_y, 1e-9) * 1.08, label

    def x(self, value: float) -> float:
        return _LEFT + value / self._most_x * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self._most_y * (_HEIGHT - _TOP - _BOTTOM)

    def add(self, text: str) -> None:
        self._parts.append(text)

    def axes(self, x_text: Callable[[float], str], x_ticks: Sequence[float] | None = None) -> None:
        for tick in nice_ticks(self._most_y, 4):
            at = self.y(tick)
            self.add(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>')
            self.add(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
        for tick in nice_ticks(self._most_x, 8) if x_ticks is None else x_ticks:
            self.add(
                f'<text x="{self.x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x_text(tick)}</text>'
            )

    def line(self, points: Sequence[tuple[float, float]], kind: str, name: str = "") -> None:
        path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        if path:
            self.add(f'<path {kind} d="M{path}"><title>{escape(name)}</title></path>')

    def mark_faults(self, report: Mapping[str, Any]) -> None:
        bottom = _HEIGHT - _BOTTOM
        for place, span in enumerate(report.get("chaos", {}).get("spans", ())):
            from_x, to_x = self.x(span["began_s"]), self.x(span["ended_s"])
            name = escape(span["text"])
            self.add(
                f'<rect class="band" x="{from_x:.1f}" y="{_TOP}" width="{max(0.0, to_x - from_x):.1f}" '
                f'height="{bottom - _TOP}"><title>{name}</title></rect>'
                f'<path class="mark" d="M{from_x:.1f} {_TOP}V{bottom}"><title>{name}</title></path>'
                # Two lines in turn, so that names of faults close together stay legible.
                f'<text class="fault" x="{from_x + 3:.1f}" y="{_TOP - 9 + 11 * (place % 2)}">{name}</text>'
            )

    def svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(self._label)}">'
            f"{''.join(self._parts)}</svg>"
        )


def _over_time(
    report: Mapping[str, Any], label: str, series: Sequence[tuple[str, str, Sequence[tuple[float, float]]]]
) -> str:
    """Curves over time, each (class and attributes of its path, name, points), with the faults of the run."""
    points = [point for _, _, one in series for point in one]
    over_s = report["throughput"]["step_s"] * len(report["throughput"]["tokens_per_s"])
    chart = _Chart(max([over_s, *(x for x, _ in points)]), max((y for _, y in points), default=0), label)
    chart.mark_faults(report)
    chart.axes(lambda tick: f"{tick:g} s")
    for kind, name, one in series:
        chart.line(one, kind, name)
    return chart.svg()


def _throughput(report: Mapping[str, Any]) -> str:
    found = report["throughput"]
    step, calm = found["step_s"], found.get("reference_tokens_per_s", ())
    curves = [
        (kind, "", [((n + 0.5) * step, rate) for n, rate in enumerate(rates)])
        for kind, rates in (('class="ref"', calm), ('class="run"', found["tokens_per_s"]))
    ]
    note = f"<p>Each point is a mean over {step:g} s{'; dashed: the same requests without faults' if calm else ''}.</p>"
    return _over_time(report, "output tokens per second over time", curves) + note


def _servers(report: Mapping[str, Any]) -> str:
    curves: list[tuple[str, str, Sequence[tuple[float, float]]]] = []
    keys: list[str] = []
    for place, (name, one) in enumerate(sorted(report["servers"].items())):
        hue = f"hsl({place * 137 % 360} 62% 52%)"
        points = list(zip(one["at_s"], one["rows_per_s"], strict=True))
        curves.append((f'class="run" style="stroke:{hue}"', name, points))
        keys.append(f'<span style="color:{hue}">&#9632;</span> {escape(name)}')
    return (
        _over_time(report, "rows per second of each expert server", curves)
        + f"<p>{' &nbsp; '.join(keys)}</p>"
    )


def _histogram(bins: Sequence[Sequence[float]]) -> str:
    """Bins are of equal ratio, so bars of equal width are a logarithmic axis."""
    chart = _Chart(len(bins), max(count for _, _, count in bins), "distribution")
    ticks = range(0, len(bins), max(1, len(bins) // 8))
    chart.axes(lambda tick: seconds(bins[int(tick)][0]), [float(tick) for tick in ticks])
    for place, (low, high, count) in enumerate(bins):
        left, right, top = chart.x(place), chart.x(place + 1), chart.y(count)
        said = f"{seconds(low)} to {seconds(high)}: {count:.0f}"
        chart.add(
            f'<rect class="bar" x="{left + 0.5:.1f}" y="{top:.1f}" width="{right - left - 1:.1f}" '
            f'height="{_HEIGHT - _BOTTOM - top:.1f}"><title>{said}</title></rect>'
        )
    return chart.svg()


def _sweep(points: Sequence[Mapping[str, Any]]) -> str:
    chart = _Chart(points[-1]["rate"] * 1.05, max(p["goodput"] for p in points), "goodput by rate")
    chart.axes(lambda tick: f"{tick:g}/s")
    chart.line([(point["rate"], point["goodput"]) for point in points], 'class="ref"')
    for point in points:
        kind = "dot" if point["kept"] else "dot broke"
        chart.add(
            f'<circle class="{kind}" r="4" cx="{chart.x(point["rate"]):.1f}" cy="{chart.y(point["goodput"]):.1f}">'
            f"<title>{point['rate']:.3g} requests/s: {point['goodput']:.3g} good</title></circle>"
        )
    return chart.svg()


def _experts(layers: Sequence[Sequence[int]]) -> str:
    """A row of cells for each layer; the darker, the more rows against that layer's mean."""
    columns = max(len(layer) for layer in layers)
    wide, tall = (_WIDTH - _LEFT - _RIGHT) / columns, min(22.0, 420.0 / len(layers))
    cells: list[str] = []
    for y, layer in enumerate(layers):
        mean = sum(layer) / len(layer) or 1.0
        cells.append(
            f'<text x="{_LEFT - 6}" y="{y * tall + tall * 0.7:.1f}" text-anchor="end">layer {y}</text>'
        )
        for x, rows in enumerate(layer):
            cells.append(
                f'<rect class="bar" x="{_LEFT + x * wide:.2f}" y="{y * tall:.1f}" width="{wide * 0.96:.2f}" '
                f'height="{tall * 0.92:.1f}" fill-opacity="{min(1.0, 0.04 + rows / mean / 2.5):.2f}">'
                f"<title>layer {y}, expert {x}: {rows} rows, {rows / mean:.2f} of the mean</title></rect>"
            )
    worst = max((max(layer) * len(layer) / (sum(layer) or 1) for layer in layers), default=0.0)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {len(layers) * tall + 4:.0f}" role="img" aria-label="rows of each expert">'
        f"{''.join(cells)}</svg>"
        f"<p>{columns} experts from left to right; the busiest has {worst:.2f} times its layer's mean.</p>"
    )
