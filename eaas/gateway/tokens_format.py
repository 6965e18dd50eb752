"""Shapes of POST /inference/v1/generate, which are vLLM's: token ids, whole or as they come. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from eaas.gateway.errors import ErrorReply
from eaas.gateway.openai_format import (
    DONE,
    Ending,
    FinishedChoice,
    ResponseHead,
    StreamUsage,
    TokenLogprobs,
    TokenText,
    Usage,
    error_event,
    finite,
)
from eaas.gateway.prompt_scores import TOKEN_ID

_encode = msgspec.json.encode


class TokensFormat:
    """The shapes of one request's tokens; its log-probabilities name tokens by their ids.

    Attributes:
        prompt_ids: The prompt's tokens, where they are wanted back.
    """

    prefix = ""

    def __init__(self, prompt_ids: list[int] | None) -> None:
        self.prompt_ids = prompt_ids

    def logprobs(self, tokens: Sequence[TokenLogprobs] | None) -> Any:
        """Of each token itself and the likeliest at its place, itself first; None when they were not asked for."""
        if tokens is None:
            return None
        return {"content": [self._place(token) for token in tokens]}

    def _place(self, token: TokenLogprobs) -> dict[str, Any]:
        ranked = {other.text: _entry(other, rank) for rank, other in enumerate(token.top, start=1)}
        own = ranked.pop(token.chosen.text, _entry(token.chosen, None))
        return {**own, "top_logprobs": [own, *ranked.values()][: max(1, len(token.top))]}

    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole answer."""
        return _encode(
            {
                **_head(head),
                "created": head.created,
                "model": head.model,
                "system_fingerprint": head.fingerprint,
                "choices": [
                    {
                        "index": choice.index,
                        "logprobs": self.logprobs(choice.logprobs),
                        "finish_reason": choice.finish_reason,
                        "stop_reason": choice.stop_reason,
                        "token_ids": choice.tokens,
                        "routed_experts": choice.routed_experts,
                    }
                    for choice in choices
                ],
                "usage": usage.as_dict(),
                "prompt_logprobs": choices[0].prompt_logprobs,
                "prompt_token_ids": self.prompt_ids,
            }
        )

    def events(self, head: ResponseHead, choices: int, usage: StreamUsage) -> TokenEvents:
        """The event templates of one stream."""
        return TokenEvents(self, head, usage)


class TokenEvents:
    """Stream events of token ids; bytes in, bytes out."""

    def __init__(self, shape: TokensFormat, head: ResponseHead, usage: StreamUsage) -> None:
        self._shape, self._head, self._usage = shape, head, usage

    def first(self, index: int) -> bytes:
        """Nothing, but the prompt where it is wanted back."""
        if self._shape.prompt_ids is None or index:
            return b""
        return self._event([], {"prompt_token_ids": self._shape.prompt_ids})

    def text(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        offset: int,
        tokens: Sequence[int] | None = None,
        ending: Ending | None = None,
    ) -> bytes:
        """The event of the tokens that have come."""
        return self._event([self._choice(index, logprobs, tokens or [], ending)], self._used(index))

    def finish(self, index: int, ending: Ending) -> bytes:
        """The event that ends a choice without another token, once."""
        return self._event([self._choice(index, None, [], ending)], self._used(index))

    def end(self, usage: Usage) -> bytes:
        """What ends a stream in which nothing went wrong."""
        last = self._event([], {"usage": usage.as_dict()}) if self._usage.last else b""
        return last + DONE

    def failure(self, reply: ErrorReply) -> bytes:
        """What ends a stream that failed: no [DONE] follows it."""
        return error_event(reply.body())

    def _choice(
        self,
        index: int,
        logprobs: Sequence[TokenLogprobs] | None,
        tokens: Sequence[int],
        ending: Ending | None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "logprobs": self._shape.logprobs(logprobs),
            "finish_reason": None if ending is None else ending.reason,
            "stop_reason": None if ending is None else ending.stop,
            "token_ids": tokens,
        }

    def _used(self, index: int) -> dict[str, Any]:
        return {} if self._usage.now is None else {"usage": self._usage.now(index).as_dict()}

    def _event(self, choices: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> bytes:
        return b"data: " + _encode({**_head(self._head), "choices": choices, **more}) + b"\n\n"


def _head(head: ResponseHead) -> dict[str, Any]:
    marks = {"eaas_dropped_experts": True} if head.dropped else {}
    return {"request_id": head.id, "output_mode": "tokens", **marks}


def _entry(token: TokenText, rank: int | None) -> dict[str, Any]:
    return {
        "token_id": int(token.text.removeprefix(TOKEN_ID)),
        "logprob": finite(token.logprob),
        "rank": rank,
    }
