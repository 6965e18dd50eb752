"""Sequences of tokens that an output must not hold. Pure.

Which tokens they forbid next follows from the output alone, so that a replay and a preemption forbid the same.
"""

from __future__ import annotations

from collections.abc import Sequence


class BadWords:
    """The sequences of one request: the last token of each is forbidden after those before it."""

    __slots__ = ("_after", "_always")

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._always = [tokens[0] for tokens in sequences if len(tokens) == 1]
        # By the token before the last, so that a step looks at those alone which may be at their end.
        self._after: dict[int, list[list[int]]] = {}
        for tokens in sequences:
            if len(tokens) > 1:
                self._after.setdefault(tokens[-2], []).append(list(tokens))

    def forbidden(self, output: Sequence[int]) -> list[int]:
        """Tokens that must not come next after these, some of them perhaps twice."""
        ending = self._after.get(output[-1], ()) if output else ()
        return [*self._always, *(tokens[-1] for tokens in ending if output[1 - len(tokens) :] == tokens[:-1])]
