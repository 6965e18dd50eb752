"""The native library of this package, bound by ctypes."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any

from experts import backend
from experts.model import Activation
from p2p.native import open_library

LIBRARY = Path(__file__).resolve().parent / "_experts.so"


def _structure(record: type, **kinds: Any) -> Any:
    """The C structure of a dataclass: its fields in their order, uint64_t where `kinds` says nothing else."""
    fields = [(field.name, kinds.get(field.name, c_uint64)) for field in dataclasses.fields(record)]
    return type(record.__name__, (Structure,), {"_fields_": fields, "__doc__": record.__doc__})


def values_of(structure: Structure) -> dict[str, Any]:
    """The fields of a structure by name."""
    return {name: getattr(structure, name) for name, *_ in structure._fields_}


_WINDOWS: dict[str, Any] = {"tx": c_void_p, "rx": c_void_p, "bell_page": c_void_p, "slots": c_uint32}
# Of client.h and server.h.
ServerLink = _structure(backend.ServerLink, **_WINDOWS, liveness_fd=c_int32, lane=c_uint32, lanes=c_uint32)
ClientLink = _structure(backend.ClientLink, **_WINDOWS, client_lanes=c_uint32, bell_lanes=c_uint32)
ServerStats = _structure(backend.ServerStats, speed=c_double)
ServerCounters = _structure(backend.ServerCounters)


class ExpertForm(Structure):
    """What experts compute beside their products (kernels.h)."""

    _fields_ = (("alpha", c_float), ("limit", c_float), ("shift", c_float), ("biased", c_uint32))

    @classmethod
    def of(cls, activation: Activation, biased: bool) -> ExpertForm:
        """As native code takes it."""
        return cls(activation.alpha, activation.limit, activation.shift, biased)


class IsaUnavailable(RuntimeError):
    """EAAS_ISA names an instruction set that is unknown, or that this CPU or build lacks."""


_PRODUCT = (
    c_int,
    c_void_p,
    c_uint32,
    c_uint32,
    c_void_p,
    c_uint64,
    c_uint32,
    c_void_p,
    c_uint64,
    c_uint32,
    c_uint32,
)
_CALL = (c_void_p, c_uint32, c_void_p, c_uint32, c_void_p, c_void_p, c_void_p, c_void_p)
# Arrays are passed by address: their users check shapes and strides first.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    # Of the p2p library, which this one is linked to.
    "p2p_window_init": (c_int, (c_void_p, c_uint64, c_uint64, c_uint32, c_uint64)),
    "experts_isa_select": (c_int, (c_char_p,)),
    "experts_isa_available": (c_int, (c_char_p,)),
    "experts_isa_name": (c_char_p, ()),
    "experts_numerics_class": (c_char_p, (c_int,)),
    "experts_pack_bytes": (c_uint64, (c_int, c_uint32, c_uint32)),
    "experts_gate_up_bytes": (c_uint64, (c_int, c_uint32, c_uint32)),
    "experts_pack_matrix": (None, (c_int, c_void_p, c_int, c_uint32, c_uint32, c_void_p)),
    "experts_pack_gate_up": (None, (c_int, c_void_p, c_void_p, c_int, c_uint32, c_uint32, c_void_p)),
    "experts_linear": (None, _PRODUCT),
    "experts_ffn_gate_up": (None, _PRODUCT),
    "experts_ffn_gate_up_formed": (None, (POINTER(ExpertForm), *_PRODUCT)),
    "experts_to_dtype": (None, (c_int, c_void_p, c_void_p, c_uint64)),
    "expert_client_new": (
        c_void_p,
        (*[c_uint32] * 4, c_int32, c_uint64, c_uint64, c_uint32, c_void_p, c_uint32),
    ),
    "expert_client_free": (None, (c_void_p,)),
    "expert_client_set_patience": (None, (c_void_p, c_uint64)),
    "expert_client_add_server": (c_int32, (c_void_p, POINTER(ServerLink))),
    "expert_client_remove_server": (None, (c_void_p, c_uint32)),
    "expert_client_server_idle": (c_int32, (c_void_p, c_uint32)),
    "expert_client_publish_routes": (c_int32, (c_void_p, c_uint64, c_void_p)),
    "expert_client_adopted_epoch": (c_uint64, (c_void_p,)),
    "expert_client_stats": (c_int32, (c_void_p, c_uint32, POINTER(ServerStats))),
    "expert_client_missing": (c_uint32, (c_void_p, c_void_p, c_uint32)),
    "expert_client_take_routed": (None, (c_void_p, c_void_p, c_void_p)),
    "expert_exchange": (c_int32, (*_CALL, c_uint64)),
    "expert_client_begin": (c_int32, (*_CALL, c_uint64, c_uint64)),
    "expert_client_step": (c_int32, (c_void_p, c_uint64)),
    "expert_waterfill": (c_int32, (c_uint32, c_void_p, c_void_p, c_void_p, c_double, c_uint32, c_void_p)),
    "expert_weigh": (c_int32, (c_uint32, c_void_p, c_void_p)),
    "expert_server_new": (
        c_void_p,
        (*[c_uint32] * 5, c_int32, c_uint64, c_uint64, c_uint32, c_void_p, c_void_p, c_uint64),
    ),
    "expert_server_free": (None, (c_void_p,)),
    "expert_server_stop": (None, (c_void_p,)),
    "expert_server_add_client": (c_int32, (c_void_p, POINTER(ClientLink))),
    "expert_server_remove_client": (None, (c_void_p, c_uint32)),
    "expert_server_set_expert": (c_int32, (c_void_p, c_uint32, c_uint32, c_void_p, c_void_p)),
    "expert_server_clear_expert": (None, (c_void_p, c_uint32, c_uint32)),
    "expert_server_set_form": (None, (c_void_p, POINTER(ExpertForm))),
    "expert_server_set_lease": (None, (c_void_p, c_uint64)),
    "expert_server_counters": (None, (c_void_p, POINTER(ServerCounters))),
    "expert_server_take_doubtful": (c_int64, (c_void_p,)),
    "expert_server_run": (c_int32, (c_void_p, c_uint64)),
    "expert_server_step": (c_int32, (c_void_p, c_uint64)),
}


@cache
def load() -> ctypes.CDLL:
    """Load _experts.so once, declare its functions, and apply EAAS_ISA.

    Raises:
        NativeMissing: it has not been built, does not load, or is older than this file.
        IsaUnavailable: EAAS_ISA asks for what this machine cannot run.
    """
    library = open_library(LIBRARY, _FUNCTIONS)
    _apply_isa(library)
    return library


def _apply_isa(library: ctypes.CDLL) -> None:
    if library.experts_isa_select(None) == 0:
        return
    wanted = os.environ.get("EAAS_ISA", "")
    names = [name for name in ("portable", "avx2", "avx512") if library.experts_isa_available(name.encode())]
    raise IsaUnavailable(f"EAAS_ISA is {wanted!r}; this machine can run {', '.join(names)}.")
