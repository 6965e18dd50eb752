"""Which transport a process speaks, as its command line says it: `shm`, `nixl`, or `nixl:RAIL,RAIL`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2p.descriptor import Transport
from p2p.endpoint import Endpoint
from p2p.shm import ShmEndpoint

HELP = "how processes reach each other: shm (one host, default), nixl (between hosts), or nixl:eth0,eth1 (its rails)"


@dataclass(frozen=True, kw_only=True)
class TransportChoice:
    """A transport, and the rails (names of network devices) it may use; none: the transport's own choice."""

    transport: Transport
    rails: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> TransportChoice:
        """Read `shm`, `nixl` or `nixl:RAIL,RAIL`.

        Raises:
            ValueError: it is none of them, or names a rail twice.
        """
        name, colon, listed = text.partition(":")
        rails = tuple(listed.split(",")) if colon else ()
        known = {"shm": Transport.SHM, "nixl": Transport.NIXL}
        if name not in known or (rails and name == "shm") or not all(rails) or len(set(rails)) < len(rails):
            raise ValueError(f"transport {text!r} is not known; shm, nixl or nixl:eth0,eth1 is needed.")
        return cls(transport=known[name], rails=rails)

    def opener(self) -> Callable[[str, int, int], Endpoint[Any, Any]]:
        """What makes an endpoint from (name, incarnation, lanes); it raises P2PError where it cannot be used here."""
        if self.transport is Transport.SHM:
            return ShmEndpoint
        # Not before it is asked for: an optional package, and a library of many megabytes.
        from p2p.nixl import NixlEndpoint

        return lambda name, incarnation, lanes: NixlEndpoint(
            name, incarnation, lanes, rails=self.rails or ("",)
        )
