"""The engine over the native decoder: every token's logits have the same bits, whatever happens around it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Self

import numpy as np
import pytest

from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.protocol import SamplingParams, Submit
from eaas.worker.request import Request
from experts.model import CHOICES, Dtype
from tests.eaas import decoder_world
from tests.eaas.decoder_world import VARIANTS, VOCAB
from tests.eaas.fake_decoder import Watched

SEED = 23
NEW_TOKENS = 12
DTYPES = CHOICES


@cache
def model(dtype: Dtype) -> decoder_world.World:
    spec = VARIANTS["bias, shared expert with gate"]
    return decoder_world.World.make(replace(spec, dtype=dtype, tie_embeddings=True), SEED)


class World:
    """An engine over its own decoder; keeps the bits of every row of logits that a token was chosen from."""

    def __init__(
        self, dtype: Dtype, *, step_tokens: int = 128, blocks: int = 128, reuse: bool = False, lanes: int = 1
    ) -> None:
        spec = model(dtype).spec
        self.runner = model(dtype).decoder(lanes=lanes, kv_blocks=blocks, max_rows=step_tokens)
        config = EngineConfig(
            max_model_len=spec.max_model_len,
            step_tokens=step_tokens,
            kv_blocks=blocks,
            vocab=VOCAB,
            prefix_reuse=reuse,
        )
        self.engine = Engine(Watched(self.runner.decoder, self.keep), config)
        self.bad: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.bits: dict[tuple[str, int], bytes] = {}
        self.tokens: dict[str, list[int]] = {}

    def keep(self, request: Request, index: int, logits: np.ndarray) -> None:
        self.bits[request.id, index] = logits.tobytes()

    def submit(self, id: str, output: list[int] | None = None) -> None:
        number = int(id[1:])
        params = SamplingParams(
            max_tokens=NEW_TOKENS,
            temperature=0.8,
            seed=number,
            ignore_eos=True,
            bad_tokens=self.bad.get(id, ()),
        )
        refusal = self.engine.submit(Submit(id=id, attempt=1, prompt=prompts()[id], output=output or [], params=params))
        assert refusal is None, refusal
        self.tokens[id] = list(output or [])

    def step(self) -> bool:
        outcome = self.engine.step()
        if outcome is None:
            return False
        assert not outcome.failed, outcome.failed
        for token in outcome.tokens.get(0, []):
            self.tokens[token.id].append(token.token)
        return True

    def run(self, preempt_every: int = 0) -> Self:
        steps = 0
        while self.step():
            steps += 1
            if preempt_every and steps % preempt_every == 0:
                self.engine.scheduler.preempt_youngest()
        return self


@cache
def prompts() -> dict[str, list[int]]:
    """17 of mixed lengths, half of them with a common beginning of 40 tokens."""
    source = np.random.default_rng(SEED)
    common = source.integers(0, VOCAB, 40).tolist()
    made = {}
    for number in range(17):
        own = source.integers(0, VOCAB, source.integers(1, 100)).tolist()
        made[f"p{number}"] = (common if number % 2 else []) + own
    return made


@cache
def alone(dtype: Dtype) -> tuple[dict[str, list[int]], dict[tuple[str, int], bytes]]:
    """Each request with an engine to itself."""
    world = World(dtype)
    for id in prompts():
        world.submit(id)
        world.run()
    return world.tokens, world.bits


def check(world: World, dtype: Dtype, what: str) -> None:
    tokens, bits = alone(dtype)
    for id, made in world.tokens.items():
        assert made == tokens[id], f"seed {SEED}, {what}: tokens of {id}"
    wrong = [key for key, row in world.bits.items() if row != bits[key]]
    assert not wrong, f"seed {SEED}, {what}: logits differ at {wrong[:5]}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("step_tokens", [17, 29, 48, 256])
def test_in_a_batch_of_17_at_each_chunk_size(dtype: Dtype, reuse: bool, step_tokens: int) -> None:
    world = World(dtype, step_tokens=step_tokens, reuse=reuse)
    for id in prompts():
        world.submit(id)
    check(world.run(), dtype, f"{step_tokens} rows a step, prefix reuse {reuse}")
    if reuse and step_tokens < 256:
        assert world.engine.scheduler.reused_tokens > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_at_every_chunk_boundary_of_a_prompt(dtype: Dtype) -> None:
    for step_tokens in [*range(1, 20), 31, 32, 33, 47]:
        world = World(dtype, step_tokens=step_tokens)
        world.submit("p3")
        check(world.run(), dtype, f"chunks of {step_tokens}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reuse", [True, False])
def test_after_preemption(dtype: Dtype, reuse: bool) -> None:
    world = World(dtype, step_tokens=64, reuse=reuse)
    for id in prompts():
        world.submit(id)
    world.run(preempt_every=4)
    assert world.engine.scheduler.preemptions > 3
    check(world, dtype, f"preempted, prefix reuse {reuse}")
    small = World(dtype, step_tokens=64, blocks=24, reuse=reuse)
    for id in prompts():
        small.submit(id)
    check(small.run(), dtype, f"a pool of 24 blocks, prefix reuse {reuse}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_a_prompt_seen_before(dtype: Dtype) -> None:
    world = World(dtype, reuse=True)
    for round in range(2):
        for id in prompts():
            world.submit(id)
            world.run()
        check(world, dtype, f"round {round}")
    assert world.engine.scheduler.reused_tokens > 17 * 32


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_a_replay_of_what_another_worker_emitted(dtype: Dtype) -> None:
    for sent in range(NEW_TOKENS):
        world = World(dtype, step_tokens=50)
        world.submit("p5", output=alone(dtype)[0]["p5"][:sent])
        check(world.run(), dtype, f"{sent} tokens emitted before")


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_two_lanes(dtype: Dtype) -> None:
    world = World(dtype, lanes=2)
    for id in prompts():
        world.submit(id)
    check(world.run(), dtype, "two lanes")


def holds(tokens: list[int], bad: tuple[int, ...]) -> bool:
    """Whether the sequence is among them."""
    return any(tuple(tokens[at : at + len(bad)]) == bad for at in range(len(tokens)))


def test_bad_words_are_not_said_whatever_happens_meanwhile() -> None:
    plain, _ = alone(DTYPES[0])
    # What each would say: a pair, a triple and a token.
    bad = {id: (tuple(made[1:3]), tuple(made[4:7]), (made[9],)) for id, made in plain.items()}
    wanted: dict[str, list[int]] = {}
    for id in prompts():
        world = World(DTYPES[0])
        world.bad = bad
        world.submit(id)
        wanted |= world.run().tokens
    assert not any(holds(made, one) for id, made in wanted.items() for one in bad[id])
    assert all(made != plain[id] for id, made in wanted.items())
    for reuse in (False, True):
        crowd = World(DTYPES[0], step_tokens=64, reuse=reuse)
        crowd.bad = bad
        for id in prompts():
            crowd.submit(id)
        assert crowd.run(preempt_every=4).tokens == wanted, f"seed {SEED}, prefix reuse {reuse}"
    for known in range(1, NEW_TOKENS):
        other = World(DTYPES[0])
        other.bad = bad
        other.submit("p3", wanted["p3"][:known])
        assert other.run().tokens["p3"] == wanted["p3"], f"seed {SEED}: replayed from token {known}"
