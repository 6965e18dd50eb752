"""Body of POST /v1/responses, and the chat request that it comes down to. Pure.

Nothing is stored: what refers to a stored response, conversation, prompt or file is refused, and ``store`` is taken and
answered with false, as OpenAI does for organisations that keep nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from eaas.gateway.constraints import LogprobCount
from eaas.gateway.errors import from_validation
from eaas.gateway.schema import MAX_MESSAGES, MAX_TOOLS, ChatRequest, Function, Unsupported

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text")
LOGPROBS = "message.output_text.logprobs"


class TextFormat(BaseModel):
    """``text.format``: a JSON schema stands beside its name here, not under "json_schema"."""

    model_config = _STRICT
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class Text(BaseModel):
    """``text``."""

    model_config = _STRICT
    format: TextFormat | None = None


class Reasoning(BaseModel):
    """``reasoning``; the effort reaches the chat template."""

    model_config = _STRICT
    effort: str | None = None


class FunctionTool(Function):
    """One of ``tools``: a function, flat."""

    type: Literal["function"]
    strict: bool | None = None


class ResponsesRequest(BaseModel):
    """Body of POST /v1/responses."""

    model_config = _STRICT

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_logprobs: LogprobCount | None = None
    include: list[str] | None = None
    text: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    eaas_drop_lost_experts: bool | None = None
    # As in a chat request, which judges them.
    cache_salt: Any = None
    frequency_penalty: Any = None
    ignore_eos: Any = None
    include_stop_str_in_output: Any = None
    logit_bias: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    priority: Any = None
    repetition_penalty: Any = None
    request_id: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    structured_outputs: Any = None
    top_k: Any = None

    access_programs: Unsupported = None
    context_management: Unsupported = None
    ec_transfer_params: Unsupported = None
    enable_response_messages: Unsupported = None
    image: Unsupported = None
    include_reasoning: Any = None
    kv_transfer_params: Unsupported = None
    mm_payload: Unsupported = None
    moderation: Unsupported = None
    previous_input_messages: Unsupported = None
    return_mm_kwargs: Unsupported = None
    vllm_xargs: Unsupported = None
    watermarking: Unsupported = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @field_validator("previous_response_id", "conversation", "prompt", mode="after")
    @classmethod
    def _stateless(cls, value: Any) -> None:
        if value is not None:
            raise ValueError(
                "this server stores no responses, conversations or prompts; send the whole input with each request"
            )

    @field_validator("background", mode="after")
    @classmethod
    def _foreground(cls, value: bool | None) -> None:
        if value:
            raise ValueError(
                "this server stores no responses to be fetched later; leave it out, or use 'stream'"
            )

    @field_validator("truncation", mode="after")
    @classmethod
    def _whole(cls, value: str | None) -> str | None:
        if value == "auto":
            raise ValueError("this server drops nothing from an input that is too long; use 'disabled'")
        return value

    @field_validator("include", mode="after")
    @classmethod
    def _known(cls, value: list[str] | None) -> list[str] | None:
        # A client that is to carry its own state asks for this; there is no reasoning here to encrypt.
        unknown = [name for name in value or () if name not in (LOGPROBS, "reasoning.encrypted_content")]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not supported; only {LOGPROBS!r} is")
        return value

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are part of the answer."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


class ResponsesChat(ChatRequest):
    """A chat request that came as POST /v1/responses: its errors name the fields that the client wrote."""

    @property
    def prompt_field(self) -> str:
        """Where the prompt is."""
        return "input"

    @property
    def max_output_tokens(self) -> int | None:
        """The limit under the client's name for it."""
        return self.max_completion_tokens

    @property
    def token_limit_field(self) -> str:
        """The name under which the limit is given."""
        return "max_output_tokens"


_PASSED_ON = (
    "cache_salt", "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "logit_bias", "min_p",
    "presence_penalty", "priority", "repetition_penalty", "request_id", "skip_special_tokens",
    "spaces_between_special_tokens", "stop", "stop_token_ids", "structured_outputs", "top_k",
)  # fmt: skip
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


def as_chat(wanted: ResponsesRequest) -> ResponsesChat:
    """The chat request that says the same.

    Raises:
        ApiError: an input item that is not known, or a value that no chat request may have.
    """
    try:
        messages = _messages(wanted)
        if len(messages) > MAX_MESSAGES:
            raise ValueError(f"{len(messages)} items were given; at most {MAX_MESSAGES} are allowed")
    except ValueError as error:
        raise from_validation([{"type": "value_error", "loc": ("input",), "msg": str(error)}]) from None
    fields: dict[str, Any] = {
        "model": wanted.model,
        "messages": messages,
        "max_completion_tokens": wanted.max_output_tokens,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "seed": wanted.seed,
        "stream": wanted.stream,
        "parallel_tool_calls": wanted.parallel_tool_calls,
        "chat_template_kwargs": wanted.chat_template_kwargs,
        "eaas_drop_lost_experts": wanted.eaas_drop_lost_experts,
        **{name: getattr(wanted, name) for name in _PASSED_ON},
        "tools": [_tool(tool) for tool in wanted.tools or ()] or None,
        "tool_choice": _choice(wanted.tool_choice),
        "response_format": _response_format(wanted.text),
        "reasoning_effort": wanted.reasoning.effort if wanted.reasoning else None,
    }
    if wanted.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": wanted.top_logprobs or 0}
    try:
        return ResponsesChat.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise from_validation(problems, _NAMES) from None


def _messages(wanted: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if wanted.instructions is not None:
        messages.append({"role": "system", "content": wanted.instructions})
    if isinstance(wanted.input, str):
        return [*messages, {"role": "user", "content": wanted.input}]
    for number, item in enumerate(wanted.input):
        _add(messages, item, number)
    if not messages:
        raise ValueError("it is empty; send a text, or at least one item")
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], number: int) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _text(item.get("content"), number)})
    elif kind == "function_call":
        call = {
            "id": _string(item, "call_id", number),
            "type": "function",
            "function": {
                "name": _string(item, "name", number),
                "arguments": _string(item, "arguments", number),
            },
        }
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant":
            last = {"role": "assistant", "content": None}
            messages.append(last)
        # Several calls, and the words before them, are one turn.
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _text(item.get("output"), number)
        messages.append(
            {"role": "tool", "tool_call_id": _string(item, "call_id", number), "content": content}
        )
    elif kind != "reasoning":
        # Reasoning of earlier turns is no input to these models: their templates leave it out.
        raise ValueError(
            f"item {number} is of type {str(kind)[:64]!r}; 'message', 'function_call' and 'function_call_output' are "
            "supported"
        )


def _string(item: dict[str, Any], name: str, number: int) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ValueError(f"item {number} needs a string field '{name}'")
    return value


def _text(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"item {number} needs text, or a list of content parts")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise ValueError(f"item {number} has a content part that is no text; this model takes text alone")
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            raise ValueError(f"item {number} has a content part without a string field 'text'")
        texts.append(text)
    return "".join(texts)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(exclude_unset=True)
    return {"type": function.pop("type"), "function": function}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        nested = [{"function": tool} for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": nested}}
    return choice


def _response_format(text: Text | None) -> dict[str, Any] | None:
    given = text.format if text else None
    if given is None:
        return None
    if given.type != "json_schema":
        return {"type": given.type}
    schema = {"name": given.name or "response", "schema": given.schema_, "strict": given.strict}
    return {"type": "json_schema", "json_schema": {k: v for k, v in schema.items() if v is not None}}
