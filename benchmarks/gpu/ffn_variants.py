"""Other launches of the grouped FFN, timed beside the one that is used: what to choose on another card.

python -m benchmarks.gpu.section ffn_variants

Each differs from `experts.gpu.ffn.launch_shape` in what its name says. None changes a bit of a row, which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.gpu.ffn import SHAPES, TOP_K, TURNS, Calls, random_weights
from benchmarks.gpu.timing import copy_rate, matrix_rate, seconds
from experts.gpu import ffn

NARROW: Mapping[str, Mapping[str, int]] = {
    "as used": {},
    "3 programs a processor": {"NARROW_STAGES": 4, "WIDE_STAGES": 3, "per_processor": 3},
    "1 program, deep": {"NARROW_STAGES": 12, "WIDE_STAGES": 8, "per_processor": 1},
    "1 program of 128 features": {
        "FEATURES": 128, "NARROW_STAGES": 6, "WIDE_STAGES": 5, "per_processor": 1, "num_warps": 8,
    },
    "bands of 1": {"BAND": 1},
}  # fmt: skip
WIDE: Mapping[str, Mapping[str, int]] = {
    "as used": {},
    "3 stages": {"WIDE_STAGES": 3},
    "bands of 8": {"BAND": 8},
    "bands of 32": {"BAND": 32},
    "2 programs of 64 features": {
        "FEATURES": 64, "NARROW_STAGES": 5, "WIDE_STAGES": 3, "per_processor": 2, "num_warps": 4,
    },
}  # fmt: skip


def run(report: Callable[[Mapping[str, Any]], None]) -> None:
    """Report decode of 1 and 32 tokens and prefill of many, for each shape and variant."""
    copied, multiplied = copy_rate(), matrix_rate()
    for shape in SHAPES:
        weights = random_weights(shape)
        for tokens, variants in ((1, NARROW), (32, NARROW), (shape.prefill_tokens, WIDE)):
            calls = Calls(weights, shape, tokens, TURNS if tokens < shape.prefill_tokens else 1)
            floor = calls.weight_bytes() / copied
            if tokens == shape.prefill_tokens:
                floor = 6 * tokens * TOP_K * shape.hidden * shape.intermediate / multiplied
            expected = None
            for name, changes in variants.items():
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
    used = ffn.launch_shape
    ffn.launch_shape = lambda tile: used(tile) | dict(changes)
    try:
        calls.out.fill_(float("nan"))
        took = seconds(calls.all_turns(calls.ffn), rounds=9) / len(calls.slots)
    finally:
        ffn.launch_shape = used
    return took, calls.out.clone()
