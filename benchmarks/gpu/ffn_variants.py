"""Other launches of the grouped FFN, timed beside the one that is used: what to choose on another card.

python -m benchmarks.gpu.section ffn_variants

Each differs from `experts.gpu.ffn.LAUNCH` in what its name says. None changes a bit of a row, which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.gpu.ffn import SHAPES, TOP_K, TURNS, Calls, random_weights
from benchmarks.gpu.timing import copy_rate, matrix_rate, seconds
from experts.gpu import ffn

VARIANTS: Mapping[str, Mapping[str, int]] = {
    "as used": {},
    "3 programs a processor": {"SHARED": 72 << 10, "per_processor": 3},
    "1 program, deep": {"SHARED": 224 << 10, "per_processor": 1},
    "1 program of 128 features": {
        "FEATURES": 128, "SHARED": 224 << 10, "per_processor": 1, "num_warps": 8,
    },
}  # fmt: skip


def run(report: Callable[[Mapping[str, Any]], None]) -> None:
    """Report decode of 1 and 32 tokens and prefill of many, for each shape and variant."""
    copied, multiplied = copy_rate(), matrix_rate()
    for shape in SHAPES:
        weights = random_weights(shape)
        for tokens in (1, 32, shape.prefill_tokens):
            calls = Calls(weights, shape, tokens, TURNS if tokens < shape.prefill_tokens else 1)
            floor = calls.weight_bytes() / copied
            if tokens == shape.prefill_tokens:
                floor = 6 * tokens * TOP_K * shape.hidden * shape.intermediate / multiplied
            expected = None
            for name, changes in VARIANTS.items():
                took, out = timed(calls, changes)
                expected = out if expected is None else expected
                report(
                    {
                        "what": "variant", "shape": shape.name, "tokens": tokens, "variant": name,
                        "us": round(took * 1e6, 1), "share": round(floor / took, 3),
                        "holds": torch.equal(out.view(torch.int16), expected.view(torch.int16)),
                    }
                )  # fmt: skip
        del weights
        torch.cuda.empty_cache()


def timed(calls: Calls, changes: Mapping[str, int]) -> tuple[float, torch.Tensor]:
    """Seconds of one call launched with these changes, and the rows of the last."""
    used = ffn.LAUNCH[torch.bfloat16]
    ffn.LAUNCH[torch.bfloat16] = used | dict(changes)
    try:
        calls.out.fill_(float("nan"))
        took = seconds(calls.all_turns(calls.ffn), rounds=9) / len(calls.slots)
    finally:
        ffn.LAUNCH[torch.bfloat16] = used
    return took, calls.out.clone()
