"""What a step records of some of its rows, for whoever asked to see them (`eaas.worker.taps`).

Definition, per recorded row of `width` numbers: value = source (its parts in rising order) + addend + bias, then +
scale * shared: bit for bit what `norm_rope.add_norm` makes of the residual stream. Kept are all values, as float32; or,
of the finite ones, the mean, the root of the mean square and the greatest magnitude, and how many are not finite
(`statistics` of eaas/native/ops.isa.cpp, in another order of additions).

Which rows and places are recorded is data: the launches are part of every step of a decoder that was made for it, and
return at once where nothing is asked for. The frame is pinned memory of the host, which the kernel writes.

Cost: a launch where nothing is, some 2 us. Per recorded row 4 * width bytes read of each of up to 3 inputs, and 4 *
width bytes over PCIe, 16 as statistics: 32 rows of 4096 are 0.5 MB, 10 us at 50 GB/s.
"""
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from eaas.gpu.inputs import COUNT_STRIDE, Part, fetch, rows_in_buffers
from eaas.gpu.norm_rope import check
from eaas.worker.decoder import PlanInvalid
from eaas.worker.plan import StepTaps
from eaas.worker.taps import KINDS

FRAME_FLOATS = 1 << 24  # 64 MiB: 16 rows of all that can be recorded of DeepSeek-V3
RECORDED = KINDS[: KINDS.index("expert")]
_BLOCK = 1024


def statistics_reference(rows: Tensor) -> Tensor:
    """The four of each row, float64 [rows, 4]."""
    finite, rows = rows.isfinite(), rows.double().nan_to_num(0.0, 0.0, 0.0)
    count = finite.sum(-1).clamp(min=1)
    mean, square = rows.sum(-1) / count, rows.square().sum(-1) / count
    return torch.stack((mean, square.sqrt(), rows.abs().amax(-1), (~finite).sum(-1)), -1)


def tap(
    source: Tensor, numbers: Tensor, n_rows: Tensor, place: Tensor, statistics: Tensor, frame: Tensor, *,
    addend: Tensor | None = None, bias: Tensor | None = None, shared: Tensor | None = None,
    scale: Tensor | None = None, wide: bool = False,
) -> None:  # fmt: skip
    """Record those of the first n_rows rows that have a number, if this place is asked for.

    Args:
        source: [rows, width], or [parts, rows, width] to be added up; float32, bfloat16 or int32.
        numbers: int32 [rows]: which of the recorded rows each is; below 0: none.
        n_rows: int32 [1].
        place: int32 [1]: where in `frame` these rows begin, in floats; below 0: not asked for.
        statistics: int32 [1]: whether the four are kept in place of all values.
        frame: float32, written.
        addend, shared: float32 [rows, width]; bias: float32 [width]; scale: float32 [rows].
        wide: The four stand `width` apart, too.

    Raises:
        ShapeInvalid: another type or shape.
    """
    rows, width = source.shape[-2:]
    check("source", source, source.dtype, *source.shape)
    check("frame", frame, torch.float32, None)
    for name, tensor, size in (
        ("numbers", numbers, rows), ("n_rows", n_rows, 1), ("place", place, 1), ("statistics", statistics, 1),
    ):  # fmt: skip
        check(name, tensor, torch.int32, size)
    for name, tensor, *shape in (
        ("addend", addend, rows, width), ("bias", bias, width), ("shared", shared, rows, width), ("scale", scale, rows),
    ):  # fmt: skip
        if tensor is not None:
            check(name, tensor, torch.float32, *shape)
    tap_kernel[(rows,)](
        source, addend, bias, shared, scale, numbers, n_rows, place, statistics, frame, rows, width,
        PARTS=len(source) if source.dim() == 3 else 1, WIDE=wide, BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


class Taps:
    """What one decoder's steps record: told by the host before each, fetched with its inputs.

    Args:
        most: Rows of the largest step.
        piece: Rows of logits that are computed at once.

    Attributes:
        picked: int32 [most]: the recorded rows of the step's buffers, n_picked int32 [1] of them.
        n_logits: int32 [1] for each piece: how many of the rows whose logits are recorded it has.
        floats: Most of one step.
    """

    def __init__(self, layers: int, *, most: int, piece: int, device: torch.device) -> None:
        self._layers, self._piece = layers, piece
        pieces, pinned = -(-most // piece), device.type == "cuda"
        # Counts are COUNT_STRIDE words apart: words in use, statistics, rows, rows of each piece.
        self._places = COUNT_STRIDE * (3 + pieces)
        self._picked = self._places + len(RECORDED) * layers
        self._numbers = self._picked + most
        self._host = torch.zeros(self._numbers + most, dtype=torch.int32, pin_memory=pinned)
        self._words = self._host.numpy()
        self._device = torch.zeros(len(self._host), dtype=torch.int32, device=device)
        self.floats = FRAME_FLOATS
        self._frame = torch.zeros(self.floats, pin_memory=pinned)
        self._ordinals = torch.arange(most, dtype=torch.int32, device=device)
        self._statistics, self.n_picked, *self.n_logits = (
            self._device[at : at + 1] for at in range(COUNT_STRIDE, self._places, COUNT_STRIDE)
        )
        self.picked = self._device[self._picked : self._numbers]

    def fill(self, taps: StepTaps | None, rows: int, size: int, parts: int) -> None:
        """Say what the next step, of `rows` rows in buffers of `size`, records.

        Raises:
            PlanInvalid: it needs a larger frame than there is, or single experts; nothing was written.
        """
        words = self._words
        if taps is not None and (len(taps.experts) or taps.frame.size > self.floats):
            raise PlanInvalid(
                f"{taps.frame.size} floats and {len(taps.experts)} single experts are to be recorded; at most "
                f"{self.floats} floats a step and no single expert can be. Record fewer rows or layers at once."
            )
        words[: self._places] = 0
        words[0] = len(words)
        words[self._places : self._picked] = -1
        if taps is None:
            return
        count, picked = len(taps.rows), rows_in_buffers(taps.rows, rows, size, parts)
        words[COUNT_STRIDE : 3 * COUNT_STRIDE : COUNT_STRIDE] = taps.statistics, count
        if taps.places[RECORDED.index("logits"), 0] >= 0:
            firsts = np.arange(len(self.n_logits)) * self._piece
            words[3 * COUNT_STRIDE : self._places : COUNT_STRIDE] = np.clip(count - firsts, 0, self._piece)
        words[self._places : self._picked] = taps.places.ravel()
        words[self._picked : self._picked + count] = picked
        words[self._numbers :] = -1
        words[self._numbers + picked] = np.arange(count)

    def fetch(self) -> None:
        """Launch what brings that to the device."""
        fetch(self._host, self._device, len(self._host))

    def record(self, kind: str, layer: int, source: Tensor, part: Part, **more: Tensor | None) -> None:
        """Launch the record of a micro-batch's rows. Args: source, more: as `tap` takes them."""
        begin = self._numbers + part.begin
        self._tap(kind, layer, source, self._device[begin : begin + part.size], part.n_rows, **more)

    def record_picked(self, kind: str, source: Tensor, n_rows: Tensor, first: int = 0) -> None:
        """The same of picked rows, from the `first` of them on, side by side in `source`."""
        self._tap(kind, 0, source, self._ordinals[first:], n_rows)

    def take(self, taps: StepTaps | None) -> None:
        """Give the asker what the step that ended has recorded. What no row of it was meant for may hold anything."""
        if taps is not None:
            taps.frame[...] = self._frame.numpy()[: taps.frame.size].reshape(taps.frame.shape)

    def _tap(
        self, kind: str, layer: int, source: Tensor, numbers: Tensor, n_rows: Tensor, **more: Tensor | None
    ) -> None:
        at = self._places + RECORDED.index(kind) * self._layers + layer
        tap(
            source, numbers, n_rows, self._device[at : at + 1], self._statistics, self._frame,
            wide=kind == "logits", **more,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["numbers", "place", "scale"])
def tap_kernel(
    source, addend, bias, shared, scale, numbers, n_rows, place, statistics, frame, rows, width,
    PARTS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program records one row."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(place)
    number = -1
    if (begin >= 0) & (row < tl.load(n_rows)):
        number = tl.load(numbers + row)
    if number >= 0:
        brief = tl.load(statistics)
        apart = number * width
        if not WIDE:
            apart = tl.where(brief != 0, number * 4, apart)
        to = frame + begin + apart
        copied = tl.where(brief != 0, 0, width)
        sums = tl.zeros([BLOCK], tl.float32)
        squares = tl.zeros([BLOCK], tl.float32)
        greatest = tl.zeros([BLOCK], tl.float32)
        broken = tl.zeros([BLOCK], tl.int32)
        for base in range(0, width, BLOCK):
            column = base + tl.arange(0, BLOCK)
            inside = column < width
            value = tl.load(source + row * width + column, mask=inside, other=0.0).to(tl.float32)
            for part in tl.static_range(1, PARTS):
                value += tl.load(source + (part * rows + row) * width + column, mask=inside, other=0.0)
            if addend is not None:
                value += tl.load(addend + row * width + column, mask=inside, other=0.0)
            if bias is not None:
                value += tl.load(bias + column, mask=inside, other=0.0)
            if shared is not None:
                more = tl.load(shared + row * width + column, mask=inside, other=0.0)
                if scale is not None:
                    more *= tl.load(scale + row)
                value += more
            tl.store(to + column, value, mask=column < copied)
            finite = tl.abs(value) < float("inf")
            kept = tl.where(finite, value, 0.0)
            sums += kept
            squares += kept * kept
            greatest = tl.maximum(greatest, tl.abs(kept))
            broken += tl.where(finite, 0, 1)
        if brief != 0:
            bad = tl.sum(broken, 0)
            count = tl.maximum(width - bad, 1).to(tl.float32)
            tl.store(to, tl.sum(sums, 0) / count)
            tl.store(to + 1, tl.sqrt_rn(tl.sum(squares, 0) / count))
            tl.store(to + 2, tl.max(greatest, 0))
            tl.store(to + 3, bad.to(tl.float32))
