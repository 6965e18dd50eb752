"""Every place where the Python code, or native code bound by it, reads what another process wrote.

A target takes any bytes, makes of them a message that is right, damages it as the bytes say, and hands it over. It
raises where the reader does anything but take or refuse it by its own error, or where two readers differ. The same
targets are run by hypothesis, by a fuzzer that coverage guides, and with what was found before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from experts import wire
from experts.manifest import Manifest, ManifestInvalid, PackLayout
from experts.model import CHOICES, Dtype
from p2p import native as p2p_native
from p2p.descriptor import Descriptor, Transport, decode
from p2p.endpoint import ConnectRefused, DescriptorInvalid
from p2p.frame import HEADER_BYTES, PAYLOAD_OFFSET, SIGNAL_BYTES, FrameInvalid, Header
from p2p.local import ShmEndpoint
from p2p.shm_link import create_memory
from tests.experts import wire_codec
from tests.experts.steps import MODEL_HASH, OK, PENDING, Call, World, shape_of
from tests.fuzz.choices import Choices, damage
from tests.p2p.frame_reference import checksum, open_frame, seal_frame

SHAPE = shape_of(layers=2, experts=4, hidden=24, intermediate=8, top_k=2)


def descriptor(data: bytes) -> None:
    """Descriptors: what is taken is exactly what its fields encode to."""
    choices = Choices(data)
    made = Descriptor(
        transport=choices.pick(list(Transport)),
        incarnation=choices.value(8),
        nbytes=1 + choices.value(8) % (1 << 40),
        address=choices.take(1 + choices.below(107)),
        name="".join(chr(choices.pick((97, 0, 0x7F, 0xE9, 0x20AC, 0x1F600))) for _ in range(choices.below(20))),
        token=choices.take(32),
    ).encode()
    raw = bytearray(damage(made, choices))
    if choices.below(3) and len(raw) >= 16:
        struct.pack_into("<I", raw, 12, zlib.crc32(raw[:12] + bytes(4) + raw[16:]))
    try:
        read = decode(bytes(raw))
    except DescriptorInvalid:
        assert bytes(raw) != made, "a good descriptor was refused"
    else:
        assert read.encode() == bytes(raw), f"{bytes(raw)!r} was taken for {read}"


def seal(payload: bytes, header: Header, slot_bytes: int, choices: Choices) -> bytes:
    """A slot with that frame; perhaps with a damaged header, perhaps sealed again after that."""
    slot = bytearray(max(slot_bytes, PAYLOAD_OFFSET + len(payload)))
    seal_frame(memoryview(slot), header, payload)
    if choices.often(3):
        return bytes(slot[:slot_bytes])
    head = damage(bytes(slot[SIGNAL_BYTES:PAYLOAD_OFFSET]), choices, 2)[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    length = int.from_bytes(head[28:32], "little")
    if choices.below(4):
        sealed = checksum(head[:56], bytes(slot[PAYLOAD_OFFSET : PAYLOAD_OFFSET + length]))
        head = head[:56] + sealed.to_bytes(8, "little")
    slot[SIGNAL_BYTES:PAYLOAD_OFFSET] = head
    return bytes(slot[:slot_bytes])


def frame(data: bytes) -> None:
    """Frames: the native reader and the reference give one verdict, and the same bytes."""
    choices = Choices(data)
    capacity = choices.below(1500)
    sent = Header(
        incarnation=choices.value(8),
        sequence=choices.value(8),
        attempt=choices.below(1 << 16),
        length=choices.below(capacity + 1),
        remaining_ns=choices.value(8),
        sender=choices.value(8),
    )
    raw = seal(choices.take(sent.length), sent, PAYLOAD_OFFSET + capacity, choices)
    # Memory of exactly this size: a sanitizer sees a byte too many.
    slot, out = np.frombuffer(raw, np.uint8).copy(), np.zeros(max(capacity, 1), np.uint8)
    head = np.zeros(HEADER_BYTES, np.uint8)
    awaited = (sent.incarnation, sent.sender, sent.sequence)
    memory = (slot.ctypes.data, capacity, *awaited, head.ctypes.data, out.ctypes.data)
    verdict = p2p_native.load().p2p_frame_open(*memory)
    try:
        opened = open_frame(slot.data, capacity, *awaited)
    except FrameInvalid as refusal:
        assert verdict == refusal.reason, f"native says {verdict}, the reference {refusal}"
    else:
        assert (verdict, out[:verdict].tobytes()) == (opened.header.length, opened.payload)


@cache
def world(dtype: Dtype) -> World:
    """A server that lacks one expert, and a client; they outlive an input, their sequences rise."""
    made = World(shape=SHAPE, dtype=dtype, servers=1, seed=1, slots=1, slot_bytes=2000)
    for layer in range(SHAPE.layers):
        for expert in range(SHAPE.experts):
            made.hold(0, layer, expert)
    made.add_client(max_tokens=4)
    made.publish(0, 1)
    made.add_server()
    made.hold(1, 0, 0)
    made.add_client(max_tokens=4)
    return made


def wire_of(dtype: Dtype) -> wire.WireShape:
    """What the world's ends agreed on."""
    return wire.WireShape(shape=SHAPE, dtype=dtype, model_hash=MODEL_HASH)


def hash_again(payload: bytes) -> bytes:
    """The message with its routing hash made right, so that the checks behind it are reached too."""
    pairs = int.from_bytes(payload[32:36], "little")
    listed = payload[64 : 64 + 8 * pairs]
    if len(listed) != 8 * pairs:
        return payload
    return (
        payload[:16]
        + wire_codec.routing_hash(np.frombuffer(listed, wire_codec.PAIR)).to_bytes(8, "little")
        + payload[24:]
    )


def request_of(choices: Choices, dtype: Dtype) -> wire_codec.Request:
    """A request that is right."""
    count = 1 + choices.below(3)
    pairs = np.zeros(1 + choices.below(count * SHAPE.top_k), wire_codec.PAIR)
    for pair in pairs:
        pair["row"], pair["expert"] = choices.below(count), choices.below(SHAPE.experts)
        pair["k_slot"] = choices.below(SHAPE.top_k)
    rows = np.frombuffer(choices.take(count * SHAPE.hidden * dtype.nbytes), np.uint8).reshape(count, -1)
    element = np.float32 if dtype is Dtype.FLOAT32 else np.uint16
    return wire_codec.Request(layer=choices.below(2), rows=rows.view(element), pairs=pairs)


_sequence = iter(range(1, 1 << 62))


def request(data: bytes) -> None:
    """Requests: the native server serves what the reference can read and it holds, and says why it serves no other."""
    choices = Choices(data)
    dtype = choices.pick(CHOICES)
    place, number = world(dtype), choices.below(2)
    link = place.links[1, number]
    asked = wire_codec.encode_request(wire_of(dtype), request_of(choices, dtype))
    payload = damage(asked, choices)
    if choices.below(2):
        payload = hash_again(payload)
    payload = payload[: place.slot_bytes]
    sequence = next(_sequence)
    header = Header(incarnation=100 + number, sequence=sequence, length=len(payload), sender=1001)
    slot = seal(payload, header, PAYLOAD_OFFSET + place.slot_bytes, choices)
    memory = link.request.slot(0)
    memory[SIGNAL_BYTES : len(slot)] = np.frombuffer(slot, np.uint8)[SIGNAL_BYTES:]
    p2p_native.load().p2p_signal_store(memory.ctypes.data, sequence)
    assert place.library.expert_server_step(place.servers[number].handle, place.now_ns) == 1
    reply = open_frame(link.reply.slot(0).data, place.slot_bytes, 1001, 100 + number, sequence).payload
    read: wire_codec.Request | None = None
    with contextlib.suppress(FrameInvalid, wire_codec.WireInvalid):
        opened = open_frame(memory.data, place.slot_bytes, 100 + number, 1001, sequence)
        read = wire_codec.decode_request(wire_of(dtype), opened.payload, place.slot_bytes)
    status = int.from_bytes(reply[42:44], "little")
    if read is None or read.reply_lane >= 8:
        assert status == wire.Status.INVALID, f"the reference cannot read what got {status}: {payload!r}"
        return
    held = all((read.layer, int(expert)) in place.servers[number].held for expert in read.pairs["expert"])
    assert status == (wire.Status.OK if held else wire.Status.NOT_HELD)
    answer = wire_codec.decode_reply(wire_of(dtype), reply, read)
    for pair, row in zip(read.pairs, answer.rows, strict=False):
        wanted = place.weights.row(read.layer, int(pair["expert"]), _padded(read.rows[pair["row"]]))
        assert row.tobytes() == wanted.tobytes() or np.isnan(wanted).any(), "a row served beside others differs"


def _padded(row: np.ndarray) -> np.ndarray:
    """A row as it lies in a request."""
    padded = np.zeros(-(-row.nbytes // 64) * 64 // row.itemsize, row.dtype)
    padded[: len(row)] = row
    return padded


def reply(data: bytes) -> None:
    """Replies: the native client takes what the reference can read, refuses all else, and its call ends in time."""
    choices = Choices(data)
    dtype = choices.pick(CHOICES)
    place = world(dtype)
    link = place.links[0, 0]
    call = Call(place, 0, np.random.default_rng(choices.bits(1)), 1 + choices.below(3), choices.below(2))
    believed = True
    for _ in range(5):
        asked = link.request.slot(0)
        sequence = p2p_native.load().p2p_signal_load(asked.ctypes.data)
        if sequence == p2p_native.load().p2p_signal_load(link.reply.slot(0).ctypes.data):
            break
        place.step_servers()
        opened = open_frame(asked.data, place.slot_bytes, 100, 1000, sequence)
        read = wire_codec.decode_request(wire_of(dtype), opened.payload, place.slot_bytes)
        honest = open_frame(link.reply.slot(0).data, place.slot_bytes, 1000, 100, sequence).payload
        payload = damage(honest, choices)[: place.slot_bytes]
        header = Header(
            incarnation=1000,
            sequence=sequence,
            attempt=opened.header.attempt,
            length=len(payload),
            sender=100,
        )
        slot = seal(payload, header, PAYLOAD_OFFSET + place.slot_bytes, choices)
        link.reply.slot(0)[SIGNAL_BYTES : len(slot)] = np.frombuffer(slot, np.uint8)[SIGNAL_BYTES:]
        corrupt, wanted, foreign = place.stats(0, 0).corrupt, False, False
        with contextlib.suppress(FrameInvalid, wire_codec.WireInvalid):
            taken = open_frame(link.reply.slot(0).data, place.slot_bytes, 1000, 100, sequence)
            # What another release wrote is refused, and nobody's fault.
            if wire.HEADER_BYTES <= len(taken.payload) <= wire_of(dtype).reply_bytes(len(read.pairs)):
                words = np.frombuffer(taken.payload, wire_codec.HEADER, 1)[0]
                foreign = words["magic"] == wire.MAGIC and words["version"] != wire.VERSION
            answer = wire_codec.decode_reply(wire_of(dtype), taken.payload, read)
            wanted = answer.status is wire.Status.INVALID or taken.header.attempt == opened.header.attempt
            believed &= answer.status is not wire.Status.OK or taken.payload[64:] == honest[64:]
        status = call.step()
        assert place.stats(0, 0).corrupt - corrupt == (not wanted and not foreign), (
            f"the reference says {wanted}: {payload!r}"
        )
        if status != PENDING:
            break
    if call.status == PENDING:
        place.now_ns += 10**9
        call.step()
    assert call.status != PENDING, "a call went on past its deadline"
    if call.status == OK:
        assert call.exact() or not believed, "a reply that no server gave was believed"
    else:
        assert call.untouched(), "a lost call changed its output"
    # What is still out comes back, so that the next input finds free slots.
    place.step_servers()
    place.now_ns += 40 * 10**9


@cache
def caller() -> ShmEndpoint:
    """An endpoint that outlives an input."""
    return ShmEndpoint("caller", 6)


@cache
def owner() -> ShmEndpoint:
    """An endpoint that outlives an input."""
    return ShmEndpoint("owner", 5)


def hello(data: bytes) -> None:
    """Callers: whatever one says, in whatever pieces, only the whole hello gets the window, and others are heard."""
    choices = Choices(data)
    window = owner().export_window(4096)
    offer = decode(window.descriptor)
    whole = struct.pack("<4sHHQ32s16s", b"P2PH", 1, 0, 9, offer.token, bytes(16))
    said = damage(whole, choices)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link, contextlib.ExitStack() as files:
        link.settimeout(5)
        link.connect(offer.address)
        fds = [files.enter_context(Path(os.devnull).open("rb")).fileno() for _ in range(choices.below(3))]
        answer, passed = b"", []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for start in range(0, len(said), piece := 1 + choices.below(80)):
                socket.send_fds(link, [said[start : start + piece]], fds)
            link.shutdown(socket.SHUT_WR)
            answer, passed, _, _ = socket.recv_fds(link, 16, 4)
        for fd in passed:
            os.close(fd)
        # What is left unread behind the hello makes a hang-up a reset, which may overtake the answer.
        right = said[:64] == whole and len(said) == 64
        assert (len(answer), len(passed)) in (((16, 2),) if right else ((16, 2), (16, 0), (0, 0)))
        assert not passed or (said[:8] == whole[:8] and said[16:64] == whole[16:64]), f"{said!r} got the window"
    if not passed:
        with contextlib.suppress(ConnectRefused), ShmEndpoint("caller", 7) as caller:
            caller.connect(window.descriptor)
    window.close()
    owner().progress()


def _memory(nbytes: int, sealed: bool = True) -> int:
    if sealed:
        return create_memory("fuzz", nbytes)
    fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    return fd


FILES: Sequence[Callable[[], int]] = (
    lambda: _memory(4096),
    lambda: _memory(8192),
    lambda: _memory(4096, sealed=False),
    lambda: os.open("/dev/zero", os.O_RDWR),
    lambda: os.open("/", os.O_RDONLY),
    lambda: socket.socket().detach(),
)


def _open_files() -> set[tuple[str, str]]:
    """The open descriptors, each with what it is of."""
    found = set[tuple[str, str]]()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It was this look's own.
            found.add((path.name, str(path.readlink())))
    return found


def _is_of(number: str, address: bytes) -> bool:
    """Whether an open descriptor is a link to the listener of this address."""
    # Otherwise it is no socket, has no peer, or was closed meanwhile.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as link:
        return link.getpeername() == address
    return False


def answer(data: bytes) -> None:
    """Owners: whatever one answers, with whatever files, the caller connects or is refused, and keeps nothing open."""
    choices, connecting = Choices(data), caller()
    before = _open_files()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(b"\0p2p-fuzz-" + os.urandom(8).hex().encode())
        listener.listen()
        offer = Descriptor(
            transport=Transport.SHM,
            incarnation=5,
            nbytes=8192,
            address=listener.getsockname(),
            name="o",
            token=bytes(32),
        )
        whole = struct.pack("<4sIQ", b"P2PA", 0, 8192)
        said = damage(whole, choices, 2)
        kinds = [1, 0] if choices.often(2) else [choices.below(len(FILES)) for _ in range(choices.below(4))]
        sent = set[str]()

        def serve() -> None:
            link, _ = listener.accept()
            fds = [FILES[kind]() for kind in kinds]
            sent.update(str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in fds)
            with link, contextlib.suppress(OSError):
                link.recv(64, socket.MSG_WAITALL)
                socket.send_fds(link, [said], fds)
            for fd in fds:
                os.close(fd)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            peer = connecting.connect(offer.encode(), 5)
        except ConnectRefused:
            assert (said, kinds) != (whole, [1, 0]), "a good answer was refused"
        else:
            assert (said[:16], kinds) == (whole, [1, 0]), f"{said!r} with files {kinds} was taken for an answer"
            connecting.put(peer, 8191, b"x")
            connecting.disconnect(peer)
        thread.join()
    # Others in this process open and close files of their own meanwhile.
    new = _open_files() - before
    left = {(number, of) for number, of in new if of in sent or _is_of(number, offer.address)}
    assert not left, f"files were left open: {left}"


def manifest(data: bytes) -> None:
    """Manifests: what is taken is exactly what was written, for this layout."""
    choices = Choices(data)
    layout = PackLayout(shape=SHAPE, dtype=Dtype.BFLOAT16, fingerprint="ab" * 32, numerics_class="cpu-x-1")
    made = Manifest(layout=layout, entries=choices.take(64 * layout.count)).encode()
    raw = bytearray(damage(made, choices))
    if choices.below(3):
        raw[128:160] = hashlib.sha256(raw[:128] + raw[160:]).digest()
    try:
        read = Manifest.decode(bytes(raw), layout)
    except ManifestInvalid:
        assert bytes(raw) != made, "a good manifest was refused"
    else:
        assert read.encode() == bytes(raw), f"{bytes(raw)!r} was taken for {read}"


TARGETS: dict[str, Callable[[bytes], None]] = {
    "descriptor": descriptor,
    "frame": frame,
    "request": request,
    "reply": reply,
    "hello": hello,
    "answer": answer,
    "manifest": manifest,
}
