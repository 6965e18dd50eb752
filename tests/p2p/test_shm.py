"""The shm transport between real processes: transfer, wakes, sealed memory. What it shares with cuda: test_one_host."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p import native
from p2p.build import ROOT
from p2p.endpoint import ConnectRefused, DescriptorInvalid
from p2p.frame import FrameInvalid, open_frame
from p2p.local import ShmEndpoint
from p2p.native import NativeMissing
from p2p.shm_link import create_memory, map_memory
from tests.p2p.one_host import child
from tests.p2p.peer_process import CHILD, LAYOUT, PARENT, send

pytestmark = pytest.mark.alone


@pytest.fixture
def endpoint() -> Iterator[ShmEndpoint]:
    with ShmEndpoint("parent", PARENT) as made:
        yield made


def test_frames_travel_both_ways_between_processes(endpoint: ShmEndpoint) -> None:
    with child("echo") as other:
        window = endpoint.export_window(LAYOUT.nbytes)
        peer = endpoint.connect(bytes.fromhex(other.hear()))
        other.say(window.descriptor.hex())
        slot = window.memory[LAYOUT.slot_offset(1) :]
        for sequence in range(1, 301):
            payload = random.Random(sequence).randbytes(sequence * 37)
            send(peer, 1, sequence, payload)
            deadline_s = time.monotonic() + 60
            while window.poll(LAYOUT.slot_offset(1), 1)[0] != sequence:
                assert time.monotonic() < deadline_s, f"no answer to frame {sequence}"
                seen = native.load().p2p_bell_read(endpoint.page_address, 0)
                if window.poll(LAYOUT.slot_offset(1), 1)[0] != sequence:
                    native.load().p2p_bell_wait(endpoint.page_address, 0, seen, 5_000_000)
            frame = open_frame(slot.data, LAYOUT.payload_bytes, PARENT, CHILD, sequence)
            assert frame.payload == payload[::-1], f"frame {sequence}"
        assert window.peer_incarnation == CHILD
        endpoint.disconnect(peer)
        assert other.process.wait(60) is not None, "the child leaves when its peer has gone"


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
        while (now_s := time.monotonic()) < until_s or (not (torn and torn_by_reference) and now_s < until_s + 60):
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
        assert torn and torn_by_reference, f"the writer tore nothing, {accepted} accepted: this test shows nothing"


def test_a_ring_wakes_a_lane_of_another_process(endpoint: ShmEndpoint) -> None:
    with child("wake") as other:
        peer = endpoint.connect(bytes.fromhex(other.hear()))
        sleeping = ctypes.c_uint32.from_address(peer.page_address + 64 * (1 + 2) + 4)

        def woken(first: int) -> tuple[int, int]:
            """Of 60 waits: how many the ring ended, and the median of their ends after it in nanoseconds."""
            latencies_ns, rang = [], 0
            for sequence in range(first, first + 60):
                other.say("wait")
                end_s = time.monotonic() + 60
                while not sleeping.value:
                    assert time.monotonic() < end_s, f"wait {sequence} never began"
                    time.sleep(0.0001)
                # 0 to 2 ms into a sleep of 5.
                time.sleep(sequence % 5 * 0.0005)
                endpoint.put(peer, 8, time.monotonic_ns().to_bytes(8, "little"))
                endpoint.signal(peer, 0, sequence)
                native.load().p2p_bell_ring(peer.page_address, 2)
                result, latency_ns = other.hear().split()
                rang += int(result)
                latencies_ns.append(int(latency_ns))
            return rang, sorted(latencies_ns)[30]

        # Waits that only time out end 3 to 5 ms after the ring.
        rang, median_ns = woken(1)
        other.say("")
        assert rang >= 40 and median_ns < 1_500_000, (rang, median_ns)


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


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 107), st.integers(1, 255))
def test_no_descriptor_however_damaged_connects_or_crashes(noise: bytes, position: int, flip: int) -> None:
    with ShmEndpoint("fuzzed", 1) as owner:
        damaged = bytearray(owner.export_window(4096).descriptor)
        damaged[position % len(damaged)] ^= flip
        for raw in (noise, bytes(damaged)):
            with pytest.raises((DescriptorInvalid, ConnectRefused)):
                owner.connect(raw)


def test_a_view_of_a_closed_window_stays_readable(endpoint: ShmEndpoint) -> None:
    with ShmEndpoint("other", CHILD) as other:
        window = endpoint.export_window(8192)
        peer = other.connect(window.descriptor)
        view = window.memory
        window.close()
        other.put(peer, 0, b"late")
        assert view[:4].tobytes() == b"late", "a late write lands in memory that is nobody else's"


def test_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, content in (("absent.so", None), ("broken.so", b"no library")):
        if content:
            (tmp_path / name).write_bytes(content)
        monkeypatch.setattr(native, "LIBRARY", tmp_path / name)
        with pytest.raises(NativeMissing, match=r"Run .*p2p\.build"):
            native.load.__wrapped__()


def test_a_library_of_other_headers_is_refused(tmp_path: Path) -> None:
    """Calls by other structures than it was built with would end the process."""
    headers = tmp_path / "p2p" / "native"
    shutil.copytree(native.LIBRARY.with_name("native"), headers, ignore=shutil.ignore_patterns("build"))
    native.open_library(native.LIBRARY, "p2p", {}, root=tmp_path)
    with (headers / "frame.h").open("a") as header:
        header.write("// more\n")
    with pytest.raises(NativeMissing, match=r"built from other headers than .*Run .*p2p\.build"):
        native.open_library(native.LIBRARY, "p2p", {}, root=tmp_path)


def test_a_window_may_be_closed_while_others_poll_it() -> None:
    program = (
        "import threading, time\n"
        "from p2p.endpoint import EndpointClosed\n"
        "from p2p.local import ShmEndpoint\n"
        "endpoint = ShmEndpoint('polled', 5)\n"
        "def poll(window):\n"
        "    try:\n"
        "        while True: window.poll(0, 8)\n"
        "    except EndpointClosed: ends.append(1)\n"
        "ends = []\n"
        "for _ in range(40):\n"
        "    window = endpoint.export_window(4096)\n"
        "    threads = [threading.Thread(target=poll, args=(window,)) for _ in range(2)]\n"
        "    for thread in threads: thread.start()\n"
        "    time.sleep(0.002)\n"
        "    window.close()\n"
        "    for thread in threads: thread.join()\n"
        "print(len(ends))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (0, "80\n"), done.stderr
