"""Kernels interpreted by the oldest version of Triton that is served, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.recorder import ROOT

FOLDER = Path(sys.prefix) / "triton-3.6.0"


@pytest.mark.full(seconds=40)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["gate", "group", "inputs", "norm_rope"])
def test_kernels_pass_their_tests(name: str) -> None:
    if not (FOLDER / "triton").is_dir():
        pytest.skip(f"triton 3.6.0 needed, not found in {FOLDER}; make check installs it where an index has it")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/gpu/test_{name}.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
