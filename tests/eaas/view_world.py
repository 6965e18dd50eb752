"""Small clusters for the tests of the view: Views, histories and boards of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from eaas.gateway.dashboard.board import Board, GatewayFacts, Heat, InspectionShown
from eaas.gateway.dashboard.compose import Past, Reading, board_of, inspection_of
from eaas.gateway.dashboard.heat import Flow, heat_of
from eaas.gateway.dashboard.history import ClusterSnapshot, History, follow, learn
from eaas.gateway.status import RouterStatus
from eaas.worker.protocol import LayerView
from router import bitmap
from router.view import Member, PoolSize, View

LAYERS, EXPERTS = 2, 4
ALL = range(LAYERS * EXPERTS)
BOUNDS_S = (0.01, 0.1, 1.0)
OWN = GatewayFacts(
    name="gateway/1",
    model="demo",
    version="1",
    unready="",
    running=2,
    waiting=0,
    went_on=0,
    ttft_target_s=1.0,
    tpot_target_s=0.1,
    eta_p50_s=1.25,
    eta_p90_s=8.0,
)


# Words of the tokens of an inspection, some of them what a view must not take literally.
WORDS = {7: " the", 8: "\n\x1b[31m", 9: "<script>alert(1)</script>", 10: "東京", 11: ""}
INSPECTED = InspectionShown(
    id="inspect-1",
    taps=4,
    produced=12_345,
    delivered=12_000,
    dropped=45,
    fault="",
    layers=[
        LayerView(
            layer=layer,
            entropy=[-1.0, 0.9, 0.8, -1.0, 0.7, 0.5 - layer / 10],
            pairs=[(3, 17, 412), (5, 9, 300)],
            tokens=[(token, [(3, 40 + token), (17 + layer, 20), (token, 1)]) for token in WORDS],
        )
        for layer in (1, 2, 3)
    ],
)


def member(name: str, pairs: Sequence[int] = (), state: str = "serving", **load: float) -> Member:
    """pairs: bits of the (layer, expert) pairs that may be asked of it."""
    bits = sum(1 << pair for pair in pairs)
    return Member(
        name=name,
        pool=name.partition("/")[0],
        state=state,
        incarnation=int(name.rpartition("/")[2]) + 100,
        address="",
        pid=1,
        host="h",
        serving=bitmap.to_bytes(bits, LAYERS, EXPERTS),
        load=load,
    )


def view(epoch: int, *members: Member, term: int = 1, wanted: int = 2) -> View:
    return View(term=term, epoch=epoch, replicas_wanted=wanted, layers=LAYERS, experts=EXPERTS, members=members)


def size(wanted: int, live: int, starting: int = 0) -> PoolSize:
    return PoolSize(wanted=wanted, live=live, starting=starting, draining=0, least=0, most=9)


def router(name: str, state: str) -> RouterStatus:
    return RouterStatus(name=name, pid=None, address="", state=state)


def two_of_each() -> tuple[Member, Member, Member]:
    """Three servers: every pair on two of them."""
    return (
        member("expert/1", [0, 1, 2, 3, 4, 5], busy=0.5, pairs_per_s=60.0),
        member("expert/2", [0, 1, 2, 6, 7], busy=0.5, pairs_per_s=50.0),
        member("expert/3", [3, 4, 5, 6, 7], busy=0.95, pairs_per_s=50.0),
    )


def story(*steps: tuple[float, View]) -> History:
    """The history after Views that came at these times."""
    history = History()
    for at_s, seen in steps:
        history = follow(history, seen, at_s)
    return history


def kinds(history: History) -> list[str]:
    """Oldest first."""
    return [happening.kind for happening in reversed(history.happenings)]


def texts(history: History) -> list[str]:
    """Oldest first."""
    return [happening.text for happening in reversed(history.happenings)]


def reading(at_s: float, **counted: int) -> Reading:
    zero = {"requests": 0, "failed": 0, "tokens": 0, "ended": 0, "good": 0, "went_on": 0}
    hist = (0,) * (len(BOUNDS_S) + 1)
    return Reading(at_s=at_s, wall_s=at_s + 1000, ttft=hist, itl=hist, **{**zero, **counted})


def past(*readings: Reading) -> Past:
    found = Past(ttft_bounds_s=BOUNDS_S, itl_bounds_s=BOUNDS_S)
    for one in readings:
        found = found.read(one)
    return found


def board(
    history: History,
    now_s: float,
    *,
    pools: Mapping[str, PoolSize] | None = None,
    routers: Sequence[RouterStatus] | None = None,
    heard: bool = True,
    own: GatewayFacts = OWN,
    rows: Sequence[int] | None = None,
    seen: Past | None = None,
    problem: str = "",
    inspection: InspectionShown | None = None,
) -> Board:
    """The board of a history's last View. rows: sent to each expert within one second, by pair."""
    snapshot = ClusterSnapshot(
        view=history.view,
        heard=heard,
        routers=tuple(routers or [router("router/0", "serving")]),
        pools=pools or {},
        problem=problem,
    )
    history = learn(history, snapshot, now_s)
    flow = Flow()
    if rows is not None:
        before = np.zeros(LAYERS * EXPERTS, np.uint64)
        flow = flow.read(replace(snapshot, rows=before), 0.0)
        flow = flow.read(replace(snapshot, rows=np.array(rows, np.uint64)), 1.0)
    heat = Heat(layers=0, experts=0, servers=(), hottest=0.0, balance=None)
    if history.view is not None:
        heat, _ = heat_of(history.view, flow, history, now_s, 1.0)
    return board_of(
        own=own,
        past=seen or past(reading(0.0), reading(1.0)),
        history=history,
        snapshot=snapshot,
        heat=heat,
        now_s=now_s,
        as_of_s=now_s if heard else None,
        inspection=inspection_of(inspection, WORDS.__getitem__) if inspection else None,
    )
