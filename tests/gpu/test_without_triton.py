"""Where torch or triton is missing, each of these tests' modules is skipped, and says what it needs and found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = sorted(path.name for path in Path(__file__).parent.glob("test_*.py"))


@pytest.mark.parametrize(
    ("missing", "found"), [(("triton",), "torch"), (("torch",), "triton"), (("torch", "triton"), "neither")]
)
def test_every_module_is_skipped_and_says_why(missing: tuple[str, ...], found: str) -> None:
    hide = "".join(f"sys.modules[{name!r}] = None; " for name in missing)
    code = f"import sys; {hide}import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-q", "-rs", "-p", "no:cacheprovider", "tests/gpu"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, ended.stdout + ended.stderr
    line = f"SKIPPED [{len(HERE)}] tests/gpu/conftest.py"
    assert line in ended.stdout, ended.stdout
    assert f"needs torch and triton, found {found}; make setup installs both" in ended.stdout
    assert "error" not in ended.stdout
