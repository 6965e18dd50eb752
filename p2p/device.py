"""What a GPU's kernels need of a one-sided protocol: puts, signals, loads that acquire, a clock, seals.

From here alone a kernel touches a peer's memory. A sender puts, ships what it has put, and signals last, from the
program that `is_last` names; a receiver acquires the signal and reads. TRANSPORT, read when a kernel is compiled:

- "ipc": windows mapped from peers; a put is a store. A signal is a plain store that releases, a wait plain loads that
  acquire: no remote atomic is needed, and peers on PCIe without native ones will do.
- "nvshmem": addresses of the symmetric heap, the PE in their upper 16 bits. A put stores into this PE's own instance,
  which nobody else writes as each pair of PEs has windows of its own; `ship` sends it on, a program quiets its puts
  before it counts as arrived, and the word behind a signal is its sender's. It compiles and links; it has not run.

A program's puts come before its barrier, which comes before the release; those of the others before their barrier and
their arrival at `is_last`, which the last acquires. Causality order in PTX's memory model is transitive, though
arrivals have the scope of one GPU and signals that of the system: whoever acquires a signal sees all puts before it.

Rules that every kernel built on this keeps:

- Memory that a peer may write at any moment is read by one thread and handed to the others, or each element by one
  thread only. `load_acquire` and `load_once` do that; of a plain `tl.load` every thread that holds an element makes
  its own: two may see two values, and a barrier under a branch that only one of them takes never ends.
- The clock differs from thread to thread as well: a loop's end is decided by `clock_ns`, the same for all.

The frame checksum is that of p2p/native/frame.h, bit for bit. A row's seal, over its u32 words w, all mod 2^64::

    key(i)  = (i * 0x9E3779B1 + place * 0x85EBCA6B mod 2^32) | 1
    seal    = sum of w[i] * key(i)  +  stamp(sequence, incarnation, place)
    stamp   = mix(mix(mix(sequence ^ GOLDEN) ^ incarnation) + place * GOLDEN), mix of p2p/native/frame.h

A change within one word moves the sum by less than 2^64, and never by 0: every flip of a byte is seen. A row of an
earlier sequence, of another incarnation, or from another place differs by its stamp; two rows that changed places
differ by their keys, so that the seals of several rows may be checked as one sum.

In the interpreter there is neither a clock nor a nap: the clock of waits is a counter in memory that each look moves on
by TICK_NS, that of leases is the host's, and a pause sleeps for NAP_S so that another process gets the processor.
"""
# pyright: reportRedeclaration=false, reportOptionalMemberAccess=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import time

import triton
import triton.language as tl
from triton import knobs
from triton.language import core

INTERPRET: bool = bool(knobs.runtime.interpret)
TRANSPORT = tl.constexpr("ipc")
TICK_NS = 20_000
NAP_S = 3e-3
CLOCK_STEP_NS = 1_000_000  # of the device's clock, at most: about 1 us on most cards, 1 ms on some

_PE_SHIFT = tl.constexpr(48)  # no device's address is longer
_HERE = tl.constexpr((1 << 48) - 1)
_TICK = tl.constexpr(TICK_NS)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xFF51AFD7ED558CCD)
_MIX_2 = tl.constexpr(0xC4CEB9FE1A85EC53)
_KEY_SEED = tl.constexpr(0x70327066)
_KEY_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_KEY_2 = tl.constexpr(0x94D049BB133111EB)
_LOW = tl.constexpr(0xFFFFFFFF)
_WORD_STEP = tl.constexpr(0x9E3779B1)
_PLACE_STEP = tl.constexpr(0x85EBCA6B)


@triton.jit
def put(at, index, words, mask=None):
    """Put `words` as elements `index` of what begins at `at`: int64, a multiple of 64, one address or [N]."""
    here = at & _HERE if TRANSPORT == "nvshmem" else at
    tl.store(tl.multiple_of(here.to(tl.pointer_type(words.dtype)), 64) + index, words, mask=mask)


@triton.jit
def ship(at, mask, NBYTES: tl.constexpr, value=None):
    """Send on NBYTES that were put from each address `at` (int64, one or [N]) on; then `value`, to the word before."""
    if TRANSPORT == "nvshmem":
        # The block's copy is made by other threads than the stores.
        tl.debug_barrier()
        for i in tl.range(0, at.numel):
            mine = tl.arange(0, at.numel) == i
            to = tl.sum(tl.where(mine & mask, at, 0), axis=0)
            here, pe, nbytes = to & _HERE, (to >> _PE_SHIFT).to(tl.int32), tl.full((), NBYTES, tl.int64)
            if to != 0:
                if value is None:
                    nvshmem("nvshmemx_putmem_nbi_block", here, here, nbytes, pe)
                else:
                    # Once for the block: a second thread's signal could come after the next request's.
                    word = tl.sum(tl.where(mine, value, 0), axis=0)
                    nvshmem("nvshmemx_putmem_signal_block", here, here, nbytes, here - 8, word, 9, pe)  # 9: it sets


@triton.jit
def signal(at, value, mask):
    """Store `value` to `at` (int64, one or [N]), each by one thread: who acquires it sees all that was put before."""
    if TRANSPORT == "nvshmem":
        nvshmem("nvshmem_quiet")
        ship(at + 8, mask, 8, value)
    else:
        # One thread signals for what all threads stored.
        tl.debug_barrier()
        store_release(at, value, mask)


@core.extern
def nvshmem(name, *values, _semantic=None):
    """Call NVSHMEM's device function `name` by all threads."""
    values = [_semantic.to_tensor(value) for value in values]
    symbol = {tuple(value.dtype for value in values): (name.value, tl.int32)}
    return core.extern_elementwise("", "", values, symbol, is_pure=False, _semantic=_semantic)


@triton.jit
def load_acquire(pointer, mask=None):
    """Words (int64), one or a tensor, each loaded by one thread: what their writers released before is visible then."""
    return loaded(pointer, mask, "acquire")


@triton.jit
def load_once(pointer, mask=None):
    """As `load_acquire`, without its order: for what an acquire has made visible already."""
    return loaded(pointer, mask, "relaxed")


@triton.jit
def is_last(counter, total):
    """Whether this program is the last of `total` to arrive: it then sees what all others stored before.

    `counter` (int64) is left at zero by the last.
    """
    if TRANSPORT == "nvshmem":
        nvshmem("nvshmem_quiet")
    # One thread counts for all: their stores come first.
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = before == total - 1
    tl.store(counter, 0, mask=last)
    # What the one thread acquired, the others may read.
    tl.debug_barrier()
    return last


if INTERPRET:

    @triton.jit
    def loaded(pointer, mask, ORDER: tl.constexpr):
        return tl.atomic_add(pointer, 0, mask=mask, sem=ORDER, scope="sys")

    @triton.jit
    def store_release(at, value, mask):
        tl.atomic_xchg(at.to(tl.pointer_type(tl.int64)), value, mask=mask, sem="release", scope="sys")

    @triton.jit
    def clock_ns(counter, THREADS: tl.constexpr):
        """Nanoseconds by the counter in memory (int64), which moves on by TICK_NS."""
        return tl.atomic_add(counter, _TICK, sem="relaxed")

    def lease_clock_ns(THREADS):
        """Nanoseconds by a clock that runs on while nobody looks: CLOCK_BOOTTIME, for host and device are one."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def pause_ns(duration_ns):
        """Give the processor away for a moment."""
        time.sleep(NAP_S)

else:
    from triton.language.extra.cuda import num_threads

    @triton.jit
    def loaded(pointer, mask, ORDER: tl.constexpr):
        """Load each word by one thread, and hand it to the others."""
        at = pointer.to(tl.int64) if mask is None else tl.where(mask, pointer.to(tl.int64), 0)
        found = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s64 p, $1, 0; mov.u64 $0, 0; @p ld." + ORDER + ".sys.global.b64 $0, [$1]; }",
            "=&l,l,~{memory}", [spread(at)], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
        scalar: tl.constexpr = len(pointer.shape) == 0
        own = found if scalar else tl.gather(found, tl.arange(0, pointer.numel), 0)
        return tl.sum(own, axis=0) if scalar else tl.reshape(own, pointer.shape)

    @triton.jit
    def store_release(at, value, mask):
        """Store each word by one thread."""
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s64 p, $1, 0; @p st.release.sys.global.b64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,l,~{memory}", [spread(tl.where(mask, at, 0)), spread(value)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @triton.jit
    def spread(values):
        """One number or a tensor of them at one thread's place each, then zeros: int64 [at least a word a thread]."""
        lanes: tl.constexpr = max(num_threads(), values.numel)
        flat = values
        if len(values.shape) > 0:
            flat = tl.gather(tl.reshape(values, [values.numel]), tl.arange(0, lanes) % values.numel, 0)
        return tl.where(tl.arange(0, lanes) < values.numel, flat, 0)

    @triton.jit
    def clock_ns(counter, THREADS: tl.constexpr):
        """As `lease_clock_ns`; the counter is not touched."""
        return lease_clock_ns(THREADS)

    @triton.jit
    def lease_clock_ns(THREADS: tl.constexpr):
        """Nanoseconds by the device's clock, which no host can stop: the same for all threads of the program.

        Args:
            THREADS: Of the program, 32 * num_warps.
        """
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [tl.arange(0, THREADS)], dtype=tl.int64, is_pure=False, pack=1
        )
        # Each thread has read its own: the latest is the same number for all.
        return tl.max(now, axis=0)

    @triton.jit
    def pause_ns(duration_ns):
        """Sleep for about `duration_ns` (int32), so that whoever shares the processor gets on."""
        sleep: tl.constexpr = "{ nanosleep.u32 $1; mov.u32 $0, 0; }"
        tl.inline_asm_elementwise(sleep, "=r,r", [duration_ns], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def mix(h):
    """A bijection of u64, as at the end of a frame's checksum."""
    h = (h ^ (h >> 33)) * _MIX_1
    h = (h ^ (h >> 33)) * _MIX_2
    return h ^ (h >> 33)


@triton.jit
def row_stamp(sequence, incarnation, place):
    """What a row's seal owes to when, for whom and where it was written: u64, elementwise."""
    h = mix(sequence.to(tl.uint64) ^ _GOLDEN)
    h = mix(h ^ incarnation.to(tl.uint64))
    return mix(h + place.to(tl.uint64) * _GOLDEN)


@triton.jit
def word_keys(index, place):
    """Keys (u32) of the words `index` of the row at `place`."""
    return (index.to(tl.uint32) * _WORD_STEP + place.to(tl.uint32) * _PLACE_STEP) | 1


@triton.jit
def folded(words, index, place):
    """Each word (u32) times its key: u64, to be summed over the row."""
    return words.to(tl.uint64) * word_keys(index, place).to(tl.uint64)


@triton.jit
def frame_key(index):
    """Key of the u32 word `index` (u64, below 256) of a block of a frame, as p2p/native/frame.h makes them."""
    z = (index + 1) * _GOLDEN + _KEY_SEED
    z = (z ^ (z >> 30)) * _KEY_1
    z = (z ^ (z >> 27)) * _KEY_2
    return ((z ^ (z >> 31)) >> 32) | 1


@triton.jit
def frame_folded(word, index):
    """What a u64 word contributes to its block: it is the block's u32 words 2 * index and 2 * index + 1."""
    word = word.to(tl.uint64)
    return (word & _LOW) * frame_key(2 * index) + (word >> 32) * frame_key(2 * index + 1)


@triton.jit
def block_power(exponent):
    """What a block weighs that `exponent` (below 1,024) others follow: the block factor to that power."""
    exponent = exponent.to(tl.uint64)
    power = exponent * 0 + 1
    base = exponent * 0 + _GOLDEN
    for bit in tl.static_range(10):
        power = tl.where(((exponent >> bit) & 1) != 0, power * base, power)
        base = base * base
    return power
