"""What a key may still spend: requests and tokens that come back evenly over a minute. Pure.

A budget begins full, holds what comes back in a minute and no more, and may go below nothing: the tokens of an answer
are known only when it ends, and whoever wrote more than was reckoned waits until that has come back.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MINUTE_S = 60.0


class Budget:
    """So many a minute."""

    __slots__ = ("_at_s", "_left", "per_minute")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._left, self._at_s = float(per_minute), now_s

    def left(self, now_s: float) -> float:
        """What may be spent now; below 0 while a debt is paid back."""
        came_back = max(0.0, now_s - self._at_s) * self.per_minute / MINUTE_S
        self._left = min(float(self.per_minute), self._left + came_back)
        self._at_s = max(self._at_s, now_s)
        return self._left

    def wait_s(self, amount: float, now_s: float) -> float:
        """How long until so much may be spent: 0 now. What is more than the whole budget needs it full."""
        lacking = min(amount, self.per_minute) - self.left(now_s)
        return max(0.0, lacking) * MINUTE_S / self.per_minute

    def spend(self, amount: float, now_s: float) -> None:
        """Take so much, whether it is there or not; below 0 gives it back."""
        self._left = min(float(self.per_minute), self.left(now_s) - amount)

    def full_s(self, now_s: float) -> float:
        return (self.per_minute - self.left(now_s)) * MINUTE_S / self.per_minute


class Overdrawn(NamedTuple):
    """Why a request must wait: `kind` is "requests" or "tokens"."""

    kind: str
    per_minute: int
    retry_after_s: int


class Account:
    """The budgets of one name, and its weight beside others."""

    def __init__(self, name: str) -> None:
        self.name, self.weight = name, 1
        self.requests: Budget | None = None
        self.tokens: Budget | None = None

    def set(self, requests_per_minute: int | None, tokens_per_minute: int | None, now_s: float) -> None:
        """Use these budgets from now on; one that stays the same keeps what was spent of it."""
        self.requests = _same_or_new(self.requests, requests_per_minute, now_s)
        self.tokens = _same_or_new(self.tokens, tokens_per_minute, now_s)

    def spend(self, now_s: float, *, requests: int = 0, tokens: int = 0) -> Overdrawn | None:
        """Spend so much; nothing is spent where the answer is why not. Args: tokens: as a request is reckoned."""
        wanted = [("requests", self.requests, requests), ("tokens", self.tokens, tokens)]
        for kind, budget, amount in wanted:
            wait_s = budget.wait_s(amount, now_s) if budget is not None else 0.0
            if budget is not None and wait_s > 0:
                return Overdrawn(kind, budget.per_minute, max(1, math.ceil(wait_s)))
        for _, budget, amount in wanted:
            if budget is not None:
                budget.spend(amount, now_s)
        return None

    def settle(self, reserved: int, used: int, now_s: float) -> None:
        """Replace what was reckoned by what it was."""
        if self.tokens is not None:
            self.tokens.spend(used - reserved, now_s)

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """What a client is told of its budgets, under the names that OpenAI gave them."""
        told: list[tuple[bytes, bytes]] = []
        for kind, budget in ((b"requests", self.requests), (b"tokens", self.tokens)):
            if budget is not None:
                told += [
                    (b"x-ratelimit-limit-" + kind, b"%d" % budget.per_minute),
                    (b"x-ratelimit-remaining-" + kind, b"%d" % max(0, math.floor(budget.left(now_s)))),
                    (b"x-ratelimit-reset-" + kind, b"%.3fs" % budget.full_s(now_s)),
                ]
        return told


def _same_or_new(budget: Budget | None, per_minute: int | None, now_s: float) -> Budget | None:
    if per_minute is None:
        return None
    return budget if budget is not None and budget.per_minute == per_minute else Budget(per_minute, now_s)
