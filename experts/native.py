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


@cache
def load() -> ctypes.CDLL:
    """Load _experts.so once, declare its functions, and apply EAAS_ISA.

    Raises:
        NativeMissing: it has not been built, or does not load.
        IsaUnavailable: EAAS_ISA asks for what this machine cannot run.
    """
    library = open_library(LIBRARY)
    _declare_kernels(library)
    _declare_client(library)
    _declare_server(library)
    _apply_isa(library)
    return library


def _declare_kernels(library: ctypes.CDLL) -> None:
    library.experts_isa_select.argtypes = [c_char_p]
    library.experts_isa_select.restype = c_int
    library.experts_isa_available.argtypes = [c_char_p]
    library.experts_isa_available.restype = c_int
    library.experts_isa_name.argtypes = []
    library.experts_isa_name.restype = c_char_p
    library.experts_numerics_class.argtypes = [c_int]
    library.experts_numerics_class.restype = c_char_p
    library.experts_pack_bytes.argtypes = [c_int, c_uint32, c_uint32]
    library.experts_pack_bytes.restype = c_uint64
    library.experts_gate_up_bytes.argtypes = [c_int, c_uint32, c_uint32]
    library.experts_gate_up_bytes.restype = c_uint64
    matrix = [c_uint32, c_uint32, c_void_p]
    library.experts_pack_matrix.argtypes = [c_int, c_void_p, c_int, *matrix]
    library.experts_pack_matrix.restype = None
    library.experts_pack_gate_up.argtypes = [c_int, c_void_p, c_void_p, c_int, *matrix]
    library.experts_pack_gate_up.restype = None
    product = [c_int, c_void_p, c_uint32, c_uint32, c_void_p, c_uint64, c_uint32]
    tiles = [c_uint64, c_uint32, c_uint32]
    for name in ("experts_linear", "experts_ffn_down", "experts_ffn_gate_up"):
        function = getattr(library, name)
        # Arrays are passed by address: experts.kernels checks shapes and strides first.
        function.argtypes = [*product, c_void_p, *tiles]
        function.restype = None
    library.experts_ffn_gate_up_formed.argtypes = [POINTER(ExpertForm), *product, c_void_p, *tiles]
    library.experts_ffn_gate_up_formed.restype = None
    library.experts_to_dtype.argtypes = [c_int, c_void_p, c_void_p, c_uint64]
    library.experts_to_dtype.restype = None


def _declare_client(library: ctypes.CDLL) -> None:
    # Of the p2p library, which this one is linked to.
    library.p2p_window_init.argtypes = [c_void_p, c_uint64, c_uint64, c_uint32, c_uint64]
    library.p2p_window_init.restype = c_int
    library.expert_client_new.argtypes = [
        *[c_uint32] * 4,
        c_int32,
        c_uint64,
        c_uint64,
        c_uint32,
        c_void_p,
        c_uint32,
    ]
    library.expert_client_new.restype = c_void_p
    library.expert_client_free.argtypes = [c_void_p]
    library.expert_client_free.restype = None
    library.expert_client_set_patience.argtypes = [c_void_p, c_uint64]
    library.expert_client_set_patience.restype = None
    library.expert_client_add_server.argtypes = [c_void_p, POINTER(ServerLink)]
    library.expert_client_add_server.restype = c_int32
    library.expert_client_remove_server.argtypes = [c_void_p, c_uint32]
    library.expert_client_remove_server.restype = None
    library.expert_client_server_idle.argtypes = [c_void_p, c_uint32]
    library.expert_client_server_idle.restype = c_int32
    library.expert_client_publish_routes.argtypes = [c_void_p, c_uint64, c_void_p]
    library.expert_client_publish_routes.restype = c_int32
    library.expert_client_adopted_epoch.argtypes = [c_void_p]
    library.expert_client_adopted_epoch.restype = c_uint64
    library.expert_client_stats.argtypes = [c_void_p, c_uint32, POINTER(ServerStats)]
    library.expert_client_stats.restype = c_int32
    library.expert_client_missing.argtypes = [c_void_p, c_void_p, c_uint32]
    library.expert_client_missing.restype = c_uint32
    library.expert_client_take_routed.argtypes = [c_void_p, c_void_p, c_void_p]
    library.expert_client_take_routed.restype = None
    call = [c_void_p, c_uint32, c_void_p, c_uint32, c_void_p, c_void_p, c_void_p]
    library.expert_exchange.argtypes = [*call, c_void_p, c_uint64]
    library.expert_exchange.restype = c_int32
    library.expert_client_begin.argtypes = [*call, c_void_p, c_uint64, c_uint64]
    library.expert_client_begin.restype = c_int32
    library.expert_client_step.argtypes = [c_void_p, c_uint64]
    library.expert_waterfill.argtypes = [c_uint32, c_void_p, c_void_p, c_void_p, c_double, c_uint32, c_void_p]
    library.expert_waterfill.restype = c_int32
    library.expert_weigh.argtypes = [c_uint32, c_void_p, c_void_p]
    library.expert_weigh.restype = c_int32
    library.expert_client_step.restype = c_int32


def _declare_server(library: ctypes.CDLL) -> None:
    library.expert_server_new.argtypes = [
        *[c_uint32] * 5,
        c_int32,
        c_uint64,
        c_uint64,
        c_uint32,
        c_void_p,
        c_void_p,
        c_uint64,
    ]
    library.expert_server_new.restype = c_void_p
    library.expert_server_add_client.argtypes = [c_void_p, POINTER(ClientLink)]
    library.expert_server_add_client.restype = c_int32
    library.expert_server_set_expert.argtypes = [c_void_p, c_uint32, c_uint32, c_void_p, c_void_p]
    library.expert_server_set_expert.restype = c_int32
    library.expert_server_take_doubtful.argtypes = [c_void_p]
    library.expert_server_take_doubtful.restype = c_int64
    library.expert_server_run.argtypes = [c_void_p, c_uint64]
    library.expert_server_run.restype = c_int32
    library.expert_server_step.argtypes = [c_void_p, c_uint64]
    library.expert_server_step.restype = c_int32
    for name, more in (
        ("free", []),
        ("stop", []),
        ("remove_client", [c_uint32]),
        ("clear_expert", [c_uint32, c_uint32]),
        ("set_lease", [c_uint64]),
        ("set_form", [POINTER(ExpertForm)]),
        ("counters", [POINTER(ServerCounters)]),
    ):
        function = getattr(library, f"expert_server_{name}")
        function.argtypes = [c_void_p, *more]
        function.restype = None


def _apply_isa(library: ctypes.CDLL) -> None:
    if library.experts_isa_select(None) == 0:
        return
    wanted = os.environ.get("EAAS_ISA", "")
    names = [name for name in ("portable", "avx2", "avx512") if library.experts_isa_available(name.encode())]
    raise IsaUnavailable(f"EAAS_ISA is {wanted!r}; this machine can run {', '.join(names)}.")
