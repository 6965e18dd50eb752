"""From logits to tokens, in native code: deterministic, and independent of the batch around a row.

Order, as vLLM has it: log-probabilities from the untouched logits; tokens that are not allowed, biases; repetition,
then frequency and presence penalties; forbidden tokens; temperature; min-p; top-k; top-p; one draw by Philox4x32-10
keyed by (seed, choice, index).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eaas import native
from eaas.native import SAMPLE_ROW


class Refused(ValueError):
    """Nothing could be sampled for a row; the text says why."""


@dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """How to choose one token.

    Attributes:
        seed: 64 bits; with `choice` and `index` (of the token in the output) it keys the draw.
        temperature: 0 (in fact below 1e-5): the highest logit, the lowest id on a tie.
        top_k: Keep the k likeliest, and ties with the last of them; 0: all.
        top_p: Keep the likeliest until they hold this share, in (0, 1].
        min_p: Drop what is less likely than this share of the likeliest, in [0, 1].
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output.
        presence_penalty: Subtracted from logits of tokens in the output.
        frequency_penalty: The same, times their count there.
        prompt: Token ids; needed for the repetition penalty only.
        output: Token ids so far; needed for penalties only.
        forbidden: Token ids never chosen, such as end tokens before min_tokens.
        allowed, allowed_too: uint32 bits of the vocabulary, as `bits_of` makes them: what may be chosen; None: all may.
        biased, biases: Token ids, and what is added to their logits.
        given: A token that is chosen whatever its logits, such as a prompt's own; -1: none.
        logprobs: Likeliest tokens to report beside the chosen one's log-probability; -1: neither.
    """

    seed: int
    index: int
    choice: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt: Sequence[int] | np.ndarray = ()
    output: Sequence[int] | np.ndarray = ()
    forbidden: Sequence[int] | np.ndarray = ()
    allowed: np.ndarray | None = None
    allowed_too: np.ndarray | None = None
    biased: Sequence[int] | np.ndarray = ()
    biases: Sequence[float] | np.ndarray = ()
    given: int = -1
    logprobs: int = -1


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One chosen token.

    Attributes:
        token: Its id.
        logprob: Its log-probability under the untouched logits; None unless asked for.
        rank: How many tokens are as likely or likelier, itself included; of equals the lower id counts as likelier. 0
            unless asked for.
        top: The likeliest tokens with theirs, the best first; as many as asked for.
    """

    token: int
    logprob: float | None = None
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


_NONE = np.empty(0, dtype=np.int32)
_REASONS = {
    native.SAMPLER_E_NOT_FINITE: "its logits hold NaN or infinity",
    native.SAMPLER_E_NOTHING_LEFT: "every token is forbidden",
    native.SAMPLER_E_TOKEN: "a listed token is outside the vocabulary",
}


class Sampler:
    """Chooses tokens. Keeps no state between calls.

    Args:
        vocab: Logits of a row.
    """

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self._library = native.load()

    def sample(self, logits: np.ndarray, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """Choose one token for each row.

        Args:
            logits: float32 [len(rows), vocab], contiguous.
            rows: How.

        Raises:
            Refused: a row's logits hold NaN or infinity, it leaves no token, or lists one outside the vocabulary.
        """
        plan = np.zeros(len(rows), dtype=SAMPLE_ROW)
        kept: list[np.ndarray] = []
        for number, row in enumerate(rows):
            kept += _fill(plan[number], row)
        tops = max((min(row.logprobs, self.vocab) for row in rows), default=0)
        tokens = np.empty(len(rows), dtype=np.int32)
        logprobs = np.empty(len(rows), dtype=np.float32)
        ranks = np.empty(len(rows), dtype=np.uint32)
        top_ids = np.empty((len(rows), max(tops, 0)), dtype=np.int32)
        top_logprobs = np.empty(top_ids.shape, dtype=np.float32)
        statuses = np.empty(len(rows), dtype=np.int32)
        pointers = [array.ctypes.data for array in (plan, tokens, logprobs, ranks, top_ids, top_logprobs)]
        status = self._library.sampler_sample(
            logits.ctypes.data, len(rows), self.vocab, *pointers, top_ids.shape[1], statuses.ctypes.data
        )
        if status:
            raise MemoryError(f"No memory to sample from {self.vocab} tokens (code {status}).")
        for number in np.flatnonzero(statuses)[:1].tolist():
            raise Refused(f"Row {number}: {_REASONS[int(statuses[number])]}.")
        return [
            Sampled(
                token=int(tokens[number]),
                logprob=float(logprobs[number]) if row.logprobs >= 0 else None,
                rank=int(ranks[number]) if row.logprobs >= 0 else 0,
                top=_pairs(top_ids[number], top_logprobs[number], row.logprobs),
            )
            for number, row in enumerate(rows)
        ]


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """One block of Philox4x32-10: four 32-bit words from a counter of four and a key of two."""
    words = np.array(counter, dtype=np.uint32), np.array(key, dtype=np.uint32), np.empty(4, dtype=np.uint32)
    native.load().sampler_philox(*(array.ctypes.data for array in words))
    return words[2].tolist()


def _pairs(ids: np.ndarray, logprobs: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    if count <= 0:
        return ()
    return tuple(zip(ids[:count].tolist(), logprobs[:count].tolist(), strict=True))


def _fill(to: np.void, row: SamplingRow) -> list[np.ndarray]:
    penalised = row.presence_penalty != 0 or row.frequency_penalty != 0
    repeated = row.repetition_penalty != 1
    lists = {
        "prompt": row.prompt if repeated else _NONE,
        "output": row.output if repeated or penalised else _NONE,
        "forbidden": row.forbidden,
        "biased": row.biased,
    }
    arrays = []
    for name, tokens in lists.items():
        array = np.ascontiguousarray(tokens, dtype=np.int32)
        to[name] = array.ctypes.data if array.size else 0
        to[f"{name}_count"] = array.size
        arrays.append(array)
    biases = np.ascontiguousarray(row.biases, dtype=np.float32)
    for name, array in (("biases", biases), ("allowed", row.allowed), ("allowed_too", row.allowed_too)):
        if array is not None and array.size:
            array = np.ascontiguousarray(array)
            to[name] = array.ctypes.data
            arrays.append(array)
    to["given"] = row.given + 1
    to["seed"], to["index"], to["choice"] = row.seed, row.index, row.choice
    to["temperature"], to["top_p"], to["min_p"] = row.temperature, row.top_p, row.min_p
    to["repetition"], to["presence"] = row.repetition_penalty, row.presence_penalty
    to["frequency"], to["top_k"], to["top_count"] = row.frequency_penalty, row.top_k, row.logprobs
    return arrays
