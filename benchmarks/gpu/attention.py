"""The attention worker's kernels on a GPU: right values on fresh inputs, a row's bits its own, and bytes a second.

Decode attention must read each position's keys and values once: 4 * kv_heads * head_dim bytes a layer. That over the
time, beside the card's copy rate, is the figure. What is timed rotates over caches that together exceed the L2 cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.timing import L2_BYTES, copy_rate, seconds
from eaas import native
from eaas.gpu import norm_rope, sampling
from eaas.gpu.attention import Sums, attention, attention_reference, plan_work
from eaas.gpu.gate import gate, parts_of
from eaas.model.spec import MoeSpec, Score
from eaas.native import SAMPLE_ROW
from tests.eaas.reference import gate_reference

Say = Callable[[Mapping[str, Any]], None]
DEVICE = "cuda"
BLOCK_TOKENS = 16
# Query heads, key heads, head size: of Qwen3-30B-A3B, of shapes S and L, of a model without grouped heads.
HEADS = ((32, 4, 128), (12, 4, 64), (16, 16, 128))
# Rows of the mixed step that are computed apart: chunks of its prompt, and single rows.
CUTS = ((0, 1), (1, 8), (8, 37), (37, 99), (99, 100), (100, 104), (50, 51), (101, 102), (102, 103))
MOE = MoeSpec(experts=128, top_k=8, expert_intermediate=768, norm_topk=True)
GROUPED = MoeSpec(
    experts=256, top_k=8, expert_intermediate=2048, norm_topk=True, score=Score.SIGMOID, correction_bias=True,
    groups=8, groups_topk=4, scaling_factor=2.5,
)  # fmt: skip


def run(report: Say) -> None:
    """All checks, then all times; each is reported as soon as it is known."""
    check_attention(report)
    check_rows(report)
    check_gate(report)
    check_sampling(report)
    rate = copy_rate()
    report({"what": "copy", "tb_per_s": round(rate / 1e12, 3)})
    time_decode(report, rate)
    time_prefill(report)
    time_small(report, rate)


def fresh_seed() -> int:
    """A seed that no run before had; it goes into the result."""
    return random.SystemRandom().randrange(1 << 31)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative L2 error in double; NaN where anything is."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def held(value: float, limit: float) -> bool:
    """Whether an error is small enough; NaN never is."""
    return bool(value < limit)


def count_of(rows: int) -> Tensor:
    """A count on the device."""
    return torch.tensor([rows], dtype=torch.int32, device=DEVICE)


class Cache:
    """Sequences in a paged cache, their blocks in random order, in as many layers as asked for.

    Args:
        lengths: Positions of each sequence.
        heads: Query heads, key heads, head size.
        layers: Copies that differ.
    """

    def __init__(self, lengths: list[int], heads: tuple[int, int, int], layers: int, seed: int) -> None:
        self.lengths = lengths
        self.heads = q_heads, kv_heads, dim = heads
        torch.manual_seed(seed)
        counts = [-(-length // BLOCK_TOKENS) for length in lengths]
        order = torch.randperm(sum(counts)).to(torch.int32)
        tables = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
        for seq, blocks in enumerate(order.split(counts)):
            tables[seq, : len(blocks)] = blocks
        self.tables = tables.to(DEVICE)
        shape = (layers, sum(counts), kv_heads, BLOCK_TOKENS, dim)
        self.keys, self.values = (torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(2))
        self.sums = Sums.make(q_heads, dim, DEVICE)

    def step(self, rows: list[tuple[int, int]]) -> Callable[..., Tensor]:
        """What attends for (sequence, position) rows of given queries, in one layer."""
        q_heads, kv_heads, dim = self.heads
        seqs, positions = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
        work = plan_work(positions, seqs, q_heads // kv_heads)
        merges = work.merges if len(work.merges) else np.zeros((1, 4), dtype=np.int32)
        places, numbers, items, joined = (
            torch.from_numpy(array).to(DEVICE) for array in (positions, seqs, work.items, merges)
        )
        n_items, n_merges = count_of(len(work.items)), count_of(len(work.merges))
        out = torch.full((len(rows), q_heads, dim), torch.nan, dtype=torch.bfloat16, device=DEVICE)

        def attend(queries: Tensor, layer: int = 0, window: int = 0) -> Tensor:
            attention(
                queries, self.keys[layer], self.values[layer], places, numbers, self.tables, items, n_items,
                joined, n_merges, self.sums, out, window=window,
            )  # fmt: skip
            return out

        return attend

    def queries(self, rows: int) -> Tensor:
        """Random queries."""
        q_heads, _, dim = self.heads
        return torch.randn(rows, q_heads, dim, device=DEVICE).bfloat16()


def check_attention(report: Say) -> None:
    """A mixed step against its definition, and its rows against themselves alone and in chunks."""
    for heads in HEADS:
        for window in (0, 700):
            seed = fresh_seed()
            cache = Cache([1500, 1, 513, 3000, 40], heads, 1, seed)
            rows = [(0, position) for position in range(1400, 1500)]
            rows += [(1, 0), (2, 512), (3, 2999), (4, 39)]
            queries = cache.queries(len(rows))
            out = cache.step(rows)(queries, window=window).clone()
            seqs, positions = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
            wanted = attention_reference(queries, cache.keys[0], cache.values[0], positions, seqs, cache.tables, window)
            off = distance(out, wanted)
            differing = 0
            for begin, end in (
                (0, 1),
                (1, 8),
                (8, 37),
                (37, 99),
                (99, 100),
                (100, 104),
                *((i, i + 1) for i in (50, 101, 102)),
            ):
                part = cache.step(rows[begin:end])(queries[begin:end].contiguous(), window=window)
                differing += int((part.view(torch.int16) != out[begin:end].view(torch.int16)).sum())
            report(
                {
                    "what": "attention, right and a row's bits its own",
                    "heads": heads,
                    "window": window,
                    "off": off,
                    "values_that_differ_alone_or_in_chunks": differing,
                    "seed": seed,
                    "holds": held(off, 6e-3) and differing == 0,
                }
            )


def check_rows(report: Say) -> None:
    """Norm, SwiGLU, and what becomes of queries, keys and values."""
    seed = fresh_seed()
    torch.manual_seed(seed)
    rows, hidden, q_heads, kv_heads, dim = 37, 2048, 32, 4, 128
    x, addend = (torch.randn(rows, hidden, device=DEVICE) for _ in range(2))
    weight = torch.randn(hidden, device=DEVICE)
    total, norm = norm_rope.add_norm_reference(x.double(), addend.double(), weight.double(), 1e-6)
    out, low = (torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    norm_rope.add_norm(x, weight, count_of(rows), 1e-6, out=out, addend=addend, low=low)
    errors = {
        "sum": distance(x, total),
        "norm": distance(out, norm),
        "both halves": distance(out.double() + low, norm),
    }
    gate_up = torch.randn(rows, 2 * hidden, device=DEVICE) * 3
    act = torch.full_like(out, torch.nan)
    norm_rope.swiglu(gate_up, act, count_of(rows))
    gates, ups = gate_up.double().chunk(2, -1)
    errors["swiglu"] = distance(act, torch.nn.functional.silu(gates) * ups)

    qkv = torch.randn(rows, (q_heads + 2 * kv_heads) * dim, device=DEVICE)
    q_norm, k_norm = (torch.randn(dim, device=DEVICE) for _ in range(2))
    angles = torch.rand(4096, dim // 2, device=DEVICE) * 6
    cosines, sines = angles.cos(), angles.sin()
    positions = torch.arange(100, 100 + rows, dtype=torch.int32, device=DEVICE)
    seqs = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    tables = torch.arange(16, dtype=torch.int32, device=DEVICE).flip(0).view(1, -1).contiguous()
    queries = torch.full((rows, q_heads, dim), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    keys, values = (
        torch.full((16, kv_heads, BLOCK_TOKENS, dim), torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)
    )
    norm_rope.place(
        qkv, None, q_norm, k_norm, cosines, sines, positions, seqs, tables, queries, keys, values,
        count_of(rows), 1e-6, 0.0,
    )  # fmt: skip
    parts = qkv.double().split([q_heads * dim, kv_heads * dim, kv_heads * dim], -1)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in parts)
    blocks, slots = tables[0, (positions // BLOCK_TOKENS).long()].long(), (positions % BLOCK_TOKENS).long()
    for name, found, part, scale in (
        ("queries", queries, q, q_norm),
        ("keys", keys[blocks, :, slots], k, k_norm),
    ):
        _, normed = norm_rope.add_norm_reference(part, torch.zeros_like(part), scale.double(), 1e-6)
        turns = (table[positions.long()].double() for table in (cosines, sines))
        errors[name] = distance(found, norm_rope.rotate_reference(normed, *turns))
    errors["values"] = distance(values[blocks, :, slots], v)
    limits = {"sum": 1e-6, "both halves": 3e-5}
    holds = all(held(error, limits.get(name, 4e-3)) for name, error in errors.items())
    report({"what": "row kernels, right", "off": errors, "seed": seed, "holds": holds})


def check_gate(report: Say) -> None:
    """Choices against the definition in double; of one row and of many, by bits."""
    for name, moe, hidden in (("Qwen3-30B", MOE, 2048), ("DeepSeek-V3", GROUPED, 7168)):
        seed = fresh_seed()
        torch.manual_seed(seed)
        rows = 300
        norm = torch.randn(rows, hidden, device=DEVICE)
        weight = (torch.randn(moe.experts, hidden, device=DEVICE) / hidden**0.5).bfloat16()
        correction = torch.randn(moe.experts, device=DEVICE) * 0.1 if moe.correction_bias else None
        high = norm.bfloat16()
        low = (norm - high.float()).bfloat16()

        def choose(count: int, high: Tensor = high, low: Tensor = low, moe: MoeSpec = moe, **same: Any) -> Any:
            ids = torch.full((count, moe.top_k), -1, dtype=torch.int32, device=DEVICE)
            weights = torch.full((count, moe.top_k), torch.nan, device=DEVICE)
            parts = torch.full((parts_of(high.shape[1]) * count * moe.experts,), torch.nan, device=DEVICE)
            gate(
                high[:count],
                low[:count],
                same["weight"],
                same["correction"],
                moe,
                parts,
                ids,
                weights,
                count_of(count),
            )
            return ids, weights

        ids, weights = choose(rows, weight=weight, correction=correction)
        wanted_ids, wanted = gate_reference(norm.double(), weight, correction, moe)
        same = (ids.long() == wanted_ids).all(-1)
        off = distance(weights[same], wanted[same])
        few_ids, few = chosen(high[:5], low[:5], weight, correction, moe)
        equal = torch.equal(few_ids, ids[:5]) and torch.equal(few.view(torch.int32), weights[:5].view(torch.int32))
        turned = int((~same).sum())
        report(
            {
                "what": "gate, right and a row's bits its own",
                "shape": name,
                "off": off,
                "rows_with_a_near_tie_turned": turned,
                "of_rows": rows,
                "seed": seed,
                "holds": held(off, 1e-3) and turned <= rows // 50 and equal,
            }
        )


def chosen(high: Tensor, low: Tensor, weight: Tensor, correction: Tensor | None, moe: MoeSpec) -> tuple[Tensor, Tensor]:
    """Ids and weights of rows whose norms come in two halves."""
    rows = len(high)
    ids = torch.full((rows, moe.top_k), -1, dtype=torch.int32, device=DEVICE)
    weights = torch.full((rows, moe.top_k), torch.nan, device=DEVICE)
    parts = torch.full((parts_of(high.shape[1]) * rows * moe.experts,), torch.nan, device=DEVICE)
    gate(high, low, weight, correction, moe, parts, ids, weights, count_of(rows))
    return ids, weights


def check_sampling(report: Say) -> None:
    """Tokens chosen on the device against the engine's sampler: native, or numpy where that is not built."""
    seed = fresh_seed()
    source = np.random.default_rng(seed)
    count, vocab = 24, 151_936
    rows = np.zeros(count, dtype=SAMPLE_ROW)
    rows["seed"], rows["index"] = source.integers(0, 1 << 62, count), source.integers(0, 1 << 20, count)
    rows["temperature"] = source.choice(np.array([0.0, 0.7, 1.0], np.float32), count)
    rows["top_k"] = source.choice([0, 50], count)
    rows["top_p"] = source.choice(np.array([1.0, 0.9], np.float32), count)
    rows["min_p"] = source.choice(np.array([0.01, 0.05], np.float32), count)
    rows["repetition"], rows["top_count"] = 1.0, -1
    logits = (source.standard_normal((count, vocab)) * 3).astype(np.float32)
    tokens, status = (torch.full((count,), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    sampling.choose(
        torch.from_numpy(logits).to(DEVICE), torch.from_numpy(sampling.choices_of(rows)).to(DEVICE),
        count_of(count), sampling.Scratch.make(count, vocab, DEVICE), tokens, status,
    )  # fmt: skip
    wanted = np.zeros(count, np.int32)
    unused = [np.zeros(count, kind) for kind in (np.float32, np.uint32, np.int32, np.float32, np.int32)]
    addresses = [array.ctypes.data for array in (logits, rows, wanted, *unused)]
    native.load().sampler_sample(addresses[0], count, vocab, *addresses[1:-1], 1, addresses[-1])
    differing = int((tokens.cpu().numpy() != wanted).sum())
    report(
        {
            "what": "tokens chosen on the device",
            "rows_that_differ": differing,
            "of_rows": count,
            "seed": seed,
            "holds": not differing and not bool(status.any()),
        }
    )


def time_decode(report: Say, rate: float) -> None:
    """One position of each sequence, batches and contexts of Qwen3-30B-A3B's heads, against the copy rate."""
    heads = HEADS[0]
    for batch in (1, 32, 256):
        for context in (1024, 2048, 4096, 8192):
            nbytes = 4 * heads[1] * heads[2] * context * batch
            layers = max(1, min(32, 1 + 4 * L2_BYTES // nbytes))
            cache = Cache([context] * batch, heads, layers, fresh_seed())
            attend, queries = cache.step([(seq, context - 1) for seq in range(batch)]), cache.queries(batch)

            def act(attend: Callable[..., Tensor] = attend, queries: Tensor = queries, layers: int = layers) -> None:
                for layer in range(layers):
                    attend(queries, layer)

            took_s = seconds(act) / layers
            report(
                {
                    "what": "decode attention",
                    "batch": batch,
                    "context": context,
                    "us": round(took_s * 1e6, 2),
                    "floor_us": round(nbytes / rate * 1e6, 2),
                    "tb_per_s": round(nbytes / took_s / 1e12, 3),
                    "of_copy": round(nbytes / took_s / rate, 3),
                }
            )
            del cache, attend


def time_prefill(report: Say) -> None:
    """The last chunk of a prompt, in flops a second: 4 * head_dim a query head and key that is seen."""
    for heads in HEADS[:2]:
        for length, chunk in ((4096, 4096), (8192, 2048)):
            cache = Cache([length], heads, 1, fresh_seed())
            attend, queries = (
                cache.step([(0, p) for p in range(length - chunk, length)]),
                cache.queries(chunk),
            )
            took_s = seconds(lambda attend=attend, queries=queries: attend(queries))
            flops = 4 * heads[0] * heads[2] * sum(range(length - chunk + 1, length + 1))
            report(
                {
                    "what": "prefill attention",
                    "heads": heads,
                    "rows": chunk,
                    "context": length,
                    "us": round(took_s * 1e6, 1),
                    "tflops": round(flops / took_s / 1e12, 1),
                }
            )


def time_small(report: Say, rate: float) -> None:
    """What surrounds attention in a layer of Qwen3-30B-A3B's sizes, and choosing tokens, each beside its bytes."""
    hidden, vocab = 2048, 151_936
    for rows in (1, 256):
        count = count_of(rows)
        x, addend = (torch.randn(rows, hidden, device=DEVICE) for _ in range(2))
        weight = torch.randn(hidden, device=DEVICE)
        high, low = (torch.empty(rows, hidden, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        took_s = seconds(
            lambda x=x, high=high, low=low, addend=addend, weight=weight, count=count: norm_rope.add_norm(
                x, weight, count, 1e-6, out=high, addend=addend, low=low
            ),
            repeats=20,
        )
        _say_small(report, "add and norm", rows, took_s, 16 * hidden * rows, rate)
        weights = torch.randn(MOE.experts, hidden, device=DEVICE).bfloat16()
        ids = torch.empty(rows, MOE.top_k, dtype=torch.int32, device=DEVICE)
        shares, parts = (
            torch.empty(size, device=DEVICE) for size in ((rows, MOE.top_k), (parts_of(hidden) * rows * MOE.experts,))
        )
        took_s = seconds(
            lambda high=high, low=low, weights=weights, parts=parts, ids=ids, shares=shares, count=count: gate(
                high, low, weights, None, MOE, parts, ids, shares, count
            ),
            repeats=20,
        )
        _say_small(report, "gate", rows, took_s, 2 * MOE.experts * hidden + 4 * hidden * rows, rate)
        logits = torch.randn(rows, vocab, device=DEVICE) * 3
        scratch = sampling.Scratch.make(rows, vocab, DEVICE)
        tokens, status = (torch.empty(rows, dtype=torch.int32, device=DEVICE) for _ in range(2))
        for name, temperature, top_p in (
            ("greedy", 0.0, 1.0),
            ("draw", 1.0, 1.0),
            ("draw, top_p 0.9", 1.0, 0.9),
        ):
            ways = np.zeros(rows, dtype=SAMPLE_ROW)
            ways["temperature"], ways["top_p"], ways["top_count"] = temperature, top_p, -1
            choices = torch.from_numpy(sampling.choices_of(ways)).to(DEVICE)
            took_s = seconds(
                lambda logits=logits, choices=choices, count=count, scratch=scratch, tokens=tokens, status=status: (
                    sampling.choose(logits, choices, count, scratch, tokens, status)
                )
            )
            _say_small(report, f"choose tokens, {name}", rows, took_s, 4 * vocab * rows, rate)


def _say_small(report: Say, name: str, rows: int, took_s: float, nbytes: int, rate: float) -> None:
    floor_s = nbytes / rate
    report({"what": name, "rows": rows, "us": round(took_s * 1e6, 2), "floor_us": round(floor_s * 1e6, 2)})
