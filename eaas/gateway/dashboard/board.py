"""The view-model: everything that a view of the cluster shows at one moment, as plain frozen data.

One side composes it (compose.py), JSON carries it, and every view draws it: none computes anything of its own.
Rates are for each second, times are seconds since 1970 by the gateway's clock, and None means that nothing was seen
from which to tell.
"""

from __future__ import annotations

from dataclasses import dataclass

# Moods, from calm to alarming.
GOOD, INFO, WARN, BAD = "good", "info", "warn", "bad"

# Verdicts.
WHOLE, DEGRADED, DOWN = "whole", "degraded", "down"

# States of an expert server's column that no View has.
LOST = "lost"

# Marks of a cell of the heat map.
TAKEN_OVER, GAINED, GIVEN_UP = "taken-over", "gained", "given-up"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why the verdict is not "whole". do: what whoever reads it does about it."""

    mood: str
    text: str
    do: str


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one gateway serves.

    good_per_s: choices that ended within the targets of TTFT and TPOT. failed: requests answered with a fault of the
    server's in the window. Latencies are estimated from a histogram over window_s. went_on: choices that went on at
    another attention worker, ever.
    """

    name: str
    ready: bool
    window_s: float
    requests_per_s: float
    tokens_per_s: float
    good_per_s: float
    ended_per_s: float
    failed: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    running: int
    waiting: int
    went_on: int
    uptime_s: float
    ttft_target_s: float
    tpot_target_s: float


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
class Pool:
    """A pool whose processes the router orders."""

    name: str
    wanted: int
    live: int
    starting: int
    draining: int
    held_up: str = ""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A column of the heat map, a cell for each layer.

    state: of the member, or "lost". held: experts of each layer that may be asked of it, or could until it was lost.
    rows: a second, of each layer. marks: what changed lately in each layer, mostly nothing. since_s: when it was lost;
    else None. gone_reason: why. heir: who serves in its place; empty while nobody does.
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
    heir: str = ""


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
class Router:
    """A router as the gateway last saw it: "serving", "standby" or "unreachable"."""

    name: str
    state: str


@dataclass(frozen=True, kw_only=True)
class Board:
    """Everything. happenings: newest first. as_of_s: when the router was last heard; None: never."""

    at_s: float
    as_of_s: float | None
    model: str
    version: str
    verdict: str
    reasons: tuple[Reason, ...]
    epoch: int | None
    term: int | None
    copies_least: int
    copies_wanted: int
    routers: tuple[Router, ...]
    traffic: Traffic
    past: tuple[Point, ...]
    pools: tuple[Pool, ...]
    workers: tuple[Worker, ...]
    heat: Heat
    happenings: tuple[Happening, ...]
