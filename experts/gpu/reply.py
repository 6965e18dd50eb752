"""Replying: each answer sealed into its client's window, a request's headers and signal when its last answer is there.

Definition: pair p of the batch, listed by client c at place i of request q: the words of out[p], then their seal, to
answer i of q's reply slot. The program that answers the last pair of a request writes the reply's headers, releases its
signal and marks it answered; once the lease has ended, by the device's own clock, only the headers: should the lease go
on, a later pass takes the request again. A request whose status is not OK gets headers alone. The last program of all
ends the pass: it clears the batch, counts the pass and how long it was busy, and tells the host, who never has to ask.

Cost: reads and writes one row of each pair. 1,024 pairs of 7,168 bf16: 14.7 MB read, 14.8 written: 6.9 us at an H200's
copy rate; with the launch, two fences and the signal about 9 us.

Nothing waits here: PROGRAMS on a processor take one pair after another, and the last one does what is left.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from experts.gpu.layout import row_warps
from experts.gpu.pack import write_header
from experts.gpu.tables import ServerTables, check_tensor
from experts.gpu.tiles import programs
from experts.gpu.words import COUNT, HOST, JOB, SERVER, SLOT, STATUS, WIRE
from p2p.device import clock_ns, folded, is_last, lease_clock_ns, load_once, put, row_stamp, ship, signal

PROGRAMS = 4  # of each processor, so that loads of one are under way while another waits

_NEVER = tl.constexpr(0x7FFFFFFFFFFFFFFF)


def reply_reference(out: torch.Tensor, origin: torch.Tensor, answers: torch.Tensor) -> None:
    """The definition of where answers go: out [P, hidden], origin int32 [P], answers [client, place, hidden] flat."""
    answers.view(-1, out.shape[1])[origin.long()] = out


def reply(tables: ServerTables, out: torch.Tensor) -> None:
    """Answer the requests that `poll` found, and end the pass.

    Args:
        out: bf16 [pairs of a pass, hidden].

    Raises:
        ValueError: a shape or type does not fit.
    """
    shape = tables.shape
    check_tensor("out", out, torch.bfloat16, (tables.pairs, shape.hidden))
    warps = row_warps(shape.answer_words)
    reply_kernel[(max(tables.clients, programs(out.device, PROGRAMS)),)](
        out.view(torch.int32), tables.control, tables.jobs, tables.origin, tables.n_pairs, tables.counts,
        **tables.constants(reply_kernel.arg_names), THREADS=32 * warps, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def status_of(job):
    """A request's status, now that its rows have been looked at."""
    return tl.where(tl.load(job + JOB.BAD) != 0, STATUS.INVALID, tl.load(job + JOB.STATUS))


@triton.jit
def answer_request(
    job, control,
    K: tl.constexpr, HIDDEN: tl.constexpr, MODEL_HASH: tl.constexpr,
    ANSWER_STRIDE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Write a reply's headers and release its signal: all its answers are there."""
    lease_ns = load_once(control + SERVER.LEASE_NS)
    status = status_of(job)
    sequence = tl.load(job + JOB.SEQUENCE)
    rows = tl.load(job + JOB.ROWS)
    at = tl.load(job + JOB.REPLY)
    one = sequence * 0
    length = tl.where(status == STATUS.OK, rows * K * ANSWER_STRIDE, 0) + WIRE.BYTES
    service_ns = clock_ns(control + SERVER.CLOCK, THREADS) - tl.load(job + JOB.PICKED_NS)
    write_header(
        at, one == 0, one + WIRE.REPLY, tl.load(job + JOB.CLIENT), sequence, tl.load(job + JOB.ATTEMPT), length, one,
        tl.load(control + SERVER.INCARNATION), one + WIRE.BYTES, one + 1, one.to(tl.uint64),
        tl.load(job + JOB.CHECKSUM), tl.load(job + JOB.LAYER), rows, tl.load(job + JOB.PAIRS),
        status << 16 | WIRE.ANSWERS, service_ns, HIDDEN, MODEL_HASH,
    )  # fmt: skip
    if lease_ns > lease_clock_ns(THREADS):
        # Last: the client may read the reply as soon as it changes.
        signal(at, sequence, at != 0)
        tl.store(tl.load(job + JOB.MARK).to(tl.pointer_type(tl.int64)), sequence)


@triton.jit
def count_pass(jobs, counts, control, host, CLIENTS: tl.constexpr, CLIENTS_WIDE: tl.constexpr, THREADS: tl.constexpr):
    """Add a pass that had requests to the counters, and copy them to the host. One program, after all others."""
    client = tl.arange(0, CLIENTS_WIDE)
    job = jobs + client * JOB.WORDS
    busy = tl.load(job + JOB.STATE, mask=client < CLIENTS, other=0) != 0
    began = tl.min(tl.load(job + JOB.PICKED_NS, mask=busy, other=_NEVER), axis=0)
    if tl.max(busy.to(tl.int32), axis=0) > 0:
        took = clock_ns(control + SERVER.CLOCK, THREADS) - began
        word = tl.arange(0, COUNT.WORDS)
        found = tl.load(counts + word)
        found += tl.where(word == COUNT.BUSY_NS, took, 0) + tl.where(word == COUNT.BATCHES, 1, 0)
        # Several threads hold each word: all have read it before one writes it.
        tl.debug_barrier()
        tl.store(counts + word, found)
        tl.store(host + HOST.COUNTS + word, found)


@triton.jit
def reply_kernel(
    out, control, jobs, origin, n_pairs, counts,
    CLIENTS: tl.constexpr, CLIENTS_WIDE: tl.constexpr, HIDDEN: tl.constexpr, K: tl.constexpr, CAPACITY: tl.constexpr,
    MODEL_HASH: tl.constexpr, ANSWER_SEAL: tl.constexpr, ANSWER_STRIDE: tl.constexpr,
    ANSWER_TILE: tl.constexpr, THREADS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Seal answers into clients' windows; the last of a request signals."""
    program = tl.program_id(0)
    total = tl.load(n_pairs)
    index = tl.arange(0, ANSWER_TILE)
    answer_words: tl.constexpr = HIDDEN // 2
    for number in tl.range(program, total, tl.num_programs(0)):
        pair = tl.zeros((), tl.int64) + number
        listed = tl.load(origin + pair)
        client = listed // (CAPACITY * K)
        place = listed % (CAPACITY * K)
        job = jobs + client * JOB.WORDS
        words = tl.load(out + pair * answer_words + index, mask=index < answer_words, other=0)
        words = words.to(tl.uint32, bitcast=True)
        if status_of(job) == STATUS.OK:
            at = tl.load(job + JOB.REPLY) + SLOT.LIST + place.to(tl.int64) * ANSWER_STRIDE
            put(at, index, words, index < answer_words)
            stamp = row_stamp(tl.load(job + JOB.SEQUENCE), tl.load(job + JOB.CLIENT), place)
            put(at, ANSWER_SEAL // 8, tl.sum(folded(words, index, place), axis=0) + stamp)
            ship(at, at != 0, ANSWER_SEAL + 8)
        if is_last(job + JOB.ANSWERED, tl.load(job + JOB.PAIRS)):
            answer_request(job, control, K, HIDDEN, MODEL_HASH, ANSWER_STRIDE, THREADS)
    if program < CLIENTS:
        job = jobs + program * JOB.WORDS
        # A request whose header could not be believed has no pairs.
        if (tl.load(job + JOB.STATE) != 0) & (tl.load(job + JOB.PAIRS) == 0):
            answer_request(job, control, K, HIDDEN, MODEL_HASH, ANSWER_STRIDE, THREADS)
    if is_last(control + SERVER.ARRIVALS, tl.num_programs(0)):
        tl.store(n_pairs, 0)
        passes = tl.load(control + SERVER.PASS) + 1
        # All threads have read it before one writes it.
        tl.debug_barrier()
        tl.store(control + SERVER.PASS, passes)
        host = tl.load(control + SERVER.HOST).to(tl.pointer_type(tl.int64))
        count_pass(jobs, counts, control, host, CLIENTS, CLIENTS_WIDE, THREADS)
        tl.store(host + HOST.CLOCK_NS, tl.zeros((), tl.int64) + lease_clock_ns(THREADS))
        tl.store(host, passes)
