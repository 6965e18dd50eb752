"""Choosing the tokens of a step; sampling parameters are kept by slot, so that a row costs no object.

A request's parameters are written into its slot's row once; a step gathers the rows of its slots and calls
the native sampler. Only requests with penalties, or still short of min_tokens, cost Python in every step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eaas import native
from eaas.engine import fallback_sampler
from eaas.engine.request import Request
from eaas.engine.worker_protocol import MAX_TOP_LOGPROBS
from eaas.native import SAMPLE_ROW


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was chosen for each row.

    Args:
        tokens: One a row.
        logprobs: float32, one a row; meaningful where the request asked for them. None where no row did.
        top_ids, top_logprobs: [rows, most asked for].
        refused: Rows for which nothing could be chosen, and why; their token means nothing.
    """

    tokens: list[int]
    logprobs: list[float] | None
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    refused: dict[int, str]

    def top(self, row: int, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens of a row and their log-probabilities, the best first."""
        ids, logprobs = self.top_ids[row, :count], self.top_logprobs[row, :count]
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True))


@dataclass(kw_only=True, slots=True)
class _Slot:
    """What a slot's row points at, which must live as long as the row does."""

    request: Request
    prompt: np.ndarray
    output: np.ndarray
    forbidden: np.ndarray
    penalised: bool
    copied: int = field(default=0)

    @property
    def special(self) -> bool:
        return self.penalised or len(self.forbidden) > 0


class Chooser:
    """Chooses tokens for the slots of one scheduler.

    Args:
        vocab: Logits of a row.
        slots: Requests that can run at once.
    """

    def __init__(self, *, vocab: int, slots: int) -> None:
        self._vocab = vocab
        self._sample = fallback_sampler.load().sampler_sample
        self._rows = np.zeros(slots, dtype=SAMPLE_ROW)
        # Gathered as words: numpy copies structures field by field, ten times slower.
        self._words = self._rows.view(np.uint64).reshape(slots, -1)
        self._slots: list[_Slot | None] = [None] * slots
        self._tokens = np.empty(slots, dtype=np.int32)
        self._logprobs = np.empty(slots, dtype=np.float32)
        self._top_ids = np.empty((slots, MAX_TOP_LOGPROBS), dtype=np.int32)
        self._top_logprobs = np.empty((slots, MAX_TOP_LOGPROBS), dtype=np.float32)
        results = (self._tokens, self._logprobs, self._top_ids, self._top_logprobs)
        self._results = [array.ctypes.data for array in results]
        self._where = ctypes.c_uint32()

    def choose(self, logits: np.ndarray, slots: np.ndarray, requests: Sequence[Request]) -> Choice:
        """Choose the next token of each request.

        Args:
            logits: float32 [rows, vocab], contiguous; a refused row's are overwritten.
            slots: int32 [rows].
            requests: [rows], each in its slot.
        """
        count = len(requests)
        wanted = (count, self._vocab)
        if logits.dtype != np.float32 or logits.shape != wanted or not logits.flags.c_contiguous:
            raise ValueError(
                f"Logits are {logits.dtype} {list(logits.shape)}; contiguous float32 {list(wanted)} needed."
            )
        wants_logprobs = False
        indexes: list[int] = []
        for slot, request in zip(slots.tolist(), requests, strict=True):
            held = self._slots[slot]
            if held is None or held.request is not request:
                held = self._slots[slot] = self._enter(slot, request)
            if held.special:
                self._update(slot, held)
            wants_logprobs |= request.params.logprobs >= 0
            indexes.append(len(request.output))
        words = self._words.take(slots, axis=0)
        words[:, _INDEX_WORD] = indexes
        refused = self._run(logits, words)
        return Choice(
            tokens=self._tokens[:count].tolist(),
            logprobs=self._logprobs[:count].tolist() if wants_logprobs else None,
            top_ids=self._top_ids,
            top_logprobs=self._top_logprobs,
            refused=refused,
        )

    def _run(self, logits: np.ndarray, words: np.ndarray) -> dict[int, str]:
        refused: dict[int, str] = {}
        while True:
            status = self._sample(
                logits.ctypes.data,
                len(words),
                self._vocab,
                words.ctypes.data,
                *self._results,
                MAX_TOP_LOGPROBS,
                self._where,
            )
            if not status:
                return refused
            row = self._where.value
            if status not in _REASONS or row in refused:
                raise MemoryError(f"No memory to sample from {self._vocab} tokens (code {status}).")
            refused[row] = _REASONS[status]
            # The others are chosen again, which gives the same tokens: each depends on its own row alone.
            logits[row] = 0.0
            words[row] = _ANY_TOKEN

    def _enter(self, slot: int, request: Request) -> _Slot:
        params = request.params
        repeats = params.repetition_penalty != 1.0
        penalised = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        early = params.min_tokens > len(request.output)
        held = _Slot(
            request=request,
            prompt=request.prompt if repeats else _NOTHING,
            output=np.empty(params.max_tokens, dtype=np.int32) if penalised else _NOTHING,
            forbidden=np.array(
                sorted(token for token in request.stops if early and token < self._vocab), dtype=np.int32
            ),
            penalised=penalised,
        )
        row = self._rows[slot]
        row["prompt"], row["prompt_count"] = held.prompt.ctypes.data, len(held.prompt)
        row["output"], row["output_count"] = held.output.ctypes.data, 0
        row["forbidden"], row["forbidden_count"] = held.forbidden.ctypes.data, len(held.forbidden)
        row["seed"], row["choice"] = params.seed, params.choice
        row["temperature"], row["top_p"], row["min_p"] = params.temperature, params.top_p, params.min_p
        row["repetition"] = params.repetition_penalty
        row["presence"], row["frequency"] = params.presence_penalty, params.frequency_penalty
        row["top_k"], row["top_count"] = params.top_k, params.logprobs
        return held

    def _update(self, slot: int, held: _Slot) -> None:
        output = held.request.output
        row = self._rows[slot]
        if held.penalised:
            held.output[held.copied : len(output)] = output[held.copied :]
            held.copied = len(output)
            row["output_count"] = held.copied
        if len(output) >= held.request.params.min_tokens:
            row["forbidden_count"] = 0
            held.forbidden = _NOTHING


def _any_token() -> np.ndarray:
    row = np.zeros(1, dtype=SAMPLE_ROW)
    row["top_p"], row["repetition"], row["top_count"] = 1.0, 1.0, -1
    return row.view(np.uint64)


_ANY_TOKEN = _any_token()
_INDEX_WORD = (SAMPLE_ROW.fields or {})["index"][1] // 8
_NOTHING = np.empty(0, dtype=np.int32)
_REASONS = {
    native.SAMPLER_E_NOT_FINITE: "its logits hold NaN or infinity: the model or its weights are broken",
    native.SAMPLER_E_TOKEN: "a listed token is outside the vocabulary",
    native.SAMPLER_E_NOTHING_LEFT: "every token is forbidden; at least one must be left",
}
