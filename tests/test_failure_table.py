"""The failure table in docs/failures.md: each row names tests that inject its fault, and they are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "failures.md"
COLUMNS = ["Fault", "Noticed by, within", "What happens", "A client sees", "Injected by"]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> list[tuple[str, list[str]]]:
    """(part of the page, cells) of each row of each table."""
    found, part = [], ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("## "):
            part = line[3:]
        if line.startswith("| "):
            found.append((part, [cell.strip() for cell in line.strip("|").split("|")]))
    return found


@cache
def defined_in(name: str) -> frozenset[str]:
    path = ROOT / name
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


FAULTS = [(part, cells) for part, cells in rows() if cells != COLUMNS]


@pytest.mark.parametrize(("part", "cells"), FAULTS, ids=[f"{part}: {cells[0]}" for part, cells in FAULTS])
def test_every_fault_of_the_table_is_injected_by_a_test(part: str, cells: list[str]) -> None:
    assert len(cells) == len(COLUMNS), f"{part}: {cells[0]}: {len(cells)} cells, {len(COLUMNS)} needed"
    assert all(cells), f"{part}: {cells[0]} leaves a cell empty"
    named = NAMED.findall(cells[-1])
    assert named, f"{part}: {cells[0]} names no test as `tests/file.py::test_name`"
    assert len(named) == cells[-1].count("`") // 2, f"{part}: {cells[0]} names something else than tests"
    missing = [f"{name}::{test}" for name, test in named if test not in defined_in(name)]
    assert not missing, f"{part}: {cells[0]} names tests that are not there: {', '.join(missing)}"


def test_every_part_of_the_page_has_its_table() -> None:
    text = TABLE.read_text()
    heads = text.count("| " + " | ".join(COLUMNS) + " |")
    assert heads == len({part for part, _ in FAULTS})
