"""How long steps take by their rows, learned from those that were measured; and what that makes of prompts. Pure.

Whoever generates waits for the whole step, rows of others' prompts included. The more such rows, the longer between two
tokens; the fewer, the slower the prompt, since a step reads all its weights anew. `rows_beside` weighs these two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

# A step with prompts beside it is at most so many times as long as one without.
STRETCH = 2.0
# Of the speed that prompts have alone, however many wait: the rest of it would make a step several times as long.
MOST_SHARE = 0.9
# How fast a step displaces what was thought of its size, and of all.
OWN, ALL = 1 / 8, 1 / 16
# Of steps of one size, one after another, one in so many is looked at.
EVERY = 4
# What the first looks at a size find is of that size, and not of a machine that has become slower: so many of them move
# it alone, and fast.
YOUNG, OWN_YOUNG = 8, 1 / 2
# Of steps with prompts, one after another, so many; then one without, whose length is what the others are held against.
MOST_MIXED = 64


class StepTime:
    """How long a step of so many rows takes: a curve through a few sizes, the latest measured counting most.

    One more row makes a step longer, but by no more than its even part: that bounds what is thought of sizes that were
    not seen, from their neighbors.

    Attributes:
        known: Whether any step was measured; until then a row is thought to take a quarter of a step of one.
    """

    def __init__(self, most: int) -> None:
        """Args: most: rows of the longest step."""
        self.known = False
        self._sizes: list[int] = [1, 2, 3, 4, 5]
        while self._sizes[-1] < most:
            self._sizes.append(self._sizes[-3] * 2)
        self._times: list[float] = [3.0 + size for size in self._sizes]
        self._looks = [0] * len(self._sizes)
        self._rows = self._again = 0

    def of(self, rows: int) -> float:
        """Seconds that a step of so many rows takes."""
        sizes, times = self._sizes, self._times
        at = bisect_left(sizes, rows, 1, len(sizes) - 1)
        rise = (times[at] - times[at - 1]) / (sizes[at] - sizes[at - 1])
        return times[at] + rise * (rows - sizes[at])

    def took(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long. One that waited for something else counts little."""
        self._again = (self._again + 1) % EVERY if rows == self._rows else 0
        self._rows = rows
        if self._again or seconds <= 0:
            return
        sizes, times = self._sizes, self._times
        ratio = seconds / self.of(rows)
        if not self.known:
            self.known, self._times = True, [time * ratio for time in times]
            return
        off = min(max(ratio, 1 / 3), 3.0) - 1
        high = bisect_left(sizes, rows, 1, len(sizes) - 1)
        part = (rows - sizes[high - 1]) / (sizes[high] - sizes[high - 1])
        nearest = high if part > 0.5 else high - 1
        self._looks[nearest] += 1
        young = self._looks[nearest] <= YOUNG
        every, own = (1.0, OWN_YOUNG) if young else (1 + ALL * off, OWN)
        times = self._times = [time * every for time in times]
        times[high] *= 1 + own * part * off
        times[high - 1] *= 1 + own * (1 - part) * off
        for at in range(nearest + 1, len(sizes)):
            before = times[at - 1]
            times[at] = min(max(times[at], before), before * sizes[at] / sizes[at - 1])
        for at in range(nearest - 1, -1, -1):
            after = times[at + 1]
            times[at] = max(min(times[at], after), after * sizes[at] / sizes[at + 1])


def rows_beside(time: StepTime, generating: int, waiting: int, most: int, share: float) -> int:
    """How many rows of prompts, 1 to `most`, a step has beside those of requests that generate.

    As many as leave it within STRETCH times its length without; but not fewer than it takes to compute prompts at
    `share` of the speed that they have alone, or, where many requests wait for their prompts, at the part that they
    are of all.
    """
    if not time.known:
        return most
    share = max(share, min(MOST_SHARE, waiting / (waiting + generating)))
    longest_s, rows = STRETCH * time.of(generating), range(1, most + 1)
    slowest = share * (generating + most) / time.of(generating + most)
    short = bisect_right(rows, longest_s, key=lambda count: time.of(generating + count))
    quick = bisect_left(rows, slowest, key=lambda count: count / time.of(generating + count)) + 1
    return min(most, max(short, quick))
