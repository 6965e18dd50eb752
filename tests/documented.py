"""The table of docs/metrics.md, and the names of metrics in expressions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "metrics.md"
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
_WORDS = {
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "and",
    "or",
    "unless",
    "bool",
    "offset",
}


@dataclass(frozen=True, kw_only=True)
class Documented:
    """One row of the table."""

    name: str
    kind: str
    labels: tuple[str, ...]
    page: str
    meaning: str

    @property
    def series(self) -> tuple[str, ...]:
        """Names that its samples have."""
        return tuple(self.name + suffix for suffix in _SUFFIXES.get(self.kind, ("",)))


def table() -> list[Documented]:
    """Every row."""
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([^|]*) \| (\w+) \| (.*) \|$", DOCUMENT.read_text(), re.M)
    return [
        Documented(
            name=name, kind=kind, labels=tuple(labels.replace(" ", "").split(",")) if labels.strip() else (),
            page=page, meaning=meaning,
        )
        for name, kind, labels, page, meaning in rows
    ]  # fmt: skip


def names_in(expression: str) -> set[str]:
    """Names of metrics in a PromQL expression: whatever is no function, label, string, duration or word of it."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    found = re.findall(r"(?<![\w:.$])([a-zA-Z_:][\w:]*)(?!\s*\()\b", bare)
    return {name for name in found if name not in _WORDS}


def labels_in(expression: str) -> set[str]:
    """Names of labels that it selects or groups by."""
    selected = re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression)
    grouped = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expression)
    return {*selected, *(label.strip() for group in grouped for label in group.split(",") if label.strip())}
