"""The policy of GPU clients' patience, alone: what it is measured by, and a long life of servers under it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from experts.gpu import patience
from experts.gpu.patience import EDGES_NS, LEAST_PAIRS, SIZES, STEPS, Patience

CALLS = 100_000


def size_of(pairs: int) -> int:
    """The size class of so many pairs."""
    return min(SIZES - 1, max(0, pairs.bit_length() - LEAST_PAIRS.bit_length() + 1))


def step_of(ns: int) -> int:
    """The step that a time counts in."""
    fine = ns >> 12
    octave = max(0, fine.bit_length() - 3)
    return 0 if fine < 4 else min(STEPS - 1, octave * 4 + (fine >> octave & 3))


def counts_of(*replies: tuple[int, int, int], servers: int = 2) -> np.ndarray:
    """Replies as (server, pairs, ns)."""
    counts = np.zeros((servers, SIZES, STEPS), np.int64)
    for server, pairs, ns in replies:
        counts[server, size_of(pairs), step_of(ns)] += 1
    return counts


def test_times_and_sizes_fall_into_steps_that_cover_them() -> None:
    for ns in (0, 16_383, 16_384, 20_480, 300_000, 20_000_000, 999_999_999):
        step = step_of(ns)
        assert ns < EDGES_NS[step] and (step == 0 or ns >= EDGES_NS[step - 1])
    assert step_of(1 << 40) == STEPS - 1
    assert [size_of(pairs) for pairs in (1, 15, 16, 31, 32, 4096, 1 << 20)] == [0, 0, 1, 1, 2, 9, 9]


def test_limits_follow_the_slowest_of_a_hundred_and_never_the_best_by_far() -> None:
    known = Patience(2)
    assert (known.limits_ns() == patience.UNKNOWN_NS).all()
    known.learn(counts_of(*[(0, 64, 4_000_000)] * 200, *[(0, 64, 500_000_000)] * 3))
    hedge, suspect = known.limits_ns()[0, size_of(64)]
    assert 8_000_000 <= hedge <= 10_000_000 and suspect == patience.SUSPECT_FLOOR_NS
    # A larger size was never seen: as many times longer. A smaller one took no longer.
    assert known.limits_ns()[0, size_of(128), 0] == 2 * hedge
    assert known.limits_ns()[0, size_of(16), 0] == hedge
    assert (known.limits_ns()[1] == patience.UNKNOWN_NS).all(), "one server's times are not another's"
    known.learn(counts_of(*[(1, 64, 100_000_000)] * 200))
    assert known.limits_ns()[1, size_of(64), 0] == patience.LONG_TIMES * hedge
    known.learn(counts_of(*[(0, 64, 300_000)] * 4000))
    assert known.limits_ns()[0, size_of(64)].tolist() == [patience.HEDGE_FLOOR_NS, patience.SUSPECT_FLOOR_NS]
    known.forget(0)
    assert (known.limits_ns()[0] == patience.UNKNOWN_NS).all()


@dataclass
class Life:
    """One client's calls to two servers, by the policy's numbers alone.

    Attributes:
        suspected: Replies that came, of servers that were suspect before.
        hedged, pairs: Sent again by hedging, and sent at all.
    """

    suspected: int = 0
    hedged: int = 0
    pairs: int = 0

    def live(
        self,
        seed: int,
        limits: Callable[[np.ndarray], np.ndarray] = lambda known: known,
        *,
        pays: bool = True,
    ) -> None:
        """Passes of 0.3 ms that take 20 ms now and then, at one server or at all; a request may see two of them.

        Args:
            limits: What a mutant makes of the limits.
            pays: Whether hedges cost credit.
        """
        draw = random.Random(seed)
        known, counts = Patience(2), counts_of()
        table, credit, now_s, counted_s = limits(known.limits_ns()), 0, 0.0, 0.0
        slow: tuple[int, ...] = ()
        for call in range(CALLS):
            if call % 2500 == 0:
                # Only who is slow while the best is not is measured by the best.
                slow = draw.choice(((), (0,), (0,), (0, 1)))
            pairs = draw.choice((8, 64, 64, 64, 512))
            longest_ns = 0
            if credit < patience.HEDGE_CALLS * patience.HEDGE_COST * pairs:
                credit += patience.HEDGE_EARNED * pairs
            self.pairs += pairs
            for server in (0, 1):
                pass_ns = (20_000_000 if server in slow else 300_000) * draw.uniform(0.9, 1.1)
                took_ns = int(pass_ns * (1 + draw.random()) + 1000 * pairs)
                size = size_of(pairs // 2)
                hedge_ns, suspect_ns = table[server, size]
                if took_ns > hedge_ns and (not pays or credit >= patience.HEDGE_COST * (pairs // 2)):
                    credit -= patience.HEDGE_COST * (pairs // 2)
                    self.hedged += pairs // 2
                self.suspected += took_ns > suspect_ns
                counts[server, size, step_of(min(took_ns, int(suspect_ns)))] += 1
                longest_ns = max(longest_ns, took_ns)
            now_s += longest_ns / 1e9
            if now_s - counted_s > 0.5:
                known.learn(counts)
                counts[:] = 0
                table, counted_s = limits(known.limits_ns()), now_s

    def wrong(self) -> str:
        """What the policy promises and this life broke."""
        if self.suspected:
            return f"{self.suspected} servers that answered were suspect"
        if self.hedged > 0.05 * self.pairs:
            return f"{self.hedged} of {self.pairs} pairs were hedged"
        return ""


@pytest.mark.full(seconds=3)
def test_a_long_life_suspects_nobody_who_answers_and_hedges_little() -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    life = Life()
    life.live(seed)
    assert not life.wrong(), f"seed {seed}: {life.wrong()}"
    assert life.hedged, f"seed {seed}: nobody was ever hedged"


MUTANTS: dict[str, dict[str, object]] = {
    "a constant patience of 5 ms": {"limits": lambda known: np.full_like(known, 5_000_000)},
    "no credit": {"pays": False},
    "suspect at the hedge's limit": {"limits": lambda known: known[:, :, :1].repeat(2, axis=2)},
}


@pytest.mark.full(seconds=3)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_long_life_kills_mutants(name: str) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    life = Life()
    life.live(seed, **MUTANTS[name])  # type: ignore[arg-type]
    assert life.wrong(), f"seed {seed}: {name} lives"
