"""POST /v1/responses: the request body, the chat request that it comes down to, the response object and the published
events of its stream, in order. Pure.

What refers to a conversation, prompt or file is refused: none of these are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, field_validator

from eaas.gateway.constraints import LogprobCount, Strict
from eaas.gateway.errors import OVERLOADED, ErrorReply, checked, wrong_field
from eaas.gateway.event_ids import Identity
from eaas.gateway.formats import Delta, Ending, ResponseHead, TranscriptFormat, Usage, error_event, named_event
from eaas.gateway.logprobs import logprob_entry
from eaas.gateway.output_reader import CallBegun, Part, Reading, Thought
from eaas.gateway.schema import MAX_MESSAGES, MAX_TOOLS, ChatRequest, Function, more_fields, only

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text")
LOGPROBS = "message.output_text.logprobs"

_encode = msgspec.json.encode


class TextFormat(Strict):
    """``text.format``: a JSON schema stands beside its name here, not under "json_schema"."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class Text(Strict):
    """``text``."""

    format: TextFormat | None = None


class Reasoning(Strict):
    """``reasoning``; the effort reaches the chat template."""

    effort: str | None = None


class FunctionTool(Function):
    """One of ``tools``: a function, flat."""

    type: Literal["function"]
    strict: bool | None = None


_NOT_STORED = only(
    because="this server keeps no conversations or prompts; send the whole input, or a 'previous_response_id'"
)
_WHOLE = only("disabled", because="this server drops nothing from an input that is too long; use 'disabled'")
_AS_IN_A_CHAT = (
    "cache_salt", "eaas_drop_lost_experts", "frequency_penalty", "ignore_eos", "include_reasoning",
    "include_stop_str_in_output", "logit_bias", "min_p", "parallel_tool_calls", "presence_penalty", "priority",
    "repetition_penalty", "request_id", "seed", "skip_special_tokens", "spaces_between_special_tokens", "stop",
    "stop_token_ids", "stream", "structured_outputs", "temperature", "top_k", "top_p",
)  # fmt: skip


@more_fields(
    taken=_AS_IN_A_CHAT,
    refused=(
        "access_programs", "context_management", "ec_transfer_params", "enable_response_messages",
        "force_routed_experts", "image", "kv_transfer_params", "mm_payload", "moderation", "previous_input_messages",
        "return_mm_kwargs", "return_routed_experts", "vllm_xargs", "watermarking",
    ),
)  # fmt: skip
class ResponsesRequest(Strict):
    """Body of POST /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: LogprobCount | None = None
    include: list[str] | None = None
    text: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[Any, _NOT_STORED] = None
    prompt: Annotated[Any, _NOT_STORED] = None
    background: bool | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, _WHOLE] = None

    @field_validator("include", mode="after")
    @classmethod
    def _known(cls, value: list[str] | None) -> list[str] | None:
        # A client that is to carry its own state asks for this; there is no reasoning here to encrypt.
        unknown = [name for name in value or () if name not in (LOGPROBS, "reasoning.encrypted_content")]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not supported; only {LOGPROBS!r} is")
        return value


class ResponsesChat(ChatRequest):
    """A chat request that came as POST /v1/responses: its errors name the fields that the client wrote."""

    prompt_field = "input"

    @property
    def token_limit_field(self) -> str:
        return "max_output_tokens"


# By the chat request's name of a field.
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


def as_chat(given: ResponsesRequest) -> ResponsesChat:
    """The chat request that says the same. Raises ApiError: an input item that is not known, or a value that no chat
    request may have."""
    try:
        messages = _messages(given)
        if len(messages) > MAX_MESSAGES:
            raise ValueError(f"{len(messages)} items were given; at most {MAX_MESSAGES} are allowed")
    except ValueError as error:
        raise wrong_field("input", str(error)) from None
    fields: dict[str, Any] = {
        **{name: getattr(given, name) for name in ("model", "chat_template_kwargs", *_AS_IN_A_CHAT)},
        "messages": messages,
        "max_completion_tokens": given.max_output_tokens,
        "tools": [_tool(tool) for tool in given.tools or ()] or None,
        "tool_choice": _choice(given.tool_choice),
        "response_format": _response_format(given.text),
        "reasoning_effort": given.reasoning.effort if given.reasoning else None,
    }
    if LOGPROBS in (given.include or ()) or given.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": given.top_logprobs or 0}
    return checked(ResponsesChat, fields, _NAMES)


def _messages(given: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if given.instructions is not None:
        messages.append({"role": "system", "content": given.instructions})
    if isinstance(given.input, str):
        return [*messages, {"role": "user", "content": given.input}]
    for number, item in enumerate(given.input):
        _add(messages, item, f"item {number}")
    if not messages:
        raise ValueError("it is empty; send a text, or at least one item")
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _text(item.get("content"), where)})
    elif kind == "function_call":
        id, name, arguments = (_string(item, field, where) for field in ("call_id", "name", "arguments"))
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant":
            last = {"role": "assistant", "content": None}
            messages.append(last)
        # Several calls, and the words before them, are one turn.
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _text(item.get("output"), where)
        call = _string(item, "call_id", where)
        messages.append({"role": "tool", "tool_call_id": call, "content": content})
    elif kind != "reasoning":
        # Reasoning of earlier turns is no input to these models: their templates leave it out.
        raise ValueError(
            f"{where} is of type {str(kind)[:64]!r}; 'message', 'function_call' and 'function_call_output' are "
            "supported"
        )


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{where} needs a string field '{name}'")
    return value


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} needs text, or a list of content parts")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise ValueError(f"{where} has a content part that is no text; this model takes text alone")
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            raise ValueError(f"{where} has a content part without a string field 'text'")
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
    if given is None or given.type != "json_schema":
        return None if given is None else {"type": given.type}
    schema = {"name": given.name or "response", "schema": given.schema_, "strict": given.strict}
    return {"type": "json_schema", "json_schema": {k: v for k, v in schema.items() if v is not None}}


_ITEM_IDS = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def input_items(given: ResponsesRequest, identity: Identity) -> list[dict[str, Any]]:
    """The input as the items in which it is kept and listed, each of which has an id. They mean the same."""
    asked = [{"role": "user", "content": given.input}] if isinstance(given.input, str) else given.input
    items: list[dict[str, Any]] = []
    for number, item in enumerate(asked):
        kind = item.get("type", "message")
        # Those of the output have the numbers from 0 on.
        own = {
            "id": identity.item_id(_ITEM_IDS.get(str(kind), "item"), -1 - number),
            "type": kind,
            "status": "completed",
        }
        items.append({**own, **item})
        if kind == "message" and isinstance(text := item.get("content"), str):
            said = item.get("role") == "assistant"
            part = {"type": "output_text", "annotations": []} if said else {"type": "input_text"}
            items[-1]["content"] = [{**part, "text": text}]
    return items


def repeated(given: ResponsesRequest, wanted: ResponsesChat) -> dict[str, Any]:
    """What a response repeats of its request, with OpenAI's defaults."""
    text = given.text.model_dump(by_alias=True, exclude_none=True) if given.text else {}
    return {
        "background": bool(given.background),
        "instructions": given.instructions,
        "max_output_tokens": given.max_output_tokens,
        "metadata": given.metadata or {},
        "parallel_tool_calls": wanted.parallel_tool_calls is not False,
        "previous_response_id": given.previous_response_id,
        "reasoning": {"effort": wanted.reasoning_effort, "summary": None},
        "store": bool(given.store or given.background),
        "temperature": 1.0 if wanted.temperature is None else wanted.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": given.tool_choice or "auto",
        "tools": [{"strict": None, **tool.model_dump(exclude_unset=True)} for tool in given.tools or ()],
        "top_logprobs": given.top_logprobs or 0,
        "top_p": 1.0 if wanted.top_p is None else wanted.top_p,
        "truncation": "disabled",
        "user": given.user,
    }


# The content of items that have one, by their types.
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
# The terminal event and the response's status, by finish_reason.
_ENDS = {"length": ("incomplete", "incomplete"), "abort": ("incomplete", "cancelled")}


class ResponsesFormat(TranscriptFormat):
    """The shapes of one request's response; its items are those of ``output``.

    A piece of text costs one fast string escape between two byte templates, as in the streams of chunks.
    """

    prefix = "resp_"

    def __init__(self, reading: Reading | None, said: Mapping[str, Any]) -> None:
        """Args: said: what the response repeats of its request."""
        super().__init__(reading)
        self._said = said
        self._sequence = 0
        self._logprobs: list[dict[str, Any]] = []  # of the open item's text
        self._status = "in_progress"
        self._end = "completed"
        self._start = b""

    def whole(self, usage: Usage | None = None, error: ErrorReply | None = None) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._said,
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.identity.created,
            "status": self._status,
            "model": self.head.model,
            "system_fingerprint": self.head.fingerprint,
            **self.head.marks,
            "output": self.items,
            "error": None if error is None else {"code": _error_code(error), "message": error.message},
            "incomplete_details": incomplete,
            "usage": None if usage is None else _usage(usage),
        }

    def queued(self, head: ResponseHead) -> dict[str, Any]:
        """The response object before anything is computed."""
        self.head, self._status = head, "queued"
        return self.whole()

    def number_from(self, number: int) -> None:
        """Its events have numbers from this one on: others were told before."""
        self._sequence = number

    def not_kept(self) -> None:
        """From now on the response says that it is not kept."""
        self._said = {**self._said, "store": False}

    def first(self, index: int) -> bytes:
        known = bool(self._sequence)
        created = b"" if known else self._event("response.created", {"response": self.whole()})
        return created + self._event("response.in_progress", {"response": self.whole()})

    def event(self, delta: Delta) -> bytes:
        """The events of one piece of text, or none yet; and those that end the last item."""
        logprobs, events = [logprob_entry(token) for token in delta.logprobs or ()], b""
        said, rest = self.parts(delta)
        for part in said:
            events += self._part(part, logprobs)
            logprobs = []
        for part in rest:
            events += self._part(part, [])
        return events if delta.ending is None else events + self._finish(delta.ending)

    def _finish(self, ending: Ending) -> bytes:
        events = b"" if self.items else self._words("", [])
        self._end, self._status = _ENDS.get(ending.reason, ("completed", "completed"))
        return events + self._close("completed" if self._status == "completed" else "incomplete")

    def end(self, usage: Usage) -> bytes:
        return self._event(f"response.{self._end}", {"response": self.whole(usage)})

    def failure(self, reply: ErrorReply) -> bytes:
        """What ends a stream that failed: the published event, and the one on which clients raise."""
        self._status = "failed"
        failed = self._event("response.failed", {"response": self.whole(error=reply)})
        return failed + error_event(reply.body())

    def _part(self, part: Part, logprobs: list[dict[str, Any]]) -> bytes:
        if isinstance(part, str):
            return b"" if self.between_items(part, "message") else self._words(part, logprobs)
        if isinstance(part, Thought):
            item = {"type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            begun = b"" if self.open == "reasoning" else self._begin("rs", item)
            return begun + self._delta(part.text)
        if isinstance(part, CallBegun):
            call = {"call_id": self.call_id(part), "name": part.name, "arguments": ""}
            return self._begin("fc", {"type": "function_call", "status": "in_progress", **call})
        return self._delta(part.text)

    def _words(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        item = {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
        events = b"" if self.open == "message" else self._begin("msg", item)
        if not text and not logprobs:
            return events
        self._logprobs += logprobs
        return events + self._delta(text, b',"logprobs":' + (_encode(logprobs) if logprobs else b"[]"))

    def _begin(self, prefix: str, item: dict[str, Any]) -> bytes:
        events = self._close("completed") if self.open else b""
        item = {"id": self.head.identity.item_id(prefix, len(self.items)), **item}
        self.items.append(item)
        self.open = item["type"]
        place = {"output_index": len(self.items) - 1}
        events += self._event("response.output_item.added", {**place, "item": item})
        if self.open in _TEXTS:
            events += self._event("response.content_part.added", {**self._place(), "part": self._content("")})
        name = f"response.{_TEXTS.get(self.open, 'function_call_arguments')}.delta"
        opening = _encode({"type": name, **self._place()})[:-1]
        self._start = b"event: " + name.encode() + b"\ndata: " + opening + b',"delta":'
        return events

    def _delta(self, text: str, more: bytes = b"") -> bytes:
        self.pieces.append(text)
        event = self._start + _encode(text) + more + b',"sequence_number":%d}\n\n' % self._sequence
        self._sequence += 1
        return event

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {**place, "content_index": 0} if self.open in _TEXTS else place

    def _content(self, text: str) -> dict[str, Any]:
        """The one part of the open item's content."""
        more = {"annotations": [], "logprobs": self._logprobs} if self.open == "message" else {}
        return {"type": _TEXTS[self.open], "text": text, **more}

    def _close(self, status: str) -> bytes:
        item, place = self.items[-1], self._place()
        whole = "".join(self.pieces)
        if self.open in _TEXTS:
            part = self._content(whole)
            item["content"] = [part]
            logprobs = {"logprobs": self._logprobs} if self.open == "message" else {}
            events = self._event(f"response.{part['type']}.done", {**place, "text": whole, **logprobs})
            events += self._event("response.content_part.done", {**place, "part": part})
        else:
            item["arguments"] = whole
            done = {**place, "name": item["name"], "arguments": whole}
            events = self._event("response.function_call_arguments.done", done)
        item["status"] = status
        self.open, self.pieces, self._logprobs = "", [], []
        done = {"output_index": place["output_index"], "item": item}
        return events + self._event("response.output_item.done", done)

    def _event(self, name: str, fields: Mapping[str, Any]) -> bytes:
        event = named_event(name, {**fields, "sequence_number": self._sequence})
        self._sequence += 1
        return event


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }


def _error_code(reply: ErrorReply) -> str:
    # OpenAI's own list of codes is closed; the error event beside it has ours.
    return "rate_limit_exceeded" if reply.kind == OVERLOADED and reply.status == 429 else "server_error"
