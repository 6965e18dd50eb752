"""Memory of a GPU that processes share."""

from __future__ import annotations

from p2p.cuda_device import Device


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
        try:
            self.address = device.reserve(nbytes)
            device.map(self.address, nbytes, handle)
            self._mapped = True
            device.allow(self.address, nbytes)
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
        memory = cls(device, device.create(whole_bytes, rdma=rdma), whole_bytes)
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
        return cls(device, device.import_fd(fd), nbytes)

    def export_fd(self) -> int:
        """A file descriptor to hand to another process, the caller's to close; it keeps the memory alive."""
        if self._handle is None:
            raise ValueError("this device memory was closed; create another.")
        return self.device.export_fd(self._handle)

    def close(self) -> None:
        """Unmap and release; idempotent. Where a step fails, the rest can be tried again by another call."""
        if self._mapped:
            self.device.unmap(self.address, self.nbytes)
            self._mapped = False
        if self.address:
            self.device.free(self.address, self.nbytes)
            self.address = 0
        if self._handle is not None:
            self.device.release(self._handle)
            self._handle = None
