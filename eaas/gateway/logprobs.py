"""Log-probabilities of tokens as clients see them, and those of one choice's prompt as its worker tells them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

# Of one request, over all its prompts, choices and alternatives: some 60 MB until it is answered.
MOST_SCORES = 1 << 18

TOKEN_ID = "token_id:"

# JSON has no infinity; OpenAI reports an impossible token by this value.
IMPOSSIBLE_LOGPROB = -9999.0

# Of each token its log-probability, its rank and the likeliest at its place.
Scores = Sequence[tuple[float, int, list[tuple[int, float]]]]


class TokenText(NamedTuple):
    """One token as a client sees it: its text, its bytes, and its log-probability; a prompt's first token has none."""

    text: str
    raw: bytes
    logprob: float | None


class TokenLogprobs(NamedTuple):
    """A chosen token and the most likely alternatives at its place."""

    chosen: TokenText
    top: Sequence[TokenText]


def finite(logprob: float | None) -> float | None:
    """A log-probability as JSON can say it; None where there is none."""
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) and logprob > IMPOSSIBLE_LOGPROB else IMPOSSIBLE_LOGPROB


def logprob_entry(token: TokenLogprobs) -> dict[str, Any]:
    """A token as OpenAI's chats and responses tell of it."""

    def entry(one: TokenText) -> dict[str, Any]:
        return {"token": one.text, "logprob": finite(one.logprob), "bytes": list(one.raw)}

    return {**entry(token.chosen), "top_logprobs": [entry(other) for other in token.top]}


class TokenNames(Protocol):
    """Text and bytes of single tokens."""

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


class TokensById:
    """Names tokens by their ids, as "token_id:7", for clients that cannot tell tokens of one text apart."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def token_text(self, token: int) -> str:
        return f"{TOKEN_ID}{token}"

    def token_bytes(self, token: int) -> bytes:
        return self._names.token_bytes(token)


def token_logprobs(
    names: TokenNames, token: int, logprob: float | None, top: Sequence[tuple[int, float]]
) -> TokenLogprobs:
    """A token and the likeliest at its place, as clients see them."""

    def text(token: int, value: float | None) -> TokenText:
        return TokenText(names.token_text(token), names.token_bytes(token), value)

    return TokenLogprobs(text(token, logprob), [text(*pair) for pair in top])


class PromptScores:
    """Gathered piece by piece; what a replay tells again is the same, and counts once."""

    def __init__(self, prompt: Sequence[int], names: TokenNames, *, named: int, by_id: int) -> None:
        """Args: named, by_id: Likeliest tokens that the client wants beside each, in either shape; -1: not in it."""
        self._named = named
        self._by_id = by_id
        self._prompt = prompt
        self._names = names
        self._scores: list[tuple[float, int, list[tuple[int, float]]]] = []

    def take(self, start: int, scores: Scores) -> None:
        """Take those of tokens number ``start`` and on; what leaves a gap is left out."""
        known = len(self._scores) + 1
        if start <= known:
            self._scores += scores[known - start :]

    def named(self) -> list[TokenLogprobs] | None:
        """As those of chosen tokens; the first token has no log-probability."""
        if self._named < 0:
            return None
        scored = [(None, 0, []), *self._scores]
        return [
            token_logprobs(self._names, token, logprob, top[: self._named])
            for token, (logprob, _, top) in zip(self._prompt, scored, strict=False)
        ]

    def by_id(self) -> list[dict[str, Any] | None] | None:
        """vLLM's ``prompt_logprobs``: for each token but the first, itself and the likeliest by id."""
        if self._by_id < 0:
            return None
        shown: list[dict[str, Any] | None] = [None]
        for token, (logprob, own, top) in zip(self._prompt[1:], self._scores, strict=False):
            entries = {token: (logprob, own)}
            entries |= {other: (value, rank) for rank, (other, value) in enumerate(top[: self._by_id], start=1)}
            texts = {other: self._names.token_text(other) for other in entries}
            shown.append(
                {
                    str(other): {"logprob": finite(value), "rank": rank, "decoded_token": texts[other]}
                    for other, (value, rank) in entries.items()
                }
            )
        return shown
