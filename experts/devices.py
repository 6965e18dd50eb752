"""Which processor computes, as command lines name it: `cpu`, `cuda:0`, or `interpreter`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from experts.backend import Backend
from experts.cpu import CpuBackend
from experts.grouped import LAYOUTS
from experts.model import Dtype
from p2p.descriptor import Transport
from p2p.endpoint import Endpoint
from p2p.transport import TransportChoice

CPU, CUDA, INTERPRETER = "cpu", "cuda", "interpreter"


@dataclass(frozen=True, kw_only=True)
class Device:
    """A processor, and its number among those of its kind."""

    kind: str = CPU
    index: int = 0

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read `cpu`, `cuda`, `cuda:N` or `interpreter`.

        Raises:
            ValueError: it is none of them.
        """
        name, colon, number = text.partition(":")
        if name == CUDA and (not colon or (number.isascii() and number.isdecimal())):
            return cls(kind=CUDA, index=int(number or 0))
        if text in (CPU, INTERPRETER):
            return cls(kind=text)
        raise ValueError(f"device {text!r} is not known; cpu, cuda:0 or interpreter is needed.")

    def __str__(self) -> str:
        return f"cuda:{self.index}" if self.kind == CUDA else self.kind

    @property
    def runs_kernels(self) -> bool:
        """Whether the GPU's kernels compute, on whatever."""
        return self.kind != CPU

    @property
    def keeps(self) -> frozenset[Dtype]:
        """Types of quantized experts that its kernels read as the checkpoint holds them."""
        return frozenset({Dtype.FP8} if self.runs_kernels else LAYOUTS)

    def backend(self) -> Backend:
        """What carries and computes rows.

        Raises:
            DeviceUnavailable: this device is not here, or what it needs is not installed.
        """
        if not self.runs_kernels:
            return CpuBackend()
        # Not before it is asked for: torch takes seconds and hundreds of megabytes.
        from experts.gpu import open_backend

        return open_backend(self.index if self.kind == CUDA else None)

    def opener(self, transport: TransportChoice) -> Callable[[str, int, int], Endpoint[Any, Any]]:
        """What makes an endpoint whose windows this device reaches, from (name, incarnation, lanes).

        On a GPU the windows lie in its memory, unless the transport says otherwise than its default.

        Raises:
            P2PError: the transport's windows cannot be reached.
        """
        if self.kind == CUDA and transport.transport is Transport.SHM:
            transport = TransportChoice(transport=Transport.CUDA, device=self.index)
        return transport.opener(on_device=self.kind == CUDA)
