"""The cuda transport: endpoints of one host and one user whose windows lie in device memory (links: see local.py).

GPU code writes a peer's window at `CudaPeer.address` and reads its own at `CudaWindow.address`, with no CPU on the
way: one GPU that two processes share, or GPUs of one node that reach each other (NVLink). What this module does from
the host, `put`, `signal`, `poll` and `memory`, goes by synchronous copies and is for set-up, tests and trials.

A window is an allocation of its own, in whole granules (2 MiB), shared by a POSIX file descriptor. It lives for as long
as either side has it mapped, so that kernels go on reading and writing safely after the other process was killed.

Sealed memfds do not exist for device memory; this takes their place. Nothing can resize an allocation once it is
made. How large one is cannot be asked of its file descriptor, but the driver refuses to map more than there is, and all
of it is mapped at once, before use: so an owner that lies about the size is refused in `connect`, and can do no more
than any owner or writer can, which is to write nonsense into that one window; readers copy before they check.

The address in a descriptor, beyond the 37 bytes of the socket's name, little-endian::

    offset  size  field
        37    16  UUID of the GPU that the window lies on
        53     8  bytes of the allocation

Kernels do not notice a window going away, they fail, and with them the context of their process. So take a window or
peer out of the device's tables, and let everything enqueued with the old tables end, before closing or disconnecting.
"""

from __future__ import annotations

import mmap
import socket
import struct
import uuid
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from p2p.cuda_device import Device
from p2p.cuda_driver import CudaDriver, CudaError
from p2p.descriptor import Descriptor, Transport
from p2p.device_memory import DeviceMemory
from p2p.endpoint import ConnectRefused, DescriptorInvalid
from p2p.frame import check_words, load_signals
from p2p.local import RETIRED_LIMIT_BYTES, SOCKET_PREFIX, LocalEndpoint, LocalPeer, LocalWindow
from p2p.shm_link import call

_SOCKET_BYTES: Final = len(SOCKET_PREFIX) + 32
_PLACE: Final = struct.Struct("<16sQ")


class CudaWindow(LocalWindow):
    """Device memory that one peer writes and this process's kernels read. Made by `CudaEndpoint.export_window`."""

    def __init__(
        self, endpoint: CudaEndpoint, offer: Descriptor, device_memory: DeviceMemory, fd: int
    ) -> None:
        super().__init__(endpoint, offer, fd)
        self._device_memory = device_memory

    @property
    def address(self) -> int:
        """Where the memory starts, for kernels of this process; the CPU cannot read it."""
        self._require_open()
        return self._device_memory.address

    @property
    def memory(self) -> NDArray[np.uint8]:
        """A copy of the memory as it is now, u8[nbytes]."""
        return self.read(0, self.nbytes)

    @property
    def held_bytes(self) -> int:
        return self._device_memory.nbytes

    @property
    def is_open(self) -> bool:
        return self._device_memory.address != 0

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """A copy of a part of the memory, u8[nbytes].

        Raises:
            ValueError: it does not lie in the window.
        """
        if offset < 0 or nbytes < 1 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} do not lie in a window of {self.nbytes}.")
        return self._device_memory.device.read(self.address + offset, nbytes)

    def poll(self, offset: int, count: int, stride_bytes: int = 8) -> NDArray[np.uint64]:
        """Read `count` signal words, the first at `offset`: u64[count]. What was put before them is there too.

        Raises:
            ValueError: a word would lie outside the window or off 8 bytes.
        """
        check_words(self.nbytes, offset, count, stride_bytes)
        return load_signals(self.read(offset, (count - 1) * stride_bytes + 8), 0, count, stride_bytes)

    def _let_go(self) -> None:
        self._device_memory.close()


class CudaPeer(LocalPeer):
    """Another endpoint's window, mapped for this process's kernels. Made by `CudaEndpoint.connect`."""

    def __init__(
        self, offer: Descriptor, link: socket.socket, device_memory: DeviceMemory, page: mmap.mmap
    ) -> None:
        super().__init__(offer, link, page)
        self._device_memory = device_memory

    @property
    def address(self) -> int:
        """Where the window starts, for kernels of this process; the CPU cannot write it."""
        self._require_open()
        return self._device_memory.address

    @property
    def is_open(self) -> bool:
        return self._device_memory.address != 0

    def _let_go(self) -> None:
        self._device_memory.close()


class CudaEndpoint(LocalEndpoint[CudaWindow, CudaPeer]):
    """One process's end of the cuda transport. A context manager; safe to use from several threads.

    Args:
        name: For logs and error messages, at most 255 bytes.
        incarnation: Of this process's life; a restarted process has another.
        lanes: Doorbells to offer, 1 to 63: they ring between host threads.
        device: The GPU on which windows lie and whose kernels write to peers, in the driver's order.
        driver: Loaded already; where not given, the machine's own.
        retired_limit_bytes: A peer that keeps more than this of closed windows mapped is refused new ones.

    Raises:
        CudaMissing: there is no driver.
        CudaError: the GPU is not there, or cannot share its memory.
    """

    transport: ClassVar[Transport] = Transport.CUDA

    def __init__(
        self,
        name: str,
        incarnation: int,
        lanes: int = 1,
        *,
        device: int = 0,
        driver: CudaDriver | None = None,
        retired_limit_bytes: int = RETIRED_LIMIT_BYTES,
    ) -> None:
        self.device: Device = Device(driver or CudaDriver.load(), device)
        try:
            super().__init__(name, incarnation, lanes, retired_limit_bytes=retired_limit_bytes)
        except BaseException:
            self.device.close()
            raise

    def _new_window(self, nbytes: int, incarnation: int) -> CudaWindow:
        memory = DeviceMemory.create(self.device, nbytes)
        try:
            place = _PLACE.pack(self.device.facts.uuid.bytes, memory.nbytes)
            offer = self._describe(nbytes, incarnation, place)
            return CudaWindow(self, offer, memory, memory.export_fd())
        except BaseException:
            memory.close()
            raise

    def _join(self, offer: Descriptor, timeout_s: float) -> CudaPeer:
        owner, held_bytes = _place_of(offer)

        def map_window(fd: int) -> DeviceMemory:
            try:
                return DeviceMemory.receive(self.device, fd, held_bytes)
            except (CudaError, ValueError) as error:
                raise ConnectRefused(
                    f"{offer.name}'s window on GPU-{owner} cannot be mapped on {self.device.facts}: {error}"
                ) from error

        address = offer.address[:_SOCKET_BYTES]
        return CudaPeer(offer, *call(offer, address, self.incarnation, timeout_s, map_window))

    def _store(self, peer: CudaPeer, offset: int, data: NDArray[np.uint8]) -> None:
        if len(data):
            self.device.write(peer.address + offset, data)

    def _store_signal(self, peer: CudaPeer, offset: int, value: int) -> None:
        # Each earlier put has ended on the device: a release. One word is one aligned copy.
        self.device.write(peer.address + offset, np.array([value], dtype=np.uint64).view(np.uint8))

    def close(self) -> None:
        """Leave nothing behind; idempotent. Stop kernels that use this endpoint's memory first."""
        try:
            super().close()
        finally:
            self.device.close()


def _place_of(offer: Descriptor) -> tuple[uuid.UUID, int]:
    if len(offer.address) != _SOCKET_BYTES + _PLACE.size:
        raise DescriptorInvalid(
            f"an address of {len(offer.address)} bytes found, {_SOCKET_BYTES + _PLACE.size} needed; ask for a new one."
        )
    identity, held_bytes = _PLACE.unpack_from(offer.address, _SOCKET_BYTES)
    if held_bytes < offer.nbytes:
        raise DescriptorInvalid(
            f"an allocation of {held_bytes} bytes for a window of {offer.nbytes}; ask for a new descriptor."
        )
    return uuid.UUID(bytes=identity), held_bytes
