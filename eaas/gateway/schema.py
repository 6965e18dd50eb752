"""Request bodies of the OpenAI API as pydantic models. Pure.

Fields that are known to change the answer, and that this server cannot honor, are refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, create_model, field_validator, model_validator

from eaas.gateway.constraints import ConstrainedRequest, LogprobCount, Strict, TokenId
from eaas.gateway.errors import checked
from eaas.worker.protocol import MAX_BAD

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_PROMPTS = 64
MAX_MESSAGES = 4096
# Each is up to two sequences of tokens.
MAX_BAD_WORDS = MAX_BAD // 2
MAX_TOOLS = 128

S = TypeVar("S", bound=Strict)

BadWord = Annotated[str, Field(min_length=1, max_length=256)]
# What a field may say that asks for nothing.
_NOTHING = (False, [], {}, "")
_FALSE = (*_NOTHING, 0, 0.0)


def only(*values: Any, because: str = "this server does not support it; leave it out") -> AfterValidator:
    """The check of a field that may be left out, null, or have one of these values; none of them means anything."""

    def check(value: Any) -> None:
        if value is not None and not any(value == known and type(value) is type(known) for known in values):
            raise ValueError(because)

    return AfterValidator(check)


Unsupported = Annotated[Any, only(*_NOTHING)]


def more_fields(*, taken: Sequence[str] = (), refused: Sequence[str] = ()) -> Callable[[type[S]], type[S]]:
    """Fields of a request body that need no type of their own, each of which may be left out.
    Args: taken: those that another request, which this one comes down to, has and judges. refused: those that this
    server does not support."""
    fields: dict[str, Any] = {**dict.fromkeys(taken, (Any, None)), **dict.fromkeys(refused, (Unsupported, None))}

    def extended(body: type[S]) -> type[S]:
        return create_model(body.__name__, __base__=body, __doc__=body.__doc__, __module__=body.__module__, **fields)

    return extended


class StreamOptions(Strict):
    """``stream_options``: whether a last chunk carries the usage, or each."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Message(Strict, extra="allow"):
    """One chat message; fields beyond these reach the chat template untouched."""

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


class Function(Strict, extra="allow"):
    """What a tool of type "function" does; ``parameters`` is a JSON schema of an object."""

    name: Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Strict, extra="allow"):
    """One of ``tools``; fields beyond these reach the chat template untouched."""

    type: Literal["function"]
    function: Function


class Conversation(Strict):
    """What a chat and the counting of its tokens share: how messages become a prompt."""

    prompt_field: ClassVar[str] = "messages"  # where they are, for an error

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # A chat template mostly writes the special tokens itself.
    add_special_tokens: bool | None = None
    # The largest that models come with have some 20,000 characters.
    chat_template: Annotated[str, Field(min_length=1, max_length=1 << 16)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _agree_on_the_turn(self) -> Conversation:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("'add_generation_prompt' and 'continue_final_message' exclude each other")
        return self

    @property
    def begins_turn(self) -> bool:
        """Whether the assistant's turn is opened for it, rather than the last message gone on with."""
        begins = self.add_generation_prompt
        return not self.continue_final_message if begins is None else begins

    @property
    def template_options(self) -> dict[str, Any]:
        """More names for the chat template."""
        return self.chat_template_kwargs or {}

    @property
    def tool_dicts(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]


@more_fields(
    refused=(
        "ec_transfer_params", "kv_transfer_params", "logits_processors", "logprob_token_ids", "mm_payload",
        "prompt_embeds", "repetition_detection", "return_mm_kwargs", "return_token_offsets", "return_weight_versions",
        "routed_experts", "thinking_token_budget", "use_beam_search", "vllm_xargs", "watermarking",
    )
)  # fmt: skip
class GenerationRequest(ConstrainedRequest):
    """What chat and plain completions share."""

    prompt_field: ClassVar[str]  # where the prompt is
    default_limit: ClassVar[int | None] = None  # of tokens; None: all that there is room for

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
    stop: list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
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
    # As an answer's `routed_experts`.
    force_routed_experts: str | None = None

    best_of: Any = None
    length_penalty: Annotated[Any, only(1, 1.0)] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None

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
                raise ValueError(f"a stop string needs 1 to {MAX_STOP_CHARACTERS} characters; found {len(text)}")
        return stops

    @field_validator("stop_token_ids", mode="after")
    @classmethod
    def _few_stop_tokens(cls, ids: list[int] | None) -> list[int] | None:
        if ids is not None and len(ids) > MAX_STOPS:
            raise ValueError(f"{len(ids)} stop tokens were given; at most {MAX_STOPS} are allowed")
        return ids

    @model_validator(mode="after")
    def _agree(self) -> GenerationRequest:
        rules = (
            (self.stream and self.prompt_logprobs is not None,
             "'prompt_logprobs' needs 'stream': false: it is part of a whole answer"),
            (self.stream and self.return_routed_experts,
             "'return_routed_experts' needs 'stream': false: it is part of a whole answer"),
            (self.stream_options is not None and not self.stream,
             "'stream_options' is only allowed when 'stream' is true"),
            (self.detokenize is False and (self.stop or getattr(self, "tools", None)),
             "'detokenize' of false cannot be with 'stop' or 'tools', which are looked for in the text"),
            (self.best_of is not None and self.best_of != self.choices,
             "'best_of' other than 'n' is not supported; leave it out"),
        )  # fmt: skip
        for broken, reason in rules:
            if broken:
                raise ValueError(reason)
        return self

    @property
    def token_limit(self) -> int | None:
        """Wanted tokens; None when no number was given."""
        return self.max_tokens

    @property
    def token_limit_field(self) -> str:
        """The name under which the limit is given."""
        return "max_tokens"

    @property
    def echo_count(self) -> int:
        """Alternatives reported for each token of a prompt that is shown first; -1: none are."""
        return -1

    @property
    def choices(self) -> int:
        """Choices wanted for each prompt."""
        return 1 if self.n is None else self.n


_NO_FUNCTIONS = only(*_FALSE, because="it is deprecated and not supported; use 'tools' and 'tool_choice'")
_TEXT_ALONE = only(*_FALSE, ["text"], because="this model answers with text alone; leave it out")


@more_fields(refused=("documents", "moderation", "prediction", "return_prompt_text", "web_search_options"))
class ChatRequest(GenerationRequest, Conversation):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, _NO_FUNCTIONS] = None
    function_call: Annotated[Any, _NO_FUNCTIONS] = None
    modalities: Annotated[list[str] | None, _TEXT_ALONE] = None
    audio: Annotated[Any, _TEXT_ALONE] = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _agree_on_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("'top_logprobs' needs 'logprobs': true")
        return self

    @property
    def template_options(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **super().template_options}

    @property
    def token_limit(self) -> int | None:
        """Wanted completion tokens, under either of OpenAI's two names; None when neither was given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def top_count(self) -> int:
        """Alternatives reported for each token; -1 when no log-probabilities are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else -1


class BatchChatRequest(Strict, extra="allow"):
    """Body of POST /v1/chat/completions/batch, which is vLLM's: several conversations; the other fields are those of a
    chat, and each conversation's."""

    model: str | None = None
    messages: Annotated[list[list[Any]], Field(min_length=1, max_length=MAX_PROMPTS)]

    @model_validator(mode="after")
    def _has_one_answer_each(self) -> BatchChatRequest:
        asked = self.model_extra or {}
        # What is told of one conversation, or as one goes on.
        for name in ("echo", "prompt_logprobs", "stream", "tools"):
            value = asked.get(name)
            if value is not None and value is not False and value != []:
                raise ValueError(f"'{name}' is not supported with several conversations; leave it out")
        if asked.get("n") not in (None, 1):
            raise ValueError("'n' other than 1 is not supported with several conversations; leave it out")
        return self

    def chats(self) -> list[ChatRequest]:
        """One request for each conversation. Raises ApiError: a value that no chat may have."""
        first, *others = self.messages
        chat = checked(ChatRequest, {**(self.model_extra or {}), "model": self.model, "messages": first})
        # What all share is judged once: it may be large, and nothing else is done meanwhile.
        alone = [checked(ChatRequest, {"messages": messages}) for messages in others]
        return [chat, *(chat.model_copy(update={"messages": other.messages}) for other in alone)]


def _all_ids(items: list[Any]) -> bool:
    # JSON's true is an integer to isinstance. There may be a million of them, so no Python runs for each.
    return set(map(type, items)) == {int}


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt_field = "prompt"
    default_limit = 16  # OpenAI's

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: Annotated[Any, only(*_FALSE)] = None

    @field_validator("prompt", mode="after")
    @classmethod
    def _known_prompt(cls, prompt: Any) -> list[str] | list[list[int]]:
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if _all_ids(prompt):
                return [prompt]
            if len(prompt) > MAX_PROMPTS:
                raise ValueError(f"{len(prompt)} prompts were given; at most {MAX_PROMPTS} fit in one request")
            if all(isinstance(item, str) for item in prompt):
                return prompt
            if all(isinstance(item, list) and item and _all_ids(item) for item in prompt):
                return prompt
        raise ValueError("need a string, a list of strings, a list of token ids, or a list of lists of token ids")

    @model_validator(mode="after")
    def _says_something(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("'max_tokens' of 0 needs 'echo': true; else there is nothing to answer with")
        return self

    @property
    def top_count(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def echo_count(self) -> int:
        """The same for each token of the prompt that is shown first."""
        return self.top_count if self.echo else -1
