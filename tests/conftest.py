"""For all tests: what they have in common checks too, even where Python drops `assert`."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.shards import COLLECTED, parse_shard, shard_of

# Without a GPU the kernels' tests run in Triton's interpreter, which must be said before triton is imported; and what
# imports transformers, long before those tests are collected, imports it.
if not any(found for name in ("nvidia[0-9]*", "dxg") for found in Path("/dev").glob(name)):
    os.environ["TRITON_INTERPRET"] = "1"

# Clusters keep their journals and logs there, and nowhere in the home of whoever runs the tests.
os.environ["XDG_STATE_HOME"] = _STATE = tempfile.mkdtemp(prefix="eaas-tests-")
atexit.register(shutil.rmtree, _STATE, ignore_errors=True)

# pytest turns the asserts of test files into code of its own, which `python -O` keeps. Those of the worlds and judges
# beside them are turned too; without this they would vanish there, and `make test-optimized` would check little.
_PARTS = sorted({path.stem for path in Path(__file__).parent.iterdir()} - {"conftest", "shards", "__pycache__"})
pytest.register_assert_rewrite(*(f"tests.{part}" for part in _PARTS))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard",
        type=parse_shard,
        metavar="K/N",
        help="run the Kth of N shards, which take about equally long",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other shards."""
    config.stash[COLLECTED] = list(items)
    if shard := config.getoption("--shard"):
        items[:] = shard_of(items, *shard)
        kept = set(items)
        config.hook.pytest_deselected(items=[item for item in config.stash[COLLECTED] if item not in kept])


def pytest_collection_finish() -> None:
    """A full collection walks over all of torch and transformers and holds the interpreter's lock for long; the tests'
    fake workers and members, threads of this process, would fall silent meanwhile and be taken for lost. What imports
    made stays for ever, so no collection need look at it again: the gateway does likewise."""
    gc.collect()
    gc.freeze()


# What a process may take to end once its tests have.
_END_S = 60


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """A thread that a failed test left behind would keep the process for ever: it ends, saying where each thread is."""
    faulthandler.dump_traceback_later(_END_S, exit=True, file=sys.__stderr__)
