"""What shm and cuda promise alike, between real processes: proof of life, secrecy, retirement, nothing left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p.descriptor import Transport, decode
from p2p.endpoint import ConnectRefused, DescriptorInvalid, EndpointClosed, PeerGone, Status
from tests.host_stalls import bounded
from tests.p2p.one_host import OneHost, forge, hangs_up, open_fds, retired_bytes
from tests.p2p.peer_process import CHILD, PARENT

pytestmark = pytest.mark.alone

SOCKET_BYTES = 37  # of the address: the name of the owner's socket


@pytest.fixture
def endpoint(one_host: OneHost) -> Iterator[Any]:
    with one_host.endpoint("parent", PARENT) as made:
        yield made


def test_a_killed_peer_is_noticed_within_100_ms(one_host: OneHost, endpoint: Any) -> None:
    with one_host.child("hold") as other:
        window = endpoint.export_window(4096)
        other.say(window.descriptor.hex())
        assert other.hear() == "connected"
        assert endpoint.status(window) is Status.ALIVE
        other.freeze()
        assert not hangs_up(window.liveness_fd, 0.05), "a frozen process keeps its mapping: it is not gone"
        with bounded(0.1):
            other.process.send_signal(signal.SIGKILL)
            assert hangs_up(window.liveness_fd, 60.0)
        assert endpoint.status(window) is Status.GONE


def test_a_dead_owner_is_noticed_by_the_writer(one_host: OneHost, endpoint: Any) -> None:
    with one_host.child("wake") as other:
        peer = endpoint.connect(bytes.fromhex(other.hear()))
        endpoint.signal(peer, 0, 1)
        other.process.send_signal(signal.SIGKILL)
        assert hangs_up(peer.liveness_fd, 60.0)
        with pytest.raises(PeerGone, match="child has ended or withdrew the window"):
            endpoint.signal(peer, 0, 2)
        endpoint.put(peer, 0, b"into the mapping, which outlives the dead")


def test_a_wrong_token_is_refused_and_the_right_one_still_works(one_host: OneHost, endpoint: Any) -> None:
    window = endpoint.export_window(4096)
    with one_host.endpoint("other", CHILD) as other:
        *most, last = decode(window.descriptor).token
        for token in (bytes(32), bytes([*most, last ^ 1])):
            with pytest.raises(ConnectRefused, match="parent refuses: this descriptor was withdrawn or taken"):
                other.connect(forge(window.descriptor, token=token))
        other.connect(window.descriptor)
        with pytest.raises(ConnectRefused, match="withdrawn or taken"):
            other.connect(window.descriptor)


def test_a_descriptor_that_lies_about_the_size_is_refused(one_host: OneHost, endpoint: Any) -> None:
    window = endpoint.export_window(4096)
    with one_host.endpoint("other", CHILD) as other, pytest.raises(ConnectRefused, match="makes no sense"):
        other.connect(forge(window.descriptor, nbytes=8192))


@pytest.mark.parametrize("change", [{"transport": Transport.SIM}, {"address": b"/tmp/somewhere"}])
def test_a_descriptor_of_another_transport_is_refused(
    one_host: OneHost, endpoint: Any, change: dict[str, object]
) -> None:
    with pytest.raises(DescriptorInvalid, match=f"this endpoint speaks {one_host.name}"):
        endpoint.connect(forge(endpoint.export_window(4096).descriptor, **change))


def raw_socket(endpoint: Any) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(60)
    link.connect(decode(endpoint.export_window(4096).descriptor).address[:SOCKET_BYTES])
    return link


def test_callers_that_say_nothing_delay_nobody_and_are_hung_up_on(one_host: OneHost, endpoint: Any) -> None:
    silent = [raw_socket(endpoint) for _ in range(5)]
    # It takes longer where a caller waits for those that say nothing.
    with bounded(0.5), one_host.endpoint("other", CHILD) as other:
        other.connect(endpoint.export_window(4096).descriptor)
    for link in silent:
        assert link.recv(1) == b"", "hung up on after the handshake's time is over"
        link.close()


def test_noise_in_place_of_a_hello_is_refused(endpoint: Any) -> None:
    for seed in range(20):
        with raw_socket(endpoint) as link:
            link.sendall(random.Random(seed).randbytes(64))
            answer = link.recv(100)
            assert answer[:8] == b"P2PA\x03\0\0\0" and link.recv(1) == b"", f"seed {seed}"


@pytest.mark.skipif(os.geteuid() != 0, reason=f"needs root to become another user, found uid {os.geteuid()}")
def test_another_user_is_hung_up_on_even_with_the_right_token(endpoint: Any) -> None:
    program = (
        "import os, socket, sys; os.setuid(int(sys.argv[3])); s = socket.socket(socket.AF_UNIX)\n"
        "s.settimeout(60)\n"
        "s.connect(bytes.fromhex(sys.argv[1])); s.sendall(bytes.fromhex(sys.argv[2])); print(s.recv(4))"
    )

    def answer(uid: int) -> str:
        offer = decode(endpoint.export_window(4096).descriptor)
        hello = b"P2PH" + struct.pack("<HHQ", 1, 0, CHILD) + offer.token + bytes(16)
        command = [sys.executable, "-c", program, offer.address[:SOCKET_BYTES].hex(), hello.hex(), str(uid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()

    assert answer(0) == "b'P2PA'"
    # Hung up on with or without its hello read: nothing, or a reset.
    assert answer(65534) in ("b''", "")


def test_of_many_callers_with_one_descriptor_exactly_one_gets_the_window(one_host: OneHost, endpoint: Any) -> None:
    window = endpoint.export_window(4096)
    outcomes: list[str] = []

    def call(number: int) -> None:
        with one_host.endpoint(f"caller-{number}", number) as caller:
            try:
                caller.connect(window.descriptor)
                outcomes.append("connected")
                time.sleep(0.1)
            except ConnectRefused:
                outcomes.append("refused")

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["connected"] + ["refused"] * 7


def test_a_closed_window_stays_retired_until_its_peer_lets_go(one_host: OneHost, endpoint: Any) -> None:
    with one_host.endpoint("other", CHILD) as other:
        window = endpoint.export_window(8192)
        peer = other.connect(window.descriptor)
        window.close()
        window.close()
        assert retired_bytes(endpoint) == window.held_bytes >= 8192
        assert other.status(peer) is Status.GONE, "the writer is told"
        other.put(peer, 0, b"late")
        endpoint.progress()
        assert retired_bytes(endpoint) == window.held_bytes
        other.disconnect(peer)
        other.disconnect(peer)
        endpoint.progress()
        assert retired_bytes(endpoint) == 0
        with pytest.raises(EndpointClosed, match="window was closed"):
            window.poll(0, 1)


def test_a_peer_that_never_lets_go_is_refused_at_the_bound(one_host: OneHost) -> None:
    limit_bytes = 10_000 if one_host.driver is None else 5 << 20
    with (
        one_host.endpoint("owner", PARENT, retired_limit_bytes=limit_bytes) as owner,
        one_host.endpoint("other", CHILD) as other,
        one_host.endpoint("third", CHILD + 1) as third,
    ):
        peers = []
        for _ in range(3):
            window = owner.export_window(4096)
            peers.append(other.connect(window.descriptor))
            window.close()
        window = owner.export_window(4096)
        with pytest.raises(ConnectRefused, match="too much memory is retired for this peer"):
            other.connect(window.descriptor)
        third.connect(window.descriptor)
        other.disconnect(peers[0])
        other.connect(owner.export_window(4096).descriptor)


def test_a_disconnected_peer_is_noticed_and_writes_no_more(one_host: OneHost, endpoint: Any) -> None:
    with one_host.child("leave") as other:
        window = endpoint.export_window(4096)
        other.say(window.descriptor.hex())
        assert other.hear() == "connected"
        assert not hangs_up(window.liveness_fd, 0)
        other.say("go")
        assert other.hear() == "disconnected"
        assert hangs_up(window.liveness_fd, 0)
        assert endpoint.status(window) is Status.GONE


class OfOthers:
    """What other tests left in this process, which is not counted: it may go meanwhile."""

    def __init__(self) -> None:
        gc.collect()
        self.fds, self.threads = open_fds(), threading.enumerate()
        self.memory = set(mapped_memory())


def mapped_memory() -> list[str]:
    """The inode of each mapping of this package's memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if "memfd:p2p" in line or "memfd:fake-cuda" in line]


def left_behind(one_host: OneHost, of_others: OfOthers) -> tuple[int, int, int, dict[str, int]]:
    """(open file descriptors, threads, mappings of this package's memory, what the driver holds)."""
    gc.collect()
    mappings = sum(inode not in of_others.memory for inode in mapped_memory())
    threads = sum(thread not in of_others.threads for thread in threading.enumerate())
    return len(open_fds() - of_others.fds), threads, mappings, one_host.live()


@pytest.mark.full(seconds=8)
def test_nothing_is_left_behind_after_close(one_host: OneHost) -> None:
    of_others = OfOthers()
    before = left_behind(one_host, of_others)
    for _ in range(20):
        a, b = one_host.endpoint("a", 1), one_host.endpoint("b", 2)
        windows = [a.export_window(4096) for _ in range(3)]
        peers = [b.connect(window.descriptor) for window in windows[:2]]
        windows[0].close()
        with pytest.raises(ConnectRefused):
            b.connect(windows[0].descriptor)
        assert left_behind(one_host, of_others)[:3] > before[:3]
        a.close()
        b.close()
        a.close()
        b.close()
        del windows, peers, a, b
    assert left_behind(one_host, of_others) == before


def test_everything_is_refused_after_close(one_host: OneHost, endpoint: Any) -> None:
    with one_host.endpoint("other", CHILD) as other:
        offer = other.export_window(4096).descriptor
        peer = endpoint.connect(offer)
        window = endpoint.export_window(4096)
        endpoint.close()
        for action in (
            lambda: endpoint.export_window(4096),
            lambda: endpoint.connect(offer),
            lambda: endpoint.put(peer, 0, b"x"),
            lambda: endpoint.signal(peer, 0, 1),
            lambda: endpoint.page_address,
            lambda: peer.address,
            lambda: window.memory,
        ):
            with pytest.raises(EndpointClosed):
                action()
        assert endpoint.status(peer) is Status.GONE is endpoint.status(window)
        endpoint.progress()
        with pytest.raises(ConnectRefused, match="parent does not answer"):
            other.connect(window.descriptor)


def test_an_owner_that_is_frozen_is_given_up_on_in_time(one_host: OneHost, endpoint: Any) -> None:
    with one_host.child("wake") as other:
        descriptor = bytes.fromhex(other.hear())
        other.freeze()
        with pytest.raises(ConnectRefused, match=r"child does not answer: timed out"):
            endpoint.connect(descriptor, timeout_s=0.2)


@pytest.mark.parametrize("offset, data", [(-1, b"x"), (4096, b"x"), (4000, bytes(97))])
def test_puts_and_signals_outside_the_window_are_refused(
    one_host: OneHost, endpoint: Any, offset: int, data: bytes
) -> None:
    with one_host.endpoint("other", CHILD) as other:
        peer = other.connect(endpoint.export_window(4096).descriptor)
        with pytest.raises(ValueError, match="do not lie in a window of 4096"):
            other.put(peer, offset, data)
        with pytest.raises(ValueError, match="not 8-aligned in 4096 bytes"):
            other.signal(peer, offset + 4092, 1)


def test_impossible_endpoints_and_windows_are_refused(one_host: OneHost, endpoint: Any) -> None:
    for arguments in (("", 1), ("x" * 256, 1), ("x", -1), ("x", 1 << 64)):
        with pytest.raises(ValueError, match="1 to 255 bytes and a u64 needed"):
            one_host.endpoint(*arguments)
    with pytest.raises(ValueError, match="has room for 1 to 63"):
        one_host.endpoint("x", 1, lanes=64)
    with pytest.raises(ValueError, match="a window of 0 bytes asked for"):
        endpoint.export_window(0)
