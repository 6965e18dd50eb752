"""Devices by their names on command lines."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from experts.backend import DeviceUnavailable
from experts.devices import CPU, CUDA, INTERPRETER, Device
from experts.formats import experts_dtype
from experts.model import Dtype
from p2p.cuda_driver import CudaDriver, CudaMissing
from p2p.endpoint import P2PError
from p2p.local import ShmEndpoint
from p2p.transport import TransportChoice
from tests.experts.checkpoint_files import QWEN3


@pytest.mark.parametrize(
    ("text", "kind", "index"),
    [
        ("cpu", CPU, 0),
        ("cuda", CUDA, 0),
        ("cuda:3", CUDA, 3),
        ("interpreter", INTERPRETER, 0),
    ],
)
def test_a_device_is_read_as_it_is_named(text: str, kind: str, index: int) -> None:
    assert Device.parse(text) == Device(kind=kind, index=index)


@pytest.mark.parametrize("text", ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:\u0662", "interpreter:1"])
def test_another_word_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ValueError, match="cpu, cuda:0 or interpreter is needed"):
        Device.parse(text)


def test_windows_lie_where_the_device_reaches_them() -> None:
    shm, cuda = TransportChoice.parse("shm"), TransportChoice.parse("cuda:1")
    assert Device.parse("cpu").opener(shm) is ShmEndpoint
    assert Device.parse("interpreter").opener(shm) is ShmEndpoint
    assert Device.parse("cuda:1").opener(shm) is not ShmEndpoint
    for device in ("cpu", "interpreter"):
        with pytest.raises(P2PError, match="choose shm or nixl"):
            Device.parse(device).opener(cuda)


def test_experts_are_served_as_they_are_stored_where_the_device_has_kernels_for_them() -> None:
    fp8 = QWEN3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    int4 = QWEN3 | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    for device, kept in (("cpu", Dtype.INT4), ("cuda:0", Dtype.BFLOAT16), ("interpreter", Dtype.BFLOAT16)):
        keeps = Device.parse(device).keeps
        assert experts_dtype("auto", fp8, keeps) is Dtype.FP8
        assert experts_dtype("auto", int4, keeps) is kept
        assert experts_dtype("bfloat16", fp8, keeps) is Dtype.BFLOAT16


def test_what_a_gpu_needs_is_said_in_the_order_in_which_it_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> CudaDriver:
        raise CudaMissing("no driver: install one.")

    for name in ("torch", "triton"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(CudaDriver, "load", absent)
    with pytest.raises(
        DeviceUnavailable, match=r"^--device cuda:0: no driver: install one\. Without a GPU: --device cpu"
    ):
        Device.parse("cuda").backend()
    monkeypatch.setattr(CudaDriver, "load", lambda: SimpleNamespace(devices=lambda: ["one"]))
    with pytest.raises(DeviceUnavailable, match=r"^--device cuda:0: .*torch.*pip install torch\.$"):
        Device.parse("cuda").backend()
    counted = SimpleNamespace(device_count=lambda: 0)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=counted, __version__="2.13.0+cpu"))
    with pytest.raises(
        DeviceUnavailable, match=r"needs GPU 0; the driver sees 1, torch 2\.13\.0\+cpu 0: see `eaas doctor`"
    ):
        Device.parse("cuda").backend()
    counted.device_count = lambda: 1
    with pytest.raises(DeviceUnavailable, match=r"^--device cuda:0: .*triton.*pip install triton\.$"):
        Device.parse("cuda").backend()
