"""POST /v1/messages and /v1/messages/count_tokens, for clients of Anthropic's API: the request bodies, the chat request
that they come down to; the message, the published events of its stream, errors.

What comes from Anthropic's side of a conversation and means nothing to these models (reasoning of earlier turns, marks
for its cache) is left out; what would change the answer and cannot be honored is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from eaas.gateway.constraints import Strict
from eaas.gateway.errors import OVERLOADED, ErrorReply, checked, wrong_field
from eaas.gateway.formats import Delta, Ending, TranscriptFormat, Usage, named_event
from eaas.gateway.output_reader import CallBegun, Part, Reading, Thought
from eaas.gateway.schema import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, ChatRequest, more_fields

PATH = "/v1/messages"

Blocks = str | list[dict[str, Any]]


class Turn(Strict):
    """One of ``messages``."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesTool(Strict):
    """One of ``tools``: a function of the client's. Tools that a server would run are refused."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class MessagesToolChoice(Strict):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Strict):
    """``output_config.format``: what the answer must be."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """``output_config``; the effort reaches the chat template."""

    effort: str | None = None
    format: OutputFormat | None = None


class Thinking(Strict):
    """``thinking``; how much a model thinks, it decides itself."""

    type: Literal["enabled", "disabled", "adaptive"]


class CountTokensRequest(Strict):
    """Body of POST /v1/messages/count_tokens: whatever is part of the prompt."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Blocks | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: Thinking | None = None


_AS_IN_A_CHAT = (
    "cache_salt", "eaas_drop_lost_experts", "priority", "seed", "stream", "temperature", "top_k", "top_p",
)  # fmt: skip


@more_fields(
    taken=_AS_IN_A_CHAT,
    refused=(
        "container", "context_management", "ec_transfer_params", "force_routed_experts", "kv_transfer_params",
        "mcp_servers", "mm_payload", "return_mm_kwargs", "return_routed_experts", "vllm_xargs", "watermarking",
    ),
)  # fmt: skip
class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None


# By the chat request's name of a field.
_NAMES = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}


def as_chat(given: CountTokensRequest) -> ChatRequest:
    """The chat request that says the same. Raises ApiError: a content block that is not known, or a value that no chat
    request may have."""
    try:
        messages = _messages(given)
    except ValueError as error:
        raise wrong_field("messages", str(error)) from None
    choice, output = given.tool_choice, given.output_config
    kind = given.thinking.type if given.thinking is not None else "adaptive"
    # What Qwen's and GLM's templates, and DeepSeek's, call it.
    thinks = {} if kind == "adaptive" else dict.fromkeys(("enable_thinking", "thinking"), kind == "enabled")
    fields: dict[str, Any] = {
        "model": given.model,
        "messages": messages,
        "tools": [_tool(tool) for tool in given.tools or ()] or None,
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
        "reasoning_effort": None if output is None else output.effort,
        "chat_template_kwargs": {**thinks, **(given.chat_template_kwargs or {})} or None,
    }
    if output is not None and output.format is not None:
        schema = {"name": "answer", "schema": output.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(given, MessagesRequest):
        fields |= {name: getattr(given, name) for name in (*_AS_IN_A_CHAT, "max_tokens")}
        fields["stop"] = given.stop_sequences
    return checked(ChatRequest, fields, _NAMES)


def _messages(given: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if given.system is not None:
        messages.append({"role": "system", "content": _text(given.system, "system")})
    for number, turn in enumerate(given.messages):
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
    call = _string(block, "tool_use_id", where)
    return {"role": "tool", "tool_call_id": call, "content": _text(content or "", where)}


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
    return "required" if choice.type == "any" else choice.type


# By finish_reason; of a message that an operator aborted there is no word for why.
_STOP_REASONS = {"length": "max_tokens", "abort": None}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def body_for(path: str, reply: ErrorReply) -> bytes:
    """A failure in the shape that clients of this path know."""
    return error_body(reply) if path == PATH or path.startswith(f"{PATH}/") else reply.body()


def error_body(reply: ErrorReply) -> bytes:
    """A failure in Anthropic's shape."""
    other = "invalid_request_error" if reply.status < 500 else "api_error"
    other = "overloaded_error" if reply.kind == OVERLOADED else other
    kind = _ERROR_TYPES.get(reply.status, other)
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": reply.message}})


class MessagesFormat(TranscriptFormat):
    """The shapes of one request's message; its items are content blocks."""

    prefix = "msg_"

    def __init__(self, reading: Reading | None, prompt_tokens: int) -> None:
        super().__init__(reading)
        self._prompt_tokens = prompt_tokens
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def whole(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": self.items,
            **self._stop,
            **self.head.marks,
            "usage": _usage(usage),
        }

    def first(self, index: int) -> bytes:
        usage = Usage(prompt=self._prompt_tokens, completion=0)
        return named_event("message_start", {"message": self.whole(usage)})

    def event(self, delta: Delta) -> bytes:
        """The events of one piece of text, or none yet; and those that end the last block."""
        said, rest = self.parts(delta)
        events = b"".join(map(self._part, said + rest))
        return events if delta.ending is None else events + self._finish(delta.ending)

    def _finish(self, ending: Ending) -> bytes:
        called = self.reader is not None and self.reader.calls
        reason = _STOP_REASONS.get(ending.reason, "tool_use" if called else "end_turn")
        if isinstance(ending.stop, str):
            self._stop["stop_sequence"], reason = ending.stop, "stop_sequence"
        self._stop["stop_reason"] = reason
        return self._close()

    def end(self, usage: Usage) -> bytes:
        delta = {"delta": self._stop, **self.head.marks, "usage": _usage(usage)}
        return named_event("message_delta", delta) + named_event("message_stop", {})

    def failure(self, reply: ErrorReply) -> bytes:
        return b"event: error\ndata: " + error_body(reply) + b"\n\n"

    def _part(self, part: Part) -> bytes:
        if isinstance(part, CallBegun):
            call = {"id": self.call_id(part), "name": part.name, "input": {}}
            return self._begin({"type": "tool_use", **call})
        if isinstance(part, Thought):
            begins = {"type": "thinking", "thinking": "", "signature": ""}
            begun = b"" if self.open == "thinking" else self._begin(begins)
            return begun + self._delta({"type": "thinking_delta", "thinking": part.text}, part.text)
        if not isinstance(part, str):
            return self._delta({"type": "input_json_delta", "partial_json": part.text}, part.text)
        if not part or self.between_items(part, "text"):
            return b""
        begun = b"" if self.open == "text" else self._begin({"type": "text", "text": ""})
        return begun + self._delta({"type": "text_delta", "text": part}, part)

    def _begin(self, block: dict[str, Any]) -> bytes:
        events = self._close()
        self.items.append(block)
        self.open = block["type"]
        place = {"index": len(self.items) - 1}
        return events + named_event("content_block_start", {**place, "content_block": block})

    def _delta(self, delta: dict[str, str], piece: str) -> bytes:
        self.pieces.append(piece)
        return named_event("content_block_delta", {"index": len(self.items) - 1, "delta": delta})

    def _close(self) -> bytes:
        if not self.open:
            return b""
        whole = "".join(self.pieces)
        if self.open in ("text", "thinking"):
            self.items[-1][self.open] = whole
        else:
            self.items[-1]["input"] = _object(whole)
        self.open, self.pieces = "", []
        return named_event("content_block_stop", {"index": len(self.items) - 1})


def _object(written: str) -> dict[str, Any]:
    """The arguments of a call; those that were cut off, or are no object, have no place in a message."""
    try:
        read = msgspec.json.decode(written) if written else {}
    except msgspec.DecodeError:
        return {}
    return read if isinstance(read, dict) else {}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": usage.completion,
    }
