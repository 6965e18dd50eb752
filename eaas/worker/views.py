"""What the gates of some layers do, over rows without end, in a memory that does not grow. Pure.

The commonest tokens are found as Misra and Gries do, a step at a time (Agarwal et al., "Mergeable Summaries", 2012): a
token that is more than one row in 257 has a counter. Its experts are counted only while it has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from eaas.worker.protocol import LayerView

WINDOWS = 24
WINDOW_S = 5.0
MOST_PAIRS = 32
MOST_TOKENS = 24
EXPERTS_OF_TOKEN = 8
_COUNTERS = 256
# Of the type of what it is added to: numpy then takes a path that is 25 times as fast.
_ONE = np.int32(1)


class Views:
    """Of rows since it was made. Memory: 4 * layers * experts * (experts + 256) bytes, less where little was chosen."""

    def __init__(self, layers: Iterable[int], experts: int, top_k: int) -> None:
        """Args: layers: those that have a gate, numbered among all."""
        self._layers = tuple(layers)
        self._place = {layer: place for place, layer in enumerate(self._layers)}
        count = len(self._layers)
        self._experts = experts
        # Sums of entropies, and of how many rows, by window, the newest last.
        self._entropies = np.zeros((WINDOWS, 2, count))
        self._window = 0
        self._lower, self._higher = np.triu_indices(top_k, 1)
        self._pairs = np.zeros((count, experts * experts), np.int32)
        # Counts only rise: no pair below the last one shown need be looked at.
        self._least = [1] * count
        self._slot_of: dict[int, int] = {}
        self._tokens = [-1] * _COUNTERS
        self._counts = np.zeros(_COUNTERS, np.int64)
        self._chosen = np.zeros((_COUNTERS, count, experts), np.int32)

    def add(
        self,
        tokens: NDArray[np.int32],
        gates: Mapping[int, NDArray[np.float32]],
        chosen: Mapping[int, NDArray[np.float32]],
        at_s: float,
    ) -> None:
        """Take in the rows of a step. Layers may be missing in either mapping.

        Args:
            tokens: [n].
            gates: Logits [n, experts] by layer.
            chosen: Ids of experts [n, top_k] by layer.
            at_s: Monotonic.
        """
        if gates:
            self._turn(at_s)
            places = [self._place[layer] for layer in gates]
            found = gate_entropy(np.stack(list(gates.values())))
            sound = np.isfinite(found)
            self._entropies[-1, 0, places] += np.where(sound, found, 0).sum(axis=1)
            self._entropies[-1, 1, places] += sound.sum(axis=1)
        if chosen:
            places = np.array([self._place[layer] for layer in chosen])
            ids = np.sort(np.stack(list(chosen.values())).astype(np.int64), axis=-1)
            pairs = ids[..., self._lower] * self._experts + ids[..., self._higher]
            pairs += (places * self._pairs.shape[1])[:, None, None]
            np.add.at(self._pairs.reshape(-1), pairs.reshape(-1), _ONE)
            slots = self._slots(tokens)
            kept = slots >= 0
            cells = slots[kept] * len(self._layers) + places[:, None]
            cells = cells[..., None] * self._experts + ids[:, kept]
            np.add.at(self._chosen.reshape(-1), cells.reshape(-1), _ONE)

    def _turn(self, at_s: float) -> None:
        """Begin the windows that have come."""
        passed = min(WINDOWS, int(at_s // WINDOW_S) - self._window)
        if passed > 0:
            self._entropies[:-passed] = self._entropies[passed:]
            self._entropies[-passed:] = 0
            self._window = int(at_s // WINDOW_S)

    def _slots(self, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
        """Count the tokens; the counter of each [n], negative where it has none."""
        names, which, counts = np.unique(tokens, return_inverse=True, return_counts=True)
        slots = np.array([self._slot_of.get(name, -1) for name in names.tolist()], np.int64)
        known = slots >= 0
        self._counts[slots[known]] += counts[known]
        new = np.flatnonzero(~known)
        if len(new):
            # Of old and new counts all are lowered alike, until no more are above 0 than there are counters.
            every = np.concatenate([self._counts, counts[new]])
            every = np.maximum(every - np.partition(every, len(new) - 1)[len(new) - 1], 0)
            self._counts, left = every[:_COUNTERS], every[_COUNTERS:]
            new = new[left > 0]
            free = np.flatnonzero(self._counts == 0)[: len(new)]
            self._counts[free] = left[left > 0]
            self._chosen[free] = 0
            slots[new] = free
            for slot, name in zip(free.tolist(), names[new].tolist(), strict=True):
                self._slot_of.pop(self._tokens[slot], None)
                self._slot_of[name], self._tokens[slot] = slot, name
            # A counter that fell to 0 may have gone to another of these tokens.
            slots[known] = [self._slot_of.get(name, -1) for name in names[known].tolist()]
        return slots[which]

    def summary(self) -> list[LayerView]:
        """Of each layer, whether or not anything of it was added."""
        sums, rows = self._entropies[:, 0], self._entropies[:, 1]
        means = np.where(rows > 0, sums / np.maximum(rows, 1), -1.0).T.tolist()
        slots = np.argsort(-self._counts, kind="stable")[:MOST_TOKENS]
        slots = slots[self._counts[slots] > 0]
        counts = self._chosen[slots]
        best = np.argsort(-counts, axis=-1, kind="stable")[..., :EXPERTS_OF_TOKEN]
        chosen = np.stack([best, np.take_along_axis(counts, best, -1)], axis=-1).tolist()
        names = [self._tokens[slot] for slot in slots]
        views: list[LayerView] = []
        for place, layer in enumerate(self._layers):
            experts = ([(e, n) for e, n in of_token[place] if n] for of_token in chosen)
            tokens = [(name, found) for name, found in zip(names, experts, strict=True) if found]
            entropy = means[place] if max(means[place]) >= 0 else []
            views.append(LayerView(layer, entropy, self._pairs_of(place), tokens))
        return views

    def _pairs_of(self, place: int) -> list[tuple[int, int, int]]:
        counts = self._pairs[place]
        likely = np.flatnonzero(counts >= self._least[place])
        likely = likely[np.argsort(-counts[likely], kind="stable")[:MOST_PAIRS]].tolist()
        if len(likely) == MOST_PAIRS:
            self._least[place] = int(counts[likely[-1]])
        return [(pair // self._experts, pair % self._experts, int(counts[pair])) for pair in likely]


def gate_entropy(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Entropy of softmax over the last axis, of the greatest possible: 0 to 1. Not finite where the logits are not."""
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max(axis=-1, keepdims=True)
        scores = np.exp(shifted)
        total = scores.sum(axis=-1)
        found = np.log(total) - (scores * shifted).sum(axis=-1) / total
    return found / max(math.log(logits.shape[-1]), 1e-9)
