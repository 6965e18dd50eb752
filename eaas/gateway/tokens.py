"""POST /inference/v1/generate, token ids in and token ids out: the request body, the completion that it comes down to,
the shapes of the answer. Pure.

The shapes are vLLM's, which would ignore a sampling parameter that no completion has: it is refused by name here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, model_validator

from eaas.gateway.constraints import Strict, TokenId
from eaas.gateway.errors import checked
from eaas.gateway.formats import ChunkFormat, Delta, FinishedChoice, ResponseHead, Usage
from eaas.gateway.logprobs import TOKEN_ID, TokenLogprobs, TokenText, finite
from eaas.gateway.schema import CompletionRequest, StreamOptions, more_fields, only

_AS_IN_A_COMPLETION = ("cache_salt", "priority", "request_id")
# Those of vLLM's SamplingParams that say how it is to be told, which this route settles itself.
_SETTLED = frozenset({"detokenize", "output_kind", "flat_logprobs"})
# Those that a completion has beside its sampling, and this request in fields of its own, or not at all.
_OWN = frozenset({*_AS_IN_A_COMPLETION, "echo", "model", "prompt", "return_token_ids", "stream", "stream_options"})

_INSIDE = only(False, because="it is one of 'sampling_params' here; put it there")

_encode = msgspec.json.encode


@more_fields(
    taken=_AS_IN_A_COMPLETION, refused=("content_parts", "ec_transfer_params", "features", "kv_transfer_params")
)
class TokensRequest(Strict):
    """Body of POST /inference/v1/generate."""

    model: str | None = None
    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: dict[str, Any]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens"] | None = None
    return_token_ids: bool | None = None
    force_routed_experts: Annotated[Any, _INSIDE] = None
    return_routed_experts: Annotated[Any, _INSIDE] = None

    @model_validator(mode="after")
    def _all_are_known(self) -> TokensRequest:
        known = CompletionRequest.model_fields.keys() - _OWN | _SETTLED
        for name, value in self.sampling_params.items():
            if value is not None and name not in known:
                raise ValueError(f"'sampling_params' has {name[:64]!r}, which this server does not support")
        return self


class TokensCompletion(CompletionRequest):
    """A completion that came as POST /inference/v1/generate: without a limit it has all the room that there is."""

    prompt_field = "token_ids"
    default_limit = None


def as_completion(given: TokensRequest) -> TokensCompletion:
    """The completion that says the same. Raises ApiError: a value that no completion may have."""
    asked = {name: value for name, value in given.sampling_params.items() if name not in _SETTLED}
    fields = {
        **asked,
        **{name: getattr(given, name) for name in ("model", "stream", "stream_options", *_AS_IN_A_COMPLETION)},
        "prompt": given.token_ids,
        "return_token_ids": True,
        # Text is made where a stop string is looked for in it, and shown nowhere.
        "detokenize": None if asked.get("stop") else False,
        "return_tokens_as_token_ids": True,
    }
    return checked(TokensCompletion, fields, {"prompt": "token_ids"})


class TokensFormat(ChunkFormat):
    """The shapes of one request's tokens; its log-probabilities name tokens by their ids."""

    prefix = ""
    no_usage = b""

    def __init__(self, prompt_ids: list[int] | None) -> None:
        """Args: prompt_ids: the prompt's tokens, where they are wanted back."""
        self._prompt_ids = prompt_ids

    def chunk_fields(self, head: ResponseHead) -> dict[str, Any]:
        return {"request_id": head.id, "output_mode": "tokens", **head.marks}

    def logprobs(self, tokens: Sequence[TokenLogprobs] | None, offset: int = 0) -> dict[str, Any] | None:
        """Of each token itself and the likeliest at its place, itself first; None when they were not asked for."""
        return None if tokens is None else {"content": [_place(token) for token in tokens]}

    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        return _encode(
            {
                **self.chunk_fields(head),
                "created": head.identity.created,
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
                "prompt_token_ids": self._prompt_ids,
            }
        )

    def first(self, index: int) -> bytes:
        """Nothing, but the prompt where it is wanted back."""
        if self._prompt_ids is None or index:
            return b""
        return self.opening + b'],"prompt_token_ids":' + _encode(self._prompt_ids) + b"}\n\n"

    def text_template(self, index: int) -> None:
        return None

    def event(self, delta: Delta) -> bytes:
        """The event of the tokens that have come, or of an end without another."""
        ending = delta.ending
        choice = {
            "index": delta.index,
            "logprobs": self.logprobs(delta.logprobs),
            "finish_reason": None if ending is None else ending.reason,
            "stop_reason": None if ending is None else ending.stop,
            "token_ids": delta.tokens or [],
        }
        return self.opening + _encode(choice)[:-1] + self.counted(delta.index)


def _place(token: TokenLogprobs) -> dict[str, Any]:
    ranked = {other.text: _entry(other, rank) for rank, other in enumerate(token.top, start=1)}
    own = ranked.pop(token.chosen.text, _entry(token.chosen, None))
    return {**own, "top_logprobs": [own, *ranked.values()][: max(1, len(token.top))]}


def _entry(token: TokenText, rank: int | None) -> dict[str, Any]:
    named = int(token.text.removeprefix(TOKEN_ID))
    return {"token_id": named, "logprob": finite(token.logprob), "rank": rank}
