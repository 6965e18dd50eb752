"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and the chat request that they come down to. Pure.

The shapes are Anthropic's. What comes from its side of a conversation and means nothing to these models (reasoning of
earlier turns, marks for its cache) is left out; what would change the answer and cannot be honoured is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from eaas.gateway.errors import from_validation
from eaas.gateway.schema import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, ChatRequest, Unsupported

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

Blocks = str | list[dict[str, Any]]


class Turn(BaseModel):
    """One of ``messages``."""

    model_config = _STRICT
    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesTool(BaseModel):
    """One of ``tools``: a function of the client's. Tools that a server would run are refused."""

    model_config = _STRICT
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class MessagesToolChoice(BaseModel):
    """``tool_choice``."""

    model_config = _STRICT
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(BaseModel):
    """``output_config.format``: what the answer must be."""

    model_config = _STRICT
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """``output_config``; the effort reaches the chat template."""

    model_config = _STRICT
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(BaseModel):
    """Body of POST /v1/messages/count_tokens: whatever is part of the prompt."""

    model_config = _STRICT

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Blocks | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    @field_validator("thinking", mode="after")
    @classmethod
    def _none_is_shown(cls, value: dict[str, Any] | None) -> None:
        # "adaptive" leaves it to the model how much it thinks: these do not.
        if value is not None and value.get("type") not in ("disabled", "adaptive"):
            raise ValueError("this model does not think aloud; leave it out, or use type 'disabled'")


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    # As in a chat request, which judges them.
    cache_salt: Any = None
    eaas_drop_lost_experts: Any = None
    priority: Any = None
    seed: Any = None
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None

    container: Unsupported = None
    context_management: Unsupported = None
    ec_transfer_params: Unsupported = None
    kv_transfer_params: Unsupported = None
    mcp_servers: Unsupported = None
    mm_payload: Unsupported = None
    return_mm_kwargs: Unsupported = None
    vllm_xargs: Unsupported = None
    watermarking: Unsupported = None


_PASSED_ON = ("cache_salt", "eaas_drop_lost_experts", "max_tokens", "priority", "seed", "stream", "temperature",
              "top_k", "top_p")  # fmt: skip
_NAMES = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}


def as_chat(wanted: CountTokensRequest) -> ChatRequest:
    """The chat request that says the same.

    Raises:
        ApiError: a content block that is not known, or a value that no chat request may have.
    """
    try:
        messages = _messages(wanted)
    except ValueError as error:
        raise from_validation([{"type": "value_error", "loc": ("messages",), "msg": str(error)}]) from None
    choice, output = wanted.tool_choice, wanted.output_config
    fields: dict[str, Any] = {
        "model": wanted.model,
        "messages": messages,
        "tools": [_tool(tool) for tool in wanted.tools or ()] or None,
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
        "response_format": None if output is None or output.format is None else _schema(output.format),
        "reasoning_effort": None if output is None else output.effort,
        "chat_template_kwargs": wanted.chat_template_kwargs,
    }
    if isinstance(wanted, MessagesRequest):
        fields |= {name: getattr(wanted, name) for name in _PASSED_ON}
        fields["stop"] = wanted.stop_sequences
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise from_validation(problems, _NAMES) from None


def _messages(wanted: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if wanted.system is not None:
        messages.append({"role": "system", "content": _text(wanted.system, "system")})
    for number, turn in enumerate(wanted.messages):
        where = f"message {number}"
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
            continue
        calls = [_call(block, where) for block in turn.content if block.get("type") == "tool_use"]
        results = [block for block in turn.content if block.get("type") == "tool_result"]
        rest = [block for block in turn.content if block.get("type") not in ("tool_use", "tool_result")]
        messages += [_result(block, where) for block in results]
        if calls:
            said = _text(rest, where)
            messages.append({"role": turn.role, "content": said or None, "tool_calls": calls})
        elif rest or not results:
            messages.append({"role": turn.role, "content": _text(rest, where)})
    return messages


def _text(content: Blocks, where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for block in content:
        kind = block.get("type")
        if kind in ("thinking", "redacted_thinking"):
            continue
        if kind != "text":
            raise ValueError(
                f"{where} has a block of type {str(kind)[:64]!r}; this model takes 'text', 'tool_use' and 'tool_result'"
            )
        texts.append(_string(block, "text", where))
    return "".join(texts)


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise ValueError(f"{where} has a tool_use block whose 'input' is no object")
    function = {"name": _string(block, "name", where), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    if content is not None and not isinstance(content, str | list):
        raise ValueError(f"{where} has a tool_result block whose 'content' is neither text nor blocks")
    return {
        "role": "tool",
        "tool_call_id": _string(block, "tool_use_id", where),
        "content": _text(content or "", where),
    }


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{where} has a {block.get('type')} block without a string field '{name}'")
    return value


def _tool(tool: MessagesTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _choice(choice: MessagesToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _schema(given: OutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.schema_}}
