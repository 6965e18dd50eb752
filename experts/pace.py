"""Which of a client's servers are idle, which are slow, and whether the link or the server is why. Pure.

A reply's latency has two parts: the service time, which the server itself measured, and the rest, in which rows were
under way or waited to be taken up. Each is compared with its own history, per reply, over the interval between two
observations. More rows take longer: what is usual is scaled by the pairs that were in flight, by all of them, as if
nothing were fixed cost; so a prefill after decoding makes no server slow.

A transport's monitor can only accuse the link: it watches the way there, and replies, many times larger, come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

LEAST_REPLIES: Final = 8  # of an interval that says anything; fewer are added to the next
LEARN: Final = 3  # intervals before the first verdict
IN_ROW: Final = 3  # intervals that must agree to change a verdict: one freeze is in a single one
SLOW_TIMES: Final = 2.0
STILL_SLOW_TIMES: Final = 4 / 3  # as a channel has recovered at three quarters of its bandwidth
FLOOR_NS: Final = 100_000  # what the host's scheduler may add to any reply


class Pace(Enum):
    """What a client sees of one server."""

    IDLE = "idle"
    OK = "ok"
    SLOW_LINK = "slow_link"
    SLOW_EXPERT = "slow_expert"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Of one server since it was attached. in_flight: pairs in flight when each answered chunk was sent, summed.

    late: slots that wait for a late reply now. link_slow: what the transport's monitor says of the way there.
    corrupt: replies that failed a check. quarantined: so many of late that the server is asked only where no other
    replica exists.
    """

    calls: int = 0
    replies: int = 0
    in_flight: int = 0
    latency_ns: int = 0
    service_ns: int = 0
    late: int = 0
    link_slow: bool = False
    corrupt: int = 0
    quarantined: bool = False


@dataclass(frozen=True, kw_only=True)
class _PerReply:
    """Means over an interval."""

    in_flight: float
    service_ns: float
    away_ns: float


@dataclass(frozen=True, kw_only=True)
class Track:
    """What is remembered of one server between observations."""

    idle: bool = True
    verdict: Pace = Pace.OK
    seen_calls: int = 0
    judged: Observation = Observation()  # at the end of the last interval that was judged
    usual: _PerReply | None = None
    learned: int = 0
    suspected: Pace = Pace.OK
    in_row: int = 0
    corrupt: int = 0  # of a server that is quarantined

    @property
    def pace(self) -> Pace:
        return Pace.IDLE if self.idle else self.verdict


def observe(track: Track, totals: Observation) -> Track:
    """Judge the interval since the last observation."""
    if totals.calls < track.seen_calls:
        track = Track()  # attached anew
    # A server that owes a reply is not idle; its silence is judged elsewhere.
    idle = totals.calls == track.seen_calls and not totals.late
    corrupt = totals.corrupt if totals.quarantined else 0
    track = replace(track, idle=idle, seen_calls=totals.calls, corrupt=corrupt)
    replies = totals.replies - track.judged.replies
    if replies < LEAST_REPLIES:
        return track
    service_ns = totals.service_ns - track.judged.service_ns
    now = _PerReply(
        in_flight=(totals.in_flight - track.judged.in_flight) / replies,
        service_ns=service_ns / replies,
        away_ns=max(0, totals.latency_ns - track.judged.latency_ns - service_ns) / replies,
    )
    track = replace(track, judged=totals)
    if track.usual is None or track.learned < LEARN:
        return _learn(track, now)
    seen = _seen(track, track.usual, now, totals.link_slow)
    if seen is track.verdict:
        track = replace(track, suspected=seen, in_row=0)
        return _learn(track, now) if seen is Pace.OK else track
    in_row = track.in_row + 1 if seen is track.suspected else 1
    if in_row < IN_ROW:
        return replace(track, suspected=seen, in_row=in_row)
    return replace(track, verdict=seen, suspected=seen, in_row=0)


def _learn(track: Track, now: _PerReply) -> Track:
    old = track.usual or now
    usual = _PerReply(
        in_flight=old.in_flight + (now.in_flight - old.in_flight) / 8,
        service_ns=old.service_ns + (now.service_ns - old.service_ns) / 8,
        away_ns=old.away_ns + (now.away_ns - old.away_ns) / 8,
    )
    return replace(track, usual=usual, learned=track.learned + 1)


def _seen(track: Track, usual: _PerReply, now: _PerReply, link_slow: bool) -> Pace:
    if link_slow:
        return Pace.SLOW_LINK
    load = max(1.0, now.in_flight / max(1.0, usual.in_flight))

    def excess_ns(found_ns: float, usual_ns: float, blamed: Pace) -> float:
        times = STILL_SLOW_TIMES if track.verdict is blamed else SLOW_TIMES
        return found_ns - times * load * usual_ns - FLOOR_NS

    service_ns = excess_ns(now.service_ns, usual.service_ns, Pace.SLOW_EXPERT)
    away_ns = excess_ns(now.away_ns, usual.away_ns, Pace.SLOW_LINK)
    if max(service_ns, away_ns) <= 0:
        return Pace.OK
    return Pace.SLOW_EXPERT if service_ns >= away_ns else Pace.SLOW_LINK


def observe_all(tracks: Mapping[str, Track], found: Mapping[str, Observation]) -> dict[str, Track]:
    """Observe every server that is attached now, by name; those no longer attached are forgotten."""
    return {name: observe(tracks.get(name, Track()), totals) for name, totals in found.items()}


def load_entries(tracks: Mapping[str, Track]) -> dict[str, float]:
    """The load report's words: how many servers go at each pace, each slow one by name, and each whose replies come
    corrupt, with their number."""
    paces = [track.pace for track in tracks.values()]
    counts = {f"servers_{pace.value}": float(paces.count(pace)) for pace in Pace if pace in paces}
    slow = {name: track.pace for name, track in tracks.items() if track.pace not in (Pace.IDLE, Pace.OK)}
    corrupt = {f"corrupt:{name}": float(track.corrupt) for name, track in tracks.items() if track.corrupt}
    return counts | {f"{pace.value}:{name}": 1.0 for name, pace in slow.items()} | corrupt
