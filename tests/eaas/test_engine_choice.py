"""Choosing by slot agrees with the sampler called row by row."""

from __future__ import annotations

import numpy as np
import pytest

from eaas.engine.choice import Chooser
from eaas.engine.request import Request
from eaas.engine.sampler import Sampler, SamplingRow
from eaas.engine.worker_protocol import SamplingParams

VOCAB = 50
SEED = 31


def params_of(source: np.random.Generator) -> SamplingParams:
    """Any mixture of parameters, each off half of the time."""

    def maybe(value: float, off: float) -> float:
        return value if source.random() < 0.5 else off

    return SamplingParams(
        max_tokens=8,
        min_tokens=int(maybe(4, 0)),
        temperature=maybe(1.3, 0.0),
        top_p=maybe(0.8, 1.0),
        top_k=int(maybe(7, 0)),
        min_p=maybe(0.05, 0.0),
        seed=int(source.integers(1 << 63)),
        choice=int(source.integers(4)),
        presence_penalty=maybe(0.9, 0.0),
        frequency_penalty=maybe(0.6, 0.0),
        repetition_penalty=maybe(1.4, 1.0),
        logprobs=int(maybe(3, -1)),
        stop_token_ids=(1, 2, 3, VOCAB + 5),
    )


def row_of(request: Request) -> SamplingRow:
    params = request.params
    early = len(request.output) < params.min_tokens
    return SamplingRow(
        seed=params.seed,
        index=len(request.output),
        choice=params.choice,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        prompt=request.prompt,
        output=np.array(request.output, dtype=np.int32),
        forbidden=[token for token in request.stops if early and token < VOCAB],
        logprobs=params.logprobs,
    )


def request_of(params: SamplingParams, prompt: list[int], output: list[int] | None = None) -> Request:
    return Request(owner=0, id="r", attempt=1, prompt=prompt, output=output or [], params=params)


def test_every_mixture_of_parameters_gives_the_samplers_choice() -> None:
    source = np.random.default_rng(SEED)
    slots = 6
    chooser, sampler = Chooser(vocab=VOCAB, slots=slots), Sampler(VOCAB)
    live: dict[int, Request] = {}
    for step in range(300):
        for slot in range(slots):
            # Requests come, end and move between slots, as they do when they are preempted.
            if slot not in live or source.random() < 0.1:
                prompt = source.integers(0, VOCAB, 5).tolist()
                emitted = source.integers(0, VOCAB, source.integers(0, 3)).tolist()
                live[slot] = request_of(params_of(source), prompt, emitted)
        if source.random() < 0.2:
            live[0], live[1] = live[1], live[0]
        chosen = source.permutation(slots)[: source.integers(1, slots + 1)].astype(np.int32)
        requests = [live[slot] for slot in chosen.tolist()]
        logits = source.standard_normal((len(requests), VOCAB), dtype=np.float32)
        wanted = sampler.sample(logits, [row_of(request) for request in requests])
        choice = chooser.choose(logits, chosen, requests)
        assert choice.tokens == [row.token for row in wanted], f"seed {SEED}, step {step}"
        for number, (request, row) in enumerate(zip(requests, wanted, strict=True)):
            count = request.params.logprobs
            if count >= 0:
                assert choice.logprobs is not None
                assert choice.logprobs[number] == row.logprob
                assert choice.top(number, count) == list(row.top)
            request.output.append(choice.tokens[number])
        for slot in list(live):
            if len(live[slot].output) >= live[slot].params.max_tokens:
                del live[slot]


def test_a_row_with_nothing_to_choose_is_refused_alone() -> None:
    chooser = Chooser(vocab=4, slots=2)
    barred = SamplingParams(max_tokens=2, min_tokens=1, stop_token_ids=(0, 1, 2, 3))
    free = SamplingParams(max_tokens=2, temperature=0.0)
    logits = np.array([[1, 2, 3, 4], [4, 3, 2, 1]], dtype=np.float32)
    requests = [request_of(barred, [1]), request_of(free, [1])]
    choice = chooser.choose(logits, np.arange(2, dtype=np.int32), requests)
    assert choice.refused == {0: "every token is forbidden; at least one must be left"}
    assert choice.tokens[1] == 0


def test_logits_of_another_shape_are_refused() -> None:
    chooser = Chooser(vocab=4, slots=2)
    request = request_of(SamplingParams(max_tokens=1), [1])
    with pytest.raises(ValueError, match=r"\[1, 5\]; contiguous float32 \[1, 4\] needed"):
        chooser.choose(np.zeros((1, 5), dtype=np.float32), np.zeros(1, dtype=np.int32), [request])
