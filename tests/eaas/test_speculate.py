"""Tokens guessed ahead: whatever is guessed, what comes out is what comes out without."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from eaas.cluster.config import ClusterConfig
from eaas.worker import speculate
from eaas.worker.config import WorkerOptions, drafts_of
from eaas.worker.constraint import Constraint, Grammars
from eaas.worker.decoder import ExpertsLost
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.grammar import Grammar, of_schema
from eaas.worker.plan import StepPlan
from eaas.worker.protocol import SamplingParams, Submit, Token
from eaas.worker.request import Request
from eaas.worker.speculate import ALIKE, COPIED, GRAM, LONG, Lookup, Speculation
from router.options import OptionsInvalid
from tests.eaas import decoder_world
from tests.eaas.decoder_world import VARIANTS
from tests.eaas.fake_decoder import BLOCK_TOKENS, FakeDecoder, expected_output, problems
from tests.eaas.test_constraint import EOS, MODEL, SCHEMA, VOCAB, logits_of

DRAFTS = 4
Told = tuple[int, int, str, float | None, tuple[tuple[int, float], ...]]

# How requests may be bound; each is asked for with several seeds.
BOUND: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "ignore_eos": True},
    "stops": {"stop_token_ids": list(range(20, 60)), "min_tokens": 9},
    "log-probabilities": {"logprobs": 3, "ignore_eos": True},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.9, "top_k": 9},
    "bad words": {"allowed_token_ids": list(range(3, 9)), "bad_tokens": [(4, 5), (6,), (3, 3, 3)]},
    "schema": {"grammar": of_schema(SCHEMA)},
    "late end": {
        "grammar": Grammar("regex", "[a-d]{1,60}"),
        "min_tokens": 6,
        "logit_bias": [(0, 3.0), (2, 3.0)],
    },
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = Grammars.open(MODEL, VOCAB, sorted(EOS), DRAFTS)
    assert found is not None
    yield found
    found.close()


class Oracle:
    """Guesses what is said without drafts, but for a token that is wrong now and then."""

    def __init__(self, wanted: dict[str, list[Told]], seed: int) -> None:
        self._wanted, self._draw = wanted, random.Random(seed)

    def guess(self, speculation: Speculation, request: Request, guessed: Any) -> tuple[list[int], float]:
        guessed(speculation, request)  # It keeps what it knows of the request.
        room = min(speculation.most, request.params.max_tokens - len(request.output) - 1)
        said = [told[1] for told in self._wanted[request.id][len(request.output) :][: max(0, room)]]
        for number in range(len(said)):
            if self._draw.random() < 0.3:
                said[number] = self._draw.randrange(100)
        return said, 1.0


class World:
    """An engine, and all that was told of each request."""

    def __init__(self, decoder: Any, grammars: Grammars | None, drafts: int, **limits: Any) -> None:
        config = EngineConfig(
            **{"max_model_len": 256, "block_tokens": BLOCK_TOKENS, "kv_blocks": 512, "step_tokens": 128,
               "vocab": VOCAB, "eos_ids": EOS, "drafts": drafts, **limits}
        )  # fmt: skip
        self.engine = Engine(decoder, config, grammars=grammars)
        self.told: dict[str, list[Told]] = {}

    def submit(self, id: str, prompt: Sequence[int], output: Sequence[Told] = (), **params: Any) -> None:
        given = SamplingParams(**{"max_tokens": 40, "temperature": 1.0, **params})
        said = [told[1] for told in output]
        assert self.engine.submit(Submit(id=id, attempt=1, prompt=list(prompt), output=said, params=given)) is None
        self.told[id] = list(output)

    def step(self) -> None:
        while self.engine.compiling and not self.engine.has_work:
            time.sleep(0.001)
        outcome = self.engine.step()
        if outcome is None:
            return
        assert not outcome.failed, outcome.failed
        for token in outcome.tokens.get(0, []):
            assert token.index == len(self.told[token.id]), token
            self.told[token.id].append(_told(token))

    def run(self) -> dict[str, list[Told]]:
        while self.engine.has_work or self.engine.compiling:
            self.step()
        return self.told


def _told(token: Token) -> Told:
    top = tuple((one, round(score, 6)) for one, score in token.top or ())
    return token.index, token.token, token.finish, token.logprob, top


def fake() -> FakeDecoder:
    decoder = FakeDecoder(512)
    decoder.vocab, decoder.logits = VOCAB, logits_of
    return decoder


def asked(seed: int) -> dict[str, tuple[list[int], dict[str, Any]]]:
    draw, common = random.Random(seed), list(range(100, 117))
    return {
        f"{kind} {number}": (
            common[: draw.randrange(18)] + [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 30))],
            {"seed": draw.randrange(1 << 30), **params},
        )
        for kind, params in BOUND.items()
        for number in range(3)
    }


def right_or_wrong(monkeypatch: pytest.MonkeyPatch, wanted: dict[str, list[Told]], seed: int) -> None:
    """Have drafts be made whatever they cost, and be what an oracle says."""
    oracle, guessed = Oracle(wanted, seed), Speculation._guess
    monkeypatch.setattr(Speculation, "_guess", lambda self, request: oracle.guess(self, request, guessed))
    monkeypatch.setattr(Speculation, "_worth", lambda self, chances, rows: len(chances))
    monkeypatch.setattr(speculate, "STILL_STEPS", 0)
    draw, make = random.Random(seed), Constraint._make
    # What comes after a draft may be too much for the grammar's library.
    monkeypatch.setattr(
        Constraint, "_make", lambda self, *args: (not self.made or draw.random() < 0.9) and make(self, *args)
    )


@pytest.mark.parametrize("blocks", [512, 40])
def test_what_is_told_is_the_same_with_drafts_right_and_wrong(
    blocks: int, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = time.time_ns()
    wanted: dict[str, list[Told]] = {}
    for id, (prompt, params) in asked(seed).items():
        alone = World(fake(), grammars, 0)
        alone.submit(id, prompt, **params)
        wanted |= alone.run()
    right_or_wrong(monkeypatch, wanted, seed)
    draw, decoder = random.Random(seed), fake()
    world = World(decoder, grammars, DRAFTS, kv_blocks=blocks)
    speculation, lost = world.engine.scheduler.speculation, [0]

    def lose(_: float) -> None:
        if draw.random() < 0.1:
            lost[0] += 1
            raise ExpertsLost("for a moment")

    decoder.before_step = lose
    for turn in range(2):
        for id, (prompt, params) in asked(seed).items():
            # The second time each goes on where another worker has left it.
            world.submit(id, prompt, wanted[id][: turn * draw.randrange(len(wanted[id]))], **params)
        assert world.run() == wanted, f"seed {seed}, turn {turn}"
        pool = world.engine.scheduler.pool
        assert not problems(pool, []), f"seed {seed}"
    assert speculation.accepted > 300 and speculation.wrong > 100 and lost[0] > 0, f"seed {seed}"
    assert blocks == 512 or world.engine.scheduler.preemptions > 0


def test_what_is_guessed_neither_fails_a_request_nor_keeps_it_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guess is of a token whose experts nobody has, and which never comes."""
    prompt, made, now, decoder = [1, 2, 3, 4], 30, [0.0], FakeDecoder(64)
    wanted = expected_output(prompt, made)
    never = next(token for token in range(decoder.vocab) if token not in [*prompt, *wanted])
    compute, lost = decoder.step, [0]

    def step(plan: StepPlan, deadline_s: float) -> np.ndarray:
        now[0] += 0.01
        rows = np.flatnonzero(plan.token_ids == never)
        if not len(rows):
            return compute(plan, deadline_s)
        now[0] += deadline_s
        lost[0] += 1
        raise ExpertsLost("nobody has them", rows)

    monkeypatch.setattr(decoder, "step", step)
    monkeypatch.setattr(Speculation, "_guess", lambda self, request: ([never], 1.0))
    monkeypatch.setattr(Speculation, "_worth", lambda self, chances, rows: len(chances))
    config = EngineConfig(
        max_model_len=128, block_tokens=BLOCK_TOKENS, kv_blocks=64, step_tokens=16, vocab=decoder.vocab,
        drafts=DRAFTS, deadline_s=30.0,
    )  # fmt: skip
    engine = Engine(decoder, config, clock=lambda: now[0])
    params = SamplingParams(max_tokens=made, temperature=0.0, ignore_eos=True)
    engine.submit(Submit(id="a", attempt=1, prompt=prompt, output=[], params=params))
    told: list[int] = []
    while (outcome := engine.step()) is not None:
        assert not outcome.failed
        told += [token.token for token in outcome.tokens.get(0, [])]
    assert told == wanted
    assert lost[0] == 1 and now[0] < 2.0, now


@cache
def native_model() -> decoder_world.World:
    return decoder_world.World.make(VARIANTS["bias, shared expert with gate"], 23)


def test_the_native_decoder_chooses_the_same_tokens_and_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = time.time_ns()
    draw, vocab = random.Random(seed), decoder_world.VOCAB
    prompts = {f"{n}": [draw.randrange(vocab) for _ in range(draw.randint(1, 60))] for n in range(12)}

    def run(drafts: int) -> World:
        runner = native_model().decoder(lanes=1, kv_blocks=128, max_rows=64)
        world = World(
            runner.decoder,
            None,
            drafts,
            kv_blocks=128,
            step_tokens=64,
            prefill_share=1.0,
            block_tokens=16,
            vocab=vocab,
            eos_ids=frozenset(),
        )
        for id, prompt in prompts.items():
            world.submit(id, prompt, seed=int(id), logprobs=2, temperature=0.8, max_tokens=24)
        world.run()
        return world

    wanted = run(0).told
    right_or_wrong(monkeypatch, wanted, seed)
    found = run(DRAFTS)
    assert found.told == wanted, f"seed {seed}"
    assert found.engine.scheduler.speculation.accepted > 50


def request_of(prompt: Sequence[int], output: Sequence[int] = (), max_tokens: int = 1 << 20) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(owner=0, id="r", attempt=1, prompt=np.array(prompt, np.int32), output=list(output), params=params)


def test_a_guess_is_what_followed_the_last_time() -> None:
    seed = time.time_ns()
    draw = random.Random(seed)
    for _ in range(200):
        tokens = [draw.randrange(3) for _ in range(draw.randint(1, 80))]
        cut = draw.randrange(len(tokens) + 1)
        request = request_of(tokens[:cut][:1] or [0])
        request.output = tokens[: draw.randrange(len(tokens))]
        lookup = Lookup(request.prompt, (0.0, 0.0, 0.0))
        lookup.follow(request.output)
        request.output = list(tokens)
        lookup.follow(request.output)
        known = [*request.prompt.tolist(), *tokens]
        places = [at for at in range(GRAM, len(known)) if known[at - GRAM : at] == known[-GRAM:]]
        wanted = known[places[-1] :][:DRAFTS] if places else []
        assert lookup.guess(DRAFTS) == wanted, f"seed {seed}: {known}"
        if places:
            long = places[-1] >= LONG and known[places[-1] - LONG : places[-1]] == known[-LONG:]
            assert lookup.kind == (COPIED if long else ALIKE), f"seed {seed}: {known}"


class Life:
    """Requests for each token of which there is a guess that is right as often as `right` says, in steps that take
    3 + rows unless `step_s` says otherwise.
    """

    def __init__(self, right: float, requests: int = 1) -> None:
        self.speculation = Speculation(DRAFTS, 512)
        self.requests = [request_of([1, 2, 3]) for _ in range(requests)]
        self.seed = time.time_ns()
        self.draw = random.Random(self.seed)
        self.right, self.tokens, self.seconds = right, 0, 0.0
        self.step_s: Callable[[int], float] = lambda rows: 3.0 + rows

    def step(self) -> None:
        self.speculation.draft(self.requests)
        rows = sum(1 + len(request.drafts) for request in self.requests)
        for request in self.requests:
            said, drafts = len(request.output), request.drafts
            assert drafts == list(range(said, said + len(drafts)))
            kept = 0
            while True:
                right = self.draw.random() < self.right
                request.output.append(said + kept if right else 1 << 19)
                if not right or kept == len(drafts):
                    break
                kept += 1
            if drafts:
                self.speculation.judged(request, kept)
            self.tokens += kept + 1
        self.seconds += self.step_s(rows)
        self.speculation.took(rows, self.step_s(rows))

    def faster(self, steps: int) -> float:
        """Tokens a second over the steps to come, beside those without drafts."""
        self.tokens, self.seconds = 0, 0.0
        for _ in range(steps):
            self.step()
        return self.tokens / self.seconds * self.step_s(len(self.requests)) / len(self.requests)


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every look finds that token i is likely i; how often it was looked."""
    looks = [0]

    def guess(lookup: Lookup, most: int) -> list[int]:
        looks[0] += 1
        lookup.kind = ALIKE
        return list(range(lookup.said, lookup.said + most))

    monkeypatch.setattr(Lookup, "guess", guess)
    yield looks


@pytest.mark.parametrize("requests", [1, 8, 32])
def test_drafts_that_are_wrong_cost_little_and_those_that_are_right_are_made(
    requests: int, guessing: list[int]
) -> None:
    for right in (0.0, 0.1, 0.5, 0.9, 1.0):
        life = Life(right, requests)
        faster = life.faster(2000)
        assert faster > 0.98, f"seed {life.seed}: {right} of drafts were right: {faster}"
        if requests == 1 and right >= 0.9:
            assert faster > 1.5, f"seed {life.seed}: {right} of drafts were right: {faster}"


@pytest.mark.parametrize("requests", [1, 8])
def test_where_a_row_costs_as_much_as_a_step_nothing_is_guessed_however_often_it_is_right(
    requests: int, guessing: list[int]
) -> None:
    life = Life(0.95, requests)
    life.step_s = lambda rows: 1e-3 * rows
    life.faster(1500)
    drafted = life.speculation.drafted
    assert life.faster(3000) > 0.99, f"seed {life.seed}"
    assert life.speculation.drafted - drafted < 3000 * requests * 0.02, f"seed {life.seed}"


def test_guesses_are_looked_for_seldom_where_they_are_wrong_and_soon_made_when_they_come_right(
    guessing: list[int],
) -> None:
    life = Life(0.0)
    life.faster(1000)
    before = guessing[0]
    life.faster(1000)
    assert guessing[0] - before < 1000 / 12, f"seed {life.seed}: {guessing[0] - before} looks"
    life.right = 1.0
    life.faster(1000)
    assert life.faster(200) > 1.8, f"seed {life.seed}"


def test_guesses_that_were_right_are_made_though_none_was_ever_tried(
    guessing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculate, "PROBING", 0.0)
    monkeypatch.setattr(speculate, "CHANCES", (0.0, 0.0, 0.0))
    life = Life(1.0)
    life.faster(200)
    assert life.faster(200) > 1.8, f"seed {life.seed}"


def test_a_row_that_was_thought_dear_on_a_bad_day_is_tried_again(guessing: list[int]) -> None:
    life = Life(1.0)
    life.step_s = lambda rows: 1.0 * rows
    life.faster(2000)
    life.step_s = lambda rows: 0.9 + 0.1 * rows
    life.faster(6000)
    assert life.faster(500) > 1.6, f"seed {life.seed}"


@pytest.mark.parametrize("row_s", [0.0, 0.1])
def test_where_rows_cost_next_to_nothing_all_requests_have_all_their_drafts(row_s: float, guessing: list[int]) -> None:
    """What a step of so many rows takes is known by nobody before one was tried."""
    for requests in (1, 8):
        life = Life(0.97, requests)
        life.step_s = lambda rows: 3.0 + row_s * rows
        life.faster(2000)
        before = life.speculation.drafted
        life.faster(1000)
        drafted = (life.speculation.drafted - before) / (1000 * requests * DRAFTS)
        assert drafted > 0.8, f"seed {life.seed}: {requests} requests have {drafted:.0%}"


def test_what_a_grammar_forbids_is_looked_for_ever_more_seldom(guessing: list[int]) -> None:
    life = Life(1.0)
    life.faster(100)
    before = guessing[0]
    for _ in range(1000):
        life.speculation.draft(life.requests)
        if life.requests[0].drafts:
            life.requests[0].drafts = []
            life.speculation.forbidden(life.requests[0])
        life.requests[0].output.append(1 << 19)
        life.speculation.took(1, 4.0)
    assert guessing[0] - before < 200, f"seed {life.seed}: {guessing[0] - before} looks"


def test_a_new_request_begins_as_patient_as_the_last_one_was(guessing: list[int]) -> None:
    life = Life(0.0)
    life.faster(2000)
    life.speculation.forget(life.requests[0])
    life.requests = [request_of([1, 2, 3])]
    before = guessing[0]
    life.faster(64)
    assert 1 <= guessing[0] - before < 16, f"seed {life.seed}"


@pytest.mark.parametrize("text", ["", "on", "ngram", "ngram:0", "ngram:17", "ngram:-1", "suffix:4"])
def test_what_is_no_way_to_guess_is_refused(text: str) -> None:
    with pytest.raises(OptionsInvalid, match="off, or ngram:N with 1 to 16"):
        drafts_of(text)


def test_a_gpu_refuses_to_guess() -> None:
    assert WorkerOptions(router="127.0.0.1:1", model=MODEL).speculate == "off"
    with pytest.raises(OptionsInvalid, match="--speculate is for attention workers on CPUs"):
        ClusterConfig(model=MODEL, device=("cuda:0",), speculate="ngram:4")
    assert drafts_of(ClusterConfig(model=MODEL, speculate="ngram:4").speculate) == DRAFTS
