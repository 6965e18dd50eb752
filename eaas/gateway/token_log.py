"""The token log of one choice: which tokens the client owns, and which message may add the next one. Pure.

Workers die, freeze and wake again. A token is accepted only from the current attempt and only at the next
index, so that whatever a worker sends late or twice, the client sees each token once and in order.
"""

from __future__ import annotations


class TokenLog:
    """Prompt, output so far, and the attempt that may extend it."""

    __slots__ = ("attempt", "losses", "lost_alone", "output", "prompt")

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.output: list[int] = []
        self.attempt = 1
        # Attempts lost since the last accepted token, and those of them in which nothing else can have been the cause.
        self.losses = self.lost_alone = 0

    def accept(self, attempt: int, index: int, token: int) -> bool:
        """Append ``token`` if it is the next of the current attempt; else change nothing and say False."""
        if attempt != self.attempt or index != len(self.output):
            return False
        self.output.append(token)
        self.losses = self.lost_alone = 0
        return True

    def move(self) -> None:
        """End the current attempt, for no fault of the request or its worker."""
        self.attempt += 1

    def lose(self, *, alone: bool = False) -> None:
        """End the current attempt with its worker: nothing more is accepted from it.

        Args:
            alone: No other request there waited for its first token, so that this one may have brought it down.
        """
        self.attempt += 1
        self.losses += 1
        self.lost_alone += alone
