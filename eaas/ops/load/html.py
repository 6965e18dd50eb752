"""The report as one HTML page that needs nothing else: inline SVG, light and dark. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

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
.bad b{color:var(--bad)}.good b{color:var(--good)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px 4px 0;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}th{font-weight:600;color:var(--dim);font-size:12px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--dim);font:11px system-ui,sans-serif}
.grid{stroke:var(--line)}.run{stroke:var(--a);fill:none;stroke-width:1.8;stroke-linejoin:round}
.ref{stroke:var(--b);fill:none;stroke-width:1.3;stroke-dasharray:4 3}.bar{fill:var(--a)}
.band{fill:var(--band)}.mark{stroke:var(--bad);stroke-width:1.4}svg .fault{fill:var(--bad)}.dot{fill:var(--a)}
.dot.broke{fill:var(--bad)}
"""


def page(report: Mapping[str, Any]) -> str:
    """The page of a report as `as_report` makes it."""
    settings = report["settings"]
    parts = [
        f"<h1>Load on {escape(str(settings.get('endpoint', '')))}</h1>",
        f"<p>{escape(_subtitle(settings))}</p>",
        _tiles(report),
        "<h2>Output tokens per second</h2>",
        _throughput(report),
        _faults(report),
        "<h2>Latency</h2>",
        _latencies(report["summary"]),
    ]
    for title, key in (("Time to first token", "ttft_histogram"), ("Time between tokens", "itl_histogram")):
        if report[key]:
            parts += [f"<h2>{title}</h2>", _histogram(report[key])]
    if report["sweep"]:
        parts += ["<h2>Goodput by rate</h2>", _sweep(report["sweep"])]
    if report["servers"]:
        parts += ["<h2>Rows per second of each expert server</h2>", _servers(report)]
    if any(any(layer) for layer in report["expert_rows"]):
        parts += ["<h2>Rows of each expert</h2>", _experts(report["expert_rows"])]
    if report["expert_rows_note"]:
        parts.append(f"<p>{escape(report['expert_rows_note'])}</p>")
    parts.append(_errors(report))
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>Load report</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _subtitle(settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value}" for name, value in settings.items() if name != "endpoint" and value != ""
    )


def seconds(value: float | None) -> str:
    """A duration for people."""
    if value is None:
        return "never"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 or value == 0 else f"{value * 1e6:.0f} µs"


def number(value: float) -> str:
    """A figure for people."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _tiles(report: Mapping[str, Any]) -> str:
    summary, verdict = report["summary"], report.get("verdict")
    tiles = [
        (number(summary["tokens_per_s"]), "tokens/s", ""),
        (number(summary["requests_per_s"]), "requests/s", ""),
        (number(summary["goodput"]), "goodput, requests/s", ""),
    ]
    for key, text in (("ttft_s", "TTFT"), ("itl_s", "ITL")):
        if summary[key]:
            tiles.append((seconds(summary[key]["p99"]), f"{text} p99", ""))
    tiles.append((str(summary["failed"]), f"failed of {summary['requests']}", _mood(summary["failed"])))
    if verdict is not None:
        tiles += [
            (str(verdict[key]), f"{key} {unit}", _mood(verdict[key]))
            for key, unit in (("lost", "tokens"), ("repeated", "tokens"), ("changed", "streams"))
        ]
    cells = [
        f'<div class="tile {mood}"><b>{escape(figure)}</b><span>{text}</span></div>'
        for figure, text, mood in tiles
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _mood(count: int) -> str:
    return "bad" if count else "good"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover [low, high)."""
    span = max(high - low, 1e-12)
    raw = span / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


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
        for tick in nice_ticks(0, self._most_y, 4):
            at = self.y(tick)
            self.add(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>')
            self.add(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
        for tick in nice_ticks(0, self._most_x, 8) if x_ticks is None else x_ticks:
            self.add(
                f'<text x="{self.x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x_text(tick)}</text>'
            )

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        if path:
            self.add(f'<path class="{kind}" d="M{path}"/>')

    def svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(self._label)}">'
            f"{''.join(self._parts)}</svg>"
        )


def _throughput(report: Mapping[str, Any]) -> str:
    found = report["throughput"]
    step, rates = found["step_s"], found["tokens_per_s"]
    calm = found.get("reference_tokens_per_s", [])
    chart = _Chart(len(rates) * step, max([*rates, *calm], default=0), "output tokens per second over time")
    _mark_faults(chart, report)
    chart.axes(lambda tick: f"{tick:g} s")
    chart.line([((n + 0.5) * step, rate) for n, rate in enumerate(calm)], "ref")
    chart.line([((n + 0.5) * step, rate) for n, rate in enumerate(rates)], "run")
    note = f"<p>Each point is a mean over {step:g} s{'; dashed: the same requests without faults' if calm else ''}.</p>"
    return chart.svg() + note


def _mark_faults(chart: _Chart, report: Mapping[str, Any]) -> None:
    bottom = _HEIGHT - _BOTTOM
    for place, span in enumerate(report.get("chaos", {}).get("spans", ())):
        from_x, to_x = chart.x(span["began_s"]), chart.x(span["ended_s"])
        name = escape(span["text"])
        chart.add(
            f'<rect class="band" x="{from_x:.1f}" y="{_TOP}" width="{max(0.0, to_x - from_x):.1f}" '
            f'height="{bottom - _TOP}"><title>{name}</title></rect>'
            f'<path class="mark" d="M{from_x:.1f} {_TOP}V{bottom}"><title>{name}</title></path>'
            # Two lines in turn, so that names of faults close together stay legible.
            f'<text class="fault" x="{from_x + 3:.1f}" y="{_TOP - 9 + 11 * (place % 2)}">{name}</text>'
        )


def less(loss: float, than: str) -> str:
    """A share that is missing, beside what; a negative one is the load's own rise, and nothing that a fault gave."""
    return f"no dip against {than}" if loss <= 0 else f"{loss:.2%} less than {than}"


def _faults(report: Mapping[str, Any]) -> str:
    chaos = report.get("chaos")
    if chaos is None:
        return ""
    lines: list[str] = []
    found = chaos.get("windows")
    if found:
        after = number(found["after"]) if found["after"] is not None else "no tokens"
        lines.append(
            f"<p>Tokens/s before {number(found['before'])}, during {number(found['during'])}, after {after}. In the "
            f"{found['loss_s']:.3g} s after the first fault {less(found['loss'], 'before')}"
            + (
                f", {less(lost, 'the reference')}"
                if (lost := chaos.get("loss_to_reference")) is not None
                else ""
            )
            + ".</p>"
        )
        rows = [
            [one["fault"]["text"], f"{one['fault']['began_s']:.2f} s", seconds(one["recovery_s"])]
            + (
                [seconds(one["stalls_s"][key]) for key in ("p50", "p99", "most")]
                if one["stalls_s"]
                else ["", "", ""]
            )
            for one in found["recoveries"]
        ]
        lines.append(
            _table(["fault", "began", "throughput back after", "added stall p50", "p99", "longest"], rows)
        )
    wrong = [f"Refused: {event['text']}" for event in chaos["events"] if event["phase"] == "refused"]
    wrong += [chaos["problem"]] if chaos["problem"] else []
    lines += [f'<p class="bad"><b>{escape(text)}</b></p>' for text in wrong]
    return "<h2>Faults</h2>" + "".join(lines)


LATENCIES = (
    ("TTFT", "ttft_s"),
    ("TTFT from the planned time", "ttft_planned_s"),
    ("ITL", "itl_s"),
    ("TPOT", "tpot_s"),
    ("E2E", "e2e_s"),
    ("E2E from the planned time", "e2e_planned_s"),
    ("dispatch delay", "dispatch_s"),
)


def _latencies(summary: Mapping[str, Any]) -> str:
    rows = [
        [name, *(seconds(summary[key][word]) for word in ("mean", "p50", "p95", "p99", "most"))]
        for name, key in LATENCIES
        if summary[key]
    ]
    return _table(["", "mean", "p50", "p95", "p99", "longest"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


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
    chart = _Chart(
        max(p["rate"] for p in points) * 1.05, max(p["goodput"] for p in points), "goodput by rate"
    )
    chart.axes(lambda tick: f"{tick:g}/s")
    ordered = sorted(points, key=lambda point: point["rate"])
    chart.line([(point["rate"], point["goodput"]) for point in ordered], "ref")
    for point in ordered:
        kind = "dot" if point["kept"] else "dot broke"
        chart.add(
            f'<circle class="{kind}" r="4" cx="{chart.x(point["rate"]):.1f}" cy="{chart.y(point["goodput"]):.1f}">'
            f"<title>{point['rate']:.3g} requests/s: {point['goodput']:.3g} good</title></circle>"
        )
    return chart.svg()


def _servers(report: Mapping[str, Any]) -> str:
    servers = report["servers"]
    found = report["throughput"]
    over_s = found["step_s"] * len(found["tokens_per_s"])
    most_x = max([over_s, *(at for one in servers.values() for at in one["at_s"])])
    most_y = max([rows for one in servers.values() for rows in one["rows_per_s"]], default=1.0)
    chart = _Chart(most_x, most_y, "rows per second of each expert server")
    _mark_faults(chart, report)
    chart.axes(lambda tick: f"{tick:g} s")
    keys: list[str] = []
    for place, (name, one) in enumerate(sorted(servers.items())):
        hue = f"hsl({place * 137 % 360} 62% 52%)"
        points = list(zip(one["at_s"], one["rows_per_s"], strict=True))
        path = "L".join(f"{chart.x(x):.1f} {chart.y(y):.1f}" for x, y in points)
        chart.add(f'<path class="run" style="stroke:{hue}" d="M{path}"><title>{escape(name)}</title></path>')
        keys.append(f'<span style="color:{hue}">&#9632;</span> {escape(name)}')
    return chart.svg() + f"<p>{' &nbsp; '.join(keys)}</p>"


def _experts(layers: Sequence[Sequence[int]]) -> str:
    """A row of cells for each layer; the darker, the more rows against that layer's mean."""
    columns = max(len(layer) for layer in layers)
    wide = (_WIDTH - _LEFT - _RIGHT) / columns
    tall = min(22.0, 420.0 / len(layers))
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
    height = len(layers) * tall + 4
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="rows of each expert">{"".join(cells)}</svg>'
        f"<p>{columns} experts from left to right; the busiest has {worst:.2f} times its layer's mean.</p>"
    )


def _errors(report: Mapping[str, Any]) -> str:
    errors = report["summary"]["errors"]
    differences = report.get("verdict", {}).get("differences", ())
    text = ""
    if errors:
        rows = [[kind, str(count)] for kind, count in errors.items()]
        text += "<h2>Failed requests</h2>" + _table(["kind", "requests"], rows)
    if differences:
        rows = [
            [f"request {one['prompt']}", one["kind"], str(one["at"]), str(one["tokens"]), one["text"]]
            for one in differences
        ]
        text += "<h2>First differences</h2>" + _table(["", "kind", "at character", "tokens", "found"], rows)
    return text
