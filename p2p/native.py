"""The native library of this package, bound by ctypes. Its headers under native/ are the reference."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from p2p.endpoint import P2PError

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "p2p" / "_p2p.so"

P2P_E_MEMORY = -40  # api.h

LANE_FUNCTION = ctypes.CFUNCTYPE(None, c_void_p, c_uint32)


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


_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "p2p_checksum": (c_uint64, (c_void_p, c_void_p, c_uint64)),
    "p2p_frame_seal": (None, (c_void_p, c_void_p)),
    "p2p_frame_open": (c_int, (c_void_p, c_uint64, c_uint64, c_uint64, c_uint64, c_void_p, c_void_p)),
    "p2p_signal_store": (None, (c_void_p, c_uint64)),
    "p2p_signal_load": (c_uint64, (c_void_p,)),
    "p2p_signals_load": (None, (c_void_p, c_uint64, c_uint64, c_void_p)),
    "p2p_window_bytes": (c_uint64, (c_uint32, c_uint64)),
    "p2p_window_init": (c_int, (c_void_p, c_uint64, c_uint64, c_uint32, c_uint64)),
    "p2p_window_check": (c_int, (c_void_p, c_uint64, c_uint64, c_uint32, c_uint64)),
    "p2p_bell_init": (c_int, (c_void_p, c_uint64, c_uint32)),
    "p2p_bell_beat": (None, (c_void_p,)),
    "p2p_bell_heartbeat": (c_uint64, (c_void_p,)),
    "p2p_bell_ring": (None, (c_void_p, c_uint32)),
    "p2p_bell_read": (c_uint32, (c_void_p, c_uint32)),
    "p2p_bell_wait": (c_int, (c_void_p, c_uint32, c_uint32, c_uint64)),
    "p2p_bell_prepare": (c_uint32, (c_void_p, c_uint32)),
    "p2p_bell_sleep": (c_int, (c_void_p, c_uint32, c_uint32, c_uint64)),
    "p2p_bell_cancel": (None, (c_void_p, c_uint32)),
    "p2p_lanes_new": (c_void_p, (c_uint32, POINTER(c_int32))),
    "p2p_lanes_free": (None, (c_void_p,)),
    "p2p_lanes_run": (c_int, (c_void_p, LANE_FUNCTION, c_void_p)),
    "p2p_lanes_barrier": (None, (c_void_p, c_uint32)),
    "p2p_fault_arm": (c_int, (c_void_p, c_char_p, c_char_p)),
    "p2p_fault_disarm": (c_int, (c_uint64,)),
    "p2p_fault_link": (c_int, (c_void_p, c_char_p)),
    "p2p_fault_unlink": (None, (c_void_p,)),
    "p2p_fault_pass": (None, (c_char_p,)),
    "p2p_monitor_new": (c_void_p, (c_uint32,)),
    "p2p_monitor_free": (None, (c_void_p,)),
    "p2p_monitor_posted": (None, (c_void_p, c_uint64, c_uint64)),
    "p2p_monitor_completed": (None, (c_void_p, c_uint64, c_uint64, c_uint64)),
    "p2p_monitor_read": (None, (c_void_p, c_void_p)),
    "p2p_monitor_drain": (c_uint32, (c_void_p, c_void_p, c_uint32)),
}


@cache
def load() -> ctypes.CDLL:
    """Load _p2p.so once and declare its functions. Calls release the GIL and keep errno for ctypes.get_errno.

    Raises:
        NativeMissing: it has not been built, does not load, or was built from other headers.
    """
    return open_library(LIBRARY, "p2p", _FUNCTIONS, keep_errno=True)


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
