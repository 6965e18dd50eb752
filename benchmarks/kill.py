"""The README's picture: tokens per second through the kill of an expert server.

eaas serve --experts 4 --allow-chaos
eaas load --arrivals constant --rate 4 --for 40s --ignore-eos --chaos deploy/chaos/kill-one.toml --reference \\
  --json kill.json
python -m benchmarks.kill kill.json --experts 4      # records the run and draws docs/kill.svg from it
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.readme import KILL, newest
from benchmarks.report import RESULTS, record

PICTURE = RESULTS.parent.parent / "docs" / "kill.svg"
SEEN = ("lost", "repeated", "changed")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 280, 56, 14, 34, 44
# Light and dark pages show it alike: the picture brings its own paper.
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.grid{stroke:#e3e3e3;fill:none}.run{stroke:#0b6bcb;fill:none;"
    "stroke-width:2}.calm{stroke:#888;fill:none;stroke-width:1.5;stroke-dasharray:5 4}.kill{stroke:#c4001a;"
    "stroke-width:2}.red{fill:#c4001a;font-weight:600}"
)


def result_of(report: Mapping[str, Any], experts: int) -> dict[str, Any]:
    """What is kept of a report of `eaas load`.

    Raises:
        ValueError: it had no fault, or no reference beside it.
    """
    spans, found = report.get("chaos", {}).get("spans", ()), report["throughput"]
    if not spans or "verdict" not in report:
        raise ValueError("The report has no fault or no reference; run eaas load with --chaos and --reference.")
    stalls = report["chaos"]["windows"]["recoveries"][0]["stalls_s"] if report["chaos"].get("windows") else None
    return {
        "experts": experts,
        "step_s": found["step_s"],
        "tokens_per_s": [round(rate, 1) for rate in found["tokens_per_s"]],
        "calm_tokens_per_s": [round(rate, 1) for rate in found["reference_tokens_per_s"]],
        "fault": spans[0]["text"],
        "at_s": round(spans[0]["began_s"], 3),
        "arrivals_per_s": report["settings"].get("rate"),
        "requests": report["summary"]["requests"],
        "failed": report["summary"]["failed"],
        "compared": report["verdict"]["compared"],
        **{name: report["verdict"][name] for name in SEEN},
        "longest_stall_ms": None if stalls is None else round(1e3 * stalls["most"], 1),
    }


def nice_ticks(high: float, count: int = 5) -> list[float]:
    """Round numbers that cover [0, high)."""
    raw = max(high, 1e-12) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    return [n * step for n in range(math.floor(high / step + 1e-9) + 1)]


def _means(rates: Sequence[float], points: int) -> list[float]:
    whole = range(0, len(rates) - points + 1, points)
    return [sum(rates[at : at + points]) / points for at in whole]


def picture(row: Mapping[str, Any]) -> str:
    """The SVG of one recorded run."""
    # Means of a second: what is left is what a client could notice.
    points = max(1, round(1.0 / row["step_s"]))
    step_s = points * row["step_s"]
    rates, calm = (_means(row[name], points) for name in ("tokens_per_s", "calm_tokens_per_s"))
    end_s, top = len(rates) * step_s, max([*rates, *calm, 1.0]) * 1.08
    bottom = _HEIGHT - _BOTTOM

    def x(at_s: float) -> float:
        return _LEFT + at_s / end_s * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return bottom - rate / top * (bottom - _TOP)

    def line(values: Sequence[float], kind: str) -> str:
        points = "L".join(f"{x((n + 0.5) * step_s):.1f} {y(value):.1f}" for n, value in enumerate(values))
        return f'<path class="{kind}" d="M{points}"/>'

    parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>']
    for tick in nice_ticks(top, 4):
        parts.append(f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts += [
        f'<text x="{x(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g} s</text>'
        for tick in nice_ticks(end_s, 8)
    ]
    at = x(row["at_s"])
    parts += [
        f'<path class="kill" d="M{at:.1f} {_TOP - 6}V{bottom}"/>',
        f'<text class="red" x="{at + 5:.1f}" y="{_TOP - 10}">{escape(row["fault"])}</text>',
        line(calm, "calm"),
        line(rates, "run"),
        f'<text x="{_LEFT}" y="{_TOP - 10}">tokens per second</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">solid: with the kill; dashed: the same requests without it; '
        "each point is the mean of a second</text>",
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Tokens per second while an expert server is killed"><style>{_STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("report", type=Path, nargs="?", help="what eaas load --json wrote; none: draw again")
    options.add_argument("--experts", type=int, default=4, help="expert servers there were")
    given = options.parse_args()
    if given.report:
        record("kill", result_of(json.loads(given.report.read_text()), given.experts))
    PICTURE.write_text(picture(newest("kill", KILL)[-1]))
    print(PICTURE)


if __name__ == "__main__":
    main()
