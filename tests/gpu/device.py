"""Where the kernels' tests run: on a GPU where there is one, else in Triton's interpreter on plain memory."""

from __future__ import annotations

import random

import torch


def gpus() -> int:
    """GPUs that torch can use; none where its build has no CUDA."""
    return torch.cuda.device_count()


DEVICE = "cuda" if gpus() else "cpu"


def fresh_seed() -> int:
    """A seed that no run before had; put it into every assertion's message."""
    return random.SystemRandom().randrange(1 << 31)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of NaN, or of a senseless number where there is none: what a kernel does not write shows."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -7, dtype=dtype, device=DEVICE)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2 error in double; NaN where anything is."""
    found, wanted = found.double().cpu(), wanted.double().cpu()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-300))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold equal bits, NaN included."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(width), other.view(width))
