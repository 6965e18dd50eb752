"""The model as the gateway knows it: its name, its tokenizer and its limits; no weights."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from eaas.gateway.errors import full, invalid, out_of_vocabulary, too_long
from eaas.gateway.output_reader import Reading
from eaas.gateway.output_styles import CallStyle, ThoughtStyle, marks_in, style_of, thoughts_of
from eaas.gateway.schema import Conversation, Message
from eaas.gateway.tool_calls import ToolUse
from eaas.model.chat import TemplateRefused
from eaas.model.families import spec_of
from eaas.model.loader import read_object
from eaas.model.tokenizer import Tokenizer, TokenizerInvalid
from experts.checkpoint import CheckpointInvalid, read_config
from experts.model import ConfigInvalid

T = TypeVar("T")

# Longer texts are encoded on a thread (the tokenizer releases the GIL): about a millisecond stays here.
_INLINE_CHARACTERS = 4096
# What a message costs a chat template, in characters of text.
_MESSAGE_CHARACTERS = 256
# Of those that are longer still, one is encoded at a time: each takes a core for seconds, and a template the GIL.
_LONG_CHARACTERS = 1 << 18
# So many are encoded or wait for it at once, each with a body of megabytes.
_MOST_LONG = 16
# At the end of a prompt, so many tokens say whether it has begun a thought.
_ENDING_TOKENS = 32
# The most that a client's own chat template may make: a whole body of text.
_MOST_RENDERED = 4 << 20


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One model under its served name.

    Attributes:
        max_model_len: Tokens that fit in the context.
        vocab: Token ids are below it.
        path: Its folder.
        shape: How many of its layers have experts, and how many each of them.
        fingerprint: Hash of the checkpoint, as the router's View has it; empty before that is known.
        created: Unix time in seconds, for /v1/models.
        trusts_templates: Requests may bring a chat template of their own.
    """

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    vocab: int
    path: str
    shape: tuple[int, int]
    created: int
    fingerprint: str = ""
    trusts_templates: bool = False
    _long: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False, compare=False)
    _long_taken: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_MOST_LONG), init=False, repr=False, compare=False
    )

    # How long the last one took.
    _long_s: list[float] = field(default_factory=lambda: [1.0], init=False, repr=False, compare=False)

    @cached_property
    def call_style(self) -> CallStyle:
        return style_of(self.tokenizer.chat_template or "")

    @cached_property
    def shows_tools(self) -> bool:
        return "tools" in (self.tokenizer.chat_template or "")

    @cached_property
    def thought_style(self) -> ThoughtStyle | None:
        """How the model thinks aloud; None where its chat template shows nothing of it."""
        return thoughts_of(self.tokenizer.chat_template or "")

    @cached_property
    def marks(self) -> Mapping[str, int]:
        """The tokens that stand for what is around calls and thoughts; none for a mark that is plain text."""
        marks = marks_in(self.call_style, self.thought_style)
        found = {mark: self.tokenizer.added_token(mark) for mark in marks}
        return {mark: token for mark, token in found.items() if token is not None}

    def reading(self, prompt: Sequence[int], use: ToolUse, *, thinks: bool, shown: bool) -> Reading | None:
        """How the outputs for a prompt are read; None: they are words alone. Args: thinks: thoughts are looked for;
        shown: and told."""
        calls, thoughts = self.call_style if use.shown else None, self.thought_style if thinks else None
        end = self.tokenizer.decode(prompt[-_ENDING_TOKENS:], skip_special=False).rstrip()
        thinking = thoughts is not None and end.endswith(thoughts.begin)
        if thoughts is not None and not thoughts.may_follow(end):
            thoughts = None
        if calls is None and thoughts is None:
            return None
        return Reading(calls=calls, thoughts=thoughts, thinking=thinking, tools=use.shown, shown=shown)

    def shown_tokens(self, reading: Reading | None) -> frozenset[int]:
        """The special tokens by which calls and thoughts are found, and which are no text otherwise."""
        marks = marks_in(reading.calls, reading.thoughts) if reading is not None else ()
        return frozenset(filter(self.tokenizer.is_special, (self.marks[m] for m in marks if m in self.marks)))

    def system_fingerprint(self, numerics_classes: Sequence[str], dropped: bool) -> str:
        """OpenAI's system_fingerprint: changes with the weights, with the numerics that computed the answer, and when
        experts were dropped."""
        text = "\n".join([self.fingerprint, *numerics_classes, *("dropped",) * dropped])
        return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    async def encode_prompts(
        self,
        prompts: Sequence[str] | Sequence[list[int]],
        *,
        add_special_tokens: bool = True,
        must_fit: bool = True,
        field: str = "prompt",
    ) -> list[list[int]]:
        """Token ids of each prompt. Raises ApiError: one is outside the vocabulary, or a prompt is empty.

        Args: add_special_tokens: put around texts what the model wants around a prompt. must_fit: a text that is over
        the context however it is cut is refused before that. field: where the client wrote them."""
        encoded: list[list[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                if must_fit:
                    self.check_length(prompt, field)
                tokens = await self.encode_text(prompt, add_special_tokens=add_special_tokens)
            else:
                tokens = prompt
                self.check_tokens(tokens, field)
            if not tokens:
                raise invalid("The prompt is empty; send at least one token.", param=field)
            encoded.append(tokens)
        return encoded

    def check_tokens(self, tokens: Sequence[int], field: str) -> None:
        """Refuse token ids outside the vocabulary. Millions take some milliseconds. Raises ApiError: 400, naming the
        field."""
        for extreme in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= extreme < self.vocab:
                raise out_of_vocabulary(extreme, self.vocab, field)

    def check_length(self, text: str, field: str) -> None:
        """Refuse a prompt that cannot fit, before it costs the seconds of being cut into tokens. Raises ApiError: 400,
        naming the field."""
        if self.tokenizer.most_bytes is None:
            return
        # Each token of the vocabulary stands for so many bytes at most; the end of a cut character adds none.
        most_bytes = self.max_model_len * self.tokenizer.most_bytes
        found_bytes = len(text.encode(errors="surrogatepass")) if len(text) * 4 > most_bytes else 0
        if found_bytes > most_bytes:
            found = f"at most {most_bytes} bytes of text, but the prompt has {found_bytes} bytes"
            raise too_long(self.max_model_len, found, "Shorten it.", field)

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, by default with what the model wants around a prompt."""
        encode = self.tokenizer.encode
        return await self._aside(len(text), lambda: encode(text, add_special_tokens=add_special_tokens))

    async def bad_tokens(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The sequences of tokens that words are written with, as vLLM finds them: each as it begins a text, and behind
        a space where that makes another first token and as many of them. Raises ApiError: a word has no tokens."""
        if not words:
            return ()
        words = list(dict.fromkeys(word.lstrip() for word in words))
        encode = self.tokenizer.encode

        def both(word: str) -> tuple[list[int], list[int]]:
            return encode(word, add_special_tokens=False), encode(f" {word}", add_special_tokens=False)

        encoded = await self._aside(len(words) * _MESSAGE_CHARACTERS, lambda: list(map(both, words)))
        found: list[tuple[int, ...]] = []
        for bare, spaced in encoded:
            if not bare:
                message = "Each of 'bad_words' needs at least one token; one of them has none."
                raise invalid(message, param="bad_words")
            found.append(tuple(bare))
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(tuple(spaced))
        return tuple(found)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return await self._aside(len(tokens), lambda: self.tokenizer.decode(tokens, skip_special=False))

    async def names(self, tokens: Sequence[int]) -> list[str]:
        return await self._aside(len(tokens), lambda: list(map(self.tokenizer.token_name, tokens)))

    async def encode_chat(
        self, messages: Sequence[Message], wanted: Conversation, *, tools: Sequence[Mapping[str, Any]], must_fit: bool
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Args: wanted: how the messages become a prompt. tools: descriptions for the chat template. must_fit: what is
        over the context however it is cut is refused before that. Raises ApiError: the chat template refuses the
        messages, or gives nothing; or the client's is not wanted here."""
        template, options, field = wanted.chat_template, wanted.template_options, wanted.prompt_field
        if "chat_template" in options:
            raise invalid("Give it as the field 'chat_template' instead.", param="chat_template_kwargs")
        if template is not None and not self.trusts_templates:
            raise invalid(
                "This server uses the model's own chat template; leave 'chat_template' out, or start the server with "
                "--trust-request-chat-template.",
                param="chat_template",
                code="unsupported_value",
            )
        prepared = [_for_template(message.model_dump(exclude_none=True)) for message in messages]
        plain = not tools and not options and all(len(message) == 2 for message in prepared)
        characters = sum(len(str(message["content"])) + _MESSAGE_CHARACTERS for message in prepared)
        # The client's template may take as long as a template may, and is compiled first.
        least = 0 if plain else _INLINE_CHARACTERS + 1
        least = least if template is None else _LONG_CHARACTERS + 1

        def encode() -> list[int]:
            text = self.tokenizer.template(template).render(
                prepared,
                add_generation_prompt=wanted.begins_turn,
                continue_final_message=bool(wanted.continue_final_message),
                tools=tools or None,
                options=options,
            )
            if template is not None and len(text) > _MOST_RENDERED:
                raise TemplateRefused(
                    f"The chat template makes {len(text)} characters; at most {_MOST_RENDERED} are taken."
                )
            if must_fit:
                self.check_length(text, field)
            return self.tokenizer.encode(text, add_special_tokens=bool(wanted.add_special_tokens))

        try:
            tokens = await self._aside(max(characters, least), encode)
        except TemplateRefused as error:
            at = field if template is None else "chat_template"
            raise invalid(str(error), param=at) from error
        if not tokens:
            raise invalid("The messages give an empty prompt.", param=field)
        return tokens

    async def _aside(self, characters: int, work: Callable[[], T]) -> T:
        """Do what takes as long as so much text: here, on a thread, or on a thread after other long ones."""
        if characters <= _INLINE_CHARACTERS:
            return work()
        if characters <= _LONG_CHARACTERS:
            return await asyncio.to_thread(work)
        if self._long_taken.locked():
            raise full(
                f"{_MOST_LONG} long texts are being cut into tokens, the most at once. Try again shortly.",
                after_s=self._long_s[0],
            )
        async with self._long_taken, self._long:
            began_s = time.monotonic()
            try:
                return await asyncio.to_thread(work)
            finally:
                self._long_s[0] = time.monotonic() - began_s


class ModelUnusable(ValueError):
    """The checkpoint folder cannot be served; the text says why."""


def load_model(
    folder: Path, name: str, *, trusts_templates: bool = False, max_model_len: int | None = None
) -> ServedModel:
    """The model in a checkpoint folder under its served name. No file of weights is opened.
    Args: trusts_templates: as `ServedModel`. max_model_len: tokens of the context, where fewer are wanted than the
    model has. Raises ModelUnusable: a file is missing or makes no sense."""
    try:
        spec = spec_of(read_config(folder), read_object(folder / "generation_config.json"))
        tokenizer = Tokenizer.load(folder)
    except (CheckpointInvalid, ConfigInvalid, TokenizerInvalid, TemplateRefused) as error:
        raise ModelUnusable(str(error)) from error
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        max_model_len=spec.context(max_model_len),
        vocab=spec.vocab,
        path=str(folder.resolve()),
        shape=(len(spec.moe_layers), spec.moe.experts),
        created=int((folder / "config.json").stat().st_mtime),
        trusts_templates=trusts_templates,
    )


def _for_template(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it, with "role" and "content".

    Clients speak OpenAI's form, which differs in some places from what the templates were written for: templates know
    no role "developer", read a call's arguments as an object rather than as its text, add up contents without asking
    whether there is one, and know thoughts by one of their two names.
    """
    message = {**given, "content": given.get("content") or ""}
    if message.get("role") == "developer":
        message["role"] = "system"
    if thought := message.pop("reasoning", None):
        message.setdefault("reasoning_content", thought)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call_for_template(call) for call in calls]
    return message


def _call_for_template(given: Any) -> Any:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping):
        return given
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            # What a model wrote once may be no JSON; it is to see its own words again.
            read = None
        arguments = read if isinstance(read, dict) else arguments
    return {**given, "function": {**function, "arguments": arguments}}
