"""What the gates do, judged by counting everything."""

from __future__ import annotations

import time
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from eaas.worker.protocol import LayerView
from eaas.worker.views import (
    EXPERTS_OF_TOKEN,
    MOST_PAIRS,
    MOST_TOKENS,
    WINDOW_S,
    WINDOWS,
    Views,
    gate_entropy,
)

LAYERS = (1, 2, 7)
EXPERTS, TOP_K = 12, 3
COUNTERS = 256


class Judge:
    """Counts all rows one by one, and forgets nothing."""

    def __init__(self) -> None:
        self.tokens: Counter[int] = Counter()
        self.pairs = {layer: Counter[tuple[int, int]]() for layer in LAYERS}
        self.experts = {layer: Counter[tuple[int, int]]() for layer in LAYERS}
        self.entropy = {layer: dict[int, list[float]]() for layer in LAYERS}
        self.window = 0

    def add(self, tokens: NDArray, gates: dict, chosen: dict, at_s: float) -> None:
        # Time goes on with a step of no tokens, too.
        self.window = int(at_s // WINDOW_S) if gates else self.window
        for layer, logits in gates.items():
            for row in logits.astype(np.float64):
                share = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
                bits = -sum(p * np.log(p) for p in share if p > 0) / np.log(EXPERTS)
                self.entropy[layer].setdefault(int(at_s // WINDOW_S), []).append(bits)
        self.tokens.update(tokens.tolist() if chosen else [])
        for layer, ids in chosen.items():
            for token, row in zip(tokens.tolist(), ids.astype(int).tolist(), strict=True):
                self.pairs[layer].update(combinations(sorted(row), 2))
                self.experts[layer].update((token, expert) for expert in row)


def step(rng: np.random.Generator, tokens: NDArray) -> tuple[NDArray, dict, dict]:
    """Logits, and the experts that they choose, of some of the layers each."""
    logits = {layer: rng.normal(0, 2, (len(tokens), EXPERTS)).astype(np.float32) for layer in LAYERS}
    ids = {layer: np.argsort(-x, axis=1)[:, :TOP_K].astype(np.float32) for layer, x in logits.items()}
    gates = {layer: x for layer, x in logits.items() if rng.random() < 0.8}
    return tokens, gates, {layer: x for layer, x in ids.items() if rng.random() < 0.8}


@pytest.mark.parametrize("run", range(3))
def test_of_few_tokens_everything_is_counted_exactly(run: int) -> None:
    seed = time.time_ns() % 1_000_000 + run
    rng = np.random.default_rng(seed)
    views, judge, at_s = Views(LAYERS, EXPERTS, TOP_K), Judge(), 1000.0
    for _ in range(200):
        tokens = (rng.zipf(1.5, rng.integers(0, 20)) % COUNTERS).astype(np.int32)
        rows = step(rng, tokens)
        views.add(*rows, at_s)
        judge.add(*rows, at_s)
        at_s += rng.random() * 2 if rng.random() < 0.95 else WINDOW_S * rng.integers(1, WINDOWS)
    shown = views.summary()
    assert [view.layer for view in shown] == list(LAYERS), f"seed {seed}"
    often = sorted(judge.tokens.values(), reverse=True)[:MOST_TOKENS]
    for view in shown:
        layer = view.layer
        windows = [judge.entropy[layer].get(judge.window - back, []) for back in reversed(range(WINDOWS))]
        means = [np.mean(each) if each else -1 for each in windows]
        means = means if max(means) >= 0 else []
        assert view.entropy == pytest.approx(means, abs=1e-5), f"seed {seed}"
        assert {pair[:2]: pair[2] for pair in view.pairs}.items() <= judge.pairs[layer].items()
        wanted = sorted(judge.pairs[layer].values(), reverse=True)[:MOST_PAIRS]
        assert [pair[2] for pair in view.pairs] == wanted, f"seed {seed}"
        assert all(low < high for low, high, _ in view.pairs)
        assert [judge.tokens[token] for token, _ in view.tokens] == often, f"seed {seed}"
        for token, experts in view.tokens:
            of_it = {expert: n for (name, expert), n in judge.experts[layer].items() if name == token}
            assert dict(experts).items() <= of_it.items(), f"seed {seed}"
            counts = sorted(of_it.values(), reverse=True)[:EXPERTS_OF_TOKEN]
            assert [n for _, n in experts] == counts, f"seed {seed}"


@pytest.mark.parametrize("run", range(2))
def test_common_tokens_are_found_among_any_number_of_rare_ones(run: int) -> None:
    seed = time.time_ns() % 1_000_000 + run
    rng = np.random.default_rng(seed)
    views, judge = Views(LAYERS, EXPERTS, TOP_K), Judge()
    common = rng.choice(1 << 30, MOST_TOKENS, replace=False)
    rows = 0
    for _ in range(150):
        tokens = rng.integers(0, 1 << 30, rng.choice([1, 8, 600])).astype(np.int32)
        frequent = rng.random(len(tokens)) < 0.5
        tokens[frequent] = rng.choice(common, frequent.sum())
        _, gates, chosen = step(rng, tokens)
        # Every layer has every row, so that each has the same counts of tokens.
        chosen = {layer: chosen.get(layer, np.tile(np.arange(TOP_K), (len(tokens), 1))) for layer in LAYERS}
        views.add(tokens, gates, chosen, 0.0)
        judge.add(tokens, {}, chosen, 0.0)
        rows += len(tokens)
    for view in views.summary():
        assert {token for token, _ in view.tokens} == set(common.tolist()), f"seed {seed}"
        for token, experts in view.tokens:
            for expert, count in experts:
                true = judge.experts[view.layer][token, expert]
                assert true - rows / (COUNTERS + 1) <= count <= true, f"seed {seed}"


def test_nothing_is_told_of_what_was_not_recorded_and_old_windows_go() -> None:
    views = Views(LAYERS, EXPERTS, TOP_K)
    assert views.summary() == [LayerView(layer) for layer in LAYERS]
    tokens = np.array([5, 5], np.int32)
    views.add(tokens, {2: np.zeros((2, EXPERTS), np.float32)}, {}, 100.0)
    view = views.summary()[1]
    assert (view.entropy[-1], view.entropy[:-1]) == (pytest.approx(1.0), [-1.0] * (WINDOWS - 1))
    assert (view.pairs, view.tokens) == ([], [])
    views.add(tokens, {7: np.zeros((2, EXPERTS), np.float32)}, {}, 100.0 + WINDOWS * WINDOW_S)
    assert views.summary()[1] == LayerView(2)
    views.add(tokens, {}, {1: np.array([[3, 0, 1], [1, 0, 9]], np.float32)}, 0.0)
    first = views.summary()[0]
    assert (first.layer, first.entropy) == (1, [])
    assert first.pairs[0] == (0, 1, 2)
    assert first.tokens == [(5, [(0, 2), (1, 2), (3, 1), (9, 1)])]


def test_logits_that_are_no_numbers_spoil_no_mean() -> None:
    views = Views([0], EXPERTS, TOP_K)
    logits = np.zeros((3, EXPERTS), np.float32)
    logits[0, 4], logits[1, 2] = np.nan, np.inf
    views.add(np.zeros(3, np.int32), {0: logits}, {}, 0.0)
    assert views.summary()[0].entropy[-1] == pytest.approx(1.0)
    one = gate_entropy(np.array([[0.0, 200.0]], np.float32))
    assert one == pytest.approx([0.0])
    assert gate_entropy(np.zeros((1, 1), np.float32)) == pytest.approx([0.0])
