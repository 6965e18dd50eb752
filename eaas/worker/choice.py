"""Choosing the tokens of a step; sampling parameters are kept by slot, so that a row costs no object.

A request's parameters are written into its slot's row once; a step gathers the rows of its slots and calls
the native sampler. Only requests with penalties or bad words, or still short of min_tokens, cost Python in every
step; the mask of a grammar lies where its row points. Where the decoder chooses by itself, on a GPU, only the rows
that it leaves are chosen here: among them those with forbidden tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from eaas import native
from eaas.native import SAMPLE_ROW
from eaas.worker.bad_words import BadWords
from eaas.worker.request import Request
from eaas.worker.steps import Judged


class Refusal(NamedTuple):
    """Why nothing could be chosen for a row.

    Args:
        reason: In words.
        asked: Whether what the client bound the choice by leaves nothing, or is too much; else the row is broken.
    """

    reason: str
    asked: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was chosen for each request's row; the rows of judged tokens come after them.

    Args:
        tokens: One a request; below 0 where none could be chosen yet.
        logprobs: float32, one a row; meaningful where the request asked for them. None where no row did.
        ranks: [rows], 1 for the likeliest; as `logprobs`.
        top_ids, top_logprobs: [rows, most asked for].
        refused: Rows for which nothing could be chosen; their token means nothing.
    """

    tokens: list[int]
    logprobs: list[float] | None
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    refused: dict[int, Refusal]

    def top(self, row: int, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens of a row and their log-probabilities, the best first."""
        ids, logprobs = self.top_ids[row, :count], self.top_logprobs[row, :count]
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a decoder chose by itself; its arrays are valid until its next step.

    Args:
        chosen: bool [rows], whether it did.
        tokens: int32 [rows], which mean something where it did and they are sound.
        sound: bool [rows], whether the row's logits were finite.
        logits: float32 [rows not chosen, vocab], contiguous, in the order of rows.
    """

    chosen: np.ndarray
    tokens: np.ndarray
    sound: np.ndarray
    logits: np.ndarray


@dataclass(kw_only=True, slots=True)
class _Slot:
    """What a slot's row points at, which must live as long as the row does."""

    request: Request
    prompt: np.ndarray
    output: np.ndarray
    ends: np.ndarray  # tokens that are forbidden before min_tokens
    bad: BadWords | None
    allowed: np.ndarray
    biased: np.ndarray
    biases: np.ndarray
    penalised: bool
    copied: int = field(default=0)
    forbidden: np.ndarray = field(default_factory=lambda: _NOTHING)

    @property
    def special(self) -> bool:
        return self.penalised or len(self.ends) > 0 or self.bad is not None


class Chooser:
    """Chooses tokens for the slots of one scheduler.

    Args:
        vocab: Logits of a row.
        slots: Requests that can run at once.
    """

    def __init__(self, *, vocab: int, slots: int) -> None:
        self._vocab = vocab
        self._sample = native.load().sampler_sample
        self._rows = np.zeros(slots, dtype=SAMPLE_ROW)
        # Gathered as words: numpy copies structures field by field, ten times slower.
        self._words = self._rows.view(np.uint64).reshape(slots, -1)
        self._slots: list[_Slot | None] = [None] * slots
        self._most_top = _USUAL_TOP
        self._make_room(slots)

    def choose(
        self,
        logits: np.ndarray,
        slots: np.ndarray,
        requests: Sequence[Request],
        judged: Sequence[Judged] = (),
        barred: Mapping[int, str] = {},
    ) -> Choice:
        """Choose the next token of each request, and judge tokens of prompts.

        Args:
            logits: float32 [rows, vocab], contiguous.
            slots: int32 [requests].
            requests: Each in its slot.
            judged: What the rows after those of requests are for.
            barred: Rows for which no token can be chosen, and why not at all; "": not yet.
        """
        words = self._gather(slots, requests, judged)
        self._check(logits, len(words))
        count = len(requests)
        refused = self._run(logits, words, barred)
        return Choice(
            tokens=self._tokens[:count].tolist(),
            logprobs=self._logprobs[: len(words)].tolist() if _wants_logprobs(requests, judged) else None,
            ranks=self._ranks,
            top_ids=self._top_ids,
            top_logprobs=self._top_logprobs,
            refused=refused,
        )

    def ways(
        self, slots: np.ndarray, requests: Sequence[Request], judged: Sequence[Judged] = ()
    ) -> np.ndarray:
        """How the next token of each request is to be chosen: `eaas.native.SAMPLE_ROW` [rows], for a decoder that
        chooses by itself. What its rows point at is valid until the requests' next tokens are known.

        Args:
            slots, requests, judged: As for `choose`.
        """
        return self._gather(slots, requests, judged).view(SAMPLE_ROW)[:, 0]

    def complete(
        self,
        ways: np.ndarray,
        requests: Sequence[Request],
        found: Found,
        judged: Sequence[Judged] = (),
        barred: Mapping[int, str] = {},
    ) -> Choice:
        """What a decoder chose, with the tokens of rows that it left.

        Args:
            ways: What `ways` gave for these requests.
            found: What the decoder did with them.
            judged, barred: As for `choose`.
        """
        broken = np.flatnonzero(found.chosen & ~found.sound)
        refused = {int(row): _REASONS[native.SAMPLER_E_NOT_FINITE] for row in broken}
        left = np.flatnonzero(~found.chosen)
        count = len(left)
        if not count:
            none = self._top_ids[:0], self._top_logprobs[:0]
            return Choice(
                tokens=found.tokens.tolist(),
                logprobs=None,
                ranks=self._ranks[:0],
                top_ids=none[0],
                top_logprobs=none[1],
                refused=refused,
            )
        self._check(found.logits, count)
        words = ways[left].view(np.uint64).reshape(count, -1)
        # A grammar's rows are never chosen for on a device.
        here = {number: barred[row] for number, row in enumerate(left.tolist()) if row in barred}
        refused |= {int(left[row]): reason for row, reason in self._run(found.logits, words, here).items()}

        def spread(array: np.ndarray) -> np.ndarray:
            whole = np.zeros((len(ways), *array.shape[1:]), dtype=array.dtype)
            whole[left] = array[:count]
            return whole

        tokens = np.where(found.chosen, found.tokens, spread(self._tokens))
        return Choice(
            tokens=tokens[: len(requests)].tolist(),
            logprobs=spread(self._logprobs).tolist() if _wants_logprobs(requests, judged) else None,
            ranks=spread(self._ranks),
            top_ids=spread(self._top_ids),
            top_logprobs=spread(self._top_logprobs),
            refused=refused,
        )

    def _check(self, logits: np.ndarray, count: int) -> None:
        wanted = (count, self._vocab)
        if logits.dtype != np.float32 or logits.shape != wanted or not logits.flags.c_contiguous:
            raise ValueError(
                f"Logits are {logits.dtype} {list(logits.shape)}; contiguous float32 {list(wanted)} needed."
            )

    def _make_room(self, rows: int) -> None:
        """Results of so many rows, each with as many of the likeliest tokens as any request has asked for."""
        self._made_top = self._most_top
        self._tokens = np.empty(rows, dtype=np.int32)
        self._logprobs = np.empty(rows, dtype=np.float32)
        self._ranks = np.empty(rows, dtype=np.uint32)
        self._top_ids = np.empty((rows, self._made_top), dtype=np.int32)
        self._top_logprobs = np.empty((rows, self._made_top), dtype=np.float32)
        self._statuses = np.empty(rows, dtype=np.int32)
        results = (self._tokens, self._logprobs, self._ranks, self._top_ids, self._top_logprobs)
        self._results = [array.ctypes.data for array in results]

    def _gather(self, slots: np.ndarray, requests: Sequence[Request], judged: Sequence[Judged]) -> np.ndarray:
        """The rows of slots, as words, brought up to date; after them those of judged tokens."""
        indexes: list[int] = []
        for slot, request in zip(slots.tolist(), requests, strict=True):
            held = self._slots[slot]
            if held is None or held.request is not request:
                held = self._slots[slot] = self._enter(slot, request)
            if held.special:
                self._update(slot, held)
            indexes.append(len(request.output))
        words = self._words.take(slots, axis=0)
        words[:, _INDEX_WORD] = indexes
        if judged:
            words = np.concatenate([words, *(_judging(piece) for piece in judged)])
            self._most_top = max(self._most_top, *(piece.request.params.prompt_logprobs for piece in judged))
        if len(words) > len(self._tokens) or self._most_top > self._made_top:
            self._make_room(max(len(words), len(self._tokens)))
        return words

    def _run(self, logits: np.ndarray, words: np.ndarray, barred: Mapping[int, str]) -> dict[int, Refusal]:
        for row in barred:
            words[row] = _ANY_TOKEN
        status = self._sample(
            logits.ctypes.data,
            len(words),
            self._vocab,
            words.ctypes.data,
            *self._results,
            self._made_top,
            self._statuses.ctypes.data,
        )
        if status:
            raise MemoryError(f"No memory to sample from {self._vocab} tokens (code {status}).")
        self._tokens[[row for row, reason in barred.items() if not reason]] = -1
        broken = np.flatnonzero(self._statuses[: len(words)])
        refused = {row: _REASONS[int(self._statuses[row])] for row in broken.tolist()}
        # Logits that are not finite are nobody's request, whatever its grammar has come to.
        return refused | {
            row: Refusal(reason, asked=True)
            for row, reason in barred.items()
            if reason and int(self._statuses[row]) != native.SAMPLER_E_NOT_FINITE
        }

    def _enter(self, slot: int, request: Request) -> _Slot:
        params = request.params
        repeats = params.repetition_penalty != 1.0
        penalised = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        constraint = request.constraint
        # A grammar's mask keeps the end back by itself, as long as it can.
        early = params.min_tokens > len(request.output) and constraint is None
        held = _Slot(
            request=request,
            prompt=request.prompt if repeats else _NOTHING,
            output=np.empty(params.max_tokens, dtype=np.int32) if penalised else _NOTHING,
            ends=np.array(
                sorted(token for token in request.stops if early and token < self._vocab), dtype=np.int32
            ),
            bad=BadWords(params.bad_tokens) if params.bad_tokens else None,
            allowed=bits_of(params.allowed_token_ids, self._vocab) if params.allowed_token_ids else _NOTHING,
            biased=np.array([token for token, _ in params.logit_bias], dtype=np.int32),
            biases=np.array([bias for _, bias in params.logit_bias], dtype=np.float32),
            penalised=penalised,
        )
        row = self._rows[slot]
        row["allowed"] = 0 if constraint is None else constraint.mask.ctypes.data
        row["allowed_too"] = held.allowed.ctypes.data if len(held.allowed) else 0
        row["biased"], row["biases"] = held.biased.ctypes.data, held.biases.ctypes.data
        row["biased_count"] = len(held.biased)
        row["prompt"], row["prompt_count"] = held.prompt.ctypes.data, len(held.prompt)
        row["output"], row["output_count"] = held.output.ctypes.data, 0
        row["forbidden"], row["forbidden_count"] = 0, 0
        row["seed"], row["choice"] = params.seed, params.choice
        row["temperature"], row["top_p"], row["min_p"] = params.temperature, params.top_p, params.min_p
        row["repetition"] = params.repetition_penalty
        row["presence"], row["frequency"] = params.presence_penalty, params.frequency_penalty
        row["top_k"], row["top_count"] = params.top_k, params.logprobs
        self._most_top = max(self._most_top, params.logprobs)
        return held

    def _update(self, slot: int, held: _Slot) -> None:
        output = held.request.output
        row = self._rows[slot]
        if held.penalised:
            held.output[held.copied : len(output)] = output[held.copied :]
            held.copied = len(output)
            row["output_count"] = held.copied
        if len(output) >= held.request.params.min_tokens:
            held.ends = _NOTHING
        held.forbidden = held.ends
        if held.bad is not None:
            held.forbidden = np.array([*held.ends, *held.bad.forbidden(output)], dtype=np.int32)
        row["forbidden"], row["forbidden_count"] = held.forbidden.ctypes.data, len(held.forbidden)


def bits_of(tokens: Sequence[int] | np.ndarray, vocab: int) -> np.ndarray:
    """One bit a token, 32 in a word, the lowest first: uint32 [(vocab + 31) / 32], set for the tokens given.

    Raises:
        IndexError: a token is outside the vocabulary.
    """
    chosen = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    chosen[:vocab][np.asarray(tokens, dtype=np.int64)] = 1
    return np.packbits(chosen, bitorder="little").view(np.uint32)


def _wants_logprobs(requests: Sequence[Request], judged: Sequence[Judged]) -> bool:
    return bool(judged) or any(request.params.logprobs >= 0 for request in requests)


def _judging(piece: Judged) -> np.ndarray:
    """Rows, as words, that choose the tokens of a prompt that are there, for their log-probabilities."""
    rows = _ANY_TOKEN.view(SAMPLE_ROW).repeat(piece.stop - piece.start)
    rows["given"] = piece.request.prompt[piece.start : piece.stop] + 1
    rows["top_count"] = piece.request.params.prompt_logprobs
    return rows.view(np.uint64).reshape(len(rows), -1)


def _any_token() -> np.ndarray:
    row = np.zeros(1, dtype=SAMPLE_ROW)
    row["top_p"], row["repetition"], row["top_count"] = 1.0, 1.0, -1
    return row.view(np.uint64)


_ANY_TOKEN = _any_token()
_INDEX_WORD = (SAMPLE_ROW.fields or {})["index"][1] // 8
_NOTHING = np.empty(0, dtype=np.int32)
# What gateways allow by default; for more, the results are made wider.
_USUAL_TOP = 20
_REASONS = {
    native.SAMPLER_E_NOT_FINITE: Refusal(
        "its logits hold NaN or infinity: the model or its weights are broken", asked=False
    ),
    native.SAMPLER_E_TOKEN: Refusal("a listed token is outside the vocabulary", asked=False),
    native.SAMPLER_E_NOTHING_LEFT: Refusal("every token is forbidden; at least one must be left", asked=True),
}
