"""The router's listener: the service, health, reflection and the scaler of KEDA on one port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.election import Election
from router.exposure import LOOPBACK, bound_address, host_port, told_address
from router.heartbeat import ending
from router.keda import SERVICE as KEDA_SERVICE
from router.keda import ExternalScaler
from router.proto import externalscaler_pb2_grpc as keda_rpc
from router.proto import router_pb2_grpc as rpc
from router.role_check import RequireRoles
from router.service import RouterService
from router.standby import SERVICE, RefuseUnlessLeading
from router.state import Config
from router.store import Store
from router.tls import Credentials

if TYPE_CHECKING:
    from router.admin import AdminListener

_MOST_STREAMS = 4096
_GRACE_S = 0.2
# Ticks come ten times a second: an event loop that stands so long, while its process neither computes nor reads, hangs;
# so does one that stands for so much longer whatever its process does.
_HUNG_S, _LONGEST_S = 1.5, 60.0


class CannotListen(Exception):
    """An address cannot be bound, or not as asked."""


async def serve(
    config: Config,
    store: Store,
    port: int,
    stop: asyncio.Event,
    ready: Callable[[str, str], None],
    election: Election | None = None,
    admin: Callable[[RouterService], AdminListener] | None = None,
    allow_chaos: bool = False,
    host: str = LOOPBACK,
    advertise: str = "",
    credentials: Credentials | None = None,
) -> None:
    """Serve until `stop` is set.

    Args:
        port: 0 = any.
        ready: called with the addresses of the router and its admin listener once it leads, or stands by.
        election: None where there is only one router.
        admin: makes the admin listener; None: there is none, and its address is empty.
        allow_chaos: faults may be injected into members that allow it.
        host: IP address to listen on.
        advertise: name of this machine for the others; empty: the host.
        credentials: every caller must prove its role; None: no TLS, on loopback alone.

    Raises:
        Exposed: other machines could reach it, and there is no TLS.
        CannotListen: the port is taken, or the admin listener's.
        JournalUnusable: the journal cannot be read or written.
    """
    bound_host = bound_address("--host", host, {"TLS (--tls-dir)": credentials is not None})
    told_host = told_address("--host", bound_host, advertise)
    service = RouterService(config, store, election=election, allow_chaos=allow_chaos)
    server = grpc.aio.server(
        interceptors=(
            *((RequireRoles(),) if credentials is not None else ()),
            RefuseUnlessLeading(service.leads, service.not_leading),
        ),
        options=(
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", _MOST_STREAMS),
            # Clients ping every second (router/client.py); the default tolerates one in 5 minutes and hangs up.
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.keepalive_permit_without_calls", 1),
        ),
    )
    try:
        at = host_port(bound_host, port)
        bound = (
            server.add_secure_port(at, credentials.server()) if credentials else server.add_insecure_port(at)
        )
    except RuntimeError as error:
        raise CannotListen(
            f"port {port} of {bound_host} cannot be used ({error}): "
            f"stop what listens there or give another --port"
        ) from error
    rpc.add_RouterServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(service.health, server)
    keda_rpc.add_ExternalScalerServicer_to_server(ExternalScaler(config, lambda: service.state), server)
    names = (SERVICE, KEDA_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    listener = admin(service) if admin is not None else None
    if election is None:
        service.lead()
    else:
        await election.reach()
    await server.start()
    address = host_port(told_host, bound)
    # A commit to etcd may wait for the network, and is judged by the lease there.
    heartbeat = ending(
        lambda: service.turns, bound_s=_HUNG_S if election is None else _LONGEST_S, longest_s=_LONGEST_S
    )
    heartbeat.start()
    working = {asyncio.create_task(service.run()), asyncio.create_task(stop.wait())}
    if election is not None:
        working.add(asyncio.create_task(service.follow(election, address)))
    try:
        if listener is not None:
            await listener.begin()
        ready(address, listener.address if listener is not None else "")
        done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            # Only the wait for `stop` ends by itself: this raises what ended another.
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
