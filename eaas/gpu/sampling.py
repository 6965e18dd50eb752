"""From logits to tokens on the device: the rules and the generator of eaas/native/sampler.cpp, by its own arithmetic.

Definition, per row of logits x: below a temperature of 1e-5 the highest logit, the lowest id on a tie. Else weights
exp((x - highest) / temperature); those below min_p become 0; those below the k-th highest logit become 0 (ties with it
stay); of the likeliest, ties by id, those stay before which less than top_p of the total lies; then one draw by
Philox4x32-10, keyed by (seed, choice, index), over the weights in order of ids. A row that holds NaN or infinity gets
status NOT_FINITE.

Bits: the exponential is that of experts/native/simd.h, operation by operation; the total is summed as there, by sixteen
lanes over blocks of 1,024 in float32 and over blocks in float64; the draw walks blocks, and then one by one. So the
token is that of the native sampler. Only where top-p's border lies within the last bits of a float64 sum could it
differ, for that sum alone is made in another order. Penalties, tokens allowed or not, biases and log-probabilities are
not done here: `can_choose` says which rows are.

Cost: greedy reads 4 * vocab bytes a row (256 rows of 152,000: 36 us at 4.3 TB/s). A draw writes and reads as many
weights and walks at most 1,024 of them one by one, some 50 us; top-k and top-p search for their border by halving, up
to 32 passes of one program over its row in the L2 cache each, some 10 us a pass; programs take rows side by side.
"""
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from eaas.gpu.norm_rope import check
from experts.gpu.tiles import inlined

CHOICE_WORDS = 12
OK, NOT_FINITE = 0, -1
GREEDY_BELOW = 1e-5
SUM_BLOCK = 1024  # kSampleBlock of eaas/native/ops.h
_SCANNED = 4096  # logits of one program of the scan
_WALKED = 4096  # logits that a choosing program takes at a time
_SLOTS = 128  # rows chosen side by side


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Room for choosing among `vocab` tokens.

    Attributes:
        highest: float32 [rows, blocks of the scan]; lowest_at int32: where, lowest id first; finite int32.
        weights: float32 [slots, vocab up to a multiple of SUM_BLOCK].
        sums: float32 [slots, blocks of SUM_BLOCK].
    """

    highest: Tensor
    lowest_at: Tensor
    finite: Tensor
    weights: Tensor
    sums: Tensor

    @classmethod
    def make(cls, rows: int, vocab: int, device: torch.device | str) -> Scratch:
        """Room for `rows` rows on a device."""
        scanned, summed, slots = -(-vocab // _SCANNED), -(-vocab // SUM_BLOCK), min(rows, _SLOTS)
        return cls(
            highest=torch.empty(rows, scanned, dtype=torch.float32, device=device),
            lowest_at=torch.empty(rows, scanned, dtype=torch.int32, device=device),
            finite=torch.empty(rows, scanned, dtype=torch.int32, device=device),
            weights=torch.empty(slots, summed * SUM_BLOCK, dtype=torch.float32, device=device),
            sums=torch.empty(slots, summed, dtype=torch.float32, device=device),
        )


def can_choose(rows: np.ndarray) -> np.ndarray:
    """Which rows the device can choose for: bool, of an array of `eaas.native.SAMPLE_ROW`."""
    plain = (rows["repetition"] == 1) & (rows["presence"] == 0) & (rows["frequency"] == 0)
    unseen = (rows["prompt_count"] == 0) & (rows["output_count"] == 0)
    free = (rows["forbidden_count"] == 0) & (rows["biased_count"] == 0) & (rows["given"] == 0)
    free &= (rows["allowed"] == 0) & (rows["allowed_too"] == 0)
    return (plain | unseen) & free & (rows["top_count"] < 0)


def choices_of(rows: np.ndarray, here: np.ndarray | None = None) -> np.ndarray:
    """What `choose` reads: int32 [rows, CHOICE_WORDS] of an array of `eaas.native.SAMPLE_ROW`.

    Args:
        here: bool [rows], for which the device is to choose; of the others it takes the highest, which costs least.

    Words: seed, low and high; index, low and high; choice; bits of temperature, top_p and min_p; top_k; three of 0.
    """
    words = np.zeros((len(rows), CHOICE_WORDS), dtype=np.uint32)
    for place, name in ((0, "seed"), (2, "index")):
        words[:, place] = rows[name] & np.uint64(0xFFFFFFFF)
        words[:, place + 1] = rows[name] >> np.uint64(32)
    words[:, 4] = rows["choice"]
    for place, name in ((5, "temperature"), (6, "top_p"), (7, "min_p")):
        words[:, place] = np.ascontiguousarray(rows[name], dtype=np.float32).view(np.uint32)
    words[:, 8] = rows["top_k"]
    if here is not None:
        words[~here, 5] = 0
    return words.view(np.int32)


def greedy_reference(logits: Tensor) -> Tensor:
    """The highest logit of each row, the lowest id on a tie: int64 [rows]."""
    highest = logits.max(-1, keepdim=True).values
    return (logits == highest).int().argmax(-1)


def choose(
    logits: Tensor, choices: Tensor, n_choices: Tensor, scratch: Scratch, tokens: Tensor, status: Tensor
) -> None:
    """Choose a token for each of the first n_choices rows.

    Args:
        logits: float32 [rows, vocab].
        choices: int32 [rows, CHOICE_WORDS], as `choices_of` makes them.
        n_choices: int32 [1].
        tokens, status: int32 [rows], written; a token means nothing where its status is not OK. Both may lie in
            pinned memory of the host.

    Raises:
        ShapeInvalid: another type or shape.
    """
    vocab = logits.shape[1]
    rows = min(len(logits), len(choices))
    check("logits", logits, torch.float32, rows, vocab)
    check("choices", choices, torch.int32, rows, CHOICE_WORDS)
    check("n_choices", n_choices, torch.int32, 1)
    check("tokens", tokens, torch.int32, rows)
    check("status", status, torch.int32, rows)
    scanned, summed = -(-vocab // _SCANNED), -(-vocab // SUM_BLOCK)
    for name in ("highest", "lowest_at", "finite"):
        check(name, getattr(scratch, name), torch.float32 if name == "highest" else torch.int32, rows, scanned)
    slots = min(rows, len(scratch.weights))
    check("weights", scratch.weights, torch.float32, slots, summed * SUM_BLOCK)
    check("sums", scratch.sums, torch.float32, slots, summed)
    scan_kernel[(rows, scanned)](
        logits, n_choices, scratch.highest, scratch.lowest_at, scratch.finite, vocab, BLOCK=_SCANNED,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    choose_kernel[(slots,)](
        logits, choices, n_choices, scratch.highest, scratch.lowest_at, scratch.finite, scratch.weights,
        scratch.sums, tokens, status, vocab,
        SCANNED=scanned, SCANNED_PAD=triton.next_power_of_2(scanned), SUMMED=summed, WORDS=CHOICE_WORDS,
        BLOCK=_WALKED, SUM_BLOCK=SUM_BLOCK, GREEDY_BELOW=GREEDY_BELOW,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def scan_kernel(logits, n_choices, highest, lowest_at, finite, vocab, BLOCK: tl.constexpr):
    """The highest of BLOCK logits of a row, where it is first, and whether all are finite."""
    row = tl.program_id(0)
    if row < tl.load(n_choices):
        part = tl.program_id(1)
        token = part * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        x = tl.load(logits + row.to(tl.int64) * vocab + token, mask=inside, other=float("-inf"))
        best = tl.max(x, 0)
        first = tl.min(tl.where(x == best, token, 0x7FFFFFFF), 0)
        # NaN and infinities times 0 are not 0.
        odd = tl.sum((tl.where(inside, x, 0.0) * 0.0 != 0.0).to(tl.int32), 0)
        at = row * tl.num_programs(1) + part
        tl.store(highest + at, best)
        tl.store(lowest_at + at, first)
        tl.store(finite + at, (odd == 0).to(tl.int32))


@inlined
def philox(c0, c1, c2, c3, k0, k1):
    """The first two words of one block of Philox4x32-10 (Salmon et al., 2011); all u32."""
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1


@inlined
def exponential(x):
    """exp of experts/native/simd.h, bit for bit."""
    magic = 12582912.0
    bounded = tl.minimum(tl.maximum(x, -104.0), 89.0)
    shifted = tl.fma(bounded, 1.44269504088896341, magic)
    n = shifted - magic
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, bounded))
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r) + 1.0
    power = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    # By two factors, so that subnormal results round once.
    half = power >> 1
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    high = ((power - half + 127) << 23).to(tl.float32, bitcast=True)
    return p * low * high


@inlined
def rank_of(x):
    """float32 to u32 in the same order; -0 equals 0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@inlined
def total_of(weights, sums, SUMMED: tl.constexpr, SUM_BLOCK: tl.constexpr):
    """Sum of a row's weights as the native sampler makes it; the sums of blocks are left in `sums`."""
    lane = tl.arange(0, 16)
    block = tl.arange(0, 32)
    for first in range(0, SUMMED, 32):
        inside = first + block < SUMMED
        at = (first + block)[:, None] * SUM_BLOCK + lane[None, :]
        total = tl.zeros([32, 16], tl.float32)
        for step in range(SUM_BLOCK // 16):
            total += tl.load(weights + at + step * 16, mask=inside[:, None], other=0.0)
        # The tree of simd.h: i + (i + 8), + 4, + 2, + 1.
        eight, other = tl.split(tl.permute(tl.reshape(total, (32, 2, 8)), (0, 2, 1)))
        four, other = tl.split(tl.permute(tl.reshape(eight + other, (32, 2, 4)), (0, 2, 1)))
        two, other = tl.split(tl.permute(tl.reshape(four + other, (32, 2, 2)), (0, 2, 1)))
        one, other = tl.split(two + other)
        tl.store(sums + first + block, one + other, mask=inside)
    # Other threads of this program read them next.
    tl.debug_barrier()
    total = tl.full([], 0.0, tl.float64)
    for number in range(SUMMED):
        total += tl.load(sums + number).to(tl.float64)
    return total


@inlined
def measure(x, weights, vocab, least, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens that have weight rank at `least` or higher; BY_MASS: what they weigh. float64."""
    found = tl.full([], 0.0, tl.float64)
    for base in range(0, vocab, BLOCK):
        token = base + tl.arange(0, BLOCK)
        inside = token < vocab
        value = tl.load(x + token, mask=inside, other=0.0)
        weight = tl.load(weights + token, mask=inside, other=0.0)
        counts = (weight > 0) & (rank_of(value) >= least)
        if BY_MASS:
            found += tl.sum(tl.where(counts, weight, 0.0).to(tl.float64), 0)
        else:
            found += tl.sum(counts.to(tl.int32), 0).to(tl.float64)
    return found


@inlined
def border(x, weights, vocab, wanted, highest, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest rank at which `measure` reaches `wanted`; 0 where it never does."""
    low = tl.full([], 0, tl.uint32)
    high = highest
    # Always: measure(low) >= wanted or low is 0; measure(high + 1) < wanted.
    while low < high:
        middle = high - ((high - low) >> 1)
        if measure(x, weights, vocab, middle, BY_MASS, BLOCK) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low


@inlined
def keep_top_k(x, weights, vocab, top_k, highest, BLOCK: tl.constexpr):
    """Zero the weights of tokens below the k-th highest logit that has weight."""
    least = border(x, weights, vocab, top_k.to(tl.float64), highest, False, BLOCK)
    for base in range(0, vocab, BLOCK):
        token = base + tl.arange(0, BLOCK)
        value = tl.load(x + token, mask=token < vocab, other=0.0)
        tl.store(weights + token, tl.zeros([BLOCK], tl.float32), mask=(token < vocab) & (rank_of(value) < least))
    tl.debug_barrier()


@inlined
def keep_top_p(x, weights, vocab, wanted, highest, BLOCK: tl.constexpr):
    """Keep the likeliest tokens, ties by id, while those before weigh less than `wanted`; always the first."""
    # Above the border lies less than is wanted: the last that stays is among those at it.
    last = border(x, weights, vocab, wanted, highest, True, BLOCK)
    above = tl.full([], 0.0, tl.float64)
    if last < highest:
        above = measure(x, weights, vocab, last + 1, True, BLOCK)
    for base in range(0, vocab, BLOCK):
        token = base + tl.arange(0, BLOCK)
        inside = token < vocab
        value = tl.load(x + token, mask=inside, other=0.0)
        weight = tl.load(weights + token, mask=inside, other=0.0)
        rank = rank_of(value)
        tied = inside & (rank == last) & (weight > 0)
        share = tl.where(tied, weight, 0.0).to(tl.float64)
        before = above + tl.cumsum(share, 0) - share
        # The likeliest token of all has nothing before it.
        stays = (rank > last) | (tied & ((before < wanted) | (before == 0.0)))
        tl.store(weights + token, tl.where(stays, weight, 0.0), mask=inside)
        above += tl.sum(share, 0)
    tl.debug_barrier()


@inlined
def draw(weights, sums, uniform, vocab, SUMMED: tl.constexpr, SUM_BLOCK: tl.constexpr):
    """The token at `uniform` (float64, below 1) of the weights, in order of ids."""
    target = uniform * total_of(weights, sums, SUMMED, SUM_BLOCK)
    passed = tl.full([], 0.0, tl.float64)
    block = 0
    after = passed + tl.load(sums).to(tl.float64)
    while (target >= after) & (block < SUMMED - 1):
        passed = after
        block += 1
        after = passed + tl.load(sums + block).to(tl.float64)
    first = block * SUM_BLOCK
    if target >= after:
        # Rounding may carry the target to the very end: the last token that can be drawn it is.
        first = 0
        end = 0
    else:
        end = tl.minimum(first + SUM_BLOCK, vocab)
    chosen = -1
    token = first
    while token < end:
        weight = tl.load(weights + token).to(tl.float64)
        if weight > 0:
            # Where the walk ends just short of the block's sum, its last token it is.
            chosen = token
            passed += weight
            if passed > target:
                end = token
        token += 1
    if chosen < 0:
        for base in range(0, vocab, SUM_BLOCK):
            token_here = base + tl.arange(0, SUM_BLOCK)
            weight_here = tl.load(weights + token_here, mask=token_here < vocab, other=0.0)
            chosen = tl.maximum(chosen, tl.max(tl.where(weight_here > 0, token_here, -1), 0))
    return chosen


@triton.jit
def choose_kernel(
    logits, choices, n_choices, highest, lowest_at, finite, all_weights, all_sums, tokens, status, vocab,
    SCANNED: tl.constexpr, SCANNED_PAD: tl.constexpr, SUMMED: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, SUM_BLOCK: tl.constexpr, GREEDY_BELOW: tl.constexpr,
):  # fmt: skip
    """Programs take rows in turn."""
    slot = tl.program_id(0).to(tl.int64)
    weights = all_weights + slot * SUMMED * SUM_BLOCK
    sums = all_sums + slot * SUMMED
    for row in range(tl.program_id(0), tl.load(n_choices), tl.num_programs(0)):
        part = tl.arange(0, SCANNED_PAD)
        here = row * SCANNED + part
        bests = tl.load(highest + here, mask=part < SCANNED, other=float("-inf"))
        top = tl.max(bests, 0)
        firsts = tl.load(lowest_at + here, mask=part < SCANNED, other=0x7FFFFFFF)
        chosen = tl.min(tl.where(bests == top, firsts, 0x7FFFFFFF), 0)
        sound = tl.min(tl.load(finite + here, mask=part < SCANNED, other=1), 0)
        plan = choices + row * WORDS
        temperature = tl.load(plan + 5).to(tl.float32, bitcast=True)
        if (sound != 0) & (temperature >= GREEDY_BELOW):
            x = logits + tl.cast(row, tl.int64) * vocab
            min_p = tl.load(plan + 7).to(tl.float32, bitcast=True)
            scale = tl.div_rn(1.0, temperature)
            for base in range(0, SUMMED * SUM_BLOCK, SUM_BLOCK):
                token = base + tl.arange(0, SUM_BLOCK)
                value = tl.load(x + token, mask=token < vocab, other=0.0)
                weight = exponential((value - top) * scale)
                stays = (token < vocab) & (weight >= min_p)
                tl.store(weights + token, tl.where(stays, weight, 0.0))
            tl.debug_barrier()
            top_rank = rank_of(top)
            top_k = tl.load(plan + 8)
            if (top_k > 0) & (top_k < vocab):
                keep_top_k(x, weights, vocab, top_k, top_rank, BLOCK)
            top_p = tl.load(plan + 6).to(tl.float32, bitcast=True)
            if top_p < 1.0:
                wanted = total_of(weights, sums, SUMMED, SUM_BLOCK) * top_p.to(tl.float64)
                keep_top_p(x, weights, vocab, wanted, top_rank, BLOCK)
            seed_low = tl.load(plan).to(tl.uint32, bitcast=True)
            seed_high = tl.load(plan + 1).to(tl.uint32, bitcast=True)
            index_low = tl.load(plan + 2).to(tl.uint32, bitcast=True)
            index_high = tl.load(plan + 3).to(tl.uint32, bitcast=True)
            number = tl.load(plan + 4).to(tl.uint32, bitcast=True)
            none = number ^ number
            first, second = philox(index_low, index_high, number, none, seed_low, seed_high)
            high_bits = (first >> 5).to(tl.int64) * 67108864 + (second >> 6).to(tl.int64)
            uniform = high_bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53
            chosen = draw(weights, sums, uniform, vocab, SUMMED, SUM_BLOCK)
            # The next row of this program overwrites what its threads still read.
            tl.debug_barrier()
        tl.store(tokens + row, chosen)
        tl.store(status + row, tl.where(sound != 0, 0, -1))
