"""Faults that a process does to itself: off by default, the same by the same seed, and always over in time."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2p import faults, native
from p2p.frame import FrameInvalid, Header, open_frame, seal_frame
from p2p.window import WindowLayout

pytestmark = pytest.mark.alone

LAYOUT = WindowLayout(slots=4, payload_bytes=4096)
OWNER, SENDER = 0xA1, 0xB2
PEER, OTHER = "attention/0", "attention/1"
SEED = 20


@pytest.fixture
def library() -> Iterator[Any]:
    """Native code that may be armed, and is not afterwards."""
    faults.allow()
    found = native.load()
    for name, result, arguments in (
        ("p2p_fault_send", c_int, (c_void_p, c_void_p, c_uint64, c_void_p, c_uint32, c_uint32)),
        ("p2p_fault_spoil", None, (c_void_p, c_void_p, c_uint64)),
        ("p2p_fault_is_cut", c_int, (c_void_p,)),
        ("p2p_fault_is_down", c_int, (native.ctypes.c_char_p,)),
        ("p2p_fault_linger", None, (c_uint64, c_void_p)),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    yield found
    for number in range(1, 10):
        faults.disarm(number)


class Link:
    """A window that this process writes, for a peer."""

    def __init__(self, library: Any, peer: str) -> None:
        self.library = library
        self.memory = np.zeros(LAYOUT.nbytes, np.uint8)
        self.address = self.memory.ctypes.data
        self.sequence = 0
        faults.link(self.address, peer)

    def send(self) -> str:
        """Have a frame go: "sent", "kept" (later or never), or what a reader says of it."""
        self.sequence += 1
        slot = self.memory[LAYOUT.slot_offset(self.sequence % LAYOUT.slots) :]
        payload = np.random.default_rng(self.sequence).bytes(1000)
        fields = {"incarnation": OWNER, "sequence": self.sequence, "sender": SENDER, "length": len(payload)}
        seal_frame(slot.data, Header(**fields), payload)
        if self.library.p2p_fault_send(self.address, slot.ctypes.data, self.sequence, None, 0, 1):
            return "kept"
        try:
            found = open_frame(slot.data, LAYOUT.payload_bytes, OWNER, SENDER, self.sequence).payload
        except FrameInvalid as refusal:
            return refusal.reason.name
        assert found == payload
        return "sent"

    def signal(self) -> int:
        slot = LAYOUT.slot_offset(self.sequence % LAYOUT.slots)
        return native.load().p2p_signal_load(self.memory.ctypes.data + slot)


@pytest.mark.parametrize(("kind", "hit"), [("loss", "kept"), ("wire", "CHECKSUM")])
def test_a_share_of_frames_is_hit_and_the_same_ones_by_the_same_seed(library: Any, kind: str, hit: str) -> None:
    def run(seed: int, peer: str) -> list[str]:
        link = Link(library, peer)
        faults.arm(1, kind, share=0.3, seed=seed)
        found = [link.send() for _ in range(400)]
        faults.disarm(1)
        assert [link.send() for _ in range(20)] == ["sent"] * 20
        return found

    found = run(SEED, PEER)
    assert 80 < found.count(hit) < 160 and found.count("sent") == 400 - found.count(hit), f"seed {SEED}"
    assert run(SEED, PEER) == found, f"seed {SEED}"
    assert run(SEED + 1, PEER) != found and run(SEED, OTHER) != found, f"seed {SEED}"


@pytest.mark.parametrize(("kind", "hit"), [("loss", "kept"), ("partition", "kept"), ("wire", "CHECKSUM")])
def test_only_frames_for_the_peers_named_are_hit(library: Any, kind: str, hit: str) -> None:
    first, second = Link(library, PEER), Link(library, OTHER)
    faults.arm(1, kind, peers=("attention/10", PEER))
    assert (first.send(), second.send()) == (hit, "sent")
    assert library.p2p_fault_is_cut(first.address) == (kind == "partition")
    assert library.p2p_fault_is_cut(second.address) == 0


def test_a_delayed_signal_comes_late_and_in_order(library: Any) -> None:
    link = Link(library, PEER)
    faults.arm(1, "delay", by_s=1.0)
    began_s = time.monotonic()
    assert link.send() == "kept" and link.signal() == 0
    while link.signal() != link.sequence:
        assert time.monotonic() < began_s + 10
    assert time.monotonic() - began_s >= 1.0
    # Delays of several faults add up; what is under way when one ends still takes its time.
    faults.arm(2, "delay", by_s=1.0)
    assert link.send() == "kept"
    faults.disarm(1), faults.disarm(2)
    assert link.signal() != link.sequence
    assert link.send() == "sent"


def test_nothing_is_written_to_a_window_that_was_let_go(library: Any) -> None:
    link, other = Link(library, PEER), Link(library, OTHER)
    faults.arm(1, "delay", by_s=0.5)
    assert (link.send(), other.send()) == ("kept", "kept")
    faults.unlink(link.address)
    end_s = time.monotonic() + 60
    while other.signal() != other.sequence:
        assert time.monotonic() < end_s
    time.sleep(0.1)
    assert link.signal() == 0


def test_rows_are_spoiled_one_bit_or_one_nan_at_a_time(library: Any) -> None:
    link = Link(library, PEER)
    for kind in ("rows", "nan"):
        faults.arm(1, kind, seed=SEED)
        rows = np.ones(512, np.float32)
        library.p2p_fault_spoil(link.address, rows.ctypes.data, len(rows))
        faults.disarm(1)
        changed = rows.view(np.uint32) ^ np.ones(512, np.float32).view(np.uint32)
        assert np.count_nonzero(changed) == 1, f"{kind}, seed {SEED}"
        if kind == "nan":
            assert np.isnan(rows).sum() == 1
        else:
            assert int(changed.max()).bit_count() == 1


def test_work_is_stretched_and_a_slowness_that_ends_keeps_nobody(library: Any) -> None:
    faults.arm(1, "slow", times=4.0)
    began_ns = time.monotonic_ns()
    time.sleep(0.03)
    library.p2p_fault_linger(began_ns, None)
    assert time.monotonic_ns() - began_ns >= 0.12e9
    faults.disarm(1)
    began_ns = time.monotonic_ns()
    library.p2p_fault_linger(began_ns - 10**12, None)
    assert time.monotonic_ns() - began_ns < 10**9


def test_a_rail_is_down_by_its_name(library: Any) -> None:
    faults.arm(1, "rail-down", where="eth0")
    assert (library.p2p_fault_is_down(b"eth0"), library.p2p_fault_is_down(b"eth1")) == (1, 0)


def test_an_unknown_point_is_named(library: Any) -> None:
    with pytest.raises(faults.NoSuchPlace, match="no point 'nowhere'"):
        faults.arm(1, "kill", where="nowhere")


def run(code: str) -> subprocess.Popen[str]:
    """A process that is told to hurt itself."""
    lines = f"from p2p import faults\nimport time\n{code}"
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE, text=True, cwd=root)


@pytest.mark.parametrize("act", ["faults.kill()", "faults.Waker(1.0)", "faults.arm(1, 'loss')", "faults.disarm(1)"])
def test_nothing_can_be_armed_where_it_was_not_allowed(act: str) -> None:
    code = f"try:\n  {act}\nexcept faults.NotAllowed as error:\n  print(error)\n"
    found = run(code + "faults.point('computed')").communicate(timeout=60)[0]
    assert "--allow-chaos" in found


def test_a_kill_strikes_at_its_point_after_so_many_passes() -> None:
    process = run(
        "faults.allow()\nfaults.arm(1, 'kill', where='computed', after=2)\n"
        "for number in range(9):\n  faults.point('combined')\n  print(number, flush=True)\n  faults.point('computed')"
    )
    assert process.communicate(timeout=60)[0].split() == ["0", "1", "2"]
    assert process.returncode == -signal.SIGKILL


def test_a_freeze_at_a_point_ends_by_itself_and_leaves_no_process_behind() -> None:
    process = run(
        "faults.allow()\nwaker = faults.Waker(0.4)\nfaults.arm(1, 'freeze', where='computed', waker=waker.fd)\n"
        "print(waker._process.pid, flush=True)\nbegan = time.monotonic()\nfaults.point('computed')\n"
        "print(time.monotonic() - began, flush=True)\nwaker.close()\nprint(waker._process.poll())"
    )
    found = process.communicate(timeout=60)[0].split()
    assert process.returncode == 0 and float(found[1]) >= 0.4 and found[2] == "0", found


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_waker_that_is_not_needed_goes(how: str) -> None:
    ending = "waker.close()\ntime.sleep(60)" if how == "closed" else "time.sleep(60)"
    process = run(f"faults.allow()\nwaker = faults.Waker(30)\nprint(waker._process.pid, flush=True)\n{ending}")
    assert process.stdout is not None
    waker = Path(f"/proc/{int(process.stdout.readline())}")
    if how == "killed":
        process.kill()
    end_s = time.monotonic() + 60
    # It may go between any two looks at it.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while waker.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < end_s, "the waker lives on"
            time.sleep(0.02)
    process.kill()
    process.communicate()


def test_a_freeze_of_no_time_does_not_last() -> None:
    process = run(
        "faults.allow()\nfor _ in range(3):\n  waker = faults.Waker(0.0)\n  waker.stop()\n  waker.close()\n"
        "  waker.stop()\nprint('awake')"
    )
    assert process.communicate(timeout=60)[0].split() == ["awake"]
