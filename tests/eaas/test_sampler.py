"""The sampler: filters against numpy, draws against their distribution, the generator against vectors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eaas.worker.sample import bits_of
from tests.eaas.sampling import (
    Refused,
    Sampled,
    Sampler,
    SamplingRow,
    philox,
)

SEED = 20261121
VOCAB = 2500  # more than one block of sums, and no multiple of 16 or 1024


def random(seed: int = SEED) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


def one(logits: np.ndarray, row: SamplingRow) -> Sampled:
    return Sampler(logits.size).sample(np.ascontiguousarray(logits, dtype=np.float32)[None], [row])[0]


def draws(logits: np.ndarray, row: SamplingRow, count: int) -> np.ndarray:
    """Tokens at indexes 0 to count - 1."""
    rows = [replace(row, index=index) for index in range(count)]
    repeated = np.repeat(np.asarray(logits, dtype=np.float32)[None], count, axis=0)
    return np.array([sampled.token for sampled in Sampler(logits.size).sample(repeated, rows)])


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64) - logits.max())
    return powers / powers.sum()


def chi_square_fits(tokens: np.ndarray, expected: np.ndarray) -> None:
    """The counts fit the distribution: chi-square below its mean plus five standard deviations."""
    counts = np.bincount(tokens, minlength=expected.size)
    assert counts[expected == 0].sum() == 0, f"tokens that cannot be drawn were drawn, seed {SEED}"
    wanted = expected * tokens.size
    large = wanted >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(wanted[large], wanted[~large].sum() + 1e-12)
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    freedom = max(len(wanted) - 1, 1)
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), f"chi-square {statistic} of {freedom}, seed {SEED}"


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_generator_is_philox_4x32_10(counter: list[int], key: list[int], words: list[int]) -> None:
    """Vectors of the Random123 distribution, kat_vectors."""
    assert philox(counter, key) == words


def test_temperature_zero_takes_the_highest_logit_and_the_lowest_id_on_a_tie() -> None:
    logits = random().standard_normal(VOCAB).astype(np.float32)
    logits[[2400, 1033, 1700]] = 9.0
    assert one(logits, SamplingRow(seed=1, index=0, temperature=0.0)).token == 1033


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = random().standard_normal(VOCAB) * 3
    tokens = draws(logits, SamplingRow(seed=SEED, index=0, temperature=temperature), 10000)
    chi_square_fits(tokens, softmax(logits.astype(np.float32) / temperature))


def test_min_p_top_k_and_top_p_keep_what_their_definitions_say() -> None:
    logits = (random().standard_normal(VOCAB) * 3).astype(np.float32)
    row = SamplingRow(seed=SEED, index=0, temperature=1.3, min_p=0.01, top_k=40, top_p=0.8)
    share = softmax(logits / np.float32(1.3))
    share[share < 0.01 * share.max()] = 0
    share[logits < np.sort(logits)[-40]] = 0
    order = np.argsort(-share, kind="stable")
    before = np.cumsum(share[order]) - share[order]
    share[order[before >= 0.8 * share.sum()]] = 0
    assert 3 < np.count_nonzero(share) < 40
    chi_square_fits(draws(logits, row, 5000), share / share.sum())


def test_top_p_over_more_than_one_sorted_piece() -> None:
    logits = (random().standard_normal(VOCAB) * 0.1).astype(np.float32)
    share = softmax(logits)
    order = np.argsort(-share, kind="stable")
    kept = np.cumsum(share[order]) - share[order] < 0.9
    assert np.count_nonzero(kept) > 256
    tokens = draws(logits, SamplingRow(seed=SEED, index=0, top_p=0.9), 6000)
    assert set(tokens) <= set(order[kept].tolist())
    assert len(set(tokens) & set(order[kept][-300:].tolist())) > 150


def test_top_p_takes_equal_logits_by_id_and_both_zeros_are_equal() -> None:
    logits = np.zeros(32_000, dtype=np.float32)
    logits[1::2] = -0.0
    tokens = draws(logits, SamplingRow(seed=SEED, index=0, top_p=0.03125), 600)
    assert tokens.max() < 1000, f"tokens from {tokens.max()}, seed {SEED}"
    assert np.count_nonzero(tokens % 2) > 200 and tokens.max() > 900, f"seed {SEED}"


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"top_p": 1e-9}, {2}),
        ({"top_p": 0.4}, {2}),
        ({"top_p": 0.61}, {2, 4}),
        ({"top_p": 0.94}, {0, 2, 3, 4}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {2}),
        ({"top_k": 3}, {0, 2, 3, 4}),  # the third and the fourth tie
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"min_p": 1.0}, {2}),
        ({"min_p": 0.3}, {2, 4}),
        ({"top_k": 2, "top_p": 0.72}, {2, 4}),  # top-p counts shares of what top-k left
        ({"top_k": 2, "top_p": 0.69}, {2}),
        ({"forbidden": [2, 4]}, {0, 1, 3}),
        ({"forbidden": [2, 4], "top_k": 1}, {0, 3}),
    ],
)
def test_filters_at_their_edges(change: dict, kept: set[int]) -> None:
    logits = np.log(np.array([0.12, 0.05, 0.5, 0.12, 0.21], dtype=np.float32))
    assert set(draws(logits, SamplingRow(seed=3, index=0, **change), 600)) == kept


def test_penalties_are_those_of_vllm() -> None:
    logits = (random().standard_normal(VOCAB) * 2).astype(np.float32)
    prompt, output = [5, 6, 7, 7, 2499], [6, 8, 8, 8, 0]
    row = SamplingRow(
        seed=1,
        index=5,
        repetition_penalty=1.7,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        prompt=prompt,
        output=output,
    )
    wanted = logits.astype(np.float64)
    for token in set(prompt + output):
        wanted[token] = wanted[token] / 1.7 if wanted[token] > 0 else wanted[token] * 1.7
    for token in set(output):
        wanted[token] -= 0.4 + 0.3 * output.count(token)
    chi_square_fits(draws(logits, row, 10000), softmax(wanted))
    for token in set(prompt + output):
        near = logits.copy()
        near[1234] = wanted[token] + 1e-3
        others = [other for other in range(VOCAB) if other not in (token, 1234)]
        greedy = replace(row, temperature=0.0, forbidden=others)
        assert one(near, greedy).token == 1234
        near[1234] = wanted[token] - 1e-3
        assert one(near, greedy).token == token, f"token {token}, seed {SEED}"


def test_logprobs_come_from_untouched_logits() -> None:
    logits = (random().standard_normal(VOCAB) * 3).astype(np.float32)
    logits[[9, 4]] = logits.max() + 1
    exact = np.log(softmax(logits))
    row = SamplingRow(seed=1, index=0, temperature=0.0, forbidden=[4], frequency_penalty=2.0, output=[9], logprobs=5)
    sampled = one(logits, row)
    assert sampled.logprob == pytest.approx(exact[sampled.token], abs=1e-5)
    order = np.lexsort((np.arange(VOCAB), -logits))[:5].tolist()
    assert [token for token, _ in sampled.top] == order and order[:2] == [4, 9]
    assert [logprob for _, logprob in sampled.top] == pytest.approx(exact[order].tolist(), abs=1e-5)
    assert one(logits, replace(row, logprobs=0)) == replace(sampled, top=())
    places = np.lexsort((np.arange(VOCAB), -logits)).tolist()
    for token in (4, 9, *places[::37], places[-1]):
        given = one(logits, replace(row, given=token, logprobs=0))
        assert (given.token, given.rank) == (token, places.index(token) + 1), f"token {token}, seed {SEED}"
    assert one(logits, replace(row, logprobs=-1)) == Sampled(token=sampled.token)
    assert len(one(logits[:10], replace(row, logprobs=20)).top) == 10


def test_a_row_does_not_depend_on_the_batch_around_it() -> None:
    logits = (random().standard_normal((12, VOCAB)) * 2).astype(np.float32)
    rows = [
        SamplingRow(
            seed=100 + i,
            index=i,
            choice=i % 2,
            top_p=0.9 if i % 3 else 1.0,
            top_k=50 * (i % 2),
            logprobs=i % 4 - 1,
        )
        for i in range(12)
    ]
    rows[3] = replace(rows[3], presence_penalty=1.0, output=[1, 2, 3])
    sampler = Sampler(VOCAB)
    batch = sampler.sample(logits, rows)
    order = random().permutation(12)
    mixed = sampler.sample(np.ascontiguousarray(logits[order]), [rows[i] for i in order])
    for i in range(12):
        assert batch[i] == one(logits[i], rows[i]) == mixed[order.tolist().index(i)], f"row {i}, seed {SEED}"


def test_seed_choice_and_index_each_change_the_draws() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    base = SamplingRow(seed=7, index=0)
    first = draws(logits, base, 200)
    assert (draws(logits, base, 200) == first).all()
    for change in ({"seed": 8}, {"seed": 7 + (1 << 32)}, {"choice": 1}):
        equal = int((draws(logits, replace(base, **change), 200) == first).sum())
        assert equal < 5, f"{change}: {equal} of 200 draws are the same"
    assert len(set(first.tolist())) > 150


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1023, VOCAB - 1])
def test_logits_that_are_not_finite_are_an_error(bad: float, place: int) -> None:
    logits = np.zeros((2, VOCAB), dtype=np.float32)
    logits[1, place] = bad
    with pytest.raises(Refused, match="Row 1: its logits hold NaN or infinity"):
        Sampler(VOCAB).sample(logits, [SamplingRow(seed=1, index=0, temperature=0.0)] * 2)


def test_bad_arguments_are_refused() -> None:
    logits = np.zeros(8, dtype=np.float32)
    with pytest.raises(Refused, match="outside the vocabulary"):
        one(logits, SamplingRow(seed=1, index=0, presence_penalty=1.0, output=[8]))
    with pytest.raises(Refused, match="every token is forbidden"):
        one(logits, SamplingRow(seed=1, index=0, forbidden=range(8)))
    assert Sampler(8).sample(np.empty((0, 8), dtype=np.float32), []) == []


@pytest.mark.parametrize("vocab", [VOCAB, 32_000])
@pytest.mark.parametrize("top_p", [1e-60, 1e-45, 1e-38])
def test_the_likeliest_token_stays_however_small_top_p(vocab: int, top_p: float) -> None:
    logits = random().standard_normal(vocab).astype(np.float32)
    tokens = draws(logits, SamplingRow(seed=SEED, index=0, top_p=top_p), 8)
    assert set(tokens.tolist()) == {int(logits.argmax())}, f"seed {SEED}"


@pytest.mark.parametrize("vocab", [31, 32, 33, VOCAB])
def test_only_tokens_allowed_by_both_masks_are_chosen(vocab: int) -> None:
    logits = random().standard_normal(vocab).astype(np.float32)
    first, second = set(range(0, vocab, 2)) | {vocab - 1}, set(range(0, vocab, 3)) | {vocab - 1}
    row = SamplingRow(
        seed=5, index=0, temperature=3.0, allowed=bits_of(sorted(first), vocab),
        allowed_too=bits_of(sorted(second), vocab),
    )  # fmt: skip
    assert set(draws(logits, row, 4000).tolist()) <= first & second, f"seed {SEED}"
    for token in (0, vocab - 1):
        assert one(logits, SamplingRow(seed=1, index=0, allowed=bits_of([token], vocab))).token == token
    with pytest.raises(Refused, match="every token is forbidden"):
        one(logits, SamplingRow(seed=1, index=0, allowed=bits_of([], vocab)))


def test_biases_are_added_before_penalties_and_do_not_show_in_log_probabilities() -> None:
    logits = random().standard_normal(VOCAB).astype(np.float32)
    biased, biases = [3, 700, VOCAB - 1], [2.0, -1.5, 30.0]
    row = SamplingRow(seed=1, index=0, temperature=0.8, biased=biased, biases=biases)
    changed = logits.copy()
    changed[biased] += np.array(biases, np.float32)
    plain = SamplingRow(seed=1, index=0, temperature=0.8)
    assert draws(logits, row, 300).tolist() == draws(changed, plain, 300).tolist()
    penalties: dict[str, Any] = {
        "output": [3, 700],
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "temperature": 0.0,
    }
    one_by_one = one(changed, SamplingRow(seed=1, index=0, **penalties)).token
    assert one(logits, SamplingRow(seed=1, index=0, biased=biased, biases=biases, **penalties)).token == one_by_one
    found = one(logits, SamplingRow(seed=1, index=0, temperature=0.0, biased=biased, biases=biases, logprobs=0))
    assert found.token == VOCAB - 1
    assert found.logprob == pytest.approx(float(np.log(softmax(logits)[VOCAB - 1])), abs=1e-5)
    with pytest.raises(Refused, match="outside the vocabulary"):
        one(logits, SamplingRow(seed=1, index=0, biased=[VOCAB], biases=[1.0]))


def test_a_given_token_is_taken_whatever_its_logits() -> None:
    logits = random().standard_normal(VOCAB).astype(np.float32)
    for token in (0, 17, VOCAB - 1):
        found = one(logits, SamplingRow(seed=1, index=0, given=token, logprobs=2))
        assert found.token == token
        assert found.logprob == pytest.approx(float(np.log(softmax(logits)[token])), abs=1e-5)
        assert [other for other, _ in found.top] == np.argsort(-logits)[:2].tolist()
    with pytest.raises(Refused, match="outside the vocabulary"):
        one(logits, SamplingRow(seed=1, index=0, given=VOCAB))
