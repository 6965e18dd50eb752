"""Which transport a process speaks, as its command line says it: `shm`, `nixl`, `nixl:RAIL,RAIL`, `shm+nixl:RAIL` or
`cuda:DEVICE`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2p.descriptor import Transport
from p2p.endpoint import Endpoint, P2PError
from p2p.local import ShmEndpoint
from p2p.nearby import NearbyEndpoint


@dataclass(frozen=True, kw_only=True)
class TransportChoice:
    """A transport, the rails (names of network devices) it may use, and the GPU its windows lie on.

    No rails: the transport's own choice. No device: windows lie in host memory. near: shared memory to whoever is on
    the same host, and nixl to all others.
    """

    transport: Transport
    rails: tuple[str, ...] = ()
    device: int | None = None
    near: bool = False

    @classmethod
    def parse(cls, text: str) -> TransportChoice:
        """Read `shm`, `nixl`, `nixl:RAIL,RAIL`, `cuda` or `cuda:DEVICE`; nixl also with `@cuda:DEVICE` behind it, or
        `shm+` before it.

        Raises:
            ValueError: it is none of them, or names a rail twice.
        """
        way, at, place = text.partition("@")
        near = way.startswith("shm+") and not at
        name, colon, rest = way.removeprefix("shm+" if near else "").partition(":")
        listed = tuple(rest.split(",")) if colon else ()
        device = _device_of(place if at else way)
        if name == "nixl" and all(listed) and len(set(listed)) == len(listed) and (device is not None or not at):
            return cls(transport=Transport.NIXL, rails=listed, device=device, near=near)
        if device is not None and not at:
            return cls(transport=Transport.CUDA, device=device)
        if text == "shm":
            return cls(transport=Transport.SHM)
        raise ValueError(
            f"transport {text!r} is not known; shm, nixl, nixl:eth0,eth1, shm+nixl:eth0, cuda:1 or nixl:eth0@cuda:1 is "
            "needed."
        )

    @property
    def named_rails(self) -> tuple[str, ...]:
        """What the endpoint's rails are called: ("",) where nixl chooses, none where nothing goes over a network."""
        return self.rails or ("",) if self.transport is Transport.NIXL else ()

    @property
    def crosses_network(self) -> bool:
        """Whether bytes may leave this machine, as they are: nixl over any rail but the loopback device."""
        return any(rail != "lo" for rail in self.named_rails)

    def opener(self, *, on_device: bool = False) -> Callable[[str, int, int], Endpoint[Any, Any]]:
        """What makes an endpoint from (name, incarnation, lanes); it raises P2PError where it cannot be used here.

        Args:
            on_device: Whether the caller can do with windows that the CPU can neither read nor write.

        Raises:
            P2PError: it cannot, and this choice makes such windows.
        """
        if self.device is not None and not on_device:
            raise P2PError(
                f"windows on GPU {self.device} are asked for, and this process computes on CPUs: choose shm or nixl."
            )
        if self.transport is Transport.SHM:
            return ShmEndpoint
        # Not before they are asked for: optional packages, and libraries of many megabytes.
        if self.transport is Transport.CUDA:
            from p2p.cuda import CudaEndpoint

            device = self.device or 0
            return lambda name, incarnation, lanes: CudaEndpoint(name, incarnation, lanes, device=device)
        from p2p.nixl import NixlEndpoint

        if self.near:

            def both(name: str, incarnation: int, lanes: int) -> NearbyEndpoint:
                near = ShmEndpoint(name, incarnation, lanes)
                try:
                    page = near.share_page()
                    return NearbyEndpoint(
                        near, NixlEndpoint(name, incarnation, lanes, rails=self.named_rails, page=page)
                    )
                except BaseException:
                    near.close()
                    raise

            return both
        return lambda name, incarnation, lanes: NixlEndpoint(
            name, incarnation, lanes, rails=self.named_rails, device=self.device
        )


def _device_of(text: str) -> int | None:
    """The GPU that `cuda` or `cuda:NUMBER` names; None where it is neither."""
    name, colon, number = text.partition(":")
    if name != "cuda" or (colon and not (number.isascii() and number.isdecimal())):
        return None
    return int(number or 0)
