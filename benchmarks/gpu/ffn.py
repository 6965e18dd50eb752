"""The experts' FFN on a real GPU: right rows, the same bits in every class, bytes and flops a second.

Decode counts the bytes of each used expert once, beside the copy rate measured in the same run; weights of several
layers take turns, far more than the L2 cache holds. Prefill counts 6 * pairs * hidden * intermediate flops, beside
torch's own bf16 product, its grouped one, and that of transformers where it can be imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.local_experts import LocalExperts
from benchmarks.gpu.timing import copy_rate, matrix_rate, seconds
from experts.gpu.ffn import ffn_reference, gate_up, grouped_ffn, quantize_reference
from experts.gpu.group import Groups, group
from experts.gpu.weights import FP8_TILE, ExpertWeights, Fp8ExpertWeights
from experts.quantized import Codes, Quantized

DEVICE = "cuda"
TOP_K = 8
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
WIDTHS = (16, 64, 128)  # of the tiles of tokens
TURNS = 32  # calls of one replay, each with other experts: host launches and the L2 cache count for nothing
LARGE_BYTES = 500e6  # of weights: from here on 85% of the copy rate are asked for, below 60%

Report = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model's experts, and what prefill is asked for: its share of the matrix rate."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    layers: int
    goal: float
    prefill_tokens: int = 8192


SHAPES = (
    Shape(name="DeepSeek-V3, 32 experts", hidden=7168, intermediate=2048, experts=32, layers=2, goal=0.70),
    Shape(name="Qwen3-30B-A3B", hidden=2048, intermediate=768, experts=128, layers=8, goal=0.55),
)


class Calls:
    """What one call of the grouped FFN needs, for some tokens that each take TOP_K experts of one layer."""

    def __init__(self, weights: ExpertWeights | Fp8ExpertWeights, shape: Shape, tokens: int, turns: int) -> None:
        pairs = tokens * TOP_K
        self.weights, self.pairs = weights, pairs
        self.rows = torch.randn(tokens, shape.hidden, device=DEVICE).bfloat16()
        self.n_rows = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
        self.row_of = (torch.arange(pairs, device=DEVICE) // TOP_K).to(torch.int32)
        self.slots = [
            (chosen(tokens, shape.experts) + turn % shape.layers * shape.experts).flatten() for turn in range(turns)
        ]
        self.groups = [
            Groups.allocate(pairs=pairs, slots=weights.slots, tile=weights.widest_group, device=DEVICE)
            for _ in range(turns)
        ]
        for turn in range(turns):
            self.group(turn)
        self.scales, self.act_scales = None, None
        if isinstance(weights, Fp8ExpertWeights):
            self.act_scales = torch.empty(pairs, weights.act_width // FP8_TILE, device=DEVICE)
            self.rows, self.scales = quantize_reference(self.rows.float())
        self.act = torch.empty(pairs, weights.act_width, dtype=self.rows.dtype, device=DEVICE)
        self.out = torch.empty(pairs, shape.hidden, dtype=torch.bfloat16, device=DEVICE)

    def group(self, turn: int) -> None:
        group(self.slots[turn], self.n_rows, self.groups[turn], per_row=TOP_K)

    def ffn(self, turn: int) -> None:
        grouped_ffn(
            self.rows, self.row_of, self.groups[turn], self.weights, self.act, self.out, self.scales, self.act_scales
        )  # fmt: skip

    def first_half(self, turn: int) -> None:
        gate_up(self.rows, self.row_of, self.groups[turn], self.weights, self.act, self.scales, self.act_scales)

    def all_turns(self, call: Callable[[int], None]) -> Callable[[], None]:
        def act() -> None:
            for turn in range(len(self.slots)):
                call(turn)

        return act

    def weight_bytes(self) -> float:
        """Of the experts that one call uses, each once; the mean of all turns."""
        used = sum(len(slots.unique()) for slots in self.slots)
        return used * self.weights.expert_bytes / len(self.slots)


def run(report: Report) -> None:
    """Report correctness, then decode, then prefill, for each shape; then float8; others' ways last."""
    copied, multiplied = copy_rate(), matrix_rate()
    report(
        {
            "what": "beside",
            "copy_tb_per_s": round(copied / 1e12, 3),
            "bf16_tflops": round(multiplied / 1e12, 1),
        }
    )
    for shape in SHAPES:
        weights = random_weights(shape)
        correctness(report, shape, weights)
        for tokens in TOKENS:
            decode(report, shape, weights, tokens, copied)
        prefill(report, shape, weights, multiplied)
        combined(report, shape, weights)
        del weights
        torch.cuda.empty_cache()
    narrow = random_fp8_experts(SHAPES[0].layers * SHAPES[0].experts, SHAPES[0].hidden, SHAPES[0].intermediate)
    for tokens in (1, 16, 128):
        decode(report, SHAPES[0], narrow, tokens, copied)
    prefill(report, SHAPES[0], narrow, multiplied)
    del narrow
    torch.cuda.empty_cache()
    for shape in SHAPES:
        for name, act in baselines(shape):
            try:
                rate(report, shape, name, act, multiplied)
            except (AttributeError, RuntimeError, TypeError) as error:
                # Another version of what is not ours: the line says so, and the others still come.
                report({"what": "prefill", "shape": shape.name, "by": name, "failed": str(error)[:300]})
        torch.cuda.empty_cache()


def chosen(tokens: int, experts: int) -> torch.Tensor:
    """TOP_K different experts for each token: int32 [tokens, TOP_K]."""
    return torch.rand(tokens, experts, device=DEVICE).topk(TOP_K, dim=1).indices.to(torch.int32)


def random_weights(shape: Shape) -> ExpertWeights:
    """Loaded slots for all layers of a shape."""
    weights = ExpertWeights.allocate(
        slots=shape.layers * shape.experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        device=DEVICE,
    )
    weights.gate_up.normal_(0, shape.hidden**-0.5)
    weights.down.normal_(0, shape.intermediate**-0.5)
    return weights


def random_fp8_experts(slots: int, hidden: int, intermediate: int) -> Fp8ExpertWeights:
    """Loaded slots in float8: one random expert in all of them, which costs a timing nothing."""
    weights = Fp8ExpertWeights.allocate(slots=slots, hidden=hidden, intermediate=intermediate, device=DEVICE)
    wide, high = (intermediate, hidden), (hidden, intermediate)
    weights.load(0, *(random_fp8(*size) for size in (wide, wide, high)))
    for tensor in (weights.gate_up.view(torch.uint8), weights.down.view(torch.uint8)):
        tensor[1:] = tensor[:1]
    for scales in (weights.gate_up_scales, weights.down_scales):
        scales[1:] = scales[:1].clone()
    return weights


def random_fp8(rows: int, k: int) -> Quantized:
    """A matrix whose product keeps the size of a row."""
    codes = torch.randn(rows, k).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    scales = np.full((rows, -(-k // FP8_TILE)), k**-0.5, np.float32)
    return Quantized(kind=Codes.E4M3, codes=codes, scales=scales, group=FP8_TILE)


def correctness(report: Report, shape: Shape, weights: ExpertWeights) -> None:
    """Rows against double, and their bits alone, in every class and again and again."""
    seed = int(torch.randint(1 << 31, (1,)))
    torch.manual_seed(seed)
    # One expert has several whole groups of each class and a rest, one a few pairs, one a single pair.
    slots = torch.tensor([0] * 300 + [1] * 40 + [2], dtype=torch.int32, device=DEVICE)[torch.randperm(341)]
    rows = torch.randn(50, shape.hidden, device=DEVICE).bfloat16()
    row_of = torch.randint(50, (341,), dtype=torch.int32, device=DEVICE)

    def outcome(tile: int, only: slice = slice(None)) -> torch.Tensor:
        mine, from_row = slots[only].contiguous(), row_of[only].contiguous()
        pairs = len(mine)
        groups = Groups.allocate(pairs=pairs, slots=weights.slots, tile=tile, device=DEVICE)
        group(mine, torch.tensor([pairs], dtype=torch.int32, device=DEVICE), groups)
        act = torch.full((pairs, weights.act_width), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        out = torch.full((pairs, shape.hidden), float("nan"), device=DEVICE)
        grouped_ffn(rows, from_row, groups, weights, act, out)
        return out

    found = outcome(16)
    errors = []
    for slot in range(3):
        pairs = (slots == slot).nonzero()[:4, 0]
        wanted = ffn_reference(rows[row_of[pairs].long()], *weights.unload(slot))
        errors.append(float((found[pairs].double() - wanted).norm() / wanted.norm()))
    report(
        {
            "what": "rows against double", "shape": shape.name, "seed": seed, "relative_error": max(errors),
            "holds": all(error < 2e-3 for error in errors) and bool(found.isfinite().all()),
        }
    )  # fmt: skip
    bits = found.view(torch.int32)
    differ = {
        "narrow groups": any(not torch.equal(outcome(tile).view(torch.int32), bits) for tile in WIDTHS[1:]),
        "alone": any(
            not torch.equal(outcome(tile, slice(pair, pair + 1)).view(torch.int32)[0], bits[pair])
            for pair in (0, 170, 340)
            for tile in WIDTHS
        ),
        "again": any(not torch.equal(outcome(tile).view(torch.int32), bits) for tile in WIDTHS for _ in range(5)),
    }
    report(
        {
            "what": "a row's bits alone, in every class, again", "shape": shape.name, "seed": seed,
            "differ": [name for name, found in differ.items() if found], "holds": not any(differ.values()),
        }
    )  # fmt: skip


def decode(report: Report, shape: Shape, weights: ExpertWeights | Fp8ExpertWeights, tokens: int, copied: float) -> None:
    """Bytes of weights a second, of the FFN and with grouping."""
    calls = Calls(weights, shape, tokens, TURNS)
    nbytes = calls.weight_bytes()
    alone = seconds(calls.all_turns(calls.ffn)) / TURNS
    grouped = seconds(calls.all_turns(lambda turn: (calls.group(turn), calls.ffn(turn))[0])) / TURNS
    half = seconds(calls.all_turns(calls.first_half)) / TURNS
    share, goal = nbytes / alone / copied, 0.85 if nbytes >= LARGE_BYTES else 0.60
    report(
        {
            "what": "decode", "shape": shape.name, "weights": kind(weights), "tokens": tokens,
            "weight_mb": round(nbytes / 1e6, 1), "us": round(alone * 1e6, 1),
            "us_with_grouping": round(grouped * 1e6, 1), "gate_up_us": round(half * 1e6, 1),
            "floor_us": round(nbytes / copied * 1e6, 1),
            "tb_per_s": round(nbytes / alone / 1e12, 3), "share_of_copy": round(share, 3), "goal": goal,
            "reached": share >= goal,
        }
    )  # fmt: skip


def prefill(report: Report, shape: Shape, weights: ExpertWeights | Fp8ExpertWeights, multiplied: float) -> None:
    """Flops a second of many tokens."""
    calls = Calls(weights, shape, shape.prefill_tokens, 1)
    rate(report, shape, f"grouped_ffn, {kind(weights)}", lambda: calls.ffn(0), multiplied)
    half = seconds(lambda: calls.first_half(0), rounds=7)
    grouping = seconds(lambda: calls.group(0), rounds=7)
    report(
        {
            "what": "parts of prefill", "shape": shape.name, "pairs": calls.pairs,
            "grouping_us": round(grouping * 1e6, 1), "gate_up_ms": round(half * 1e3, 3),
        }
    )  # fmt: skip


def combined(report: Report, shape: Shape, weights: ExpertWeights) -> None:
    """All that an attention worker launches for one MoE layer when the experts are in its own process."""
    table = torch.arange(weights.slots, dtype=torch.int32, device=DEVICE).view(shape.layers, shape.experts)
    experts = LocalExperts(weights=weights, table=table, top_k=TOP_K, max_rows=max(TOKENS))
    for tokens in (1, 32):
        rows = torch.randn(tokens, shape.hidden, device=DEVICE).bfloat16()
        ids = [chosen(tokens, shape.experts) for _ in range(TURNS)]
        gates, out = (
            torch.rand(tokens, TOP_K, device=DEVICE),
            torch.empty(tokens, shape.hidden, device=DEVICE),
        )
        n_rows = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)

        def act(rows=rows, ids=ids, gates=gates, n_rows=n_rows, out=out) -> None:
            for turn in range(TURNS):
                experts.enqueue(turn % shape.layers, rows, ids[turn], gates, n_rows, out)

        us = seconds(act) / TURNS * 1e6
        report({"what": "local experts, one layer", "shape": shape.name, "tokens": tokens, "us": round(us, 1)})


def rate(report: Report, shape: Shape, name: str, act: Callable[[], object], multiplied: float) -> None:
    """Report one way of prefill."""
    flops = 6 * shape.prefill_tokens * TOP_K * shape.hidden * shape.intermediate
    took = seconds(act, rounds=7)
    share = flops / took / multiplied
    report(
        {
            "what": "prefill", "shape": shape.name, "by": name, "tokens": shape.prefill_tokens,
            "ms": round(took * 1e3, 3), "floor_ms": round(flops / multiplied * 1e3, 3),
            "tflops": round(flops / took / 1e12, 1), "share_of_matrix": round(share, 3), "goal": shape.goal,
            "reached": share >= shape.goal,
        }
    )  # fmt: skip


def baselines(shape: Shape) -> Sequence[tuple[str, Callable[[], object]]]:
    """Others' ways, on weights of their own layout: the two grouped products, and transformers' whole layer."""
    sizes = (
        (shape.experts, 2 * shape.intermediate, shape.hidden),
        (shape.experts, shape.hidden, shape.intermediate),
    )
    wide, high = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) * size[2] ** -0.5 for size in sizes)
    ids = chosen(shape.prefill_tokens, shape.experts)
    rows = torch.randn(shape.prefill_tokens, shape.hidden, device=DEVICE).bfloat16()
    ways: list[tuple[str, Callable[[], object]]] = []
    grouped_mm = getattr(torch, "_grouped_mm", None)
    if grouped_mm is not None:
        order = ids.flatten().argsort()
        counts = torch.bincount(ids.flatten(), minlength=shape.experts)
        offsets = counts.cumsum(0).to(torch.int32)

        def products() -> torch.Tensor:
            gate, up = grouped_mm(rows[order // TOP_K], wide.transpose(1, 2), offs=offsets).chunk(2, dim=1)
            return grouped_mm(torch.nn.functional.silu(gate) * up, high.transpose(1, 2), offs=offsets)

        ways.append(("torch._grouped_mm", products))
    forward = transformers_forward()
    if forward is not None:
        module = SimpleNamespace(
            num_experts=shape.experts, gate_up_proj=wide, down_proj=high, has_gate=True, has_bias=False,
            is_transposed=False, has_post_expert_norm=False, _is_expert_parallel=False,
            _apply_gate=lambda both: torch.nn.functional.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],
        )  # fmt: skip
        gates = torch.rand(shape.prefill_tokens, TOP_K, device=DEVICE).bfloat16()
        ways.append(("transformers grouped_mm", lambda: forward(module, rows, ids.long(), gates)))
    return ways


def transformers_forward() -> Callable[..., torch.Tensor] | None:
    """Its experts by grouped products, or none where it cannot be imported."""
    try:
        module = importlib.import_module("transformers.integrations.moe")
    except ImportError:
        return None
    return getattr(module, "grouped_mm_experts_forward", None)


def kind(weights: ExpertWeights | Fp8ExpertWeights) -> str:
    """What a reader calls their type."""
    return "float8_e4m3" if isinstance(weights, Fp8ExpertWeights) else "bfloat16"
