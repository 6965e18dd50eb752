"""Which addresses only this machine can reach, and what a listener needs before others may reach it. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"


class Exposed(ValueError):
    """A listener would be open to other machines without what protects it; or its address is none."""


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
