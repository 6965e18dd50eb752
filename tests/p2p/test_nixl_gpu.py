"""The nixl transport with windows on a GPU, over loopback TCP and a stand-in for the driver.

The stand-in's device memory is registered with NIXL as host memory, which it is; everything else is as with a GPU: the
host copies what is carried and stores the signals by the driver, on the threads and in the contexts that it needs.
"""

from __future__ import annotations

import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2p import native, nixl_native
from p2p.endpoint import P2PError, Status
from p2p.frame import open_frame
from p2p.nixl import NixlEndpoint
from p2p.window import WindowLayout
from tests.p2p.one_host import OneHost
from tests.p2p.peer_process import send as send_frame

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(nixl_native.PACKAGE) is None, reason="needs package nixl-cu13, found none"
)
OWNER, WRITER = 101, 202
LAYOUT = WindowLayout(slots=2, payload_bytes=256 * 1024)
# What UCX reads: loopback alone, whatever else this machine has.
os.environ["UCX_NET_DEVICES"] = "lo"


@pytest.fixture
def world(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneHost]:
    """The stand-in, whose memory NIXL takes for what it is; it holds no more at the end than before."""
    monkeypatch.setattr(nixl_native, "GPU_MEMORY", 0)
    made = OneHost(stand_in)
    before = made.live()
    yield made
    assert made.live() == before


@pytest.fixture
def owner(world: OneHost) -> Iterator[NixlEndpoint]:
    with NixlEndpoint("owner", OWNER, device=0, driver=world.driver) as made:
        yield made


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.0005)
    return bool(condition())


@pytest.mark.parametrize("writer_s_device", [None, 1])
@pytest.mark.parametrize("nbytes", [100, 49_000, 5_000_000])
def test_what_is_put_is_on_the_device_when_its_signal_is(
    world: OneHost, owner: NixlEndpoint, nbytes: int, writer_s_device: int | None
) -> None:
    driver = world.driver if writer_s_device is not None else None
    with NixlEndpoint("writer", WRITER, device=writer_s_device, driver=driver) as writer:
        window = owner.export_window(6 << 20)
        assert world.live()["mappings"] == 1
        peer = writer.connect(window.descriptor)
        assert bool(peer.device_address) is (writer_s_device is not None)
        for number in range(1, 6):
            data = random.Random(number).randbytes(nbytes)
            writer.put(peer, 64, data)
            writer.signal(peer, 0, number)
            assert until(lambda number=number: window.poll(0, 1)[0] == number), f"signal {number}"
            assert window.memory[64 : 64 + nbytes].tobytes() == data, f"put {number}"
        assert window.peer_incarnation == WRITER


def test_frames_stored_in_the_image_go_out_by_themselves(world: OneHost, owner: NixlEndpoint) -> None:
    with NixlEndpoint("writer", WRITER, device=1, driver=world.driver) as writer:
        window = owner.export_window(LAYOUT.nbytes)
        page = np.zeros(LAYOUT.nbytes, np.uint8)
        layout = (LAYOUT.slots, LAYOUT.payload_bytes)
        assert native.load().p2p_window_init(page.ctypes.data, len(page), OWNER, *layout) == 0
        assert owner.device
        owner.device.write(window.address, page[:4096])
        peer = writer.connect(window.descriptor)
        at = LAYOUT.slot_offset(1)
        for sequence in range(1, 20):
            payload = random.Random(sequence).randbytes(sequence * 10_000)
            send_frame(peer, 1, sequence, payload, sender=WRITER)  # type: ignore[arg-type]
            assert until(lambda sequence=sequence: window.poll(at, 1)[0] == sequence), f"frame {sequence}"
            frame = open_frame(window.memory[at:].data, LAYOUT.payload_bytes, OWNER, WRITER, sequence)
            assert frame.payload == payload, f"frame {sequence}"


def test_adapters_writes_are_flushed_before_a_signal_where_the_gpu_does_not_order_them(
    world: OneHost,
) -> None:
    assert world.driver
    library = world.driver._library
    try:
        library.fake_cuda_rdma(0, 1)
        with (
            NixlEndpoint("owner", OWNER, device=0, driver=world.driver) as owner,
            NixlEndpoint("writer", WRITER) as writer,
        ):
            window = owner.export_window(4096)
            peer = writer.connect(window.descriptor)
            before = library.fake_cuda_live(b"flushes")
            writer.signal(peer, 0, 7)
            assert until(lambda: window.poll(0, 1)[0] == 7)
            assert library.fake_cuda_live(b"flushes") == before + 1
        library.fake_cuda_rdma(0, 2)
        with pytest.raises(P2PError, match=r"device 0 .* neither orders nor flushes what network adapters write"):
            NixlEndpoint("owner", OWNER, device=0, driver=world.driver)
    finally:
        library.fake_cuda_rdma(100, 1)


def test_a_window_that_the_driver_loses_is_gone(world: OneHost, owner: NixlEndpoint) -> None:
    assert world.driver
    with NixlEndpoint("writer", WRITER) as writer:
        window = owner.export_window(4096)
        peer = writer.connect(window.descriptor)
        world.driver._library.fake_cuda_fail(b"cuMemcpyHtoDAsync_v2", 700)
        writer.put(peer, 64, b"x")
        assert until(lambda: owner.status(window) is Status.GONE)
        assert until(lambda: writer.status(peer) is Status.GONE)


def test_windows_ask_for_memory_that_adapters_reach(world: OneHost, owner: NixlEndpoint) -> None:
    assert world.driver
    before = world.driver._library.fake_cuda_live(b"rdma")
    window = owner.export_window(4096)
    assert world.driver._library.fake_cuda_live(b"rdma") == before + 1
    window.close()
    window.close()
    assert world.live()["mappings"] == 0


def test_device_memory_that_ucx_cannot_register_is_refused_in_words(stand_in: Path) -> None:
    world = OneHost(stand_in)
    before = world.live()
    with (
        NixlEndpoint("owner", OWNER, device=0, driver=world.driver) as owner,
        pytest.raises(P2PError, match="UCX cannot register the memory"),
    ):
        owner.export_window(4096)
    assert world.live() == before


@pytest.mark.parametrize("chosen", ["all", "cuda,tcp", "tcp,cuda_ipc", "^cma,knem,xpmem", "^sm"])
def test_no_gpu_of_a_peer_may_write_past_the_fence(
    chosen: str, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", chosen)
    with pytest.raises(P2PError, match=r"which allows .*cuda_ipc|which allows .*cma"):
        NixlEndpoint("owner", OWNER, device=0, driver=OneHost(stand_in).driver)


@pytest.mark.parametrize("chosen", [None, "tcp", "tcp,cuda_copy", "^cma,knem,xpmem,cuda_ipc", "^sm,cuda"])
def test_what_stops_at_the_fence_is_allowed(chosen: str | None) -> None:
    nixl_native.check_transports(chosen, nixl_native.UNFENCED_GPU)
