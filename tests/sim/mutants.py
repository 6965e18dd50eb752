"""Native code with one check taken out, linked with the product's objects for all the rest."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from experts import native
from p2p import build

FLAGS = [*(flag for flag in build.COMMON if flag != "-O3"), "-O1", "-w", f"-I{build.ROOT}"]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One source, what it says, and what the mutant says instead."""

    source: str
    says: str
    instead: str

    def write(self, folder: Path) -> Path:
        """The mutated source."""
        text = (build.ROOT / self.source).read_text()
        found = text.count(self.says)
        if found != 1:
            raise AssertionError(f"{self.source} says {self.says!r} {found} times; the mutant needs it once.")
        path = folder / Path(self.source).name
        path.write_text(text.replace(self.says, self.instead))
        return path

    def library(self, folder: Path) -> ctypes.CDLL:
        """p2p and experts in one library, this source of them mutated."""
        mutated = self.write(folder)
        objects = [
            str(built)
            for package in ("p2p", "experts")
            for source in (build.ROOT / package / "native").glob("*.cpp")
            if str(source.relative_to(build.ROOT)) != self.source
            for built in (source.parent / "build").glob(f"{source.name}.*o")
        ]
        library = folder / f"_{folder.name}.so"
        build.run_compiler([*FLAGS, "-shared", "-Wl,-Bsymbolic", str(mutated), *objects, "-o", str(library)])
        with patch.object(native, "LIBRARY", library):
            return native.load.__wrapped__()
