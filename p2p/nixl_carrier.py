"""The native half of a nixl endpoint, and who is inside it: it outlives every call, every link and their memory."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from p2p.cuda_device import Device
from p2p.endpoint import EndpointClosed
from p2p.memory import HostMemory, Memory


class Carrier:
    """A P2pCarrier (native/carrier.h) with its links.

    It knows nothing of the endpoint it belongs to, so that it can be freed when that one is collected.

    Args:
        handle: From p2p_carrier_new; this object frees it.
        device: Where its windows lie, if not in host memory; this object closes it.
        gpu: The same, as the carrier knows it.
    """

    def __init__(
        self,
        name: str,
        library: ctypes.CDLL,
        handle: int,
        page: HostMemory,
        device: Device | None,
        gpu: ctypes.Structure | None,
    ) -> None:
        self.lock = threading.RLock()
        self._idle = threading.Condition(self.lock)
        self._name = name
        self._library = library
        self._handle: int | None = handle
        self._page = page
        self._device = device
        self._gpu = gpu
        self._process = os.getpid()
        self._closing = self._abandoned = False
        self._calls = 0
        # Native code uses it until the link is closed, whatever became of its Python end.
        self._memory: dict[int, Memory] = {}

    def require_open(self) -> int:
        """The handle; hold the lock while it is used, or be inside `call`.

        Raises:
            EndpointClosed: it is closed, or being closed.
        """
        if self._closing or self._handle is None:
            raise EndpointClosed(f"endpoint {self._name} was closed; make a new one under a new incarnation.")
        return self._handle

    @contextmanager
    def call(self) -> Iterator[int]:
        """The handle, for a native call that may last: until its end the carrier is not freed.

        Raises:
            EndpointClosed: it is closed, or being closed.
        """
        with self.lock:
            handle = self.require_open()
            self._calls += 1
        try:
            yield handle
        finally:
            self._leave()

    def progress(self) -> None:
        """One round on this thread."""
        with self.lock:
            if self._handle is not None:
                self._library.p2p_carrier_progress(self._handle)

    def adopt(self, link: int, memory: Memory) -> None:
        """Keep a new link, inside `call`.

        Raises:
            EndpointClosed: the carrier is being closed; so is the link then.
        """
        with self.lock:
            if self._closing:
                self._library.p2p_link_close(link, 0)
            self.require_open()
            self._memory[link] = memory

    def close_link(self, link: int, bound_s: float) -> None:
        """Idempotent. The other's memory is let go when nothing can land there any more."""
        with self.lock:
            if link not in self._memory:
                return
            memory = self._memory.pop(link)
            self._calls += 1
        try:
            # Not under the lock: it may take as long as the network does.
            self._library.p2p_link_close(link, int(bound_s * 1e9))
            # Where nobody closed the endpoint, threads may still read what lies on this host: it goes when they do.
            if not self._abandoned or type(memory) is not HostMemory:
                memory.close()
        finally:
            self._leave()

    def stop(self) -> None:
        """Refuse new calls; those that wait for a peer give up."""
        with self.lock:
            self._closing = True
            if self._handle is not None:
                self._library.p2p_carrier_leave(self._handle)

    def close(self, bound_s: float) -> None:
        """Close what links are left, wait for every call and free; idempotent."""
        self.stop()
        for link in list(self._memory):
            self.close_link(link, bound_s)
        with self.lock:
            self._idle.wait_for(lambda: not self._calls)
            handle, self._handle = self._handle, None
        if handle is not None:
            self._library.p2p_carrier_free(handle)
        if handle is not None and self._device is not None:
            self._device.close()

    def abandon(self) -> None:
        """For an endpoint that nobody closed: its threads must not outlive its memory."""
        # A fork has none of the threads that closing waits for.
        if os.getpid() == self._process:
            self._abandoned = True
            self.close(0.0)

    def _leave(self) -> None:
        with self.lock:
            self._calls -= 1
            self._idle.notify_all()
