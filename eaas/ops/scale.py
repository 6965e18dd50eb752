"""`eaas scale`: the pools of a cluster, shown and changed through its router."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from eaas.ops.terminal import table
from router.client import RouterClient
from router.pools import PoolSize
from router.roles import OPERATOR
from router.tls import Credentials

LOOK_S = 0.2


def operator_credentials(tls_dir: Path | None) -> Credentials | None:
    """What a command proves itself with to the router; None without a folder. Raises CredentialsInvalid."""
    return Credentials(tls_dir / OPERATOR, OPERATOR) if tls_dir is not None else None


def wait_for_size(client: RouterClient, pool: str, wait_s: float) -> PoolSize:
    """The pool's size once it is what is wanted, or after `wait_s` as it is then. Raises RouterUnavailable."""
    until_s = time.monotonic() + wait_s
    while True:
        size = client.status().pools[pool]
        if not size.is_scaling or time.monotonic() >= until_s:
            return size
        time.sleep(min(LOOK_S, max(0.0, until_s - time.monotonic())))


def pools_table(pools: Mapping[str, PoolSize]) -> Table:
    """One line for each pool."""
    head = ("pool", "wanted", "live", "starting", "draining", "bounds", "held up")
    return table(
        head,
        (
            (
                name,
                *map(str, (size.wanted, size.live, size.starting, size.draining)),
                f"{size.least} to {size.most}",
                size.held_up,
            )
            for name, size in pools.items()
        ),
    )
