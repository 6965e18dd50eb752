"""The nixl transport between real processes over loopback TCP: transfer, proof of life, fence, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2p import native, nixl_native
from p2p.descriptor import Transport, decode
from p2p.endpoint import ConnectRefused, DescriptorInvalid, EndpointClosed, P2PError, PeerGone, Status
from p2p.frame import open_frame
from p2p.nixl import NixlEndpoint, NixlWindow
from tests.p2p.nixl_process import CHILD, LAYOUT, PARENT, lay_out, send

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec(nixl_native.PACKAGE) is None, reason="needs package nixl-cu13, found none"
    ),
    pytest.mark.alone,
]
ROOT = Path(__file__).parents[2]
# What UCX reads: loopback alone, whatever else this machine has.
os.environ["UCX_NET_DEVICES"] = "lo"


class Child:
    """A process of its own that plays one role of nixl_process.py."""

    def __init__(self, role: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.p2p.nixl_process", role]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment, cwd=ROOT
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

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def child(role: str) -> Iterator[Child]:
    process = Child(role)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
        for pipe in (process.process.stdin, process.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def endpoint() -> Iterator[NixlEndpoint]:
    with NixlEndpoint("parent", PARENT) as made:
        yield made


def hangs_up(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(timeout_s * 1000))


def until(condition: Any, timeout_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.0005)
    return bool(condition())


def forge(descriptor: bytes, **changes: object) -> bytes:
    return replace(decode(descriptor), **changes).encode()  # type: ignore[arg-type]


def test_native_frames_travel_both_ways_between_processes(endpoint: NixlEndpoint) -> None:
    with child("echo") as other:
        window = lay_out(endpoint.export_window(LAYOUT.nbytes))
        peer = endpoint.connect(bytes.fromhex(other.hear()))
        other.say(window.descriptor.hex())
        assert other.hear() == "connected"
        slot = window.memory[LAYOUT.slot_offset(1) :]
        for sequence in range(1, 201):
            payload = random.Random(sequence).randbytes(sequence * 1300)
            send(peer, 1, sequence, payload)
            deadline_s = time.monotonic() + 60
            while window.poll(LAYOUT.slot_offset(1), 1)[0] != sequence:
                assert time.monotonic() < deadline_s, f"no answer to frame {sequence}"
                if sequence % 2:
                    endpoint.progress()
                else:
                    seen = native.load().p2p_bell_read(endpoint.page_address, 0)
                    if window.poll(LAYOUT.slot_offset(1), 1)[0] != sequence:
                        native.load().p2p_bell_wait(endpoint.page_address, 0, seen, 5_000_000)
            frame = open_frame(slot.data, LAYOUT.payload_bytes, PARENT, CHILD, sequence)
            assert frame.payload == payload[::-1], f"frame {sequence}"
        assert window.peer_incarnation == CHILD
        assert endpoint.refused == 0
        endpoint.disconnect(peer)
        window.close()
        assert other.process.wait(60) is not None, "the child leaves when its peer has gone"


def test_a_signal_shows_every_put_before_it(endpoint: NixlEndpoint) -> None:
    with child("write") as other:
        window = endpoint.export_window(1 << 20)
        other.say(window.descriptor.hex())
        assert other.hear() == "connected"
        numbers = window.memory.view("<u8")
        for _ in range(60):
            first = int(window.poll(0, 1)[0])
            assert until(lambda first=first: window.poll(0, 1)[0] > first)
            signalled = int(window.poll(0, 1)[0])
            assert int(numbers[1:].min()) >= signalled, f"signal {signalled} before its bytes"


def test_a_large_put_arrives_whole(endpoint: NixlEndpoint) -> None:
    with child("own") as other:
        size = 16 << 20
        other.say(str(size))
        peer = endpoint.connect(bytes.fromhex(other.hear()))
        for turn in range(1, 4):
            payload = random.Random(turn).randbytes(size - 8)
            endpoint.put(peer, 8, payload)
            endpoint.signal(peer, 0, turn)
            other.say(f"digest {turn}")
            assert other.hear() == hashlib.sha256(payload).hexdigest(), f"put {turn}"
        counts = endpoint.channel_counts(peer)
        assert counts["bytes"] == 3 * (size - 8) and not counts["sent_again"]
        assert [rail.live for rail in endpoint.rail_counts(peer)] == [True]


def test_a_killed_writer_is_noticed_and_a_frozen_one_is_not(endpoint: NixlEndpoint) -> None:
    with child("hold") as other:
        window = endpoint.export_window(4096)
        other.say(f"7 {window.descriptor.hex()}")
        assert other.hear() == "connected"
        assert window.peer_incarnation == 7
        other.freeze()
        assert not hangs_up(window.liveness_fd, 0.5), "a frozen process may go on: it is not gone"
        assert endpoint.status(window) is Status.ALIVE
        other.thaw()
        assert not hangs_up(window.liveness_fd, 0.1)
        other.process.send_signal(signal.SIGKILL)
        assert hangs_up(window.liveness_fd, 60.0)
        assert endpoint.status(window) is Status.GONE


def test_a_killed_owner_is_noticed_and_a_frozen_one_is_not(endpoint: NixlEndpoint) -> None:
    with child("own") as other:
        other.say("65536")
        peer = endpoint.connect(bytes.fromhex(other.hear()))
        other.freeze()
        endpoint.put(peer, 8, bytes(4096))
        endpoint.signal(peer, 0, 1)
        assert not hangs_up(peer.liveness_fd, 0.5)
        assert endpoint.channel_counts(peer)["waiting"], "nothing is known to have come to a frozen owner"
        other.thaw()
        assert until(lambda: endpoint.channel_counts(peer)["waiting"] == 0)
        other.process.send_signal(signal.SIGKILL)
        assert hangs_up(peer.liveness_fd, 60.0)
        assert endpoint.status(peer) is Status.GONE
        for action in (lambda: endpoint.put(peer, 0, b"x"), lambda: endpoint.signal(peer, 0, 1)):
            with pytest.raises(PeerGone, match="child has ended or withdrew the window"):
                action()
        endpoint.disconnect(peer)


def test_what_was_put_before_leaving_arrives_and_leaving_is_noticed(endpoint: NixlEndpoint) -> None:
    with child("leave") as other:
        window = endpoint.export_window(4 << 20)
        other.say(window.descriptor.hex())
        assert other.hear() == "connected"
        assert not hangs_up(window.liveness_fd, 0)
        other.say("go")
        assert other.hear() == "disconnected"
        assert window.poll(0, 1)[0] == 7 and set(window.memory[8:].tobytes()) == {7}
        assert hangs_up(window.liveness_fd, 60.0)
        assert endpoint.status(window) is Status.GONE


def test_nothing_lands_after_a_window_was_closed(endpoint: NixlEndpoint) -> None:
    with child("write") as other:
        window = endpoint.export_window(8 << 20)
        other.say(window.descriptor.hex())
        assert other.hear() == "connected"
        assert until(lambda: window.poll(0, 1)[0] > 2)
        view = window.memory
        window.close()
        window.close()
        before = hashlib.sha256(view).hexdigest()
        assert other.hear() == "gone", "the writer is told"
        time.sleep(0.3)
        assert hashlib.sha256(view).hexdigest() == before
        with pytest.raises(EndpointClosed, match="window was closed"):
            window.poll(0, 1)
        assert endpoint.status(window) is Status.GONE and window.liveness_fd == -1


def test_nothing_lands_after_the_window_of_a_frozen_writer_was_closed(endpoint: NixlEndpoint) -> None:
    with child("write") as other:
        window = endpoint.export_window(8 << 20)
        other.say(window.descriptor.hex())
        assert other.hear() == "connected"
        assert until(lambda: window.poll(0, 1)[0] > 2)
        other.freeze()
        view = window.memory
        window.close()
        before = hashlib.sha256(view).hexdigest()
        other.thaw()
        assert other.hear() == "gone"
        assert hashlib.sha256(view).hexdigest() == before


def test_a_restarted_member_connects_under_its_new_incarnation(endpoint: NixlEndpoint) -> None:
    for incarnation in (8, 9, 10):
        with child("hold") as other:
            window = endpoint.export_window(4096)
            other.say(f"{incarnation} {window.descriptor.hex()}")
            assert other.hear() == "connected"
            assert window.peer_incarnation == incarnation
            other.process.kill()
            assert hangs_up(window.liveness_fd, 60.0)
            window.close()


def test_a_wrong_token_is_refused_and_the_right_one_works_once(endpoint: NixlEndpoint) -> None:
    window = endpoint.export_window(4096)
    with NixlEndpoint("other", CHILD) as other:
        *most, last = decode(window.descriptor).token
        for token in (bytes(32), bytes([*most, last ^ 1])):
            with pytest.raises(ConnectRefused, match=r"parent cannot be joined.*no answer in 1000 ms"):
                other.connect(forge(window.descriptor, token=token), timeout_s=1.0)
        assert endpoint.refused >= 2 and window.peer_incarnation == 0
        peer = other.connect(window.descriptor)
        with pytest.raises(ConnectRefused, match="withdrawn or taken"):
            other.connect(window.descriptor, timeout_s=0.2)
        other.signal(peer, 0, 5)
        assert until(lambda: window.poll(0, 1)[0] == 5)


def test_of_many_callers_with_one_descriptor_exactly_one_gets_the_window(endpoint: NixlEndpoint) -> None:
    window = endpoint.export_window(4096)
    outcomes: list[str] = []

    def call(number: int) -> None:
        with NixlEndpoint(f"caller-{number}", number) as caller:
            try:
                caller.connect(window.descriptor, timeout_s=60)
                outcomes.append("connected")
                time.sleep(0.5)
            except ConnectRefused:
                outcomes.append("refused")

    threads = [threading.Thread(target=call, args=(number,)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["connected"] + ["refused"] * 4


def test_a_frozen_or_absent_owner_is_given_up_on_in_time(endpoint: NixlEndpoint) -> None:
    with child("own") as other:
        other.say("4096")
        descriptor = bytes.fromhex(other.hear())
        other.freeze()
        for _ in range(2):
            with pytest.raises(ConnectRefused, match="child cannot be joined"):
                endpoint.connect(descriptor, timeout_s=0.2)
            other.process.kill()
            other.process.wait()


@pytest.mark.parametrize("change", [{"transport": Transport.SIM, "address": b"x"}])
def test_a_descriptor_of_another_transport_is_refused(endpoint: NixlEndpoint, change: dict[str, object]) -> None:
    with pytest.raises(DescriptorInvalid, match="this endpoint speaks NIXL"):
        endpoint.connect(forge(endpoint.export_window(4096).descriptor, **change))


@pytest.mark.parametrize("address", [b"x", bytes(64), b"\xff" * 64, b"\x08\0\0\0" + bytes(8), bytes(16384)])
def test_an_address_that_makes_no_sense_is_refused(endpoint: NixlEndpoint, address: bytes) -> None:
    descriptor = forge(endpoint.export_window(4096).descriptor, address=address)
    with pytest.raises(ConnectRefused, match=r"makes no sense|refuses the other side's address"):
        endpoint.connect(descriptor, timeout_s=0.2)


OF_OTHERS: set[str] = set()


@pytest.fixture
def of_others() -> None:
    """Know the threads of this process by their ids from now on."""
    OF_OTHERS.clear()
    OF_OTHERS.update(task.name for task in Path("/proc/self/task").iterdir())


def left_behind() -> tuple[int, int, int]:
    """(open file descriptors, threads, of this process as the kernel sees it; shared mappings).

    Threads that were there before the test are not counted: those of other tests may end meanwhile.
    """
    gc.collect()
    tasks = sum(task.name not in OF_OTHERS for task in Path("/proc/self/task").iterdir())
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        tasks,
        Path("/proc/self/maps").read_text().count("rw-s"),
    )


def settled() -> tuple[int, int, int]:
    """What is left behind once it stays the same for a while: threads of UCX end a little later."""
    found, before = left_behind(), None
    end_s = time.monotonic() + 60
    while found != before and time.monotonic() < end_s:
        time.sleep(0.3)
        found, before = left_behind(), found
    return found


def no_more_than(before: tuple[int, int, int]) -> bool:
    """Whether nothing is there that was not before; what other tests left may go meanwhile."""
    return all(now <= then for now, then in zip(left_behind(), before, strict=True))


@pytest.mark.full(seconds=5)
def test_nothing_is_left_behind_after_close(of_others: None) -> None:
    def use() -> None:
        a, b = NixlEndpoint("a", 1), NixlEndpoint("b", 2)
        windows = [a.export_window(1 << 20) for _ in range(3)]
        peers = [b.connect(window.descriptor) for window in windows[:2]]
        windows[0].close()
        b.put(peers[1], 8, bytes(1 << 19))
        assert left_behind() > before
        for _ in range(2):
            a.close()
            b.close()

    before = (0, 0, 0)
    use()  # What UCX keeps for the life of the process.
    before = settled()
    rss_kb = resident_kb()
    for _ in range(6):
        use()
    assert until(lambda: no_more_than(before)), (left_behind(), before)
    assert resident_kb() - rss_kb < 20_000, "each round maps 5 MB of windows and images"


def resident_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def test_an_endpoint_that_nobody_closed_is_closed_when_it_is_collected(of_others: None) -> None:
    def use() -> None:
        a, b = NixlEndpoint("a", 1), NixlEndpoint("b", 2)
        peer = b.connect(a.export_window(1 << 20).descriptor)
        b.put(peer, 8, bytes(1 << 19))

    use()
    before = settled()
    use()
    assert until(lambda: no_more_than(before)), (left_behind(), before)


def test_an_endpoint_alive_at_the_interpreters_exit_ends_it_well(endpoint: NixlEndpoint) -> None:
    window = endpoint.export_window(8 << 20)
    program = (
        "from p2p.nixl import NixlEndpoint\n"
        "endpoint = NixlEndpoint('child', 2)\n"
        f"peer = endpoint.connect(bytes.fromhex('{window.descriptor.hex()}'))\n"
        "endpoint.put(peer, 8, bytes(4 << 20))\n"
        # As native code does whose caller did not wait for it.
        "import ctypes, threading\n"
        "from p2p import native\n"
        "load, words = native.load().p2p_signals_load, (ctypes.c_uint64 * 1)()\n"
        "at = endpoint.export_window(4096).address\n"
        "def read():\n"
        "    while True: load(at, 8, 1, words)\n"
        "threading.Thread(target=read, daemon=True).start()\n"
        "print('done', flush=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert hangs_up(window.liveness_fd, 60.0)


def test_closing_an_endpoint_ends_a_connect_that_waits() -> None:
    outcomes: list[str] = []

    def call(caller: NixlEndpoint, descriptor: bytes) -> None:
        try:
            caller.connect(descriptor, timeout_s=60)
        except EndpointClosed:
            outcomes.append("closed")

    with child("own") as other:
        other.say("4096")
        descriptor = bytes.fromhex(other.hear())
        other.freeze()
        caller = NixlEndpoint("caller", CHILD)
        thread = threading.Thread(target=call, args=(caller, descriptor))
        thread.start()
        time.sleep(0.5)
        caller.close()
        thread.join(60)
        assert outcomes == ["closed"]


def test_closing_an_endpoint_at_any_moment_of_a_connect_or_an_export_is_safe(endpoint: NixlEndpoint) -> None:
    for turn in range(12):
        window = endpoint.export_window(4096)
        caller = NixlEndpoint("caller", turn)
        ended: list[str] = []

        def call(caller: NixlEndpoint = caller, window: NixlWindow = window, ended: list[str] = ended) -> None:
            with contextlib.suppress(EndpointClosed):
                caller.connect(window.descriptor)
                caller.export_window(4096)
            ended.append("ended")

        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.015 * turn)
        caller.close()
        thread.join(60)
        assert ended and not caller._links, f"turn {turn}"
        window.close()


def test_a_monitor_outlives_its_peer_and_says_so(endpoint: NixlEndpoint) -> None:
    with NixlEndpoint("other", CHILD) as other:
        peer = other.connect(endpoint.export_window(4096).descriptor)
        monitor = other.monitor(peer)
        other.put(peer, 8, bytes(64))
        assert until(lambda: monitor.read().bytes == 64)
        other.disconnect(peer)
        with pytest.raises(EndpointClosed, match="this side disconnected from parent"):
            monitor.read()


def test_everything_is_refused_after_close(endpoint: NixlEndpoint) -> None:
    with NixlEndpoint("other", CHILD) as other:
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
            lambda: peer.page_address,
            lambda: window.memory,
        ):
            with pytest.raises(EndpointClosed):
                action()
        assert endpoint.status(peer) is Status.GONE is endpoint.status(window)
        endpoint.progress()
        assert endpoint.rail_counts(peer) == ()


@pytest.mark.parametrize("offset, data", [(-1, b"x"), (4096, b"x"), (4000, bytes(97))])
def test_puts_and_signals_outside_the_window_are_refused(endpoint: NixlEndpoint, offset: int, data: bytes) -> None:
    with NixlEndpoint("other", CHILD) as other:
        peer = other.connect(endpoint.export_window(4096).descriptor)
        with pytest.raises(ValueError, match="do not lie in a window of 4096"):
            other.put(peer, offset, data)
        with pytest.raises(ValueError, match="not 8-aligned in 4096 bytes"):
            other.signal(peer, offset + 4092, 1)


def test_impossible_endpoints_and_windows_are_refused(endpoint: NixlEndpoint) -> None:
    for arguments in (("", 1), ("x" * 256, 1), ("x", -1), ("x", 1 << 64)):
        with pytest.raises(ValueError, match="1 to 255 bytes and a u64 needed"):
            NixlEndpoint(*arguments)
    with pytest.raises(ValueError, match="has room for 1 to 63"):
        NixlEndpoint("x", 1, lanes=64)
    with pytest.raises(ValueError, match="0 rails named; 1 to 16 needed"):
        NixlEndpoint("x", 1, rails=())
    with pytest.raises(ValueError, match="a window of 0 bytes asked for"):
        endpoint.export_window(0)


def test_a_rail_that_this_machine_lacks_is_named_beside_those_it_has() -> None:
    with pytest.raises(P2PError, match=r"rail 'nosuch0' is no device of this machine; it has .*lo"):
        NixlEndpoint("x", 1, rails=("lo", "nosuch0"))


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_native, "PACKAGE", "nixl_of_another_age")
    with pytest.raises(nixl_native.NixlMissing, match="pip install --no-deps nixl-cu13"):
        nixl_native.find_library()


@pytest.mark.parametrize(
    "chosen, allowed",
    [
        ("all", "cma, knem, xpmem"),
        ("tcp,sm", "cma, knem, xpmem"),
        ("tcp,\\cma", "cma"),
        ("mm,tcp", "xpmem"),
        ("^cma", "knem, xpmem"),
        ("^ud,mm", "cma, knem"),
    ],
)
def test_ucx_transports_that_no_fence_stops_are_refused(chosen: str, allowed: str) -> None:
    with pytest.raises(P2PError, match=f"which allows {allowed}: .*UCX_TLS=\\^cma,knem,xpmem,cuda_ipc"):
        nixl_native.check_transports(chosen)


@pytest.mark.parametrize("chosen", [None, "", "tcp", "rc,ud,self", "^cma,knem,xpmem", "^sm", "posix,sysv,tcp"])
def test_ucx_transports_that_end_with_their_agent_are_allowed(chosen: str | None) -> None:
    nixl_native.check_transports(chosen)


def test_a_library_of_another_age_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    program = (
        "from p2p import nixl_native, native; from pathlib import Path\n"
        "nixl_native.find_library = lambda: Path(native.LIBRARY)\n"
        "try: nixl_native.load()\n"
        "except nixl_native.NixlMissing as error: print(error)"
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30).stdout
    assert "has no function nixl_capi_create_configured_agent. Version 1.5.1 is needed" in shown, shown


def test_two_rails_on_one_device_share_the_bytes() -> None:
    with (
        NixlEndpoint("owner", PARENT, rails=("lo", "lo")) as owner,
        NixlEndpoint("writer", CHILD, rails=("lo",)) as writer,
    ):
        window = owner.export_window(16 << 20)
        peer = writer.connect(window.descriptor)
        payload = np.random.default_rng(1).integers(0, 256, (16 << 20) - 8, np.uint8)
        for turn in range(1, 5):
            writer.put(peer, 8, payload)
            writer.signal(peer, 0, turn)
            assert until(lambda turn=turn: window.poll(0, 1)[0] == turn)
        assert (window.memory[8:] == payload).all()
        rails = writer.rail_counts(peer)
        assert [rail.live for rail in rails] == [True, True]
        assert min(rail.sent_bytes for rail in rails) > 1 << 20, rails
