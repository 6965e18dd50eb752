"""The worker pool alone, against workers on the same event loop: what takes too long between processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import pytest

from eaas.gateway.config import GatewayConfig
from eaas.gateway.failover import Sequence
from eaas.gateway.metrics import GatewayMetrics, Histogram, Recent
from eaas.gateway.pool import WorkerPool
from eaas.gateway.text import Choice, Generation
from eaas.worker.protocol import Failed, SamplingParams
from router.view import Member, View
from tests.eaas.gateway_world import MAX_MODEL_LEN, FakeWorker


class Letters:
    """A detokenizer for which a token is a code point."""

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


async def worker_of(number: int) -> FakeWorker:
    worker = FakeWorker(
        loop=asyncio.get_running_loop(),
        name=f"attention/{number}",
        incarnation=number,
        model_hash="",
        step_s=0.002,
    )
    await worker._start()
    return worker


def view_of(*workers: FakeWorker, draining: Iterable[FakeWorker] = ()) -> View:
    members = tuple(
        Member(
            name=w.name, pool="attention", state="draining" if w in draining else "serving",
            incarnation=w.incarnation, address=w.address, pid=1, host="h",
        )
        for w in workers
    )  # fmt: skip
    return View(term=1, epoch=1, replicas_wanted=1, layers=1, experts=1, members=members)


def sequence_of(text: str, tokens: int) -> tuple[Generation, Sequence]:
    generation = Generation(on_change=lambda: None)
    choice = Choice(generation=generation, index=0, detokenizer=Letters(), matcher=None, min_tokens=0, names=None)
    prompt = [ord(letter) for letter in text]
    params = SamplingParams(max_tokens=tokens)
    return generation, Sequence(id=text[:64], prompt=prompt, params=params, choice=choice, generation=generation)


async def until(condition, what: str) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s, what
        await asyncio.sleep(0.002)


def test_an_idle_worker_may_be_silent_for_ever() -> None:
    async def scenario() -> None:
        pool = WorkerPool(GatewayConfig(deadline_s=0.1, silence_margin_s=0.05), GatewayMetrics())
        worker = await worker_of(1)
        pool.apply_view(view_of(worker))
        await until(lambda: len(pool.links()) == 1, "a link")
        await asyncio.sleep(0.5)
        generation, sequence = sequence_of("hello ", 5)
        pool.submit(sequence)
        await until(lambda: generation.ended, "the end")
        assert generation.error is None
        assert sequence.log.attempt == 1
        pool.close()

    asyncio.run(scenario())


def test_a_replay_stays_in_its_numerics_class_while_one_is_left() -> None:
    async def scenario() -> None:
        metrics = GatewayMetrics()
        pool = WorkerPool(GatewayConfig(), metrics)
        first, second, other = await worker_of(1), await worker_of(2), await worker_of(3)
        other.numerics_class = "another"
        pool.apply_view(view_of(first, second))
        await until(lambda: len(pool.links()) == 2, "two links")
        busy = [sequence_of(f"busy {number} ", 2000) for number in range(3)]
        for _, sequence in busy:
            pool.submit(sequence)
        generation, sequence = sequence_of("hello ", 60)
        pool.submit(sequence)
        await until(lambda: len(sequence.log.output) > 5, "tokens")
        pool.apply_view(view_of(first, second, other))
        await until(lambda: len(pool.links()) == 3, "three links")
        kept, lost = (second, first) if sequence.id in first.jobs else (first, second)
        pool.apply_view(view_of(kept, other))
        await until(lambda: generation.ended, "the end")
        assert generation.numerics_classes == (kept.numerics_class,)
        assert sequence.id in {submit.id for submit in kept.submits}, "though the other class was idle"
        assert metrics.class_crossings == 0
        assert lost.incarnation not in {link.incarnation for link in pool.links()}
        pool.close()

    asyncio.run(scenario())


def test_the_least_loaded_worker_is_chosen_whatever_was_chosen_last() -> None:
    async def scenario() -> None:
        pool = WorkerPool(GatewayConfig(), GatewayMetrics())
        first, second = await worker_of(1), await worker_of(2)
        first.frozen = second.frozen = True
        pool.apply_view(view_of(first, second))
        await until(lambda: len(pool.links()) == 2, "two links")
        pool.submit(sequence_of("x" * 5000, 5)[1])
        for number in range(6):
            pool.submit(sequence_of(f"small {number}", 5)[1])
        await until(lambda: len(first.submits) + len(second.submits) == 7, "seven requests")
        assert sorted([len(first.submits), len(second.submits)]) == [1, 6]
        pool.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_no_load_is_left_behind_when_all_has_ended(seed: int) -> None:
    async def scenario() -> None:
        pool = WorkerPool(GatewayConfig(deadline_s=1), GatewayMetrics())
        workers = [await worker_of(number) for number in (1, 2)]
        pool.apply_view(view_of(*workers))
        await until(lambda: len(pool.links()) == 2, "two links")
        started = [sequence_of(f"text {number} {seed}", 3 + 7 * number) for number in range(12)]
        for _, sequence in started:
            pool.submit(sequence)
        await until(lambda: len(started[5][1].log.output) > 2, "tokens")
        pool.cancel([sequence for _, sequence in started[8 + seed :]])
        await until(lambda: all(g.ended for g, _ in started[: 8 + seed]), "the ends")
        assert [link.outstanding for link in pool.links()] == [0, 0]
        assert pool.running == pool.waiting == 0
        await until(lambda: not any(worker.jobs for worker in workers), "cancelled jobs")
        pool.close()

    asyncio.run(scenario())


def test_the_load_tells_what_waits_without_a_worker_and_how_the_last_minute_was() -> None:
    async def scenario() -> None:
        pool = WorkerPool(GatewayConfig(batch_tokens=7), GatewayMetrics())
        load = pool.load
        assert load() == {"running": 0, "waiting": 0, "backlog_tokens": 0, "queue_s": 0}
        generation, sequence = sequence_of("hello", 4)
        pool.submit(sequence)
        pool.submit(sequence_of("good bye", 100)[1])
        await asyncio.sleep(0.02)
        waits = load()
        assert (waits["running"], waits["waiting"], waits["backlog_tokens"]) == (0, 2, 5 + 4 + 8 + 7)
        assert waits["queue_s"] >= 0.02
        pool.apply_view(view_of(await worker_of(1)))
        await until(lambda: generation.ended, "the end of the short one")
        serves = load()
        assert (serves["running"], serves["waiting"], serves["queue_s"]) == (1, 0, 0)
        assert serves["ttft_p99_s"] >= 0.02
        assert 0.001 < serves["tpot_p99_s"] < serves["ttft_p99_s"]
        pool.close()

    asyncio.run(scenario())


def test_a_percentile_of_the_last_minute_forgets_what_was_before() -> None:
    recent = Recent()
    assert recent.p99_s(0) is None
    recent.add(10, 5.0)
    for number in range(200):
        recent.add(60 + number / 100, number / 1000)
    assert recent.p99_s(65) == 0.198
    assert recent.p99_s(70.5) == 0.197
    assert recent.p99_s(200) is None


def test_a_request_without_a_limit_gets_what_its_worker_has_room_for() -> None:
    """It was admitted when no worker could be asked."""

    async def scenario() -> None:
        pool = WorkerPool(GatewayConfig(), GatewayMetrics())
        _, open_end = sequence_of("free", MAX_MODEL_LEN * 2)
        open_end.open_end = True
        _, bounded = sequence_of("bound", MAX_MODEL_LEN * 2)
        pool.submit(open_end)
        pool.submit(bounded)
        worker = await worker_of(1)
        pool.apply_view(view_of(worker))
        await until(lambda: len(worker.submits) == 2, "both")
        limits = {submit.id: submit.params.max_tokens for submit in worker.submits}
        assert limits == {"free": MAX_MODEL_LEN - 4, "bound": MAX_MODEL_LEN * 2}
        pool.close()

    asyncio.run(scenario())


def test_a_draining_worker_ends_what_it_can_and_the_rest_goes_on_elsewhere() -> None:
    async def scenario() -> None:
        metrics = GatewayMetrics()
        pool = WorkerPool(GatewayConfig(drain_move_s=0.6), metrics)
        first, second = await worker_of(1), await worker_of(2)
        pool.apply_view(view_of(first))
        await until(lambda: len(pool.links()) == 1, "a link")
        short, long, later = sequence_of("short", 40), sequence_of("long", 1000), sequence_of("later", 5)
        for _, sequence in (short, long):
            pool.submit(sequence)
        await until(lambda: short[1].log.output and long[1].log.output, "tokens")
        pool.apply_view(view_of(first, second))
        await until(lambda: len(pool.links()) == 2, "two links")
        pool.apply_view(view_of(first, second, draining=[first]))
        pool.submit(later[1])
        await until(lambda: short[0].ended and later[0].ended, "the short ones")
        assert "short" not in [submit.id for submit in second.submits], "it would have ended soon"
        assert "later" not in [submit.id for submit in first.submits], "sent to a worker that drains"
        await until(lambda: "long" in [submit.id for submit in second.submits], "the long one")
        assert metrics.replays == {"drained": 1}
        assert first.cancels == ["long"]
        await until(lambda: len(long[1].log.output) >= 600, "more tokens")
        text = [ord("long"[number % 4]) for number in range(600)]
        assert long[1].log.output[:600] == text, "tokens changed when it moved"
        pool.close()

    asyncio.run(scenario())


def test_what_has_no_token_yet_leaves_a_draining_worker_at_once() -> None:
    async def scenario() -> None:
        metrics = GatewayMetrics()
        pool = WorkerPool(GatewayConfig(), metrics)
        first, second = await worker_of(1), await worker_of(2)
        first.frozen = True
        pool.apply_view(view_of(first))
        await until(lambda: len(pool.links()) == 1, "a link")
        started = [sequence_of(text, 5) for text in ("one", "two")]
        for _, sequence in started:
            pool.submit(sequence)
        await until(lambda: len(first.submits) == 2, "both")
        pool.apply_view(view_of(first, second))
        await until(lambda: len(pool.links()) == 2, "two links")
        assert not metrics.replays, "two small requests need no second worker"
        pool.apply_view(view_of(first, second, draining=[first]))
        await until(lambda: all(generation.ended for generation, _ in started), "the ends")
        assert metrics.replays == {"drained": 2}
        assert sorted(first.cancels) == ["one", "two"]
        pool.close()

    asyncio.run(scenario())


def test_a_new_worker_takes_its_part_of_what_queues_at_the_others() -> None:
    async def scenario() -> None:
        metrics = GatewayMetrics()
        pool = WorkerPool(GatewayConfig(), metrics)
        first, second = await worker_of(1), await worker_of(2)
        pool.apply_view(view_of(first))
        await until(lambda: len(pool.links()) == 1, "a link")
        begun = sequence_of("begun", 400)
        pool.submit(begun[1])
        await until(lambda: len(begun[1].log.output) > 3, "tokens")
        first.frozen = True
        queued = [sequence_of(f"queued {number:2}", 5) for number in range(20)]
        for _, sequence in queued:
            pool.submit(sequence)
        await until(lambda: len(first.submits) == 21, "the queue")
        pool.apply_view(view_of(first, second))
        await until(lambda: len(pool.links()) == 2, "two links")
        moved = metrics.replays["shared"]
        # What the first has begun counts too: 400 tokens, as far as they are reckoned.
        assert 10 < moved <= 20
        assert abs(pool.links()[0].outstanding - pool.links()[1].outstanding) < 3 * 15 + 1
        await until(lambda: len(second.submits) == moved, "the moved ones")
        assert {submit.id for submit in second.submits} == {f"queued {19 - n:2}" for n in range(moved)}
        first.frozen = False
        await until(lambda: all(g.ended for g, _ in [begun, *queued]), "the ends")
        assert all(len(sequence.log.output) == 5 for _, sequence in queued)
        assert [link.outstanding for link in pool.links()] == [0, 0]
        pool.close()

    asyncio.run(scenario())


def test_drains_are_no_losses_however_many_meet_a_request_that_waits() -> None:
    async def scenario() -> None:
        metrics = GatewayMetrics()
        pool = WorkerPool(GatewayConfig(max_losses=2), metrics)
        generation, sequence = sequence_of("waits", 5)
        pool.submit(sequence)
        for number in range(1, 6):
            worker = await worker_of(number)
            worker.frozen = True
            pool.apply_view(view_of(worker))
            await until(lambda worker=worker: worker.submits, "the request")
            pool.apply_view(view_of(worker, draining=[worker]))
            if number % 2:
                worker._server.close()
                for writer in worker.writers:
                    writer.transport.abort()
                await until(lambda: not pool.links(), "the end of the link")
            pool.apply_view(view_of())
        assert generation.error is None
        assert metrics.replays == {"drained": 5}
        pool.apply_view(view_of(await worker_of(9)))
        await until(lambda: generation.ended, "the end")
        assert len(sequence.log.output) == 5
        pool.close()

    asyncio.run(scenario())


def test_a_draining_worker_keeps_its_choices_while_nobody_else_can_take_them() -> None:
    async def scenario() -> None:
        metrics = GatewayMetrics()
        pool = WorkerPool(GatewayConfig(drain_move_s=0.01), metrics)
        only = await worker_of(1)
        pool.apply_view(view_of(only))
        await until(lambda: len(pool.links()) == 1, "a link")
        generation, sequence = sequence_of("hello", 400)
        pool.submit(sequence)
        pool.apply_view(view_of(only, draining=[only]))
        _, new = sequence_of("new", 3)
        pool.submit(new)
        await until(lambda: generation.ended, "the end")
        assert generation.error is None
        assert (metrics.replays, pool.waiting, len(only.submits)) == ({}, 1, 1)
        pool.apply_view(view_of())
        pool.apply_view(view_of(await worker_of(2)))
        await until(lambda: len(new.log.output) == 3, "the one that waited")
        pool.close()

    asyncio.run(scenario())


def test_what_a_drain_moved_goes_back_when_the_drain_is_taken_back() -> None:
    async def scenario() -> None:
        metrics = GatewayMetrics()
        pool = WorkerPool(GatewayConfig(deadline_s=30), metrics)
        first, second = await worker_of(1), await worker_of(2)
        first.frozen = second.frozen = True
        pool.apply_view(view_of(first, second))
        await until(lambda: len(pool.links()) == 2, "two links")
        started = [sequence_of(f"request {number}", 5) for number in range(4)]
        for _, sequence in started:
            pool.submit(sequence)
        await until(lambda: len(first.submits) == len(second.submits) == 2, "two each")
        pool.apply_view(view_of(first, second, draining=[first]))
        await until(lambda: len(second.submits) == 4, "all on the second")
        first.frozen = False
        pool.apply_view(view_of(first))
        await until(lambda: all(generation.ended for generation, _ in started), "the ends")
        assert [generation.error for generation, _ in started] == [None] * 4
        assert metrics.replays == {"drained": 2, "worker_lost": 4}
        pool.close()

    asyncio.run(scenario())


def test_it_warns_of_workers_that_are_lost_and_not_of_those_that_go_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def said() -> list[tuple[str, str]]:
        found = [
            (record.levelname, " ".join(record.getMessage().split()[:2]))
            for record in caplog.records
            if record.name.startswith("eaas.gateway")
        ]
        caplog.clear()
        return found

    async def scenario() -> None:
        pool = WorkerPool(GatewayConfig(deadline_s=30), GatewayMetrics())
        workers = _, drained, refuses, last = [await worker_of(number) for number in range(1, 5)]
        for worker in workers:
            worker.frozen = True
        pool.apply_view(view_of(*workers))
        await until(lambda: len(pool.links()) == 4, "four links")
        for number in range(4):
            pool.submit(sequence_of(f"request {number}", 5)[1])
        await until(lambda: all(worker.submits for worker in workers), "one each")
        said()
        pool.apply_view(view_of(drained, refuses, last))
        assert said() == [("WARNING", "worker_lost name=attention/1"), ("WARNING", "replay name=attention/1")]
        link = next(link for link in pool.links() if link.name == refuses.name)
        pool.failed(
            link,
            Failed(id=refuses.submits[0].id, attempt=1, code="shutting_down", message="bye", retryable=True),
        )
        assert [(level, text.split()[0]) for level, text in said()] == [("INFO", "choice_failed")]
        pool.apply_view(view_of(drained, refuses, last, draining=[drained]))
        pool.apply_view(view_of(refuses, last))
        pool.close()
        told = said()
        assert {level for level, _ in told} == {"INFO"}, told
        names = [text for _, text in told if text.startswith("worker_lost")]
        assert sorted(names) == [f"worker_lost name=attention/{number}" for number in (2, 3, 4)]

    with caplog.at_level("INFO"):
        asyncio.run(scenario())


def test_a_worker_whose_drain_was_taken_back_is_like_any_other() -> None:
    async def scenario() -> None:
        metrics = GatewayMetrics()
        pool = WorkerPool(GatewayConfig(drain_move_s=0.05), metrics)
        first, second = await worker_of(1), await worker_of(2)
        pool.apply_view(view_of(first))
        await until(lambda: len(pool.links()) == 1, "a link")
        _, sequence = sequence_of("goes on", 2000)
        pool.submit(sequence)
        await until(lambda: sequence.log.output, "tokens")
        pool.apply_view(view_of(first, draining=[first]))
        pool.apply_view(view_of(first, second))
        await until(lambda: len(pool.links()) == 2, "two links")
        # The fake sends a token each 2 ms: this is several sweeps, each after drain_move_s.
        many = len(sequence.log.output) + 300
        await until(lambda: len(sequence.log.output) >= many, "more tokens")
        assert (metrics.replays, len(second.submits)) == ({}, 0), "moved from a worker that serves"
        first.frozen = True
        _, lost = sequence_of("lost", 5)
        lost.refused_by.add(second.incarnation)
        pool.submit(lost)
        await until(lambda: len(first.submits) == 2, "the one to be lost")
        pool.apply_view(view_of(second))
        assert lost.log.losses == 1
        assert "drained" not in metrics.replays
        pool.close()

    asyncio.run(scenario())


def test_losing_a_worker_with_many_choices_costs_time_by_their_number_and_not_by_its_square() -> None:
    async def lose(count: int) -> float:
        pool = WorkerPool(GatewayConfig(), GatewayMetrics())
        worker, other = await worker_of(1), await worker_of(2)
        pool.apply_view(view_of(worker))
        await until(lambda: len(pool.links()) == 1, "a link")
        sequences = [sequence_of(f"{number}", 5)[1] for number in range(count)]
        worker.frozen = other.frozen = True
        for sequence in sequences:
            pool.submit(sequence)
            sequence.begun = True
            # All of them are lost for the second time.
            sequence.log.lose()
        began_s = time.process_time()
        pool.links()[0].drop("killed")
        pool.apply_view(view_of(other))
        await until(lambda: len(pool.links()) == 1, "another")
        await until(lambda: any(sequence.link for sequence in sequences), "the first group")
        took_s = time.process_time() - began_s
        pool.close()
        worker.stop_now()
        other.stop_now()
        return took_s

    few = min(asyncio.run(lose(500)) for _ in range(3))
    many = min(asyncio.run(lose(8000)) for _ in range(3))
    # Sixteen times as long where each costs the same; the square would be 256 times.
    assert many < 64 * few, f"500 choices cost {few:.4f} s, sixteen times as many {many:.4f} s"


def test_no_deadline_runs_for_those_who_wait_for_a_trial_while_a_worker_serves() -> None:
    async def scenario() -> None:
        pool = WorkerPool(GatewayConfig(deadline_s=0.3), GatewayMetrics())
        first, second = await worker_of(1), await worker_of(2)
        pool.apply_view(view_of(first))
        await until(lambda: len(pool.links()) == 1, "a link")
        first.frozen = second.frozen = True
        asked = [sequence_of(f"{number}", 5) for number in range(5)]
        for _, sequence in asked[:4]:
            pool.submit(sequence)
            sequence.log.lose()
        pool.links()[0].drop("killed")
        pool.apply_view(view_of(second))
        await until(lambda: len(second.jobs) == 2, "half of the suspects at the other")
        pool.submit(asked[4][1])
        await asyncio.sleep(1.0)
        assert not [generation.error for generation, _ in asked if generation.ended]
        assert (pool.waiting, len(second.jobs)) == (3, 2), "the others wait for their turn"
        # The deadline runs from when nobody serves any more.
        second.stop_now()
        await asyncio.sleep(0.1)
        third = await worker_of(3)
        pool.apply_view(view_of(third))
        await until(lambda: all(generation.ended for generation, _ in asked), "all ends")
        assert [generation.error for generation, _ in asked] == [None] * 5
        pool.apply_view(view_of())
        late, sequence = sequence_of("late", 5)
        pool.submit(sequence)
        await until(lambda: late.ended, "without a worker the deadline runs")
        assert late.error is not None and "the router knows no attention worker" in late.error.message
        pool.close()
        first.stop_now()
        third.stop_now()

    asyncio.run(scenario())


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram((0.1, 1.0))
    for duration_s in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(duration_s)
    assert histogram.buckets() == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]


@pytest.mark.parametrize("code", ["too_long", "never_fits", "overloaded"])
def test_a_replay_that_one_worker_has_no_room_for_goes_to_the_next(code: str) -> None:
    async def scenario() -> None:
        pool = WorkerPool(GatewayConfig(), GatewayMetrics())
        first, small, large = await worker_of(1), await worker_of(2), await worker_of(3)
        small.refuse = lambda submit: Failed(
            id=submit.id, attempt=submit.attempt, code=code, message="no room", retryable=False
        )
        pool.apply_view(view_of(first))
        await until(lambda: len(pool.links()) == 1, "a link")
        generation, sequence = sequence_of("hello ", 60)
        pool.submit(sequence)
        await until(lambda: len(sequence.log.output) > 5, "tokens")
        pool.apply_view(view_of(small, large))
        await until(lambda: generation.ended, "the end")
        assert generation.error is None, generation.error
        assert generation.finished_choices()[0].text == ("hello " * 10)[:60]
        assert sequence.id in {submit.id for submit in large.submits}
        pool.close()

    asyncio.run(scenario())
