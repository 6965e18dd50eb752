"""The paged KV pool: references, sharing by content, and which block is taken next."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaas.worker.blocks import BlockError, BlockPool, next_digest, root_digest
from tests.eaas.fake_decoder import problems


def chain(tokens: list[int], fingerprint: str = "model", block_tokens: int = 1) -> list[bytes]:
    digest, found = root_digest(fingerprint, block_tokens), []
    for token in tokens:
        digest = next_digest(digest, token.to_bytes(4, "little"))
        found.append(digest)
    return found


def filled(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks of a sequence of one-token blocks, acquired and published."""
    got = pool.acquire(chain(tokens), len(tokens))
    assert got is not None
    for block, digest in zip(got.blocks, chain(tokens), strict=True):
        pool.publish(block, digest)
    return got.blocks


def test_a_common_beginning_is_shared_without_copying() -> None:
    pool = BlockPool(blocks=8, block_tokens=1)
    first = filled(pool, [1, 2, 3])
    second = pool.acquire(chain([1, 2, 9]), 3)
    assert second is not None
    assert (second.reused, second.blocks[:2]) == (2, first[:2])
    assert second.blocks[2] not in first
    assert [pool._references[b] for b in first] == [2, 2, 1]
    assert not problems(pool, [first, second.blocks])


def test_the_same_tokens_after_another_beginning_are_not_shared() -> None:
    pool = BlockPool(blocks=8, block_tokens=1)
    filled(pool, [1, 2, 3])
    got = pool.acquire(chain([7, 2, 3]), 3)
    assert got is not None
    assert got.reused == 0


def test_another_model_shares_nothing() -> None:
    pool = BlockPool(blocks=8, block_tokens=1)
    filled(pool, [1, 2, 3])
    got = pool.acquire(chain([1, 2, 3], fingerprint="another"), 3)
    assert got is not None
    assert got.reused == 0
    assert root_digest("model", 1) != root_digest("model", 2)


def test_released_blocks_serve_again_until_they_are_taken() -> None:
    pool = BlockPool(blocks=4, block_tokens=1)
    first = filled(pool, [1, 2, 3])
    pool.release(first)
    assert (pool.free, len(pool._cached)) == (4, 3)
    again = pool.acquire(chain([1, 2, 3]), 3)
    assert again is not None
    assert (again.reused, again.blocks) == (3, first)
    pool.release(again.blocks)
    taken = pool.acquire([], 4)
    assert taken is not None
    assert (pool.free, len(pool._cached)) == (0, 0)
    pool.release(taken.blocks)
    assert pool.acquire(chain([1, 2, 3]), 3).reused == 0  # type: ignore[union-attr]


def test_the_least_recently_released_goes_first_and_a_chain_from_its_end() -> None:
    pool = BlockPool(blocks=4, block_tokens=1)
    old, new = filled(pool, [1, 2]), filled(pool, [5, 6])
    pool.release(old)
    pool.release(new)
    assert [pool.take() for _ in range(4)] == [old[1], old[0], new[1], new[0]]


def test_blank_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(blocks=3, block_tokens=1)
    cached = filled(pool, [1])
    pool.release(cached)
    assert {pool.take(), pool.take()}.isdisjoint(cached)


def test_nothing_is_taken_when_there_are_too_few() -> None:
    pool = BlockPool(blocks=4, block_tokens=1)
    pool.release(filled(pool, [1, 2]))
    assert pool.acquire(chain([1, 2]), 5) is None
    assert pool.acquire(chain([1, 2]), 3, spare=2) is None
    assert pool.free == 4
    assert not problems(pool, [])
    # Two of the four free blocks are the shared ones themselves.
    assert pool.acquire(chain([1, 2]), 4) is not None


def test_what_is_forgotten_serves_nobody_again_and_no_block_is_lost() -> None:
    pool = BlockPool(blocks=4, block_tokens=1)
    held = filled(pool, [1, 2])
    pool.release(filled(pool, [3, 4]))
    pool.forget()
    assert problems(pool, [held]) == [] and (pool.free, len(pool._cached)) == (2, 0)
    assert pool.acquire(chain([1, 2]), 2).reused == 0  # type: ignore[union-attr]
    pool.release(held)
    assert (pool.free, len(pool._cached)) == (2, 0)


def test_reuse_can_be_switched_off() -> None:
    pool = BlockPool(blocks=4, block_tokens=1, reuse=False)
    pool.release(filled(pool, [1, 2]))
    assert len(pool._cached) == 0
    assert pool.acquire(chain([1, 2]), 2).reused == 0  # type: ignore[union-attr]


def test_a_second_copy_of_the_same_content_stays_unnamed() -> None:
    pool = BlockPool(blocks=4, block_tokens=1)
    digest = chain([1])[0]
    first, second = pool.take(), pool.take()
    pool.publish(first, digest)
    pool.publish(second, digest)
    pool.release([second])
    assert len(pool._cached) == 0
    assert not problems(pool, [[first]])


@pytest.mark.parametrize("blocks", [0, -1])
def test_an_empty_pool_is_refused(blocks: int) -> None:
    with pytest.raises(ValueError, match="raise --kv-tokens"):
        BlockPool(blocks=blocks)


def test_corrupting_calls_are_refused() -> None:
    pool = BlockPool(blocks=1, block_tokens=1)
    with pytest.raises(BlockError, match="released but nobody holds it"):
        pool.release([0])
    with pytest.raises(BlockError, match="published but nobody holds it"):
        pool.publish(0, chain([1])[0])
    pool.take()
    with pytest.raises(BlockError, match="preempt a request first"):
        pool.take()


Sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    prompts=Sequences,
    releases=st.lists(st.integers(0, 9), max_size=40),
    forgets=st.sets(st.integers(0, 39), max_size=3),
    blocks=st.integers(1, 12),
)
def test_no_sequence_of_calls_leaks_or_mixes_blocks(
    prompts: list[list[int]], releases: list[int], forgets: set[int], blocks: int
) -> None:
    """The judge is the world's own record: the tokens that each block was last filled with."""
    pool = BlockPool(blocks=blocks, block_tokens=1)
    content: dict[int, tuple[int, ...]] = {}
    live: list[list[int]] = []
    for turn, prompt in enumerate(prompts):
        got = pool.acquire(chain(prompt), len(prompt))
        if got is not None:
            for number, block in enumerate(got.blocks):
                upto = tuple(prompt[: number + 1])
                if number < got.reused:
                    assert content.get(block) == upto, f"block {block}: {content.get(block)}, wanted {upto}"
                else:
                    assert all(block not in blocks for blocks in live), f"block {block} is in use"
                    content[block] = upto
                    pool.publish(block, chain(prompt)[number])
            live.append(got.blocks)
        if turn < len(releases) and live:
            pool.release(live.pop(releases[turn] % len(live)))
        if turn in forgets:
            pool.forget()
            content.clear()
        assert problems(pool, live) == []
