"""Shapes of POST /v1/responses: the response object, and the published events of its stream, in order. Pure.

One transcript keeps what was said so far, since the last events of each item repeat it whole. A piece of text costs one
fast string escape between two byte templates, as in the other streams.
"""

from __future__ import annotations

import secrets
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
    TokenText,
    Usage,
    error_event,
    finite,
)
from eaas.gateway.tool_calls import CallBegun, CallReader, CallStyle
from eaas.gateway.tool_format import call_id

_encode = msgspec.json.encode
# The terminal event and the response's status, by finish_reason.
_ENDS = {"length": ("incomplete", "incomplete"), "abort": ("incomplete", "cancelled")}


class ResponsesFormat:
    """The shapes of one request's response.

    Attributes:
        said: What the response repeats of its request.
        style: How the model writes calls; None when it was shown no tools.
    """

    prefix = "resp_"

    def __init__(self, said: Mapping[str, Any], style: CallStyle | None) -> None:
        self.said = said
        self.style = style
        self._events: ResponseEvents | None = None

    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole response, or what the stream has come to."""
        if self._events is not None:
            return _encode(self._events.response(usage))
        events = ResponseEvents(self, head)
        for choice in choices:
            events.text(0, choice.text, choice.logprobs, 0)
            events.finish(0, Ending(choice.finish_reason))
        return _encode(events.response(usage))

    def events(self, head: ResponseHead, choices: int, usage: StreamUsage) -> ResponseEvents:
        """The one transcript of a stream, from now on under this head."""
        if self._events is None:
            self._events = ResponseEvents(self, head)
        self._events.head = head
        return self._events


class ResponseEvents:
    """The events of one stream, and the response as far as it has come."""

    def __init__(self, shape: ResponsesFormat, head: ResponseHead) -> None:
        self.head = head
        self._shape = shape
        self._sequence = 0
        self._output: list[dict[str, Any]] = []  # items, the open one last
        self._open = ""  # type of the open item
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._logprobs: list[dict[str, Any]] = []
        self._status = "in_progress"
        self._end = "completed"
        self._start = b""
        self._reader = None if shape.style is None else CallReader(shape.style)

    def response(self, usage: Usage | None = None, error: ErrorReply | None = None) -> dict[str, Any]:
        """The response object as it stands."""
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._shape.said,
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": self._status,
            "model": self.head.model,
            "system_fingerprint": self.head.fingerprint,
            **({"eaas_dropped_experts": True} if self.head.dropped else {}),
            "output": self._output,
            "error": None if error is None else {"code": _error_code(error), "message": error.message},
            "incomplete_details": incomplete,
            "usage": None if usage is None else _usage(usage),
        }

    def first(self, index: int) -> bytes:
        """What opens the response."""
        created = self._event("response.created", {"response": self.response()})
        return created + self._event("response.in_progress", {"response": self.response()})

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
        shown = [_logprob(token) for token in logprobs or ()]
        events = self._words(text, shown) if self._reader is None else b""
        for part in [] if self._reader is None else self._reader.push(text):
            events += self._part(part, shown)
            shown = []
        return events if ending is None else events + self.finish(index, ending)

    def finish(self, index: int, ending: Ending) -> bytes:
        """The events that end the last item."""
        reason, events = ending.reason, b""
        if self._reader is not None:
            for part in self._reader.flush(cut=reason in ("length", "abort")):
                events += self._part(part, [])
        if not self._output:
            events += self._words("", [])
        self._end, self._status = _ENDS.get(reason, ("completed", "completed"))
        return events + self._close("completed" if self._status == "completed" else "incomplete")

    def end(self, usage: Usage) -> bytes:
        """What ends a stream in which nothing went wrong."""
        return self._event(f"response.{self._end}", {"response": self.response(usage)})

    def failure(self, reply: ErrorReply) -> bytes:
        """What ends a stream that failed: the published event, and the one on which clients raise."""
        self._status = "failed"
        return self._event("response.failed", {"response": self.response(error=reply)}) + error_event(
            reply.body()
        )

    def _part(self, part: Any, logprobs: list[dict[str, Any]]) -> bytes:
        if isinstance(part, str):
            # White space around calls is no message.
            return self._words(part, logprobs) if part.strip() or self._open == "message" else b""
        if isinstance(part, CallBegun):
            style = self._shape.style
            item = {
                "id": f"fc_{secrets.token_hex(16)}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": call_id(style) if style else "",
                "name": part.name,
                "arguments": "",
            }
            return self._begin(item)
        self._pieces.append(part.text)
        return self._delta(part.text)

    def _words(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        events = b""
        if self._open != "message":
            item = {
                "id": f"msg_{secrets.token_hex(16)}",
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            events = self._begin(item)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events += self._event("response.content_part.added", {**self._place(), "part": part})
        if not text and not logprobs:
            return events
        self._pieces.append(text)
        self._logprobs += logprobs
        return events + self._delta(text, b',"logprobs":' + (_encode(logprobs) if logprobs else b"[]"))

    def _begin(self, item: dict[str, Any]) -> bytes:
        events = self._close("completed") if self._open else b""
        self._output.append(item)
        self._open = item["type"]
        place = {"output_index": len(self._output) - 1}
        events += self._event("response.output_item.added", {**place, "item": item})
        kind = "output_text" if self._open == "message" else "function_call_arguments"
        name = f"response.{kind}.delta"
        opening = _encode({"type": name, **self._place()})[:-1]
        self._start = b"event: " + name.encode() + b"\ndata: " + opening + b',"delta":'
        return events

    def _delta(self, text: str, more: bytes = b"") -> bytes:
        event = self._start + _encode(text) + more + b',"sequence_number":%d}\n\n' % self._sequence
        self._sequence += 1
        return event

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return {**place, "content_index": 0} if self._open == "message" else place

    def _close(self, status: str) -> bytes:
        item, place = self._output[-1], self._place()
        whole = "".join(self._pieces)
        if self._open == "message":
            part = {"type": "output_text", "text": whole, "annotations": [], "logprobs": self._logprobs}
            item["content"] = [part]
            done = {**place, "text": whole, "logprobs": self._logprobs}
            events = self._event("response.output_text.done", done)
            events += self._event("response.content_part.done", {**place, "part": part})
        else:
            item["arguments"] = whole
            done = {**place, "name": item["name"], "arguments": whole}
            events = self._event("response.function_call_arguments.done", done)
        item["status"] = status
        events += self._event(
            "response.output_item.done", {"output_index": place["output_index"], "item": item}
        )
        self._open = ""
        self._pieces, self._logprobs = [], []
        return events

    def _event(self, name: str, fields: Mapping[str, Any]) -> bytes:
        body = _encode({"type": name, **fields, "sequence_number": self._sequence})
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


def _token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.raw)}


def _logprob(token: TokenLogprobs) -> dict[str, Any]:
    return {**_token(token.chosen), "top_logprobs": [_token(other) for other in token.top]}


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
