"""Pairs of one weight slot stand together, as the definition says, however many there are."""

from __future__ import annotations

import pytest
import torch

from experts.gpu import group as module
from experts.gpu.group import SMALL, Groups, group, group_reference
from tests.gpu.aot import compile_kernel
from tests.gpu.device import DEVICE, fresh_seed


def number(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def found(groups: Groups, pairs: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    n = int(groups.n_groups)
    rows = (groups.slot[:n].tolist(), groups.start[:n].tolist(), groups.count[:n].tolist())
    return groups.order[:pairs].tolist(), list(zip(*rows, strict=True))


@pytest.mark.parametrize(
    ("pairs", "n", "slots", "tile"),
    [
        (1, 1, 1, 16),
        pytest.param(40, 37, 3, 16, marks=pytest.mark.smoke),
        (SMALL, SMALL, 2, 64),
        (300, 300, 5, 128),
        (1500, 1400, 3, 64),
        (700, 0, 9, 16),
    ],
)
def test_groups_are_those_of_the_definition_each_time(pairs: int, n: int, slots: int, tile: int) -> None:
    seed = fresh_seed()
    draw = torch.Generator().manual_seed(seed)
    groups = Groups.allocate(pairs=pairs, slots=slots, tile=tile, device=DEVICE)
    for there in (n, n // 2, n):
        chosen = torch.randint(-1, slots, (pairs,), generator=draw, dtype=torch.int32)
        order, wanted = group_reference(chosen[:there], tile)
        groups.order.fill_(-7)
        group(chosen.to(DEVICE), number(there), groups)
        assert found(groups, len(order)) == (order, wanted), f"seed {seed}, {there} pairs"
        assert groups.order[len(order) :].eq(-7).all(), f"seed {seed}: something was written behind the end"


@pytest.mark.parametrize("rows", [9, 120])
def test_a_table_says_which_slot_an_expert_has(rows: int) -> None:
    seed, top_k = fresh_seed(), 3
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 6, (rows, top_k), generator=draw, dtype=torch.int32)
    table = torch.tensor([4, -1, 0, 7, 2, 5], dtype=torch.int32)
    groups = Groups.allocate(pairs=rows * top_k, slots=8, tile=16, device=DEVICE)
    group(ids.to(DEVICE), number(rows - 2), groups, per_row=top_k, table=table.to(DEVICE))
    flat = ids.flatten()[: (rows - 2) * top_k]
    chosen = torch.where(flat >= 0, table[flat.clamp_min(0).long()], -1)
    order, wanted = group_reference(chosen, 16)
    assert found(groups, len(order)) == (order, wanted), f"seed {seed}"


def test_pairs_of_a_few_layers_among_many_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for slots that no pair names is neither looked at nor left behind."""
    monkeypatch.setattr(module, "SCAN", 64)
    seed = fresh_seed()
    draw = torch.Generator().manual_seed(seed)
    experts, slots, pairs = 16, 58 * 16 + 5, 260
    groups = Groups.allocate(pairs=pairs, slots=slots, tile=16, device=DEVICE)
    for layers in ([3], [57, 0, 20], [30, 31, 33]):
        first = torch.tensor(layers)[torch.randint(len(layers), (pairs,), generator=draw)] * experts
        chosen = (first + torch.randint(-1, experts + 3, (pairs,), generator=draw)).to(torch.int32)
        order, wanted = group_reference(chosen, 16)
        group(chosen.to(DEVICE), number(pairs), groups)
        assert found(groups, len(order)) == (order, wanted), f"seed {seed}, layers {layers}"
        for left in (groups.tally[:-1], groups.touched, groups.arrived):
            assert not left.any(), f"seed {seed}, layers {layers}"


def test_what_cannot_be_is_said() -> None:
    for pairs, slots, tile in ((4, 2, 0), (0, 2, 16), (4, 0, 16)):
        with pytest.raises(ValueError, match="each is at least 1"):
            Groups.allocate(pairs=pairs, slots=slots, tile=tile, device=DEVICE)
    groups = Groups.allocate(pairs=4, slots=2, tile=16, device=DEVICE)
    with pytest.raises(ValueError, match=r"room for 4\. Allocate them for 5"):
        group(torch.zeros(5, dtype=torch.int32, device=DEVICE), number(5), groups)
    with pytest.raises(ValueError, match="contiguous int32 is needed"):
        group(torch.zeros(4, dtype=torch.int64, device=DEVICE), number(4), groups)


@pytest.mark.parametrize("kernel", ["_group_small", "_count", "_collect"])
def test_grouping_compiles_without_spills(kernel: str) -> None:
    tables = ("slots", "n", "table", "order", "group_slot", "group_start", "group_count")
    tables += ("n_groups", "marks", "tally", "touched", "runs")
    numbers = ("pairs", "per_row", "scans", "n_runs")
    constants = {
        "_group_small": {"WIDTH": SMALL, "CHUNK": 16},
        "_count": {"WIDTH": 1024, "SCAN": module.SCAN, "SCANS": 32},
        "_collect": {"WIDTH": 2048, "SCAN": module.SCAN},
    }[kernel]
    names = getattr(module, kernel).arg_names
    kinds = dict.fromkeys(tables, "*i32") | dict.fromkeys(numbers, "i32") | {"arrived": "*i64"}
    built = compile_kernel(
        "experts.gpu.group",
        kernel,
        {name: kind for name, kind in kinds.items() if name in names},
        constants | {"TILE": 64, "TABLE": True},
        num_warps=4 if kernel == "_collect" else 8,
    )
    assert built.spills == 0, f"{built.registers} registers"
