"""Waiting: for the replies of all servers that were asked; they are judged, and what failed is redispatched.

Definition: wait until the signal of every server asked equals its request's sequence, at most the client's patience and
never past the step's deadline; where a pair that is still missing could be asked of nobody else, as long again as
the client waits for such a one. Copy each reply's headers, then judge the copy: magic, versions, incarnations,
sequence, attempt, lengths, the request's own checksum, layer, counts, status, and the frame's checksum over it all. A
server that did not answer, or not soundly, becomes suspect and its slot owes a reply: neither is used again before the
host says so. What failed is sent again (`redispatch`), at most ROUNDS times. Answers are not looked at here: each has a
seal of its own, checked by whoever adds it up.

Cost: two launches; when all have answered, one look at the signals, one at the headers, about 5 us on an H200.

Two kernels, for what waits must be small: `wait_kernel` is one warp of few registers. The redispatch takes nearly all
registers of a processor, and while it stood there no program that counts on its place beside a second one would:
of a grid of two programs on every processor the last two would begin when the others have ended, and take as long
again. So `wait_replies_kernel` comes when the waiting is over, and waits itself only where something failed.

Deadlock: each is one program; whatever it waits for may run on the other 131 processors, and beside the first. It
waits for no program of its own stream. Every wait ends by the device's clock. A server whose kernels run on the same
GPU must be on another stream, and be warmed up before: loading a kernel's code may wait until the device is idle.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from experts.gpu.layout import Verdict
from experts.gpu.pack import header_fold, header_words
from experts.gpu.redispatch import send_again, stranded
from experts.gpu.tables import ClientTables
from experts.gpu.words import ASKED, CLIENT, HEAD, REPORT, SEEN, STATUS, VERDICT, WIRE
from p2p.device import clock_ns, load_acquire, load_once, mix, pause_ns

_FIRST_PAUSE_NS = tl.constexpr(32)
_LAST_PAUSE_NS = tl.constexpr(2048)
_ONE_WARP = tl.constexpr(32)


def wait_replies_reference(verdicts: Sequence[Mapping[int, Verdict]], rounds: int) -> bool:
    """Whether a call is sent again, given the verdicts on each round's servers so far."""
    failed = [verdict for verdict in verdicts[-1].values() if verdict > Verdict.ARRIVED]
    return bool(failed) and len(verdicts) <= rounds


def wait_replies(
    tables: ClientTables,
    layer: int,
    rows: torch.Tensor,
    ids: torch.Tensor,
    n_rows: torch.Tensor,
) -> None:
    """Wait for the replies to what `dispatch` sent with the same arguments."""
    wait_kernel[(1,)](
        tables.control, tables.asked, **tables.constants(wait_kernel.arg_names), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    wait_replies_kernel[(1,)](
        rows, ids, n_rows, tables.peers, tables.routes, tables.suspect, tables.owed, tables.sequence,
        tables.control, tables.place, tables.asked, tables.seen, tables.report.data_ptr(), layer,
        **tables.constants(wait_replies_kernel.arg_names), num_warps=tables.wait_warps, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def has_come(seen, number):
    """Whether a signal is that of the reply awaited."""
    return seen == number


@triton.jit
def await_signals(reply_at, number, waiting, longest_ns, control, THREADS: tl.constexpr):
    """Wait for the signals of the servers where `waiting`; where it still is when the time is over.

    Args:
        longest_ns: That it waits, int64; 0: it only looks.
    """
    start = clock_ns(control + CLIENT.CLOCK, THREADS)
    limit = tl.minimum(tl.load(control + CLIENT.DEADLINE_NS) - start, longest_ns)
    pause = tl.full((), _FIRST_PAUSE_NS, tl.int32)
    going = tl.max(waiting.to(tl.int32), axis=0)
    while going > 0:
        seen = load_acquire(reply_at.to(tl.pointer_type(tl.int64)), waiting)
        waiting = waiting & (has_come(seen, number) == 0)
        left = tl.max(waiting.to(tl.int32), axis=0)
        late = clock_ns(control + CLIENT.CLOCK, THREADS) - start >= limit
        going = tl.where(late, 0, left)
        if going > 0:
            pause_ns(pause)
            pause = tl.minimum(pause * 2, _LAST_PAUSE_NS)
    # What one thread acquired, the others may read.
    tl.debug_barrier()
    return waiting


@triton.jit
def judge_replies(
    reply_at, arrived, number, incarnation, checksum, pairs, own, layer, rows, attempt,
    WIDTH: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, MODEL_HASH: tl.constexpr,
    ANSWER_STRIDE: tl.constexpr,
):  # fmt: skip
    """Verdicts on the headers of the replies that arrived, int32 [WIDTH], and the times that they say, int64."""
    lane = tl.arange(0, 16)[None, :]
    # The copy: each word is read once, and the same for all threads.
    words = load_once(header_words(reply_at[:, None], lane), arrived[:, None] & (lane < 16))
    status = tl.sum(tl.where(lane == HEAD.WIRE_DTYPE, (words >> 16) & 0xFFFF, 0), axis=1)
    bare = (status == STATUS.INVALID)[:, None]
    length = tl.where(status == STATUS.OK, number * 0 + rows * K * ANSWER_STRIDE, 0) + WIRE.BYTES
    needed = tl.where(lane == HEAD.MAGIC, WIRE.FRAME_WORD, words * 0)
    needed = tl.where(lane == HEAD.INCARNATION, own, needed)
    needed = tl.where(lane == HEAD.SEQUENCE, number[:, None], needed)
    needed = tl.where(lane == HEAD.ATTEMPT, (attempt | length << 32)[:, None], needed)
    needed = tl.where(lane == HEAD.SENDER, incarnation[:, None], needed)
    needed = tl.where(lane == HEAD.COVERED, WIRE.BYTES, needed)
    needed = tl.where(lane == HEAD.WIRE_MAGIC, WIRE.REPLY_WORD, needed)
    needed = tl.where(lane == HEAD.WIRE_MODEL_HASH, MODEL_HASH, needed)
    needed = tl.where(lane == HEAD.WIRE_ROUTING_HASH, checksum[:, None], needed)
    needed = tl.where(
        lane == HEAD.WIRE_LAYER, (number * 0 + layer | (number * 0 + rows) << 32)[:, None], needed
    )
    needed = tl.where(lane == HEAD.WIRE_PAIRS, (pairs | number * 0 + (HIDDEN << 32))[:, None], needed)
    needed = tl.where(lane == HEAD.WIRE_DTYPE, (status << 16 | WIRE.ANSWERS)[:, None], needed)
    sums = tl.sum(header_fold(words, lane, number[:, None] * 0 + 1), axis=1)
    needed = tl.where(lane == HEAD.CHECKSUM, mix(sums).to(tl.int64)[:, None], needed)
    # A server that could not read the request repeats nothing of it.
    free = (lane == HEAD.WIRE_SERVICE_NS) | (bare & ((lane == HEAD.ATTEMPT) | ((lane >= 9) & (lane < 15))))
    sound = tl.min((free | same_words(words, needed)).to(tl.int32), axis=1) != 0
    answered = tl.where(status == STATUS.OK, VERDICT.ARRIVED, VERDICT.REFUSED)
    service = tl.sum(tl.where(lane == HEAD.WIRE_SERVICE_NS, words, 0), axis=1)
    return tl.where(sound & (status <= STATUS.INVALID), answered, VERDICT.CORRUPT), service


@triton.jit
def note_replies(seen, server, came, pairs, service):
    """Add to what is known of the servers whose answers came: nobody waits for it."""
    row = seen + server * SEEN.WORDS
    replies = tl.load(row + SEEN.REPLIES, mask=came, other=0)
    total = tl.load(row + SEEN.PAIRS, mask=came, other=0)
    took = tl.load(row + SEEN.SERVICE_NS, mask=came, other=0)
    # Several threads hold each number: all have read it before one writes it.
    tl.debug_barrier()
    tl.store(row + SEEN.REPLIES, replies + 1, mask=came)
    tl.store(row + SEEN.PAIRS, total + pairs, mask=came)
    tl.store(row + SEEN.SERVICE_NS, took + service, mask=came)


@triton.jit
def same_words(words, needed):
    """Whether header words are what they must be, elementwise."""
    return words == needed


@triton.jit
def wait_kernel(control, asked, SERVERS: tl.constexpr, WIDTH: tl.constexpr, LAYOUT: tl.constexpr):
    """Wait for the replies of a call's first round, and do nothing else."""
    server = tl.arange(0, WIDTH)
    there = server < SERVERS
    row = asked + server * ASKED.WORDS
    asks = tl.load(row + ASKED.VERDICT, mask=there, other=VERDICT.NONE) == VERDICT.WAITING
    number = tl.load(row + ASKED.SEQUENCE, mask=there, other=0)
    reply_at = tl.load(row + ASKED.REPLY, mask=there, other=0)
    await_signals(reply_at, number, asks, tl.load(control + CLIENT.PATIENCE_NS), control, _ONE_WARP)


@triton.jit(do_not_specialize=["layer"])
def wait_replies_kernel(
    rows, ids, n_rows, peers, routes, suspect, owed, sequence, control, place, asked, seen, report, layer,
    LAYERS: tl.constexpr, EXPERTS: tl.constexpr, REPLICAS: tl.constexpr, SERVERS: tl.constexpr, ROUNDS: tl.constexpr,
    HIDDEN: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, ROWS_OUT: tl.constexpr,
    MODEL_HASH: tl.constexpr, ROW_SEAL: tl.constexpr, ROW_STRIDE: tl.constexpr,
    ROWS_OFFSET: tl.constexpr, ANSWER_STRIDE: tl.constexpr, REQUEST_STRIDE: tl.constexpr, REPLY_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, WAIT_THREADS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Judge the headers of a call's replies, and send again what is missing."""
    copy = tl.load(control + CLIENT.COPY)
    own = tl.load(control + CLIENT.INCARNATION)
    count = tl.load(n_rows)
    server = tl.arange(0, WIDTH)
    there = server < SERVERS
    told = report.to(tl.pointer_type(tl.int64))
    barred = tl.zeros([WIDTH], tl.int32)
    used = tl.zeros([WIDTH], tl.int32)
    attempt = tl.zeros((), tl.int32)
    going = tl.full((), 1, tl.int32)
    # The first round has been waited for.
    longest_ns = tl.zeros((), tl.int64)
    while going > 0:
        row = asked + (attempt * SERVERS + server) * ASKED.WORDS
        before = tl.load(row + ASKED.VERDICT, mask=there, other=VERDICT.NONE)
        slot = tl.load(row + ASKED.SLOT, mask=there, other=0).to(tl.int32)
        number = tl.load(row + ASKED.SEQUENCE, mask=there, other=0)
        reply_at = tl.load(row + ASKED.REPLY, mask=there, other=0)
        asks = before == VERDICT.WAITING
        used |= tl.where(asks, 1 << tl.maximum(slot, 0), 0)
        missing = await_signals(reply_at, number, asks, longest_ns, control, WAIT_THREADS)
        longest_ns = tl.load(control + CLIENT.PATIENCE_NS)
        alone = tl.max(missing.to(tl.int32), axis=0)
        if (alone > 0) & (attempt < ROUNDS):
            alone = stranded(
                ids, peers, routes, suspect, owed, place, layer, count, copy, attempt, missing, barred, used,
                LAYERS, EXPERTS, REPLICAS, SERVERS, K, SLOTS, WIDTH, WIDE,
            )  # fmt: skip
        if alone > 0:
            # Without it the call is lost, whoever else is asked.
            missing = await_signals(
                reply_at, number, missing, tl.load(control + CLIENT.ALONE_NS), control, WAIT_THREADS
            )
        pairs = tl.load(row + ASKED.PAIRS, mask=there, other=0)
        verdict, service = judge_replies(
            reply_at, asks & (missing == 0), number,
            tl.load(row + ASKED.INCARNATION, mask=there, other=0), tl.load(row + ASKED.CHECKSUM, mask=there, other=0),
            pairs, own, layer, count, attempt,
            WIDTH, K, HIDDEN, MODEL_HASH, ANSWER_STRIDE,
        )  # fmt: skip
        verdict = tl.where(asks, tl.where(missing, VERDICT.MISSING, verdict), VERDICT.NONE)
        tl.store(row + ASKED.VERDICT, verdict.to(tl.int64), mask=there)
        note_replies(seen, server, verdict == VERDICT.ARRIVED, pairs, service)
        failed = verdict > VERDICT.ARRIVED
        barred |= failed.to(tl.int32)
        going = tl.max(failed.to(tl.int32), axis=0)
        if going > 0:
            lost = verdict > VERDICT.REFUSED
            tl.store(suspect + server, tl.full([WIDTH], 1, tl.int64), mask=lost)
            # A late reply may land there at any time.
            tl.store(owed + server * SLOTS + slot, number, mask=lost)
            flags = told + REPORT.WORDS + server
            known = tl.load(flags, mask=failed, other=0)
            tl.store(flags, known | (tl.full([WIDTH], 1, tl.int64) << verdict), mask=failed)
            tl.store(
                told + REPORT.RETIRED, tl.load(told + REPORT.RETIRED) + tl.sum(lost.to(tl.int64), axis=0)
            )
            # What all threads noted is read by all below.
            tl.debug_barrier()
            attempt += 1
            going = tl.zeros((), tl.int32)
            if attempt <= ROUNDS:
                now = clock_ns(control + CLIENT.CLOCK, WAIT_THREADS)
                sent = send_again(
                    rows, ids, peers, routes, suspect, owed, sequence, control, place, asked, layer, count,
                    copy, attempt, now, barred, used,
                    LAYERS, EXPERTS, REPLICAS, SERVERS, HIDDEN, K, SLOTS, ROWS_OUT, MODEL_HASH, ROW_SEAL, ROW_STRIDE,
                    ROWS_OFFSET, REQUEST_STRIDE, REPLY_STRIDE, WIDTH, WIDE, TILE,
                )  # fmt: skip
                tl.store(told + REPORT.REDISPATCHED, tl.load(told + REPORT.REDISPATCHED) + sent)
                going = (sent > 0).to(tl.int32)
