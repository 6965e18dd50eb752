"""How long steps take, as it is learned; and how many rows of prompts that allows beside requests that generate."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eaas.worker.blocks import BlockPool
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.protocol import SamplingParams, Share, Submit
from eaas.worker.request import Request
from eaas.worker.scheduler import Scheduler, SchedulerConfig
from eaas.worker.step_time import EVERY, STRETCH, StepTime, rows_beside
from tests.eaas.fake_decoder import BLOCK_TOKENS, VOCAB, FakeDecoder

MOST = 512
Curve = Callable[[int], float]
# Seconds of a step by its rows: where reading weights counts most, where computing does, and where neither grows.
MACHINES: dict[str, Curve] = {
    "two cores": lambda rows: 6e-3 + 1.3e-3 * min(rows, 32) + 0.7e-3 * max(0, rows - 32),
    "line": lambda rows: 4e-3 + 1e-3 * rows,
    "accelerator": lambda rows: 9e-3 + 2e-6 * rows,
}


def seed() -> int:
    return time.time_ns()


@pytest.mark.parametrize("machine", list(MACHINES))
def test_what_steps_take_is_learned_of_all_sizes_between_those_seen(machine: str) -> None:
    found, curve, drawn = StepTime(MOST), MACHINES[machine], seed()
    draw, sizes = random.Random(drawn), (1, 2, 5, 9, 16, 40, 100, 256, 512)
    for _ in range(4000):
        rows = draw.choice(sizes)
        found.took(rows, curve(rows) * draw.uniform(0.9, 1.1))
    for rows in (1, 2, 3, 5, 12, 16, 30, 64, 100, 200, 300, 512):
        assert found.of(rows) == pytest.approx(curve(rows), rel=0.25), f"seed {drawn}: {rows} rows"


def test_one_more_row_never_shortens_a_step_and_adds_at_most_its_even_part() -> None:
    drawn = seed()
    draw = random.Random(drawn)
    for _ in range(50):
        found = StepTime(MOST)
        for _ in range(100):
            found.took(draw.randint(1, MOST), draw.uniform(0, 1) ** 4)
        times = [found.of(rows) for rows in range(1, MOST + 1)]
        for rows in range(1, MOST):
            before, after = times[rows - 1], times[rows]
            assert before <= after * (1 + 1e-9) <= before * (rows + 1) / rows * (1 + 1e-6), f"seed {drawn}: {rows}"


def test_a_step_that_waited_says_little_and_all_sizes_follow_a_machine_that_slows_down() -> None:
    found, curve, drawn = StepTime(MOST), MACHINES["line"], seed()
    draw = random.Random(drawn)
    for number in range(3000):
        rows = draw.choice((1, 8, 512))
        found.took(rows, curve(rows) * (300 if number % 500 == 7 else 1))
    assert found.of(8) == pytest.approx(curve(8), rel=0.4), f"seed {drawn}"
    before = found.of(8)
    found.took(9, 300 * curve(9))
    assert found.of(8) < 1.5 * before
    for _ in range(300 * EVERY):
        found.took(8, 2 * curve(8))
    assert found.of(8) == pytest.approx(2 * curve(8), rel=0.05)
    assert found.of(512) > 1.2 * curve(512)


def learned(curve: Curve) -> StepTime:
    """What a worker knows that computes whole prompts, generates, and does both by what it knows."""
    found = StepTime(MOST)
    for generating in (1, 8, 32):
        for _ in range(100 * EVERY):
            found.took(MOST, curve(MOST))
            found.took(generating, curve(generating))
            rows = generating + rows_beside(found, generating, 1, MOST - generating, 0.5)
            found.took(rows, curve(rows))
    return found


@pytest.mark.parametrize("machine", list(MACHINES))
def test_prompts_before_anybody_generates_are_known_by_what_they_took(machine: str) -> None:
    """They are not measured again while somebody does."""
    found, curve = StepTime(MOST), MACHINES[machine]
    for rows in (MOST, 1):
        for _ in range(50 * EVERY):
            found.took(rows, curve(rows))
    assert found.of(1) == pytest.approx(curve(1), rel=0.05)
    assert found.of(MOST) == pytest.approx(curve(MOST), rel=0.1)


@pytest.mark.parametrize("machine", list(MACHINES))
@pytest.mark.parametrize("generating", [1, 8, 32, 200])
def test_prompts_make_steps_twice_as_long_or_have_no_more_than_their_least_speed(machine: str, generating: int) -> None:
    curve = MACHINES[machine]
    found, most = learned(curve), MOST - generating
    alone = MOST / curve(MOST)
    rows = rows_beside(found, generating, 1, most, 0.5)
    longer = curve(generating + rows) / curve(generating)
    if longer > 1.1 * STRETCH:
        assert rows / curve(generating + rows) < 0.6 * alone, (rows, longer)
    elif rows < most:
        assert longer > 0.85 * STRETCH, "a longer step could have been borne"
    if rows < most:
        assert rows / curve(generating + rows) > 0.4 * alone, (rows, longer)


def test_a_machine_on_which_rows_cost_nothing_computes_prompts_as_fast_as_ever() -> None:
    found = learned(MACHINES["accelerator"])
    assert rows_beside(found, 32, 1, MOST - 32, 0.5) == MOST - 32


def test_prompts_have_all_rows_where_nothing_was_measured_or_their_share_is_all() -> None:
    assert rows_beside(StepTime(MOST), 8, 1, 504, 0.5) == 504
    assert rows_beside(learned(MACHINES["two cores"]), 8, 1, 504, 1.0) == 504


def test_the_more_requests_wait_for_their_prompts_the_faster_those_go_and_never_alone() -> None:
    """As the part that they are of all, so that who waits and who generates count alike."""
    curve = MACHINES["two cores"]
    found, alone = learned(curve), MOST / curve(MOST)

    def speed(generating: int, waiting: int) -> float:
        rows = rows_beside(found, generating, waiting, MOST - generating, 0.5)
        return rows / curve(generating + rows) / alone

    speeds = [speed(8, waiting) for waiting in (1, 8, 16, 32, 72)]
    assert speeds[0] == speeds[1] and speeds == sorted(speeds), speeds
    for waiting, found_speed in zip((16, 32, 72), speeds[2:], strict=True):
        assert found_speed == pytest.approx(waiting / (waiting + 8), abs=0.1)
    assert speed(1, 1000) == speed(1, 9) < 0.97


def test_a_prompt_goes_on_however_long_steps_take() -> None:
    found = StepTime(MOST)
    found.took(1, 1e-3)
    for _ in range(50):
        found.took(2, 10.0)
        found.took(3, 10.0)
    assert rows_beside(found, 1, 1, 511, 1e-9) >= 1


def test_chunks_are_bounded_beside_those_who_generate_and_nowhere_else() -> None:
    curve = MACHINES["two cores"]
    pool = BlockPool(blocks=4096, block_tokens=BLOCK_TOKENS, reuse=False)
    scheduler = Scheduler(SchedulerConfig(max_model_len=4096, step_tokens=MOST), pool)
    scheduler.step_time = learned(curve)

    def add(id: str, prompt: int, background: bool = False) -> None:
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        request = Request(
            owner=0,
            id=id,
            attempt=1,
            prompt=np.arange(prompt, dtype=np.int32),
            output=[],
            params=params,
            share=Share(background=background),
        )
        scheduler.add(request)

    def step() -> int:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.complete([5] * len(plan.requests))
        return len(plan.token_ids)

    add("alone", 512)
    assert step() == MOST
    assert step() == 1
    add("beside", 1024)
    # Whoever is in the background may wait: streams do not pay for that queue.
    for number in range(50):
        add(f"background {number}", 64, background=True)
    rows = [step() for _ in range(3)]
    bound = rows_beside(scheduler.step_time, 1, 1, MOST - 1, 0.5)
    assert rows == [1 + bound] * 3 and bound < 64
    for number in range(5):
        add(f"waiting {number}", 1024)
    assert step() == 1 + rows_beside(scheduler.step_time, 1, 6, MOST - 1, 0.5) > 1 + 2 * bound
    scheduler.cancel(0, "alone")
    assert step() == MOST


def test_a_calm_step_that_was_thought_long_is_measured_again_while_prompts_keep_coming() -> None:
    curve = MACHINES["line"]
    pool = BlockPool(blocks=1 << 15, block_tokens=BLOCK_TOKENS, reuse=False)
    scheduler = Scheduler(SchedulerConfig(max_model_len=1 << 14, step_tokens=MOST, max_running=9), pool)
    scheduler.step_time = learned(curve)
    for _ in range(40 * EVERY):
        scheduler.step_time.took(8, 3 * curve(8))

    def add(id: str, prompt: int) -> None:
        params = SamplingParams(max_tokens=8192 if prompt == 1 else 1, ignore_eos=True)
        scheduler.add(Request(owner=0, id=id, attempt=1, prompt=np.zeros(prompt, np.int32), output=[], params=params))

    for number in range(8):
        add(f"{number}", 1)
    longest = list[float]()
    for number in range(1500):
        if scheduler.waiting < 2:
            add(f"prompt {number}", 512)
        plan = scheduler.plan()
        assert plan is not None
        scheduler.complete([5] * len(plan.requests))
        rows = len(plan.token_ids)
        scheduler.step_time.took(rows, curve(rows))
        longest = [*longest[-200:], curve(rows) / curve(8)]
    assert max(longest) < 1.5 * STRETCH


def test_an_engine_learns_from_its_steps_how_many_rows_of_prompts_others_can_bear() -> None:
    now, decoder = [0.0], FakeDecoder(1024)
    compute = decoder.step

    def step(plan: Any, deadline_s: float) -> np.ndarray:
        now[0] += MACHINES["two cores"](len(plan.token_ids))
        return compute(plan, deadline_s)

    decoder.step = step
    config = EngineConfig(max_model_len=2048, block_tokens=BLOCK_TOKENS, kv_blocks=1024, step_tokens=MOST, vocab=VOCAB)
    engine = Engine(decoder, config, clock=lambda: now[0])
    for number, prompt in enumerate((600, 600, 600)):
        params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        engine.submit(Submit(id=f"{number}", attempt=1, prompt=[1 + number] * prompt, params=params))
        for _ in range(60):
            engine.step()
    assert decoder.rows_per_step[0] == MOST
    assert 8 < max(decoder.rows_per_step[62:]) < 100, decoder.rows_per_step
