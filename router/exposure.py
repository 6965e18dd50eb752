"""Addresses: which only this machine can reach, what a listener needs to be open to others, lists of routers. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"


class Exposed(ValueError):
    """A listener would be open to other machines without what protects it; or its address is none."""


class RouterAddressInvalid(ValueError):
    """A list of addresses that cannot be followed."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than localhost may mean anything."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bound_address(option: str, host: str, protection: Mapping[str, bool]) -> str:
    """The IP address to bind for the value of an option.

    Args:
        protection: What a listener that others can reach must have, in words with the options that give it, and whether
            it is there.

    Raises:
        Exposed: no IP address, or one that others can reach while something is missing.
    """
    name = LOOPBACK if host == "localhost" else host.strip("[]")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        raise Exposed(
            f"{option} {host} is no IP address; give one of this machine, such as 127.0.0.1, ::1 or 0.0.0.0."
        ) from None
    missing = [what for what, there in protection.items() if not there]
    if missing and not address.is_loopback:
        raise Exposed(
            f"{option} {host} can be reached by other machines, and this listener has no {' and no '.join(missing)}. "
            f"Give it that (docs/security.md), or listen on loopback, such as 127.0.0.1."
        )
    return str(address)


def told_address(option: str, host: str, advertised: str) -> str:
    """The host under which others are told to reach a listener that is bound to `host`.

    Raises:
        Exposed: it is bound to every address, and no name was given.
    """
    if advertised:
        return advertised
    if ipaddress.ip_address(host).is_unspecified:
        raise Exposed(
            f"{option} {host} is every address of this machine, and none that others can call. Name the one that they "
            "reach it by with --advertise."
        )
    return host


def host_port(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


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
