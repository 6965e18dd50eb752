"""The attention worker's dense products on a GPU: bytes a second of few rows, flops a second of many.

A product reads 2 * N * K bytes of weights, whatever the rows, and takes 2 * B * N * K flops: the figures are those over
the time, beside the card's copy and matrix rates. What is timed goes round matrices that together exceed the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.gpu.timing import L2_BYTES, copy_rate, matrix_rate, seconds
from eaas.gpu.linear import LinearWeight, Scratch, linear

# N, K of Qwen3-30B-A3B: queries, keys and values together; attention's output; logits.
MATRICES = {"qkv": (5120, 2048), "output": (2048, 4096), "logits": (151_936, 2048)}
ROWS = (1, 32, 256, 2048)


def run(report: Callable[[Mapping[str, Any]], None]) -> None:
    """Report each matrix and number of rows."""
    copied, multiplied = copy_rate(), matrix_rate()
    for name, (n, k) in MATRICES.items():
        for rows in ROWS:
            took_s = seconds(Products(n, k, rows, "cuda").enqueue) / max(1, turns_of(n, k))
            report(result_of(name, n, k, rows, took_s, copied, multiplied))
        torch.cuda.empty_cache()


def turns_of(n: int, k: int) -> int:
    """How many matrices are more than the L2 cache holds."""
    return 1 + 2 * L2_BYTES // (2 * n * k)


def result_of(
    name: str, n: int, k: int, rows: int, took_s: float, copied: float, multiplied: float
) -> Mapping[str, Any]:
    """One record."""
    return {
        "what": "linear", "matrix": name, "n": n, "k": k, "rows": rows, "us": round(took_s * 1e6, 2),
        "of_copy": round(2 * n * k / took_s / copied, 3),
        "of_matrix": round(2 * rows * n * k / took_s / multiplied, 3),
    }  # fmt: skip


class Products:
    """One product with each of several matrices."""

    def __init__(self, n: int, k: int, rows: int, device: str) -> None:
        self.x = torch.randn(rows, k, device=device).bfloat16()
        scratch = Scratch.make(device)
        self.weights = [
            LinearWeight.pack(torch.randn(n, k, device=device) * k**-0.5, scratch) for _ in range(turns_of(n, k))
        ]
        self.out = torch.empty(rows, n, device=device, dtype=torch.bfloat16)
        self.n_rows = torch.tensor([rows], dtype=torch.int32, device=device)

    def enqueue(self) -> None:
        for weight in self.weights:
            linear(self.x, weight, self.out, self.n_rows)
