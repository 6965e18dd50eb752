"""`eaas top`: boards from a gateway's /dashboard/events, however often the connection ends, pictures out, and keys."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import ClassVar
from urllib.parse import quote

import msgspec
from rich.console import Group
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Center, Middle
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Static

from eaas.cluster.status import asking, said_by
from eaas.gateway.dashboard.board import BAD, GOOD, INFO, Board
from eaas.ops.top_picture import SORTS, Show, clock, draw

# Boards come every second; longer silence means that the gateway, or the way there, hangs.
SILENCE_S = 6.0
_AGAIN_S = 1.0
# A board of the largest model known on 64 servers is under 200 kB.
_LONGEST_LINE = 4 << 20
_HELP = """\
[b]Keys[/]   [b]q[/] quit   [b]p[/] pause and go on   [b]s[/] sort by number, load, state   [b]?[/] this
         [b]e[/] experts that an inspection sees, by token   [b]l[/] its next layer   [b]m[/] next model

[b]Top line[/]   ● whole: nothing to do   ▲ degraded: served, but look   ✕ down: not served
           below it: what is amiss, and → what to do about it
[b]Gateway[/]    means and percentiles of the last 10 s; goodput: answers within the
           targets of TTFT and of the time per token
[b]Heat map[/]   a column for each expert server, a row for each layer, the rows that it
           computes a second; brighter is busier
           » took over from a lost server   + gained   − gave up a copy
           ✕ lost   … loading   ↓ drains   ? suspect
[b]Experts[/]    entropy of the gate's scores, of the greatest possible: the newest of each
           layer, and over two minutes; experts chosen together; by token, how often
[b]Times[/]      are UTC; the same picture is at /dashboard of the gateway
"""


class FeedRefused(Exception):
    """The gateway gives no boards, and asking again would not help; the text says what to do."""


def boards_in(lines: Iterable[bytes]) -> Iterator[Board]:
    """Boards among the lines of an event stream. Raises ValueError: data that is no board, or a line without end."""
    for line in lines:
        if len(line) >= _LONGEST_LINE:
            raise ValueError(f"a line over {_LONGEST_LINE} bytes found, boards are shorter")
        if line.startswith(b"data:"):
            yield msgspec.json.decode(line[5:], type=Board)


class Feed:
    """What the gateway at `url` has to show, until it is closed."""

    def __init__(self, url: str, model: str = "") -> None:
        """Args: model: which of several is shown; empty: that with which the gateway was started."""
        base = url if "://" in url else f"http://{url}"
        self.url = base.rstrip("/").removesuffix("/v1") + "/dashboard/events"
        self.url += f"?model={quote(model)}" if model else ""
        self._closed = threading.Event()

    def of(self, model: str) -> Feed:
        return Feed(self.url.partition("/dashboard/")[0], model)

    def news(self) -> Iterator[Board | str]:
        """Each board, and each time in words why there is none, until `close`. Raises FeedRefused: it is no gateway
        that has boards, or it wants a key."""
        while not self._closed.is_set():
            try:
                yield from self._boards()
                reason = "the gateway ended the connection"
            except urllib.error.HTTPError as error:
                if error.code in (401, 403):
                    raise FeedRefused(
                        f"{self.url} asks for an operator's key (status {error.code}). Put one that "
                        "`eaas keys new FILE NAME --operator` made into EAAS_API_KEY."
                    ) from None
                if error.code == 404:
                    older = f"{self.url} does not exist: what answers there is no EaaS gateway, or an older one."
                    raise FeedRefused(said_by(error) or older) from None
                reason = f"the gateway answers {error.code}"
            except (OSError, ValueError) as error:
                reason = _words(error)
            if not self._closed.is_set():
                yield reason
            self._closed.wait(_AGAIN_S)

    def _boards(self) -> Iterator[Board]:
        with urllib.request.urlopen(asking(self.url), timeout=SILENCE_S) as response:
            for board in boards_in(iter(lambda: response.readline(_LONGEST_LINE), b"")):
                if self._closed.is_set():
                    return
                yield board

    def first(self, timeout_s: float) -> Board:
        """The first board. Raises FeedRefused: as `news`, or none came in time."""
        end_s = time.monotonic() + timeout_s
        for news in self.news():
            if isinstance(news, Board):
                return news
            if time.monotonic() > end_s:
                break
        raise FeedRefused(f"no news from {self.url}: {news}. Start a cluster with `eaas serve`, or give --url.")

    def close(self) -> None:
        self._closed.set()


def _words(error: OSError | ValueError) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(reason, TimeoutError):
        return "the gateway is silent"
    return f"it cannot be read ({reason})"


class Help(ModalScreen[None]):
    """What the keys and the glyphs mean; any of ?, q and Escape leaves it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter,space", "dismiss", "close", show=False)
    ]
    DEFAULT_CSS = """
    Help { background: #0b1117 70%; }
    Help Middle, Help Center { width: 100%; height: 100%; background: transparent; }
    Help Static { width: 84; max-width: 100%; height: auto; padding: 1 2; background: #18222c; color: #dbe3ea;
      border: round #3d4956; }
    """

    def compose(self) -> ComposeResult:
        with Middle(), Center():
            yield Static(_HELP, id="help")


class Top(App[str]):
    """The live view. Its return value says why it ended by itself, if it did."""

    TITLE = "eaas top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: #0f161d; color: #dbe3ea; overflow: hidden; }
    #picture { width: 100%; height: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit"),
        Binding("p,space", "pause", "pause"),
        Binding("s", "sort", "sort"),
        Binding("e", "gates", "experts"),
        Binding("l", "layer", "layer"),
        Binding("m", "model", "model"),
        Binding("question_mark,h", "help", "help"),
    ]

    def __init__(self, feed: Feed, board: Board | None = None) -> None:
        """Args: board: to show until the feed brings one."""
        super().__init__()
        self._feed = feed
        self.board = board
        self.paused = False
        self.sort = SORTS[0]
        self.gates = False
        self.step = 0
        self._broken = ""
        self._told_s = time.monotonic()

    def compose(self) -> ComposeResult:
        yield Static(id="picture")

    def on_mount(self) -> None:
        self.read()
        self.set_interval(1.0, self.show)
        self.show()

    def on_unmount(self) -> None:
        self._feed.close()

    @work(thread=True, exit_on_error=False)
    def read(self) -> None:
        feed = self._feed
        try:
            for news in feed.news():
                # What comes late of another model is shown no more.
                if feed is self._feed:
                    self.call_from_thread(self.tell, news)
        except FeedRefused as error:
            self.call_from_thread(self.exit, str(error))

    def tell(self, news: Board | str) -> None:
        if isinstance(news, str):
            self._broken = news
        else:
            self._broken, self._told_s = "", time.monotonic()
            if not self.paused:
                self.board = news
        self.show()

    def show(self) -> None:
        board = self.board
        picture = self.query_one("#picture", Static)
        if board is None:
            waits = self._broken or "waiting for the first news"
            picture.update(Text(f"\n  {self._feed.url}: {waits}. q quits.", "#8b98a5"))
            return
        news, mood = self._news(board)
        show = Show(
            width=self.size.width,
            height=self.size.height,
            sort=self.sort,
            gates=self.gates,
            step=self.step,
            news=news,
            mood=mood,
        )
        picture.update(Group(*draw(board, show)))

    def _news(self, board: Board) -> tuple[str, str]:
        if self._broken:
            return f"no news for {time.monotonic() - self._told_s:.0f} s: {self._broken}", BAD
        return (f"paused at {clock(board.at_s)}", INFO) if self.paused else ("live", GOOD)

    def on_resize(self, event: Resize) -> None:
        del event
        self.call_after_refresh(self.show)

    def action_pause(self) -> None:
        self.paused = not self.paused
        self.show()

    def action_sort(self) -> None:
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self.show()

    def action_gates(self) -> None:
        """What an inspection sees, or the servers."""
        self.gates = not self.gates
        self.show()

    def action_layer(self) -> None:
        self.step += 1
        self.show()

    def action_model(self) -> None:
        if self.board is not None and (names := [n for n in self.board.models if n != self.board.gateway.model]):
            later = [name for name in names if name > self.board.gateway.model]
            self._feed.close()
            self._feed = self._feed.of(min(later or names))
            self.read()

    def action_help(self) -> None:
        self.push_screen(Help())
