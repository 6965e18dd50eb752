"""What clients must not notice: lost, frozen and replaced attention workers, slow readers, absent clients."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from eaas.worker.protocol import Failed, Step, Submit, Token, encode
from tests.eaas.gateway_world import FakeWorker, GatewayProcess, World, eventually, gateway_url
from tests.host_stalls import bounded

PLAIN = "/v1/completions"
PROMPT = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def url(world: World) -> Iterator[str]:
    with gateway_url(world, "--deadline-s", "5", "--stall-s", "1") as url:
        yield url


@pytest.fixture
def workers(world: World, url: str) -> Iterator[Callable[..., list[FakeWorker]]]:
    def start(count: int, **options: Any) -> list[FakeWorker]:
        started = [world.worker(**options) for _ in range(count)]
        world.router.show(*started)
        names = sorted(worker.name for worker in started)
        eventually(lambda: status_of(url)["gateway"]["attention_workers"] == names, f"connections to {names}")
        return started

    yield start
    world.router.show()
    world.stop_workers()


def status_of(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/status").json()


def stream(url: str, tokens: int, prompt: str = PROMPT) -> Iterator[str]:
    """Texts of one streamed completion; an error event is raised, a missing [DONE] too."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "stream": True}
    with httpx.stream("POST", f"{url}{PLAIN}", json=body, timeout=60) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            data = line.partition("data: ")[2]
            if data == "[DONE]":
                return
            if data:
                event = json.loads(data)
                assert "error" not in event, event
                yield event["choices"][0]["text"]
    raise AssertionError("the stream ended without [DONE]")


def placed(worker: FakeWorker) -> int:
    """Choices that it was the first to get: on a busy host some may be moved to it, for another's silence."""
    return sum(submit.attempt == 1 for submit in worker.submits)


def expected(tokens: int, prompt: str = PROMPT) -> list[str]:
    return list((prompt * (tokens // len(prompt) + 1))[:tokens])


def test_a_worker_killed_in_mid_stream_is_replayed_and_each_token_comes_once(
    url: str, workers: Callable[..., list[FakeWorker]]
) -> None:
    lost, kept = workers(2, step_s=0.003)
    texts: list[str] = []
    for text in stream(url, 120):
        texts.append(text)
        if len(texts) == 40:
            # Whichever has it now: on a busy host it may have been moved for its worker's silence.
            lost, kept = (lost, kept) if lost.jobs else (kept, lost)
            lost.stop()
    assert texts == expected(120)
    replay, original = kept.submits[-1], lost.submits[-1]
    replayed = (original.attempt + 1, original.prompt, original.params)
    assert (replay.attempt, replay.prompt, replay.params) == replayed
    assert bytes(replay.output).decode() == "".join(texts)[: len(replay.output)]
    assert len(replay.output) >= 40


@pytest.mark.parametrize("seed", range(3))
def test_many_streams_survive_random_kills_unchanged(
    url: str, world: World, workers: Callable[..., list[FakeWorker]], seed: int
) -> None:
    source = random.Random(seed)
    alive = workers(3, step_s=0.003)
    prompts = [f"stream {number} of seed {seed}; " for number in range(16)]
    with ThreadPoolExecutor(16) as threads:
        results = [threads.submit(lambda p=prompt: list(stream(url, 150, p))) for prompt in prompts]
        for _ in range(3):
            time.sleep(source.uniform(0.02, 0.1))
            victim = alive.pop(source.randrange(len(alive)))
            victim.stop()
            alive.append(world.worker(step_s=0.003))
            # The gateway may learn of it from the connection or from the View, in either order.
            time.sleep(source.choice([0, 0.02]))
            world.router.show(*alive)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.result() == expected(150, prompt), f"seed {seed} {prompt}"


def test_choices_that_are_not_streamed_survive_a_kill_too(url: str, workers: Callable[..., list[FakeWorker]]) -> None:
    pair = workers(2, step_s=0.003)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 80, "n": 4}
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(httpx.post, f"{url}{PLAIN}", json=body, timeout=60)
        eventually(lambda: min(worker.sent for worker in pair) > 20, "tokens from both")
        assert [placed(worker) for worker in pair] == [2, 2], "choices are spread"
        pair[0].stop()
        choices = reply.result().json()["choices"]
    assert [choice["text"] for choice in choices] == ["".join(expected(80))] * 4


def test_a_replay_waits_for_a_worker_that_has_yet_to_appear(
    url: str, world: World, workers: Callable[..., list[FakeWorker]]
) -> None:
    (only,) = workers(1, step_s=0.003)
    texts: list[str] = []
    for text in stream(url, 60):
        texts.append(text)
        if len(texts) == 20:
            only.stop()
            world.router.show()
            threading.Timer(0.3, lambda: world.router.show(world.worker(step_s=0.003))).start()
    assert texts == expected(60)


def test_what_a_frozen_worker_says_after_its_replacement_is_ignored(
    url: str, world: World, workers: Callable[..., list[FakeWorker]]
) -> None:
    first, second = workers(2, step_s=0.003)
    texts: list[str] = []
    frozen = second
    for text in stream(url, 200):
        texts.append(text)
        if len(texts) == 30:
            frozen, other = (first, second) if first.submits else (second, first)
            frozen.frozen = True
            world.router.show(other)
        if len(texts) == 60:
            frozen.frozen = False
    assert texts == expected(200)


def test_tokens_of_an_old_attempt_or_a_wrong_index_change_nothing(
    url: str, workers: Callable[..., list[FakeWorker]]
) -> None:
    pair = workers(2, step_s=0.005)
    texts: list[str] = []
    before = status_of(url)["gateway"]["replays"]
    for text in stream(url, 80):
        texts.append(text)
        if len(texts) == 20:
            old, new = pair if pair[0].submits else pair[::-1]
            submit = old.submits[-1]
            old.jobs.clear()
            old.send(Failed(id=submit.id, attempt=1, code="shutting_down", message="I go", retryable=True))
            eventually(lambda new=new: new.submits, "the second attempt")
            stale = [Token(submit.id, 1, index, 88) for index in range(200)]
            old.send(Step(tokens=stale))
            new.send(Step(tokens=[Token(submit.id, 2, index, 88) for index in range(20)]))
            new.send(Step(tokens=[Token("unknown", 1, 0, 88)]))
            old.send(Failed(id=submit.id, attempt=1, code="internal", message="late", retryable=False))
    assert texts == expected(80)
    assert status_of(url)["gateway"]["replays"] == before + 1


def test_a_gap_in_the_indexes_moves_the_choice_to_another_worker(
    url: str, workers: Callable[..., list[FakeWorker]]
) -> None:
    pair = workers(2, step_s=0.005)
    texts: list[str] = []
    for text in stream(url, 60):
        texts.append(text)
        if len(texts) == 20:
            faulty = pair[0] if pair[0].submits else pair[1]
            submit = faulty.submits[-1]
            faulty.send(Step(tokens=[Token(submit.id, 1, 50, 88)]))
    assert texts == expected(60)


def test_an_overloaded_worker_hands_the_request_on(url: str, workers: Callable[..., list[FakeWorker]]) -> None:
    first, second = workers(2)

    def full(submit: Submit) -> Failed:
        return Failed(id=submit.id, attempt=submit.attempt, code="overloaded", message="full", retryable=True)

    first.refuse = full
    for _ in range(4):
        assert list(stream(url, 5)) == expected(5)
    second.refuse = full
    reply = httpx.post(f"{url}{PLAIN}", json={"model": "tiny", "prompt": "a"})
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")


def dies_of_poison(worker: FakeWorker, deaths: list[str]) -> FakeWorker:
    """The worker, which from now on ends with all that it has taken when a prompt begins so."""

    def refuse(submit: Submit) -> None:
        alive = [writer for writer in worker.writers if not writer.transport.is_closing()]
        if alive and bytes(submit.prompt).startswith(b"poison"):
            deaths.append(worker.name)
            worker.jobs.clear()
            for writer in alive:
                writer.write(encode(Step(tokens=[], begun=[(submit.id, submit.attempt)])))
                writer.transport.abort()

    worker.refuse = refuse
    return worker


def test_what_waits_in_the_queues_of_two_workers_that_die_is_under_no_suspicion(
    url: str, workers: Callable[..., list[FakeWorker]]
) -> None:
    """Tried one at a time, the last of them would have its turn after the deadline of 5 s."""
    first, second = workers(2, frozen=True, queues=True)
    with ThreadPoolExecutor(40) as threads:
        streams = [threads.submit(list, stream(url, 9, f"queued {number} ")) for number in range(40)]
        # By name: on a busy host one may have been moved for its worker's silence, and so be sent more than once.
        eventually(lambda: len({s.id for s in (*first.submits, *second.submits)}) == 40, "the queues")
        first.stop()
        eventually(lambda: len({s.id for s in second.submits}) == 40, "all of them at the second")
        second.stop()
        workers(1, step_s=0.2, queues=True)
        for number, result in enumerate(streams):
            assert result.result() == expected(9, f"queued {number} ")


def test_a_worker_that_could_not_take_a_choice_once_is_asked_again(
    url: str, workers: Callable[..., list[FakeWorker]]
) -> None:
    (only,) = workers(1)
    refused: list[str] = []

    def refuse(submit: Submit) -> Failed | None:
        if refused:
            return None
        refused.append(submit.id)
        return Failed(id=submit.id, attempt=submit.attempt, code="shutting_down", message="it stops", retryable=True)

    only.refuse = refuse
    assert list(stream(url, 9)) == expected(9)
    assert len(only.submits) == 2


# Each choice of three is lost twice before it is tried, and a group of two once before it is halved.
@pytest.mark.parametrize(("choices", "most"), [(1, 2 + 3), (3, 3 * 2 + 1 + 3)])
def test_a_request_that_brings_down_every_worker_is_given_up(
    url: str, workers: Callable[..., list[FakeWorker]], choices: int, most: int
) -> None:
    deaths: list[str] = []
    for worker in workers(2):
        dies_of_poison(worker, deaths)
    body = {"model": "tiny", "prompt": "poison", "n": choices}
    reply = httpx.post(f"{url}{PLAIN}", json=body, timeout=60)
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "attempts_exhausted"
    assert 2 + 3 <= len(deaths) <= most


@pytest.mark.parametrize("count", [1, 3])
def test_a_request_that_brings_down_every_worker_takes_no_other_with_it(
    url: str, workers: Callable[..., list[FakeWorker]], count: int
) -> None:
    """The innocent are with it twice, and wait for their first token. Workers that died are there again at once."""
    deaths: list[str] = []
    group = [dies_of_poison(worker, deaths) for worker in workers(count, step_s=0.02)]
    for worker in group:
        worker.frozen = True
    with ThreadPoolExecutor(20) as threads:
        streams = [threads.submit(list, stream(url, 9, f"innocent {number} ")) for number in range(8)]
        eventually(lambda: sum(len(worker.submits) for worker in group) == 8, "the innocent ones")
        body = {"model": "tiny", "prompt": "poison"}
        poison = threads.submit(httpx.post, f"{url}{PLAIN}", json=body, timeout=60)
        eventually(lambda: len(deaths) >= 2, "two deaths")
        for worker in group:
            worker.frozen = False
        late = [threads.submit(list, stream(url, 9, f"late one {number} ")) for number in range(8)]
        for kind, results in (("innocent", streams), ("late one", late)):
            for number, result in enumerate(results):
                assert result.result() == expected(9, f"{kind} {number} ")
        assert poison.result().status_code == 500
        assert poison.result().json()["error"]["code"] == "attempts_exhausted"
    assert len(deaths) == 2 + 3


def test_a_worker_with_another_model_is_never_used(url: str, world: World) -> None:
    wrong, right = world.worker(model_hash="0" * 64), world.worker()
    world.router.show(wrong, right)
    eventually(lambda: status_of(url)["gateway"]["attention_workers"] == [right.name], "the right worker alone")
    for _ in range(4):
        assert list(stream(url, 3)) == expected(3)
    assert not wrong.submits
    world.router.show()
    world.stop_workers()


def test_another_numerics_class_is_a_last_resort_and_is_told(
    url: str, world: World, workers: Callable[..., list[FakeWorker]]
) -> None:
    (only,) = workers(1, step_s=0.003)
    other = world.worker(step_s=0.003, numerics_class="cpu-bf16-vdpbf16-1")
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "stream": True}
    prints: list[str] = []
    with httpx.stream("POST", f"{url}{PLAIN}", json=body) as reply:
        for line in reply.iter_lines():
            data = line.partition("data: ")[2]
            if data and data != "[DONE]":
                prints.append(json.loads(data)["system_fingerprint"])
                if len(prints) == 10:
                    world.router.show(only, other)
                if len(prints) == 30:
                    only.stop()
    assert len(set(prints)) == 2
    assert prints == sorted(prints, key=prints.index), "it changes once"
    assert 'eaas_class_crossings_total{model="tiny"} 1.0' in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize("code", ["expert_lost", "class_lost"])
def test_a_choice_whose_class_lost_experts_goes_on_where_another_class_has_them(
    url: str, world: World, workers: Callable[..., list[FakeWorker]], code: str
) -> None:
    """Those of its own class are not asked: they would wait for the same experts."""
    world.router.expert_classes = ("cpu-f32-fma-1", "cuda-sm90-f32-triton3.6-1")
    first, second = workers(2, step_s=0.003)
    other = world.worker(step_s=0.003, numerics_class="cuda-sm90-f32-triton3.6-1")
    lost: list[str] = []

    def refuse(submit: Submit) -> Failed | None:
        lost.append(submit.id)
        return Failed(id=submit.id, attempt=submit.attempt, code=code, message="no replica", retryable=True)

    first.refuse = second.refuse = refuse
    before = crossings(url)
    world.router.show(first, second, other)
    eventually(lambda: len(status_of(url)["gateway"]["attention_workers"]) == 3, "three workers")
    for _ in range(4):
        assert list(stream(url, 20)) == expected(20)
    assert len(other.submits) == 4
    assert 0 < len(lost) <= 4, "one of a class is enough to ask"
    assert crossings(url) == before, "what had not begun has not crossed"
    # One that has begun crosses, and says so.
    first.refuse = second.refuse = lambda _: None
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "stream": True}
    begun = 0
    while not begun:
        prints: list[str] = []
        with httpx.stream("POST", f"{url}{PLAIN}", json=body) as reply:
            for line in reply.iter_lines():
                data = line.partition("data: ")[2]
                if not data or data == "[DONE]":
                    continue
                prints.append(json.loads(data)["system_fingerprint"])
                if len(prints) == 10:
                    begun = sum(give_up(worker, code) for worker in (first, second))
        assert len(prints) >= 60, "a token is missing"
        assert len(set(prints)) == 1 + begun
    assert crossings(url) == before + 1
    world.router.expert_classes = ("",)


def give_up(worker: FakeWorker, code: str) -> int:
    """Have a worker fail all that it has; how many that were."""
    worker.frozen = True
    jobs = list(worker.jobs.values())
    for job in jobs:
        del worker.jobs[job.submit.id]
        id, attempt = job.submit.id, job.submit.attempt
        worker.send(Failed(id=id, attempt=attempt, code=code, message="gone", retryable=True))
    worker.frozen = False
    return len(jobs)


def crossings(url: str) -> float:
    """Choices that went on in another class, so far."""
    text = httpx.get(f"{url}/metrics").text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith("eaas_class_crossings_total{")))


def test_new_work_goes_to_the_worker_with_the_least(url: str, workers: Callable[..., list[FakeWorker]]) -> None:
    first, second = workers(2, frozen=True)
    body = {"model": "tiny", "max_tokens": 10}
    with ThreadPoolExecutor(8) as threads:
        big = threads.submit(httpx.post, f"{url}{PLAIN}", json={**body, "prompt": "x" * 2000}, timeout=60)
        eventually(lambda: first.submits or second.submits, "the first request")
        loaded, idle = (first, second) if first.submits else (second, first)
        small = []
        for number in range(1, 7):
            small.append(threads.submit(httpx.post, f"{url}{PLAIN}", json={**body, "prompt": "small"}, timeout=60))
            eventually(lambda n=number: placed(idle) + placed(loaded) == n + 1, f"request {number}")
        assert placed(idle) == 6
        first.frozen = second.frozen = False
        assert all(reply.result().status_code == 200 for reply in [big, *small])


def test_a_draining_worker_gets_no_new_work_and_finishes_what_it_has(
    url: str, world: World, workers: Callable[..., list[FakeWorker]]
) -> None:
    (first,) = workers(1, step_s=0.003)
    second = world.worker(step_s=0.003)
    texts: list[str] = []
    for text in stream(url, 80):
        texts.append(text)
        if len(texts) == 10:
            world.router.show(first, second, **{first.name.replace("/", "_"): "draining"})
            eventually(lambda: second.name in status_of(url)["gateway"]["attention_workers"], "the second worker")
            assert list(stream(url, 3)) == expected(3)
            assert len(second.submits) == 1
    assert texts == expected(80)
    assert len(first.submits) == 1


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_is_cancelled_at_once(
    url: str, workers: Callable[..., list[FakeWorker]], streamed: bool
) -> None:
    (worker,) = workers(1, step_s=0.01)
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 5000, "stream": streamed, "n": 2}).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    lines = [
        f"POST {PLAIN} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]

    connection = socket.create_connection((host, int(port)))
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    eventually(lambda: worker.sent > 6, "tokens")
    if streamed:
        assert b"200" in connection.recv(100)
    with bounded(0.3):
        connection.close()
        eventually(lambda: len(worker.cancels) == 2, "a cancel for each choice")
    assert sorted(worker.cancels) == sorted(submit.id for submit in worker.submits)
    assert not worker.jobs
    eventually(lambda: status_of(url)["gateway"]["running"] == 0, "an empty gateway")


@pytest.mark.alone
def test_a_slow_reader_stalls_only_itself_and_is_ended(url: str, workers: Callable[..., list[FakeWorker]]) -> None:
    (worker,) = workers(1, step_s=0.0002)
    # Twenty alternatives make each token's event about 2 KB: far more than the sockets' buffers take.
    body = json.dumps(
        {
            "model": "tiny", "messages": [{"role": "user", "content": "slow"}], "max_tokens": 8000,
            "stream": True, "logprobs": True, "top_logprobs": 20,
        }
    ).encode()  # fmt: skip
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    connection.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
    eventually(lambda: worker.submits, "the slow request")
    with bounded(2.0):
        assert list(stream(url, 50)) == expected(50)
    eventually(lambda: worker.cancels, "the stalled client's end")
    assert worker.sent < 7000, "the client was ended for not reading, before all was generated"
    eventually(lambda: status_of(url)["gateway"]["running"] == 0, "an empty gateway")
    connection.close()


@pytest.mark.alone
def test_sigterm_ends_streams_with_a_retryable_error_within_a_second(world: World) -> None:
    worker = world.worker(step_s=0.01)
    world.router.show(worker)
    gateway = GatewayProcess(world)
    ended: list[tuple[int, str]] = []
    late: list[BaseException] = []

    def stop() -> None:
        try:
            with bounded(1.5):
                ended.append(gateway.stop())
        except AssertionError as error:
            late.append(error)

    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5000, "stream": True}
    lines: list[str] = []
    with httpx.stream("POST", f"{gateway.url}{PLAIN}", json=body) as reply:
        stopper = threading.Thread(target=stop)
        for line in reply.iter_lines():
            if line:
                lines.append(line)
            if len(lines) == 10 and not stopper.ident:
                stopper.start()
    stopper.join()
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert not late, late
    ((status, log),) = ended
    assert status == 0
    assert "Traceback" not in log, log
    world.router.show()
    world.stop_workers()


def request_bytes(tokens: int) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "leaving ", "max_tokens": tokens, "stream": True}).encode()
    head = f"POST {PLAIN} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("pipelined", [False, True])
def test_clients_that_go_away_cost_no_other_stream_anything(
    url: str, workers: Callable[..., list[FakeWorker]], pipelined: bool
) -> None:
    (worker,) = workers(1, step_s=0.002)
    host, _, port = url.removeprefix("http://").partition(":")
    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(lambda: list(stream(url, 400)))
        eventually(lambda: worker.sent > 6, "tokens")
        while not staying.done():
            leaving = [socket.create_connection((host, int(port))) for _ in range(4)]
            for connection in leaving:
                connection.sendall(request_bytes(60) * (1 + pipelined))
            if pipelined:
                # The second request waits behind the first, which is being answered when the client goes.
                for connection in leaving:
                    connection.recv(200)
            time.sleep(0.02)
            for connection in leaving:
                connection.close()
        assert staying.result() == expected(400)
    # A lost link would have had it computed again.
    assert {submit.attempt for submit in worker.submits} == {1}
    assert [bytes(s.prompt)[:3] for s in worker.submits].count(PROMPT.encode()[:3]) == 1
    eventually(lambda: status_of(url)["gateway"]["running"] == 0, "an empty gateway")
