"""The view-model: all that a view of the cluster shows at one moment, as plain frozen data, glyphs and words. Pure.

One side composes it (compose.py), JSON carries it, and every view draws it (the page beside this file, and `eaas top`):
none computes anything of its own. Rates are for each second, times are seconds since 1970 by the gateway's clock, and
None means that nothing was seen from which to tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eaas.gateway.status import RouterStatus
from eaas.worker.protocol import LayerView
from router.view import PoolSize

# Moods, from calm to alarming.
GOOD, INFO, WARN, BAD = "good", "info", "warn", "bad"

# Verdicts.
WHOLE, DEGRADED, DOWN = "whole", "degraded", "down"

# States of an expert server's column that no View has.
LOST = "lost"

# Marks of a cell of the heat map.
TAKEN_OVER, GAINED, GIVEN_UP = "taken-over", "gained", "given-up"

# Each has a glyph of its own, so that nothing is said by color alone.
MOOD_GLYPHS = {GOOD: "✓", INFO: "·", WARN: "▲", BAD: "✕"}
VERDICT_GLYPHS = {WHOLE: "●", DEGRADED: "▲", DOWN: "✕"}
STATE_GLYPHS = {"serving": "", "suspect": "?", "draining": "↓", "joining": "…", "warming": "…", LOST: "✕"}
MARK_GLYPHS = {"": "", TAKEN_OVER: "»", GAINED: "+", GIVEN_UP: "−"}


@dataclass(frozen=True)
class Reason:
    """Why the verdict is not "whole". do: what whoever reads it does about it."""

    mood: str
    text: str
    do: str = ""


@dataclass(frozen=True, kw_only=True)
class GatewayFacts:
    """What a gateway knows of itself.

    unready: why it can serve no request now; empty when it can. went_on: choices that went on at another attention
    worker, ever. eta_p50_s, eta_p90_s: what a request sent now is predicted to take.
    """

    name: str
    model: str
    version: str
    unready: str
    running: int
    waiting: int
    went_on: int
    ttft_target_s: float
    tpot_target_s: float
    eta_p50_s: float
    eta_p90_s: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Means over a window, and percentiles estimated from a histogram. window_s: how long it really was.

    good_per_s: choices that ended within the targets of TTFT and TPOT. failed: requests answered with a fault of the
    server's, in the window.
    """

    window_s: float = 0.0
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    ended_per_s: float = 0.0
    good_per_s: float = 0.0
    failed: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None


@dataclass(frozen=True)
class Figure:
    """One figure of the gateway, in words. more: what goes beside it, smaller."""

    name: str
    value: str
    more: str = ""
    mood: str = INFO


@dataclass(frozen=True, kw_only=True)
class Point:
    """One second of the past, for curves."""

    at_s: float
    tokens_per_s: float
    requests_per_s: float
    itl_p99_s: float | None


@dataclass(frozen=True, kw_only=True)
class Worker:
    """An attention worker. kv_use, busy: 0 to 1. tokens_per_s: computed, those of prompts too."""

    name: str
    state: str
    kv_use: float | None
    busy: float | None
    running: int
    waiting: int
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Server:
    """A column of the heat map, a cell for each layer.

    state: of the member, or "lost". held: experts of each layer that may be asked of it, or could until it was lost.
    rows: a second, of each layer. marks: what changed lately in each layer, mostly nothing. since_s: when it was lost;
    else None. gone_reason: why. replacement: who serves in its place; empty while nobody does.
    """

    name: str
    state: str
    experts: int
    rows_per_s: float
    busy: float | None
    held: tuple[int, ...]
    rows: tuple[float, ...]
    marks: tuple[str, ...]
    since_s: float | None = None
    gone_reason: str = ""
    replacement: str = ""


@dataclass(frozen=True, kw_only=True)
class Heat:
    """Layers by expert servers.

    hottest: rows a second that stand for full heat, of late. balance: the busiest server over the mean.
    """

    layers: int
    experts: int
    servers: tuple[Server, ...]
    hottest: float
    balance: float | None


@dataclass(frozen=True, kw_only=True)
class Happening:
    """One thing that happened. who: the member, or empty. kind: a word that does not change with the text."""

    at_s: float
    kind: str
    mood: str
    text: str
    who: str = ""


@dataclass(frozen=True, kw_only=True)
class _Inspecting:
    """How an inspection goes. taps: how many there are. fault: empty when all is well."""

    id: str
    taps: int
    produced: int
    delivered: int
    dropped: int
    fault: str


@dataclass(frozen=True, kw_only=True)
class InspectionShown(_Inspecting):
    """As workers say it, all together. layers: that have a gate."""

    layers: Sequence[LayerView]


@dataclass(frozen=True, kw_only=True)
class GateView:
    """How the gate of one MoE layer chooses.

    entropy: of its scores, 0 to 1, by windows of time, the newest last; None: nothing was recorded in it. drift: last
    quarter less the first. pairs: two experts and how often both were chosen, the oftenest first. experts: columns of
    the heat map. tokens: its rows, the commonest first: a text, and how often each of these experts was chosen for it.
    """

    layer: int
    entropy: tuple[float | None, ...]
    drift: float | None
    pairs: tuple[tuple[int, int, int], ...]
    experts: tuple[int, ...]
    tokens: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Inspection(_Inspecting):
    """The same for people."""

    layers: tuple[GateView, ...]


@dataclass(frozen=True, kw_only=True)
class Board:
    """Everything. happenings: newest first. as_of_s: when the router was last heard; None: never. facts: of the whole
    cluster, for one line. pools: those whose processes the router orders. models: names of all that can be shown."""

    at_s: float
    as_of_s: float | None
    verdict: str
    reasons: tuple[Reason, ...]
    facts: tuple[str, ...]
    epoch: int | None
    term: int | None
    routers: tuple[RouterStatus, ...]
    gateway: GatewayFacts
    rates: Rates
    figures: tuple[Figure, ...]
    past: tuple[Point, ...]
    pools: Mapping[str, PoolSize]
    workers: tuple[Worker, ...]
    heat: Heat
    happenings: tuple[Happening, ...]
    inspection: Inspection | None = None
    models: tuple[str, ...] = ()


def seconds(value: float | None) -> str:
    """A duration, such as 84 µs, 4.2 ms, 1.25 s or 3 min; a dash for None."""
    if value is None:
        return "–"
    if value >= 120:
        return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
    if value >= 0.9995:
        return f"{value:.3g} s"
    if value >= 0.9995e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.0f} µs"


def ago(value_s: float) -> str:
    """How long ago: just now, 3 s ago, 5 min ago."""
    return "just now" if value_s < 1 else f"{seconds(float(round(value_s)))} ago"


def number(value: float | None) -> str:
    """A figure, such as 0.4, 86, 2,310, 45.1k or 3.2M; a dash for None."""
    if value is None:
        return "–"
    if value >= 999_500:
        return f"{value / 1e6:.3g}M"
    if value >= 9_999.5:
        return f"{value / 1e3:.3g}k"
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}".removesuffix(".0")


def short(value: float) -> str:
    """A figure in at most four characters, such as 86, 2.3k, 45k or 3.2M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"


def share(value: float | None) -> str:
    """A share of 1 in percent; a dash for None."""
    return "–" if value is None else f"{100 * value:.0f}%"


def many(count: int, one: str) -> str:
    """A count with its noun: 1 server, 2 servers."""
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def visible(text: str) -> str:
    """The text of a token in at most 24 characters, all of which can be seen."""
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text).replace(" ", "␣")
    return shown if len(shown) <= 24 else f"{shown[:23]}…"


def listed(names: list[str]) -> str:
    """Names with commas; of more than four the first three and how many more."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
