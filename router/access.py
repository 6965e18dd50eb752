"""Who may reach and call what: addresses that listeners are open to, lists of routers, and roles. Pure.

A role is what a process proves with its certificate: the first word of the path of the one URI `spiffe://eaas/ROLE/...`
among the certificate's subject alternative names, such as spiffe://eaas/expert or spiffe://eaas/expert/rack-3. The same
certificate carries the DNS name ROLE.eaas.internal, which nobody resolves: it is what a caller checks of whoever
answers, so that a process is known by what it is and not by where it runs.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping

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


ROUTER, EXPERT, ATTENTION, GATEWAY = "router", "expert", "attention", "gateway"
# A program with a model of its own, whose experts this cluster computes.
CLIENT = "client"
# Starts and stops processes; commands of people and of tools; the autoscaler of Kubernetes.
LAUNCHER, OPERATOR, SCALER = "launcher", "operator", "scaler"
ROLES = (ROUTER, EXPERT, ATTENTION, GATEWAY, CLIENT, LAUNCHER, OPERATOR, SCALER)

TRUST_DOMAIN = "spiffe://eaas/"
# Files of the folder that a process proves its role with.
CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"

_MEMBERS = frozenset({EXPERT, ATTENTION, GATEWAY, CLIENT})
_ALL = frozenset(ROLES)
_OPERATOR = frozenset({OPERATOR})
_SCALER = frozenset({SCALER})

CALLERS: dict[str, frozenset[str]] = {
    "/router.v1.Router/Join": _MEMBERS,
    "/router.v1.Router/Renew": _MEMBERS,
    "/router.v1.Router/Watch": _MEMBERS | {LAUNCHER, OPERATOR},
    "/router.v1.Router/Loaded": frozenset({EXPERT}),
    "/router.v1.Router/Suspect": frozenset({ATTENTION, GATEWAY}),
    "/router.v1.Router/Leave": _MEMBERS | {OPERATOR},
    "/router.v1.Router/ReportExit": frozenset({LAUNCHER}),
    "/router.v1.Router/Launches": frozenset({LAUNCHER}),
    "/router.v1.Router/Scale": _OPERATOR,
    "/router.v1.Router/AddModel": _OPERATOR | {LAUNCHER},
    "/router.v1.Router/RemoveModel": _OPERATOR,
    "/router.v1.Router/Retire": _MEMBERS - {CLIENT} | {OPERATOR},
    "/router.v1.Router/Status": _MEMBERS | {LAUNCHER, OPERATOR},
    "/router.v1.Router/Inject": _OPERATOR,
    "/router.v1.Router/Clear": _OPERATOR,
    "/router.v1.Router/Faults": _OPERATOR,
    "/externalscaler.ExternalScaler/IsActive": _SCALER,
    "/externalscaler.ExternalScaler/StreamIsActive": _SCALER,
    "/externalscaler.ExternalScaler/GetMetricSpec": _SCALER,
    "/externalscaler.ExternalScaler/GetMetrics": _SCALER,
    "/experts.v1.Experts/Attach": frozenset({ATTENTION, CLIENT}),
    "/experts.v1.Experts/Describe": frozenset({CLIENT}),
    "/experts.v1.Experts/Manifest": frozenset({EXPERT}),
    "/experts.v1.Experts/Give": frozenset({EXPERT}),
    "/grpc.health.v1.Health/Check": _ALL,
    "/grpc.health.v1.Health/List": _ALL,
    "/grpc.health.v1.Health/Watch": _ALL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATOR,
}

# The field of a request that says for which pool, or which of its members, it speaks.
_SPEAKS_FOR = {
    "/router.v1.Router/Join": "pool",
    "/router.v1.Router/Renew": "name",
    "/router.v1.Router/Watch": "name",
    "/router.v1.Router/Loaded": "name",
    "/router.v1.Router/Leave": "name",
    "/router.v1.Router/Retire": "name",
    "/router.v1.Router/Suspect": "by",
    "/experts.v1.Experts/Attach": "name",
}


def server_name(role: str) -> str:
    """The DNS name that the certificate of a server with this role carries."""
    return f"{role}.eaas.internal"


def role_uri(role: str, name: str = "") -> str:
    """The URI that says a role, and which of its processes it is."""
    return f"{TRUST_DOMAIN}{role}/{name}" if name else f"{TRUST_DOMAIN}{role}"


def role_of(names: Iterable[str]) -> str:
    """The role that a certificate's subject alternative names say; empty: none, none that is known, or several."""
    found = [name.removeprefix(TRUST_DOMAIN) for name in names if name.startswith(TRUST_DOMAIN)]
    role = found[0].partition("/")[0] if len(found) == 1 else ""
    return role if role in ROLES else ""


def refusal(role: str, method: str) -> str:
    """Why a role may not call a method, such as "/router.v1.Router/Join"; empty: it may."""
    callers = CALLERS.get(method, frozenset())
    if role in callers:
        return ""
    needed = ", ".join(sorted(callers)) or "nobody"
    return (
        f"{method} is for {needed}; the caller's certificate says {role or 'no role'}. "
        f"Use a certificate with {TRUST_DOMAIN}ROLE for the process that calls"
    )


def claim_refusal(role: str, method: str, request: object) -> str:
    """Why a member may not say that, for it would speak for a member of another role; empty: it may."""
    field = _SPEAKS_FOR.get(method, "")
    said = str(getattr(request, field, "")).partition("/")[0] if field else ""
    if not said or said == role or role not in _MEMBERS:
        return ""
    return f"{method} for a member of {said!r}; the caller's certificate says {role}"
