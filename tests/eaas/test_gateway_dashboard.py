"""/dashboard and its events, through the real gateway process: bounded, alive, and nothing that a page may not do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest

from eaas.gateway.dashboard.app import BEAT_S, MOST_LISTENERS, dashboard_page
from eaas.gateway.dashboard.board import Board
from tests.eaas.gateway_world import FakeWorker, GatewayProcess, World, eventually


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("model"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def worker(world: World) -> FakeWorker:
    worker = world.worker()
    world.router.show(worker)
    return worker


@pytest.fixture(scope="module")
def url(world: World, worker: FakeWorker) -> Iterator[str]:
    gateway = GatewayProcess(world)
    eventually(lambda: httpx.get(f"{gateway.url}/health").status_code == 200, "ready")
    yield gateway.url
    status, log = gateway.stop()
    assert status == 0
    assert "Traceback" not in log, log
    assert "dashboard_failed" not in log, log


def boards(url: str, most: int, timeout_s: float = 30.0) -> Iterator[Board]:
    """The first boards of a new listener."""
    with httpx.stream("GET", f"{url}/dashboard/events", timeout=timeout_s) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-store"
        for line in reply.iter_lines():
            if line.startswith("data:"):
                yield msgspec.json.decode(line[5:], type=Board)
                most -= 1
                if not most:
                    return


def complete(url: str, **body: object) -> httpx.Response:
    wanted = {"model": "tiny", "prompt": "abc", "max_tokens": 20, **body}
    return httpx.post(f"{url}/v1/completions", json=wanted, timeout=30)


def choices(url: str) -> dict[str, float]:
    """How many choices have ended, and how many of them were good, as /metrics says."""
    scraped = httpx.get(f"{url}/metrics").text
    found = re.findall(r"^eaas_choices_(ended|good)_total\{.*\} (\S+)", scraped, re.M)
    assert len(found) == 2, scraped
    return {word: float(count) for word, count in found}


def test_a_listener_gets_a_board_at_once_and_then_one_after_another(url: str, worker: FakeWorker) -> None:
    complete(url)
    first, *rest = boards(url, 4)
    assert (first.gateway.model, first.verdict) == ("tiny", "whole"), first.reasons
    assert [server.name for server in first.heat.servers] == ["expert/1"]
    assert first.heat.servers[0].busy == 0.25
    assert [each.name for each in first.workers] == [worker.name]
    assert first.routers[0].state == "serving"
    at_s = [first.at_s, *(board.at_s for board in rest)]
    assert at_s == sorted(set(at_s))


def test_what_is_served_is_counted_and_what_is_good_too(url: str) -> None:
    listening = boards(url, 60)
    before = next(listening).gateway
    counted = choices(url)["ended"]
    for _ in range(5):
        assert complete(url).status_code == 200
    assert complete(url, model="other").status_code == 404
    # What is read in the middle of a request has tokens of one that has not ended.
    eventually(lambda: choices(url)["ended"] >= counted + 5, "all five are counted")
    done_s = time.time()
    board = next(b for b in listening if b.past and b.past[-1].at_s > done_s)
    rates = board.rates
    ended = round(rates.ended_per_s * rates.window_s)
    assert ended >= 5
    assert rates.ttft_p50_s is not None and rates.itl_p99_s is not None
    assert rates.failed == 0
    # Twenty tokens each. The refused one is a request that was answered too.
    assert rates.tokens_per_s * rates.window_s == pytest.approx(20 * ended)
    assert rates.good_per_s == rates.ended_per_s
    # A request is counted when it has been answered, which is a moment later.
    assert rates.requests_per_s * rates.window_s >= ended - 1.1
    assert before.name == board.gateway.name
    found = choices(url)
    assert found["ended"] == found["good"] >= 5


def test_what_happens_while_nobody_watches_is_told_later(url: str, world: World, worker: FakeWorker) -> None:
    other = world.worker()
    world.router.show(worker, other)
    eventually(lambda: any(b.workers[-1].name == other.name for b in boards(url, 1)), "the second")
    eventually(lambda: len(httpx.get(f"{url}/status").json()["gateway"]["attention_workers"]) == 2, "linked")
    began_s = time.time()
    world.router.show(worker)
    other.stop()
    eventually(lambda: len(httpx.get(f"{url}/status").json()["gateway"]["attention_workers"]) == 1, "gone")
    shown: list[Board] = []

    def is_told() -> bool:
        shown[:] = boards(url, 1)
        return {"lost", "serves"} <= {h.kind for h in shown[0].happenings}

    eventually(is_told, "a board that tells of it")
    lost = next(h for h in shown[0].happenings if h.kind == "lost")
    assert lost.text == f"{other.name} lost"
    assert began_s - 1 < lost.at_s < time.time() + 1
    assert next(h for h in shown[0].happenings if h.kind == "serves").text == f"{other.name} serves"


def listen(url: str) -> ExitStack | None:
    """A listener that stays until it is closed; None where there is no place."""
    stack = ExitStack()
    reply = stack.enter_context(httpx.stream("GET", f"{url}/dashboard/events", timeout=30))
    if reply.status_code != 200:
        stack.close()
        return None
    lines = reply.iter_lines()
    # An iterator that is let go closes its connection.
    stack.callback(lines.close)  # type: ignore[attr-defined]
    assert next(lines) == "retry: 1000"
    return stack


def test_listeners_are_bounded_and_a_place_is_given_back(url: str) -> None:
    with ExitStack() as open_ones:
        found: list[ExitStack | None] = []
        for _ in range(MOST_LISTENERS):
            # Those of earlier tests may not have gone yet.
            eventually(lambda: found.append(listen(url)) or found[-1], "a place")
            open_ones.enter_context(found[-1])  # type: ignore[arg-type]
        refused = open_ones.enter_context(httpx.stream("GET", f"{url}/dashboard/events", timeout=30))
        assert refused.status_code == 503
        assert json.loads(refused.read())["error"]["code"] == "too_many_listeners"
        assert refused.headers["retry-after"] == "5"
        assert complete(url).status_code == 200

    eventually(lambda: found.append(listen(url)) or found[-1], "a place once they have gone")
    found[-1].close()  # type: ignore[union-attr]


def test_a_listener_that_reads_nothing_costs_nobody_anything(url: str) -> None:
    with httpx.stream("GET", f"{url}/dashboard/events", timeout=30):
        assert complete(url).status_code == 200
        assert len(list(boards(url, 3))) == 3


def test_boards_go_on_while_the_router_is_away_and_say_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    worker = world.worker()
    world.router.show(worker)
    gateway = GatewayProcess(world)
    eventually(lambda: httpx.get(f"{gateway.url}/health").status_code == 200, "ready")
    listening = boards(gateway.url, 100)
    first = next(listening)
    world.router.stop()
    heard = time.monotonic()
    for board in listening:
        silence_s, heard = time.monotonic() - heard, time.monotonic()
        assert silence_s < BEAT_S + 5, "no word for too long"
        if board.verdict == "degraded":
            break
    assert any("router/0 does not answer" in reason.text for reason in board.reasons)
    assert board.as_of_s is not None and board.as_of_s < board.at_s
    assert [s.name for s in board.heat.servers] == [s.name for s in first.heat.servers]
    assert board.happenings[0].kind == "router-away"
    status, log = gateway.stop()
    assert (status, "Traceback" in log) == (0, False), log
    world.close()


def test_listeners_end_with_their_gateway(world: World, worker: FakeWorker) -> None:
    gateway = GatewayProcess(world)
    with httpx.stream("GET", f"{gateway.url}/dashboard/events", timeout=30) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "retry: 1000"
        status, log = gateway.stop()
        # The body ends as it should: whoever listens comes back, to the next gateway.
        assert sum(1 for _ in lines) >= 0
    assert (status, "Traceback" in log) == (0, False), log


def test_the_page_needs_nothing_else_and_may_run_nothing_else(url: str) -> None:
    reply = httpx.get(f"{url}/dashboard")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.content == dashboard_page()[0]
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", reply.text)
    assert set(links) <= {"data:,", "#heat"}, links
    for left_over in ("innerHTML", "eval(", "/*style*/", "/*script*/", "/*glyphs*/", " on" + "click="):
        assert left_over not in reply.text
    assert httpx.post(f"{url}/dashboard").status_code == 405
