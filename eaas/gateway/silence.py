"""How long a worker with work may be silent before its choices go on elsewhere. Pure.

A worker that has work speaks at least every 50 ms (its beats). To move its choices is a cheap act: each costs a
prefill, the old attempt is void, and the worker is used again as soon as it speaks. So little evidence is enough: four
times the longest of its recent silences. That is never below LEAST_S, five beats, nor above MOST_S, which leaves 0.3 s
of a pause of one second for the replay. An alarm that proves false, because the silence ended soon after it, doubles
the bound, up to FALSE_MOST_S, for a minute: a host too busy to run its processes in time is not made busier.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_S = 0.25
MOST_S = 0.7
FALSE_MOST_S = 5.0
FORGIVE_S = 60.0
_TIMES = 4.0
# The longest silence fades by so much with each message: to a third after 500 of them.
_FADES = 0.998


@dataclass(slots=True)
class Silence:
    """What is known of one worker's silences."""

    longest_s: float = 0.0
    alarmed: bool = False
    _false_alarms: int = 0
    _last_false_s: float = 0.0

    def heard(self, silence_s: float, now_s: float) -> bool:
        """A silence has ended. Returns whether it was an alarm."""
        alarmed, self.alarmed = self.alarmed, False
        if alarmed and silence_s < 2.0 * self.bound_s(now_s):
            self._false_alarms += 1
            self._last_false_s = now_s
        # What was a freeze says nothing of the rhythm.
        self.longest_s = max(self.longest_s * _FADES, min(silence_s, MOST_S) if not alarmed else 0.0)
        return alarmed

    def bound_s(self, now_s: float) -> float:
        """The longest silence that is no alarm."""
        if self._false_alarms and now_s - self._last_false_s >= FORGIVE_S:
            self._false_alarms -= 1
            self._last_false_s = now_s
        bound_s = min(max(LEAST_S, _TIMES * self.longest_s), MOST_S)
        return min(bound_s * 2.0**self._false_alarms, FALSE_MOST_S) if self._false_alarms else bound_s
