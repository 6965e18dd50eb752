"""`eaas top`: the picture at any size, what keys do, and what it says when the gateway goes away."""

from __future__ import annotations

import asyncio
import http.server
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from eaas.gateway.dashboard.app import event_of
from eaas.gateway.dashboard.board import (
    MARK_GLYPHS,
    MOOD_GLYPHS,
    STATE_GLYPHS,
    Board,
    Happening,
    Heat,
    Server,
)
from eaas.ops.top import Feed, FeedRefused, Help, Top, boards_in
from eaas.ops.top_picture import Show, draw
from tests.eaas.view_world import INSPECTED, board, member, past, reading, size, story, two_of_each, view

ROOT = Path(__file__).resolve().parent.parent.parent
ONE, TWO, THREE = two_of_each()
WORKER = member("attention/1", running=12.0, waiting=3.0, kv_use=0.42, tokens_per_s=1234.0, busy=0.93)
POOLS = {"expert": size(3, 2, starting=1), "attention": size(1, 1)}
CALM = board(story((0.0, view(5, ONE, TWO, THREE, WORKER))), 5.0, rows=[40] * 8)
LOST_STORY = story((0.0, view(5, ONE, TWO, THREE, WORKER)), (10.0, view(6, TWO, THREE, WORKER)))
LOST = board(
    LOST_STORY,
    13.0,
    pools=POOLS,
    rows=[40] * 8,
    seen=past(*(reading(float(s), tokens=100 * s, requests=s, ended=s, good=s - s // 5) for s in range(60))),
)

SEEN = board(LOST_STORY, 13.0, pools=POOLS, rows=[40] * 8, inspection=INSPECTED)


def large() -> Board:
    """64 servers of 61 layers, in every state."""
    states = [state for state in STATE_GLYPHS for _ in range(11)]
    marks = [mark for mark in MARK_GLYPHS for _ in range(16)]
    servers = tuple(
        Server(
            name=f"expert/{n + 1}",
            state=states[n],
            experts=366,
            rows_per_s=100.0 * n,
            busy=n / 64,
            held=(6,) * 61,
            rows=tuple(float(n * layer) for layer in range(61)),
            marks=(marks[n],) * 61,
        )
        for n in range(64)
    )
    heat = Heat(layers=61, experts=384, servers=servers, hottest=63 * 60.0, balance=2.0)
    workers = tuple(replace(LOST.workers[0], name=f"attention/{n}") for n in range(20))
    return replace(LOST, heat=heat, workers=workers)


def picture(shown: Board, width: int = 80, height: int = 24, **show: Any) -> list[str]:
    lines = draw(shown, Show(width=width, height=height, **show))
    assert len(lines) == height
    wide = [line.plain for line in lines if line.cell_len > width]
    assert not wide, f"wider than {width}: {wide}"
    return [line.plain.rstrip() for line in lines]


def test_eighty_by_twenty_four_says_it_all() -> None:
    lines = picture(LOST)
    text = "\n".join(lines)
    assert lines[0].startswith(" ▲ DEGRADED  demo · servers 2/3 · copies 1/2 · epoch 6")
    assert lines[0].endswith("00:00:13 UTC")
    for said in (
        "▲ expert/1 lost 3 s ago; a replacement starts",
        "▲ 6 experts on 1 of 2 servers: the next loss there makes requests wait",
        "→ Nothing to do. After a minute: eaas scale, then the newest expert log.",
        "tokens/s 100", "requests/s 1", "goodput 0.8/s 80%", "failed 0",
        "KV ███░░░  42%", "run 12", "wait 3", "tok/s 1,234", "busy 93%",
        "1✕", "lost", "✕ expert/1 lost; its experts go on at expert/2, expert/3", "q  quit",
    ):  # fmt: skip
        assert said in text, f"{said!r} is not in\n{text}"
    assert "…" not in text.replace("… loads", ""), f"something is cut off:\n{text}"
    # The whole screen is used: what happened ends just above the keys, and the heat map has every layer.
    assert [line.split()[:2] for line in lines if line.startswith(" layer")] == [
        ["layer", "0"],
        ["layer", "1"],
    ]


def test_nothing_is_said_by_colour_alone() -> None:
    states, marks, moods = set(STATE_GLYPHS.values()), set(MARK_GLYPHS.values()), set(MOOD_GLYPHS.values())
    assert len(moods) == len(MOOD_GLYPHS)
    assert len(marks) == len(MARK_GLYPHS)
    # Joining and warming are one to whoever looks: it loads.
    assert len(states) == len(STATE_GLYPHS) - 1
    lines = picture(LOST)
    layer = next(line for line in lines if line.startswith(" layer 0"))
    assert (layer.count("✕"), layer.count("»")) == (1, 2), layer


@pytest.mark.parametrize("shown", [CALM, LOST, large(), SEEN], ids=["calm", "lost", "large", "seen"])
@pytest.mark.parametrize("size", [(80, 24), (200, 60), (60, 18), (40, 10), (20, 4), (5, 2), (1, 1)])
def test_any_size_of_screen_is_filled_and_never_left(shown: Board, size: tuple[int, int]) -> None:
    picture(shown, *size)
    picture(shown, *size, gates=True, step=4)


def test_an_inspection_takes_the_place_of_the_servers_where_asked_for() -> None:
    assert any(line.startswith(" layer 0") for line in picture(SEEN))
    assert " e  experts" in picture(SEEN)[-1] and " e " not in picture(LOST, gates=True)[-1]
    lines = picture(SEEN, gates=True, step=4, height=40)
    text = "\n".join(lines)
    for said in (
        "experts by token, layer 2", "12.3k records, 45 dropped", " by layer ▄▃▂", "█▇ ▆▃ 30%, drift -60.0 points",
        " together 3+17 ×412  5+9 ×300", " expert ", " ␣the ", " \\n\\x1b[31m ", " <script>aler… ", " 東京 ", " #11 ",
        " e  servers", " l  layer", " ?  help",
    ):  # fmt: skip
        assert said in text, f"{said!r} is not in\n{text}"
    head = next(line for line in lines if line.startswith(" expert "))
    assert head.split()[1:] == ["3", "7", "8", "9", "10", "11", "19"]
    row = next(line for line in lines if line.startswith(" ␣the"))
    assert row.split()[1:] == ["47", "1", "·", "·", "·", "·", "20"]
    assert row.index("20") == head.index("19")


def test_an_inspection_that_fails_or_has_seen_nothing_says_so() -> None:
    assert SEEN.inspection is not None
    failed = replace(SEEN.inspection, fault="the disk is full")
    assert " ✕ the disk is full" in picture(replace(SEEN, inspection=failed), gates=True)
    empty = picture(replace(SEEN, inspection=replace(failed, layers=())), gates=True)
    assert " ✕ the disk is full" in empty and " no gate was recorded yet, no experts" in empty
    bare = replace(SEEN.inspection.layers[0], entropy=(), drift=None, pairs=(), tokens=(), experts=())
    assert " entropy   –" in picture(replace(SEEN, inspection=replace(failed, layers=(bare,))), gates=True)


def test_layers_that_do_not_fit_are_folded_and_the_worst_of_them_is_shown() -> None:
    shown = large()
    quiet = tuple(replace(s, rows=(0.0,) * 61, marks=("",) * 61, state="serving") for s in shown.heat.servers)
    hot = replace(quiet[3], rows=(*(0.0,) * 30, shown.heat.hottest, *(0.0,) * 30))
    heat = replace(shown.heat, servers=(*quiet[:3], hot, *quiet[4:]))
    lines = [line for line in picture(replace(shown, heat=heat)) if re.match(r" \d+–\d+", line)]
    labels = [line.split()[0] for line in lines]
    assert labels[0].startswith("0–")
    assert labels[-1].endswith("–60")
    row = next(line for line in lines if "█" in line)
    first, last = map(int, row.split()[0].split("–"))
    assert first <= 30 <= last
    assert row.index("█") == 1 + 9 + 3


def test_servers_are_sorted_as_asked() -> None:
    heads = {
        sort: next(line for line in picture(LOST, sort=sort) if line.startswith(" server")).split()[1:]
        for sort in ("number", "load", "state")
    }
    assert heads == {"number": ["1✕", "2", "3"], "load": ["2", "3", "1✕"], "state": ["1✕", "2", "3"]}


def test_text_that_looks_like_markup_is_shown_as_it_is() -> None:
    nasty = "[bold red]x[/] [link=file:///etc]y"
    happening = Happening(at_s=1.0, kind="lost", mood="bad", text=nasty)
    assert any(nasty in line for line in picture(replace(CALM, happenings=(happening,))))


# -- keys, in the application itself


class Still:
    """A feed that tells what a test wants."""

    url = "http://gateway/dashboard/events"

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[Board | str | None] = queue.SimpleQueue()
        self.closed = False

    def news(self) -> Iterator[Board | str]:
        yield from iter(self._told.get, None)

    def tell(self, news: Board | str) -> None:
        self._told.put(news)

    def close(self) -> None:
        self.closed = True
        self._told.put(None)


def shown_by(app: Top) -> str:
    """The screen, as text."""
    width = app.size.width
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text[:width].rstrip() for strip in strips)


async def until(pilot: Pilot[Any], app: Top, holds: Callable[[], bool]) -> None:
    """A screen is drawn a moment after what changes it, on a busy host a long one."""
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s, shown_by(app)
        await pilot.pause(0.02)


async def until_shown(pilot: Pilot[Any], app: Top, words: str) -> None:
    await until(pilot, app, lambda: words in shown_by(app))


def test_keys_pause_sort_explain_and_quit() -> None:
    async def play() -> None:
        feed = Still()
        app = Top(feed, CALM)  # type: ignore[arg-type]
        async with app.run_test(size=(80, 24)) as pilot:
            await until_shown(pilot, app, "● WHOLE")
            feed.tell(LOST)
            await until_shown(pilot, app, "▲ DEGRADED")
            await pilot.press("p")
            await until_shown(pilot, app, "paused at 00:00:13")
            feed.tell(CALM)
            await pilot.pause()
            assert "▲ DEGRADED" in shown_by(app), "a paused picture has changed"
            await pilot.press("p")
            feed.tell(CALM)
            await until_shown(pilot, app, "● WHOLE")
            await pilot.press("s")
            await until_shown(pilot, app, "sort: load")
            feed.tell(SEEN)
            await until_shown(pilot, app, "e  experts")
            await pilot.press("e")
            await until_shown(pilot, app, "experts by token, layer 1")
            await pilot.press("l")
            await until_shown(pilot, app, "experts by token, layer 2")
            await pilot.press("e")
            await until_shown(pilot, app, "expert servers by layer")
            feed.tell(CALM)
            await until_shown(pilot, app, "sort: load")
            await pilot.press("question_mark")
            await until_shown(pilot, app, "took over from a lost server")
            assert isinstance(app.screen, Help)
            await pilot.press("q")
            await until(pilot, app, lambda: not isinstance(app.screen, Help))
            feed.tell("nothing listens there")
            await until_shown(pilot, app, "? NO NEWS, was whole")
            no_news = re.compile(r"✕ no news for \S+ s: nothing listens there")
            await until(pilot, app, lambda: no_news.search(shown_by(app)) is not None)
            feed.tell(CALM)
            await until_shown(pilot, app, "● WHOLE")
            await pilot.resize_terminal(100, 30)
            await until(pilot, app, lambda: "q  quit" in shown_by(app).splitlines()[-1])
            lines = shown_by(app).splitlines()
            assert len(lines) == 30
            assert lines[-1].endswith("✓ live")
            assert len(lines[-1]) == 99
            await pilot.press("q")
        assert app.return_value is None
        assert feed.closed

    asyncio.run(play())


def test_a_key_goes_round_the_models() -> None:
    async def play() -> None:
        feeds: dict[str, Still] = {name: Still() for name in ("a", "b")}
        first = feeds["a"]
        for feed in feeds.values():
            feed.of = feeds.__getitem__  # type: ignore[attr-defined]
        boards = {
            name: replace(CALM, models=("a", "b"), facts=(f"model-{name}",), gateway=replace(CALM.gateway, model=name))
            for name in feeds
        }
        app = Top(first, boards["a"])  # type: ignore[arg-type]
        async with app.run_test(size=(80, 24)) as pilot:
            await until_shown(pilot, app, "model-a")
            assert "m  model" in shown_by(app)
            await pilot.press("m")
            feeds["b"].tell(boards["b"])
            await until_shown(pilot, app, "model-b")
            assert first.closed
            first.closed, first._told = False, queue.SimpleQueue()
            await pilot.press("m")
            first.tell(boards["a"])
            await until_shown(pilot, app, "model-a")
            await pilot.press("q")

    asyncio.run(play())


# -- the feed


class Gateway:
    """Answers /dashboard/events as a test wants, one answer for each connection."""

    def __init__(self, *answers: tuple[int, list[bytes]]) -> None:
        left = list(answers)
        self.headers: list[dict[str, str]] = []
        seen = self.headers

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.append(dict(self.headers))
                status, parts = left.pop(0) if left else (503, [])
                self.send_response(status)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for part in parts:
                    self.wfile.write(part)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_the_feed_goes_on_after_every_end_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAAS_API_KEY", "secret-key")
    event = event_of(CALM)
    torn = event_of(LOST)[:-40] + b"\n\n"
    answers = (
        (200, [b"retry: 1000\n\n", event, b": nothing new\n\n", event]),
        (200, [torn]),
        (500, []),
        (200, [event_of(LOST)]),
    )
    gateway = Gateway(*answers)
    feed = Feed(gateway.url + "/v1")
    told: list[str] = []

    for news in feed.news():
        told.append(news.verdict if isinstance(news, Board) else news)
        if told[-1] == "degraded":
            feed.close()
    gateway.close()
    assert told[:2] == ["whole", "whole"]
    assert told[2] == "the gateway ended the connection"
    assert told[3].startswith("it cannot be read")
    assert told[4:] == ["the gateway answers 500", "degraded"]
    assert {headers["Authorization"] for headers in gateway.headers} == {"Bearer secret-key"}


def test_a_line_without_end_is_refused_and_a_half_board_is_no_board() -> None:
    with pytest.raises(ValueError, match="a line over"):
        list(boards_in([b"data:" + b"x" * (4 << 20)]))
    with pytest.raises(ValueError):
        list(boards_in([b'data: {"at_s": 1}\n']))


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "asks for an operator's key"), (403, "asks for an operator's key"), (404, "no EaaS gateway")],
)
def test_what_asking_again_cannot_cure_is_said_at_once(status: int, said: str) -> None:
    gateway = Gateway((status, []))
    with pytest.raises(FeedRefused, match=said):
        Feed(gateway.url).first(5.0)
    gateway.close()


# -- the command


def run_top(*arguments: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """`eaas top` in a process of its own. without: a module that it cannot import."""
    start = "import sys\n"
    if without:
        start += f"sys.modules[{without!r}] = None\n"
    start += "from eaas.ops.cli import main\nmain()\n"
    return subprocess.run(
        [sys.executable, "-c", start, "top", *arguments],
        capture_output=True, text=True, timeout=60, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_without_textual_it_says_what_to_install() -> None:
    ended = run_top(without="textual")
    assert ended.returncode == 1
    assert "pip install 'eaas[top]'" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_without_a_gateway_it_says_so() -> None:
    gateway = Gateway((404, []), (401, []))
    for said in ("no EaaS gateway", "made into EAAS_API_KEY"):
        ended = run_top("--url", gateway.url)
        assert ended.returncode == 1
        assert said in " ".join(ended.stderr.split())
        assert "Traceback" not in ended.stderr
    gateway.close()


def test_without_a_terminal_it_says_so_and_ends() -> None:
    gateway = Gateway((200, [event_of(CALM)]))
    ended = run_top("--url", gateway.url)
    gateway.close()
    assert ended.returncode == 1
    assert "there is none here. Use eaas status" in " ".join(ended.stderr.split())
