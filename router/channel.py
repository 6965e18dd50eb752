"""The connection to the router, or to whichever of several leads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.exposure import target_of
from router.proto import router_pb2 as pb
from router.proto import router_pb2_grpc as rpc
from router.roles import ROUTER
from router.standby import LEADER, STANDBY
from router.tls import Credentials

PLAIN = (("grpc.enable_http_proxy", 0),)
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A frozen router's sockets stay open: only unanswered pings tell. gRPC must be told to send more than two, and
    # counts ping_timeout (60 s unless set), not keepalive_timeout.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    *PLAIN,
    (
        "grpc.service_config",
        json.dumps(
            {
                "loadBalancingConfig": [{"round_robin": {}}],
                "healthCheckConfig": {"serviceName": LEADER},
            }
        ),
    ),
)


def open_channel(address: str, credentials: Credentials | None = None) -> grpc.Channel:
    """A channel that sends every call to the router that leads, as health tells. Raises RouterAddressInvalid."""
    return channel_to(target_of(address), ROUTER, credentials, _OPTIONS)


def channel_to(
    address: str, role: str, credentials: Credentials | None, options: Sequence[tuple[str, Any]] = PLAIN
) -> grpc.Channel:
    """A channel to a process of the cluster; with credentials over TLS, and only to one that proves its role."""
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return credentials.channel(address, role, options)


def answers(address: str, timeout_s: float, credentials: Credentials | None = None) -> bool:
    """True if the router at one address answers, leading or not."""
    with channel_to(address, ROUTER, credentials) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return True


def pid_at(address: str, timeout_s: float, credentials: Credentials | None = None) -> int | None:
    """Process of the router at one address, leading or not; None if it does not answer."""
    with channel_to(address, ROUTER, credentials) as channel:
        stub: Any = rpc.RouterStub(channel)
        try:
            return stub.Status(pb.StatusRequest(), timeout=timeout_s).pid
        except grpc.RpcError:
            return None


def is_refused_by_standby(error: grpc.RpcError) -> bool:
    """True if a router carried nothing out because it does not lead, or does no more: the one that leads may be asked
    at once."""
    metadata: Any = error.trailing_metadata()
    return any(key == STANDBY for key, _ in metadata or ())
