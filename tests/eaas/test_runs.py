"""Promises of runs: who asks under a key has the same tokens as who asked first, and nothing is computed twice."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future
from typing import Any

from eaas.worker import runs as module
from eaas.worker.constraint import Compiling
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.protocol import Failed, Grammar, SamplingParams, Step, Submit, Token
from eaas.worker.runs import GRACE_S, GRACE_TOKENS, KEPT_S, MOST_LISTENERS, Runs
from tests.eaas.fake_decoder import BLOCK_TOKENS, VOCAB, FakeDecoder, expected_output

PROMPT = list(range(1, 12))


class World:
    """An engine with runs, its clock and what each of its connections was told."""

    def __init__(self, blocks: int = 400) -> None:
        self.now_s = 0.0
        self.decoder = FakeDecoder(blocks)
        config = EngineConfig(
            max_model_len=4096, step_tokens=64, kv_blocks=blocks, block_tokens=BLOCK_TOKENS, vocab=VOCAB
        )
        self.engine = Engine(self.decoder, config, clock=lambda: self.now_s)
        self.runs = Runs(self.engine)
        self.engine.scheduler.on_end = self.runs.ended
        self.told: dict[tuple[int, str], list[Token]] = {}
        self.failed: list[tuple[int, Failed]] = []

    def submit(self, owner: int, id: str = "a", key: str = "k", **given: Any) -> None:
        given = {"prompt": PROMPT, "output": [], "attempt": 1, **given}
        message = {name: given.pop(name) for name in ("prompt", "output", "attempt")}
        params = SamplingParams(**{"max_tokens": 30, "temperature": 0.0, **given})
        self.told[owner, id] = []
        reply = self.runs.submit(Submit(id=id, key=key, params=params, **message), owner, self.now_s, self.now_s)
        if isinstance(reply, Failed):
            self.failed.append((owner, reply))
        elif isinstance(reply, Step):
            self.told[owner, id] += reply.tokens

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            outcome = self.engine.step()
            if outcome is None:
                return
            self.runs.spread(outcome)
            for owner, tokens in outcome.tokens.items():
                for token in tokens if owner else ():
                    self.told[owner, token.id].append(token)
            self.failed += [(owner, one) for owner, some in outcome.failed.items() for one in some]
            self.runs.expire(self.now_s)

    def heard(self, owner: int, id: str = "a", start: int = 0) -> list[int]:
        """The tokens that a listener was told, which came once and in order."""
        tokens = self.told[owner, id]
        assert [token.index for token in tokens] == list(range(start, start + len(tokens))), tokens
        return [token.token for token in tokens]

    @property
    def rows(self) -> int:
        return self.engine.computed


WHOLE = expected_output(PROMPT, 30)
ALONE = len(PROMPT) + 29  # rows of a run that is computed once


def test_who_asks_for_a_run_in_progress_has_its_tokens_at_once_and_nothing_is_computed_twice() -> None:
    world = World()
    world.submit(1)
    world.step(10)
    world.submit(2, "b", attempt=3)
    assert world.heard(2, "b") == WHOLE[:10], "what there is comes at once"
    assert {token.attempt for token in world.told[2, "b"]} == {3}
    world.submit(3, output=WHOLE[:4])
    world.step(40)
    assert world.heard(1) == world.heard(2, "b") == WHOLE and world.heard(3, start=4) == WHOLE[4:]
    assert all(told[-1].finish == "length" for told in world.told.values())
    assert world.rows == ALONE
    assert (world.runs.joined, world.runs.kept, world.runs.told) == (2, 0, 16)


def test_a_run_whose_gateway_is_lost_goes_on_for_who_comes_in_time() -> None:
    world = World()
    world.submit(1)
    world.step(5)
    assert world.runs.leave(1, world.now_s) == 0
    world.now_s += GRACE_S - 0.1
    world.step(5)
    world.submit(2)
    assert world.heard(2) == WHOLE[:10]
    world.now_s += 5 * GRACE_S
    world.step(40)
    assert world.heard(2) == WHOLE and world.rows == ALONE


def test_a_run_that_nobody_asks_for_ends_and_is_replayed_from_what_it_said() -> None:
    for ends in ("time", "tokens"):
        world, limit = World(600), 2000 if ends == "tokens" else 30
        whole = expected_output(PROMPT, limit)
        world.submit(1, max_tokens=limit)
        world.step(5)
        world.runs.leave(1, world.now_s)
        world.now_s += GRACE_S if ends == "time" else 0.0
        world.step(GRACE_TOKENS + 5)
        assert not world.engine.live() and world.engine.load()["kv_use"] == 0.0
        had = world.rows
        assert had - len(PROMPT) <= (GRACE_TOKENS + 6 if ends == "tokens" else 6)
        world.submit(2, max_tokens=limit, output=whole[:2])
        told = len(world.told[2, "a"])
        assert told >= 4 and world.runs.told == told
        world.step(1)
        assert world.rows - had <= BLOCK_TOKENS, "all but the last block was there"
        world.step(limit)
        assert world.heard(2, start=2) == whole[2:]
        assert world.rows <= len(PROMPT) + limit + BLOCK_TOKENS


def test_who_comes_when_a_run_has_finished_is_told_the_rest_at_once() -> None:
    world = World()
    world.submit(1)
    world.step(40)
    for owner in (2, 3):
        world.submit(owner, output=WHOLE[:29])
        assert world.heard(owner, start=29) == WHOLE[29:] and world.told[owner, "a"][-1].finish == "length"
    assert not world.engine.has_work and world.rows == ALONE
    world.now_s += KEPT_S
    world.runs.expire(world.now_s)
    world.submit(4)
    assert world.heard(4) == [], "it is forgotten in time, and computed again"
    world.step(40)
    assert world.heard(4) == WHOLE


def test_the_last_listener_ends_a_run_by_its_word_and_none_before() -> None:
    world = World()
    for owner in (1, 2, 3):
        world.submit(owner)
    world.step(5)
    assert world.runs.cancel("a", 1) and world.runs.cancel("a", 3)
    world.step(5)
    assert world.heard(2) == WHOLE[:10] and len(world.heard(1)) == len(world.heard(3)) == 5
    assert world.runs.cancel("a", 2) and not world.engine.live()
    assert not world.runs.cancel("a", 2)
    world.submit(1, attempt=2)
    assert world.heard(1) == WHOLE[:10], "what was said is known still"
    world.step(40)
    assert world.heard(1) == WHOLE and world.rows <= ALONE + BLOCK_TOKENS


def test_who_asks_while_a_grammar_is_compiled_hears_all_though_the_first_leaves() -> None:
    class Slow:
        def __init__(self) -> None:
            self.made: list[Future[Any]] = []

        def begin(self, *_: Any) -> Future[Any]:
            self.made.append(Future())
            return self.made[-1]

    for leaves in (True, False):
        world, slow = World(), Slow()
        world.engine.compiling = Compiling(slow, lambda: None, lambda: 0.0)  # type: ignore[arg-type]
        for owner in (1, 2):
            world.submit(owner, grammar=Grammar("regex", ".*"))
        if leaves:
            world.runs.leave(1, world.now_s)
        else:
            world.runs.cancel("a", 1)
        for future in slow.made:
            if not future.cancelled():
                future.set_result(None)
        world.step(40)
        assert world.heard(2) == WHOLE and world.heard(1) == [], "who left was told more"


def test_a_newer_attempt_of_a_listener_takes_the_place_of_its_older() -> None:
    world = World()
    world.submit(1)
    world.submit(2)
    world.step(5)
    for owner in (1, 2):
        world.submit(owner, attempt=2, output=WHOLE[:5])
    world.step(40)
    for owner in (1, 2):
        assert world.heard(owner, start=5) == WHOLE[5:]
        assert {token.attempt for token in world.told[owner, "a"]} == {2}
    assert world.rows == ALONE


def test_who_asks_for_anything_else_under_a_key_has_a_run_of_its_own() -> None:
    world = World()
    world.submit(1)
    world.step(10)
    other = [9, 9, 9]
    world.submit(2, prompt=other)
    world.submit(3, max_tokens=20)
    world.submit(4, temperature=1.0, seed=5)
    world.submit(5, output=[VOCAB - 1])
    world.submit(6, key="")
    world.submit(7, key="another")
    for params in ({"drop_lost_experts": True}, {"prompt_logprobs": 1}):
        world.submit(8, str(params), **params)
    assert not any(world.told[owner, id] for owner, id in world.told if owner > 1)
    world.step(60)
    assert world.heard(2) == expected_output(other, 30)
    assert world.heard(1) == world.heard(6) == world.heard(7) == WHOLE and world.heard(3) == WHOLE[:20]
    assert world.runs.joined == world.runs.kept == 0
    assert {token.attempt for token in world.told[4, "a"]} == {1} and len(world.heard(5, start=1)) == 29


def test_log_probabilities_are_told_again_as_they_were_or_computed_again() -> None:
    world = World()
    world.submit(1, logprobs=3)
    world.step(10)
    world.submit(2, logprobs=3)
    assert world.told[2, "a"] == world.told[1, "a"] and len(world.told[2, "a"]) == 10
    world.step(40)
    whole = world.told[1, "a"]
    assert world.told[2, "a"] == whole and len(whole) == 30 and all(len(token.top) == 3 for token in whole)
    world.submit(3, logprobs=3)
    assert world.told[3, "a"] == whole
    # A run that was taken over from a lost worker knows none of the tokens that it began with.
    world = World()
    world.submit(1, logprobs=3, output=WHOLE[:8])
    world.step(5)
    world.submit(2, logprobs=3, output=WHOLE[:9])
    world.submit(3, logprobs=3, output=WHOLE[:7])
    assert (world.runs.joined, len(world.told[2, "a"]), world.told[3, "a"]) == (1, 4, [])
    world.step(40)
    assert world.told[2, "a"] == whole[9:] and world.told[3, "a"] == whole[7:]


def test_a_run_that_ended_early_is_replayed_with_its_log_probabilities() -> None:
    world = World()
    world.submit(1, logprobs=2)
    world.step(12)
    world.runs.cancel("a", 1)
    world.submit(2, logprobs=2)
    assert world.told[2, "a"] == world.told[1, "a"]
    world.step(6)
    world.runs.cancel("a", 2)
    world.submit(3, logprobs=2)
    world.step(40)
    fresh = World()
    fresh.submit(3, logprobs=2)
    fresh.step(40)
    assert world.told[3, "a"] == fresh.told[3, "a"] and world.runs.told == 12 + 18


def test_what_is_kept_is_bounded_in_number_bytes_and_pairs(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "KEPT_RUNS", 5)
    world = World()
    for number in range(9):
        world.submit(1, f"r{number}", key=f"k{number}", max_tokens=3)
    world.step(20)
    assert len(world.runs._ended) == 5
    monkeypatch.setattr(module, "KEPT_BYTES", 1300)
    world.submit(1, "more", key="more", max_tokens=3)
    world.step(5)
    assert len(world.runs._ended) == 2 and world.runs._ended_bytes <= 1300
    world.submit(1, "long", key="long", max_tokens=3, stop_token_ids=tuple(range(90, 110)))
    world.step(5)
    assert len(world.runs._ended) == 1, "what was asked counts too"
    monkeypatch.setattr(module, "ALL_PAIRS", 100)
    monkeypatch.setattr(module, "RUN_PAIRS", 60)
    for number in range(3):
        world.submit(2, f"s{number}", key=f"s{number}", logprobs=2, max_tokens=30)
    world.step(10)
    assert [r.told is not None for r in world.engine.live()] == [True, False, False]
    world.step(12)
    assert [r.told is not None for r in world.engine.live()] == [False] * 3, "20 tokens of three pairs each"
    world.step(20)
    world.now_s += KEPT_S
    world.runs.expire(world.now_s)
    assert not world.runs._ended and world.runs._ended_bytes == world.runs._pairs == 0
    for owner in range(MOST_LISTENERS + 3):
        world.submit(owner + 1, "l", key="l")
    world.step(1)
    assert world.runs.joined == MOST_LISTENERS and len(world.engine.live()) == 3


def test_every_listener_has_every_token_once_whoever_comes_goes_and_dies() -> None:
    seed = time.time_ns()
    draw = random.Random(seed)
    world = World(blocks=60)
    prompts = {key: [draw.randrange(VOCAB) for _ in range(draw.randrange(2, 20))] for key in "pqr"}
    whole = {key: expected_output(prompt, 40) for key, prompt in prompts.items()}
    asked: dict[tuple[int, str], tuple[str, int]] = {}
    finished = 0
    for number in range(600):
        act = draw.random()
        if act < 0.25 and len(asked) < 12:
            key, owner, id = draw.choice("pqr"), draw.randrange(1, 5), f"{number}"
            start = draw.choice([0, 0, draw.randrange(39)])
            asked[owner, id] = key, start
            params: dict[str, Any] = draw.choice([{}, {}, {"logprobs": 1}])
            world.submit(owner, id, key, prompt=prompts[key], output=whole[key][:start], max_tokens=40, **params)
        elif act < 0.35 and asked:
            owner, id = draw.choice(list(asked))
            assert world.runs.cancel(id, owner) or world.told[owner, id][-1].finish, seed
            del asked[owner, id]
        elif act < 0.4:
            gone = draw.randrange(1, 5)
            world.runs.leave(gone, world.now_s)
            asked = {name: what for name, what in asked.items() if name[0] != gone}
        else:
            world.now_s += draw.choice([0.0, 0.1, 3.0])
            world.step(draw.randrange(6))
        for (owner, id), (key, start) in list(asked.items()):
            heard = world.heard(owner, id, start)
            assert heard == whole[key][start : start + len(heard)], seed
            if world.told[owner, id] and world.told[owner, id][-1].finish:
                assert start + len(heard) == 40, seed
                del asked[owner, id]
                finished += 1
    assert not world.failed and finished > 5, (seed, world.failed, finished)
    for owner in range(1, 5):
        world.runs.leave(owner, world.now_s)
    world.now_s += GRACE_S
    world.runs.expire(world.now_s)
    world.now_s += KEPT_S
    world.runs.expire(world.now_s)
    runs = world.runs
    left = (runs._live, runs._alone, runs._ended, runs._shared, runs._others, runs._ended_bytes, runs._pairs)
    assert not any(left) and not world.engine.live(), seed
