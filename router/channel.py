"""The connection to the router, or to whichever of several leads."""

from __future__ import annotations

import ipaddress
import json

import grpc

from router.standby import LEADER

_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A frozen router's sockets stay open: only unanswered pings tell. Unless told otherwise, gRPC stops after two.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 1_500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
    (
        "grpc.service_config",
        json.dumps(
            {
                "loadBalancingConfig": [{"round_robin": {}}],
                "healthCheckConfig": {"serviceName": LEADER},
                # A router that has just ceased to lead refuses calls before its health has told everyone.
                "methodConfig": [
                    {
                        "name": [{}],
                        "retryPolicy": {
                            "maxAttempts": 4,
                            "initialBackoff": "0.05s",
                            "maxBackoff": "0.2s",
                            "backoffMultiplier": 2,
                            "retryableStatusCodes": ["UNAVAILABLE"],
                        },
                    }
                ],
            }
        ),
    ),
)


class RouterAddressInvalid(ValueError):
    """A list of addresses that cannot be followed."""


def open_channel(address: str) -> grpc.Channel:
    """A channel that sends every call to the router that leads, as health tells. Raises RouterAddressInvalid."""
    return grpc.insecure_channel(target_of(address), options=_OPTIONS)


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
