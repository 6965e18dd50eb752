"""Request bodies of the OpenAI API as pydantic models. Pure.

Types are strict ("5" is no integer) and null means "not given", as OpenAI has it. Unknown fields are ignored;
fields that are known to change the answer, and that this server cannot honour, are refused rather than
ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 64
MAX_MESSAGES = 4096

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(BaseModel):
    """``stream_options``: whether a last chunk carries the usage."""

    model_config = _STRICT
    include_usage: bool | None = None


class Message(BaseModel):
    """One chat message; fields beyond these reach the chat template untouched."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts: list[str] = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
                raise ValueError("only content parts of type 'text' are supported by this model")
            text = part.get(part["type"])
            if not isinstance(text, str):
                raise ValueError("a content part of type 'text' needs a string field 'text'")
            texts.append(text)
        return "".join(texts)


class GenerationRequest(BaseModel):
    """What chat and plain completions share."""

    model_config = _STRICT

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    ignore_eos: bool | None = None
    stop: list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None

    best_of: Any = None
    logit_bias: Any = None
    response_format: Any = None

    @field_validator("stop", mode="before")
    @classmethod
    def _list_stops(cls, stop: Any) -> Any:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list):
            return stops
        if len(stops) > MAX_STOPS:
            raise ValueError(f"{len(stops)} stop strings were given; at most {MAX_STOPS} are allowed")
        for text in stops:
            if isinstance(text, str) and not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise ValueError(
                    f"a stop string needs 1 to {MAX_STOP_CHARACTERS} characters; found {len(text)}"
                )
        return stops

    @field_validator("stop_token_ids", mode="after")
    @classmethod
    def _few_stop_tokens(cls, ids: list[int] | None) -> list[int] | None:
        if ids is not None and len(ids) > MAX_STOPS:
            raise ValueError(f"{len(ids)} stop tokens were given; at most {MAX_STOPS} are allowed")
        return ids

    @field_validator("logit_bias", "response_format", mode="after")
    @classmethod
    def _unsupported(cls, value: Any) -> Any:
        plain_text = isinstance(value, dict) and value.get("type") == "text"
        if value and not plain_text:
            raise ValueError("this server does not support it; leave it out")
        return None

    @model_validator(mode="after")
    def _agree(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' is only allowed when 'stream' is true")
        if self.best_of is not None and self.best_of != self.choices:
            raise ValueError("'best_of' other than 'n' is not supported; leave it out")
        return self

    @property
    def choices(self) -> int:
        """Choices wanted for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    functions: Any = None

    @field_validator("tools", "functions", mode="after")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value:
            raise ValueError("this server does not support tools; leave it out")
        return None

    @model_validator(mode="after")
    def _agree_on_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("'top_logprobs' needs 'logprobs': true")
        return self

    @property
    def prompt_field(self) -> str:
        """Where the prompt is."""
        return "messages"

    @property
    def token_limit(self) -> int | None:
        """Wanted completion tokens, under either of OpenAI's two names; None when neither was given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_field(self) -> str:
        """The name under which the limit was given."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def top_count(self) -> int:
        """Alternatives reported for each token; -1 when no log-probabilities are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else -1


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Any = None

    @field_validator("prompt", mode="after")
    @classmethod
    def _known_prompt(cls, prompt: Any) -> list[str] | list[list[int]]:
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if all(type(item) is int for item in prompt):
                return [prompt]
            if len(prompt) > MAX_PROMPTS:
                raise ValueError(
                    f"{len(prompt)} prompts were given; at most {MAX_PROMPTS} fit in one request"
                )
            if all(isinstance(item, str) for item in prompt):
                return prompt
            if all(isinstance(item, list) and item and all(type(i) is int for i in item) for item in prompt):
                return prompt
        raise ValueError(
            "need a string, a list of strings, a list of token ids, or a list of lists of token ids"
        )

    @field_validator("echo", "suffix", mode="after")
    @classmethod
    def _not_here(cls, value: Any) -> Any:
        if value:
            raise ValueError("this server does not support it; leave it out")
        return None

    @property
    def prompt_field(self) -> str:
        """Where the prompt is."""
        return "prompt"

    @property
    def token_limit(self) -> int:
        """Wanted completion tokens; OpenAI's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def token_limit_field(self) -> str:
        """The name under which the limit is given."""
        return "max_tokens"

    @property
    def top_count(self) -> int:
        """Alternatives reported for each token; -1 when no log-probabilities are wanted."""
        return -1 if self.logprobs is None else self.logprobs
