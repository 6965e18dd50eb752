"""A channel over simulated rails: links that delay, tear, stall, break and heal, by a seed and a virtual clock.

Both ends are the shipped engine (p2p/native/channel.h), driven through its C interface. Bytes are read from the
writer's memory when they are sent or when they land. What the world saw arrive is the judge: each message once, whole.
"""

from __future__ import annotations

import ctypes
import hashlib
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_int, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field

import numpy as np

from p2p import native
from p2p.window import WindowLayout

OWNER, WRITER = 71, 72
LAYOUT = WindowLayout(slots=8, payload_bytes=3000)
STEP_NS = 200_000
MS = 1_000_000
DONE, NOTE = 1, 2


class Event(Structure):
    _fields_ = (("kind", c_uint32), ("bytes", c_uint32), ("ticket", c_uint64), ("note", c_void_p))


WRITE = CFUNCTYPE(c_int, c_void_p, c_uint64, c_uint64, c_void_p, c_uint64, c_void_p, c_uint32)
TELL = CFUNCTYPE(c_int, c_void_p, c_void_p, c_uint32)
POLL = CFUNCTYPE(c_int, c_void_p, POINTER(Event))


class PathOps(Structure):
    _fields_ = (("write", WRITE), ("tell", TELL), ("poll", POLL))


class Path(Structure):
    _fields_ = (("ops", POINTER(PathOps)), ("self", c_void_p))


class Command(Structure):
    _fields_ = (
        ("kind", c_uint32),
        ("path", c_uint32),
        ("generation", c_uint32),
        ("blob_bytes", c_uint32),
        ("blob", ctypes.c_uint8 * 8128),
    )


CLOSE, OPEN, LOST = 1, 2, 3


class Counts(Structure):
    _fields_ = tuple(
        (name, c_uint64)
        for name in ("writes", "bytes", "sent_again", "repeated", "doubts", "closed", "opened", "waiting")
    )


class Config(Structure):
    _fields_ = tuple(
        (name, c_uint64)
        for name in ("paths", "piece_bytes", "silence_ns", "grace_ns", "reopen_first_ns", "reopen_last_ns")
    )


def library() -> ctypes.CDLL:
    """The native library, with the engine's functions declared."""
    lib = native.load()
    for name in ("p2p_writer_new", "p2p_owner_new"):
        getattr(lib, name).restype = c_void_p
    lib.p2p_writer_new.argtypes = (c_void_p, c_uint64, c_uint64, c_void_p, c_void_p)
    lib.p2p_owner_new.argtypes = (c_void_p, c_uint64, c_uint64, c_void_p, c_uint32, c_void_p, c_void_p)
    for name, arguments in {
        "free": (),
        "path_open": (c_uint32, c_uint32, Path, c_uint64),
        "path_closed": (c_uint32, c_uint32, c_uint64),
        "step": (c_uint64,),
        "command": (c_void_p,),
        "counts": (c_void_p,),
        "bye": (),
    }.items():
        getattr(lib, f"p2p_end_{name}").argtypes = (c_void_p, *arguments)
    lib.p2p_owner_offer.argtypes = (c_void_p, c_uint32, c_uint32, c_void_p, c_uint32, c_uint64)
    lib.p2p_writer_watch_slots.argtypes = (c_void_p,)
    for name in ("put", "signal"):
        getattr(lib, f"p2p_writer_{name}").argtypes = (c_void_p, c_uint64, c_uint64, c_uint64)
    return lib


@dataclass(kw_only=True)
class Rail:
    """A physical link: what happens to it happens to every transport that uses it."""

    bytes_per_s: float
    delay_ns: int
    cut: bool = False
    free_ns: int = 0


@dataclass
class Transport:
    """One opened path: in-order bytes both ways, as a TCP connection; a cut stalls it, healing delivers."""

    rail: Rail
    generation: int
    closed: bool = False  # by the owner's shell: nothing lands any more
    broken: bool = False  # the transport reports an error
    refuses: bool = False  # it says so of a write that is under way all the same
    to_owner: deque[bytes] = field(default_factory=deque)
    to_writer: deque[tuple[int, int, bytes]] = field(default_factory=deque)
    stalled: list[Callable[[], None]] = field(default_factory=list)


class World:
    """One channel of `paths` rails.

    Args:
        fences: False plants a mutant shell, which says that a path is closed while its bytes may still land.
    """

    def __init__(self, seed: int, paths: int = 2, *, fences: bool = True, bytes_per_s: float = 25e6) -> None:
        self.random = random.Random(seed)
        self.lib = library()
        self.fences = fences
        self.closing_ns = 10 * MS
        self.now_ns = 1
        self.order = itertools.count()
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.window = np.zeros(LAYOUT.nbytes, np.uint8)
        self.image = np.zeros(LAYOUT.nbytes, np.uint8)
        for memory in (self.window, self.image):
            self.lib.p2p_window_init(memory.ctypes.data, LAYOUT.nbytes, OWNER, LAYOUT.slots, LAYOUT.payload_bytes)
        config = Config(paths, 1024, 100 * MS, 20 * MS, 300 * MS, 3000 * MS)
        self.writer = self.lib.p2p_writer_new(self.image.ctypes.data, LAYOUT.nbytes, OWNER, byref(config), None)
        self.owner = self.lib.p2p_owner_new(self.window.ctypes.data, LAYOUT.nbytes, OWNER, None, 0, byref(config), None)
        self.lib.p2p_writer_watch_slots(self.writer)
        self.rails = [Rail(bytes_per_s=bytes_per_s, delay_ns=50_000) for _ in range(paths)]
        self.transports: dict[tuple[int, int], Transport] = {}
        self.keep: list[object] = []  # callbacks that native code holds
        self.frozen = {"writer": False, "owner": False}
        self.lost = {"writer": False, "owner": False}
        for i in range(paths):
            transport = self.transport(i, 0)
            self.lib.p2p_end_path_open(self.writer, i, 0, self.path(transport, "writer"), self.now_ns)
            self.lib.p2p_end_path_open(self.owner, i, 0, self.path(transport, "owner"), self.now_ns)

    # The network.

    def transport(self, rail: int, generation: int) -> Transport:
        return self.transports.setdefault((rail, generation), Transport(self.rails[rail], generation))

    def at(self, when_ns: int, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when_ns, next(self.order), act))

    def carry(self, transport: Transport, nbytes: int, act: Callable[[], None]) -> None:
        """Bytes over the rail, in turn with all others there; `act` when they have arrived."""
        rail = transport.rail
        rail.free_ns = max(rail.free_ns, self.now_ns) + int(nbytes / rail.bytes_per_s * 1e9)

        def arrive() -> None:
            # In order: behind what stalls, everything does.
            if rail.cut or transport.stalled:
                transport.stalled.append(act)
            else:
                act()

        self.at(rail.free_ns + rail.delay_ns, arrive)

    def path(self, transport: Transport, end: str) -> Path:
        def write(_: int, ticket: int, offset: int, source: int, nbytes: int, note: int, note_bytes: int) -> int:
            if transport.broken:
                return -1
            if transport.refuses:
                transport.broken = True
            told = ctypes.string_at(note, note_bytes)
            cut = self.random.randint(0, nbytes)
            # In the kernel's buffers already, or still to be read.
            early = ctypes.string_at(source, nbytes) if self.random.random() < 0.5 else None

            def land(a: int, b: int) -> Callable[[], None]:
                def act() -> None:
                    if not transport.closed:
                        data = early[a:b] if early else ctypes.string_at(source + a, b - a)
                        ctypes.memmove(self.window.ctypes.data + offset + a, data, b - a)

                return act

            def finish() -> None:
                land(cut, nbytes)()
                if not transport.closed:
                    transport.to_owner.append(told)
                    self.carry(transport, 64, lambda: transport.to_writer.append((DONE, ticket, b"")))

            if cut:
                self.carry(transport, cut, land(0, cut))
            self.carry(transport, nbytes - cut + 64, finish)
            return -1 if transport.broken else 0

        def tell(_: int, note: int, note_bytes: int) -> int:
            if transport.broken:
                return -1
            told = ctypes.string_at(note, note_bytes)
            if end == "writer":
                self.carry(transport, 64, lambda: transport.to_owner.append(told))
            else:
                self.carry(transport, 64, lambda: transport.to_writer.append((NOTE, 0, told)))
            return 0

        def poll(_: int, event: Event) -> int:
            if transport.broken:
                return -1
            queue = transport.to_writer if end == "writer" else transport.to_owner
            if not queue:
                return 0
            item = queue.popleft()
            kind, ticket, told = item if isinstance(item, tuple) else (NOTE, 0, item)
            held = ctypes.create_string_buffer(told, max(1, len(told)))
            transport_notes[0] = held
            event[0] = Event(kind, len(told), ticket, ctypes.addressof(held))
            return 1

        transport_notes: list[object] = [None]
        ops = PathOps(WRITE(write), TELL(tell), POLL(poll))
        self.keep.append((ops, transport_notes))
        return Path(ctypes.pointer(ops), None)

    def cut(self, rail: int) -> None:
        """Nothing gets through any more, and nobody is told."""
        self.rails[rail].cut = True

    def heal(self, rail: int) -> None:
        """What stalled arrives now, however late."""
        self.rails[rail].cut = False
        for (index, _), transport in list(self.transports.items()):
            if index == rail:
                stalled, transport.stalled = transport.stalled, []
                for act in stalled:
                    act()

    # The shells of both ends.

    def obey(self, end: str) -> None:
        command = Command()
        while self.lib.p2p_end_command(getattr(self, end), byref(command)):
            index, generation = command.path, command.generation
            if command.kind == LOST:
                self.lost[end] = True
            elif command.kind == CLOSE and end == "owner":
                self.at(self.now_ns + self.closing_ns, lambda i=index, g=generation: self.close(i, g))
            elif command.kind == OPEN and end == "owner":
                self.at(self.now_ns + 30 * MS, lambda i=index, g=generation: self.offer(i, g))
            elif command.kind == OPEN:
                blob = bytes(command.blob[: command.blob_bytes])
                self.at(self.now_ns + 30 * MS, lambda i=index, g=generation, b=blob: self.join(i, g, b))

    def close(self, index: int, generation: int) -> None:
        if self.fences:
            self.transport(index, generation).closed = True
        self.lib.p2p_end_path_closed(self.owner, index, generation, self.now_ns)

    def offer(self, index: int, generation: int) -> None:
        self.transport(index, generation)
        address = b"rail %d, %d" % (index, generation)
        self.lib.p2p_owner_offer(self.owner, index, generation, address, len(address), self.now_ns)

    def join(self, index: int, generation: int, address: bytes) -> None:
        assert address == b"rail %d, %d" % (index, generation)
        transport = self.transport(index, generation)

        def welcome() -> None:
            self.lib.p2p_end_path_open(self.writer, index, generation, self.path(transport, "writer"), self.now_ns)

        def hello() -> None:
            opened = self.lib.p2p_end_path_open(
                self.owner, index, generation, self.path(transport, "owner"), self.now_ns
            )
            if opened == 0:
                self.carry(transport, 64, welcome)

        self.carry(transport, 64, hello)

    def step(self) -> None:
        """One turn of everything."""
        self.now_ns += STEP_NS
        while self.events and self.events[0][0] <= self.now_ns:
            heapq.heappop(self.events)[2]()
        for end in ("writer", "owner"):
            if not self.frozen[end]:
                self.lib.p2p_end_step(getattr(self, end), self.now_ns)
                self.obey(end)

    def counts(self, end: str) -> Counts:
        counts = Counts()
        self.lib.p2p_end_counts(getattr(self, end), byref(counts))
        return counts

    def close_all(self) -> None:
        self.lib.p2p_end_free(self.writer)
        self.lib.p2p_end_free(self.owner)


class Stream:
    """Messages through the slots of a world: written when a slot is free, read, judged, and the slot given back."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.sent: dict[int, bytes] = {}
        self.received: dict[int, bytes] = {}
        self.doubled = self.torn = self.backwards = 0
        self.sequence = 0
        self.free = deque(range(LAYOUT.slots))
        self.awaited = [0] * LAYOUT.slots
        self.seen = [0] * LAYOUT.slots
        self.header, self.copy = np.zeros(64, np.uint8), np.zeros(LAYOUT.payload_bytes, np.uint8)

    def send(self) -> None:
        index = self.free.popleft()
        self.sequence += 1
        payload = self.random.randbytes(self.random.choice((16, 700, 3000)))
        at = self.world.image.ctypes.data + LAYOUT.slot_offset(index)
        ctypes.memmove(at + 128, payload, len(payload))
        fields = np.array([0, OWNER, self.sequence, len(payload) << 32, 0, WRITER, 0, 0], np.uint64)
        self.world.lib.p2p_frame_seal(at, fields.ctypes.data)
        self.world.lib.p2p_signal_store(at, self.sequence)
        self.sent[self.sequence] = hashlib.sha256(payload).digest()
        self.awaited[index] = self.sequence

    def read(self) -> None:
        for index in range(LAYOUT.slots):
            at = self.world.window.ctypes.data + LAYOUT.slot_offset(index)
            signal = self.world.lib.p2p_signal_load(at)
            if signal == self.seen[index]:
                continue
            self.backwards += signal < self.seen[index]
            self.seen[index] = signal
            length = self.world.lib.p2p_frame_open(
                at,
                LAYOUT.payload_bytes,
                OWNER,
                WRITER,
                signal,
                self.header.ctypes.data,
                self.copy.ctypes.data,
            )
            if length < 0:
                self.torn += 1
                continue
            self.doubled += signal in self.received
            self.received[signal] = hashlib.sha256(self.copy[:length].tobytes()).digest()
            if signal == self.awaited[index]:
                self.world.at(self.world.now_ns + 100_000, lambda i=index: self.free.append(i))

    def run(self, messages: int, disturb: Callable[[int], None] = lambda sent: None, limit_s: float = 600) -> None:
        """Until all messages are there, or the time is over."""
        end_ns = self.world.now_ns + int(limit_s * 1e9)
        while len(self.received) < messages and self.world.now_ns < end_ns:
            while self.free and self.sequence < messages and not self.world.frozen["writer"]:
                self.send()
                disturb(self.sequence)
            self.world.step()
            # A reader may be slow: all that time nothing else may land in what it is to read.
            if self.random.random() < 0.2:
                self.read()
