"""The dashboard page in a real browser, and `eaas top` in a real terminal, on a live cluster while a server is killed.

The pictures that `make screenshots` keeps are made here.
"""

from __future__ import annotations

import asyncio
import fcntl
import http.server
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from eaas.cluster.config import ClusterConfig
from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from eaas.gateway.dashboard.app import dashboard_page, event_of
from eaas.gateway.dashboard.board import Board
from eaas.gateway.dashboard.history import History
from eaas.model.loader import resolve_model
from eaas.ops.top import Feed, Top
from tests import chromium
from tests.eaas import view_world

pytestmark = pytest.mark.full(seconds=10)

ROOT = Path(__file__).resolve().parent.parent.parent
LOST = "document.querySelector('#map td.lost:not(.replaced)') !== null"
WORKING = "document.querySelector('#map td.cell.hi') !== null"
needs_browser = pytest.mark.skipif(bool(chromium.missing()), reason=chromium.missing())


@pytest.fixture(scope="module")
def watched() -> Iterator[LocalCluster]:
    """The demonstration model on five expert servers, each expert on two, with two attention workers."""
    config = ClusterConfig(
        model=resolve_model("demo"),
        served_model_name="demo",
        experts=5,
        attention=2,
        replicas=2,
        port=0,
        cores=(0, 1),
    )
    with LocalCluster(config) as running:
        yield running


@pytest.fixture
def page(tmp_path: Path) -> Iterator[chromium.Page]:
    with chromium.Page(tmp_path / "profile", height=720) as page:
        yield page


class Streams:
    """Clients that stream one completion after another, and remember how each ended."""

    def __init__(self, url: str, clients: int = 5) -> None:
        self._url = url
        self._stop = threading.Event()
        self.ends: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(clients)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            self.ends.append(self._stream(f"ROMEO: {number}"))
            self._stop.wait(0.2)

    def _stream(self, prompt: str) -> str:
        wanted = {"model": "demo", "prompt": prompt, "max_tokens": 96, "stream": True, "seed": 1}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(wanted).encode(), headers)
        finish = "none"
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                for line in reply:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return str(event["error"])
                        finish = event["choices"][0]["finish_reason"] or finish
        except OSError as error:
            return repr(error)
        return finish


def kill_one(url: str) -> str:
    """SIGKILL for the second expert server; its name."""
    experts = [m for m in fetch_status(url)["members"] if m["pool"] == "expert" and m["state"] == "serving"]
    victim = sorted(experts, key=lambda m: int(m["name"].partition("/")[2]))[1]
    os.kill(victim["pid"], signal.SIGKILL)
    return victim["name"]


def is_whole(url: str) -> bool:
    state = fetch_status(url)
    serving = [m for m in state["members"] if m["pool"] == "expert" and m["state"] == "serving"]
    return len(serving) == 5 and state["replicas_min"] >= 2


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def screen_of(app: Top) -> str:
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips)


async def drawn(app: Top, pilot: Pilot[str], said: str, timeout_s: float = 60.0) -> None:
    """Wait until the terminal shows a text."""
    end_s = time.monotonic() + timeout_s
    while said not in screen_of(app):
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {said!r} in\n{screen_of(app)}"
        await pilot.pause(0.05)


def svg_to_png(page: chromium.Page, svg: Path) -> None:
    page.open(svg.as_uri())
    page.until("document.readyState === 'complete'")
    width, height = page.run("(b => [b.width, b.height])(document.documentElement.viewBox.baseVal)")
    page.resize(round(width), round(height))
    page.picture(svg.with_suffix(".png"))


def is_picture(path: Path) -> bool:
    """A PNG that shows something: one of a single colour is a few hundred bytes."""
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


@needs_browser
def test_pictures_of_a_kill_show_the_loss_who_took_over_and_the_replacement(
    watched: LocalCluster, page: chromium.Page, tmp_path: Path
) -> None:
    url = watched.url
    pictures = Path(os.environ.get("EAAS_SCREENSHOTS") or tmp_path / "screenshots")
    pictures.mkdir(parents=True, exist_ok=True)
    eventually(lambda: is_whole(url), "a whole cluster")
    app = Top(Feed(url))

    def picture(name: str, pilot_svg: str) -> None:
        (pictures / f"top-{name}.svg").write_text(pilot_svg)
        for scheme in ("dark", "light"):
            page.prefer(scheme)
            # Colours glide for 0.4 s.
            time.sleep(0.6)
            page.picture(pictures / f"dashboard-{name}-{scheme}.png")

    async def play() -> None:
        async with app.run_test(size=(80, 24)) as pilot:

            async def hold(name: str, seen_by_page: str, seen_by_top: str) -> None:
                """Wait until both show it, pause both, and take their pictures."""

                async def hold_top() -> None:
                    await drawn(app, pilot, seen_by_top)
                    await pilot.press("p")

                def hold_page() -> None:
                    page.until(seen_by_page, 60)
                    page.press("p")

                await asyncio.gather(asyncio.to_thread(hold_page), hold_top())
                await drawn(app, pilot, "paused at")
                await asyncio.to_thread(picture, name, app.export_screenshot(title="eaas top"))
                await pilot.press("p")
                await asyncio.to_thread(page.press, "p")

            page.open(f"{url}/dashboard")
            await asyncio.to_thread(page.until, f"{WORKING} && board.past.length > 15", 90)
            await hold("calm", "document.querySelector('.bar.whole') !== null", "● WHOLE")
            victim = await asyncio.to_thread(kill_one, url)
            await hold("lost", LOST, f"✕ {victim} lost")
            replaced = f"serves in place of {victim}"
            await hold("replaced", f"document.body.innerText.includes('{replaced}')", replaced)
            await drawn(app, pilot, "● WHOLE")
            await asyncio.to_thread(page.until, "document.querySelector('.bar.whole') !== null", 60)

    with Streams(url) as streams:
        asyncio.run(play())
        said = page.text()
    assert set(streams.ends) == {"length"}, f"streams ended otherwise: {set(streams.ends)}"
    assert "no request failed" in said
    assert page.problems() == []
    assert page.requests() == {f"{url}/dashboard", f"{url}/dashboard/events"}
    lost = (pictures / "top-lost.svg").read_text()
    assert "DEGRADED" in lost and "»" in lost
    for name in ("calm", "lost", "replaced"):
        svg_to_png(page, pictures / f"top-{name}.svg")
    made = sorted(pictures.glob("*.png"))
    assert len(made) == 9
    assert [path.name for path in made if not is_picture(path)] == []


@needs_browser
def test_the_page_is_driven_by_keys_alone(watched: LocalCluster, page: chromium.Page) -> None:
    page.open(f"{watched.url}/dashboard")
    page.until("board !== null && document.querySelectorAll('#map tbody td').length > 0")
    columns = page.run("document.querySelectorAll('#map thead th').length") - 1
    focus = [""]
    while focus[-1] != "explain" and len(focus) < 20:
        page.press("Tab", 9)
        focus.append(page.run("document.activeElement.id || document.activeElement.className"))
        if focus[-1] == "map":
            page.press("ArrowRight", 39)
            page.press("ArrowDown", 40)
            second = page.run("sorted(board.heat.servers)[1].name")
            assert page.run("document.getElementById('detail').textContent").startswith(f"{second}, layer 1: ")
            for _ in range(columns + 3):
                page.press("ArrowRight", 39)
            last = page.run("sorted(board.heat.servers).at(-1).name")
            assert page.run("document.getElementById('detail').textContent").startswith(f"{last}, layer 1: ")
            assert page.run("document.querySelectorAll('#map .chosen').length") == 1
    places = ["skip", "map", "happenings", "pause", "sort", "explain"]
    assert [each for each in focus if each in places] == places
    page.press("s")
    assert "sort: load" in page.text()
    page.press("?")
    page.until("document.getElementById('help').open")
    page.press("Escape", 27)
    page.until("!document.getElementById('help').open")
    page.press("p")
    at_s = page.run("board.at_s")
    assert "paused at" in page.text()
    heard = page.run("heardMs")
    page.until(f"heardMs > {heard}")
    assert page.run("board.at_s") == at_s, "a paused page has changed"
    page.press("p")
    page.until(f"board.at_s > {at_s}")
    assert page.problems() == []


@needs_browser
def test_the_page_says_that_it_has_no_news_and_comes_back_by_itself(watched: LocalCluster, page: chromium.Page) -> None:
    page.open(f"{watched.url}/dashboard")
    page.until("board !== null && !trouble")
    name = page.run("document.getElementById('gateway-title').textContent")
    # Frozen, it says nothing and ends nothing: only silence tells.
    pid = watched.pids()[name]
    os.kill(pid, signal.SIGSTOP)
    try:
        page.until("document.body.classList.contains('stale')", 60)
        assert "NO NEWS" in page.text()
        assert page.run("document.querySelector('.bar.whole') === null"), "silence is shown as health"
    finally:
        os.kill(pid, signal.SIGKILL)
    page.until("!trouble && board.gateway.name !== " + json.dumps(name), 90)
    page.until("!document.body.classList.contains('stale')")
    assert [text for text in page.problems() if "net::" not in text] == []


@needs_browser
def test_the_page_asks_for_a_key_where_one_is_needed_and_keeps_it_out_of_the_address(
    watched: LocalCluster, page: chromium.Page
) -> None:
    page.open(f"{watched.url}/dashboard")
    page.until("board !== null")
    # A gateway with keys, as the page sees it.
    page.run(
        "(() => { const plain = window.fetch; window.asked = []; window.fetch = (to, how) => {"
        "  window.asked.push(how.headers.authorization ?? '');"
        "  return how.headers.authorization === 'Bearer right' ? plain(to, how)"
        "    : Promise.resolve(new Response('', { status: 401 })); };"
        "  board = null; follow(); })()"
    )
    page.until("!document.getElementById('ask').hidden")
    assert page.run("document.activeElement.id") == "key"
    for letter in "right":
        page.press(letter)
    page.press("\r", 13)
    page.until("board !== null")
    assert page.run("window.asked") == ["", "Bearer right"]
    assert page.run("document.getElementById('ask').hidden")
    # From another page: a new fragment alone loads nothing.
    page.open("about:blank")
    page.open(f"{watched.url}/dashboard#key=abc%20d")
    page.until("board !== null")
    assert page.run("location.href") == f"{watched.url}/dashboard"
    assert page.run("sessionStorage.getItem('eaas-key')") == "abc d"


class Canned(http.server.BaseHTTPRequestHandler):
    """A gateway of one board."""

    board: Board

    def do_GET(self) -> None:
        body, headers = dashboard_page()
        kind = "text/html; charset=utf-8"
        if self.path == "/dashboard/events":
            body, headers, kind = event_of(self.board), {}, "text/event-stream"
        self.send_response(200)
        for name, value in {**headers, "content-type": kind}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@needs_browser
def test_the_page_shows_an_inspection_while_there_is_one(page: chromium.Page) -> None:
    Canned.board = view_world.board(History(), 60.0, inspection=view_world.INSPECTED)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canned)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page.open(f"http://127.0.0.1:{server.server_port}/dashboard")
    page.until("!document.getElementById('inspection').hidden")
    text = page.text()
    for said in (
        "inspection inspect-1",
        "4 taps, 12.3k records, 45 dropped",
        "▸ layer 1",
        "3+17 ×412",
        "-50.0",
    ):
        assert said in text, text
    assert "<script>alert(1)</scrip…" in text
    rows = "Array.from(document.querySelectorAll('#by-token tbody tr'), r => Array.from(r.cells, c => c.textContent))"
    assert page.run(rows)[0] == ["␣the", "47", "1", "·", "·", "·", "·", "20"]
    page.press("l")
    page.until("document.getElementById('layer').textContent.includes('layer 2')")
    assert page.run("document.querySelector('#by-token thead tr').textContent") == "token3789101119"
    failed = replace(view_world.INSPECTED, fault="the disk is full", layers=())
    Canned.board = view_world.board(History(), 61.0, inspection=failed)
    page.until("document.getElementById('inspection-said').textContent === '✕ the disk is full'")
    Canned.board = view_world.board(History(), 62.0)
    page.until("document.getElementById('inspection').hidden")
    assert page.problems() == []
    server.shutdown()
    server.server_close()


class Terminal:
    """A process on a pseudo-terminal of 80 x 24."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
        }
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        self._slave = slave
        self.seen = ""

    def until(self, said: str, timeout_s: float = 60.0) -> None:
        """Wait until it has written a text since the last time."""
        end_s = time.monotonic() + timeout_s
        while said not in self.seen:
            assert time.monotonic() < end_s, f"not within {timeout_s} s: {said!r} in {self.seen[-3000:]!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self.seen += os.read(self._master, 1 << 16).decode(errors="replace")
        self.seen = self.seen.partition(said)[2]

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def close(self) -> int:
        """The exit status, once it has ended; the terminal must be as it was."""
        status = self.process.wait(30)
        after = termios.tcgetattr(self._slave)
        os.close(self._master)
        os.close(self._slave)
        assert after[:4] == self.before[:4], "the terminal was left changed"
        return status


def test_top_lives_in_a_real_terminal(watched: LocalCluster) -> None:
    eventually(lambda: is_whole(watched.url), "a whole cluster")
    terminal = Terminal(sys.executable, "-m", "eaas.ops.cli", "top", "--url", watched.url)
    try:
        terminal.until("\x1b[?1049h")
        terminal.until("● WHOLE")
        terminal.until("✓ live")
        terminal.type("s")
        terminal.until("sort: load")
        terminal.type("p")
        terminal.until("paused at")
        terminal.type("p")
        terminal.until("✓ live")
        victim = kill_one(watched.url)
        terminal.until("DEGRADED")
        terminal.until(f"{victim} lost")
        terminal.until("● WHOLE")
        terminal.type("?")
        terminal.until("took over from a lost server")
        terminal.type("q")
        terminal.until("what happened")
        terminal.type("q")
        terminal.until("\x1b[?1049l")
        assert terminal.close() == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
