"""Replying: each answer sealed into its client's window, a request's headers and signal when its last answer is there.

Definition: pair p of the batch, listed by client c at place i of request q: the words of out[p], then their seal, to
answer i of q's reply slot. The program that answers the last pair of a request writes the reply's headers and releases
its signal. A request whose status is not OK gets headers alone. The last program of all ends the pass: it clears the
batch, counts the pass and how long it was busy, and tells the host, who never has to ask.

Cost: reads and writes one row of each pair. 1,024 pairs of 7,168 bf16: 14.7 MB read, 14.8 written: 6.9 us at an H200's
copy rate; with the launch, two fences and the signal about 9 us.

Nothing waits here: PROGRAMS on a processor take one pair after another, and the last one does what is left.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from experts.gpu.layout import (
    PAYLOAD,
    REPLY,
    WIRE_BYTES,
    CountWord,
    HostWord,
    JobWord,
    RowsBack,
    ServerWord,
    Status,
    row_warps,
)
from experts.gpu.pack import store_seal, write_header
from experts.gpu.tables import ServerTables
from experts.gpu.tiles import programs
from p2p.device import clock_ns, folded, is_last, row_stamp, store_release

PROGRAMS = 4  # of each processor, so that loads of one are under way while another waits

_PASS = tl.constexpr(int(ServerWord.PASS))
_ARRIVALS = tl.constexpr(int(ServerWord.ARRIVALS))
_CLOCK = tl.constexpr(int(ServerWord.CLOCK))
_HOST = tl.constexpr(int(ServerWord.HOST))
_OWN = tl.constexpr(int(ServerWord.INCARNATION))
_JOB_WORDS = tl.constexpr(int(JobWord.WORDS))
_J_STATE = tl.constexpr(int(JobWord.STATE))
_J_STATUS = tl.constexpr(int(JobWord.STATUS))
_J_REPLY = tl.constexpr(int(JobWord.REPLY))
_J_SEQUENCE = tl.constexpr(int(JobWord.SEQUENCE))
_J_ATTEMPT = tl.constexpr(int(JobWord.ATTEMPT))
_J_ROWS = tl.constexpr(int(JobWord.ROWS))
_J_PAIRS = tl.constexpr(int(JobWord.PAIRS))
_J_LAYER = tl.constexpr(int(JobWord.LAYER))
_J_CHECKSUM = tl.constexpr(int(JobWord.CHECKSUM))
_J_CLIENT = tl.constexpr(int(JobWord.CLIENT))
_J_PICKED = tl.constexpr(int(JobWord.PICKED_NS))
_J_ANSWERED = tl.constexpr(int(JobWord.ANSWERED))
_J_BAD = tl.constexpr(int(JobWord.BAD))
_BUSY = tl.constexpr(int(CountWord.BUSY_NS))
_BATCHES = tl.constexpr(int(CountWord.BATCHES))
_COUNT_WORDS = tl.constexpr(int(CountWord.WORDS))
_HOST_COUNTS = tl.constexpr(int(HostWord.COUNTS))
_NEVER = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_OK = tl.constexpr(int(Status.OK))
_INVALID = tl.constexpr(int(Status.INVALID))
_BF16_BACK = tl.constexpr(int(RowsBack.BF16))
_REPLY_KIND = tl.constexpr(REPLY)
_WIRE_BYTES = tl.constexpr(WIRE_BYTES)
_ANSWERS = tl.constexpr(PAYLOAD + WIRE_BYTES)


def reply_reference(out: torch.Tensor, origin: torch.Tensor, answers: torch.Tensor) -> None:
    """The definition of where answers go: out [P, hidden], origin int32 [P], answers [client, place, hidden] flat."""
    answers.view(-1, out.shape[1])[origin.long()] = out


def reply(tables: ServerTables, out: torch.Tensor) -> None:
    """Answer the requests that `take` found, and end the pass.

    Args:
        out: [pairs of a pass, hidden], bf16 or float32 as rows go back.

    Raises:
        ValueError: a shape or type does not fit.
    """
    shape = tables.shape
    dtype = torch.bfloat16 if shape.rows_back is RowsBack.BF16 else torch.float32
    needed = (tables.pairs, shape.hidden)
    if out.dtype != dtype or tuple(out.shape) != needed or not out.is_contiguous():
        raise ValueError(f"out: found {out.dtype} {tuple(out.shape)}, needed {dtype} {needed}, contiguous.")
    warps = row_warps(shape.answer_words)
    reply_kernel[(max(tables.clients, programs(out.device, PROGRAMS)),)](
        out.view(torch.int32), tables.control, tables.jobs, tables.origin, tables.n_pairs, tables.counts,
        **tables.constants(reply_kernel.arg_names), THREADS=32 * warps, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def status_of(job):
    """A request's status, now that its rows have been looked at."""
    return tl.where(tl.load(job + _J_BAD) != 0, _INVALID, tl.load(job + _J_STATUS))


@triton.jit
def answer_request(
    job, control,
    K: tl.constexpr, HIDDEN: tl.constexpr, MODEL_HASH: tl.constexpr, ROWS_BACK: tl.constexpr,
    ANSWER_STRIDE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Write a reply's headers and release its signal: all its answers are there."""
    status = status_of(job)
    sequence = tl.load(job + _J_SEQUENCE)
    rows = tl.load(job + _J_ROWS)
    at = tl.load(job + _J_REPLY)
    one = sequence * 0
    length = tl.where(status == _OK, rows * K * ANSWER_STRIDE, 0) + _WIRE_BYTES
    service_ns = clock_ns(control + _CLOCK, THREADS) - tl.load(job + _J_PICKED)
    write_header(
        at, one == 0, one + _REPLY_KIND, tl.load(job + _J_CLIENT), sequence, tl.load(job + _J_ATTEMPT), length, one,
        tl.load(control + _OWN), one + _WIRE_BYTES, one + 1, one.to(tl.uint64), tl.load(job + _J_CHECKSUM),
        tl.load(job + _J_LAYER), rows, tl.load(job + _J_PAIRS), ROWS_BACK | status << 16, service_ns,
        HIDDEN, MODEL_HASH,
    )  # fmt: skip
    # One thread signals for what all threads stored.
    tl.debug_barrier()
    # Signal last: the client may read the reply as soon as it changes.
    store_release(at.to(tl.pointer_type(tl.int64)), sequence)


@triton.jit
def count_pass(
    jobs, counts, control, host, CLIENTS: tl.constexpr, CLIENTS_WIDE: tl.constexpr, THREADS: tl.constexpr
):
    """Add a pass that had requests to the counters, and copy them to the host. One program, after all others."""
    client = tl.arange(0, CLIENTS_WIDE)
    job = jobs + client * _JOB_WORDS
    busy = tl.load(job + _J_STATE, mask=client < CLIENTS, other=0) != 0
    began = tl.min(tl.load(job + _J_PICKED, mask=busy, other=_NEVER), axis=0)
    if tl.max(busy.to(tl.int32), axis=0) > 0:
        took = clock_ns(control + _CLOCK, THREADS) - began
        word = tl.arange(0, _COUNT_WORDS)
        found = tl.load(counts + word)
        found += tl.where(word == _BUSY, took, 0) + tl.where(word == _BATCHES, 1, 0)
        # Several threads hold each word: all have read it before one writes it.
        tl.debug_barrier()
        tl.store(counts + word, found)
        tl.store(host + _HOST_COUNTS + word, found)


@triton.jit
def reply_kernel(
    out, control, jobs, origin, n_pairs, counts,
    CLIENTS: tl.constexpr, CLIENTS_WIDE: tl.constexpr, HIDDEN: tl.constexpr, K: tl.constexpr, CAPACITY: tl.constexpr,
    MODEL_HASH: tl.constexpr, ROWS_BACK: tl.constexpr, ANSWER_SEAL: tl.constexpr, ANSWER_STRIDE: tl.constexpr,
    ANSWER_TILE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Seal answers into clients' windows; the last of a request signals."""
    program = tl.program_id(0)
    total = tl.load(n_pairs)
    index = tl.arange(0, ANSWER_TILE)
    answer_words: tl.constexpr = HIDDEN // 2 if ROWS_BACK == _BF16_BACK else HIDDEN
    for number in tl.range(program, total, tl.num_programs(0)):
        pair = tl.zeros((), tl.int64) + number
        listed = tl.load(origin + pair)
        client = listed // (CAPACITY * K)
        place = listed % (CAPACITY * K)
        job = jobs + client * _JOB_WORDS
        words = tl.load(out + pair * answer_words + index, mask=index < answer_words, other=0)
        words = words.to(tl.uint32, bitcast=True)
        if status_of(job) == _OK:
            at = tl.load(job + _J_REPLY) + _ANSWERS + place.to(tl.int64) * ANSWER_STRIDE
            to = tl.multiple_of(at.to(tl.pointer_type(tl.uint32)), 64)
            tl.store(to + index, words, mask=index < answer_words)
            stamp = row_stamp(tl.load(job + _J_SEQUENCE), tl.load(job + _J_CLIENT), place)
            store_seal(at + ANSWER_SEAL, tl.sum(folded(words, index, place), axis=0) + stamp)
        if is_last(job + _J_ANSWERED, tl.load(job + _J_PAIRS)):
            answer_request(job, control, K, HIDDEN, MODEL_HASH, ROWS_BACK, ANSWER_STRIDE, THREADS)
    if program < CLIENTS:
        job = jobs + program * _JOB_WORDS
        # A request whose header could not be believed has no pairs.
        if (tl.load(job + _J_STATE) != 0) & (tl.load(job + _J_PAIRS) == 0):
            answer_request(job, control, K, HIDDEN, MODEL_HASH, ROWS_BACK, ANSWER_STRIDE, THREADS)
    if is_last(control + _ARRIVALS, tl.num_programs(0)):
        tl.store(n_pairs, 0)
        passes = tl.load(control + _PASS) + 1
        # All threads have read it before one writes it.
        tl.debug_barrier()
        tl.store(control + _PASS, passes)
        host = tl.load(control + _HOST).to(tl.pointer_type(tl.int64))
        count_pass(jobs, counts, control, host, CLIENTS, CLIENTS_WIDE, THREADS)
        tl.store(host, passes)
