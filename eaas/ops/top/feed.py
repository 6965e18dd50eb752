"""Boards from a gateway's /dashboard/events, one after another, however often the connection ends."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from eaas.gateway.dashboard.board import Board

# Boards come every second; longer silence means that the gateway, or the way there, hangs.
SILENCE_S = 6.0
_AGAIN_S = 1.0
# A board of the largest model known on 64 servers is under 200 kB.
_LONGEST_LINE = 4 << 20


@dataclass(frozen=True, kw_only=True)
class NoNews:
    """The feed is broken. reason: in words; it is tried again."""

    reason: str


class FeedRefused(Exception):
    """The gateway gives no boards, and asking again would not help; the text says what to do."""


def boards_in(lines: Iterable[bytes]) -> Iterator[Board]:
    """Boards among the lines of an event stream.

    Raises:
        ValueError: data that is no board, or a line without end.
    """
    for line in lines:
        if len(line) >= _LONGEST_LINE:
            raise ValueError(f"a line over {_LONGEST_LINE} bytes found, boards are shorter")
        if line.startswith(b"data:"):
            yield msgspec.json.decode(line[5:], type=Board)


class Feed:
    """What one gateway has to show, until it is closed."""

    def __init__(self, url: str, key: str = "") -> None:
        """Args: url: of the gateway. key: sent as a bearer token where it is not empty."""
        base = url if "://" in url else f"http://{url}"
        self.url = base.rstrip("/").removesuffix("/v1") + "/dashboard/events"
        self._key = key
        self._closed = threading.Event()

    def news(self) -> Iterator[Board | NoNews]:
        """Each board, and each time why there is none, until `close`.

        Raises:
            FeedRefused: it is no gateway that has boards, or it wants a key.
        """
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
                    raise FeedRefused(
                        f"{self.url} does not exist: what answers there is no EaaS gateway, or an older one."
                    ) from None
                reason = f"the gateway answers {error.code}"
            except (OSError, ValueError) as error:
                reason = "the gateway is silent" if isinstance(error, TimeoutError) else _words(error)
            if not self._closed.is_set():
                yield NoNews(reason=reason)
            self._closed.wait(_AGAIN_S)

    def _boards(self) -> Iterator[Board]:
        request = urllib.request.Request(self.url, headers={"accept": "text/event-stream"})
        if self._key:
            request.add_header("authorization", f"Bearer {self._key}")
        with urllib.request.urlopen(request, timeout=SILENCE_S) as response:
            for board in boards_in(iter(lambda: response.readline(_LONGEST_LINE), b"")):
                if self._closed.is_set():
                    return
                yield board

    def first(self, timeout_s: float) -> Board:
        """The first board.

        Raises:
            FeedRefused: as `news`, or none came in time.
        """
        end_s = time.monotonic() + timeout_s
        for news in self.news():
            if isinstance(news, Board):
                return news
            if time.monotonic() > end_s:
                break
        raise FeedRefused(
            f"no news from {self.url}: {news.reason}. Start a cluster with `eaas serve`, or give --url."
        )

    def close(self) -> None:
        """Stop at the next line, or the next try."""
        self._closed.set()


def _words(error: OSError | ValueError) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(reason, TimeoutError):
        return "the gateway is silent"
    return f"it cannot be read ({reason})"
