"""Compiles the native libraries: one plain shared object per package, bound by ctypes.

Each package keeps its C++ under `native/`. A file named `*.isa.cpp` is compiled once per instruction set, in a
namespace of its own, and the best one that the machine has is chosen at run time; so one build serves every host.

Where the machine has no C++ compiler, that of the Python package `ziglang` compiles; the libraries compute the
same bits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-ffp-contract=off", "-pthread")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = tuple(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16", "vnni", "vbmi"))
ISA_FLAGS: dict[str, tuple[str, ...]] = {"portable": (), "avx2": _AVX2, "avx512": (*_AVX512, *_AVX2)}


@dataclass(frozen=True, kw_only=True)
class Library:
    """One shared object: `package`/_`package`.so, linked against the libraries of lower layers.

    Attributes:
        formats: Modules of the package that describe formats: `python -m PACKAGE.NAME` prints what is built as
            native/build/NAME_format.h.
    """

    package: str
    links: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return ROOT / self.package / f"_{self.package}.so"


LIBRARIES = (
    Library(package="p2p"),
    Library(package="experts", links=("p2p",), formats=("wire",)),
    Library(package="eaas", links=("p2p", "experts")),
)


class BuildFailed(RuntimeError):
    """The compiler is missing or refused a file; the text holds its own words."""


def compiler() -> list[str]:
    """The C++ compiler to use: $CXX, else the first of g++, clang++, c++ on the PATH, else ziglang's.

    Raises:
        BuildFailed: there is none.
    """
    if named := shlex.split(os.environ.get("CXX", "")):
        return named
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang"):
        # Named, for by itself it compiles for this very processor, whatever the flags say, and for musl.
        return [sys.executable, "-m", "ziglang", "c++", "-target", f"{platform.machine()}-linux-{_libc()}"]
    raise BuildFailed(
        "No C++ compiler found: no $CXX, no g++, clang++ or c++ on the PATH, no Python package ziglang. The native code"
        " needs one. Install g++ 12 or later, or run `make setup`, which installs ziglang into .venv."
    )


def run_compiler(arguments: Sequence[str]) -> None:
    """Run the C++ compiler.

    Raises:
        BuildFailed: there is none, it cannot be run, or it refused a file.
    """
    _run([*compiler(), *arguments])


def _libc() -> str:
    """The C library of this machine, as zig names it: "gnu.2.36"."""
    name, version = platform.libc_ver()
    return f"gnu.{version}" if name == "glibc" else "musl"


def build(extra: Sequence[str] = (), only: Sequence[str] = ()) -> list[Path]:
    """Build every library whose sources changed.

    Args:
        extra: More compiler and linker flags, such as `-fsanitize=address`.
        only: Packages to build; all where empty.

    Returns:
        Paths of the libraries, built or already current.

    Raises:
        BuildFailed: no compiler, or it refused a file.
    """
    cxx = compiler()
    wanted = [library for library in LIBRARIES if not only or library.package in only]
    return [_build_library(cxx, library, tuple(extra)) for library in wanted]


def headers_digest(package: str, root: Path = ROOT) -> str:
    """Names a package's headers as they are, with those of lower layers and what describes its formats: its library
    holds that of those it was built from.
    """
    [library] = (library for library in LIBRARIES if library.package == package)
    digest = hashlib.sha256()
    for each in (*library.links, package):
        for header in sorted((root / each / "native").glob("*.h")):
            digest.update(header.read_bytes())
    for name in library.formats:
        digest.update((root / package / f"{name}.py").read_bytes())
    return digest.hexdigest()


def compile_objects(cxx: Sequence[str], library: Library, extra: Sequence[str], into: Path) -> tuple[list[Path], bool]:
    """Compile a package's sources into the folder `into`: the objects, and whether any had changed.

    Raises:
        BuildFailed: the compiler cannot be run, or refused a file.
    """
    isas = tuple(ISA_FLAGS) if platform.machine() == "x86_64" else ("portable",)
    native = ROOT / library.package / "native"
    into.mkdir(parents=True, exist_ok=True)
    headers = [
        path
        for package in (*library.links, library.package)
        for path in sorted((ROOT / package / "native").glob("*.h"))
    ]
    headers += [_write_format(library.package, name) for name in library.formats]
    flags = [*COMMON, *extra, "-I", str(ROOT), *(f"-DEAAS_HAVE_{name.upper()}=1" for name in isas)]
    flags.append(f'-DP2P_HEADERS="{headers_digest(library.package)}"')
    jobs = [
        _Object(
            source=source,
            target=into / f"{source.name}{'.' + isa if isa else ''}.o",
            command=[*cxx, *flags, *_isa_flags(isa), "-c", str(source)],
        )
        for source in sorted(native.glob("*.cpp"))
        for isa in (isas if source.name.endswith(".isa.cpp") else ("",))
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        fresh = list(pool.map(lambda job: job.compile(headers), jobs))
    return [job.target for job in jobs], any(fresh)


def _build_library(cxx: Sequence[str], library: Library, extra: tuple[str, ...]) -> Path:
    objects, fresh = compile_objects(cxx, library, extra, ROOT / library.package / "native" / "build")
    # Linked by path, found beside each other by rpath at run time.
    link = [*cxx, "-shared", "-pthread", *extra, *map(str, objects)]
    link += [str(ROOT / lower / f"_{lower}.so") for lower in library.links]
    link += [f"-Wl,-rpath,$ORIGIN/../{lower}" for lower in library.links]
    link += [f"-Wl,-soname,_{library.package}.so", "-Wl,-z,defs", "-o"]
    if fresh or not library.path.exists():
        # Linked beside and renamed over: a process that maps the old library keeps it whole.
        partial = library.path.with_suffix(f".{os.getpid()}.partial")
        _run([*link, str(partial)])
        partial.replace(library.path)
    return library.path


def _write_format(package: str, name: str) -> Path:
    """Bring the header of a format up to date with its description."""
    header = ROOT / package / "native" / "build" / f"{name}_format.h"
    text = _run([sys.executable, str(ROOT / package / f"{name}.py")])
    if not header.exists() or header.read_text() != text:
        header.parent.mkdir(parents=True, exist_ok=True)
        # Renamed over: whoever compiles beside this finds one or the other.
        partial = header.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(text)
        partial.replace(header)
    return header


def _isa_flags(isa: str) -> list[str]:
    return [*ISA_FLAGS[isa], f"-DEAAS_ISA_{isa.upper()}=1", f"-DEAAS_ISA_NS=isa_{isa}"] if isa else []


@dataclass(frozen=True, kw_only=True)
class _Object:
    """One object file: a source and the command that compiles it."""

    source: Path
    target: Path
    command: list[str]

    def compile(self, headers: Sequence[Path]) -> bool:
        """Compile unless a stamp says that sources and flags are unchanged; True when compiled."""
        digest = hashlib.sha256(repr(self.command).encode())
        for path in (self.source, *headers):
            digest.update(path.read_bytes())
        stamp = self.target.with_suffix(".stamp")
        if self.target.exists() and stamp.exists() and stamp.read_text() == digest.hexdigest():
            return False
        _run([*self.command, "-o", str(self.target)])
        stamp.write_text(digest.hexdigest())
        return True


def _run(command: list[str]) -> str:
    # ziglang builds its C++ library at first use, and keeps it here rather than in the home of whoever builds.
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(ROOT / "build" / "zig"), **os.environ}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    except OSError as error:
        raise BuildFailed(
            f"The C++ compiler {command[0]} cannot be run: {error}. Name another in CXX, or unset it."
        ) from error
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-4000:]}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)
    return done.stdout


if __name__ == "__main__":
    try:
        for library_path in build(only=sys.argv[1:]):
            print(library_path.relative_to(ROOT))
    except BuildFailed as failure:
        sys.exit(str(failure))
