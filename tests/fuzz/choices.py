"""Decisions read from a fuzzer's bytes, and damage done by them. native.h reads its bytes alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Decisions, one after another, from `data`; once it is used up every decision is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def left(self) -> bool:
        """Whether there is more to decide by."""
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        """The next `count` bytes, zeros behind the end."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken.ljust(count, b"\0")

    def bits(self, nbytes: int) -> int:
        """An unsigned number of so many bytes."""
        return int.from_bytes(self.take(nbytes), "little")

    def below(self, limit: int) -> int:
        """A number in 0..limit - 1."""
        return self.bits(1 if limit <= 256 else 2 if limit <= 65536 else 4) % limit if limit > 1 else 0

    def often(self, of: int) -> bool:
        """True but once in `of` times; True at the end of the bytes."""
        return self.below(of) < of - 1

    def pick(self, items: Sequence[T]) -> T:
        """One of them."""
        return items[self.below(len(items))]

    def value(self, nbytes: int) -> int:
        """A number that such a field finds hard: an extreme, a neighbour of one, or any."""
        top = (1 << 8 * nbytes) - 1
        return self.pick((0, 1, top, top >> 1, (top >> 1) + 1, top - 1, self.bits(1), self.bits(nbytes))) & top


def damage(raw: bytes, choices: Choices, most: int = 3) -> bytes:
    """`raw` after up to `most` changes: bits, fields, cuts, excess, parts of itself elsewhere."""
    data = bytearray(raw)
    for _ in range(choices.below(most + 1)):
        at = choices.below(len(data) + 1)
        kind = choices.below(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << choices.below(8)
        elif kind in (1, 2) and at < len(data):
            width = choices.pick((2, 4, 8))
            at = min(at // width * width, max(0, len(data) - width))
            data[at : at + width] = choices.value(width).to_bytes(width, "little")[: len(data) - at]
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            data[at:at] = choices.take(choices.below(70))
        elif kind == 5:
            other = choices.below(len(data) + 1)
            data[at : at + 16] = data[other : other + 16]
    return bytes(data)
