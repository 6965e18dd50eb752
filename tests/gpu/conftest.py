"""Kernels run in Triton's interpreter where torch can use no GPU.

Where there is none, tests/conftest.py has said so before triton was imported; here it is said of one that torch cannot
use.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

NEEDED = ("torch", "triton")
FOUND = [name for name in NEEDED if importlib.util.find_spec(name) is not None]
WHY = ""
if len(FOUND) < len(NEEDED):
    WHY = f"needs torch and triton, found {' and '.join(FOUND) or 'neither'}; make setup installs both"

if len(FOUND) == len(NEEDED):
    # Not before torch is known to be here.
    from tests.gpu.device import gpus

    if not gpus() and os.environ.get("TRITON_INTERPRET") != "1":
        if "triton" in sys.modules:
            WHY = (
                "needs triton's interpreter, found triton imported without: this machine has a GPU that torch cannot "
                "use. Run these tests with TRITON_INTERPRET=1 in the environment"
            )
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_itemcollected(item: pytest.Item) -> None:
    """The interpreter is slow: but for a few, `smoke`, the tests of kernels are for `make test-all` alone."""
    if not any(item.iter_markers("smoke")) and not any(item.iter_markers("full")):
        item.add_marker(pytest.mark.full(seconds=3))


class Left(pytest.Module):
    """A module that cannot be imported here: said, and not left out without a word."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(WHY, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip each module where what all of them need is missing."""
    return Left.from_parent(parent, path=module_path) if WHY else None
