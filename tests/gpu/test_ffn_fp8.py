"""Experts in float8 give the definition's rows, and the same bits in whatever company a row comes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from experts.gpu import backend as module
from experts.gpu.backend import GpuBackend
from experts.gpu.ffn import LAUNCH, ffn_fp8_reference, grouped_ffn, quantize_reference
from experts.gpu.group import Groups, group
from experts.gpu.weights import FP8_TILE, Fp8ExpertWeights
from experts.kernels import KernelsBroken, WeightsBroken, pack_expert
from experts.model import Dtype, ExpertShape
from experts.quantized import Codes, Quantized
from experts.wire import WireShape
from tests.gpu.aot import SHARED_LIMIT_BYTES, compile_kernel
from tests.gpu.device import DEVICE, distance, fresh_seed, poisoned, same_bits

HIDDEN, INTERMEDIATE, SLOTS = 208, 72, 2
# An act near a boundary of float8 is rounded the other way where sums differ; tensor cores keep 14 bits of them.
LIMIT = 2e-2


def number(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def poisoned_fp8(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)


def drawn(rows: int, k: int, rng: np.random.Generator) -> Quantized:
    """A matrix whose product keeps the size of a row, and in which no two scales are equal."""
    codes = torch.from_numpy(rng.standard_normal((rows, k), np.float32)).to(torch.float8_e4m3fn)
    return Quantized(
        kind=Codes.E4M3,
        codes=codes.view(torch.uint8).numpy(),
        scales=(rng.random((rows, -(-k // FP8_TILE)), np.float32) + np.float32(0.5)) / np.float32(k**0.5),
        group=FP8_TILE,
    )


def expert(rng: np.random.Generator) -> tuple[Quantized, Quantized, Quantized]:
    wide = drawn(INTERMEDIATE, HIDDEN, rng), drawn(INTERMEDIATE, HIDDEN, rng)
    return *wide, drawn(HIDDEN, INTERMEDIATE, rng)


class Case:
    """Random experts, rows and pairs of one seed."""

    def __init__(self, seed: int, pairs: int, rows: int = 20) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.weights = Fp8ExpertWeights.allocate(slots=SLOTS, hidden=HIDDEN, intermediate=INTERMEDIATE, device=DEVICE)
        self.weights.gate_up.view(torch.uint8).fill_(0x7F)  # NaN, where loading leaves anything out
        self.experts = [expert(np.random.default_rng(seed + slot)) for slot in range(SLOTS)]
        for slot in range(SLOTS):
            self.weights.load(slot, *self.experts[slot])
        self.rows = torch.randn(rows, HIDDEN, generator=draw).bfloat16()
        self.row_of = torch.randint(0, rows, (pairs,), generator=draw, dtype=torch.int32)
        self.slots = torch.randint(-1, SLOTS, (pairs,), generator=draw, dtype=torch.int32)

    def run(self, tile: int, only: slice = slice(None)) -> torch.Tensor:
        """Rows of some pairs, poisoned where nothing was to be written."""
        slots, row_of = self.slots[only].to(DEVICE), self.row_of[only].to(DEVICE)
        pairs, width = len(slots), self.weights.act_width
        groups = Groups.allocate(pairs=pairs, slots=SLOTS, tile=tile, device=DEVICE)
        group(slots, number(pairs), groups)
        out = poisoned(pairs, HIDDEN)
        scratch = poisoned_fp8(pairs, width), poisoned(pairs, width // FP8_TILE)
        q, scales = (tensor.to(DEVICE) for tensor in quantize_reference(self.rows.float()))
        grouped_ffn(q, row_of, groups, self.weights, scratch[0], out, scales, scratch[1])
        return out.cpu()

    def wanted(self) -> torch.Tensor:
        experts = [[torch.from_numpy(matrix.dequantized()).double() for matrix in three] for three in self.experts]
        rows = [
            ffn_fp8_reference(self.rows[r : r + 1], *experts[s])
            for r, s in zip(self.row_of.tolist(), self.slots.tolist(), strict=True)
        ]
        return torch.cat(rows)


@pytest.mark.parametrize("tile", [16, 64])
def test_rows_are_those_of_the_definition(tile: int) -> None:
    seed = fresh_seed()
    case = Case(seed, pairs=50)
    held = case.slots >= 0
    out = case.run(tile)
    assert distance(out[held], case.wanted()[held]) < LIMIT, f"seed {seed}"
    assert out[~held].isnan().all(), f"seed {seed}: a pair of no group was written"


def test_a_row_has_the_same_bits_alone_and_on_both_sides_of_every_border() -> None:
    seed = fresh_seed()
    case = Case(seed, pairs=90)
    case.slots[:] = 1
    whole = case.run(16)  # of six groups: tiles of full height
    for pairs in (1, 16, 17, 64, 65):  # of one group or two: of half the height in down, and each width
        part = case.run(64, only=slice(90 - pairs, 90))
        assert same_bits(part, whole[90 - pairs :]), f"seed {seed}, {pairs} pairs"


def test_an_expert_is_loaded_as_its_checkpoint_quantized_it() -> None:
    seed = fresh_seed()
    matrices = expert(np.random.default_rng(seed))
    weights = Fp8ExpertWeights.allocate(slots=1, hidden=HIDDEN, intermediate=INTERMEDIATE, device=DEVICE)
    weights.load(0, *matrices)
    for matrix, back in zip(matrices, weights.unload(0), strict=True):
        assert np.array_equal(back.codes, matrix.codes), f"seed {seed}"
        assert np.array_equal(back.scales, matrix.scales), f"seed {seed}"
    with pytest.raises(ValueError, match="codes int8 in groups of 128; e4m3 in groups of 128 is needed"):
        weights.load(0, *(replace(matrix, kind=Codes.INT8) for matrix in matrices))


def test_wide_groups_are_refused() -> None:
    case = Case(fresh_seed(), pairs=4)
    with pytest.raises(ValueError, match="in groups of 128; allocate 4 in groups of at most 64"):
        case.run(128)


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FP8])
def test_the_self_test_passes_here_and_catches_broken_kernels(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = GpuBackend(torch.device(DEVICE))
    backend.self_test(dtype)
    monkeypatch.setattr(module, "compute_rows", lambda x, *others: x.float() * 1.03)
    with pytest.raises(KernelsBroken, match=f"the {dtype.label} kernels on {DEVICE} differ from the definition"):
        backend.self_test(dtype)


def test_a_gpu_without_float8_says_how_to_serve_its_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a GPU, without the context that one of its own would have made.
    backend = GpuBackend(torch.device("cpu"))
    backend.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"capability 8.0; experts in fp8 need 8.9. Serve them with --dtype bfloat16"):
        backend.numerics_class(Dtype.FP8)
    assert "-sm80-bf16-" in backend.numerics_class(Dtype.BFLOAT16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert "-sm89-fp8-" in backend.numerics_class(Dtype.FP8)
    for dtype in set(Dtype) - {Dtype.BFLOAT16, Dtype.FP8}:
        with pytest.raises(ValueError, match=f"{dtype.label} is asked for"):
            backend.numerics_class(dtype)


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_an_expert_that_reads_otherwise_than_it_was_written_is_not_served(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = fresh_seed()
    shape = ExpertShape(architecture="", layer_ids=(0,), experts=1, hidden=128, intermediate=64, top_k=1)
    wire = WireShape(shape=shape, dtype=Dtype.FP8, model_hash=7)
    server = GpuBackend(torch.device(DEVICE)).server(wire, incarnation=5, cores=(-1,), bell_page=0)
    rng = np.random.default_rng(seed)
    gate, up, down = (drawn(*size, rng) for size in ((64, 128), (64, 128), (128, 64)))
    packed = pack_expert(gate, up, down, Dtype.FP8)
    unload = Fp8ExpertWeights.unload

    def torn(weights: Fp8ExpertWeights, slot: int) -> tuple[Quantized, ...]:
        gate, up, down = unload(weights, slot)
        getattr(down, part).view(np.uint8)[-1, -1] ^= 1
        return gate, up, down

    with monkeypatch.context() as patch:
        patch.setattr(Fp8ExpertWeights, "unload", torn)
        with pytest.raises(WeightsBroken, match="down of expert 0 of layer 0 reads otherwise"):
            server.set_expert(0, 0, packed.gate_up, packed.down)
    assert int(server.tables.held[0, 0]) == -1, f"seed {seed}"
    server.close()


@pytest.mark.parametrize(("gated", "k", "n"), [(True, 7168, 2048), (False, 2048, 7168)])
def test_products_compile_to_wgmma(gated: bool, k: int, n: int) -> None:
    tables = ("order", "group_slot", "group_start", "group_count", "n_groups")
    kinds = dict.fromkeys(tables, "*i32") | dict.fromkeys(("rows", "weights", "out"), "*fp8e4nv")
    kinds |= {"scales": "*fp32", "weight_scales": "*fp32", "k_tiles": "i32"}
    kinds |= {"row_of": "*i32", "out_scales": "*fp32"} if gated else {"out": "*fp32"}
    absent = dict.fromkeys({"out_scales", "row_of"} - set(kinds))
    shape = dict(LAUNCH[torch.float8_e4m3fn])
    warps = shape.pop("num_warps") * shape.pop("per_processor")
    built = compile_kernel(
        "experts.gpu.ffn", "grouped_kernel", kinds,
        absent | shape | {"K": k, "N": n, "GATED": gated, "WIDEST": 64, "INTERPRET": False}, num_warps=warps,
    )  # fmt: skip
    assert built.wgmma
    assert "e4m3.e4m3" in built.ptx
    assert built.spills == 0, f"{built.registers} registers"
    assert built.shared_bytes <= SHARED_LIMIT_BYTES
