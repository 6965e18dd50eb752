"""Waiting: for the replies of all servers that were asked; they are judged, and what failed or is late goes elsewhere.

Definition: wait for the signals that equal their requests' sequences, until each pair has an answer or the step waits
no longer. As `experts.gpu.patience` has it: past its first limit a server is late, and where credit is left its pairs
are sent to another replica as well (`redispatch`), in another slot; past its second it is suspect, and they are sent
at no cost. A reply's headers are copied, and the copy judged: magic, versions, incarnations, sequence, attempt,
lengths, the request's own checksum, layer, counts, status, and the frame's checksum over it all. What is not sound
makes its server suspect; it, and what is refused, is sent again as soon as all have come or one is late. At most ROUNDS
times in a call is anything sent again. Whichever sound reply comes first counts, a late one among them. A slot that
still owes its reply when the waiting is over is put aside until that was seen: by the next call, or by the host where
the reply was not sound. How long each reply took is counted, up to its server's second limit: one freeze does not
excuse the next. Answers are not looked at here: each has a seal of its own, checked by whoever adds it up.

Cost: two launches; when all have answered, one look at the signals, one at the headers, about 5 us on an H200.

Two kernels, for what waits must be small: `wait_kernel` is one warp of few registers. The redispatch takes up to half
the registers of a processor, and while it stood there no program that counts on its place beside a second one would:
of a grid of two programs on every processor the last two would begin when the others have ended, and take as long
again. So `wait_replies_kernel` comes when the first limit is over, and waits itself only for what is late.

Deadlock: each is one program; whatever it waits for may run on the other 131 processors, and beside the first. It
waits for no program of its own stream. Every wait ends by the device's clock. A server whose kernels run on the same
GPU must be on another stream, and be warmed up before: loading a kernel's code may wait until the device is idle.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from experts.gpu.pack import header_fold, header_words
from experts.gpu.redispatch import find_answers, send_again, unanswered
from experts.gpu.tables import ClientTables
from experts.gpu.words import ASKED, CLIENT, HEAD, PATIENCE, PEER, REPORT, SEEN, SLOT, STATUS, VERDICT, WIRE
from p2p.device import clock_ns, load_acquire, load_once, mix, pause_ns

_FIRST_PAUSE_NS = tl.constexpr(32)
_LAST_PAUSE_NS = tl.constexpr(2048)
_ONE_WARP = tl.constexpr(32)
# What a server's latest request has come to while it is awaited.
_IN_TIME = tl.constexpr(0)
_HEDGED = tl.constexpr(1)
_SUSPECT = tl.constexpr(2)


def wait_replies_reference(asked: Sequence[Sequence[int]], sound: set[tuple[int, int]]) -> list[int | None]:
    """The definition of which answer of each pair counts: the round.

    Args:
        asked: By pair, the servers that it was asked of, round by round.
        sound: Server and round of the replies that came and are sound.
    """
    return [next((n for n in range(len(servers) - 1, -1, -1) if (servers[n], n) in sound), None) for servers in asked]


def wait_replies(tables: ClientTables, layer: int, rows: torch.Tensor, ids: torch.Tensor, n_rows: torch.Tensor) -> None:
    """Wait for the replies to what `dispatch` sent with the same arguments."""
    wait_kernel[(1,)](
        tables.control, tables.asked, tables.limits, **tables.constants(wait_kernel.arg_names), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    wait_replies_kernel[(1,)](
        rows, ids, n_rows, tables.peers, tables.routes, tables.suspect, tables.owed, tables.sequence,
        tables.control, tables.place, tables.before, tables.asked, tables.limits, tables.took, tables.seen,
        tables.report.data_ptr(), layer,
        **tables.constants(wait_replies_kernel.arg_names), num_warps=tables.wait_warps, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def has_come(seen, number):
    """Whether a signal is that of the reply awaited."""
    return seen == number


@triton.jit
def size_of(pairs):
    """The size class of so many pairs, elementwise: int32."""
    size = (pairs * 0).to(tl.int32)
    for i in tl.static_range(PATIENCE.SIZES - 1):
        size += (pairs >= (PATIENCE.LEAST << i)).to(tl.int32)
    return size


@triton.jit
def note_times(took, server, pairs, ns, came):
    """Count how long the replies took, each in its quarter octave: what float32 says above its lower 21 bits."""
    fine = tl.minimum(tl.maximum(ns >> 12, 0), 0xFFFFFF).to(tl.float32).to(tl.int32, bitcast=True)
    step = tl.minimum(tl.maximum((fine >> 21) - 516, 0), PATIENCE.STEPS - 1)
    spot = took + (server * PATIENCE.SIZES + size_of(pairs)) * PATIENCE.STEPS + step
    tl.atomic_add(spot, (pairs * 0) + 1, mask=came, sem="relaxed")


@triton.jit
def due_ns(limits, control, server, there, pairs, sent_ns):
    """When each server is late and when it is suspect, by the device's clock: int64 [WIDTH] each."""
    row = limits + (server * PATIENCE.SIZES + size_of(pairs)) * 2
    most = tl.maximum((tl.load(control + CLIENT.END_NS) - sent_ns) // 4, 1)
    late = tl.minimum(tl.load(row, mask=there, other=0), most)
    suspect = tl.minimum(tl.load(row + 1, mask=there, other=0), most)
    return sent_ns + late, sent_ns + suspect


@triton.jit
def await_signals(row, wanted, waiting, until_ns, control, EACH: tl.constexpr, THREADS: tl.constexpr):
    """Wait until no reply is wanted, or one is and its time is over; those that came: bool [WIDTH].

    Args:
        row: Where in `asked` each server's latest request is noted.
        wanted, waiting: Whose reply some pair needs, and whose is out: bool [WIDTH].
        until_ns: By server, the device's clock at which the waiting ends for all.
        EACH: It ends with the first that comes.
    """
    number = tl.load(row + ASKED.SEQUENCE, mask=waiting, other=0)
    reply_at = tl.load(row + ASKED.REPLY, mask=waiting, other=0)
    sent_ns = tl.load(row + ASKED.SENT_NS, mask=waiting, other=0)
    # Not by whoever waited before.
    fresh = tl.load(row + ASKED.TOOK_NS, mask=waiting, other=0) == 0
    until_ns = tl.minimum(until_ns, tl.load(control + CLIENT.END_NS))
    out = waiting
    pause = tl.full((), _FIRST_PAUSE_NS, tl.int32)
    going = tl.max((out & wanted).to(tl.int32), axis=0)
    while going > 0:
        seen = load_acquire(reply_at.to(tl.pointer_type(tl.int64)), out)
        came = out & has_come(seen, number)
        now = clock_ns(control + CLIENT.CLOCK, THREADS)
        if tl.max(came.to(tl.int32), axis=0) > 0:
            tl.store(row + ASKED.TOOK_NS, now - sent_ns, mask=came & fresh)
            out = out & (came == 0)
            going = 0 if EACH else tl.max((out & wanted).to(tl.int32), axis=0)
        going = tl.where(tl.max((out & wanted & (now >= until_ns)).to(tl.int32), axis=0) > 0, 0, going)
        if going > 0:
            pause_ns(pause)
            pause = tl.minimum(pause * 2, _LAST_PAUSE_NS)
    # What one thread acquired, the others may read.
    tl.debug_barrier()
    return waiting & (out == 0)


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
    needed = tl.where(lane == HEAD.WIRE_LAYER, (number * 0 + layer | (number * 0 + rows) << 32)[:, None], needed)
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
def take_back(
    peers, suspect, owed, copy, SERVERS: tl.constexpr, SLOTS: tl.constexpr, REPLY_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, UNSOUND: tl.constexpr,
):  # fmt: skip
    """Free the slots whose late replies have come, UNSOUND ones too; trust servers that owe none any more."""
    server = tl.arange(0, WIDTH)
    there = server < SERVERS
    window = tl.load(peers + (copy * SERVERS + server) * PEER.WORDS + PEER.REPLY, mask=there, other=0)
    owes = tl.zeros([WIDTH], tl.int32)
    freed = tl.zeros([WIDTH], tl.int32)
    for slot in tl.static_range(SLOTS):
        number = tl.load(owed + server * SLOTS + slot, mask=there, other=0)
        number = tl.abs(number) if UNSOUND else number
        out = (number > 0) & (window != 0)
        seen = load_acquire((window + SLOT.FIRST + slot * REPLY_STRIDE).to(tl.pointer_type(tl.int64)), out)
        # The server's signal comes after all it writes there: it is done with the slot.
        came = out & (seen == number)
        tl.store(owed + server * SLOTS + slot, tl.zeros([WIDTH], tl.int64), mask=came)
        owes |= ((number != 0) & (came == 0)).to(tl.int32)
        freed |= came.to(tl.int32)
    tl.store(suspect + server, tl.zeros([WIDTH], tl.int64), mask=there & (freed != 0) & (owes == 0))


@triton.jit
def wait_kernel(control, asked, limits, SERVERS: tl.constexpr, WIDTH: tl.constexpr, LAYOUT: tl.constexpr):
    """Wait for the replies of a call's first round until something can be done, and do nothing else."""
    server = tl.arange(0, WIDTH)
    there = server < SERVERS
    row = asked + server * ASKED.WORDS
    asks = tl.load(row + ASKED.VERDICT, mask=there, other=VERDICT.NONE) == VERDICT.WAITING
    pairs = tl.load(row + ASKED.PAIRS, mask=there, other=0)
    sent_ns = tl.load(row + ASKED.SENT_NS, mask=there, other=0)
    late_ns, suspect_ns = due_ns(limits, control, server, there, pairs, sent_ns)
    paid = pairs * PATIENCE.COST <= earned(control, tl.sum(tl.where(asks, pairs, 0), axis=0))
    until_ns = tl.where(paid, late_ns, suspect_ns)
    await_signals(row, asks, asks, until_ns, control, False, _ONE_WARP)


@triton.jit
def earned(control, sent):
    """The credit of a client whose call sends that many pairs, int64."""
    credit = tl.load(control + CLIENT.CREDIT)
    return credit + tl.where(credit < PATIENCE.MOST * sent, PATIENCE.EARNED * sent, 0)


@triton.jit(do_not_specialize=["layer"])
def wait_replies_kernel(
    rows, ids, n_rows, peers, routes, suspect, owed, sequence, control, place, before, asked, limits, took, seen,
    report, layer,
    LAYERS: tl.constexpr, EXPERTS: tl.constexpr, REPLICAS: tl.constexpr, SERVERS: tl.constexpr, ROUNDS: tl.constexpr,
    HIDDEN: tl.constexpr, K: tl.constexpr, CAPACITY: tl.constexpr, SLOTS: tl.constexpr, ROWS_OUT: tl.constexpr,
    MODEL_HASH: tl.constexpr, ROW_SEAL: tl.constexpr, ROW_STRIDE: tl.constexpr,
    ROWS_OFFSET: tl.constexpr, ANSWER_STRIDE: tl.constexpr, REQUEST_STRIDE: tl.constexpr, REPLY_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, WAIT_THREADS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Judge the headers of a call's replies, and send again what is missing."""
    copy = tl.load(control + CLIENT.COPY)
    own = tl.load(control + CLIENT.INCARNATION)
    count = tl.load(n_rows)
    end_ns = tl.load(control + CLIENT.END_NS)
    server = tl.arange(0, WIDTH)
    there = server < SERVERS
    bit = tl.full([WIDTH], 1, tl.int64) << server
    told = report.to(tl.pointer_type(tl.int64))
    flags = told + REPORT.WORDS + server
    # Each server has at most one request out in a call: what it was asked last, in which round.
    asked_in = tl.zeros([WIDTH], tl.int32)
    row = asked + server * ASKED.WORDS
    waiting = tl.load(row + ASKED.VERDICT, mask=there, other=VERDICT.NONE) == VERDICT.WAITING
    wanted = waiting
    state = tl.zeros([WIDTH], tl.int32)
    in_vain = bit == 0
    barred = tl.zeros([WIDTH], tl.int32)
    slot = tl.load(row + ASKED.SLOT, mask=there, other=0).to(tl.int32)
    used = tl.where(waiting, 1 << tl.maximum(slot, 0), 0)
    credit = earned(control, tl.sum(tl.where(waiting, tl.load(row + ASKED.PAIRS, mask=there, other=0), 0), axis=0))
    retired = tl.zeros((), tl.int64)
    attempt = tl.zeros((), tl.int32)
    # Pairs of which a server failed or is late, and that nobody could take so far; and that somebody will who owes.
    kept = tl.zeros((), tl.int32)
    hope = tl.zeros((), tl.int32)
    going = tl.max(waiting.to(tl.int32), axis=0)
    while going > 0:
        row = asked + (asked_in * SERVERS + server) * ASKED.WORDS
        slot = tl.load(row + ASKED.SLOT, mask=there, other=0).to(tl.int32)
        number = tl.load(row + ASKED.SEQUENCE, mask=there, other=0)
        pairs = tl.load(row + ASKED.PAIRS, mask=there, other=0)
        sent_ns = tl.load(row + ASKED.SENT_NS, mask=there, other=0)
        late_ns, suspect_ns = due_ns(limits, control, server, there, pairs, sent_ns)
        paid = (state == _IN_TIME) & (pairs * PATIENCE.COST <= tl.where(attempt < ROUNDS, credit, -1))
        until_ns = tl.where(state == _SUSPECT, end_ns, tl.where(paid & (in_vain == 0), late_ns, suspect_ns))
        if hope > 0:
            # Nobody who is asked can tell when a slot is free again.
            pause_ns(tl.full((), _LAST_PAUSE_NS, tl.int32))
            until_ns = bit * 0
        came = await_signals(row, wanted, waiting, until_ns, control, True, WAIT_THREADS)
        verdict, service = judge_replies(
            tl.load(row + ASKED.REPLY, mask=there, other=0), came, number,
            tl.load(row + ASKED.INCARNATION, mask=there, other=0), tl.load(row + ASKED.CHECKSUM, mask=there, other=0),
            pairs, own, layer, count, asked_in,
            WIDTH, K, HIDDEN, MODEL_HASH, ANSWER_STRIDE,
        )  # fmt: skip
        waiting = waiting & (came == 0)
        failed = came & (verdict > VERDICT.ARRIVED)
        took_ns = tl.minimum(tl.load(row + ASKED.TOOK_NS, mask=there, other=0), suspect_ns - sent_ns)
        note_times(took, server, pairs, took_ns, came & (failed == 0))
        note_replies(seen, server, came & (failed == 0), pairs, service)
        corrupt = came & (verdict == VERDICT.CORRUPT)
        retired += tl.sum(corrupt.to(tl.int64), axis=0)
        tl.store(suspect + server, bit * 0 + 1, mask=corrupt)
        # Whoever wrote that may still be writing: only the host takes back what is owed with the other sign.
        tl.store(owed + server * SLOTS + slot, -number, mask=corrupt)
        known = tl.load(flags, mask=failed, other=0)
        tl.store(flags, known | (bit * 0 + 1 << verdict), mask=failed)
        some = tl.max(came.to(tl.int32), axis=0)
        tl.store(row + ASKED.VERDICT, verdict.to(tl.int64), mask=came)
        if (some > 0) & (attempt > 0):
            # What all threads noted is read by all below.
            tl.debug_barrier()
            wanted = unanswered(place, before, asked, count, attempt, SERVERS, K, CAPACITY, WIDTH, WIDE)
        now = clock_ns(control + CLIENT.CLOCK, WAIT_THREADS)
        silent = waiting & (state != _SUSPECT) & (now >= suspect_ns)
        hedged = wanted & waiting & paid & (now >= late_ns) & (silent == 0)
        cost = tl.where(hedged, pairs * PATIENCE.COST, 0)
        hedged = hedged & (tl.cumsum(cost, axis=0) <= credit)
        state = tl.where(silent, _SUSPECT, state)
        moves = failed | (wanted & (silent | hedged))
        tl.store(row + ASKED.VERDICT, bit * 0 + VERDICT.MISSING, mask=moves & waiting)
        barred |= failed.to(tl.int32)
        # Whoever answers has a slot for what was kept.
        some = tl.max(moves.to(tl.int32), axis=0) | tl.where(kept > 0, some, 0) | hope
        if (some > 0) & (attempt < ROUNDS) & (now < end_ns):
            # What all threads noted is read by all below.
            tl.debug_barrier()
            take_back(peers, suspect, owed, copy, SERVERS, SLOTS, REPLY_STRIDE, WIDTH, False)
            tl.debug_barrier()
            counted, moved, kept, hope = send_again(
                rows, ids, peers, routes, suspect, owed, sequence, control, place, before, asked, layer, count,
                copy, attempt + 1, now, barred, waiting, used,
                LAYERS, EXPERTS, REPLICAS, SERVERS, HIDDEN, K, CAPACITY, SLOTS, ROWS_OUT, MODEL_HASH, ROW_SEAL,
                ROW_STRIDE, ROWS_OFFSET, REQUEST_STRIDE, REPLY_STRIDE, WIDTH, WIDE, TILE,
            )  # fmt: skip
            sent = tl.sum(counted, axis=0)
            if sent > 0:
                tl.store(told + REPORT.REDISPATCHED, tl.load(told + REPORT.REDISPATCHED) + sent)
                attempt += 1
                credit -= tl.sum(tl.where(hedged, moved, 0), axis=0) * PATIENCE.COST
                asks = counted > 0
                state = tl.where(asks, _IN_TIME, tl.where(hedged, _HEDGED, state))
                asked_in = tl.where(asks, attempt, asked_in)
                again = asked + (attempt * SERVERS + server) * ASKED.WORDS
                slot = tl.load(again + ASKED.SLOT, mask=asks, other=0).to(tl.int32)
                used |= tl.where(asks, 1 << tl.maximum(slot, 0), 0)
                waiting = waiting | asks
                wanted = wanted | asks
            # Nobody has room for these pairs before somebody answers.
            in_vain = waiting & paid & (now >= late_ns) & (moved == 0)
            hedged = hedged & in_vain
            state = tl.where(hedged, _IN_TIME, state)
            again = asked + (asked_in * SERVERS + server) * ASKED.WORDS
            tl.store(again + ASKED.VERDICT, bit * 0 + VERDICT.WAITING, mask=hedged)
            tl.debug_barrier()
        hope = tl.where(attempt < ROUNDS, hope, 0)
        going = tl.max((wanted & waiting).to(tl.int32), axis=0) | hope
        going = tl.where(now < end_ns, going, 0)
    tl.store(control + CLIENT.CREDIT, credit)
    row = asked + (asked_in * SERVERS + server) * ASKED.WORDS
    slot = tl.load(row + ASKED.SLOT, mask=there, other=0).to(tl.int32)
    tl.store(row + ASKED.VERDICT, bit * 0 + VERDICT.MISSING, mask=waiting)
    # A late reply may land there at any time.
    tl.store(owed + server * SLOTS + slot, tl.load(row + ASKED.SEQUENCE, mask=there, other=0), mask=waiting)
    pairs = tl.load(row + ASKED.PAIRS, mask=there, other=0)
    sent_ns = tl.load(row + ASKED.SENT_NS, mask=there, other=0)
    # It takes at least as long, where that says anything.
    now = clock_ns(control + CLIENT.CLOCK, WAIT_THREADS)
    late_ns, suspect_ns = due_ns(limits, control, server, there, pairs, sent_ns)
    note_times(took, server, pairs, tl.minimum(now, suspect_ns) - sent_ns, waiting & (now >= late_ns))
    lost = waiting & (state == _SUSPECT)
    tl.store(suspect + server, bit * 0 + 1, mask=lost)
    known = tl.load(flags, mask=lost, other=0)
    tl.store(flags, known | (bit * 0 + 1 << VERDICT.MISSING), mask=lost)
    retired += tl.sum(waiting.to(tl.int64), axis=0)
    tl.store(told + REPORT.RETIRED, tl.load(told + REPORT.RETIRED) + retired)
    # What all threads noted is read by all below.
    tl.debug_barrier()
    if attempt > 0:
        find_answers(place, before, asked, count, attempt, SERVERS, K, CAPACITY, WIDE)
    take_back(peers, suspect, owed, copy, SERVERS, SLOTS, REPLY_STRIDE, WIDTH, False)
