"""The shm transport native to native (loops.cpp), and the memory copies it is measured against."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from ctypes import c_uint64, c_void_p
from pathlib import Path

import numpy as np

from benchmarks.transports.side import SILENCE_S, SLOTS, Load, Silent
from p2p import native
from p2p.build import ROOT, run_compiler
from p2p.local import ShmEndpoint
from p2p.window import WindowLayout

COPIES = ("copy_out", "put", "put_sealed", "copy_in", "open", "checksum")
_SILENT = -100


def build(folder: Path) -> Path:
    """Compile loops.cpp against the p2p library into a folder.

    Raises:
        BuildFailed: no compiler, or it refused.
    """
    path, source = folder / "loops.so", Path(__file__).with_name("loops.cpp")
    flags = ["-std=c++20", "-O3", "-shared", "-fPIC", "-Wall", "-Wextra", "-I", str(ROOT), str(source)]
    run_compiler([*flags, str(native.LIBRARY), f"-Wl,-rpath,{native.LIBRARY.parent}", "-o", str(path)])
    return path


class _Link(ctypes.Structure):
    _fields_ = (
        ("out", c_void_p),
        ("into", c_void_p),
        ("peer_page", c_void_p),
        ("own_page", c_void_p),
        *((name, c_uint64) for name in ("stride", "capacity", "slots", "own", "peer", "sent", "taken")),
    )


class NativeShm:
    """Sealed frames over shm, C++ on both ends."""

    pinned = True

    def __init__(self, endpoint: ShmEndpoint, links: int, payload_bytes: int, loops: Path) -> None:
        self._endpoint = endpoint
        self._layout = WindowLayout(slots=SLOTS, payload_bytes=payload_bytes)
        self._windows = [endpoint.export_window(self._layout.nbytes) for _ in range(links)]
        self._links = (_Link * links)()
        self._loops = ctypes.CDLL(str(loops))
        self._source = np.ones(payload_bytes, np.uint8)
        self._target = np.ones(payload_bytes, np.uint8)

    def offers(self) -> list[str]:
        """Descriptors."""
        return [window.descriptor.hex() for window in self._windows]

    def join(self, offers: Sequence[str]) -> None:
        """Connect to the windows of the other ends."""
        first = self._layout.slot_offset(0)
        for i, (window, offer) in enumerate(zip(self._windows, offers, strict=True)):
            peer = self._endpoint.connect(bytes.fromhex(offer))
            link = self._links[i]
            link.out, link.into = peer.address + first, window.address + first
            link.peer_page, link.own_page = peer.page_address, self._endpoint.page_address
            link.stride, link.capacity, link.slots = (
                self._layout.stride_bytes,
                self._layout.payload_bytes,
                SLOTS,
            )
            link.own, link.peer = self._endpoint.incarnation, peer.incarnation

    def drive(self, load: Load) -> list[int]:
        """As `Side.drive`."""
        ns = np.zeros(load.count, np.uint64)
        words = (c_uint64(word) for word in (len(self._links), load.request_bytes, load.depth, load.count))
        self._call(self._loops.loops_drive, *words, load.parked, *self._buffers(), c_void_p(ns.ctypes.data))
        return ns.tolist()

    def serve(self, load: Load) -> None:
        """As `Side.serve`."""
        words = (c_uint64(word) for word in (len(self._links), load.reply_bytes, load.count))
        self._call(self._loops.loops_serve, *words, load.parked, *self._buffers())

    def close(self) -> None:
        """Withdraw windows and peers."""
        self._endpoint.close()

    def _buffers(self) -> tuple[c_void_p, c_void_p]:
        return c_void_p(self._source.ctypes.data), c_void_p(self._target.ctypes.data)

    def _call(self, loop: ctypes._NamedFuncPointer, *arguments: object) -> None:
        result = loop(self._links, *arguments)
        if result == _SILENT:
            raise Silent(f"nothing came for {SILENCE_S:.0f} s; the other process has ended or is stuck.")
        if result:
            raise RuntimeError(f"a frame was refused with {result} (p2p/native/frame.h): the benchmark is wrong.")


class Copies:
    """memcpy, put, seal and open in one process, in turn over as many slots and private buffers of `nbytes`."""

    def __init__(self, loops: Path, nbytes: int, pieces: int = 1) -> None:
        self._copy = ctypes.CDLL(str(loops)).loops_copy
        self._copy.restype = c_uint64
        self._nbytes = nbytes
        self._stride = WindowLayout(slots=1, payload_bytes=nbytes).stride_bytes
        self._pieces = pieces
        size = self._stride * pieces
        file = os.memfd_create("copies")
        os.ftruncate(file, size)
        # As a window is: shared memory. Written once, so that no page is missing later.
        self._slots = np.frombuffer(mmap.mmap(file, size), np.uint8)
        os.close(file)
        self._buffers = np.ones(size, np.uint8)
        self._slots[:] = 1

    def ns(self, what: str, calls: int) -> int:
        """Of so many calls of one of COPIES; `open` needs `put_sealed` on every slot before it."""
        words = [c_uint64(word) for word in (self._pieces, self._nbytes, calls)]
        slots, buffers = c_void_p(self._slots.ctypes.data), c_void_p(self._buffers.ctypes.data)
        ns = self._copy(COPIES.index(what), slots, c_uint64(self._stride), buffers, *words)
        if not ns:
            raise RuntimeError("a frame sealed here was refused: the benchmark is wrong.")
        return ns


class Memcpy:
    """What no transport can beat: the bytes of a request and its reply copied within one process."""

    pinned = True

    def __init__(self, loops: Path) -> None:
        self._loops = loops
        self._copies: dict[tuple[int, int], Copies] = {}

    def offers(self) -> list[str]:
        """Nothing to know."""
        return [""]

    def join(self, offers: Sequence[str]) -> None:
        """Nobody to join."""

    def drive(self, load: Load) -> list[int]:
        """Round trips one by one; where several requests are under way, requests only, in one go."""
        key = (load.request_bytes, load.depth)
        if key not in self._copies:
            self._copies[key] = Copies(self._loops, *key)
        copies = self._copies[key]
        if load.depth > 1:
            return [copies.ns("copy_out", load.count) // load.count] * load.count
        return [copies.ns("copy_out", 1) + copies.ns("copy_in", 1) for _ in range(load.count)]

    def serve(self, load: Load) -> None:
        """Nobody asks."""

    def close(self) -> None:
        """Nothing is kept."""
