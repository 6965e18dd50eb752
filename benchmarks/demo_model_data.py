"""Training data of the demonstration model: tokenizer, random segmentation, chat layout, batches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from benchmarks.make_model import SPECIAL_TOKENS

END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS


def train_tokenizer(text: str, vocab: int) -> Tokenizer:
    """Byte-level BPE of `vocab` entries, the three special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


class Segmenter:
    """Segments words at random: each BPE merge is left out with probability `dropout` (arXiv 1910.13267).

    A few variants of each distinct word are drawn once; each occurrence then takes one of them.
    """

    def __init__(self, tokenizer: Tokenizer, dropout: float, variants: int, rng: np.random.Generator) -> None:
        model = json.loads(tokenizer.to_str())["model"]
        self.ids: dict[str, int] = model["vocab"]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        self.split = tokenizer.pre_tokenizer.pre_tokenize_str
        self.specials = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")
        self.dropout, self.variants, self.rng = dropout, variants, rng
        self.known: dict[str, list[list[int]]] = {}

    def segment(self, word: str) -> list[int]:
        parts = list(word)
        while len(parts) > 1:
            ranked = [
                (rank, i)
                for i, pair in enumerate(pairwise(parts))
                if (rank := self.ranks.get(pair)) is not None
                and (self.dropout == 0 or self.rng.random() >= self.dropout)
            ]
            if not ranked:
                break
            _, i = min(ranked)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts]

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, another random segmentation at each call."""
        out: list[int] = []
        for piece in self.specials.split(text):
            if piece in self.ids and piece.startswith("<|"):
                out.append(self.ids[piece])
                continue
            words = [word for word, _ in self.split(piece)]
            picks = self.rng.integers(self.variants, size=len(words)).tolist()
            for word, pick in zip(words, picks, strict=True):
                if word not in self.known:
                    self.known[word] = [self.segment(word) for _ in range(self.variants)]
                out.extend(self.known[word][pick])
        return np.asarray(out, np.int64)


def as_chat(text: str) -> str:
    """The speeches of a play as conversations: of each two in turn, one is asked and one answered."""
    speeches = [part.partition(":\n")[2] for part in text.split("\n\n")]
    pairs = [(a, b) for a, b in pairwise(speeches) if a and b]
    return "".join(
        f"{TURN_START}user\n{a}{TURN_END}\n{TURN_START}assistant\n{b}{TURN_END}{END_OF_TEXT}" for a, b in pairs
    )


def batches(
    segmenter: Segmenter, text: str, chat: str, tokens: int, chat_share: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches (ids, next ids), both [rows, length] with rows * length = tokens.

    Random windows; an epoch is one new segmentation. Most windows are short because attention costs their
    square; now and then come long ones, so that the model holds to max_position_embeddings.
    """
    rng = segmenter.rng
    while True:
        plain, talk = segmenter.encode(text), segmenter.encode(chat)
        for step in range(max(1, round(len(plain) / (tokens * (1 - chat_share))))):
            length = {7: 1024, 15: 2048}.get(step % 16, 256)
            from_talk = rng.random(tokens // length) < chat_share
            sources = [talk if pick else plain for pick in from_talk]
            starts = [rng.integers(len(source) - length) for source in sources]
            block = torch.from_numpy(
                np.stack([ids[at : at + length + 1] for ids, at in zip(sources, starts, strict=True)])
            )
            yield block[:, :-1], block[:, 1:]
