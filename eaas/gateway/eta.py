"""When requests will have ended, learned online from those that have: median, 90th percentile, when to ask next. Pure.

What remains is the wait (those ahead, times how long each took in queues of such a size), and the tokens left times the
time of each with so many requests in progress. Tokens left: the hazard of ending at each length among requests alike,
among prompts as long, and among all, each leaning on the next wider one where it has seen too little; an output that
was cut says only that it would have been longer (Kaplan-Meier). All quantiles move by what came, so that each keeps its
level in the long run whatever the load does (Gibbs and Candes 2021).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise, product
from typing import NamedTuple

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
P50, P90 = LEVELS.index(0.5), LEVELS.index(0.9)
_HAZARDS = tuple(-math.log1p(-level) for level in LEVELS)
# Lengths go by sixths of an octave, up to 2^20 tokens. Where nothing is known: of those that come to each, so many end
# there. Half end by 128 tokens, and nine of ten by 700.
_PER_OCTAVE, _MOST_PLACES = 6, 120
_ENDS = [min(0.5, 0.066 * ((place + 0.5) / 42) ** 3) for place in range(_MOST_PLACES)]
# Of what nobody has judged yet, the 90th percentile is said to be e^(0.4 * 3) times as long: a speed is not known.
_DOUBT = 3.0
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
        place = int(at)
        ends = _ENDS[place]
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

    def knows(self, busy: int) -> bool:
        return max(self._seen_s, default=-1) >= busy


class _Calibration:
    """What to add to the logarithms of times so that each keeps its level."""

    def __init__(self) -> None:
        self._offsets, self._seen = [0.0] * len(LEVELS), 0.0

    def offset(self, number: int) -> float:
        """Of that level, as it is now; the fewer have been judged, the farther apart they are."""
        return self._offsets[number] + _DOUBT * (LEVELS[number] - 0.5) / (1.0 + self._seen / _FEW)

    def estimate(self, raw_s: Sequence[float], price_s: float) -> Estimate:
        # Offsets learn apart, and may cross.
        times_s = sorted(raw * math.exp(self.offset(number)) for number, raw in enumerate(raw_s))
        return Estimate(times_s[P50], times_s[P90], next_poll_s(times_s, price_s))

    def learn(self, number: int, *, held: bool) -> None:
        """Args: held: a request ended by what was told of it at that level."""
        self._seen += 1.0 / len(LEVELS)
        # Fast at first, and never so slow that it would not follow a load.
        step = max(0.05, 0.4 / math.sqrt(max(1.0, self._seen)))
        self._offsets[number] += step * (LEVELS[number] - held)


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
class _Told:
    """What was told of a request, and the levels of which it is not known yet whether they held."""

    at_s: float
    raw_s: list[float]
    calibration: _Calibration
    unknown: set[int] = field(default_factory=lambda: set(range(len(LEVELS))))

    def due_s(self, number: int) -> float:
        # By the present offset: by the one of then, a whole burst would be corrected for the same error.
        return self.at_s + self.raw_s[number] * math.exp(self.calibration.offset(number))


@dataclass(slots=True)
class _Request:
    limit: int
    background: bool
    groups: list[Lengths]
    since_s: float
    turn: int
    ahead: int
    first_s: float | None = None
    at_once: int = 1
    busy: int = 0
    poll_at_s: float = 0.0
    told: list[_Told] = field(default_factory=list[_Told])


class Eta:
    """What is known of the requests in progress, and of how others went. Set `workers`: those that take requests."""

    def __init__(self) -> None:
        self.workers = 1
        self._requests: dict[str, _Request] = {}
        self._all, self._groups = Lengths(400.0), dict[int, Lengths]()
        self._tokens, self._waits = _Paces(), (_Paces(), _Paces())
        self._calibrations = {key: _Calibration() for key in product((False, True), repeat=3)}
        self._submitted, self._started, self._price_s, self._polled = 0, 0, 1.0, 0
        # By when each level of what was told holds or is late; turns tell those of one moment apart.
        self._due, self._turns = list[tuple[float, int, int, _Told]](), count()
        # Between two ends while there is work, since the last one, and places promised to who was refused.
        self._gap_s, self._end_s, self._promised = 0.0, 0.0, 0.0
        self._lasted_s: dict[str, float] = {}

    def submitted(
        self, id: str, now_s: float, *, prompt: int, limit: int, alike: Hashable, background: bool = False
    ) -> None:
        """A request begins to wait, for a worker or at one. Args: prompt, limit: tokens of it, and at most of its
        output. alike: equal where lengths may be. background: others may go before it. Idempotent."""
        if id in self._requests:
            return
        if not self._requests:
            self._end_s = now_s
        self._submitted += 1
        # Two that are not alike may share a group, of so many.
        keys = (-prompt.bit_length(), 200.0), (hash(alike) % _MOST_GROUPS, 50.0)
        groups = [self._all, *(self._groups.setdefault(key, Lengths(half)) for key, half in keys)]
        ahead = self._submitted - self._started
        self._requests[id] = _Request(limit, background, groups, now_s, self._submitted, ahead)

    def began(self, id: str, now_s: float, *, told: int = 1) -> None:
        """Its first token is there. Args: told: tokens that came at once, which a worker may have had long before."""
        request = self._requests.get(id)
        if request is None or request.first_s is not None:
            return
        self._started += 1
        request.first_s, request.at_once, request.busy = now_s, told, self._busy()
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
        if request.first_s is not None and made > request.at_once:
            busy = (request.busy + self._busy()) // 2
            self._tokens.learn(busy, (now_s - request.first_s) / (made - request.at_once))
        known = finish in ("stop", "length")
        for told in request.told:
            for number in told.unknown if known else ():
                told.calibration.learn(number, held=now_s <= told.due_s(number))
            told.unknown.clear()
        if request.told and known:
            self._polled += 1
            more = min(len(request.told), _MOST_POLLS) - _MEAN_POLLS
            step = max(0.02, 0.4 / math.sqrt(self._polled))
            self._price_s = min(1e4, max(1e-4, self._price_s * math.exp(step * more)))

    def estimate(self, id: str, now_s: float, *, made: int) -> Estimate | None:
        """Of a request in progress that has so many tokens; None: it is not. Who asks is told when to ask again."""
        request = self._requests.get(id)
        if request is None:
            return None
        ahead = 0 if request.first_s is not None else max(1, request.turn - self._started)
        left = [length - made for length in lengths_of(request.groups, made, request.limit)]
        raw_s, calibration = self._raw_s(left, ahead, request.background)
        self._learn(now_s)
        p50_s, p90_s, after_s = calibration.estimate(raw_s, self._price_s)
        # However wrong all that is: one that stands still is asked for ever more seldom.
        after_s = max(after_s, _LEAST_AFTER * (now_s - request.since_s))
        if now_s >= request.poll_at_s:
            request.poll_at_s = now_s + after_s
            request.told.append(told := _Told(now_s, raw_s, calibration))
            for number in range(len(LEVELS)):
                heapq.heappush(self._due, (told.due_s(number), next(self._turns), number, told))
        return Estimate(p50_s, p90_s, after_s)

    def sent_now(self) -> Estimate:
        """Of a request of which nothing is known yet, sent now."""
        ahead, lengths = self._submitted + 1 - self._started, lengths_of([self._all], 0, 1 << 20)
        raw_s, calibration = self._raw_s(lengths, ahead, False)
        return calibration.estimate(raw_s, self._price_s)

    def _raw_s(self, left: Sequence[float], ahead: int, background: bool) -> tuple[list[float], _Calibration]:
        waits, many = self._waits[background], ahead.bit_length()
        # Behind more than ever were before it at least one must end for each, at the pace at which they do.
        wait_s = ahead * max(waits.at(many, 0.0), 0.0 if waits.knows(many) else self._gap_s)
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

    def _learn(self, now_s: float) -> None:
        """What is late is known to be before it ends; were it not learned then, those that are short would be judged
        first, and others be told of times as short."""
        while self._due and self._due[0][0] <= now_s:
            _, turn, number, told = heapq.heappop(self._due)
            if number not in told.unknown:
                continue
            if (due_s := told.due_s(number)) > now_s:
                heapq.heappush(self._due, (due_s, turn, number, told))
            else:
                told.unknown.discard(number)
                told.calibration.learn(number, held=False)

    def _busy(self) -> int:
        return int(4 * math.log2(1.0 + len(self._requests) / self.workers))
