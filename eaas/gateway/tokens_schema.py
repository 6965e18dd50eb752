"""Body of POST /inference/v1/generate, token ids in and token ids out, and the completion that it comes down to. Pure.

The shape is vLLM's. Its sampling parameters are a nested object of the names that completions have; one that no
completion has would be ignored there, so it is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eaas.gateway.errors import from_validation
from eaas.gateway.schema import CompletionRequest, StreamOptions, Unsupported

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
# Those of vLLM's SamplingParams that say how it is to be told, which this route settles itself.
_SETTLED = frozenset({"detokenize", "output_kind", "flat_logprobs"})
# Those that a completion has beside its sampling, and this request in fields of its own, or not at all.
_OWN = frozenset(
    {
        "cache_salt", "echo", "model", "priority", "prompt", "request_id", "return_token_ids", "stream",
        "stream_options",
    }
)  # fmt: skip


class TokensRequest(BaseModel):
    """Body of POST /inference/v1/generate."""

    model_config = _STRICT

    model: str | None = None
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    sampling_params: dict[str, Any]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens"] | None = None
    return_token_ids: bool | None = None
    # As in a completion, which judges them.
    cache_salt: Any = None
    priority: Any = None
    request_id: Any = None

    content_parts: Unsupported = None
    ec_transfer_params: Unsupported = None
    features: Unsupported = None
    kv_transfer_params: Unsupported = None

    @model_validator(mode="after")
    def _all_are_known(self) -> TokensRequest:
        known = CompletionRequest.model_fields.keys() - _OWN | _SETTLED
        unknown = next((name for name, value in self.sampling_params.items()
                        if value is not None and name not in known), None)  # fmt: skip
        if unknown is not None:
            raise ValueError(f"'sampling_params' has {unknown[:64]!r}, which this server does not support")
        return self


class TokensCompletion(CompletionRequest):
    """A completion that came as POST /inference/v1/generate: without a limit it has all the room that there is."""

    @property
    def prompt_field(self) -> str:
        """Where the prompt is."""
        return "token_ids"

    @property
    def token_limit(self) -> int | None:
        """Wanted tokens; None when no number was given."""
        return self.max_tokens

    @property
    def token_limit_field(self) -> str:
        """The name under which the limit is given."""
        return "max_tokens"


_NAMES = {"prompt": "token_ids"}


def as_completion(wanted: TokensRequest) -> TokensCompletion:
    """The completion that says the same.

    Raises:
        ApiError: a value that no completion may have.
    """
    asked = {name: value for name, value in wanted.sampling_params.items() if name not in _SETTLED}
    fields: dict[str, Any] = {
        **asked,
        "model": wanted.model,
        "prompt": wanted.token_ids,
        "stream": wanted.stream,
        "stream_options": wanted.stream_options,
        "cache_salt": wanted.cache_salt,
        "priority": wanted.priority,
        "request_id": wanted.request_id,
        "return_token_ids": True,
        # Text is made where a stop string is looked for in it, and shown nowhere.
        "detokenize": None if asked.get("stop") else False,
        "return_tokens_as_token_ids": True,
    }
    try:
        return TokensCompletion.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise from_validation(problems, _NAMES) from None
