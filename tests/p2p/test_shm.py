"""The shm transport between real processes: transfer, proof of life, secrecy, and nothing left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p import (
    ConnectRefused,
    DescriptorInvalid,
    EndpointClosed,
    FrameInvalid,
    NativeMissing,
    PeerGone,
    ShmEndpoint,
    Status,
    Transport,
    decode,
    native,
    open_frame,
)
from p2p.shm_link import create_memory, map_memory
from tests.p2p.peer_process import CHILD, LAYOUT, PARENT, send

CHILD_PROGRAM = Path(__file__).parent / "peer_process.py"
ROOT = Path(__file__).parents[2]


class Child:
    """A process of its own that plays one role of peer_process.py."""

    def __init__(self, role: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(CHILD_PROGRAM), role]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment
        )

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def child(role: str) -> Iterator[Child]:
    process = Child(role)
    try:
        yield process
    finally:
        process.kill()
        for pipe in (process.process.stdin, process.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def endpoint() -> Iterator[ShmEndpoint]:
    with ShmEndpoint("parent", PARENT) as made:
        yield made


def hangs_up(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(timeout_s * 1000))


def forge(descriptor: bytes, **changes: object) -> bytes:
    return replace(decode(descriptor), **changes).encode()  # type: ignore[arg-type]


def test_frames_travel_both_ways_between_processes(endpoint: ShmEndpoint) -> None:
    with child("echo") as other:
        window = endpoint.export_window(LAYOUT.nbytes)
        peer = endpoint.connect(bytes.fromhex(other.hear()))
        other.say(window.descriptor.hex())
        slot = window.memory[LAYOUT.slot_offset(1) :]
        for sequence in range(1, 301):
            payload = random.Random(sequence).randbytes(sequence * 37)
            send(peer, 1, sequence, payload)
            deadline_s = time.monotonic() + 5
            while window.poll(LAYOUT.slot_offset(1), 1)[0] != sequence:
                assert time.monotonic() < deadline_s, f"no answer to frame {sequence}"
                seen = native.load().p2p_bell_read(endpoint.page_address, 0)
                if window.poll(LAYOUT.slot_offset(1), 1)[0] != sequence:
                    native.load().p2p_bell_wait(endpoint.page_address, 0, seen, 5_000_000)
            frame = open_frame(slot.data, LAYOUT.payload_bytes, PARENT, CHILD, sequence)
            assert frame.payload == payload[::-1], f"frame {sequence}"
        assert window.peer_incarnation == CHILD
        endpoint.disconnect(peer)
        assert other.process.wait(5) is not None, "the child leaves when its peer has gone"


def test_a_killed_peer_is_noticed_within_100_ms(endpoint: ShmEndpoint) -> None:
    with child("hold") as other:
        window = endpoint.export_window(4096)
        other.say(window.descriptor.hex())
        assert other.hear() == "connected"
        assert endpoint.status(window) is Status.ALIVE
        other.freeze()
        assert not hangs_up(window.liveness_fd, 0.05), "a frozen process keeps its mapping: it is not gone"
        started_s = time.monotonic()
        other.process.send_signal(signal.SIGKILL)
        assert hangs_up(window.liveness_fd, 1.0)
        assert time.monotonic() - started_s < 0.1
        assert endpoint.status(window) is Status.GONE


def test_a_dead_owner_is_noticed_by_the_writer(endpoint: ShmEndpoint) -> None:
    with child("wake") as other:
        peer = endpoint.connect(bytes.fromhex(other.hear()))
        endpoint.signal(peer, 0, 1)
        other.process.send_signal(signal.SIGKILL)
        assert hangs_up(peer.liveness_fd, 1.0)
        with pytest.raises(PeerGone, match="child has ended or withdrew the window"):
            endpoint.signal(peer, 0, 2)
        endpoint.put(peer, 0, b"into the mapping, which outlives the dead")


def test_a_reader_never_accepts_what_a_running_writer_tears(endpoint: ShmEndpoint) -> None:
    with child("tear") as other:
        window = endpoint.export_window(LAYOUT.nbytes)
        other.say(window.descriptor.hex())
        assert other.hear() == "writing"
        slot = window.memory[LAYOUT.slot_offset(0) : LAYOUT.slot_offset(1)]
        header, copy = np.zeros(64, np.uint8), np.zeros(LAYOUT.payload_bytes, np.uint8)
        where = (
            slot.ctypes.data,
            LAYOUT.payload_bytes,
            PARENT,
            CHILD,
            1,
            header.ctypes.data,
            copy.ctypes.data,
        )
        accepted = torn = torn_by_reference = 0
        until_s = time.monotonic() + 1.5
        while time.monotonic() < until_s or (not torn and time.monotonic() < until_s + 5):
            result = native.load().p2p_frame_open(*where)
            if result >= 0:
                attempt = int(header.view("<u4")[6])
                assert set(copy.tobytes()) == {attempt}, f"a torn payload was accepted after {accepted}"
            accepted += result >= 0
            torn += result == -10
            try:
                frame = open_frame(slot.data, LAYOUT.payload_bytes, PARENT, CHILD, 1)
                assert set(frame.payload) == {frame.header.attempt}
            except FrameInvalid:
                torn_by_reference += 1
        assert torn and torn_by_reference, (
            f"the writer tore nothing, {accepted} accepted: this test shows nothing"
        )


def test_a_ring_wakes_a_lane_of_another_process(endpoint: ShmEndpoint) -> None:
    with child("wake") as other:
        peer = endpoint.connect(bytes.fromhex(other.hear()))
        latencies_ns, rang = [], 0
        for sequence in range(1, 61):
            other.say("wait")
            time.sleep(0.002 + sequence % 7 / 1000)
            endpoint.put(peer, 8, time.monotonic_ns().to_bytes(8, "little"))
            endpoint.signal(peer, 0, sequence)
            native.load().p2p_bell_ring(peer.page_address, 2)
            result, latency_ns = other.hear().split()
            rang += int(result)
            latencies_ns.append(int(latency_ns))
        other.say("")
        assert rang >= 40, f"{rang} of 60 waits ended by the ring"
        # Waits that only time out end 2.5 ms late on average.
        assert statistics.median(latencies_ns) < 1_500_000, sorted(latencies_ns)


def test_memory_is_sealed_against_resizing() -> None:
    fd = create_memory("test", 8192)
    try:
        for size in (4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(fd)
        with pytest.raises(ConnectRefused, match="not 4096 sealed bytes"):
            map_memory(fd, 4096)
    finally:
        os.close(fd)


def test_memory_that_its_owner_could_resize_is_not_mapped() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(ConnectRefused, match="not 4096 sealed bytes"):
            map_memory(fd, 4096)
    finally:
        os.close(fd)


def test_a_wrong_token_is_refused_and_the_right_one_still_works(endpoint: ShmEndpoint) -> None:
    window = endpoint.export_window(4096)
    with ShmEndpoint("other", CHILD) as other:
        for token in (bytes(32), decode(window.descriptor).token[:-1] + b"\0"):
            with pytest.raises(
                ConnectRefused, match="parent refuses: this descriptor was withdrawn or taken"
            ):
                other.connect(forge(window.descriptor, token=token))
        other.connect(window.descriptor)
        with pytest.raises(ConnectRefused, match="withdrawn or taken"):
            other.connect(window.descriptor)


def test_a_descriptor_that_lies_about_the_size_is_refused(endpoint: ShmEndpoint) -> None:
    window = endpoint.export_window(4096)
    with ShmEndpoint("other", CHILD) as other, pytest.raises(ConnectRefused, match="makes no sense"):
        other.connect(forge(window.descriptor, nbytes=8192))


@pytest.mark.parametrize("change", [{"transport": Transport.SIM}, {"address": b"/tmp/somewhere"}])
def test_a_descriptor_of_another_transport_is_refused(
    endpoint: ShmEndpoint, change: dict[str, object]
) -> None:
    with pytest.raises(DescriptorInvalid, match="this endpoint speaks SHM"):
        endpoint.connect(forge(endpoint.export_window(4096).descriptor, **change))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 107), st.integers(1, 255))
def test_no_descriptor_however_damaged_connects_or_crashes(noise: bytes, position: int, flip: int) -> None:
    with ShmEndpoint("fuzzed", 1) as owner:
        damaged = bytearray(owner.export_window(4096).descriptor)
        damaged[position % len(damaged)] ^= flip
        for raw in (noise, bytes(damaged)):
            with pytest.raises((DescriptorInvalid, ConnectRefused)):
                owner.connect(raw)


def raw_socket(endpoint: ShmEndpoint) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(3)
    link.connect(decode(endpoint.export_window(4096).descriptor).address)
    return link


def test_callers_that_say_nothing_delay_nobody_and_are_hung_up_on(endpoint: ShmEndpoint) -> None:
    silent = [raw_socket(endpoint) for _ in range(5)]
    started_s = time.monotonic()
    with ShmEndpoint("other", CHILD) as other:
        other.connect(endpoint.export_window(4096).descriptor)
    assert time.monotonic() - started_s < 0.5
    for link in silent:
        assert link.recv(1) == b"", "hung up on after the handshake's time is over"
        link.close()


def test_noise_in_place_of_a_hello_is_refused(endpoint: ShmEndpoint) -> None:
    for seed in range(20):
        with raw_socket(endpoint) as link:
            link.sendall(random.Random(seed).randbytes(64))
            answer = link.recv(100)
            assert answer[:8] == b"P2PA\x03\0\0\0" and link.recv(1) == b"", f"seed {seed}"


@pytest.mark.skipif(os.geteuid() != 0, reason=f"needs root to become another user, found uid {os.geteuid()}")
def test_another_user_is_hung_up_on_even_with_the_right_token(endpoint: ShmEndpoint) -> None:
    program = (
        "import os, socket, sys; os.setuid(int(sys.argv[3])); s = socket.socket(socket.AF_UNIX)\n"
        "s.settimeout(3)\n"
        "s.connect(bytes.fromhex(sys.argv[1])); s.sendall(bytes.fromhex(sys.argv[2])); print(s.recv(4))"
    )

    def answer(uid: int) -> str:
        offer = decode(endpoint.export_window(4096).descriptor)
        hello = b"P2PH" + struct.pack("<HHQ", 1, 0, CHILD) + offer.token + bytes(16)
        command = [sys.executable, "-c", program, offer.address.hex(), hello.hex(), str(uid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()

    assert answer(0) == "b'P2PA'"
    # Hung up on with or without its hello read: nothing, or a reset.
    assert answer(65534) in ("b''", "")


def test_of_many_callers_with_one_descriptor_exactly_one_gets_the_window(endpoint: ShmEndpoint) -> None:
    window = endpoint.export_window(4096)
    outcomes: list[str] = []

    def call(number: int) -> None:
        with ShmEndpoint(f"caller-{number}", number) as caller:
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


def test_a_closed_window_stays_retired_until_its_peer_lets_go(endpoint: ShmEndpoint) -> None:
    with ShmEndpoint("other", CHILD) as other:
        window = endpoint.export_window(8192)
        peer = other.connect(window.descriptor)
        view = window.memory
        window.close()
        window.close()
        assert endpoint.retired_bytes == 8192
        assert other.status(peer) is Status.GONE, "the writer is told"
        other.put(peer, 0, b"late")
        assert view[:4].tobytes() == b"late", "a late write lands in memory that is nobody else's"
        other.disconnect(peer)
        other.disconnect(peer)
        endpoint.progress()
        assert endpoint.retired_bytes == 0
        with pytest.raises(EndpointClosed, match="window was closed"):
            window.poll(0, 1)


def test_a_peer_that_never_lets_go_is_refused_at_the_bound() -> None:
    with (
        ShmEndpoint("owner", PARENT, retired_limit_bytes=10_000) as owner,
        ShmEndpoint("other", CHILD) as other,
        ShmEndpoint("third", CHILD + 1) as third,
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


def test_a_disconnected_peer_is_noticed_and_writes_no_more(endpoint: ShmEndpoint) -> None:
    with child("leave") as other:
        window = endpoint.export_window(4096)
        other.say(window.descriptor.hex())
        assert other.hear() == "connected"
        assert not hangs_up(window.liveness_fd, 0)
        other.say("go")
        assert other.hear() == "disconnected"
        assert hangs_up(window.liveness_fd, 0)
        assert endpoint.status(window) is Status.GONE


def left_behind() -> tuple[int, int, int]:
    """(open file descriptors, threads, mappings of this package's memory)."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("memfd:p2p")
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), mappings


def test_nothing_is_left_behind_after_close() -> None:
    before = left_behind()
    for _ in range(20):
        a, b = ShmEndpoint("a", 1), ShmEndpoint("b", 2)
        windows = [a.export_window(4096) for _ in range(3)]
        peers = [b.connect(window.descriptor) for window in windows[:2]]
        windows[0].close()
        with pytest.raises(ConnectRefused):
            b.connect(windows[0].descriptor)
        assert left_behind() > before
        a.close()
        b.close()
        a.close()
        b.close()
        del windows, peers, a, b
    assert left_behind() == before


def test_everything_is_refused_after_close(endpoint: ShmEndpoint) -> None:
    with ShmEndpoint("other", CHILD) as other:
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


def test_an_owner_that_is_frozen_is_given_up_on_in_time(endpoint: ShmEndpoint) -> None:
    with child("wake") as other:
        descriptor = bytes.fromhex(other.hear())
        other.freeze()
        with pytest.raises(ConnectRefused, match=r"child does not answer: timed out"):
            endpoint.connect(descriptor, timeout_s=0.2)


@pytest.mark.parametrize("offset, data", [(-1, b"x"), (4096, b"x"), (4000, bytes(97))])
def test_puts_and_signals_outside_the_window_are_refused(
    endpoint: ShmEndpoint, offset: int, data: bytes
) -> None:
    with ShmEndpoint("other", CHILD) as other:
        peer = other.connect(endpoint.export_window(4096).descriptor)
        with pytest.raises(ValueError, match="do not lie in a window of 4096"):
            other.put(peer, offset, data)
        with pytest.raises(ValueError, match="not 8-aligned in 4096 bytes"):
            other.signal(peer, offset + 4092, 1)


def test_impossible_endpoints_and_windows_are_refused(endpoint: ShmEndpoint) -> None:
    for arguments in (("", 1), ("x" * 256, 1), ("x", -1), ("x", 1 << 64)):
        with pytest.raises(ValueError, match="1 to 255 bytes and a u64 needed"):
            ShmEndpoint(*arguments)
    with pytest.raises(ValueError, match="has room for 1 to 63"):
        ShmEndpoint("x", 1, lanes=64)
    with pytest.raises(ValueError, match="a window of 0 bytes asked for"):
        endpoint.export_window(0)


def test_without_native_code_windows_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NativeMissing("not built")

    monkeypatch.setattr(native, "load", missing)
    with ShmEndpoint("a", 1) as a, ShmEndpoint("b", 2) as b:
        window = a.export_window(4096)
        peer = b.connect(window.descriptor)
        b.put(peer, 100, np.arange(10, dtype=np.uint8))
        b.signal(peer, 0, 2**63 + 1)
        assert window.poll(0, 2, 64).tolist() == [2**63 + 1, 0]
        assert window.memory[100:110].tolist() == list(range(10))


def test_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, content in (("absent.so", None), ("broken.so", b"no library")):
        if content:
            (tmp_path / name).write_bytes(content)
        monkeypatch.setattr(native, "LIBRARY", tmp_path / name)
        with pytest.raises(NativeMissing, match=r"Run .*p2p\.build"):
            native.load.__wrapped__()
