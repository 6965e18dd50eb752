"""The board of one moment, from what the gateway counted, what it followed and what the router told. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eaas.gateway.dashboard.board import (
    BAD,
    DEGRADED,
    DOWN,
    INFO,
    WARN,
    WHOLE,
    Board,
    Figure,
    GateView,
    GatewayFacts,
    Heat,
    Inspection,
    InspectionShown,
    Point,
    Rates,
    Reason,
    Worker,
    ago,
    listed,
    many,
    number,
    seconds,
    share,
    visible,
)
from eaas.gateway.dashboard.history import ClusterSnapshot, History
from eaas.gateway.status import copies, sleeps
from eaas.worker.protocol import LayerView
from router.view import ATTENTION, EXPERT, SERVING, SUSPECT, Member, PoolSize

_SHOWN_HAPPENINGS = 100
_SHOWN_EXPERTS = 24
# Rates and latencies are of this long, or of what was seen: long enough for a percentile, short enough for a fault.
WINDOW_S = 10.0
# Curves show two minutes.
MOST_POINTS = 120
_MOST_READINGS = 16


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Counters at one moment; all only rise.

    at_s: monotonic. wall_s: since 1970. ended: choices that ended; good: of them, those within the targets. ttft, itl:
    histogram counts, one for each bound and one above all.
    """

    at_s: float
    wall_s: float
    requests: int
    failed: int
    tokens: int
    ended: int
    good: int
    went_on: int
    ttft: tuple[int, ...]
    itl: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Past:
    """The last readings, and a point for each second before."""

    ttft_bounds_s: tuple[float, ...]
    itl_bounds_s: tuple[float, ...]
    readings: tuple[Reading, ...] = ()
    points: tuple[Point, ...] = ()

    def read(self, reading: Reading) -> Past:
        """With one reading more; the oldest are forgotten."""
        points = self.points
        if self.readings and reading.at_s > self.readings[-1].at_s:
            points = (*points, self._point(self.readings[-1], reading))[-MOST_POINTS:]
        kept = [r for r in self.readings if reading.at_s - r.at_s <= WINDOW_S + 0.5]
        return replace(self, readings=(*kept, reading)[-_MOST_READINGS:], points=points)

    def rates(self) -> Rates:
        """Of the window that ends with the newest reading."""
        return self._rates(self.readings[0], self.readings[-1]) if len(self.readings) > 1 else Rates()

    def _rates(self, old: Reading, new: Reading) -> Rates:
        window_s = new.at_s - old.at_s
        ttft, itl = _change(old.ttft, new.ttft), _change(old.itl, new.itl)
        return Rates(
            window_s=window_s,
            requests_per_s=(new.requests - old.requests) / window_s,
            tokens_per_s=(new.tokens - old.tokens) / window_s,
            ended_per_s=(new.ended - old.ended) / window_s,
            good_per_s=(new.good - old.good) / window_s,
            failed=new.failed - old.failed,
            ttft_p50_s=quantile(self.ttft_bounds_s, ttft, 0.5),
            ttft_p99_s=quantile(self.ttft_bounds_s, ttft, 0.99),
            itl_p50_s=quantile(self.itl_bounds_s, itl, 0.5),
            itl_p99_s=quantile(self.itl_bounds_s, itl, 0.99),
        )

    def _point(self, old: Reading, new: Reading) -> Point:
        rates = self._rates(old, new)
        return Point(
            at_s=new.wall_s,
            tokens_per_s=rates.tokens_per_s,
            requests_per_s=rates.requests_per_s,
            itl_p99_s=rates.itl_p99_s,
        )


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """A quantile of what a histogram counted, as if spread evenly within each bucket; None when it counted nothing.
    Args: bounds: upper bounds, rising. counts: for each bound, and one above all, of which only the lower end is known.
    share: 0 to 1."""
    total = sum(counts)
    if not total:
        return None
    left = share * total
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and left <= count:
            return lower + (bound - lower) * left / count
        left -= count
        lower = bound
    return lower


def _change(old: Sequence[int], new: Sequence[int]) -> list[int]:
    return [after - before for before, after in zip(old, new, strict=True)]


def board_of(
    *,
    own: GatewayFacts,
    past: Past,
    history: History,
    snapshot: ClusterSnapshot,
    heat: Heat,
    now_s: float,
    as_of_s: float | None,
    models: tuple[str, ...] = (),
    inspection: Inspection | None = None,
) -> Board:
    """The board. Args: snapshot, history, heat: of the model that it shows. models: the names of all. now_s: since
    1970. as_of_s: when a router last answered."""
    view = snapshot.view
    wanted = view.replicas_wanted if view is not None else 0
    asleep = view is not None and sleeps(view)
    least, short = (wanted, 0) if asleep else copies(view) if view is not None else (0, 0)
    pools, rates = snapshot.pools, past.rates()
    serving = sum(server.state == SERVING for server in heat.servers)
    reasons = (
        *_stops(own, past, history, pools, least, short),
        *_control(snapshot, as_of_s),
        *_losses(history, snapshot, now_s),
        *_thin(history, least, short, wanted),
        *_faults(snapshot, rates),
    )
    moods = {reason.mood for reason in reasons}
    return Board(
        at_s=now_s,
        as_of_s=as_of_s,
        # Down when requests cannot be served, degraded when anything is amiss.
        verdict=DOWN if BAD in moods else DEGRADED if WARN in moods else WHOLE,
        reasons=reasons,
        facts=(
            own.model,
            f"servers {serving}/{pools[EXPERT].wanted}" if EXPERT in pools else f"servers {serving}",
            "asleep" if asleep else f"copies {least}/{wanted}",
            f"epoch {view.epoch if view is not None else '?'}",
        ),
        epoch=view.epoch if view is not None else None,
        term=view.term if view is not None else None,
        routers=snapshot.routers,
        gateway=own,
        rates=rates,
        figures=figures_of(own, rates),
        past=past.points,
        pools=pools,
        workers=tuple(_worker(member) for member in view.pool(ATTENTION)) if view is not None else (),
        heat=heat,
        happenings=history.happenings[:_SHOWN_HAPPENINGS],
        inspection=inspection,
        models=models,
    )


def inspection_of(shown: InspectionShown, token_text: Callable[[int], str]) -> Inspection:
    """An inspection with the texts of its tokens."""
    told: dict[str, Any] = vars(shown) | {"layers": tuple(_gate(layer, token_text) for layer in shown.layers)}
    return Inspection(**told)


def _gate(layer: LayerView, token_text: Callable[[int], str]) -> GateView:
    rows = [(token, dict(chosen)) for token, chosen in layer.tokens]
    counts: Counter[int] = Counter()
    for _, by_expert in rows:
        counts.update(by_expert)
    columns = sorted(expert for expert, _ in counts.most_common(_SHOWN_EXPERTS))
    entropy = tuple(value if value >= 0 else None for value in layer.entropy)
    return GateView(
        layer=layer.layer,
        entropy=entropy,
        drift=drift_of([value for value in entropy if value is not None]),
        pairs=tuple(layer.pairs),
        experts=tuple(columns),
        tokens=tuple(
            (visible(token_text(token)) or f"#{token}", tuple(by_expert.get(one, 0) for one in columns))
            for token, by_expert in rows
        ),
    )


def drift_of(values: Sequence[float]) -> float | None:
    """Mean of the last quarter less mean of the first; None for fewer than two."""
    part = -(-len(values) // 4)
    return (sum(values[-part:]) - sum(values[:part])) / part if len(values) > 1 else None


def _stops(
    own: GatewayFacts, past: Past, history: History, pools: Mapping[str, PoolSize], least: int, short: int
) -> list[Reason]:
    found: list[Reason] = []
    if own.unready and past.points and past.points[-1].tokens_per_s:
        # A worker that was silent for a moment serves nobody new; while tokens come nothing is down.
        do = "Streams go on. If it lasts, this says that nothing is served."
        found.append(Reason(WARN, f"new requests wait: {own.unready}", do))
    elif own.unready:
        do = "New ones join by themselves. After a minute: eaas scale, then their logs."
        found.append(Reason(BAD, f"no request can be served: {own.unready}", do))
    if history.formed and not least:
        do = "Servers load them now. After a minute: eaas scale, then their logs."
        if EXPERT in pools and not pools[EXPERT].wanted:
            do = "The pool was scaled to 0. To serve again: eaas scale expert 2"
        text = f"{many(short, 'expert')} on no server: requests that need them wait"
        found.append(Reason(BAD, text, do))
    elif not least and not own.unready:
        do = "Expert servers load the model; nothing to do."
        found.append(Reason(WARN, "the first placement is not complete yet", do))
    return found


def _control(snapshot: ClusterSnapshot, as_of_s: float | None) -> list[Reason]:
    away = [router.name for router in snapshot.routers if router.state == "unreachable"]
    leads = any(router.state == "serving" for router in snapshot.routers)
    do = "Requests go on. It is started again within seconds; if not, read its log."
    if snapshot.problem:
        return [Reason(WARN, f"the router cannot decide: {snapshot.problem}", do)]
    if away and not leads:
        told = "" if as_of_s is not None else ", and never did"
        return [Reason(WARN, f"{listed(away)} does not answer{told}; the cluster may differ", do)]
    if away:
        do = "Another leads. It is started again; if not, read its log."
        return [Reason(WARN, f"{listed(away)} does not answer; another leads", do)]
    return []


def _losses(history: History, snapshot: ClusterSnapshot, now_s: float) -> list[Reason]:
    found: list[Reason] = []
    members = snapshot.view.members if snapshot.view is not None else ()
    for name, pool in snapshot.pools.items():
        serving = sum(m.pool == name and m.state in (SERVING, SUSPECT) for m in members)
        missing = pool.wanted - serving
        if missing <= 0 or not history.formed:
            continue
        # Ordered, or already a member that loads.
        coming = "starts" if pool.starting else "loads" if pool.live >= pool.wanted else "is not ordered yet"
        lost = history.unreplaced(name)[-missing:]
        if not lost:
            text = f"{serving} of {pool.wanted} {name} processes serve; the next {coming}"
            found.append(Reason(WARN, text, "Nothing to do while it starts: eaas scale shows it."))
            continue
        why = f" ({lost[-1].reason})" if lost[-1].reason else ""
        names = listed([x.member.name for x in lost])
        text = f"{names} lost{why} {ago(now_s - lost[-1].at_s)}; a replacement {coming}"
        do = f"Nothing to do. After a minute: eaas scale, then the newest {name} log."
        found.append(Reason(WARN, text, do))
    return found


def _thin(history: History, least: int, short: int, wanted: int) -> list[Reason]:
    if not history.formed or not 0 < least < wanted:
        return []
    text = f"{many(short, 'expert')} on {least} of {wanted} servers: the next loss there makes requests wait"
    return [Reason(WARN, text, "The router makes copies. If it lasts: eaas scale expert, to more.")]


def _faults(snapshot: ClusterSnapshot, rates: Rates) -> list[Reason]:
    found: list[Reason] = []
    if rates.failed:
        text = f"{many(rates.failed, 'request')} failed in the last {rates.window_s:.0f} s"
        found.append(Reason(WARN, text, "The gateway's log has a line for each, with its request id."))
    members = snapshot.view.members if snapshot.view is not None else ()
    suspects = [member.name for member in members if member.state == SUSPECT]
    if suspects:
        do = "Nothing to do: others take its work, and the router decides within seconds."
        found.append(Reason(WARN, f"{listed(suspects)} suspect: silent, or reported", do))
    held_up = [(name, pool.held_up) for name, pool in snapshot.pools.items() if pool.held_up]
    return found + [Reason(INFO, f"pool {name}: {why}") for name, why in held_up]


def figures_of(own: GatewayFacts, rates: Rates) -> tuple[Figure, ...]:
    """What every view shows of a gateway, in this order."""
    on_target = share(rates.good_per_s / rates.ended_per_s) if rates.ended_per_s else ""
    return (
        Figure("tokens/s", number(rates.tokens_per_s)),
        Figure("goodput", f"{number(rates.good_per_s)}/s", more=on_target),
        Figure("requests/s", number(rates.requests_per_s)),
        Figure("failed", str(rates.failed), mood=BAD if rates.failed else INFO),
        Figure("TTFT", seconds(rates.ttft_p50_s), more=f"p99 {seconds(rates.ttft_p99_s)}"),
        Figure("ITL", seconds(rates.itl_p50_s), more=f"p99 {seconds(rates.itl_p99_s)}"),
        Figure("running", str(own.running), more=f"{own.went_on} went on" if own.went_on else ""),
        Figure("waiting", str(own.waiting), mood=WARN if own.waiting else INFO),
        Figure("sent now", seconds(own.eta_p50_s), more=f"p90 {seconds(own.eta_p90_s)}"),
    )


def _worker(member: Member) -> Worker:
    load: Mapping[str, float] = member.load
    return Worker(
        name=member.name,
        state=member.state,
        kv_use=load.get("kv_use"),
        busy=load.get("busy"),
        running=int(load.get("running", 0)),
        waiting=int(load.get("waiting", 0)),
        tokens_per_s=load.get("tokens_per_s"),
    )
