"""NVSHMEM's host side, for kernels with the transport "nvshmem" of p2p/device.py. **It has not run on a GPU.**

Nothing of the product chooses it: a group of PEs is fixed; membership changes only by beginning another on all of them.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Final

from p2p.endpoint import P2PError

UNIQUE_ID_BYTES: Final = 128
_INITIALIZED: Final = 2  # NVSHMEM_STATUS_IS_INITIALIZED
DEVICE_LIBRARIES: Final = ("libnvshmem_device_sm_90.bc", "libnvshmem_device.bc")


class NvshmemError(P2PError):
    """NVSHMEM is missing or refused something."""


def library(*names: str) -> Path:
    """The first of these that NVIDIA's wheel has, or NvshmemError; kernels are linked with DEVICE_LIBRARIES."""
    found = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvshmem")
    folders = (found and found.submodule_search_locations) or ()
    if there := [path for it in folders for name in names if (path := Path(it, "lib", name)).exists()]:
        return there[0]
    raise NvshmemError(f"{names[0]} needed, not found: pip install --no-deps nvidia-nvshmem-cu13.")


def unique_id() -> bytes:
    """The name of a new group, to be told to all its PEs."""
    identity = ctypes.create_string_buffer(UNIQUE_ID_BYTES)
    c_int.from_buffer(identity).value = (1 << 16) + UNIQUE_ID_BYTES
    _call("nvshmemx_get_uniqueid", identity)
    return identity.raw


class Group:
    """This process as PE `pe` of the `pes` of a group, on the GPU whose context is current, or NvshmemError."""

    def __init__(self, name: bytes, *, pe: int, pes: int) -> None:
        # The attributes point at it: it must last as long.
        identity = ctypes.create_string_buffer(name, UNIQUE_ID_BYTES)
        attributes = ctypes.create_string_buffer(144)
        for offset, nbytes in ((0, 144), (16, 128), (24, 24)):
            c_int.from_buffer(attributes, offset).value = (1 << 16) + nbytes
        _call("nvshmemx_set_attr_uniqueid_args", c_int(pe), c_int(pes), identity, attributes)
        _call("nvshmemx_hostlib_init_attr", c_int(1 << 3), attributes)  # by the unique id
        # Without a GPU some versions only join the group, and leave the rest to the first use.
        if (found := _loaded().nvshmemx_init_status()) < _INITIALIZED:
            raise NvshmemError(
                f"nvshmemx_hostlib_init_attr: status {found} found, {_INITIALIZED} needed: make a GPU current."
            )

    def allocate(self, nbytes: int) -> int:
        """The address of symmetric memory, of any content. Every PE allocates the same, in one order."""
        allocate = _loaded().nvshmem_malloc
        allocate.restype = c_void_p
        if not (address := allocate(c_size_t(nbytes))):
            raise NvshmemError(f"no {nbytes} bytes left in the symmetric heap; set NVSHMEM_SYMMETRIC_SIZE.")
        return address

    def register(self, module: int) -> None:
        """Let a loaded CUmodule's kernels put, before the first of them is launched."""
        _call("nvshmemx_cumodule_init", c_void_p(module))

    def close(self) -> None:
        """Leave, with all other PEs, once their kernels have ended; the symmetric memory is gone."""
        _loaded().nvshmemx_hostlib_finalize()


def _call(name: str, *arguments: object) -> None:
    if status := getattr(_loaded(), name)(*arguments):
        raise NvshmemError(f"{name}: status {status}; NVSHMEM_DEBUG=INFO tells why.")


def _loaded() -> ctypes.CDLL:
    return ctypes.CDLL(str(library("libnvshmem_host.so.3")))
