"""The example of the README runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_two_processes_of_the_readme_talk(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "p2p" / "README.md").read_text(), re.DOTALL)
    program = tmp_path / "example.py"
    program.write_text(example)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "b'hello'\n"), done.stderr
