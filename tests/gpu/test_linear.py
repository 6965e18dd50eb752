"""A row times a matrix: the definition's values, and the same bits alone and in any batch."""

from __future__ import annotations

import pytest
import torch

from eaas.gpu import linear as module
from eaas.gpu.linear import ITEMS, LinearWeight, Scratch, linear, linear_reference, part_tiles_of
from tests.gpu.aot import SHARED_LIMIT_BYTES, compile_kernel
from tests.gpu.device import DEVICE, distance, fresh_seed, poisoned, same_bits


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
    return LinearWeight.pack(weight, Scratch.make(DEVICE), bias)


def product(
    x: torch.Tensor, weight: LinearWeight, n: int | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    # Rows of x and of the output lie further apart than they are long.
    apart = poisoned(len(x), x.shape[1] + 8, dtype=torch.bfloat16)
    apart[:, : x.shape[1]] = x.to(DEVICE)
    out = poisoned(len(x), weight.n + 3, dtype=dtype)
    n_rows = torch.tensor([len(x) if n is None else n], dtype=torch.int32, device=DEVICE)
    linear(apart[:, : x.shape[1]], weight, out[:, : weight.n], n_rows)
    assert out[:, weight.n :].isnan().all()
    return out[:, : weight.n].cpu()


@pytest.mark.parametrize(
    ("n", "k", "rows", "there"),
    [
        pytest.param(72, 136, 5, 4, marks=pytest.mark.smoke),
        (300, 64, 20, 20),
        (136, 72, 40, 33),
        (300, 72, 150, 140),
        (136, 584, 20, 17),
        (136, 584, 150, 140),
    ],
)
def test_rows_are_those_of_the_definition(n: int, k: int, rows: int, there: int) -> None:
    seed = fresh_seed()
    draw = torch.Generator().manual_seed(seed)
    weight = pack(torch.randn(n, k, generator=draw), torch.randn(n, generator=draw))
    x = torch.randn(rows, k, generator=draw).bfloat16()
    out = product(x, weight, there)
    wanted = linear_reference(x, weight.unpack().cpu(), None if weight.bias is None else weight.bias.cpu())
    assert distance(out[:there], wanted[:there]) < 1e-4, f"seed {seed}"
    assert out[there:].isnan().all(), f"seed {seed}: a row that is not there was written"
    assert same_bits(product(x, weight, there, torch.bfloat16)[:there], out[:there].bfloat16()), f"seed {seed}"


def test_a_row_has_the_same_bits_alone_and_on_both_sides_of_every_border(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = fresh_seed()
    draw = torch.Generator().manual_seed(seed)
    weight = pack(torch.randn(72, 584, generator=draw))
    x = torch.randn(130, 584, generator=draw).bfloat16()
    whole = product(x, weight)
    for rows in (1, 16, 17, 32, 33, 64, 65, 128):
        assert same_bits(product(x[130 - rows :], weight), whole[130 - rows :]), f"seed {seed}, {rows} rows"
    assert not weight.scratch.arrived.any(), f"seed {seed}"
    monkeypatch.setattr(module, "ITEMS", 0)  # no room: each program adds its item's parts itself
    weight.scratch.sums.fill_(float("nan"))
    for rows in (7, 130):
        assert same_bits(product(x[:rows], weight), whole[:rows]), f"seed {seed}, {rows} rows"


def test_parts_are_added_in_rising_order() -> None:
    seed = fresh_seed()
    draw = torch.Generator().manual_seed(seed)
    matrix = torch.randn(72, 1096, generator=draw)
    x = torch.randn(9, 1096, generator=draw).bfloat16()
    width = part_tiles_of(72, 1096) * 64
    wanted, parts = torch.zeros(9, 72), range(0, 1096, width)
    assert len(parts) == 4
    for first in parts:
        part = slice(first, min(first + width, 1096))
        assert part_tiles_of(72, part.stop - first) * 64 >= part.stop - first, "of one part itself"
        wanted += product(x[:, part], pack(matrix[:, part]))
    assert same_bits(product(x, pack(matrix)), wanted), f"seed {seed}"


def test_large_matrices_are_cut_into_a_hundred_items_that_fit_the_scratch() -> None:
    for n, k in ((5120, 2048), (2048, 4096), (1536, 4096), (7168, 2048), (2048, 6144), (151936, 2048)):
        items = -(-n // 64) * -(-k // 64 // part_tiles_of(n, k))
        assert items >= 100, (n, k)
        assert items <= ITEMS or part_tiles_of(n, k) * 64 >= k, (n, k)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="100 columns; a multiple of 8"):
        pack(torch.zeros(8, 100))
    with pytest.raises(ValueError, match=r"The bias is \(7,\); \(8,\) is needed"):
        pack(torch.zeros(8, 16), torch.zeros(7))
    weight = pack(torch.zeros(8, 16))
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"x is torch\.float32"):
        linear(poisoned(2, 16), weight, poisoned(2, 8), one)
    with pytest.raises(ValueError, match=r"\(2, 8\), columns side by side, is needed"):
        linear(poisoned(2, 16, dtype=torch.bfloat16), weight, poisoned(2, 9), one)


@pytest.mark.parametrize(("tokens", "split"), [(16, True), (64, True), (128, False)])
def test_products_compile_to_wgmma(tokens: int, split: bool) -> None:
    features, per_processor = (128, 1) if tokens == 128 else (64, 2)
    built = compile_kernel(
        "eaas.gpu.linear", "_linear",
        {"x": "*bf16", "weights": "*bf16", "bias": "*fp32", "out": "*bf16", "n_rows": "*i32", "sums": "*fp32"}
        | {"arrived": "*i64", "rows": "i32", "x_stride": "i32", "out_stride": "i32", "k_tiles": "i32"}
        | {"part_tiles": "i32"},
        {"N": 2048, "K": 4096, "PARTS": 4, "SPLIT": split, "FEATURES": features, "TOKENS": tokens}
        | {"SHARED": (216 << 10) // per_processor, "INTERPRET": False},
        num_warps=8 // per_processor,
        multiples=("x_stride", "out_stride"),
    )  # fmt: skip
    assert built.wgmma
    assert built.spills == 0, f"{built.registers} registers"
    assert built.registers * 256 <= 65536
    assert (built.shared_bytes + 1024) * per_processor <= SHARED_LIMIT_BYTES + 1024, built.shared_bytes
