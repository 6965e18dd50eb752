"""Shapes of POST /v1/messages, which are Anthropic's: the message, the published events of its stream, errors. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from eaas.gateway.errors import OVERLOADED, ErrorReply
from eaas.gateway.openai_format import (
    Ending,
    FinishedChoice,
    ResponseHead,
    StreamUsage,
    TokenLogprobs,
    Usage,
)
from eaas.gateway.tool_calls import CallBegun, CallReader, CallStyle, Part
from eaas.gateway.tool_format import call_id

PATH = "/v1/messages"

_encode = msgspec.json.encode
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
    kind = _ERROR_TYPES.get(reply.status)
    if kind is None:
        kind = "invalid_request_error" if reply.status < 500 else "api_error"
        if reply.kind == OVERLOADED:
            kind = "overloaded_error"
    return _encode({"type": "error", "error": {"type": kind, "message": reply.message}})


def _event(name: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name, **fields}) + b"\n\n"


class MessagesFormat:
    """The shapes of one request's message.

    Attributes:
        prompt_tokens: Tokens of its prompt.
        style: How the model writes calls; None when it was shown no tools.
    """

    prefix = "msg_"

    def __init__(self, prompt_tokens: int, style: CallStyle | None) -> None:
        self.prompt_tokens = prompt_tokens
        self.style = style
        self._events: MessageEvents | None = None

    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole message."""
        events = MessageEvents(self, head)
        for choice in choices:
            events.text(0, choice.text, None, 0)
            events.finish(0, Ending(choice.finish_reason, choice.stop_reason))
        return _encode(events.message(usage))

    def events(self, head: ResponseHead, choices: int, usage: StreamUsage) -> MessageEvents:
        """The one transcript of a stream, from now on under this head."""
        if self._events is None:
            self._events = MessageEvents(self, head)
        self._events.head = head
        return self._events


class MessageEvents:
    """The events of one stream, and the message as far as it has come."""

    def __init__(self, shape: MessagesFormat, head: ResponseHead) -> None:
        self._shape, self.head = shape, head
        self._content: list[dict[str, Any]] = []  # blocks, the open one last
        self._open = ""  # type of the open block
        self._pieces: list[str] = []  # of the open block's text or input
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._reader = None if shape.style is None else CallReader(shape.style)

    def message(self, usage: Usage) -> dict[str, Any]:
        """The message object as it stands."""
        return {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": self._content,
            **self._stop,
            **self._marks(),
            "usage": _usage(usage),
        }

    def first(self, index: int) -> bytes:
        """What opens the message."""
        usage = Usage(prompt=self._shape.prompt_tokens, completion=0)
        return _event("message_start", {"message": self.message(usage)})

    def text(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        offset: int,
        tokens: Sequence[int] | None = None,
        ending: Ending | None = None,
    ) -> bytes:
        """The events of one piece of text: words, calls, or none yet."""
        parts: Sequence[Part] = [text] if self._reader is None else self._reader.push(text)
        events = b"".join(map(self._part, parts))
        return events if ending is None else events + self.finish(index, ending)

    def finish(self, index: int, ending: Ending) -> bytes:
        """The events that end the last block."""
        events, reason = b"", _STOP_REASONS.get(ending.reason, "end_turn")
        if self._reader is not None:
            events = b"".join(map(self._part, self._reader.flush(cut=ending.reason in _STOP_REASONS)))
            if self._reader.calls and reason == "end_turn":
                reason = "tool_use"
        if isinstance(ending.stop, str):
            self._stop["stop_sequence"], reason = ending.stop, "stop_sequence"
        self._stop["stop_reason"] = reason
        return events + self._close()

    def end(self, usage: Usage) -> bytes:
        """What ends a stream in which nothing went wrong."""
        delta = {"delta": self._stop, **self._marks(), "usage": _usage(usage)}
        return _event("message_delta", delta) + _event("message_stop", {})

    def _marks(self) -> dict[str, Any]:
        return {"eaas_dropped_experts": True} if self.head.dropped else {}

    def failure(self, reply: ErrorReply) -> bytes:
        """What ends a stream that failed."""
        return b"event: error\ndata: " + error_body(reply) + b"\n\n"

    def _part(self, part: Part) -> bytes:
        if isinstance(part, CallBegun):
            style = self._shape.style
            name = {"id": call_id(style) if style else "", "name": part.name}
            return self._begin({"type": "tool_use", **name, "input": {}})
        if not isinstance(part, str):
            return self._delta({"type": "input_json_delta", "partial_json": part.text}, part.text)
        if not part or (self._open != "text" and self._reader is not None and not part.strip()):
            # White space around calls is no block.
            return b""
        begun = b"" if self._open == "text" else self._begin({"type": "text", "text": ""})
        return begun + self._delta({"type": "text_delta", "text": part}, part)

    def _begin(self, block: dict[str, Any]) -> bytes:
        events = self._close()
        self._content.append(block)
        self._open = block["type"]
        return events + _event(
            "content_block_start", {"index": len(self._content) - 1, "content_block": block}
        )

    def _delta(self, delta: dict[str, str], piece: str) -> bytes:
        self._pieces.append(piece)
        return _event("content_block_delta", {"index": len(self._content) - 1, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        whole = "".join(self._pieces)
        if self._open == "text":
            self._content[-1]["text"] = whole
        else:
            self._content[-1]["input"] = _object(whole)
        self._open, self._pieces = "", []
        return _event("content_block_stop", {"index": len(self._content) - 1})


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
