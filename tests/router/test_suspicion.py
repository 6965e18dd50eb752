"""How surprising a silence is: judged against counting, and against what regular and irregular members are due."""

from __future__ import annotations

import math
import random

import pytest

from router.liveness import DEAD, LEARNED, REMEMBERED, SUSPECT, add_silence, suspicion
from router.state import SilenceHistogram

LEASE_S = 2.0
RENEW_S = 0.25


def histogram_of(silences: list[float]) -> SilenceHistogram:
    known = SilenceHistogram()
    for silence_s in silences:
        known = add_silence(known, silence_s, LEASE_S)
    return known


def found(known: SilenceHistogram, silence_s: float) -> float:
    return suspicion(known, silence_s, lease_s=LEASE_S, renew_s=RENEW_S)


def crossing(known: SilenceHistogram, level: float) -> float:
    """The silence at which suspicion reaches a level."""
    return next(ms / 1000 for ms in range(100_000) if found(known, ms / 1000) >= level)


def test_the_prior_is_the_lease() -> None:
    for known in (SilenceHistogram(), histogram_of([0.01] * (LEARNED - 1))):
        assert found(known, RENEW_S) == 0
        assert found(known, LEASE_S) == pytest.approx(DEAD)
        assert crossing(known, SUSPECT) == pytest.approx((LEASE_S + RENEW_S) / 2, abs=0.002)


def test_who_is_punctual_is_judged_as_the_docstring_reckons() -> None:
    known = histogram_of([0.2505] * 300)
    assert crossing(known, SUSPECT) == pytest.approx(0.28 + 2 * math.log(10) * 0.04, abs=0.01)
    assert crossing(known, DEAD) == pytest.approx(0.28 + 6 * math.log(10) * 0.04, abs=0.01)


def test_renewing_sooner_than_asked_earns_no_suspicion() -> None:
    assert found(histogram_of([0.01] * 900), RENEW_S) == 0
    assert crossing(histogram_of([0.01] * 900), SUSPECT) == pytest.approx(0.47, abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_a_wide_tail_is_waited_for_as_long_as_it_is_wide(seed: int) -> None:
    """Against counting a million silences of the same kind: never more than their tail says, plus a half."""
    dice = random.Random(seed)

    def silence_s() -> float:
        return RENEW_S + dice.expovariate(1 / 0.06)

    known = histogram_of([silence_s() for _ in range(REMEMBERED - 1)])
    for level_s in (0.3, 0.4, 0.5, 0.7, 0.9, 1.2):
        true = (level_s - RENEW_S) / 0.06 / math.log(10)
        assert found(known, level_s) <= true * 1.35 + 0.5, f"seed {seed}, {level_s} s"
        assert found(known, level_s) >= true * 0.4 - 0.5, f"seed {seed}, {level_s} s"


@pytest.mark.parametrize("seed", range(5))
def test_suspicion_grows_with_silence(seed: int) -> None:
    dice = random.Random(seed)
    known = histogram_of([dice.choice((0.02, 0.25, 0.26, 0.4, 1.9, 9.0)) for _ in range(dice.randrange(2000))])
    levels = [found(known, ms / 1000) for ms in range(0, 4000, 5)]
    assert levels == sorted(levels), f"seed {seed}"


def test_one_long_silence_in_150_buys_the_whole_lease() -> None:
    often = [*[0.25] * 150, 1.3] * 4
    assert crossing(histogram_of(often), DEAD) > LEASE_S


@pytest.mark.parametrize("seed", range(200))
def test_counting_in_buckets_condemns_nobody_sooner(seed: int) -> None:
    """Against the silences themselves: their 99th percentile, and six decades of the mean beyond it."""
    dice = random.Random(seed)
    late_s = dice.uniform(0.005, 0.2)
    silences = [
        RENEW_S + (dice.expovariate(1 / late_s) if dice.random() < 0.02 else dice.uniform(0.0, 0.01))
        for _ in range(dice.randrange(LEARNED, REMEMBERED))
    ]
    ordered = sorted(silences)
    percentile_s = ordered[math.ceil(0.99 * len(ordered)) - 1]
    beyond = [silence_s - percentile_s for silence_s in ordered if silence_s > percentile_s]
    mean_s = max(LEASE_S / 50, sum(beyond) / len(beyond) if beyond else 0.0)
    dead_s = percentile_s + 6 * math.log(10) * mean_s
    sooner_s = crossing(histogram_of(silences), DEAD)
    assert sooner_s >= min(dead_s, LEASE_S), f"seed {seed}: {sooner_s:.2f} s for {dead_s:.2f} s"


def test_what_was_long_ago_is_forgotten() -> None:
    known = histogram_of([1.5] * 300)
    for _ in range(12 * REMEMBERED):
        known = add_silence(known, 0.25, LEASE_S)
        assert known.samples < REMEMBERED
    assert crossing(known, DEAD) < 0.85
