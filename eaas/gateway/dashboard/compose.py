"""The board of one moment, from what the gateway counted, what it followed and what the router told. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eaas.gateway.dashboard.board import (
    BAD,
    DEGRADED,
    DOWN,
    INFO,
    WARN,
    WHOLE,
    Board,
    Heat,
    Pool,
    Reason,
    Traffic,
    Worker,
)
from eaas.gateway.dashboard.history import History, copies
from eaas.gateway.dashboard.rates import Past
from eaas.gateway.dashboard.sight import Sight
from eaas.gateway.dashboard.words import ago, listed, many
from router.view import ATTENTION, EXPERT, SERVING, SUSPECT, Member

_SHOWN_HAPPENINGS = 100


@dataclass(frozen=True, kw_only=True)
class Own:
    """What a gateway knows of itself. unready: why it can serve no request now; empty when it can."""

    name: str
    model: str
    version: str
    unready: str
    running: int
    waiting: int
    went_on: int
    uptime_s: float
    ttft_target_s: float
    tpot_target_s: float


def board_of(
    *,
    own: Own,
    past: Past,
    history: History,
    sight: Sight,
    heat: Heat,
    now_s: float,
    as_of_s: float | None,
) -> Board:
    """The board.

    Args:
        now_s: Since 1970. as_of_s: when a router last answered.
    """
    view = sight.view
    least, short = copies(view) if view is not None else (0, 0)
    wanted = view.replicas_wanted if view is not None else 0
    pools = tuple(
        Pool(
            name=name,
            wanted=size.wanted,
            live=size.live,
            starting=size.starting,
            draining=size.draining,
            held_up=size.held_up,
        )
        for name, size in sight.pools.items()
    )
    traffic = _traffic(own, past)
    reasons = (
        *_stops(own, past, history, pools, least, short),
        *_control(sight, as_of_s),
        *_losses(history, sight, pools, now_s),
        *_thin(history, least, short, wanted),
        *_faults(sight, traffic, pools),
    )
    return Board(
        at_s=now_s,
        as_of_s=as_of_s,
        model=own.model,
        version=own.version,
        verdict=verdict_of(reasons),
        reasons=reasons,
        epoch=view.epoch if view is not None else None,
        term=view.term if view is not None else None,
        copies_least=least,
        copies_wanted=wanted,
        routers=sight.routers,
        traffic=traffic,
        past=past.points,
        pools=pools,
        workers=tuple(_worker(member) for member in view.pool(ATTENTION)) if view is not None else (),
        heat=heat,
        happenings=history.happenings[:_SHOWN_HAPPENINGS],
    )


def verdict_of(reasons: tuple[Reason, ...]) -> str:
    """The word for the whole: down when requests cannot be served, degraded when anything is amiss."""
    moods = {reason.mood for reason in reasons}
    return DOWN if BAD in moods else DEGRADED if WARN in moods else WHOLE


def _stops(
    own: Own, past: Past, history: History, pools: tuple[Pool, ...], least: int, short: int
) -> list[Reason]:
    found: list[Reason] = []
    if own.unready and past.points and past.points[-1].tokens_per_s:
        # A worker that was silent for a moment serves nobody new; while tokens come nothing is down.
        do = "Streams go on. If it lasts, this says that nothing is served."
        found.append(Reason(mood=WARN, text=f"new requests wait: {own.unready}", do=do))
    elif own.unready:
        do = "New ones join by themselves. After a minute: eaas scale, then their logs."
        found.append(Reason(mood=BAD, text=f"no request can be served: {own.unready}", do=do))
    if history.formed and not least:
        do = "Servers load them now. After a minute: eaas scale, then their logs."
        if any(pool.name == EXPERT and not pool.wanted for pool in pools):
            do = "The pool was scaled to 0. To serve again: eaas scale expert 2"
        text = f"{many(short, 'expert')} on no server: requests that need them wait"
        found.append(Reason(mood=BAD, text=text, do=do))
    elif not least and not own.unready:
        do = "Expert servers load the model; nothing to do."
        found.append(Reason(mood=WARN, text="the first placement is not complete yet", do=do))
    return found


def _control(sight: Sight, as_of_s: float | None) -> list[Reason]:
    away = [router.name for router in sight.routers if router.state == "unreachable"]
    leads = any(router.state == "serving" for router in sight.routers)
    do = "Requests go on. It is started again within seconds; if not, read its log."
    if sight.problem:
        return [Reason(mood=WARN, text=f"the router cannot decide: {sight.problem}", do=do)]
    if away and not leads:
        told = "" if as_of_s is not None else ", and never did"
        return [
            Reason(mood=WARN, text=f"{listed(away)} does not answer{told}; the cluster may differ", do=do)
        ]
    if away:
        do = "Another leads. It is started again; if not, read its log."
        return [Reason(mood=WARN, text=f"{listed(away)} does not answer; another leads", do=do)]
    return []


def _losses(history: History, sight: Sight, pools: tuple[Pool, ...], now_s: float) -> list[Reason]:
    found: list[Reason] = []
    members = sight.view.members if sight.view is not None else ()
    for pool in pools:
        serving = sum(m.pool == pool.name and m.state in (SERVING, SUSPECT) for m in members)
        missing = pool.wanted - serving
        if missing <= 0 or not history.formed:
            continue
        # Ordered, or already a member that loads.
        coming = "starts" if pool.starting else "loads" if pool.live >= pool.wanted else "is not ordered yet"
        lost = history.unreplaced(pool.name)[-missing:]
        if not lost:
            text = f"{serving} of {pool.wanted} {pool.name} processes serve; the next {coming}"
            found.append(
                Reason(mood=WARN, text=text, do="Nothing to do while it starts: eaas scale shows it.")
            )
            continue
        why = f" ({lost[-1].reason})" if lost[-1].reason else ""
        names = listed([x.member.name for x in lost])
        text = f"{names} lost{why} {ago(now_s - lost[-1].at_s)}; a replacement {coming}"
        do = f"Nothing to do. After a minute: eaas scale, then the newest {pool.name} log."
        found.append(Reason(mood=WARN, text=text, do=do))
    return found


def _thin(history: History, least: int, short: int, wanted: int) -> list[Reason]:
    if not history.formed or not 0 < least < wanted:
        return []
    text = f"{many(short, 'expert')} on {least} of {wanted} servers: the next loss there makes requests wait"
    return [
        Reason(mood=WARN, text=text, do="The router makes copies. If it lasts: eaas scale expert, to more.")
    ]


def _faults(sight: Sight, traffic: Traffic, pools: tuple[Pool, ...]) -> list[Reason]:
    found: list[Reason] = []
    if traffic.failed:
        text = f"{many(traffic.failed, 'request')} failed in the last {traffic.window_s:.0f} s"
        found.append(
            Reason(mood=WARN, text=text, do="The gateway's log has a line for each, with its request id.")
        )
    members = sight.view.members if sight.view is not None else ()
    suspects = [member.name for member in members if member.state == SUSPECT]
    if suspects:
        do = "Nothing to do: others take its work, and the router decides within seconds."
        found.append(Reason(mood=WARN, text=f"{listed(suspects)} suspect: silent, or accused", do=do))
    held_up = [Reason(mood=INFO, text=f"pool {p.name}: {p.held_up}", do="") for p in pools if p.held_up]
    return [*found, *held_up]


def _traffic(own: Own, past: Past) -> Traffic:
    rates = past.rates()
    return Traffic(
        name=own.name,
        ready=not own.unready,
        window_s=rates.window_s,
        requests_per_s=rates.requests_per_s,
        tokens_per_s=rates.tokens_per_s,
        good_per_s=rates.good_per_s,
        ended_per_s=rates.ended_per_s,
        failed=rates.failed,
        ttft_p50_s=rates.ttft_p50_s,
        ttft_p99_s=rates.ttft_p99_s,
        itl_p50_s=rates.itl_p50_s,
        itl_p99_s=rates.itl_p99_s,
        running=own.running,
        waiting=own.waiting,
        went_on=own.went_on,
        uptime_s=own.uptime_s,
        ttft_target_s=own.ttft_target_s,
        tpot_target_s=own.tpot_target_s,
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
