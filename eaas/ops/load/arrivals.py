"""When requests are sent: open loops by seed, closed loops, and the search for the highest rate that still keeps its
promise. Pure.

An open loop sends on time whatever the server does, as users do; a closed loop waits for an answer first, so that a
slow server gets less load and looks better than it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

OPEN = ("constant", "poisson", "gamma")
FORMS = "constant, poisson, gamma:SHAPE (below 1 is burstier than Poisson), closed:STREAMS or trace:FILE"
# No schedule is longer: a rate mistyped by a thousand must not fill the memory.
MOST_REQUESTS = 2_000_000


class ArrivalsInvalid(ValueError):
    """No such arrival process; the text says what was found and what is needed."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """An arrival process.

    Attributes:
        kind: One of OPEN, "closed" or "trace".
        shape: Of the gamma distribution of gaps; their coefficient of variation is shape ** -0.5.
        streams: Requests in flight in a closed loop.
        path: Of a trace.
    """

    kind: str
    shape: float = 1.0
    streams: int = 0
    path: str = ""


def read_arrivals(text: str) -> Arrivals:
    """An arrival process from its word.

    Raises:
        ArrivalsInvalid: no such word, or an option that makes no sense.
    """
    kind, _, option = text.partition(":")
    if kind in ("constant", "poisson") and not option:
        return Arrivals(kind=kind)
    if kind == "trace" and option:
        return Arrivals(kind=kind, path=option)
    if kind == "closed" and option.isdecimal() and 1 <= int(option) <= 10_000:
        return Arrivals(kind=kind, streams=int(option))
    if kind == "gamma":
        try:
            shape = float(option)
        except ValueError:
            shape = 0.0
        if 1e-3 <= shape <= 1e3:
            return Arrivals(kind=kind, shape=shape)
    raise ArrivalsInvalid(f"arrivals are {text!r}; give {FORMS}.")


def schedule(
    arrivals: Arrivals, rate: float, seed: int, *, for_s: float | None, requests: int | None
) -> list[float]:
    """When an open loop sends, in seconds since its start.

    Args:
        rate: Requests per second, in the mean.
        for_s: No request is planned at or after this. requests: nor are there more than so many. One of both is needed.

    Raises:
        ArrivalsInvalid: no open loop, no rate, or no end.
    """
    if arrivals.kind not in OPEN or not 0 < rate <= 1e5:
        raise ArrivalsInvalid(
            f"{arrivals.kind} arrivals at {rate:g} requests/s; an open loop ({', '.join(OPEN)}) needs a rate over 0 "
            f"and at most 100000."
        )
    if for_s is None and requests is None:
        raise ArrivalsInvalid("the load has no end; give a duration or a number of requests.")
    expected = rate * for_s if for_s is not None else float(requests or 0)
    count = min(expected, requests) if requests is not None else expected
    if count > MOST_REQUESTS:
        raise ArrivalsInvalid(f"{count:.0f} requests; at most {MOST_REQUESTS} are possible. Lower the rate.")
    times: list[float] = []
    rng = np.random.default_rng(seed)
    at_s = 0.0
    while requests is None or len(times) < requests:
        size = 1024
        if arrivals.kind == "constant":
            block = (len(times) + np.arange(size)) / rate
        else:
            shape = arrivals.shape if arrivals.kind == "gamma" else 1.0
            block = at_s + np.cumsum(rng.gamma(shape, 1.0 / (shape * rate), size))
            at_s = float(block[-1])
        times += block.tolist()
        if for_s is not None and times[-1] >= for_s:
            times = [time_s for time_s in times if time_s < for_s]
            break
    return times[:requests]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A rate that was tried, and whether the endpoint kept its promise at it."""

    rate: float
    kept: bool


def next_rate(points: Sequence[Point], start: float, closeness: float = 1.1) -> float | None:
    """The next rate to try in the search for the knee: doubled until the promise breaks, then bisected.

    Args:
        points: What was tried. start: The first rate.
        closeness: The search is over when the least rate that broke it is at most so many times the knee.

    Returns:
        Requests per second; None when the knee is known, or further from the start than a thousand times.
    """
    if not points:
        return start
    kept, broke = knee(points), min((p.rate for p in points if not p.kept), default=None)
    if broke is None:
        return kept * 2 if kept is not None and kept < start * 1000 else None
    if kept is None:
        return broke / 2 if broke > start / 1000 else None
    # The middle of the ratio: a rate is known to so many per cent.
    return (kept * broke) ** 0.5 if broke / kept > closeness else None


def knee(points: Sequence[Point]) -> float | None:
    """The highest rate kept below every rate that broke the promise; None: none was kept."""
    broke = min((p.rate for p in points if not p.kept), default=float("inf"))
    return max((p.rate for p in points if p.kept and p.rate < broke), default=None)
