"""Shapes of POST /v1/chat/completions and /v1/completions, which are OpenAI's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from eaas.gateway.formats import ChunkFormat, Delta, FinishedChoice, ResponseHead, Usage, call_id
from eaas.gateway.logprobs import TokenLogprobs, finite
from eaas.gateway.output_reader import CallBegun, OutputReader, Part, Reading, Thought, read_output

_encode = msgspec.json.encode


class ChatFormat(ChunkFormat):
    """Shapes of POST /v1/chat/completions. The model's calls become ``tool_calls``; its thoughts have both names that
    clients know, ``reasoning_content`` as DeepSeek has it and ``reasoning`` as vLLM does."""

    prefix = "chatcmpl-"
    kind = "chat.completion.chunk"
    before, after = b'"delta":{"content":', b"}"

    def __init__(self, reading: Reading | None = None, prompt_ids: list[int] | None = None) -> None:
        """Args: reading: how the outputs are read; None where they are words alone. prompt_ids: the prompt's tokens,
        where token ids were asked for."""
        self._reading = reading
        self._readers: dict[int, OutputReader] = {}
        self._shown_ids = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}

    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        return _encode(
            {
                **head.fields("chat.completion"),
                "choices": [self._choice(head, choice) for choice in choices],
                "usage": usage.as_dict(),
                "prompt_logprobs": choices[0].prompt_logprobs,
                "prompt_token_ids": None,
                **self._shown_ids,
            }
        )

    def _choice(self, head: ResponseHead, choice: FinishedChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        reason = choice.finish_reason
        if self._reading is not None:
            words, thoughts, calls = read_output(self._reading, choice.text, cut=reason == "length")
            message["content"] = words if words.strip() or not calls else None
            if thoughts:
                message |= {"reasoning_content": thoughts, "reasoning": thoughts}
            if calls:
                message["tool_calls"] = [_call(self._reading, head, choice.index, *call) for call in calls]
                reason = "tool_calls" if reason == "stop" else reason
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self.logprobs(choice.logprobs),
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.tokens,
            **_routed_experts(choice),
        }

    def _start(self, index: int) -> bytes:
        return self.opening + b'{"index":%d,"delta":{' % index

    def first(self, index: int) -> bytes:
        """The event that opens a choice: its role, and the prompt's ids where they are wanted."""
        delta = b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        event = self._start(index) + delta + self.counted(index, opens=True)
        shown = self._shown_ids
        return event.replace(b"}\n\n", b"," + _encode(shown)[1:] + b"\n\n") if shown else event

    def text_template(self, index: int) -> tuple[bytes, bytes] | None:
        return ChunkFormat.text_template(self, index) if self._reading is None else None

    def event(self, delta: Delta) -> bytes:
        """The event of one piece of text; of one that is read, several or none yet."""
        if self._reading is not None:
            return self._events_read(delta, self._reading)
        if delta.ending is None or delta.text or delta.logprobs is not None or delta.tokens is not None:
            return ChunkFormat.event(self, delta)
        return self._start(delta.index) + b"}" + self.rest(delta.index, ending=delta.ending)

    def _events_read(self, delta: Delta, reading: Reading) -> bytes:
        index, logprobs, tokens, ending = delta.index, delta.logprobs, delta.tokens, delta.ending
        start, events = self._start(index), b""
        reader = self._readers.get(index) or self._readers.setdefault(index, OutputReader(reading))
        parts = reader.push(delta.text)
        if parts == [delta.text] and ending is None:
            return ChunkFormat.event(self, delta)
        said = [self._said(index, part, reading) for part in parts]
        for one in said or ([b""] if logprobs or tokens else []):
            events += start + one + b"}" + self.rest(index, self.logprobs(logprobs), tokens)
            # Log-probabilities and ids are shown once, whatever became of the text.
            logprobs = tokens = None
        if ending is not None:
            for part in reader.flush(cut=ending.reason == "length"):
                events += start + self._said(index, part, reading) + b"}" + self.rest(index)
            if reader.calls and ending.reason == "stop":
                ending = ending._replace(reason="tool_calls")
            events += start + b"}" + self.rest(index, ending=ending)
        return events

    def _said(self, choice: int, part: Part, reading: Reading) -> bytes:
        """What a chunk's "delta" says of words, of thoughts, of a call that begins, or of more of its arguments."""
        if isinstance(part, str):
            return b'"content":' + _encode(part)
        if isinstance(part, Thought):
            return _encode({"reasoning_content": part.text, "reasoning": part.text})[1:-1]
        if isinstance(part, CallBegun):
            call = {"index": part.number, **_call(reading, self.head, choice, part, "")}
        else:
            call = {"index": part.number, "function": {"arguments": part.text}}
        return b'"tool_calls":' + _encode([call])


def _call(reading: Reading, head: ResponseHead, choice: int, begun: CallBegun, arguments: str) -> dict[str, Any]:
    function = {"name": begun.name, "arguments": arguments}
    return {"id": call_id(reading, head, begun, choice), "type": "function", "function": function}


def _routed_experts(choice: FinishedChoice) -> dict[str, str]:
    return {} if choice.routed_experts is None else {"routed_experts": choice.routed_experts}


class CompletionFormat(ChunkFormat):
    """Shapes of POST /v1/completions."""

    prefix = "cmpl-"
    kind = "text_completion"
    before = b'"text":'

    def __init__(self, prompt_ids: Sequence[list[int]] | None = None, choices: int = 1) -> None:
        """Args: prompt_ids: The tokens of each prompt, where token ids were asked for. choices: For each prompt."""
        self._prompt_ids = prompt_ids
        self._choices = choices

    def _shown_ids(self, index: int) -> dict[str, list[int]]:
        ids = self._prompt_ids
        return {} if ids is None else {"prompt_token_ids": ids[index // self._choices]}

    def body(self, head: ResponseHead, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        return _encode(
            {
                **head.fields(self.kind),
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
                        **self._shown_ids(choice.index),
                    }
                    for choice in choices
                ],
                "usage": usage.as_dict(),
            }
        )

    def first(self, index: int) -> bytes:
        """Nothing, since a plain completion has no role to announce; its prompt where token ids are wanted."""
        shown = self._shown_ids(index)
        if not shown:
            return b""
        fields = b'"text":"","logprobs":null,"finish_reason":null,"token_ids":[],' + _encode(shown)[1:-1]
        return self.opening + b'{"index":%d,' % index + fields + self.counted(index, opens=True)

    def logprobs(self, tokens: Sequence[TokenLogprobs] | None, offset: int = 0) -> dict[str, Any] | None:
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
