"""Sampling by slot agrees with the sampler called row by row."""

from __future__ import annotations

import numpy as np
import pytest

from eaas.worker.plan import StepPlan
from eaas.worker.protocol import SamplingParams
from eaas.worker.request import Chunk, Request
from eaas.worker.sample import DeviceSamples, Refusal, Samples, SlotSampler, bits_of
from tests.eaas.sampling import Sampler, SamplingRow

VOCAB = 50
SEED = 31
BROKEN = Refusal("its logits hold NaN or infinity: the model or its weights are broken", asked=False)
NOTHING_LEFT = Refusal("every token is forbidden; at least one must be left", asked=True)


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
        # Now and then more than most ask for.
        logprobs=int(maybe(3, -1)) if source.random() < 0.9 else VOCAB - 5,
        stop_token_ids=(1, 2, 3, VOCAB + 5),
        logit_bias=((7, 2.5), (8, -3.0)) if source.random() < 0.3 else (),
        allowed_token_ids=tuple(range(4, VOCAB, 3)) if source.random() < 0.3 else (),
        bad_tokens=tuple(bad_of(source) for _ in range(40)) if source.random() < 0.5 else (),
    )


def bad_of(source: np.random.Generator) -> tuple[int, ...]:
    """Of up to three of the few tokens that are chosen often."""
    return tuple(source.integers(0, 20, source.choice([1, 2, 2, 3])).tolist())


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
        forbidden=[token for token in request.stops if early and token < VOCAB]
        + [bad[-1] for bad in params.bad_tokens if [*request.output, bad[-1]][-len(bad) :] == list(bad)],
        allowed_too=bits_of(params.allowed_token_ids, VOCAB) if params.allowed_token_ids else None,
        biased=[token for token, _ in params.logit_bias],
        biases=[bias for _, bias in params.logit_bias],
        logprobs=params.logprobs,
    )


def plan_of(requests: list[Request], slots: np.ndarray | None = None, prompts: list[Chunk] = []) -> StepPlan:  # noqa: B006
    """A step of one row for each request, in its slot, and of those that tell of prompts."""
    count, none = len(requests), np.zeros(0, dtype=np.int32)
    seqs = np.arange(count, dtype=np.int32) if slots is None else slots
    return StepPlan(
        token_ids=none,
        positions=none,
        seqs=seqs,
        block_tables=none,
        logits_rows=np.arange(count, dtype=np.int32),
        requests=requests,
        prompt_logprobs=prompts,
    )


def samples_of(
    sampler: SlotSampler, plan: StepPlan, logits: np.ndarray, barred: dict[int, str] | None = None
) -> Samples:
    return sampler.sample(plan, sampler.rows(plan), logits, barred or {})


def request_of(params: SamplingParams, prompt: list[int], output: list[int] | None = None) -> Request:
    return Request(
        owner=0,
        id="r",
        attempt=1,
        prompt=np.array(prompt, np.int32),
        output=output or [],
        params=params,
    )


def test_every_mixture_of_parameters_gives_the_samplers_choice() -> None:
    source = np.random.default_rng(SEED)
    slots = 6
    slot_sampler, sampler = SlotSampler(vocab=VOCAB, slots=slots), Sampler(VOCAB)
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
        choice = samples_of(slot_sampler, plan_of(requests, chosen), logits)
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


def test_what_a_decoder_chose_is_kept_and_what_it_left_is_chosen() -> None:
    source = np.random.default_rng(SEED)
    for step in range(200):
        count = int(source.integers(1, 7))
        requests = [request_of(params_of(source), source.integers(0, VOCAB, 5).tolist(), [4]) for _ in range(count)]
        slots = source.permutation(6)[:count].astype(np.int32)
        logits = source.standard_normal((count, VOCAB), dtype=np.float32)
        plan = plan_of(requests, slots)
        wanted = samples_of(SlotSampler(vocab=VOCAB, slots=6), plan, logits.copy())
        here = source.random(count) < 0.5
        for number, request in enumerate(requests):
            here[number] &= request.params.logprobs < 0
        slot_sampler = SlotSampler(vocab=VOCAB, slots=6)
        # Of the rows that it leaves, a decoder's tokens mean nothing.
        tokens = np.where(here, wanted.tokens, -5).astype(np.int32)
        found = DeviceSamples(sampled=here, tokens=tokens, sound=here, logits=logits[~here])
        choice = slot_sampler.sample(plan, slot_sampler.rows(plan), found.logits, device=found)
        assert choice.tokens == wanted.tokens, f"seed {SEED}, step {step}"
        assert choice.refused == {}
        for number, request in enumerate(requests):
            if (asked := request.params.logprobs) >= 0:
                assert choice.logprobs is not None
                assert wanted.logprobs is not None
                assert choice.logprobs[number] == wanted.logprobs[number]
                assert choice.top(number, asked) == wanted.top(number, asked)


def test_rows_are_refused_alone_whoever_chooses() -> None:
    slot_sampler = SlotSampler(vocab=4, slots=4)
    barred = SamplingParams(max_tokens=2, min_tokens=1, stop_token_ids=(0, 1, 2, 3))
    free = SamplingParams(max_tokens=2, temperature=0.0)
    requests = [request_of(params, [1]) for params in (free, barred, free, free)]
    plan = plan_of(requests)
    found = DeviceSamples(
        sampled=np.array([True, False, True, False]),
        tokens=np.array([9, 9, 2, 9], dtype=np.int32),
        sound=np.array([False, False, True, True]),
        logits=np.array([[1, 2, 3, 4], [4, 5, 2, 1]], dtype=np.float32),
    )
    choice = slot_sampler.sample(plan, slot_sampler.rows(plan), found.logits, device=found)
    assert choice.refused == {0: BROKEN, 1: NOTHING_LEFT}
    assert choice.tokens[2:] == [2, 1]
    assert choice.logprobs is None


def test_a_row_with_nothing_to_choose_is_refused_alone() -> None:
    slot_sampler = SlotSampler(vocab=4, slots=2)
    barred = SamplingParams(max_tokens=2, min_tokens=1, stop_token_ids=(0, 1, 2, 3))
    free = SamplingParams(max_tokens=2, temperature=0.0)
    logits = np.array([[1, 2, 3, 4], [4, 3, 2, 1]], dtype=np.float32)
    requests = [request_of(barred, [1]), request_of(free, [1])]
    choice = samples_of(slot_sampler, plan_of(requests), logits)
    assert choice.refused == {0: NOTHING_LEFT}
    assert choice.tokens[1] == 0


def test_a_barred_row_of_broken_logits_is_refused_alone() -> None:
    """Whatever its grammar has come to, the model is to blame; a grammar's own fault is told of rows that are whole."""
    logits = np.full((4, 4), np.nan, dtype=np.float32)
    logits[3] = 1, 2, 3, 4
    requests = [request_of(SamplingParams(max_tokens=2, temperature=0.0), [1]) for _ in range(4)]
    barred = {0: "it is too much", 1: "", 3: "it is too much"}
    choice = samples_of(SlotSampler(vocab=4, slots=4), plan_of(requests), logits, barred)
    assert choice.refused == {0: BROKEN, 1: BROKEN, 2: BROKEN, 3: Refusal("it is too much", asked=True)}
    assert choice.tokens[:3] == [0, -1, 0]


def test_many_refused_rows_cost_no_row_a_second_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time by their number, and not by its square."""
    slot_sampler, calls = SlotSampler(vocab=4, slots=64), [0]
    sample = slot_sampler._sample

    def counted(*arguments: object) -> int:
        calls[0] += 1
        return sample(*arguments)

    monkeypatch.setattr(slot_sampler, "_sample", counted)
    logits = np.tile(np.array([1, 2, 3, 4], dtype=np.float32), (64, 1))
    logits[1::2] = np.inf
    requests = [request_of(SamplingParams(max_tokens=2, temperature=0.0), [1]) for _ in range(64)]
    choice = samples_of(slot_sampler, plan_of(requests), logits)
    assert choice.refused == dict.fromkeys(range(1, 64, 2), BROKEN)
    assert choice.tokens == [3, 0] * 32 and calls == [1]


def test_logits_of_another_shape_are_refused() -> None:
    slot_sampler = SlotSampler(vocab=4, slots=2)
    request = request_of(SamplingParams(max_tokens=1), [1])
    with pytest.raises(ValueError, match=r"\[1, 5\]; contiguous float32 \[1, 4\] needed"):
        samples_of(slot_sampler, plan_of([request]), np.zeros((1, 5), dtype=np.float32))


@pytest.mark.parametrize("by_decoder", [False, True])
def test_barred_rows_have_no_token_and_rows_of_prompts_come_after_them(by_decoder: bool) -> None:
    source = np.random.default_rng(SEED)
    logits = source.standard_normal((6, VOCAB), dtype=np.float32)
    requests = [request_of(SamplingParams(max_tokens=2, temperature=0.0), [1]) for _ in range(3)]
    asks = request_of(SamplingParams(max_tokens=2, prompt_logprobs=2), [4, 9, 17, 30])
    plan, barred = plan_of(requests, prompts=[Chunk(asks, 1, 4)]), {0: "", 2: "it is too much"}
    sampler, device = SlotSampler(vocab=VOCAB, slots=3), None
    if by_decoder:
        none = np.zeros(6, dtype=bool)
        device = DeviceSamples(sampled=none, tokens=np.zeros(6, np.int32), sound=none, logits=logits)
    choice = sampler.sample(plan, sampler.rows(plan), logits.copy(), barred, device)
    assert choice.tokens[0] == -1 and choice.tokens[1] == logits[1].argmax() and len(choice.tokens) == 3
    assert choice.refused == {2: Refusal("it is too much", asked=True)}
    assert choice.logprobs is not None
    for row, token in ((3, 9), (4, 17), (5, 30)):
        chances = logits[row] - np.log(np.exp(logits[row].astype(np.float64)).sum())
        assert choice.logprobs[row] == pytest.approx(chances[token], abs=1e-5)
        assert [other for other, _ in choice.top(row, 2)] == np.argsort(-chances)[:2].tolist()
