"""For all tests of the benchmarks: their commands are called within this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def sigterm_as_before() -> Iterator[None]:
    """A command ends its process at SIGTERM, which must not be left to the tests after it."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
