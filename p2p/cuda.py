"""The cuda transport: endpoints of one host and one user whose windows lie in device memory (links: see local.py).

GPU code writes a peer's window at `peer.address` and reads its own at `window.address`, with no CPU on the
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

import struct
import uuid
from collections.abc import Callable
from typing import ClassVar, Final

from p2p.cuda_device import Device, DeviceMemory
from p2p.cuda_driver import CudaDriver, CudaError
from p2p.descriptor import Descriptor, Transport
from p2p.endpoint import ConnectRefused, DescriptorInvalid
from p2p.local import RETIRED_LIMIT_BYTES, LocalEndpoint
from p2p.memory import Memory
from p2p.shm_link import SOCKET_BYTES

_PLACE: Final = struct.Struct("<16sQ")


class CudaEndpoint(LocalEndpoint):
    """One process's end of the cuda transport. Doorbells ring between host threads.

    Args:
        device: The GPU on which windows lie and whose kernels write to peers, in the driver's order.
        driver: Loaded already; where not given, the machine's own.

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

    def _allocate(self, nbytes: int) -> tuple[Memory, int, bytes]:
        memory = DeviceMemory.create(self.device, nbytes)
        try:
            return memory, memory.export_fd(), _PLACE.pack(self.device.facts.uuid.bytes, memory.nbytes)
        except BaseException:
            memory.close()
            raise

    def _mapper(self, offer: Descriptor) -> Callable[[int], Memory]:
        owner, held_bytes = _place_of(offer)

        def map_window(fd: int) -> Memory:
            try:
                return DeviceMemory.receive(self.device, fd, held_bytes)
            except (CudaError, ValueError) as error:
                raise ConnectRefused(
                    f"{offer.name}'s window on GPU-{owner} cannot be mapped on {self.device.facts}: {error}"
                ) from error

        return map_window

    def close(self) -> None:
        """Leave nothing behind; idempotent. Stop kernels that use this endpoint's memory first."""
        try:
            super().close()
        finally:
            self.device.close()


def _place_of(offer: Descriptor) -> tuple[uuid.UUID, int]:
    if len(offer.address) != SOCKET_BYTES + _PLACE.size:
        raise DescriptorInvalid(
            f"an address of {len(offer.address)} bytes found, {SOCKET_BYTES + _PLACE.size} needed; ask for a new one."
        )
    identity, held_bytes = _PLACE.unpack_from(offer.address, SOCKET_BYTES)
    if held_bytes < offer.nbytes:
        raise DescriptorInvalid(
            f"an allocation of {held_bytes} bytes for a window of {offer.nbytes}; ask for a new descriptor."
        )
    return uuid.UUID(bytes=identity), held_bytes
