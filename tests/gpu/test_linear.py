"""A row times a matrix: the definition's values, and the same bits alone and in any batch."""

from __future__ import annotations

import pytest
import torch

from eaas.gpu.linear import LinearWeight, linear, linear_reference
from tests.gpu.aot import SHARED_LIMIT_BYTES, compile_kernel
from tests.gpu.device import DEVICE, distance, fresh_seed, poisoned, same_bits


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
    ],
)
def test_rows_are_those_of_the_definition(n: int, k: int, rows: int, there: int) -> None:
    seed = fresh_seed()
    draw = torch.Generator().manual_seed(seed)
    weight = LinearWeight.pack(torch.randn(n, k, generator=draw), torch.randn(n, generator=draw), DEVICE)
    x = torch.randn(rows, k, generator=draw).bfloat16()
    out = product(x, weight, there)
    wanted = linear_reference(x, weight.unpack().cpu(), None if weight.bias is None else weight.bias.cpu())
    assert distance(out[:there], wanted[:there]) < 1e-4, f"seed {seed}"
    assert out[there:].isnan().all(), f"seed {seed}: a row that is not there was written"
    assert same_bits(product(x, weight, there, torch.bfloat16)[:there], out[:there].bfloat16()), (
        f"seed {seed}"
    )


def test_a_row_has_the_same_bits_alone_and_in_every_batch() -> None:
    seed = fresh_seed()
    draw = torch.Generator().manual_seed(seed)
    weight = LinearWeight.pack(torch.randn(136, 136, generator=draw), device=DEVICE)
    x = torch.randn(140, 136, generator=draw).bfloat16()
    whole = product(x, weight)
    for rows in (slice(7, 8), slice(5, 35), slice(0, 64), slice(100, 140)):
        assert same_bits(product(x[rows], weight), whole[rows]), f"seed {seed}, rows {rows}"


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="100 columns; a multiple of 8"):
        LinearWeight.pack(torch.zeros(8, 100))
    with pytest.raises(ValueError, match=r"The bias is \(7,\); \(8,\) is needed"):
        LinearWeight.pack(torch.zeros(8, 16), torch.zeros(7))
    weight = LinearWeight.pack(torch.zeros(8, 16), device=DEVICE)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"x is torch\.float32"):
        linear(poisoned(2, 16), weight, poisoned(2, 8), one)
    with pytest.raises(ValueError, match=r"\(2, 8\), columns side by side, is needed"):
        linear(poisoned(2, 16, dtype=torch.bfloat16), weight, poisoned(2, 9), one)


@pytest.mark.parametrize(("tokens", "stages"), [(16, 10), (64, 6), (128, 4)])
def test_products_compile_to_wgmma(tokens: int, stages: int) -> None:
    wide = tokens > 64
    built = compile_kernel(
        "eaas.gpu.linear",
        "_linear",
        {"x": "*bf16", "weights": "*bf16", "bias": "*fp32", "out": "*bf16", "n_rows": "*i32"}
        | {"rows": "i32", "x_stride": "i32", "out_stride": "i32", "k_tiles": "i32"},
        {"N": 4096, "K": 2048, "BIAS": True, "INTERPRET": False}
        | {"FEATURES": 128 if wide else 64, "PAIR": wide, "TOKENS": tokens, "STAGES": stages},
        num_warps=8 if wide else 4,
        multiples=("x_stride", "out_stride"),
    )
    assert built.wgmma
    assert built.spills == 0, f"{built.registers} registers"
    per_processor = 1 if wide else 2
    assert (built.shared_bytes + 1024) * per_processor <= SHARED_LIMIT_BYTES + 1024, built.shared_bytes
