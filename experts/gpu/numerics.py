"""The name of the arithmetic that the kernels do: equal strings promise equal bits."""

from __future__ import annotations

import torch
import triton


def numerics_class(device: torch.device) -> str:
    """Of bfloat16 products on a device: the chip's generation and the compiler are part of it."""
    compiler = ".".join(triton.__version__.split(".")[:2])
    if device.type != "cuda":
        return f"interpreter-bf16-triton{compiler}-1"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda-sm{major}{minor}-bf16-triton{compiler}-1"
