"""How surprising a silence is. Pure.

suspicion = -log10 of the chance that a member which lives is silent for so long: 4 is one in ten thousand, 8 one in a
hundred million. The chance comes from the member's own past silences, from one renewal to the next: up to their 99th
percentile as they were counted, beyond it an exponential whose mean is that of the excesses. With a lease of 2 s,
renewals every 0.25 s and no silence ever much longer, the percentile is 0.28 s and the mean is taken as the least
believed, a 50th of the lease (0.04 s): suspicion is 4 at 0.28 + 2 * 2.3 * 0.04 = 0.47 s and 8 at 0.28 + 6 * 2.3 * 0.04
= 0.83 s. Who is often late is given more time, and who is often very late the whole lease, which no verdict outlasts.

Until 200 silences are known, 50 s of them, the prior holds: an exponential beyond the renewal that is due whose
suspicion is 8 at the end of the lease; so it is 4 half-way, at 1.1 s.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

SUSPECT = 4.0
DEAD = 8.0
LEARNED = 200
REMEMBERED = 1000

# A histogram: silences in 64ths of a lease, the last for all that are longer, 16 bits a bucket in one int.
_BUCKETS = 65
_BITS = 16
_HALF = sum(0x7FFF << (_BITS * i) for i in range(_BUCKETS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rhythm:
    """The silences of one member so far. counts: the histogram. samples: sum of it."""

    counts: int = 0
    samples: int = 0


def heard(rhythm: Rhythm, silence_s: float, lease_s: float) -> Rhythm:
    """The rhythm with one more silence; beyond 1,000 the older half counts half."""
    bucket = min(int(silence_s * (_BUCKETS - 1) / lease_s), _BUCKETS - 1)
    counts, samples = rhythm.counts + (1 << (_BITS * bucket)), rhythm.samples + 1
    if samples >= REMEMBERED:
        counts = counts >> 1 & _HALF
        samples = sum(_unpacked(counts))
    return Rhythm(counts=counts, samples=samples)


def suspicion(rhythm: Rhythm, silence_s: float, *, lease_s: float, renew_s: float) -> float:
    """How surprising it is that a member has been silent for so long; 0 before its renewal is due."""
    if silence_s <= renew_s:
        return 0.0
    if rhythm.samples < LEARNED:
        return DEAD * (silence_s - renew_s) / (lease_s - renew_s)
    counts = _unpacked(rhythm.counts)
    width_s = lease_s / (_BUCKETS - 1)
    # Nobody need renew sooner than it was told, though it often does.
    end = math.floor(renew_s / width_s) + 1
    beyond = sum(counts[end:])
    while 100 * beyond > rhythm.samples:
        beyond -= counts[end]
        end += 1
    percentile_s = end * width_s
    if silence_s <= percentile_s:
        longer = sum(counts[int(silence_s / width_s) :])
        return min(2.0, math.log10(rhythm.samples / max(1, longer)))
    # From the lower end of the percentile's bucket to the upper ends of theirs, so that the mean errs towards patience:
    # 14 times as much hangs on it as on the percentile.
    excess_s = sum(count * (i + 2 - end) for i, count in enumerate(counts) if i >= end) * width_s
    mean_s = max(lease_s / 50, excess_s / max(1, beyond))
    return 2.0 + (silence_s - percentile_s) / mean_s / math.log(10)


def _unpacked(counts: int) -> tuple[int, ...]:
    return struct.unpack(f"<{_BUCKETS}H", counts.to_bytes(_BUCKETS * _BITS // 8, "little"))
