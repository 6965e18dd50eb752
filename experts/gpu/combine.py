"""Combine: each token's answers, weighted and added in the order of the k-slots, in float32.

Definition, for every token t < n: out[t] = weights[t, 0] * answer[t, 0], then out[t] += weights[t, k] * answer[t, k]
for k = 1, 2, ..., each product rounded before it is added. An answer is loaded into registers once; its words' sum with
its seal says whether it is whole, of this sequence and from this place; exactly these registers are added. The seals of
a token's answers are checked as one sum. Where it is wrong, or an answer is missing, the token's sum is all NaN and the
report says so: no row that was not checked is ever used.

Cost: reads n * top_k answers, writes n float32 rows. At 128 tokens of 7,168 columns, top-8, bf16: 14.7 MB read, 3.7
written: 4.3 us at an H200's copy rate. All answers of a token are in flight at once; three dependent loads come before
(place, where it was asked, the answers): about 7 us.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from experts.gpu.dispatch import check_rows
from experts.gpu.tables import ClientTables, check_tensor
from experts.gpu.words import ASKED, CLIENT, MARK, REPORT, SLOT, VERDICT
from p2p.device import folded, row_stamp

_HIGH = tl.constexpr(0xFFFF0000)


def combine_reference(answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The definition: answers [n, top_k, hidden], weights float32 [n, top_k], to float32 [n, hidden]."""
    out = weights[:, 0, None] * answers[:, 0].float()
    for k in range(1, answers.shape[1]):
        out += weights[:, k, None] * answers[:, k].float()
    return out


def combine(
    tables: ClientTables, layer: int, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    n_rows: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    """Add up the answers to what `dispatch` sent with the same rows, ids and count.

    Args:
        weights: float32 [B, top_k].
        out: float32 [B, hidden]. Rows that do not count are left as they are.

    Raises:
        ValueError: a shape or type does not fit.
    """
    check_rows(tables, layer, rows, ids, n_rows)
    check_tensor("weights", weights, torch.float32, tuple(ids.shape))
    check_tensor("out", out, torch.float32, tuple(rows.shape))
    combine_kernel[(len(rows),)](
        weights, n_rows, tables.control, tables.place, tables.asked, tables.report.data_ptr(),
        tables.blank.data_ptr(), out,
        **tables.constants(combine_kernel.arg_names), ANSWER_TILE=triton.next_power_of_2(tables.shape.answer_words),
        num_warps=tables.back_warps, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def sound(total):
    """Whether words and seals of answers agree: what is left of their sum."""
    return total == 0


@triton.jit
def answer_words(at, HIDDEN: tl.constexpr, ANSWER_TILE: tl.constexpr):
    """The words of the answer at the address `at`, u32 [ANSWER_TILE]."""
    index = tl.arange(0, ANSWER_TILE)
    inside = index < HIDDEN // 2
    row = tl.multiple_of(at.to(tl.pointer_type(tl.uint32)), 64)
    # Volatile: loaded once, and never again for another use.
    return tl.load(row + index, mask=inside, other=0, volatile=True)


@triton.jit
def combine_kernel(
    weights, n_rows, control, place, asked, report, blank, out,
    HIDDEN: tl.constexpr, K: tl.constexpr, SERVERS: tl.constexpr,
    ANSWER_SEAL: tl.constexpr, ANSWER_STRIDE: tl.constexpr, WIDE: tl.constexpr, ANSWER_TILE: tl.constexpr,
    BACK_THREADS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """One token: check, weigh and add its answers."""
    token = tl.program_id(0)
    if token < tl.load(n_rows):
        k = tl.arange(0, WIDE)
        there = k < K
        at = tl.load(place + token * K + k, mask=there, other=-1)
        row = asked + at * ASKED.WORDS
        verdict = tl.load(row + ASKED.VERDICT, mask=at >= 0, other=0)
        here = verdict == VERDICT.ARRIVED
        answer = (token * K + k).to(tl.int64) * ANSWER_STRIDE + SLOT.LIST
        # Where there is no answer, zeros under a zero seal: no load needs a mask for it.
        answer_at = tl.where(here, tl.load(row + ASKED.REPLY, mask=here, other=0) + answer, blank)
        weight = tl.load(weights + token * K + k, mask=there, other=0.0)
        stamps = row_stamp(
            tl.load(row + ASKED.SEQUENCE, mask=here, other=0), tl.load(control + CLIENT.INCARNATION), token * K + k
        )
        lost = tl.sum((there & (here == 0)).to(tl.int32), axis=0)

        # One seal a thread: none is read by two.
        lane = tl.arange(0, BACK_THREADS)
        seal_at = tl.zeros([BACK_THREADS], tl.int64)
        for i in tl.static_range(K):
            seal_at = tl.where(lane == i, tl.sum(tl.where(k == i, answer_at, 0), axis=0), seal_at)
        seals = tl.load((seal_at + ANSWER_SEAL).to(tl.pointer_type(tl.uint64)), mask=lane < K, other=0, volatile=True)
        index = tl.arange(0, ANSWER_TILE)
        fold = tl.zeros([ANSWER_TILE], tl.uint64)
        even = tl.zeros([ANSWER_TILE], tl.float32)
        odd = tl.zeros([ANSWER_TILE], tl.float32)
        for i in tl.static_range(K):
            at_i = tl.sum(tl.where(k == i, answer_at, 0), axis=0)
            weight_i = tl.sum(tl.where(k == i, weight, 0.0), axis=0)
            words = answer_words(at_i, HIDDEN, ANSWER_TILE)
            fold += folded(words, index, token * K + i)
            low = weight_i * (words << 16).to(tl.float32, bitcast=True)
            high = weight_i * (words & _HIGH).to(tl.float32, bitcast=True)
            # Not 0 + low: that would lose the sign of a zero.
            even = low if i == 0 else even + low
            odd = high if i == 0 else odd + high
        total = tl.sum(fold, axis=0) + tl.sum(tl.where(here, stamps, 0), axis=0) - tl.sum(seals, axis=0)
        whole = sound(total)
        bad = (lost > 0) | (whole == 0)
        nothing = float("nan")
        row_out = out + token.to(tl.int64) * HIDDEN
        even = tl.where(bad, nothing, even)
        odd = tl.where(bad, nothing, odd)
        column = tl.arange(0, 2 * ANSWER_TILE)
        tl.store(row_out + column, tl.interleave(even, odd), mask=column < HIDDEN)
        if bad:
            told = report.to(tl.pointer_type(tl.int64))
            # Stores alone: the host's memory knows no atomics of ours.
            one = tl.full((), 1, tl.int64)
            tl.store(told + REPORT.LOST, one, mask=lost > 0)
            tl.store(told + REPORT.CORRUPT, one, mask=whole == 0)
            mark = tl.where(lost > 0, MARK.LOST, 0) | tl.where(whole == 0, MARK.CORRUPT, 0)
            tl.store(told + REPORT.WORDS + SERVERS + token, mark.to(tl.int64))
            tell_who(
                told + REPORT.WORDS, at % SERVERS, here, answer_at, stamps, token,
                HIDDEN, K, ANSWER_SEAL, WIDE, ANSWER_TILE, BACK_THREADS,
            )  # fmt: skip


@triton.jit
def tell_who(
    flags, server, here, answer_at, stamps, token,
    HIDDEN: tl.constexpr, K: tl.constexpr, ANSWER_SEAL: tl.constexpr, WIDE: tl.constexpr,
    ANSWER_TILE: tl.constexpr, BACK_THREADS: tl.constexpr,
):  # fmt: skip
    """Flag the servers of a token's answers that are not whole: each looked at again, alone, for what is still so."""
    k = tl.arange(0, WIDE)
    index = tl.arange(0, ANSWER_TILE)
    lane = tl.arange(0, BACK_THREADS)
    for number in tl.range(0, K):
        mine = k == number
        at = tl.sum(tl.where(mine, answer_at, 0), axis=0)
        words = answer_words(at, HIDDEN, ANSWER_TILE)
        seal = tl.load(
            (at + lane * 0 + ANSWER_SEAL).to(tl.pointer_type(tl.uint64)), mask=lane == 0, other=0, volatile=True
        )
        rest = tl.sum(folded(words, index, token * K + number), axis=0) - tl.sum(seal, axis=0)
        rest += tl.sum(tl.where(mine & here, stamps, 0), axis=0)
        flag = flags + tl.maximum(tl.sum(tl.where(mine, server, 0), axis=0), 0)
        # Two programs may both do this: they set the same bit.
        tl.store(flag, tl.load(flag) | (tl.full((), 1, tl.int64) << VERDICT.CORRUPT), mask=sound(rest) == 0)
