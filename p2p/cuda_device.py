"""One GPU and memory on it that processes share, pinned host memory, copies; by the driver alone.

A thread's current context is pushed for the length of a call and popped again, so that others who use the driver in
this process (torch) find theirs unchanged; the context is the device's primary one, the same as theirs, so addresses
are good for their kernels.

Copies run on a stream that does not wait for the process's other streams: a server's kernels may run for as long as
they like meanwhile.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from p2p.cuda_driver import Access, AllocationProperties, CudaDriver, Location
from p2p.endpoint import P2PError
from p2p.frame import load_signals
from p2p.memory import HostMemory

_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_POSIX_FD: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED: Final = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_REGISTERED: Final = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Device:
    """One GPU, by its place in the driver's order, with its primary context retained. For use from any thread.

    Sizes and addresses are in bytes. The first one in a process takes 0.3 s and some hundred megabytes of the GPU.

    Raises:
        P2PError: there is no such GPU, or one that cannot share its memory.
        CudaError: it cannot be used.
    """

    def __init__(self, driver: CudaDriver, ordinal: int) -> None:
        found = driver.devices()
        if not 0 <= ordinal < len(found):
            listed = ", ".join(map(str, found)) or "none"
            raise P2PError(f"GPU {ordinal} is asked for and {listed} found: see CUDA_VISIBLE_DEVICES and nvidia-smi.")
        self.facts = found[ordinal]
        if not self.facts.exports_fds:
            raise P2PError(
                f"{self.facts} cannot share its memory by file descriptors: use another GPU, or another transport."
            )
        # Made once: a UUID takes microseconds to print.
        self._where = f" on {self.facts}"
        self.driver = driver
        self._device = c_int()
        self._context = c_void_p()
        self._stream = c_void_p()
        self._open = False
        self._call("Looking it up", "cuDeviceGet", byref(self._device), ordinal)
        self._call("Making it ready", "cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._open = True
        try:
            with self.current():
                self._call("Making a stream", "cuStreamCreate", byref(self._stream), _NON_BLOCKING)
            size, doing = c_size_t(), "Asking for its granularity"
            self._call(doing, "cuMemGetAllocationGranularity", byref(size), self.properties(), _RECOMMENDED)
            self.granularity = size.value
        except BaseException:
            self.close()
            raise

    @property
    def context(self) -> int:
        """The primary context's handle, for native code."""
        return self._context.value or 0

    @property
    def stream(self) -> int:
        """The handle of the stream that copies run on, for native code."""
        return self._stream.value or 0

    def _call(self, doing: str, function: str, *arguments: Any) -> None:
        self.driver.call(doing + self._where, function, *arguments)

    def call(self, doing: str, function: str, *arguments: Any) -> None:
        """Call one of the driver's functions in this device's context.

        Raises:
            CudaError: it returned anything but success; the text begins with `doing`.
        """
        with self.current():
            self._call(doing, function, *arguments)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device's primary context the calling thread's, and restore the one before."""
        if not self._open:
            raise P2PError(f"{self.facts} was closed here; open it again.")
        with ExitStack() as leaving:
            self._call("Entering the context", "cuCtxPushCurrent_v2", self._context)
            leaving.callback(self._call, "Leaving the context", "cuCtxPopCurrent_v2", byref(c_void_p()))
            # Without it a call here would spoil the CUDA graph that another thread may just be capturing.
            mode, exchange = c_int(_RELAXED), "cuThreadExchangeStreamCaptureMode"
            self._call("Entering the context", exchange, byref(mode))
            leaving.callback(self._call, "Leaving the context", exchange, byref(mode))
            yield

    def properties(self, rdma: bool = False) -> AllocationProperties:
        """Of memory that other processes can map and, where the GPU lets them, adapters reach (`rdma`)."""
        return AllocationProperties(
            type=_PINNED,
            handle_types=_POSIX_FD,
            location=Location(_ON_DEVICE, self.facts.ordinal),
            rdma=int(rdma and self.facts.exports_rdma),
        )

    def register(self, host_address: int, nbytes: int) -> int:
        """Pin host memory, and let kernels use it: its address for them."""
        address = c_uint64()
        self.call(f"Pinning {nbytes} bytes", "cuMemHostRegister_v2", host_address, nbytes, _REGISTERED)
        try:
            self.call("Mapping pinned bytes", "cuMemHostGetDevicePointer_v2", byref(address), host_address, 0)
        except BaseException:
            self.unregister(host_address)
            raise
        return address.value

    def unregister(self, host_address: int) -> None:
        """Unpin host memory."""
        self.call("Unpinning bytes", "cuMemHostUnregister", host_address)

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy u8[n], contiguous, to the device; when this returns everyone who reads it there sees it."""
        self._copy(f"Writing {len(data)} bytes", "cuMemcpyHtoDAsync_v2", address, data.ctypes.data, len(data))

    def read(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Copy from the device: u8[nbytes]."""
        data = np.empty(nbytes, dtype=np.uint8)
        self._copy(f"Reading {nbytes} bytes", "cuMemcpyDtoHAsync_v2", data.ctypes.data, address, nbytes)
        return data

    def clear(self, address: int, nbytes: int) -> None:
        """Zero bytes on the device; done when this returns."""
        self._copy(f"Zeroing {nbytes} bytes", "cuMemsetD8Async", address, 0, nbytes)

    def _copy(self, doing: str, function: str, *arguments: Any) -> None:
        with self.current():
            self._call(doing, function, *arguments, self._stream)
            self._call(f"{doing}, to its end", "cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Let the device go; idempotent. Memory on it has to be closed before."""
        if not self._open:
            return
        try:
            if self._stream:
                with self.current():
                    self._call("Ending a stream", "cuStreamDestroy_v2", self._stream)
        finally:
            self._open = False
            self._call("Letting go", "cuDevicePrimaryCtxRelease_v2", self._device)


class DeviceMemory:
    """An allocation on a GPU, mapped at `address` for kernels of this process on that device.

    It outlives the process that made it for as long as another has it mapped. Stop what uses it before closing: a
    kernel that touches unmapped memory fails, and every later call of the process with it.

    Args:
        handle: Of the allocation; this object releases it.
        nbytes: Of the allocation, a multiple of the device's granularity.
    """

    def __init__(self, device: Device, handle: int, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self.address = 0
        self._handle: int | None = handle
        self._mapped = False
        address, access = c_uint64(), Access(Location(_ON_DEVICE, device.facts.ordinal), _READ_WRITE)
        try:
            doing = f"Reserving {nbytes} bytes of addresses"
            device.call(doing, "cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
            self.address = address.value
            device.call(f"Mapping {nbytes} bytes", "cuMemMap", self.address, nbytes, 0, handle, 0)
            self._mapped = True
            device.call("Opening mapped memory", "cuMemSetAccess", self.address, nbytes, access, 1)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, device: Device, nbytes: int, *, rdma: bool = False) -> DeviceMemory:
        """Allocate at least `nbytes` of zeros, rounded up to whole granules.

        Args:
            rdma: Whether network adapters are to reach it, where the GPU lets them.

        Raises:
            CudaError: the GPU has no memory left, or cannot share it.
        """
        whole_bytes = -(-nbytes // device.granularity) * device.granularity
        handle, doing = c_uint64(), f"Allocating {whole_bytes} bytes"
        device.call(doing, "cuMemCreate", byref(handle), whole_bytes, device.properties(rdma), 0)
        memory = cls(device, handle.value, whole_bytes)
        try:
            # The driver promises nothing about what was there before.
            device.clear(memory.address, whole_bytes)
        except BaseException:
            memory.close()
            raise
        return memory

    @classmethod
    def receive(cls, device: Device, fd: int, nbytes: int) -> DeviceMemory:
        """Map an allocation that another process shared.

        Args:
            fd: From its `export_fd`; it stays the caller's.
            nbytes: What the other calls its size: the driver refuses to map more than there is.

        Raises:
            ValueError: nbytes is no multiple of the granularity here.
            CudaError: it is no shared memory, is smaller, or out of this GPU's reach.
        """
        if nbytes < 1 or nbytes % device.granularity:
            raise ValueError(f"{nbytes} bytes shared; a positive multiple of {device.granularity} is needed.")
        handle, function = c_uint64(), "cuMemImportFromShareableHandle"
        device.call("Taking shared memory", function, byref(handle), c_void_p(fd), _POSIX_FD)
        return cls(device, handle.value, nbytes)

    def export_fd(self) -> int:
        """A file descriptor to hand to another process, the caller's to close; it keeps the memory alive."""
        if self._handle is None:
            raise ValueError("this device memory was closed; create another.")
        fd = c_int(-1)
        self.device.call("Sharing memory", "cuMemExportToShareableHandle", byref(fd), self._handle, _POSIX_FD, 0)
        os.set_inheritable(fd.value, False)
        return fd.value

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return self.device.read(self.address + offset, nbytes)

    def poll(self, offset: int, count: int, stride_bytes: int) -> NDArray[np.uint64]:
        return load_signals(self.read(offset, (count - 1) * stride_bytes + 8), 0, count, stride_bytes)

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        if len(data):
            self.device.write(self.address + offset, data)

    def store_signal(self, offset: int, value: int) -> None:
        # Each earlier write has ended on the device: a release. One word is one aligned copy.
        self.write(offset, np.array([value], dtype=np.uint64).view(np.uint8))

    def close(self) -> None:
        """Unmap and release; idempotent. Where a step fails, the rest can be tried again by another call."""
        if self._mapped:
            # A kernel that still uses it fails, and the process's context with it.
            self.device.call("Unmapping memory", "cuMemUnmap", self.address, self.nbytes)
            self._mapped = False
        if self.address:
            self.device.call("Freeing addresses", "cuMemAddressFree", self.address, self.nbytes)
            self.address = 0
        if self._handle is not None:
            # The memory goes when every handle, descriptor and mapping of it, anywhere, has.
            self.device.call("Releasing memory", "cuMemRelease", self._handle)
            self._handle = None


class PinnedMemory(HostMemory):
    """Host memory that kernels read and write at `device_address`."""

    def __init__(self, device: Device, nbytes: int) -> None:
        # Shared, so that a fork leaves these very pages to this process.
        super().__init__(mmap.mmap(-1, nbytes, flags=mmap.MAP_ANONYMOUS | mmap.MAP_SHARED))
        self._device = device
        self.device_address = device.register(self.address, nbytes)

    def close(self) -> None:
        """Unpin; idempotent. Kernels must use it no more."""
        if self.device_address:
            self._device.unregister(self.address)
            self.device_address = 0
        super().close()
