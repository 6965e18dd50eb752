"""What the shapes of all APIs share, whole and streamed: of chunks, between byte templates, or of a transcript.

A streamed token costs one fast string escape between two byte templates: everything else in its event is
fixed for its choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import msgspec

from eaas.gateway.errors import ErrorReply
from eaas.gateway.event_ids import Identity
from eaas.gateway.logprobs import TokenLogprobs, logprob_entry
from eaas.gateway.output_reader import CallBegun, OutputReader, Part, Reading

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


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


class Ending(NamedTuple):
    """Why a choice ended: OpenAI's ``finish_reason``, and the stop string or the client's stop token that it met."""

    reason: str
    stop: int | str | None = None


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What became visible of one choice, or its end alone. Each token makes one: a Struct costs the least.

    Attributes:
        offset: Characters of the choice's text before it.
        tokens: Ids that it came from, when they were asked for.
        ending: The choice ends with it.
    """

    index: int
    text: str
    logprobs: Sequence[TokenLogprobs] | None = None
    offset: int = 0
    tokens: Sequence[int] | None = None
    ending: Ending | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseHead:
    """What all events of a response share.

    Attributes:
        identity: What is random about it follows from this.
        fingerprint: OpenAI's system_fingerprint: the model's weights and the numerics class.
        dropped: Terms of lost experts are missing, as the client allowed.
    """

    id: str
    identity: Identity
    model: str
    fingerprint: str | None
    dropped: bool = False

    @property
    def marks(self) -> dict[str, bool]:
        """The field that says so; none where nothing is missing."""
        return {"eaas_dropped_experts": True} if self.dropped else {}

    def fields(self, kind: str) -> dict[str, Any]:
        """What every object of a completion begins with; `kind` is its "object"."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.identity.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            **self.marks,
        }


def error_event(body: bytes) -> bytes:
    """The event that ends a stream which failed: no [DONE] follows it."""
    return b"data: " + body + b"\n\n"


def named_event(name: str, fields: Mapping[str, Any]) -> bytes:
    """An event whose name is its "type" as well."""
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name, **fields}) + b"\n\n"


def call_id(reading: Reading, head: ResponseHead, call: CallBegun, choice: int = 0) -> str:
    """The id of a call: the model's own, or one of a form that the family's chat templates accept."""
    letters = reading.calls.id_letters if reading.calls is not None else 0
    return call.id or head.identity.call_id(choice, call.number, letters)


class Format(ABC):
    """The shapes of one request's response, whole or streamed; bytes, and none where there is nothing to say."""

    prefix: ClassVar[str]  # of the response's id

    @abstractmethod
    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole response."""

    @abstractmethod
    def events(self, head: ResponseHead, choices: int, usage: StreamUsage) -> Format:
        """This format, whose events are from now on those of a stream of so many choices under this head."""

    @abstractmethod
    def first(self, index: int) -> bytes:
        """What opens a choice."""

    @abstractmethod
    def event(self, delta: Delta) -> bytes:
        """The events of what became visible, or of the end of a choice alone."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """What ends a stream in which nothing went wrong."""

    def text_template(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and after the text, as JSON, in an event that is one piece of text of a choice and nothing
        else; None where there is more to such events."""
        return None

    def failure(self, reply: ErrorReply) -> bytes:
        """What ends a stream that failed."""
        return error_event(reply.body())


class TranscriptFormat(Format):
    """Shapes that tell of what was said as items, of which one is open at a time and is repeated whole at its end.

    One transcript keeps what was said so far, for the last events and for the whole response.
    """

    # Ends that the model did not choose: what was still to become a call is left out.
    cut_off = frozenset({"length", "abort"})

    def __init__(self, reading: Reading | None) -> None:
        """Args: reading: how the output is read; None where it is words alone."""
        self.items: list[dict[str, Any]] = []  # the open one last
        self.open = ""  # type of the open item
        self.pieces: list[str] = []  # of the open item's text or arguments
        self.head = ResponseHead(id="", identity=Identity(drawn="", created=0), model="", fingerprint=None)
        self.reader = None if reading is None else OutputReader(reading)
        self._reading = reading or Reading()
        self._begun = False

    @abstractmethod
    def whole(self, usage: Usage) -> dict[str, Any]:
        """The response as it stands."""

    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole response, or what the stream has come to."""
        if not self._begun:
            self.events(head, len(choices), StreamUsage())
            for choice in choices:
                ending = Ending(choice.finish_reason, choice.stop_reason)
                self.event(Delta(0, choice.text, choice.logprobs, ending=ending))
        return _encode(self.whole(usage))

    def events(self, head: ResponseHead, choices: int, usage: StreamUsage) -> TranscriptFormat:
        """The same transcript, from now on under this head."""
        self.head, self._begun = head, True
        return self

    def parts(self, delta: Delta) -> tuple[list[Part], list[Part]]:
        """What a text makes certain, and what the end does."""
        if self.reader is None:
            return [delta.text], []
        parts, ending = self.reader.push(delta.text), delta.ending
        return parts, [] if ending is None else self.reader.flush(cut=ending.reason in self.cut_off)

    def between_items(self, text: str, kind: str) -> bool:
        """Whether it is white space between items, which begins none of this type."""
        return self.reader is not None and self.open != kind and not text.strip()

    def call_id(self, call: CallBegun) -> str:
        return call_id(self._reading, self.head, call)


class ChunkFormat(Format):
    """What streams of chunks share. A text is put between two byte templates that are fixed for its choice."""

    kind: ClassVar[str] = ""  # "object" of a chunk
    before: ClassVar[bytes] = b""  # what stands before the text of a choice, behind its index
    after: ClassVar[bytes] = b""
    no_usage: ClassVar[bytes] = b',"usage":null'  # in chunks before the one that has it

    def chunk_fields(self, head: ResponseHead) -> dict[str, Any]:
        """What every chunk begins with."""
        return head.fields(self.kind)

    def logprobs(self, tokens: Sequence[TokenLogprobs] | None, offset: int = 0) -> dict[str, Any] | None:
        """What is told of tokens, the first so many characters behind the start of its choice; None: nothing is."""
        return None if tokens is None else {"content": [logprob_entry(token) for token in tokens], "refusal": None}

    def events(self, head: ResponseHead, choices: int, usage: StreamUsage) -> ChunkFormat:
        """The event templates of a stream of so many choices."""
        self._usage, self.head = usage, head
        self.opening = b"data: " + _encode(self.chunk_fields(head))[:-1] + b',"choices":['
        self._token_end = b"}]" + (self.no_usage if usage.last else b"") + b"}\n\n"
        self._plain_end = self.after + b',"logprobs":null,"finish_reason":null' + self._token_end
        self._starts = [self.opening + b'{"index":%d,' % index + self.before for index in range(choices)]
        return self

    def text_template(self, index: int) -> tuple[bytes, bytes] | None:
        """The templates of its choice, where they alone are around the text."""
        return (self._starts[index], self._plain_end) if self._usage.now is None else None

    def event(self, delta: Delta) -> bytes:
        """The event of one piece of text."""
        index, logprobs, tokens, ending = delta.index, delta.logprobs, delta.tokens, delta.ending
        start = self._starts[index] + _encode(delta.text)
        if logprobs is None and tokens is None and ending is None and self._usage.now is None:
            return start + self._plain_end
        return start + self.after + self.rest(index, self.logprobs(logprobs, delta.offset), tokens, ending)

    def rest(
        self, index: int, logprobs: Any = None, tokens: Sequence[int] | None = None, ending: Ending | None = None
    ) -> bytes:
        rest = b',"logprobs":' + _encode(logprobs) + b',"finish_reason":'
        rest += b"null" if ending is None else _encode(ending.reason)
        if ending is not None and ending.stop is not None:
            rest += b',"stop_reason":' + _encode(ending.stop)
        if tokens is not None:
            rest += b',"token_ids":' + _encode(tokens)
        return rest + self.counted(index)

    def counted(self, index: int, *, opens: bool = False) -> bytes:
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
        return self.opening + b'],"usage":' + _encode(usage.as_dict()) + b"}\n\n" + DONE
