"""The least time that a decode step can take on this machine: bytes over bandwidth, operations over peak.

    bytes = dense weights + distinct experts * bytes of one expert + rows * context * bytes of a position's KV

Dense weights (attention projections, norms, gates, head) are read once a step, each expert that any row chose once,
and the keys and values before each row once; activations stay in the caches.

    operations = 2 * rows * (dense parameters + layers * top_k * parameters of one expert)
               + 4 * rows * context * layers * query heads * head size

Bandwidth and peak are measured, by code that is not ours: torch's sum of an array far larger than the caches, and
its square matrix products, in float32 and, where the processor has instructions for it, in bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import hardware
from eaas.model.families import tensors_of
from eaas.model.loader import load_spec
from experts.checkpoint import Checkpoint
from experts.model import ExpertShape

STREAM_BYTES = 512 << 20  # many times the last cache
MATRIX = 1024
REPEATS = 4


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one decode step must read and compute.

    Attributes:
        nbytes: Bytes read from memory.
        flops: Multiplications and additions.
    """

    nbytes: float
    flops: float

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The longer of reading and computing."""
        return max(self.nbytes / bytes_per_s, self.flops / flops_per_s)


def step_of(model: Path, rows: int, context: int, distinct_experts: float) -> Step:
    """The work of one step.

    Args:
        model: Checkpoint folder, bfloat16.
        rows: Sequences that advance by one token.
        context: Positions before each.
        distinct_experts: Different (layer, expert) pairs that the rows chose, over all layers.
    """
    checkpoint = Checkpoint.open(model)
    spec, shape = load_spec(checkpoint), ExpertShape.from_config(checkpoint.config)
    # One row of the embedding a token; where it is the head as well, the head reads all of it.
    plans = tensors_of(spec).items()
    dense = sum(int(np.prod(plan.shape)) for role, plan in plans if role != "embed" or spec.tie_embeddings)
    expert = 3 * shape.hidden * shape.intermediate
    size = spec.dtype.nbytes
    kv_bytes = spec.layers * spec.kv_heads * spec.cached_dims * size
    attention = 2 * context * spec.layers * spec.q_heads * spec.cached_dims
    return Step(
        nbytes=size * (dense + distinct_experts * expert) + rows * context * kv_bytes,
        flops=rows * (2 * (dense + shape.layers * shape.top_k * expert) + attention),
    )


def bandwidth(threads: int) -> float:
    """Bytes per second that so many threads read from memory, best of a few passes."""
    import torch

    torch.set_num_threads(threads)
    # numpy's memory: in huge pages where the host has them, as weights are.
    array = torch.from_numpy(np.ones(STREAM_BYTES // 4, np.float32))
    return STREAM_BYTES / _best_s(array.sum)


def peak_flops(threads: int) -> float:
    """Multiplications and additions per second of square matrix products, of the faster type."""
    import torch

    torch.set_num_threads(threads)
    # Without the instructions torch's bfloat16 product is hundreds of times slower than that of float32.
    has_bfloat16 = {"avx512_bf16", "amx_bf16"} & set(hardware()["isa"])
    rates = []
    for dtype in (torch.float32, torch.bfloat16) if has_bfloat16 else (torch.float32,):
        left, right = (torch.ones(MATRIX, MATRIX, dtype=dtype) for _ in range(2))
        rates.append(2 * MATRIX**3 / _best_s(lambda a=left, b=right: a @ b))
    return max(rates)


def _best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
