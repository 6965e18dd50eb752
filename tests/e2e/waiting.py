"""Waiting for what a real cluster reaches sooner or later, and its last words where it does not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eaas.cluster.local import LocalCluster
from eaas.cluster.status import GatewayUnreachable, fetch_status
from router.client import RouterUnavailable

# Not a figure: whoever does not come back at all is found, however busy the host is.
LIMIT_S = 60.0
_LOG_LINES = 30


def wait_for(what: str, reached: Callable[[], bool], cluster: LocalCluster | None = None) -> float:
    """Seconds until `reached()` holds; where it never does, the cluster's status and logs are in the message."""
    started_s = time.monotonic()
    while True:
        try:
            if reached():
                return time.monotonic() - started_s
            why = ""
        except (GatewayUnreachable, RouterUnavailable) as error:
            # A gateway or router that is replaced, or that a busy host lets answer late, is asked again.
            why = f" ({error})"
        if time.monotonic() - started_s > LIMIT_S:
            pytest.fail(f"not within {LIMIT_S:g} s: {what}{why}{last_words(cluster) if cluster else ''}")
        time.sleep(0.05)


def last_words(cluster: LocalCluster) -> str:
    """What the cluster says of itself, and the ends of its logs."""
    try:
        words = [json.dumps(fetch_status(cluster.url))]
    except GatewayUnreachable as error:
        words = [str(error)]
    for log in sorted(Path(cluster.state_dir).glob("*.log"), key=lambda path: path.stat().st_mtime)[-6:]:
        words += [f"-- {log.name}", *log.read_text(errors="replace").splitlines()[-_LOG_LINES:]]
    return "\n" + "\n".join(words)
