"""What the scaling policy promises, by name."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from router.scaling import Memory, Policy, PolicyInvalid, Signals, decide, signals_of

SAMPLE_S = 10.0


class Pool:
    """A pool that obeys at once, starts servers in start_s, and drains in no time; counted by its own record."""

    def __init__(self, policy: Policy, size: int) -> None:
        self.policy, self.memory, self.now_s = policy, Memory(), 1000.0
        self.wanted = self.live = size
        self.orders: list[tuple[float, int]] = []
        self.sizes: list[tuple[float, int]] = []

    def tick(self, load: float, step_s: float = SAMPLE_S, **words: float | None) -> int:
        """One decision under a load in servers; words replace what is reported."""
        self.now_s += step_s
        while self.orders and self.orders[0][0] <= self.now_s:
            self.live += self.orders.pop(0)[1]
        busy = min(1.0, load / self.live) if self.live else None
        said = Signals(wanted=self.wanted, live=self.live, starting=self.wanted - self.live, busy=busy)
        size, self.memory = decide(self.policy, replace(said, **words), self.memory, self.now_s)
        if size != self.wanted:
            self.sizes.append((self.now_s, size))
        if size > self.wanted:
            self.orders.append((self.now_s + self.policy.start_s, size - self.wanted))
        elif size < self.wanted:
            self.orders, self.live = [], size
        self.wanted = size
        return size


def noisy(seed: int, load: float) -> float:
    return load * random.Random(seed).lognormvariate(0.0, 0.25)


@pytest.mark.parametrize("unit", [1, 4])
def test_the_size_never_leaves_its_bounds_and_is_whole_units(unit: int) -> None:
    for seed in range(10):
        chance = random.Random(seed)
        policy = Policy(least=4, most=20, unit=unit)
        pool = Pool(policy, 8)
        for _ in range(500):
            load = chance.choice([0.0, 1.0, 10.0, 1e6])
            size = pool.tick(load, queue_s=chance.choice([None, 0.0, 1e9]), lateness=chance.choice([None, 9.0]))
            assert 4 <= size <= 20 and size % unit == 0, f"seed {seed}: {size}, {pool.memory.why}"


def test_a_size_out_of_bounds_is_put_right_at_once() -> None:
    for wanted, right in ((1, 2), (9, 8)):
        size, memory = decide(Policy(least=2, most=8), Signals(wanted=wanted, live=wanted), Memory(), 0.0)
        assert size == right and "bounds" in memory.why


def test_it_grows_within_one_sample_of_a_burst() -> None:
    for seed in range(20):
        pool = Pool(Policy(), 20)
        for step in range(100):
            pool.tick(noisy(seed * 1000 + step, 8.0))
        while pool.live < pool.wanted:
            pool.tick(8.0)
        before = pool.wanted
        size = pool.tick(before)
        assert size > before, f"seed {seed}: {size} after {before}; {pool.memory.why}"


def test_it_shrinks_only_after_the_hold() -> None:
    pool = Pool(Policy(), 40)
    for _ in range(100):
        pool.tick(20.0)
    ended_s, settled = pool.now_s, pool.wanted
    pool.sizes.clear()
    for _ in range(60):
        pool.tick(10.0)
    assert pool.sizes, "it never shrank"
    assert pool.sizes[0][0] > ended_s + pool.policy.hold_s and pool.sizes[0][1] < settled


def test_one_change_is_in_flight() -> None:
    pool = Pool(Policy(), 4)
    for step in range(400):
        pool.tick(4.0 + step / 10)
    gaps = [b - a for (a, _), (b, _) in zip(pool.sizes, pool.sizes[1:], strict=False)]
    assert gaps and min(gaps) >= pool.policy.start_s, gaps


def test_an_overdue_start_holds_up_no_further_growth() -> None:
    policy, memory, wanted = Policy(), Memory(), 4
    sizes = []
    for step in range(20):
        said = Signals(wanted=wanted, live=4, starting=wanted - 4, busy=1.0, queue_s=step * 5.0)
        wanted, memory = decide(policy, said, memory, step * SAMPLE_S)
        sizes.append(wanted)
    assert len(set(sizes)) >= 4, sizes


def test_servers_that_are_starting_count() -> None:
    pool = Pool(replace(Policy(), start_s=600.0), 4)
    for _ in range(40):
        pool.tick(4.0, queue_s=0.0)
    assert pool.wanted == 7, pool.sizes


def test_changes_keep_their_rate_in_any_hour() -> None:
    for seed in range(5):
        chance = random.Random(seed)
        policy = Policy(changes_per_h=12, hold_s=20.0)
        pool = Pool(policy, 10)
        for _ in range(3000):
            pool.tick(chance.uniform(1.0, 40.0))
        at_s = [when for when, _ in pool.sizes]
        worst = max(sum(start <= when < start + 3600 for when in at_s) for start in at_s)
        assert worst <= 12, f"seed {seed}: {worst} changes within an hour"


def test_a_queue_wakes_a_pool_of_zero_and_a_pause_ends_it() -> None:
    policy = Policy(least=0)
    size, memory = decide(policy, Signals(wanted=0, live=0, queue_s=0.0), Memory(), 0.0)
    assert size == 0
    size, memory = decide(policy, Signals(wanted=0, live=0, queue_s=0.2), memory, 0.1)
    assert size == 1 and "requests wait" in memory.why
    pool = Pool(policy, 3)
    for _ in range(60):
        pool.tick(2.0)
    assert pool.wanted > 0
    for _ in range(29):
        pool.tick(0.0)
    assert pool.wanted > 0, "given up before idle_s"
    pool.tick(0.0)
    assert pool.wanted == 0 and "no work" in pool.memory.why
    for _ in range(100):
        assert pool.tick(0.0) == 0, pool.memory.why


def test_it_says_why() -> None:
    pool = Pool(Policy(), 4)
    pool.tick(4.0)
    pool.tick(4.0)
    assert pool.memory.why.startswith("4 -> 7: at once; load 4.0, trend 4.0, burst 4.0: 4.0 x 1.75"), pool.memory.why
    pool.tick(4.0)
    assert "7 starting" in pool.memory.why or "enough" in pool.memory.why, pool.memory.why


def test_a_lost_memory_is_harmless() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        pool = Pool(Policy(), 20)
        for step in range(200):
            pool.tick(noisy(seed * 1000 + step, 10.0))
        before = pool.wanted
        pool.memory = Memory()
        for step in range(11):
            size = pool.tick(noisy(seed * 999 + step, 10.0) * chance.choice([0.5, 1.0]))
            assert size >= before, f"seed {seed}: {size} of {before} after {step} samples; {pool.memory.why}"


@pytest.mark.parametrize("missing", ["busy", "queue_s", "backlog_tokens", "tokens_per_s", "kv_use", "lateness"])
def test_missing_signals_are_never_taken_for_nothing(missing: str) -> None:
    whole = Signals(
        wanted=10,
        live=10,
        busy=0.6,
        backlog_tokens=0.0,
        tokens_per_s=6e3,
        queue_s=0.0,
        kv_use=0.1,
        lateness=0.2,
    )
    memory = Memory()
    for step in range(200):
        said = whole if step < 100 else replace(whole, **{missing: None})
        size, memory = decide(Policy(), said, memory, step * SAMPLE_S)
        assert size >= 10, f"step {step}: {memory.why}"


def test_without_any_report_the_size_stays() -> None:
    memory = Memory()
    for step in range(200):
        size, memory = decide(Policy(), Signals(wanted=7, live=7), memory, step * SAMPLE_S)
        assert size == 7
    assert "no load" in memory.why


def test_a_constant_noisy_load_does_not_make_it_swing() -> None:
    for seed in range(10):
        chance = random.Random(seed)
        pool = Pool(Policy(), 18)
        for _ in range(8640):
            pool.tick(10.0 * chance.lognormvariate(0.0, 0.1))
        assert len(pool.sizes) <= 24 * 6, f"seed {seed}: {len(pool.sizes)} changes a day"


def test_a_queue_counts_by_tokens_or_by_its_age() -> None:
    for words in ({"backlog_tokens": 2e4, "tokens_per_s": 1e4}, {"queue_s": 2.0}):
        pool = Pool(Policy(), 10)
        pool.tick(10.0, **words)
        size = pool.tick(10.0, **words)
        # 20 server-seconds within 10 s are two servers more than 1.75 x 10.
        assert size == 20, f"{words}: {size}, {pool.memory.why}"


def test_a_full_cache_asks_for_servers_whatever_the_load() -> None:
    pool = Pool(Policy(), 10)
    pool.tick(1.0, kv_use=0.97)
    assert pool.tick(1.0, kv_use=0.97) == 12 and "KV" in pool.memory.why


def test_a_missed_slo_raises_the_headroom_only_of_busy_servers() -> None:
    strains = {}
    for busy in (0.4, 0.6):
        said, memory = Signals(wanted=10, live=10, busy=busy, lateness=1.5), Memory()
        for step in range(12):
            _, memory = decide(Policy(), said, memory, step * SAMPLE_S)
        strains[busy] = memory.past.strain
    # 110 s are two windows of strain_s, so two steps of a quarter.
    assert strains[0.4] == 1.0 and strains[0.6] == pytest.approx(1.25**2, rel=0.03), strains


def test_memory_stays_small() -> None:
    chance = random.Random(1)
    pool = Pool(Policy(least=0), 10)
    for _ in range(20000):
        pool.tick(chance.uniform(0, 30), step_s=0.1 if chance.random() < 0.5 else 10.0, queue_s=chance.random())
        assert len(pool.memory.changes) <= 45 and len(pool.memory.past.needs) <= 200


def test_a_clock_that_steps_back_changes_nothing() -> None:
    pool = Pool(Policy(), 10)
    for _ in range(100):
        pool.tick(5.5)
    size, memory = decide(pool.policy, Signals(wanted=10, live=10, busy=0.0), pool.memory, pool.now_s - 500)
    assert size == 10 and memory.at_s == pool.now_s


@pytest.mark.parametrize(
    "wrong",
    [
        {"least": 3, "most": 2},
        {"least": -1},
        {"unit": 3},
        {"start_s": 0.0},
        {"headroom": 0.0},
        {"burst_s": 500.0},
        {"hold_s": 1e6},
        {"changes_per_h": 0},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PolicyInvalid, match="give"):
        Policy(**wrong)  # type: ignore[arg-type]


def test_signals_are_read_from_load_words() -> None:
    loads = {
        "expert": [{"busy": 0.2, "rows_per_s": 100.0}, {"busy": 0.4, "rows_per_s": 300.0}, {}],
        "attention": [{"busy": 0.5, "tokens_per_s": 50.0, "backlog_tokens": 70.0, "queue_s": 0.5, "kv_use": 0.3}],
        "gateway": [{"backlog_tokens": 30.0, "queue_s": 2.0, "ttft_p99_s": 1.0, "tpot_p99_s": 0.3}],
    }
    sizes = {"wanted": 3, "live": 3, "starting": 0, "draining": 0}
    expert = signals_of("expert", loads, **sizes)
    assert expert.busy == pytest.approx(0.3) and expert.tokens_per_s == 400.0
    assert expert.queue_s is None and expert.backlog_tokens is None
    attention = signals_of("attention", loads, **sizes)
    assert (attention.backlog_tokens, attention.queue_s, attention.kv_use) == (100.0, 2.0, 0.3)
    assert attention.lateness == pytest.approx(3.0)
    empty = signals_of("expert", loads, wanted=0, live=0, starting=0, draining=0)
    assert empty.queue_s == 2.0
