"""Redispatch: what was asked of servers that failed goes to the next replica, in the same call and the same graph.

Device functions of `wait_replies`, not kernels: the program that has waited packs the rows itself, one by one.
Definition: every pair whose last round failed or is late is chosen a server anew, among those that failed nothing, have
answered all that this call asked of them, and have a slot that it has not used; it keeps its old place where there is
none, and is tried again when somebody has answered, or a slot that was owed is free. Once the
waiting is over its place is where it was answered: a late reply counts like any other. Rows, lists, seals and headers
are made by the functions that `dispatch` uses.

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
def send_again(
    rows, ids, peers, routes, suspect, owed, sequence, control, place, before, asked, layer, count, copy,
    attempt, now, barred, waiting, used,
    LAYERS: tl.constexpr, EXPERTS: tl.constexpr, REPLICAS: tl.constexpr, SERVERS: tl.constexpr,
    HIDDEN: tl.constexpr, K: tl.constexpr, CAPACITY: tl.constexpr, SLOTS: tl.constexpr, ROWS_OUT: tl.constexpr,
    MODEL_HASH: tl.constexpr, ROW_SEAL: tl.constexpr, ROW_STRIDE: tl.constexpr, ROWS_OFFSET: tl.constexpr,
    REQUEST_STRIDE: tl.constexpr, REPLY_STRIDE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Send what failed or is late as round `attempt`.

    Returns:
        The pairs sent to each server, and those of each server's that another took: int64 [WIDTH]. Then how many nobody
        could take, and of these how many somebody might who only owes replies: int32.

    Args:
        count: Tokens of the call.
        waiting: bool [WIDTH], whose reply is out: it is asked nothing more.
        barred, used: As for `pack.grade_servers`.
    """
    server = tl.arange(0, WIDTH)
    k = tl.arange(0, WIDE)
    there = server < SERVERS
    barred |= waiting.to(tl.int32)
    grade, slot = grade_servers(peers, suspect, owed, copy, barred, used, SERVERS, WIDTH, SLOTS)
    slot_at = slots_at(peers, copy, slot, SERVERS, WIDTH, REQUEST_STRIDE)
    peer = peers + (copy * SERVERS + server) * PEER.WORDS
    incarnation = tl.load(peer + PEER.INCARNATION, mask=there, other=0)
    number = tl.load(sequence + server, mask=there, other=0) + 1
    listed = tl.zeros([WIDTH], tl.uint64)
    counted = tl.zeros([WIDTH], tl.int64)
    moved = tl.zeros([WIDTH], tl.int64)
    kept = tl.zeros((), tl.int32)
    hope = tl.zeros((), tl.int32)
    live = tl.load(peer + PEER.LIVE, mask=there, other=0) != 0
    # Without a slot, for all of them owe.
    owes = (live & (slot < 0) & (barred == 0)).to(tl.int32)
    for i in tl.range(0, count):
        token = tl.zeros((), tl.int32) + i
        here = k < K
        was = tl.load(place + token * K + k, mask=here, other=-1)
        verdict = tl.load(asked + was * ASKED.WORDS + ASKED.VERDICT, mask=was >= 0, other=VERDICT.ARRIVED)
        expert = tl.load(ids + token * K + k, mask=here, other=-1)
        # Whoever was asked before may have answered after all.
        left, _ = asked_of(was, before, asked, token, attempt - 1, server, SERVERS, K, CAPACITY, WIDTH, WIDE)
        late = here & left & (verdict > VERDICT.ARRIVED)
        chosen = choose_servers(routes, layer, expert, late, grade, copy, LAYERS, EXPERTS, REPLICAS, WIDTH, WIDE)
        whose = (was % SERVERS)[:, None] == server[None, :]
        kept_here = late & (chosen < 0)
        later = choose_servers(routes, layer, expert, kept_here, owes, copy, LAYERS, EXPERTS, REPLICAS, WIDTH, WIDE)
        kept += tl.sum(kept_here.to(tl.int32), axis=0)
        hope |= tl.max((later >= 0).to(tl.int32), axis=0)
        moved += tl.sum((whose & (chosen >= 0)[:, None]).to(tl.int64), axis=0)
        # All threads have read the place before one writes it.
        tl.debug_barrier()
        tl.store(before + ((attempt - 1) * CAPACITY + token) * K + k, was, mask=chosen >= 0)
        tl.store(place + token * K + k, attempt * SERVERS + chosen, mask=chosen >= 0)
        send_row(
            rows, token, slot_at, chosen, number, incarnation,
            HIDDEN, K, ROWS_OUT, ROW_SEAL, ROW_STRIDE, ROWS_OFFSET, WIDTH, WIDE, TILE,
        )  # fmt: skip
        fold, pairs = list_row(slot_at, grade > 0, chosen, expert, token, count, K, WIDTH, WIDE)
        listed += fold
        counted += pairs
    send_headers(
        peers, copy, control, asked, sequence, slot_at, slot, counted, listed, layer, count, attempt, now,
        tl.load(control + CLIENT.DEADLINE_NS),
        SERVERS, WIDTH, K, HIDDEN, MODEL_HASH, ROWS_OUT, ROWS_OFFSET, ROW_STRIDE, REPLY_STRIDE,
    )  # fmt: skip
    return counted, moved, kept, hope


@triton.jit
def asked_of(
    at, before, asked, token, attempt, server,
    SERVERS: tl.constexpr, K: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of a token's pairs with these places: whether nobody has answered (bool [WIDE]), and whom they were asked of
    (int32 [WIDE, WIDTH])."""
    k = tl.arange(0, WIDE)
    left = at >= 0
    asks = tl.zeros([WIDE, WIDTH], tl.int32)
    for _ in tl.range(0, attempt + 1):
        verdict = tl.load(asked + at * ASKED.WORDS + ASKED.VERDICT, mask=at >= 0, other=VERDICT.NONE)
        left = left & (verdict != VERDICT.ARRIVED)
        asks |= ((at >= 0)[:, None] & ((at % SERVERS)[:, None] == server[None, :])).to(tl.int32)
        earlier = before + ((at // SERVERS - 1) * CAPACITY + token) * K + k
        at = tl.load(earlier, mask=at >= SERVERS, other=-1)
    return left, asks


@triton.jit
def unanswered(
    place, before, asked, count, attempt,
    SERVERS: tl.constexpr, K: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Which servers a pair was asked of that nobody has answered: bool [WIDTH]."""
    server = tl.arange(0, WIDTH)
    k = tl.arange(0, WIDE)
    found = tl.zeros([WIDTH], tl.int32)
    for i in tl.range(0, count):
        token = tl.zeros((), tl.int32) + i
        at = tl.load(place + token * K + k, mask=k < K, other=-1)
        left, asks = asked_of(at, before, asked, token, attempt, server, SERVERS, K, CAPACITY, WIDTH, WIDE)
        found |= tl.max(asks * left.to(tl.int32)[:, None], axis=0)
    return found > 0


@triton.jit
def find_answers(
    place, before, asked, count, attempt,
    SERVERS: tl.constexpr, K: tl.constexpr, CAPACITY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Let each pair's place be where it was answered: by whom it was asked of last, or else before."""
    k = tl.arange(0, WIDE)
    for i in tl.range(0, count):
        token = tl.zeros((), tl.int32) + i
        at = tl.load(place + token * K + k, mask=k < K, other=-1)
        for _ in tl.range(0, attempt):
            verdict = tl.load(asked + at * ASKED.WORDS + ASKED.VERDICT, mask=at >= 0, other=VERDICT.ARRIVED)
            back = (verdict != VERDICT.ARRIVED) & (at >= SERVERS)
            earlier = before + ((at // SERVERS - 1) * CAPACITY + token) * K + k
            at = tl.where(back, tl.load(earlier, mask=back, other=-1), at)
        tl.debug_barrier()
        tl.store(place + token * K + k, at, mask=k < K)
