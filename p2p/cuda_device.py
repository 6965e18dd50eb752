"""One GPU: shareable memory, pinned host memory, copies; by the driver alone.

A thread's current context is pushed for the length of a call and popped again, so that others who use the driver in
this process (torch) find theirs unchanged; the context is the device's primary one, the same as theirs, so addresses
are good for their kernels.

Copies run on a stream that does not wait for the process's other streams: a server's kernels may run for as long as
they like meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from p2p.cuda_driver import Access, AllocationProperties, CudaDriver, Location
from p2p.endpoint import P2PError

_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_POSIX_FD: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED: Final = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_REGISTERED: Final = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Device:
    """One GPU with its primary context retained. For use from any thread. Sizes and addresses are in bytes.

    The first one in a process takes 0.3 s and some hundred megabytes of the GPU.

    Args:
        ordinal: Which GPU, in the driver's order.

    Raises:
        P2PError: there is no such GPU, or one that cannot share its memory.
        CudaError: it cannot be used.
    """

    def __init__(self, driver: CudaDriver, ordinal: int) -> None:
        found = driver.devices()
        if not 0 <= ordinal < len(found):
            listed = ", ".join(map(str, found)) or "none"
            raise P2PError(
                f"GPU {ordinal} is asked for and {listed} found: see CUDA_VISIBLE_DEVICES and nvidia-smi."
            )
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
            self.granularity = self._granularity()
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

    def _properties(self, rdma: bool = False) -> AllocationProperties:
        return AllocationProperties(
            type=_PINNED,
            handle_types=_POSIX_FD,
            location=Location(_ON_DEVICE, self.facts.ordinal),
            rdma=int(rdma and self.facts.exports_rdma),
        )

    def _granularity(self) -> int:
        size, wanted = c_size_t(), self._properties()
        self._call(
            "Asking for its granularity", "cuMemGetAllocationGranularity", byref(size), wanted, _RECOMMENDED
        )
        return size.value

    def create(self, nbytes: int, *, rdma: bool = False) -> int:
        """Allocate memory that other processes can map: its handle, to be released. `rdma`: adapters may reach it."""
        handle = c_uint64()
        with self.current():
            self._call(
                f"Allocating {nbytes} bytes", "cuMemCreate", byref(handle), nbytes, self._properties(rdma), 0
            )
        return handle.value

    def export_fd(self, handle: int) -> int:
        """A file descriptor that stands for the allocation, the caller's to close."""
        fd = c_int(-1)
        with self.current():
            self._call("Sharing memory", "cuMemExportToShareableHandle", byref(fd), handle, _POSIX_FD, 0)
        os.set_inheritable(fd.value, False)
        return fd.value

    def import_fd(self, fd: int) -> int:
        """The handle of an allocation that another process shared, to be released; the fd stays the caller's."""
        handle = c_uint64()
        with self.current():
            self._call(
                "Taking shared memory",
                "cuMemImportFromShareableHandle",
                byref(handle),
                c_void_p(fd),
                _POSIX_FD,
            )
        return handle.value

    def release(self, handle: int) -> None:
        """Give a handle back; the memory goes when every handle, descriptor and mapping of it, anywhere, has."""
        with self.current():
            self._call("Releasing memory", "cuMemRelease", handle)

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses."""
        address = c_uint64()
        with self.current():
            self._call(
                f"Reserving {nbytes} bytes of addresses",
                "cuMemAddressReserve",
                byref(address),
                nbytes,
                0,
                0,
                0,
            )
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        """Give reserved addresses back, all of them."""
        with self.current():
            self._call("Freeing addresses", "cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map an allocation at reserved addresses; the driver refuses more bytes than it has."""
        with self.current():
            self._call(f"Mapping {nbytes} bytes", "cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap what was mapped there. A kernel that still uses it fails, and the process's context with it."""
        with self.current():
            self._call("Unmapping memory", "cuMemUnmap", address, nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        """Let this device's kernels read and write mapped memory, wherever it lies."""
        access = Access(Location(_ON_DEVICE, self.facts.ordinal), _READ_WRITE)
        with self.current():
            self._call("Opening mapped memory", "cuMemSetAccess", address, nbytes, access, 1)

    def register(self, host_address: int, nbytes: int) -> int:
        """Pin host memory, and let kernels use it: its address for them."""
        address = c_uint64()
        with self.current():
            self._call(f"Pinning {nbytes} bytes", "cuMemHostRegister_v2", host_address, nbytes, _REGISTERED)
            try:
                self._call(
                    "Mapping pinned bytes", "cuMemHostGetDevicePointer_v2", byref(address), host_address, 0
                )
            except BaseException:
                self.unregister(host_address)
                raise
        return address.value

    def unregister(self, host_address: int) -> None:
        """Unpin host memory."""
        with self.current():
            self._call("Unpinning bytes", "cuMemHostUnregister", host_address)

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy u8[n], contiguous, to the device; when this returns everyone who reads it there sees it."""
        with self.current():
            self._call(
                f"Writing {len(data)} bytes",
                "cuMemcpyHtoDAsync_v2",
                address,
                data.ctypes.data,
                len(data),
                self._stream,
            )
            self._call("Writing", "cuStreamSynchronize", self._stream)

    def read(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Copy from the device: u8[nbytes]."""
        data = np.empty(nbytes, dtype=np.uint8)
        with self.current():
            self._call(
                f"Reading {nbytes} bytes",
                "cuMemcpyDtoHAsync_v2",
                data.ctypes.data,
                address,
                nbytes,
                self._stream,
            )
            self._call("Reading", "cuStreamSynchronize", self._stream)
        return data

    def clear(self, address: int, nbytes: int) -> None:
        """Zero bytes on the device; done when this returns."""
        with self.current():
            self._call(f"Zeroing {nbytes} bytes", "cuMemsetD8Async", address, 0, nbytes, self._stream)
            self._call("Zeroing", "cuStreamSynchronize", self._stream)

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
