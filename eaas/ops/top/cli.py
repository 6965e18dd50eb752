"""`eaas top`."""

from __future__ import annotations

import os
import sys

from eaas.cluster.status import KEY_VARIABLE
from eaas.ops.terminal import DEFAULT_URL, Url, fail, failing_on

FIRST_S = 5.0


def top(url: Url = DEFAULT_URL) -> None:
    """Watch a running cluster, live: traffic, attention workers, the load of each layer on each expert server, and
    what happened. The same is shown by a browser at /dashboard of the gateway.

    Keys: q quits, p pauses, s sorts, ? explains. Exits with 1 when the gateway can't be reached. Where the gateway asks
    for a key, put it into EAAS_API_KEY.

    Example: eaas top --url http://127.0.0.1:8001
    """
    try:
        from eaas.ops.top.app import Top
    except ModuleNotFoundError as error:
        raise fail(f"eaas top needs {error.name}, which is not installed: pip install 'eaas[top]'") from None
    from eaas.ops.top.feed import Feed, FeedRefused

    key = os.environ.get(KEY_VARIABLE, "")
    with failing_on(FeedRefused):
        board = Feed(url, key).first(FIRST_S)
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise FeedRefused(
                "eaas top draws on a terminal, and there is none here. Use eaas status, or /dashboard in a browser."
            )
        said = Top(Feed(url, key), board).run()
        if said:
            raise FeedRefused(said)
