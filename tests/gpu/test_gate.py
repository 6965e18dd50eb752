"""Promises of the gate: the experts that the definition chooses, ties to the lowest, a row's choice its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eaas.gpu.gate import gate, parts_of
from eaas.gpu.norm_rope import ShapeInvalid
from eaas.model.spec import MoeSpec, Score
from tests.eaas.reference import gate_reference
from tests.gpu.aot import compile_kernel
from tests.gpu.device import DEVICE, distance, fresh_seed, poisoned, same_bits

PLAIN = MoeSpec(experts=8, top_k=2, expert_intermediate=1, norm_topk=True)
SIGMOID = MoeSpec(
    experts=24, top_k=5, expert_intermediate=1, norm_topk=True, score=Score.SIGMOID, correction_bias=True,
    groups=6, groups_topk=3, scaling_factor=2.5,
)  # fmt: skip
SPECS = {
    "softmax": PLAIN,
    "softmax, not normalised": replace(PLAIN, norm_topk=False, experts=70, top_k=7),
    "softmax, groups": replace(PLAIN, experts=12, groups=4, groups_topk=2, top_k=4),
    "sigmoid, correction, groups": SIGMOID,
    "groups of one": replace(SIGMOID, experts=6, groups=6, groups_topk=5),
    "all of them": replace(PLAIN, experts=5, top_k=5),
}


def chosen(
    high: Tensor,
    low: Tensor,
    weight: Tensor,
    correction: Tensor | None,
    moe: MoeSpec,
    count: int | None = None,
) -> tuple[Tensor, Tensor]:
    rows, hidden = high.shape
    ids = poisoned(rows, moe.top_k, dtype=torch.int32)
    weights = poisoned(rows, moe.top_k)
    parts = poisoned(parts_of(hidden) * rows * moe.experts)
    n_rows = torch.tensor([rows if count is None else count], dtype=torch.int32, device=DEVICE)
    gate(high, low, weight, correction, moe, parts, ids, weights, n_rows)
    return ids, weights


def split(norm: Tensor) -> tuple[Tensor, Tensor]:
    high = norm.to(torch.bfloat16)
    return high, (norm - high.float()).to(torch.bfloat16)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows", [pytest.param(3, marks=pytest.mark.smoke), 21])
def test_the_gate_chooses_what_the_definition_chooses(name: str, rows: int) -> None:
    seed, moe, hidden = fresh_seed(), SPECS[name], 600
    generator = torch.Generator().manual_seed(seed)
    norm = torch.randn(rows, hidden, generator=generator).to(DEVICE)
    weight = (torch.randn(moe.experts, hidden, generator=generator) * 2 / hidden**0.5).to(torch.bfloat16).to(DEVICE)
    correction = torch.randn(moe.experts, generator=generator).to(DEVICE) * 0.2 if moe.correction_bias else None
    high, low = split(norm)
    ids, weights = chosen(high, low, weight, correction, moe)
    wanted_ids, wanted = gate_reference(norm.double(), weight, correction, moe)
    # Where two experts are closer than float32 tells apart, either may come first.
    same = (ids.long() == wanted_ids).all(-1)
    assert int((~same).sum()) <= rows // 20, f"seed {seed}"
    off = distance(weights[same], wanted[same])
    assert off < 1e-4, f"off by {off}, seed {seed}"

    alone_ids, alone = chosen(high[2:3].clone(), low[2:3].clone(), weight, correction, moe)
    assert torch.equal(alone_ids[0], ids[2]), f"seed {seed}"
    assert same_bits(alone[0], weights[2]), f"seed {seed}"


def test_ties_go_to_the_lowest_index_and_what_is_no_number_still_gives_ids_in_range() -> None:
    weight = torch.zeros(8, 64, dtype=torch.bfloat16, device=DEVICE)
    weight[5:, 0] = 1.0
    norm = torch.zeros(4, 64, device=DEVICE)
    norm[0, 0], norm[1, 0], norm[3, 0] = 1.0, -1.0, torch.nan
    ids, weights = chosen(*split(norm), weight, None, replace(PLAIN, top_k=3))
    assert ids.tolist() == [[5, 6, 7], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert torch.allclose(weights[:3], torch.full((3, 3), 1 / 3, device=DEVICE))
    assert weights[3].isnan().all()


def test_rows_that_do_not_count_are_left_alone() -> None:
    norm = torch.ones(3, 64, device=DEVICE)
    weight = torch.ones(8, 64, dtype=torch.bfloat16, device=DEVICE)
    ids, weights = chosen(*split(norm), weight, None, PLAIN, count=2)
    assert ids[2].tolist() == [-7, -7]
    assert weights[2].isnan().all()
    assert ids[:2].tolist() == [[0, 1]] * 2


def test_scratch_that_is_too_small_is_refused_in_words() -> None:
    norm, weight = torch.ones(3, 64, device=DEVICE), torch.ones(8, 64, dtype=torch.bfloat16, device=DEVICE)
    high, low = split(norm)
    count = torch.ones(1, dtype=torch.int32, device=DEVICE)
    ids, weights = poisoned(3, 2, dtype=torch.int32), poisoned(3, 2)
    with pytest.raises(ShapeInvalid, match="of 23 elements; float32 of 24 is needed"):
        gate(high, low, weight, None, PLAIN, poisoned(23), ids, weights, count)


@pytest.mark.parametrize("rows", [16, 64])
def test_scores_compile_for_an_h200_to_warp_group_products(rows: int) -> None:
    built = compile_kernel(
        "eaas.gpu.gate", "score_kernel",
        {
            "norm": "*bf16", "low": "*bf16", "weight": "*bf16", "parts": "*fp32", "n_rows": "*i32", "rows": "i32",
            "hidden": "i32", "experts": "i32",
        },
        {"PART": 512, "K_TILE": 64, "M_TILE": 64, "N_TILE": rows, "INTERPRET": False},
        multiples=("hidden", "experts"),
    )  # fmt: skip
    assert built.wgmma
    assert built.spills == 0


def test_the_choice_compiles_for_an_h200_without_spills() -> None:
    built = compile_kernel(
        "eaas.gpu.gate", "choose_kernel",
        {
            "parts": "*fp32", "correction": "*fp32", "ids": "*i32", "weights": "*fp32", "n_rows": "*i32",
            "rows": "i32", "factor": "fp32",
        },
        {
            "PARTS": 14, "EXPERTS": 256, "PAD": 256, "TOP_K": 8, "TOP_PAD": 8, "SIGMOID": True, "NORMALIZE": True,
            "GROUPS": 8, "GROUPS_PAD": 8, "GROUPS_KEPT": 4,
        },
        num_warps=1,
    )  # fmt: skip
    assert built.spills == 0
