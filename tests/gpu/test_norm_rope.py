"""Promises of the row kernels: right values, a row's bits its own, nothing written for rows that do not count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eaas.gpu import norm_rope
from eaas.worker.decoder import rope_tables
from tests.eaas.decoder_world import spec_of
from tests.gpu.aot import compile_kernel
from tests.gpu.device import DEVICE, distance, fresh_seed, poisoned, same_bits


def drawn(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE)


def count_of(rows: int) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=DEVICE)


def test_embedding_rows_are_copied_and_rows_that_do_not_count_are_left_alone() -> None:
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    table = drawn(generator, 37, 50).to(torch.bfloat16)
    tokens = torch.tensor([36, 0, 5, 5, 99999], dtype=torch.int32, device=DEVICE)
    x = poisoned(5, 50)
    norm_rope.embed(table, tokens, x, count_of(4))
    assert torch.equal(x[:4], table[tokens[:4].long()].float()), f"seed {seed}"
    assert x[4].isnan().all()


@pytest.mark.parametrize("hidden", [50, 128, 300])
def test_the_norm_adds_what_it_is_given_and_equals_its_definition(hidden: int) -> None:
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    rows = 5
    x, addend, shared = (drawn(generator, rows, hidden) for _ in range(3))
    weight, bias, share_weight = (drawn(generator, hidden) for _ in range(3))
    scale = drawn(generator, rows)
    out, low = (poisoned(rows, hidden, dtype=torch.bfloat16) for _ in range(2))
    share, before = poisoned(rows), x.clone()
    norm_rope.add_norm(
        x, weight, count_of(rows - 1), 1e-6, out=out, addend=addend, bias=bias, shared=shared, scale=scale,
        low=low, share_weight=share_weight, share=share,
    )  # fmt: skip
    plus = (addend + bias).double() + shared.double() * scale.double()[:, None]
    total, norm = norm_rope.add_norm_reference(before.double(), plus, weight.double(), 1e-6)
    assert distance(x[:-1], total[:-1]) < 1e-6, f"seed {seed}"
    assert distance(out[:-1], norm[:-1]) < 3e-3, f"seed {seed}"
    assert distance(out[:-1].double() + low[:-1].double(), norm[:-1]) < 2e-5, f"seed {seed}"
    assert distance(share[:-1], torch.sigmoid(norm @ share_weight.double())[:-1]) < 1e-5, f"seed {seed}"
    assert torch.equal(x[-1], before[-1]), "a row that does not count was changed"
    assert out[-1].isnan().all()
    assert share[-1].isnan()

    alone, alone_x = poisoned(1, hidden, dtype=torch.bfloat16), before[2:3].clone()
    norm_rope.add_norm(
        alone_x, weight, count_of(1), 1e-6, out=alone, addend=addend[2:3].clone(), bias=bias,
        shared=shared[2:3].clone(), scale=scale[2:3].clone(),
    )  # fmt: skip
    assert same_bits(alone[0], out[2]), f"seed {seed}"
    assert same_bits(alone_x[0], x[2]), f"seed {seed}"


def test_picked_rows_are_normed_in_any_order_and_the_stream_is_left_alone() -> None:
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    x, addend, weight = drawn(generator, 4, 64), drawn(generator, 4, 64), drawn(generator, 64)
    before, out = x.clone(), poisoned(3, 64, dtype=torch.bfloat16)
    pick = torch.tensor([3, 0, 3], dtype=torch.int32, device=DEVICE)
    norm_rope.add_norm(x, weight, count_of(3), 1e-6, out=out, addend=addend, pick=pick)
    _, norm = norm_rope.add_norm_reference(before.double(), addend.double(), weight.double(), 1e-6)
    assert torch.equal(x, before)
    assert distance(out, norm[[3, 0, 3]]) < 3e-3, f"seed {seed}"
    assert same_bits(out[0], out[2])


def test_swiglu_equals_its_definition() -> None:
    seed = fresh_seed()
    gate_up = drawn(torch.Generator().manual_seed(seed), 3, 2 * 1100, scale=3.0)
    out = poisoned(3, 1100, dtype=torch.bfloat16)
    norm_rope.swiglu(gate_up, out, count_of(2))
    gate, up = gate_up.double().chunk(2, -1)
    assert distance(out[:2], (torch.nn.functional.silu(gate) * up)[:2]) < 3e-3, f"seed {seed}"
    assert out[2].isnan().all()


def placed(
    seed: int, rows: list[int], q_heads: int, kv_heads: int, dim: int, norm: str, clip: float
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Queries and both caches of some of 6 rows, and the reference of all, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    columns = (q_heads + 2 * kv_heads) * dim
    qkv, bias = drawn(generator, 6, columns), drawn(generator, columns, scale=0.3)
    full = norm == "full"
    norms = [drawn(generator, heads * dim if full else dim) for heads in (q_heads, kv_heads)]
    q_norm, k_norm = norms if norm != "none" else (None, None)
    cosines, sines = (torch.from_numpy(t).to(DEVICE) for t in rope_tables(spec_of(head_dim=dim), 64))
    positions = torch.tensor([0, 1, 15, 16, 40, 63], dtype=torch.int32)
    seqs = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32)
    tables = torch.tensor([[4, 0, 1, 2], [5, 6, 7, 3]], dtype=torch.int32)
    queries = poisoned(len(rows), q_heads, dim, dtype=torch.bfloat16)
    keys, values = (poisoned(8, kv_heads, 16, dim, dtype=torch.bfloat16) for _ in range(2))
    norm_rope.place(
        qkv[rows].contiguous(), bias, q_norm, k_norm, cosines, sines, positions[rows].to(DEVICE),
        seqs[rows].to(DEVICE), tables.to(DEVICE), queries, keys, values, count_of(len(rows)), 1e-6, clip,
    )  # fmt: skip

    total = (qkv + bias).double()
    parts = list(total.split([q_heads * dim, kv_heads * dim, kv_heads * dim], -1))
    if full:
        for place, weight in enumerate(norms):
            _, parts[place] = norm_rope.add_norm_reference(
                parts[place], torch.zeros_like(parts[place]), weight.double(), 1e-6
            )
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in parts)
    if norm == "head":
        (_, q), (_, k) = (
            norm_rope.add_norm_reference(part, torch.zeros_like(part), weight.double(), 1e-6)
            for part, weight in zip((q, k), norms, strict=True)
        )
    if clip:
        q, k, v = (part.clamp(-clip, clip) for part in (q, k, v))
    turned = [
        norm_rope.rotate_reference(part, cosines[positions.long()].double(), sines[positions.long()].double())
        for part in (q, k)
    ]
    return queries, keys, values, (*turned, v)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "norm", "clip"),
    [(6, 2, 32, "none", 0.0), (3, 3, 10, "head", 0.0), (8, 1, 16, "full", 0.9), (4, 4, 24, "head", 0.5)],
)
def test_queries_keys_and_values_are_finished_and_stored(
    q_heads: int, kv_heads: int, dim: int, norm: str, clip: float
) -> None:
    seed = fresh_seed()
    sizes = (q_heads, kv_heads, dim, norm, clip)
    queries, keys, values, (q, k, v) = placed(seed, list(range(6)), *sizes)
    assert distance(queries, q) < 4e-3, f"seed {seed}"
    cells = [(4, 0), (4, 1), (4, 15), (6, 0), (7, 8), (3, 15)]
    for row, (block, slot) in enumerate(cells):
        assert distance(keys[block, :, slot], k[row]) < 6e-3, f"row {row}, seed {seed}"
        assert distance(values[block, :, slot], v[row]) < 6e-3, f"row {row}, seed {seed}"
    written = int(keys.isfinite().sum())
    assert written == 6 * kv_heads * dim, "a place that is nobody's was written"
    some, some_keys, some_values, _ = placed(seed, [2, 4], *sizes)
    assert same_bits(some, queries[[2, 4]]), f"seed {seed}"
    for block, slot in (cells[2], cells[4]):
        assert same_bits(some_keys[block, :, slot], keys[block, :, slot]), f"seed {seed}"
        assert same_bits(some_values[block, :, slot], values[block, :, slot]), f"seed {seed}"


def test_a_tensor_of_another_shape_or_type_is_refused_in_words() -> None:
    x = poisoned(2, 8)
    with pytest.raises(norm_rope.ShapeInvalid, match=r"weight is contiguous torch.float32 \[2, 8\]"):
        norm_rope.add_norm(x, x, count_of(2), 1e-6, out=poisoned(2, 8, dtype=torch.bfloat16))
    with pytest.raises(norm_rope.ShapeInvalid, match="bfloat16"):
        norm_rope.embed(x, count_of(0), x, count_of(0))
    with pytest.raises(norm_rope.ShapeInvalid, match="strided"):
        norm_rope.add_norm(x.T, x[0], count_of(2), 1e-6, out=poisoned(8, 2, dtype=torch.bfloat16))


ROW = {"n_rows": "*i32", "hidden": "i32"}
PLACE = {
    "qkv": "*fp32", "bias": "*fp32", "q_norm": "*fp32", "k_norm": "*fp32", "cosines": "*fp32", "sines": "*fp32",
    "positions": "*i32", "seqs": "*i32", "tables": "*i32", "queries": "*bf16", "keys": "*bf16", "values": "*bf16",
    "n_rows": "*i32", "table_blocks": "i32", "eps": "fp32", "clip": "fp32",
}  # fmt: skip
ADD_NORM = {
    "x": "*fp32", "addend": "*fp32", "shared": "*fp32", "scale": "*fp32", "weight": "*fp32", "out": "*bf16",
    "low": "*bf16", "share_weight": "*fp32", "share": "*fp32", "eps": "fp32", **ROW,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "signature", "constexprs", "warps"),
    [
        ("embed_kernel", {"table": "*bf16", "tokens": "*i32", "x": "*fp32", **ROW}, {"BLOCK": 2048}, 4),
        ("add_norm_kernel", ADD_NORM, {"bias": None, "pick": None, "BLOCK": 8192, "INTERPRET": False}, 8),
        (
            "swiglu_kernel",
            {"gate_up": "*fp32", "out": "*bf16", "n_rows": "*i32", "inner": "i32"},
            {"BLOCK": 1024, "INTERPRET": False},
            4,
        ),
        (
            "place_kernel",
            PLACE,
            {
                "KV_HEADS": 4, "GROUP": 8, "DIM": 128, "BLOCK_TOKENS": 16, "NORM": 2, "CLIP": True, "GROUP_PAD": 8,
                "HALF_PAD": 64, "Q_PAD": 4096, "KV_PAD": 512, "INTERPRET": False,
            },
            4,
        ),
    ],
)  # fmt: skip
def test_row_kernels_compile_for_an_h200_without_spills(
    kernel: str, signature: dict, constexprs: dict, warps: int
) -> None:
    sizes = {"hidden", "inner"} & signature.keys()
    built = compile_kernel("eaas.gpu.norm_rope", kernel, signature, constexprs, num_warps=warps, multiples=sizes)
    assert built.spills == 0
    assert built.registers <= 128
    assert "LDG.E.128" in built.sass or "LDG.E.64" in built.sass, "loads are narrow"
