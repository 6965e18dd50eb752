"""Which experts computed a token is told the same whatever happened around it, and refused where nobody knows."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from eaas.gateway.text import RoutedExpertsLog
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.protocol import RoutedExperts, SamplingParams, Submit
from tests.eaas import decoder_world, test_engine_bits
from tests.eaas.decoder_world import VARIANTS
from tests.eaas.fake_decoder import FakeDecoder
from tests.eaas.test_engine_bits import NEW_TOKENS, SEED, prompts

SPEC = VARIANTS["sigmoid, groups, correction, shared, leading dense"]


class World(test_engine_bits.World):
    """As there; and what each request was told of its experts, as a gateway keeps it."""

    def __init__(self, *, step_tokens: int = 128, blocks: int = 128, lanes: int = 1) -> None:
        made = decoder_world.World.make(SPEC, SEED)
        self.runner = made.decoder(lanes=lanes, kv_blocks=blocks, max_rows=step_tokens)
        config = EngineConfig(
            max_model_len=SPEC.max_model_len,
            step_tokens=step_tokens,
            kv_blocks=blocks,
            vocab=SPEC.vocab,
            prefill_share=1.0,
        )
        self.engine = Engine(self.runner.decoder, config)
        self.tokens: dict[str, list[int]] = {}
        self.routing: dict[str, RoutedExpertsLog] = {}

    def submit(self, id: str, output: list[int] | None = None, start: int = 0) -> None:
        params = SamplingParams(max_tokens=NEW_TOKENS, seed=int(id[1:]), ignore_eos=True, routed_from=start)
        message = Submit(id=id, attempt=1, prompt=prompts()[id], output=output or [], params=params)
        assert self.engine.submit(message) is None
        self.tokens[id] = list(output or [])
        self.routing.setdefault(id, RoutedExpertsLog(start))

    def step(self) -> bool:
        outcome = self.engine.step()
        if outcome is None:
            return False
        for piece in outcome.routed.get(0, []):
            self.routing[piece.id].take(piece)
        for token in outcome.tokens.get(0, []):
            self.tokens[token.id].append(token.token)
        return True

    def told(self) -> dict[str, np.ndarray]:
        """[tokens - 1, layers, top_k] of each request."""
        return {id: decoded(routing) for id, routing in self.routing.items()}


def decoded(routing: RoutedExpertsLog) -> np.ndarray:
    text = routing.encoded()
    assert text is not None
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


@pytest.fixture(scope="module")
def alone() -> World:
    """Each request after the other, every row computed, in one engine without room for two."""
    world = World(blocks=16)
    for id in prompts():
        world.submit(id)
        world.run()
    return world


def check(world: World, alone: World, what: str) -> None:
    wanted = alone.told()
    for id, found in world.told().items():
        assert world.tokens[id] == alone.tokens[id], f"seed {SEED}, {what}: tokens of {id}"
        assert found.shape == (len(prompts()[id]) + NEW_TOKENS - 1, 2, 3) and found.dtype == np.uint8
        assert (found == wanted[id]).all(), f"seed {SEED}, {what}: experts of {id}"


def test_they_differ_by_token_and_layer(alone: World) -> None:
    found = np.concatenate(list(alone.told().values()))
    assert found.max() < SPEC.moe.experts and len(np.unique(found)) > 4
    assert len(np.unique(found.reshape(len(found), -1), axis=0)) > 20


@pytest.mark.parametrize("step_tokens", [17, 29, 256])
@pytest.mark.parametrize("lanes", [1, 2])
def test_in_a_batch_by_chunks_with_shared_prefixes(alone: World, step_tokens: int, lanes: int) -> None:
    world = World(step_tokens=step_tokens, lanes=lanes)
    for id in prompts():
        world.submit(id)
    check(world.run(), alone, f"{step_tokens} rows a step, {lanes} lanes")
    assert step_tokens == 256 or world.engine.scheduler.reused_tokens > 0


def test_after_preemption(alone: World) -> None:
    world = World(blocks=40)
    for id in prompts():
        world.submit(id)
    check(world.run(preempt_every=3), alone, "preempted")
    assert world.engine.scheduler.preemptions > 3


def test_a_replay_on_another_worker_tells_the_rest_alone(alone: World) -> None:
    first, second = World(step_tokens=1024), World()
    for id in prompts():
        first.submit(id)
    for _ in range(8):
        first.step()
    second.routing = first.routing
    for id, output in first.tokens.items():
        assert 0 < len(output) < NEW_TOKENS
        second.submit(id, output)
    check(second.run(), alone, "replayed")


def test_blocks_of_those_who_did_not_ask_are_not_taken(alone: World) -> None:
    world = World()
    for id in prompts():
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        assert world.engine.submit(Submit(id=f"q{id}", attempt=1, prompt=prompts()[id], params=params)) is None
    while outcome := world.engine.step():
        assert not outcome.routed
    for id in prompts():
        world.submit(id)
    check(world.run(), alone, "after others")


def test_the_first_of_the_prompt_are_left_out_where_they_are_known(alone: World) -> None:
    world = World()
    world.submit("p3", start=30)
    world.run()
    assert (world.told()["p3"] == alone.told()["p3"][30:]).all()


def test_a_decoder_that_does_not_know_refuses() -> None:
    engine = Engine(FakeDecoder(16), EngineConfig(max_model_len=64, kv_blocks=16, vocab=97, block_tokens=4))
    params = SamplingParams(max_tokens=2, routed_from=0)
    refusal = engine.submit(Submit(id="a", attempt=1, prompt=[1], params=params))
    assert refusal is not None and refusal.code == "bad_request" and "native" in refusal.message


def test_pieces_overlap_or_leave_a_gap() -> None:
    def piece(start: int, stop: int) -> RoutedExperts:
        return RoutedExperts("a", 1, start, stop, 1, 2, bytes(range(2 * start, 2 * stop)))

    routing = RoutedExpertsLog(0)
    assert routing.encoded() is None
    for start, stop in ((0, 3), (2, 5), (1, 4), (7, 9), (5, 5), (5, 6)):
        routing.take(piece(start, stop))
    assert decoded(routing).ravel().tolist() == list(range(12))
