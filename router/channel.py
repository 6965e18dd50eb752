"""The connection to the router, or to whichever of several leads."""

from __future__ import annotations

import argparse
import ipaddress
import json
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.standby import LEADER, STANDBY

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
    ("grpc.enable_http_proxy", 0),
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


class RouterAddressInvalid(ValueError):
    """A list of addresses that cannot be followed."""


def open_channel(address: str) -> grpc.Channel:
    """A channel that sends every call to the router that leads, as health tells. Raises RouterAddressInvalid."""
    return grpc.insecure_channel(target_of(address), options=_OPTIONS)


def router_address(text: str) -> str:
    """The value of a --router option. Raises argparse.ArgumentTypeError."""
    try:
        target_of(text)
    except RouterAddressInvalid as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def answers(address: str, timeout_s: float) -> bool:
    """True if the router at one address answers, leading or not."""
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return True


def is_refused_by_standby(error: grpc.RpcError) -> bool:
    """True if a router carried nothing out because it does not lead, or does no more: the one that leads may be asked
    at once."""
    metadata: Any = error.trailing_metadata()
    return any(key == STANDBY for key, _ in metadata or ())


def target_of(address: str) -> str:
    """gRPC's name for one router's address, or for several with commas between.

    Raises:
        RouterAddressInvalid: an entry of several is no IP address with a port.
    """
    parts = [part.strip() for part in address.split(",")]
    if len(parts) == 1:
        return address
    versions: set[int] = set()
    for part in parts:
        host, _, port = part.rpartition(":")
        try:
            versions.add(ipaddress.ip_address(host.strip("[]")).version)
        except ValueError:
            versions.add(0)
        if not port.isdigit() or 0 in versions or len(versions) > 1:
            # gRPC follows a list of addresses of one kind; a name in it would be looked up once and never again.
            raise RouterAddressInvalid(
                f"router address {part!r} found among several; IP:PORT needed, all of one IP version, or one "
                f"NAME:PORT whose name resolves to all of them"
            )
    return f"ipv{versions.pop()}:{','.join(parts)}"
