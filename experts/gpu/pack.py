"""What sending and receiving share: choosing servers, packing rows and lists, writing and checking headers.

Device functions only. `dispatch` packs one token a program, `wait_replies` what has to go again, token after token;
both by the same functions, so that what a server receives does not depend on who sent it. "Width" is the number of
servers up to a power of two, "wide" the number of k-slots likewise.

Rows in e4m3: of each 128 columns, with a = max(|x|, 2^-100), scale = a * (1 / 448) and codes of x * (448 / a) to
nearest even, in float32, as `experts.gpu.ffn` has them. The rounding is written out: the interpreter's own loses
subnormals.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from experts.gpu.words import HEAD, OUT, PEER, SLOT, WIRE
from p2p.device import block_power, folded, frame_folded, frame_key, mix, put, row_stamp, ship, word_keys

LARGEST = 448.0  # of e4m3
LEAST = 2.0**-100  # the largest magnitude of a group counts as at least this: a group of zeros has a scale

_LEAST = tl.constexpr(LEAST)
_LARGEST = tl.constexpr(LARGEST)
_ONE_PART = tl.constexpr(1 / LARGEST)


@triton.jit
def grade_servers(
    peers, suspect, owed, copy, barred, used, SERVERS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr
):
    """How far each server can be asked: grades int32 [WIDTH], and the slot it would be asked in, or -1.

    2: trusted. 1: suspect, or it owes a reply; for want of another. 0: gone, barred, or without a free slot.

    Args:
        barred: int32 [WIDTH], not 0: not in this call.
        used: int32 [WIDTH], bits of the slots that this call has used.
    """
    server = tl.arange(0, WIDTH)
    there = server < SERVERS
    live = tl.load(peers + (copy * SERVERS + server) * PEER.WORDS + PEER.LIVE, mask=there, other=0) != 0
    trusted = tl.load(suspect + server, mask=there, other=1) == 0
    slot = tl.full([WIDTH], -1, tl.int32)
    for i in tl.static_range(SLOTS):
        owes = tl.load(owed + server * SLOTS + (SLOTS - 1 - i), mask=there, other=1) != 0
        trusted = trusted & (owes == 0)
        free = (owes == 0) & (((used >> (SLOTS - 1 - i)) & 1) == 0)
        slot = tl.where(free, SLOTS - 1 - i, slot)
    can = live & (slot >= 0) & (barred == 0)
    return tl.where(can, tl.where(trusted, 2, 1), 0), slot


@triton.jit
def choose_servers(
    routes, layer, expert, wanted, grade, copy,
    LAYERS: tl.constexpr, EXPERTS: tl.constexpr, REPLICAS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The server of each pair: the first of the best grade among its expert's replicas, or -1: int32 [WIDE]."""
    server = tl.arange(0, WIDTH)
    known = wanted & (expert >= 0) & (expert < EXPERTS)
    row = routes + ((copy * LAYERS + layer) * EXPERTS + expert) * REPLICAS
    chosen = tl.full([WIDE], -1, tl.int32)
    best = tl.zeros([WIDE], tl.int32)
    for replica in tl.static_range(REPLICAS):
        candidate = tl.load(row + replica, mask=known, other=-1)
        found = tl.max(tl.where(candidate[:, None] == server[None, :], grade[None, :], 0), axis=1)
        chosen = tl.where(found > best, candidate, chosen)
        best = tl.maximum(best, found)
    return chosen


@triton.jit
def list_row(slot_at, usable, chosen, expert, token, rows, K: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Write one token's words into the lists of all usable servers, its own pairs among them or not.

    Returns:
        What the words contribute to each list's checksum (u64 [WIDTH]), and the pairs of each server (int64).
    """
    k = tl.arange(0, WIDE)
    match = chosen[:, None] == tl.arange(0, WIDTH)[None, :]
    word = tl.where(match, (expert + WIRE.LISTED)[:, None], 0)
    at = token * K + k
    put(slot_at + SLOT.LIST, at[:, None], word, (k < K)[:, None] & usable[None, :])
    ship(slot_at + (SLOT.LIST + token * K * 4), usable, 4 * K)
    index = at + WIRE.WORDS
    blocks = covered_blocks(rows, K)
    weight = frame_key((index % WIRE.BLOCK_WORDS).to(tl.uint64)) * block_power(blocks - 1 - index // WIRE.BLOCK_WORDS)
    fold = tl.sum(word.to(tl.uint64) * weight[:, None], axis=0)
    return fold, tl.sum(match.to(tl.int64), axis=0)


@triton.jit
def covered_blocks(rows, K: tl.constexpr):
    """Blocks of a request's payload that its checksum covers."""
    return (rows * K + (WIRE.WORDS + WIRE.BLOCK_WORDS - 1)) // WIRE.BLOCK_WORDS


@triton.jit
def send_row(
    rows, token, slot_at, chosen, sequence, incarnation,
    HIDDEN: tl.constexpr, K: tl.constexpr, ROWS_OUT: tl.constexpr, ROW_SEAL: tl.constexpr, ROW_STRIDE: tl.constexpr,
    ROWS_OFFSET: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pack row `token` of `rows` (bf16) and put it to every server that is asked for it, once, under its seal.

    Args:
        slot_at: int64 [WIDTH], address of each server's slot.
        chosen: int32 [WIDE], server of each pair, or -1.
        sequence, incarnation: int64 [WIDTH], of each server's frame.
        TILE: HIDDEN up to a power of two.
    """
    k = tl.arange(0, WIDE)
    match = chosen[:, None] == tl.arange(0, WIDTH)[None, :]
    earlier = (chosen[:, None] == chosen[None, :]) & (k[None, :] < k[:, None])
    first = (chosen >= 0) & (tl.max(earlier.to(tl.int32), axis=1) == 0)
    place = token.to(tl.int64) * ROW_STRIDE + (SLOT.PAYLOAD + ROWS_OFFSET)
    row_at = tl.where(first, tl.sum(tl.where(match, slot_at[None, :], 0), axis=1) + place, 0)
    stamps = row_stamp(sequence, incarnation, token)
    stamp = tl.sum(tl.where(match, stamps[None, :], 0), axis=1)
    if ROWS_OUT == OUT.BF16:
        index = tl.arange(0, TILE // 2)
        words = tl.load(
            rows.to(tl.pointer_type(tl.uint32)) + token.to(tl.int64) * (HIDDEN // 2) + index,
            mask=index < HIDDEN // 2,
            other=0,
        )
        fold = tl.sum(folded(words, index, token), axis=0)
        for i in tl.static_range(K):
            at = tl.sum(tl.where(k == i, row_at, 0), axis=0)
            if at != 0:
                put(at, index, words, index < HIDDEN // 2)
                put(at, ROW_SEAL // 8, fold + tl.sum(tl.where(k == i, stamp, 0), axis=0))
                ship(at, at != 0, ROW_SEAL + 8)
    else:
        group = tl.arange(0, TILE // WIRE.SCALE_GROUP)
        column = group[:, None] * WIRE.SCALE_GROUP + tl.arange(0, WIRE.SCALE_GROUP)[None, :]
        inside = column < HIDDEN
        x = tl.load(rows + token.to(tl.int64) * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        codes, scale = quantized(x)
        scales = scale.to(tl.uint32, bitcast=True)
        fold = tl.sum(tl.sum(tl.where(inside, folded_bytes(codes, column, token), 0), axis=1), axis=0)
        scale_index = group + HIDDEN // 4
        scaled = group < HIDDEN // WIRE.SCALE_GROUP
        fold += tl.sum(tl.where(scaled, folded(scales, scale_index, token), 0), axis=0)
        for i in tl.static_range(K):
            at = tl.sum(tl.where(k == i, row_at, 0), axis=0)
            if at != 0:
                put(at, column, codes, inside)
                put(at, scale_index, scales, scaled)
                put(at, ROW_SEAL // 8, fold + tl.sum(tl.where(k == i, stamp, 0), axis=0))
                ship(at, at != 0, ROW_SEAL + 8)


@triton.jit
def quantized(x):
    """Groups of 128 columns, float32 [groups, 128], as codes of e4m3 (uint8) and scales (float32 [groups])."""
    largest = tl.maximum(tl.max(tl.abs(x), axis=1), _LEAST)
    inverse = tl.div_rn(tl.full(largest.shape, _LARGEST, tl.float32), largest)
    return e4m3_codes(x * inverse[:, None]), largest * _ONE_PART


@triton.jit
def e4m3_codes(y):
    """float32 to e4m3 (uint8), to nearest even; beyond 448 is 448, NaN is NaN."""
    bits = y.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(y), 448.0)
    whole = size.to(tl.uint32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count multiples of 2^-9, which is what the last place of a float32 near 2^14 counts.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def folded_bytes(codes, column, place):
    """As `folded`, of single bytes of the words."""
    shift = (column % 4 * 8).to(tl.uint64)
    return codes.to(tl.uint64) * (word_keys(column // 4, place).to(tl.uint64) << shift)


@triton.jit
def write_header(
    slot_at, mask, kind, incarnation, sequence, attempt, length, remaining_ns, sender, covered, blocks, listed,
    routing, layer, rows, pairs, form, service_ns, HIDDEN: tl.constexpr, MODEL_HASH: tl.constexpr,
):  # fmt: skip
    """Write both headers of a frame at the address of its slot, or of one frame per server: all int64 of one shape.

    Args:
        listed: u64, what a routing list contributes to the checksum of `blocks` blocks.
        form: The words of offset 40 and 42.

    Returns:
        The checksum, int64.
    """
    one = sequence * 0
    head = _put(slot_at, HEAD.MAGIC, one + WIRE.FRAME_WORD, mask)
    head += _put(slot_at, HEAD.INCARNATION, incarnation, mask)
    head += _put(slot_at, HEAD.SEQUENCE, sequence, mask)
    head += _put(slot_at, HEAD.ATTEMPT, attempt | length << 32, mask)
    head += _put(slot_at, HEAD.REMAINING_NS, remaining_ns, mask)
    head += _put(slot_at, HEAD.SENDER, sender, mask)
    head += _put(slot_at, HEAD.COVERED, covered, mask)
    wire = _put(slot_at, HEAD.WIRE_MAGIC, kind << 48 | WIRE.WORD, mask)
    wire += _put(slot_at, HEAD.WIRE_MODEL_HASH, one + MODEL_HASH, mask)
    wire += _put(slot_at, HEAD.WIRE_ROUTING_HASH, routing, mask)
    wire += _put(slot_at, HEAD.WIRE_LAYER, layer | rows << 32, mask)
    wire += _put(slot_at, HEAD.WIRE_PAIRS, pairs | one + (HIDDEN << 32), mask)
    wire += _put(slot_at, HEAD.WIRE_DTYPE, form, mask)
    wire += _put(slot_at, HEAD.WIRE_SERVICE_NS, service_ns, mask)
    wire += _put(slot_at, HEAD.WIRE_DIGEST, one, mask)
    checksum = mix(head * block_power(blocks) + wire * block_power(blocks - 1) + listed).to(tl.int64)
    _put(slot_at, HEAD.CHECKSUM, checksum, mask)
    ship(slot_at + SLOT.HEADERS, mask, SLOT.LIST - SLOT.HEADERS)
    return checksum


@triton.jit
def _put(slot_at, INDEX: tl.constexpr, word, mask):
    """Write one header word, and return what it contributes to its header's block of the checksum."""
    put(slot_at + SLOT.HEADERS, INDEX, word.to(tl.int64), mask)
    return frame_folded(word, tl.full((), INDEX % 8, tl.uint64))


@triton.jit
def header_words(slot_at, lane):
    """Addresses of the 16 words of both headers."""
    return (slot_at + (SLOT.HEADERS + 8 * lane)).to(tl.pointer_type(tl.int64))


@triton.jit
def header_fold(words, lane, blocks):
    """What each of the 16 header words contributes to the checksum before it is mixed; the checksum's own: 0."""
    part = frame_folded(words, (lane % 8).to(tl.uint64))
    weight = tl.where(lane < 8, block_power(blocks), block_power(blocks - 1))
    return tl.where(lane == HEAD.CHECKSUM, 0, part * weight)
