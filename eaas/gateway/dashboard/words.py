"""Figures and times for people, in few characters. Pure."""

from __future__ import annotations


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


def listed(names: list[str]) -> str:
    """Names with commas; of more than four the first three and how many more."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
