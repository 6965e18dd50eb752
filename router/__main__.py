"""The router's process: python -m router --journal FILE --experts 4 --replicas 2 (router.config)"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router import child
from router.access import ROUTER, Exposed, host_port
from router.config import RouterOptions
from router.etcd import Etcd, EtcdInvalid
from router.etcd_store import ClusterInvalid, Election, EtcdStore, prefix_of
from router.heartbeat import ending
from router.journal import Journal, JournalUnusable, Store, read_entries
from router.keda import SERVICE as KEDA_SERVICE
from router.keda import ExternalScaler
from router.messages import SERVICE
from router.pools import autoscale_bounds
from router.proto import externalscaler_pb2_grpc as keda_rpc
from router.proto import router_pb2_grpc as rpc
from router.scaling import Policy
from router.service import CannotListen, Guard, RouterService
from router.state import Config, ConfigInvalid
from router.tls import CredentialsInvalid

log = logging.getLogger("router")

_MOST_STREAMS = 4096
_GRACE_S = 0.2
# Ticks come ten times a second: an event loop that stands so long, while its process neither computes nor reads, hangs;
# so does one that stands for so much longer whatever its process does.
_HUNG_S, _LONGEST_S = 1.5, 60.0

START_ERRORS = (
    ConfigInvalid, JournalUnusable, EtcdInvalid, ClusterInvalid, CannotListen, Exposed, CredentialsInvalid
)  # fmt: skip


def store_of(options: RouterOptions) -> tuple[Store, Election | None]:
    """The store that was asked for; with etcd, the election too. Raises as Journal, Etcd and EtcdStore do."""
    if options.journal is not None and options.store == "sqlite":
        return Journal(options.journal), None
    etcd = Etcd(options.etcd, tls_dir=options.etcd_tls_dir)
    election = Election(etcd, prefix_of(options.cluster), options.leader_ttl_s)
    return EtcdStore(etcd, options.cluster, election), election


async def serve(
    options: RouterOptions,
    config: Config,
    store: Store,
    election: Election | None,
    stop: asyncio.Event,
    ready: Callable[[str, str], None],
) -> None:
    """Serve until `stop` is set, or this router is retired.

    Args:
        election: None where there is only one router.
        ready: called with the addresses of the router and its admin listener (empty: there is none) once it leads, or
            stands by.

    Raises:
        CannotListen: a port is taken, or the file of the admin listener's key holds none.
        CredentialsInvalid: as --tls-dir says.
        Exposed: other machines could reach the admin listener, and it has no TLS or no key.
        JournalUnusable: the journal cannot be read or written.
    """
    credentials = child.credentials(options, ROUTER)
    name = f"router/{options.number}"
    service = RouterService(
        config,
        store,
        election=election,
        allow_chaos=options.allow_chaos,
        name=name,
        named=partial(read_entries, options.models_file),
    )
    # gRPC's newer way to read hands each message from thread to thread: with 600 members a quarter of what they cost.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
    server = grpc.aio.server(
        interceptors=(Guard(service, needs_roles=credentials is not None),),
        options=(
            ("grpc.so_reuseport", 0),
            # It measures bandwidth for large transfers, with a ping to each of many members that say little.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.max_concurrent_streams", _MOST_STREAMS),
            # Clients ping every second (router/client.py); the default tolerates one in 5 minutes and hangs up.
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.keepalive_permit_without_calls", 1),
        ),
    )
    try:
        at = host_port(options.bound_host, options.port)
        bound = server.add_secure_port(at, credentials.server()) if credentials else server.add_insecure_port(at)
    except RuntimeError as error:
        raise CannotListen(
            f"port {options.port} of {options.bound_host} cannot be used ({error}): "
            f"stop what listens there or give another --port"
        ) from error
    rpc.add_RouterServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(service.health, server)
    keda_rpc.add_ExternalScalerServicer_to_server(ExternalScaler(config, lambda: service.state), server)
    names = (SERVICE, KEDA_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    listener = None
    if options.admin_port is not None:
        # Here: only a router that has this listener loads its libraries.
        from router.admin import listen

        listener = listen(options, config, service, credentials)
    if election is None:
        service.lead()
    else:
        await election.reach()
    await server.start()
    address = host_port(options.told_host, bound)
    # A commit to etcd may wait for the network, and is judged by the lease there.
    heartbeat = ending(lambda: service.turns, bound_s=_HUNG_S if election is None else _LONGEST_S, longest_s=_LONGEST_S)
    heartbeat.start()
    working = {asyncio.create_task(each) for each in (service.run(), stop.wait(), service.retired.wait())}
    if election is not None:
        working.add(asyncio.create_task(service.follow(election, address)))
    try:
        if listener is not None:
            await listener.begin()
        ready(address, listener.address if listener is not None else "")
        done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            # Only the waits for an end end by themselves: this raises what ended another.
            task.result()
    finally:
        heartbeat.close()
        for task in working:
            task.cancel()
        service.step_down()
        if listener is not None:
            await listener.shutdown()
        if election is not None:
            await election.resign()
        await server.stop(_GRACE_S)


async def run(options: RouterOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises START_ERRORS."""
    bounds = autoscale_bounds(options.autoscale)
    name, _, path = options.first_model.partition("=")
    config = Config(
        experts_wanted=options.experts,
        attention_wanted=options.attention,
        replicas=options.replicas,
        least={pool: least for pool, (least, _) in bounds.items()},
        most={pool: most for pool, (_, most) in bounds.items()},
        autoscale={pool: Policy(least=least, most=most) for pool, (least, most) in bounds.items()},
        redundant=options.redundant_experts,
        lease_s=options.lease_s,
        sleep_after_s=options.sleep_after_s,
        first_model=(name, path),
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
