"""Who computes routed experts, as a decoder on a GPU asks them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from experts.gpu.client import StepReport


class DeviceExperts(Protocol):
    """Expert servers, through an `experts.gpu.client.GpuClient`; tests and benchmarks bring experts of their own.

    Attributes:
        stream: Where steps are to be launched, and what they read is written in their order; None: anywhere.
    """

    stream: torch.cuda.Stream | None

    def begin(self, deadline_s: float) -> None:
        """A step is about to be launched, whose calls end by then."""
        ...

    def enqueue(
        self, layer: int, rows: Tensor, ids: Tensor, weights: Tensor, n_rows: Tensor, out: Tensor
    ) -> None:
        """Launch what sums the experts of the first n_rows rows: nothing of it may wait for the host.

        Args:
            layer: MoE layer.
            rows: bfloat16 [size, hidden].
            ids: int32 [size, top_k]; weights float32 [size, top_k].
            n_rows: int32 [1].
            out: float32 [size, hidden], written.
        """
        ...

    def end(self) -> StepReport:
        """The step has run: what became of its calls."""
        ...
