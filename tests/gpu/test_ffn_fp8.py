"""Experts in float8 give the definition's rows, and the same bits in whatever company a row comes."""

from __future__ import annotations

import pytest
import torch

from experts.gpu.ffn_fp8 import ffn_fp8_reference, grouped_ffn_fp8, quantise_reference, quantise_rows
from experts.gpu.group import Groups, group
from experts.gpu.weights import FP8_TILE, Fp8ExpertWeights
from tests.gpu.aot import SHARED_LIMIT_BYTES, compile_kernel
from tests.gpu.device import DEVICE, distance, fresh_seed, poisoned, same_bits

HIDDEN, INTERMEDIATE, SLOTS = 208, 72, 2
# An act near a boundary of float8 is rounded the other way where sums differ; tensor cores keep 14 bits of them.
LIMIT = 2e-2


def number(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def poisoned_fp8(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)


def quantised(rows: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    tiles = -(-rows.shape[1] // FP8_TILE)
    q, scales = poisoned_fp8(len(rows), tiles * FP8_TILE), poisoned(len(rows), tiles)
    quantise_rows(rows.to(DEVICE), number(n), q, scales)
    return q, scales


class Case:
    """Random experts, rows and pairs of one seed."""

    def __init__(self, seed: int, pairs: int, rows: int = 20) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.weights = Fp8ExpertWeights.allocate(
            slots=SLOTS, hidden=HIDDEN, intermediate=INTERMEDIATE, device=DEVICE
        )
        self.weights.gate_up.view(torch.uint8).fill_(0x7F)  # NaN, where loading leaves anything out
        wide, high = (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
        for slot in range(SLOTS):
            matrices = [torch.randn(shape, generator=draw) / shape[1] ** 0.5 for shape in (wide, wide, high)]
            self.weights.load(slot, *matrices)
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
        grouped_ffn_fp8(*quantised(self.rows, len(self.rows)), row_of, groups, self.weights, *scratch, out)
        return out.cpu()

    def wanted(self) -> torch.Tensor:
        experts = [[matrix.cpu() for matrix in self.weights.unload(slot)] for slot in range(SLOTS)]
        rows = [
            ffn_fp8_reference(self.rows[r : r + 1], *experts[s])
            for r, s in zip(self.row_of.tolist(), self.slots.tolist(), strict=True)
        ]
        return torch.cat(rows)


def test_rows_are_quantised_to_the_bits_of_the_definition() -> None:
    seed = fresh_seed()
    rows = (torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 3).bfloat16()
    rows[2] = 0
    rows[3, 5] = 1e30
    q, scales = (tensor.cpu() for tensor in quantised(rows, 6))
    wanted, wanted_scales = quantise_reference(rows.float())
    assert same_bits(q[:6], wanted[:6]), f"seed {seed}"
    assert same_bits(scales[:6], wanted_scales[:6]), f"seed {seed}"
    assert scales[6].isnan().all(), f"seed {seed}: a row that is not there was written"


@pytest.mark.parametrize("tile", [16, 64])
def test_rows_are_those_of_the_definition(tile: int) -> None:
    seed = fresh_seed()
    case = Case(seed, pairs=50)
    held = case.slots >= 0
    out = case.run(tile)
    assert distance(out[held], case.wanted()[held]) < LIMIT, f"seed {seed}"
    assert out[~held].isnan().all(), f"seed {seed}: a pair of no group was written"


def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_both_classes() -> None:
    seed = fresh_seed()
    case = Case(seed, pairs=90)
    case.slots[:] = 1
    whole = case.run(16)
    assert same_bits(whole, case.run(64)), f"seed {seed}"
    for tile in (16, 64):
        assert same_bits(case.run(tile, only=slice(70, 71))[0], whole[70]), f"seed {seed}, tile {tile}"


def test_an_expert_is_loaded_as_its_checkpoint_quantised_it() -> None:
    seed = fresh_seed()
    draw = torch.Generator().manual_seed(seed)
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    q = [torch.randn(shape, generator=draw).to(torch.float8_e4m3fn) for shape in shapes]
    scales = [torch.rand([-(-size // FP8_TILE) for size in shape], generator=draw) for shape in shapes]
    weights = Fp8ExpertWeights.allocate(slots=1, hidden=HIDDEN, intermediate=INTERMEDIATE, device=DEVICE)
    weights.load_quantised(0, q, scales)
    for matrix, scale, back in zip(q, scales, weights.unload(0), strict=True):
        spread = scale.double().repeat_interleave(FP8_TILE, 0).repeat_interleave(FP8_TILE, 1)
        wanted = matrix.double() * spread[: matrix.shape[0], : matrix.shape[1]]
        assert torch.equal(back.cpu(), wanted), f"seed {seed}"
    with pytest.raises(ValueError, match="one for each 128 x 128, is needed"):
        weights.load_quantised(0, q, [scale[:0] for scale in scales])


def test_wide_groups_are_refused() -> None:
    case = Case(fresh_seed(), pairs=4)
    with pytest.raises(ValueError, match="float8 takes groups of 16 or 64"):
        case.run(128)


@pytest.mark.parametrize(
    ("kernel", "tile", "stages"), [("_gate_up", 16, 6), ("_gate_up", 64, 5), ("_down", 64, 5)]
)
def test_products_compile_to_wgmma(kernel: str, tile: int, stages: int) -> None:
    tables = ("order", "group_slot", "group_start", "group_count", "n_groups")
    kinds = dict.fromkeys(tables, "*i32") | {"weights": "*fp8e4nv", "weight_scales": "*fp32"}
    kinds |= {"act": "*fp8e4nv", "act_scales": "*fp32", "k_tiles": "i32"}
    rows = {"rows": "*fp8e4nv", "scales": "*fp32", "row_of": "*i32"}
    kinds |= rows if kernel == "_gate_up" else {"out": "*fp32"}
    shape = {"TOKENS": tile, "STAGES": stages, "BAND": 16, "INTERPRET": False}
    built = compile_kernel(
        "experts.gpu.ffn_fp8", kernel, kinds, shape | {"HIDDEN": 7168, "INTERMEDIATE": 2048}, num_warps=8
    )
    assert built.wgmma
    assert "e4m3.e4m3" in built.ptx
    assert built.spills == 0, f"{built.registers} registers"
    assert built.shared_bytes <= SHARED_LIMIT_BYTES
