"""A stranger that reaches a nixl window's port, but was not invited: whatever it says changes nothing."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import struct
import time
from collections.abc import Iterator
from ctypes import c_char_p, c_int, c_uint32, c_uint64, c_void_p

import numpy as np
import pytest

from p2p import nixl_native
from p2p.descriptor import decode
from p2p.endpoint import Status
from p2p.nixl import NixlEndpoint

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(nixl_native.PACKAGE) is None, reason="needs package nixl-cu13, found none"
)
os.environ["UCX_NET_DEVICES"] = "lo"
OWNER, WRITER = 11, 22
HELLO, WROTE, SIGNAL, DOUBT, BYE = 6, 1, 2, 3, 32


class Ops(ctypes.Structure):
    """P2pPathOps of native/path.h; only `tell` and `poll` are called."""

    _fields_ = (
        ("write", c_void_p),
        ("tell", ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, c_uint32)),
        ("poll", ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)),
    )


class Path(ctypes.Structure):
    _fields_ = (("ops", ctypes.POINTER(Ops)), ("itself", c_void_p))


class Note(ctypes.Structure):
    """P2pNote of native/path.h."""

    _fields_ = (
        *(("magic", c_uint32), ("version", ctypes.c_uint8), ("kind", ctypes.c_uint8)),
        *(("path", ctypes.c_uint16), ("generation", c_uint32), ("blob_bytes", c_uint32)),
        *((name, c_uint64) for name in ("incarnation", "number", "first", "offset", "value", "checksum")),
    )


class Intruder:
    """An agent of its own that has learnt where a window's first agent listens."""

    def __init__(self, address: bytes) -> None:
        self.library = nixl_native.load()
        self.library.p2p_nixl_path_new.restype = c_void_p
        self.library.p2p_nixl_path_new.argtypes = (
            *(c_char_p, c_void_p, c_uint64, c_int, c_void_p, c_char_p, c_uint64),
        )
        self.library.p2p_nixl_path_join.argtypes = (c_void_p, c_char_p, c_uint32)
        self.library.p2p_nixl_path_ends.argtypes = (c_void_p,)
        self.library.p2p_nixl_path_ends.restype = Path
        self.library.p2p_nixl_path_free.argtypes = (c_void_p,)
        self.library.p2p_note_seal.argtypes = (ctypes.POINTER(Note), c_char_p, c_void_p)
        self.memory = np.zeros(4096, np.uint8)
        error = ctypes.create_string_buffer(200)
        self.path = self.library.p2p_nixl_path_new(b"", self.memory.ctypes.data, 4096, 0, None, error, 200)
        assert self.path, error.value
        (length,) = struct.unpack_from("<I", address)
        assert self.library.p2p_nixl_path_join(self.path, address[4 : 4 + length], length) == 0
        self.ends = self.library.p2p_nixl_path_ends(self.path)
        self.event = ctypes.create_string_buffer(64)

    def tell(self, note: bytes) -> None:
        assert self.ends.ops.contents.tell(self.ends.itself, note, len(note)) == 0
        self.listen()

    def listen(self) -> int:
        return self.ends.ops.contents.poll(self.ends.itself, self.event)

    def seal(self, blob: bytes = b"", **fields: int) -> bytes:
        note = Note(blob_bytes=len(blob), **({"incarnation": OWNER} | fields))
        sealed = ctypes.create_string_buffer(8192)
        count = self.library.p2p_note_seal(ctypes.byref(note), blob, sealed)
        assert count == 64 + len(blob)
        return sealed.raw[:count]

    def close(self) -> None:
        self.library.p2p_nixl_path_free(self.path)


@pytest.fixture
def owner() -> Iterator[NixlEndpoint]:
    with NixlEndpoint("owner", OWNER) as made:
        yield made


def test_noise_before_the_peer_connects_is_dropped_and_counted(owner: NixlEndpoint) -> None:
    window = owner.export_window(4096)
    intruder = Intruder(decode(window.descriptor).address)
    token = bytearray(decode(window.descriptor).token)
    token[7] ^= 1
    for seed in range(100):
        rng = random.Random(seed)
        noise = rng.randbytes(rng.choice((40, 64, 200, 8000)))
        hello = bytes(token) + struct.pack("<QQ", 9, seed) + rng.randbytes(seed)
        intruder.tell(noise)
        intruder.tell(intruder.seal(hello, kind=HELLO))
        intruder.tell(intruder.seal(rng.randbytes(seed), kind=rng.randrange(256), number=seed))
    end_s = time.monotonic() + 10
    while owner.refused < 300 and time.monotonic() < end_s:
        intruder.listen()
    assert owner.refused == 300 and window.peer_incarnation == 0
    with NixlEndpoint("writer", WRITER) as writer:
        peer = writer.connect(window.descriptor)
        writer.signal(peer, 0, 5)
        while window.poll(0, 1)[0] != 5:
            assert time.monotonic() < end_s + 10
            writer.progress()
    intruder.close()


def test_who_is_not_the_peer_can_neither_signal_nor_end_the_link(owner: NixlEndpoint) -> None:
    window = owner.export_window(4096)
    intruder = Intruder(decode(window.descriptor).address)
    with NixlEndpoint("writer", WRITER) as writer:
        peer = writer.connect(window.descriptor)
        writer.signal(peer, 0, 1)
        for fields in (
            {"kind": SIGNAL, "number": 2, "value": 666},
            {"kind": WROTE, "number": 2},
            {"kind": DOUBT, "value": 1},
            {"kind": BYE},
        ):
            note = intruder.seal(**fields)
            intruder.tell(note)
            # Bytes for the window's beginning, carried in front of the note.
            intruder.tell(struct.pack("<8sQQ", b"P2PCARD\x01", 0, 8) + bytes(8) + note)
        until_s = time.monotonic() + 0.5
        while time.monotonic() < until_s:
            intruder.listen()
        assert owner.status(window) is Status.ALIVE and window.poll(0, 1)[0] == 1
        writer.signal(peer, 0, 2)
        until_s = time.monotonic() + 10
        while window.poll(0, 1)[0] != 2:
            assert time.monotonic() < until_s
            writer.progress()
        assert writer.channel_counts(peer)["closed"] == 0
    intruder.close()
