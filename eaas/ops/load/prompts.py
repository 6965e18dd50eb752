"""What requests ask: prompts of words by seed, of a file or of a trace's lengths, and the bodies around them. Pure.

A length in tokens needs the endpoint's tokenizer, which a client does not have: two probes say how many tokens a word
costs there (`TokenCost`), and prompts are made of words accordingly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from eaas.ops.load.traces import BLOCK_TOKENS, TraceRequest

_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part over new sound "
    "take only little work know place year live me back give most very after thing our just name good sentence man "
    "think say great where help through much before line right too mean old any same tell boy follow came want show"
)
WORDS = _WORDS.split(" ")
DEFAULT_TOKENS = 32


class PromptsInvalid(ValueError):
    """No such prompts; the text says what is needed."""


@dataclass(frozen=True, kw_only=True)
class TokenCost:
    """What a prompt of words costs at an endpoint, in tokens: `fixed` (template, first word) and for each word."""

    fixed: float = 0.0
    per_word: float = 1.0

    @classmethod
    def of_probes(cls, few: tuple[int, int], many: tuple[int, int]) -> TokenCost:
        """From two prompts, each as (words, tokens)."""
        per_word = max(0.1, (many[1] - few[1]) / (many[0] - few[0]))
        return cls(fixed=max(0.0, few[1] - per_word * few[0]), per_word=per_word)

    def words(self, tokens: int) -> int:
        """Words of a prompt of about so many tokens, rounded down: a full context leaves no room for more."""
        return max(1, int((tokens - self.fixed) / self.per_word))


def words(seed: int, number: int, count: int) -> str:
    """`count` random words, always the same for (seed, number)."""
    picks: list[int] = np.random.default_rng((seed, number)).integers(0, len(WORDS), size=count).tolist()
    return " ".join([WORDS[pick] for pick in picks])


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request's content: a text or chat messages, and the tokens wanted (None: the workload's)."""

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None


Prompts = Callable[[int], Prompt]


def word_prompts(seed: int, tokens: int, cost: TokenCost) -> Prompts:
    """Prompts of about so many tokens, each of other words."""
    count = cost.words(tokens)
    return lambda index: Prompt(text=words(seed, index, count))


def trace_prompts(requests: Sequence[TraceRequest], seed: int, cost: TokenCost) -> Prompts:
    """Prompts of a trace's lengths; those whose blocks begin alike begin with the same words."""
    per_block = max(1, round(BLOCK_TOKENS / cost.per_word))

    def prompt(index: int) -> Prompt:
        request = requests[index % len(requests)]
        left = cost.words(request.prompt_tokens)
        parts: list[str] = []
        for block in request.blocks:
            if left <= 0:
                break
            # A block is made whole and then cut: a shorter prompt still begins as a longer one does.
            parts.append(" ".join(words(seed, block, per_block).split(" ")[:left]))
            left -= per_block
        if left > 0:
            # Beyond all block names, which count from 0.
            parts.append(words(seed, (1 << 40) + index, left))
        return Prompt(text=" ".join(parts), max_tokens=request.output_tokens)

    return prompt


def read_prompts(lines: Iterable[str]) -> list[Prompt]:
    """Prompts of a file: a text in each line, or JSON lines with "prompt" or "messages", and perhaps "max_tokens".

    Raises:
        PromptsInvalid: a line of JSON without a prompt, or no line at all.
    """
    found: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        if not text.lstrip().startswith("{"):
            found.append(Prompt(text=text))
            continue
        try:
            said: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise PromptsInvalid(f"line {number} of the prompts is no JSON: {error}.") from None
        prompt, messages, most = said.get("prompt", ""), said.get("messages", ()), said.get("max_tokens")
        if not isinstance(prompt, str) or not isinstance(messages, list | tuple) or not (prompt or messages):
            raise PromptsInvalid(f'line {number} of the prompts needs a text "prompt" or a list "messages".')
        found.append(Prompt(text=prompt, messages=tuple(messages), max_tokens=most))  # pyright: ignore[reportUnknownArgumentType]
    if not found:
        raise PromptsInvalid("the file of prompts is empty; at least one line is needed.")
    return found


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests of a run: body number `index` is always the same.

    Attributes:
        distinct: Different bodies; later indexes begin again. None: no end of them.
        seed: Of sampling; request `index` gets seed + index. Greedy where the temperature is 0.
        options: Further fields of every body, such as {"ignore_eos": True}.
    """

    model: str
    chat: bool
    prompts: Prompts
    distinct: int | None = None
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    def index(self, number: int) -> int:
        """Which body the request `number` of a run carries."""
        return number if self.distinct is None else number % self.distinct

    def body(self, index: int, *, max_tokens: int | None = None) -> bytes:
        """The JSON body of a streamed request."""
        prompt = self.prompts(index)
        fields: dict[str, Any] = {"model": self.model}
        if self.chat:
            fields["messages"] = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        else:
            fields["prompt"] = prompt.text or "\n".join(str(m.get("content", "")) for m in prompt.messages)
        fields["max_tokens"] = max_tokens or prompt.max_tokens or self.max_tokens
        fields["temperature"] = self.temperature
        if self.temperature > 0:
            fields["seed"] = self.seed + index
        return msgspec.json.encode(
            fields | dict(self.options) | {"stream": True, "stream_options": {"include_usage": True}}
        )
