"""The decoder on a GPU: one step from token ids to logits, and to tokens where asked, as one graph launch.

A step of `size` rows (a power of two) is always the same launches on the same addresses; what differs, counts of rows
included, is read on the device (`eaas.gpu.inputs`). `warm`, or else the first step of a size, runs it once with nothing
to do, so that all is compiled and loaded, and captures it; its steps are replays. Once all `sizes` are warm nothing is
compiled, loaded or captured any more: what steps launch beside their graphs, the graphs launch as well. On the CPU, for
tests, the same launches run in Triton's interpreter without graphs.

Per layer, on the main stream: add what the last layer computed, norm, queries/keys/values, place them, attend, output
projection, add, norm, gate; then on a second stream the experts, and beside them the shared expert. With double
batching a step is two micro-batches: while the experts compute one, the main stream attends for the other. Rows of a
sequence keep their order, so any plan may be cut, and no row's bits depend on it.

Products are bfloat16 with float32 sums; the residual stream, scores of experts and logits are float32; keys and values
are bfloat16. A row's logits depend only on its sequence's tokens up to it, the weights and the numerics class.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import triton
from torch import Tensor

from eaas.gpu import norm_rope, sampling
from eaas.gpu.attention import QUERIES, Sums, attention
from eaas.gpu.gate import gate, parts_of
from eaas.gpu.inputs import Part, Step, StepInputs
from eaas.gpu.linear import linear
from eaas.gpu.streams import Streams
from eaas.gpu.taps import RECORDED, Taps
from eaas.gpu.weights import DeviceWeights, LayerWeights, Mlp, source_of
from eaas.model.spec import ModelSpec
from eaas.worker.decoder import (
    BLOCK_TOKENS,
    DecoderError,
    ExpertsLost,
    PlanInvalid,
    StepLimits,
    check_ways,
    plan_arrays,
    rope_tables,
)
from eaas.worker.plan import StepPlan
from eaas.worker.sample import DeviceSamples
from eaas.worker.taps import OF_EXPERTS
from experts.gpu.client import StepReport
from experts.gpu.tiles import numerics_class
from experts.model import Dtype
from p2p.device import INTERPRET

LOGITS_ROWS = 256  # rows of logits that are kept on the device at once
DAMAGED_STEPS = 3  # how often a step is run again because an answer was damaged
WARM_UP_S = 10.0  # what a step of no rows may wait for its experts, of which it asks nothing
LEAST_ROWS_OF_TWO = 2  # a step of fewer rows is one micro-batch


@dataclass(kw_only=True, eq=False)
class _Rows:
    """Buffers of one micro-batch, views of the step's; rows in the first dimension."""

    part: Part
    x: Tensor
    norm: Tensor
    low: Tensor
    qkv: Tensor
    queries: Tensor
    attended: Tensor
    projected: Tensor
    ids: Tensor
    weights: Tensor
    added: Tensor
    gate_up: Tensor
    act: Tensor
    shared: Tensor
    share: Tensor
    away: torch.cuda.Event | None


@dataclass(kw_only=True, eq=False)
class _Size:
    """Steps of one size: their inputs, their buffers, and their graph once it is captured."""

    step: Step
    rows: Sequence[_Rows]
    graph: torch.cuda.CUDAGraph | None = field(default=None)


class DeviceExperts(Protocol):
    """Expert servers, through an `experts.gpu.client.GpuClient`; tests and benchmarks bring experts of their own.

    Attributes:
        stream: Where steps are to be launched, and what they read is written in their order; None: anywhere.
    """

    stream: torch.cuda.Stream | None

    def begin(self, deadline_s: float) -> None:
        """A step is about to be launched, whose calls end by then."""
        ...

    def enqueue(self, layer: int, rows: Tensor, ids: Tensor, weights: Tensor, n_rows: Tensor, out: Tensor) -> None:
        """Launch what sums the experts of the first n_rows rows: nothing of it may wait for the host.

        Args:
            rows: bfloat16 [size, hidden].
            ids: int32 [size, top_k]; weights float32 [size, top_k].
            n_rows: int32 [1].
            out: float32 [size, hidden], written.
        """
        ...

    def end(self) -> StepReport:
        """The step has run: what became of its calls."""
        ...


class GpuDecoder:
    """A model's attention side on one GPU, with a paged key-value cache. One thread at a time.

    Attributes:
        tap_kinds: What it can record of rows (eaas.worker.taps).
        tap_floats: The most floats that one step records.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, np.ndarray] | DeviceWeights, experts: DeviceExperts,
        kv_blocks: int, *, block_tokens: int = BLOCK_TOKENS, max_rows: int = 512, dtype: Dtype | None = None,
        device: torch.device | str = "cuda", double_batching: bool = False, taps: bool = False,
    ) -> None:  # fmt: skip
        """Upload the weights and take all memory that steps need.

        Args:
            weights: By role (`eaas.model.loader.load_weights`), or on the device already.
            experts: Who computes routed experts; must outlive the decoder.
            block_tokens: Positions per block, a multiple of 16.
            dtype: Of products, keys and values: bfloat16. The spec's where None.
            device: "cuda", or "cpu" in Triton's interpreter.
            double_batching: Run a step as two micro-batches that overlap; may be changed before sizes are warm.
            taps: Be able to record rows (`StepPlan.taps`), for some launches more in each step (`eaas.gpu.taps`).

        Raises:
            DecoderError: sizes or a type that the GPU does not serve.
            WeightsInvalid: a weight is missing or of the wrong size.
            torch.OutOfMemoryError: the device has too little memory.
        """
        self.spec = spec
        self.device = torch.device(device)
        self._check(spec, Dtype(spec.dtype if dtype is None else dtype), block_tokens, kv_blocks, max_rows)
        self.block_tokens, self.max_rows = block_tokens, max_rows
        self._limits = StepLimits.of(spec, max_rows=max_rows, block_tokens=block_tokens, kv_blocks=kv_blocks)
        self.max_positions = self._limits.max_positions
        self._experts, self.double_batching = experts, double_batching
        self._most = triton.next_power_of_2(max_rows)
        self._streams = Streams(self.device, experts.stream)
        with self._streams.main():
            if isinstance(weights, DeviceWeights):
                self._weights = weights
            else:
                self._weights = DeviceWeights.upload(spec, source_of(weights), self.device)
            group = spec.q_heads // spec.kv_heads
            self._inputs = StepInputs(self._limits, group=group, most=self._most, device=self.device)
            self._take_memory(kv_blocks)
            self._taps = None
            if taps:
                self._taps = Taps(spec.layers, most=self._most, piece=len(self._logits), device=self.device)
        kinds = frozenset(RECORDED if taps else ())
        self.tap_kinds = kinds if spec.moe_layers else kinds - OF_EXPERTS
        self.tap_floats = self._taps.floats if self._taps else 0
        self._sizes: dict[tuple[int, int], _Size] = {}
        self._closed = False

    @property
    def numerics_class(self) -> str:
        """Equal strings promise equal bits."""
        return numerics_class(self.device)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the steps that there are: powers of two. One of fewer rows runs as the next larger."""
        return tuple(1 << power for power in range(self._most.bit_length()))

    def close(self) -> None:
        """Free the device's memory. Idempotent; no step may follow."""
        if not self._closed:
            self._closed = True
            self._streams.wait()
            self._sizes.clear()
            for name in (
                "_weights", "_inputs", "_buffers", "_keys", "_values", "_scratch", "_sums", "_logits", "_piece",
                "_taps",
            ):  # fmt: skip
                delattr(self, name)

    def step(self, plan: StepPlan, deadline_s: float) -> np.ndarray:
        """As `eaas.worker.decoder.Decoder.step`, but what the plan may drop is not dropped."""
        arrays = self._run(plan, None, deadline_s)
        count = len(arrays[4])
        self._make_host_room(count)
        with self._streams.main():
            for first, last in self._pieces(count):
                if first:
                    # The step's own launches fill the buffer once.
                    self._head(first, self._sent(np.full(1, last - first, dtype=np.int32)))
                self._host_logits[first:last].copy_(self._logits[: last - first], non_blocking=True)
            self._streams.wait()
        return self._host_logits.numpy()[:count]

    def step_tokens(self, plan: StepPlan, rows: np.ndarray, deadline_s: float) -> DeviceSamples:
        """As `eaas.worker.decoder.Decoder.step_tokens`; the logits of rows that the device chooses for do not leave it.

        Whether it does is the row's own affair (`eaas.gpu.sampling.can_choose`), whoever else is in the step.
        """
        check_ways(plan, rows)
        here = sampling.can_choose(rows)
        choices = sampling.choices_of(rows, here)
        self._run(plan, choices[: len(self._logits)], deadline_s)
        left = np.flatnonzero(~here)
        self._make_host_room(len(left))
        with self._streams.main():
            for first, last in self._pieces(len(rows)):
                if first:
                    # The step's own launches choose once, as many as there is room for.
                    piece = np.full((last - first + 1, sampling.CHOICE_WORDS), last - first, dtype=np.int32)
                    piece[1:] = choices[first:last]
                    number = self._sent(piece.ravel())
                    self._head(first, number)
                    sampling.choose(
                        self._logits, self._piece[1:], number, self._scratch, self._tokens[first:], self._status[first:]
                    )  # fmt: skip
                for to in range(*np.searchsorted(left, (first, last))):
                    self._host_logits[to].copy_(self._logits[left[to] - first], non_blocking=True)
            if len(left) or len(rows) > len(self._logits):
                self._streams.wait()
        return DeviceSamples(
            sampled=here,
            tokens=self._tokens.numpy()[: len(rows)],
            sound=self._status.numpy()[: len(rows)] == sampling.OK,
            logits=self._host_logits.numpy()[: len(left)],
        )

    def warm(self, sizes: Sequence[int]) -> None:
        """Compile, load and capture steps of these numbers of rows, where that is not done yet."""
        for rows in sizes:
            self._size(rows)

    # -- inside ----------------------------------------------------------------------------------------------

    def _check(self, spec: ModelSpec, dtype: Dtype, block_tokens: int, kv_blocks: int, max_rows: int) -> None:
        if dtype is not Dtype.BFLOAT16:
            raise DecoderError(
                f"The GPU computes in bfloat16; {dtype.name.lower()} is asked for. Ask for --dtype bfloat16, or serve "
                "with --device cpu."
            )
        if (self.device.type == "cuda") == INTERPRET:
            raise DecoderError(
                f"Device {self.device} with TRITON_INTERPRET={int(INTERPRET)}: kernels run on cuda, or on cpu in the "
                "interpreter. Change the one or the other."
            )
        if spec.beyond_gpus:
            raise DecoderError(
                f"{spec.architecture} has {spec.beyond_gpus}, which the GPU does not compute. Serve with --device cpu."
            )
        group = spec.q_heads // spec.kv_heads
        if group > QUERIES or spec.head_dim > 256 or block_tokens % 16 or spec.moe.experts > 4096:
            raise DecoderError(
                f"The GPU cannot serve {group} query heads to a key head (at most {QUERIES}), heads of "
                f"{spec.head_dim} (at most 256), {spec.moe.experts} experts (at most 4096) or blocks of "
                f"{block_tokens} positions (a multiple of 16). Change the one out of range."
            )
        if min(kv_blocks, max_rows) < 1 or kv_blocks * block_tokens * spec.kv_size >= 1 << 31:
            raise DecoderError(
                f"{kv_blocks} blocks of {block_tokens} positions and {max_rows} rows a step: at least 1 of each, and "
                "of the cache less than 2**31 numbers a layer, are possible."
            )

    def _take_memory(self, kv_blocks: int) -> None:
        spec, moe, device, most = self.spec, self.spec.moe, self.device, self._most

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        shape = (spec.layers, kv_blocks, spec.kv_heads, self.block_tokens, spec.head_dim)
        self._keys, self._values = room(*shape, dtype=torch.bfloat16), room(*shape, dtype=torch.bfloat16)
        cosines, sines = rope_tables(spec, self.max_positions)
        self._cosines, self._sines = (torch.from_numpy(table).to(device) for table in (cosines, sines))
        inner = max(spec.intermediate if moe.dense_layers else 0, moe.shared_intermediate)
        heads = (spec.q_heads, spec.head_dim)
        self._buffers = {
            "x": room(most, spec.hidden),
            "norm": room(most, spec.hidden, dtype=torch.bfloat16),
            "low": room(most, spec.hidden, dtype=torch.bfloat16),
            "qkv": room(most, spec.q_size + 2 * spec.kv_size),
            "queries": room(most, *heads, dtype=torch.bfloat16),
            "attended": room(most, *heads, dtype=torch.bfloat16),
            "projected": room(most, spec.hidden),
            "ids": room(most, moe.top_k, dtype=torch.int32),
            "weights": room(most, moe.top_k),
            "added": room(most, spec.hidden),
            "gate_up": room(most, 2 * inner),
            "act": room(most, inner, dtype=torch.bfloat16),
            "shared": room(most, spec.hidden if moe.shared_intermediate else 0),
            "share": room(most),
        }
        self._scores = room(parts_of(spec.hidden) * most * moe.experts)
        self._sums = Sums.make(spec.q_heads, spec.head_dim, device, self._inputs.partials)
        self._final = room(most, spec.hidden, dtype=torch.bfloat16)
        self._logits = room(min(most, LOGITS_ROWS), spec.vocab)
        # Taken now: memory that is taken later may have to wait for a device that is never idle.
        self._piece = room(1 + len(self._logits), sampling.CHOICE_WORDS, dtype=torch.int32)
        self._host_logits = torch.empty(self._logits.shape, pin_memory=device.type == "cuda")
        self._scratch = sampling.Scratch.make(len(self._logits), spec.vocab, device)
        # Written by the device, read by the host when the step has ended.
        self._tokens, self._status = (
            torch.zeros(most, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)
        )

    def _run(self, plan: StepPlan, choices: np.ndarray | None, deadline_s: float) -> list[np.ndarray]:
        """Run one step to its end; the plan's arrays."""
        if self._closed:
            raise DecoderError("The decoder is closed; make another one.")
        arrays = plan_arrays(plan)
        fault = self._limits.fault_of_rows(arrays)
        if fault:
            raise self._limits.refusal(*fault, arrays)
        size = self._size(len(arrays[0]))
        if self._taps is not None:
            self._taps.fill(plan.taps, len(arrays[0]), size.step.size, len(size.rows))
        elif plan.taps is not None:
            raise PlanInvalid("Rows are to be recorded by a decoder made without taps. Make it with them.")
        with self._streams.main():
            self._inputs.fill(arrays, choices, size.step.size, len(size.rows))
            end_s = time.monotonic() + deadline_s
            for left in range(DAMAGED_STEPS, -1, -1):
                report = self._once(size, max(0.0, end_s - time.monotonic()))
                if report.usable:
                    if self._taps is not None:
                        self._taps.take(plan.taps)
                    return arrays
                if report.lost or not left:
                    break
        # Two micro-batches number their rows alike.
        known = len(size.rows) == 1
        lost = np.array(report.lost or report.corrupt, dtype=np.int64)
        raise ExpertsLost(
            f"{len(lost)} rows have an expert that did not answer {'in time' if report.lost else 'soundly'}.",
            lost if known else None,
        )

    def _once(self, size: _Size, deadline_s: float) -> StepReport:
        self._experts.begin(deadline_s)
        if size.graph is not None:
            size.graph.replay()
        else:
            self._launch(size)
        self._streams.wait()
        return self._experts.end()

    def _size(self, rows: int) -> _Size:
        """Steps of that many rows, captured."""
        count = triton.next_power_of_2(rows)
        micro_batches = 2 if self.double_batching and count >= LEAST_ROWS_OF_TWO else 1
        size = self._sizes.get((count, micro_batches))
        if size is None:
            step = self._inputs.step(count, micro_batches)
            parts = []
            for part in step.parts:
                mine = slice(part.begin, part.begin + part.size)
                parts.append(_Rows(part=part, away=None, **{k: v[mine] for k, v in self._buffers.items()}))
            size = _Size(step=step, rows=parts)
            if self.device.type == "cuda":
                self._capture(size)
            self._sizes[count, micro_batches] = size
        return size

    def _capture(self, size: _Size) -> None:
        with self._streams.main():
            # Whatever compiles or loads on its first launch must do so outside of a capture.
            self._inputs.clear()
            self._launch(size)
            self._streams.wait()
            # A step, for what other threads write about servers meanwhile would become part of the graph.
            self._experts.begin(WARM_UP_S)
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self._streams.stream, capture_error_mode="thread_local"):
                    self._launch(size)
            finally:
                self._experts.end()
            size.graph = graph

    def _launch(self, size: _Size) -> None:
        """Everything that a step runs, in order."""
        step = size.step
        self._inputs.fetch(step)
        if self._taps is not None:
            self._taps.fetch()
        for rows in size.rows:
            # Of an earlier launch, which a capture may not wait for.
            rows.away = None
            norm_rope.embed(self._weights.embed, rows.part.tokens, rows.x, rows.part.n_rows)
            self._record("embed", 0, rows.x, rows)
        before: LayerWeights | None = None
        for number, layer in enumerate(self._weights.layers):
            for rows in size.rows:
                self._streams.come_back(rows.away)
                self._attend(number, layer, before, rows)
                self._feed_forward(number, layer, rows)
            before = layer
        for rows in size.rows:
            self._streams.come_back(rows.away)
            self._record("residual", self.spec.layers - 1, rows.x, rows, **_added_by(before, vars(rows)))
        whole = {name: self._buffers[name][: step.size] for name in ("x", "added", "shared", "share")}
        # First: what the step itself is asked for is left in the same buffers.
        self._record_head(before, whole)
        self._finish(before, whole, step.wanted, step.n_wanted)
        self._head(0, step.n_wanted, step.size)
        sampling.choose(self._logits, step.choices, step.n_choices, self._scratch, self._tokens, self._status)

    def _attend(self, number: int, layer: LayerWeights, before: LayerWeights | None, rows: _Rows) -> None:
        """The residual stream past the last layer, and this layer's attention of it in `projected`."""
        spec, part = self.spec, rows.part
        norm_rope.add_norm(
            rows.x, layer.input_norm, part.n_rows, spec.eps, out=rows.norm, **_added_by(before, vars(rows))
        )
        if number:
            self._record("residual", number - 1, rows.x, rows)
        linear(rows.norm, layer.qkv, rows.qkv, part.n_rows)
        keys, values = self._keys[number], self._values[number]
        norm_rope.place(
            rows.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, self._cosines, self._sines, part.positions,
            part.seqs, self._inputs.tables, rows.queries, keys, values, part.n_rows, spec.eps, spec.clip_qkv,
        )  # fmt: skip
        attention(
            rows.queries, keys, values, part.positions, part.seqs, self._inputs.tables, part.items, part.n_items,
            part.merges, part.n_merges, self._sums, rows.attended, window=spec.sliding_window[number],
        )  # fmt: skip
        linear(rows.attended.view(part.size, -1), layer.o, rows.projected, part.n_rows)
        self._record("attention", number, rows.projected, rows, bias=layer.o_bias)

    def _feed_forward(self, number: int, layer: LayerWeights, rows: _Rows) -> None:
        """What the layer's MLP or experts add, in `added`; experts compute it on the other stream."""
        spec, count = self.spec, rows.part.n_rows
        residual = {"addend": rows.projected, "bias": layer.o_bias}
        if layer.gate is None:
            norm_rope.add_norm(rows.x, layer.post_norm, count, spec.eps, out=rows.norm, **residual)
            self._mlp(layer.dense, rows, rows.added)
            return
        shares = {} if layer.shared_gate is None else {"share_weight": layer.shared_gate, "share": rows.share}
        norm_rope.add_norm(rows.x, layer.post_norm, count, spec.eps, out=rows.norm, low=rows.low, **residual, **shares)
        gate(rows.norm, rows.low, layer.gate, layer.correction, spec.moe, self._scores, rows.ids, rows.weights, count)
        with self._streams.away() as end:
            self._experts.enqueue(layer.moe_layer, rows.norm, rows.ids, rows.weights, count, rows.added)
        rows.away = end
        scores = (parts_of(spec.hidden), rows.part.size, spec.moe.experts)
        self._record("gate", number, self._scores[: math.prod(scores)].view(scores), rows)
        self._record("experts", number, rows.ids, rows)
        if layer.shared is not None:
            self._mlp(layer.shared, rows, rows.shared)

    def _finish(self, last: LayerWeights | None, whole: Mapping[str, Tensor], pick: Tensor, count: Tensor) -> None:
        """The final norm of picked rows, side by side in `_final`."""
        norm_rope.add_norm(
            whole["x"], self._weights.final_norm, count, self.spec.eps, out=self._final[: len(pick)], pick=pick,
            **_added_by(last, whole),
        )  # fmt: skip

    def _record(self, kind: str, layer: int, source: Tensor, rows: _Rows, **more: Tensor | None) -> None:
        if self._taps is not None:
            self._taps.record(kind, layer, source, rows.part, **more)

    def _record_head(self, last: LayerWeights | None, whole: Mapping[str, Tensor]) -> None:
        """The final norm and the logits of recorded rows, whether or not the step is asked for these."""
        taps, size = self._taps, len(whole["x"])
        if taps is None:
            return
        self._finish(last, whole, taps.picked[:size], taps.n_picked)
        taps.record_picked("final_norm", self._final[:size], taps.n_picked)
        for first, count in zip(range(0, size, len(self._logits)), taps.n_logits, strict=False):
            self._head(first, count, size - first)
            taps.record_picked("logits", self._logits[: size - first], count, first)

    def _mlp(self, mlp: Mlp | None, rows: _Rows, out: Tensor) -> None:
        if mlp is None:
            raise DecoderError("A layer has neither experts nor an MLP; its weights were not made by `upload`.")
        size, count = rows.part.size, rows.part.n_rows
        # Layers whose MLPs differ in width share one buffer.
        gate_up = rows.gate_up.reshape(-1)[: size * 2 * mlp.inner].view(size, 2 * mlp.inner)
        act = rows.act.reshape(-1)[: size * mlp.inner].view(size, mlp.inner)
        linear(rows.norm, mlp.gate_up, gate_up, count)
        norm_rope.swiglu(gate_up, act, count)
        linear(act, mlp.down, out, count)

    def _pieces(self, count: int) -> Iterator[tuple[int, int]]:
        """Logits rows that the device keeps at once, from and to."""
        for first in range(0, count, len(self._logits)):
            yield first, min(count, first + len(self._logits))

    def _make_host_room(self, rows: int) -> None:
        """Room on the host for the logits of so many rows."""
        if len(self._host_logits) < rows:
            pinned = self.device.type == "cuda"
            self._host_logits = torch.empty(rows, self.spec.vocab, pin_memory=pinned)

    def _head(self, first: int, count: Tensor, size: int | None = None) -> None:
        """Logits of wanted rows from `first` on, as many as there is room for."""
        rows = min(len(self._logits), len(self._final) - first if size is None else size)
        linear(self._final[first : first + rows], self._weights.head, self._logits[:rows], count)

    def _sent(self, words: np.ndarray) -> Tensor:
        """Send a piece's number of rows and its choices, the number."""
        self._piece.view(-1)[: len(words)].copy_(torch.from_numpy(words))
        return self._piece.view(-1)[:1]


def _added_by(layer: LayerWeights | None, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a layer's MLP or experts, and its shared expert beside them, add to the residual stream."""
    if layer is None:
        return {}
    if layer.shared is None:
        return {"addend": buffers["added"]}
    scale = {} if layer.shared_gate is None else {"scale": buffers["share"]}
    return {"addend": buffers["added"], "shared": buffers["shared"], **scale}
