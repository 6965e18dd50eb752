"""The scheduler against a model whose every token depends on all tokens before it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaas.worker.blocks import BlockPool
from eaas.worker.plan import StepPlan
from eaas.worker.protocol import SamplingParams
from eaas.worker.request import Refused, Request
from eaas.worker.scheduler import Scheduler, SchedulerConfig
from tests.eaas.fake_decoder import BLOCK_TOKENS, FakeDecoder, expected_output, problems


@dataclass
class World:
    """A scheduler, its model, and the record of everything that was emitted."""

    blocks: int = 16
    reuse: bool = True
    step_tokens: int = 8
    max_running: int = 8
    max_waiting: int = 100
    max_model_len: int = 64
    emitted: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_model_len=self.max_model_len,
            step_tokens=self.step_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
        )
        self.pool = BlockPool(blocks=self.blocks, block_tokens=BLOCK_TOKENS, reuse=self.reuse)
        self.scheduler = Scheduler(config, self.pool)
        self.decoder = FakeDecoder(self.blocks)

    def submit(
        self,
        id: str,
        prompt: list[int],
        max_tokens: int,
        output: list[int] | None = None,
        stop: int = -1,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Request:
        stops = (stop,) if stop >= 0 else ()
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, cache_salt=cache_salt, priority=priority)
        request = Request(
            owner=0,
            id=id,
            attempt=1,
            prompt=np.array(prompt, np.int32),
            output=output or [],
            params=params,
        )
        self.scheduler.add(request)
        self.emitted[id] = list(output or [])
        return request

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self.check_plan(plan)
        tokens = self.decoder.step(plan, 1.0).argmax(axis=1).tolist()
        for made in self.scheduler.complete(tokens):
            id = made.request.id
            assert made.number == len(self.emitted[id]), f"{id}: token {made.number} after {self.emitted[id]}"
            assert id not in self.finished, f"{id} goes on after its end"
            self.emitted[id].append(made.token)
            if made.finish:
                self.finished[id] = made.finish
        self.check_blocks()
        return plan

    def run(self, steps: int = 10_000) -> int:
        for taken in range(steps):
            if self.step() is None:
                return taken
        raise AssertionError(f"not done after {steps} steps")

    def check_plan(self, plan: StepPlan) -> None:
        assert 1 <= len(plan.token_ids) <= self.step_tokens
        generating = {r.id for r in self.scheduler.live() if r.slot >= 0 and r.computed >= len(r.context)}
        assert generating <= {r.id for r in plan.requests}, "a generating request has no row"

    def check_blocks(self) -> None:
        live = list(self.scheduler.live())
        assert problems(self.pool, [r.blocks for r in live]) == []
        for request in live:
            assert len(request.blocks) * BLOCK_TOKENS >= request.computed
        waiting = [(r.params.priority, r.order) for r in self.scheduler.queue()]
        assert waiting == sorted(waiting), "the queue is out of order"


def test_a_request_alone_makes_its_tokens_in_order() -> None:
    world = World()
    world.submit("a", [1, 2, 3, 4, 5], 9)
    world.run()
    assert world.emitted["a"] == expected_output([1, 2, 3, 4, 5], 9)
    assert world.finished == {"a": "length"}
    assert world.pool.free == world.blocks


def test_others_are_admitted_beside_requests_that_are_left_out_again() -> None:
    """Not the first time: those who come and need the same would hold up all others one after another."""
    world = World(step_tokens=4)
    held = world.submit("held", [1] * 6, 4)
    plan = world.scheduler.plan()
    assert plan is not None and set(plan.seqs.tolist()) == {held.slot}
    world.submit("other", [2, 3], 4)
    world.scheduler.abandon()
    world.scheduler.park([held])
    assert world.scheduler.plan() is None, "who is left out for the first time may be followed by many like it"
    world.scheduler.unpark()
    plan = world.scheduler.plan()
    assert plan is not None and set(plan.seqs.tolist()) == {held.slot}, "it takes the whole step"
    world.scheduler.abandon()
    world.scheduler.park([held])
    for _ in range(4):
        plan = world.scheduler.plan()
        assert plan is not None and held.slot not in plan.seqs
        world.scheduler.complete(world.decoder.step(plan, 1.0).argmax(axis=1).tolist())
    assert world.scheduler.waiting == 0 and world.scheduler.parked == 1
    assert [request.id for request in world.scheduler.live()] == ["held"], "the other has ended"


def test_a_stop_token_ends_the_request_and_is_emitted() -> None:
    prompt = [3, 1, 4]
    stop = expected_output(prompt, 6)[3]
    world = World()
    world.submit("a", prompt, 20, stop=stop)
    world.run()
    assert world.emitted["a"] == expected_output(prompt, 20, frozenset({stop}))
    assert world.finished == {"a": "stop"}


def test_the_end_of_the_model_is_ignored_on_request_and_before_min_tokens() -> None:
    prompt = [3, 1, 4]
    first = expected_output(prompt, 1)[0]
    for ignore, minimum, wanted in ((True, 0, "length"), (False, 0, "stop"), (False, 2, "length")):
        params = SamplingParams(max_tokens=2, min_tokens=minimum, ignore_eos=ignore)
        request = Request(
            owner=0,
            id="a",
            attempt=1,
            prompt=np.array(prompt, np.int32),
            output=[],
            params=params,
            eos=frozenset({first}),
        )
        world = World()
        world.scheduler.add(request)
        world.emitted["a"] = []
        world.run()
        assert world.finished["a"] == wanted, f"ignore_eos {ignore}, min_tokens {minimum}"


@pytest.mark.parametrize("step_tokens", range(1, 20))
def test_every_chunk_size_gives_the_same_tokens(step_tokens: int) -> None:
    world = World(step_tokens=step_tokens)
    prompt = list(range(17))
    world.submit("a", prompt, 5)
    world.run()
    assert world.emitted["a"] == expected_output(prompt, 5)
    assert max(world.decoder.rows_per_step) == min(step_tokens, 17)


def test_generating_requests_go_before_prompts() -> None:
    world = World(step_tokens=4)
    world.submit("a", [1], 10)
    world.step()
    world.submit("b", list(range(9)), 2)
    for _ in range(3):
        plan = world.step()
        assert plan is not None
        assert plan.positions[0] == 1 + len(world.emitted["a"]) - 2
        assert len(plan.token_ids) == 4
    assert len(world.emitted["a"]) == 4
    assert len(world.emitted["b"]) == 1


def test_prompts_are_computed_in_order_of_arrival() -> None:
    world = World(step_tokens=4, blocks=32)
    for id in "abc":
        world.submit(id, list(range(6)), 1)
    order: list[str] = []
    while world.step():
        order += [id for id in world.finished if id not in order]
    assert order == ["a", "b", "c"]


def test_the_youngest_is_preempted_and_its_tokens_stay() -> None:
    world = World(blocks=6, reuse=False)
    old = world.submit("old", [1, 2, 3], 18)
    young = world.submit("young", [4, 5, 6], 18)
    world.run()
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert world.emitted == {"old": expected_output([1, 2, 3], 18), "young": expected_output([4, 5, 6], 18)}
    assert len(world.decoder.rows_per_step) < 50, "preempted and admitted to and fro"


def test_preempted_requests_come_back_in_order_of_arrival() -> None:
    world = World(max_running=2)
    for id in "abcd":
        world.submit(id, [1, ord(id)], 6)
    world.step()
    assert [world.scheduler.preempt_youngest().id for _ in range(2)] == ["b", "a"]  # type: ignore[union-attr]
    world.check_blocks()
    world.run()
    assert list(world.finished) == ["a", "b", "c", "d"]


def test_the_lower_priority_begins_first_and_equals_in_order_of_arrival() -> None:
    world = World(max_running=1)
    world.submit("running", [1, 2], 3, priority=9)
    world.step()
    for id, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0), ("e", 1), ("f", -1)):
        world.submit(id, [1, 2, 3], 2, priority=priority)
    assert [request.id for request in world.scheduler.queue()] == ["c", "f", "b", "d", "a", "e"]
    world.run()
    # Who runs is not stopped for one that waits.
    assert list(world.finished) == ["running", "c", "f", "b", "d", "a", "e"]


def test_the_last_priority_is_preempted_first_whoever_is_youngest() -> None:
    world = World()
    for id, priority in (("a", 2), ("b", 0), ("c", 2), ("d", 1)):
        world.submit(id, [1, 2], 6, priority=priority)
    world.step()
    world.submit("later", [5], 1, priority=2)
    assert [world.scheduler.preempt_youngest().id for _ in range(4)] == ["c", "a", "d", "b"]  # type: ignore[union-attr]
    assert [request.id for request in world.scheduler.queue()] == ["b", "d", "a", "c", "later"]
    world.run()
    assert all(world.emitted[id] == expected_output([1, 2], 6) for id in "abcd")


def test_a_newcomer_leaves_a_spare_block_for_each_running_request() -> None:
    world = World(blocks=4, max_running=4)
    world.submit("a", [1] * BLOCK_TOKENS, 4)
    world.step()
    world.submit("b", [2] * 2 * BLOCK_TOKENS, 2)
    world.run()
    assert world.scheduler.preemptions == 0
    assert list(world.finished) == ["a", "b"]


def test_a_preempted_request_finds_its_full_blocks_again() -> None:
    world = World(blocks=32)
    world.submit("a", list(range(10)), 12)
    for _ in range(8):
        world.step()
    world.scheduler.preempt_youngest()
    world.check_blocks()
    before = sum(world.decoder.rows_per_step)
    world.run()
    assert world.emitted["a"] == expected_output(list(range(10)), 12)
    assert sum(world.decoder.rows_per_step) - before <= 12 - 8 + BLOCK_TOKENS + 1


def test_a_common_prompt_is_computed_once() -> None:
    for reuse, most in ((True, 1), (False, 21)):
        world = World(reuse=reuse, step_tokens=64)
        prompt = list(range(21))
        world.submit("a", prompt, 1)
        world.run()
        world.submit("b", prompt, 1)
        world.run()
        assert world.decoder.rows_per_step == [21, most], f"prefix reuse {reuse}"
        assert world.emitted["a"] == world.emitted["b"] == expected_output(prompt, 1)


def test_requests_share_blocks_under_the_same_salt_alone() -> None:
    """However a tenant chooses its salt: one that is the bytes of another's first block is no way to its blocks."""
    prompt = [*range(97, 97 + BLOCK_TOKENS), *range(21)]
    first_block = np.array(prompt[:BLOCK_TOKENS], dtype=np.int32).tobytes().decode("latin-1")
    world = World(step_tokens=64, blocks=200)
    for name, salt, rows in (
        ("a", "", len(prompt)), ("b", "tenant 1", len(prompt)), ("c", "tenant 2", len(prompt)),
        ("d", "tenant 1", 1), ("e", "", 1), ("f", first_block, len(prompt)),
    ):  # fmt: skip
        world.submit(name, prompt, 1, cache_salt=salt)
        world.run()
        assert world.decoder.rows_per_step[-1] == rows, f"{name} under {salt!r}"
    world.submit("g", prompt[BLOCK_TOKENS:], 1, cache_salt=first_block)
    world.run()
    assert world.decoder.rows_per_step[-1] == 21, "the chain of another's blocks was continued"


def test_the_last_prompt_token_is_always_computed() -> None:
    world = World(step_tokens=64)
    prompt = list(range(4 * BLOCK_TOKENS))
    for id in "ab":
        world.submit(id, prompt, 1)
        world.run()
    assert world.decoder.rows_per_step == [16, BLOCK_TOKENS]
    assert world.emitted["b"] == expected_output(prompt, 1)


def test_a_replay_goes_on_at_the_next_index() -> None:
    prompt = [7, 8, 9]
    wanted = expected_output(prompt, 12)
    for sent in range(12):
        world = World()
        world.submit("a", prompt, 12, output=wanted[:sent])
        world.run()
        assert world.emitted["a"] == wanted, f"{sent} tokens were emitted before"


def test_cancelling_frees_the_blocks_at_once() -> None:
    world = World(step_tokens=4)
    for id in "abc":
        world.submit(id, list(range(6)), 9)
    world.step()
    world.step()
    held = [r.slot >= 0 for r in world.scheduler.live()]
    assert held == [True, True, False], "one generates, one is in its prompt, one waits"
    for id in "abc":
        assert world.scheduler.cancel(0, id)
        world.check_blocks()
    assert world.pool.free == world.blocks
    assert world.step() is None
    assert not world.scheduler.cancel(0, "a")


def test_a_step_that_did_not_happen_changes_nothing() -> None:
    world = World(step_tokens=4, max_running=2)
    for id in "abc":
        world.submit(id, [1, 2, ord(id)], 9)
    while world.scheduler.plan() is not None:
        world.scheduler.abandon()
        world.check_blocks()
        world.step()
    for id in "abc":
        assert world.emitted[id] == expected_output([1, 2, ord(id)], 9)
    assert world.pool.free == world.blocks


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "output", "code", "text"),
    [
        ([], 1, [], "bad_request", "no tokens"),
        ([1], 2, [5, 6], "bad_request", "already there|there already"),
        ([1] * 60, 5, [], "too_long", "make 65; the model's limit is 64.*at most 4 tokens"),
        ([1] * 70, 5, [], "too_long", "at most 0 tokens"),
        ([1] * 30, 20, [], "never_fits", r"need 13 KV blocks; this worker has 8 \(32 tokens\)"),
    ],
)
def test_what_can_never_be_served_is_refused_clearly(
    prompt: list[int], max_tokens: int, output: list[int], code: str, text: str
) -> None:
    world = World(blocks=8)
    with pytest.raises(Refused, match=text) as refused:
        world.submit("a", prompt, max_tokens, output)
    assert (refused.value.code, refused.value.retryable) == (code, False)
    assert world.step() is None


def test_the_largest_request_that_fits_is_served() -> None:
    world = World(blocks=8)
    world.submit("a", list(range(13)), 20)
    world.run()
    assert world.emitted["a"] == expected_output(list(range(13)), 20)


def test_a_name_is_used_once_and_the_queue_is_bounded() -> None:
    world = World(max_waiting=2)
    world.submit("a", [1], 1)
    with pytest.raises(Refused, match="already being served") as twice:
        world.submit("a", [1], 1)
    assert not twice.value.retryable
    world.submit("b", [1], 1)
    with pytest.raises(Refused, match="2 requests wait here") as full:
        world.submit("c", [1], 1)
    assert (full.value.code, full.value.retryable) == ("overloaded", True)
    world.run()
    assert set(world.finished) == {"a", "b"}


def test_steps_and_their_results_alternate() -> None:
    world = World()
    world.submit("a", [1], 1)
    for call in (lambda: world.scheduler.complete([]), world.scheduler.abandon):
        with pytest.raises(RuntimeError, match="call plan first"):
            call()
    world.scheduler.plan()
    for call in (
        world.scheduler.plan,
        world.scheduler.preempt_youngest,
        lambda: world.scheduler.cancel(0, "a"),
    ):
        with pytest.raises(RuntimeError, match="A step is running"):
            call()


@pytest.mark.parametrize("name", ["max_model_len", "step_tokens", "max_running", "max_waiting"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        SchedulerConfig(**{"max_model_len": 8, name: 0})  # pyright: ignore[reportArgumentType]


Submit = st.tuples(st.just("submit"), st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 12))
Step = st.tuples(st.just("step"), st.integers(1, 6), st.just(0))
Act = st.one_of(
    Submit,
    Submit,
    Step,
    Step,
    st.tuples(st.just("cancel"), st.integers(0, 50), st.just(0)),
    st.tuples(st.just("preempt"), st.just(0), st.just(0)),
    st.tuples(st.just("fail"), st.just(0), st.just(0)),
)


@settings(max_examples=250, deadline=None)
@given(
    acts=st.lists(Act, min_size=6, max_size=60),
    blocks=st.integers(8, 16),
    step_tokens=st.integers(1, 24),
    max_running=st.integers(1, 8),
    reuse=st.booleans(),
)
def test_any_history_gives_every_request_its_tokens_and_leaks_nothing(
    acts: list[tuple[str, object, int]], blocks: int, step_tokens: int, max_running: int, reuse: bool
) -> None:
    """Whatever is submitted, cancelled, preempted or failed: right tokens, budget kept, all blocks back."""
    world = World(blocks=blocks, step_tokens=step_tokens, max_running=max_running, reuse=reuse)
    wanted: dict[str, list[int]] = {}
    dropped: set[str] = set()
    for number, (act, first, second) in enumerate(acts):
        if act == "submit" and isinstance(first, list):
            id = f"r{number}"
            world.submit(id, first, second, priority=sum(first) % 3 - 1)
            wanted[id] = expected_output(first, second)
        elif act == "step" and isinstance(first, int):
            for _ in range(first):
                world.step()
        elif act == "cancel":
            live = [r.id for r in world.scheduler.live()]
            if live:
                id = live[first % len(live)]  # type: ignore[operator]
                world.scheduler.cancel(0, id)
                dropped.add(id)
        elif act == "preempt":
            world.scheduler.preempt_youngest()
        elif world.scheduler.plan() is not None:
            world.scheduler.abandon()
        world.check_blocks()
    world.run()
    for id, tokens in wanted.items():
        if id in dropped:
            assert world.emitted[id] == tokens[: len(world.emitted[id])]
        else:
            assert world.emitted[id] == tokens
            assert world.finished[id] == "length"
    assert world.pool.free == world.blocks
    assert list(world.scheduler.live()) == []
