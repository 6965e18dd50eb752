"""The token log of one choice: which tokens the client owns, and which message may add the next one. Pure.

Workers die, freeze and wake again. A token is accepted only from the current attempt and only at the next
index, so that whatever a worker sends late or twice, the client sees each token once and in order.
"""

from __future__ import annotations


class TokenLog:
    """Prompt, output so far, and the attempt that may extend it."""

    __slots__ = ("attempt", "losses", "output", "prompt")

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.output: list[int] = []
        self.attempt = 1
        self.losses = 0

    def accept(self, attempt: int, index: int, token: int) -> bool:
        """Append ``token`` if it is the next of the current attempt; else change nothing and say False."""
        if attempt != self.attempt or index != len(self.output):
            return False
        self.output.append(token)
        self.losses = 0
        return True

    def move(self) -> None:
        """End the current attempt, for no fault of the request or its worker."""
        self.attempt += 1

    def lose(self) -> int:
        """End the current attempt: nothing more is accepted from it.

        Returns:
            Attempts lost since the last accepted token: a request that brings down every worker that takes it
            must not be handed on for ever.
        """
        self.attempt += 1
        self.losses += 1
        return self.losses
