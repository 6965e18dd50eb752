"""The attention worker's loop over real sockets, with a model without weights."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from eaas.worker import loop as worker_module
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.loop import Worker
from eaas.worker.protocol import (
    Cancel,
    Failed,
    ForgetBlocks,
    Hello,
    SamplingParams,
    Share,
    Step,
    Submit,
    ToGateway,
    ToWorker,
    WorkerLoad,
    encode,
    for_gateway,
)
from tests.eaas.fake_decoder import BLOCK_TOKENS, VOCAB, FakeDecoder, expected_output
from tests.host_stalls import bounded

pytestmark = pytest.mark.alone

TIMEOUT_S = 60.0


class Gateway:
    """A gateway's end of a connection."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.connection = socket.create_connection(address, timeout=TIMEOUT_S)
        self.reader = for_gateway()
        self.arrived: list[ToGateway] = []
        self.loads: list[WorkerLoad] = []
        self.hello = self.next()

    def send(self, *messages: ToWorker) -> None:
        self.connection.sendall(b"".join(encode(message) for message in messages))

    def submit(self, id: str, prompt: list[int], max_tokens: int = 5) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.send(Submit(id=id, attempt=1, prompt=prompt, params=params))

    def next(self) -> ToGateway:
        """The next message that says more than how busy the worker is."""
        while True:
            while not self.arrived:
                data = self.connection.recv(65536)
                if not data:
                    raise EOFError
                self.arrived += self.reader.feed(data)
            message = self.arrived.pop(0)
            if not isinstance(message, Step) or message.load is None:
                return message
            self.loads.append(message.load)

    def collect(self, *ids: str) -> dict[str, list[int]]:
        """Tokens of these requests until all have ended."""
        found: dict[str, list[int]] = {id: [] for id in ids}
        ended: set[str] = set()
        while len(ended) < len(ids):
            message = self.next()
            assert isinstance(message, Step), message
            for token in message.tokens:
                assert token.index == len(found[token.id]), token
                found[token.id].append(token.token)
                if token.finish:
                    ended.add(token.id)
        return found


class World:
    """A worker that runs on a thread."""

    def __init__(self, may_answer: Callable[[], bool] = lambda: True) -> None:
        self.decoder = FakeDecoder(64)
        config = EngineConfig(
            max_model_len=10_000,
            step_tokens=32,
            kv_blocks=64,
            block_tokens=BLOCK_TOKENS,
            vocab=VOCAB,
        )
        self.engine = Engine(self.decoder, config)
        self.hello = Hello(
            name="attention/1",
            incarnation=7,
            model_hash="abc",
            numerics_class="cpu",
            max_model_len=64,
            vocab=VOCAB,
            kv_tokens=256,
        )
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.passes = 0
        self.worker = Worker(self.engine, self.hello, listener, between_steps=self.count, may_answer=may_answer)
        self.thread = threading.Thread(target=self.worker.run, daemon=True)

    def count(self) -> None:
        self.passes += 1

    def until(self, true: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while not true():
            assert time.monotonic() < end_s, what
            time.sleep(0.002)

    def slow_down(self) -> None:
        self.decoder.before_step = lambda deadline_s: time.sleep(0.005)


@contextlib.contextmanager
def running(world: World) -> Iterator[World]:
    world.thread.start()
    try:
        yield world
    finally:
        world.worker.stop("the test is over")
        world.thread.join(TIMEOUT_S)
        assert not world.thread.is_alive()


@pytest.fixture
def world() -> Iterator[World]:
    with running(World()) as made:
        yield made


def test_the_worker_says_who_it_is_first(world: World) -> None:
    assert Gateway(world.address).hello == world.hello


def test_two_gateways_get_their_own_tokens(world: World) -> None:
    first, second = Gateway(world.address), Gateway(world.address)
    first.submit("a", [1, 2, 3])
    second.submit("a", [4, 5], 7)
    second.submit("b", [6], 3)
    assert second.collect("a", "b") == {"a": expected_output([4, 5], 7), "b": expected_output([6], 3)}
    assert first.collect("a") == {"a": expected_output([1, 2, 3], 5)}


def test_all_tokens_of_a_step_come_in_one_message(world: World) -> None:
    gateway = Gateway(world.address)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    gateway.send(*(Submit(id=str(n), attempt=1, prompt=[n], params=params) for n in range(9)))
    sizes = []
    while sum(sizes) < 36:
        message = gateway.next()
        assert isinstance(message, Step)
        # Without any it only says that the worker lives, as it may on a busy host.
        if message.tokens:
            sizes.append(len(message.tokens))
    assert sizes == [9, 9, 9, 9]


def test_gateways_hear_how_busy_the_worker_is_and_when_it_is_idle_again(world: World) -> None:
    asking, other = Gateway(world.address), Gateway(world.address)
    world.slow_down()
    asking.submit("a", list(range(1, 20)), max_tokens=40)
    asking.collect("a")

    def has_heard() -> bool:
        with contextlib.suppress(TimeoutError):
            other.next()
        told = [load.running for load in other.loads]
        return 1 in told and told[-1] == 0

    other.connection.settimeout(0.1)
    world.until(has_heard, "it does not say that it is idle again")
    busy = [load for load in other.loads if load.running]
    assert busy and all(load.running == 1 and load.waiting == 0 for load in busy)
    assert all(load.kv_use > 0 for load in busy)
    assert other.loads[-1] == WorkerLoad(looked_up=19), "nothing runs, and nothing of the prompt was known"


def test_what_was_computed_before_it_is_forgotten_is_computed_again(world: World) -> None:
    gateway, prompt = Gateway(world.address), list(range(1, 40))
    counts = world.engine.scheduler
    texts: list[list[int]] = []
    reused: list[int] = []
    for id in ("a", "b", "c", "d"):
        if id == "c":
            gateway.send(ForgetBlocks())
        before = counts.reused_tokens
        gateway.submit(id, prompt)
        texts.append(gateway.collect(id)[id])
        reused.append(counts.reused_tokens - before)
    assert reused[0] == reused[2] == 0 < reused[1] == reused[3], reused
    assert texts == [texts[0]] * 4


def test_a_refusal_says_why(world: World) -> None:
    gateway = Gateway(world.address)
    gateway.submit("a", [1] * 300)
    refusal = gateway.next()
    assert isinstance(refusal, Failed)
    assert (refusal.id, refusal.code, refusal.retryable) == ("a", "never_fits", False)


def test_a_cancelled_request_stops_and_frees_its_blocks(world: World) -> None:
    world.slow_down()
    gateway = Gateway(world.address)
    gateway.submit("long", [1], 200)
    gateway.next()
    gateway.send(Cancel(id="long"), Cancel(id="unknown"))
    world.until(lambda: world.engine.load()["kv_use"] == 0.0, "blocks are still held")
    gateway.submit("next", [2], 3)
    while gateway.connection and (message := gateway.next()):
        assert isinstance(message, Step)
        if any(token.id == "next" for token in message.tokens):
            return


def test_a_gateway_that_goes_away_frees_its_blocks_within_a_step(world: World) -> None:
    world.slow_down()
    leaving, staying = Gateway(world.address), Gateway(world.address)
    leaving.submit("a", [1], 200)
    staying.submit("b", [2], 60)
    leaving.next()
    # Counted by the worker's own thread: this one may look late.
    closed, beside, without = threading.Event(), list[int](), list[int]()

    def note(deadline_s: float) -> None:
        time.sleep(0.005)
        if closed.is_set():
            here = {request.id for request in world.engine.scheduler.live()}
            (beside if "a" in here else without).append(len(here))

    world.decoder.before_step = note
    leaving.connection.close()
    closed.set()
    world.until(lambda: without or not world.engine.has_work, "the request of a lost gateway runs on")
    assert len(beside) <= 20
    assert staying.collect("b") == {"b": expected_output([2], 60)}
    world.until(lambda: not world.engine.has_work, "work is left")
    assert world.engine.load()["kv_use"] == 0.0


def test_nonsense_ends_its_own_connection_only(world: World) -> None:
    good, bad = Gateway(world.address), Gateway(world.address)
    bad.connection.sendall(b"\xff\xff\xff\xff nonsense")
    with pytest.raises((EOFError, ConnectionResetError)):
        bad.next()
    good.submit("a", [1])
    assert good.collect("a") == {"a": expected_output([1], 5)}


def test_a_gateway_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "UNREAD_LIMIT_BYTES", 1 << 16)
    with running(World()) as world:
        deaf, good = Gateway(world.address), Gateway(world.address)
        # Each refusal is an answer that the deaf gateway leaves unread.
        refused = encode(Submit(id="x" * 256, attempt=1, prompt=[], params=SamplingParams(max_tokens=1)))
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(2000):
                deaf.connection.sendall(refused * 100)
        good.submit("a", [1])
        assert good.collect("a") == {"a": expected_output([1], 5)}


def test_a_slow_reader_gets_every_message_in_order(world: World) -> None:
    gateway = Gateway(world.address)
    count = 20_000

    def ask() -> None:
        for first in range(0, count, 100):
            params = SamplingParams(max_tokens=1)
            ids = range(first, first + 100)
            gateway.send(*(Submit(id=f"{n:0200}", attempt=1, prompt=[], params=params) for n in ids))

    asking = threading.Thread(target=ask)
    asking.start()
    world.until(lambda: any(link.unread for link in world.worker._links.values()), "nothing piled up")
    for number in range(count):
        message = gateway.next()
        assert isinstance(message, Failed)
        assert int(message.id) == number
    asking.join()


def test_a_worker_in_a_long_step_says_that_it_lives(world: World) -> None:
    world.decoder.before_step = lambda deadline_s: time.sleep(6.5 * worker_module.BEAT_S)
    gateways = [Gateway(world.address), Gateway(world.address)]
    began_s = time.monotonic()
    gateways[0].submit("a", [1], 1)
    sizes = []
    while sum(sizes) == 0:
        message = gateways[0].next()
        assert isinstance(message, Step)
        sizes.append(len(message.tokens))
    took_s = time.monotonic() - began_s
    assert sizes[-1] == 1
    # Six were due; a busy host may keep the thread from some, or make the step itself last longer.
    assert 2 <= len(sizes) - 1 <= took_s / worker_module.BEAT_S + 1, sizes
    assert gateways[1].next() == Step(tokens=[]), "whoever has nothing here hears it too"


def test_a_request_that_comes_in_a_long_step_has_waited_since_it_came(world: World) -> None:
    go_on = threading.Event()
    world.decoder.before_step = lambda deadline_s: go_on.wait(TIMEOUT_S)
    gateways = [Gateway(world.address), Gateway(world.address)]
    gateways[0].submit("a", [1], 1)
    world.until(lambda: world.engine.scheduler.running == 1, "the step did not begin")
    sent_s = time.monotonic()
    gateways[1].submit("b", [2], 3)
    gateways[1].submit("c", [3], 3)
    world.until(lambda: any(link.arrived for link in world.worker._links.values()), "nothing was read")
    read_s = time.monotonic()
    came_s: list[float] = []

    def note(deadline_s: float) -> None:
        came_s.extend(request.submitted_s for request in world.engine.scheduler.live())

    world.decoder.before_step = note
    go_on.set()
    assert gateways[1].collect("b", "c") == {"b": expected_output([2], 3), "c": expected_output([3], 3)}
    assert sent_s <= came_s[0] <= read_s, "it counted from the end of the step before"


def test_a_worker_whose_step_never_ends_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "STUCK_MARGIN_S", -29.7)
    go_on = threading.Event()
    with running(World()) as world:
        world.decoder.before_step = lambda deadline_s: go_on.wait()
        gateway = Gateway(world.address)
        gateway.submit("a", [1], 1)
        beats = 0
        gateway.connection.settimeout(6 * worker_module.BEAT_S)
        try:
            with pytest.raises(TimeoutError):
                while beats < 100:
                    gateway.next()
                    beats += 1
        finally:
            go_on.set()
    assert beats < 100


def test_stopping_sends_every_request_elsewhere(world: World) -> None:
    world.slow_down()
    gateway = Gateway(world.address)
    gateway.submit("a", [1], 200)
    gateway.submit("b", [1], 200)
    world.until(lambda: world.engine.scheduler.running == 2, "the requests did not arrive")
    ended: list[Failed] = []
    with bounded(1.0):
        world.worker.stop("told to stop")
        with pytest.raises((EOFError, ConnectionResetError)):
            while True:
                message = gateway.next()
                if isinstance(message, Failed):
                    ended.append(message)
        world.thread.join(TIMEOUT_S)
    assert not world.thread.is_alive()
    assert {(f.id, f.code, f.retryable) for f in ended} == {
        ("a", "shutting_down", True),
        ("b", "shutting_down", True),
    }
    assert "attention/1 stops: told to stop" in ended[0].message


def test_nothing_is_answered_while_the_lease_may_be_over() -> None:
    lease = threading.Event()
    with running(World(may_answer=lease.is_set)) as world:
        gateway = Gateway(world.address)
        gateway.submit("a", [1])
        time.sleep(0.1)
        assert world.decoder.rows_per_step == []
        lease.set()
        assert gateway.collect("a") == {"a": expected_output([1], 5)}


def test_an_idle_worker_sleeps(world: World) -> None:
    gateway = Gateway(world.address)
    gateway.submit("a", [1])
    gateway.collect("a")
    passes = world.passes
    time.sleep(0.2)
    assert world.passes - passes <= 2


def test_a_run_outlives_its_gateway_and_goes_on_for_the_next(world: World) -> None:
    # Slow until the other asks for it, however late that is: a run that has ended is not joined.
    asked = threading.Event()
    world.decoder.before_step = lambda deadline_s: asked.wait(0.1)
    params = SamplingParams(max_tokens=60, temperature=0.0)
    lost, other = Gateway(world.address), Gateway(world.address)
    lost.send(Submit(id="a", attempt=1, prompt=[1, 2], params=params, key="k"))
    while not (isinstance(message := lost.next(), Step) and message.tokens):
        continue
    lost.connection.close()
    world.until(lambda: len(world.worker._links) == 1, "it is still connected")
    other.send(Submit(id="b", attempt=1, prompt=[1, 2], params=params, key="k"))
    world.until(lambda: world.worker._runs.joined, "it does not join the run")
    asked.set()
    assert other.collect("b") == {"b": expected_output([1, 2], 60)}
    assert world.engine.computed == 2 + 59, "something was computed twice"
    world.until(lambda: world.engine.load()["kv_use"] == 0.0, "blocks are still held")

    def has_heard() -> bool:
        # It says so with its load, from time to time.
        with contextlib.suppress(TimeoutError):
            other.next()
        return any((load.joined, load.kept) == (1, 0) for load in other.loads)

    other.connection.settimeout(0.1)
    world.until(has_heard, "it does not say that the run was joined")
    assert all(load.kept == 0 for load in other.loads)


def test_a_worker_that_stops_tells_every_listener_of_a_run(world: World) -> None:
    world.slow_down()
    params = SamplingParams(max_tokens=150, temperature=0.0)
    gateways = [Gateway(world.address), Gateway(world.address)]
    for gateway in gateways:
        gateway.send(Submit(id="a", attempt=1, prompt=[1, 2], params=params, key="k"))
        while not (isinstance(message := gateway.next(), Step) and message.tokens):
            continue
    lost = Gateway(world.address)
    lost.send(Submit(id="a", attempt=1, prompt=[3], params=params, key="alone"))
    while not (isinstance(message := lost.next(), Step) and message.tokens):
        continue
    lost.connection.close()
    world.until(lambda: len(world.worker._links) == 2, "it is still connected")
    world.worker.stop("an order")
    for gateway in gateways:
        while not isinstance(message := gateway.next(), Failed):
            continue
        assert (message.id, message.code) == ("a", "shutting_down")


def test_background_steps_leave_the_cores_to_others_half_of_the_time(world: World) -> None:
    world.slow_down()
    gateway = Gateway(world.address)
    params = SamplingParams(max_tokens=200, temperature=0.0)
    began_s = time.monotonic()
    gateway.submit("now", [1], 1)
    gateway.send(Submit(id="later", attempt=1, prompt=[1], params=params, share=Share(background=True)))
    world.until(lambda: len(world.decoder.rows_per_step) > 40, "the job is computed")
    steps, took_s = len(world.decoder.rows_per_step), time.monotonic() - began_s
    # Each takes 5 ms at least, and rests as long. The first two are not for the background alone.
    assert (steps - 3) * 0.010 <= took_s, f"{steps} steps in {took_s:.3f} s"
    gateway.send(Cancel(id="later"))
