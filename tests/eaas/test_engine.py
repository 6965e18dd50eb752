"""The engine over a model without weights: the same tokens however batched, cut, moved or resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from eaas.worker.decoder import ExpertsLost
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.plan import StepPlan
from eaas.worker.protocol import Failed, SamplingParams, Submit, Token
from eaas.worker.request import Request
from eaas.worker.runs import Runs
from tests.eaas.fake_decoder import BLOCK_TOKENS, VOCAB, FakeDecoder, Watched, expected_output

MAX_MODEL_LEN = 128


class World:
    """An engine, its decoder, every token and every row of logits that came out of it."""

    def __init__(
        self,
        blocks: int = 256,
        step_tokens: int = 64,
        reuse: bool = True,
        eos: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decoder = FakeDecoder(blocks)
        self.logits: dict[tuple[str, int], bytes] = {}
        config = EngineConfig(
            max_model_len=MAX_MODEL_LEN,
            step_tokens=step_tokens,
            kv_blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            vocab=VOCAB,
            eos_ids=frozenset(eos),
            prefix_reuse=reuse,
        )
        self.engine = Engine(Watched(self.decoder, self.keep), config, clock=clock)
        self.tokens: dict[str, list[int]] = {}
        self.records: list[Token] = []
        self.failed: list[Failed] = []

    def keep(self, request: Request, index: int, logits: np.ndarray) -> None:
        bits = logits.tobytes()
        assert self.logits.setdefault((request.id, index), bits) == bits, f"{request.id} {index} differs"

    def submit(self, id: str, prompt: Sequence[int], output: Sequence[int] = (), **params: Any) -> None:
        message = Submit(
            id=id,
            attempt=1,
            prompt=list(prompt),
            output=list(output),
            params=SamplingParams(**{"max_tokens": 10, "temperature": 0.0, **params}),  # type: ignore[arg-type]
        )
        refusal = self.engine.submit(message)
        if refusal is not None:
            self.failed.append(refusal)
        self.tokens.setdefault(id, list(output))

    def step(self) -> bool:
        outcome = self.engine.step()
        if outcome is None:
            return False
        for token in outcome.tokens.get(0, []):
            assert token.index == len(self.tokens[token.id]), f"{token} after {self.tokens[token.id]}"
            self.tokens[token.id].append(token.token)
            self.records.append(token)
        self.failed += outcome.failed.get(0, [])
        return True

    def run(self) -> None:
        while self.step():
            continue
        assert not self.engine.has_work
        assert self.engine.load()["kv_use"] == 0.0


def sampled(seed: int) -> dict[str, Any]:
    return {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": seed}


def prompts(count: int, seed: int = 5) -> dict[str, list[int]]:
    source = np.random.default_rng(seed)
    return {f"p{number}": source.integers(0, VOCAB, source.integers(1, 60)).tolist() for number in range(count)}


def alone(prompt: Sequence[int], **params: Any) -> tuple[list[int], list[bytes]]:
    """Tokens and logits of a request that has an engine to itself."""
    world = World(reuse=False, step_tokens=256)
    world.submit("a", prompt, **params)
    world.run()
    return world.tokens["a"], [world.logits["a", index] for index in range(len(world.tokens["a"]))]


def test_greedy_tokens_are_the_models() -> None:
    prompt = [1, 2, 3, 4, 5]
    assert alone(prompt)[0] == expected_output(prompt, 10)


@pytest.mark.parametrize("step_tokens", [1, 2, 3, 5, 16, 17, 33, 64])
@pytest.mark.parametrize("reuse", [True, False])
def test_seventeen_at_once_give_the_bits_of_each_alone(step_tokens: int, reuse: bool) -> None:
    world = World(step_tokens=step_tokens, reuse=reuse)
    asked = prompts(17)
    for number, (id, prompt) in enumerate(asked.items()):
        world.submit(id, prompt, **sampled(number))
    world.run()
    for number, (id, prompt) in enumerate(asked.items()):
        tokens, logits = alone(prompt, **sampled(number))
        assert world.tokens[id] == tokens, f"{id} with {step_tokens} rows a step"
        assert [world.logits[id, index] for index in range(10)] == logits


def test_forced_preemption_changes_nothing() -> None:
    asked = prompts(6)
    for reuse in (True, False):
        world = World(step_tokens=24, reuse=reuse)
        for number, (id, prompt) in enumerate(asked.items()):
            world.submit(id, prompt, **sampled(number))
        steps = 0
        while world.step():
            steps += 1
            if steps % 3 == 0:
                world.engine.scheduler.preempt_youngest()
        assert world.engine.scheduler.preemptions >= 4
        for number, (id, prompt) in enumerate(asked.items()):
            assert world.tokens[id] == alone(prompt, **sampled(number))[0], f"{id}, prefix reuse {reuse}"


def test_a_pool_too_small_for_all_changes_nothing() -> None:
    asked = prompts(12)
    world = World(blocks=40, step_tokens=64)
    for number, (id, prompt) in enumerate(asked.items()):
        world.submit(id, prompt, max_tokens=60, **sampled(number))
    world.run()
    assert world.engine.scheduler.preemptions > 0
    for number, (id, prompt) in enumerate(asked.items()):
        assert world.tokens[id] == alone(prompt, max_tokens=60, **sampled(number))[0], id


def test_a_common_beginning_changes_nothing() -> None:
    world = World(step_tokens=256)
    prompt = prompts(1)["p0"][:40] * 2
    for number in range(5):
        world.submit(f"r{number}", [*prompt[:60], number], **sampled(number))
        world.run()
        assert world.tokens[f"r{number}"] == alone([*prompt[:60], number], **sampled(number))[0]
    assert world.engine.scheduler.reused_tokens >= 4 * 56


@pytest.mark.parametrize("sent", range(11))
def test_a_replay_continues_where_another_worker_stopped(sent: int) -> None:
    penalties = {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "min_tokens": 6,
    }
    params = {"max_tokens": 11, **sampled(3), **penalties}
    tokens, logits = alone([5, 6, 7], **params)
    world = World(step_tokens=4)
    world.submit("a", [5, 6, 7], output=tokens[:sent], **params)
    world.run()
    assert world.tokens["a"] == tokens
    assert [world.logits["a", index] for index in range(sent, 11)] == logits[sent:]
    assert world.records[0].index == sent


def test_penalties_and_preemption_agree() -> None:
    params = {"max_tokens": 30, "frequency_penalty": 2.0, "repetition_penalty": 1.5, "temperature": 0.0}
    wanted = alone([1, 2, 3], **params)[0]
    assert wanted != alone([1, 2, 3], max_tokens=30)[0], "the penalties do nothing here"
    world = World(step_tokens=8)
    world.submit("a", [1, 2, 3], **params)
    while world.step():
        world.engine.scheduler.preempt_youngest() if len(world.tokens["a"]) % 4 == 0 else None
    assert world.tokens["a"] == wanted


def test_end_tokens_wait_for_min_tokens() -> None:
    eos = expected_output([9, 9], 3)[2]
    for minimum, ignore, count in ((0, False, 3), (8, False, None), (0, True, 20)):
        world = World(eos=[eos])
        world.submit("a", [9, 9], max_tokens=20, min_tokens=minimum, ignore_eos=ignore)
        world.run()
        tokens = world.tokens["a"]
        assert eos not in tokens[:minimum], f"min_tokens {minimum}"
        if count is not None:
            assert len(tokens) == count, f"min_tokens {minimum}, ignore_eos {ignore}"
        assert world.records[-1].finish == ("stop" if tokens[-1] == eos and not ignore else "length")


def test_log_probabilities_come_only_where_they_are_asked_for() -> None:
    world = World()
    world.submit("none", [1, 2], max_tokens=2)
    world.submit("own", [1, 2], max_tokens=2, logprobs=0)
    world.submit("three", [1, 2], max_tokens=2, logprobs=3)
    world.run()
    by_id = {token.id: token for token in world.records if token.index == 0}
    assert (by_id["none"].logprob, by_id["none"].top) == (None, [])
    logits = np.frombuffer(world.logits["own", 0], dtype=np.float32).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logprobs)[:3]
    assert by_id["own"].logprob == pytest.approx(logprobs[by_id["own"].token], abs=1e-5)
    assert by_id["own"].top == []
    assert [token for token, _ in by_id["three"].top] == best.tolist()
    assert [logprob for _, logprob in by_id["three"].top] == pytest.approx(logprobs[best], abs=1e-5)


def test_cancelling_frees_within_one_step() -> None:
    world = World(step_tokens=8)
    for id in "abc":
        world.submit(id, range(6), max_tokens=50)
    world.step()
    world.step()
    for id in "abc":
        assert world.engine.cancel(id)
    assert not any(world.engine.load().values())
    assert not world.step()
    assert not world.engine.cancel("a")


def test_the_load_counts_what_is_queued_and_how_long() -> None:
    now_s = [100.0]
    world = World(step_tokens=8, clock=lambda: now_s[0])
    world.submit("first", range(12), max_tokens=30)
    world.step()
    now_s[0] += 2
    world.submit("second", range(20, 40), max_tokens=3)
    now_s[0] += 5
    load = world.engine.load()
    assert (load["running"], load["waiting"], load["queue_s"]) == (1, 1, 5)
    # Four of the first prompt's twelve are left; of the second all 20, and the 3 that it may generate.
    assert load["backlog_tokens"] == 4 + 20 + 3
    world.step()
    # The first has its first token and waits for the next one; of the second, four are computed.
    assert world.engine.load()["backlog_tokens"] == 1 + 16
    world.run()
    assert world.engine.computed == 12 + 29 + 20 + 2
    assert not any(world.engine.load().values())


def test_only_steps_that_computed_count_as_busy() -> None:
    now_s = [0.0]
    world = World(clock=lambda: now_s[0])
    compute = world.decoder.step

    def lose(plan: StepPlan, deadline_s: float) -> np.ndarray:
        now_s[0] += 1
        raise ExpertsLost

    def slow(plan: StepPlan, deadline_s: float) -> np.ndarray:
        now_s[0] += 3
        return compute(plan, deadline_s)

    world.submit("a", [1, 2], max_tokens=2)
    world.decoder.step = lose
    assert world.step()
    assert world.engine.busy_s == 0
    world.decoder.step = slow
    world.run()
    assert world.engine.busy_s == 6


def test_an_owner_that_goes_takes_only_its_own_requests() -> None:
    world = World()
    for owner in (0, 7):
        for id in "ab":
            message = Submit(id=id, attempt=1, prompt=[1], params=SamplingParams(max_tokens=3, temperature=0.0))
            assert world.engine.submit(message, owner) is None
            world.tokens[id] = []
    world.step()
    assert Runs(world.engine).leave(7, 0.0) == 2
    world.run()
    assert {id: len(tokens) for id, tokens in world.tokens.items()} == {"a": 3, "b": 3}


def test_a_newer_attempt_replaces_the_older() -> None:
    world = World()
    world.submit("a", [1, 2], max_tokens=5)
    world.step()
    again = Submit(
        id="a",
        attempt=2,
        prompt=[1, 2],
        output=list(world.tokens["a"]),
        params=SamplingParams(max_tokens=5, temperature=0),
    )
    assert world.engine.submit(again) is None
    world.run()
    assert world.tokens["a"] == expected_output([1, 2], 5)
    assert [token.attempt for token in world.records] == [1, 2, 2, 2, 2]


def test_the_same_attempt_twice_is_refused_and_the_first_goes_on() -> None:
    world = World()
    world.submit("a", [1, 2], max_tokens=5)
    world.submit("a", [1, 2], max_tokens=5)
    assert [f.code for f in world.failed] == ["bad_request"]
    world.run()
    assert world.tokens["a"] == expected_output([1, 2], 5)


def test_lost_experts_fail_each_request_at_its_own_deadline_and_no_other() -> None:
    """Deadline 30 s. Lost from 100 s on; a, b in the step, c comes 10 s later, all is well again at 135 s."""
    world = World()
    now_s = [100.0]
    world.engine = Engine(Watched(world.decoder, world.keep), world.engine.config, clock=lambda: now_s[0])
    world.submit("a", [1, 2, 3], max_tokens=9)
    world.submit("b", [4, 5, 6], max_tokens=9)
    world.step()
    waits: list[float] = []

    def lost(deadline_s: float) -> None:
        waits.append(deadline_s)
        if len(waits) == 1:
            now_s[0] += 10
            world.submit("c", [7, 8, 9], max_tokens=9)
            now_s[0] += deadline_s - 10
        elif now_s[0] + deadline_s < 135:
            now_s[0] += deadline_s
        else:
            now_s[0] = 135.0
            return
        raise ExpertsLost("expert 3 of layer 1 has no live replica")

    world.decoder.before_step = lost
    world.step()
    assert now_s[0] == pytest.approx(130)
    assert {(f.id, f.code, f.retryable) for f in world.failed} == {
        ("a", "expert_lost", True),
        ("b", "expert_lost", True),
    }
    world.step()
    assert waits == [30.0, pytest.approx(10.0)], "c had waited 20 of its 30 s"
    world.decoder.before_step = None
    world.run()
    assert world.tokens["c"] == expected_output([7, 8, 9], 9)
    assert len(world.failed) == 2


def test_a_request_whose_rows_all_came_goes_on_when_the_step_is_lost_for_another() -> None:
    world = World()
    now_s = [100.0]
    world.engine = Engine(Watched(world.decoder, world.keep), world.engine.config, clock=lambda: now_s[0])
    world.submit("a", [1, 2, 3], max_tokens=9)
    world.submit("b", [4, 5, 6], max_tokens=9)
    world.step()

    def lost(deadline_s: float) -> None:
        now_s[0] += deadline_s
        raise ExpertsLost("expert 3 of layer 1 has no live replica", np.array([1]))

    world.decoder.before_step = lost
    world.step()
    assert [(f.id, f.code, f.retryable) for f in world.failed] == [("b", "expert_lost", True)]
    waits: list[float] = []
    world.decoder.before_step = waits.append
    world.run()
    assert world.tokens["a"] == expected_output([1, 2, 3], 9)
    assert waits[:2] == [1.5, 30.0], "a waited with b; its own experts still have time to answer"


def test_the_first_step_that_meets_lost_experts_holds_up_others_for_no_longer_than_patience() -> None:
    """Deadline 30 s, patience 1.5 s: "b" needs lost experts and fails at its deadline, "a" has its tokens at once."""
    world = World()
    now_s = [100.0]
    world.engine = Engine(Watched(world.decoder, world.keep), world.engine.config, clock=lambda: now_s[0])
    whole, ended_s = world.decoder.step, dict[str, float]()

    def step(plan: StepPlan, deadline_s: float) -> np.ndarray:
        lost = [row for row in range(len(plan.token_ids)) if plan.token_ids[row] == 1 and not plan.positions[row]]
        if not lost:
            now_s[0] += 0.01
            return whole(plan, deadline_s)
        now_s[0] += min(1.5, deadline_s)
        raise ExpertsLost("expert 3 of layer 1 has no live replica", np.array(lost))

    world.decoder.step = step  # type: ignore[method-assign]
    world.submit("a", [2, 3, 4], max_tokens=40)
    world.submit("b", [1, 5], max_tokens=2)
    while not world.failed:
        world.step()
        if len(world.tokens["a"]) == 40:
            ended_s.setdefault("a", now_s[0])
    assert world.tokens["a"] == expected_output([2, 3, 4], 40)
    assert ended_s["a"] < 102, "held up once by the patience, and then in peace"
    assert 129.9 < now_s[0] < 131.6, "b failed by its own deadline, or by the end of the step that reached it"
    assert [(f.id, f.code, f.retryable) for f in world.failed] == [("b", "expert_lost", True)]


def test_requests_that_keep_coming_for_lost_experts_hold_up_no_other_for_ever() -> None:
    """Deadline 30 s. One more request that needs them comes every second; "a" needs none of them."""
    world = World()
    now_s = [100.0]
    world.engine = Engine(Watched(world.decoder, world.keep), world.engine.config, clock=lambda: now_s[0])
    whole = world.decoder.step
    came_s: dict[str, float] = {}

    def step(plan: StepPlan, deadline_s: float) -> np.ndarray:
        lost = [row for row, position in enumerate(plan.positions) if plan.token_ids[row] == 1 and not position]
        if not lost:
            now_s[0] += 0.01
            return whole(plan, deadline_s)
        now_s[0] += deadline_s
        raise ExpertsLost("expert 3 of layer 1 has no live replica", np.array(lost))

    world.decoder.step = step  # type: ignore[method-assign]
    world.submit("a", [2, 3, 4], max_tokens=40)
    while len(world.tokens["a"]) < 40:
        if now_s[0] - max(came_s.values(), default=0.0) >= 1:
            id = f"n{len(came_s)}"
            came_s[id] = now_s[0]
            world.submit(id, [1, 5], max_tokens=2)
        ended = len(world.failed)
        world.step()
        assert now_s[0] < 200, f"a has {len(world.tokens['a'])} of 40 tokens"
        for failed in world.failed[ended:]:
            assert now_s[0] - came_s[failed.id] < 35, failed
    assert world.tokens["a"] == expected_output([2, 3, 4], 40)
    world.decoder.step = whole  # type: ignore[method-assign]
    left = [id for id in came_s if id not in {f.id for f in world.failed}]
    assert left
    world.run()
    assert [world.tokens[id] for id in left] == [expected_output([1, 5], 2)] * len(left)


def test_who_queues_behind_requests_that_wait_for_lost_experts_is_served_when_it_needs_none_of_them() -> None:
    """Deadline 30 s. Prompts of ones need what is lost, and each fills a step; those of twos, behind them, do not."""
    world = World(step_tokens=4)
    now_s = [100.0]
    world.engine = Engine(Watched(world.decoder, world.keep), world.engine.config, clock=lambda: now_s[0])
    whole = world.decoder.step

    def step(plan: StepPlan, deadline_s: float) -> np.ndarray:
        lost = [row for row, token in enumerate(plan.token_ids) if token == 1 and plan.positions[row] < 6]
        if not lost:
            now_s[0] += 0.01
            return whole(plan, deadline_s)
        now_s[0] += deadline_s
        raise ExpertsLost("expert 3 of layer 1 has no live replica", np.array(lost))

    world.decoder.step = step  # type: ignore[method-assign]
    needs, others = ("a", "c", "d"), ("b", "e", "f")
    for id in sorted(needs + others):
        world.submit(id, [1 if id in needs else 2] * 6, max_tokens=3)
    while world.engine.has_work:
        world.step()
        assert now_s[0] < 300
    assert sorted(f.id for f in world.failed) == sorted(needs)
    assert [world.tokens[id] for id in others] == [expected_output([2] * 6, 3)] * len(others)


def test_who_queues_where_nothing_can_be_computed_fails_soon_after_the_deadline() -> None:
    world = World(step_tokens=4)
    now_s = [0.0]
    world.engine = Engine(Watched(world.decoder, world.keep), world.engine.config, clock=lambda: now_s[0])
    for number in range(60):
        world.submit(f"q{number}", [1, 2, 3, number], max_tokens=4)

    def lost(deadline_s: float) -> None:
        now_s[0] += deadline_s
        raise ExpertsLost("expert 3 of layer 1 has no live replica", np.array([0]))

    world.decoder.before_step = lost
    while world.engine.has_work:
        world.step()
    assert len(world.failed) == 60
    assert now_s[0] < 40
    said = [failed.message.partition(":")[0] for failed in world.failed]
    assert said.count("It waited in the queue while nothing could be computed for 38 s") > 40, set(said)
    assert world.engine.load()["kv_use"] == 0.0


def test_a_request_that_went_on_while_experts_were_lost_has_not_waited_for_them() -> None:
    """Deadline 30 s. Lost from 100 s on for b and c; a is computed meanwhile, and once is to blame too."""
    world = World()
    now_s = [100.0]
    world.engine = Engine(Watched(world.decoder, world.keep), world.engine.config, clock=lambda: now_s[0])
    world.submit("a", [2, 3, 4], max_tokens=9)
    world.step()
    world.submit("b", [1, 5], max_tokens=9)

    def lost(blamed: Sequence[int], deadline_s: float, comes: str = "") -> None:
        if comes:
            now_s[0] += 25
            world.submit(comes, [1, 6], max_tokens=9)
        now_s[0] += deadline_s - (25 if comes else 0)
        raise ExpertsLost("expert 3 of layer 1 has no live replica", np.array(blamed))

    world.decoder.before_step = lambda deadline_s: lost([1, 2], deadline_s, "c")
    world.step()
    assert [f.id for f in world.failed] == ["b"]
    world.decoder.before_step = lambda deadline_s: lost([1, 2], deadline_s)
    world.step()
    world.decoder.before_step = None
    world.step()
    assert len(world.tokens["a"]) == 2, "a goes on without c"
    world.decoder.before_step = lambda deadline_s: lost([0], deadline_s)
    world.step()
    world.decoder.before_step = None
    world.run()
    assert [f.id for f in world.failed] == ["b"], "a was lost for a moment only"
    assert world.tokens["a"] == expected_output([2, 3, 4], 9)
    assert world.tokens["c"] == expected_output([1, 6], 9)


def test_a_step_lost_for_no_row_is_lost_for_all_and_none_waits_past_its_deadline() -> None:
    world = World()
    now_s = [100.0]
    world.engine = Engine(Watched(world.decoder, world.keep), world.engine.config, clock=lambda: now_s[0])
    world.submit("a", [1, 2, 3])
    world.submit("b", [4, 5, 6])

    def lost(deadline_s: float) -> None:
        now_s[0] += 1
        raise ExpertsLost("the expert call ended with code -2", np.zeros(0, np.int64))

    world.decoder.before_step = lost
    while world.engine.has_work:
        assert now_s[0] < 131, "nobody fails"
        world.step()
    assert sorted((f.id, f.code) for f in world.failed) == [("a", "expert_lost"), ("b", "expert_lost")]


def test_requests_that_queue_while_experts_are_lost_fail_at_their_deadline_too() -> None:
    world = World(step_tokens=4)
    now_s = [0.0]
    world.engine = Engine(Watched(world.decoder, world.keep), world.engine.config, clock=lambda: now_s[0])
    for number in range(12):
        world.submit(f"q{number}", [1, 2, 3, number], max_tokens=4)

    def lost(deadline_s: float) -> None:
        now_s[0] += deadline_s
        raise ExpertsLost("nobody")

    world.decoder.before_step = lost
    world.step()
    assert len(world.failed) == 12
    assert now_s[0] == pytest.approx(30)
    assert not world.engine.has_work
    assert world.engine.load()["kv_use"] == 0.0


@pytest.mark.parametrize("bounds", [{}, {"allowed_token_ids": (5, 6, 7)}, {"bad_tokens": ((5,),)}])
def test_a_row_of_broken_logits_fails_alone(bounds: dict[str, Any]) -> None:
    """By no fault of its client, whatever that bound its output by."""
    world = World()
    poison = [13, 13, 13]
    whole = world.decoder.logits

    def broken(history: Sequence[int]) -> np.ndarray:
        logits = whole(history)
        if list(history[:3]) == poison:
            logits[5] = np.nan
        return logits

    world.decoder.logits = broken
    for id, prompt in {"a": [1, 2], "bad": poison, "c": [3, 4]}.items():
        world.submit(id, prompt, logprobs=2, **(bounds if id == "bad" else {}))
    world.run()
    assert [(f.id, f.code, f.retryable) for f in world.failed] == [("bad", "internal", False)]
    assert "NaN or infinity" in world.failed[0].message
    assert world.tokens == {"a": expected_output([1, 2], 10), "bad": [], "c": expected_output([3, 4], 10)}


@pytest.mark.parametrize(
    ("prompt", "output", "code", "text"),
    [
        ([1, VOCAB], [], "bad_request", f"prompt holds token {VOCAB}; ids are 0 to {VOCAB - 1}"),
        ([1], [2, 500], "bad_request", "output holds token 500"),
        ([], [], "bad_request", "no tokens"),
        ([1] * MAX_MODEL_LEN, [], "too_long", f"the model's limit is {MAX_MODEL_LEN}"),
    ],
)
def test_a_bad_request_is_refused_clearly(prompt: list[int], output: list[int], code: str, text: str) -> None:
    world = World()
    world.submit("a", prompt, output)
    assert [(f.id, f.attempt, f.code, f.retryable) for f in world.failed] == [("a", 1, code, False)]
    assert text in world.failed[0].message
    assert not world.engine.has_work
