"""The other process of the tests of one host: `python peer_process.py ROLE [STAND_IN]`, lines over stdin and stdout.

It speaks shm, or cuda where the file of a stand-in for libcuda is named.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

import numpy as np

from p2p import native
from p2p.cuda import CudaEndpoint
from p2p.cuda_driver import CudaDriver
from p2p.endpoint import Peer, Status
from p2p.frame import open_frame
from p2p.local import ShmEndpoint
from p2p.window import WindowLayout

LAYOUT = WindowLayout(slots=2, payload_bytes=256 * 1024)
PARENT, CHILD = 101, 202


def say(text: str) -> None:
    print(text, flush=True)


def hear() -> str:
    return sys.stdin.readline().strip()


def new_endpoint() -> Any:
    if len(sys.argv) < 3:
        return ShmEndpoint("child", CHILD, 3)
    return CudaEndpoint("child", CHILD, 3, driver=CudaDriver.load(sys.argv[2]))


def connect(endpoint: Any) -> Any:
    return endpoint.connect(bytes.fromhex(hear()))


def echo() -> None:
    """Export a window, connect to the parent's, and send every frame back with its payload reversed."""
    with new_endpoint() as endpoint:
        window = endpoint.export_window(LAYOUT.nbytes)
        say(window.descriptor.hex())
        peer = connect(endpoint)
        slot = window.memory[LAYOUT.slot_offset(1) :]
        library, sequence = native.load(), 1
        while endpoint.status(window) is Status.ALIVE:
            seen = library.p2p_bell_read(endpoint.page_address, 0)
            if window.poll(LAYOUT.slot_offset(1), 1)[0] != sequence:
                library.p2p_bell_wait(endpoint.page_address, 0, seen, 5_000_000)
                continue
            frame = open_frame(slot.data, LAYOUT.payload_bytes, CHILD, PARENT, sequence)
            send(peer, 1, sequence, frame.payload[::-1])
            sequence += 1


def send(peer: Peer, index: int, sequence: int, payload: bytes, attempt: int = 0, sender: int | None = None) -> None:
    """One frame by native code: payload, header, signal, doorbell."""
    library, at = native.load(), peer.address + LAYOUT.slot_offset(index)
    ctypes.memmove(at + 128, payload, len(payload))
    fields = np.zeros(8, np.uint64)
    fields[1], fields[2], fields[5] = (
        peer.incarnation,
        sequence,
        sender or (CHILD if peer.incarnation == PARENT else PARENT),
    )
    fields[3] = attempt | len(payload) << 32
    library.p2p_frame_seal(at, fields.ctypes.data)
    library.p2p_signal_store(at, sequence)
    library.p2p_bell_ring(peer.page_address, 0)


def hold() -> None:
    """Connect and live on."""
    endpoint = new_endpoint()
    connect(endpoint)
    say("connected")
    time.sleep(60)


def own() -> None:
    """Export a window of 8192 bytes and put the answer, reversed, into the peer's for each signal in it."""
    endpoint = new_endpoint()
    window = endpoint.export_window(8192)
    say(window.descriptor.hex())
    peer = connect(endpoint)
    say("connected")
    for sequence in range(1, 1 << 30):
        while window.poll(0, 1)[0] != sequence:
            time.sleep(0.0005)
        endpoint.put(peer, 64, window.memory[64:1064][::-1].copy())
        endpoint.signal(peer, 0, sequence)


def leave() -> None:
    """Connect, then disconnect when told."""
    endpoint = new_endpoint()
    peer = connect(endpoint)
    say("connected")
    hear()
    endpoint.disconnect(peer)
    say("disconnected")
    hear()


def tear() -> None:
    """Overwrite slot 0 for ever, without waiting for anyone: one sequence, another content each time."""
    endpoint = new_endpoint()
    peer = connect(endpoint)
    payloads = [np.full(LAYOUT.payload_bytes // 8, 0x0101010101010101 * i, np.uint64).tobytes() for i in range(200)]
    say("writing")
    for turn in range(10**9):
        attempt = turn % len(payloads)
        send(peer, 0, 1, payloads[attempt], attempt)


def wake() -> None:
    """Wait on the own doorbell for signal 1, 2, 3...; say how long after the ring each wait ended, in ns."""
    with new_endpoint() as endpoint:
        window = endpoint.export_window(4096)
        say(window.descriptor.hex())
        library, sequence = native.load(), 1
        while hear():
            rang = 0
            seen = library.p2p_bell_read(endpoint.page_address, 2)
            while window.poll(0, 1)[0] != sequence:
                rang = library.p2p_bell_wait(endpoint.page_address, 2, seen, 5_000_000)
                seen = library.p2p_bell_read(endpoint.page_address, 2)
            say(f"{rang} {time.monotonic_ns() - int(window.poll(8, 1)[0])}")
            sequence += 1


if __name__ == "__main__":
    {role.__name__: role for role in (echo, hold, own, leave, tear, wake)}[sys.argv[1]]()
