"""The native code's compiler: whichever there is, and where there is none a word on how to get one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from p2p import build


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH, empty; no CXX, and no ziglang."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    return tmp_path


def put(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_the_compiler_is_the_named_one_then_the_first_on_the_path_then_zigs(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name == "ziglang")
    monkeypatch.setattr(build.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-gnu.2.36"]
    assert build.compiler() == zig
    for name in ("c++", "clang++", "g++"):
        found = put(bare_machine, name)
        assert build.compiler() == [found]
    monkeypatch.setenv("CXX", "ccache clang++-19")
    assert build.compiler() == ["ccache", "clang++-19"]


def test_without_a_compiler_the_build_says_what_it_looked_for_and_what_to_install(bare_machine: Path) -> None:
    with pytest.raises(build.BuildFailed, match=r"no g\+\+, clang\+\+ or c\+\+ .* ziglang.*Install g\+\+"):
        build.build()


def test_a_compiler_that_cannot_be_run_ends_the_build_with_a_word() -> None:
    command = [sys.executable, str(build.ROOT / "p2p" / "build.py")]
    done = subprocess.run(command, env={"CXX": "/nothing/g++"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "/nothing/g++ cannot be run" in done.stderr
    assert "Traceback" not in done.stderr
