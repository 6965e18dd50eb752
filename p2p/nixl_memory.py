"""What lies behind the nixl transport's windows and peers: host memory, device memory, or pinned host memory.

Windows on a GPU are device memory: adapters write there directly where they can, else the host copies, and the host
stores the signals, so kernels poll and read them as windows of the cuda transport. What goes out is an image in host
memory: on an endpoint with a GPU it is pinned, so that kernels write frames there and the transport's thread, which
watches the slots' signals, sends them. No kernel takes part in the network: that is what is meant by host-driven.
"""

from __future__ import annotations

import ctypes
import mmap
from ctypes import c_uint32, c_void_p
from typing import Final

import numpy as np
from numpy.typing import NDArray

from p2p.cuda_device import Device
from p2p.cuda_driver import Attribute
from p2p.device_memory import DeviceMemory
from p2p.endpoint import P2PError
from p2p.frame import load_signals

GPU_MEMORY: Final = 1  # NIXL's VRAM
_ORDERED: Final = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
_FLUSHED_BY_HOST: Final = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST


class HostMemory:
    """Memory of this process that adapters may write or read: a window, or the image of a peer's."""

    def __init__(self, nbytes: int, flags: int = mmap.MAP_PRIVATE) -> None:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_ANONYMOUS | flags)
        self.array = np.frombuffer(memory, dtype=np.uint8)
        # Asked for once: numpy takes microseconds to say it.
        self.address = int(self.array.ctypes.data)
        self.device_address = 0

    def poll(self, library: ctypes.CDLL, offset: int, count: int, stride_bytes: int) -> NDArray[np.uint64]:
        """Read signal words that lie inside, each an acquire: u64[count]."""
        words = (ctypes.c_uint64 * count)()
        library.p2p_signals_load(self.address + offset, stride_bytes, count, words)
        return np.ctypeslib.as_array(words)

    def close(self) -> None:
        """Let go. Views keep the memory: what Python code still holds stays readable."""


class PinnedMemory(HostMemory):
    """Host memory that kernels read and write at `device_address`."""

    def __init__(self, device: Device, nbytes: int) -> None:
        # Shared, so that a fork leaves these very pages to this process.
        super().__init__(nbytes, mmap.MAP_SHARED)
        self._device = device
        self.device_address = device.register(self.address, nbytes)

    def close(self) -> None:
        """Unpin; idempotent. Kernels must use it no more."""
        if self.device_address:
            self._device.unregister(self.address)
            self.device_address = 0


class DeviceWindow:
    """Device memory that a peer writes from afar."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._memory = DeviceMemory.create(device, nbytes, rdma=True)
        self._nbytes = nbytes
        self.address = self._memory.address

    @property
    def array(self) -> NDArray[np.uint8]:
        """A copy as it is now, u8[nbytes]."""
        return self._memory.device.read(self.address, self._nbytes)

    def poll(self, library: ctypes.CDLL, offset: int, count: int, stride_bytes: int) -> NDArray[np.uint64]:
        """Read signal words that lie inside: u64[count]."""
        span = self._memory.device.read(self.address + offset, (count - 1) * stride_bytes + 8)
        return load_signals(span, 0, count, stride_bytes)

    def close(self) -> None:
        """Free it; idempotent. Kernels must use it no more."""
        self._memory.close()


class Gpu(ctypes.Structure):
    """P2pGpu of native/gpu.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("push", "pop", "exchange_mode", "to_device", "from_device")),
        *((name, c_void_p) for name in ("synchronize", "flush", "context", "stream")),
        ("kind", c_uint32),
        ("device", c_uint32),
    )


def gpu_of(device: Device) -> Gpu:
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
    return Gpu(
        context=device.context,
        stream=device.stream,
        kind=GPU_MEMORY,
        device=ordinal,
        **{name: driver.entry(function) for name, function in entries.items()},
    )
