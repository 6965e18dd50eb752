"""A measured process: python -m benchmarks.transports '{"index": 0, "others": 1, "payload_bytes": 4096, ...}'

Holds one end of every transport. Reads one request a line from stdin, [verb, {...}], and answers one line,
{"result": ...}, {"missing": why} or {"error": why}, on stdout; ends with stdin. Whatever libraries print goes to
stderr.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.transports.side import Load, Missing, Side, pinned


def opened(transport: str, index: int, others: int, payload_bytes: int, loops: str) -> Side:
    """This process's end of a transport.

    Raises:
        Missing: it cannot run here.
    """
    links = others if index == 0 else 1
    incarnation = 1000 + index
    if transport in ("memcpy", "shm", "shm-parked"):
        from benchmarks.transports.native import Memcpy, NativeShm
        from p2p.local import ShmEndpoint

        if transport == "memcpy":
            return Memcpy(Path(loops))
        endpoint = ShmEndpoint(f"{transport}-{index}", incarnation)
        return NativeShm(endpoint, links, payload_bytes, Path(loops))
    if transport == "shm-python":
        from benchmarks.transports.endpoint import EndpointSide
        from p2p.local import ShmEndpoint

        return EndpointSide(ShmEndpoint(f"{transport}-{index}", incarnation), links, payload_bytes)
    if transport.startswith("nixl"):
        return _nixl(transport, index, links, payload_bytes)
    if transport == "grpc":
        from benchmarks.transports.rpc import Rpc

        return Rpc(links)
    from benchmarks.transports.gloo import Gloo

    return Gloo(index, others, payload_bytes)


def _nixl(transport: str, index: int, links: int, payload_bytes: int) -> Side:
    if importlib.util.find_spec("nixl_cu13") is None:
        raise Missing("needs the package nixl_cu13. Get it: pip install --no-deps nixl-cu13")
    # Not cma, knem or xpmem: they write into the receiver's memory past any fence. What the user has set stays.
    os.environ.setdefault("UCX_TLS", "^cma,knem,xpmem")
    if transport == "nixl-bare":
        from benchmarks.transports.nixl_bare import NixlBare

        return NixlBare(index, links, payload_bytes)
    from benchmarks.transports.endpoint import EndpointSide
    from p2p.nixl import NixlEndpoint  # pyright: ignore[reportMissingImports]

    endpoint = NixlEndpoint(f"{transport}-{os.getpid()}", 1000 + index)
    return EndpointSide(endpoint, links, payload_bytes, framed=transport == "nixl")


class Process:
    """The ends of all transports in this process, and what is asked of them."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._sides: dict[str, Side] = {}

    def open(self, transport: str) -> list[str]:
        """Offers of a transport's links."""
        side = self._sides[transport] = opened(transport, **self._options)
        return side.offers()

    def join(self, transport: str, offers: list[str]) -> None:
        """Take up the other ends' offers."""
        self._sides[transport].join(offers)

    def drive(self, transport: str, load: dict[str, Any]) -> dict[str, Any]:
        """ns of each round, and of the whole run."""
        side, asked = self._sides[transport], Load(**load)
        with pinned(self._core(side, asked)):
            began = time.perf_counter_ns()
            rounds_ns = side.drive(asked)
            return {"rounds_ns": rounds_ns, "total_ns": time.perf_counter_ns() - began}

    def serve(self, transport: str, load: dict[str, Any]) -> dict[str, float]:
        """How long it took, and the CPU time that the serving thread used."""
        side, asked = self._sides[transport], Load(**load)
        with pinned(self._core(side, asked)):
            began, used = time.monotonic(), time.thread_time()
            side.serve(asked)
            return {"wall_s": time.monotonic() - began, "cpu_s": time.thread_time() - used}

    def close(self) -> None:
        """Close every end."""
        for side in self._sides.values():
            side.close()

    def _core(self, side: Side, load: Load) -> int | None:
        return load.cores[self._options["index"] % len(load.cores)] if side.pinned else None


def main(argument: str) -> None:
    """Answer until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    process = Process(json.loads(argument))
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        try:
            answer = {
                "result": {
                    "open": process.open,
                    "join": process.join,
                    "drive": process.drive,
                    "serve": process.serve,
                }[verb](**arguments)
            }
        except Missing as missing:
            answer = {"missing": str(missing)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()
    process.close()


if __name__ == "__main__":
    main(sys.argv[1])
