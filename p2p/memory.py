"""What lies behind the windows and peers of every transport: memory of this host, or of a GPU (cuda_device.py)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from p2p import native
from p2p.endpoint import EndpointClosed


class Memory(Protocol):
    """A range of memory. Offsets lie inside it: whoever calls has seen to that."""

    address: int  # for native code, or for kernels; 0 once it is closed
    nbytes: int  # allocated

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes, u8[nbytes]; a copy where the memory lies on a GPU."""
        ...

    def poll(self, offset: int, count: int, stride_bytes: int) -> NDArray[np.uint64]:
        """Read signal words, each an acquire: u64[count]."""
        ...

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Copy u8[n], contiguous, there."""
        ...

    def store_signal(self, offset: int, value: int) -> None:
        """A release: what was written before is seen by whoever sees the word."""
        ...

    def close(self) -> None:
        """Let go; idempotent. Native code and kernels must use it no more."""
        ...


class HostMemory:
    """Memory of this host that is mapped here."""

    device_address = 0

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._library = native.load()
        self.nbytes = len(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))

    @classmethod
    def allocate(cls, nbytes: int, flags: int = mmap.MAP_PRIVATE) -> HostMemory:
        """Zeros of this process alone."""
        return cls(mmap.mmap(-1, nbytes, flags=mmap.MAP_ANONYMOUS | flags))

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._mapping, np.uint8, nbytes, offset)

    def poll(self, offset: int, count: int, stride_bytes: int) -> NDArray[np.uint64]:
        words = (ctypes.c_uint64 * count)()
        self._library.p2p_signals_load(self._held(offset), stride_bytes, count, words)
        return np.ctypeslib.as_array(words)

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        self._mapping[offset : offset + len(data)] = data.data

    def store_signal(self, offset: int, value: int) -> None:
        self._library.p2p_signal_store(self._held(offset), value)

    def _held(self, offset: int) -> Any:
        """The bytes from there on. Whoever holds them keeps the mapping, so that another thread may close meanwhile.

        Raises:
            EndpointClosed: it is closed.
        """
        try:
            return ctypes.byref(ctypes.c_char.from_buffer(self._mapping, offset))
        except ValueError as error:
            raise EndpointClosed("this memory was closed.") from error

    def close(self) -> None:
        self.address = 0
        # Views keep the mapping: what Python code still holds stays readable.
        with contextlib.suppress(BufferError):
            self._mapping.close()
