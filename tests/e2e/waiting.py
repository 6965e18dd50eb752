"""Waiting for what a real cluster reaches sooner or later, and its last words where it does not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from eaas.cluster.local import LocalCluster
from eaas.cluster.status import GatewayUnreachable, fetch_status

# Not a figure: whoever does not come back at all is found, however busy the host is.
LIMIT_S = 60.0
_LOG_LINES = 30


def wait_for(what: str, reached: Callable[[], bool], cluster: LocalCluster | None = None) -> float:
    """Seconds until `reached()` holds; where it never does, the cluster's status and logs are in the message."""
    started_s = time.monotonic()
    while not reached():
        waited_s = time.monotonic() - started_s
        assert waited_s < LIMIT_S, f"not within {LIMIT_S:g} s: {what}{last_words(cluster) if cluster else ''}"
        time.sleep(0.05)
    return time.monotonic() - started_s


def last_words(cluster: LocalCluster) -> str:
    """What the cluster says of itself, and the ends of its logs."""
    try:
        words = [json.dumps(fetch_status(cluster.url))]
    except GatewayUnreachable as error:
        words = [str(error)]
    for log in sorted(Path(cluster.state_dir).glob("*.log"), key=lambda path: path.stat().st_mtime)[-6:]:
        words += [f"-- {log.name}", *log.read_text(errors="replace").splitlines()[-_LOG_LINES:]]
    return "\n" + "\n".join(words)
