"""NIXL's library where it is installed, and the native half of the nixl transport (native/carrier.h), bound by ctypes.

With it what goes in and comes out there: what each rail has done, the GPU on which windows lie.
The package nixl-cu13 is looked up, never imported: its Python part and its build against CUDA are not needed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import socket
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from p2p import native
from p2p.cuda_device import Device
from p2p.cuda_driver import Attribute
from p2p.endpoint import P2PError

PACKAGE: Final = "nixl_cu13"
ERROR_BYTES: Final = 512
LINK_ADDRESS_BYTES: Final = 16384
GPU_MEMORY: Final = 1  # NIXL's VRAM
_ORDERED: Final = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
_FLUSHED_BY_HOST: Final = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST

_INSTALL: Final = (
    "Install it with `pip install --no-deps nixl-cu13` (after the CPU build of torch, where torch is used)"
)
# By these the kernel of a frozen peer writes to our memory later, whatever this side has closed.
UNFENCED: Final = frozenset({"cma", "knem", "xpmem"})
# And by this its GPU to ours.
UNFENCED_GPU: Final = UNFENCED | {"cuda_ipc"}
_UNFENCED_BY: Final = {
    "all": UNFENCED_GPU,
    "cuda": frozenset({"cuda_ipc"}),
    "sm": UNFENCED,
    "shm": UNFENCED,
    "mm": frozenset({"xpmem"}),
}
_INFINIBAND: Final = Path("/sys/class/infiniband")


class NixlMissing(P2PError):
    """The nixl transport cannot be used in this environment; the text says why and what to install."""


ChannelCounts = native.Declarations("p2p", "channel", "P2pChannelCounts").structures["P2pChannelCounts"]


class RailCounts(NamedTuple):
    """What one rail of a peer has done, and does: P2pPathCounts of native/channel.h."""

    live: bool
    bytes_per_s: int
    sent_bytes: int


_GPU = native.Declarations("p2p", "gpu", "P2pGpu").structures["P2pGpu"]


def gpu_of(device: Device) -> ctypes.Structure:
    """What native code needs to copy to a device; the device has to outlive it.

    Raises:
        P2PError: kernels there would not see what adapters write in order, and nothing can be done about it.
    """
    driver, ordinal = device.driver, device.facts.ordinal
    entries = {
        "push": "cuCtxPushCurrent_v2",
        "pop": "cuCtxPopCurrent_v2",
        "exchange_mode": "cuThreadExchangeStreamCaptureMode",
        "to_device": "cuMemcpyHtoDAsync_v2",
        "from_device": "cuMemcpyDtoHAsync_v2",
        "synchronize": "cuStreamSynchronize",
    }
    reached = driver.attribute(ordinal, Attribute.RDMA)
    if reached and driver.attribute(ordinal, Attribute.RDMA_ORDERING) < _ORDERED:
        if not driver.attribute(ordinal, Attribute.RDMA_FLUSH) & _FLUSHED_BY_HOST:
            raise P2PError(
                f"{device.facts} neither orders nor flushes what network adapters write to it: use nixl without a GPU."
            )
        entries["flush"] = "cuFlushGPUDirectRDMAWrites"
    return _GPU(
        context=device.context,
        stream=device.stream,
        kind=GPU_MEMORY,
        device=ordinal,
        **{name: driver.entry(function) for name, function in entries.items()},
    )


def find_library() -> Path:
    """Where the package keeps NIXL's C interface.

    Raises:
        NixlMissing: the package is not installed, or is laid out in another way.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise NixlMissing(f"Package nixl-cu13 is needed for the nixl transport and not found. {_INSTALL}.")
    library = Path(spec.origin).parents[1] / f".{PACKAGE}.mesonpy.libs" / "libnixl_capi.so"
    if not library.exists():
        raise NixlMissing(f"{library} is needed and not found. {_INSTALL}; 1.5.1 is known to work.")
    return library


@cache
def load() -> ctypes.CDLL:
    """Load NIXL. 0.2 s the first time; calls release the GIL.

    Raises:
        NixlMissing: there is no NIXL, or one whose C interface differs.
        NativeMissing: this package's own library is not built.
        P2PError: UCX_TLS allows transports that no closing of a window stops.
    """
    check_transports(os.environ.get("UCX_TLS"))
    library = native.load()
    error = ctypes.create_string_buffer(ERROR_BYTES)
    if library.p2p_nixl_load(bytes(find_library()), error, ERROR_BYTES) != 0:
        reason = error.value.decode(errors="replace")
        raise NixlMissing(
            f"NIXL does not load: {reason}. Version 1.5.1 is needed. {_INSTALL.replace('13`', '13==1.5.1`')}."
        )
    return library


def check_transports(chosen: str | None, unfenced: frozenset[str] = UNFENCED) -> None:
    """Refuse a value of UCX_TLS that allows unfenced transports; without one this package forbids them.

    Args:
        unfenced: Which those are: UNFENCED_GPU where windows lie on a GPU.

    Raises:
        P2PError: it allows some.
    """
    if chosen is None:
        return
    listed = chosen.strip().removeprefix("^").split(",")
    # As UCX reads them: `\name` is that name alone, `name:aux` its auxiliary use.
    names = [name.strip().removeprefix("\\").partition(":")[0] for name in listed]
    meant = unfenced & frozenset[str]().union(*(_UNFENCED_BY.get(name, {name}) for name in names))
    allowed = unfenced - meant if chosen.strip().startswith("^") else meant
    if allowed:
        raise P2PError(
            f"UCX_TLS={chosen} found, which allows {', '.join(sorted(allowed))}: what peers write by them lands even "
            "after a window was closed. Forbid them with UCX_TLS=^cma,knem,xpmem,cuda_ipc, name others such as "
            "UCX_TLS=tcp, or unset it."
        )


def devices() -> list[str]:
    """What a rail can be called on this machine: network interfaces, and RDMA ports as UCX names them (`mlx5_0:1`)."""
    found = [name for _, name in socket.if_nameindex()]
    ports = sorted(_INFINIBAND.glob("*/ports/*")) if _INFINIBAND.is_dir() else []
    return found + [f"{port.parents[1].name}:{port.name}" for port in ports]


def check_rails(rails: tuple[str, ...]) -> None:
    """Refuse rails that this machine does not have; an empty name is UCX's own choice.

    Raises:
        P2PError: a rail is unknown.
        ValueError: none or more than 16 are named.
    """
    if not 1 <= len(rails) <= 16:
        raise ValueError(f"{len(rails)} rails named; 1 to 16 needed.")
    known = devices()
    for rail in rails:
        if rail and rail not in known:
            raise P2PError(f"rail {rail!r} is no device of this machine; it has {', '.join(known)}.")
