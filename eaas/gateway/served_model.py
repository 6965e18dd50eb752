"""The model as the gateway knows it: its name, its tokenizer and its limits; no weights."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from eaas.gateway.errors import invalid
from eaas.model.chat import TemplateRefused
from eaas.model.tokenizer import Tokenizer

T = TypeVar("T")

# Longer texts are encoded on a thread (the tokenizer releases the GIL): about a millisecond stays here.
_INLINE_CHARACTERS = 4096


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One model under its served name.

    Attributes:
        max_model_len: Tokens that fit in the context.
        vocab: Token ids are below it.
        fingerprint: Hash of the checkpoint.
        created: Unix time in seconds, for /v1/models.
    """

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    vocab: int
    fingerprint: str
    created: int

    def system_fingerprint(self, numerics_classes: Sequence[str]) -> str:
        """OpenAI's system_fingerprint: changes with the weights and with the numerics that computed the
        answer."""
        text = "\n".join([self.fingerprint, *numerics_classes])
        return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    async def encode_prompts(self, prompts: Sequence[str] | Sequence[list[int]]) -> list[list[int]]:
        """Token ids of each prompt.

        Raises:
            ApiError: a token id outside the vocabulary, or an empty prompt.
        """
        encoded: list[list[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                text = prompt
                tokens = await _inline_or_thread(len(text), lambda text=text: self.tokenizer.encode(text))
            else:
                tokens = prompt
                wrong = next((token for token in tokens if not 0 <= token < self.vocab), None)
                if wrong is not None:
                    message = f"Token {wrong} is outside the vocabulary; token ids are 0 to {self.vocab - 1}."
                    raise invalid(message, param="prompt", code="invalid_value")
            if not tokens:
                raise invalid(
                    "The prompt is empty; send at least one token.", param="prompt", code="invalid_value"
                )
            encoded.append(tokens)
        return encoded

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Args:
            options: More names for the chat template.

        Raises:
            ApiError: the chat template refuses the messages, or gives nothing.
        """
        characters = sum(len(message.get("content") or "") for message in messages)
        try:
            tokens = await _inline_or_thread(
                characters, lambda: self.tokenizer.encode_chat(messages, options=options)
            )
        except TemplateRefused as error:
            raise invalid(str(error), param="messages", code="invalid_value") from error
        if not tokens:
            raise invalid("The messages give an empty prompt.", param="messages", code="invalid_value")
        return tokens


async def _inline_or_thread(characters: int, work: Callable[[], T]) -> T:
    return work() if characters <= _INLINE_CHARACTERS else await asyncio.to_thread(work)
