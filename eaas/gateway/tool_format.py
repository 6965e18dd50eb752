"""Chat completions whose model was shown tools: its calls become ``tool_calls``, whole or as deltas. Pure."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import Any

import msgspec

from eaas.gateway.openai_format import (
    ChatEvents,
    ChatFormat,
    Ending,
    FinishedChoice,
    ResponseHead,
    StreamUsage,
    TokenLogprobs,
)
from eaas.gateway.tool_calls import CallBegun, CallReader, CallStyle, Part, read_calls

_encode = msgspec.json.encode
_LETTERS = string.ascii_letters + string.digits


def call_id(style: CallStyle) -> str:
    """A new id for a call, of a form that the family's chat templates accept."""
    if style.id_letters:
        return "".join(secrets.choice(_LETTERS) for _ in range(style.id_letters))
    return f"call_{secrets.token_hex(12)}"


class ToolChatFormat(ChatFormat):
    """Shapes of POST /v1/chat/completions where tools were given; one for each request, whose readers it keeps."""

    def __init__(self, style: CallStyle, prompt_ids: list[int] | None = None) -> None:
        super().__init__(prompt_ids)
        self.style = style
        self._readers: dict[int, CallReader] = {}

    def reader(self, index: int) -> CallReader:
        """The reader of a streamed choice."""
        return self._readers.setdefault(index, CallReader(self.style))

    def choice(self, choice: FinishedChoice) -> dict[str, Any]:
        """One entry of the response's ``choices``."""
        text, calls = read_calls(self.style, choice.text, cut=choice.finish_reason == "length")
        entry = super().choice(choice)
        entry["message"]["content"] = text if text.strip() or not calls else None
        if calls:
            entry["message"]["tool_calls"] = [
                {
                    "id": call_id(self.style),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for name, arguments in calls
            ]
            if choice.finish_reason == "stop":
                entry["finish_reason"] = "tool_calls"
        return entry

    def events(self, head: ResponseHead, choices: int, usage: StreamUsage) -> ChatEvents:
        """The event templates of one stream of so many choices."""
        return ToolChatEvents(self, head, choices, usage)


class ToolChatEvents(ChatEvents):
    """Stream events of one chat completion with tools."""

    def __init__(self, shape: ToolChatFormat, head: ResponseHead, choices: int, usage: StreamUsage) -> None:
        super().__init__(shape, head, choices, usage)
        self._tools = shape

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
        deltas = [self._delta(part) for part in self._tools.reader(index).push(text)]
        if not deltas and (logprobs or tokens):
            deltas = [b""]
        events = self._events(index, deltas, logprobs, tokens)
        return events if ending is None else events + self.finish(index, ending)

    def finish(self, index: int, ending: Ending) -> bytes:
        """The events that end a choice, once."""
        reader = self._tools.reader(index)
        rest = self._events(
            index, [self._delta(part) for part in reader.flush(cut=ending.reason == "length")], None, None
        )
        if reader.calls and ending.reason == "stop":
            ending = ending._replace(reason="tool_calls")
        return rest + super().finish(index, ending)

    def _events(
        self,
        index: int,
        deltas: Sequence[bytes],
        logprobs: Sequence[TokenLogprobs] | None,
        tokens: Sequence[int] | None,
    ) -> bytes:
        start = self._opening + b'{"index":%d,"delta":{' % index
        events = b""
        for number, delta in enumerate(deltas):
            # Log-probabilities and ids are shown once, whatever became of the text.
            events += (
                start
                + delta
                + (self.rest(index, None, None) if number else self.rest(index, logprobs, tokens))
            )
        return events

    def _delta(self, part: Part) -> bytes:
        if isinstance(part, str):
            return b'"content":' + _encode(part)
        function = (
            {"name": part.name, "arguments": ""} if isinstance(part, CallBegun) else {"arguments": part.text}
        )
        call = {"index": part.number, "function": function}
        if isinstance(part, CallBegun):
            call = {
                "index": part.number,
                "id": call_id(self._tools.style),
                "type": "function",
                "function": function,
            }
        return b'"tool_calls":' + _encode([call])
