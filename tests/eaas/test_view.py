"""The view-model: what happened, how hot which server is, how fast, and whether anybody need get up."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from eaas.gateway.dashboard.board import (
    DEGRADED,
    DOWN,
    GAINED,
    GIVEN_UP,
    TAKEN_OVER,
    WHOLE,
    Board,
    ago,
    number,
    seconds,
    short,
)
from eaas.gateway.dashboard.compose import MOST_POINTS, drift_of, inspection_of, quantile
from eaas.gateway.dashboard.heat import Flow, heat_of, spread
from eaas.gateway.dashboard.history import MOST_HAPPENINGS, ClusterSnapshot, History, follow, learn
from eaas.gateway.status import copies
from eaas.worker.protocol import LayerView
from router.view import GoneMember, View
from tests.eaas.view_world import (
    ALL,
    BOUNDS_S,
    EXPERTS,
    INSPECTED,
    LAYERS,
    OWN,
    board,
    kinds,
    member,
    past,
    reading,
    router,
    size,
    story,
    texts,
    two_of_each,
    view,
)

ONE, TWO, THREE = two_of_each()
WORKER = member("attention/1", running=2.0, kv_use=0.5, tokens_per_s=40.0)
WHOLE_VIEW = view(5, ONE, TWO, THREE, WORKER)
POOLS = {"expert": size(3, 3), "attention": size(1, 1)}


# -- what happened


def test_a_loss_says_who_goes_on_marks_their_cells_and_ends_with_the_replacement() -> None:
    history = story((0.0, WHOLE_VIEW), (10.0, view(6, TWO, THREE, WORKER)))
    assert texts(history)[1] == "expert/1 lost; its experts go on at expert/2, expert/3"
    # expert/1 held pairs 0-5: 0-2 are on expert/2 (layer 0), 3 and 4-5 on expert/3 (both layers).
    assert {place: mark.kind for place, mark in history.marks.items()} == {
        ("expert/2", 0): TAKEN_OVER,
        ("expert/3", 0): TAKEN_OVER,
        ("expert/3", 1): TAKEN_OVER,
    }
    history = follow(history, view(7, TWO, THREE, WORKER, member("expert/4", state="joining")), 10.5)
    history = follow(history, view(8, TWO, THREE, WORKER, member("expert/4", ONE_PAIRS)), 11.5)
    assert kinds(history) == ["begins", "lost", "joined", "replaced", "redundant"]
    assert texts(history)[-2:] == [
        "expert/4 serves in place of expert/1, 1.5 s after its loss",
        "every expert is on 2 servers again, after 1.5 s",
    ]
    assert not history.unreplaced("expert")


ONE_PAIRS = (0, 1, 2, 3, 4, 5)


def test_the_router_s_reason_is_told_as_soon_as_it_is_known() -> None:
    history = story((0.0, WHOLE_VIEW), (1.0, view(6, TWO, THREE, WORKER)))
    gone = GoneMember(name="expert/1", incarnation=101, pid=1, reason="silent for 1.20 s")
    other = GoneMember(name="expert/1", incarnation=5, pid=1, reason="of long ago")
    history = learn(history, ClusterSnapshot(view=history.view, heard=True, gone=(other, gone)), 2.0)
    assert texts(history)[1].startswith("expert/1 lost (silent for 1.20 s); its experts")
    assert history.lost[0].reason == "silent for 1.20 s"
    again = learn(history, ClusterSnapshot(view=history.view, heard=True, gone=(other, gone)), 3.0)
    assert again.happenings == history.happenings


def test_an_orderly_end_is_no_loss() -> None:
    draining = replace(ONE, state="draining")
    history = story((0.0, WHOLE_VIEW), (1.0, view(6, draining, TWO, THREE)), (2.0, view(7, TWO, THREE)))
    assert "expert/1 drains" in texts(history)
    assert "expert/1 has drained and left" in texts(history)
    assert [lost.member.name for lost in history.lost] == ["attention/1"]


def test_suspicion_comes_and_goes() -> None:
    suspect = replace(TWO, state="suspect")
    history = story((0.0, WHOLE_VIEW), (1.0, view(5, ONE, suspect, THREE, WORKER)), (2.0, WHOLE_VIEW))
    assert kinds(history) == ["begins", "suspect", "well"]


def test_moves_close_together_are_one_and_a_later_one_is_another() -> None:
    with_more = member("expert/2", [*(0, 1, 2, 6, 7), 3])
    with_most = member("expert/2", [*(0, 1, 2, 6, 7), 3, 4])
    less = member("expert/3", [5, 6, 7])
    history = story(
        (0.0, WHOLE_VIEW),
        (1.0, view(6, ONE, with_more, THREE, WORKER)),
        (2.0, view(7, ONE, with_most, THREE, WORKER)),
        (3.0, view(8, ONE, with_most, less, WORKER)),
    )
    assert kinds(history) == ["begins", "moved"]
    assert texts(history)[-1] == "copies moved: expert/2 +2, expert/3 −2 (epoch 8)"
    marks = {place: mark.kind for place, mark in history.marks.items()}
    assert marks[("expert/2", 1)] == GAINED
    assert marks[("expert/3", 1)] == GIVEN_UP
    history = follow(history, view(9, ONE, with_most, THREE, WORKER), 60.0)
    assert kinds(history) == ["begins", "moved", "moved"]
    assert {place for place, _ in history.marks.items()} == {("expert/3", 0), ("expert/3", 1)}, "old marks stay"


def test_experts_on_no_server_are_told_once_and_the_end_of_it_too() -> None:
    alone = view(6, TWO, WORKER)
    history = story((0.0, WHOLE_VIEW), (1.0, alone), (1.5, alone), (4.0, WHOLE_VIEW))
    assert kinds(history).count("experts-gone") == 1
    assert "3 experts on no server: requests that need them wait" in texts(history)
    assert texts(history)[-1] == "every expert is on 2 servers again, after 3 s"


def test_a_new_term_a_router_away_and_a_scaled_pool_are_told() -> None:
    history = story((0.0, WHOLE_VIEW), (1.0, replace(WHOLE_VIEW, term=2)))
    away, back = router("router/0", "unreachable"), router("router/0", "serving")
    for at_s, seen, wanted in ((2.0, back, 3), (3.0, away, 3), (4.0, away, 3), (9.0, back, 5)):
        snapshot = ClusterSnapshot(
            view=history.view, heard=True, routers=(seen,), pools={"expert": size(wanted, wanted)}
        )
        history = learn(history, snapshot, at_s)
    assert kinds(history) == ["begins", "term", "router-away", "router-back", "scaled"]
    assert texts(history)[-2:] == ["router/0 answers again, after 6 s", "pool expert scales from 3 to 5"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_views_come_the_history_stays_bounded_and_names_no_ghosts(seed: int) -> None:
    rng = random.Random(seed)
    history, at_s, newest = History(), 0.0, 0
    names: list[int] = []
    states = ["joining", "warming", "serving", "serving", "suspect", "draining"]
    for epoch in range(150):
        # A name never returns.
        came = range(newest, newest + rng.randint(0, 2))
        newest += len(came)
        names = [n for n in (*names, *came) if rng.random() < 0.8][:6]
        members = [member(f"expert/{n}", rng.sample(ALL, rng.randint(0, 8)), rng.choice(states)) for n in names]
        history = follow(history, view(epoch, *members, wanted=rng.randint(1, 3)), at_s)
        at_s += rng.random() * 20
        shown = board(history, at_s, pools={"expert": size(3, len(names))}, rows=[5] * 8)
        assert len(history.happenings) <= MOST_HAPPENINGS, f"seed {seed}"
        assert len(history.lost) <= 64, f"seed {seed}"
        columns = [server.name for server in shown.heat.servers]
        assert len(columns) == len(set(columns)), f"seed {seed}: {columns}"
        assert {m.name for m in members} <= set(columns), f"seed {seed}"
        told = {lost.member.name for lost in history.lost}
        assert {server.name for server in shown.heat.servers if server.state == "lost"} <= told, f"seed {seed}"


def test_copies_are_counted_as_one_by_one() -> None:
    rng = random.Random(7)
    for _ in range(50):
        members = [member(f"expert/{n}", rng.sample(ALL, rng.randint(0, 8))) for n in range(1, rng.randint(2, 6))]
        seen = view(1, *members)
        each = [len(seen.replicas(layer, expert)) for layer in range(LAYERS) for expert in range(EXPERTS)]
        assert copies(seen) == (min(each), each.count(min(each)))
    assert copies(View(term=1, epoch=1, replicas_wanted=1, layers=0, experts=0)) == (0, 0)


# -- heat


def test_rows_of_an_expert_are_spread_over_its_copies_and_scaled_to_what_servers_report() -> None:
    history = story((0.0, WHOLE_VIEW))
    shown = board(history, 1.0, rows=[20, 20, 20, 20, 20, 20, 20, 20])
    assert [server.name for server in shown.heat.servers] == ["expert/1", "expert/2", "expert/3"]
    # Each row of 20 is shared by two copies: 10 for every pair held, which is 60, 50 and 50, as reported.
    assert [server.rows for server in shown.heat.servers] == [(40.0, 20.0), (30.0, 20.0), (10.0, 40.0)]
    assert shown.heat.hottest == 40.0
    assert shown.heat.balance == pytest.approx(60 / (160 / 3))
    half = view(5, replace(ONE, load={"pairs_per_s": 30.0}), TWO, THREE)
    shown = board(story((0.0, half)), 1.0, rows=[20] * 8)
    assert shown.heat.servers[0].rows == (20.0, 10.0)


def test_before_two_readings_the_heat_is_what_servers_report_and_not_zero() -> None:
    snapshot = ClusterSnapshot(view=WHOLE_VIEW, heard=True, rows=np.zeros(LAYERS * EXPERTS, np.uint64))
    heat, _ = heat_of(WHOLE_VIEW, Flow().read(snapshot, 0.0), story((0.0, WHOLE_VIEW)), 1.0, 1.0)
    assert [sum(server.rows) for server in heat.servers] == [60.0, 50.0, 50.0]
    assert heat.servers[0].rows == (40.0, 20.0)


def test_spreading_loses_no_row() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        rates = rng.random(LAYERS * EXPERTS) * 100
        bits = {f"expert/{n}": bytes([int(rng.integers(256))]) for n in range(4)} | {"expert/9": b"\xff"}
        found = spread(rates, bits, (LAYERS, EXPERTS))
        assert sum(load.sum() for load in found.values()) == pytest.approx(rates.sum())
    assert spread(rates, {"expert/1": b""}, (LAYERS, EXPERTS))["expert/1"].sum() == 0


def test_a_router_that_counts_anew_makes_no_negative_rate() -> None:
    snapshot = ClusterSnapshot(view=WHOLE_VIEW, heard=True)
    flow = Flow()
    for at_s, rows in ((0.0, 1000), (1.0, 1100), (2.0, 7), (3.0, 107)):
        flow = flow.read(replace(snapshot, rows=np.full(8, rows, np.uint64)), at_s)
    assert flow.rates() is not None
    assert (flow.rates() == 100).all()


def test_a_lost_server_keeps_its_column_until_it_is_old_news() -> None:
    history = story((0.0, WHOLE_VIEW), (10.0, view(6, TWO, THREE, WORKER)))
    first = board(history, 11.0).heat.servers[0]
    assert (first.name, first.state, first.since_s, first.held) == ("expert/1", "lost", 10.0, (4, 2))
    history = follow(history, view(8, TWO, THREE, WORKER, member("expert/4", ONE_PAIRS)), 12.0)
    assert board(history, 69.0).heat.servers[0].replacement == "expert/4"
    assert [server.name for server in board(history, 71.0).heat.servers] == [
        "expert/2",
        "expert/3",
        "expert/4",
    ]


# -- rates


def test_rates_are_of_the_last_ten_seconds() -> None:
    found = past(*(reading(float(s), requests=2 * s, tokens=100 * s * s) for s in range(31))).rates()
    assert found.window_s == 10.0
    assert found.requests_per_s == 2.0
    assert found.tokens_per_s == (100 * 900 - 100 * 400) / 10
    assert past(reading(0.0)).rates().tokens_per_s == 0


def test_curves_hold_two_minutes_and_start_anew_with_the_counters() -> None:
    found = past(*(reading(float(s), tokens=s) for s in range(500)))
    assert len(found.points) == MOST_POINTS
    assert len(found.readings) <= 16
    assert {point.tokens_per_s for point in found.points} == {1.0}


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99, 1.0])
def test_a_quantile_of_buckets_is_within_the_bucket_of_the_true_one(share: float) -> None:
    rng = random.Random(11)
    for _ in range(100):
        seen = sorted(rng.uniform(0, 1.5) ** 3 for _ in range(rng.randint(1, 200)))
        counts = [0] * (len(BOUNDS_S) + 1)
        for value in seen:
            counts[sum(bound < value for bound in BOUNDS_S)] += 1
        true = seen[max(0, int(np.ceil(share * len(seen))) - 1)]
        found = quantile(BOUNDS_S, counts, share)
        place = sum(bound < true for bound in BOUNDS_S)
        low = (0.0, *BOUNDS_S)[place]
        high = (*BOUNDS_S, BOUNDS_S[-1])[place]
        assert found is not None
        assert low <= found <= high, (share, true, found)
    assert quantile(BOUNDS_S, [0, 0, 0, 0], share) is None


# -- the verdict


def test_a_whole_cluster_asks_for_nothing() -> None:
    shown = board(story((0.0, WHOLE_VIEW)), 1.0, pools=POOLS)
    assert (shown.verdict, shown.reasons) == (WHOLE, ())
    assert shown.epoch == 5 and "copies 2/2" in shown.facts
    assert shown.workers[0].kv_use == 0.5


def test_after_a_loss_it_is_degraded_and_says_what_comes() -> None:
    history = story((0.0, WHOLE_VIEW), (10.0, view(6, TWO, THREE, WORKER)))
    pools = {"expert": size(3, 2, starting=1), "attention": size(1, 1)}
    shown = board(history, 13.0, pools=pools)
    assert shown.verdict == DEGRADED
    assert [reason.text for reason in shown.reasons] == [
        "expert/1 lost 3 s ago; a replacement starts",
        "6 experts on 1 of 2 servers: the next loss there makes requests wait",
    ]
    history = follow(history, view(7, TWO, THREE, WORKER, member("expert/4", state="warming")), 14.0)
    shown = board(history, 14.0, pools=POOLS)
    assert shown.reasons[0].text == "expert/1 lost 4 s ago; a replacement loads"
    assert all(reason.do for reason in shown.reasons)


@pytest.mark.parametrize(
    ("case", "verdict", "said"),
    [
        ("unready", DOWN, "no request can be served: no attention worker serves"),
        ("gone", DOWN, "3 experts on no server"),
        ("router", DEGRADED, "router/0 does not answer"),
        ("standby", DEGRADED, "another leads"),
        ("journal", DEGRADED, "the router cannot decide: disk full"),
        ("suspect", DEGRADED, "expert/2 suspect"),
        ("silent", DEGRADED, "new requests wait: no attention worker serves"),
        ("failed", DEGRADED, "2 requests failed in the last 1 s"),
        ("forming", DEGRADED, "the first placement is not complete yet"),
        ("shrunk", WHOLE, ""),
    ],
)
def test_every_trouble_has_its_verdict_and_its_words(case: str, verdict: str, said: str) -> None:
    away = router("router/0", "unreachable")
    leads = router("router/1", "serving")
    history = story((0.0, WHOLE_VIEW))
    shown = {
        "unready": lambda: board(history, 1.0, own=replace(OWN, unready="no attention worker serves")),
        "silent": lambda: board(
            history,
            1.0,
            own=replace(OWN, unready="no attention worker serves"),
            seen=past(reading(0.0), reading(1.0, tokens=256)),
        ),
        "gone": lambda: board(story((0.0, WHOLE_VIEW), (1.0, view(6, TWO, WORKER))), 2.0),
        "router": lambda: board(history, 1.0, routers=[away], heard=False),
        "standby": lambda: board(history, 1.0, routers=[leads, away]),
        "journal": lambda: board(history, 1.0, problem="disk full"),
        "suspect": lambda: board(story((0.0, view(5, ONE, replace(TWO, state="suspect"), THREE))), 1.0),
        "failed": lambda: board(history, 1.0, seen=past(reading(0.0), reading(1.0, requests=9, failed=2))),
        "forming": lambda: board(story((0.0, view(1, member("expert/1", state="warming")))), 1.0),
        # One of three was lost, and the pool then made smaller: nothing is missing.
        "shrunk": lambda: board(
            story((0.0, WHOLE_VIEW), (1.0, view(7, member("expert/2", ALL), member("expert/3", ALL), WORKER))),
            2.0,
            pools={"expert": size(2, 2)},
        ),
    }[case]()
    assert shown.verdict == verdict, shown.reasons
    assert any(said in reason.text for reason in shown.reasons) or (not said and not shown.reasons)


def test_a_board_of_nothing_yet_can_be_shown() -> None:
    shown = board(History(), 1.0, heard=False, own=replace(OWN, unready="the router has not been heard yet"))
    assert (shown.verdict, shown.epoch, shown.heat.servers) == (DOWN, None, ())


def test_json_carries_a_board_whole() -> None:
    history = story((0.0, WHOLE_VIEW), (10.0, view(6, TWO, THREE, WORKER)))
    shown = board(history, 11.0, pools=POOLS, rows=[1, 2, 3, 4, 5, 6, 7, 8], inspection=INSPECTED)
    assert msgspec.json.decode(msgspec.json.encode(shown), type=Board) == shown


# -- an inspection


def test_an_inspection_is_shown_in_words_with_the_oftenest_experts_as_columns() -> None:
    assert board(story((0.0, WHOLE_VIEW)), 1.0).inspection is None
    shown = board(story((0.0, WHOLE_VIEW)), 1.0, inspection=INSPECTED).inspection
    assert shown is not None
    assert (shown.id, shown.taps, shown.produced, shown.dropped) == ("inspect-1", 4, 12_345, 45)
    first = shown.layers[0]
    assert first.entropy == (None, 0.9, 0.8, None, 0.7, 0.4)
    assert first.drift == pytest.approx(0.4 - 0.9)
    assert first.experts == (3, 7, 8, 9, 10, 11, 18)
    assert [text for text, _ in first.tokens] == [
        "␣the",
        "\\n\\x1b[31m",
        "<script>alert(1)</scrip…",
        "東京",
        "#11",
    ]
    assert [counts for _, counts in first.tokens][1] == (48, 0, 1, 0, 0, 0, 20)
    for layer, told in zip(shown.layers, INSPECTED.layers, strict=True):
        for (_, counts), (_, chosen) in zip(layer.tokens, told.tokens, strict=True):
            assert {e: n for e, n in zip(layer.experts, counts, strict=True) if n} == dict(chosen)


def test_of_many_experts_those_chosen_oftenest_have_columns() -> None:
    tokens = [(7 + n, [(8 * n + expert, 100 * n + expert + 1) for expert in range(8)]) for n in range(5)]
    layer = LayerView(layer=0, tokens=tokens)
    words = dict.fromkeys(range(20), "x")
    (found,) = inspection_of(replace(INSPECTED, layers=[layer]), words.__getitem__).layers
    assert found.experts == tuple(range(16, 40))
    assert found.tokens[0] == ("x", (0,) * 24)
    assert (found.entropy, found.drift) == ((), None)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 24])
def test_drift_is_the_last_quarter_less_the_first(count: int) -> None:
    values = np.random.default_rng(count).random(count)
    part = max(1, int(np.ceil(count / 4)))
    assert drift_of(values.tolist()) == pytest.approx(values[-part:].mean() - values[:part].mean())
    assert drift_of([0.5]) is None and drift_of([]) is None


def test_figures_are_short_and_right() -> None:
    assert [seconds(x) for x in (None, 0, 84e-6, 4.2e-3, 0.9996, 1.25, 60, 180, 9000)] == [
        "–", "0 µs", "84 µs", "4.2 ms", "1 s", "1.25 s", "60 s", "3 min", "2.5 h",
    ]  # fmt: skip
    assert [number(x) for x in (None, 0, 0.44, 9.96, 2310, 45100, 3.2e6)] == [
        "–", "0", "0.4", "10", "2,310", "45.1k", "3.2M",
    ]  # fmt: skip
    assert [short(x) for x in (0, 86.4, 999.4, 999.6, 2310, 45100, 999_900, 3.2e6)] == [
        "0", "86", "999", "1.0k", "2.3k", "45k", "1.0M", "3.2M",
    ]  # fmt: skip
    assert max(len(short(10**power * 9.94)) for power in range(10)) <= 4
    assert [ago(x) for x in (0.2, 3.4, 300)] == ["just now", "3 s ago", "5 min ago"]
