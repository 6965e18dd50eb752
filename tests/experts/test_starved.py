"""No exception of native code crosses to Python, where it would end the process: it is said, and life goes on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2p import nixl_native
from p2p.build import run_compiler
from tests.sim.mutants import FLAGS

pytestmark = [pytest.mark.alone, pytest.mark.full(seconds=3)]

ROOT = Path(__file__).parents[2]
NIXL = pytest.mark.skipif(
    importlib.util.find_spec(nixl_native.PACKAGE) is None, reason="needs package nixl-cu13, found none"
)


@pytest.fixture(scope="module")
def starve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("starve") / "starve.so"
    run_compiler([*FLAGS, "-shared", str(ROOT / "tests/experts/starve.cpp"), "-o", str(library)])
    return library


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("experts", {"routes", "step", "run", "sizes"}),
        ("faults", {"arm", "link"}),
        pytest.param("links", {"export", "connect", "put", "endpoint"}, marks=NIXL),
    ],
)
def test_native_code_without_memory_says_so_and_works_when_there_is_some(
    starve: Path, part: str, names: set[str]
) -> None:
    environment = os.environ | {"LD_PRELOAD": str(starve), "PYTHONPATH": str(ROOT), "UCX_NET_DEVICES": "lo"}
    command = [sys.executable, "-m", "tests.experts.starved", part]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    refused = {name: int(count) for name, count in (line.split() for line in done.stdout.splitlines())}
    assert refused.keys() == names, done.stdout
    assert all(refused.values()), f"nothing was refused: {refused}"
