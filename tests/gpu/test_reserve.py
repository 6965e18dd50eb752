"""What a server takes of a GPU's memory for experts, and says that it holds."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from experts.gpu.backend import GpuBackend
from experts.gpu.layout import CountWord, HostWord
from experts.gpu.weights import ExpertWeights, Fp8ExpertWeights
from experts.kernels import WeightsBroken, pack_expert
from experts.model import Dtype, ExpertShape
from experts.wire import WireShape
from router.placement import place
from tests.gpu.device import DEVICE, fresh_seed
from tests.gpu.kernel_server import EVERY, SHAPE, matrices_of

LARGE = ExpertShape(architecture="", layer_ids=tuple(range(48)), experts=128, hidden=2048, intermediate=768, top_k=8)


@pytest.mark.parametrize(("dtype", "kind"), [(Dtype.BFLOAT16, ExpertWeights), (Dtype.FP8, Fp8ExpertWeights)])
def test_as_many_experts_as_fit_are_told_and_no_placement_gives_more(
    dtype: Dtype, kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seed = fresh_seed()
    allocate, every = kind.allocate, LARGE.layers * LARGE.experts
    monkeypatch.setattr(kind, "allocate", lambda **sizes: allocate(**sizes | {"device": "meta"}))
    one_bytes = kind.allocate(slots=1, hidden=LARGE.hidden, intermediate=LARGE.intermediate).expert_bytes
    # Of a GPU, without the context that one of its own would have made.
    backend, free_bytes = GpuBackend(torch.device("cpu")), [0]
    backend.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes[0], 1 << 40))
    wire = WireShape(shape=LARGE, dtype=dtype, model_hash=7)
    with pytest.raises(ValueError, match="0 bytes free, and 80% of that hold no expert"):
        backend.reserve(wire)
    free_bytes[0] = int(np.random.default_rng(seed).integers(2 * one_bytes, every * one_bytes))
    with caplog.at_level(logging.INFO):
        fit = backend.reserve(wire)
    assert fit * one_bytes <= 0.8 * free_bytes[0] < (fit + 1) * one_bytes, f"seed {seed}"
    assert f"slots={fit} bytes={fit * one_bytes} free_bytes={free_bytes[0]}" in caplog.text
    placed = place(layers=LARGE.layers, experts=LARGE.experts, replicas=1, capacity={"expert/1": fit})
    assert placed["expert/1"].bit_count() == fit, f"seed {seed}"
    free_bytes[0] = 2 * every * one_bytes
    assert backend.reserve(wire) == every, "no more than there are"


def test_a_server_uses_the_slots_that_were_reserved_for_it_and_no_other_does() -> None:
    backend = GpuBackend(torch.device(DEVICE))
    wire = WireShape(shape=SHAPE, dtype=Dtype.BFLOAT16, model_hash=7)
    assert backend.reserve(wire) == len(EVERY)
    reserved = backend._reserved
    first, second = (backend.server(wire, incarnation=n, cores=(-1,), bell_page=0) for n in (1, 2))
    assert first._weights is reserved and second._weights is not reserved
    with pytest.raises(ValueError, match=r"cannot be served beside another model on .*: a GPU's server has one"):
        first.add_model(wire)
    seed = fresh_seed()
    packed = {
        pair: pack_expert(gate, up, down, Dtype.BFLOAT16)
        for pair, (gate, up, down) in matrices_of(seed, wire.dtype).items()
    }
    first._free.clear()
    with pytest.raises(WeightsBroken, match="finds no room: 8 experts"):
        first.set_expert(0, 0, packed[0, 0].gate_up, packed[0, 0].down)
    for pair in EVERY:
        second.set_expert(pair[0], pair[1], packed[pair].gate_up, packed[pair].down)
    assert len(second.tables.held.unique()) == len(EVERY), f"seed {seed}"
    second.tables.host[HostWord.COUNTS + CountWord.PAIRS] = 10
    second.tables.host[HostWord.COUNTS + CountWord.EXPERTS] = 2
    wanted = SHAPE.hidden * SHAPE.intermediate // 64 * (10 + 2 * 180)
    assert second.counters().work == wanted, "reading an expert's weights counts as 180 rows of it"
