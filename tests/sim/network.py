"""The sim transport: the same windows in one process, carried by an adversary with a seed and its own clock.

Bytes for a peer are written to an image; `forward` hands ranges of it to the network, which takes a snapshot
and applies it to the owner's window in pieces, late, out of order, twice or never. Signals travel likewise.
Endpoints freeze (what they have under way stops between two pieces and lands after they thaw), die, and
return as new incarnations.

Nothing happens by itself: `advance` moves the clock and applies what is due. One seed, one run: `trace_hash`
shows it. Native protocol code runs on it unchanged: it writes frames at `SimPeer.address`, `forward_slots`
carries them.
"""

from __future__ import annotations

import heapq
import random
import struct
import zlib
from collections.abc import Iterable
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from p2p.descriptor import TOKEN_BYTES, WINDOW_LIMIT_BYTES, Descriptor, Transport, decode
from p2p.endpoint import (
    CONNECT_S,
    ConnectRefused,
    DescriptorInvalid,
    EndpointClosed,
    Peer,
    PeerGone,
    Status,
    Window,
    check_words,
)
from p2p.frame import PAYLOAD_OFFSET, SIGNAL_BYTES, load_signals
from p2p.window import WindowLayout
from tests.sim.adversary import Adversary, Counts

_WORD: Final = struct.Struct("<Q")
_LENGTH: Final = struct.Struct("<I")
_LENGTH_OFFSET: Final = SIGNAL_BYTES + 28


# When it is due, its number, where to, at which offset, what, and whether it is a signal.
_Event = tuple[int, int, "SimPeer", int, bytes, bool]


class SimNetwork:
    """Endpoints in one process and one virtual clock.

    Args:
        seed: Of everything that the adversary decides.
        adversary: Its habits; where not given, small delays and torn puts only.
    """

    def __init__(self, seed: int, adversary: Adversary | None = None) -> None:
        self.seed = seed
        self.adversary = adversary or Adversary()
        self.counts = Counts()
        self.random = random.Random(seed)
        self._now_ns = 0
        self._numbers = 0
        self._links = 0
        self._events: list[_Event] = []
        self._offers: dict[bytes, SimWindow] = {}
        self._spare: dict[tuple[str, int], list[NDArray[np.uint8]]] = {}
        self._trace = 0

    def now(self) -> int:
        """The virtual clock in ns; it starts at 0."""
        return self._now_ns

    @property
    def trace_hash(self) -> str:
        """Of every byte applied so far, with its time and place."""
        return f"{self._trace:08x}"

    def endpoint(self, name: str, incarnation: int) -> SimEndpoint:
        """A new endpoint."""
        return SimEndpoint(self, name, incarnation)

    def restart(self, endpoint: SimEndpoint, incarnation: int) -> SimEndpoint:
        """Kill an endpoint; its successor has the same name and another incarnation.

        Raises:
            ValueError: the incarnation is the old one.
        """
        if incarnation == endpoint.incarnation:
            raise ValueError(f"{endpoint.name} lived as {incarnation} before; choose another.")
        endpoint.kill()
        return self.endpoint(endpoint.name, incarnation)

    def next_ns(self) -> int | None:
        """When something is due next; None where nothing is under way."""
        return self._events[0][0] if self._events else None

    def advance(self, ns: int) -> None:
        """Move the clock by `ns`, applying in order everything that falls due meanwhile.

        Raises:
            ValueError: ns is negative.
        """
        if ns < 0:
            raise ValueError(f"advance by {ns} ns asked for; time only moves forward.")
        until_ns = self._now_ns + ns
        events = self._events
        while events and events[0][0] <= until_ns:
            event = heapq.heappop(events)
            self._now_ns = max(self._now_ns, event[0])
            self._deliver(event)
        self._now_ns = until_ns

    def settle(self) -> None:
        """Advance until nothing is under way; what frozen endpoints hold back stays with them."""
        while (at_ns := self.next_ns()) is not None:
            self.advance(max(0, at_ns - self._now_ns))

    def _deliver(self, event: _Event) -> None:
        at_ns, _, peer, offset, data, is_signal = event
        writer = peer._endpoint
        if peer._closed or at_ns > writer._cut_ns:
            self.counts.lost += 1
            return
        if writer.frozen:
            # A frozen process keeps its mapping: the rest of its write comes when it thaws.
            writer._held.append(event)
            return
        self.counts.applied += 1
        self._trace = zlib.crc32(data, self._trace ^ (self._now_ns + offset * peer._number) & 0xFFFFFFFF)
        window = peer._window
        window._array.data[offset : offset + len(data)] = data
        window.rung |= is_signal

    def _push(self, at_ns: int, peer: SimPeer, offset: int, data: bytes, is_signal: bool) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (at_ns, self._numbers, peer, offset, data, is_signal))

    def _between(self, times_ns: tuple[int, int]) -> int:
        shortest, longest = times_ns
        return shortest + int(self.random.random() * (longest - shortest + 1))

    def _send(self, peer: SimPeer, offset: int, data: bytes, late_ns: int, is_signal: bool) -> int:
        """Send one piece; when it is due, or 0 where it was lost."""
        habits = self.adversary
        at_ns = self._now_ns + self._between(habits.delay_ns) + late_ns
        # One draw for three rare things: most pieces meet none of them.
        luck = self.random.random()
        if luck < habits.loss_rate:
            self.counts.lost += 1
            return 0
        luck -= habits.loss_rate
        if luck < habits.repeat_rate:
            self.counts.repeated += 1
            self._push(at_ns + self._between(habits.late_ns), peer, offset, data, is_signal)
        elif luck < habits.repeat_rate + habits.flip_rate:
            self.counts.flipped += 1
            bit = self.random.randrange(8 * len(data))
            data = (int.from_bytes(data, "little") ^ 1 << bit).to_bytes(len(data), "little")
        self._push(at_ns, peer, offset, data, is_signal)
        return at_ns

    def _put(self, peer: SimPeer, offset: int, data: bytes) -> None:
        habits, draw = self.adversary, self.random.random
        ends = {len(data), *(int(draw() * len(data)) for _ in range(int(draw() * habits.pieces)))} - {0}
        pieces = sorted(ends)
        stalls = self._chance(habits.late_rate)
        first_late = self.random.randrange(len(pieces)) if stalls else len(pieces)
        late_ns = self._between(habits.late_ns) if stalls else 0
        self.counts.late += len(pieces) - first_late
        start = 0
        for i, end in enumerate(pieces):
            at_ns = self._send(peer, offset + start, data[start:end], late_ns if i >= first_late else 0, False)
            peer._settled_ns = max(peer._settled_ns, at_ns)
            start = end

    def _signal(self, peer: SimPeer, offset: int, value: int) -> None:
        overtakes = self._chance(self.adversary.overtake_rate)
        self.counts.overtook += overtakes
        wait_ns = 0 if overtakes else max(0, peer._settled_ns - self._now_ns)
        at_ns = self._send(peer, offset, _WORD.pack(value), wait_ns, True)
        peer._settled_ns = max(peer._settled_ns, 0 if overtakes else at_ns)

    def _chance(self, rate: float) -> bool:
        return rate > 0 and self.random.random() < rate

    def _token(self) -> bytes:
        return self.random.randbytes(TOKEN_BYTES)

    def _memory(self, name: str, nbytes: int) -> NDArray[np.uint8]:
        spare = self._spare.get((name, nbytes))
        if not spare or not self.adversary.recycles:
            return _aligned_zeros(nbytes)
        self.counts.recycled += 1
        memory = spare.pop(self.random.randrange(len(spare)))
        memory[:] = 0
        return memory


def _aligned_zeros(nbytes: int) -> NDArray[np.uint8]:
    memory = np.zeros(nbytes + 64, dtype=np.uint8)
    skip = -memory.ctypes.data % 64
    return memory[skip : skip + nbytes]


class ArrayMemory:
    """Memory of this process: u8[n], 8-aligned."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array = array
        self.address = int(array.ctypes.data)
        self.nbytes = len(array)

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return self.array[offset : offset + nbytes]

    def poll(self, offset: int, count: int, stride_bytes: int) -> NDArray[np.uint64]:
        return load_signals(self.array, offset, count, stride_bytes)

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        self.array[offset : offset + len(data)] = data

    def store_signal(self, offset: int, value: int) -> None:
        _WORD.pack_into(self.array.data, offset, value)

    def close(self) -> None:
        pass


class SimWindow(Window):
    """Memory that one peer writes through the network. Made by `SimEndpoint.export_window`."""

    def __init__(self, endpoint: SimEndpoint, offer: Descriptor) -> None:
        # Kept for as long as anything may still be applied to it: closed windows are retired.
        self._array = endpoint.network._memory(offer.name, offer.nbytes)
        super().__init__(offer, ArrayMemory(self._array))
        self.rung = False  # by each signal that arrives, until the owner resets it: its doorbell
        self._endpoint = endpoint
        self._peer: SimPeer | None = None

    @property
    def liveness_fd(self) -> int:
        return -1

    @property
    def peer_incarnation(self) -> int:
        return self._peer._endpoint.incarnation if self._peer else 0

    @property
    def _closed(self) -> bool:
        return self._memory is None

    def close(self) -> None:
        """Withdraw the window; idempotent. What is under way still lands in its own memory."""
        network = self._endpoint.network
        if network.adversary.recycles and not self._closed:
            network._spare.setdefault((self._offer.name, self.nbytes), []).append(self._array)
        self._memory = None
        network._offers.pop(self._offer.token, None)


class SimPeer(Peer):
    """Another endpoint's window, as an image of it: what is written there travels only by `forward`."""

    shares_doorbells: ClassVar[bool] = False

    def __init__(self, endpoint: SimEndpoint, window: SimWindow, number: int) -> None:
        # A one-sided read at connect time, so that header pages look the same from here.
        self._image = _aligned_zeros(window.nbytes)
        self._image[:] = window._array
        super().__init__(window._offer, ArrayMemory(self._image))
        self._endpoint = endpoint
        self._window = window
        self._number = number
        self._words = self._image[: window.nbytes // 8 * 8].view(np.uint64).data
        self._layout: WindowLayout | None = None
        self._carried: dict[int, int] = {}  # by a slot's offset: the signal sent last
        self._settled_ns = 0

    @property
    def liveness_fd(self) -> int:
        return -1

    @property
    def page_address(self) -> int:
        return 0

    @property
    def _closed(self) -> bool:
        return self._memory is None

    @property
    def image(self) -> NDArray[np.uint8]:
        """What native code writes at `address`: u8[nbytes]."""
        return self._require_open().read(0, self.nbytes)


class SimEndpoint:
    """One simulated process's end. Made by `SimNetwork.endpoint`."""

    def __init__(self, network: SimNetwork, name: str, incarnation: int) -> None:
        self.network = network
        self.name = name
        self.incarnation = incarnation
        self.page_address = 0
        self.frozen = False
        self._held: list[_Event] = []
        self._windows: list[SimWindow] = []
        self._peers: list[SimPeer] = []
        self._died_ns: int | None = None
        self._cut_ns: float = float("inf")  # nothing of a dead endpoint is applied after this

    @property
    def dead(self) -> bool:
        return self._died_ns is not None

    def freeze(self) -> None:
        """Stop as by SIGSTOP: writes under way stop between two pieces. Do not run its code meanwhile."""
        self.frozen = True

    def thaw(self) -> None:
        """Go on: what was held back is due at once, in its order."""
        self.frozen = False
        for event in self._held:
            self.network._push(self.network.now(), *event[2:])
        self._held.clear()

    def kill(self) -> None:
        """Die as by SIGKILL: only writes due before some instant, at the latest the notice, still land."""
        if not self.dead:
            now_ns = self.network.now()
            self._died_ns = now_ns
            self._cut_ns = now_ns + self.network.random.randint(0, self.network.adversary.notice_ns)
            self.frozen = False
            self._held.clear()
            for window in self._windows:
                window.close()

    def export_window(self, nbytes: int, incarnation: int | None = None) -> SimWindow:
        """Offer `nbytes` of zeroed memory to one peer; `incarnation` is the endpoint's own unless given.

        Raises:
            ValueError: nbytes is out of bounds.
        """
        self._require_open()
        if not 1 <= nbytes <= WINDOW_LIMIT_BYTES:
            raise ValueError(f"a window of {nbytes} bytes asked for; 1 to {WINDOW_LIMIT_BYTES} needed.")
        offer = Descriptor(
            transport=Transport.SIM,
            incarnation=self.incarnation if incarnation is None else incarnation,
            nbytes=nbytes,
            address=b"sim",
            name=self.name,
            token=self.network._token(),
        )
        window = SimWindow(self, offer)
        self.network._offers[offer.token] = window
        self._windows.append(window)
        return window

    def connect(self, descriptor: bytes, timeout_s: float = CONNECT_S) -> SimPeer:
        """Take up an offer made on the same network; nothing here waits.

        Raises:
            DescriptorInvalid: these bytes are no descriptor, or of another transport.
            ConnectRefused: it was withdrawn or taken.
        """
        self._require_open()
        offer = decode(descriptor)
        if offer.transport is not Transport.SIM:
            raise DescriptorInvalid(f"a {offer.transport.name} descriptor; this endpoint speaks SIM.")
        window = self.network._offers.pop(offer.token, None)
        if window is None:
            raise ConnectRefused(f"{offer.name} refuses: this descriptor was withdrawn or taken.")
        self.network._links += 1
        peer = SimPeer(self, window, self.network._links)
        window._peer = peer
        self._peers.append(peer)
        return peer

    def put(self, peer: SimPeer, offset: int, source: bytes | bytearray | memoryview | NDArray[np.uint8]) -> None:
        """Write bytes into the image and send them.

        Raises:
            ValueError: they would not fit.
        """
        data = np.frombuffer(source, dtype=np.uint8)
        self._check_range(peer, offset, len(data))
        peer.image[offset : offset + len(data)] = data
        self.forward(peer, [(offset, len(data))])

    def signal(self, peer: SimPeer, offset: int, value: int) -> None:
        """Send a signal word: it arrives after every earlier put, unless the adversary lets it overtake.

        Raises:
            PeerGone: the owner's death has been noticed.
        """
        self.forward(peer, [], (offset, value))

    def forward(self, peer: SimPeer, ranges: Iterable[tuple[int, int]], signal: tuple[int, int] | None = None) -> None:
        """Send (offset, length) ranges of the image as they are now, then a signal (offset, value).

        Raises:
            ValueError: a range or the signal does not lie in the window.
            PeerGone: there is a signal, and the owner's death has been noticed.
        """
        self._require_open()
        image = peer.image
        if signal and self.status(peer) is Status.GONE:
            raise PeerGone(f"{peer.name} has ended or withdrew the window; use another.")
        for offset, length in ranges:
            self._check_range(peer, offset, length)
            if length:
                self.network._put(peer, offset, bytes(image.data[offset : offset + length]))
        if signal:
            offset, value = signal
            check_words(peer.nbytes, offset)
            _WORD.pack_into(image.data, offset, value)
            self.network._signal(peer, offset, value)

    def forward_slots(self, peer: SimPeer, layout: WindowLayout) -> int:
        """Send every frame of the image whose signal changed since the last call; returns how many.

        Raises:
            ValueError: the layout does not fit into the window.
            PeerGone: a frame is to be sent and the owner's death has been noticed.
        """
        image = peer.image
        if layout is not peer._layout:
            self._check_range(peer, 0, layout.nbytes)
            peer._layout = layout
            for at in range(layout.slot_offset(0), layout.nbytes, layout.stride_bytes):
                peer._carried.setdefault(at, 0)
        sent = 0
        for at, carried in peer._carried.items():
            value = peer._words[at // 8]
            if value == carried:
                continue
            peer._carried[at] = value
            (length,) = _LENGTH.unpack_from(image.data, at + _LENGTH_OFFSET)
            end = PAYLOAD_OFFSET + min(length, layout.payload_bytes)
            self.forward(peer, [(at + SIGNAL_BYTES, end - SIGNAL_BYTES)], (at, value))
            sent += 1
        return sent

    def progress(self) -> None:
        """Nothing to do: the network's clock does it all."""

    def status(self, link: SimWindow | SimPeer) -> Status:
        """GONE once this side or the other has closed the link, or the other's death has been noticed."""
        if isinstance(link, SimPeer):
            owner = link._window._endpoint
            gone = link._closed or (link._window._closed and not owner.dead) or owner._noticed()
        else:
            peer = link._peer
            gone = link._closed or (peer is not None and (peer._closed or peer._endpoint._noticed()))
        return Status.GONE if gone else Status.ALIVE

    def disconnect(self, peer: SimPeer) -> None:
        """Give up a peer; idempotent. What is under way to it is dropped."""
        peer._memory = None

    def close(self) -> None:
        """Disconnect every peer and withdraw every window; idempotent."""
        for peer in self._peers:
            peer._memory = None
        for window in self._windows:
            window.close()
        self.kill()

    def _noticed(self) -> bool:
        notice_ns = self.network.adversary.notice_ns
        return self._died_ns is not None and self.network.now() >= self._died_ns + notice_ns

    def _require_open(self) -> None:
        if self.dead:
            raise EndpointClosed(f"endpoint {self.name} has ended; make a new one under a new incarnation.")

    def _check_range(self, peer: SimPeer, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > peer.nbytes:
            raise ValueError(f"{length} bytes at {offset} do not lie in a window of {peer.nbytes}.")
