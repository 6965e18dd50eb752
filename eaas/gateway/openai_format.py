"""Response bodies and stream events in OpenAI's shapes. Pure.

A streamed token costs one fast string escape between two byte templates: everything else in its event is
fixed for its choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from eaas.gateway.errors import ErrorReply

DONE = b"data: [DONE]\n\n"
# JSON has no infinity; OpenAI reports an impossible token by this value.
IMPOSSIBLE_LOGPROB = -9999.0

_encode = msgspec.json.encode


class TokenText(NamedTuple):
    """One token as a client sees it: its text, its bytes, and its log-probability; a prompt's first token has none."""

    text: str
    raw: bytes
    logprob: float | None


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
class StreamUsage:
    """What a stream tells of its tokens.

    Attributes:
        last: A last chunk of its own has the usage.
        now: What a choice has used so far, where every chunk has it.
    """

    last: bool = False
    now: Callable[[int], Usage] | None = None


@dataclass(frozen=True, kw_only=True)
class FinishedChoice:
    """A whole choice, for a response that is not streamed."""

    index: int
    text: str
    finish_reason: str
    logprobs: Sequence[TokenLogprobs] | None
    tokens: Sequence[int] | None = None
    prompt_logprobs: Sequence[dict[str, Any] | None] | None = None
    routed_experts: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseHead:
    """What all events of a response share.

    Attributes:
        created: Unix time in seconds.
        fingerprint: OpenAI's system_fingerprint: the model's weights and the numerics class.
        dropped: Terms of lost experts are missing, as the client allowed; then `eaas_dropped_experts` is true.
    """

    id: str
    created: int
    model: str
    fingerprint: str | None
    dropped: bool = False

    def fields(self, kind: str) -> dict[str, Any]:
        """What every object of the response begins with; `kind` is its "object"."""
        marks = {"eaas_dropped_experts": True} if self.dropped else {}
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            **marks,
        }


def finite(logprob: float | None) -> float | None:
    """A log-probability as JSON can say it; None where there is none."""
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) and logprob > IMPOSSIBLE_LOGPROB else IMPOSSIBLE_LOGPROB


def error_event(body: bytes) -> bytes:
    """The event that ends a stream which failed: no [DONE] follows it."""
    return b"data: " + body + b"\n\n"


class Ending(NamedTuple):
    """Why a choice ended: OpenAI's ``finish_reason``, and the stop string or the client's stop token that it met."""

    reason: str
    stop: int | str | None = None

    def fields(self) -> bytes:
        """As the last fields of a choice."""
        stop = b"" if self.stop is None else b',"stop_reason":' + _encode(self.stop)
        return b',"finish_reason":' + _encode(self.reason) + stop


class Events(Protocol):
    """The events of one stream; bytes in OpenAI's shapes, and nothing where there is nothing to say."""

    def first(self, index: int) -> bytes:
        """What opens a choice."""
        ...

    def text(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        offset: int,
        tokens: Sequence[int] | None = None,
        ending: Ending | None = None,
    ) -> bytes:
        """One piece of text, ``offset`` characters after the start of its choice, with the ids of its tokens where they
        are wanted. With an ending it is the last, and ``finish`` is not called."""
        ...

    def finish(self, index: int, ending: Ending) -> bytes:
        """What ends a choice without text, once."""
        ...

    def end(self, usage: Usage) -> bytes:
        """What ends a stream in which nothing went wrong."""
        ...

    def failure(self, reply: ErrorReply) -> bytes:
        """What ends a stream that failed."""
        ...


class Format(Protocol):
    """The shapes of one request's response, whole or streamed."""

    prefix: str

    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole response."""
        ...

    def events(self, head: ResponseHead, choices: int, usage: StreamUsage) -> Events:
        """The event templates of one stream of so many choices."""
        ...


class ChatFormat:
    """Shapes of POST /v1/chat/completions."""

    prefix = "chatcmpl-"

    def __init__(self, prompt_ids: list[int] | None = None) -> None:
        """Args: prompt_ids: The prompt's tokens, where token ids were asked for."""
        self.shown_ids = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}

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
        return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.raw)}

    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole response."""
        return _encode(
            {
                **head.fields("chat.completion"),
                "choices": [self.choice(choice) for choice in choices],
                "usage": usage.as_dict(),
                "prompt_logprobs": choices[0].prompt_logprobs,
                "prompt_token_ids": None,
                **self.shown_ids,
            }
        )

    def choice(self, choice: FinishedChoice) -> dict[str, Any]:
        """One entry of the response's ``choices``."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self.logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.tokens,
            **_routed_experts(choice),
        }

    def events(self, head: ResponseHead, choices: int, usage: StreamUsage) -> ChatEvents:
        """The event templates of one stream of so many choices."""
        return ChatEvents(self, head, choices, usage)


class CompletionFormat:
    """Shapes of POST /v1/completions."""

    prefix = "cmpl-"

    def __init__(self, prompt_ids: Sequence[list[int]] | None = None, choices: int = 1) -> None:
        """Args: prompt_ids: The tokens of each prompt, where token ids were asked for. choices: For each prompt."""
        self._prompt_ids = prompt_ids
        self._choices = choices

    def shown_ids(self, index: int) -> dict[str, list[int]]:
        """The prompt of a choice, where token ids were asked for."""
        return (
            {} if self._prompt_ids is None else {"prompt_token_ids": self._prompt_ids[index // self._choices]}
        )

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
            "token_logprobs": [finite(token.chosen.logprob) for token in tokens],
            # The chosen token is always among them, so there may be one more than was asked for.
            "top_logprobs": [
                None
                if token.chosen.logprob is None
                else {other.text: finite(other.logprob) for other in (token.chosen, *token.top)}
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole response."""
        return _encode(
            {
                **head.fields("text_completion"),
                "choices": [
                    {
                        "index": choice.index,
                        "text": choice.text,
                        "logprobs": self.logprobs(choice.logprobs),
                        "finish_reason": choice.finish_reason,
                        "stop_reason": choice.stop_reason,
                        "token_ids": choice.tokens,
                        "prompt_logprobs": choice.prompt_logprobs,
                        "prompt_token_ids": None,
                        **_routed_experts(choice),
                        **self.shown_ids(choice.index),
                    }
                    for choice in choices
                ],
                "usage": usage.as_dict(),
            }
        )

    def events(self, head: ResponseHead, choices: int, usage: StreamUsage) -> CompletionEvents:
        """The event templates of one stream of so many choices."""
        return CompletionEvents(self, head, choices, usage)


def _routed_experts(choice: FinishedChoice) -> dict[str, Any]:
    return {} if choice.routed_experts is None else {"routed_experts": choice.routed_experts}


def _shown_tokens(tokens: Sequence[int] | None) -> bytes:
    return b"" if tokens is None else b',"token_ids":' + _encode(tokens)


def _ended(ending: Ending | None) -> bytes:
    return b',"finish_reason":null' if ending is None else ending.fields()


def _opening(head: ResponseHead, kind: str) -> bytes:
    return b"data: " + _encode(head.fields(kind))[:-1] + b',"choices":['


class _ChunkEvents:
    """What streams of both kinds of completion share."""

    def __init__(self, head: ResponseHead, kind: str, usage: StreamUsage) -> None:
        self._usage = usage
        self._opening = _opening(head, kind)
        self._token_end = b"}]" + (b',"usage":null' if usage.last else b"") + b"}\n\n"

    def _counted(self, index: int, *, opens: bool = False) -> bytes:
        """The end of an event, with what its choice has used so far where each has it: nothing where it opens one."""
        if self._usage.now is None:
            return self._token_end
        usage = self._usage.now(index)
        usage = Usage(prompt=usage.prompt, completion=0) if opens else usage
        return b'}],"usage":' + _encode(usage.as_dict()) + b"}\n\n"

    def end(self, usage: Usage) -> bytes:
        """What ends a stream in which nothing went wrong: the usage if it was asked for, and [DONE]."""
        if not self._usage.last:
            return DONE
        return self._opening + b'],"usage":' + _encode(usage.as_dict()) + b"}\n\n" + DONE

    def failure(self, reply: ErrorReply) -> bytes:
        """What ends a stream that failed: no [DONE] follows it."""
        return error_event(reply.body())


class ChatEvents(_ChunkEvents):
    """Stream events of one chat completion; bytes in, bytes out."""

    def __init__(self, shape: ChatFormat, head: ResponseHead, choices: int, usage: StreamUsage) -> None:
        super().__init__(head, "chat.completion.chunk", usage)
        self._shape = shape
        self._plain_end = b'},"logprobs":null,"finish_reason":null' + self._token_end
        self._starts = [
            self._opening + b'{"index":%d,"delta":{"content":' % index for index in range(choices)
        ]

    def first(self, index: int) -> bytes:
        """The event that opens a choice: its role."""
        delta = b'%d,"delta":{"role":"assistant","content":""' % index
        end = b'},"logprobs":null,"finish_reason":null' + self._counted(index, opens=True)
        event = self._opening + b'{"index":' + delta + end
        shown = self._shape.shown_ids
        return event.replace(b"}\n\n", b"," + _encode(shown)[1:] + b"\n\n") if shown else event

    def text(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        offset: int,
        tokens: Sequence[int] | None = None,
        ending: Ending | None = None,
    ) -> bytes:
        """The event of one piece of text."""
        start = self._starts[index] + _encode(text)
        if logprobs is None and tokens is None and ending is None and self._usage.now is None:
            return start + self._plain_end
        return start + self.rest(index, logprobs, tokens, ending)

    def rest(
        self,
        index: int,
        logprobs: Sequence[TokenLogprobs] | None,
        tokens: Sequence[int] | None,
        ending: Ending | None = None,
    ) -> bytes:
        """What follows the last field of a delta."""
        shown = b'},"logprobs":' + _encode(self._shape.logprobs(logprobs)) + _ended(ending)
        return shown + _shown_tokens(tokens) + self._counted(index)

    def finish(self, index: int, ending: Ending) -> bytes:
        """The event that ends a choice without text, once."""
        return self._opening + b'{"index":%d,"delta":{' % index + self.rest(index, None, None, ending)


class CompletionEvents(_ChunkEvents):
    """Stream events of one plain completion; bytes in, bytes out."""

    def __init__(self, shape: CompletionFormat, head: ResponseHead, choices: int, usage: StreamUsage) -> None:
        super().__init__(head, "text_completion", usage)
        self._shape = shape
        self._plain_end = b',"logprobs":null,"finish_reason":null' + self._token_end
        self._starts = [self._opening + b'{"index":%d,"text":' % index for index in range(choices)]

    def first(self, index: int) -> bytes:
        """Nothing, since a plain completion has no role to announce; its prompt where token ids are wanted."""
        shown = self._shape.shown_ids(index)
        if not shown:
            return b""
        fields = b'"","logprobs":null,"finish_reason":null,"token_ids":[],' + _encode(shown)[1:-1]
        return self._starts[index] + fields + self._counted(index, opens=True)

    def text(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        offset: int,
        tokens: Sequence[int] | None = None,
        ending: Ending | None = None,
    ) -> bytes:
        """The event of one piece of text."""
        start = self._starts[index] + _encode(text)
        if logprobs is None and tokens is None and ending is None and self._usage.now is None:
            return start + self._plain_end
        body = b',"logprobs":' + _encode(self._shape.logprobs(logprobs, offset)) + _ended(ending)
        return start + body + _shown_tokens(tokens) + self._counted(index)

    def finish(self, index: int, ending: Ending) -> bytes:
        """The event that ends a choice without text, once."""
        return self._starts[index] + b'"","logprobs":null' + ending.fields() + self._counted(index)
