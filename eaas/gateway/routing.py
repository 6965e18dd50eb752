"""The experts of one choice's tokens, as its worker tells them, and as clients get them. Pure."""

from __future__ import annotations

import base64
import io

import numpy as np

from eaas.worker.protocol import RoutedExperts

# Of one request, in prompts and outputs, counting each choice: what is told of them is kept until it is answered.
MOST_ROUTED_TOKENS = 1 << 17


class Routing:
    """Gathered piece by piece; what a replay tells again counts once."""

    __slots__ = ("_pieces", "_shape", "_stop", "_width")

    def __init__(self, start: int) -> None:
        """Args: start: The first token that the client wants, at most the length of the prompt."""
        self._stop = start
        self._pieces: list[bytes] = []
        self._shape = (0, 0)
        self._width = 1

    def take(self, piece: RoutedExperts) -> None:
        """Take those of tokens number ``piece.start`` to ``piece.stop`` - 1; what leaves a gap is left out."""
        tokens = piece.stop - piece.start
        if piece.start > self._stop or tokens < 1:
            return
        self._shape = (piece.layers, piece.top_k)
        bytes_each = len(piece.experts) // tokens
        self._width = bytes_each // (piece.layers * piece.top_k)
        self._pieces.append(piece.experts[(self._stop - piece.start) * bytes_each :])
        self._stop = max(self._stop, piece.stop)

    def encoded(self) -> str | None:
        """As vLLM returns them: base64 of a .npy file, [tokens - 1, layers, top_k]; None where none were told.

        No step has computed the last token, so no experts were chosen for it.
        """
        if not self._pieces:
            return None
        found = np.frombuffer(b"".join(self._pieces), f"<u{self._width}")
        file = io.BytesIO()
        np.save(file, found.reshape(-1, *self._shape), allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()
