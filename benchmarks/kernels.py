"""Each native kernel of the token path against its floor and against torch, in one interleaved run.

The floor of a kernel is the longer of its bytes over the memory bandwidth and its operations over the rate of the
instruction that they are made of: fma, or the dot product of bfloat16 pairs. Both are measured in every round beside
it. Weights and keys take turns over more than the last-level cache holds. Results are compared with torch before
anything is timed.

    python -m benchmarks.kernels --only gate_up --shape L --rounds 9
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.make_model import SHAPES, Shape
from benchmarks.probe import BEYOND_CACHE, Lanes, huge, library, part, pointer
from benchmarks.report import record, spread
from eaas import native
from experts import native as experts_native
from experts.kernels import TILE_ROWS, isa_name, pack_expert, pack_matrix, to_dtype
from experts.model import Dtype
from tests.eaas.sampling import Sampler, SamplingRow

TARGET_S = 0.008  # of one sample, where one call is shorter
FFN_ROWS = (1, 2, 4, 8, 16, 64, 256)
BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one size.

    Attributes:
        name: What --only selects.
        size: Its sizes, as a reader wants them.
        nbytes: Bytes that memory must move.
        flops: Operations.
        run: run(lane, lanes, calls): that lane's share of so many calls.
        torch: One call of torch's equivalent; its argument counts calls, to take weights in turn.
        error: Largest difference of the two results, over the bound that rounding sets; under 1 is equal.
        lanes: Most lanes that it can use; None: any.
        dot: Whether its operations are products of bfloat16 pairs.
    """

    name: str
    size: str
    nbytes: float
    flops: float
    run: Callable[[int, int, int], object]
    torch: Callable[[int], object]
    error: Callable[[], float]
    lanes: int | None = None
    dot: bool = False


def bfloat16(array: np.ndarray) -> torch.Tensor:
    """Bits as uint16 to a tensor over the same memory."""
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def drawn(*shape: int, seed: int = 1) -> np.ndarray:
    """Normal float32."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def in_turn(array: np.ndarray) -> tuple[np.ndarray, int]:
    """Copies of an array's bytes beyond the last-level cache, [copies, nbytes]."""
    flat = array.reshape(-1).view(np.uint8)
    copies = max(1, BEYOND_CACHE // flat.size)
    out = huge(flat.size * copies).reshape(copies, flat.size)
    out[:] = flat
    return out, copies


def over(found: np.ndarray, wanted: torch.Tensor, bound: float) -> float:
    """Largest difference, in units of `bound` times the largest wanted value."""
    exact = wanted.float().numpy()
    return float(np.abs(found.reshape(exact.shape) - exact).max() / (bound * np.abs(exact).max()))


def product_case(name: str, rows: int, k: int, counts: Sequence[int], gate_up: bool = False) -> Iterator[Case]:
    """x @ W.T with W [rows, k]; with gate_up W holds gate and up, [2 * rows, k], and silu(gate) * up follows."""
    weight = to_dtype(drawn((2 if gate_up else 1) * rows, k) * np.float32(k**-0.5), Dtype.BFLOAT16)
    if gate_up:
        data = pack_expert(weight[:rows], weight[rows:], np.zeros((k, rows), np.uint16), Dtype.BFLOAT16).gate_up
        kernel, tiles = "experts_ffn_gate_up", -(-rows // 32)
    else:
        data = pack_matrix(weight, Dtype.BFLOAT16).data
        kernel, tiles = "experts_linear", -(-rows // TILE_ROWS)
    packed, copies = in_turn(data)
    plain, plain_copies = in_turn(weight)
    torch_weights = [bfloat16(copy.view(np.uint16).reshape(weight.shape)) for copy in plain]
    address = ctypes.c_void_p(native.address_of(experts_native.load(), kernel))
    native_loop = library().probe_product
    for m in counts:
        x = to_dtype(drawn(m, k, seed=m), Dtype.BFLOAT16)
        out = np.zeros((m, rows), np.uint16 if gate_up else np.float32)
        torch_x = bfloat16(x)

        def run(lane: int, lanes: int, calls: int, m: int = m, x: np.ndarray = x, out: np.ndarray = out) -> None:
            native_loop(
                address, 1, pointer(packed), ctypes.c_uint64(packed.shape[1]), copies, rows, k, pointer(x), m,
                pointer(out), *part(tiles, lane, lanes), int(gate_up), calls,
            )  # fmt: skip

        def by_torch(call: int, x: torch.Tensor = torch_x) -> torch.Tensor:
            y = x @ torch_weights[call % plain_copies].T
            return functional.silu(y[:, :rows]) * y[:, rows:] if gate_up else y

        def error(x: torch.Tensor = torch_x, out: np.ndarray = out, run: Any = run) -> float:
            run(0, 1, 1)
            y = x.float() @ torch_weights[0].float().T
            if not gate_up:
                return over(out, y, 1e-5)
            return over(bfloat16(out).float().numpy(), functional.silu(y[:, :rows]) * y[:, rows:], 2**-7)

        yield Case(
            name=name, size=f"m{m} k{k} n{rows}", nbytes=weight.nbytes, flops=2.0 * m * weight.size, run=run,
            torch=by_torch, error=error, dot=True,
        )  # fmt: skip


def attention_case(shape: Shape, name: str, rows: int, length: int) -> Iterator[Case]:
    """The last `rows` positions of a sequence of `length` attend to all before them and themselves."""
    dim, kv, heads = shape.head_dim, shape.kv_heads, shape.q_heads
    blocks = -(-length // BLOCK_TOKENS)
    drawn_both = (drawn(kv, blocks * BLOCK_TOKENS, dim, seed=seed) for seed in (1, 2))
    keys, values = (to_dtype(each, Dtype.BFLOAT16) for each in drawn_both)
    # A block's key-value head: keys transposed [dim][16], then values [16][dim].
    cut = keys.reshape(kv, blocks, BLOCK_TOKENS, dim).transpose(1, 0, 3, 2).reshape(blocks, kv, -1)
    paged = np.concatenate([cut, values.reshape(kv, blocks, -1).transpose(1, 0, 2)], axis=2)
    cache, copies = in_turn(paged)
    tables = np.arange(copies * blocks, dtype=np.int32)
    queries = drawn(rows, heads, dim, seed=3)
    scaled = queries * np.float32(dim**-0.5)
    out = np.zeros_like(queries)
    ops = ctypes.c_void_p(native.load().decoder_ops())

    def run(lane: int, lanes: int, calls: int) -> None:
        library().probe_attend(
            ops, pointer(cache), pointer(tables), blocks, copies, BLOCK_TOKENS,
            ctypes.c_uint64(paged.nbytes // blocks // kv), kv, heads, dim, rows, length - rows, pointer(scaled),
            pointer(out), *part(kv, lane, lanes), calls,
        )  # fmt: skip

    both = np.stack([keys[:, :length], values[:, :length]])
    plain, plain_copies = in_turn(both)
    pairs = [bfloat16(copy.view(np.uint16).reshape(both.shape)) for copy in plain]
    mask = None if rows == 1 else torch.ones(length, length, dtype=torch.bool).tril()[length - rows :]

    def torch_queries(dtype: torch.dtype) -> torch.Tensor:
        # One row: the queries of a key-value head stand where rows would, so that nothing is expanded.
        grouped = torch.from_numpy(queries).reshape(rows, kv, -1, dim)
        moved = grouped.permute(1, 0, 2, 3) if rows == 1 else grouped.flatten(1, 2).permute(1, 0, 2)
        return moved.reshape(1, -1 if rows > 1 else kv, rows * (1 if rows > 1 else heads // kv), dim).to(dtype)

    rounded = torch_queries(torch.bfloat16)

    def attended(query: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
        key, value = pair if rows == 1 else pair.repeat_interleave(heads // kv, dim=1)
        return functional.scaled_dot_product_attention(query, key[None], value[None], attn_mask=mask)

    def error() -> float:
        run(0, 1, 1)
        wanted = attended(torch_queries(torch.float32), pairs[0].float())[0]
        ordered = wanted.reshape(rows, heads, dim) if rows == 1 else wanted.permute(1, 0, 2)
        return over(out, ordered.contiguous(), 1e-4)

    seen = sum(range(length - rows + 1, length + 1))
    yield Case(
        name=name, size=f"rows{rows} context{length}", nbytes=both.nbytes, flops=4.0 * dim * heads * seen, run=run,
        torch=lambda call: attended(rounded, pairs[call % plain_copies]), error=error, lanes=kv,
    )  # fmt: skip


def rows_case(shape: Shape, rows: int) -> Iterator[Case]:
    """Input norm, then norm and rotation of each head, then keys and values to the cache."""
    dim, kv, heads, hidden = shape.head_dim, shape.kv_heads, shape.q_heads, shape.hidden
    x, qkv = drawn(rows, hidden), drawn(rows, heads + 2 * kv, dim, seed=2)
    weight, angles = np.abs(drawn(max(hidden, dim), seed=3)), drawn(rows, dim // 2, seed=4)
    cosines, sines = np.cos(angles), np.sin(angles)
    normed, rotated = np.zeros_like(x), np.zeros_like(qkv)
    subtile_bytes = 2 * 16 * 2 * dim
    cache = np.zeros(-(-rows // 16) * kv * subtile_bytes, np.uint8)
    ops = ctypes.c_void_p(native.load().decoder_ops())

    def run(lane: int, lanes: int, calls: int) -> None:
        library().probe_rows(
            ops, pointer(x), pointer(weight), hidden, pointer(normed), pointer(qkv), pointer(rotated), heads, kv,
            dim, pointer(cosines), pointer(sines), pointer(cache), ctypes.c_uint64(subtile_bytes),
            *part(rows, lane, lanes), calls,
        )  # fmt: skip

    tx, tq, tw, tc, ts = map(torch.from_numpy, (x, qkv, weight, cosines[:, None], sines[:, None]))
    stored = torch.zeros(rows, 2 * kv, dim, dtype=torch.bfloat16)
    places = torch.arange(rows)

    def by_torch(call: int) -> torch.Tensor:
        functional.rms_norm(tx, (hidden,), tw[:hidden], 1e-6)
        turned = functional.rms_norm(tq[:, : heads + kv], (dim,), tw[:dim], 1e-6)
        low, high = turned.chunk(2, dim=-1)
        turned = torch.cat([low * tc - high * ts, high * tc + low * ts], dim=-1)
        kept = torch.cat([turned[:, heads:], tq[:, heads + kv :]], dim=1).to(torch.bfloat16)
        stored.index_copy_(0, places, kept)
        return turned

    def error() -> float:
        run(0, 1, 1)
        return over(rotated[:, : heads + kv], by_torch(0), 1e-5)

    moved = 2 * x.nbytes + 2 * qkv.nbytes + rows * kv * 2 * dim * 2
    yield Case(
        name="rows", size=f"rows{rows}", nbytes=moved, flops=8.0 * (x.size + qkv.size), run=run, torch=by_torch,
        error=error,
    )  # fmt: skip


def gate_case(shape: Shape, rows: int) -> Iterator[Case]:
    """The gate's product in float32, softmax, and the normalised top-k."""
    experts, hidden, top_k = shape.experts, shape.hidden, shape.top_k
    weight, x = drawn(experts, hidden) * np.float32(hidden**-0.5), drawn(rows, hidden, seed=2)
    packed = pack_matrix(weight, Dtype.FLOAT32)
    logits = np.zeros((rows, experts), np.float32)
    ids, weights = np.zeros((rows, top_k), np.uint16), np.zeros((rows, top_k), np.float32)
    ops = ctypes.c_void_p(native.load().decoder_ops())
    linear = ctypes.c_void_p(native.address_of(experts_native.load(), "experts_linear"))

    def run(lane: int, lanes: int, calls: int) -> None:
        first, last = part(rows, lane, lanes)
        if first == last:
            return
        library().probe_product(
            linear, 0, pointer(packed.data), ctypes.c_uint64(0), 1, experts, hidden, pointer(x, first * hidden),
            last - first, pointer(logits, first * experts), 0, packed.tiles, 0, calls,
        )  # fmt: skip
        library().probe_gate(ops, pointer(logits), experts, top_k, pointer(ids), pointer(weights), first, last, calls)

    tx, tw = torch.from_numpy(x), torch.from_numpy(weight)

    def by_torch(call: int) -> torch.Tensor:
        shares, _ = (tx @ tw.T).softmax(dim=-1).topk(top_k, dim=-1)
        return shares / shares.sum(dim=-1, keepdim=True)

    def error() -> float:
        run(0, 1, 1)
        return over(weights, by_torch(0), 1e-4)

    yield Case(
        name="gate", size=f"rows{rows}", nbytes=weight.nbytes, flops=2.0 * rows * weight.size, run=run,
        torch=by_torch, error=error,
    )  # fmt: skip


def sampler_case(shape: Shape, label: str, spread_of_logits: float, row: SamplingRow) -> Iterator[Case]:
    """One row of logits to one token, on one lane."""
    logits = drawn(1, shape.vocab) * np.float32(spread_of_logits)
    sampler, plan = Sampler(shape.vocab), [row]
    tensor = torch.from_numpy(logits)

    def run(lane: int, lanes: int, calls: int) -> None:
        for _ in range(calls):
            sampler.sample(logits, plan)

    def by_torch(call: int) -> torch.Tensor:
        if row.temperature == 0:
            return tensor.argmax(dim=-1)
        shares = tensor.softmax(dim=-1)
        if row.top_p < 1:
            ordered, order = shares.sort(dim=-1, descending=True)
            ordered[ordered.cumsum(dim=-1) - ordered >= row.top_p] = 0
            shares = torch.zeros_like(shares).scatter_(-1, order, ordered)
        return shares.multinomial(1)

    def error() -> float:
        chosen = sampler.sample(logits, plan)[0].token
        allowed = {int(by_torch(0)[0])} if row.temperature == 0 else set(range(shape.vocab))
        return 0.0 if chosen in allowed else 2.0

    yield Case(
        name="sampler",
        size=label,
        nbytes=0,
        flops=4.0 * shape.vocab,
        run=run,
        torch=by_torch,
        error=error,
        lanes=1,
    )


def cases(shape: Shape) -> Iterator[tuple[str, Callable[[], Iterator[Case]]]]:
    """Every kernel of the token path by name; each makes its cases when it is asked."""
    s, qkv = shape, (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
    yield "gate_up", lambda: product_case("gate_up", s.intermediate, s.hidden, FFN_ROWS, gate_up=True)
    yield "down", lambda: product_case("down", s.hidden, s.intermediate, FFN_ROWS)
    yield "qkv", lambda: product_case("qkv", qkv, s.hidden, (1, 8, 256))
    yield "output", lambda: product_case("output", s.hidden, s.q_heads * s.head_dim, (1, 8, 256))
    yield "head", lambda: product_case("head", s.vocab, s.hidden, (1, 8))
    for length in (128, 1024, 8192):
        yield "attention", lambda length=length: attention_case(s, "attention", 1, length)
    yield "attention", lambda: attention_case(s, "attention", 256, 1024)
    for rows in (1, 256):
        yield "rows", lambda rows=rows: rows_case(s, rows)
        yield "gate", lambda rows=rows: gate_case(s, rows)
    for label, width, temperature, top_p in (
        ("greedy", 2.0, 0.0, 1.0),
        ("temperature", 2.0, 1.0, 1.0),
        ("top_p 0.95, peaked", 4.0, 1.0, 0.95),
        ("top_p 0.95, flat", 0.3, 1.0, 0.95),
    ):
        row = SamplingRow(seed=1, index=0, temperature=temperature, top_p=top_p)
        yield "sampler", lambda label=label, width=width, row=row: sampler_case(s, label, width, row)


def measure(case: Case, lanes: Lanes, rounds: int) -> dict[str, Any]:
    """Interleaved rounds of floor, kernel and torch; medians."""
    if case.error() >= 1:
        raise RuntimeError(f"{case.name} {case.size} disagrees with torch by {case.error():.3g} bounds; no timing.")
    torch.set_num_threads(lanes.count)

    def sample(calls: int) -> float:
        return lanes.seconds(lambda lane: case.run(lane, lanes.count, calls)) / calls

    def torch_sample(first: int, calls: int) -> float:
        started = time.perf_counter()
        for call in range(first, first + calls):
            case.torch(call)
        elapsed = (time.perf_counter() - started) / calls
        time.sleep(0.004)  # torch's threads spin for a while after their work
        return elapsed

    calls = max(1, min(2000, round(TARGET_S / sample(1))))
    torch_calls = max(1, min(2000, round(TARGET_S / torch_sample(0, 1))))
    ours, theirs, floors, bandwidths, rates = [], [], [], [], []
    for number in range(rounds):
        floor = lanes.floor(isa_name(), case.dot)
        bandwidths.append(floor.bandwidth / 1e9)
        rates.append(floor.flops / 1e9)
        floors.append(floor.seconds(case.nbytes, case.flops))
        ours.append(sample(calls))
        theirs.append(torch_sample(number * torch_calls, torch_calls))
    middle = spread(bandwidths)["median"] * 1e9
    peak = spread(rates)["median"] * 1e9
    return {
        "kernel": case.name,
        "size": case.size,
        "lanes": lanes.count,
        "isa": isa_name(),
        "rounds": rounds,
        "us": spread([1e6 * value for value in ours]),
        "bound": "bytes" if case.nbytes / middle >= case.flops / peak else "operations",
        "floor_us": spread([1e6 * value for value in floors]),
        "of_floor": spread([least / value for least, value in zip(floors, ours, strict=True)]),
        "torch_us": spread([1e6 * value for value in theirs]),
        "torch_over_ours": spread([other / value for other, value in zip(theirs, ours, strict=True)]),
        "gb_per_s": spread(bandwidths),
        "gflop_per_s": spread(rates),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every kernel asked for; one JSON line each, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(name for name, _ in cases(SHAPES["S"])))
    parser.add_argument("--only", choices=names, help="one kernel; all where not given")
    parser.add_argument("--shape", default="S,L", help="shapes, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    pools = [Lanes(cores[:count]) for count in sorted({1, len(cores)})]
    rows = []
    with torch.inference_mode():
        for shape in options.shape.split(","):
            for name, make in cases(SHAPES[shape]):
                for case in make() if options.only in (None, name) else ():
                    for lanes in pools:
                        if lanes.count > 1 and case.lanes is not None and case.lanes < lanes.count:
                            continue
                        result = {"shape": shape} | measure(case, lanes, options.rounds)
                        record("kernels", result)
                        rows.append(result)
    for lanes in pools:
        lanes.close()
    print(f"{'kernel':10} {'size':22} shape lanes {'us':>9} {'floor us':>9} {'of floor':>8} {'torch/ours':>10}")
    for row in rows:
        of_floor, ratio = row["of_floor"]["median"], row["torch_over_ours"]["median"]
        print(
            f"{row['kernel']:10} {row['size']:22} {row['shape']:5} {row['lanes']:5} {row['us']['median']:9.1f} "
            f"{row['floor_us']['median']:9.1f} {of_floor:8.0%} {ratio:9.1f}x  ({row['bound']})"
        )


if __name__ == "__main__":
    main()
