"""The native library of this package, bound by ctypes. Its headers under native/ are the reference."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from p2p.endpoint import P2PError

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "p2p" / "_p2p.so"

P2P_E_MEMORY = -40  # api.h


# Of what headers name, all that ctypes does not call by its name. ExpertCall is a pointer to a function.
_OTHERS: dict[str, Any] = {"void": None, "ExpertCall": c_void_p}


class Declarations:
    """What headers declare, as ctypes takes it.

    Attributes:
        structures: By name; their fields are named and ordered as in the header.
    """

    def __init__(self, package: str, headers: str, structures: str = "") -> None:
        """Args: headers: names of those to read, of a package's native/. structures: names of those used."""
        texts = [(ROOT / package / "native" / f"{name}.h").read_text() for name in headers.split()]
        self._text = re.sub(r"//.*", "", "".join(texts))
        self.structures: dict[str, Any] = {}
        for name in structures.split():
            body = re.findall(rf"^struct {name} {{(.*?)^}};", self._text, re.DOTALL | re.MULTILINE)[0]
            # A pointer to a function is one to anything.
            body = re.sub(r"\w+ \(\*(\w+)\)\(.*?\);", r"void* \1;", body)
            declared = re.findall(r"(\w+\*?) ([\w, ]+);", body)
            fields = [(field, self._type(kind)) for kind, names in declared for field in names.split(", ")]
            self.structures[name] = type(name, (ctypes.Structure,), {"_fields_": fields})

    def functions(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Of each exported function by name: the type of its result, and those of its arguments."""
        declared = re.findall(r"P2P_API ([\w: ]+?\*?) (\w+)\(([^;]*)\);", self._text)
        return {
            name: (
                self._type(result),
                tuple(map(self._type, re.split(r",(?![^(]*\))", arguments))) if arguments != "void" else (),
            )
            for result, name, arguments in declared
        }

    def enumerated(self, name: str) -> list[str]:
        """The names of an enumeration whose values count from 0."""
        return re.findall(r"\w+", re.findall(rf"^enum {name} {{(.*?)}};", self._text, re.DOTALL | re.MULTILINE)[0])

    def numbered(self, prefix: str) -> dict[str, int]:
        """The constants whose names begin so, by the rest of their names."""
        found = re.findall(rf"\b{prefix}(\w+) = (-?\d+)", self._text)
        return {name: int(number) for name, number in found}

    def _type(self, text: str) -> Any:
        """Of a parameter, a field or a result: "const ServerLink* link". Arrays are passed by address: their users
        check shapes and strides first.
        """
        name = re.sub(r"const |struct ", "", text).strip()
        if name.startswith("char*") and name.count("*") == 1:
            return c_char_p
        if "(*" not in name and name.partition("*")[0] in self.structures:
            return ctypes.POINTER(self.structures[name.partition("*")[0]])
        if "*" in name or "[" in name:
            return c_void_p
        word = name.split()[0]
        return _OTHERS[word] if word in _OTHERS else getattr(ctypes, f"c_{word.removesuffix('_t')}")


class NativeMissing(P2PError):
    """The native library is not there; the text says how to build it."""


def open_library(
    path: Path,
    package: str,
    functions: Mapping[str, tuple[Any, tuple[Any, ...]]],
    *,
    keep_errno: bool = False,
    root: Path = ROOT,
) -> ctypes.CDLL:
    """Load a library that `p2p.build` makes and declare its functions; calls release the GIL.

    Args:
        package: Whose headers declare them.
        functions: By name, the type of what each returns and those of its arguments.
        keep_errno: Keep errno for ctypes.get_errno.
        root: Where the packages lie.

    Raises:
        NativeMissing: it has not been built, does not load, or was built from other headers.
    """
    if not path.exists():
        raise NativeMissing(f"{path} is missing. Run `make setup`, or `python -m p2p.build`.")
    try:
        library = ctypes.CDLL(str(path), use_errno=keep_errno)
    except OSError as error:
        raise NativeMissing(f"{path} does not load: {error}. Run `python -m p2p.build`.") from error
    # Before anything is called: another layout of a structure would end the process.
    built_from = getattr(library, f"{package}_headers", lambda: b"")
    built_from.restype = c_char_p
    # Here: `python -m p2p.build` would find itself imported otherwise.
    from p2p.build import headers_digest

    if built_from() != headers_digest(package, root).encode():
        raise NativeMissing(
            f"{path} was built from other headers than {root / package} has. Run `python -m p2p.build`."
        )
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


@cache
def load() -> ctypes.CDLL:
    """Load _p2p.so once and declare its functions; raises as `open_library`. Calls keep errno for ctypes.get_errno."""
    declared = Declarations("p2p", "frame window doorbell lanes faults monitor carrier nixl_library")
    return open_library(LIBRARY, "p2p", declared.functions(), keep_errno=True)


def named_cores(named: Sequence[int]) -> tuple[int, ...]:
    """Cores for lanes: those that were named, in that order; all that this process may use where none was.

    Raises:
        ValueError: a core twice, or one that this process may not use.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if set(named) - set(allowed) or len(set(named)) < len(named):
        text = ",".join(map(str, named))
        raise ValueError(f"--cores {text}: name each once, among those this process may use: {allowed}.")
    return tuple(named or allowed)
