"""Under `python -O` the tests still test, and the product still refuses what it must."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZED = {**os.environ, "PYTHONOPTIMIZE": "1"}


def test_asserts_of_tests_and_of_their_worlds_hold_under_o(tmp_path: Path) -> None:
    """A test run that dropped them would pass whatever the product does."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "shards.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests" / name)
    (tmp_path / "tests" / "world.py").write_text("def check(value):\n    assert value == 1\n")
    (tmp_path / "tests" / "test_it.py").write_text(
        "from tests.world import check\n\n\ndef test_here():\n    assert 1 == 2\n\n\n"
        "def test_there():\n    check(2)\n\n\n"
        "def test_that_asserts_are_off_elsewhere():\n    exec('assert False')\n    assert not __debug__\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={**OPTIMIZED, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "2 failed, 1 passed" in run.stdout, run.stdout + run.stderr


REFUSALS = {
    "descriptor": "from p2p.descriptor import decode; decode(b'x' * 200)",
    "frame": "from p2p.frame import open_frame; open_frame(bytes(4096), 1024, 1, 1, 1)",
    "keys": "from pathlib import Path; from eaas.gateway.keys import read_keys; read_keys(Path('/dev/null'))",
    "exposure": "from router.access import bound_address; bound_address('--host', '0.0.0.0', {'TLS': False})",
    "checkpoint": "from experts.checkpoint import Checkpoint; Checkpoint.open('/dev')",
    "config": "from pathlib import Path; from eaas.cluster.config import ClusterConfig; "
    "ClusterConfig(model=Path(), served_model_name='m', replicas=0)",
    "gateway": "from eaas.gateway.config import GatewayConfig; GatewayConfig(max_requests=0)",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_is_refused_stays_refused_under_o(what: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", REFUSALS[what]],
        env=OPTIMIZED,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    last = run.stderr.strip().splitlines()[-1]
    refusals = ("Invalid:", "Exposed:", "ValueError:", "NotFound:", "Failed:")
    assert any(word in last for word in refusals) and "AttributeError" not in last, last
