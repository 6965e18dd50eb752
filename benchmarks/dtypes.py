"""Decode steps of one process with experts of several types, interleaved; and one lane's matrix product.

    python -m benchmarks.dtypes --shape L --batch 1,8

Random weights, every expert in this process, greedy decoding of random prompts. Rounds alternate between the
types, so that the machine's moods hit all alike; medians of the rounds and of their ratios count. Beside the ratio
of bfloat16's time to each stands that of the bytes that a step reads: experts as often as they are drawn evenly,
attention, shared experts and head once. Types that are kept as stored have bfloat16 in all but the experts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.make_model import make_model
from benchmarks.report import record, spread
from eaas.model.loader import load_spec, load_weights
from eaas.ops.planner import Work
from eaas.worker.decoder import Decoder
from eaas.worker.plan import StepPlan
from experts import native
from experts.checkpoint import Checkpoint
from experts.grouped import LAYOUTS, pack, sample
from experts.kernels import aligned_bytes, numerics_class, pack_expert, packed_bytes
from experts.model import Dtype, ExpertShape
from tests.eaas.local_experts import LocalExperts

BLOCKS_EACH, FIRST, STEPS = 8, 64, 8  # cache blocks of a sequence; position that rounds start at; their steps


def experts_of(checkpoint: Checkpoint, dtype: Dtype, lanes: int, batch: int) -> LocalExperts:
    """Those of the checkpoint; of a type that is kept as stored the same random one in every place."""
    if dtype not in LAYOUTS:
        return LocalExperts.load(checkpoint, dtype, lanes=lanes, max_rows=batch)
    shape, random = ExpertShape.from_config(checkpoint.config), np.random.default_rng(1)
    local = LocalExperts(
        layers=shape.layers, experts=shape.experts, hidden=shape.hidden, intermediate=shape.intermediate,
        top_k=shape.top_k, dtype=dtype, lanes=lanes, max_rows=batch,
    )  # fmt: skip
    gate, up = (sample(dtype, shape.intermediate, shape.hidden, random) for _ in range(2))
    packed = pack_expert(gate, up, sample(dtype, shape.hidden, shape.intermediate, random), dtype)
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            local.place(layer, expert, packed)
    return local


class Engine:
    """A decoder over sequences that are all FIRST tokens long."""

    def __init__(self, folder: Path, dtype: Dtype, cores: Sequence[int], batch: int) -> None:
        checkpoint = Checkpoint.open(folder)
        spec = self._spec = replace(load_spec(checkpoint), dtype=Dtype.INT8 if dtype is Dtype.INT8 else Dtype.BFLOAT16)
        # The decoder holds only its address.
        self._experts = experts_of(checkpoint, dtype, len(cores), batch)
        work, moe = Work.of(spec), spec.moe
        # An expert of 32 columns of gate and up, and 64 of down, for each tile.
        expert = packed_bytes(dtype, -(-moe.expert_intermediate // 32), spec.hidden)
        expert += packed_bytes(dtype, -(-spec.hidden // 64), moe.expert_intermediate)
        dense = work.dense_bytes * (packed_bytes(dtype, 1, 1024) / 131072 if dtype is Dtype.INT8 else 1)
        drawn = {n: moe.experts * (1 - (1 - moe.top_k / moe.experts) ** n) for n in range(1, batch + 1)}
        self.step_bytes = {n: dense + work.layers * drawn[n] * expert for n in drawn}
        blocks, weights = batch * BLOCKS_EACH, load_weights(checkpoint, self._spec)
        self._decoder = Decoder(self._spec, weights, self._experts.backend, cores, blocks, max_rows=batch)

    def step_s(self, batch: int, seed: int) -> float:
        """Seconds of one decode step of `batch` sequences, from the median of STEPS."""
        tokens = np.random.default_rng(seed).integers(0, self._spec.vocab, batch).astype(np.int32)
        rows, taken = np.arange(batch, dtype=np.int32), []
        for step in range(STEPS):
            plan = StepPlan(
                token_ids=tokens,
                positions=np.full(batch, FIRST + step, np.int32),
                seqs=rows,
                block_tables=np.arange(batch * BLOCKS_EACH, dtype=np.int32).reshape(batch, -1),
                logits_rows=rows,
            )
            began_s = time.perf_counter()
            logits = self._decoder.step(plan, 60.0)
            taken.append(time.perf_counter() - began_s)
            tokens = logits.argmax(axis=1).astype(np.int32)
        return float(np.median(taken))


def measure_steps(folder: Path, batches: Sequence[int], cores: Sequence[int], rounds: int) -> None:
    """Interleaved decode steps; records one line for each batch size."""
    allowed, results = os.sched_getaffinity(0), []
    dtypes = (Dtype.BFLOAT16, Dtype.INT8, *LAYOUTS)
    engines = {dtype: Engine(folder, dtype, cores, max(batches)) for dtype in dtypes}
    for batch in batches:
        seconds: dict[Dtype, list[float]] = {dtype: [] for dtype in dtypes}
        for number in range(rounds + 1):
            for dtype in dtypes:
                taken_s = engines[dtype].step_s(batch, number)
                if number:  # The first round warms both up.
                    seconds[dtype].append(taken_s)
        slow, bytes_of = seconds[Dtype.BFLOAT16], {d: engines[d].step_bytes[batch] for d in dtypes}
        for dtype in dtypes[1:]:
            ratio = spread([one / two for one, two in zip(slow, seconds[dtype], strict=True)])
            bytes_ratio = bytes_of[Dtype.BFLOAT16] / bytes_of[dtype]
            result = {
                "batch": batch, "lanes": len(cores), "rounds": rounds, "dtype": dtype.label,
                "classes": [numerics_class(Dtype.BFLOAT16), numerics_class(dtype)],
                "bfloat16_ms": spread([1e3 * s for s in slow]),
                f"{dtype.label}_ms": spread([1e3 * s for s in seconds[dtype]]),
                "tokens_per_s": round(batch / float(np.median(seconds[dtype])), 1),
                "ratio": ratio, "bytes_ratio": round(bytes_ratio, 3),
                "of_bytes_ratio": round(ratio["median"] / bytes_ratio, 3),
            }  # fmt: skip
            results.append(result)
    # This thread was lane 0 and pinned; the record names the cores that there were.
    os.sched_setaffinity(0, allowed)
    for result in results:
        record("dtypes", {"what": "decode step", "shape": folder.name, **result})


def measure_product(rows_list: Sequence[int], rounds: int, k: int = 1024, tiles: int = 1000) -> None:
    """One lane's product of few rows with a matrix that no cache holds; CPU time, the best round."""
    library, random = native.load(), np.random.default_rng(1)
    x = (0x3C00 + random.integers(0, 512, (max(rows_list), k))).astype(np.uint16)
    out = np.zeros((len(x), tiles * 64), np.float32)
    packed = {}
    for dtype in (Dtype.BFLOAT16, Dtype.INT8, *LAYOUTS):
        packed[dtype] = aligned_bytes(packed_bytes(dtype, tiles, k))
        if dtype in LAYOUTS:
            packed[dtype][:] = np.resize(pack(sample(dtype, 640, k, random), dtype), packed[dtype].size)
            continue
        matrix = random.standard_normal((tiles * 64, k), np.float32)
        library.experts_pack_matrix(
            dtype, matrix.ctypes.data, 0, tiles * 64, k, packed[dtype].ctypes.data
        )  # fmt: skip
    for rows in rows_list:
        best = dict.fromkeys(packed, float("inf"))
        for _ in range(rounds):
            for dtype, data in packed.items():
                began_s = time.thread_time()
                library.experts_linear(
                    dtype, data.ctypes.data, tiles * 64, k, x.ctypes.data, k, rows, out.ctypes.data,
                    tiles * 64, 0, tiles,
                )  # fmt: skip
                best[dtype] = min(best[dtype], time.thread_time() - began_s)
        result: dict[str, object] = {"what": "product of one lane", "rows": rows}
        for dtype, seconds in best.items():
            result[f"{dtype.label}_gb_per_s"] = round(packed[dtype].nbytes / seconds / 1e9, 1)
            result[f"{dtype.label}_gop_per_s"] = round(2 * rows * tiles * 64 * k / seconds / 1e9, 1)
        record("dtypes", result)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and append one JSON line for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="L", choices=["tiny", "S", "L"])
    parser.add_argument("--batch", default="1,8", help="batch sizes, comma-separated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    batches = [int(batch) for batch in options.batch.split(",")]
    measure_product(batches, options.rounds)
    with tempfile.TemporaryDirectory(prefix="eaas-bench-") as folder:
        model = Path(folder) / options.shape
        make_model(options.shape, "qwen3_moe", model, seed=1, dtype="bfloat16")
        cores = sorted(os.sched_getaffinity(0))[: options.threads]
        measure_steps(model, batches, cores, options.rounds)


if __name__ == "__main__":
    main()
