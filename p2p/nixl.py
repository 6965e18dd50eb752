"""The nixl transport: endpoints of different hosts, joined over UCX (RDMA, TCP) on one rail or several.

Bytes land in the owner's window by one-sided writes. What is put, and the frames that native code writes to
`Peer.address`, goes out of an image of the window on this side. A rail that fails costs nothing but its bandwidth:
see native/channel.h. Threads, connections and their ends are native/carrier.h's.

Windows on a GPU are device memory: adapters write there directly where they can, else the host copies, and the host
stores the signals, so kernels poll and read them as windows of the cuda transport. Images then are pinned, so that
kernels write frames there and the transport's thread, which watches the slots' signals, sends them. No kernel takes
part in the network: that is what is meant by host-driven.

UCX over TCP neither encrypts nor asks who writes to the memory of a process that it can reach: keep these rails on a
network of their own. The token keeps out peers that were not invited, not attackers on that network.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import ClassVar, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from p2p import nixl_native
from p2p.cuda_device import Device, DeviceMemory, PinnedMemory
from p2p.cuda_driver import CudaDriver
from p2p.descriptor import WINDOW_LIMIT_BYTES, Descriptor, Transport, decode
from p2p.endpoint import (
    CONNECT_S,
    ConnectRefused,
    DescriptorInvalid,
    P2PError,
    Peer,
    PeerGone,
    Status,
    Window,
    check_endpoint,
    check_words,
)
from p2p.memory import HostMemory, Memory
from p2p.monitor import ChannelState, Monitor
from p2p.nixl_carrier import Carrier
from p2p.nixl_native import ChannelCounts, RailCounts, gpu_of
from p2p.shm_link import new_token

# 256 MB put over 1 Gbit/s take 2 s. What does not move is given up sooner: see native/link.cpp.
CLOSE_S: Final = 5.0


class NixlWindow(Window):
    """Memory that one peer writes from afar and this process reads. Made by `NixlEndpoint.export_window`."""

    def __init__(self, endpoint: NixlEndpoint, offer: Descriptor, memory: Memory, link: int) -> None:
        super().__init__(offer, memory)
        self._endpoint = endpoint
        self._link = link

    @property
    def peer_incarnation(self) -> int:
        return self._endpoint._ask(self, "p2p_link_peer_incarnation", 0)

    @property
    def liveness_fd(self) -> int:
        return self._endpoint._ask(self, "p2p_link_fd", -1)

    def close(self) -> None:
        """Withdraw the window; idempotent. When this returns, nothing that was sent to it lands any more."""
        self._endpoint._close_link(self)


class NixlPeer(Peer):
    """Another endpoint's window, as an image that is sent. Made by `NixlEndpoint.connect`.

    A frame that native code stores in a slot of the image, signal last, is sent by itself.
    """

    # Its page is that of this side's pump.
    shares_doorbells: ClassVar[bool] = False

    def __init__(self, endpoint: NixlEndpoint, offer: Descriptor, image: HostMemory, link: int) -> None:
        super().__init__(offer, image)
        self._endpoint = endpoint
        self._link = link
        self._device_address = image.device_address

    @property
    def device_address(self) -> int:
        """The same image for kernels: what they store in a slot, signal last, is sent. 0 without a GPU."""
        self._require_open()
        return self._device_address

    @property
    def page_address(self) -> int:
        """The doorbell page of this side's pump: its lane 0 is rung after a signal was stored in the image."""
        self._require_open()
        return self._endpoint._pump_page

    @property
    def liveness_fd(self) -> int:
        return self._endpoint._ask(self, "p2p_link_fd", -1)

    @property
    def slow(self) -> bool:
        """By native/monitor.h."""
        endpoint = self._endpoint
        with endpoint._lock:
            return self._memory is not None and endpoint.monitor(self).read().state is ChannelState.SLOW


L = TypeVar("L", NixlWindow, NixlPeer)


class NixlEndpoint:
    """One process's end of the nixl transport: an `Endpoint`. A context manager; safe to use from several threads.

    Args:
        name: For logs and error messages, at most 255 bytes.
        incarnation: Of this process's life; a restarted process has another.
        lanes: Doorbells to offer, 1 to 63.
        rails: Network devices to use, each for a path of its own; an empty name leaves the choice to UCX
            (and its variable UCX_NET_DEVICES). Of two endpoints, equal places in this list meet.
        device: The GPU on which windows lie, in the driver's order; none: host memory.
        driver: Loaded already; where not given, the machine's own.
        page: A doorbell page of as many lanes to ring, which others ring too; none: one of its own.

    Raises:
        NixlMissing: NIXL is not installed, or another version.
        P2PError: a rail is no device of this machine, or the GPU cannot be used (CudaMissing, CudaError).
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        lanes: int = 1,
        *,
        rails: tuple[str, ...] = ("",),
        device: int | None = None,
        driver: CudaDriver | None = None,
        page: HostMemory | None = None,
    ) -> None:
        check_endpoint(name, incarnation, lanes)
        nixl_native.check_rails(rails)
        self.name = name
        self.incarnation = incarnation
        self.lanes = lanes
        self.rails = rails
        self.library = nixl_native.load()
        self._links: list[NixlWindow | NixlPeer] = []
        self._page = page or HostMemory.allocate(mmap.PAGESIZE)
        if page is None:
            self.library.p2p_bell_init(self._page.address, incarnation, lanes)
        if device is not None:
            nixl_native.check_transports(os.environ.get("UCX_TLS"), nixl_native.UNFENCED_GPU)
        self.device = None if device is None else Device(driver or CudaDriver.load(), device)
        names = (ctypes.c_char_p * len(rails))(*(rail.encode() for rail in rails))
        with ExitStack() as undo:
            if self.device:
                undo.callback(self.device.close)
            gpu = gpu_of(self.device) if self.device else None
            handle: int | None = self.library.p2p_carrier_new(
                *(incarnation, names, len(rails), self._page.address, lanes, ctypes.byref(gpu) if gpu else None)
            )
            if handle is not None:
                undo.pop_all()
        if handle is None:
            raise P2PError(
                f"no threads or no memory are left for endpoint {name}; raise the limit on processes (ulimit -u) or"
                " on memory (ulimit -v)."
            )
        self._pump_page = int(self.library.p2p_carrier_page(handle))
        self._carrier = Carrier(name, self.library, handle, self._page, self.device, gpu)
        self._lock = self._carrier.lock
        # Also at the interpreter's exit: threads that write to memory must not outlive it.
        self._unclosed = weakref.finalize(self, self._carrier.abandon)

    def __enter__(self) -> NixlEndpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def page_address(self) -> int:
        """This endpoint's own doorbell page: rung when a signal lands in one of its windows."""
        self._carrier.require_open()
        return self._page.address

    def export_window(self, nbytes: int, incarnation: int | None = None) -> NixlWindow:
        """Takes 25 to 40 ms for each rail, and 0.5 s the first time in a process. P2PError: no rail can be opened."""
        if not 1 <= nbytes <= WINDOW_LIMIT_BYTES:
            raise ValueError(f"a window of {nbytes} bytes asked for; 1 to {WINDOW_LIMIT_BYTES} needed.")
        incarnation = self.incarnation if incarnation is None else incarnation
        token, error = new_token(), ctypes.create_string_buffer(nixl_native.ERROR_BYTES)
        with self._carrier.call() as carrier, ExitStack() as undo:
            # Allocated now: without memory this fails here, and not in the token path.
            if self.device:
                memory = DeviceMemory.create(self.device, nbytes, rdma=True)
            else:
                memory = HostMemory.allocate(nbytes, mmap.MAP_PRIVATE | mmap.MAP_POPULATE)
            undo.callback(memory.close)
            link = self.library.p2p_link_export(
                *(carrier, memory.address, nbytes, incarnation, token, error, len(error))
            )
            if link is None:
                raise P2PError(
                    f"{self._rails_text()} cannot be opened: {error.value.decode()}. This machine has "
                    f"{', '.join(nixl_native.devices())}; name those to use in `rails`."
                )
            address = ctypes.create_string_buffer(nixl_native.LINK_ADDRESS_BYTES)
            length = self.library.p2p_link_address(link, address)
            if not length:
                self.library.p2p_link_close(link, 0)
                raise P2PError(
                    f"the addresses of {self._rails_text()} take more than the {nixl_native.LINK_ADDRESS_BYTES} "
                    f"bytes that a descriptor has for them; name fewer."
                )
            offer = Descriptor(
                transport=Transport.NIXL,
                incarnation=incarnation,
                nbytes=nbytes,
                address=address.raw[:length],
                name=self.name,
                token=token,
            )
            return self._adopt(NixlWindow(self, offer, memory, link), memory, undo)

    def connect(self, descriptor: bytes, timeout_s: float = CONNECT_S) -> NixlPeer:
        """Join over every rail that answers in time; ConnectRefused does not say which of its reasons it is.

        Raises:
            OSError: there is no address space for an image of the window.
        """
        offer = decode(descriptor)
        if offer.transport is not Transport.NIXL:
            raise DescriptorInvalid(f"a {offer.transport.name} descriptor; this endpoint speaks NIXL.")
        error = ctypes.create_string_buffer(nixl_native.ERROR_BYTES)
        with self._carrier.call() as carrier, ExitStack() as undo:
            image = PinnedMemory(self.device, offer.nbytes) if self.device else HostMemory.allocate(offer.nbytes)
            undo.callback(image.close)
            link = self.library.p2p_link_connect(
                *(carrier, image.address, offer.nbytes, offer.incarnation, offer.token),
                *(offer.address, len(offer.address), int(timeout_s * 1e9), error, len(error)),
            )
            if link is None:
                self._carrier.require_open()
                raise ConnectRefused(
                    f"{offer.name} cannot be joined over {self._rails_text()}: {error.value.decode()}. Its process "
                    "has ended or is out of reach, or the descriptor was withdrawn or taken: ask for a new one."
                )
            return self._adopt(NixlPeer(self, offer, image, link), image, undo)

    def put(self, peer: NixlPeer, offset: int, source: bytes | bytearray | memoryview | NDArray[np.uint8]) -> None:
        """They are there when a later signal is. PeerGone: also where there is no memory to note the write."""
        data = np.frombuffer(source, dtype=np.uint8)
        if offset < 0 or offset + len(data) > peer.nbytes:
            raise ValueError(f"{len(data)} bytes at {offset} do not lie in a window of {peer.nbytes}.")
        with self._lock:
            image = peer._require_open()
            self._require_alive(peer)
            image.write(offset, data)
            self._require_room(peer, self.library.p2p_link_put(peer._link, offset, len(data)))

    def signal(self, peer: NixlPeer, offset: int, value: int) -> None:
        check_words(peer.nbytes, offset)
        with self._lock:
            peer._require_open()
            self._require_alive(peer)
            self._require_room(peer, self.library.p2p_link_signal(peer._link, offset, value))

    def progress(self) -> None:
        """Move what is under way on this thread; while it is called often, the transport's own thread rests."""
        self._carrier.progress()

    def status(self, link: NixlWindow | NixlPeer) -> Status:
        return Status.ALIVE if self._ask(link, "p2p_link_alive", 0) else Status.GONE

    def monitor(self, peer: NixlPeer) -> Monitor:
        """Of all writes to a peer, over whatever rails; read after disconnecting it raises EndpointClosed."""
        with self._connected(peer):
            return Monitor(self.library.p2p_link_monitor(peer._link) or 0, partial(self._connected, peer))

    @contextmanager
    def _connected(self, peer: NixlPeer) -> Iterator[None]:
        with self._lock:
            peer._require_open()
            yield

    def rail_counts(self, peer: NixlPeer) -> tuple[RailCounts, ...]:
        """What each of the owner's rails carries, in their order; empty once this side disconnected."""
        rails: list[RailCounts] = []
        words = (ctypes.c_uint64 * len(RailCounts._fields))()
        with self._lock:
            while peer._memory and self.library.p2p_link_rail_counts(peer._link, len(rails), words) == 0:
                live, *rest = words
                rails.append(RailCounts(bool(live), *rest))
        return tuple(rails)

    def channel_counts(self, link: NixlWindow | NixlPeer) -> dict[str, int]:
        """What the link's channel has done (P2pChannelCounts of native/channel.h); zeros once it is closed."""
        counts = ChannelCounts()
        with self._lock:
            if link._memory:
                self.library.p2p_link_counts(link._link, ctypes.byref(counts))
        return {name: getattr(counts, name) for name, *_ in ChannelCounts._fields_}

    @property
    def refused(self) -> int:
        """Hellos and notes that were dropped since they made no sense, or came from the wrong side."""
        with self._lock:
            return self.library.p2p_carrier_refused(self._carrier.require_open())

    def disconnect(self, peer: NixlPeer) -> None:
        """Send what was put, as long as it moves, and leave; idempotent. Stop native code that writes first."""
        self._close_link(peer)

    def close(self) -> None:
        """Leave nothing behind; idempotent. Stop native code that uses this endpoint's memory first."""
        self._carrier.stop()
        with self._lock:
            links = sorted(self._links, key=lambda link: isinstance(link, NixlWindow))
        # Peers first: what was put goes out while the windows still hear.
        for link in links:
            self._close_link(link)
        self._carrier.close(CLOSE_S)
        self._unclosed.detach()

    def _require_alive(self, peer: NixlPeer) -> None:
        if not self.library.p2p_link_alive(peer._link):
            raise PeerGone(f"{peer.name} has ended or withdrew the window; use another.")

    def _require_room(self, peer: NixlPeer, code: int) -> None:
        if code:
            # Native code ends the link: some of the write may be under way, and nothing may follow it.
            raise PeerGone(
                f"no memory is left to note a write to {peer.name} (code {code}); the link to it ends."
                " Connect again once there is some."
            )

    def _adopt(self, link: L, memory: Memory, undo: ExitStack) -> L:
        with self._lock:
            self._carrier.adopt(link._link, memory)
            undo.pop_all()
            self._links.append(link)
        return link

    def _ask(self, link: NixlWindow | NixlPeer, function: str, closed: int) -> int:
        with self._lock:
            return closed if link._memory is None else int(getattr(self.library, function)(link._link))

    def _close_link(self, link: NixlWindow | NixlPeer) -> None:
        with self._lock:
            if link not in self._links:
                return
            self._links.remove(link)
            # Views keep the memory: what Python code still holds stays readable.
            link._memory = None
        self._carrier.close_link(link._link, CLOSE_S)

    def _rails_text(self) -> str:
        named = ", ".join(rail for rail in self.rails if rail)
        return f"rails {named}" if named else "the rails that UCX chose"
