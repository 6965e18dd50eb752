"""Rows carried and computed by kernels, on a GPU or in Triton's interpreter: `experts.backend.Backend`.

Rows never come here: whoever owns the attention worker's steps launches expert calls through its `GpuClient`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from experts import grouped
from experts.gpu.client import GpuClient
from experts.gpu.ffn import ffn_fp8_reference, ffn_reference, quantize_reference
from experts.gpu.layout import ExchangeShape, RowsOut
from experts.gpu.server import Batch, GpuServer, GroupedExperts
from experts.gpu.tables import signed
from experts.gpu.tiles import numerics_class
from experts.gpu.weights import ExpertWeights, Fp8ExpertWeights, Matrix
from experts.kernels import KernelsBroken
from experts.model import Dtype
from experts.quantized import Quantized
from experts.routes import MOST_REPLICAS
from experts.wire import SEALED_VERSION, WireShape
from p2p.device import INTERPRET
from p2p.endpoint import Window
from p2p.window import WindowLayout

log = logging.getLogger(__name__)

CAPACITY = 512  # most rows of a step: those that workers start with, unless told otherwise
# A client has 2 slots of CAPACITY * top_k answers for each server that it knows, a server as much for each client (both
# windows of a link are equal) and rows, activations and answers for a pass that asks all that all clients may:
# DeepSeek-V3 118 MB a link, 3.8 GB for 32 servers at a client, 1.9 GB for 16 clients at a server and 1.1 beside it;
# Qwen3-30B-A3B 34 MB a link, 1.1 GB, and 0.5 GB and 0.4.
MOST_SERVERS, MOST_CLIENTS = (4, 2) if INTERPRET else (32, 16)
IDLE_S = 0.0001 if INTERPRET else 0.001  # by the device's clock, of which the interpreter has little
# Seconds of the device's clock in one. The interpreter's is a counter that each look moves on by 20 us; a look takes it
# five to twenty milliseconds.
CLOCK = 0.004 if INTERPRET else 1.0
_SHARE = 0.8  # of the memory that is free at the start, for experts
_SELF_TEST = (160, 128, 7)  # intermediate, hidden, rows
_LEAST_FP8 = (8, 9)  # compute capability of the first GPUs that multiply float8


def exchange_shape(wire: WireShape) -> ExchangeShape:
    """What clients and servers of a model agree on.

    Raises:
        ValueError: the kernels cannot carry rows of this shape.
    """
    shape = wire.shape
    return ExchangeShape(
        layers=shape.layers,
        experts=shape.experts,
        hidden=shape.hidden,
        top_k=shape.top_k,
        capacity=CAPACITY,
        # As float8 experts take them.
        rows_out=RowsOut.E4M3 if wire.dtype is Dtype.FP8 else RowsOut.BF16,
        model_hash=signed(wire.model_hash),
    )


class GpuBackend:
    """The kernels of one device."""

    wire_version = SEALED_VERSION
    most_slot_bytes = 1 << 28
    rings_lanes = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            # Before there is a lease to renew: the driver's context takes seconds in which nothing else runs.
            torch.empty(1, pin_memory=True).to(device)
        self._reserved: ExpertWeights | Fp8ExpertWeights | None = None

    def numerics_class(self, dtype: Dtype) -> str:
        """Of bfloat16 or float8 products: the chip's generation and the compiler are part of it."""
        if dtype is Dtype.FP8:
            found = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else _LEAST_FP8
            if found < _LEAST_FP8:
                raise ValueError(
                    f"{self.device} has compute capability {found[0]}.{found[1]}; experts in fp8 need"
                    f" {_LEAST_FP8[0]}.{_LEAST_FP8[1]}. Serve them with --dtype bfloat16."
                )
            return numerics_class(self.device, "fp8")
        if dtype is not Dtype.BFLOAT16:
            raise ValueError(
                f"kernels compute in bfloat16, and {dtype.label} is asked for: --dtype bfloat16, or --device cpu."
            )
        return numerics_class(self.device)

    def self_test(self, dtype: Dtype) -> None:
        """Run a small expert through the server's own kernels; ValueError where there are none of this dtype."""
        self.numerics_class(dtype)
        inter, hidden, rows = _SELF_TEST
        generator = torch.Generator().manual_seed(20250917)
        x = torch.randn(rows, hidden, generator=generator).bfloat16()
        sizes = (inter, hidden), (inter, hidden), (hidden, inter)
        if dtype is Dtype.FP8:
            draw = np.random.default_rng(20250917)
            gate, up, down = (grouped.sample(dtype, *size, draw) for size in sizes)
            wanted = ffn_fp8_reference(x, *(torch.from_numpy(w.dequantized()).double() for w in (gate, up, down)))
            # An activation near a boundary of float8 may be rounded the other way.
            bound = 2e-2
        else:
            gate, up, down = (torch.randn(size, generator=generator).div(8).bfloat16() for size in sizes)
            wanted = ffn_reference(x, gate, up, down)
            # The rows are rounded to bfloat16, 2**-9 of each, and so are the activations before them.
            bound = 1e-2
        found = compute_rows(x, gate, up, down, self.device).double().cpu()
        error = float((found - wanted).norm() / wanted.norm())
        if not error <= bound:
            raise KernelsBroken(
                f"the {dtype.label} kernels on {self.device} differ from the definition by {error:.3g}; up to {bound}"
                f" is rounding. Report this machine's GPU, torch {torch.__version__}, and what `make gpu` says."
            )

    def window(self, wire: WireShape, most_tokens: int, slots: int) -> WindowLayout:
        """A frame of the largest kind fits a slot. `slots` is the exchange's own affair."""
        if most_tokens > CAPACITY:
            raise ValueError(
                f"steps of up to {most_tokens} rows; kernels carry at most {CAPACITY} at once. Start with"
                f" --step-tokens {CAPACITY} or less."
            )
        shape = exchange_shape(wire)
        there, back = shape.request_window, shape.reply_window
        return WindowLayout(slots=shape.slots, payload_bytes=max(there.payload_bytes, back.payload_bytes))

    def prepare(self, window: Window, layout: WindowLayout) -> None:
        """Nothing to write: kernels take a window's layout from what was agreed."""

    def client(
        self, wire: WireShape, *, incarnation: int, lanes: int, bell_page: int, max_tokens: int, patience_s: float
    ) -> GpuClient:
        """Its calls wait until their deadline; those of more rows than `window` allowed are refused."""
        return GpuClient(
            exchange_shape(wire),
            servers=MOST_SERVERS,
            replicas=MOST_REPLICAS,
            incarnation=incarnation,
            device=self.device,
            clock=CLOCK,
        )

    def reserve(self, wire: WireShape) -> int:
        """Slots for all experts of the model, or for as many as the GPU's free memory holds."""
        self._reserved = self._allocate(wire)
        return self._reserved.slots

    def _allocate(self, wire: WireShape) -> ExpertWeights | Fp8ExpertWeights:
        experts, slots = wire.shape, wire.shape.layers * wire.shape.experts
        if not experts.plain:
            raise ValueError(
                f"experts of {experts.architecture} have an activation and biases that only CPUs compute; serve them"
                " with --device cpu."
            )
        kind = _weights_of(wire.dtype)
        sizes = {"hidden": experts.hidden, "intermediate": experts.intermediate}
        if self.device.type == "cuda":
            one_bytes = kind.allocate(slots=1, **sizes, device="meta").expert_bytes
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            slots = min(slots, int(_SHARE * free_bytes) // one_bytes)
            if not slots:
                raise ValueError(
                    f"{self.device} has {free_bytes} bytes free, and {_SHARE:.0%} of that hold no expert of {one_bytes}"
                    " bytes. End what else uses this GPU, or name another."
                )
            log.info("reserved slots=%d bytes=%d free_bytes=%d", slots, slots * one_bytes, free_bytes)
        return kind.allocate(slots=slots, **sizes, device=self.device)

    def server(self, wire: WireShape, *, incarnation: int, cores: Sequence[int], bell_page: int) -> GpuServer:
        """One whose experts lie in the slots that were reserved, else in what `reserve` takes; raises as that does."""
        weights, self._reserved = self._reserved or self._allocate(wire), None
        shape = exchange_shape(wire)
        return GpuServer(
            shape,
            clients=MOST_CLIENTS,
            compute=GroupedExperts(weights, MOST_CLIENTS * shape.pairs, self.device),
            incarnation=incarnation,
            device=self.device,
            idle_s=IDLE_S,
            weights=weights,
        )


def _weights_of(dtype: Dtype) -> type[ExpertWeights | Fp8ExpertWeights]:
    return Fp8ExpertWeights if dtype is Dtype.FP8 else ExpertWeights


def compute_rows(
    x: torch.Tensor, gate: Matrix | Quantized, up: Matrix | Quantized, down: Matrix | Quantized, device: torch.device
) -> torch.Tensor:
    """Rows of one expert through the kernels of a server: x bf16 [rows, hidden] to float32 [rows, hidden]."""
    rows, hidden = x.shape
    kept = isinstance(gate, Quantized)
    weights = _weights_of(Dtype.FP8 if kept else Dtype.BFLOAT16).allocate(
        slots=1, hidden=hidden, intermediate=gate.shape[0], device=device
    )
    weights.load(0, gate, up, down)  # type: ignore[arg-type]
    index = torch.arange(rows, dtype=torch.int32, device=device)
    sent, scales = quantize_reference(x.float()) if kept else (x, None)
    batch = Batch(
        rows=sent.to(device),
        scales=None if scales is None else scales.to(device),
        row_of=index,
        slots=torch.zeros_like(index),
        n_pairs=torch.full((1,), rows, dtype=torch.int32, device=device),
        out=torch.full((rows, hidden), float("nan"), device=device),
    )
    # Triton launches on the thread's own GPU, wherever the tensors lie.
    with torch.cuda.device(device.index if device.type == "cuda" else -1):
        GroupedExperts(weights, rows, device)(batch)
    return batch.out
