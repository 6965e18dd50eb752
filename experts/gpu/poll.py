"""Polling: a pass's first kernel looks for requests and lists their pairs; one program for each client.

Definition: wait until a slot of the client has a signal above its last answered sequence, or another client's program
found one, at most `idle_ns`, and not at all once the stop word is set. A pass that begins after the lease ended, by the
device's own clock, finds nothing. Of several such slots take the oldest. Copy its headers, then judge the copy: magic,
versions, flags, incarnations, the signal's own sequence, lengths, model hash, layer, counts, the frame's checksum over
headers and list. Each listed pair claims a place of the pass's batch, with its expert's weight slot; a request that is
unsound, or asks for an expert that is not held, leaves its places at -1 and is answered with its status alone. Whose
header is unsound is not believed its sequence: only that very signal is put aside. A pass takes one request of each
client, so a long one delays the others by one frame.

Cost: 4 bytes for each possible pair; one look at the signals, one at the headers, one at the list, one at the table of
held experts, each waiting for the one before: about 4 us on an H200 from signal to end. An empty pass ends after
`idle_ns`, at most a millisecond.

Deadlock: at most CLIENTS programs of four warps wait, each 1/16 of one of 132 processors' warps, and no shared memory
to speak of: 64 of them hold 4 processors of 132 where they stand sixteen to each, or 1/16 of 64. They wait for kernels
of other streams only, and never longer than `idle_ns`.
"""
# pyright: reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from experts.gpu.pack import covered_blocks, header_fold, header_words
from experts.gpu.tables import ServerTables
from experts.gpu.words import COUNT, HEAD, JOB, PEER, SERVER, SLOT, STATUS, WIRE
from p2p.device import block_power, clock_ns, frame_key, lease_clock_ns, load_acquire, load_once, mix, pause_ns

POLL_WARPS = 4

_LIST_TILE = tl.constexpr(1024)
_THREADS = tl.constexpr(32 * POLL_WARPS)
_FIRST_PAUSE_NS = tl.constexpr(32)
_LAST_PAUSE_NS = tl.constexpr(256)
_LOOKS = tl.constexpr(16)  # at the signals, for one at the stop word
_NEVER = tl.constexpr(0x7FFFFFFFFFFFFFFF)


def poll_reference(signals: Mapping[int, int], done: Mapping[int, int]) -> int | None:
    """The definition of which slot is taken, by slot's signal and last answered sequence."""
    fresh = {slot: seen for slot, seen in signals.items() if seen > done[slot]}
    return min(fresh, key=lambda slot: fresh[slot]) if fresh else None


def poll(tables: ServerTables, idle_ns: int) -> None:
    """Look for requests for at most `idle_ns`, and list what is to be computed."""
    poll_kernel[(tables.clients,)](
        tables.control, tables.peers, tables.held, tables.done, tables.rejected, tables.jobs, tables.slots,
        tables.row_of, tables.origin, tables.n_pairs, tables.counts, tables.asked_in, idle_ns,
        **tables.constants(poll_kernel.arg_names), num_warps=POLL_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def is_fresh(seen, answered, refused):
    """Whether a signal tells of a request that was not answered yet. An older one came late or twice."""
    return (seen > answered) & (seen != refused)


@triton.jit
def await_signal(
    window, live, client, done, rejected, control, number, idle_ns,
    SLOTS: tl.constexpr, SLOTS_WIDE: tl.constexpr, REQUEST_STRIDE: tl.constexpr,
):  # fmt: skip
    """Wait for a request: the oldest fresh signal and its slot, or 0 and -1.

    Args:
        number: Of this pass; whoever finds something writes it where the other programs look.
    """
    slot = tl.arange(0, SLOTS_WIDE)
    mine = slot < tl.where(live, SLOTS, 0)
    pointer = (window + SLOT.FIRST + slot.to(tl.int64) * REQUEST_STRIDE).to(tl.pointer_type(tl.int64))
    answered = tl.load(done + client * SLOTS + slot, mask=slot < SLOTS, other=0)
    refused = tl.load(rejected + client * SLOTS + slot, mask=slot < SLOTS, other=0)
    start = clock_ns(control + SERVER.CLOCK, _THREADS)
    pause = tl.full((), _FIRST_PAUSE_NS, tl.int32)
    looks = tl.zeros((), tl.int32)
    stopped = load_acquire(control + SERVER.STOP)
    oldest = tl.full((), _NEVER, tl.int64)
    which = tl.full((), -1, tl.int32)
    # Who has no client only keeps the pass from ending at once, and one program is enough for that.
    going = ((stopped == 0) & (live | (client == 0))).to(tl.int32)
    while going > 0:
        elsewhere = load_acquire(control + SERVER.FOUND) == number
        seen = load_acquire(pointer, mine)
        fresh = mine & is_fresh(seen, answered, refused)
        oldest = tl.min(tl.where(fresh, seen, _NEVER), axis=0)
        which = tl.max(tl.where(fresh & (seen == oldest), slot, -1), axis=0)
        late = clock_ns(control + SERVER.CLOCK, _THREADS) - start > idle_ns
        looks += 1
        if looks % _LOOKS == 0:
            stopped = load_acquire(control + SERVER.STOP)
        going = tl.where((which >= 0) | elsewhere | late | (stopped != 0), 0, 1)
        if going > 0:
            pause_ns(pause)
            pause = tl.minimum(pause * 2, _LAST_PAUSE_NS)
    if which >= 0:
        tl.atomic_xchg(control + SERVER.FOUND, number, sem="relaxed")
    # What one thread acquired, the others may read.
    tl.debug_barrier()
    return tl.where(which >= 0, oldest, 0), which


@triton.jit
def word_of(words, lane, INDEX: tl.constexpr):
    """One of the header words."""
    return tl.sum(tl.where(lane == INDEX, words, 0), axis=0)


@triton.jit
def head_sound(
    words, lane, own, sender, sequence,
    LAYERS: tl.constexpr, CAPACITY: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, MODEL_HASH: tl.constexpr,
    ROWS_OUT: tl.constexpr, ROWS_OFFSET: tl.constexpr, ROW_STRIDE: tl.constexpr,
):  # fmt: skip
    """Whether all of a request's header is as it must be, the checksum aside."""
    attempt = word_of(words, lane, HEAD.ATTEMPT) & 0xFFFFFFFF
    layer = word_of(words, lane, HEAD.WIRE_LAYER) & 0xFFFFFFFF
    rows = word_of(words, lane, HEAD.WIRE_LAYER) >> 32
    pairs = word_of(words, lane, HEAD.WIRE_PAIRS) & 0xFFFFFFFF
    ranges = (attempt < WIRE.ATTEMPTS) & (layer < LAYERS) & (rows >= 1) & (rows <= CAPACITY)
    ranges = ranges & (pairs >= 1) & (pairs <= rows * K)
    needed = tl.where(lane == HEAD.MAGIC, WIRE.FRAME_WORD, words * 0)
    needed = tl.where(lane == HEAD.INCARNATION, own, needed)
    needed = tl.where(lane == HEAD.SEQUENCE, sequence, needed)
    needed = tl.where(lane == HEAD.ATTEMPT, attempt | (rows * ROW_STRIDE + ROWS_OFFSET) << 32, needed)
    needed = tl.where(lane == HEAD.SENDER, sender, needed)
    needed = tl.where(lane == HEAD.COVERED, rows * (4 * K) + WIRE.BYTES, needed)
    needed = tl.where(lane == HEAD.WIRE_MAGIC, WIRE.REQUEST_WORD, needed)
    needed = tl.where(lane == HEAD.WIRE_MODEL_HASH, MODEL_HASH, needed)
    needed = tl.where(lane == HEAD.WIRE_PAIRS, pairs | pairs * 0 + (HIDDEN << 32), needed)
    needed = tl.where(lane == HEAD.WIRE_DTYPE, ROWS_OUT, needed)
    free = (lane == HEAD.REMAINING_NS) | (lane == HEAD.CHECKSUM) | (lane == HEAD.WIRE_LAYER)
    return ranges & (tl.min((free | (words == needed)).to(tl.int32), axis=0) != 0)


@triton.jit
def checksum_holds(words, lane, listed, blocks):
    """Whether the header's checksum is that of the words and of the list that was read."""
    sums = tl.sum(header_fold(words, lane, blocks), axis=0) + listed
    return mix(sums).to(tl.int64) == word_of(words, lane, HEAD.CHECKSUM)


@triton.jit(do_not_specialize=["idle_ns"])
def poll_kernel(
    control, peers, held, done, rejected, jobs, slots, row_of, origin, n_pairs, counts, asked_in, idle_ns,
    LAYERS: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, K: tl.constexpr, CAPACITY: tl.constexpr,
    SLOTS: tl.constexpr, ROWS_OUT: tl.constexpr, MODEL_HASH: tl.constexpr, ROW_STRIDE: tl.constexpr,
    ROWS_OFFSET: tl.constexpr, REQUEST_STRIDE: tl.constexpr, REPLY_STRIDE: tl.constexpr, SLOTS_WIDE: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """One client: await a request, judge it, and list its pairs."""
    client = tl.program_id(0)
    job = jobs + client * JOB.WORDS
    number = tl.load(control + SERVER.PASS) + 1
    peer = peers + client * PEER.WORDS
    # The host writes a client's row while passes run: live last.
    live = load_acquire(peer + PEER.LIVE) != 0
    live = live & (load_once(control + SERVER.LEASE_NS) > lease_clock_ns(_THREADS))
    request = load_once(peer + PEER.REQUEST)
    reply = load_once(peer + PEER.REPLY)
    sender = load_once(peer + PEER.INCARNATION)
    tl.store(job + JOB.STATE, 0)
    tl.store(job + JOB.ANSWERED, 0)
    tl.store(job + JOB.BAD, 0)
    sequence, slot = await_signal(
        request, live, client, done, rejected, control, number, idle_ns, SLOTS, SLOTS_WIDE, REQUEST_STRIDE
    )
    if slot >= 0:
        picked = clock_ns(control + SERVER.CLOCK, _THREADS)
        at = request + SLOT.FIRST + slot.to(tl.int64) * REQUEST_STRIDE
        lane = tl.arange(0, 16)
        # The copy: each word is read once, and the same for all threads.
        words = load_once(header_words(at, lane), lane < 16)
        sound = head_sound(
            words, lane, tl.load(control + SERVER.INCARNATION), sender, sequence,
            LAYERS, CAPACITY, K, HIDDEN, MODEL_HASH, ROWS_OUT, ROWS_OFFSET, ROW_STRIDE,
        )  # fmt: skip
        tl.store(job + JOB.REQUEST, at)  # these at once: the list needs their registers
        tl.store(job + JOB.REPLY, reply + SLOT.FIRST + slot.to(tl.int64) * REPLY_STRIDE)
        tl.store(job + JOB.SEQUENCE, sequence)
        tl.store(job + JOB.CLIENT, sender)
        tl.store(job + JOB.PICKED_NS, picked)
        attempt = tl.where(sound, word_of(words, lane, HEAD.ATTEMPT) & 0xFFFFFFFF, 0)
        layer = tl.where(sound, word_of(words, lane, HEAD.WIRE_LAYER) & 0xFFFFFFFF, 0)
        rows = tl.where(sound, word_of(words, lane, HEAD.WIRE_LAYER) >> 32, 0).to(tl.int32)
        claimed = tl.where(sound, word_of(words, lane, HEAD.WIRE_PAIRS) & 0xFFFFFFFF, 0).to(tl.int32)
        base = tl.atomic_add(n_pairs, claimed, sem="relaxed")
        blocks = covered_blocks(rows, K)
        block = tl.arange(0, _LIST_TILE // WIRE.BLOCK_WORDS)
        listed = tl.zeros((), tl.uint64)
        taken = tl.zeros((), tl.int32)
        wrong = tl.zeros((), tl.int32)
        unheld = tl.zeros((), tl.int32)
        activated = tl.zeros((), tl.int64)
        for start in tl.range(0, tl.where(sound, rows * K + WIRE.WORDS, 0), _LIST_TILE):
            index = start + tl.arange(0, _LIST_TILE)
            entry = index - WIRE.WORDS
            inside = (entry >= 0) & (entry < rows * K)
            # Volatile: loaded once, and what is used is what is summed.
            word = tl.load(
                (at + SLOT.PAYLOAD + 4 * index.to(tl.int64)).to(tl.pointer_type(tl.uint32)),
                mask=inside, other=0, volatile=True,
            )  # fmt: skip
            keyed = word.to(tl.uint64) * frame_key((index % WIRE.BLOCK_WORDS).to(tl.uint64))
            sums = tl.sum(tl.reshape(keyed, [_LIST_TILE // WIRE.BLOCK_WORDS, WIRE.BLOCK_WORDS]), axis=1)
            after = tl.maximum(blocks - 1 - start // WIRE.BLOCK_WORDS - block, 0)
            listed += tl.sum(sums * block_power(after), axis=0)
            asks = word != 0
            expert = word.to(tl.int64) - WIRE.LISTED
            known = asks & (expert >= 0) & (expert < EXPERTS)
            place = tl.load(held + layer * EXPERTS + expert, mask=known, other=-1)
            # Whoever asks for it first in this pass, of all clients, counts it.
            last = tl.atomic_xchg(asked_in + layer * EXPERTS + expert, number + index * 0, mask=known, sem="relaxed")
            activated += tl.sum((known & (last != number)).to(tl.int64), axis=0)
            rank = taken + tl.cumsum(asks.to(tl.int32), axis=0) - 1
            mine = asks & (rank < claimed)
            tl.store(slots + base + rank, place, mask=mine)
            tl.store(row_of + base + rank, client * CAPACITY + entry // K, mask=mine)
            tl.store(origin + base + rank, client * (CAPACITY * K) + entry, mask=mine)
            taken += tl.sum(asks.to(tl.int32), axis=0)
            wrong += tl.sum((asks & (known == 0)).to(tl.int32), axis=0)
            unheld += tl.sum((known & (place < 0)).to(tl.int32), axis=0)
        sound = sound & (taken == claimed) & (wrong == 0) & checksum_holds(words, lane, listed, blocks)
        status = tl.where(sound, tl.where(unheld > 0, STATUS.NOT_HELD, STATUS.OK), STATUS.INVALID)
        if status != STATUS.OK:
            # Other threads wrote these places above.
            tl.debug_barrier()
            for start in tl.range(0, claimed, _LIST_TILE):
                rank = start + tl.arange(0, _LIST_TILE)
                tl.store(slots + base + rank, -1, mask=rank < claimed)
                tl.store(row_of + base + rank, 0, mask=rank < claimed)
                tl.store(origin + base + rank, client * (CAPACITY * K), mask=rank < claimed)
        # A header that does not hold has no sequence to trust: only this very signal is put aside.
        mark = tl.where(sound, done.to(tl.int64), rejected.to(tl.int64)) + 8 * (client * SLOTS + slot)
        tl.atomic_add(counts + status, 1, sem="relaxed")
        tl.atomic_add(counts + COUNT.ROWS, rows.to(tl.int64), sem="relaxed")
        tl.atomic_add(counts + COUNT.PAIRS, claimed.to(tl.int64), sem="relaxed")
        tl.atomic_add(counts + COUNT.EXPERTS, activated, sem="relaxed")
        tl.store(job + JOB.STATE, 1)
        tl.store(job + JOB.STATUS, status.to(tl.int64))
        tl.store(job + JOB.MARK, mark)
        tl.store(job + JOB.ATTEMPT, attempt)
        tl.store(job + JOB.ROWS, rows.to(tl.int64))
        tl.store(job + JOB.PAIRS, claimed.to(tl.int64))
        tl.store(job + JOB.LAYER, layer)
        tl.store(job + JOB.CHECKSUM, word_of(words, lane, HEAD.CHECKSUM))
