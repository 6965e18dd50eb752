"""One Python target under atheris: python -m tests.fuzz.guided TARGET [libFuzzer's arguments]."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["p2p", "experts"]):
    from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()
