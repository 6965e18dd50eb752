"""The native library of this package, bound by ctypes as its headers under native/ declare it."""

from __future__ import annotations

import ctypes
import os
from ctypes import Structure
from functools import cache
from pathlib import Path
from typing import Any

from experts.model import SWIGLU, Activation
from p2p.native import Declarations, open_library

LIBRARY = Path(__file__).resolve().parent / "_experts.so"

_DECLARED = Declarations(
    "experts", "client server kernels waterfill", "ServerLink ServerStats ClientLink ServerCounters ExpertForm"
)
ServerLink, ServerStats, ClientLink, ServerCounters, ExpertForm = _DECLARED.structures.values()


def values_of(structure: Structure) -> dict[str, Any]:
    """The fields of a structure by name."""
    return {name: getattr(structure, name) for name, *_ in structure._fields_}


def form_of(activation: Activation, biased: bool) -> Any:
    """What experts compute beside their products, as native code takes it: nothing where that is SwiGLU alone."""
    if activation == SWIGLU and not biased:
        return None
    return ExpertForm(activation.alpha, activation.limit, activation.shift, biased)


class IsaUnavailable(RuntimeError):
    """EAAS_ISA names an instruction set that is unknown, or that this CPU or build lacks."""


@cache
def load() -> ctypes.CDLL:
    """Load _experts.so once, declare its functions, and apply EAAS_ISA.

    Raises:
        NativeMissing: as `open_library`.
        IsaUnavailable: EAAS_ISA asks for what this machine cannot run.
    """
    library = open_library(LIBRARY, "experts", _DECLARED.functions())
    if library.experts_isa_select(None) != 0:
        wanted, known = os.environ.get("EAAS_ISA", ""), ("portable", "avx2", "avx512")
        names = ", ".join(name for name in known if library.experts_isa_available(name.encode()))
        raise IsaUnavailable(f"EAAS_ISA is {wanted!r}; this machine can run {names}.")
    return library
