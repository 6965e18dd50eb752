"""The router's process: python -m router --journal FILE --experts 4 --replicas 2 (router.config)"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from router import child
from router.access import Exposed
from router.config import RouterOptions
from router.etcd import Etcd, EtcdInvalid
from router.etcd_store import ClusterInvalid, Election, EtcdStore, prefix_of
from router.journal import Journal, JournalUnusable, Store
from router.pools import autoscale_bounds
from router.scaling import Policy
from router.service import CannotListen, serve
from router.state import Config, ConfigInvalid
from router.tls import CredentialsInvalid

log = logging.getLogger("router")


START_ERRORS = (
    ConfigInvalid, JournalUnusable, EtcdInvalid, ClusterInvalid, CannotListen, Exposed, CredentialsInvalid
)  # fmt: skip


def store_of(options: RouterOptions) -> tuple[Store, Election | None]:
    """The store that was asked for; with etcd, the election too. Raises as Journal, Etcd and EtcdStore do."""
    if options.journal is not None and options.store == "sqlite":
        return Journal(options.journal), None
    etcd = Etcd(options.etcd)
    election = Election(etcd, prefix_of(options.cluster), options.leader_ttl_s)
    return EtcdStore(etcd, options.cluster, election), election


async def run(options: RouterOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises START_ERRORS."""
    bounds = autoscale_bounds(options.autoscale)
    config = Config(
        experts_wanted=options.experts,
        attention_wanted=options.attention,
        replicas=options.replicas,
        least={pool: least for pool, (least, _) in bounds.items()},
        most={pool: most for pool, (_, most) in bounds.items()},
        autoscale={pool: Policy(least=least, most=most) for pool, (least, most) in bounds.items()},
        redundant=options.redundant_experts,
        lease_s=options.lease_s,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def ready(address: str, admin_address: str) -> None:
        log.info("ready address=%s admin=%s", address, admin_address or "off")
        more = {"admin": admin_address} if admin_address else {}
        child.tell_ready(options, f"router/{options.number}", address, **more)

    store, election = store_of(options)
    try:
        await serve(options, config, store, election, stop, ready)
    finally:
        store.close()


def main(options: RouterOptions) -> int:
    """Serve until SIGTERM or SIGINT. Raises START_ERRORS. Returns the exit code."""
    asyncio.run(run(options))
    return 0


if __name__ == "__main__":
    sys.exit(child.start("router", RouterOptions, main, START_ERRORS))
