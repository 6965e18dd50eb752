"""The native targets, built with all of p2p's and experts' native code under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from p2p import build as libraries
from p2p.build import COMMON, LIBRARIES, ROOT, BuildFailed, compile_objects, compiler

SOURCES = sorted(map(str, Path(__file__).parent.glob("*.cpp")))
SANITIZED = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fno-sanitize-recover=all",
    "-fsanitize=address,undefined",
)
# What judges bytes is counted for guidance, what multiplies numbers is not.
UNCOUNTED = "src:*/kernels*\nsrc:*.isa.cpp\nsrc:*/pack.cpp\nsrc:*/tests/*\n"


def clang() -> str | None:
    """A clang that brings libFuzzer; None where there is none."""
    for name in ("clang++", *(f"clang++-{version}" for version in range(21, 13, -1))):
        if found := shutil.which(name):
            asked = [found, "-print-file-name=libclang_rt.fuzzer-x86_64.a"]
            if Path(subprocess.run(asked, capture_output=True, text=True).stdout.strip()).is_absolute():
                return found
    return None


def build(folder: Path, cxx: str | None) -> Path:
    """Build the fuzzer in `folder`: guided by coverage with a clang, blind without (`cxx` None).

    Raises:
        BuildFailed: no compiler, or it refused a file.
    """
    guided, command = cxx is not None, [cxx] if cxx else compiler()
    compiling, linking = SANITIZED, ("-DFUZZ_BLINDLY",)
    if guided:
        folder.mkdir(parents=True, exist_ok=True)
        uncounted = folder / "uncounted.txt"
        uncounted.write_text(UNCOUNTED)
        compiling += ("-fsanitize=fuzzer-no-link", f"-fsanitize-coverage-ignorelist={uncounted}")
        linking = ("-fsanitize=fuzzer",)
    objects: list[str] = []
    for library in LIBRARIES[:2]:
        objects += map(
            str,
            compile_objects(command, library, compiling, folder / library.package / "native" / "build")[0],
        )
    program = folder / "build" / "native-fuzzer"
    program.parent.mkdir(exist_ok=True)
    flags = [*COMMON, *compiling, *linking, "-I", str(ROOT)]
    done = subprocess.run([*command, *flags, *SOURCES, *objects, "-o", str(program)], capture_output=True, text=True)
    if done.returncode:
        raise BuildFailed(done.stderr[-4000:])
    return program


def environment() -> dict[str, str]:
    """Of a fuzzer that runs in another folder."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1", "PYTHONPATH": path}


if __name__ == "__main__":
    # In a copy of this tree: its libraries and the blind fuzzer, from the same objects.
    try:
        libraries.build(SANITIZED)
        print(build(ROOT, None))
    except BuildFailed as failure:
        sys.exit(str(failure))
