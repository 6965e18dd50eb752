"""The simulated network: one seed, one run; promises kept while it behaves; readers that survive when it does not."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p import (
    ConnectRefused,
    DescriptorInvalid,
    Endpoint,
    EndpointClosed,
    PeerGone,
    ShmEndpoint,
    Status,
    WindowLayout,
    native,
)
from p2p.sim import Adversary, SimEndpoint, SimNetwork, SimPeer, SimWindow

LAYOUT = WindowLayout(slots=4, payload_bytes=600)
CLIENT = 9
DEADLINE_NS = 1_000_000
FREEZE_NS = 3_000_000
PAUSE_NS = 20_000
STEP_NS = 5_000
HOSTILE = Adversary(
    pieces=4, late_rate=0.002, late_ns=(200_000, 3_000_000), repeat_rate=0.05, loss_rate=0.002, overtake_rate=0.05
)


def answer_to(payload: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in payload)


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
    """A client that, unlike production, reuses a slot as soon as it gives up; and the record of what it asked."""

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
        if begun % 97 == 0 and not self.thaw_ns:
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
        times = [self.network.next_ns(), self.thaw_ns or None, *(call.deadline_ns for call in self.calls if call)]
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
    assert min(vars(counts).values()) > 50, f"seed {SEED}: the adversary was idle: {counts}"


@pytest.mark.parametrize(
    "mutant", [validates_in_place, believes_any_sequence, skips_the_checksum, believes_the_signal]
)
def test_a_reader_that_leaves_a_check_out_accepts_wrong_replies(mutant: Reader) -> None:
    outcome = World(SEED, HOSTILE, mutant).run(4_000)
    assert outcome.wrong > 0, f"seed {SEED}: {outcome}"


def test_one_seed_gives_one_run() -> None:
    def run(seed: int) -> tuple[str, Outcome, int]:
        world = World(seed, HOSTILE, copies_then_validates)
        return world.run(300).__dict__ and world.network.trace_hash, world.outcome, world.network.now()

    assert run(1) == run(1)
    assert run(1)[0] != run(2)[0]
