"""Redispatch: what was asked of servers that failed goes to the next replica, in the same call and the same graph.

A device function of `wait_replies`, not a kernel: the program that has waited packs the rows itself, one by one.
Definition: every pair whose last round failed is chosen a server anew, among those that failed nothing in this call and
have a slot that this call has not used; it keeps its old place where there is none, and is lost unless a later
round finds one. Rows, lists, seals and headers are made by the functions that `dispatch` uses.

Cost: nothing where nothing fails. Else one program's copy rate, some 20 GB/s: 50 us for 128 rows of 7 KB and 200 us
for 512, beside waits of milliseconds.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from experts.gpu.dispatch import send_headers, slots_at
from experts.gpu.pack import choose_servers, grade_servers, list_row, send_row
from experts.gpu.words import ASKED, CLIENT, PEER, VERDICT


@triton.jit
def stranded(
    ids, peers, routes, suspect, owed, place, layer, count, copy, attempt, missing, barred, used,
    LAYERS: tl.constexpr, EXPERTS: tl.constexpr, REPLICAS: tl.constexpr, SERVERS: tl.constexpr, K: tl.constexpr,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """How many pairs that were asked in round `attempt` of servers that are `missing` nobody else could answer: int32.

    Args:
        missing: bool [WIDTH].
        barred, used: As for `pack.grade_servers`.
    """
    server = tl.arange(0, WIDTH)
    k = tl.arange(0, WIDE)
    without = barred | missing.to(tl.int32)
    grade, _ = grade_servers(peers, suspect, owed, copy, without, used, SERVERS, WIDTH, SLOTS)
    found = tl.zeros((), tl.int32)
    for i in tl.range(0, count):
        token = tl.zeros((), tl.int32) + i
        here = k < K
        was = tl.load(place + token * K + k, mask=here, other=-1) - attempt * SERVERS
        silent = tl.max(((was[:, None] == server[None, :]) & missing[None, :]).to(tl.int32), axis=1) > 0
        expert = tl.load(ids + token * K + k, mask=here, other=-1)
        chosen = choose_servers(
            routes, layer, expert, silent, grade, copy, LAYERS, EXPERTS, REPLICAS, WIDTH, WIDE
        )
        found += tl.sum((silent & (chosen < 0)).to(tl.int32), axis=0)
    return found


@triton.jit
def send_again(
    rows, ids, peers, routes, suspect, owed, sequence, control, place, asked, layer, count, copy, attempt, now,
    barred, used,
    LAYERS: tl.constexpr, EXPERTS: tl.constexpr, REPLICAS: tl.constexpr, SERVERS: tl.constexpr,
    HIDDEN: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, ROWS_OUT: tl.constexpr, MODEL_HASH: tl.constexpr,
    ROW_SEAL: tl.constexpr, ROW_STRIDE: tl.constexpr, ROWS_OFFSET: tl.constexpr, REQUEST_STRIDE: tl.constexpr,
    REPLY_STRIDE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Send what failed as round `attempt`; the number of pairs sent (int64).

    Args:
        count: Tokens of the call.
        barred, used: As for `pack.grade_servers`.
    """
    server = tl.arange(0, WIDTH)
    k = tl.arange(0, WIDE)
    there = server < SERVERS
    grade, slot = grade_servers(peers, suspect, owed, copy, barred, used, SERVERS, WIDTH, SLOTS)
    slot_at = slots_at(peers, copy, slot, SERVERS, WIDTH, REQUEST_STRIDE)
    peer = peers + (copy * SERVERS + server) * PEER.WORDS
    incarnation = tl.load(peer + PEER.INCARNATION, mask=there, other=0)
    number = tl.load(sequence + server, mask=there, other=0) + 1
    listed = tl.zeros([WIDTH], tl.uint64)
    counted = tl.zeros([WIDTH], tl.int64)
    for i in tl.range(0, count):
        token = tl.zeros((), tl.int32) + i
        here = k < K
        was = tl.load(place + token * K + k, mask=here, other=-1)
        verdict = tl.load(asked + was * ASKED.WORDS + ASKED.VERDICT, mask=was >= 0, other=VERDICT.ARRIVED)
        expert = tl.load(ids + token * K + k, mask=here, other=-1)
        chosen = choose_servers(
            routes, layer, expert, here & (verdict != VERDICT.ARRIVED), grade, copy,
            LAYERS, EXPERTS, REPLICAS, WIDTH, WIDE,
        )  # fmt: skip
        tl.store(place + token * K + k, attempt * SERVERS + chosen, mask=chosen >= 0)
        send_row(
            rows, token, slot_at, chosen, number, incarnation,
            HIDDEN, K, ROWS_OUT, ROW_SEAL, ROW_STRIDE, ROWS_OFFSET, WIDTH, WIDE, TILE,
        )  # fmt: skip
        fold, pairs = list_row(slot_at, grade > 0, chosen, expert, token, count, K, WIDTH, WIDE)
        listed += fold
        counted += pairs
    send_headers(
        peers, copy, control, asked, sequence, slot_at, slot, counted, listed, layer, count, attempt,
        tl.maximum(tl.load(control + CLIENT.DEADLINE_NS) - now, 0),
        SERVERS, WIDTH, K, HIDDEN, MODEL_HASH, ROWS_OUT, ROWS_OFFSET, ROW_STRIDE, REPLY_STRIDE,
    )  # fmt: skip
    return tl.sum(counted, axis=0)
