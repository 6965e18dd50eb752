"""The paged KV pool: which block belongs to whom, and which full blocks can serve again. Pure.

A block holds the keys and values of `block_tokens` consecutive tokens. A full block is a function of all
tokens up to its end, so it is named by a digest chained over them (BLAKE2b, 128 bits; the root names the
model): equal digests mean equal content, and requests with a common beginning share its full blocks without
copying. A block that is not full has one owner and no digest. A block is in one of three states:
    held     reference count above 0, in neither free list
    cached   reference count 0, has a digest: free, but usable again until taken; least recently used first
    blank    reference count 0, no digest: free
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 16


class BlockError(RuntimeError):
    """The pool was asked for something that would corrupt it: a bug of the caller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Acquired:
    """Blocks of one sequence in order; the first `reused` are full and hold what their digests name."""

    blocks: list[int]
    reused: int


def root_digest(fingerprint: str, block_tokens: int) -> bytes:
    """Start of every chain: blocks of different models or sizes never have the same digest."""
    return blake2b(f"{block_tokens}:{fingerprint}".encode(), digest_size=DIGEST_BYTES).digest()


def next_digest(previous: bytes, tokens: bytes) -> bytes:
    """Digest of the block that follows `previous` and holds `tokens` (int32, little-endian)."""
    return blake2b(previous + tokens, digest_size=DIGEST_BYTES).digest()


class BlockPool:
    """Hands out blocks 0 to `blocks` - 1, counts references, and remembers the content of full blocks."""

    def __init__(self, *, blocks: int, block_tokens: int = 16, reuse: bool = True) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(f"A KV pool of {blocks} blocks of {block_tokens} tokens holds nothing; raise --kv-tokens.")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.reuse = reuse
        self._references = [0] * blocks
        self._digests: list[bytes | None] = [None] * blocks
        self._by_digest: dict[bytes, int] = {}
        self._blank = list(range(blocks - 1, -1, -1))
        # A dict keeps its insertion order: the first key is the block released longest ago.
        self._cached: dict[int, None] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._blank) + len(self._cached)

    def acquire(self, digests: Sequence[bytes], count: int, spare: int = 0) -> Acquired | None:
        """Take `count` blocks, of which as many of the first as possible are those that `digests` name.

        Args:
            digests: Chain of the sequence's first full blocks, at most `count` of them.
            spare: Free blocks that must remain.

        Returns:
            None, and nothing is taken, if there are too few.
        """
        shared: list[int] = []
        revived = 0
        if self.reuse:
            for digest in digests:
                block = self._by_digest.get(digest)
                if block is None:
                    break
                shared.append(block)
                revived += self._references[block] == 0
        if count - len(shared) + revived + spare > self.free:
            return None
        for block in shared:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        blocks = shared + [self.take() for _ in range(count - len(shared))]
        return Acquired(blocks=blocks, reused=len(shared))

    def take(self) -> int:
        """Take one block with no content. Raises BlockError: none is free; look at `free` first."""
        if self._blank:
            block = self._blank.pop()
        elif self._cached:
            block = next(iter(self._cached))
            del self._cached[block]
            self._forget(block)
        else:
            raise BlockError(f"All {self.blocks} KV blocks are held; preempt a request first.")
        self._references[block] = 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """Say that a held block is full, will not change, and holds what `digest` names."""
        if self._references[block] < 1:
            raise BlockError(f"Block {block} is published but nobody holds it.")
        # Two requests may compute the same content at once: the first copy serves later ones.
        if self.reuse and self._digests[block] is None and digest not in self._by_digest:
            self._digests[block] = digest
            self._by_digest[digest] = block

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block of a sequence, in the sequence's order.

        The last blocks become the first to be taken again: a chain is only usable from its beginning.
        """
        for block in reversed(list(blocks)):
            references = self._references[block] - 1
            if references < 0:
                raise BlockError(f"Block {block} is released but nobody holds it.")
            self._references[block] = references
            if references == 0:
                if self._digests[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def forget(self) -> None:
        """Let no content be used again: what is held is its holders' alone."""
        self._by_digest.clear()
        self._digests = [None] * self.blocks
        self._blank += self._cached
        self._cached.clear()

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block] = None
