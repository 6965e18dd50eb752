"""The native library of this package, bound by ctypes as its headers under native/ declare it."""

from __future__ import annotations

import ctypes
import os
import re
from ctypes import POINTER, Structure
from functools import cache
from pathlib import Path
from typing import Any

from experts.model import Activation
from p2p.native import open_library

LIBRARY = Path(__file__).resolve().parent / "_experts.so"

_HEADERS = [LIBRARY.parent / "native" / f"{name}.h" for name in ("client", "server", "kernels", "waterfill")]
_DECLARED = re.sub(r"//.*", "", "".join(header.read_text() for header in _HEADERS))
_SCALARS: dict[str, Any] = {
    "void": None,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def _type(text: str) -> Any:
    """Of a parameter, a field or a result: "const ServerLink* link". Arrays are passed by address: their users check
    shapes and strides first.
    """
    name = re.sub(r"const |struct ", "", text).strip()
    if "(*" in name or name.startswith("void*"):
        return ctypes.c_void_p
    if name.startswith("char*"):
        return ctypes.c_char_p
    if name.partition("*")[0] in _STRUCTURES:
        return POINTER(_STRUCTURES[name.partition("*")[0]])
    return ctypes.c_void_p if "*" in name else _SCALARS[name.split()[0]]


def _structure(name: str) -> Any:
    """The structure of a header, its fields named and ordered as there."""
    body = re.findall(rf"^struct {name} {{(.*?)^}};", _DECLARED, re.DOTALL | re.MULTILINE)[0]
    declared = re.findall(r"(\w+\*?) ([\w, ]+);", body)
    fields = [(field, _type(kind)) for kind, names in declared for field in names.split(", ")]
    return type(name, (Structure,), {"_fields_": fields})


_STRUCTURES: dict[str, Any] = {}
for _name in ("ServerLink", "ServerStats", "ClientLink", "ServerCounters", "ExpertForm"):
    _STRUCTURES[_name] = _structure(_name)
ServerLink, ServerStats, ClientLink, ServerCounters, ExpertForm = _STRUCTURES.values()


def values_of(structure: Structure) -> dict[str, Any]:
    """The fields of a structure by name."""
    return {name: getattr(structure, name) for name, *_ in structure._fields_}


def form_of(activation: Activation, biased: bool) -> Any:
    """What experts compute beside their products, as native code takes it."""
    return ExpertForm(activation.alpha, activation.limit, activation.shift, biased)


class IsaUnavailable(RuntimeError):
    """EAAS_ISA names an instruction set that is unknown, or that this CPU or build lacks."""


def _functions() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Of each exported function by name: the type of its result, and those of its arguments."""
    declared = re.findall(r"P2P_API ([\w ]+?\*?) (\w+)\(([^;]*)\);", _DECLARED)
    return {
        name: (
            _type(result),
            tuple(map(_type, re.split(r",(?![^(]*\))", arguments))) if arguments != "void" else (),
        )
        for result, name, arguments in declared
    }


@cache
def load() -> ctypes.CDLL:
    """Load _experts.so once, declare its functions, and apply EAAS_ISA.

    Raises:
        NativeMissing: it has not been built, does not load, or was built from other headers.
        IsaUnavailable: EAAS_ISA asks for what this machine cannot run.
    """
    library = open_library(LIBRARY, "experts", _functions())
    if library.experts_isa_select(None) != 0:
        wanted, known = os.environ.get("EAAS_ISA", ""), ("portable", "avx2", "avx512")
        names = ", ".join(name for name in known if library.experts_isa_available(name.encode()))
        raise IsaUnavailable(f"EAAS_ISA is {wanted!r}; this machine can run {names}.")
    return library
