"""The cuda transport over a strict stand-in for the driver: transfer, death, lies, every failing step, and words.

What it shares with shm is in test_one_host.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from p2p.cuda import CudaEndpoint
from p2p.cuda_device import Device, DeviceMemory
from p2p.cuda_driver import PEER_ACCESS, PEER_ATOMICS, CudaDriver, CudaError, CudaMissing
from p2p.descriptor import Transport, decode
from p2p.endpoint import ConnectRefused, DescriptorInvalid, P2PError, Status
from p2p.frame import Header, open_frame, seal_frame
from p2p.transport import TransportChoice
from tests.p2p.one_host import ROOT, OneHost, forge, hangs_up, open_fds, retired_bytes
from tests.p2p.peer_process import CHILD, PARENT

GRANULE = 2 << 20


@pytest.fixture
def world(stand_in: Path) -> Iterator[OneHost]:
    """The stand-in, which holds nothing more at the end than it did before."""
    made = OneHost(stand_in)
    before = made.live()
    yield made
    assert made.live() == before


@pytest.fixture
def endpoint(world: OneHost) -> Iterator[CudaEndpoint]:
    with world.endpoint("parent", PARENT) as made:
        yield made


def tell(world: OneHost, what: str, *arguments: object) -> None:
    assert world.driver
    getattr(world.driver._library, what)(*arguments)


@contextlib.contextmanager
def told(world: OneHost, what: str, value: int, otherwise: int) -> Iterator[None]:
    tell(world, what, value)
    try:
        yield
    finally:
        tell(world, what, otherwise)


def until_polled(window: object, value: int) -> None:
    deadline_s = time.monotonic() + 60
    while window.poll(0, 1)[0] != value:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline_s, f"no signal {value}"
        time.sleep(0.0005)


def test_bytes_travel_both_ways_between_processes(world: OneHost, endpoint: CudaEndpoint) -> None:
    with world.child("own") as other:
        window = endpoint.export_window(8192)
        peer = endpoint.connect(bytes.fromhex(other.hear()))
        other.say(window.descriptor.hex())
        assert other.hear() == "connected"
        for sequence in range(1, 51):
            data = np.random.default_rng(sequence).integers(0, 256, 1000, dtype=np.uint8)
            endpoint.put(peer, 64, data)
            endpoint.signal(peer, 0, sequence)
            until_polled(window, sequence)
            assert (window.memory[64:1064] == data[::-1]).all(), f"message {sequence}"
        assert window.peer_incarnation == CHILD
        assert peer.page_address and window.liveness_fd >= 0


def test_frames_travel(world: OneHost, endpoint: CudaEndpoint) -> None:
    with world.endpoint("other", CHILD, device=1) as other:
        window = endpoint.export_window(4096)
        peer = other.connect(window.descriptor)
        frame = memoryview(bytearray(1024))
        seal_frame(frame, Header(incarnation=PARENT, sender=CHILD, sequence=7, length=5), b"hello")
        other.put(peer, 0, frame)
        other.signal(peer, 0, 7)
        other.put(peer, 4095, b"")
        assert window.poll(0, 2, 64).tolist() == [7, int.from_bytes(frame[64:72], "little")]
        assert open_frame(window.memory.data, 896, PARENT, CHILD, 7).payload == b"hello"
        assert window.address != peer.address and window.address % GRANULE == 0


def test_a_killed_owner_leaves_the_mapping_usable_and_is_gone(world: OneHost, endpoint: CudaEndpoint) -> None:
    with world.child("own") as other:
        peer = endpoint.connect(bytes.fromhex(other.hear()))
        endpoint.put(peer, 64, b"before")
        other.process.send_signal(signal.SIGKILL)
        assert hangs_up(peer.liveness_fd, 60.0)
        assert endpoint.status(peer) is Status.GONE
        assert endpoint.device.read(peer.address + 64, 6).tobytes() == b"before"
        endpoint.put(peer, 64, b"after ")
        assert endpoint.device.read(peer.address + 64, 6).tobytes() == b"after "
        endpoint.disconnect(peer)
        endpoint.disconnect(peer)


def test_a_killed_writer_leaves_what_it_wrote_and_its_window_goes_at_once(
    world: OneHost, endpoint: CudaEndpoint
) -> None:
    with world.child("own") as other:
        window = endpoint.export_window(8192)
        peer = endpoint.connect(bytes.fromhex(other.hear()))
        other.say(window.descriptor.hex())
        assert other.hear() == "connected"
        endpoint.put(peer, 64, bytes(range(200)) * 5)
        endpoint.signal(peer, 0, 1)
        until_polled(window, 1)
        other.process.send_signal(signal.SIGKILL)
        assert hangs_up(window.liveness_fd, 60.0)
        assert window.memory[64:1064].tobytes() == (bytes(range(200)) * 5)[::-1]
        window.close()
        assert retired_bytes(endpoint) == 0
        assert world.live()["mappings"] == 1, "the peer's alone"


def test_a_late_write_lands_in_retired_memory_alone(world: OneHost, endpoint: CudaEndpoint) -> None:
    with world.endpoint("other", CHILD) as other:
        first = endpoint.export_window(4096)
        address, peer = first.address, other.connect(first.descriptor)
        first.close()
        second = endpoint.export_window(4096)
        other.put(peer, 0, b"late")
        assert endpoint.device.read(address, 4).tobytes() == b"late", "still mapped"
        assert not second.memory.any()
        assert retired_bytes(endpoint) == GRANULE
        other.disconnect(peer)
        endpoint.progress()
        assert retired_bytes(endpoint) == 0
        with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
            endpoint.device.read(address, 4)


def test_windows_are_whole_granules_of_zeros(world: OneHost, endpoint: CudaEndpoint) -> None:
    for nbytes, held_bytes in ((1, GRANULE), (GRANULE, GRANULE), (GRANULE + 1, 2 * GRANULE)):
        window = endpoint.export_window(nbytes)
        assert (window.nbytes, window.held_bytes) == (nbytes, held_bytes)
        assert not endpoint.device.read(window.address, held_bytes).any()
        assert decode(window.descriptor).nbytes == nbytes


def test_no_child_inherits_the_memory(world: OneHost, endpoint: CudaEndpoint) -> None:
    window = endpoint.export_window(4096)
    listed = subprocess.run(
        ["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False, check=True
    ).stdout
    assert "fake-cuda" not in listed
    assert window._fd >= 0 and not os.get_inheritable(window._fd)


def place(descriptor: bytes, held_bytes: int) -> bytes:
    address = decode(descriptor).address
    return forge(descriptor, address=address[:53] + struct.pack("<Q", held_bytes))


@pytest.mark.parametrize(
    "held_bytes, message",
    [(4 * GRANULE, "CUDA_ERROR_INVALID_VALUE"), (GRANULE + 4096, "a positive multiple of 2097152 is needed")],
)
def test_a_lie_about_the_size_of_the_memory_is_refused(
    world: OneHost, endpoint: CudaEndpoint, held_bytes: int, message: str
) -> None:
    window = endpoint.export_window(4096)
    with world.endpoint("other", CHILD) as other:
        before = world.live()
        with pytest.raises(ConnectRefused, match=f"parent's window on GPU-a0.* cannot be mapped.*{message}"):
            other.connect(place(window.descriptor, held_bytes))
        assert world.live() == before
        assert hangs_up(window.liveness_fd, 60.0), "the owner is told"


def test_a_descriptor_with_another_address_is_refused(endpoint: CudaEndpoint) -> None:
    descriptor = endpoint.export_window(GRANULE).descriptor
    for address in (decode(descriptor).address[:-1], decode(descriptor).address + b"x"):
        with pytest.raises(DescriptorInvalid, match=r"an address of 6[02] bytes found, 61 needed"):
            endpoint.connect(forge(descriptor, address=address))
    with pytest.raises(DescriptorInvalid, match="an allocation of 4096 bytes for a window of 2097152"):
        endpoint.connect(place(descriptor, 4096))


def test_gpus_that_do_not_reach_each_other_are_refused_in_words(world: OneHost, endpoint: CudaEndpoint) -> None:
    with told(world, "fake_cuda_part", 1, 0), world.endpoint("other", CHILD, device=1) as other:
        before = world.live()
        with pytest.raises(ConnectRefused, match=r"device 1 .*PEER_ACCESS.*place both processes on one GPU"):
            other.connect(endpoint.export_window(4096).descriptor)
        assert world.live()["mappings"] == before["mappings"] + 1, "the new window alone"


def test_memory_that_is_no_device_memory_is_refused(world: OneHost, endpoint: CudaEndpoint) -> None:
    fd = os.memfd_create("something else")
    try:
        with pytest.raises(CudaError, match="Taking shared memory on device 0"):
            DeviceMemory.receive(endpoint.device, fd, GRANULE)
    finally:
        os.close(fd)


# Every entry point that a window, a peer or an endpoint needs, told to fail once.
CREATING = (
    "cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
    "cuMemsetD8Async", "cuStreamSynchronize", "cuCtxPushCurrent_v2", "cuThreadExchangeStreamCaptureMode",
)  # fmt: skip
RECEIVING = ("cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")
OPENING = (
    "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetUuid_v2", "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute", "cuDriverGetVersion", "cuDevicePrimaryCtxRetain", "cuStreamCreate",
    "cuMemGetAllocationGranularity",
)  # fmt: skip


@pytest.mark.parametrize("step", CREATING)
def test_a_window_that_cannot_be_made_leaves_nothing(world: OneHost, endpoint: CudaEndpoint, step: str) -> None:
    before, fds = world.live(), open_fds()
    tell(world, "fake_cuda_fail", step.encode(), 2)
    with pytest.raises(CudaError, match=r"on device 0 .*CUDA_ERROR_OUT_OF_MEMORY \(2\).*Give the GPU back"):
        endpoint.export_window(4096)
    assert (world.live(), open_fds() - fds) == (before, set())
    endpoint.export_window(4096)


@pytest.mark.parametrize("step", RECEIVING)
def test_a_peer_that_cannot_be_mapped_leaves_nothing(world: OneHost, endpoint: CudaEndpoint, step: str) -> None:
    window = endpoint.export_window(4096)
    with world.endpoint("other", CHILD) as other:
        before = world.live()
        tell(world, "fake_cuda_fail", step.encode(), 2)
        with pytest.raises(ConnectRefused, match="cannot be mapped on device 0"):
            other.connect(window.descriptor)
        assert world.live() == before


@pytest.mark.parametrize("step", OPENING)
def test_an_endpoint_that_cannot_be_made_leaves_nothing(world: OneHost, step: str) -> None:
    before, fds = world.live(), open_fds()
    tell(world, "fake_cuda_fail", step.encode(), 801)
    with pytest.raises(CudaError, match="use another transport"):
        world.endpoint("x", 1)
    with pytest.raises(ValueError, match="1 to 255 bytes"):
        world.endpoint("", 1)
    assert (world.live(), open_fds() - fds) == (before, set())


@pytest.mark.parametrize("step", ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"])
def test_what_could_not_be_closed_is_closed_by_another_try(world: OneHost, endpoint: CudaEndpoint, step: str) -> None:
    window = endpoint.export_window(4096)
    with world.endpoint("other", CHILD) as other:
        before = world.live()
        peer = other.connect(window.descriptor)
        tell(world, "fake_cuda_fail", step.encode(), 999)
        with pytest.raises(CudaError, match=r"\(999\)"):
            other.disconnect(peer)
        assert endpoint.status(window) is Status.ALIVE, "the owner's proof comes when the memory is let go"
        other.disconnect(peer)
        assert endpoint.status(window) is Status.GONE
        assert world.live() == before


def test_closing_goes_on_past_a_failure(world: OneHost) -> None:
    made = world.endpoint("x", 1)
    for _ in range(3):
        made.export_window(4096)
    tell(world, "fake_cuda_fail", b"cuMemRelease", 719)
    with pytest.raises(CudaError, match="its context is lost: end the process"):
        made.close()
    assert world.live()["mappings"] == 0 == world.live()["contexts"]
    assert world.live()["handles"] == 1, "what the driver refused to release"
    made.close()
    tell(world, "fake_cuda_forget")


def test_memory_of_the_host_is_shared_with_kernels(world: OneHost, endpoint: CudaEndpoint) -> None:
    words = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint64)
    address = endpoint.device.register(words.ctypes.data, words.nbytes)
    assert world.live()["pinned"] == 1
    words[1] = 7
    assert ctypes.c_uint64.from_address(address + 8).value == 7
    endpoint.device.unregister(words.ctypes.data)
    assert world.live()["pinned"] == 0
    tell(world, "fake_cuda_fail", b"cuMemHostGetDevicePointer_v2", 801)
    with pytest.raises(CudaError, match="Mapping pinned bytes on device 0"):
        endpoint.device.register(words.ctypes.data, words.nbytes)


def test_other_users_of_the_driver_find_their_context_unchanged(world: OneHost, endpoint: CudaEndpoint) -> None:
    assert world.driver
    library, mode = world.driver._library, ctypes.c_int(1)
    other = Device(world.driver, 1)
    library.cuCtxPushCurrent_v2(other._context)
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    endpoint.export_window(4096).close()
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 1, "the thread's mode of capture as it was"
    left = ctypes.c_void_p()
    assert library.cuCtxPopCurrent_v2(ctypes.byref(left)) == 0 and left.value == other._context.value
    other.close()
    other.close()
    with pytest.raises(P2PError, match=r"device 1 .* was closed here"):
        other.read(0, 1)


def test_threads_share_an_endpoint(world: OneHost, endpoint: CudaEndpoint) -> None:
    with world.endpoint("other", CHILD) as other:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for _ in range(10):
                    window = endpoint.export_window(4096)
                    peer = other.connect(window.descriptor)
                    other.put(peer, 8, bytes([number]) * 100)
                    other.signal(peer, 0, number)
                    assert window.poll(0, 1)[0] == number
                    assert set(window.memory[8:108].tolist()) == {number}
                    other.disconnect(peer)
                    window.close()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        endpoint.progress()
        assert retired_bytes(endpoint) == 0


def test_without_a_driver_the_words_say_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CudaMissing, match=r"absent\.so is needed and does not load.*Install NVIDIA's driver"):
        CudaDriver.load(str(tmp_path / "absent.so"))
    with pytest.raises(CudaMissing, match=r"has no function cuInit: a driver of CUDA 12 or later is needed"):
        CudaDriver.load("libc.so.6")


def test_without_a_gpu_the_words_say_so(world: OneHost, stand_in: Path) -> None:
    with told(world, "fake_cuda_devices", 0, 2):
        with pytest.raises(CudaError, match=r"CUDA_ERROR_NO_DEVICE \(100\).*CUDA_VISIBLE_DEVICES"):
            CudaDriver.load(str(stand_in))
        with pytest.raises(P2PError, match="GPU 0 is asked for and none found"):
            world.endpoint("x", 1)
    with pytest.raises(P2PError, match=r"GPU 2 is asked for and device 0 \(Stand-in, GPU-a0.*, device 1 .* found"):
        world.endpoint("x", 1, device=2)


def test_an_error_that_the_driver_cannot_name_is_still_told(world: OneHost, endpoint: CudaEndpoint) -> None:
    tell(world, "fake_cuda_fail", b"cuMemCreate", 12345)
    with pytest.raises(CudaError, match=r"an error unknown to this driver \(12345\).*dmesg") as caught:
        endpoint.export_window(4096)
    assert caught.value.code == 12345


def test_facts_of_a_gpu(world: OneHost) -> None:
    assert world.driver
    assert world.driver.version == (13, 0)
    first, second = world.driver.devices()
    assert (first.name, first.capability, first.multiprocessors) == ("Stand-in", (9, 0), 132)
    assert first.exports_fds and first.exports_rdma and not first.exclusive and not first.mps
    assert str(second) == "device 1 (Stand-in, GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1)"


def test_what_gpus_can_do_in_each_others_memory(world: OneHost) -> None:
    assert world.driver
    assert world.driver.peer_has(0, 1, PEER_ACCESS)
    assert not world.driver.peer_has(0, 1, PEER_ATOMICS)
    with told(world, "fake_cuda_part", 1, 0):
        assert not world.driver.peer_has(1, 0, PEER_ACCESS)
    with pytest.raises(
        CudaError, match="Asking what device 0 can do in the memory of device 2: CUDA_ERROR_INVALID_DEVICE"
    ):
        world.driver.peer_has(0, 2, PEER_ACCESS)


@pytest.mark.parametrize("text, device", [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)])
def test_a_device_belongs_to_the_choice(text: str, device: int) -> None:
    assert TransportChoice.parse(text).device == device
    assert TransportChoice.parse(text).named_rails == ()
    with pytest.raises(P2PError, match=f"windows on GPU {device} are asked for, and this process computes on CPUs"):
        TransportChoice.parse(text).opener()


@pytest.mark.parametrize(
    "text",
    [
        *("cuda:", "cuda:-1", "cuda:x", "cuda:0,1", "cuda:²", "CUDA", "shm:0", "nixl:"),
        *("nixl@", "nixl@shm", "cuda@cuda:0", "shm@cuda:0", "nixl:@cuda"),
    ],
)
def test_what_is_no_choice_is_refused(text: str) -> None:
    known = "is not known; shm, nixl, nixl:eth0,eth1, shm+nixl:eth0, cuda:1 or nixl:eth0@cuda:1 is needed"
    with pytest.raises(ValueError, match=re.escape(known)):
        TransportChoice.parse(text)


def test_nixl_may_have_a_device_too() -> None:
    choice = TransportChoice.parse("nixl:eth0,eth1@cuda:2")
    assert (choice.transport, choice.named_rails, choice.device) == (Transport.NIXL, ("eth0", "eth1"), 2)
    assert TransportChoice.parse("nixl@cuda").device == 0
    assert TransportChoice.parse("nixl").device is None
    with pytest.raises(P2PError, match="windows on GPU 2 are asked for"):
        choice.opener()


def test_a_trial_runs_over_the_machine_s_own_driver(stand_in: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(stand_in.parent)}
    command = [sys.executable, "-m", "p2p.trial", "cuda:1", "cuda:9"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    works, absent = said.splitlines()
    assert "problem=''" in works and "round_trip_us=0.0" not in works
    assert "GPU 9 is asked for" in absent
