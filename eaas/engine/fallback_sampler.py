"""The sampler without native code: the functions of eaas/native/sampler.h, in numpy. Correct, and slow."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eaas import native
from eaas.native import SAMPLE_ROW
from experts.fallback_ends import view_at

_OK = 0
_GREEDY_BELOW = 1e-5
_WORD = 0xFFFFFFFF

Floats = NDArray[np.float32]


@cache
def load() -> Any:
    """The native library, or where it is missing one that stands in for its sampler."""
    return native.load_or_none() or FallbackSampler()


class FallbackSampler:
    """Names and arguments are those of sampler.h; arrays are passed by address."""

    def sampler_sample(
        self, logits: int, rows: int, vocab: int, plan: int, tokens: int, logprobs: int, ranks: int,
        top_ids: int, top_logprobs: int, top_stride: int, where: ctypes.c_uint32,
    ) -> int:  # fmt: skip
        """Choose a token for each row; the status of the first row that has none."""
        x = _array(logits, np.float32, rows, vocab)
        chosen, chances = _array(tokens, np.int32, rows), _array(logprobs, np.float32, rows)
        places = _array(ranks, np.uint32, rows)
        best_ids = _array(top_ids, np.int32, rows, top_stride)
        best_chances = _array(top_logprobs, np.float32, rows, top_stride)
        for number, row in enumerate(_array(plan, SAMPLE_ROW, rows)):
            where.value = number
            token = _choose(x[number], row)
            if token < 0:
                return token
            chosen[number] = token
            if row["top_count"] >= 0:
                normaliser = _normaliser(x[number])
                chances[number] = x[number, token] - normaliser
                order = np.argsort(-x[number], kind="stable")
                places[number] = np.flatnonzero(order == token)[0] + 1
                best = order[: row["top_count"]]
                best_ids[number, : len(best)] = best
                best_chances[number, : len(best)] = x[number, best] - normaliser
        return _OK

    def sampler_philox(self, counter: int, key: int, out: int) -> None:
        """One block of the generator."""
        counters, keys = _array(counter, np.uint32, 4).tolist(), _array(key, np.uint32, 2).tolist()
        _array(out, np.uint32, 4)[:] = philox(counters, keys)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """One block of Philox4x32-10 (Salmon et al., 2011): four words from a counter of four and a key of two."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _WORD, (a >> 32) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def _array(address: int, dtype: Any, *shape: int) -> NDArray[Any]:
    count = int(np.prod(shape))
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(view_at(address, count * np.dtype(dtype).itemsize), dtype).reshape(shape)


def _normaliser(x: Floats) -> float:
    top = float(x.max())
    return float(np.log(np.exp(x.astype(np.float64) - top).sum())) + top


def _choose(logits: Floats, row: np.void) -> int:
    if not np.isfinite(logits).all():
        return native.SAMPLER_E_NOT_FINITE
    prompt, output, forbidden, biased = (
        _array(int(row[name]), np.int32, int(row[f"{name}_count"]))
        for name in ("prompt", "output", "forbidden", "biased")
    )
    for tokens in (prompt, output, forbidden, biased):
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(logits):
            return native.SAMPLER_E_TOKEN
    if row["given"]:
        return int(row["given"]) - 1 if row["given"] <= len(logits) else native.SAMPLER_E_TOKEN
    x = logits.copy()
    for name in ("allowed", "allowed_too"):
        if row[name]:
            words = _array(int(row[name]), np.uint8, 4 * (-(-len(x) // 32)))
            x[np.unpackbits(words, bitorder="little")[: len(x)] == 0] = -np.inf
    np.add.at(x, biased, _array(int(row["biases"]), np.float32, len(biased)))
    seen = np.union1d(prompt, output)
    x[seen] = np.where(x[seen] > 0, x[seen] / row["repetition"], x[seen] * row["repetition"])
    tokens, counts = np.unique(output, return_counts=True)
    x[tokens] -= row["frequency"] * counts.astype(np.float32) + row["presence"]
    x[forbidden] = -np.inf
    if np.isneginf(x.max()):
        return native.SAMPLER_E_NOTHING_LEFT
    if row["temperature"] < _GREEDY_BELOW:
        return int(x.argmax())
    return _draw(_keep(x, row), row)


def _keep(x: Floats, row: np.void) -> NDArray[np.float64]:
    """What each token weighs after min-p, top-k and top-p; the likeliest before them weighs 1."""
    weights = np.exp((x - x.max()).astype(np.float64) / float(row["temperature"]))
    weights[weights < row["min_p"]] = 0.0
    left = x[weights > 0]
    if 0 < row["top_k"] < len(left):
        weights[x < np.partition(left, -row["top_k"])[-row["top_k"]]] = 0.0
    if row["top_p"] < 1:
        order = np.argsort(-x, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        beyond = before >= weights.sum() * float(row["top_p"])
        beyond[0] = False
        weights[order[beyond]] = 0.0
    return weights


def _draw(weights: NDArray[np.float64], row: np.void) -> int:
    index, seed = int(row["index"]), int(row["seed"])
    bits = philox([index & _WORD, index >> 32, int(row["choice"]), 0], [seed & _WORD, seed >> 32])
    uniform = ((bits[0] >> 5) * (1 << 26) + (bits[1] >> 6)) / (1 << 53)
    passed = weights.cumsum()
    # Rounding may carry the target to the very end: the last token that can be drawn it is.
    last = int(np.flatnonzero(weights)[-1])
    return min(int(np.searchsorted(passed, uniform * passed[-1], side="right")), last)
