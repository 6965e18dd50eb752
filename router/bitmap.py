"""Sets of (layer, expert) pairs as bitmaps. Pure.

Bit = layer * experts + expert, beyond the base of its model (router.models). Inside the router a bitmap is an int (set
operations on whole placements are then one instruction stream); on the wire it is bytes, least significant bit of byte
0 first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_


def to_bytes(bits: int, layers: int, experts: int) -> bytes:
    """Wire form of a bitmap: ceil(layers * experts / 8) bytes."""
    return bits.to_bytes((layers * experts + 7) // 8, "little")


def from_bytes(bitmap: bytes) -> int:
    """The bitmap that `to_bytes` wrote; missing trailing bytes are zeros."""
    return int.from_bytes(bitmap, "little")


def of_pairs(pairs: Iterable[tuple[int, int]], experts: int) -> int:
    """Bitmap of (layer, expert) pairs."""
    bits = 0
    for layer, expert in pairs:
        bits |= 1 << (layer * experts + expert)
    return bits


def pairs(bits: int, experts: int) -> Iterator[tuple[int, int]]:
    """The (layer, expert) pairs of a bitmap, by layer, then expert."""
    return (divmod(bit, experts) for bit in indexes(bits))


def indexes(mask: int) -> list[int]:
    """The set bits of a mask, lowest first."""
    found: list[int] = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def union(bitmaps: Iterable[int]) -> int:
    """The bits that are in any of the bitmaps."""
    return reduce(or_, bitmaps, 0)


def everything(layers: int, experts: int) -> int:
    """All bits of a model."""
    return (1 << layers * experts) - 1


def lowest(bits: int, count: int) -> int:
    """The lowest `count` of the bits."""
    if bits.bit_count() <= count:
        return bits
    chosen = 0
    for _ in range(count):
        bit = bits & -bits
        chosen |= bit
        bits ^= bit
    return chosen


def copies(bitmaps: Iterable[int], everything: int) -> tuple[int, int]:
    """In how many of the bitmaps the bit of `everything` is that is in the fewest, and how many bits are in so few."""
    # on[k]: the bits that are in more than k of them.
    on: list[int] = []
    for bits in bitmaps:
        more = bits & everything
        for count, known in enumerate(on):
            on[count], more = more | known, more & known
        if more:
            on.append(more)
    least = sum(known == everything for known in on) if everything else 0
    more = on[least] if least < len(on) else 0
    return least, (everything & ~more).bit_count()


def by_layer(bits: int, layers: int, experts: int) -> list[int]:
    """How many experts of each layer a bitmap names."""
    mask = (1 << experts) - 1
    return [(bits >> (layer * experts) & mask).bit_count() for layer in range(layers)]


def in_at_least(count: int, held: list[int]) -> int:
    """The bits that are in at least so many of the bitmaps."""
    at_least = [-1] + [0] * count
    for bits in held:
        for n in range(count, 0, -1):
            at_least[n] |= at_least[n - 1] & bits
    return at_least[-1]
