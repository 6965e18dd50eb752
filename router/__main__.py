"""The router's process: python -m router --journal FILE --experts 4 --attention 1 --replicas 2"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from functools import partial
from pathlib import Path

from router import child
from router.etcd import Etcd, EtcdInvalid
from router.etcd_store import ClusterInvalid, Election, EtcdStore, prefix_of
from router.exposure import LOOPBACK, Exposed
from router.journal import Journal, JournalUnusable, Store
from router.pools import autoscale_bounds
from router.roles import ROUTER
from router.scaling import Policy
from router.service import CannotListen, serve
from router.state import Config, ConfigInvalid
from router.tls import CredentialsInvalid

log = logging.getLogger("router")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="eaas router",
        description="Keep membership and placement of a cluster. Listens on loopback unless told otherwise.",
        epilog="Exit codes: 0 stopped by a signal, 1 could not start (the message says why), 2 bad usage. "
        "Examples: eaas router --port 7000 --journal router.db --experts 4 --replicas 2; "
        "eaas router --port 7000 --store etcd --etcd http://127.0.0.1:2379 --experts 4",
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 = any (default)")
    child.add_listener(parser)
    parser.add_argument(
        "--store", choices=("sqlite", "etcd"), default="sqlite", help="with etcd, several routers stand by"
    )
    parser.add_argument("--journal", type=Path, help="SQLite file; created if missing")
    parser.add_argument(
        "--etcd", metavar="URL,...", help="etcd's addresses: http on loopback, https elsewhere"
    )
    parser.add_argument("--cluster", default="eaas", help="name of this cluster in etcd (default eaas)")
    parser.add_argument(
        "--leader-ttl-s",
        type=float,
        default=3.0,
        help="silence that ends a leader's term (default 3, at least 2)",
    )
    parser.add_argument("--number", type=int, default=0, help="it is called router/NUMBER (default 0)")
    parser.add_argument("--experts", type=int, default=1, help="wanted expert servers (default 1)")
    parser.add_argument("--attention", type=int, default=1, help="wanted attention workers (default 1)")
    parser.add_argument("--replicas", type=int, default=1, help="copies of every expert, at most --experts")
    parser.add_argument(
        "--redundant-experts",
        type=int,
        default=0,
        help="copies of each layer beyond --replicas, for the experts with most load (default 0)",
    )
    parser.add_argument(
        "--lease-s", type=float, default=2.0, help="silence that ends a membership (default 2)"
    )
    parser.add_argument(
        "--autoscale",
        action="append",
        default=[],
        metavar="POOL:LEAST..MOST",
        help="let a pool's size follow its load, such as expert:1..6; once for each pool",
    )
    parser.add_argument(
        "--admin-port",
        type=int,
        help="port for scaling, health and metrics over HTTP, and https with --tls-dir; 0 = any; default: none",
    )
    parser.add_argument(
        "--admin-host",
        default=LOOPBACK,
        help=f"IP address of --admin-port (default {LOOPBACK}); one that others can reach needs --tls-dir and a key",
    )
    parser.add_argument(
        "--admin-key-file", type=Path, help="file with the key that requests to --admin-port must bring"
    )
    child.add_options(parser)
    options = parser.parse_args(arguments)
    needed = "etcd" if options.store == "etcd" else "journal"
    if not getattr(options, needed):
        parser.error(f"--store {options.store} needs --{needed}")
    if options.etcd and options.store != "etcd":
        parser.error("--etcd without --store etcd: the state would be kept in --journal alone")
    if options.admin_key_file is not None and options.admin_port is None:
        parser.error("--admin-key-file without --admin-port: there is no listener to ask for the key")
    return options


def store_of(arguments: argparse.Namespace) -> tuple[Store, Election | None]:
    """The store that was asked for; with etcd, the election too. Raises as Journal, Etcd and EtcdStore do."""
    if arguments.store == "sqlite":
        return Journal(arguments.journal), None
    etcd = Etcd(arguments.etcd)
    election = Election(etcd, prefix_of(arguments.cluster), arguments.leader_ttl_s)
    return EtcdStore(etcd, arguments.cluster, election), election


async def run(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT."""
    bounds = autoscale_bounds(arguments.autoscale)
    config = Config(
        experts_wanted=arguments.experts,
        attention_wanted=arguments.attention,
        replicas=arguments.replicas,
        least={pool: least for pool, (least, _) in bounds.items()},
        most={pool: most for pool, (_, most) in bounds.items()},
        autoscale={pool: Policy(least=least, most=most) for pool, (least, most) in bounds.items()},
        redundant=arguments.redundant_experts,
        lease_s=arguments.lease_s,
    )
    credentials = child.credentials(arguments, ROUTER)
    admin = None
    if arguments.admin_port is not None:
        # Here: only a router that has this listener loads its libraries.
        from router.admin import listen

        admin = partial(
            *(listen, config, arguments.admin_port, arguments.admin_key_file),
            host=arguments.admin_host,
            credentials=credentials,
        )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def ready(address: str, admin_address: str) -> None:
        log.info("ready address=%s admin=%s", address, admin_address or "off")
        more = {"admin": admin_address} if admin_address else {}
        child.tell_ready(arguments, f"router/{arguments.number}", address, **more)

    store, election = store_of(arguments)
    try:
        await serve(
            *(config, store, arguments.port, stop, ready, election, admin, arguments.allow_chaos),
            host=arguments.host,
            advertise=arguments.advertise,
            credentials=credentials,
        )
    finally:
        store.close()


def main() -> int:
    arguments = parse(sys.argv[1:])
    child.begin(arguments)
    try:
        asyncio.run(run(arguments))
    except (
        *(ConfigInvalid, JournalUnusable, EtcdInvalid, ClusterInvalid, CannotListen),
        *(Exposed, CredentialsInvalid),
    ) as error:
        log.error("cannot_start reason=%s", error)
        child.tell_failed(arguments, str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
