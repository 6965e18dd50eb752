"""What this card can do at most, by torch's own kernels: the figures beside which all others are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.gpu.timing import copy_rate, matrix_rate


def run(report: Callable[[Mapping[str, Any]], None]) -> None:
    """Report the card, its copy rate twice (their difference is noise) and its bf16 matrix rate."""
    gpu = torch.cuda.get_device_properties(0)
    report(
        {
            "what": "card",
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "l2_bytes": gpu.L2_cache_size,
            "shared_bytes_per_sm": gpu.shared_memory_per_multiprocessor,
        }
    )
    report({"what": "copy", "tb_per_s": [round(copy_rate() / 1e12, 3) for _ in range(2)]})
    report({"what": "bf16 matrix product", "tflops": [round(matrix_rate() / 1e12, 1) for _ in range(2)]})
