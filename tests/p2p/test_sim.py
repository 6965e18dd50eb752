"""The simulated network: one seed, one run; promises kept while it behaves; readers that survive it."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p import native
from p2p.endpoint import ConnectRefused, DescriptorInvalid, Endpoint, EndpointClosed, PeerGone, Status
from p2p.local import ShmEndpoint
from p2p.window import WindowLayout
from tests.sim.network import Adversary, SimEndpoint, SimNetwork, SimPeer, SimWindow

LAYOUT = WindowLayout(slots=4, payload_bytes=600)
CLIENT = 9
DEADLINE_NS = 1_000_000
FREEZE_NS = 3_000_000
PAUSE_NS = 20_000
STEP_NS = 5_000
HOSTILE = Adversary(
    pieces=4,
    late_rate=0.002,
    late_ns=(200_000, 3_000_000),
    repeat_rate=0.05,
    loss_rate=0.002,
    overtake_rate=0.05,
    flip_rate=0.002,
    recycles=True,
)


INVERTED = bytes(byte ^ 0xFF for byte in range(256))


def answer_to(payload: bytes) -> bytes:
    return payload.translate(INVERTED)


def write_frame(address: int, owner: int, sender: int, sequence: int, payload: bytes) -> None:
    """A frame by native code, as production writes it: payload, header, signal."""
    ctypes.memmove(address + 128, payload, len(payload))
    fields = np.array([0, owner, sequence, len(payload) << 32, 0, sender, 0, 0], np.uint64)
    native.load().p2p_frame_seal(address, fields.ctypes.data)
    native.load().p2p_signal_store(address, sequence)


class Slot:
    """A reader's view of one slot of a window, and private memory for what is in it."""

    def __init__(self, window: SimWindow, index: int, owner: int, sender: int) -> None:
        self.offset = LAYOUT.slot_offset(index)
        self.memory = window.memory[self.offset : self.offset + LAYOUT.stride_bytes]
        self.address = window.address + self.offset
        self.ids = owner, sender
        self.signal_before = 0
        self.header, self.copy = np.zeros(64, np.uint8), np.zeros(LAYOUT.payload_bytes, np.uint8)

    def signal(self) -> int:
        return native.load().p2p_signal_load(self.address)

    def open(self, sequence: int) -> int:
        where = self.header.ctypes.data, self.copy.ctypes.data
        return native.load().p2p_frame_open(self.address, LAYOUT.payload_bytes, *self.ids, sequence, *where)


Pause = Callable[[], None]
Reader = Callable[[Slot, int, Pause], bytes | None]


def copies_then_validates(slot: Slot, sequence: int, pause: Pause) -> bytes | None:
    if slot.signal() != sequence or (length := slot.open(sequence)) < 0:
        return None
    pause()
    return slot.copy[:length].tobytes()


def validates_in_place(slot: Slot, sequence: int, pause: Pause) -> bytes | None:
    if slot.signal() != sequence or (length := slot.open(sequence)) < 0:
        return None
    pause()
    return slot.memory[128 : 128 + length].tobytes()


def believes_any_sequence(slot: Slot, sequence: int, pause: Pause) -> bytes | None:
    there = int(slot.memory[64 + 16 : 64 + 24].view(np.uint64)[0])
    if slot.signal() == slot.signal_before or (length := slot.open(there)) < 0:
        return None
    pause()
    return slot.copy[:length].tobytes()


def skips_the_checksum(slot: Slot, sequence: int, pause: Pause) -> bytes | None:
    if slot.signal() != sequence or -10 < slot.open(sequence) < 0:
        return None
    pause()
    return slot.copy[: slot.header[28:32].view(np.uint32)[0]].tobytes()


def believes_the_signal(slot: Slot, sequence: int, pause: Pause) -> bytes | None:
    if slot.signal() != sequence:
        return None
    pause()
    length = int(slot.memory[64 + 28 : 64 + 32].view(np.uint32)[0])
    return slot.memory[128 : 128 + min(length, LAYOUT.payload_bytes)].tobytes()


class EchoServer:
    """Answers every valid request; its reader is the real one."""

    def __init__(self, endpoint: SimEndpoint) -> None:
        self.endpoint = endpoint
        self.window = endpoint.export_window(LAYOUT.nbytes)
        self.slots = [Slot(self.window, i, endpoint.incarnation, CLIENT) for i in range(LAYOUT.slots)]
        self.done = [0] * LAYOUT.slots
        self.signals = LAYOUT.slot_offset(0), LAYOUT.slots, LAYOUT.stride_bytes
        self.peer: SimPeer | None = None

    def step(self) -> None:
        peer = self.peer
        assert peer is not None
        signals = self.window.poll(*self.signals).tolist()
        if signals == self.done:
            return
        for i, (slot, sequence) in enumerate(zip(self.slots, signals, strict=True)):
            if sequence == self.done[i] or (length := slot.open(sequence)) < 0:
                continue
            self.done[i] = sequence
            reply = answer_to(slot.copy[:length].tobytes())
            write_frame(peer.address + slot.offset, CLIENT, self.endpoint.incarnation, sequence, reply)
        self.endpoint.forward_slots(peer, LAYOUT)


@dataclass(kw_only=True)
class Call:
    sequence: int
    expected: bytes
    deadline_ns: int


@dataclass(kw_only=True)
class Outcome:
    right: int = 0
    wrong: int = 0
    given_up: int = 0


class World:
    """A client that, unlike production, reuses a slot as soon as it gives up; and what it asked."""

    def __init__(self, seed: int, adversary: Adversary, reader: Reader) -> None:
        self.network = SimNetwork(seed, adversary)
        self.random = random.Random(seed)
        self.reader = reader
        self.outcome = Outcome()
        self.client = self.network.endpoint("client", CLIENT)
        self.server = EchoServer(self.network.endpoint("server", 1000))
        self.sequences = list(range(1, LAYOUT.slots + 1))
        self.thaw_ns = 0
        self.attach()

    def attach(self) -> None:
        self.window = self.client.export_window(LAYOUT.nbytes)
        self.peer = self.client.connect(self.server.window.descriptor)
        self.server.peer = self.server.endpoint.connect(self.window.descriptor)
        ids = CLIENT, self.server.endpoint.incarnation
        self.slots = [Slot(self.window, i, *ids) for i in range(LAYOUT.slots)]
        self.calls: list[Call | None] = [None] * LAYOUT.slots

    def run(self, calls: int) -> Outcome:
        begun = 0
        while sum(vars(self.outcome).values()) < calls:
            for i, call in enumerate(self.calls):
                if call is None and begun < calls:
                    self.calls[i] = self.begin(i)
                    begun += 1
                    self.client.forward_slots(self.peer, LAYOUT)
                    self.disturb(begun)
            if not self.server.endpoint.frozen:
                self.server.step()
            for i, call in enumerate(self.calls):
                if call is not None and self.judge(call, self.reader(self.slots[i], call.sequence, self.pause)):
                    self.calls[i] = None
            self.move_on()
        return self.outcome

    def begin(self, i: int) -> Call:
        self.sequences[i] += LAYOUT.slots
        self.slots[i].signal_before = self.slots[i].signal()
        payload = self.random.randbytes(self.random.choice((64, 512)))
        at = self.peer.address + self.slots[i].offset
        write_frame(at, self.server.endpoint.incarnation, CLIENT, self.sequences[i], payload)
        deadline_ns = self.network.now() + DEADLINE_NS
        return Call(sequence=self.sequences[i], expected=answer_to(payload), deadline_ns=deadline_ns)

    def judge(self, call: Call, reply: bytes | None) -> bool:
        """True when the call is over."""
        if reply is None and self.network.now() < call.deadline_ns:
            return False
        self.outcome.given_up += reply is None
        self.outcome.right += reply == call.expected
        self.outcome.wrong += reply is not None and reply != call.expected
        return True

    def disturb(self, begun: int) -> None:
        if begun % 197 == 0 and not self.thaw_ns:
            self.server.endpoint.freeze()
            self.thaw_ns = self.network.now() + FREEZE_NS
        if begun % 1999 == 0:
            self.outcome.given_up += sum(call is not None for call in self.calls)
            incarnation = self.server.endpoint.incarnation + 1
            self.server = EchoServer(self.network.restart(self.server.endpoint, incarnation))
            self.thaw_ns = 0
            self.attach()

    def pause(self) -> None:
        self.network.advance(PAUSE_NS)

    def move_on(self) -> None:
        now_ns = self.network.now()
        times = [
            self.network.next_ns(),
            self.thaw_ns or None,
            *(call.deadline_ns for call in self.calls if call),
        ]
        due_ns = [at_ns for at_ns in times if at_ns is not None]
        self.network.advance(max(STEP_NS, min(due_ns, default=now_ns) - now_ns))
        if self.thaw_ns and self.network.now() >= self.thaw_ns:
            self.server.endpoint.thaw()
            self.thaw_ns = 0


SEED = 20


def test_a_reader_that_copies_then_validates_accepts_no_wrong_reply_in_20_000_calls() -> None:
    world = World(SEED, HOSTILE, copies_then_validates)
    outcome, counts = world.run(20_000), world.network.counts
    assert outcome.wrong == 0, f"seed {SEED}: {outcome}"
    assert outcome.right > 15_000, f"seed {SEED}: {outcome}"
    assert min(vars(counts).values()) >= 10, f"seed {SEED}: the adversary was idle: {counts}"


@pytest.mark.parametrize("mutant", [validates_in_place, believes_any_sequence, skips_the_checksum, believes_the_signal])
def test_a_reader_that_leaves_a_check_out_accepts_wrong_replies(mutant: Reader) -> None:
    outcome = World(SEED, HOSTILE, mutant).run(4_000)
    assert outcome.wrong > 0, f"seed {SEED}: {outcome}"


def test_one_seed_gives_one_run() -> None:
    def run(seed: int) -> tuple[str, Outcome, int]:
        world = World(seed, HOSTILE, copies_then_validates)
        outcome = world.run(300)
        return world.network.trace_hash, outcome, world.network.now()

    assert run(1) == run(1)
    assert run(1)[0] != run(2)[0]


def pair(seed: int, adversary: Adversary | None = None) -> tuple[SimNetwork, SimEndpoint, SimEndpoint]:
    network = SimNetwork(seed, adversary)
    return network, network.endpoint("reader", 1), network.endpoint("writer", 2)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), frozen=st.booleans())
def test_a_signal_shows_every_earlier_put_while_the_network_keeps_its_promise(seed: int, frozen: bool) -> None:
    network, reader, writer = pair(seed, Adversary(pieces=5, late_rate=0.5, late_ns=(10_000, 90_000)))
    window = reader.export_window(4096)
    peer = writer.connect(window.descriptor)
    for number in range(1, 6):
        writer.put(peer, 64 * number, bytes([number]) * 60)
        writer.signal(peer, 0, number)
    seen = 0
    while seen < 5:
        network.advance(1_000)
        if frozen and network.now() in (20_000, 60_000):
            (writer.thaw if writer.frozen else writer.freeze)()
        seen = int(window.poll(0, 1)[0])
        for number in range(1, seen + 1):
            assert set(window.memory[64 * number : 64 * number + 60]) == {number}, f"seed {seed}, signal {seen}"


def test_nothing_of_a_frozen_endpoint_lands_until_it_thaws() -> None:
    network, reader, writer = pair(3)
    window = reader.export_window(4096)
    peer = writer.connect(window.descriptor)
    writer.put(peer, 8, b"late")
    writer.signal(peer, 0, 1)
    writer.freeze()
    network.settle()
    network.advance(10**9)
    assert not window.memory.any() and reader.status(window) is Status.ALIVE
    writer.thaw()
    network.advance(0)
    assert window.memory[8:12].tobytes() == b"late" and window.poll(0, 1)[0] == 1


def test_nothing_of_a_dead_endpoint_lands_once_its_death_shows() -> None:
    landed = set()
    for seed in range(30):
        network, reader, writer = pair(seed, Adversary(pieces=8, delay_ns=(0, 2_000_000), notice_ns=1_000_000))
        window = reader.export_window(4096)
        peer = writer.connect(window.descriptor)
        writer.put(peer, 0, b"x" * 4096)
        writer.kill()
        while reader.status(window) is Status.ALIVE:
            network.advance(100_000)
        assert network.now() <= 1_100_000
        count = int(window.memory.astype(bool).sum())
        network.settle()
        assert int(window.memory.astype(bool).sum()) == count, f"seed {seed}"
        landed.add(count)
    assert len(landed) > 5, "some deaths tear the write, at different places"


def test_a_dead_owner_shows_after_the_notice_and_a_restart_is_another_incarnation() -> None:
    network, reader, writer = pair(4)
    window = reader.export_window(4096)
    peer = writer.connect(window.descriptor)
    with pytest.raises(ValueError, match="reader lived as 1 before; choose another"):
        network.restart(reader, 1)
    again = network.restart(reader, 3)
    assert writer.status(peer) is Status.ALIVE
    writer.signal(peer, 0, 1)
    network.advance(network.adversary.notice_ns)
    assert writer.status(peer) is Status.GONE
    with pytest.raises(PeerGone, match="reader has ended or withdrew the window"):
        writer.signal(peer, 0, 2)
    with pytest.raises(EndpointClosed, match="endpoint reader has ended"):
        reader.export_window(4096)
    assert again.export_window(4096).incarnation == 3


def test_a_descriptor_is_good_for_one_connection_on_one_network() -> None:
    _, reader, writer = pair(5)
    window = reader.export_window(4096)
    writer.connect(window.descriptor)
    withdrawn = reader.export_window(4096)
    withdrawn.close()
    for descriptor in (
        window.descriptor,
        withdrawn.descriptor,
        SimNetwork(6).endpoint("x", 1).export_window(1).descriptor,
    ):
        with pytest.raises(ConnectRefused, match="withdrawn or taken"):
            writer.connect(descriptor)
    with ShmEndpoint("shm", 7) as other, pytest.raises(DescriptorInvalid, match="a SHM descriptor"):
        writer.connect(other.export_window(4096).descriptor)
    with pytest.raises(DescriptorInvalid, match="no descriptor"):
        writer.connect(b"noise")


def test_disconnecting_drops_what_is_under_way_and_shows_at_once() -> None:
    network, reader, writer = pair(8)
    window = reader.export_window(4096)
    peer = writer.connect(window.descriptor)
    writer.put(peer, 0, b"never")
    writer.disconnect(peer)
    writer.disconnect(peer)
    assert reader.status(window) is Status.GONE is writer.status(peer)
    network.settle()
    assert not window.memory.any()
    with pytest.raises(EndpointClosed, match="disconnected from reader"):
        writer.put(peer, 0, b"never")


def test_the_image_begins_as_the_window_was_when_the_peer_connected() -> None:
    _, reader, writer = pair(9)
    window = reader.export_window(LAYOUT.nbytes)
    library = native.load()
    library.p2p_window_init(window.address, window.nbytes, 1, LAYOUT.slots, LAYOUT.payload_bytes)
    peer = writer.connect(window.descriptor)
    assert library.p2p_window_check(peer.address, peer.nbytes, 1, LAYOUT.slots, LAYOUT.payload_bytes) == 0
    assert window.address % 64 == peer.address % 64 == 0


def test_forward_slots_carries_each_new_frame_once() -> None:
    network, reader, writer = pair(10)
    window = reader.export_window(LAYOUT.nbytes)
    peer = writer.connect(window.descriptor)
    write_frame(peer.address + LAYOUT.slot_offset(2), 1, 2, 5, b"hello")
    assert [writer.forward_slots(peer, LAYOUT) for _ in range(2)] == [1, 0]
    network.settle()
    slot = Slot(window, 2, 1, 2)
    assert slot.signal() == 5 and slot.open(5) == 5 and slot.copy[:5].tobytes() == b"hello"


def test_a_closed_window_s_memory_goes_to_the_next_and_late_writes_land_in_it_where_the_adversary_says_so() -> None:
    network, reader, writer = pair(12, Adversary(recycles=True))
    window = reader.export_window(4096)
    peer = writer.connect(window.descriptor)
    writer.put(peer, 8, b"before")
    network.settle()
    writer.put(peer, 16, b"late")
    again = network.restart(reader, 3)
    successor = again.export_window(4096)
    assert successor.address == window._array.ctypes.data and not successor.memory.any()
    network.settle()
    assert successor.memory[16:20].tobytes() == b"late" and not successor.memory[:16].any()
    assert again.export_window(4096).address != successor.address


def test_a_window_is_rung_by_signals_only_and_a_flip_is_one_bit() -> None:
    network, reader, writer = pair(13, Adversary(flip_rate=1.0, pieces=1))
    window = reader.export_window(4096)
    peer = writer.connect(window.descriptor)
    writer.put(peer, 64, bytes(100))
    network.settle()
    assert not window.rung and int(np.bitwise_count(window.memory).sum()) == 1
    writer.signal(peer, 0, 0)
    network.settle()
    assert window.rung and network.counts.flipped == 2


def test_impossible_orders_are_refused() -> None:
    network, reader, writer = pair(11)
    peer = writer.connect(reader.export_window(4096).descriptor)
    with pytest.raises(ValueError, match="97 bytes at 4000 do not lie in a window of 4096"):
        writer.forward(peer, [(4000, 97)])
    with pytest.raises(ValueError, match="not 8-aligned"):
        writer.signal(peer, 4, 1)
    with pytest.raises(ValueError, match="do not lie in a window"):
        writer.forward_slots(peer, LAYOUT)
    with pytest.raises(ValueError, match="time only moves forward"):
        network.advance(-1)
    with pytest.raises(ValueError, match="a window of 0 bytes"):
        reader.export_window(0)
    for habits in ({"loss_rate": 1.1}, {"pieces": 0}):
        with pytest.raises(ValueError, match="rates from 0 to 1 and at least one piece"):
            Adversary(**habits)
    with pytest.raises(ValueError, match=r"times are \(shortest, longest\)"):
        Adversary(delay_ns=(2, 1))


def test_both_transports_offer_the_whole_interface() -> None:
    promised = {name for name in vars(Endpoint) if not name.startswith("_")}
    with ShmEndpoint("shm", 1) as shm:
        for endpoint in (shm, SimNetwork(0).endpoint("sim", 1)):
            assert promised <= set(dir(endpoint)), type(endpoint).__name__
