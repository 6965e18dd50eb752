"""How many servers a pool should have: fast up, slow down, and always a reason. Pure.

    wanted, memory = decide(policy, signals, memory, now_s)     # memory.why says it in words

Load is counted in servers: one fully busy server is 1. It is what servers worked on plus the growth of the queue, so
that work which had to wait is not overlooked. GPU utilisation is no signal: a polling kernel shows 100% when idle.

A server ordered now serves `start_s` later, so the load to provide for is a forecast: the larger of the trend (a mean
over `trend_s`, carried `start_s` further along its slope) and of most of the last burst (a mean over `burst_s`), times
the headroom for what no forecast sees. Up at once; down when the largest need of the last `hold_s` allows it. A profile
of the day was tried and left out: it saved less than 0.1% on the week of benchmarks.elasticity.

That does not suit all loads: of bursts shorter than a start no mean tells. What was asked does not depend on how many
served, so each sample tells how the forecast times every factor, and every fleet that stays as it is, would have fared.
Where the headroom was late too often, or a fleet that stays was cheaper, the cheapest that was in time is followed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.view import ATTENTION, EXPERT, GATEWAY

HOUR_S: Final = 3600.0
# A lower load than this, in servers, is no work: lease keeping and health checks.
IDLE_LOAD = 0.005
# Forgetting of the measured speed of a server; it changes with the mix of requests, not with the load.
SPEED_S = 300.0
# The word for what a pool does per second, in the unit of its queue.
RATES = {EXPERT: "rows_per_s", ATTENTION: "tokens_per_s"}
# Of a burst's load, so that scatter alone rarely counts.
BURST_SHARE = 0.92
# What is given back early must start again; this and 50 s of hold_s make about 30 changes an hour.
BAND = 0.06
# Shrinking may use four fifths of the changes, so that growing always finds some left: 36 of 45.
SHRINK_SHARE = 0.8
# Servers are fully busy from here on. What they lack is not seen where no queue is: it is taken for a quarter.
FULL, LACK = 0.95, 1.25
# At 85% of the KV cache preemption is near.
KV_MOST = 0.85
# p99 over the SLO for one window of 60 s and one start: a quarter more headroom, forgotten within hours, 2 at most.
STRAIN_STEP, STRAIN_S, STRAIN_MOST = 1.25, 90.0, 2.0
# With least = 0: without any work for this long, nothing is kept.
IDLE_S = 300.0

Floats = NDArray[np.float64]
# Rows of what would have been: fleets that stay as they are; the forecast times each of FACTORS.
STEADY, FORECAST = 0, 1
# Steps of 2.5%, up to 100: bursts of tens of seconds are 30 times the mean.
FACTORS: Final[Floats] = 0.9 * np.power(1.025, np.arange(192), dtype=np.float64)
# Of all tokens, so many may wait for more than LATE_S.
LATE_SHARE, LATE_S = 0.001, 1.0
# A week counts, so that each of its days does; the first three hours are too little to judge by.
KEPT_S, LEARN_S = 7 * 24 * HOUR_S, 3 * HOUR_S
# 1.75 x the mean just keeps 99.9% of a week of real chat tokens in time; on some days three times as many are late.
USUAL, SCATTER = 1.75, 3.0
_USUAL_AT: Final = int(np.searchsorted(FACTORS, USUAL))
_zeros = partial(np.zeros, (2, len(FACTORS)))


class PolicyInvalid(ValueError):
    """A setting makes no sense."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Settings for one pool; times in seconds.

    least, most, unit: bounds of the size, and what it changes by (8: nodes of eight servers).
    start_s: from order to serving. clear_s: a queue is to be gone after this long.
    """

    least: int = 1
    most: int = 64
    unit: int = 1
    # 1.75 x the mean just keeps 99.9% of an hour of real chat tokens in time, in steps of 10 s (benchmarks.elasticity).
    # What history asks for instead is changed in proportion: with 3.5, twice as much.
    headroom: float = USUAL
    start_s: float = 30.0
    # Loads are means over this long. Ticks are 0.1 s, far less than any server takes to start.
    sample_s: float = 10.0
    # Load wanders by 10% in half an hour: with samples that scatter by 25%, a mean over 5 to 10 minutes errs least.
    trend_s: float = 450.0
    # Bursts last some minutes: three samples tell one from scatter.
    burst_s: float = 25.0
    hold_s: float = 50.0
    clear_s: float = 10.0
    changes_per_h: int = 45

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise PolicyInvalid(f"bounds {self.least} to {self.most}; give 0 <= least <= most, and most >= 1")
        if self.unit < 1 or self.least % self.unit or self.most % self.unit:
            raise PolicyInvalid(
                f"unit {self.unit} with bounds {self.least} to {self.most}; give a unit of at least 1 that divides both"
            )
        for name in ("start_s", "sample_s", "burst_s", "hold_s", "clear_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise PolicyInvalid(f"{name} is {getattr(self, name)}; give a number above 0")
        for name, least, most in (("headroom", 0.01, 100), ("changes_per_h", 1, 3600)):
            if not least <= getattr(self, name) <= most:
                raise PolicyInvalid(f"{name} is {getattr(self, name)}; give {least} to {most}")
        if not self.burst_s < self.trend_s < math.inf:
            raise PolicyInvalid(f"trend_s is {self.trend_s}; give more than burst_s, which is {self.burst_s}")
        for name in ("hold_s", "start_s"):
            if getattr(self, name) > (longest := 200 * self.sample_s):
                raise PolicyInvalid(f"{name} is {getattr(self, name)}; give at most 200 times sample_s, {longest}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """One pool at one moment. What is None is not known, and never taken for nothing.

    wanted: size wanted now. live: members that serve. starting: ordered or warming up. draining: on their way out.
    busy: mean over the live servers, 0 to 1. tokens_per_s: of the pool, in the unit of backlog_tokens (rows, for the
    expert pool). queue_s: age of the oldest waiting request. kv_use: mean, 0 to 1. lateness: p99 over its SLO, the
    worse of TTFT and TPOT; above 1 the SLO is missed.
    """

    wanted: int
    live: int
    starting: int = 0
    draining: int = 0
    busy: float | None = None
    backlog_tokens: float | None = None
    tokens_per_s: float | None = None
    queue_s: float | None = None
    kv_use: float | None = None
    lateness: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hindsight:
    """Sums and queues of all fleets, [2, factors]: STEADY and FORECAST. No array is written to once it is here.

    tokens, late, paid: server-seconds, forgotten over KEPT_S as kept_s is; reckoned, had: those paid of what was
    followed while it was a forecast, and what the pool had meanwhile. queue: server-seconds. wants, held: sizes of the
    last samples, and the most of a hold; newest last.
    """

    kept_s: float = 0.0
    tokens: float = 0.0
    reckoned: float = 0.0
    had: float = 0.0
    late: Floats = field(default_factory=_zeros)
    paid: Floats = field(default_factory=_zeros)
    queue: Floats = field(default_factory=_zeros)
    wants: tuple[Floats, ...] = ()
    held: tuple[Floats, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What samples have shown of the load, in servers.

    age_s: how much was seen. trend, base, burst: means over trend_s, 4 trend_s and burst_s. needs: (time, servers) of
    the last hold_s, each larger than all later ones. strain: factor on the headroom, last raised at strained_s. seen:
    what other fleets would have cost. chosen: whether a fleet that stays is followed, or the forecast; at: which of
    them; chosen_s: since when.
    """

    age_s: float = 0.0
    trend: float = 0.0
    base: float = 0.0
    burst: float = 0.0
    needs: tuple[tuple[float, float], ...] = ()
    strain: float = 1.0
    strained_s: float = -math.inf
    seen: Hindsight = field(default_factory=Hindsight)
    chosen: int = FORECAST
    at: int = _USUAL_AT
    chosen_s: float = -math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What the policy remembers of one pool. A new one is always safe: nothing is given up until a trend was seen.

    at_s: last call. known_s, work: seconds of known load in the open sample, and server-seconds done in them. backlog:
    server-seconds that waited when it began. speed: tokens per second of a busy server; 0: unknown. live: at
    the last call. worked_s: when there was work. changes: times of the last hour's. why: the last decision in words.
    """

    at_s: float | None = None
    known_s: float = 0.0
    work: float = 0.0
    backlog: float | None = None
    speed: float = 0.0
    live: int | None = None
    worked_s: float = -math.inf
    past: Past = field(default_factory=Past)
    changes: tuple[float, ...] = ()
    why: str = "nothing seen yet"


def decide(policy: Policy, signals: Signals, memory: Memory, now_s: float) -> tuple[int, Memory]:
    """The size that a pool should have now; call it at every tick, with `signals.wanted` as it stands.

    Args:
        now_s: Of a clock that counts suspend. A step back is ignored.

    Returns:
        Servers wanted, within the bounds and in whole units, and what to remember.
    """
    seen = _observe(policy, signals, memory, now_s)
    wanted = signals.wanted
    bounded = min(_units(policy, max(wanted, policy.least)), policy.most)
    if bounded != wanted:
        return bounded, replace(seen, why=f"{wanted} -> {bounded}: the bounds")
    if not wanted and _waiting(signals):
        size = min(_units(policy, max((seen.backlog or 0.0) / policy.clear_s, 1.0)), policy.most)
        changes = _with(policy, seen.changes, now_s)
        return size, replace(seen, changes=changes, why=f"0 -> {size}: requests wait and nothing serves")
    if seen.known_s < 0.999 * policy.sample_s:
        return wanted, seen

    backlog = _backlog(signals, seen.speed)
    need, past, reason = _forecast(policy, signals, seen, backlog, now_s)
    changes = seen.changes
    if changes and changes[0] <= now_s - HOUR_S:
        changes = tuple(at_s for at_s in changes if at_s > now_s - HOUR_S)
    if wanted and not policy.least and min(now_s - seen.worked_s, past.age_s) >= IDLE_S:
        # What was before a pause says nothing of what comes after it.
        size, why = 0, f"no work for {IDLE_S:.0f} s"
        past = Past(seen=past.seen, chosen=past.chosen, at=past.at, chosen_s=past.chosen_s)
    else:
        size, why = _resize(policy, signals, past, changes, need, now_s)
    if size != wanted:
        changes, why = _with(policy, changes, now_s), f"{wanted} -> {size}: {why}"
    else:
        why = f"{wanted}: {why}"
    why = f"{why}; {reason}"
    return size, replace(seen, known_s=0.0, work=0.0, backlog=backlog, past=past, changes=changes, why=why)


def _observe(policy: Policy, signals: Signals, memory: Memory, now_s: float) -> Memory:
    """Add the time since the last call to the open sample, where the load is known."""
    # After a longer gap (the router stalled) what is seen now says nothing about most of it.
    elapsed_s = 0.0 if memory.at_s is None else min(max(now_s - memory.at_s, 0.0), policy.sample_s)
    speed, rate, waiting = memory.speed, signals.tokens_per_s, _waiting(signals)
    # Who joined since the last call did nothing before it.
    served = signals.live if memory.live is None else min(signals.live, memory.live)
    working = None if signals.busy is None else min(signals.busy, 1.0) * served
    if working is None and rate is not None and speed:
        working = min(rate / speed, signals.live)
    elif working is not None and rate and working > 0.2:
        speed += (rate / working - speed) * (_gain(elapsed_s, SPEED_S, memory.past.age_s) if speed else 1.0)
    if working is None and (waiting or not signals.live):
        # Whoever lets requests wait has no time left.
        working = float(signals.live)
    known = working is not None
    return replace(
        memory,
        at_s=now_s if memory.at_s is None else max(now_s, memory.at_s),
        known_s=memory.known_s + elapsed_s if known else memory.known_s,
        work=memory.work + elapsed_s * working if known else memory.work,
        backlog=_backlog(signals, speed) if memory.backlog is None else memory.backlog,
        speed=speed,
        live=signals.live,
        worked_s=now_s if not known or working > IDLE_LOAD or waiting else memory.worked_s,
        why=memory.why if known else f"{signals.wanted}: no load is reported",
    )


def _backlog(signals: Signals, speed: float) -> float | None:
    """Server-seconds of work that wait; the queue's age says it where tokens or the speed are unknown."""
    if signals.backlog_tokens is not None and speed:
        return signals.backlog_tokens / speed
    return None if signals.queue_s is None else signals.queue_s * signals.live


def _waiting(signals: Signals) -> bool:
    return bool(signals.backlog_tokens or signals.queue_s)


def _forecast(
    policy: Policy, signals: Signals, seen: Memory, backlog: float | None, now_s: float
) -> tuple[float, Past, str]:
    """Close the sample: servers needed once one ordered now serves, what the past is now, and the sum in words."""
    span_s, past = seen.known_s, seen.past
    grown = 0.0 if backlog is None or seen.backlog is None else backlog - seen.backlog
    load = max(0.0, (seen.work + grown) / span_s)
    age_s = past.age_s + span_s
    trend = past.trend + (load - past.trend) * _gain(span_s, policy.trend_s, age_s)
    base = past.base + (load - past.base) * _gain(span_s, 4 * policy.trend_s, age_s)
    burst = past.burst + (load - past.burst) * _gain(span_s, policy.burst_s, age_s)
    # The two means lag by their lengths, so their difference over 3 trend_s is the slope.
    rise = max(0.0, trend - base) / (3 * policy.trend_s) * (policy.start_s + policy.sample_s)
    ahead = swift = max(trend + rise, BURST_SHARE * burst)
    # Fully busy servers tell that more is asked, not how much.
    full = backlog is None and seen.work > FULL * span_s * signals.live
    # Until a hold is over the pool has what was followed before.
    settled = past.chosen == FORECAST and now_s - past.chosen_s > policy.hold_s
    followed = past.at if settled else None
    asked = LACK * load if full else load
    hindsight = _learn(policy, past.seen, asked, span_s, ahead, signals.wanted, followed)
    chosen, at = _best(hindsight)
    factor, waiting = USUAL if at == _USUAL_AT else float(FACTORS[at]), backlog or 0.0
    if chosen == STEADY:
        ahead, factor = 1.0, float(min(_sizes(policy)[at], policy.most))
        # A queue that is not late yet it works off, as it did.
        waiting = max(0.0, waiting - LATE_S * factor)

    strain, strained_s = 1 + (past.strain - 1) * math.exp(-span_s / HOUR_S), past.strained_s
    # Late with idle servers is not for want of servers.
    late = signals.lateness is not None and signals.lateness > 1 and (signals.busy is None or signals.busy > 0.5)
    if late and now_s - strained_s >= STRAIN_S:
        strain, strained_s = min(strain * STRAIN_STEP, STRAIN_MOST), now_s

    headroom = factor * (policy.headroom / USUAL * strain)
    need = headroom * ahead + waiting / policy.clear_s
    reason = f"load {load:.1f}, trend {trend:.1f}, burst {burst:.1f}: {ahead:.1f} x {headroom:.2f}"
    if waiting:
        reason += f" + {waiting / policy.clear_s:.1f} for the queue"
    if full and (least := max(LACK * load, policy.headroom * strain * swift)) > need:
        need, reason = least, f"load {load:.1f}, fully busy"
    if signals.kv_use is not None and signals.kv_use * signals.live > need * KV_MOST:
        need = signals.kv_use * signals.live / KV_MOST
        reason = f"KV cache {signals.kv_use:.0%} full, {KV_MOST:.0%} allowed"
    held = (*[h for h in past.needs if h[0] > now_s - policy.hold_s and h[1] > need], (now_s, need))
    new = Past(
        age_s=age_s, trend=trend, base=base, burst=burst, needs=held, strain=strain, strained_s=strained_s,
        seen=hindsight, chosen=chosen, at=at, chosen_s=past.chosen_s if chosen == past.chosen else now_s,
    )  # fmt: skip
    return need, new, reason


def _resize(
    policy: Policy, signals: Signals, past: Past, changes: tuple[float, ...], need: float, now_s: float
) -> tuple[int, str]:
    """Grow for the need, shrink to the largest of the hold, or say why not yet."""
    wanted = signals.wanted
    floor = max(policy.least, min(policy.unit, wanted))
    size = min(max(_units(policy, need), floor), policy.most)
    if size > wanted:
        # A start that is overdue may have failed: what is ordered meanwhile counts, but holds up no more.
        if signals.starting and changes and now_s - changes[-1] < policy.start_s:
            return wanted, f"needs {size}, {signals.starting} starting"
        if len(changes) >= policy.changes_per_h:
            return wanted, f"needs {size}, {len(changes)} changes this hour"
        return size, "at once"
    size = min(max(_units(policy, past.needs[0][1]), floor), policy.most)
    # A steady need has no scatter to be kept out.
    if size >= wanted or (past.chosen != STEADY and size > wanted * (1 - BAND)):
        return wanted, "enough"
    if past.age_s < policy.trend_s / 4:
        return wanted, f"{size} would do, {past.age_s:.0f} s seen of {policy.trend_s / 4:.0f}"
    if signals.starting or signals.draining:
        return wanted, f"{size} would do, a change is under way"
    if len(changes) >= SHRINK_SHARE * policy.changes_per_h:
        return wanted, f"{size} would do, {len(changes)} changes this hour"
    return size, f"no more needed for {policy.hold_s:.0f} s"


def _with(policy: Policy, changes: tuple[float, ...], now_s: float) -> tuple[float, ...]:
    # Waking from zero is never refused, so there may be more than the limit: the newest count.
    return (*changes, now_s)[-policy.changes_per_h :]


def _units(policy: Policy, servers: float) -> int:
    """The least size in whole units that is not below."""
    # 1e-9: 1.75 x 4 must be 7, whatever the last bit says.
    return math.ceil(servers / policy.unit - 1e-9) * policy.unit


def _gain(span_s: float, length_s: float, age_s: float) -> float:
    """Weight of a new sample in a mean over length_s: a plain mean until that much has been seen."""
    return max(1 - math.exp(-span_s / length_s), span_s / age_s if age_s > span_s else 1.0)


def _learn(
    policy: Policy, seen: Hindsight, load: float, span_s: float, ahead: float, wanted: int, followed: int | None
) -> Hindsight:
    """What is known once all fleets have served the sample that ends now, of this load.

    Args:
        ahead: The forecast.
        wanted: The pool's size.
        followed: The factor by which it has followed the forecast; None: it has not.
    """
    keep = math.exp(-span_s / KEPT_S)
    late, paid, queue = seen.late * keep, seen.paid * keep, seen.queue
    reckoned, had = seen.reckoned * keep, seen.had * keep
    if seen.held:
        # Ordered `start` samples ago it serves now; given back it is gone at once.
        served = np.minimum.reduce(seen.held)
        grown = queue + (load - served) * span_s
        before, after = queue - served * LATE_S, grown - served * LATE_S
        # The queue grows evenly within a sample: the part of it that lies above the limit.
        over = np.maximum(before, 0) + np.maximum(after, 0)
        late += load * span_s * over / (np.abs(before) + np.abs(after) + 1e-12)
        paid += seen.held[-1] * span_s
        if followed is not None:
            reckoned += float(seen.held[-1][FORECAST, followed]) * span_s
            had += wanted * span_s
        queue = np.maximum(grown, 0)
    # A fleet that never changes does not do so for a queue either.
    asked = np.stack((_sizes(policy), FACTORS * ahead + queue[FORECAST] / policy.clear_s))
    want = np.clip(np.ceil(asked / policy.unit - 1e-9) * policy.unit, policy.least, policy.most)
    hold, start = (math.ceil(length_s / policy.sample_s) for length_s in (policy.hold_s, policy.start_s))
    wants = (*seen.wants, want)[-hold:]
    held = (*seen.held, np.maximum.reduce(wants))[-start - 1 :]
    kept_s, tokens = seen.kept_s * keep + span_s, seen.tokens * keep + load * span_s
    return Hindsight(
        kept_s=kept_s, tokens=tokens, reckoned=reckoned, had=had, late=late, paid=paid, queue=queue,
        wants=wants, held=held,
    )  # fmt: skip


def _best(seen: Hindsight) -> tuple[int, int]:
    """Whom to follow, STEADY or FORECAST, and which of the row: the usual factor unless it did worse."""
    if seen.kept_s < 0.99 * LEARN_S or not seen.tokens:
        return FORECAST, _USUAL_AT
    share = seen.late / (LATE_SHARE * seen.tokens)
    costs = np.where(share <= 1, seen.paid, np.inf)
    # A fleet that follows a forecast is dearer than reckoned: it may change so often only.
    drag = max(1.0, seen.had / seen.reckoned) if seen.reckoned else 1.0
    costs[FORECAST] *= drag
    usual = drag * seen.paid[FORECAST, _USUAL_AT]
    if share[FORECAST, _USUAL_AT] <= SCATTER:
        costs[FORECAST] = np.inf
        costs[FORECAST, _USUAL_AT] = usual
    row, at = divmod(int(np.argmin(costs)), len(FACTORS))
    return (FORECAST, _USUAL_AT) if costs[row, at] == np.inf else (row, at)


def _sizes(policy: Policy) -> Floats:
    """Of the fleets that never change, [factors]: each unit, or as many as there is room for."""
    step = policy.unit * math.ceil(policy.most / policy.unit / len(FACTORS))
    return step * np.arange(1.0, len(FACTORS) + 1)


def signals_of(
    pool: str,
    loads: Mapping[str, Sequence[Mapping[str, float]]],
    *,
    wanted: int,
    live: int,
    starting: int,
    draining: int,
    ttft_slo_s: float = 2.0,
    tpot_slo_s: float = 0.1,
) -> Signals:
    """What the members' load words say of one launched pool.

    Args:
        loads: By pool, the last report of each member that serves; words and whole reports may be missing.
        ttft_slo_s, tpot_slo_s: What p99 of TTFT and TPOT may be.
    """
    own, gates = loads.get(pool, ()), loads.get(GATEWAY, ())
    slos = (("ttft_p99_s", ttft_slo_s), ("tpot_p99_s", tpot_slo_s))
    late = [p99_s / slo_s for word, slo_s in slos for p99_s in _words(gates, word)]
    # Streams wait at gateways and in attention workers. Their tokens are no measure for expert servers, which show
    # what they lack by being busy; but any wait must wake an empty pool.
    queues = [*loads.get(ATTENTION, ()), *gates]
    queue = max(_words(queues, "queue_s"), default=None)
    tokens = _words(queues, "backlog_tokens")
    asks = pool == ATTENTION or live == 0
    return Signals(
        wanted=wanted,
        live=live,
        starting=starting,
        draining=draining,
        busy=_mean(_words(own, "busy")),
        backlog_tokens=sum(tokens) if tokens and asks else None,
        tokens_per_s=sum(rates) if (rates := _words(own, RATES[pool])) else None,
        queue_s=queue if asks else None,
        kv_use=_mean(_words(own, "kv_use")),
        lateness=max(late, default=None),
    )


def _words(loads: Sequence[Mapping[str, float]], word: str) -> list[float]:
    return [load[word] for load in loads if word in load and math.isfinite(load[word])]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
