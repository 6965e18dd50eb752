"""Who computes routed experts, as a decoder on a GPU asks them: in this process, or servers that may be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


class DeviceExperts(Protocol):
    """Who computes routed experts: `experts.gpu.local.LocalExperts`, or a client of expert servers."""

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


class Report(Protocol):
    """What became of a step's expert calls (`experts.gpu.client.StepReport`).

    Attributes:
        lost: Rows with an expert that nobody answered for in time.
        corrupt: Rows with an answer that was damaged.
    """

    @property
    def lost(self) -> Sequence[int]: ...
    @property
    def corrupt(self) -> Sequence[int]: ...


@runtime_checkable
class RemoteExperts(Protocol):
    """Experts that may be lost: `experts.gpu.client_end.ClientEnd`.

    Attributes:
        stream: Where steps are to be launched, and what they read is written in their order; None without a GPU.
    """

    stream: torch.cuda.Stream | None

    def begin(self, deadline_s: float) -> None:
        """A step is about to be launched, whose calls end by then."""
        ...

    def end(self) -> Report:
        """The step has run: what became of its calls."""
        ...
