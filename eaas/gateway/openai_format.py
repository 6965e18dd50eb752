"""Response bodies and stream events in OpenAI's shapes. Pure.

A streamed token costs one fast string escape between two byte templates: everything else in its event is
fixed for its choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

DONE = b"data: [DONE]\n\n"
# JSON has no infinity; OpenAI reports an impossible token by this value.
IMPOSSIBLE_LOGPROB = -9999.0

_encode = msgspec.json.encode


class TokenText(NamedTuple):
    """One token as a client sees it: its text, its bytes, and its natural-log probability."""

    text: str
    raw: bytes
    logprob: float


class TokenLogprobs(NamedTuple):
    """A chosen token and the most likely alternatives at its place."""

    chosen: TokenText
    top: Sequence[TokenText]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of one request, all choices together."""

    prompt: int
    completion: int

    def as_dict(self) -> dict[str, int]:
        """OpenAI's ``usage`` object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }


@dataclass(frozen=True, kw_only=True)
class FinishedChoice:
    """A whole choice, for a response that is not streamed."""

    index: int
    text: str
    finish_reason: str
    logprobs: Sequence[TokenLogprobs] | None


@dataclass(frozen=True, kw_only=True)
class ResponseHead:
    """What all events of a response share.

    Attributes:
        created: Unix time in seconds.
        fingerprint: OpenAI's system_fingerprint: the model's weights and the numerics class.
    """

    id: str
    created: int
    model: str
    fingerprint: str | None


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > IMPOSSIBLE_LOGPROB else IMPOSSIBLE_LOGPROB


def error_event(body: bytes) -> bytes:
    """The event that ends a stream which failed: no [DONE] follows it."""
    return b"data: " + body + b"\n\n"


class ChatFormat:
    """Shapes of POST /v1/chat/completions."""

    prefix = "chatcmpl-"

    def logprobs(self, tokens: Sequence[TokenLogprobs] | None, offset: int = 0) -> Any:
        """OpenAI's chat ``logprobs`` object; None when they were not asked for."""
        if tokens is None:
            return None
        content = [
            {**self._token(token.chosen), "top_logprobs": [self._token(other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: TokenText) -> dict[str, Any]:
        return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}

    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole response."""
        return _encode(
            {
                "id": head.id,
                "object": "chat.completion",
                "created": head.created,
                "model": head.model,
                "system_fingerprint": head.fingerprint,
                "choices": [
                    {
                        "index": choice.index,
                        "message": {"role": "assistant", "content": choice.text, "refusal": None},
                        "logprobs": self.logprobs(choice.logprobs),
                        "finish_reason": choice.finish_reason,
                    }
                    for choice in choices
                ],
                "usage": usage.as_dict(),
            }
        )

    def events(self, head: ResponseHead, choices: int, include_usage: bool) -> ChatEvents:
        """The event templates of one stream of so many choices."""
        return ChatEvents(self, head, choices, include_usage)


class CompletionFormat:
    """Shapes of POST /v1/completions."""

    prefix = "cmpl-"

    def logprobs(self, tokens: Sequence[TokenLogprobs] | None, offset: int = 0) -> Any:
        """OpenAI's completion ``logprobs`` object; None when they were not asked for.

        Args:
            offset: Characters of this choice's text before the first of ``tokens``.
        """
        if tokens is None:
            return None
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.chosen.text)
        return {
            "tokens": [token.chosen.text for token in tokens],
            "token_logprobs": [_finite(token.chosen.logprob) for token in tokens],
            # The chosen token is always among them, so there may be one more than was asked for.
            "top_logprobs": [
                {other.text: _finite(other.logprob) for other in (*token.top, token.chosen)}
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole response."""
        return _encode(
            {
                "id": head.id,
                "object": "text_completion",
                "created": head.created,
                "model": head.model,
                "system_fingerprint": head.fingerprint,
                "choices": [
                    {
                        "index": choice.index,
                        "text": choice.text,
                        "logprobs": self.logprobs(choice.logprobs),
                        "finish_reason": choice.finish_reason,
                    }
                    for choice in choices
                ],
                "usage": usage.as_dict(),
            }
        )

    def events(self, head: ResponseHead, choices: int, include_usage: bool) -> CompletionEvents:
        """The event templates of one stream of so many choices."""
        return CompletionEvents(self, head, choices, include_usage)


Format = ChatFormat | CompletionFormat


def _opening(head: ResponseHead, kind: str) -> bytes:
    fixed = {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }
    return b"data: " + _encode(fixed)[:-1] + b',"choices":['


class ChatEvents:
    """Stream events of one chat completion; bytes in, bytes out."""

    def __init__(self, shape: ChatFormat, head: ResponseHead, choices: int, include_usage: bool) -> None:
        self._shape = shape
        self._opening = _opening(head, "chat.completion.chunk")
        self._token_end = b"}]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._plain_end = b'},"logprobs":null,"finish_reason":null' + self._token_end
        self._starts = [
            self._opening + b'{"index":%d,"delta":{"content":' % index for index in range(choices)
        ]

    def first(self, index: int) -> bytes:
        """The event that opens a choice: its role."""
        delta = b'%d,"delta":{"role":"assistant","content":""' % index
        return self._opening + b'{"index":' + delta + self._plain_end

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] | None, offset: int) -> bytes:
        """The event of one piece of text; ``offset`` is for completions only."""
        start = self._starts[index] + _encode(text)
        if logprobs is None:
            return start + self._plain_end
        body = b'},"logprobs":' + _encode(self._shape.logprobs(logprobs)) + b',"finish_reason":null'
        return start + body + self._token_end

    def finish(self, index: int, reason: str) -> bytes:
        """The event that ends a choice, once."""
        tail = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":' % index
        return self._opening + tail + _encode(reason) + self._token_end

    def usage(self, usage: Usage) -> bytes:
        """The event after all choices, when usage was asked for."""
        return self._opening + b'],"usage":' + _encode(usage.as_dict()) + b"}\n\n"


class CompletionEvents:
    """Stream events of one plain completion; bytes in, bytes out."""

    def __init__(
        self, shape: CompletionFormat, head: ResponseHead, choices: int, include_usage: bool
    ) -> None:
        self._shape = shape
        self._opening = _opening(head, "text_completion")
        self._token_end = b"}]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._plain_end = b',"logprobs":null,"finish_reason":null' + self._token_end
        self._starts = [self._opening + b'{"index":%d,"text":' % index for index in range(choices)]

    def first(self, index: int) -> bytes:
        """Nothing: a plain completion has no role to announce."""
        return b""

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] | None, offset: int) -> bytes:
        """The event of one piece of text, ``offset`` characters after the start of the choice."""
        start = self._starts[index] + _encode(text)
        if logprobs is None:
            return start + self._plain_end
        body = b',"logprobs":' + _encode(self._shape.logprobs(logprobs, offset)) + b',"finish_reason":null'
        return start + body + self._token_end

    def finish(self, index: int, reason: str) -> bytes:
        """The event that ends a choice, once."""
        tail = b'{"index":%d,"text":"","logprobs":null,"finish_reason":' % index
        return self._opening + tail + _encode(reason) + self._token_end

    def usage(self, usage: Usage) -> bytes:
        """The event after all choices, when usage was asked for."""
        return self._opening + b'],"usage":' + _encode(usage.as_dict()) + b"}\n\n"


Events = ChatEvents | CompletionEvents
