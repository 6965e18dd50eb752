"""The other process of the nixl tests: `python -m tests.p2p.nixl_process ROLE`, lines over stdin and stdout."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import sys
import time

import numpy as np

from p2p import native
from p2p.endpoint import PeerGone, Status
from p2p.frame import open_frame
from p2p.nixl import NixlEndpoint, NixlPeer, NixlWindow
from p2p.window import WindowLayout

LAYOUT = WindowLayout(slots=2, payload_bytes=256 * 1024)
PARENT, CHILD = 101, 202
RAILS = tuple(os.environ.get("RAILS", "").split(","))


def say(text: str) -> None:
    print(text, flush=True)


def hear() -> str:
    return sys.stdin.readline().strip()


def lay_out(window: NixlWindow) -> NixlWindow:
    """Write the header page that tells the peer where the slots are."""
    layout = (LAYOUT.slots, LAYOUT.payload_bytes)
    # No assert: in the process of its own it would not be made under `python -O`.
    if native.load().p2p_window_init(window.address, window.nbytes, window.incarnation, *layout) != 0:
        raise ValueError(f"a window of {window.nbytes} bytes has no room for {layout}")
    return window


def send(peer: NixlPeer, index: int, sequence: int, payload: bytes) -> None:
    """One frame by native code, into the image: payload, header, signal, doorbell."""
    library, at = native.load(), peer.address + LAYOUT.slot_offset(index)
    ctypes.memmove(at + 128, payload, len(payload))
    fields = np.zeros(8, np.uint64)
    fields[1], fields[2] = peer.incarnation, sequence
    fields[3], fields[5] = len(payload) << 32, CHILD if peer.incarnation == PARENT else PARENT
    library.p2p_frame_seal(at, fields.ctypes.data)
    library.p2p_signal_store(at, sequence)
    library.p2p_bell_ring(peer.page_address, 0)


def echo() -> None:
    """Send every frame back with its payload reversed, waiting on the own doorbell."""
    with NixlEndpoint("child", CHILD) as endpoint:
        window = lay_out(endpoint.export_window(LAYOUT.nbytes))
        say(window.descriptor.hex())
        peer = endpoint.connect(bytes.fromhex(hear()))
        say("connected")
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


def own() -> None:
    """Export windows as told (`SIZE`), and say the SHA-256 of one when its signal at 0 is there (`digest N`)."""
    with NixlEndpoint("child", CHILD, rails=RAILS) as endpoint:
        windows: list[NixlWindow] = []
        while words := hear().split():
            if words[0] == "digest":
                window, value = windows[-1], int(words[1])
                while window.poll(0, 1)[0] != value:
                    time.sleep(0.0005)
                say(hashlib.sha256(window.memory[8:]).hexdigest())
            else:
                windows.append(endpoint.export_window(int(words[0])))
                say(windows[-1].descriptor.hex())


def write() -> None:
    """Connect, and for ever write a rising number over the whole window, each with its signal."""
    with NixlEndpoint("child", CHILD) as endpoint:
        peer = endpoint.connect(bytes.fromhex(hear()))
        say("connected")
        with contextlib.suppress(PeerGone):
            for number in range(1, 1 << 62):
                endpoint.put(peer, 8, np.full(peer.nbytes // 8 - 1, number, np.uint64).view(np.uint8))
                endpoint.signal(peer, 0, number)
                time.sleep(0.002)
        say("gone")
        hear()


def leave() -> None:
    """Connect, then put and leave at once when told."""
    endpoint = NixlEndpoint("child", CHILD, rails=RAILS)
    peer = endpoint.connect(bytes.fromhex(hear()), timeout_s=60)
    say("connected")
    hear()
    endpoint.put(peer, 8, b"\x07" * (peer.nbytes - 8))
    endpoint.signal(peer, 0, 7)
    endpoint.disconnect(peer)
    say("disconnected")
    hear()


def hold() -> None:
    """Connect as the incarnation told, and live on."""
    incarnation, descriptor = hear().split()
    endpoint = NixlEndpoint("child", int(incarnation))
    endpoint.connect(bytes.fromhex(descriptor))
    say("connected")
    hear()


if __name__ == "__main__":
    {role.__name__: role for role in (echo, own, write, leave, hold)}[sys.argv[1]]()
