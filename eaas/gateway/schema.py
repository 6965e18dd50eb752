"""Request bodies of the OpenAI API as pydantic models. Pure.

Types are strict ("5" is no integer) and null means "not given", as OpenAI has it. Unknown fields are ignored;
fields that are known to change the answer, and that this server cannot honour, are refused rather than
ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from eaas.gateway.constraints import ConstrainedRequest, LogprobCount
from eaas.worker.protocol import MAX_BAD

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_PROMPTS = 64
MAX_MESSAGES = 4096
# Each is up to two sequences of tokens.
MAX_BAD_WORDS = MAX_BAD // 2
MAX_TOOLS = 128

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


# The largest that models come with have some 20,000 characters.
ChatTemplateSource = Annotated[str, Field(min_length=1, max_length=1 << 16)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]


def _only(*defaults: Any) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if value is not None and not any(value == known and type(value) is type(known) for known in defaults):
            raise ValueError("this server does not support it; leave it out")

    return check


# Types of fields that may be left out, null, or what the name says.
Unsupported = Annotated[Any, AfterValidator(_only(False, [], {}, ""))]
OnlyOne = Annotated[Any, AfterValidator(_only(1, 1.0))]
OnlyTrue = Annotated[Any, AfterValidator(_only(True))]


class StreamOptions(BaseModel):
    """``stream_options``: whether a last chunk carries the usage, or each."""

    model_config = _STRICT
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


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

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        # An assistant's turn may be its tool calls alone.
        if self.content is None and self.role in ("developer", "system", "tool", "user"):
            raise ValueError(f"a message of role '{self.role}' needs 'content'")
        return self


class Function(BaseModel):
    """What a tool of type "function" does; ``parameters`` is a JSON schema of an object."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    name: Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """One of ``tools``; fields beyond these reach the chat template untouched."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    type: Literal["function"]
    function: Function


class GenerationRequest(ConstrainedRequest):
    """What chat and plain completions share."""

    model_config = _STRICT

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    ignore_eos: bool | None = None
    stop: list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None
    eaas_drop_lost_experts: bool | None = None
    # Requests of different salts share no KV blocks.
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    # The lower, the earlier.
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    skip_special_tokens: bool | None = None
    # False: token ids alone are told.
    detokenize: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] | None = None

    best_of: Any = None
    ec_transfer_params: Unsupported = None
    kv_transfer_params: Unsupported = None
    length_penalty: OnlyOne = None
    logits_processors: Unsupported = None
    logprob_token_ids: Unsupported = None
    mm_payload: Unsupported = None
    prompt_embeds: Unsupported = None
    repetition_detection: Unsupported = None
    return_mm_kwargs: Unsupported = None
    return_token_offsets: Unsupported = None
    return_weight_versions: Unsupported = None
    routed_experts: Unsupported = None
    spaces_between_special_tokens: OnlyTrue = None
    thinking_token_budget: Unsupported = None
    use_beam_search: Unsupported = None
    vllm_xargs: Unsupported = None
    watermarking: Unsupported = None

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

    @model_validator(mode="after")
    def _agree(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' is only allowed when 'stream' is true")
        if self.detokenize is False and (self.stop or getattr(self, "tools", None)):
            raise ValueError(
                "'detokenize' of false cannot be with 'stop' or 'tools', which are looked for in the text"
            )
        if self.best_of is not None and self.best_of != self.choices:
            raise ValueError("'best_of' other than 'n' is not supported; leave it out")
        return self

    @property
    def echo_count(self) -> int:
        """Alternatives reported for each token of a prompt that is shown first; -1: none are."""
        return -1

    def cut(self, prompt: list[int], context: int) -> list[int]:
        """The prompt's tokens, as many as `truncate_prompt_tokens` says: the last ones, or the first.

        Args:
            context: Tokens that fit in the context, less one, which -1 stands for.
        """
        most = self.truncate_prompt_tokens
        if most is None:
            return prompt
        most = context - 1 if most < 0 else most
        return prompt[:most] if self.truncation_side == "right" else prompt[max(0, len(prompt) - most) :]

    @property
    def choices(self) -> int:
        """Choices wanted for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_stats(self) -> bool:
        """Whether every chunk of the stream has the usage of its choice so far."""
        return (
            self.stream_options is not None
            and self.include_usage
            and bool(self.stream_options.continuous_usage_stats)
        )


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    add_special_tokens: bool | None = None
    chat_template: ChatTemplateSource | None = None
    documents: Unsupported = None
    echo: bool | None = None
    include_reasoning: Any = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    return_prompt_text: Unsupported = None
    web_search_options: Unsupported = None

    @field_validator("functions", "function_call", mode="after")
    @classmethod
    def _no_functions(cls, value: Any) -> Any:
        if value:
            raise ValueError("it is deprecated and not supported; use 'tools' and 'tool_choice'")
        return None

    @field_validator("modalities", "audio", mode="after")
    @classmethod
    def _text_alone(cls, value: Any) -> Any:
        if value and value != ["text"]:
            raise ValueError("this model answers with text alone; leave it out")
        return None

    @model_validator(mode="after")
    def _agree_on_the_turn(self) -> ChatRequest:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("'add_generation_prompt' and 'continue_final_message' exclude each other")
        return self

    @model_validator(mode="after")
    def _agree_on_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("'top_logprobs' needs 'logprobs': true")
        return self

    @property
    def begins_turn(self) -> bool:
        """Whether the assistant's turn is opened for it, rather than the last message gone on with."""
        begins = self.add_generation_prompt
        return not self.continue_final_message if begins is None else begins

    @property
    def tool_dicts(self) -> list[dict[str, Any]]:
        """The tools as the client gave them."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]

    @property
    def template_options(self) -> dict[str, Any]:
        """More names for the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

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


def _all_ids(items: list[Any]) -> bool:
    # JSON's true is an integer to isinstance. There may be a million of them, so no Python runs for each.
    return set(map(type, items)) == {int}


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: Any = None

    @field_validator("prompt", mode="after")
    @classmethod
    def _known_prompt(cls, prompt: Any) -> list[str] | list[list[int]]:
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if _all_ids(prompt):
                return [prompt]
            if len(prompt) > MAX_PROMPTS:
                raise ValueError(
                    f"{len(prompt)} prompts were given; at most {MAX_PROMPTS} fit in one request"
                )
            if all(isinstance(item, str) for item in prompt):
                return prompt
            if all(isinstance(item, list) and item and _all_ids(item) for item in prompt):
                return prompt
        raise ValueError(
            "need a string, a list of strings, a list of token ids, or a list of lists of token ids"
        )

    @model_validator(mode="after")
    def _says_something(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("'max_tokens' of 0 needs 'echo': true; else there is nothing to answer with")
        return self

    @field_validator("suffix", mode="after")
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
    def token_limit(self) -> int | None:
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

    @property
    def echo_count(self) -> int:
        """The same for each token of the prompt that is shown first."""
        return self.top_count if self.echo else -1
