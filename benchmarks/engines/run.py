"""What every engine of a benchmark can do, and what it says of a run. No package of any engine is needed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

PROMPT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens per second of a batch: once every prompt has its first token, and prompts' computation included."""

    decode: float
    whole: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One batch, generated greedily.

    Attributes:
        tokens: New tokens of each prompt.
        total_s: From the start to the last token.
        steps_s: Seconds of each step; the first ones computed the prompts.
        made: Tokens that each step made.
    """

    tokens: list[list[int]]
    total_s: float
    steps_s: list[float]
    made: list[int]

    @property
    def decode_steps_s(self) -> list[float]:
        """Seconds of the steps that computed one row for every prompt and nothing else."""
        full = [s for s, made in zip(self.steps_s, self.made, strict=True) if made == len(self.tokens)]
        # The first of them computed the last of the prompts.
        return full[1:]

    @property
    def speed(self) -> Speed:
        """Its speed; decoding counts from the step that gave the last prompt its first token."""
        begun = self.made.index(len(self.tokens)) + 1
        decode_s = max(sum(self.steps_s[begun:]), 1e-9)
        return Speed(decode=sum(self.made[begun:]) / decode_s, whole=sum(self.made) / self.total_s)


class BenchmarkEngine(Protocol):
    """One model, loaded; greedy; ends a request at its token count only."""

    facts: dict[str, Any]  # for the result: library, build, threads

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        """`tokens` new tokens for every prompt, computed together."""
        ...

    def logits(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 [prompts, vocab] after the last token of each prompt."""
        ...

    def close(self) -> None:
        """End threads and let memory go."""
        ...


def prompts_for(batch: int, vocab: int, seed: int, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """`batch` random prompts of `tokens` ids below `vocab`; no special token among them."""
    return np.random.default_rng(seed).integers(300, vocab, size=(batch, tokens)).tolist()
