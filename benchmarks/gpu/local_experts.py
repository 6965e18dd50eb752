"""The experts in this process: what the servers would answer, in the same bits, without a server.

Definition, for token t, gate weights w and the pairs' rows y = FFN(rows[t]) of `ffn`:
    out[t] = w[t, 0] * y[t, 0] + w[t, 1] * y[t, 1] + ...
in that order, each product and each sum rounded to float32. A token of which an expert is not here gets NaN: it is
never served with a term left out.

Cost: the FFN's, and B * K * H reads of float32 with B * H written to combine: 7 us for 128 tokens of 8 experts at
H 7168 on an H200.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from experts.gpu.client import StepReport
from experts.gpu.ffn import grouped_ffn
from experts.gpu.group import Groups, group
from experts.gpu.weights import ExpertWeights


def combine_reference(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The definition: pairs' rows [B, K, H] and weights [B, K] to float32 [B, H]. The same bits."""
    out = weights[:, 0, None] * rows[:, 0].float()
    for k in range(1, rows.shape[1]):
        out = out + weights[:, k, None] * rows[:, k].float()
    return out


class LocalExperts:
    """Experts of all layers in this process's device memory. Calls share scratch: one stream at a time."""

    stream: torch.cuda.Stream | None = None

    def __init__(
        self,
        *,
        weights: ExpertWeights,
        table: torch.Tensor,
        top_k: int,
        max_rows: int,
        row_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate all that calls of at most `max_rows` tokens need.

        Args:
            weights: Loaded slots; may be reloaded later.
            table: int32 [layers, experts], on the weights' device: the slot of each expert, -1: not here.
            row_dtype: In which an expert's row goes to combine; as servers send it.

        Raises:
            ValueError: the table is none, or no token could be served.
        """
        device = weights.gate_up.device
        if table.dtype != torch.int32 or table.dim() != 2 or table.device != device:
            raise ValueError(
                f"The table is {table.dtype} {tuple(table.shape)} on {table.device}; "
                f"int32 [layers, experts] on {device} is needed."
            )
        if max_rows < 1 or top_k < 1:
            raise ValueError(f"{max_rows} rows of {top_k} experts; both are at least 1.")
        pairs = max_rows * top_k
        self.weights, self.table, self.top_k, self.max_rows = weights, table.contiguous(), top_k, max_rows
        self._groups = Groups.allocate(pairs=pairs, slots=weights.slots, tile=weights.widest_group, device=device)
        self._row_of = (torch.arange(pairs, device=device) // top_k).to(torch.int32)
        self._out = torch.empty(pairs, weights.hidden, dtype=row_dtype, device=device)
        self._act = torch.empty(pairs, weights.act_width, dtype=torch.bfloat16, device=device)

    def begin(self, deadline_s: float) -> None:
        """Nothing to prepare: nobody is waited for."""

    def end(self) -> StepReport:
        """Nobody was asked who could be lost."""
        return StepReport()

    def enqueue(
        self,
        layer: int,
        rows: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        n_rows: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Run the chosen experts of one MoE layer, in stream order; nothing waits, so a graph can hold it.

        Args:
            layer: MoE layer.
            rows: bf16 [B, H].
            ids: int32 [B, K], the chosen experts.
            weights: float32 [B, K], what the gate gave them.
            n_rows: int32 [1], on the device: tokens that there are.
            out: float32 [B, H]; rows from n_rows on are left as they are.

        Raises:
            ValueError: a shape or type does not fit.
        """
        b, hidden = len(rows), self.weights.hidden
        if not 0 < b <= self.max_rows:
            raise ValueError(f"{b} rows; 1 to {self.max_rows} are possible. Build LocalExperts for more.")
        if not 0 <= layer < len(self.table):
            raise ValueError(f"MoE layer {layer} of {len(self.table)}; 0 to {len(self.table) - 1} exist.")
        for name, tensor, shape, dtype in (
            ("rows", rows, (b, hidden), torch.bfloat16),
            ("ids", ids, (b, self.top_k), torch.int32),
            ("weights", weights, (b, self.top_k), torch.float32),
            ("out", out, (b, hidden), torch.float32),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; {dtype} {shape}, contiguous, is needed."
                )
        table, pairs = self.table[layer], b * self.top_k
        group(ids.view(-1), n_rows, self._groups, per_row=self.top_k, table=table)
        row_of, act, answers = self._row_of[:pairs], self._act[:pairs], self._out[:pairs]
        grouped_ffn(rows, row_of, self._groups, self.weights, act, answers)
        _combine[(b, triton.cdiv(hidden, 1024))](
            answers, ids, table, weights, n_rows, out,
            HIDDEN=hidden, TOP_K=self.top_k, WIDTH=min(1024, triton.next_power_of_2(hidden)),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit
def _combine(
    answers, ids, table, weights, n_rows, out,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    if token < tl.load(n_rows):
        column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = column < HIDDEN
        total = tl.zeros([WIDTH], tl.float32)
        for k in tl.static_range(TOP_K):
            pair = token * TOP_K + k
            expert = tl.load(ids + pair)
            slot = tl.where(expert >= 0, tl.load(table + tl.maximum(expert, 0)), -1)
            # A mask is a vector here: the interpreter takes none that comes from a number.
            here = inside & (column >= tl.where(slot >= 0, 0, HIDDEN))
            row = tl.load(answers + pair.to(tl.int64) * HIDDEN + column, mask=here, other=float("nan"))
            term = tl.load(weights + pair) * row.to(tl.float32)
            # Not 0 + term: the first term keeps its sign where it is zero.
            total = term if k == 0 else total + term
        tl.store(out + token.to(tl.int64) * HIDDEN + column, total, mask=inside)
