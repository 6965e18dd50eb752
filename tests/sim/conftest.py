"""How long the fencing run is: make sim ARGS="--calls 1000000"."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--calls", type=int, default=None, help="expert calls of the fencing run, over many seeds")
    parser.addoption("--seed", type=int, default=1, help="the fencing run's first seed")
