"""When requests will have ended, learned online from those that have: median, 90th percentile, when to ask next. Pure.

What remains is the wait (those ahead, times how long each took in queues of such a size), and the tokens left times the
time of each with so many requests in progress. Tokens left: the hazard of ending at each length among requests alike,
among prompts as long, and among all, each leaning on the next wider one where it has seen too little; an output that
was cut says only that it would have been longer (Kaplan-Meier). All quantiles move by what came, so that each keeps its
level in the long run whatever the load does (Gibbs and Candes 2021).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any, NamedTuple

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
P50, P90 = LEVELS.index(0.5), LEVELS.index(0.9)
_HAZARDS = tuple(-math.log1p(-level) for level in LEVELS)
# Lengths go by sixths of an octave, up to 2^20 tokens; where nothing is known a third of each octave ends in it.
_PER_OCTAVE, _MOST_PLACES, _ENDS = 6, 120, 0.065
# What a group must have seen of a length to count as much as the next wider one; groups of requests alike.
_FEW, _MOST_GROUPS = 8.0, 1024
# Of each request, the one at its end included, a little under two; the least time between two of them, by its age.
_MEAN_POLLS, _MOST_POLLS, _LEAST_AFTER = 1.8, 5, 0.03


class Estimate(NamedTuple):
    """Seconds from now: the median and the 90th percentile of the end, and when to ask next."""

    p50_s: float
    p90_s: float
    poll_after_s: float


class Lengths:
    """Outputs that ended, by length; each half as much as the one `half` later."""

    def __init__(self, half: float) -> None:
        self._growth, self.one = 2.0 ** (1.0 / half), 1.0
        self.ended, self.whole = [0.0] * _MOST_PLACES, [0.0] * _MOST_PLACES

    def add(self, made: int, *, whole: bool) -> None:
        """Take in an output of `made` tokens. Args: whole: not cut."""
        # Later ones weigh more rather than earlier ones less: one place is written, and not all.
        self.one *= self._growth
        place = min(_MOST_PLACES - 1, int(_PER_OCTAVE * math.log2(made)))
        self.ended[place] += self.one
        self.whole[place] += self.one * whole
        if self.one > 1e9:
            self.ended, self.whole = ([x / self.one for x in counts] for counts in (self.ended, self.whole))
            self.one = 1.0


def lengths_of(groups: Sequence[Lengths], made: int, limit: int) -> list[float]:
    """The whole length of an output that has `made` tokens, at each of LEVELS. Args: groups: the widest first."""
    at, passed, found = max(0.0, _PER_OCTAVE * math.log2(made + 0.5)), 0.0, list[float]()
    reached = [sum(group.ended[int(at) :]) for group in groups]
    while len(found) < len(LEVELS) and at < _MOST_PLACES and 2.0 ** (at / _PER_OCTAVE) < limit:
        place, ends = int(at), _ENDS
        for number, group in enumerate(groups):
            ended, whole, few = group.ended[place], group.whole[place], _FEW * group.one
            # Those that were cut there were there for half of it.
            ends = (whole + few * ends) / (max(whole, reached[number] - (ended - whole) / 2) + few)
            reached[number] -= ended
        hazard = -math.log1p(-min(ends, 0.999))
        after = passed + hazard * (place + 1 - at)
        while len(found) < len(LEVELS) and _HAZARDS[len(found)] <= after:
            inside = (_HAZARDS[len(found)] - passed) / hazard
            found.append(2.0 ** ((at + inside) / _PER_OCTAVE))
        passed, at = after, place + 1.0
    found += [limit] * (len(LEVELS) - len(found))
    return [max(made + 0.5, min(length, limit)) for length in found]


class _Paces:
    """Seconds by how busy it was, the older the less."""

    def __init__(self) -> None:
        self._seen_s: dict[int, float] = {}

    def learn(self, busy: int, took_s: float) -> None:
        usual_s = self._seen_s.get(busy, took_s := max(1e-9, took_s))
        self._seen_s[busy] = usual_s * (took_s / usual_s) ** 0.1

    def at(self, busy: int, unknown_s: float) -> float:
        near = min(self._seen_s, key=lambda seen: abs(seen - busy), default=busy)
        return self._seen_s.get(near, unknown_s)


class _Calibration:
    """What to add to the logarithms of times so that each keeps its level."""

    def __init__(self) -> None:
        self._offsets, self._seen = [0.0] * len(LEVELS), 0

    def estimate(self, raw_s: Sequence[float], price_s: float) -> Estimate:
        # Offsets learn apart, and may cross.
        times_s = sorted(raw * math.exp(offset) for raw, offset in zip(raw_s, self._offsets, strict=True))
        return Estimate(times_s[P50], times_s[P90], next_poll_s(times_s, price_s))

    def learn(self, raw_s: Sequence[float], took_s: float) -> None:
        self._seen += 1
        # Fast at first, and never so slow that it would not follow a load.
        step = max(0.05, 0.4 / math.sqrt(self._seen))
        for number, level in enumerate(LEVELS):
            # By the present offset: by the one of then, a whole burst would be corrected for the same error.
            held = took_s <= raw_s[number] * math.exp(self._offsets[number])
            self._offsets[number] += step * (level - held)


def next_poll_s(times_s: Sequence[float], price_s: float) -> float:
    """When to ask next so that the time lost past the end, and `price_s` for each question, are least together.

    By dynamic programming, as if nothing were learned in between. Args: times_s: at each of LEVELS.
    """
    shares = [b - a for a, b in pairwise((0.0, *LEVELS[:-1], 1.0))]
    ends = [(a + b) / 2 for a, b in pairwise((0.0, *times_s))]
    costs, choice, left = [0.0] * (len(ends) + 1), 0, 0.0
    for start in range(len(ends) - 1, -1, -1):
        left += shares[start]
        share = moment = 0.0
        costs[start] = math.inf
        for stop in range(start, len(ends)):
            share, moment = share + shares[stop], moment + shares[stop] * ends[stop]
            cost = share * times_s[stop] - moment + price_s * left + costs[stop + 1]
            if cost < costs[start]:
                costs[start], choice = cost, stop
    return times_s[choice]


@dataclass(slots=True)
class _Request:
    limit: int
    background: bool
    groups: list[Lengths]
    since_s: float
    turn: int
    ahead: int
    first_s: float | None = None
    busy: int = 0
    poll_at_s: float = 0.0
    told: list[tuple[float, list[float], _Calibration]] = field(default_factory=list[Any])


class Eta:
    """What is known of the requests in progress, and of how others went. Set `workers`: those that take requests."""

    def __init__(self) -> None:
        self.workers = 1
        self._requests: dict[str, _Request] = {}
        self._all, self._groups = Lengths(400.0), dict[int, Lengths]()
        self._tokens, self._waits = _Paces(), (_Paces(), _Paces())
        self._calibrations = {key: _Calibration() for key in product((False, True), repeat=3)}
        self._submitted, self._started, self._price_s = 0, 0, 1.0
        # Between two ends while there is work, since the last one, and places promised to who was refused.
        self._gap_s, self._end_s, self._promised = 0.0, 0.0, 0.0
        self._lasted_s: dict[str, float] = {}

    def submitted(
        self, id: str, now_s: float, *, prompt: int, limit: int, alike: Hashable, background: bool = False
    ) -> None:
        """A request begins to wait, for a worker or at one. Args: prompt, limit: tokens of it, and at most of its
        output. alike: equal where lengths may be. background: others may go before it."""
        if not self._requests:
            self._end_s = now_s
        self._submitted += 1
        # Two that are not alike may share a group, of so many.
        keys = (-prompt.bit_length(), 200.0), (hash(alike) % _MOST_GROUPS, 50.0)
        groups = [self._all, *(self._groups.setdefault(key, Lengths(half)) for key, half in keys)]
        ahead = self._submitted - self._started
        self._requests[id] = _Request(limit, background, groups, now_s, self._submitted, ahead)

    def began(self, id: str, now_s: float) -> None:
        """Its first token is there."""
        request = self._requests.get(id)
        if request is None or request.first_s is not None:
            return
        self._started += 1
        request.first_s, request.busy = now_s, self._busy()
        each_s = (now_s - request.since_s) / request.ahead
        self._waits[request.background].learn(request.ahead.bit_length(), each_s)

    def ended(self, id: str, now_s: float, *, made: int, finish: str) -> None:
        """It is over. Args: made: tokens of the output. finish: "stop" or "length"; else it was given up."""
        request = self._requests.pop(id, None)
        if request is None:
            return
        self._gap_s += 0.1 * (now_s - self._end_s - self._gap_s)
        self._end_s, self._promised = now_s, max(0.0, self._promised - 1.0)
        for group in request.groups if made else ():
            group.add(made, whole=finish == "stop")
        self._started += request.first_s is None
        if request.first_s is not None:
            busy = (request.busy + self._busy()) // 2
            self._tokens.learn(busy, (now_s - request.first_s) / max(1, made - 1))
        if finish not in ("stop", "length"):
            return
        for at_s, raw_s, calibration in request.told:
            calibration.learn(raw_s, now_s - at_s)
        if request.told:
            more = min(len(request.told), _MOST_POLLS) - _MEAN_POLLS
            self._price_s = min(1e4, max(1e-4, self._price_s * math.exp(0.02 * more)))

    def estimate(self, id: str, now_s: float, *, made: int) -> Estimate | None:
        """Of a request in progress that has so many tokens; None: it is not. Who asks is told when to ask again."""
        request = self._requests.get(id)
        if request is None:
            return None
        ahead = 0 if request.first_s is not None else max(1, request.turn - self._started)
        left = [length - made for length in lengths_of(request.groups, made, request.limit)]
        raw_s, calibration = self._raw_s(left, ahead, request.background)
        p50_s, p90_s, after_s = calibration.estimate(raw_s, self._price_s)
        # However wrong all that is: one that stands still is asked for ever more seldom.
        after_s = max(after_s, _LEAST_AFTER * (now_s - request.since_s))
        if now_s >= request.poll_at_s:
            request.poll_at_s = now_s + after_s
            request.told.append((now_s, raw_s, calibration))
        return Estimate(p50_s, p90_s, after_s)

    def sent_now(self) -> Estimate:
        """Of a request of which nothing is known yet, sent now."""
        ahead, lengths = self._submitted + 1 - self._started, lengths_of([self._all], 0, 1 << 20)
        raw_s, calibration = self._raw_s(lengths, ahead, False)
        return calibration.estimate(raw_s, self._price_s)

    def _raw_s(self, left: Sequence[float], ahead: int, background: bool) -> tuple[list[float], _Calibration]:
        wait_s = ahead * self._waits[background].at(ahead.bit_length(), 0.0)
        token_s = self._tokens.at(self._busy(), 0.02)
        calibration = self._calibrations[background, ahead > 0, wait_s > token_s * left[P50]]
        return [max(1e-6, wait_s + token_s * more) for more in left], calibration

    def freed_s(self, now_s: float, requests: float = 1.0) -> float:
        """Until as many have ended, beside those that others wait for who were told so before."""
        self._promised += requests
        return self._promised * max(self._gap_s, now_s - self._end_s)

    def lasted(self, cause: str, took_s: float) -> None:
        """What nobody could be served without is back."""
        self._lasted_s[cause] = max(1e-3, math.sqrt(took_s * self._lasted_s.get(cause, took_s)))

    def back_s(self, cause: str, age_s: float) -> float:
        """Until that is back which has been away for so long: what is left of the usual; beyond it, as long again."""
        left_s = self._lasted_s.get(cause, 0.0) - age_s
        return left_s if left_s > 0.0 else age_s

    def _busy(self) -> int:
        return int(4 * math.log2(1.0 + len(self._requests) / self.workers))
