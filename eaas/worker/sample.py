"""Sampling: the next token of each request of a step, and log-probabilities of prompts.

A request's SamplingParams are written into its slot's row (`eaas.native.SAMPLE_ROW`) once; a step gathers the rows of
its slots and calls the native sampler, so that a row costs no object. Only requests with penalties or bad words, or
still short of min_tokens, cost Python in every step; the mask of a grammar lies where its row points. Where the decoder
samples by itself, only the rows that it leaves are sampled here: those with forbidden tokens on a GPU, on a CPU those
that want more than the highest logit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from eaas import native
from eaas.native import SAMPLE_ROW
from eaas.worker.plan import StepPlan
from eaas.worker.request import Chunk, Request


class BadWords:
    """Sequences of tokens that one request's output must not hold: the last of each is forbidden after the others.

    What is forbidden next follows from the output alone, so that a replay and a preemption forbid the same.
    """

    __slots__ = ("_after", "_always")

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._always = [tokens[0] for tokens in sequences if len(tokens) == 1]
        # By the token before the last, so that a step looks at those alone which may be at their end.
        self._after: dict[int, list[list[int]]] = {}
        for tokens in sequences:
            if len(tokens) > 1:
                self._after.setdefault(tokens[-2], []).append(list(tokens))

    def forbidden(self, output: Sequence[int]) -> list[int]:
        """Tokens that must not come next after these, some of them perhaps twice."""
        ending = self._after.get(output[-1], ()) if output else ()
        return [*self._always, *(tokens[-1] for tokens in ending if output[1 - len(tokens) :] == tokens[:-1])]


class Refusal(NamedTuple):
    """Why nothing could be sampled for a row.

    Args:
        reason: In words.
        asked: Whether what the client bound the choice by leaves nothing, or is too much; else the row is broken.
    """

    reason: str
    asked: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """What a step sampled: a row for each request of the plan, then one for each token of its prompt_logprobs.

    Args:
        tokens: One a request; below 0 where none could be sampled yet.
        logprobs: float32, one a row; meaningful where the request asked for them. None where no row did.
        ranks: [rows], 1 for the likeliest; as `logprobs`.
        top_ids, top_logprobs: [rows, most asked for].
        refused: Rows for which nothing could be sampled; their token means nothing.
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
class DeviceSamples:
    """What a decoder sampled by itself; its arrays are valid until its next step.

    Args:
        sampled: bool [rows], whether it did.
        tokens: int32 [rows], which mean something where it did and they are sound.
        sound: bool [rows], whether the row's logits were finite.
        logits: float32 [rows not sampled, vocab], contiguous, in the order of rows.
    """

    sampled: np.ndarray
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
    forbidden: list[np.ndarray] = field(default_factory=list[np.ndarray])

    @property
    def special(self) -> bool:
        return self.penalised or len(self.ends) > 0 or self.bad is not None


class SlotSampler:
    """Samples for the slots of one scheduler.

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

    def rows(self, plan: StepPlan) -> np.ndarray:
        """How to sample the step: `eaas.native.SAMPLE_ROW`, one for each of its logits rows, brought up to date. What
        they point at is valid until the requests' next tokens are known."""
        indexes: list[int] = []
        slots = plan.slots
        for slot, request in zip(slots.tolist(), plan.requests, strict=True):
            held = self._slots[slot]
            if held is None or held.request is not request:
                held = self._slots[slot] = self._enter(slot, request)
            if held.special:
                self._update(slot, held)
            indexes.append(len(request.output))
        words = self._words.take(slots, axis=0)
        words[:, _INDEX_WORD] = indexes
        if plan.ahead is not None:
            self._look_ahead(plan, plan.ahead, words)
        if plan.prompt_logprobs:
            words = np.concatenate([words, *(_prompt_words(chunk) for chunk in plan.prompt_logprobs)])
            wanted = (chunk.request.params.prompt_logprobs for chunk in plan.prompt_logprobs)
            self._most_top = max(self._most_top, *wanted)
        if len(words) > len(self._tokens) or self._most_top > self._made_top:
            self._make_room(max(len(words), len(self._tokens)))
        return words.view(SAMPLE_ROW)[:, 0]

    def sample(
        self,
        plan: StepPlan,
        rows: np.ndarray,
        logits: np.ndarray,
        barred: Mapping[int, str] = {},
        device: DeviceSamples | None = None,
    ) -> Samples:
        """Sample the next token of each request, and what the plan asks of prompts.

        Args:
            rows: What `rows` gave for this plan.
            logits: float32 [rows, vocab], contiguous; of those alone that `device` left.
            barred: Rows for which no token can be sampled, and why not at all; "": not yet. A device leaves them.
            device: What the decoder sampled by itself; None: nothing.
        """
        words, refused = rows.view(np.uint64).reshape(len(rows), -1), dict[int, Refusal]()
        tokens, logprobs = self._tokens, self._logprobs
        ranks, top_ids, top_logprobs = self._ranks, self._top_ids, self._top_logprobs
        if device is None:
            refused = self._run(logits, words, barred)
        else:
            broken = np.flatnonzero(device.sampled & ~device.sound)
            refused = {int(row): _REASONS[native.SAMPLER_E_NOT_FINITE] for row in broken}
            left = np.flatnonzero(~device.sampled)
            tokens = device.tokens
            if len(left):
                here = {number: barred[row] for number, row in enumerate(left.tolist()) if row in barred}
                found = self._run(logits, words[left], here)
                refused |= {int(left[number]): reason for number, reason in found.items()}

                def spread(array: np.ndarray) -> np.ndarray:
                    whole = np.zeros((len(rows), *array.shape[1:]), dtype=array.dtype)
                    whole[left] = array[: len(left)]
                    return whole

                tokens = np.where(device.sampled, tokens, spread(self._tokens))
                logprobs, ranks = spread(logprobs), spread(ranks)
                top_ids, top_logprobs = spread(top_ids), spread(top_logprobs)
        # A device leaves the rows whose log-probabilities are asked for.
        tells = bool(plan.prompt_logprobs) or any(r.params.logprobs >= 0 for r in plan.requests)
        return Samples(
            tokens=tokens[: len(plan.requests)].tolist(),
            logprobs=logprobs[: len(rows)].tolist() if tells else None,
            ranks=ranks,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            refused=refused,
        )

    def _look_ahead(self, plan: StepPlan, ahead: np.ndarray, words: np.ndarray) -> None:
        """Have the rows of drafts sampled as those of tokens that come after them."""
        for row in np.flatnonzero(ahead).tolist():
            request, number = plan.requests[row], int(ahead[row])
            held = self._slots[request.slot]
            if held is not None and held.special:
                self._update(request.slot, held, request.drafts[:number])
                words[row] = self._words[request.slot]
            words[row, _INDEX_WORD] = len(request.output) + number
            if request.constraint is not None:
                # The masks lie one behind the other.
                words[row, _ALLOWED_WORD] += np.uint64(number * request.constraint.mask.nbytes)

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

    def _run(self, logits: np.ndarray, words: np.ndarray, barred: Mapping[int, str]) -> dict[int, Refusal]:
        wanted = (len(words), self._vocab)
        if logits.dtype != np.float32 or logits.shape != wanted or not logits.flags.c_contiguous:
            raise ValueError(
                f"Logits are {logits.dtype} {list(logits.shape)}; contiguous float32 {list(wanted)} needed."
            )
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
            ends=np.array(sorted(token for token in request.stops if early and token < self._vocab), dtype=np.int32),
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

    def _update(self, slot: int, held: _Slot, drafts: Sequence[int] = ()) -> None:
        """Args: drafts: which the row comes after."""
        output = held.request.output
        count = len(output) + len(drafts)
        row = self._rows[slot]
        if held.penalised:
            held.output[held.copied : len(output)] = output[held.copied :]
            held.copied = len(output)
            held.output[len(output) : count] = drafts
            row["output_count"] = count
        forbidden = held.ends if count < held.request.params.min_tokens else _NOTHING
        if not drafts:
            held.ends, held.forbidden = forbidden, []
        if held.bad is not None:
            said = [*output, *drafts] if drafts else output
            forbidden = np.array([*forbidden, *held.bad.forbidden(said)], dtype=np.int32)
        held.forbidden.append(forbidden)
        row["forbidden"], row["forbidden_count"] = forbidden.ctypes.data, len(forbidden)


def bits_of(tokens: Sequence[int] | np.ndarray, vocab: int) -> np.ndarray:
    """One bit a token, 32 in a word, the lowest first: uint32 [(vocab + 31) / 32], set for the tokens given.

    Raises:
        IndexError: a token is outside the vocabulary.
    """
    chosen = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    chosen[:vocab][np.asarray(tokens, dtype=np.int64)] = 1
    return np.packbits(chosen, bitorder="little").view(np.uint32)


def _prompt_words(chunk: Chunk) -> np.ndarray:
    """Rows, as words, that take the tokens of a prompt that are there, for their log-probabilities."""
    rows = _ANY_TOKEN.view(SAMPLE_ROW).repeat(chunk.rows)
    rows["given"] = chunk.request.prompt[chunk.start : chunk.stop] + 1
    rows["top_count"] = chunk.request.params.prompt_logprobs
    return rows.view(np.uint64).reshape(len(rows), -1)


def _any_token() -> np.ndarray:
    row = np.zeros(1, dtype=SAMPLE_ROW)
    row["top_p"], row["repetition"], row["top_count"] = 1.0, 1.0, -1
    return row.view(np.uint64)


_ANY_TOKEN = _any_token()
_INDEX_WORD, _ALLOWED_WORD = ((SAMPLE_ROW.fields or {})[name][1] // 8 for name in ("index", "allowed"))
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
