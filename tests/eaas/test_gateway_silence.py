"""Workers that fall silent with work: their choices go on elsewhere at once, and a waking worker repeats nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import pytest

from eaas.gateway.config import GatewayConfig
from eaas.gateway.failover import FALSE_MOST_S, FORGIVE_S, LEAST_S, MOST_S, Silence
from eaas.gateway.metrics import GatewayMetrics
from eaas.gateway.pool import WorkerPool
from eaas.worker.protocol import PROTOCOL, Failed, Step, Submit, Token, encode
from tests.eaas.gateway_world import FakeWorker
from tests.eaas.test_gateway_pool import sequence_of, until, view_of, worker_of
from tests.host_stalls import bounded

pytestmark = pytest.mark.alone

TEXT = "hello "


def in_a_pool(
    scenario: Callable[[WorkerPool, list[FakeWorker]], Awaitable[None]],
    workers: int,
    deadline_s: float = 30.0,
) -> None:
    async def run() -> None:
        config = GatewayConfig(deadline_s=deadline_s)
        pool = WorkerPool(config, GatewayMetrics())
        group = [await worker_of(number) for number in range(1, workers + 1)]
        pool.apply_view(view_of(*group))
        await until(lambda: len(pool.links()) == workers, "links")
        try:
            await scenario(pool, group)
        finally:
            pool.close()

    asyncio.run(run())


def test_a_silent_worker_is_left_at_once_and_used_again_when_it_wakes() -> None:
    async def scenario(pool: WorkerPool, workers: list[FakeWorker]) -> None:
        generation, sequence = sequence_of(TEXT, 400)
        pool.submit(sequence)
        await until(lambda: len(sequence.log.output) > 5, "tokens")
        frozen = next(worker for worker in workers if worker.submits)
        other = next(worker for worker in workers if worker is not frozen)
        frozen.silent = True
        # Generous: the bound is 0.25 s where the machine is quiet.
        with bounded(3.0):
            await until(lambda: other.submits, "a replay")
        assert other.submits[0].output == sequence.log.output[: len(other.submits[0].output)]
        # It wakes in the middle of its step: its next token is of an attempt that is over.
        await until(lambda: frozen.cancels, "the Cancel")
        frozen.silent = False
        stale = Token(id=sequence.id, attempt=1, index=len(other.submits[0].output), token=7)
        for writer in frozen.writers:
            writer.write(encode(Step(tokens=[stale])))
        await until(lambda: pool.metrics.stale_tokens == 1, "what a waking worker says")
        await until(lambda: generation.ended, "the end")
        assert generation.error is None
        assert generation.finished_choices()[0].text == (TEXT * 67)[:400]
        assert pool.metrics.replays == {"silent": 1}
        assert pool.metrics.silences == 1
        await until(lambda: not any(link.silence.alarmed for link in pool.links()), "trust again")
        # Of two idle workers the one chosen longest ago is taken.
        again, more = sequence_of("more ", 20)
        pool.submit(more)
        await until(lambda: again.ended, "another end")
        assert again.finished_choices()[0].text == "more " * 4

    in_a_pool(scenario, 2)


def test_the_only_worker_is_waited_for_and_goes_on_in_the_same_attempt() -> None:
    async def scenario(pool: WorkerPool, workers: list[FakeWorker]) -> None:
        generation, sequence = sequence_of(TEXT, 60)
        pool.submit(sequence)
        await until(lambda: len(sequence.log.output) > 5, "tokens")
        workers[0].silent = True
        await until(lambda: pool.metrics.silences == 1, "the alarm")
        assert "attention/1 is silent" in pool.unready_reason()
        _, later = sequence_of("later ", 12)
        pool.submit(later)
        assert pool.waiting == 1, "nothing new is given to a silent worker"
        workers[0].silent = False
        await until(lambda: generation.ended and later.generation.ended, "the ends")
        assert generation.finished_choices()[0].text == TEXT * 10
        assert later.generation.finished_choices()[0].text == "later later "
        assert [submit.attempt for submit in workers[0].submits] == [1, 1]
        assert pool.metrics.replays == {}

    in_a_pool(scenario, 1)


def test_nothing_that_has_begun_leaves_its_class_because_its_worker_is_silent() -> None:
    async def scenario(pool: WorkerPool, workers: list[FakeWorker]) -> None:
        generation, sequence = sequence_of(TEXT, 60)
        pool.submit(sequence)
        await until(lambda: len(sequence.log.output) > 5, "tokens")
        other = await worker_of(9)
        other.numerics_class = "another"
        pool.apply_view(view_of(*workers, other))
        await until(lambda: len(pool.links()) == 2, "two links")
        workers[0].silent = True
        await until(lambda: pool.metrics.silences == 1, "the alarm")
        # What has not begun goes where it can begin.
        _, later = sequence_of("later ", 12)
        pool.submit(later)
        await until(lambda: later.generation.ended, "the later one")
        assert [submit.id for submit in other.submits] == [later.id]
        workers[0].silent = False
        await until(lambda: generation.ended, "the end")
        assert generation.finished_choices()[0].text == TEXT * 10
        assert (pool.metrics.replays, pool.metrics.class_crossings) == ({}, 0)

    in_a_pool(scenario, 1)


def test_past_the_deadline_a_silent_worker_is_left_for_another_class() -> None:
    async def scenario(pool: WorkerPool, workers: list[FakeWorker]) -> None:
        generation, sequence = sequence_of(TEXT, 60)
        sequence.key = "known"
        pool.submit(sequence)
        await until(lambda: len(sequence.log.output) > 5, "tokens")
        other = await worker_of(9)
        other.numerics_class = "another"
        pool.apply_view(view_of(*workers, other))
        await until(lambda: len(pool.links()) == 2, "two links")
        workers[0].silent = True
        await until(lambda: generation.ended, "the end")
        assert generation.finished_choices()[0].text == TEXT * 10
        assert pool.metrics.class_crossings == 1
        assert workers[0].submits[0].key == "known" and not other.submits[-1].key, "nobody joins what is of two classes"

    in_a_pool(scenario, 1, deadline_s=1.0)


def test_whichever_comes_first_the_silent_worker_or_a_new_one_goes_on() -> None:
    async def scenario(pool: WorkerPool, workers: list[FakeWorker]) -> None:
        generation, sequence = sequence_of(TEXT, 60)
        pool.submit(sequence)
        await until(lambda: len(sequence.log.output) > 5, "tokens")
        workers[0].silent = True
        await until(lambda: pool.metrics.silences == 1, "the alarm")
        new = await worker_of(9)
        pool.apply_view(view_of(*workers, new))
        await until(lambda: generation.ended, "the end")
        assert generation.finished_choices()[0].text == TEXT * 10
        assert new.submits[0].attempt == 2
        assert pool.metrics.replays == {"silent": 1}

    in_a_pool(scenario, 1)


def test_nobody_waits_for_a_silent_worker_past_the_deadline() -> None:
    async def scenario(pool: WorkerPool, workers: list[FakeWorker]) -> None:
        generation, sequence = sequence_of(TEXT, 60)
        pool.submit(sequence)
        await until(lambda: len(sequence.log.output) > 5, "tokens")
        workers[0].silent = True
        await until(lambda: generation.ended, "the end")
        assert generation.error is not None
        assert generation.error.status == 503
        assert generation.error.retry_after_s
        assert "attention/1 has been silent" in generation.error.message
        assert pool.running == 0

    in_a_pool(scenario, 1, deadline_s=0.5)


def test_a_worker_that_only_takes_long_is_not_left() -> None:
    async def scenario(pool: WorkerPool, workers: list[FakeWorker]) -> None:
        generation, sequence = sequence_of(TEXT, 60)
        pool.submit(sequence)
        await until(lambda: len(sequence.log.output) > 5, "tokens")
        busy = next(worker for worker in workers if worker.submits)
        busy.frozen = True
        await asyncio.sleep(3 * MOST_S)
        busy.frozen = False
        await until(lambda: generation.ended, "the end")
        assert [submit.attempt for submit in busy.submits] == [1]

    in_a_pool(scenario, 2)


def test_the_gateways_own_stall_is_nobodys_silence() -> None:
    async def scenario(pool: WorkerPool, workers: list[FakeWorker]) -> None:
        generation, sequence = sequence_of(TEXT, 60)
        pool.submit(sequence)
        await until(lambda: len(sequence.log.output) > 5, "tokens")
        # The fake worker stands still with this thread, as a real one's words would lie unread.
        time.sleep(2 * MOST_S)
        await until(lambda: generation.ended, "the end")
        assert pool.metrics.silences == 0

    in_a_pool(scenario, 2)


def test_a_full_worker_is_asked_again_for_what_has_begun_and_refuses_what_has_not() -> None:
    async def scenario(pool: WorkerPool, workers: list[FakeWorker]) -> None:
        def overloaded(submit: Submit) -> Failed:
            return Failed(id=submit.id, attempt=submit.attempt, code="overloaded", message="full", retryable=True)

        generation, sequence = sequence_of(TEXT, 60)
        pool.submit(sequence)
        await until(lambda: len(sequence.log.output) > 5, "tokens")
        full = await worker_of(9)
        full.refuse = overloaded
        pool.apply_view(view_of(*workers, full))
        await until(lambda: len(pool.links()) == 2, "links")
        workers[0].stop_now()
        await until(lambda: full.submits, "the replay")
        fresh, new = sequence_of("new ", 8)
        pool.submit(new)
        await until(lambda: fresh.ended, "a refusal")
        assert fresh.error is not None and fresh.error.status == 429 and fresh.error.retry_after_s
        full.refuse = lambda _: None
        await until(lambda: generation.ended, "the end")
        assert generation.error is None
        assert generation.finished_choices()[0].text == TEXT * 10

    in_a_pool(scenario, 1)


def test_a_worker_of_another_protocol_is_not_used_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(pool: WorkerPool, workers: list[FakeWorker]) -> None:
        newer = await worker_of(9)
        newer.protocol = PROTOCOL + 1
        pool.apply_view(view_of(*workers, newer))
        await until(lambda: "it speaks protocol" in caplog.text, "the refusal")
        for number in range(4):
            generation, sequence = sequence_of(f"{number} ", 6)
            pool.submit(sequence)
            await until(lambda generation=generation: generation.ended, "the end")
            assert generation.error is None
        assert not newer.submits

    in_a_pool(scenario, 1)
    assert f"it speaks protocol {PROTOCOL + 1}, this gateway {PROTOCOL}; start both from the same" in caplog.text


# -- the bound itself


def test_a_quiet_machine_gives_the_least_bound_and_a_rough_one_at_most_the_most() -> None:
    silence = Silence()
    for number in range(1000):
        silence.heard(0.05, number * 0.05)
    assert silence.bound_s(50.0) == LEAST_S
    silence.heard(0.12, 50.0)
    assert 0.4 < silence.bound_s(50.0) < 0.5
    silence.heard(0.24, 50.3)
    assert silence.bound_s(50.3) == MOST_S


def test_false_alarms_double_the_bound_and_are_forgiven() -> None:
    silence = Silence()
    bounds = []
    for number in range(8):
        silence.alarmed = True
        assert silence.heard(0.3, float(number))
        bounds.append(silence.bound_s(float(number)))
    assert bounds[:3] == [2 * LEAST_S, 4 * LEAST_S, 8 * LEAST_S]
    assert bounds[-1] == FALSE_MOST_S
    for minute in range(1, 9):
        silence.bound_s(8.0 + minute * FORGIVE_S)
    assert silence.bound_s(10.0 + 9 * FORGIVE_S) == LEAST_S


def test_a_long_freeze_is_no_false_alarm() -> None:
    silence = Silence(alarmed=True)
    assert silence.heard(10.0, 20.0)
    assert silence.bound_s(20.0) == LEAST_S


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_stalls_at_random_is_not_alarmed_again_and_again(seed: int) -> None:
    draw = random.Random(seed)
    silence, now_s, alarms = Silence(), 0.0, 0
    for _ in range(20_000):
        gap_s = draw.expovariate(1 / 0.4) if draw.random() < 0.01 else 0.05
        now_s += gap_s
        silence.alarmed = gap_s >= silence.bound_s(now_s)
        alarms += silence.heard(gap_s, now_s)
    assert alarms <= now_s / 20.0, f"seed {seed}: {alarms} alarms in {now_s:.0f} s"


def test_the_router_is_told_who_speaks_and_who_owes_tokens_and_does_not() -> None:
    async def scenario(pool: WorkerPool, workers: list[FakeWorker]) -> None:
        told: list[tuple[str, int, str]] = []
        pool.on_silent = lambda name, incarnation, reason: told.append((name, incarnation, reason))
        _, sequence = sequence_of(TEXT, 60)
        pool.submit(sequence)
        await until(lambda: len(sequence.log.output) > 5, "tokens")
        assert pool.load()["hears:attention/1"] == 1.0
        workers[0].silent = True
        await until(lambda: bool(told), "a word to the router")
        (link,) = pool.links()
        assert told[0][:2] == ("attention/1", link.incarnation), told
        assert told[0][2].startswith(f"it owes {link.outstanding} tokens and has been silent for 1."), told
        assert "hears:attention/1" not in pool.load()
        workers[0].silent = False
        await until(lambda: sequence.generation.ended, "the end")
        assert len(told) == 1, told

    in_a_pool(scenario, 1)
